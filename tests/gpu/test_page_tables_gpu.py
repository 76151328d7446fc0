"""Numbers on their way to a GPU. Skipped where there is no GPU, or it is not asked for: NIBBLE_TEST_GPU=1."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from nibble.engine.page_tables import NO_UPDATES, PackedInts, PageTables
from nibble.kernels.step_inputs import Verified, settle_inputs
from nibble.kernels.transfer import HostInputs, PinnedBuffers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_numbers_that_are_on_their_way_stay() -> None:
    """The device lags behind, and steps become longer: no buffer is written before all copies from it are done."""
    tables, sent = PageTables(1, 1, "cuda"), list[tuple[list[int], torch.Tensor, torch.Tensor]]()
    for step in range(4 * PinnedBuffers.COUNT):
        torch.cuda._sleep(1 << 20)
        packed, values = PackedInts(), list(range(step, step + 100 * (step + 1)))
        place = packed.add(values)
        ints = tables.on_host(packed)
        first = ints[place].to("cuda", non_blocking=True)
        torch.cuda._sleep(1 << 20)
        sent.append((values, first, ints[place].to("cuda", non_blocking=True)))
    for values, first, second in sent:
        assert first.tolist() == second.tolist() == values


def test_inputs_of_recorded_steps_stay() -> None:
    """A recorded step copies its inputs itself, and the host does not write those of the next one before it has."""
    tables, inputs = PageTables(1, 1, "cuda"), HostInputs(4000, torch.device("cuda"))
    graph, results = torch.cuda.CUDAGraph(), list[torch.Tensor]()
    with torch.cuda.graph(graph):
        torch.cuda._sleep(1 << 20)
        inputs.copy(4000)
    for step in range(12):
        packed = PackedInts()
        packed.add([7] * 3)
        tables.send_inputs(packed, packed.add_inputs([step] * 4000), inputs, NO_UPDATES)
        graph.replay()
        inputs.note_step()
        results.append(inputs.on_device[inputs.HEADER :].clone())
    for step, result in enumerate(results):
        assert result.eq(step).all()


def test_inputs_that_are_sent_ahead() -> None:
    """They are those of the step behind one that has not copied its own yet, and the host does not wait for that."""
    requests, length, steps = 4, 8, 40
    count, ints = requests * (3 + 2 * length), partial(torch.zeros, dtype=torch.int64, device="cuda")
    tables, inputs = PageTables(1, 1, "cuda"), HostInputs(count, torch.device("cuda"))
    verified = Verified(ints(steps), ints(steps), ints(steps), ints(steps, 16))
    settled, results, graph = ints(count), list[torch.Tensor](), torch.cuda.CUDAGraph()

    def run() -> None:
        torch.cuda._sleep(1 << 22)
        inputs.copy(count)
        settle_inputs(inputs.on_device, inputs.sent_ahead, settled, (requests, length), 0, verified)

    with torch.cuda.stream(torch.cuda.Stream()):
        run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run()
    for step in range(steps):
        packed = PackedInts()
        packed.add([7] * 3)
        ahead = step % 5 > 1
        tables.send_inputs(packed, packed.add_inputs([step] * count), inputs, NO_UPDATES, is_ahead=ahead)
        graph.replay()
        inputs.note_step()
        results.append(settled.clone())
        if ahead:
            event = torch.cuda.Event()
            event.record()
            assert not event.query(), "the host has waited"
    for step, result in enumerate(results):
        assert result.eq(step).all(), (step, result.unique())

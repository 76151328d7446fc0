"""Numbers on their way to a GPU. Skipped where there is no GPU, or it is not asked for: NIBBLE_TEST_GPU=1."""

from __future__ import annotations

import pytest
import torch

from nibble.engine.page_tables import NO_UPDATES, PackedInts, PageTables
from nibble.kernels.transfer import PinnedBuffers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_numbers_that_are_on_their_way_stay() -> None:
    """The device lags behind, and steps become longer: no buffer is written before all copies from it are done."""
    tables, sent = PageTables(1, 1, "cuda"), list[tuple[list[int], torch.Tensor, torch.Tensor]]()
    inputs_N = torch.zeros(4000, dtype=torch.int64, device="cuda")
    for step in range(4 * PinnedBuffers.COUNT):
        torch.cuda._sleep(1 << 20)
        packed, values = PackedInts(), list(range(step, step + 100 * (step + 1)))
        place = packed.add(values)
        if step % 2:
            on_device = tables.send(packed)[place]
        else:
            ints = tables.send_inputs(packed, place, inputs_N, NO_UPDATES)
            torch.cuda._sleep(1 << 20)
            on_device = ints[place].to("cuda", non_blocking=True)
        sent.append((values, on_device, inputs_N[: len(values)].clone()))
    for step, (values, on_device, inputs) in enumerate(sent):
        assert on_device.tolist() == values
        assert step % 2 or inputs.tolist() == values

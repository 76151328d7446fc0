"""Recorded decode steps, on a CPU: a tape in place of a CUDA graph repeats what was recorded over the same memory.

So everything that a step reads must be in the buffers: a number that Python kept from the time of recording shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from nibble import LLM, BackendError
from nibble.attention import backends
from nibble.attention.planner.plan import cuda_graph_blocker, graph_sizes
from nibble.engine.graphs import Graphs, live
from nibble.errors import NibbleError
from nibble.kernels import experts
from planning import PLAIN
from tape import record
from tiny import CHUNKED, save_tiny
from toys import graph_backend

PROMPTS = [
    torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    for n in (40, 3, 61, 17, 90, 1, 33)
]


@pytest.fixture
def served(tiny: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    adapter = getattr(request, "param", graph_backend.Masked)
    backend = backends.register(graph_backend.info(adapter))

    def make(**options: Any) -> LLM:
        llm = LLM(
            # The toy's writes know no transforms, and its rows no window.
            **PLAIN,
            **{"model": str(tiny), "kv_scales": "one", "kv_memory": "2MiB", "max_running": 6, **options},
        )
        graph_backend.make_recordable(llm.engine.runner.pool)
        return llm

    yield make
    backends.unregister(backend.name)


def recorded(llm: LLM, how: Any = record, sizes: Sequence[int] = ()) -> LLM:
    """Records its decode steps, and lets steps run ahead, as on a GPU."""
    assert cuda_graph_blocker(llm.plan) is None
    runner = llm.engine.runner
    runner.record(Graphs(sizes or graph_sizes(llm.config.max_running), runner.device, how))
    llm.engine.overlap = True
    return llm


def answers(llm: LLM, **options: Any) -> list[tuple[int, ...]]:
    outputs = llm.generate(PROMPTS, **{"max_tokens": 20, "ignore_eos": True, **options}, progress=False)
    llm.engine.scheduler.check_integrity()
    assert llm.engine.scheduler.manager.stats.in_use == 0
    return [output.completions[0].token_ids for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("kv_format", ["bf16", "nvfp4"])
@pytest.mark.parametrize("how", [record, live], ids=["recorded", "live"])
def test_replayed_steps_give_the_answers_of_plain_ones(served: Any, kv_format: str, how: Any) -> None:
    plain = answers(served(kv_format=kv_format))
    llm = recorded(served(kv_format=kv_format), how)
    assert answers(llm) == plain
    assert answers(llm) == plain, "a prefix hit decodes from other pages"
    assert answers(llm, temperature=1.0, seed=3) == answers(
        served(kv_format=kv_format), temperature=1.0, seed=3
    )


def test_replayed_steps_attend_within_chunks(served: Any, tmp_path: Path) -> None:
    """Where a chunk begins follows from a length that only the device knows in a replay."""
    options = {"model": str(save_tiny(tmp_path, "llama4_text", **CHUNKED)), "kv_format": "bf16"}
    plain = answers(served(**options))
    llm = recorded(served(**options))
    assert [group.group.chunk for group in llm.plan.groups] == [16, None]
    assert answers(llm) == plain


@pytest.mark.slow
def test_replayed_steps_survive_preemption(served: Any) -> None:
    options = {"kv_format": "bf16", "max_context": 160, "prefix_cache": False}
    page = served(**options).plan.layout.bytes_per_page
    tight = {**options, "kv_memory": str(11 * page)}
    llm = recorded(served(**tight))
    assert answers(llm, max_tokens=60) == answers(served(**options), max_tokens=60)
    assert llm.engine.scheduler.metrics.preemptions > 0


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("requests", [1, 2, 4])
def test_padding_of_one_request_reads_no_expert(
    served: Any, tmp_path: Path, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of one request has two rows, of which experts compute the first; those of more compute all rows."""
    model = str(save_tiny(tmp_path, "qwen3_moe"))
    options = {"model": model, "kv_format": "bf16", "weights": "mxfp4", "quantized_weights": "packed"}
    plain = answers(served(**options))
    rows, computed = [], experts.naive.product

    def counted(x_TI: torch.Tensor, experts_TK: torch.Tensor, *matrices: Any) -> torch.Tensor:
        rows.append(len(experts_TK))
        return computed(x_TI, experts_TK, *matrices)

    llm = served(**options)
    sizes = llm.budget.graph_sizes
    assert sizes == (1, *graph_sizes(llm.config.max_running))
    llm = recorded(llm, live, sizes)
    monkeypatch.setattr(experts.naive, "product", counted)
    outputs = llm.generate(PROMPTS[:requests], max_tokens=20, ignore_eos=True, progress=False)
    assert [output.completions[0].token_ids for output in outputs] == plain[:requests]
    decodes = rows[-2 * len(llm.plan.layout.layers) :]
    assert set(decodes) == {requests}


def test_padding_stores_nothing(served: Any) -> None:
    """Three requests run in a step for four: the fourth row must not touch the pool."""
    llm = recorded(served(kv_format="bf16", prefix_cache=False))
    pool = llm.engine.runner.pool
    for entry in pool.view(0).streams.values():
        entry.planes[0].fill_(0)
    llm.generate(PROMPTS[:3], max_tokens=4, ignore_eos=True)
    page = llm.plan.page_size
    stored = [len(prompt) + 3 for prompt in PROMPTS[:3]]
    written = (pool.view(0).streams["k"].planes[0] != 0).any(-1).any(1).sum()  # [page, head, slot, value]
    assert sum(stored) <= written <= sum(stored) + 3, "each request may have run one token too far"
    assert written < sum(-(-length // page) * page for length in stored)


@pytest.mark.parametrize("served", [graph_backend.Peeking], indirect=True)
def test_a_kernel_that_waits_for_the_device_cannot_be_recorded(served: Any) -> None:
    with pytest.raises(BackendError, match=r"cannot be recorded .* waits for the device.*--no-graphs"):
        recorded(served(kv_format="bf16"))


@pytest.mark.parametrize("served", [graph_backend.Frozen], indirect=True)
def test_a_frozen_length_is_noticed(served: Any) -> None:
    """It is right in plain steps, and passes the start-up test; replayed, it reads far past the end of requests."""
    plain = answers(served(kv_format="bf16"))
    try:
        assert answers(recorded(served(kv_format="bf16"))) != plain
    except NibbleError as error:  # what lies there may be no number
        assert "not finite" in str(error)


def test_wrong_lengths_are_noticed(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail."""
    plain = answers(served(kv_format="bf16"))
    llm = served(kv_format="bf16")
    bound = torch.tensor(30, dtype=torch.int32)
    monkeypatch.setattr(
        graph_backend.Masked, "lengths", lambda self, segment: segment.seq_lens_B.minimum(bound)
    )
    assert answers(recorded(llm)) != plain


def test_a_plan_says_why_it_is_not_recorded(tiny: Path) -> None:
    llm = LLM(str(tiny), kv_format="bf16", kv_memory="1MiB")
    assert cuda_graph_blocker(llm.plan) == (
        "decode steps run without CUDA graphs: torch_ref of group full cannot be recorded"
    )


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 9, 63, 64, 65, 100, 128, 200, 256, 257, 1000])
def test_sizes_have_room(most: int) -> None:
    found = graph_sizes(most)
    assert list(found) == sorted(set(found)) and found[-1] >= most > 0
    assert found[0] == 2 and (len(found) == 1 or found[-2] < most)
    gaps = [(high - low) / high for low, high in pairwise(found) if high > 8]
    assert max(gaps, default=0) <= 0.5

"""Recorded decode steps of hybrid models, on a CPU: slots and positions come from buffers, and copies go before steps.

A tape stands for a CUDA graph (tests/support/tape.py), and steps run ahead of the host, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_verify_graphs as verify_graphs
import torch
from test_cuda_graphs import answers, recorded
from test_hybrid_invariance import QWEN3_NEXT

from nibble import LLM
from nibble.attention import backends
from nibble.engine.graphs import live
from nibble.engine.page_tables import PageTables
from nibble.kernels.recurrence.types import StateMetadata
from planning import PLAIN
from tape import record
from tiny import save_tiny
from toys import graph_backend, recorded_states
from toys.oracle_drafter import oracle


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Without experts, whose tokens a CPU counts on the host.
    changes = {name: value for name, value in QWEN3_NEXT.items() if "expert" not in name}
    return save_tiny(tmp_path_factory.mktemp("hybrid"), "qwen3_5_text", **changes)


@pytest.fixture
def served(hybrid: Path) -> Iterator[Any]:
    backend = backends.register(graph_backend.info(graph_backend.Masked))

    def make(**options: Any) -> LLM:
        settings = {"kv_scales": "one", "kv_memory": "8MiB", "max_running": 6, "kv_format": "bf16", **options}
        llm = LLM(str(hybrid), **PLAIN, **settings)
        graph_backend.make_recordable(llm.engine.runner.pool)
        return llm

    with recorded_states.recordable():
        yield make
    backends.unregister(backend.name)


@pytest.mark.slow
@pytest.mark.parametrize("state_format", ["fp32", "int8"])
@pytest.mark.parametrize("how", [record, live], ids=["recorded", "live"])
def test_replayed_steps_give_the_answers_of_plain_ones(served: Any, state_format: str, how: Any) -> None:
    plain = answers(served(state_format=state_format))
    llm = recorded(served(state_format=state_format), how)
    assert answers(llm) == plain
    before = llm.engine.scheduler.manager.stats.states.snapshot_hits
    assert answers(llm) == plain, "a prefix hit goes on from a copy of states"
    assert llm.engine.scheduler.manager.stats.states.snapshot_hits > before


@pytest.mark.slow
def test_replayed_steps_survive_preemption(served: Any) -> None:
    llm = recorded(served())
    manager = llm.engine.scheduler.manager
    tokens = [0] * ((llm.engine.runner.pool.pages - 12) * llm.plan.page_size)
    lease = manager.open(tokens, "", private=True)
    manager.reserve(lease, len(tokens))
    plain = served()
    expected = [
        output.completions[0].token_ids
        for output in plain.generate(PROMPTS, max_tokens=60, ignore_eos=True, progress=False)
    ]
    found = llm.generate(PROMPTS, max_tokens=60, ignore_eos=True, progress=False)
    assert [output.completions[0].token_ids for output in found] == expected
    assert llm.engine.scheduler.metrics.preemptions > 0


PROMPTS = [
    torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (90, 61, 40, 33)
]


@pytest.mark.slow
def test_frozen_slots_are_noticed(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: a row of the table that is never brought up to date."""
    plain = answers(served())
    monkeypatch.setattr(PageTables, "take_slots", lambda self: ([], []))
    with pytest.raises(Exception):  # noqa: B017  # two rows with the slot of padding, or another answer
        assert answers(recorded(served())) == plain


def test_padding_has_no_slot(served: Any) -> None:
    """Three requests run in a step for four: slots of nobody stay as they are, and what is sent says so."""
    llm = recorded(served(prefix_cache=False))
    runner = llm.engine.runner
    batches: list[StateMetadata] = []
    run = runner._run

    def spy(*arguments: Any) -> Any:
        batches.append(arguments[3].recurrent.batch)
        return run(*arguments)

    runner._run = spy
    runner.record(type(runner.graphs)(runner.graphs.sizes, runner.device, live))
    batches.clear()
    untouched = [x.planes[0][4:].clone() for x in runner.states.layers.values()]
    llm.generate(PROMPTS[:3], max_tokens=4, ignore_eos=True, progress=False)
    prompt, decode = batches[0], batches[-1]
    assert prompt.max_length == 90 and prompt.cu_seqlens_B1.tolist() == [0, 90, 151, 191]
    assert sorted(prompt.slots_B.tolist()) == [0, 1, 2] and prompt.starts_B.tolist() == [0, 0, 0]
    assert decode.max_length == 1 and decode.slots_B.tolist()[3:] == [-1]
    assert decode.starts_B.tolist()[:3] >= [92, 63, 42]
    for batch in batches:
        assert {x.dtype for x in (batch.slots_B, batch.starts_B, batch.cu_seqlens_B1)} == {torch.int32}
    for before, state in zip(untouched, runner.states.layers.values(), strict=True):
        assert torch.equal(state.planes[0][4:], before)


@pytest.mark.slow
def test_replayed_steps_with_drafts_give_the_answers_without(served: Any) -> None:
    """Rows that pad a request are before its own, and belong to no state; a draft that is taken back leaves none."""
    plain = verify_graphs.answers(served())
    told = {tuple(prompt): one.token_ids for prompt, one in zip(verify_graphs.PROMPTS, plain, strict=True)}
    with oracle(told, 0.2, most=7) as name:
        llm = served(speculative=name)
        sizes = verify_graphs.recorded(llm, record)
        verify_graphs.same(verify_graphs.answers(llm), plain)
        assert llm.speculation.counts.accepted > 20
        assert {length for size in sizes if isinstance(size, tuple) for length in size[1:]} == {4, 8}

"""Recorded steps with drafts, on a CPU: a tape in place of a CUDA graph repeats what was recorded over the same memory.

The drafter was told the answers and gets some tokens wrong, so steps have requests with all numbers of drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_cuda_graphs import PROMPTS

from nibble import LLM
from nibble.attention import backends
from nibble.attention.planner.plan import graph_sizes
from nibble.attention.planner.verify_memory import verify_graph_blocker, verify_sizes
from nibble.engine import model_runner
from nibble.engine.graphs import Graphs, live
from nibble.kernels.step_inputs import naive
from nibble.model_spec import Phase
from planning import PLAIN
from tape import record
from toys import graph_backend
from toys.oracle_drafter import oracle

TOKENS = 20


@pytest.fixture
def served(tiny: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    backend = backends.register(graph_backend.info(getattr(request, "param", graph_backend.Masked)))

    def make(**options: Any) -> LLM:
        usual = {"model": str(tiny), "kv_scales": "one", "kv_memory": "2MiB", "max_running": 6}
        llm = LLM(**PLAIN, **{**usual, "kv_format": "bf16", **options})
        graph_backend.make_recordable(llm.engine.runner.pool)
        return llm

    yield make
    backends.unregister(backend.name)


def recorded(llm: LLM, how: Any, tokens: int = 8, room: int = 32) -> list[Any]:
    """Records its steps, lets them run ahead, and returns the sizes of steps as they are replayed."""
    assert verify_graph_blocker(llm.plan) is None
    runner, most = llm.engine.runner, llm.config.max_running
    graphs = Graphs(graph_sizes(most), runner.device, how, verify_sizes(most, tokens, room))
    runner.record(graphs)
    llm.engine.overlap = True
    replay, sizes = graphs.replay, list[Any]()

    def count(size: Any) -> None:
        sizes.append(size)
        replay(size)

    graphs.replay = count  # type: ignore[method-assign]
    return sizes


def answers(llm: LLM, prompts: Sequence[list[int]] = PROMPTS, **params: Any) -> list[Any]:
    outputs = llm.generate(prompts, **{"max_tokens": TOKENS, "ignore_eos": True, "logprobs": 0, **params})
    llm.engine.scheduler.check_integrity()
    return [output.completions[0] for output in outputs]


def same(ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.token_ids == other.token_ids and not one.error
        for mine, yours in zip(one.logprobs, other.logprobs, strict=True):
            assert abs(mine.logprob - yours.logprob) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("how", [record, live], ids=["recorded", "live"])
@pytest.mark.parametrize("tokens", ["auto", "3"])
def test_replayed_steps_give_the_answers_without_drafts(served: Any, how: Any, tokens: str) -> None:
    plain = answers(served())
    known = {tuple(prompt): one.token_ids for prompt, one in zip(PROMPTS, plain, strict=True)}
    with oracle(known, 0.2, most=7) as name:
        llm = served(speculative=name, speculative_tokens=tokens)
        sizes = recorded(llm, how, tokens=4 if tokens == "3" else 8)
        same(answers(llm), plain)
        # From other pages, and one request alone.
        same(answers(llm), plain)
        same(answers(llm, PROMPTS[2:3]), plain[2:3])
        counts = llm.speculation.counts  # type: ignore[union-attr]
        assert 0.3 * counts.drafted < counts.accepted < counts.drafted
        shapes = {size for size in sizes if isinstance(size, tuple)}
        assert len(shapes) > 2 and {length for _, length in shapes} >= ({8, 4} if tokens == "auto" else {4})
        drawn = {"temperature": 1.0, "seed": 3}
        same(answers(llm, **drawn), answers(served(), **drawn))


@pytest.mark.parametrize("served", [graph_backend.Frozen], indirect=True)
def test_a_frozen_length_is_noticed(served: Any) -> None:
    plain = answers(served())
    known = {tuple(prompt): one.token_ids for prompt, one in zip(PROMPTS, plain, strict=True)}
    with oracle(known, 0.2, most=7) as name:
        llm = served(speculative=name)
        recorded(llm, record)
        found = answers(llm)
        assert any(one.token_ids != other.token_ids for one, other in zip(found, plain, strict=True))


@pytest.mark.parametrize("most", [1, 2, 6, 40, 128, 256, 1000])
@pytest.mark.parametrize("tokens", [2, 3, 4, 6, 8, 16])
def test_sizes_have_room(most: int, tokens: int) -> None:
    sizes = verify_sizes(most, tokens, 256)
    assert len(sizes) <= 14 and all(requests * length <= 256 for requests, length in sizes)
    assert list(sizes) == sorted(sizes, key=lambda size: size[0] * size[1], reverse=True)
    for requests in range(1, min(most, 128) + 1):
        length = min(tokens, 1 << (256 // requests).bit_length() - 1)
        fits = [size for size in sizes if size[0] >= requests and size[1] >= min(length, tokens)]
        if requests & (requests - 1) == 0 and (tokens & (tokens - 1)) == 0:
            assert fits, (requests, length)


def test_pages_ahead_are_sent_before_the_step_and_take_none_of_others(
    served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pool that is just large enough; with room, steps with drafts find their pages on the device."""
    plain = answers(served())
    known = {tuple(prompt): one.token_ids for prompt, one in zip(PROMPTS, plain, strict=True)}
    late = list[bool]()
    with oracle(known, 0.2, most=7) as name:
        llm = served(speculative=name, speculative_tokens="3", prefix_cache=False)
        recorded(llm, live, tokens=4)
        runner, manager = llm.engine.runner, llm.engine.scheduler.manager
        verify = runner._replay_verify

        def note(numbers: Any, *others: Any) -> Any:
            late.append(numbers.updates.any_pages)
            return verify(numbers, *others)

        monkeypatch.setattr(runner, "_replay_verify", note)
        same(answers(llm), plain)
        # A request's first step with drafts follows one that has none.
        assert len(late) > 5 and sum(late) <= 2
        needed = sum(manager.pages_for(len(prompt) + TOKENS) for prompt in PROMPTS)
        manager._allocator.allocate(manager._allocator.num_free - needed)
        found = llm.generate(PROMPTS, max_tokens=TOKENS, ignore_eos=True, logprobs=0)
        same([output.completions[0] for output in found], plain)
        assert llm.engine.scheduler.metrics.preemptions == 0


def test_a_rehearsal_has_the_lengths_of_steps(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """There what our kernels make is zero; operators of torch rely on lengths of queries that add up to all rows."""
    batches = list[Any]()

    def nothing(*arguments: Any) -> Any:
        made = naive.verify_inputs(*arguments)
        tensors = {name: getattr(made, name) for name in made.__slots__}
        return replace(made, **{name: None if x is None else x.zero_() for name, x in tensors.items()})

    with oracle({}, 0.2, most=7) as name:
        llm = served(speculative=name)
        runner = llm.engine.runner
        own = runner._with_frames
        monkeypatch.setattr(runner, "_with_frames", lambda *given: (batches.extend(given[1]), own(*given))[1])
        monkeypatch.setattr(model_runner, "verify_inputs", nothing)
        recorded(llm, record)
    verifying = [batch for batch in batches if batch.phase is Phase.VERIFY]
    assert verifying
    for batch in verifying:
        assert tuple(batch.cu_seqlens_q_B1.diff().tolist()) == batch.query_lens

"""Steps that run ahead: the next is launched before the one before it is read. Answers and books must be the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from exact_model import ExactModel, prefix_hashes
from nibble import LLM, SamplingParams
from nibble.cache.exact_window import ExactWindow
from nibble.cache.manager import CacheManager
from nibble.engine import engine as loop
from nibble.engine.engine import NOT_A_NUMBER
from nibble.engine.request import Batch, Delta, Request, ScheduledRequest
from nibble.engine.sampler import SampledTokens
from nibble.engine.scheduler import Scheduler
from traffic import arrivals, expected, limits, next_token, prompt

PAGE = 4


class Device:
    """A pool whose cells remember what was written, and the tokens that were sampled last: it works in order, and knows
    tokens before the host does.
    """

    def __init__(self, window: ExactWindow | None = None) -> None:
        self.exact = ExactModel(window, PAGE) if window else None
        self.cells: dict[tuple[int, int], int] = {}
        self.latest: dict[Request, int] = {}

    def run(self, batch: Batch) -> dict[Request, int]:
        found = {}
        for work in batch.scheduled:
            tokens = list(work.request.token_ids[: work.end])
            if len(tokens) < work.end:
                tokens.append(self.latest[work.request])
            self._write(work, tokens)
            if work.samples_token:
                found[work.request] = self.latest[work.request] = next_token(tokens)
        return found

    def _write(self, work: ScheduledRequest, tokens: list[int]) -> None:
        hashes = prefix_hashes(tokens, work.request.namespace)
        if self.exact:
            self.exact.compute(work.request.lease, hashes, work.start, work.end, work.write_from)
        for i, seen in enumerate(hashes):
            cell = (work.request.lease.pages[i // PAGE], i % PAGE)
            if i >= work.write_from:
                self.cells[cell] = seen
            assert self.cells[cell] == seen, f"token {i} of {work.request.id} is not what was stored"


class Ahead:
    """The engine's loop, one step ahead, over a fake device."""

    def __init__(
        self, pages: int, prefix_cache: bool = True, window: ExactWindow | None = None, **limits: Any
    ) -> None:
        self.manager = CacheManager(pages, PAGE, prefix_cache, window=window)
        self.scheduler = Scheduler(
            self.manager, **{"max_running": 8, "token_budget": 64, "max_context": 1000, **limits}
        )
        self.device, self.flight = Device(window), None
        self.names = iter(range(10**6))

    def add(self, prompt: list[int], max_tokens: int = 4, **more: Any) -> Request:
        request = Request(
            f"r{next(self.names)}", prompt, SamplingParams(max_tokens=max_tokens, temperature=0), **more
        )
        self.scheduler.add(request)
        return request

    def step(self) -> Batch | None:
        batch = self.scheduler.schedule()
        self.scheduler.check_integrity()
        flight = (batch, self.device.run(batch)) if batch else None
        if batch:
            assert sum(work.num_tokens for work in batch.scheduled) <= self.scheduler.token_budget
            self.scheduler.launch(batch)
        if self.flight:
            self.scheduler.commit(*self.flight)
            self.scheduler.check_integrity()
        self.flight = flight
        return batch

    def finish(self) -> None:
        for _ in range(10_000):
            if (
                self.step() is None
                and self.flight is None
                and not (self.scheduler.waiting or self.scheduler.running)
            ):
                return
        raise AssertionError("no end in sight")


@pytest.mark.parametrize("window", [None, ExactWindow(4, 2, 60, 9), ExactWindow(6, 2, 18, 2)])
@pytest.mark.parametrize("chunk", [1, 7, 64, None])
@pytest.mark.parametrize("seed", range(25))
def test_any_mix_ends_right(seed: int, chunk: int | None, window: ExactWindow | None) -> None:
    """Short on pages, with aborts, siblings, common prefixes and late arrivals: every answer is as expected."""
    dice = random.Random(seed)
    engine = Ahead(**limits(dice), chunk=chunk, window=window)
    requests: list[Request] = []
    aborted = set()
    while len(requests) < 40 or engine.scheduler.waiting or engine.scheduler.running:
        if len(requests) < 40 and dice.random() < 0.4:
            requests += arrivals(engine, dice, (0, 0, -3, 2) if seed % 2 else (0,))
        engine.step()
        if dice.random() < 0.05 and requests and not (victim := dice.choice(requests)).is_finished:
            engine.scheduler.finish(victim, "abort")
            aborted.add(victim)
    engine.finish()
    for request in set(requests) - aborted:
        assert request.output_token_ids == expected(request, engine.scheduler.limit)
    assert engine.manager.stats.in_use == 0
    engine.manager.clear()
    assert engine.manager.stats.free == engine.manager.stats.total


def test_a_step_is_not_waited_for() -> None:
    engine = Ahead(pages=20)
    request = engine.add(prompt(9), 5)
    starts = [engine.step().scheduled[0].start for _ in range(5)]
    assert starts == [0, 9, 10, 11, 12], "every step goes on where the one before will end"
    assert request.num_output_tokens == 4
    assert engine.step() is None, "the fifth token is the last, whatever it is: nothing is launched behind it"
    assert request.is_finished and request.output_token_ids == expected(request, 1000)


def test_a_token_too_many_is_thrown_away() -> None:
    engine = Ahead(pages=20)
    free = expected(Request("r", prompt(9), SamplingParams(max_tokens=9, temperature=0)), 1000)
    request = engine.add(prompt(9), 9, stop_ids=frozenset({free[2]}))
    engine.finish()
    assert request.output_token_ids == free[: free.index(free[2])]
    kept = len(engine.manager._radix) * PAGE
    assert kept <= 9 + len(request.output_token_ids), (
        "what was computed for the stop token is not in the prefix cache"
    )


def test_who_loses_its_pages_keeps_its_token() -> None:
    engine = Ahead(pages=10)
    requests = [engine.add(prompt(4, i), 20) for i in range(3)]
    engine.finish()
    assert engine.scheduler.metrics.preemptions > 0
    assert [request.output_token_ids for request in requests] == [
        expected(request, 1000) for request in requests
    ]


def test_equal_prompts_that_come_together_are_computed_once() -> None:
    engine = Ahead(pages=200, token_budget=32)
    common = prompt(80)
    requests = [engine.add([*common, *prompt(4, i + 1)], 3) for i in range(6)]
    engine.finish()
    assert engine.scheduler.metrics.prompt_tokens == 84 + 5 * 4
    assert all(request.output_token_ids == expected(request, 1000) for request in requests)


# The whole engine


PROMPTS = ["def f(x):", "the quick brown fox jumps over the lazy dog", "a", "0123456789" * 12]


@pytest.fixture(scope="module")
def pair(tiny: Path) -> tuple[LLM, LLM]:
    """The same engine twice: step by step, and one step ahead."""
    made = [
        LLM(str(tiny), kv_format="nvfp4", kv_scales="one", kv_memory="2MiB", max_running=3, token_budget=64)
        for _ in range(2)
    ]
    made[1].engine.overlap = True
    return made[0], made[1]


@pytest.fixture(autouse=True)
def idle(pair: tuple[LLM, LLM]) -> Iterator[None]:
    yield
    for llm in pair:
        assert (
            not llm.engine.busy
            and not llm.engine._in_flight
            and not llm.engine.scheduler.waiting
            and not llm.engine.scheduler.running
        )
        llm.engine.scheduler.check_integrity()
        assert llm.engine.scheduler.manager.stats.in_use == 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0, "seed": 7, "top_p": 0.9, "top_k": 40},
        {"temperature": 0.8, "seed": 7, "n": 3},
        {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": 0.1},
        {"logit_bias": {7: 3.0}, "logprobs": 2},
        {"max_tokens": 1},
    ],
    ids=lambda options: "-".join(options) or "greedy",
)
def test_the_same_answers(pair: tuple[LLM, LLM], options: dict[str, Any]) -> None:
    plain, ahead = (llm.generate(PROMPTS, **{"max_tokens": 24, **options}, progress=False) for llm in pair)
    assert [output.completions for output in ahead] == [output.completions for output in plain]
    assert [output.cached_tokens for output in ahead] == [output.cached_tokens for output in plain]


def test_stop_strings_end_an_answer_where_they_stand(pair: tuple[LLM, LLM]) -> None:
    stop = pair[0].generate(PROMPTS[0], max_tokens=24).text[5:8]
    plain, ahead = (llm.generate(PROMPTS[0], max_tokens=24, stop=stop).completions[0] for llm in pair)
    assert ahead == plain and ahead.finish_reason == "stop"
    again = pair[1].generate(PROMPTS[0] + plain.text, max_tokens=8)
    assert again.completions == pair[0].generate(PROMPTS[0] + plain.text, max_tokens=8).completions


def test_a_closed_stream_leaves_nothing(pair: tuple[LLM, LLM]) -> None:
    stream = pair[1].stream(PROMPTS[3], max_tokens=500)
    next(stream)
    other = pair[1].stream(PROMPTS[1], max_tokens=9)
    stream.close()
    assert "".join(piece.text for piece in other) == pair[0].generate(PROMPTS[1], max_tokens=9).text


def test_logits_wait_for_the_step_under_way(pair: tuple[LLM, LLM]) -> None:
    stream = pair[1].stream(PROMPTS[0], max_tokens=500)
    next(stream)
    assert pair[1].engine._in_flight
    stream.close()
    found, right = (llm.logits(PROMPTS[1]) for llm in reversed(pair))
    assert torch.equal(found, right)


def test_what_is_not_a_number_ends_its_request_only(pair: tuple[LLM, LLM]) -> None:
    """Noticed one step late; the others' answers are as they would be without it."""
    plain, ahead = pair
    runner, steps = ahead.engine.runner, []
    forward = runner.forward

    def spoiled(batch: Batch, **options: Any) -> torch.Tensor:
        logits = forward(batch, **options).clone()
        steps.append(batch)
        if len(steps) == 4:
            logits[1] = float("nan")
        return logits

    runner.forward = spoiled  # type: ignore[method-assign]
    outputs = [list[Delta](), list[Delta]()]
    for prompt_text, pieces in zip(PROMPTS, outputs, strict=False):
        ahead.engine.submit(
            ahead.tokenizer.encode(prompt_text), SamplingParams(max_tokens=12, temperature=0), pieces.append
        )
    while ahead.engine.busy:
        ahead.engine.step()
    runner.forward = forward  # type: ignore[method-assign]
    assert outputs[1][-1].error == NOT_A_NUMBER and outputs[1][-1].finish_reason == "abort"
    assert "".join(piece.text for piece in outputs[0]) == plain.generate(PROMPTS[0], max_tokens=12).text


def test_a_failing_step_ends_its_requests_only(pair: tuple[LLM, LLM]) -> None:
    plain, ahead = pair
    runner = ahead.engine.runner
    forward, failing = runner.forward, [0, 0, 0, 1]

    def broken(batch: Batch, **options: Any) -> torch.Tensor:
        if failing and failing.pop(0):
            raise RuntimeError("out of luck")
        return forward(batch, **options)

    runner.forward = broken  # type: ignore[method-assign]
    pieces: list[Delta] = []
    ahead.engine.submit(
        ahead.tokenizer.encode(PROMPTS[0]), SamplingParams(max_tokens=12, temperature=0), pieces.append
    )
    while ahead.engine.busy:
        ahead.engine.step()
    runner.forward = forward  # type: ignore[method-assign]
    assert pieces[-1].error == "RuntimeError: out of luck"
    assert ahead.generate(PROMPTS[0], max_tokens=12).text == plain.generate(PROMPTS[0], max_tokens=12).text


def test_an_interrupt_loses_nothing(pair: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    stream, read = pair[1].stream(PROMPTS[1], max_tokens=12), SampledTokens.read_ids
    first = next(stream).text

    def interrupted(picks: SampledTokens) -> None:
        raise KeyboardInterrupt

    for _ in range(2):
        monkeypatch.setattr(SampledTokens, "read_ids", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pair[1].engine.step()
        monkeypatch.setattr(SampledTokens, "read_ids", read)
        assert (
            pair[1].generate(PROMPTS[2], max_tokens=4).text == pair[0].generate(PROMPTS[2], max_tokens=4).text
        )
    rest = "".join(piece.text for piece in stream)
    assert first + rest == pair[0].generate(PROMPTS[1], max_tokens=12).text


def test_what_was_sampled_is_told_before_all_requests_fail(
    pair: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, pieces = pair[1].engine, list[Delta]()
    # With a penalty the next step is scheduled once this one is read.
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0, repetition_penalty=1.1)
    (request,) = engine.submit([5, 6, 7], params, pieces.append)
    for _ in range(4):
        engine.step()

    def broken(*_: Any) -> None:
        raise RuntimeError("a mistake in the books")

    with monkeypatch.context() as patch:
        patch.setattr(loop, "follow", broken)
        with pytest.raises(RuntimeError, match="a mistake"):
            engine.step()
    told = sum(len(piece.token_ids) for piece in pieces)
    engine.fail("the engine failed")
    assert pieces[-1].error == "the engine failed"
    assert told < sum(len(piece.token_ids) for piece in pieces) == request.num_output_tokens


@pytest.mark.parametrize("which", [0, 1])
def test_a_taker_that_fails_ends_only_its_own_answer(pair: tuple[LLM, LLM], which: int) -> None:
    engine, taken = pair[which].engine, []

    def fails(delta: Delta) -> None:
        raise ValueError("nobody takes this")

    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0)
    engine.submit([5, 6, 7], params, fails)
    engine.submit([5, 6, 8], params, taken.append)
    with pytest.raises(ValueError, match="nobody"):
        for _ in range(4):
            engine.step()
    while engine.busy:
        engine.step()
    engine.step()
    assert sum(len(delta.token_ids) for delta in taken) == 6

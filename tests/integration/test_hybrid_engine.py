"""Hybrid models as hostile callers use them: whatever happens around a request, its answer is the cold one.

Random requests share prefixes, score prompts, ask for several answers, are aborted, preempted and overtaken, in pools
that are nearly too small; the prefix cache is emptied meanwhile. The rest is what else an engine does over states.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nibble import LLM, NibbleError, SamplingParams
from nibble.config import Config
from nibble.engine.plan import plan_engine
from nibble.engine.request import Batch, Request
from nibble.errors import CapacityError
from tiny import QWEN3_NEXT, save_tiny

CONTEXT = 224


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("hybrid"), "qwen3_next", **QWEN3_NEXT)


def engine(model: Path, **options: Any) -> LLM:
    fixed = {"kv_scales": "one", "max_context": CONTEXT, "kv_memory": "16MiB"}
    return LLM(str(model), **{**fixed, **options})


def smallest(model: Path, **options: Any) -> LLM:
    """An engine with as little memory as it starts with."""
    for size in (768, 1024, 1536, 2048, 3072, 4096):
        try:
            return engine(model, **{**options, "kv_memory": f"{size}KiB"})
        except CapacityError:
            continue
    raise AssertionError("no pool was large enough")


@dataclass
class Recorder:
    """An engine, and the logits of what it sampled, by request and position."""

    llm: LLM
    logits: dict[str, dict[int, Tensor]] = field(default_factory=lambda: defaultdict(dict))

    def __post_init__(self) -> None:
        forward = self.llm.engine.runner.forward

        def spy(batch: Batch, **options: Any) -> Tensor:
            rows = forward(batch, **options)
            for item, row in zip([x for x in batch.scheduled if x.samples_token], rows, strict=False):
                self.logits[item.request.id][item.end] = row.clone()
            return rows

        self.llm.engine.runner.forward = spy  # type: ignore[method-assign]

    def submit(self, prompt: list[int], params: SamplingParams, **options: Any) -> tuple[Request, ...]:
        return self.llm.engine.submit(prompt, params, lambda _: None, **options)

    def run(self) -> None:
        while self.llm.engine.busy:
            self.llm.engine.step()


class Cold:
    """What requests are answered by themselves, without a prefix cache."""

    def __init__(self, model: Path, **options: Any) -> None:
        self.recorder = Recorder(engine(model, max_running=1, prefix_cache=False, **options))
        self.answers: dict[Any, tuple[list[int], dict[int, Tensor], list[float]]] = {}

    def check(self, request: Request, logits: dict[int, Tensor]) -> None:
        """A request that has ended has the tokens, logits and log-probabilities of a cold one, to the last bit."""
        params = request.params
        key = (tuple(request.prompt_token_ids), params.max_tokens, params.prompt_logprobs)
        if key not in self.answers:
            (cold,) = self.recorder.submit(list(request.prompt_token_ids), params)
            self.recorder.run()
            scores = [one.logprob for one in cold.prompt_logprobs]
            self.answers[key] = cold.output_token_ids, self.recorder.logits[cold.id], scores
        tokens, rows, scores = self.answers[key]
        assert request.output_token_ids == tokens
        assert all(torch.equal(logits[end], row) for end, row in rows.items() if end in logits)
        assert [one.logprob for one in request.prompt_logprobs] == pytest.approx(scores, abs=1e-6)


@dataclass
class Crowd:
    """Callers that send and abort requests at random."""

    rng: random.Random
    recorder: Recorder
    cold: Cold
    pressure: float
    running: list[Request] = field(default_factory=list)
    ended: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.texts = [[self.rng.randrange(256) for _ in range(160)] for _ in range(2)]
        scheduler = self.recorder.llm.engine.scheduler
        schedule = scheduler.schedule

        def pressed(*args: Any) -> Batch | None:
            last = scheduler.running[-1] if len(scheduler.running) > 1 else None
            if last and last.in_flight is None and self.rng.random() < self.pressure:
                scheduler._preempt(last)
            return schedule(*args)

        scheduler.schedule = pressed  # type: ignore[method-assign]

    def prompt(self) -> list[int]:
        """The beginning of a text, or of a conversation so far, and a few tokens of its own."""
        rng, more = self.rng, [self.rng.randrange(256) for _ in range(self.rng.randrange(1, 20))]
        if self.ended and rng.random() < 0.4:
            return (rng.choice(self.ended) + more)[: CONTEXT - 42]
        return rng.choice(self.texts)[: rng.randrange(1, 160)] + more

    def act(self) -> None:
        rng, llm = self.rng, self.recorder.llm
        action = rng.random()
        if action < 0.25 and len(self.running) < 10:
            params = SamplingParams(
                max_tokens=rng.choice([1, 2, 5, 17, 40]), temperature=0, ignore_eos=True,
                prompt_logprobs=rng.choice([None, None, 0]), n=rng.choice([1, 1, 3]),
            )  # fmt: skip
            self.running += self.recorder.submit(self.prompt(), params, priority=rng.choice([0, 0, 1]))
        elif action < 0.3 and self.running:
            llm.engine.abort([self.running.pop(rng.randrange(len(self.running)))])
        elif action < 0.32:
            llm.engine.reset_prefix_cache()
        elif llm.engine.busy:
            llm.engine.step()
        llm.engine.scheduler.check_integrity()
        self.collect()

    def collect(self) -> None:
        for request in [one for one in self.running if one.is_finished]:
            assert request.finish_reason == "length"
            self.cold.check(request, self.recorder.logits.pop(request.id))
            self.running.remove(request)
            self.ended.append(list(request.token_ids))


CROWDS = [
    (
        {"kv_format": "nvfp4", "state_format": "int8", "kv_window": 16},
        {"token_budget": 13, "state_interval": 32},
    ),
    ({"kv_format": "nvfp4", "state_format": "fp8", "kv_window": 40, "kv_sinks": 16, "page_size": 16}, {}),
    ({"kv_format": "bf16", "state_format": "bf16", "page_size": 32}, {"token_budget": 5, "max_running": 4}),
    ({"kv_format": "fp8_e4m3", "state_format": "fp32"}, {"max_running": 1, "state_interval": 16}),
    ({"kv_format": "k8v4", "state_format": "int8", "kv_window": 0, "page_size": 64}, {"token_budget": 40}),
]
"""What decides answers, and what may not."""


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("number", range(len(CROWDS)))
def test_answers_are_cold_ones_in_any_crowd(number: int, hybrid: Path) -> None:
    decisive, free = CROWDS[number]
    recorder = Recorder(smallest(hybrid, **{"max_running": 5, **decisive, **free}))
    # Half of them as on a GPU: what the host concludes takes effect a step late.
    recorder.llm.engine.overlap = number % 2 == 0
    crowd = Crowd(random.Random(number), recorder, Cold(hybrid, **decisive), pressure=0.1)
    for _ in range(90):
        crowd.act()
    recorder.run()
    crowd.collect()
    stats = recorder.llm.engine.scheduler.metrics.cache.states
    assert len(crowd.ended) > 8 and stats and stats.snapshot_hits and stats.attached


def test_several_answers_to_one_prompt_share_its_states(hybrid: Path) -> None:
    """Copied when each goes on: answers that are drawn differ, and each is that of its own seed."""
    llm = engine(hybrid, state_format="int8", kv_format="bf16")
    prompt = list(range(50, 130))
    params = {"max_tokens": 20, "ignore_eos": True, "temperature": 1.0, "seed": 3}
    many = llm.generate(prompt, n=4, **params).completions
    assert len({one.token_ids for one in many}) == 4
    assert llm.generate(prompt, **params).completions[0].token_ids == many[0].token_ids
    cold = engine(hybrid, state_format="int8", kv_format="bf16", prefix_cache=False, max_running=1)
    again = cold.generate(prompt, n=4, **params).completions
    assert [one.token_ids for one in again] == [one.token_ids for one in many]


def test_structured_answers_and_scores(hybrid: Path) -> None:
    """A grammar's answer goes on from a snapshot; scores are the same from cold and from the prefix cache."""
    llm = engine(hybrid, state_format="fp8", kv_format="nvfp4")
    params: dict[str, Any] = {
        "max_tokens": 60, "temperature": 0.0,
        "grammar": "json_schema:" + json.dumps({"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}),
    }  # fmt: skip
    first, second = (llm.generate("def f(x):\n" * 9, **params) for _ in range(2))
    assert second.cached_tokens > 60 and first.text == second.text
    assert json.loads(first.text)["a"] in ("x", "y")
    pairs = ("class Stack:\n    def push(self):" * 3, " return None")
    cold, hit = llm.score(*pairs), llm.score(*pairs)
    assert cold.logprob == pytest.approx(hit.logprob, abs=1e-4)
    assert [one.token for one in cold.token_logprobs] == [one.token for one in hit.token_logprobs]


@pytest.mark.slow
def test_the_longest_prompt_in_the_smallest_pool(hybrid: Path) -> None:
    """One request may take every page, whatever snapshots there are."""
    # A window that is left to Nibble is given up where memory is short.
    decisive = {"kv_format": "nvfp4", "state_format": "int8", "kv_window": 64}
    recorder, cold = Recorder(smallest(hybrid, **decisive, state_interval=16)), Cold(hybrid, **decisive)
    rng = random.Random(5)
    limit = recorder.llm.engine.scheduler.limit
    for _ in range(3):
        prompt = [rng.randrange(256) for _ in range(limit - 9)]
        for _ in range(2):
            (request,) = recorder.submit(
                prompt, SamplingParams(max_tokens=9, temperature=0, ignore_eos=True, prompt_logprobs=0)
            )
            recorder.run()
            cold.check(request, recorder.logits.pop(request.id))


def test_closing_ends_what_runs(hybrid: Path) -> None:
    llm = engine(hybrid)
    pieces: list[Any] = []
    llm.engine.submit([5] * 90, SamplingParams(max_tokens=30), pieces.append)
    llm.engine.step()
    llm.close()
    assert pieces[-1].error and llm.is_closed
    with pytest.raises(NibbleError, match="closed"):
        llm.generate("x")


def test_a_failed_step_hurts_its_own_requests_alone(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States that it has changed in part are not gone on from."""
    decisive = {"kv_format": "bf16", "state_format": "int8"}
    recorder, cold = Recorder(engine(hybrid, **decisive)), Cold(hybrid, **decisive)
    prompt, params = list(range(100)), SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)
    from nibble.attention import recurrent as layers

    rule, calls = layers.recurrence, iter(range(1 << 30))
    for failing in (1, 4, 11, 14, 20):
        (hurt,) = recorder.submit(prompt, params)
        with monkeypatch.context() as patch:

            def fail(*args: Any, failing: int = failing, first: int = next(calls), **kwargs: Any) -> Tensor:
                if next(calls) - first == failing:
                    raise RuntimeError("out of luck")
                return rule(*args, **kwargs)

            patch.setattr(layers, "recurrence", fail)
            recorder.run()
        assert hurt.finish_reason == "abort"
        recorder.llm.engine.scheduler.check_integrity()
        (request,) = recorder.submit(prompt, params)
        recorder.run()
        cold.check(request, recorder.logits.pop(request.id))


def test_the_fidelity_watch_says_what_it_does_not_look_at(hybrid: Path) -> None:
    llm = engine(hybrid, kv_format="nvfp4", state_format="int8", watch_fidelity=1.0)
    llm.generate([list(range(60)), list(range(100, 150))], max_tokens=12, ignore_eos=True)
    monitor = llm.error_monitor
    assert monitor and monitor.samples and set(monitor.readings) <= set(llm.plan.groups[0].layers)
    assert "the recurrent states of 3 layers are not compared" in monitor.summary
    assert monitor.numbers()["fidelity_uncovered_layers"] == 3
    assert any("and not the recurrent states of 3 layers" in note for note in llm.plan.notes)
    without = plan_engine(Config(model=str(hybrid), kv_format="nvfp4", kv_scales="one"))
    assert not any("watch" in note for note in without.plan.notes)

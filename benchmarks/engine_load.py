"""How an engine behaves under load: what can be measured in seconds, and whole workloads computed from that.

Measured through LLM: the rate at which prompts are computed, and the time of a decode step at some batch sizes and
contexts. So that long contexts cost no prompts, they are planted: the pool is filled with random K and V, and entered
into the prefix cache as the pages of prompts that share nothing. Computed: the engine's own scheduler runs a workload,
with those costs in place of the device, so queues and preemptions are its own.

Must not know of any one model.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import paged
import torch

from nibble import LLM, SamplingParams
from nibble.cache.manager import CacheManager
from nibble.engine.request import Batch, Delta, Request
from nibble.engine.scheduler import Scheduler
from nibble.engine.step_tokens import LONG_PROMPTS

STEPS, WARMUP = 24, 4
"""Decode steps that are timed, and those before."""
LONG = LONG_PROMPTS + 64
"""Tokens of a prompt of which the last layer attends for the last one alone."""
FAR, ROUNDED = 0.5, 5.0
"""How far below the best a chosen token may be, in deviations, and how many times what rounding does to logits: it
turns codes of activations, and experts where a router is near a tie. Tokens of another model are 2 to 6 below."""
UNIT = 16
"""Tokens that a computed workload counts as one, so that it takes a second and not a minute."""


@dataclass(frozen=True)
class Workload:
    """Prompt and answer lengths in tokens."""

    prompt: int
    answer: int

    @classmethod
    def parse(cls, text: str) -> Workload:
        """`16K/1K`."""
        prompt, _, answer = text.partition("/")
        return cls(paged.tokens(prompt), paged.tokens(answer))

    def __str__(self) -> str:
        return "/".join(f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in (self.prompt, self.answer))


@dataclass(frozen=True)
class Decode:
    """A measured decode step."""

    requests: int
    context: int
    ms: float


@dataclass(frozen=True)
class Costs:
    """What was measured of one engine. prefill: prompt length -> tokens a second; decodes: steps."""

    prefill: Mapping[int, float]
    decodes: Sequence[Decode]
    per_token_ms: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "per_token_ms", self._slope())

    def _slope(self) -> float:
        """ms that one more stored token adds to a step, from pairs of contexts at the same batch size."""
        top = bottom = 0.0
        for requests in {step.requests for step in self.decodes}:
            same = [step for step in self.decodes if step.requests == requests]
            x, y = statistics.fmean(step.context for step in same), statistics.fmean(step.ms for step in same)
            top += requests * sum((step.context - x) * (step.ms - y) for step in same)
            bottom += requests**2 * sum((step.context - x) ** 2 for step in same)
        return max(top / bottom, 0.0) if bottom else 0.0

    def base_ms(self, requests: int) -> float:
        """A step of `requests` without any context, between the batch sizes that were measured."""
        known = {
            n: statistics.fmean(
                step.ms - self.per_token_ms * n * step.context for step in self.decodes if step.requests == n
            )
            for n in sorted({step.requests for step in self.decodes})
        }
        for low, high in pairwise(known):
            if low <= requests <= high:
                return known[low] + (known[high] - known[low]) * (requests - low) / (high - low)
        nearest = min(known, key=lambda n: abs(n - requests))
        return known[nearest]

    def decode_ms(self, requests: int, stored: int) -> float:
        """A step of `requests` that have `stored` tokens in all."""
        return self.base_ms(requests) + self.per_token_ms * stored

    def rate(self, prompt: int) -> float:
        """Tokens a second while prompts of about this length are computed."""
        return self.prefill[min(self.prefill, key=lambda length: abs(length - prompt))]

    @property
    def misfit(self) -> float:
        """How far the formula is off the measured steps at worst, as a share."""
        return max(
            (abs(self.decode_ms(s.requests, s.requests * s.context) / s.ms - 1) for s in self.decodes),
            default=0.0,
        )


# Measuring


def random_prompt(length: int, vocabulary: int, seed: int) -> list[int]:
    """Tokens that no other seed begins with."""
    rng = random.Random(seed)
    return [seed % vocabulary, *rng.choices(range(vocabulary), k=length - 1)]


def prefill_rate(llm: LLM, length: int, total: int) -> float:
    """Tokens a second over about `total` tokens of prompts, one token of answer each."""
    vocabulary, engine = llm.engine.vocab_size, llm.engine
    prompts = [random_prompt(length, vocabulary, seed) for seed in range(max(total // length, 1))]
    for _ in range(2):  # the first run compiles, and the libraries choose their kernels
        engine.scheduler.manager.clear()
        start = time.perf_counter()
        llm.generate(prompts, max_tokens=1, ignore_eos=True, temperature=0, progress=False)
        seconds = time.perf_counter() - start
    return sum(map(len, prompts)) / seconds


def fill_pool(llm: LLM) -> None:
    """Random K and V in all pages: made for the first layer, copied to the others."""
    pool = llm.engine.runner.pool
    first, *others = pool.layout.layers
    stream = first.streams[0].stream
    paged.fill(pool, first.layer, paged.Heads(stream.heads, stream.heads, stream.dim))
    for layer in others:
        for name, target in pool.view(layer.layer).streams.items():
            for plane, source in zip(target.planes, pool.view(first.layer).streams[name].planes, strict=True):
                plane.copy_(source)


def fits(llm: LLM, requests: int, context: int) -> bool:
    """Whether so many requests find pages for `context` tokens, and a few more."""
    manager = llm.engine.scheduler.manager
    room = manager.pages_for(context + STEPS + WARMUP + 1) + 1
    return requests * room * manager.page_size <= manager.num_tokens


def plant(llm: LLM, prompts: Sequence[Sequence[int]]) -> None:
    """Enters all tokens of the prompts but the last into the prefix cache, as if they had been computed."""
    manager = llm.engine.scheduler.manager
    for prompt in prompts:
        lease = manager.open(prompt, f"{llm.engine.namespace}/")
        manager.reserve(lease, len(prompt) - 1)
        manager.commit(lease, prompt, len(prompt) - 1)
        manager.release(lease)


def decode_step(llm: LLM, requests: int, context: int, beside: int = 0) -> Decode:
    """The median time of a decode step of `requests`, each with `context` tokens, a multiple of the page size.

    Args:
        llm: has room for two requests more, where `beside` says so.
        requests: that decode.
        context: tokens that each has.
        beside: tokens of a prompt that each step computes whole, and another each time; 0: none.
    """
    engine = llm.engine
    engine.scheduler.manager.clear()
    prompts = [random_prompt(context + 1, engine.vocab_size, seed) for seed in range(requests)]
    plant(llm, prompts)
    pieces: list[Delta] = []
    params = SamplingParams(max_tokens=STEPS + WARMUP, ignore_eos=True, temperature=0)
    tickets = [engine.submit(prompt, params, pieces.append) for prompt in prompts]
    others = [
        random_prompt(beside, engine.vocab_size, requests + i) for i in range(beside and params.max_tokens)
    ]
    ends, seen, answered = [], 0, list[Delta]()
    while engine.busy:
        if seen and others:
            engine.submit(others.pop(), replace(params, max_tokens=1), answered.append)
        before = len(answered)
        engine.step()
        # Prompts that wait for a place are beside nothing.
        if (
            beside
            and WARMUP * requests < seen < (params.max_tokens - 1) * requests
            and len(answered) == before
        ):
            raise SystemExit("a step computed no prompt beside its decodes: leave room for two requests more")
        full, seen = len(pieces) - seen == requests, len(pieces)
        ends.append(time.perf_counter() if full else None)
    if any(piece.error for piece in pieces):
        raise SystemExit(f"a decode step failed: {next(piece.error for piece in pieces if piece.error)}")
    if any(ticket[0].num_prefix_hit_tokens != context for ticket in tickets):
        raise SystemExit(f"{context} tokens were planted, and the engine found others: nothing was measured")
    spans = [(b - a) * 1e3 for a, b in pairwise(ends) if a is not None and b is not None]
    engine.scheduler.manager.clear()
    return Decode(requests, context, statistics.median(spans[WARMUP:]))


# Checking


def gate(llm: LLM, prompt: list[int], expected_TV: torch.Tensor, bound: float) -> tuple[float, float]:
    """Stops where the engine's logits, or its greedy answers, are not the model's. Returns how far both are off.

    Answers are begun by steps with prompts, a long one among them, and written by decode steps, recorded where the
    engine records. They are judged by logits of whole prompts: how far below the best token the chosen ones are, in
    standard deviations of the logits.
    """
    found_TV = llm.logits(prompt).float().cpu()
    off = float((found_TV - expected_TV).norm() / expected_TV.norm())
    if not off <= bound:
        raise SystemExit(f"wrong logits (relative error {off:.1e}): no timing is worth anything")
    prompts = [prompt[:40], prompt[:97], prompt[:128], prompt[:161], prompt]
    if llm.engine.scheduler.max_context > LONG + STEPS:
        prompts.append(random_prompt(LONG, llm.engine.vocab_size, seed=0))
    below = 0.0
    for some, output in zip(
        prompts, llm.generate(prompts, max_tokens=STEPS, ignore_eos=True, temperature=0), strict=True
    ):
        answer = list(output.completions[0].token_ids)
        logits_TV = llm.logits([*some, *answer]).float().cpu()[len(some) - 1 : -1]
        gap = logits_TV.amax(-1) - logits_TV.gather(1, torch.tensor(answer)[:, None])[:, 0]
        below = max(below, float((gap / logits_TV.std(-1)).max()))
    if not below <= max(FAR, ROUNDED * off):
        raise SystemExit(
            f"a step chose a token {below:.2f} deviations below the best, with logits off by {off:.1e}: "
            "no timing is worth it"
        )
    return off, below


# Computing


@dataclass(frozen=True)
class Outcome:
    """A workload. tokens_s: of answers; first_s: median time to the first token; token_ms: median between tokens."""

    workload: Workload
    concurrency: int
    seconds: float
    tokens_s: float
    first_s: float
    token_ms: float
    preemptions: int


def compute(llm: LLM, costs: Costs, workload: Workload, concurrency: int) -> Outcome:
    """All requests arrive at once; the engine's scheduler serves them, in units of UNIT tokens."""
    pool, made, config = llm.engine.runner.pool, llm.engine.scheduler, llm.config
    unit = min(UNIT, pool.layout.page_size)
    manager = CacheManager(pool.pages, pool.layout.page_size // unit, prefix_cache=config.prefix_cache)
    scheduler = Scheduler(
        manager,
        max_running=made.max_running,
        token_budget=max(made.token_budget // unit, 1),
        max_context=made.max_context // unit + 1,
    )
    params = SamplingParams(max_tokens=max(workload.answer // unit, 1), ignore_eos=True, temperature=0)
    prompt = [0] * max(workload.prompt // unit, 1)
    asked = [Request(str(i), [i, *prompt[1:]], params) for i in range(concurrency)]
    for request in asked:
        scheduler.add(request)
    now, first, last = 0.0, dict[str, float](), dict[str, float]()
    while scheduler.waiting or scheduler.running:
        batch = scheduler.schedule()
        assert batch is not None
        now += step_seconds(batch, costs, unit)
        sampled = [work.request for work in batch.scheduled if work.samples_token]
        scheduler.commit(batch, dict.fromkeys(sampled, 1))
        for request in sampled:
            first.setdefault(request.id, now)
            last[request.id] = now
    answer = params.max_tokens * unit
    gaps = [(last[name] - first[name]) * 1e3 / max(answer - unit, 1) for name in first]
    return Outcome(
        workload, concurrency, now, concurrency * answer / now, statistics.median(first.values()),
        statistics.median(gaps), scheduler.metrics.preemptions,
    )  # fmt: skip


def step_seconds(batch: Batch, costs: Costs, unit: int) -> float:
    """What a step of units costs: `unit` decode steps of those that decode, and the tokens of prompts at their rate."""
    decodes = [work for work in batch.scheduled if work.phase.decodes]
    seconds = 0.0
    if decodes:
        seconds += unit * costs.decode_ms(len(decodes), unit * sum(work.end for work in decodes)) / 1e3
    for work in batch.scheduled:
        if not work.phase.decodes:
            seconds += unit * work.num_tokens / costs.rate(unit * len(work.request.prompt_token_ids))
    return seconds

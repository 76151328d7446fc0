"""What a step that verifies drafts takes beside one that decodes, and what a forced share of accepted drafts brings.

    python benchmarks/verify_steps.py [--model llama-3.1-8b] [--scheme nvfp4] [--requests 1,8,32,128] [--context 8K]
        [--drafts 3] [--accept 0.7]

Random weights, and a drafter that costs nothing; whether a draft is accepted is decided by a coin, and everything else
is the engine's own. `decode`: recorded steps of one token, launched before the last is read. `verify`: steps of
1 + DRAFTS tokens in every step. `device`: their graphs alone, replayed one after the other; what is missing to the
whole step is the host's. `auto`: the number of drafts is left to Nibble. The gate is engine_gpu.py's, and logits of
recorded steps with drafts against the same steps as they are computed without a record. Times are medians of steps,
host included.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import engine_load as load
import paged
import torch
from random_models import served
from report import markdown

import gpu
from nibble import LLM, SamplingParams
from nibble.engine import drafters, engine
from nibble.engine.drafters.base import DrafterInfo, DraftTask
from nibble.engine.request import Batch, Delta, Logprob
from nibble.engine.speculative import Speculation

EXACT, QUANTISED = 0.05, 0.35
"""As in engine_gpu.py."""
SAME = 0.03
"""Most by which logits of a step differ with and without a record, norm over norm."""
STEPS, LONG, WARMUP, REPLAYS = 32, 160, 8, 20
MOST = 512
"""Tokens of an answer, which no run gets to."""
STEP_FLOORS = {1: 1.10, 8: 1.15, 32: 1.25}
"""Most times a decode step that a step with three drafts may take."""
FORCED_FLOORS, NEVER_FLOORS = {1: 1.8, 8: 1.6}, {1: 0.97, 8: 0.97, 32: 0.97, 128: 0.98}
"""Least times as many tokens a second at 0.7, and where no draft is right."""


class Free:
    """Proposes some tokens, as many as there may be."""

    def propose(self, tasks: Sequence[DraftTask]) -> list[list[int]]:
        return [[1] * task.limit for task in tasks]


@cache
def unscored(token: int) -> Logprob:
    return Logprob(token, 0.0)


@contextmanager
def accepting(share: float) -> Iterator[None]:
    """Accept each draft with this probability, whatever was drawn."""
    dice = random.Random(1)

    def run(drafts: Sequence[int], sampled: Sequence[Logprob | None]) -> list[Logprob | None]:
        count = 0
        while count < len(drafts) and dice.random() < share:
            count += 1
        return [*map(unscored, drafts[:count]), sampled[count]]

    with mock.patch.object(engine, "accepted_run", run):
        yield


def speculation(llm: LLM, tokens: int | None) -> Speculation:
    """Drafts of so many tokens, or as many as pay."""
    vocab = llm.engine.vocab_size
    return Speculation("free", Free(), tokens or 7, tokens is None, 256, vocab, llm.engine.overlap)


@dataclass
class Run:
    """Some steps over planted prompts."""

    ms: float
    """Median of a step, host included."""
    tokens_s: float
    sizes: list[Any]
    """Of recorded steps that were replayed, in order."""

    @property
    def verified(self) -> int:
        return sum(isinstance(size, tuple) for size in self.sizes)


def run(llm: LLM, prompts: Sequence[list[int]], steps: int, drafts: Speculation | None) -> Run:
    """Decode prompts that are planted already."""
    made, pieces, sizes = llm.engine, list[Delta](), list[Any]()
    made.speculation, graphs = drafts, made.runner.graphs
    params = SamplingParams(max_tokens=MOST, ignore_eos=True, temperature=0)
    tickets = [made.submit(prompt, params, pieces.append) for prompt in prompts]
    ends, counts, replay = [], [], graphs.replay

    def note(size: Any) -> None:
        sizes.append(size)
        replay(size)

    with mock.patch.object(graphs, "replay", note):
        for _ in range(steps + WARMUP):
            made.step()
            ends.append(time.perf_counter())
            counts.append(sum(len(piece.token_ids) for piece in pieces))
    made.abort([ticket for (ticket,) in tickets])
    made.step()  # reads what is in flight
    spans = [b - a for a, b in zip(ends[WARMUP:], ends[WARMUP + 1 :], strict=False)]
    tokens = counts[-1] - counts[WARMUP]
    return Run(statistics.median(spans) * 1e3, tokens / (ends[-1] - ends[WARMUP]), sizes)


def device_ms(llm: LLM, size: Any) -> float:
    """The time of a recorded step alone, over the inputs of the step before."""
    graphs = llm.engine.runner.graphs
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graphs.replay(size)
    start.record()
    for _ in range(REPLAYS):
        graphs.replay(size)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / REPLAYS


def check(llm: LLM, context: int) -> float:
    """How far logits of recorded steps with drafts are from those of the same steps without a record."""
    made, runner, worst = llm.engine, llm.engine.runner, [0.0]
    prompts, forward = planted(llm, 3, context), runner.forward

    def both(batch: Batch, **options: Any) -> torch.Tensor:
        logits = forward(batch, **options)
        if any(item.drafts for item in batch.scheduled):
            ours, graphs = logits.float().clone(), runner.graphs
            runner.graphs = None
            theirs = forward(batch, **options).float()
            runner.graphs = graphs
            worst.append(float((ours - theirs).norm() / theirs.norm()))
        return logits

    with mock.patch.object(runner, "forward", both), accepting(0.5):
        for drafts in (7, 3, 1):
            made.speculation = speculation(llm, drafts)
            run(llm, prompts, 4, made.speculation)
    if len(worst) < 4 or not max(worst) <= SAME:
        raise SystemExit(f"recorded steps with drafts are off by {max(worst):.1e} ({len(worst) - 1} steps)")
    return max(worst)


def planted(llm: LLM, requests: int, context: int) -> list[list[int]]:
    """Prompts whose tokens are all in the prefix cache but the last."""
    llm.engine.scheduler.manager.clear()
    prompts = [load.random_prompt(context + 1, llm.engine.vocab_size, seed) for seed in range(requests)]
    load.plant(llm, prompts)
    return prompts


def verdict(value: float, floor: float | None, *, most: bool = False) -> str:
    """`1.08 x (at most 1.10: ok)`."""
    if floor is None:
        return f"{value:.3f} x"
    good = value <= floor if most else value >= floor
    return f"{value:.3f} x ({'at most' if most else 'at least'} {floor:g}: {'ok' if good else 'MISSED'})"


def measure(llm: LLM, options: argparse.Namespace) -> str:
    """Return the table."""
    context, rows = paged.tokens(options.context), []
    for requests in [int(n) for n in options.requests.split(",")]:
        if not load.fits(llm, requests, context + MOST):
            print(f"{requests} requests of {options.context} do not fit", flush=True)
            continue
        prompts = planted(llm, requests, context)
        plain = run(llm, prompts, LONG, None)
        of_decode = device_ms(llm, plain.sizes[-1])
        with accepting(options.accept):
            forced = run(llm, prompts, STEPS, speculation(llm, options.drafts))
            size = next((size for size in reversed(forced.sizes) if isinstance(size, tuple)), plain.sizes[-1])
            of_verify = device_ms(llm, size)
            auto = run(llm, prompts, STEPS, speculation(llm, None))
        with accepting(0.0):
            never = run(llm, prompts, LONG, speculation(llm, None))
        fits = 256 // requests > options.drafts
        rows.append(
            (requests, f"{plain.ms:.3f} ({of_decode:.3f})", f"{forced.ms:.3f} ({of_verify:.3f}) {size}",
             verdict(forced.ms / plain.ms, STEP_FLOORS.get(requests) if fits else None, most=True),
             verdict(forced.tokens_s / plain.tokens_s, FORCED_FLOORS.get(requests)),
             f"{auto.tokens_s / plain.tokens_s:.2f} x",
             verdict(never.tokens_s / plain.tokens_s, NEVER_FLOORS.get(requests)) + f", {never.verified} of {LONG}")
        )  # fmt: skip
        print(*rows[-1], flush=True)
    head = (
        "requests", "decode, ms (device)", f"{options.drafts} drafts, ms (device), size", "a step",
        f"tokens/s at {options.accept:g}", f"auto at {options.accept:g}", "auto at 0, steps with drafts",
    )  # fmt: skip
    return markdown(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--scheme", default="nvfp4")
    parser.add_argument("--requests", default="1,8,32,128")
    parser.add_argument("--context", default="8K")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--accept", type=float, default=0.7)
    options = parser.parse_args()
    drafters.register(DrafterInfo("free", "some tokens", Free, max_tokens=7))
    most = max(int(n) for n in options.requests.split(","))
    # The drafter is named, so that the plan has a route for drafts and memory for them.
    with served(
        options.model, kv_format=options.scheme, device=gpu.device(), max_running=most, speculative="free",
        max_context=paged.tokens(options.context) + MOST + 16,
    ) as made:  # fmt: skip
        llm, graphs = made.llm, made.llm.engine.runner.graphs
        print(f"{gpu.machine()}: {options.scheme} cache; {llm.engine.startup.summary}")
        print(*llm.engine.startup.notes, *map(str, llm.plan.groups[0].routes), sep="\n")
        if not graphs or not graphs.verify_sizes:
            raise SystemExit("steps with drafts are not recorded here: there is nothing to measure")
        print("recorded:", *graphs.verify_sizes, flush=True)
        llm.engine.speculation = None
        error, below = load.gate(
            llm, made.prompt, made.expected_TV, EXACT if options.scheme == "bf16" else QUANTISED
        )
        print(f"logits off {error:.1e}, answers at most {below:.2f} deviations below the best", flush=True)
        load.fill_pool(llm)
        print(f"recorded steps with drafts off {check(llm, 1024):.1e}", flush=True)
        print(measure(llm, options))


if __name__ == "__main__":
    main()

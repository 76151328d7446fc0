"""What a step that verifies drafts takes beside one that decodes, and what a forced share of accepted drafts brings.

    python benchmarks/verify_steps.py [--model llama-3.1-8b] [--scheme nvfp4] [--requests 1,8,32] [--context 8K]
        [--drafts 3] [--accept 0.7]

Random weights, and a drafter that costs nothing and proposes random tokens; whether a draft is accepted is decided by a
coin, and everything else is the engine's own. `decode`: recorded steps of one token, launched before the last is read.
`verify`: steps of 1 + DRAFTS tokens in every step. `auto at 0`: drafts are never right, and their number is left to
Nibble. The gate is engine_gpu.py's. Times are medians of steps, host included.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import engine_load as load
import paged
from random_models import served
from report import markdown

import gpu
from nibble import LLM, SamplingParams
from nibble.engine import drafters, engine
from nibble.engine.drafters.base import DrafterInfo, DraftTask
from nibble.engine.request import Delta, Logprob
from nibble.engine.speculative import Speculation

EXACT, QUANTISED = 0.05, 0.35
"""As in engine_gpu.py."""
STEPS, WARMUP = 32, 8
MOST = 8 * (STEPS + WARMUP)
"""Tokens of an answer, which no run gets to."""


class Free:
    """Proposes random tokens, as many as there may be."""

    def __init__(self, vocab_size: int) -> None:
        self.dice, self.vocab_size = random.Random(0), vocab_size

    def propose(self, tasks: Sequence[DraftTask]) -> list[list[int]]:
        return [[self.dice.randrange(self.vocab_size) for _ in range(task.limit)] for task in tasks]


@contextmanager
def accepting(share: float) -> Iterator[None]:
    """Accept each draft with this probability, whatever was drawn."""
    dice = random.Random(1)

    def run(drafts: Sequence[int], sampled: Sequence[Logprob | None]) -> list[Logprob | None]:
        count = 0
        while count < len(drafts) and dice.random() < share:
            count += 1
        return [*(Logprob(token, 0.0) for token in drafts[:count]), sampled[count]]

    with mock.patch.object(engine, "accepted_run", run):
        yield


def speculation(llm: LLM, tokens: int | None) -> Speculation:
    """Drafts of so many tokens, or as many as are accepted."""
    vocab = llm.engine.vocab_size
    return Speculation("free", Free(vocab), tokens or 7, tokens is None, 256, vocab, llm.engine.overlap)


def steps(llm: LLM, requests: int, context: int) -> tuple[float, float]:
    """Median ms of a step over planted prompts, and tokens a second."""
    made = llm.engine
    made.scheduler.manager.clear()
    prompts = [load.random_prompt(context + 1, made.vocab_size, seed) for seed in range(requests)]
    load.plant(llm, prompts)
    pieces: list[Delta] = []
    params = SamplingParams(max_tokens=MOST, ignore_eos=True, temperature=0)
    tickets = [made.submit(prompt, params, pieces.append) for prompt in prompts]
    ends, counts = [], []
    for _ in range(STEPS + WARMUP):
        made.step()
        ends.append(time.perf_counter())
        counts.append(sum(len(piece.token_ids) for piece in pieces))
    made.abort([ticket for (ticket,) in tickets])
    spans = [b - a for a, b in zip(ends[WARMUP:], ends[WARMUP + 1 :], strict=False)]
    tokens = counts[-1] - counts[WARMUP]
    return statistics.median(spans) * 1e3, tokens / (ends[-1] - ends[WARMUP])


def measure(llm: LLM, options: argparse.Namespace) -> str:
    """Return the table."""
    context, rows = paged.tokens(options.context), []
    for requests in [int(n) for n in options.requests.split(",")]:
        llm.engine.speculation = None
        decode_ms, plain = steps(llm, requests, context)
        llm.engine.speculation = speculation(llm, options.drafts)
        with accepting(options.accept):
            verify_ms, forced = steps(llm, requests, context)
        llm.engine.speculation = speculation(llm, None)
        with accepting(0.0):
            _, never = steps(llm, requests, context)
        rows.append(
            (requests, f"{decode_ms:.3f}", f"{verify_ms:.3f}", f"{verify_ms / decode_ms:.2f} x",
             f"{forced / plain:.2f} x", f"{never / plain:.3f} x")
        )  # fmt: skip
        print(*rows[-1], flush=True)
    head = (
        "requests", "decode, ms", f"verify {1 + options.drafts}, ms", "ratio", f"tokens/s at {options.accept:g}",
        "auto at 0",
    )  # fmt: skip
    return markdown(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--scheme", default="nvfp4")
    parser.add_argument("--requests", default="1,8,32")
    parser.add_argument("--context", default="8K")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--accept", type=float, default=0.7)
    options = parser.parse_args()
    drafters.register(DrafterInfo("free", "random tokens", lambda: Free(2), max_tokens=7))
    most = max(int(n) for n in options.requests.split(","))
    # The drafter is named, so that the plan has a route for drafts and memory for them.
    with served(
        options.model, kv_format=options.scheme, device=gpu.device(), max_running=most, speculative="free",
        max_context=paged.tokens(options.context) + MOST + 16,
    ) as made:  # fmt: skip
        print(f"{gpu.machine()}: {options.scheme} cache; {made.llm.engine.startup.summary}")
        made.llm.engine.speculation = None
        error, below = load.gate(
            made.llm, made.prompt, made.expected_TV, EXACT if options.scheme == "bf16" else QUANTISED
        )
        print(f"logits off {error:.1e}, answers at most {below:.2f} deviations below the best", flush=True)
        load.fill_pool(made.llm)
        print(measure(made.llm, options))


if __name__ == "__main__":
    main()

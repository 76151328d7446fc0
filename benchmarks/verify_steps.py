"""What a step that verifies drafts takes beside one that decodes, and what a forced share of accepted drafts brings.

    python benchmarks/verify_steps.py [--model llama-3.1-8b] [--scheme nvfp4] [--requests 1,8,32,128] [--context 8K]
        [--drafts 3] [--accept 0.7] [--head] [--kernels]

Random weights, and a drafter that costs nothing, or with --head an EAGLE-3 head of the model's shape that really runs,
over a cache in the same scheme. Whether a draft is accepted is decided by a coin, and everything else is the engine's
own. So that a head of random weights drafts at all, it takes each of its drafts for as likely as --accept.

`decode`: recorded steps of one token, launched before the last is read. `verify`: steps of 1 + DRAFTS tokens in every
step; those of a head are launched before the last is read, too, and the device gets the coin's decisions. `device`:
their graphs alone, replayed one after the other; what is missing to the whole step is the host's, and the head's.
`host + launch`: from the tokens of a step on the host to the launch of the next, where that waits for them, and the
launch. `a step`: with a head without the time that this has the device. `auto`: the number of drafts is left to
Nibble. The gate is engine_gpu.py's, and logits of recorded steps with drafts against the same steps as they are
computed without a record. Times are medians of steps, host included. On a CPU nothing is recorded, and all else runs,
which checks the benchmark:

    python benchmarks/verify_steps.py --model tiny --requests 1 --context 64 --answer 300 --steps 12 --long 24 --head
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import engine_load as load
import paged
import step_kernels
import torch
from random_models import head_folder, served
from report import markdown
from torch import Tensor

import gpu
from nibble import LLM, SamplingParams
from nibble.drafts import MAX_DRAFTS
from nibble.engine import drafters, in_flight, step_tokens
from nibble.engine.draft_head import DraftHead
from nibble.engine.draft_steps import DraftGraphs
from nibble.engine.drafters.base import DrafterInfo, DraftTask
from nibble.engine.in_flight import InFlightStep
from nibble.engine.request import Batch, Delta
from nibble.engine.sampler import SampledTokens
from nibble.engine.speculative import Speculation
from nibble.garbage import freeze_gc
from nibble.kernels import step_inputs
from nibble.kernels.step_inputs import naive

EXACT, QUANTISED = 0.05, 0.35
"""As in engine_gpu.py."""
SAME = 0.05
"""Most by which logits of a step differ with and without a record, norm over norm: a record has rows beside those of
the step, and other kernels may multiply so many."""
STEPS, LONG, WARMUP, REPLAYS, ROWS = 32, 160, 8, 20, 24
MANY = 1024
"""Steps whose coins are thrown together."""
STEP_FLOORS = {1: 1.10, 8: 1.15, 32: 1.25}
"""Most times a decode step that a step with three drafts may take."""
FORCED_FLOORS, NEVER_FLOORS = {1: 1.8, 8: 1.6}, {1: 0.97, 8: 0.97, 32: 0.97, 128: 0.98}
"""Least times as many tokens a second at 0.7, and where no draft is right."""


class Free:
    """Proposes some tokens, as many as there may be."""

    def propose(self, tasks: Sequence[DraftTask]) -> list[list[int]]:
        return [[1] * task.limit for task in tasks]


class Coins:
    """How many drafts of each request count, whatever was drawn: the same on the device and on the host."""

    def __init__(self, share: float) -> None:
        self._dice, self._share = random.Random(1), share
        self._throws = dict[int, Iterator[tuple[list[int], Tensor]]]()
        """Of the next steps of so many requests, on the host and on the device."""
        self._thrown = deque[list[int]]()
        """Of steps that the device has decided about, and the host has not read."""
        self._step = iter(list[int]())

    def throw(self) -> int:
        count = 0
        while count < MAX_DRAFTS and self._dice.random() < self._share:
            count += 1
        return count

    def begin(self, step: InFlightStep) -> None:
        """The host reads a step."""
        self._step = iter(self._thrown.popleft() if step.has_drafts and self._thrown else [])

    def run(self, drafts: Sequence[int], sampled: list[int]) -> list[int]:
        """In place of accepted_run()."""
        thrown = next(self._step, None)
        count = min(self.throw() if thrown is None else thrown, len(drafts))
        is_draft = count < len(drafts) and sampled[count] == drafts[count]
        return [*drafts[:count], sampled[count] ^ 1 if is_draft else sampled[count]]

    def accept(
        self, rows_B: Tensor, ends_B: Tensor, new_B: Tensor, ids_BL: Tensor, tokens_S: Tensor, *others: Any
    ) -> None:
        """In place of step_inputs.accept(), which gets tokens that make it decide so."""
        thrown, counts_B = self._next(len(ids_BL), ids_BL.device)
        self._thrown.append(thrown)
        forced_S = force(counts_B, rows_B, new_B, ids_BL, tokens_S, *others)
        step_inputs.accept(rows_B, ends_B, new_B, ids_BL, forced_S, *others)

    def _next(self, requests: int, device: torch.device) -> tuple[list[int], Tensor]:
        """Throw for a step. Many are thrown together, so that none of them costs the device a copy."""
        steps = self._throws.get(requests, iter(()))
        while (step := next(steps, None)) is None:
            throws = [[self.throw() for _ in range(requests)] for _ in range(MANY)]
            steps = self._throws[requests] = zip(throws, torch.tensor(throws, device=device), strict=True)
        return step


def force(counts_B: Tensor, *inputs: Any) -> Tensor:
    """Return the sampled tokens [S], but that so many drafts of each request count, and no more.

    On a GPU by one launch: the step that is measured has the device meanwhile.
    """
    if not counts_B.is_cuda:
        return force_by_torch(counts_B, *inputs)
    import forced_drafts

    return forced_drafts.force(counts_B, *inputs)


def force_by_torch(
    counts_B: Tensor, rows_B: Tensor, new_B: Tensor, ids_BL: Tensor, tokens_S: Tensor, *others: Any
) -> Tensor:
    """Return the same by the book."""
    at_BL, drawn_BL, drafts_BL = naive.compared(rows_B, new_B, ids_BL, tokens_S, *others)
    counts_B1, places_L = counts_B[:, None], torch.arange(ids_BL.shape[1])
    other_BL = drawn_BL ^ (drawn_BL == drafts_BL).long()
    forced_BL = torch.where(places_L < counts_B1, drafts_BL, other_BL)
    is_forced_BL = (places_L <= counts_B1) & (places_L < new_B[:, None] - 1)
    # What is not forced goes behind the others.
    tokens = torch.cat((tokens_S, tokens_S[:1]))
    tokens.scatter_(0, torch.where(is_forced_BL, at_BL, len(tokens_S)).flatten(), forced_BL.flatten())
    return tokens[:-1]


@contextmanager
def accepting(share: float) -> Iterator[None]:
    """Accept each draft with this probability, whatever was drawn."""
    coins, read = Coins(share), InFlightStep.read

    def read_step(self: InFlightStep, *arguments: Any) -> Any:
        coins.begin(self)
        return read(self, *arguments)

    with (
        mock.patch.object(InFlightStep, "read", read_step),
        mock.patch.object(in_flight, "accepted_run", coins.run),
        mock.patch.object(step_tokens, "accept", coins.accept),
    ):
        yield


@contextmanager
def sure(chance: float) -> Iterator[None]:
    """Let a head take each of its drafts for as likely as this; all that drawing takes is done."""
    draw, read = DraftHead._draw, DraftGraphs.read

    def run(self: DraftHead, tracks: Sequence[Any], logits_SV: torch.Tensor) -> tuple[list[int], list[float]]:
        tokens, chances = draw(self, tracks, logits_SV)
        return tokens, [chance] * len(chances)

    def run_recorded(self: DraftGraphs, *arguments: Any) -> list[tuple[list[int], list[float]]]:
        return [(tokens, [chance] * len(chances)) for tokens, chances in read(self, *arguments)]

    with mock.patch.object(DraftHead, "_draw", run), mock.patch.object(DraftGraphs, "read", run_recorded):
        yield


def speculation(llm: LLM, tokens: int | None, drafter: Any) -> Speculation:
    """Drafts of so many tokens, or as many as pay."""
    head = drafter if isinstance(drafter, DraftHead) else None
    if head:
        head.adapts = tokens is None
    return Speculation(
        "drafts", drafter, tokens or 7, tokens is None, 256, llm.engine.vocab_size, llm.engine.overlap, head,
        needs_model=bool(head),
    )  # fmt: skip


@dataclass
class Run:
    """Some steps over planted prompts."""

    ms: float
    """Median of a step, host included."""
    tokens_s: float
    sizes: list[Any]
    """Of recorded steps that were replayed, in order."""
    host: str
    """What lies between two steps with drafts: from tokens on the host to the launch, and the launch itself."""

    @property
    def verified(self) -> int:
        return sum(isinstance(size, tuple) for size in self.sizes)


def run(
    llm: LLM, prompts: Sequence[list[int]], steps: int, drafts: Speculation | None, answer: int = 512
) -> Run:
    """Decode prompts: planted already, or computed before the first step that counts."""
    made, sizes = llm.engine, list[Any]()
    made.speculation, graphs = drafts, made.runner.graphs
    params = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0)
    ends, counts, known, between, launches = [], [], [0.0], list[float](), list[float]()
    count = [0]

    def receive(piece: Delta) -> None:
        # Pieces that stayed would be walked by garbage collections, with all tokens of all prompts.
        count[0] += len(piece.token_ids)

    tickets = [made.submit(prompt, params, receive) for prompt in prompts]
    read = SampledTokens.read_ids

    def note_read(self: SampledTokens) -> list[int]:
        tokens = read(self)
        known[0] = time.perf_counter()
        return tokens

    def note(size: Any) -> None:
        sizes.append(size)
        begun = time.perf_counter()
        replay(size)
        if isinstance(size, tuple):
            between.append(begun - known[0])
            launches.append(time.perf_counter() - begun)

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(SampledTokens, "read_ids", note_read))
        if graphs:
            replay = graphs.replay
            patches.enter_context(mock.patch.object(graphs, "replay", note))
        books = made.scheduler
        while made.busy and not all(one.is_decoding for one in (*books.waiting, *books.running)):
            made.step()
        for _ in range(steps + WARMUP):
            made.step()
            ends.append(time.perf_counter())
            counts.append(count[0])
    made.abort([ticket for (ticket,) in tickets])
    made.step()  # reads what is in flight
    spans = [b - a for a, b in zip(ends[WARMUP:], ends[WARMUP + 1 :], strict=False)]
    tokens = counts[-1] - counts[WARMUP]
    host = " + ".join(f"{statistics.median(part) * 1e3:.3f}" for part in (between, launches) if part)
    return Run(statistics.median(spans) * 1e3, tokens / (ends[-1] - ends[WARMUP]), sizes, host)


def device_ms(llm: LLM, size: Any) -> float:
    """The time of a recorded step alone, over the inputs of the step before."""
    return replays_ms(llm.engine.runner.graphs, [size])


def replays_ms(graphs: Any, sizes: Sequence[Any]) -> float:
    """The time of recorded steps, one after the other."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for number in range(REPLAYS + 1):
        if number == 1:
            start.record()
        for size in sizes:
            graphs.replay(size)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / REPLAYS


def compare_kernels(llm: LLM, decode: Any, verify: Any) -> None:
    """Print the kernels of both recorded steps, those of the step with drafts by their time."""
    replay = llm.engine.runner.graphs.replay
    plain, drafts = (step_kernels.kernel_times(lambda: replay(size)) for size in (decode, verify))  # noqa: B023
    rows = [
        (name[: step_kernels.NAME], *of_kernel(plain, name), *of_kernel(drafts, name))
        for name in sorted({*plain, *drafts}, key=lambda name: -drafts.get(name, (0, 0.0))[1])
    ]
    print(markdown(("kernel", f"in {decode}", "us", f"in {verify}", "us"), rows[:ROWS]), flush=True)


def of_kernel(times: dict[str, tuple[int, float]], name: str) -> tuple[int, str]:
    """How often it ran, and its microseconds."""
    count, spent = times.get(name, (0, 0.0))
    return count, f"{spent:.0f}"


def check(llm: LLM, context: int, drafter: Any) -> float:
    """How far logits of recorded steps with drafts are from those of the same steps without a record."""
    runner, worst = llm.engine.runner, [0.0]
    prompts, forward = planted(llm, 3, context), runner.forward

    def both(batch: Batch, **options: Any) -> torch.Tensor:
        logits = forward(batch, **options)
        if any(item.drafts for item in batch.scheduled):
            ours, graphs, states = logits.float().clone(), runner.graphs, runner.hidden_states
            runner.graphs = None
            theirs = forward(batch, **options).float()
            runner.graphs, runner.hidden_states = graphs, states
            worst.append(float((ours - theirs).norm() / theirs.norm()))
        return logits

    with mock.patch.object(runner, "forward", both), accepting(0.5):
        for drafts in (7, 3, 1):
            run(llm, prompts, 4, speculation(llm, drafts, drafter))
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


def measure(llm: LLM, options: argparse.Namespace, drafter: Any) -> str:
    """Return the table."""
    context, rows, drafts = paged.tokens(options.context), [], options.drafts
    for requests in [int(n) for n in options.requests.split(",")]:
        if not load.fits(llm, requests, context + options.answer):
            print(f"{requests} requests of {options.context} do not fit", flush=True)
            continue
        prompts = planted(llm, requests, context)

        def once(steps: int, tokens: int | None = None, *, plain: bool = False) -> Run:
            made = None if plain else speculation(llm, tokens, drafter)
            return run(llm, prompts, steps, made, options.answer)  # noqa: B023

        with accepting(options.accept), sure(options.accept):
            # First, so that a head has the prefix when its steps are timed.
            forced = once(options.steps, drafts)
            plain = once(options.long, plain=True)
            auto = once(options.long)
            of_head, parts = head_parts(once, drafts, drafter) if options.head else (0.0, "")
        with accepting(0.0), sure(options.accept):
            never = once(options.long)
        size = next((size for size in reversed(forced.sizes) if isinstance(size, tuple)), "")
        if options.kernels and size:
            compare_kernels(llm, plain.sizes[-1], size)
        of_decode = f" ({device_ms(llm, plain.sizes[-1]):.3f})" if plain.sizes else ""
        of_verify = f" ({device_ms(llm, size):.3f}; {forced.host}) {size}" if size else ""
        fits = 256 // requests > drafts
        rows.append(
            (requests, f"{plain.ms:.3f}{of_decode}", f"{forced.ms:.3f}{of_verify}{parts}",
             verdict((forced.ms - of_head) / plain.ms, STEP_FLOORS.get(requests) if fits else None, most=True),
             verdict(forced.tokens_s / plain.tokens_s, FORCED_FLOORS.get(requests)),
             f"{auto.tokens_s / plain.tokens_s:.2f} x, {auto.verified} of {options.long}",
             verdict(never.tokens_s / plain.tokens_s, NEVER_FLOORS.get(requests))
             + f", {never.verified} of {options.long}")
        )  # fmt: skip
        print(*rows[-1], flush=True)
    head = (
        "requests", "decode, ms (device)", f"{drafts} drafts, ms (device; host + launch), size", "a step",
        f"tokens/s at {options.accept:g}", f"auto at {options.accept:g}, steps with drafts",
        "auto at 0, steps with drafts",
    )  # fmt: skip
    return markdown(head, rows)


def head_parts(once: Callable[..., Run], drafts: int, drafter: Any) -> tuple[float, str]:
    """Return what the head takes of the device for a step, and that in words.

    `, of which the head 0.850 (0.350 + 2 x 0.210)`: to read the hidden states of a step and to draw drafts, and of that
    its recorded steps alone, the first one and those that follow.
    """
    sizes, graphs, observed, drawn = list[Any](), drafter.graphs, list[Any](), list[float]()
    if not graphs:
        return 0.0, ""
    replay, observe, note = graphs.replay, drafter.observe, drafter._note_seconds

    def timed(*arguments: Any) -> None:
        events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        events[0].record()
        observe(*arguments)
        events[1].record()
        observed.append(events)

    def noted(chain: Any) -> None:
        note(chain)
        drawn.append(chain.seconds * 1e3)

    with ExitStack() as patches:
        patches.enter_context(
            mock.patch.object(graphs, "replay", lambda size: (sizes.append(size), replay(size)))
        )
        patches.enter_context(mock.patch.object(drafter, "observe", timed))
        patches.enter_context(mock.patch.object(drafter, "_note_seconds", noted))
        once(STEPS, drafts)
    torch.cuda.synchronize()
    reading = statistics.median(start.elapsed_time(end) for start, end in observed)
    spent = reading + statistics.median(drawn)
    first = next(size for size in reversed(sizes) if isinstance(size, tuple))
    follow = [size for size in sizes if not isinstance(size, tuple)][-1:] * (drafts - 1)
    alone, both = replays_ms(graphs, [first]), replays_ms(graphs, [first, *follow])
    rest = f" + {len(follow)} x {(both - alone) / len(follow):.3f}" if follow else ""
    return spent, f", of which the head {spent:.3f} ({alone:.3f}{rest}) {first}"


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
    parser.add_argument("--head", action="store_true", help="an EAGLE-3 head of random weights drafts")
    parser.add_argument("--kernels", action="store_true", help="show the kernels of both recorded steps")
    parser.add_argument("--answer", type=int, default=512, help="tokens of an answer, which no run gets to")
    parser.add_argument("--steps", type=int, default=STEPS, help="with drafts")
    parser.add_argument(
        "--long", type=int, default=LONG, help="steps without drafts, and where Nibble decides"
    )
    options = parser.parse_args()
    drafters.register(DrafterInfo("free", "some tokens", Free, max_tokens=7))
    most, context = max(int(n) for n in options.requests.split(",")), paged.tokens(options.context)
    with ExitStack() as stack:
        # The drafter is named, so that the plan has a route for drafts and memory for them.
        name = "free"
        if options.head:
            folder = stack.enter_context(head_folder(options.model))
            name = f"eagle3:{folder},kv_format={options.scheme}"
        made = stack.enter_context(served(
            options.model, kv_format=options.scheme, device=gpu.device(), max_running=max(most, 3), speculative=name,
            max_context=context + options.answer + 16,
        ))  # fmt: skip
        llm, graphs = made.llm, made.llm.engine.runner.graphs
        assert llm.engine.speculation is not None
        drafter = llm.engine.speculation.drafter
        print(f"{gpu.machine()}: {options.scheme} cache; {llm.engine.startup.summary}")
        print(*llm.engine.startup.notes, *map(str, llm.plan.groups[0].routes), sep="\n")
        if gpu.device() != "cpu" and not (graphs and graphs.verify_sizes):
            raise SystemExit("steps with drafts are not recorded here: there is nothing to measure")
        llm.engine.speculation = None
        freeze_gc()  # as the server's engine does
        error, below = load.gate(
            llm, made.prompt, made.expected_TV, EXACT if options.scheme == "bf16" else QUANTISED
        )
        print(f"logits off {error:.1e}, answers at most {below:.2f} deviations below the best", flush=True)
        if graphs:
            print("recorded:", *graphs.verify_sizes, flush=True)
            load.fill_pool(llm)
            print(f"recorded steps with drafts off {check(llm, 1024, drafter):.1e}", flush=True)
        print(measure(llm, options, drafter))


if __name__ == "__main__":
    main()

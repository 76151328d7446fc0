"""How much of its reuse the prefix cache keeps with an exact window: conversations, crowds and preemptions.

    python benchmarks/prefix_replay.py [--window 64 --window 128] [--layers 32] [--pages 4096] [--report]

No GPU and no model: the scheduler and the books run a made-up trace, whose answers are known beforehand. What counts
are prompt tokens that need not be computed, with an exact window and without. Snapshots get a share of the pool's
bytes; what one exact page costs is given in pages (3.56: BF16 over NVFP4).

- `turns`: conversations of several turns over a few shared system prompts. Each next turn's prompt holds the turns
  before it as a chat template writes them: answers as they were generated, without their reasoning, or with another
  end of the generation prompt.
- `crowd`: requests that start together, with one new system prompt and different ends.
- `preempt`: the conversations, while every few steps a running request loses its pages.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from report import cpu, markdown, report_path

from nibble.cache.exact_window import ExactWindow
from nibble.cache.manager import CacheManager
from nibble.config import SamplingParams
from nibble.engine.request import Request
from nibble.engine.scheduler import Scheduler
from nibble.kernels import cdiv

VOCAB = 150_000
EXACT_COST = 3.56
"""Pages of NVFP4 that take the bytes of one in BF16."""
BUDGET = 0.05
"""Share of the pool's bytes that snapshots may take."""


@dataclass(frozen=True)
class Turn:
    """A prompt, the answer that the model gives to it, and when it comes after the turn before."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    pause: int
    """Steps between the end of the turn before and this one."""


@dataclass
class Trace:
    """Conversations, each a list of turns that follow one another."""

    conversations: list[list[Turn]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of all turns."""
        return sum(len(turn.prompt) for turns in self.conversations for turn in turns)


def conversations(seed: int = 0, count: int = 64, systems: int = 4) -> Trace:
    """Conversations of 4 to 8 turns over a few system prompts of 500 to 3,000 tokens.

    Args:
        seed: of all random choices.
        count: conversations.
        systems: system prompts.
    """
    dice = random.Random(seed)
    prompts = [_tokens(dice, 500, 3000) for _ in range(systems)]
    return Trace([_conversation(dice, dice.choice(prompts)) for _ in range(count)])


def crowd(seed: int = 0, count: int = 64, shared: int = 2000) -> Trace:
    """Requests that come at once, with one system prompt of `shared` tokens and different ends.

    Args:
        seed: of all random choices.
        count: requests.
        shared: tokens of the system prompt.
    """
    dice = random.Random(seed)
    system = _tokens(dice, shared, shared)
    return Trace([[Turn((*system, *_tokens(dice, 20, 200)), _tokens(dice, 20, 60), 0)] for _ in range(count)])


def _conversation(dice: random.Random, system: tuple[int, ...]) -> list[Turn]:
    turns, history, pause = list[Turn](), system, dice.randrange(400)
    user, assistant, end, think = ((VOCAB + i, VOCAB + 9, VOCAB + i) for i in range(4))
    style = dice.choice(["verbatim", "verbatim", "no reasoning", "other end"])
    for _ in range(dice.randint(4, 8)):
        history += (*user, *_tokens(dice, 20, 400), *end, *assistant)
        prompt = history + (think if style == "other end" else ())
        reasoning = () if style == "verbatim" else _tokens(dice, 100, 600)
        text = _tokens(dice, 50, 500)
        turns.append(Turn(prompt, (*reasoning, *text, *end), pause))
        # What the template makes of the answer, from the next turn on.
        history += (*text, *end)
        pause = dice.randrange(20, 400)
    return turns


def _tokens(dice: random.Random, least: int, most: int) -> tuple[int, ...]:
    return tuple(dice.choices(range(VOCAB), k=dice.randint(least, most)))


@dataclass(frozen=True)
class Pool:
    """What the books are given."""

    pages: int
    page_size: int = 64
    window: int = 0
    num_layers: int = 32
    max_running: int = 32
    token_budget: int = 8192
    preempt_every: int = 0
    """Take the pages of the last running request every so many steps; 0: never."""

    @property
    def num_snapshot_pages(self) -> int:
        """Exact pages that only the prefix cache may hold."""
        return int(self.pages * BUDGET / EXACT_COST)

    def manager(self) -> CacheManager:
        """Return the books, with snapshots in their share of the pool."""
        if not self.window:
            return CacheManager(self.pages, self.page_size)
        copies, idle = cdiv(self.window, self.page_size), self.num_snapshot_pages
        # A running request holds its window, the page it writes, and one to grow into; prompts hold more for a step.
        num_pages = self.max_running * (copies + 2) + 3 * (copies + 1) + idle
        return CacheManager(
            self.pages, self.page_size, window=ExactWindow(self.window, self.num_layers, num_pages, idle)
        )


@dataclass(frozen=True)
class Result:
    """What became of a trace."""

    pool: Pool
    reused: int
    """Prompt tokens that were not computed, those of preempted requests included."""
    computed: int
    """Prompt tokens that were, replays included."""
    replayed: int
    hits: int
    misses: int
    evicted: int
    preemptions: int


def replay(trace: Trace, pool: Pool) -> Result:
    """Run a trace through scheduler and books, and return the counts."""
    manager = pool.manager()
    scheduler = Scheduler(
        manager, max_running=pool.max_running, token_budget=pool.token_budget, max_context=1 << 20
    )
    # (step, conversation, turn): what comes when.
    due = sorted((turns[0].pause, i, 0) for i, turns in enumerate(trace.conversations))
    running: dict[str, tuple[int, int]] = {}
    step = 0
    while due or running:
        if not running and due:
            step = max(step, due[0][0])
        while due and due[0][0] <= step:
            _, i, n = due.pop(0)
            scheduler.add(_request(trace, i, n))
            running[f"{i}-{n}"] = i, n
        if pool.preempt_every and step % pool.preempt_every == 0 and len(scheduler.running) > 1:
            scheduler._preempt(scheduler.running[-1])
        batch = scheduler.schedule()
        assert batch, "requests wait, and nothing runs"
        tokens = {
            item.request: _sample(trace, running, item.request)
            for item in batch.scheduled
            if item.samples_token
        }
        for request in scheduler.commit(batch, tokens):
            i, n = running.pop(request.id)
            if n + 1 < len(trace.conversations[i]):
                due.append((step + trace.conversations[i][n + 1].pause, i, n + 1))
                due.sort()
        step += 1
    scheduler.check_integrity()
    metrics = scheduler.metrics
    window = metrics.cache.window
    counts = (0, 0, 0, 0)
    if window:
        counts = window.replayed_tokens, window.snapshot_hits, window.snapshot_misses, window.evicted
    return Result(pool, metrics.cache.hit_tokens, metrics.prompt_tokens, *counts, metrics.preemptions)


def _request(trace: Trace, i: int, n: int) -> Request:
    turn = trace.conversations[i][n]
    return Request(f"{i}-{n}", turn.prompt, SamplingParams(max_tokens=len(turn.answer)))


def _sample(trace: Trace, running: dict[str, tuple[int, int]], request: Request) -> int:
    i, n = running[request.id]
    return trace.conversations[i][n].answer[request.num_output_tokens]


HEAD = (
    "trace", "pages", "window", "exact pages for snapshots", "reused without", "reused", "share", "replayed",
    "snapshot hits", "misses", "evicted", "preemptions",
)  # fmt: skip


def compare(name: str, trace: Trace, pool: Pool, windows: Sequence[int]) -> Iterator[tuple[object, ...]]:
    """Yield a row for each window: what is reused of what is without one.

    Args:
        name: of the trace.
        trace: what is run.
        pool: without a window.
        windows: tokens of each.
    """
    base = replay(trace, pool)
    for tokens in windows:
        result = replay(trace, replace(pool, window=tokens))
        yield (
            name, pool.pages, tokens, result.pool.num_snapshot_pages, base.reused, result.reused,
            f"{result.reused / base.reused:.3f}", result.replayed, result.hits, result.misses, result.evicted,
            result.preemptions,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--window", type=int, action="append", help="tokens; 64 and 128 unless given")
    parser.add_argument("--pages", type=int, action="append", help="of the pool; several sizes unless given")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", action="store_true", help="also write a report to benchmarks/reports/")
    options = parser.parse_args()
    turns, together = conversations(options.seed), crowd(options.seed)
    rows = []
    for pages in options.pages or (4096, 8192, 16384, 32768):
        pool = Pool(pages, num_layers=options.layers)
        often = replace(pool, preempt_every=7)
        for name, trace, one in (
            ("turns", turns, pool),
            ("crowd", together, pool),
            ("preempt", turns, often),
        ):
            for row in compare(name, trace, one, options.window or (64, 128)):
                rows.append(row)
                print(*row, sep="\t", flush=True)
    if options.report:
        path = report_path("prefix_replay")
        path.write_text(report(turns, rows, options), encoding="utf-8")
        print(f"written to {path}")


def report(turns: Trace, rows: Sequence[Sequence[object]], options: argparse.Namespace) -> str:
    facts = [
        "# Reuse of the prefix cache with an exact window\n",
        f"- Processor: {cpu()}, Python {platform.python_version()}; no model: the scheduler and the books alone",
        f"- Date: {datetime.date.today()}",
        f"- Command: `{' '.join(['python', 'benchmarks/prefix_replay.py', *sys.argv[1:]])}`",
        f"- Trace: {len(turns.conversations)} conversations, {sum(map(len, turns.conversations))} turns, "
        f"{turns.num_tokens} prompt tokens; {options.layers} layers, pages of 64 tokens",
        f"- Snapshots: {BUDGET:.0%} of the pool's bytes, an exact page takes those of {EXACT_COST} pages\n",
        "`reused`: prompt tokens that were not computed, those that preempted requests find again included; "
        "`replayed`: computed again for their exact copies.\n",
    ]
    return "\n".join([*facts, markdown(HEAD, rows), ""])


if __name__ == "__main__":
    main()

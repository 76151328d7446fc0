"""How long the scheduler takes for one step of 256 requests that decode at 128K tokens of context each.

    python benchmarks/scheduler_step.py [--requests 256] [--context 131072] [--steps 512] [--report]

No GPU and no torch: what is measured is the bookkeeping that a decode step waits for. A step of a model takes
5 ms and more, so the target is less than 2 ms. Prompts either end at different places in their pages, or all
at the same one, so that every 16th (64th) step fills 256 pages at once.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import platform
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from time import perf_counter

from report import cpu, report_path

from nibble.cache.manager import CacheManager
from nibble.config import SamplingParams
from nibble.engine.request import Batch, Request
from nibble.engine.scheduler import Scheduler

TARGET_MS = 2.0
WARMUP = 8  # the first answer token makes every token list grow at once, which no real engine sees

HEAD = (
    "| page | pages fill | schedule p50 | p99 | commit p50 | p99 | both p50 | p99 | max | < 2 ms | start s |",
    "|---:|---|---:|---:|---:|---:|---:|---:|---:|---|---:|",
)


@dataclass(frozen=True)
class Result:
    """Times in ms, one per step; `start_s` is what admitting and storing all prompts took."""

    page_size: int
    aligned: bool
    start_s: float
    schedule: list[float]
    commit: list[float]

    def row(self) -> str:
        both = [a + b for a, b in zip(self.schedule, self.commit, strict=True)]
        times = (self.schedule, self.commit, both)
        cells = [f"{at(values, share):.3f}" for values in times for share in (0.5, 0.99)]
        ends = "at once" if self.aligned else "apart"
        verdict = "yes" if at(both, 0.99) < TARGET_MS else "NO"
        cells = [str(self.page_size), ends, *cells, f"{max(both):.3f}", verdict, f"{self.start_s:.1f}"]
        return f"| {' | '.join(cells)} |"


def at(values: list[float], share: float) -> float:
    """The value below which a share of `values` lies."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def requests(count: int, context: int, page_size: int, aligned: bool) -> Iterator[Request]:
    """Prompts that share nothing, so that every page has an edge of its own in the prefix tree."""
    random.seed(0)
    base = [random.randrange(150_000) for _ in range(context)]
    for i in range(count):
        prompt = [i, *base[1 : context - (0 if aligned else i % page_size)]]
        yield Request(str(i), prompt, SamplingParams(max_tokens=1 << 20, temperature=0))


def step(scheduler: Scheduler) -> tuple[Batch, float, float]:
    """One step with made-up tokens; the times of schedule and commit in ms."""
    began = perf_counter()
    batch = scheduler.schedule()
    scheduled = perf_counter()
    assert batch is not None
    tokens = {work.request: len(work.request.token_ids) for work in batch.scheduled if work.samples_token}
    sampled = perf_counter()
    scheduler.commit(batch, tokens)
    return batch, (scheduled - began) * 1e3, (perf_counter() - sampled) * 1e3


def measure(count: int, context: int, page_size: int, steps: int, aligned: bool) -> Result:
    pages = count * ((context + steps + WARMUP) // page_size + 2)
    manager = CacheManager(pages, page_size)
    scheduler = Scheduler(manager, max_running=count, token_budget=count * context, max_context=2 * context)
    for request in requests(count, context, page_size, aligned):
        scheduler.add(request)
    began = perf_counter()
    step(scheduler)  # all prompts in one step: chunks would only take longer to set up
    start = perf_counter() - began
    scheduler.token_budget = 2 * count
    times = []
    for _ in range(WARMUP + steps):
        batch, *both = step(scheduler)
        tokens = sum(item.num_tokens for item in batch.scheduled)
        assert len(batch.scheduled) == count == tokens, "not every request decodes in every step"
        times.append(both)
    manager.check_integrity()
    gc.collect()
    return Result(page_size, aligned, start, [a for a, _ in times[WARMUP:]], [b for _, b in times[WARMUP:]])


def report(lines: list[str], options: argparse.Namespace) -> str:
    command = " ".join(["python", "benchmarks/scheduler_step.py", *sys.argv[1:]])
    facts = [
        "# Scheduler: one step of bookkeeping\n",
        f"- Processor: {cpu()}, one thread, Python {platform.python_version()}",
        f"- Date: {datetime.date.today()}",
        f"- Command: `{command}`",
        f"- Load: {options.requests} requests that decode at {options.context} tokens each, prefix cache on, "
        f"{options.steps} steps",
        "- Gate: every request decodes in every step, and the books balance at the end\n",
        "Milliseconds per step, the garbage collector on; `< 2 ms` is of the 99th percentile of both. "
        "`pages fill`: whether all requests fill their pages in the same steps. `start`: to admit all "
        "prompts, look each up in the prefix cache and enter all of its pages.\n",
    ]
    return "\n".join([*facts, *lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--context", type=int, default=131072)
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--report", action="store_true", help="also write a report to benchmarks/reports/")
    options = parser.parse_args()
    lines = [*HEAD]
    print(*HEAD, sep="\n")
    for page_size, aligned in product((16, 64), (False, True)):
        lines.append(measure(options.requests, options.context, page_size, options.steps, aligned).row())
        print(lines[-1], flush=True)
    if options.report:
        path = report_path("scheduler")
        path.write_text(report(lines, options), encoding="utf-8")
        print(f"written to {path}")


if __name__ == "__main__":
    main()

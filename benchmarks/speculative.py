"""Tokens per second of one request with drafts and without, on tasks that look-up is for and on one that it is not.

    python benchmarks/speculative.py [--model demo] [--speculative lookup] [--kv-format nvfp4] [--clock cpu] [--report]

`edit` asks for a file once more with one name changed: the prompt has the file, and the first lines of the new version,
as an editor that applies a change has them. `continue` goes on with the beginning of text that the model has not seen,
`heldout` with several pieces of it, one after the other; at temperature 1.5 a model says hardly anything twice, so that
it shows what drafts cost where none is right. Runs with drafts and without alternate in one process, and for each
prompt the median of --repeats counts; prefixes are not cached. `--clock cpu` counts seconds of the processor, which on
a CPU with --threads 1 are those of the clock where nothing else runs. Gate before any timing is reported: answers with
drafts are those without, token by token.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from report import command_line, markdown, write_report

from nibble import LLM, SamplingParams
from nibble.models.checkpoint import download

FUNCTION = '''\
class Inventory:
    """Items in stock, by name."""

    def __init__(self, items=None):
        self.items = dict(items or {})

    def add(self, name, count=1):
        """Add items, and return how many there are."""
        if count < 0:
            raise ValueError("count must not be negative")
        self.items[name] = self.items.get(name, 0) + count
        return self.items[name]

    def remove(self, name, count=1):
        """Remove items, and return how many are left."""
        if self.items.get(name, 0) < count:
            raise KeyError(name)
        self.items[name] -= count
        if self.items[name] == 0:
            del self.items[name]
        return self.items.get(name, 0)

    def total(self):
        """Return the number of all items."""
        return sum(self.items.values())
'''
OLD, NEW = "Inventory", "Warehouse"
GIVEN_LINES = 6
"""Lines of the new version that the prompt has."""


def prompts(llm: LLM, folder: Path, pieces: int) -> dict[str, list[list[int]]]:
    """The tasks' prompts."""
    changed = FUNCTION.replace(OLD, NEW).splitlines(keepends=True)
    edit = f"# before\n{FUNCTION}\n\n# after: {OLD} is called {NEW}\n{''.join(changed[:GIVEN_LINES])}"
    heldout = (folder / "heldout.txt").read_text(encoding="utf-8")
    step = len(heldout) // max(pieces, 1)
    starts = [step // 2 + step * piece for piece in range(pieces)]
    return {
        "edit": [llm.tokenizer.encode(edit)],
        "continue": [llm.tokenizer.encode(heldout[:2000])],
        "heldout": [llm.tokenizer.encode(heldout[start : start + 2000]) for start in starts],
    }


def seconds(
    llm: LLM, prompt: Sequence[int], params: SamplingParams, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, int, tuple[int, ...]]:
    """The time of an answer after its first token, the steps that it took, and its tokens."""
    llm.engine.scheduler.manager.clear()
    marks: list[float] = []
    tokens: list[int] = []
    llm.engine.submit(prompt, params, lambda delta: (marks.append(clock()), tokens.extend(delta.token_ids)))
    steps = -1
    while llm.engine.busy:
        llm.engine.step()
        steps += bool(marks)
    return marks[-1] - marks[0], steps, tuple(tokens)


def measure(
    engines: Mapping[str, LLM],
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    repeats: int,
    clock: Callable[[], float],
) -> dict[str, tuple[float, float]]:
    """Tokens per second, and per step, of each engine; raises SystemExit where answers differ."""
    spent, steps, count = dict.fromkeys(engines, 0.0), dict.fromkeys(engines, 0.0), 0
    for prompt in prompts:
        times: dict[str, list[float]] = {name: [] for name in engines}
        answers: dict[str, tuple[int, ...]] = {}
        for _ in range(repeats + 1):
            for name, llm in engines.items():
                taken, number, answers[name] = seconds(llm, prompt, params, clock)
                times[name].append(taken)
                steps[name] += number / (repeats + 1)
        if len(set(answers.values())) > 1:
            raise SystemExit("answers with drafts are not those without: no timing is worth anything")
        count += len(next(iter(answers.values()))) - 1
        for name, list_ in times.items():
            spent[name] += statistics.median(list_[1:])
    return {name: (count / spent[name], count / steps[name]) for name in engines}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--speculative", default="lookup")
    parser.add_argument("--kv-format", default="nvfp4")
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tasks", nargs="+", default=["edit", "continue", "heldout"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.5])
    parser.add_argument("--pieces", type=int, default=4, help="of held-out text")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--report", action="store_true", help="write a dated report to benchmarks/reports")
    given = parser.parse_args()
    options = {
        "kv_format": given.kv_format,
        "max_running": 4,
        "kv_memory": "256MiB",
        "threads": given.threads,
    }
    clock = time.process_time if given.clock == "cpu" else time.perf_counter
    engines = {
        "without": LLM(given.model, **options),
        "with": LLM(given.model, speculative=given.speculative, **options),
    }
    rows = []
    of_tasks = prompts(engines["with"], Path(download(given.model)), given.pieces)
    for task in given.tasks:
        for temperature in given.temperatures:
            params = SamplingParams(max_tokens=given.tokens, temperature=temperature, seed=1, ignore_eos=True)
            rates = measure(engines, of_tasks[task], params, given.repeats, clock)
            (plain, _), (drafted, per_step) = rates["without"], rates["with"]
            figures = (f"{plain:.0f}", f"{drafted:.0f}", f"{drafted / plain:.2f} x", f"{per_step:.2f}")
            rows.append((task, f"{temperature:g}", *figures))
            print(*rows[-1], flush=True)
    speculation = engines["with"].engine.speculation
    assert speculation is not None
    head = ("task", "temperature", "tokens/s without", "tokens/s with", "factor", "tokens a step")
    text = f"{markdown(head, rows)}\n\n{speculation.summary}, all runs together.\n"
    print(text)
    if given.report:
        print(write_report("speculative", text, command_line()))


if __name__ == "__main__":
    main()

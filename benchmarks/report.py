"""What the benchmarks share: tables, aims, the machine's name, and dated reports in benchmarks/reports."""

from __future__ import annotations

import datetime
import json
import platform
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nibble.hardware import processor as cpu

REPORTS = Path(__file__).parent / "reports"


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


@dataclass(frozen=True)
class Aim:
    """One line of what is asked for. value: what was measured, None where something it needs was not.

    least: whether `floor` and `aim` are to be reached (a speed-up) or not to be passed (a cost).
    """

    name: str
    what: str
    floor: float
    aim: float
    value: float | None
    least: bool = True

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        sign = 1 if self.least else -1
        if sign * self.value >= sign * self.aim:
            return "aim"
        return "floor" if sign * self.value >= sign * self.floor else "MISSED"

    def row(self) -> tuple[str, ...]:
        bound = "at least" if self.least else "at most"
        value = "-" if self.value is None else f"{self.value:.3f}"
        return self.name, self.what, f"{bound} {self.floor:g}", f"{self.aim:g}", value, self.verdict


def aims_table(aims: Iterable[Aim]) -> str:
    return markdown(("", "what", "floor", "aim", "measured", "holds"), [aim.row() for aim in aims])


def ratio(above: float | None, below: float | None) -> float | None:
    """above / below; None where either was not measured."""
    return None if above is None or below is None else above / below


def worst(values: Iterable[float | None], *, least: bool = True) -> float | None:
    """The value that decides whether all of them hold; None where one was not measured."""
    known = list(values)
    if not known or None in known:
        return None
    return (min if least else max)(value for value in known if value is not None)


def report_path(what: str, machine: str | None = None, folder: Path = REPORTS) -> Path:
    """<folder>/<what>_<machine>_<date>.md; machine: this one's processor, if None."""
    name = re.sub(r"[^a-z0-9]+", "-", (machine or cpu()).lower()).strip("-")
    path = folder / f"{what}_{name}_{datetime.date.today()}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def write_report(
    what: str,
    body: str,
    command: str,
    machine: str | None = None,
    folder: Path = REPORTS,
    facts: Sequence[str] = (),
) -> Path:
    """Writes a report, headed by machine, date and command. facts: more about the machine, versions say."""
    path = report_path(what, machine, folder)
    about = ", ".join(
        (machine or cpu(), *facts, f"Python {platform.python_version()}", str(datetime.date.today()))
    )
    path.write_text(f"# {what.replace('_', ' ')}\n\n{about}\n\n    {command}\n\n{body}", encoding="utf-8")
    return path


def write_figures(what: str, folder: Path, **figures: Any) -> Path:
    """All figures as JSON beside a report."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{what}.json"
    path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return path


def command_line() -> str:
    """The command that runs this benchmark; where its results went is left out."""
    words = sys.argv[1:]
    if "--out" in words:
        at = words.index("--out")
        del words[at : at + 2]
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])

"""What the benchmarks share: tables, the machine's name, and dated reports in benchmarks/reports."""

from __future__ import annotations

import datetime
import platform
import re
from collections.abc import Iterable, Sequence
from pathlib import Path


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def cpu() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def report_path(what: str) -> Path:
    """benchmarks/reports/<what>_<processor>_<date>.md"""
    name = re.sub(r"[^a-z0-9]+", "-", cpu().lower()).strip("-")
    path = Path(__file__).parent / "reports" / f"{what}_{name}_{datetime.date.today()}.md"
    path.parent.mkdir(exist_ok=True)
    return path


def write_report(what: str, body: str, command: str) -> Path:
    """Writes a report, headed by machine, date and command."""
    path = report_path(what)
    facts = f"{cpu()}, Python {platform.python_version()}, {datetime.date.today()}"
    path.write_text(f"# {what.replace('_', ' ')}\n\n{facts}\n\n    {command}\n\n{body}", encoding="utf-8")
    return path

"""What every backend can do with the cache of one plan, cell by cell, and what stands behind it.

A cell is a backend in one phase of one layer group: verified by the conformance tests on such a GPU, declared in its
rows, possible over staged pages, or refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby
from typing import Any

from nibble.attention.planner import evidence, needs
from nibble.attention.planner.evidence import LedgerEntry
from nibble.attention.planner.explain import Table
from nibble.attention.planner.options import PlanRequest
from nibble.attention.planner.plan import GroupPlan, Plan
from nibble.attention.planner.support import BackendInfo, Need, Phase, format_values

DECISIVE = {"kind": "for", "arch": "on", "phase": "for"}
"""What no row has is reason enough, in this order: `only for mla`, `only on SM90`, `only for decode`."""


class Status(StrEnum):
    """What a backend can do."""

    VERIFIED = "verified"  # it conformed on a GPU of this compute capability
    DECLARED = "declared"  # its rows say so
    STAGED = "staged"  # over pages that are dequantised first
    ON_REQUEST = "asked"  # the same, but only with --allow-staging
    REFUSED = "-"


@dataclass(frozen=True, slots=True)
class Cell:
    """A backend in one phase of one layer group."""

    group: GroupPlan
    need: Need
    """What is needed of it, with the phase."""
    backend: str
    status: Status
    planned: bool = False
    """The plan has it."""
    evidence: LedgerEntry | None = None
    """Of what is verified."""
    reasons: tuple[str, ...] = ()
    """Of a refusal, or why pages must be staged."""


def cells(request: PlanRequest, plan: Plan) -> Iterator[Cell]:
    """Yield every backend of `request` in every phase of every group of its plan."""
    ledger_entries = {entry.key: entry for entry in evidence.read_ledger(evidence.shipped_ledger())}
    for group, part in zip(plan.groups, needs.scheme_groups(request.spec, request.model_spec), strict=True):
        for info in request.backends.values():
            for phase in Phase:
                need = part.need(phase, request.hardware, plan.dtype, plan.page_size, plan.layout.packing)
                planned = any((route.phase, route.backend) == (phase, info.name) for route in group.routes)
                entry = ledger_entries.get((info.name, str(phase), need.kind, need.format, need.arch))
                yield Cell(group, need, info.name, *_judge(request, info, need, entry, planned))


def _judge(
    request: PlanRequest, info: BackendInfo, need: Need, entry: LedgerEntry | None, planned: bool
) -> tuple[Status, bool, LedgerEntry | None, tuple[str, ...]]:
    """Return a cell's status, whether it is planned, its evidence and its reasons."""
    if info.serves(need):
        return (Status.VERIFIED if entry else Status.DECLARED), planned, entry, ()
    staged, reasons = request.staged(need), _reasons(info, need)
    if staged and request.could_stage and info.serves(staged):
        return (Status.STAGED if request.may_stage(need.phase) else Status.ON_REQUEST), planned, None, reasons
    return Status.REFUSED, False, None, reasons


def _reasons(info: BackendInfo, need: Need) -> tuple[str, ...]:
    """Return why no row serves `need`: the first thing that none of them has, else what the nearest lacks."""
    rows = info.support
    for name, word in DECISIVE.items():
        # What no row has at all says more than the nearest row, which may miss it and more.
        matching = tuple(row for row in rows if name not in row.misses(need))
        if not matching:
            allowed = frozenset().union(*(getattr(row, name) for row in rows))
            return (f"only {word} {format_values(name, allowed)}",)
        rows = matching
    return replace(info, support=rows).nearest(need)


def as_dicts(cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """Return the cells, ready for JSON."""
    return [
        {
            "group": cell.group.group.name,
            "scheme": cell.group.scheme,
            "phase": str(cell.need.phase),
            "backend": cell.backend,
            "status": "refused" if cell.status is Status.REFUSED else str(cell.status),
            "chosen": cell.planned,
            "verified": _evidence(cell.evidence) if cell.evidence else None,
            "reasons": list(cell.reasons),
        }
        for cell in cells
    ]


def _evidence(entry: LedgerEntry) -> dict[str, Any]:
    return {"gpu": entry.gpu, "date": entry.date, "versions": dict(entry.versions)}


def as_lines(cells: Iterable[Cell], request: PlanRequest) -> Iterator[str]:
    """Yield a table for each group: backends down, phases across; then what is behind it, and why cells are refused."""
    for group, group_cells in groupby(cells, key=lambda cell: cell.group):
        entries = tuple(group_cells)
        yield ""
        yield _headline(group, entries[0].need)
        yield from _table(entries)
        yield from _evidences(entries)
        yield from _refusals(entries)
    yield from _absent(request)


def _headline(group: GroupPlan, need: Need) -> str:
    where = f"{group.group.name}: layers {needs.format_layers(group.layers)} in {group.scheme}"
    return f"{where} ({need.kind}, packing {need.packing}), {str(need).partition(', ')[2]}"


def _table(entries: tuple[Cell, ...]) -> Iterator[str]:
    rows = []
    for name, cells in groupby(entries, key=lambda cell: cell.backend):
        marks = [f"{cell.status}{'*' if cell.planned else ''}" for cell in cells]
        # Backends that are refused in all phases stand below, with their reasons.
        if set(marks) != {Status.REFUSED}:
            rows.append((name, *marks))
    yield from Table(("", *Phase), tuple(rows)).as_text()
    yield "  * chosen; staged: pages are dequantised first; asked: so too, only with --allow-staging"


def _evidences(entries: tuple[Cell, ...]) -> Iterator[str]:
    behind: dict[str, dict[str, None]] = {}
    for cell in entries:
        if cell.evidence:
            behind.setdefault(str(cell.evidence), {})[cell.backend] = None
    for text, names in behind.items():
        yield f"  verified on {text}: {', '.join(names)}"


def _refusals(entries: tuple[Cell, ...]) -> Iterator[str]:
    """Yield reasons by backend; phases that share them share a line, and are named where they are not all."""
    lines: dict[tuple[str, str], list[str]] = {}
    for cell in entries:
        if cell.reasons:
            lines.setdefault((cell.backend, "; ".join(cell.reasons)), []).append(str(cell.need.phase))
    if lines:
        yield "  refused, or not read as it is stored:"
    for (name, why), phases in lines.items():
        where = "" if len(phases) == len(Phase) else f" ({', '.join(phases)})"
        yield f"    {name}{where}: {why}"


def _absent(request: PlanRequest) -> Iterator[str]:
    """Yield what cannot run here."""
    names = [name for name, info in request.backends.items() if not info.runnable]
    missing_by_name = {name: missing for name in names if (missing := request.backends[name].missing)}
    without = [name for name in names if name not in missing_by_name]
    if names:
        yield ""
    yield from (f"{name} cannot run here: it needs {missing}" for name, missing in missing_by_name.items())
    if without:
        yield f"declared only, this version cannot run them: {', '.join(without)}"

"""Why: the reasons of a refusal, and the notes of a plan on all that was left to `auto`.

Must not decide anything; resolve.py does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from nibble.attention.planner import price
from nibble.attention.planner.needs import SchemeGroup
from nibble.attention.planner.options import ROUTED, Option, Options, PlanRequest
from nibble.attention.planner.plan import GroupPlan, Route
from nibble.attention.planner.support import BackendInfo, Need, Phase, format_values
from nibble.config import parse_hisparse
from nibble.errors import ConfigError, Unsupported


class UnservedError(ConfigError):
    """There is no plan. explain: makes the refusal, with its reasons; the search for a remedy needs none."""

    def __init__(self, explain: Callable[[], Unsupported]) -> None:
        super().__init__("there is no plan")
        self.explain = explain


def refusal(request: PlanRequest, part: SchemeGroup, phase: Phase) -> Unsupported:
    """Nobody serves `part` in `phase`: the nearest row's reasons of each backend that was considered."""
    need = request.need(part, phase)
    considered = request.considered(phase)
    refusals = {name: tuple(_reasons(request, info, need, part)) for name, info in considered.items()}
    if request.config.backend_for(phase.decodes) == "auto":
        others = (info for name, info in request.backends.items() if name not in considered)
        would_serve = {
            info.name: (f"would serve it, but {_absent(info)}",) for info in others if info.serves(need)
        }
        refusals |= would_serve
    return Unsupported(str(need), refusals)


def _absent(info: BackendInfo) -> str:
    """Why a backend that is known cannot run."""
    return f"needs {info.missing}" if info.missing else "this version has no adapter for it"


def _reasons(request: PlanRequest, info: BackendInfo, need: Need, part: SchemeGroup) -> Iterator[str]:
    native, staged = info.nearest(need), request.staged(need)
    yield from native
    if staged is None:
        return
    rest = tuple(reason for reason in info.nearest(staged) if reason not in native)
    if request.may_stage(need.phase):
        yield from (f"staged to {staged.format}: {reason}" for reason in rest)
    elif request.could_stage and info.serves(staged):
        cost = price.of_layer(part.group, part.stored_layer(0), staged.format, request.model_spec.max_context)
        moved = f"moving {cost.factor:.1f} x the bytes in each step"
        yield f"it could read pages staged to {staged.format}, with --allow-staging, {moved}"


def no_common_storage(request: PlanRequest, options: Options) -> Unsupported:
    """Each ask is served by somebody, but not all on one page size and packing."""
    asks = [choice for (_, phase), choice in options.items() if phase in ROUTED]
    divided = [
        name
        for name, field in (("page size", "pages"), ("packing", "packings"))
        if not _common([_allowed(choice, field) for choice in asks])
    ]
    page = f"page {request.config.page_size}" if request.config.page_size else "one page size"
    why = (
        f"no {' and no '.join(divided)} in common" if divided else "no page size and packing that go together"
    )
    return Unsupported(
        f"all phases over {page} and one packing on {request.hardware}: {why}", dict(_storages(options))
    )


def _allowed(choice: Iterable[Option], field: str) -> frozenset[Any] | None:
    """What any of the options reads; None for all."""
    values = [getattr(option, field) for option in choice]
    return None if None in values else frozenset().union(*values)


def _common(allowed: Iterable[frozenset[Any] | None]) -> bool:
    """Whether one value is in all of the sets."""
    bound = [values for values in allowed if values is not None]
    return not bound or bool(frozenset.intersection(*bound))


def _storages(options: Options) -> Iterator[tuple[str, tuple[str, ...]]]:
    """`backend (its phases)`, and the page sizes and packings that it reads there."""
    phases: dict[tuple[str, tuple[str, ...]], dict[str, None]] = {}
    for (_, phase), choice in options.items():
        for name in dict.fromkeys(option.backend.name for option in choice if phase in ROUTED):
            mine = [option for option in choice if option.backend.name == name]
            wants = (*_wants("page", _allowed(mine, "pages")), *_wants("packing", _allowed(mine, "packings")))
            phases.setdefault((name, wants or ("any page and packing",)), {})[str(phase)] = None
    yield from ((f"{name} ({', '.join(found)})", wants) for (name, wants), found in phases.items())


def _wants(name: str, allowed: frozenset[Any] | None) -> Iterator[str]:
    if allowed is not None:
        yield f"{name} must be in {{{', '.join(map(str, sorted(allowed)))}}}"


def notes(request: PlanRequest, groups: tuple[GroupPlan, ...], page: int, packing: str) -> Iterator[str]:
    """One line for each thing that was left to `auto`, that is staged, or that cannot run."""
    if request.config.dtype == "auto":
        why = "exact, and fastest on a CPU" if request.hardware.is_cpu else "the usual one on a GPU"
        yield f"dtype {request.dtype}: {why}"
    if request.config.page_size is None:
        small, usual = "small pages share prefixes finely", "what most kernels read in one piece"
        free = f"no route asks for another; {small if request.hardware.is_cpu else usual}"
        yield f"page size {page}: {_bound(groups, 'page') or free}"
    yield f"packing {packing}: {_bound(groups, 'packing') or 'all routes read it'}"
    for group in groups:
        yield from _group_notes(request, group)
    yield from _declared_notes(request, groups)
    if request.measured.warning:
        yield request.measured.warning


def _bound(groups: tuple[GroupPlan, ...], field: str) -> str:
    """Which backends leave no or little choice of page size or packing."""
    found: dict[str, None] = {}
    for route in (route for group in groups for route in group.routes):
        allowed = getattr(route.row, field)
        free = allowed is None or (field == "packing" and (route.stage_to or len(allowed) > 1))
        if not free:
            found[f"{route.backend} reads {format_values(field, allowed)}"] = None
    return "; ".join(found)


def _group_notes(request: PlanRequest, group: GroupPlan) -> Iterator[str]:
    """Why each phase of a group goes where it goes; phases with the same reason share a line."""
    phases: dict[str, list[str]] = {}
    for route in group.routes:
        for line in _route_notes(request, route):
            phases.setdefault(line, []).append(str(route.phase))
    for line, names in phases.items():
        yield f"{', '.join(names)} of {group.group.name} in {group.scheme}: {line}"
    if all(route.phase is not Phase.VERIFY for route in group.routes):
        asked = request.config.backend_for(True)
        who = "no backend that can run here serves" if asked == "auto" else f"{asked} does not serve"
        hot = parse_hisparse(request.config.hisparse)
        why = "a hot buffer is for one new token" if hot else f"{who} draft tokens over this storage"
        yield f"no verify of {group.group.name} in {group.scheme}: {why}"


def _route_notes(request: PlanRequest, route: Route) -> Iterator[str]:
    auto = request.config.backend_for(route.phase.decodes) == "auto"
    if auto and route.phase in ROUTED:
        first = (
            "the best of those that serve it"
            if route.measured
            else "the most preferred of those that serve it"
        )
        yield f"{route.backend}, {first} ({route.why})"
    if route.row.gathers and not request.hardware.is_cpu:
        yield f"{route.backend} gathers pages in plain torch, many times slower than a kernel that reads them"
    if route.stage_to:
        why = ", for speed: kernels that read them as they are stored take longer" if route.for_speed else ""
        yield f"pages are staged to {route.stage_to}, which {route.backend} reads{why}"


def _declared_notes(request: PlanRequest, groups: tuple[GroupPlan, ...]) -> Iterator[str]:
    names = dict.fromkeys(route.backend for group in groups for route in group.routes if not route.runnable)
    lacking = {name: lack for name in names if (lack := request.backends[name].missing)}
    yield from (f"{name} cannot run here: it needs {lack}" for name, lack in lacking.items())
    if without := [name for name in names if name not in lacking]:
        yield f"declared only, this version cannot run it: {', '.join(without)}"

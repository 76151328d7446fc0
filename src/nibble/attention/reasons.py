"""Why: the reasons of a refusal, and the notes of a plan on all that was left to `auto`.

Must not decide anything; resolve.py does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from nibble.attention import needs
from nibble.attention.capability import BackendInfo, Need, Phase
from nibble.attention.needs import Part
from nibble.attention.options import ROUTED, Options, Request
from nibble.attention.plan import GroupPlan, Route
from nibble.errors import Unsupported


def refusal(request: Request, part: Part, phase: Phase) -> Unsupported:
    """Nobody serves `part` in `phase`: the nearest row's reasons of each backend that was considered."""
    need = request.need(part, phase)
    considered = request.considered(phase)
    refusals = {name: tuple(_reasons(request, info, need)) for name, info in considered.items()}
    if request.config.backend_for(phase.decodes) == "auto":
        others = (info for name, info in request.backends.items() if name not in considered)
        would = {info.name: ("would serve it, but this version has no adapter for it",) for info in others if not info.nearest(need)}
        refusals |= would
    return Unsupported(str(need), refusals)


def _reasons(request: Request, info: BackendInfo, need: Need) -> Iterator[str]:
    native, staged = info.nearest(need), request.staged(need)
    yield from native
    if staged is None:
        return
    rest = tuple(reason for reason in info.nearest(staged) if reason not in native)
    if request.may_stage(need.phase):
        yield from (f"staged to {staged.format}: {reason}" for reason in rest)
    elif not info.nearest(staged):
        yield f"it could read pages staged to {staged.format}, with --allow-staging"


def no_common_storage(request: Request, options: Options) -> Unsupported:
    """Each ask is served by somebody, but not all on one page size and packing."""
    refusals: dict[str, tuple[str, ...]] = {}
    for (_, phase), choice in options.items():
        if phase in ROUTED:
            for option in choice:
                wants = tuple(_wants("page", option.pages)) + tuple(_wants("packing", option.packings))
                refusals.setdefault(f"{option.backend.name} ({phase})", wants or ("any page and packing",))
    page = f"page {request.config.page_size}" if request.config.page_size else "one page size"
    return Unsupported(f"{page} and one packing in all phases on {request.hardware}", refusals)


def _wants(name: str, allowed: Iterable[object] | None) -> Iterator[str]:
    if allowed is not None:
        yield f"{name} must be in {{{', '.join(map(str, sorted(allowed, key=str)))}}}"


def notes(request: Request, groups: tuple[GroupPlan, ...], page: int, packing: str) -> Iterator[str]:
    """One line for each thing that was left to `auto`, that is staged, or that cannot run."""
    if request.config.dtype == "auto":
        yield f"dtype {request.dtype}: {'exact, and fastest on a CPU' if request.hardware.is_cpu else 'the usual one on a GPU'}"
    if request.config.page_size is None:
        yield f"page size {page}: {_bound(groups, 'page') or _free(request)}"
    yield f"packing {packing}: {_bound(groups, 'packing') or 'all routes read it'}"
    yield from dict.fromkeys(line for group in groups for route in group.routes for line in _route_notes(request, group, route))
    yield from _verify_notes(groups)


def _free(request: Request) -> str:
    return "no route asks for another; " + (
        "small pages share prefixes finely" if request.hardware.is_cpu else "what most kernels read in one piece"
    )


def _bound(groups: tuple[GroupPlan, ...], field: str) -> str:
    """Which routes leave no or little choice of page size or packing."""
    found: dict[str, None] = {}
    for route in (route for group in groups for route in group.routes):
        allowed = getattr(route.row, field)
        if allowed is not None and not (field == "packing" and (route.stage_to or len(allowed) > 1)):
            found[f"{route.backend} reads {', '.join(map(str, sorted(allowed)))} in {route.phase}"] = None
    return "; ".join(found)


def _route_notes(request: Request, group: GroupPlan, route: Route) -> Iterator[str]:
    where = f"{route.phase} of {group.group.name} in {group.scheme}"
    if request.config.backend_for(route.phase.decodes) == "auto" and route.phase in ROUTED:
        yield f"{where}: {route.backend}, the most preferred that serves it ({route.row.cites})"
    if route.stage_to:
        yield f"{where}: {route.backend} does not read it, so its pages are dequantised to {route.stage_to} first"
    if not route.runnable:
        yield f"{route.backend} is declared only: this version knows its facts, but cannot run it"


def _verify_notes(groups: tuple[GroupPlan, ...]) -> Iterator[str]:
    for group in groups:
        if all(route.phase is not Phase.VERIFY for route in group.routes):
            backend = group.route(Phase.DECODE).backend
            yield f"no verify of {group.group.name} in {group.scheme}: {backend} does not serve it, so no draft tokens"

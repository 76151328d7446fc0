"""Explain a plan to people and to programs: why it is so, what each backend could do, and what it costs in bytes.

Every fact comes from the plan, the memory plan, the backends' rows, the ledger and the formats. A `Cell` is a backend
in one phase of one layer group: verified by the conformance tests on such a GPU, declared in its rows, possible over
staged pages, or refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby
from typing import Any

from nibble import formats
from nibble.attention.planner import evidence, state_memory, window_memory
from nibble.attention.planner.evidence import LedgerEntry
from nibble.attention.planner.memory import MemoryPlan
from nibble.attention.planner.options import PlanRequest
from nibble.attention.planner.plan import GroupPlan, Plan, Route, Tier
from nibble.attention.planner.support import BackendInfo, Need, format_layers, format_values
from nibble.cache.layout import CacheLayout, LayerLayout, StreamLayout
from nibble.hardware import format_bytes
from nibble.model_spec import LayerGroup, Phase

DECISIVE = {"kind": "for", "arch": "on", "phase": "for"}
"""What no row has is reason enough, in this order: `only for mla`, `only on SM90`, `only for decode`."""

DETERMINISTIC = "the same bits in any company, cold or cached, however a prompt is cut"
"""What --deterministic promises."""


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
    for group, part in zip(plan.groups, request.parts, strict=True):
        for info in request.backends.values():
            for phase in Phase:
                need = part.need(
                    phase, request.hardware, plan.dtype, plan.page_size, plan.layout.packing,
                    batch_invariance=request.spec.deterministic,
                )  # fmt: skip
                planned = any((route.phase, route.backend) == (phase, info.name) for route in group.routes)
                entry = ledger_entries.get((info.name, str(phase), need.kind, need.format, need.arch))
                status = _status(request, info, need, entry)
                direct = status in {Status.VERIFIED, Status.DECLARED}
                reasons = () if direct else _reasons(info, need)
                yield Cell(group, need, info.name, status, planned, entry if direct else None, reasons)


def _status(request: PlanRequest, info: BackendInfo, need: Need, entry: LedgerEntry | None) -> Status:
    if info.serves(need):
        return Status.VERIFIED if entry else Status.DECLARED
    staged = request.staged(need)
    if staged and request.could_stage and info.serves(staged):
        return Status.STAGED if request.may_stage(need.phase) else Status.ON_REQUEST
    return Status.REFUSED


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
            "verified": cell.evidence.as_dict() if cell.evidence else None,
            "reasons": list(cell.reasons),
        }
        for cell in cells
    ]


def as_lines(cells: Iterable[Cell], request: PlanRequest) -> Iterator[str]:
    """Yield a table for each group: backends down, phases across; then what is behind it, and why cells are refused."""
    for group, group_cells in groupby(cells, key=lambda cell: cell.group):
        entries = tuple(group_cells)
        need, layers = entries[0].need, format_layers(group.layers)
        where = f"{group.group.name}: layers {layers} in {group.scheme} ({need.kind}, packing {need.packing})"
        yield ""
        yield f"{where}, {str(need).partition(', ')[2]}"
        yield from _table(entries)
        yield from _evidences(entries)
        yield from _refusals(entries)
    names = [name for name, info in request.backends.items() if not info.runnable]
    yield from ("", *_absent(request, names)) if names else ()


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


def _absent(request: PlanRequest, names: Iterable[str]) -> Iterator[str]:
    """Yield why backends that are not runnable cannot run here."""
    declared = []
    for name in names:
        if missing := request.backends[name].missing:
            yield f"{name} cannot run here: it needs {missing}"
        else:
            declared.append(name)
    if declared:
        which = "them" if len(declared) > 1 else "it"
        yield f"declared only, this version cannot run {which}: {', '.join(declared)}"


BASELINE = "bfloat16"
"""The dtype whose plain format sizes are compared with."""
WORKSPACES = ("weights", "staging", "activations", "runtime", "tables")
POOL = ("pool", "pages", "tokens", "limit", "step_tokens", "context")
"""Fields of the memory plan: what is needed beside pages, and what follows from the rest."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under column titles."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def as_text(self, indent: str = "  ") -> Iterator[str]:
        """Yield lines for a terminal, with aligned columns."""
        lines = (self.columns, *self.rows)
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            cells = (f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True))
            yield f"{indent}{'  '.join(cells)}".rstrip()

    def as_markdown(self) -> Iterator[str]:
        """Yield lines of a Markdown table."""
        yield _markdown_line(self.columns)
        yield "|" + "---|" * len(self.columns)
        yield from map(_markdown_line, self.rows)


def _markdown_line(cells: tuple[str, ...]) -> str:
    # A bar would end the cell.
    texts = (cell.replace("|", "/") for cell in cells)
    return f"|{'|'.join(f' {text} ' if text else ' ' for text in texts)}|"


def baseline_bytes(layout: CacheLayout) -> int:
    """Return the bytes per token of the same streams, unquantised in 16 bits."""
    return sum(layer.bytes_in(formats.plain(BASELINE).name) for layer in layout.layers)


def as_dict(plan: Plan, budget: MemoryPlan | None) -> dict[str, Any]:
    """Return everything that was decided, ready for JSON; without a budget what does not fit."""
    layout = plan.layout
    names = ("memory", *WORKSPACES, "reserve", *POOL)
    return {
        "dtype": plan.dtype,
        "page_size": layout.page_size,
        "packing": layout.packing,
        "fingerprint": layout.fingerprint,
        "kv_window": plan.window,
        "kv_sinks": plan.sinks,
        "meaning": plan.meaning,
        "groups": [_group(plan, group) for group in plan.groups],
        "bytes_per_token": layout.bytes_per_token,
        "bytes_per_token_16bit": baseline_bytes(layout),
        "ratio": round(baseline_bytes(layout) / layout.bytes_per_token, 3),
        "budget": {name: getattr(budget, name) for name in names} if budget else None,
        "exact": window_memory.as_dict(plan, budget.exact, budget.context)
        if budget and budget.exact
        else None,
        "states": state_memory.as_dict(budget.states, budget.bytes_per_token, budget.fitting)
        if budget and budget.states
        else None,
        "staging": [_staged(entry) for entry in staging_costs(plan, budget.context)] if budget else [],
        "hisparse": _tier(plan.tier, budget) if plan.tier and budget and budget.host else None,
        "notes": list(plan.notes),
    }


def _tier(tier: Tier, budget: MemoryPlan) -> dict[str, Any]:
    return {
        "buffer": tier.buffer,
        "frames": budget.frames,
        "tables": budget.tier,
        "host": budget.host,
        "host_bytes_per_token": tier.layout.bytes_per_token,
        "host_format": sorted({layer.format_key for layer in tier.layout.layers}),
    }


def _staged(entry: StagedRoute) -> dict[str, Any]:
    return {
        "group": entry.group.group.name,
        "scheme": entry.group.scheme,
        "phase": str(entry.route.phase),
        "backend": entry.route.backend,
        "tokens": entry.cost.tokens,
        "bytes": entry.cost.staged,
        "direct": entry.cost.direct,
        "factor": round(entry.cost.factor, 2),
        "words": str(entry),
    }


def _group(plan: Plan, group: GroupPlan) -> dict[str, Any]:
    stored = _stored(plan, group)
    return {
        "name": group.group.name,
        "kind": group.group.kind,
        "layers": list(group.layers),
        "window": group.group.window,
        "chunk": group.group.chunk,
        "top_k": group.group.top_k or None,
        "scheme": group.scheme,
        "streams": {entry.stream.name: _stream(entry) for entry in (stored.streams if stored else ())},
        "routes": {str(route.phase): _route(route) for route in group.routes},
        **({"near_routes": _near_routes(group)} if plan.window else {}),
    }


def _stream(entry: StreamLayout) -> dict[str, Any]:
    encoder = {"encoder": entry.encoder} if entry.encoder else {}
    return {"format": entry.format, **encoder, "bytes_per_token": entry.bytes_per_token}


def _route(route: Route) -> dict[str, Any]:
    return {
        "backend": route.backend,
        "stage_to": route.stage_to,
        "runnable": route.runnable,
        "cites": route.ranking or route.source,
        **({"measured": route.measured} if route.measured else {}),
        **({"failed": route.failed} if route.failed else {}),
    }


NEAR_KERNEL = "near"
"""What the kernels of near tokens are called in plans."""


def _near_routes(group: GroupPlan) -> dict[str, Any]:
    routes = {str(route.phase): _route(route) for route in group.near_routes}
    if group.near_kernel:
        kernel = {
            "backend": NEAR_KERNEL,
            "stage_to": None,
            "runnable": True,
            "cites": "one launch for all near tokens",
        }
        routes |= {str(route.phase): kernel for route in group.routes}
    return routes


def _near_text(group: GroupPlan) -> str:
    """Return who reads near tokens, and in which phases where these differ."""
    names = {str(route.phase): str(route) for route in group.near_routes}
    if group.near_kernel:
        names |= {str(route.phase): "the kernel for near tokens" for route in group.routes}
    phases: dict[str, list[str]] = {}
    for phase in Phase:
        if name := names.get(str(phase)):
            phases.setdefault(name, []).append(str(phase))
    if len(phases) == 1:
        return next(iter(phases))
    return "; ".join(f"{', '.join(served)} {name}" for name, served in phases.items())


def _stored(plan: Plan, group: GroupPlan) -> LayerLayout | None:
    """Return what a layer of the group stores; None if all of them read others' pages."""
    return next((entry for entry in plan.layout.layers if entry.layer in group.layers), None)


def as_text(plan: Plan, budget: MemoryPlan | None = None) -> str:
    """Return lines for the terminal: routes, storage, bytes and why; memory, where there is a budget."""
    memory = _memory(plan, budget) if budget else ()
    meaning = (plan.meaning,) if plan.meaning else ()
    return "\n".join(
        (*meaning, *_routes(plan), *_bytes(plan), *memory, *(f"note: {note}" for note in plan.notes))
    )


def _routes(plan: Plan) -> Iterator[str]:
    for group in plan.groups:
        what = f"{group.group.kind}, {group.group.q_heads} query heads"
        what += f", window {group.group.window}" if group.group.window else ""
        what += f", chunks of {group.group.chunk}" if group.group.chunk else ""
        what += f", each looks at {group.group.top_k} tokens" if group.group.top_k else ""
        yield f"{group.group.name}: layers {format_layers(group.layers)} in {group.scheme} ({what})"
        width = max(len(str(route)) for route in group.routes)
        for route in group.routes:
            mark = "" if route.runnable else "declared only; "
            yield f"  {route.phase:<8} {route!s:<{width}}  {mark}{route.why}"
        if plan.window:
            yield f"  the newest {plan.window} tokens in {plan.dtype}: {_near_text(group)}"
        if plan.sinks:
            yield f"  {_sinks_text(plan, group)}"


def _sinks_text(plan: Plan, group: GroupPlan) -> str:
    """Return whether a group reads the first tokens exactly."""
    if group.sees_all:
        return f"the first {plan.sinks} tokens in {plan.dtype}: as in decode steps"
    of_its_own = (
        f"chunks of {group.group.chunk}" if group.group.chunk else f"a window of {group.group.window}"
    )
    return f"the first tokens as all others, because of {of_its_own} tokens"


def _bytes(plan: Plan) -> Iterator[str]:
    layout = plan.layout
    yield f"pages of {layout.page_size} tokens, packing {layout.packing}: {layout.bytes_per_page:,} bytes"
    for group in plan.groups:
        stored = _stored(plan, group)
        if stored:
            streams = (f"{x.stream.name} {x.format} {x.bytes_per_token:,}" for x in stored.streams)
            count = sum(entry.layer in group.layers for entry in layout.layers)
            total = f"{stored.bytes_per_token:,} bytes a token, {count} layers"
            yield f"  {group}: {' + '.join(streams)} = {total}"
    entries = (entry for layer in layout.layers for entry in layer.streams)
    encoders = dict.fromkeys(f"{x.format} by {x.encoder}" for x in entries if x.encoder)
    if encoders:
        yield f"  block scales: {', '.join(encoders)}"
    baseline = baseline_bytes(layout)
    saving = f"{baseline:,} in 16 bits: {baseline / layout.bytes_per_token:.2f} x fewer"
    yield f"  all layers: {layout.bytes_per_token:,} bytes a token, {saving}"


def _memory(plan: Plan, budget: MemoryPlan) -> Iterator[str]:
    """Yield where memory goes, and how many tokens fit."""
    parts = {name: getattr(budget, name) for name in WORKSPACES} | {"hot buffers": budget.tier}
    used = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    yield f"memory {format_bytes(budget.memory)}: {used}, reserve {format_bytes(budget.reserve)}"
    yield f"pool {format_bytes(budget.pool)} ({budget.limit}): {budget.pages:,} pages, {budget.tokens:,} tokens"
    yield f"  the same bytes hold {budget.pool // baseline_bytes(plan.layout):,} tokens in 16 bits"
    if budget.exact:
        yield from window_memory.as_lines(plan, budget.exact, budget.context)
    if budget.states:
        yield from state_memory.as_lines(budget.states, budget.bytes_per_token, budget.fitting)
    if plan.tier:
        yield from _host(plan.tier, budget)
    yield f"steps of at most {budget.step_tokens:,} tokens"
    yield from map(str, staging_costs(plan, budget.context))


def _host(tier: Tier, budget: MemoryPlan) -> Iterator[str]:
    if not budget.host:
        yield f"no host tier is made: {_no_tier(tier, budget)}"
        return
    stored = ", ".join(sorted({layer.format_key for layer in tier.layout.layers}))
    size = tier.layout.bytes_per_token
    yield f"host memory {format_bytes(budget.host)}: all pages, {stored} in {size:,} bytes a token"
    room = f"the device has room for {budget.frames:,} of {budget.pages:,} pages"
    yield f"  {room}; from then on long requests keep a hot buffer of {tier.buffer:,} tokens there"


def _no_tier(tier: Tier, budget: MemoryPlan) -> str:
    """Return why all pages lie on the device, though a host tier was requested."""
    if budget.tokens >= budget.request_tokens:
        return "the device has room for all pages"
    return (
        f"the device has room for {budget.tokens:,} of {budget.request_tokens:,} tokens, and with hot buffers of "
        f"{tier.buffer:,} tokens a request there would be room for no more"
    )


# Why


def plan_notes(request: PlanRequest, groups: tuple[GroupPlan, ...], page: int, packing: str) -> Iterator[str]:
    """Yield a line for each thing that was left to `auto`, that is staged, or that cannot run.

    Args:
        request: What is planned.
        groups: The routes that were chosen.
        page: Tokens of a page.
        packing: How planes lie in a page.
    """
    if request.spec.deterministic:
        yield f"deterministic: {DETERMINISTIC}"
    if request.spec.dtype is None:
        why = "exact, and fastest on a CPU" if request.hardware.is_cpu else "the usual one on a GPU"
        yield f"dtype {request.dtype}: {why}"
    if request.spec.page_size is None:
        small, usual = "small pages share prefixes finely", "what most kernels read in one piece"
        free = f"no route asks for another; {small if request.hardware.is_cpu else usual}"
        yield f"page size {page}: {_bound(groups, 'page') or free}"
    if request.spec.packing is None:
        yield f"packing {packing}: {_bound(groups, 'packing') or 'all routes read it'}"
    for group in groups:
        yield from _group_notes(request, group)
    routes = (route for group in groups for route in group.routes)
    yield from _absent(request, dict.fromkeys(route.backend for route in routes if not route.runnable))
    if request.measured.warning:
        yield request.measured.warning


def _bound(groups: tuple[GroupPlan, ...], field: str) -> str:
    """Return which backends leave no or little choice of page size or packing."""
    reads: dict[str, None] = {}
    for route in (route for group in groups for route in group.routes):
        allowed = getattr(route.row, field)
        # Staged pages have a packing of their own, and a backend that reads several does not decide.
        free = allowed is None or (field == "packing" and (route.stage_to or len(allowed) > 1))
        if not free:
            reads[f"{route.backend} reads {format_values(field, allowed)}"] = None
    return "; ".join(reads)


def _group_notes(request: PlanRequest, group: GroupPlan) -> Iterator[str]:
    """Yield why each phase of a group goes where it goes; phases with the same reason share a line."""
    phases: dict[str, list[str]] = {}
    for route in group.routes:
        for line in _route_notes(request, route):
            phases.setdefault(line, []).append(str(route.phase))
    for line, names in phases.items():
        yield f"{', '.join(names)} of {group}: {line}"
    # A plan without draft tokens works; who wants them must know that they are not served.
    if all(route.phase is not Phase.VERIFY for route in group.routes):
        decode = request.spec.decode_backend
        who = f"{decode} does not serve" if decode else "no backend that can run here serves"
        why = f"{who} draft tokens over this storage"
        if request.spec.offload:
            why = "a hot buffer is for one new token"
        yield f"no verify of {group}: {why}"


def _route_notes(request: PlanRequest, route: Route) -> Iterator[str]:
    if route.row.gathers and not request.hardware.is_cpu:
        yield f"{route.backend} gathers pages in plain torch, many times slower than a kernel that reads them"
    if route.stage_to:
        why = ", for speed: kernels that read them as they are stored take longer" if route.for_speed else ""
        yield f"pages are staged to {route.stage_to}, which {route.backend} reads{why}"


# What dequantising costs

PRICED_PHASES = (Phase.EXTEND, Phase.DECODE)
"""Phases whose costs are shown: PREFILL goes where EXTEND goes, and has less to stage; VERIFY is as DECODE."""


@dataclass(frozen=True, slots=True)
class StagingCost:
    """Bytes that one step over one request moves.

    Staging reads every stored byte, writes it in a plain format, and attention reads that. A kernel that reads the
    cache's own bytes reads them once, and only those that it looks at.
    """

    tokens: int
    """Of the request, the longest kind; shorter ones cost in proportion."""
    staged: int
    direct: int
    """As a kernel for the format would read them."""
    plain: int
    """Of an unquantised cache in the format that pages are staged to."""

    @property
    def factor(self) -> float:
        """How many times the bytes of direct reading."""
        return self.staged / self.direct


def staging_cost(group: LayerGroup, stored: LayerLayout, stage_to: str, tokens: int) -> StagingCost:
    """Return what staging costs in one layer.

    Args:
        group: The group of the layer.
        stored: What the layer stores, or the one whose pages it reads.
        stage_to: The plain format.
        tokens: Of the longest request.
    """
    direct, plain = stored.without_index.bytes_per_token, stored.without_index.bytes_in(stage_to)
    within = min(tokens, group.reach or tokens)
    # Sparse attention stages all tokens, and reads the chosen ones only.
    looked_at = min(within, group.top_k or within)
    staged = within * (direct + plain) + looked_at * plain
    return StagingCost(tokens, staged, looked_at * direct, looked_at * plain)


@dataclass(frozen=True, slots=True)
class StagedRoute:
    """A route that stages, and what it costs in all layers of its group."""

    group: GroupPlan
    route: Route
    cost: StagingCost

    def __str__(self) -> str:
        cost, scheme = self.cost, self.group.scheme
        return (
            f"staging, {self.route.phase} of {self.group}: {self.route.backend} reads {self.route.stage_to}; "
            f"a step over a request of {cost.tokens:,} tokens moves at least {format_bytes(cost.staged)}, "
            f"{cost.factor:.1f} x the {format_bytes(cost.direct)} that a kernel for {scheme} reads, "
            f"{cost.staged / cost.plain:.1f} x those of an unquantised cache"
        )


def staging_costs(plan: Plan, tokens: int) -> Iterator[StagedRoute]:
    """Yield what staging costs wherever the plan stages. `tokens` are those of the longest request."""
    stored = {entry.layer: entry for entry in plan.layout.layers}
    for group in plan.groups:
        for route in (group.route(phase) for phase in PRICED_PHASES):
            if route.stage_to:
                # A layer that shares KV stages the pages of its owner.
                one = staging_cost(group.group, stored[plan.owner[group.layers[0]]], route.stage_to, tokens)
                sums = (len(group.layers) * size for size in (one.staged, one.direct, one.plain))
                yield StagedRoute(group, route, StagingCost(tokens, *sums))


def staging_warnings(plan: Plan, tokens: int) -> tuple[str, ...]:
    """Return what users should know before they serve: staging in DECODE, which every token pays."""
    return tuple(str(entry) for entry in staging_costs(plan, tokens) if entry.route.phase.decodes)

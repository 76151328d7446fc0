"""A plan in words: for programs (as_dict) and for the terminal (as_text).

Owns wording only; every fact comes from the plan, the budget and the formats. Must not decide anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nibble import formats
from nibble.attention.planner import price
from nibble.attention.planner.memory import MemoryPlan
from nibble.attention.planner.needs import format_layers
from nibble.attention.planner.plan import GroupPlan, Plan, Route, Tier
from nibble.attention.planner.price import Staged
from nibble.cache.layout import CacheLayout, LayerLayout
from nibble.hardware import format_bytes

BASELINE = "bfloat16"
"""The dtype whose plain format sizes are compared with."""


def baseline_bytes(layout: CacheLayout) -> int:
    """Bytes per token of the same streams, unquantised in 16 bits."""
    plain = formats.plain(BASELINE)
    return sum(plain.bytes_per_token(entry.stream) for layer in layout.layers for entry in layer.streams)


def as_dict(plan: Plan, budget: MemoryPlan) -> dict[str, Any]:
    """Everything that was decided, ready for JSON."""
    layout = plan.layout
    return {
        "dtype": plan.dtype,
        "page_size": layout.page_size,
        "packing": layout.packing,
        "fingerprint": layout.fingerprint,
        "groups": [_group(plan, group) for group in plan.groups],
        "bytes_per_token": layout.bytes_per_token,
        "bytes_per_token_16bit": baseline_bytes(layout),
        "ratio": round(baseline_bytes(layout) / layout.bytes_per_token, 3),
        "budget": {
            "memory": budget.memory,
            "weights": budget.weights,
            "staging": budget.staging,
            "activations": budget.activations,
            "runtime": budget.runtime,
            "reserve": budget.reserve,
            "pool": budget.pool,
            "pages": budget.pages,
            "tokens": budget.tokens,
            "limit": budget.limit,
            "step_tokens": budget.step_tokens,
            "context": budget.context,
        },
        "staging": [_staged(entry) for entry in price.staged(plan, budget.context)],
        "hisparse": _tier(plan.tier, budget) if plan.tier and budget.host else None,
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


def _staged(entry: Staged) -> dict[str, Any]:
    return {
        "group": entry.group,
        "scheme": entry.scheme,
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
        "top_k": group.group.top_k or None,
        "scheme": group.scheme,
        "streams": {
            entry.stream.name: {"format": entry.format, "bytes_per_token": entry.bytes_per_token}
            for entry in (stored.streams if stored else ())
        },
        "routes": {str(route.phase): _route(route) for route in group.routes},
    }


def _route(route: Route) -> dict[str, Any]:
    return {
        "backend": route.backend,
        "stage_to": route.stage_to,
        "runnable": route.runnable,
        "cites": route.ranking or route.row.source,
        **({"measured": route.measured} if route.measured else {}),
        **({"failed": route.failed} if route.failed else {}),
    }


def _stored(plan: Plan, group: GroupPlan) -> LayerLayout | None:
    """What a layer of the group stores; None if all of them read others' pages."""
    return next((entry for entry in plan.layout.layers if entry.layer in group.layers), None)


def as_text(plan: Plan, budget: MemoryPlan | None = None) -> str:
    """Lines for the terminal: routes, storage, bytes and why; memory, where there is a budget."""
    memory = _memory(plan, budget) if budget else ()
    return "\n".join((*_routes(plan), *_bytes(plan), *memory, *_notes(plan)))


def _routes(plan: Plan) -> Iterator[str]:
    for group in plan.groups:
        what = f"{group.group.kind}, {group.group.q_heads} query heads"
        what += f", window {group.group.window}" if group.group.window else ""
        what += f", each looks at {group.group.top_k} tokens" if group.group.top_k else ""
        yield f"{group.group.name}: layers {format_layers(group.layers)} in {group.scheme} ({what})"
        width = max(len(str(route)) for route in group.routes)
        for route in group.routes:
            mark = "" if route.runnable else "declared only; "
            yield f"  {route.phase:<8} {route!s:<{width}}  {mark}{route.why}"


def _bytes(plan: Plan) -> Iterator[str]:
    layout = plan.layout
    yield f"pages of {layout.page_size} tokens, packing {layout.packing}: {layout.bytes_per_page:,} bytes"
    for group in plan.groups:
        stored = _stored(plan, group)
        if stored:
            parts = " + ".join(
                f"{entry.stream.name} {entry.format} {entry.bytes_per_token:,}" for entry in stored.streams
            )
            count = sum(entry.layer in group.layers for entry in layout.layers)
            total = f"{stored.bytes_per_token:,} bytes a token, {count} layers"
            yield f"  {group.group.name} in {group.scheme}: {parts} = {total}"
    whole = baseline_bytes(layout)
    saving = f"{whole:,} in 16 bits: {whole / layout.bytes_per_token:.2f} x fewer"
    yield f"  all layers: {layout.bytes_per_token:,} bytes a token, {saving}"


def _memory(plan: Plan, budget: MemoryPlan) -> Iterator[str]:
    """Where memory goes, and how many tokens fit."""
    parts = {
        "weights": budget.weights,
        "staging": budget.staging,
        "activations": budget.activations,
        "runtime": budget.runtime,
        "hot buffers": budget.tier,
    }
    used = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    yield f"memory {format_bytes(budget.memory)}: {used}, reserve {format_bytes(budget.reserve)}"
    yield f"pool {format_bytes(budget.pool)} ({budget.limit}): {budget.pages:,} pages, {budget.tokens:,} tokens"
    yield f"  the same bytes hold {budget.pool // baseline_bytes(plan.layout):,} tokens in 16 bits"
    if plan.tier:
        yield from _host(plan.tier, budget)
    yield f"steps of at most {budget.step_tokens:,} tokens"
    yield from map(str, price.staged(plan, budget.context))


def _host(tier: Tier, budget: MemoryPlan) -> Iterator[str]:
    if not budget.host:
        yield "no host tier is made: the device has room for all pages"
        return
    stored = ", ".join(sorted({layer.format_key for layer in tier.layout.layers}))
    size = tier.layout.bytes_per_token
    yield f"host memory {format_bytes(budget.host)}: all pages, {stored} in {size:,} bytes a token"
    room = f"the device has room for {budget.frames:,} of {budget.pages:,} pages"
    yield f"  {room}; from then on long requests keep a hot buffer of {tier.buffer:,} tokens there"


def _notes(plan: Plan) -> Iterator[str]:
    yield from (f"note: {note}" for note in plan.notes)

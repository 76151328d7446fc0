"""What staging costs: the bytes that one step moves where pages are dequantised first, beside those of direct reading.

A step over one request is counted, the longest kind; shorter ones cost in proportion. Staging reads every stored byte,
writes it in a plain format, and attention reads that; a kernel that reads the cache's own bytes reads them once, and
only those that it looks at. Owns Cost. Must not decide anything, nor know of torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nibble.attention.planner.plan import Plan, Route
from nibble.attention.planner.support import Phase
from nibble.cache.layout import LayerLayout
from nibble.hardware import format_bytes
from nibble.model_spec import LayerGroup

SHOWN = (Phase.EXTEND, Phase.DECODE)
"""Phases whose costs are told: PREFILL goes where EXTEND goes, and has less to stage; VERIFY is as DECODE."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes of one step over one request, in one layer. tokens: of the request. direct: as a kernel for the format
    would read them; plain: of an unquantised cache in the format that pages are staged to."""

    tokens: int
    staged: int
    direct: int
    plain: int

    @property
    def factor(self) -> float:
        """How many times the bytes of direct reading."""
        return self.staged / self.direct


def of_layer(group: LayerGroup, stored: LayerLayout, stage_to: str, tokens: int) -> Cost:
    """What staging a layer of `group` costs. stored: what the layer, or the one whose pages it reads, stores."""
    own, plain = stored.without_index.bytes_per_token, stored.without_index.bytes_in(stage_to)
    within = min(tokens, group.window or tokens)
    looked_at = min(within, group.top_k or within)
    return Cost(tokens, within * (own + plain) + looked_at * plain, looked_at * own, looked_at * plain)


@dataclass(frozen=True, slots=True)
class Staged:
    """A route that stages, and what it costs in all layers of its group."""

    group: str
    scheme: str
    route: Route
    cost: Cost

    def __str__(self) -> str:
        cost, who = self.cost, f"{self.route.phase} of {self.group} in {self.scheme}"
        step = f"a step over a request of {cost.tokens:,} tokens moves at least {format_bytes(cost.staged)}"
        direct = f"{cost.factor:.1f} x the {format_bytes(cost.direct)} that a kernel for {self.scheme} reads"
        plain = f"{cost.staged / cost.plain:.1f} x those of an unquantised cache"
        return f"staging, {who}: {self.route.backend} reads {self.route.stage_to}; {step}, {direct}, {plain}"


def staged(plan: Plan, tokens: int) -> Iterator[Staged]:
    """What staging costs wherever the plan stages. tokens: of the longest request."""
    stored = {entry.layer: entry for entry in plan.layout.layers}
    for group in plan.groups:
        for route in (group.route(phase) for phase in SHOWN):
            if route.stage_to:
                one = of_layer(group.group, stored[plan.owner[group.layers[0]]], route.stage_to, tokens)
                sums = (len(group.layers) * size for size in (one.staged, one.direct, one.plain))
                yield Staged(group.group.name, group.scheme, route, Cost(tokens, *sums))


def warnings(plan: Plan, tokens: int) -> tuple[str, ...]:
    """What users should know before they serve: staging in DECODE, which every token pays."""
    return tuple(str(entry) for entry in staged(plan, tokens) if entry.route.phase.decodes)

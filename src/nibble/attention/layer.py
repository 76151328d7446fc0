"""One attention layer of one step: write, (stage), attend. The only writer of the cache.

Attention sees what is stored: K and V are written first and read back from the pool, the newest tokens too, so an
answer depends neither on how a prompt was cut nor on whether its prefix was cached. Errors of kernels are wrapped
here, once. Must not know of models, requests or formats.

Shape suffixes: T tokens, H heads, D values of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from nibble.attention.capability import Phase
from nibble.attention.metadata import AttentionMetadata, AttentionSpec, Segment
from nibble.attention.plan import Plan, Route
from nibble.attention.staging import staged
from nibble.cache.hot import Coming, HotTier
from nibble.cache.pool import PagedPool
from nibble.cache.view import KVView
from nibble.errors import BackendError, NibbleError
from nibble.geometry import INDEX
from nibble.kernels.choose import NOBODY, choose
from nibble.kernels.swap import resident


class Attend(Protocol):
    """A backend's adapter."""

    def attend(self, q_THD: Tensor, view: KVView, segment: Segment, spec: AttentionSpec) -> Tensor:
        """q_THD: the segment's rows -> [T, H, Dv] in the query's dtype. Must not write to its arguments."""
        ...


class Watch(Protocol):
    """Looks on while a step attends (engine/fidelity.py). Must not write to what it is shown."""

    def see(
        self, layer: int, q_THD: Tensor, streams: Mapping[str, Tensor], spec: AttentionSpec, out_THD: Tensor
    ) -> None:
        """A layer's query and streams as the model gave them, and what was answered."""
        ...


@dataclass(frozen=True, slots=True)
class StepContext:
    """All that attention needs in one step. An argument of the model call, never a global.

    tier: where the pool's pages are, if not all on the device. coming: where the tokens lie that a layer chose, or will
    once they are fetched; segment after segment. watch: who looks on, if anybody does.
    """

    plan: Plan
    pool: PagedPool
    backends: Mapping[str, Attend]
    meta: AttentionMetadata
    tier: HotTier | None = None
    coming: dict[int, list[Coming]] = field(default_factory=dict)
    watch: Watch | None = None


def attention(
    ctx: StepContext, layer: int, q_THD: Tensor, streams: Mapping[str, Tensor], spec: AttentionSpec
) -> Tensor:
    """Stores the layer's new streams and attends over all that is stored -> [T, H, Dv], zeros in padding rows."""
    out_THD = _stored_and_attended(ctx, layer, q_THD, streams, spec)
    if ctx.watch is not None:
        ctx.watch.see(layer, q_THD, streams, spec, out_THD)
    return out_THD


def _stored_and_attended(
    ctx: StepContext, layer: int, q_THD: Tensor, streams: Mapping[str, Tensor], spec: AttentionSpec
) -> Tensor:
    """A layer that shares another's KV stores nothing, and reads its owner's pages."""
    owner, meta = ctx.plan.owner[layer], ctx.meta
    slots_T = meta.slots_T if meta.placed_T is None else meta.placed_T
    if owner == layer:
        ctx.pool.write(layer, {name: x[: len(slots_T)] for name, x in streams.items()}, slots_T)
    view = ctx.pool.view(owner)
    q_THD = view.query(q_THD)
    parts = [
        out
        for segment, slots_TK in zip(meta.segments, _slots(ctx, layer, spec), strict=True)
        for out in _segment(ctx, layer, q_THD, view, segment, spec, slots_TK)
    ]
    padding = len(q_THD) - sum(map(len, parts))
    if padding:
        parts.append(parts[0].new_zeros(padding, *parts[0].shape[1:]))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def select(
    ctx: StepContext, layer: int, q_THD: Tensor, key_T1D: Tensor, weights_TH: Tensor, top_k: int
) -> Tensor:
    """Stores the layer's new index keys, and chooses the tokens that each query looks at -> int32 [T, top_k].

    With a host tier what a segment has chosen is on its way while the next one chooses.
    """
    slots_T = ctx.meta.slots_T
    ctx.pool.write(layer, {INDEX: key_T1D[: len(slots_T)]}, slots_T)
    keys = ctx.pool.view(layer).streams[INDEX].paged
    chosen_TK = torch.full((len(q_THD), top_k), NOBODY, dtype=torch.int32, device=q_THD.device)
    coming: list[Coming] = []
    for segment in ctx.meta.segments:
        rows = slice(segment.start, segment.stop)
        longest = max(segment.kv_lens)
        chosen_TK[rows] = choose(keys, segment, q_THD[rows], weights_TH[rows], top_k, longest)
        coming.append(_begun(ctx, layer, segment, chosen_TK[rows]))
    ctx.coming[layer] = coming
    return chosen_TK


def _begun(ctx: StepContext, layer: int, segment: Segment, chosen_TK: Tensor) -> Coming:
    """Finds out where chosen tokens lie, and begins to bring what is not on the device."""
    pages_TN = pages_by_token(segment)
    if ctx.tier is None:
        return Coming(resident(chosen_TK, pages_TN, None, ctx.pool.layout.page_size))
    if segment.phase is not Phase.DECODE:
        return ctx.tier.resident(chosen_TK, pages_TN)
    assert segment.rows_B is not None
    return ctx.tier.bring(layer, chosen_TK, pages_TN, segment.rows_B)


def _slots(ctx: StepContext, layer: int, spec: AttentionSpec) -> Iterator[Tensor | None]:
    """Where the chosen tokens lie, segment by segment, each once it is all there."""
    if spec.chosen_TK is None:
        yield from [None] * len(ctx.meta.segments)
        return
    found = ctx.coming.get(spec.chooser)
    if found is None:  # chosen by somebody else than a layer, whose choice nobody shares
        found = [
            _begun(ctx, layer, part, spec.chosen_TK[part.start : part.stop]) for part in ctx.meta.segments
        ]
    for coming in found:
        if ctx.tier:
            ctx.tier.finish(layer, coming)
        yield coming.slots_TK


def pages_by_token(segment: Segment) -> Tensor:
    """int32 [T, N]: the pages of each token's request."""
    lens = segment.q_lens
    if len(lens) == segment.stop - segment.start:
        return segment.pages_BN
    counts_B = segment.q_starts_B1.diff()
    return segment.pages_BN.repeat_interleave(counts_B, 0, output_size=segment.stop - segment.start)


def _segment(
    ctx: StepContext,
    layer: int,
    q_THD: Tensor,
    view: KVView,
    segment: Segment,
    spec: AttentionSpec,
    slots_TK: Tensor | None,
) -> Iterator[Tensor]:
    route = ctx.plan.route(layer, segment.phase)
    parts = staged(view, segment, route.stage_to, spec.window) if route.stage_to else ((view, segment),)
    for part_view, part in parts:
        rows, own = slice(part.start, part.stop), spec
        if spec.chosen_TK is not None:
            chosen_TK, own_TK = spec.chosen_TK[rows], slots_TK
            if route.stage_to:  # staged pages are numbered anew
                own_TK = resident(chosen_TK, pages_by_token(part), None, view.page_size)
            own = replace(spec, chosen_TK=chosen_TK, slots_TK=own_TK)
        yield _attend(ctx.backends[route.backend], route, q_THD[rows], part_view, part, own)


def _attend(
    backend: Attend, route: Route, q_THD: Tensor, view: KVView, segment: Segment, spec: AttentionSpec
) -> Tensor:
    try:
        return backend.attend(q_THD, view, segment, spec)
    except (NibbleError, torch.OutOfMemoryError):  # which is explained where memory is known
        raise
    except Exception as error:
        raise BackendError(
            f"backend {route} failed in {segment.phase}: {type(error).__name__}: {error}"
        ) from error

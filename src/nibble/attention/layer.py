"""One attention layer of one step: write, (stage), attend. The only writer of the cache.

Attention sees what is stored: K and V are written first and read back from the pool, the newest tokens too, so an
answer depends neither on how a prompt was cut nor on whether its prefix was cached. Errors of kernels are wrapped
here, once. Must not know of models, requests or formats.

Shape suffixes: T tokens, H heads, D values of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from nibble.attention.metadata import AttentionMetadata, AttentionSpec, Segment
from nibble.attention.plan import Plan, Route
from nibble.attention.staging import staged
from nibble.cache.pool import PagedPool
from nibble.cache.view import KVView
from nibble.errors import BackendError, NibbleError
from nibble.geometry import INDEX
from nibble.kernels.choose import NOBODY, choose


class Attend(Protocol):
    """A backend's adapter."""

    def attend(self, q_THD: Tensor, view: KVView, segment: Segment, spec: AttentionSpec) -> Tensor:
        """q_THD: the segment's rows -> [T, H, Dv] in the query's dtype. Must not write to its arguments."""
        ...


@dataclass(frozen=True, slots=True)
class StepContext:
    """All that attention needs in one step. An argument of the model call, never a global."""

    plan: Plan
    pool: PagedPool
    backends: Mapping[str, Attend]
    meta: AttentionMetadata


def attention(
    ctx: StepContext, layer: int, q_THD: Tensor, streams: Mapping[str, Tensor], spec: AttentionSpec
) -> Tensor:
    """Stores the layer's new streams and attends over all that is stored -> [T, H, Dv], zeros in padding rows.

    A layer that shares another's KV stores nothing, and reads its owner's pages.
    """
    owner = ctx.plan.owner[layer]
    slots_T = ctx.meta.slots_T
    if owner == layer:
        ctx.pool.write(layer, {name: x[: len(slots_T)] for name, x in streams.items()}, slots_T)
    view = ctx.pool.view(owner)
    q_THD = view.query(q_THD)
    parts = [out for segment in ctx.meta.segments for out in _segment(ctx, layer, q_THD, view, segment, spec)]
    padding = len(q_THD) - sum(map(len, parts))
    if padding:
        parts.append(parts[0].new_zeros(padding, *parts[0].shape[1:]))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def select(
    ctx: StepContext, layer: int, q_THD: Tensor, key_T1D: Tensor, weights_TH: Tensor, top_k: int
) -> Tensor:
    """Stores the layer's new index keys, and chooses the tokens that each query looks at -> int32 [T, top_k]."""
    slots_T = ctx.meta.slots_T
    ctx.pool.write(layer, {INDEX: key_T1D[: len(slots_T)]}, slots_T)
    keys = ctx.pool.view(layer).streams[INDEX].paged
    chosen_TK = torch.full((len(q_THD), top_k), NOBODY, dtype=torch.int32, device=q_THD.device)
    for segment in ctx.meta.segments:
        rows = slice(segment.start, segment.stop)
        chosen_TK[rows] = choose(
            keys, segment.pages_BN, segment.q_lens, segment.kv_lens, q_THD[rows], weights_TH[rows], top_k
        )
    return chosen_TK


def _segment(
    ctx: StepContext, layer: int, q_THD: Tensor, view: KVView, segment: Segment, spec: AttentionSpec
) -> Iterator[Tensor]:
    route = ctx.plan.route(layer, segment.phase)
    parts = staged(view, segment, route.stage_to) if route.stage_to else ((view, segment),)
    for part_view, part in parts:
        rows = slice(part.start, part.stop)
        own = spec if spec.chosen_TK is None else replace(spec, chosen_TK=spec.chosen_TK[rows])
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

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

from nibble.attention.dequantize import dequantize_pages
from nibble.attention.planner.plan import Plan, Route
from nibble.attention.planner.support import Phase
from nibble.cache.offload.hot_buffer import HotBuffers, PendingFetch
from nibble.cache.pool import PagedPool
from nibble.cache.view import KVView
from nibble.errors import BackendError, NibbleError
from nibble.kernels import indexer
from nibble.kernels.indexer import PAD_INDEX
from nibble.kernels.offload.hot_buffer import resident_slots
from nibble.kernels.types import AttentionBatch, AttentionMetadata, AttentionParams
from nibble.model_spec import INDEX


class AttentionBackend(Protocol):
    """A backend's adapter."""

    def attend(self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams) -> Tensor:
        """q_THD: the batch's rows -> [T, H, Dv] in the query's dtype. Must not write to its arguments."""
        ...


class AttentionObserver(Protocol):
    """Looks on while a step attends (engine/error_monitor.py). Must not write to what it is shown."""

    def observe(
        self,
        layer: int,
        q_THD: Tensor,
        streams: Mapping[str, Tensor],
        params: AttentionParams,
        out_THD: Tensor,
    ) -> None:
        """A layer's query and streams as the model gave them, and what was answered."""
        ...


@dataclass(frozen=True, slots=True)
class StepContext:
    """All that attention needs in one step. An argument of the model call, never a global.

    tier: where the pool's pages are, if not all on the device. coming: where the tokens lie that a layer chose, or will
    once they are fetched; batch after batch. watch: who looks on, if anybody does.
    """

    plan: Plan
    pool: PagedPool
    backends: Mapping[str, AttentionBackend]
    meta: AttentionMetadata
    tier: HotBuffers | None = None
    pending: dict[int, list[PendingFetch]] = field(default_factory=dict)
    observer: AttentionObserver | None = None


def attention(
    ctx: StepContext, layer: int, q_THD: Tensor, streams: Mapping[str, Tensor], params: AttentionParams
) -> Tensor:
    """Stores the layer's new streams and attends over all that is stored -> [T, H, Dv], zeros in padding rows."""
    out_THD = _stored_and_attended(ctx, layer, q_THD, streams, params)
    if ctx.observer is not None:
        ctx.observer.observe(layer, q_THD, streams, params, out_THD)
    return out_THD


def _stored_and_attended(
    ctx: StepContext, layer: int, q_THD: Tensor, streams: Mapping[str, Tensor], params: AttentionParams
) -> Tensor:
    """A layer that shares another's KV stores nothing, and reads its owner's pages."""
    owner, meta = ctx.plan.owner[layer], ctx.meta
    slot_mapping_T = meta.slot_mapping_T if meta.frame_slot_mapping_T is None else meta.frame_slot_mapping_T
    if owner == layer:
        ctx.pool.write(layer, {name: x[: len(slot_mapping_T)] for name, x in streams.items()}, slot_mapping_T)
    view = ctx.pool.view(owner)
    q_THD = view.query(q_THD)
    parts = [
        out
        for batch, topk_slots_TK in zip(meta.batches, _slots(ctx, layer, params), strict=True)
        for out in _segment(ctx, layer, q_THD, view, batch, params, topk_slots_TK)
    ]
    padding = len(q_THD) - sum(map(len, parts))
    if padding:
        parts.append(parts[0].new_zeros(padding, *parts[0].shape[1:]))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def select_topk(
    ctx: StepContext, layer: int, q_THD: Tensor, key_T1D: Tensor, weights_TH: Tensor, top_k: int
) -> Tensor:
    """Stores the layer's new index keys, and chooses the tokens that each query looks at -> int32 [T, top_k].

    With a host tier what a batch has chosen is on its way while the next one chooses.
    """
    slot_mapping_T = ctx.meta.slot_mapping_T
    ctx.pool.write(layer, {INDEX: key_T1D[: len(slot_mapping_T)]}, slot_mapping_T)
    keys = ctx.pool.view(layer).streams[INDEX].paged
    topk_indices_TK = torch.full((len(q_THD), top_k), PAD_INDEX, dtype=torch.int32, device=q_THD.device)
    coming: list[PendingFetch] = []
    for batch in ctx.meta.batches:
        rows = slice(batch.start, batch.stop)
        longest = max(batch.seq_lens)
        topk_indices_TK[rows] = indexer.select_topk(
            keys, batch, q_THD[rows], weights_TH[rows], top_k, longest
        )
        coming.append(_begun(ctx, layer, batch, topk_indices_TK[rows]))
    ctx.pending[layer] = coming
    return topk_indices_TK


def _begun(ctx: StepContext, layer: int, batch: AttentionBatch, topk_indices_TK: Tensor) -> PendingFetch:
    """Finds out where chosen tokens lie, and begins to bring what is not on the device."""
    page_table_TN = page_table_by_token(batch)
    if ctx.tier is None:
        return PendingFetch(resident_slots(topk_indices_TK, page_table_TN, None, ctx.pool.layout.page_size))
    if batch.phase is not Phase.DECODE:
        return ctx.tier.lookup_resident(topk_indices_TK, page_table_TN)
    assert batch.rows_B is not None
    return ctx.tier.prefetch(layer, topk_indices_TK, page_table_TN, batch.rows_B)


def _slots(ctx: StepContext, layer: int, params: AttentionParams) -> Iterator[Tensor | None]:
    """Where the chosen tokens lie, batch by batch, each once it is all there."""
    if params.topk_indices_TK is None:
        yield from [None] * len(ctx.meta.batches)
        return
    found = ctx.pending.get(params.index_layer)
    if found is None:  # chosen by somebody else than a layer, whose choice nobody shares
        found = [
            _begun(ctx, layer, part, params.topk_indices_TK[part.start : part.stop])
            for part in ctx.meta.batches
        ]
    for coming in found:
        if ctx.tier:
            ctx.tier.wait(layer, coming)
        yield coming.topk_slots_TK


def page_table_by_token(batch: AttentionBatch) -> Tensor:
    """int32 [T, N]: the pages of each token's request."""
    lens = batch.query_lens
    if len(lens) == batch.stop - batch.start:
        return batch.page_table_BN
    counts_B = batch.cu_seqlens_q_B1.diff()
    return batch.page_table_BN.repeat_interleave(counts_B, 0, output_size=batch.stop - batch.start)


def _segment(
    ctx: StepContext,
    layer: int,
    q_THD: Tensor,
    view: KVView,
    batch: AttentionBatch,
    params: AttentionParams,
    topk_slots_TK: Tensor | None,
) -> Iterator[Tensor]:
    route = ctx.plan.route(layer, batch.phase)
    parts = (
        dequantize_pages(view, batch, route.stage_to, params.window) if route.stage_to else ((view, batch),)
    )
    for part_view, part in parts:
        rows, own = slice(part.start, part.stop), params
        if params.topk_indices_TK is not None:
            topk_indices_TK, own_TK = params.topk_indices_TK[rows], topk_slots_TK
            if route.stage_to:  # staged pages are numbered anew
                own_TK = resident_slots(topk_indices_TK, page_table_by_token(part), None, view.page_size)
            own = replace(params, topk_indices_TK=topk_indices_TK, topk_slots_TK=own_TK)
        yield _attend(ctx.backends[route.backend], route, q_THD[rows], part_view, part, own)


def _attend(
    backend: AttentionBackend,
    route: Route,
    q_THD: Tensor,
    view: KVView,
    batch: AttentionBatch,
    params: AttentionParams,
) -> Tensor:
    try:
        return backend.attend(q_THD, view, batch, params)
    except (NibbleError, torch.OutOfMemoryError):  # which is explained where memory is known
        raise
    except Exception as error:
        raise BackendError(
            f"backend {route} failed in {batch.phase}: {type(error).__name__}: {error}"
        ) from error

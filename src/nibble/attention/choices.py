"""The tokens that sparse attention looks at: which a layer chooses, and where they lie.

Layers may share a choice. With a host tier, what is not on the device is fetched as soon as it is chosen.

Shape suffixes: T tokens, H heads of the indexer, D values of a head, K chosen tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from nibble.attention.step import StepContext, resident
from nibble.attention.window import ExactCache, SplitChoice
from nibble.cache.hot_buffer import PendingFetch
from nibble.kernels import indexer
from nibble.kernels.indexer import PAD_INDEX
from nibble.kernels.types import AttentionBatch, AttentionParams
from nibble.model_spec import INDEX, Phase


def select_topk(
    ctx: StepContext, layer: int, q_THD: Tensor, key_T1D: Tensor, weights_TH: Tensor, top_k: int,
    out_TK: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Store the layer's new index keys, and choose the tokens that each query looks at.

    Args:
        ctx: the step.
        layer: the layer's index.
        q_THD: the indexer's query.
        key_T1D: its new keys.
        weights_TH: weights of its heads.
        top_k: tokens to choose.
        out_TK: where to leave what is returned, if anywhere: another stream reads it until attention has waited.

    Returns:
        int32 [T, top_k], positions; PAD_INDEX behind the last.
    """
    slot_mapping_T = ctx.meta.slot_mapping_T
    ctx.pool.write(layer, {INDEX: key_T1D[: len(slot_mapping_T)]}, slot_mapping_T)
    keys = ctx.pool.view(layer).streams[INDEX].paged
    # Padding rows belong to no batch, and choose nothing.
    if out_TK is None:
        out_TK = q_THD.new_empty(len(q_THD), top_k, dtype=torch.int32)
    out_TK.fill_(PAD_INDEX)
    fetches: list[PendingFetch] = []
    for batch in ctx.meta.batches:
        rows, longest = slice(batch.start, batch.stop), max(batch.seq_lens)
        out_TK[rows] = indexer.select_topk(keys, batch, q_THD[rows], weights_TH[rows], top_k, longest)
        # With a host tier the tokens of this batch are fetched while the next one chooses.
        fetches.append(_start_fetch(ctx, layer, batch, out_TK[rows]))
    ctx.pending[layer] = fetches
    return out_TK


def _start_fetch(
    ctx: StepContext, layer: int, batch: AttentionBatch, topk_indices_TK: Tensor
) -> PendingFetch:
    """Look up where chosen tokens lie, and start to fetch what is not on the device.

    Near tokens are read elsewhere, with an exact window.
    """
    if ctx.exact:
        topk_indices_TK = ctx.states.split_choice(layer, batch, topk_indices_TK, ctx.exact).far_TK
    if ctx.tier is None:
        return PendingFetch(resident(topk_indices_TK, batch, ctx.pool.layout.page_size))
    page_table_TN = batch.page_table_TN
    # Only decoding requests have hot buffers; the pages of others are on the device.
    if batch.phase is not Phase.DECODE:
        return ctx.tier.lookup_resident(topk_indices_TK, page_table_TN)
    assert batch.rows_B is not None
    return ctx.tier.prefetch(layer, topk_indices_TK, page_table_TN, batch.rows_B)


def lookup_topk_slots(ctx: StepContext, layer: int, params: AttentionParams) -> Iterator[Tensor | None]:
    """Yield where the chosen tokens lie, batch by batch, each once all of them are on the device."""
    if params.topk_indices_TK is None:
        yield from [None] * len(ctx.meta.batches)
        return
    fetches = ctx.pending.get(params.index_layer)
    if fetches is None:  # no layer of this step chose them, so no other layer shares the choice
        fetches = [
            _start_fetch(ctx, layer, batch, params.topk_indices_TK[batch.start : batch.stop])
            for batch in ctx.meta.batches
        ]
    for fetch in fetches:
        if ctx.tier:
            ctx.tier.wait(layer, fetch)
        yield fetch.topk_slots_TK


def layer_choice(
    ctx: StepContext, exact: ExactCache, layer: int, batch: AttentionBatch, params: AttentionParams
) -> SplitChoice:
    """Return the near and far part of what a layer has chosen for a batch, or another whose choice it shares."""
    assert params.topk_indices_TK is not None
    # Layers that share a choice share its parts.
    chooser = params.index_layer if params.index_layer in ctx.pending else layer
    topk_indices_TK = params.topk_indices_TK[batch.start : batch.stop]
    return ctx.states.split_choice(chooser, batch, topk_indices_TK, exact)

"""MLA over splits of latents that are the same in every batch: the launch of triton.py's kernel with one tile for all.

Shape suffixes: T query tokens, H query heads, D values of a latent, R of them that are values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nibble.kernels import FIXED_SPLIT, GPU, cdiv, flash, gpu_of, next_power_of_2
from nibble.kernels.codecs import LATENTS, tiles
from nibble.kernels.mla.triton import (
    MAX_ROWS,
    LatentTile,
    first_fitting,
    heads_per_tile,
    mla_kernel,
    portable_tiles,
)
from nibble.kernels.types import AttentionBatch, Paged


def fixed_tile_of(group: int, latents: Paged, rope: int, query: torch.dtype, gpu: GPU) -> LatentTile:
    """Choose the tile of attention over fixed splits: one for any number of queries.

    Args:
        group: Heads of a token in a tile.
        latents: Pages of latents.
        rope: Rotary values at the end of each.
        query: The query's dtype.
        gpu: Sizes of the GPU.
    """
    return first_fitting(portable_tiles(MAX_ROWS, gpu.arch), group, latents, rope, query, gpu)


def fixed_mla_attention(
    q_THD: Tensor, latents: Paged, rope: int, batch: AttentionBatch, scale: float,
    window: int | None = None, *, shape: LatentTile | None = None, size: int = FIXED_SPLIT,
    spread: bool | None = None,
) -> Tensor:  # fmt: skip
    """Return attention as naive.py defines it, in which a row depends on nothing but its query and what it sees.

    As fixed_attention() in kernels/attention/fixed.py, over latents.

    Args:
        q_THD: Queries with the projections of keys absorbed, request after request.
        latents: Pages of latents, one head.
        rope: Rotary values at the end of a latent.
        batch: The pages and lengths of requests.
        scale: What scores are multiplied by.
        window: Tokens that a query sees, if not all.
        shape: Another tile than the fastest.
        size: Latents of a split.
        spread: Whether programs share the splits; by the number of queries if left out.

    Returns:
        [T, H, R] in the query's dtype.
    """
    (tokens, heads, dim), gpu = q_THD.shape, gpu_of(q_THD.device)
    rank, requests, max_query_len = dim - rope, len(batch.seq_lens_B), max(batch.query_lens)
    group = heads_per_tile(heads, shape.rows if shape else MAX_ROWS)
    shape = shape or fixed_tile_of(group, latents, rope, q_THD.dtype, gpu)
    num_tiles, splits = cdiv(max_query_len, shape.rows // group), cdiv(max(batch.seq_lens), size)
    out = q_THD.new_empty(tokens, heads, rank)
    spread, parts, stats = flash.fixed_workspace(out, splits, requests, max_query_len, spread)
    latent, rotary, kind = tiles.sections(latents, rope, q_THD.dtype)
    q_THD = q_THD if q_THD.stride(2) == 1 else q_THD.contiguous()
    mla_kernel[(num_tiles, heads // group, requests * splits if spread else requests)](
        q_THD, out, None, parts, stats, out, latent, rotary, latents.scale, batch.page_table_BN, batch.cu_seqlens_q_B1,
        batch.seq_lens_B, scale, requests, tokens, batch.page_table_BN.stride(0), q_THD.stride(0), q_THD.stride(1),
        group, rank, rope, kind, LATENTS[latents.format.name].decoder.fold, window or 0, spread,
        shape.stages, shape.rows, shape.latents, 1, 1, size, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    if spread:
        flash.combine_fixed_kernel[(max_query_len, heads, requests)](
            out, parts, stats, batch.cu_seqlens_q_B1, batch.seq_lens_B, q_THD, tokens, heads, shape.rows // group,
            rank, next_power_of_2(rank), size, window or 0, False, shape.latents, num_warps=1,
        )  # fmt: skip
    return out

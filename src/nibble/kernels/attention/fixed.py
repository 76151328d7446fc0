"""Attention whose rows depend on nothing but their query and the keys that they see, bit for bit.

Shape suffixes: T query tokens, H query heads, D values of a head.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nibble.kernels import FIXED_SPLIT, GPU, SM90, cdiv, flash, gpu_of, import_problem, next_power_of_2
from nibble.kernels.attention.triton import (
    StoredTokens,
    TileShape,
    attention_kernel,
    memory_of,
    stored_tiles,
    stored_tokens,
)
from nibble.kernels.codecs import DECODERS, tiles
from nibble.kernels.types import AttentionBatch, AttentionParams, Paged

FIXED_ROWS = 64
"""Rows of the smaller tile: those of a warp group's instruction on Hopper."""
SPLITS_OF_PROCESSOR = 1
"""Splits for each processor from which decode_fixed.cu, a warp of which takes a split, is faster than Triton."""


def fixed_shape_of(
    many: bool, group: int, k: Paged, v: Paged, query: torch.dtype, gpu: GPU
) -> TileShape:  # fmt: skip
    """Choose the tile of attention over fixed splits: of one arithmetic, whatever the number of queries.

    Tiles of keys are as large for many queries as for few, and each warp has 16 rows of queries, so that Hopper's wgmma
    computes both and a row's sums are shared by the same threads.

    Args:
        many: Whether there are more rows than a small tile has.
        group: Query heads of a KV head.
        k: Pages of the keys.
        v: Pages of the values.
        query: The query's dtype.
        gpu: Sizes of the GPU.
    """
    return _fixed_shape(many, next_power_of_2(group), stored_tokens(k, v), query.itemsize, gpu)


@functools.cache
def _fixed_shape(many: bool, group: int, kv: StoredTokens, item: int, gpu: GPU) -> TileShape:
    few = [
        TileShape(max(FIXED_ROWS, group), keys, True, 4, stages, 1)
        for keys in (64, 32, 16)
        for stages in (3, 2, 1)
    ]
    small = next(shape for shape in few if memory_of(shape, kv, item, gpu) <= gpu.memory)
    large = [replace(small, rows=2 * small.rows, warps=8, stages=stages) for stages in (3, 2, 1)]
    fitting = (shape for shape in large if memory_of(shape, kv, item, gpu) <= gpu.memory)
    return next(fitting, small) if many and small.rows == FIXED_ROWS else small


def fixed_attention(
    q_THD: Tensor, k: Paged, v: Paged, batch: AttentionBatch, params: AttentionParams, *,
    shape: TileShape | None = None, size: int = FIXED_SPLIT, spread: bool | None = None,
) -> Tensor:  # fmt: skip
    """Return attention as naive.py defines it, in which a row depends on nothing but its query and the keys it sees.

    Splits of keys begin at multiples of `size`, each has a softmax of its own over tiles at fixed keys, and they are
    merged in their order: by one program, or by a second launch where programs share them, with the same bits. On
    Hopper those of decode steps may be computed by decode_fixed.cu, with the same bits too.

    Args:
        q_THD: Queries, request after request.
        k: Pages of the keys.
        v: Pages of the values.
        batch: The pages and lengths of requests.
        params: Scale, window, capping and sinks.
        shape: Another tile than the fastest.
        size: Keys of a split.
        spread: Whether programs share the splits; by the number of queries if left out.

    Returns:
        [T, H, D] in the query's dtype.
    """
    (tokens, heads, dim), gpu = q_THD.shape, gpu_of(q_THD.device)
    group, requests, max_query_len = heads // k.heads, len(batch.seq_lens_B), max(batch.query_lens)
    splits, out = cdiv(max(batch.seq_lens), size), q_THD.new_empty(tokens, heads, v.dim)
    spread, parts, stats = flash.fixed_workspace(out, splits, requests, max_query_len, spread)
    # Few splits take less time where several warps share one, as they do in Triton.
    many = requests * splits * k.heads >= SPLITS_OF_PROCESSOR * gpu.processors
    decode = _decode_kernel(k, v, gpu) if spread and many and shape is None else None
    if decode and decode.serves(q_THD, k, batch, params):
        decode.fixed_parts(q_THD.contiguous(), k, v, batch, params, (parts, stats), size)
        _combine(out, parts, stats, batch, params, max_query_len, decode.tile, size)
        return out
    shape = shape or fixed_shape_of(max_query_len * group > FIXED_ROWS, group, k, v, q_THD.dtype, gpu)
    num_tiles = cdiv(max_query_len, shape.rows // group)
    q_THD = q_THD if q_THD.stride(2) == 1 else q_THD.contiguous()
    sinks, has_sinks = q_THD if params.sinks_H is None else params.sinks_H, params.sinks_H is not None
    attention_kernel[(num_tiles, k.heads, requests * splits if spread else requests)](
        q_THD, out, None, parts, stats, out, *(stored_tiles(stream, q_THD.dtype, True, True) for stream in (k, v)),
        batch.page_table_BN, batch.cu_seqlens_q_B1, batch.seq_lens_B, sinks, params.scale, params.softcap or 0.0,
        requests, tokens, batch.page_table_BN.stride(0), q_THD.stride(0), q_THD.stride(1),
        group, dim, v.dim, params.window or 0, params.softcap is not None, has_sinks, spread,
        True, shape.rows, shape.keys, 1, 1, size, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    if spread:
        _combine(out, parts, stats, batch, params, shape.rows // group, shape.keys, size)
    return out


def _combine(
    out_THD: Tensor, parts: Tensor, stats: Tensor, batch: AttentionBatch, params: AttentionParams, tokens: int,
    keys: int, size: int,
) -> None:  # fmt: skip
    """Merge the splits that programs left. tokens, keys: of a tile."""
    count, heads, dim = out_THD.shape
    has_sinks = params.sinks_H is not None
    flash.combine_fixed_kernel[(max(batch.query_lens), heads, len(batch.seq_lens_B))](
        out_THD, parts, stats, batch.cu_seqlens_q_B1, batch.seq_lens_B, params.sinks_H if has_sinks else out_THD,
        count, heads, tokens, dim, next_power_of_2(dim), size, params.window or 0, has_sinks, keys, num_warps=1,
    )  # fmt: skip


@tiles.once_per_stream
def _decode_kernel(k: Paged, v: Paged, gpu: GPU) -> Any:
    """Return the launcher of decode_fixed.cu for these pages; None where it does not serve them."""
    halves = all(DECODERS[pages.format.name].half == torch.float16 for pages in (k, v))
    if gpu.arch != SM90 or not halves or import_problem("cuda.bindings"):
        return None
    from nibble.kernels.attention.cuda import FixedDecode

    return FixedDecode.of(k, v, gpu)

"""attention: queries over paged keys and values, for every phase; merging of parts; and prefill by torch's kernels.

Queries are the last tokens of their requests, so each sees the stored tokens up to its own, itself included.

Prefill, of many new tokens, calls the fused kernels that torch brings for CUDA. Pages are dequantised into a workspace
of a fixed number of tokens, whatever the context: attention over more keys is made of parts, merged by their
log-sum-exp. No mask is made.

cuDNN's kernel is the fastest of these on Hopper and big Blackwell, but it makes a plan for every new shape (40 ms). So
it is given few shapes: new tokens in blocks of QUERY_SIZES, keys in pieces of KEY_SIZES (and of as many tokens less as
an exact window leaves out). What is left of the keys goes to torch's flash kernel. What is left of the tokens, and
short prompts, goes to the kernel that reads pages as they are (triton.py), which splits keys where there are few
queries.

Shape suffixes: T query tokens, B requests, N pages, L keys, H query heads, D values of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from nibble.kernels import PREFILL_WORKSPACE, cdiv, triton_present
from nibble.kernels.append import dequantize_pages
from nibble.kernels.attention import naive
from nibble.kernels.attention.naive import PartialAttention
from nibble.kernels.transfer import to_device
from nibble.kernels.types import AttentionBatch, AttentionParams, Paged
from nibble.model_spec import Phase

QUERY_SIZES = (8192, 4096, 2048)
KEY_SIZES = (PREFILL_WORKSPACE, 16384, 8192, 4096, 2048)
"""Sizes of new tokens and of keys that cuDNN is given. For fewer tokens the kernel that reads pages is no slower."""


def merge_lse(a: PartialAttention, b: PartialAttention, dtype: torch.dtype) -> PartialAttention:
    """Merge attention over different keys; see naive.py.

    Args:
        a: Attention over some keys.
        b: Attention of the same queries over other keys.
        dtype: Dtype of the values returned.
    """
    if a.lse_HT.is_cuda and triton_present():
        from nibble.kernels.attention.triton import merge_lse as fast

        return fast(a, b, dtype)
    return naive.merge_lse(a, b, dtype)


# ---- prefill ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class KeyTile:
    """Keys for all rows of a block: some of the tokens that a request's pages hold."""

    pages_1N: Tensor
    keys: slice
    """Which of the tokens in these pages."""
    causal: bool
    """Whether the rows are the last of the keys, and see those up to their own."""
    cudnn: bool
    """Whether it is one of cuDNN's shapes."""
    cu_seqlens_q_2: Tensor
    """Int32, zero and the number of rows, and of keys in cu_seqlens_k_2: how flash takes a single request."""
    cu_seqlens_k_2: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class QueryBlock:
    """Rows of the queries."""

    rows: slice
    plan: tuple[KeyTile, ...] | AttentionBatch
    """Tiles that hold all keys that rows of one request see; or requests with a few rows each."""


def serves(k: Paged, v: Paged) -> bool:
    """Return whether there are kernels for these pages."""
    # Limits of torch's flash kernel.
    if k.dim != v.dim or k.dim > 256 or k.dim % 8 or not triton_present():
        return False
    from nibble.kernels.codecs.tiles import serves as has_decoder

    return has_decoder(k) and has_decoder(v)


def prefill_attention(
    q_THD: Tensor, k: Paged, v: Paged, blocks: Sequence[QueryBlock], params: AttentionParams
) -> Tensor:
    """Return attention of the rows of all blocks.

    Args:
        q_THD: Queries, request after request.
        k: Pages of the keys.
        v: Pages of the values.
        blocks: From plan_blocks, in order.
        params: The scale; there is no window, no capping and no sinks.

    Returns:
        [T, H, D] in the query's dtype.
    """
    outputs = [_block(q_THD[block.rows], k, v, block.plan, params) for block in blocks]
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def partial_prefill_attention(
    q_THD: Tensor, k: Paged, v: Paged, blocks: Sequence[QueryBlock], params: AttentionParams
) -> PartialAttention:
    """Return what prefill_attention returns, with its log-sum-exp.

    Args:
        q_THD: Queries, request after request. There may be more of a request than it has stored tokens: the first of
            them then see none.
        k: Pages of the keys.
        v: Pages of the values.
        blocks: From plan_blocks, in order.
        params: The scale; there is no window, no capping and no sinks.
    """
    parts = [_partial_block(q_THD[block.rows], k, v, block.plan, params) for block in blocks]
    if len(parts) == 1:
        return parts[0]
    values_THD = torch.cat([part.values_THD for part in parts])
    return PartialAttention(values_THD, torch.cat([part.lse_HT for part in parts], 1))


def _block(
    q_THD: Tensor, k: Paged, v: Paged, plan: tuple[KeyTile, ...] | AttentionBatch, params: AttentionParams
) -> Tensor:
    if isinstance(plan, AttentionBatch):
        return _short(q_THD, k, v, plan, params)
    return _tiles(q_THD, k, v, plan, params.scale).values_THD


def _partial_block(
    q_THD: Tensor, k: Paged, v: Paged, plan: tuple[KeyTile, ...] | AttentionBatch, params: AttentionParams
) -> PartialAttention:
    if isinstance(plan, AttentionBatch):
        return _partial_short(q_THD, k, v, plan, params)
    return _tiles(q_THD, k, v, plan, params.scale)


def _tiles(q_THD: Tensor, k: Paged, v: Paged, tiles: tuple[KeyTile, ...], scale: float) -> PartialAttention:
    """Return attention over all tiles; values are in the query's dtype."""
    total = _tile(q_THD, k, v, tiles[0], scale)
    for tile in tiles[1:]:
        # Merged parts stay in float32, and only the last merge rounds.
        rounded = q_THD.dtype if tile is tiles[-1] else torch.float32
        total = merge_lse(total, _tile(q_THD, k, v, tile, scale), rounded)
    return total


def _tile(q_THD: Tensor, k: Paged, v: Paged, tile: KeyTile, scale: float) -> PartialAttention:
    k_LHD, v_LHD = (dequantize_pages(stream, tile.pages_1N, q_THD.dtype)[0, tile.keys] for stream in (k, v))
    return (_cudnn if tile.cudnn else _flash)(q_THD, k_LHD, v_LHD, tile, scale)


def _cudnn(q_THD: Tensor, k_LHD: Tensor, v_LHD: Tensor, tile: KeyTile, scale: float) -> PartialAttention:
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_LHD, v_LHD))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, tile.causal, False, scale=scale
    )
    return PartialAttention(out[0].transpose(0, 1), lse[0, :, :, 0])


def _flash(q_THD: Tensor, k_LHD: Tensor, v_LHD: Tensor, tile: KeyTile, scale: float) -> PartialAttention:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q_THD, k_LHD, v_LHD, tile.cu_seqlens_q_2, tile.cu_seqlens_k_2, len(q_THD), len(k_LHD), 0.0, tile.causal, False,
        scale=scale,
    )  # fmt: skip
    return PartialAttention(out, lse)


def _short(q_THD: Tensor, k: Paged, v: Paged, batch: AttentionBatch, params: AttentionParams) -> Tensor:
    from nibble.kernels.attention.triton import paged_attention

    return paged_attention(q_THD, k, v, batch, params, max(batch.seq_lens))


def _partial_short(
    q_THD: Tensor, k: Paged, v: Paged, batch: AttentionBatch, params: AttentionParams
) -> PartialAttention:
    from nibble.kernels.attention.triton import partial_attention

    return partial_attention(q_THD, k, v, batch, params, max(batch.seq_lens))


# ---- how requests are cut --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows [row, row + count) of the queries, which are the last of the first `length` tokens of a request."""

    request: int
    row: int
    count: int
    length: int
    short: bool


def plan_blocks(batch: AttentionBatch, page_size: int, *, cudnn: bool) -> tuple[QueryBlock, ...]:
    """Cut the queries of requests into blocks.

    Args:
        batch: The requests. Where one has more new tokens than are stored, the first of them see none.
        page_size: Tokens of a page.
        cudnn: Whether cuDNN may be used.

    Returns:
        Blocks in the order of rows.
    """
    table_BN, query_sizes = batch.page_table_BN, QUERY_SIZES if cudnn else QUERY_SIZES[:1]
    rows = _rows(batch.query_lens, batch.seq_lens, _sizes(query_sizes, batch.num_omitted))
    key_sizes = _sizes(KEY_SIZES if cudnn else KEY_SIZES[:1], batch.num_omitted)
    groups = (tuple(group) for _, group in groupby(rows, lambda part: None if part.short else part.row))
    return tuple(
        QueryBlock(
            slice(group[0].row, group[-1].row + group[-1].count),
            _short_batch(group, table_BN)
            if group[0].short
            else tuple(_key_tiles(group[0], table_BN, page_size, key_sizes, cudnn)),
        )
        for group in groups
    )


def _sizes(sizes: Sequence[int], num_omitted: int) -> tuple[int, ...]:
    """Return sizes of tiles, descending: those given, and what is left of them without the tokens omitted.

    Small ones are left out: a prompt would be cut into very many.
    """
    shorter = [size - num_omitted for size in sizes if 2 * (size - num_omitted) >= min(sizes)]
    return tuple(sorted({*sizes, *shorter}, reverse=True))


def _rows(query_lens: Sequence[int], seq_lens: Sequence[int], sizes: Sequence[int]) -> Iterator[_Rows]:
    row = 0
    for i, (query_len, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        counts, end = [*_cut(min(query_len, length), sizes)], max(length - query_len, 0)
        blind = query_len - sum(counts)  # rows before the first stored token
        if blind and (not counts or counts[0] not in sizes):
            # The kernel for short parts knows what each row sees. A request has no two of them in a row.
            yield _Rows(i, row, query_len, length, True)
            row += query_len
            continue
        if blind:
            yield _Rows(i, row, blind, 0, True)
            row += blind
        for count in counts:
            end += count
            # Only what is left after the cut has another size, and that is short.
            yield _Rows(i, row, count, end, count not in sizes)
            row += count


def _short_batch(group: Sequence[_Rows], page_table_BN: Tensor) -> AttentionBatch:
    """Return neighbours, each with its only few rows, as a batch."""
    pages_BN = page_table_BN[group[0].request : group[-1].request + 1]
    query_lens, seq_lens = [part.count for part in group], [part.length for part in group]
    return AttentionBatch.from_lens(Phase.EXTEND, group[0].row, query_lens, seq_lens, pages_BN)


def _key_tiles(
    part: _Rows, page_table_BN: Tensor, page_size: int, sizes: Sequence[int], cudnn: bool
) -> Iterator[KeyTile]:
    """Yield what all rows see, in pieces; then the keys up to the last row's."""
    on_device = partial(to_device, dtype=torch.int32, device=page_table_BN.device)
    start = 0
    for keys in (*_cut(part.length - part.count, sizes), part.count):
        stop, first = start + keys, start // page_size
        causal = stop == part.length
        # Whole pages are dequantised, so the slice leaves out what else the first and the last page hold.
        yield KeyTile(
            page_table_BN[part.request : part.request + 1, first : cdiv(stop, page_size)],
            slice(start - first * page_size, stop - first * page_size),
            causal,
            cudnn and (causal or keys in sizes),
            on_device((0, part.count)),
            on_device((0, keys)),
        )
        start = stop


def _cut(total: int, sizes: Sequence[int]) -> Iterator[int]:
    """Yield `total` cut into as few of `sizes` (descending) as hold it, then what is left."""
    for size in sizes:
        yield from [size] * (total // size)
        total %= size
    if total:
        yield total

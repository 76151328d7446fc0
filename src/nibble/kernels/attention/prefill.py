"""prefill: many new tokens over paged keys and values, by the fused kernels that torch brings for CUDA.

Pages are dequantised into a workspace of a fixed number of tokens, whatever the context: attention over more keys is
made of parts, merged by their log-sum-exp. No mask is made. cuDNN's kernel is the fastest on Hopper, and makes a plan
for every new shape (40 ms), so it is given few: new tokens in blocks of ROWS, keys in pieces of KEYS. What is left of
the keys goes to torch's flash kernel; what is left of the tokens, and short prompts, to the kernel that reads pages as
they are (kernels/attention/__init__.py), which splits keys where there are few queries.

Owns the cutting of requests. Must not know of plans or phases.

Shape suffixes: T query tokens, B requests, N pages, L keys, H query heads, D values of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from nibble.kernels import triton_present
from nibble.kernels.attention.merge import Part, merge_lse
from nibble.kernels.gather import dequantize_pages
from nibble.kernels.sizes import PREFILL_WORKSPACE
from nibble.kernels.types import AttentionBatch, AttentionParams, Paged
from nibble.model_spec import Phase

ROWS = (8192, 4096, 2048)
KEYS = (PREFILL_WORKSPACE, 16384, 8192, 4096, 2048)
"""Sizes of new tokens and of keys that cuDNN is given. For fewer tokens the kernel that reads pages is no slower."""
WORKSPACE = KEYS[0]


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """Keys for all rows of a block: the tokens `keys` of those that pages_1N hold.

    causal: the rows are the last of the keys, and see those up to their own. cudnn: whether it is one of its shapes.
    cu_seqlens_q_2, cu_seqlens_k_2: int32, zero and the number of rows, of keys: how flash takes a single request.
    """

    pages_1N: Tensor
    keys: slice
    causal: bool
    cudnn: bool
    cu_seqlens_q_2: Tensor
    cu_seqlens_k_2: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Rows of the queries: some of one request, and the tiles that hold all keys they see; or a few each of several."""

    rows: slice
    work: tuple[Tile, ...] | AttentionBatch


def serves(k: Paged, v: Paged) -> bool:
    """Whether there are kernels for these pages."""
    if k.dim != v.dim or k.dim > 256 or k.dim % 8 or not triton_present():
        return False
    from nibble.kernels.attention import triton as attention

    return attention.serves(k) and attention.serves(v)


def prefill_attention(
    q_THD: Tensor, k: Paged, v: Paged, blocks: Sequence[Block], params: AttentionParams
) -> Tensor:
    """Attention of the rows of all blocks, which come in order -> [T, H, D]. No window, no capping, no sinks."""
    found = [_block(q_THD[block.rows], k, v, block.work, params) for block in blocks]
    return torch.cat(found) if len(found) > 1 else found[0]


def _block(
    q_THD: Tensor, k: Paged, v: Paged, work: tuple[Tile, ...] | AttentionBatch, params: AttentionParams
) -> Tensor:
    if isinstance(work, AttentionBatch):
        return _few(q_THD, k, v, work, params)
    total = _tile(q_THD, k, v, work[0], params.scale)
    for tile in work[1:]:
        dtype = q_THD.dtype if tile is work[-1] else torch.float32
        total = merge_lse(total, _tile(q_THD, k, v, tile, params.scale), dtype)
    return total.values_THD


def _tile(q_THD: Tensor, k: Paged, v: Paged, tile: Tile, scale: float) -> Part:
    k_LHD, v_LHD = (dequantize_pages(stream, tile.pages_1N, q_THD.dtype)[0, tile.keys] for stream in (k, v))
    return (_cudnn if tile.cudnn else _flash)(q_THD, k_LHD, v_LHD, tile, scale)


def _cudnn(q_THD: Tensor, k_LHD: Tensor, v_LHD: Tensor, tile: Tile, scale: float) -> Part:
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_LHD, v_LHD))
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, tile.causal, False, scale=scale
    )
    return Part(found[0][0].transpose(0, 1), found[1][0, :, :, 0])


def _flash(q_THD: Tensor, k_LHD: Tensor, v_LHD: Tensor, tile: Tile, scale: float) -> Part:
    found = torch.ops.aten._flash_attention_forward(
        q_THD, k_LHD, v_LHD, tile.cu_seqlens_q_2, tile.cu_seqlens_k_2, len(q_THD), len(k_LHD), 0.0, tile.causal, False,
        scale=scale,
    )  # fmt: skip
    return Part(found[0], found[1])


def _few(q_THD: Tensor, k: Paged, v: Paged, batch: AttentionBatch, params: AttentionParams) -> Tensor:
    from nibble.kernels.attention import triton as attention

    return attention.paged_attention(q_THD, k, v, batch, params, max(batch.seq_lens))


@dataclass(frozen=True, slots=True)
class _Ask:
    """Rows [row, row + rows) of the queries, which are the last of the first `length` tokens of a request."""

    request: int
    row: int
    rows: int
    length: int
    few: bool


def cut(
    query_lens: Sequence[int], seq_lens: Sequence[int], page_table_BN: Tensor, page_size: int, *, cudnn: bool
) -> tuple[Block, ...]:
    """The blocks of requests that ask with the last query_lens of their seq_lens tokens. cudnn: whether it may be used."""
    asks = _asks(query_lens, seq_lens, ROWS if cudnn else ROWS[:1])
    groups = (tuple(group) for _, group in groupby(asks, lambda ask: None if ask.few else ask.row))
    return tuple(
        Block(
            slice(group[0].row, group[-1].row + group[-1].rows),
            _together(group, page_table_BN)
            if group[0].few
            else tuple(_tiles(group[0], page_table_BN, page_size, cudnn)),
        )
        for group in groups
    )


def _asks(query_lens: Sequence[int], seq_lens: Sequence[int], sizes: Sequence[int]) -> Iterator[_Ask]:
    row = 0
    for i, (count, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        end = length - count
        for rows in _sizes(count, sizes):
            end += rows
            yield _Ask(i, row, rows, end, rows not in sizes)
            row += rows


def _together(asks: Sequence[_Ask], page_table_BN: Tensor) -> AttentionBatch:
    """Neighbours, each with its only ask for few rows."""
    pages_BN = page_table_BN[asks[0].request : asks[-1].request + 1]
    query_lens, seq_lens = [ask.rows for ask in asks], [ask.length for ask in asks]
    return AttentionBatch.from_lens(Phase.EXTEND, asks[0].row, query_lens, seq_lens, pages_BN)


def _tiles(ask: _Ask, page_table_BN: Tensor, size: int, cudnn: bool) -> Iterator[Tile]:
    """What all rows see, in pieces; then the keys up to the last row's."""
    on_device = partial(torch.tensor, dtype=torch.int32, device=page_table_BN.device)
    start, pieces = 0, KEYS if cudnn else KEYS[:1]
    for keys in (*_sizes(ask.length - ask.rows, pieces), ask.rows):
        stop, first = start + keys, start // size
        causal = stop == ask.length
        yield Tile(
            page_table_BN[ask.request : ask.request + 1, first : -(-stop // size)],
            slice(start - first * size, stop - first * size),
            causal,
            cudnn and (causal or keys in KEYS),
            on_device((0, ask.rows)),
            on_device((0, keys)),
        )
        start = stop


def _sizes(total: int, sizes: Sequence[int]) -> Iterator[int]:
    """`total` cut into as few of `sizes` (descending) as hold it, then what is left."""
    for size in sizes:
        yield from [size] * (total // size)
        total %= size
    if total:
        yield total

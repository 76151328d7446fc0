"""Triton kernels of the indexer: scores by tensor cores from pages in their own format, then the top k of each row.

Scores go through a workspace of bounded size, some rows of queries at a time. Few queries of a request are held while
its keys stream by; of many, each program holds a tile of keys while queries stream by. SM90 has kernels of its own for
scores (gluon_sm90.py), and CUDA C++ one for the top k (topk.cu), where it can be compiled. Lengths are read on the
device, and grids depend on none.

Shape suffixes: T query tokens, H heads of the indexer, D values of a key, N keys of a tile, W words of a key,
R requests, S rows of scores, L tokens, K = top_k. Names in capitals are constants of a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels import GPU, SM90, cdiv, flash, gpu_of, next_power_of_2
from nibble.kernels.codecs import INDEX_KEYS, tiles
from nibble.kernels.indexer.naive import PAD_INDEX
from nibble.kernels.types import AttentionBatch, Paged

WORKSPACE = 64 << 20
"""Bytes of scores held at a time."""
FEW_QUERIES = 8
"""Queries of a request for which keys stream by."""
CHUNK = 64
"""Queries that stream by one program."""
MIN_HEADS, MAX_HEADS = 16, 128
TOPK_TILE, TOPK_WARPS = 4096, 16
"""Scores that a program of topk_kernel reads at a time."""
PADDING = tl.constexpr(PAD_INDEX)


# ---- scores ----------------------------------------------------------------------------------------------------------


@triton.jit
def _entry(r_R, request, x_R):
    """Return entry `request` of a vector."""
    return tl.sum(tl.where(r_R == request, x_R, 0))


@triton.jit
def _find_tile(
    tile, turn, cu_seqlens_q, seq_lens, requests, first_row, rows, N: tl.constexpr, R: tl.constexpr
):
    """Find a tile in the line of all tiles that query tokens `turn` of requests see.

    Returns:
        How many tiles there are; and of this one the request, the row of its query, how many tokens it sees, and the
        row's first tile and the next row's.
    """
    r_R = tl.arange(0, R)
    live_R = r_R < requests
    row_R = tl.load(cu_seqlens_q + r_R, mask=live_R, other=0) + turn
    end_R = tl.load(cu_seqlens_q + 1 + r_R, mask=live_R, other=0)
    # A query sees all stored tokens but those of the queries after it.
    visible_R = tl.load(seq_lens + r_R, mask=live_R, other=0) - end_R + row_R + 1
    in_rows_R = (row_R < end_R) & (row_R >= first_row) & (row_R < first_row + rows)
    tiles_R = tl.where(in_rows_R, tl.cdiv(tl.maximum(visible_R, 0), N), 0)
    next_R = tl.cumsum(tiles_R)
    # As many requests as end at or before this tile come before the one that has it.
    request = tl.sum((next_R <= tile).to(tl.int32))
    row, visible, upto = (
        _entry(r_R, request, row_R), _entry(r_R, request, visible_R), _entry(r_R, request, next_R)
    )  # fmt: skip
    return tl.sum(tiles_R), request, row, visible, upto - _entry(r_R, request, tiles_R), upto


@triton.jit
def _weighted(products, weights_H):
    """Sum products [N, H] up to scores [N]. A NaN stays one."""
    positive = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.sum(positive * weights_H[None, :], 1)


@triton.jit
def _score_tile(keys, queries, weights_H, table, first, n_N, visible, to):
    """Score a tile of a request's keys for one query, and store what it sees."""
    # --- load
    page = tiles.pages_of(table, first, n_N, visible, keys.PAGE_SIZE)
    slot_N = tiles.slots_of(first, n_N, keys.PAGE_SIZE)
    keep_N = first + n_N < visible
    items = tiles.read_rows(keys.items, page, slot_N, 0, keep_N, 1, False)
    parts = keys.DECODE(items, 0, keys.DTYPE)
    # --- scores
    products = tl.dot(parts[0], tl.trans(queries[0]), input_precision="ieee")
    for j in tl.static_range(1, keys.PARTS):
        products = tl.dot(parts[j], tl.trans(queries[j]), products, input_precision="ieee")
    score_N = _weighted(products, weights_H)
    if keys.SCALED:  # a key's scale is positive, so it can wait until now
        score_N *= tiles.read_key_scales(keys, page, slot_N, keep_N)
    # --- store
    tl.store(to + first + n_N, score_N, mask=keep_N)


@triton.jit(
    do_not_specialize=["requests", "first_row", "rows", "score_stride", "table_stride"],
    do_not_specialize_on_alignment=["table", "cu_seqlens_q", "seq_lens"],
)
def score_few_kernel(
    q, weights, scores, keys, global_scale, table, cu_seqlens_q, seq_lens, requests, first_row, rows, score_stride,
    table_stride, q_stride_T, q_stride_H, weights_stride, HEADS: tl.constexpr, DIM: tl.constexpr, H: tl.constexpr,
    N: tl.constexpr, R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Score keys for few queries of each request: rows [first_row, first_row + rows).

    Grid: programs, and query tokens of a request. All tiles of the batch stand in one line, which is cut evenly.
    """
    program, turn, n_N = tl.program_id(0), tl.program_id(1), tl.arange(0, N)
    total = _find_tile(0, turn, cu_seqlens_q, seq_lens, requests, first_row, rows, N, R)[0].to(tl.int64)
    tile = (total * program // tl.num_programs(0)).to(tl.int32)
    stop = (total * (program + 1) // tl.num_programs(0)).to(tl.int32)
    unit = tl.load(global_scale)
    h_H = tl.arange(0, H)
    while tile < stop:
        # --- load the query of the row that comes next
        _, request, row, visible, base, upto = _find_tile(
            tile, turn, cu_seqlens_q, seq_lens, requests, first_row, rows, N, R
        )
        upto = tl.minimum(upto, stop)
        at_H = row.to(tl.int64) * q_stride_T + h_H * q_stride_H
        queries = flash.load_queries(q, at_H, h_H < HEADS, keys.PARTS, keys.items.WIDTH, DIM, keys.DTYPE)
        weights_H = tl.load(weights + row.to(tl.int64) * weights_stride + h_H, mask=h_H < HEADS, other=0.0)
        weights_H = weights_H.to(tl.float32) * unit
        pages = table + request.to(tl.int64) * table_stride
        to = scores + (row - first_row).to(tl.int64) * score_stride
        # --- its keys stream by
        for first in tl.range((tile - base) * N, (upto - base) * N, N, num_stages=STAGES):
            _score_tile(keys, queries, weights_H, pages, first, n_N, visible, to)
        tile = upto


@triton.jit(
    do_not_specialize=["first_request", "first_row", "rows", "score_stride", "table_stride"],
    do_not_specialize_on_alignment=["table", "cu_seqlens_q", "seq_lens"],
)
def score_many_kernel(
    q, weights, scores, keys, global_scale, table, cu_seqlens_q, seq_lens, first_request, first_row, rows, score_stride,
    table_stride, q_stride_T, q_stride_H, weights_stride, HEADS: tl.constexpr, DIM: tl.constexpr, H: tl.constexpr,
    N: tl.constexpr, EACH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Score a tile of keys for many queries of a request. Grid: tiles of keys, EACH query tokens, and requests."""
    # --- which queries
    first, request = tl.program_id(0) * N, tl.program_id(2) + first_request
    begin, end, length = (
        tl.load(cu_seqlens_q + request), tl.load(cu_seqlens_q + request + 1), tl.load(seq_lens + request)
    )  # fmt: skip
    past = length - (end - begin)
    row = tl.maximum(begin, first_row) + tl.program_id(1) * EACH
    stop = tl.minimum(tl.minimum(row + EACH, end), first_row + rows)
    row = tl.maximum(row, begin + first - past)  # the first that sees a key of the tile
    if (row >= stop) | (length == 0):
        return
    # --- load keys
    n_N, h_H, d_D = tl.arange(0, N), tl.arange(0, H), tl.arange(0, keys.items.WIDTH * keys.PARTS)
    table += request.to(tl.int64) * table_stride
    page = tiles.pages_of(table, first, n_N, length, keys.PAGE_SIZE)
    slot_N = tiles.slots_of(first, n_N, keys.PAGE_SIZE)
    keep_N = first + n_N < length
    items = tiles.read_rows(keys.items, page, slot_N, 0, keep_N, 1, True)
    values = tiles.interleave(keys.DECODE(items, 0, keys.DTYPE), keys.PARTS)
    scale_N = tl.full([N], 1.0, tl.float32) * tl.load(global_scale)
    if keys.SCALED:
        scale_N *= tiles.read_key_scales(keys, page, slot_N, keep_N)
    # --- queries stream by
    q += h_H[:, None] * q_stride_H + d_D[None, :]
    for current in tl.range(row, stop, num_stages=STAGES):
        at = current + tl.zeros([], tl.int64)
        if (
            HEADS == H and DIM == keys.items.WIDTH * keys.PARTS
        ):  # without masks loads become asynchronous copies
            queries = tl.load(q + at * q_stride_T)
            weights_H = tl.load(weights + at * weights_stride + h_H)
        else:
            mask = (h_H < HEADS)[:, None] & (d_D < DIM)[None, :]
            queries = tl.load(q + at * q_stride_T, mask=mask, other=0.0)
            weights_H = tl.load(weights + at * weights_stride + h_H, mask=h_H < HEADS, other=0.0)
        products = tl.dot(values, tl.trans(queries), input_precision="ieee")
        score_N = _weighted(products, weights_H.to(tl.float32)) * scale_N
        tl.store(scores + (at - first_row) * score_stride + first + n_N, score_N, mask=keep_N)


# ---- top k -----------------------------------------------------------------------------------------------------------


@triton.jit
def _ranks(scores):
    """Return int64 numbers from 0 in the order of scores. NaN is the largest, as torch sorts it; zeros are equal."""
    bits = scores.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    order = tl.where(bits < 0, 0x7FFFFFFF - size.to(tl.int64), size.to(tl.int64) + 0x80000000)
    order = tl.where(size == 0, 0x80000000, order)
    return tl.where(size > 0x7F800000, 0xFFFFFFFF, order)


@triton.jit
def _narrow(scores, visible, least, need, SHIFT: tl.constexpr, N: tl.constexpr):
    """Find 8 more bits of the least rank that is selected.

    Args:
        scores: Pointer to the row.
        visible: Its scores.
        least: The rank, but for its last SHIFT + 8 bits.
        need: How many ranks that begin as it does are selected.
        SHIFT: Bits that stay open.
        N: Scores of a tile.

    Returns:
        The rank but for its last SHIFT bits, and how many are selected of those that begin as it does.
    """
    n_N, d_D = tl.arange(0, N), tl.arange(0, 256)
    counts_D = tl.zeros([256], tl.int32)
    for first in range(0, visible, N):
        keep_N = first + n_N < visible
        rank_N = _ranks(tl.load(scores + first + n_N, mask=keep_N, other=0.0))
        keep_N &= (rank_N >> (SHIFT + 8)) == (least >> (SHIFT + 8))
        counts_D += tl.histogram((rank_N >> SHIFT).to(tl.int32) & 255, 256, mask=keep_N)
    above_D = tl.sum(counts_D) - tl.cumsum(counts_D)
    digit = tl.sum((above_D >= need).to(tl.int32))
    return least + (digit.to(tl.int64) << SHIFT), need - _entry(d_D, digit, above_D)


@triton.jit(
    do_not_specialize=["requests", "first_row", "score_stride"],
    do_not_specialize_on_alignment=["cu_seqlens_q", "seq_lens"],
)
def topk_kernel(
    scores, topk_indices, cu_seqlens_q, seq_lens, requests, first_row, score_stride, TOP_K: tl.constexpr,
    K: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Select the top k of a row of scores. Grid: rows. K: a power of two that is not less than TOP_K."""
    # --- which request
    row = tl.program_id(0)
    scores += row.to(tl.int64) * score_stride
    row += first_row
    r_R, n_N = tl.arange(0, R), tl.arange(0, N)
    end_R = tl.load(cu_seqlens_q + 1 + r_R, mask=r_R < requests, other=1 << 30)
    request = tl.sum((end_R <= row).to(tl.int32))
    # Rows behind the last request are padding, which sees nothing.
    length = tl.load(seq_lens + request, mask=request < requests, other=0)
    visible = tl.where(length > 0, length - _entry(r_R, request, end_R) + row + 1, 0)
    topk_indices += row.to(tl.int64) * TOP_K

    # --- the least score that is selected, 8 bits at a time
    least, need = tl.zeros([], tl.int64), tl.full([], TOP_K, tl.int32)
    # Where all tokens fit, the least rank stays 0 and all of them are selected.
    if visible > TOP_K:
        for digit in tl.static_range(4):
            least, need = _narrow(scores, visible, least, need, 24 - 8 * digit, N)
    # --- store what is above it, and of its equals the first
    placed, equals = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for first in range(0, visible, N):
        keep_N = first + n_N < visible
        rank_N = _ranks(tl.load(scores + first + n_N, mask=keep_N, other=0.0))
        equal_N = (keep_N & (rank_N == least)).to(tl.int32)
        before_N = equals + tl.cumsum(equal_N) - equal_N
        selected_N = (keep_N & ((rank_N > least) | ((equal_N > 0) & (before_N < need)))).to(tl.int32)
        place_N = placed + tl.cumsum(selected_N) - selected_N
        tl.store(topk_indices + place_N, first + n_N, mask=selected_N > 0)
        placed += tl.sum(selected_N)
        equals += tl.sum(equal_N)
    k_K = tl.arange(0, K)
    tl.store(topk_indices + k_K, tl.full([K], PADDING, tl.int32), mask=(k_K >= placed) & (k_K < TOP_K))


# ---- launches --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScoreTile:
    """How keys are tiled for scores."""

    keys: int
    warps: int
    stages: int
    """Stages of loads in flight."""
    programs: int
    """Programs of a processor."""
    sm90: bool = False
    """Whether it is computed by gluon_sm90.py."""


FEW_TILES = ScoreTile(64, 4, 3, 3), ScoreTile(64, 4, 3, 3, True)
MANY_TILES = ScoreTile(128, 4, 3, 2), ScoreTile(128, 8, 4, 2, True)
"""On any GPU, and on SM90."""


def serves(keys: Paged, q_THD: Tensor) -> bool:
    """Return whether there is a decoder for the keys, and their dim is whole tiles."""
    heads, dim = q_THD.shape[1:]
    return tiles.serves_index_keys(keys) and dim % 16 == 0 and heads <= MAX_HEADS and dim <= 256


def select_topk(
    keys: Paged, batch: AttentionBatch, q_THD: Tensor, weights_TH: Tensor, top_k: int, max_seq_len: int | None = None
) -> Tensor:  # fmt: skip
    """Return the top_k tokens of each query, as naive.py defines them.

    Args:
        keys: Pages of index keys, one head.
        batch: The pages and lengths of requests.
        q_THD: Queries of the indexer.
        weights_TH: Weights of its heads.
        top_k: How many tokens are selected.
        max_seq_len: A bound on stored tokens, if one is known.

    Returns:
        Int32 [T, K], ascending, PAD_INDEX at the end.
    """
    topk_indices_TK = torch.empty(len(q_THD), top_k, dtype=torch.int32, device=q_THD.device)
    capacity = batch.page_table_BN.shape[1] * keys.page_size
    # Whole float4s in each row, which topk.cu reads.
    width = cdiv(max(min(max_seq_len or capacity, capacity), 1), 128) * 128
    step = max(1, min(WORKSPACE // (4 * width), len(q_THD)))
    scores_SL = torch.empty(step, width, dtype=torch.float32, device=q_THD.device)
    for start in range(0, len(q_THD), step):
        rows = min(step, len(q_THD) - start)
        score(keys, batch, q_THD, weights_TH, scores_SL, start, rows)
        topk(scores_SL, batch, topk_indices_TK, start, rows)
    return topk_indices_TK


def score(
    keys: Paged,
    batch: AttentionBatch,
    q_THD: Tensor,
    weights_TH: Tensor,
    scores_SL: Tensor,
    start: int,
    rows: int,
) -> None:
    """Score the tokens that query rows start to start + rows see.

    Args:
        keys: Pages of index keys, one head.
        batch: The pages and lengths of requests.
        q_THD: Queries of the indexer.
        weights_TH: Weights of its heads.
        scores_SL: Float32, where scores are stored; its first row is `start`.
        start: The first row.
        rows: How many there are.
    """
    gpu, max_query_len = gpu_of(q_THD.device), max(batch.query_lens)
    q_THD = q_THD if q_THD.stride(2) == 1 else q_THD.contiguous()
    weights_TH = weights_TH if weights_TH.stride(1) == 1 else weights_TH.contiguous()
    few = max_query_len <= FEW_QUERIES
    dtype = _product_dtype(keys, q_THD.dtype, few)
    q_THD = q_THD if few else q_THD.to(dtype)
    shape = (FEW_TILES if few else MANY_TILES)[_suits_sm90(keys, q_THD, gpu, few)]
    stored = tiles.IndexKeys.of(keys, dtype, as_bytes=shape.sm90)
    (heads, dim), requests = q_THD.shape[1:], len(batch.seq_lens_B)
    padded_heads = max(next_power_of_2(heads), MIN_HEADS)
    grid: tuple[int, ...]
    # Kernels differ in two arguments: requests and their padded number, or the first request and queries of a program.
    if few:
        grid = shape.programs * gpu.processors, max_query_len
        first, each = requests, flash.padded_requests(requests)
    else:
        first, last = _requests_of(batch.query_lens, start, start + rows)
        grid = cdiv(scores_SL.shape[1], shape.keys), cdiv(min(max_query_len, rows), CHUNK), last - first
        each = CHUNK
    arguments = (
        q_THD, weights_TH, scores_SL, stored, keys.scale, batch.page_table_BN, batch.cu_seqlens_q_B1, batch.seq_lens_B,
        first, start, rows, scores_SL.stride(0), batch.page_table_BN.stride(0), q_THD.stride(0), q_THD.stride(1),
        weights_TH.stride(0), heads, dim, padded_heads, shape.keys, each, shape.stages,
    )  # fmt: skip
    if shape.sm90:
        from nibble.kernels.indexer import gluon_sm90

        gluon_sm90.launch(grid, arguments, padded_heads, shape.warps, few)
    else:
        kernel = score_few_kernel if few else score_many_kernel
        kernel[grid](*arguments, num_warps=shape.warps, num_stages=shape.stages)


def _requests_of(query_lens: tuple[int, ...], start: int, stop: int) -> tuple[int, int]:
    """Return the requests [first, last) that rows [start, stop) belong to."""
    ends = list(accumulate(query_lens))
    first = sum(end <= start for end in ends)
    return first, sum(end - n < stop for end, n in zip(ends, query_lens, strict=True))


def _product_dtype(keys: Paged, query: torch.dtype, few: bool) -> torch.dtype:
    """Return what queries and keys are multiplied in; exact for keys."""
    if query.itemsize > 2:
        return torch.float32
    if INDEX_KEYS[keys.format.name].bytes:
        return torch.float16 if few else query
    stored = keys.planes_PHS[0].dtype
    return query if stored == query else torch.float32


def _suits_sm90(keys: Paged, q_THD: Tensor, gpu: GPU, few: bool) -> bool:
    """Return whether gluon_sm90.py can read both: copies are of 16 bytes; keys of 8 bits, or of many as queries."""
    data, size = keys.planes_PHS[0], q_THD.dtype.itemsize
    copied = data if few else q_THD
    places = (copied.data_ptr(), *(x * copied.itemsize for x in copied.stride()[:-1]))
    alike = INDEX_KEYS[keys.format.name].bytes or (data.dtype == q_THD.dtype and not few)
    full_tiles = size == 2 and keys.dim == 128 and q_THD.shape[1] in {16, 32, 64, 128}
    return gpu.arch == SM90 and alike and full_tiles and all(x % 16 == 0 for x in places)


def topk(scores_SL: Tensor, batch: AttentionBatch, topk_indices_TK: Tensor, start: int, rows: int) -> None:
    """Select the top k of rows start to start + rows.

    Args:
        scores_SL: As score() left them.
        batch: The lengths of requests.
        topk_indices_TK: Int32, where the rows' tokens are stored.
        start: The first row.
        rows: How many there are.
    """
    if topk_indices_TK.is_cuda and _cuda_present():
        from nibble.kernels.indexer.cuda import topk as fast

        fast(scores_SL, batch, topk_indices_TK, start, rows)
        return
    requests, top_k = len(batch.seq_lens_B), topk_indices_TK.shape[1]
    topk_kernel[(rows,)](
        scores_SL, topk_indices_TK, batch.cu_seqlens_q_B1, batch.seq_lens_B, requests, start, scores_SL.stride(0),
        TOP_K=top_k, K=next_power_of_2(top_k), N=TOPK_TILE, R=flash.padded_requests(requests), num_warps=TOPK_WARPS,
    )  # fmt: skip


@cache
def _cuda_present() -> bool:
    """Return whether CUDA C++ can be compiled here."""
    try:
        from nibble.kernels.nvrtc import unavailable_reason
    except ImportError:
        return False
    return unavailable_reason() is None

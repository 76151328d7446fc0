"""Triton twin of kernels/indexer/__init__.py: scores by tensor cores from pages in their own format, then the best of each row.

Scores go through a workspace of bounded size, some rows of queries at a time. Few queries of a request are held while
its keys stream by; of many, each program holds a tile of keys while queries stream by. SM90 has a kernel of its own
for the former (choose_hopper.py), and CUDA C++ one for the best of a row (cuda/choose.py), where it can be compiled.
Lengths are read on the device, and grids depend on none.

Shape suffixes: T query tokens, H heads of the indexer, D values of a key, N keys of a tile, W words of a key,
R requests, K = top_k. Names in capitals are constants of a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels.attention.triton import GPU, gpu_of
from nibble.kernels.attention.triton_kernel import _queries
from nibble.kernels.codecs.decoders_index import KEYS, Keys, scale_of
from nibble.kernels.codecs.decoders_index import serves as decodes
from nibble.kernels.codecs.tiles import _rows, interleaved, pages_of, slots_of
from nibble.kernels.indexer import PAD_INDEX
from nibble.kernels.sizes import cdiv, next_power_of_2
from nibble.kernels.types import AttentionBatch, Paged

WORKSPACE = 64 << 20
"""Bytes of scores held at a time."""
FEW = 8
"""Queries of a request for which keys stream by."""
CHUNK = 64
"""Queries that stream by one program."""
LEAST_HEADS, MOST_HEADS = 16, 128
HOPPER = 90
ABSENT = tl.constexpr(PAD_INDEX)


# ---- scores ----------------------------------------------------------------------------------------------------------


@triton.jit
def _entry(r_R, request, x_R):
    """Entry `request` of a vector."""
    return tl.sum(tl.where(r_R == request, x_R, 0))


@triton.jit
def _sought(tile, turn, cu_seqlens_q, seq_lens, requests, first_row, rows, N: tl.constexpr, R: tl.constexpr):
    """Tiles that there are for query tokens `turn` of requests. Of one of them: request, row of the query, how many
    tokens it sees, and the row's first tile and the next row's.
    """
    r_R = tl.arange(0, R)
    live_R = r_R < requests
    row_R = tl.load(cu_seqlens_q + r_R, mask=live_R, other=0) + turn
    end_R = tl.load(cu_seqlens_q + 1 + r_R, mask=live_R, other=0)
    seen_R = tl.load(seq_lens + r_R, mask=live_R, other=0) - end_R + row_R + 1
    asked_R = (row_R < end_R) & (row_R >= first_row) & (row_R < first_row + rows)
    tiles_R = tl.where(asked_R, tl.cdiv(tl.maximum(seen_R, 0), N), 0)
    next_R = tl.cumsum(tiles_R)
    request = tl.sum((next_R <= tile).to(tl.int32))
    row, seen, upto = _entry(r_R, request, row_R), _entry(r_R, request, seen_R), _entry(r_R, request, next_R)
    return tl.sum(tiles_R), request, row, seen, upto - _entry(r_R, request, tiles_R), upto


@triton.jit
def _weigh(products, weights_H):
    """Products [N, H] -> scores [N]. A NaN stays one."""
    positive = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.sum(positive * weights_H[None, :], 1)


@triton.jit(
    do_not_specialize=["requests", "first_row", "rows", "score_stride", "table_stride"],
    do_not_specialize_on_alignment=["table", "cu_seqlens_q", "seq_lens"],
)
def few_kernel(
    q, weights, scores, keys, global_scale, table, cu_seqlens_q, seq_lens, requests, first_row, rows, score_stride,
    table_stride, q_stride_T, q_stride_H, weights_stride, HEADS: tl.constexpr, DIM: tl.constexpr, H: tl.constexpr,
    N: tl.constexpr, R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: programs, and query tokens of a request. All tiles of the batch stand in one line, which is cut evenly.

    Rows [first_row, first_row + rows) only.
    """
    program, turn, n_N = tl.program_id(0), tl.program_id(1), tl.arange(0, N)
    total = _sought(0, turn, cu_seqlens_q, seq_lens, requests, first_row, rows, N, R)[0].to(tl.int64)
    tile = (total * program // tl.num_programs(0)).to(tl.int32)
    stop = (total * (program + 1) // tl.num_programs(0)).to(tl.int32)
    unit = tl.load(global_scale)
    h_H = tl.arange(0, H)
    while tile < stop:
        _, request, row, seen, base, upto = _sought(
            tile, turn, cu_seqlens_q, seq_lens, requests, first_row, rows, N, R
        )
        upto = tl.minimum(upto, stop)
        at_H = row.to(tl.int64) * q_stride_T + h_H * q_stride_H
        queries = _queries(q, at_H, h_H < HEADS, keys.PARTS, keys.words.WIDTH, DIM, keys.DTYPE)
        weights_H = tl.load(weights + row.to(tl.int64) * weights_stride + h_H, mask=h_H < HEADS, other=0.0)
        weights_H = weights_H.to(tl.float32) * unit
        pages = table + request.to(tl.int64) * table_stride
        to = scores + (row - first_row).to(tl.int64) * score_stride
        for first in tl.range((tile - base) * N, (upto - base) * N, N, num_stages=STAGES):
            page, slot_N = (
                pages_of(pages, first, n_N, seen, keys.PAGE_SIZE),
                slots_of(first, n_N, keys.PAGE_SIZE),
            )
            keep_N = first + n_N < seen
            words = _rows(keys.words, page, slot_N, 0, keep_N, 1, False)
            parts = keys.DECODE(words, 0, keys.DTYPE)
            products = tl.dot(parts[0], tl.trans(queries[0]), input_precision="ieee")
            for j in tl.static_range(1, keys.PARTS):
                products = tl.dot(parts[j], tl.trans(queries[j]), products, input_precision="ieee")
            found_N = _weigh(products, weights_H)
            if keys.SCALED:
                found_N *= scale_of(keys, page, slot_N, keep_N)
            tl.store(to + first + n_N, found_N, mask=keep_N)
        tile = upto


@triton.jit(
    do_not_specialize=["first_request", "first_row", "rows", "score_stride", "table_stride"],
    do_not_specialize_on_alignment=["table", "cu_seqlens_q", "seq_lens"],
)
def many_kernel(
    q, weights, scores, keys, global_scale, table, cu_seqlens_q, seq_lens, first_request, first_row, rows, score_stride,
    table_stride, q_stride_T, q_stride_H, weights_stride, HEADS: tl.constexpr, DIM: tl.constexpr, H: tl.constexpr,
    N: tl.constexpr, EACH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of keys, EACH query tokens of a request, and requests."""
    first, request = tl.program_id(0) * N, tl.program_id(2) + first_request
    begin, end, length = (
        tl.load(cu_seqlens_q + request),
        tl.load(cu_seqlens_q + request + 1),
        tl.load(seq_lens + request),
    )
    past = length - (end - begin)
    row = tl.maximum(begin, first_row) + tl.program_id(1) * EACH
    stop = tl.minimum(tl.minimum(row + EACH, end), first_row + rows)
    row = tl.maximum(row, begin + first - past)  # the first that sees a key of the tile
    if (row >= stop) | (length == 0):
        return
    n_N, h_H, d_D = tl.arange(0, N), tl.arange(0, H), tl.arange(0, keys.words.WIDTH * keys.PARTS)
    table += request.to(tl.int64) * table_stride
    page, slot_N = pages_of(table, first, n_N, length, keys.PAGE_SIZE), slots_of(first, n_N, keys.PAGE_SIZE)
    keep_N = first + n_N < length
    words = _rows(keys.words, page, slot_N, 0, keep_N, 1, True)
    values = interleaved(keys.DECODE(words, 0, keys.DTYPE), keys.PARTS)
    scale_N = tl.full([N], 1.0, tl.float32) * tl.load(global_scale)
    if keys.SCALED:
        scale_N *= scale_of(keys, page, slot_N, keep_N)
    q += h_H[:, None] * q_stride_H + d_D[None, :]
    for now in tl.range(row, stop, num_stages=STAGES):
        at = now + tl.zeros([], tl.int64)
        if HEADS == H and DIM == keys.words.WIDTH * keys.PARTS:
            queries = tl.load(q + at * q_stride_T)
            weights_H = tl.load(weights + at * weights_stride + h_H)
        else:
            mask = (h_H < HEADS)[:, None] & (d_D < DIM)[None, :]
            queries = tl.load(q + at * q_stride_T, mask=mask, other=0.0)
            weights_H = tl.load(weights + at * weights_stride + h_H, mask=h_H < HEADS, other=0.0)
        products = tl.dot(values, tl.trans(queries), input_precision="ieee")
        found_N = _weigh(products, weights_H.to(tl.float32)) * scale_N
        tl.store(scores + (at - first_row) * score_stride + first + n_N, found_N, mask=keep_N)


# ---- the best of a row -----------------------------------------------------------------------------------------------


@triton.jit
def _ordered(scores):
    """int64 numbers from 0 in the order of scores. NaN is the largest, as torch sorts it; zeros are equal."""
    bits = scores.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    order = tl.where(bits < 0, 0x7FFFFFFF - size.to(tl.int64), size.to(tl.int64) + 0x80000000)
    order = tl.where(size == 0, 0x80000000, order)
    return tl.where(size > 0x7F800000, 0xFFFFFFFF, order)


@triton.jit
def _narrowed(scores, seen, least, need, SHIFT: tl.constexpr, N: tl.constexpr):
    """The least number that is chosen, known but for its last SHIFT bits, and how many are needed of those that begin
    as it does. Both were known but for 8 bits more.
    """
    n_N, d_D = tl.arange(0, N), tl.arange(0, 256)
    counts_D = tl.zeros([256], tl.int32)
    for first in range(0, seen, N):
        keep_N = first + n_N < seen
        order_N = _ordered(tl.load(scores + first + n_N, mask=keep_N, other=0.0))
        keep_N &= (order_N >> (SHIFT + 8)) == (least >> (SHIFT + 8))
        counts_D += tl.histogram((order_N >> SHIFT).to(tl.int32) & 255, 256, mask=keep_N)
    above_D = tl.sum(counts_D) - tl.cumsum(counts_D)
    digit = tl.sum((above_D >= need).to(tl.int32))
    return least + (digit.to(tl.int64) << SHIFT), need - _entry(d_D, digit, above_D)


@triton.jit(
    do_not_specialize=["requests", "first_row", "score_stride"],
    do_not_specialize_on_alignment=["cu_seqlens_q", "seq_lens"],
)
def best_kernel(
    scores, chosen, cu_seqlens_q, seq_lens, requests, first_row, score_stride, TOP_K: tl.constexpr, K: tl.constexpr,
    N: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Grid: rows. The least score that is chosen, 8 bits at a time; then what is above it, and of its equals the first.

    K: a power of two that is not less than TOP_K.
    """
    row = tl.program_id(0)
    scores += row.to(tl.int64) * score_stride
    row += first_row
    r_R, n_N = tl.arange(0, R), tl.arange(0, N)
    end_R = tl.load(cu_seqlens_q + 1 + r_R, mask=r_R < requests, other=1 << 30)
    request = tl.sum((end_R <= row).to(tl.int32))
    length = tl.load(seq_lens + request, mask=request < requests, other=0)
    seen = tl.where(length > 0, length - _entry(r_R, request, end_R) + row + 1, 0)
    chosen += row.to(tl.int64) * TOP_K

    least, need = tl.zeros([], tl.int64), tl.full([], TOP_K, tl.int32)
    if seen > TOP_K:
        for digit in tl.static_range(4):
            least, need = _narrowed(scores, seen, least, need, 24 - 8 * digit, N)
    placed, equals = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for first in range(0, seen, N):
        keep_N = first + n_N < seen
        order_N = _ordered(tl.load(scores + first + n_N, mask=keep_N, other=0.0))
        equal_N = (keep_N & (order_N == least)).to(tl.int32)
        before_N = equals + tl.cumsum(equal_N) - equal_N
        taken_N = (keep_N & ((order_N > least) | ((equal_N > 0) & (before_N < need)))).to(tl.int32)
        place_N = placed + tl.cumsum(taken_N) - taken_N
        tl.store(chosen + place_N, first + n_N, mask=taken_N > 0)
        placed += tl.sum(taken_N)
        equals += tl.sum(equal_N)
    k_K = tl.arange(0, K)
    tl.store(chosen + k_K, tl.full([K], ABSENT, tl.int32), mask=(k_K >= placed) & (k_K < TOP_K))


# ---- launches --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shape:
    """Keys of a tile, warps, stages of loads in flight, and programs of a processor; hopper: by choose_hopper.py."""

    keys: int
    warps: int
    stages: int
    programs: int
    hopper: bool = False


FEW_SHAPES = Shape(64, 4, 3, 3), Shape(64, 4, 3, 3, True)
MANY_SHAPES = Shape(128, 4, 3, 2), Shape(128, 8, 4, 2, True)
"""On any GPU, and on SM90."""


def serves(keys: Paged, q_THD: Tensor) -> bool:
    """Whether there is a decoder for the keys, and their dim is whole tiles."""
    heads, dim = q_THD.shape[1:]
    return decodes(keys) and dim % 16 == 0 and heads <= MOST_HEADS and dim <= 256


def choose(
    keys: Paged,
    batch: AttentionBatch,
    q_THD: Tensor,
    weights_TH: Tensor,
    top_k: int,
    longest: int | None = None,
) -> Tensor:
    """See kernels/indexer/__init__.py."""
    topk_indices_TK = torch.empty(len(q_THD), top_k, dtype=torch.int32, device=q_THD.device)
    held = batch.page_table_BN.shape[1] * keys.page_size
    width = cdiv(max(min(longest or held, held), 1), 128) * 128
    step = max(1, min(WORKSPACE // (4 * width), len(q_THD)))
    scores_SL = torch.empty(step, width, dtype=torch.float32, device=q_THD.device)
    for start in range(0, len(q_THD), step):
        rows = min(step, len(q_THD) - start)
        score(keys, batch, q_THD, weights_TH, scores_SL, start, rows)
        best(scores_SL, batch, topk_indices_TK, start, rows)
    return topk_indices_TK


def score(
    keys: Paged, batch: AttentionBatch, q_THD: Tensor, weights_TH: Tensor, scores_SL: Tensor, start: int, rows: int,
    shape: Shape | None = None,
) -> None:  # fmt: skip
    """Scores of query rows start to start + rows, where they see a token -> scores_SL, whose first row is `start`."""
    gpu, most = gpu_of(q_THD.device), max(batch.query_lens)
    q_THD = q_THD if q_THD.stride(2) == 1 else q_THD.contiguous()
    weights_TH = weights_TH if weights_TH.stride(1) == 1 else weights_TH.contiguous()
    few = most <= FEW
    dtype = _product_dtype(keys, q_THD.dtype, few)
    q_THD = q_THD if few else q_THD.to(dtype)
    shape = shape or (FEW_SHAPES if few else MANY_SHAPES)[_suits_hopper(keys, q_THD, gpu, few)]
    stored = Keys.of(keys, dtype, whole=shape.hopper)
    common = (
        q_THD, weights_TH, scores_SL, stored, keys.scale, batch.page_table_BN, batch.cu_seqlens_q_B1, batch.seq_lens_B
    )  # fmt: skip
    (heads, dim), count = q_THD.shape[1:], len(batch.seq_lens_B)
    strides = (
        scores_SL.stride(0), batch.page_table_BN.stride(0), q_THD.stride(0), q_THD.stride(1), weights_TH.stride(0)
    )  # fmt: skip
    sizes = heads, dim, max(next_power_of_2(heads), LEAST_HEADS)
    if not few:
        first, last = _asking(batch.query_lens, start, start + rows)
        grid = (
            cdiv(scores_SL.shape[1], shape.keys),
            cdiv(min(most, rows), CHUNK),
            last - first,
        )
        sized = (*common, first, start, rows, *strides, *sizes)
        if shape.hopper:
            from nibble.kernels.indexer.gluon_sm90 import launch_many

            launch_many(grid, sized, CHUNK, shape)
        else:
            many_kernel[grid](
                *sized, shape.keys, CHUNK, shape.stages, num_warps=shape.warps, num_stages=shape.stages
            )
        return
    programs, most_requests = (shape.programs * gpu.processors, most), max(next_power_of_2(count), 32)
    if shape.hopper:
        from nibble.kernels.indexer.gluon_sm90 import launch

        launch(programs, (*common, count, start, rows, *strides, *sizes), most_requests, shape)
    else:
        few_kernel[programs](
            *common, count, start, rows, *strides, *sizes, shape.keys, most_requests, shape.stages,
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip


def _asking(query_lens: tuple[int, ...], start: int, stop: int) -> tuple[int, int]:
    """The requests [first, last) that rows [start, stop) belong to."""
    ends = list(accumulate(query_lens))
    return sum(end <= start for end in ends), sum(
        end - n < stop for end, n in zip(ends, query_lens, strict=True)
    )


def _product_dtype(keys: Paged, query: torch.dtype, few: bool) -> torch.dtype:
    """What queries and keys are multiplied in; exact for keys."""
    if query.itemsize > 2:
        return torch.float32
    if KEYS[keys.format.name].bytes:
        return torch.float16 if few else query
    stored = keys.planes_PHS[0].dtype
    return query if stored == query else torch.float32


def _suits_hopper(keys: Paged, q_THD: Tensor, gpu: GPU, few: bool) -> bool:
    """Whether choose_hopper.py can read both: copies are of 16 bytes; keys of 8 bits, or of many as queries."""
    data, size = keys.planes_PHS[0], q_THD.dtype.itemsize
    copied = data if few else q_THD
    places = (copied.data_ptr(), *(x * copied.itemsize for x in copied.stride()[:-1]))
    alike = KEYS[keys.format.name].bytes or (data.dtype == q_THD.dtype and not few)
    whole = size == 2 and keys.dim == 128 and q_THD.shape[1] in {16, 32, 64, 128}
    return gpu.arch == HOPPER and alike and whole and all(x % 16 == 0 for x in places)


def best(scores_SL: Tensor, batch: AttentionBatch, topk_indices_TK: Tensor, start: int, rows: int) -> None:
    """The best of rows start to start + rows -> their rows of topk_indices_TK. scores_SL: as score() left them."""
    if topk_indices_TK.is_cuda and _cuda_present():
        from nibble.kernels.indexer.cuda import best as fast

        fast(scores_SL, batch.cu_seqlens_q_B1, batch.seq_lens_B, topk_indices_TK, start, rows)
        return
    count, top_k = len(batch.seq_lens_B), topk_indices_TK.shape[1]
    best_kernel[(rows,)](
        scores_SL, topk_indices_TK, batch.cu_seqlens_q_B1, batch.seq_lens_B, count, start, scores_SL.stride(0), top_k,
        next_power_of_2(top_k), 4096, max(next_power_of_2(count), 32), num_warps=16,
    )  # fmt: skip


@cache
def _cuda_present() -> bool:
    """Whether CUDA C++ can be compiled here."""
    try:
        from nibble.kernels.nvrtc import trouble
    except ImportError:
        return False
    return trouble() is None

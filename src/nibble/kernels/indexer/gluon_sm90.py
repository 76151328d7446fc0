"""The kernels of indexer/triton.py that score keys of 128 values, for SM90, in Gluon.

Keys stand on the side of the tensor cores that is read from registers: what is converted there never goes back to
shared memory, whose bandwidth the products would otherwise share with it. A sum over a key's values may take them in
any order, so a thread's values are 32 that lie together, which it reads by 16 bytes; queries are put in the same order
once.

There is no interpreter for Gluon: indexer/triton.py serves other GPUs, and is what tests on a CPU judge.

Shape suffixes: N keys of a tile, H heads, D values of a key, R requests. Names in capitals are constants of a kernel.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nibble.kernels.flash import MAX_FP16
from nibble.kernels.mla.gluon_sm90 import add, tile_page, tile_pointers

PROPAGATE_NAN = gl.constexpr(tl.PropagateNan.ALL)
DECODE_FOUR = gl.constexpr(
    "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }"
)
"""Four values of E4M3, which float16 holds exactly."""


@gluon.jit
def _to_product_order(x):
    """Return rows in the order of the products: of four threads that share a row, each has 32 neighbouring values."""
    parts = gl.reshape(x, [x.shape[0], 4, x.shape[1] // 8, 2])
    return gl.reshape(gl.permute(parts, [0, 2, 1, 3]), [x.shape[0], x.shape[1]])


# ---- few queries a request -------------------------------------------------------------------------------------------


@gluon.jit
def _value_of(r_R, request, x_R):
    """Return a request's value of x_R."""
    return gl.sum(gl.where(r_R == request, x_R, 0), 0)


@gluon.jit
def _find_tile(tile, query, cu_seqlens_q, seq_lens, requests, first_row, rows, N: gl.constexpr, R: gl.constexpr,
               LAYOUT: gl.constexpr):  # fmt: skip
    """Find a tile in the line of the tiles of all requests, for the query of each with the same index.

    Returns:
        The tiles of all requests; the request of the tile, its row and the keys that it sees; and the first tile of the
        request and the tile after its last.
    """
    # Computed anew for each row: the values of all requests would cost registers in between.
    r_R = gl.arange(0, R, layout=LAYOUT)
    live_R = r_R < requests
    row_R = gl.load(cu_seqlens_q + r_R, mask=live_R, other=0) + query
    end_R = gl.load(cu_seqlens_q + 1 + r_R, mask=live_R, other=0)
    visible_R = gl.load(seq_lens + r_R, mask=live_R, other=0) - end_R + row_R + 1
    scored_R = (row_R < end_R) & (row_R >= first_row) & (row_R < first_row + rows)
    tiles_R = gl.where(scored_R, (gl.maximum(visible_R, 0) + N - 1) // N, 0)
    next_R = gl.associative_scan(tiles_R, 0, add)
    request = gl.sum((next_R <= tile).to(gl.int32), 0)
    row, visible = _value_of(r_R, request, row_R), _value_of(r_R, request, visible_R)
    end_tile = _value_of(r_R, request, next_R)
    return gl.sum(tiles_R, 0), request, row, visible, end_tile - _value_of(r_R, request, tiles_R), end_tile


@gluon.jit
def _start_key_copy(
    keys, key_buffer, scale_buffer, page_table, page, first, stop, N: gl.constexpr, BYTES: gl.constexpr,
    LINE: gl.constexpr,
):  # fmt: skip
    """Start to copy a tile of keys and their scales."""
    at, keep = tile_pointers(keys.items, page_table, page, first, stop, keys.PAGE_SIZE, N, BYTES)
    async_copy.async_copy_global_to_shared(key_buffer, at, mask=keep)
    if keys.SCALED:
        n_N = gl.arange(0, N, layout=LINE)
        keep_N = first + n_N < stop
        page_N = page
        if keys.PAGE_SIZE % N != 0:
            page_N = gl.load(page_table + (first + n_N) // keys.PAGE_SIZE, mask=keep_N, other=0)
        at_N = keys.scales.data + page_N.to(gl.int64) * keys.scales.PAGE
        at_N += (first + n_N) % keys.PAGE_SIZE * keys.scales.SLOT
        async_copy.async_copy_global_to_shared(scale_buffer, at_N, mask=keep_N)
    async_copy.commit_group()


@gluon.jit
def _store_queries(
    q, row, buffer, q_stride_T, q_stride_H, H: gl.constexpr, DIM: gl.constexpr, LAYOUT: gl.constexpr
):
    """Load a token's queries and store them in shared memory, as float16."""
    h_H = gl.arange(0, H, layout=gl.SliceLayout(1, LAYOUT))
    d_D = gl.arange(0, DIM, layout=gl.SliceLayout(0, LAYOUT))
    x = gl.load(q + row.to(gl.int64) * q_stride_T + h_H[:, None] * q_stride_H + d_D[None, :]).to(gl.float32)
    x = gl.where(x > MAX_FP16, MAX_FP16, gl.where(x < -MAX_FP16, -MAX_FP16, x))
    buffer.store(_to_product_order(x.to(gl.float16)))


@gluon.jit
def _weigh(products, weights_H):
    """Return the scores of keys: products of all heads, those below 0 left out, times the heads' weights."""
    positive = gl.maximum(products, 0.0, propagate_nan=PROPAGATE_NAN)
    return gl.sum(positive * weights_H[None, :], 1)


@gluon.jit(
    do_not_specialize=["requests", "first_row", "rows", "score_stride", "page_table_stride"],
    do_not_specialize_on_alignment=["page_table", "cu_seqlens_q", "seq_lens"],
)
def score_few_sm90_kernel(
    q, weights, scores, keys, global_scale, page_table, cu_seqlens_q, seq_lens, requests, first_row, rows, score_stride,
    page_table_stride, q_stride_T, q_stride_H, weights_stride, HEADS: gl.constexpr, DIM: gl.constexpr, H: gl.constexpr,
    N: gl.constexpr, R: gl.constexpr, STAGES: gl.constexpr, REQUESTS: gl.constexpr, MMA: gl.constexpr,
    KEYS: gl.constexpr, BYTES: gl.constexpr, LINE: gl.constexpr,
):  # fmt: skip
    """Score keys for few queries a request. Grid and line of tiles are those of score_few_kernel in indexer/triton.py.

    Layouts: REQUESTS of values of each request, MMA of products, KEYS of the keys that a thread multiplies, BYTES and
    LINE of copies of keys and scales.
    """
    # --- partition
    program, query = gl.program_id(0), gl.program_id(1)
    total = _find_tile(0, query, cu_seqlens_q, seq_lens, requests, first_row, rows, N, R, REQUESTS)[0].to(
        gl.int64
    )
    tile = (total * program // gl.num_programs(0)).to(gl.int32)
    stop = (total * (program + 1) // gl.num_programs(0)).to(gl.int32)
    if tile >= stop:
        return

    COLUMN: gl.constexpr = gl.SliceLayout(0, MMA)
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    key_stages = gl.allocate_shared_memory(
        gl.uint8, [STAGES, N, DIM], gl.SwizzledSharedLayout(16, 1, 8, [1, 0])
    )
    scale_stages = gl.allocate_shared_memory(gl.float32, [STAGES, N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    queries = gl.allocate_shared_memory(gl.float16, [H, DIM], gl.NVMMASharedLayout(128, 16, 2))
    zeros = gl.full([N, H], 0.0, gl.float32, layout=MMA)
    n_N = gl.arange(0, N, layout=ROW)
    h_H = gl.arange(0, H, layout=COLUMN)
    key_scale = gl.load(global_scale)
    while tile < stop:  # each turn is a request, or what the program has of it
        _, request, row, visible, first_tile, end_tile = _find_tile(
            tile, query, cu_seqlens_q, seq_lens, requests, first_row, rows, N, R, REQUESTS
        )
        end_tile = gl.minimum(end_tile, stop)
        pages = page_table + request.to(gl.int64) * page_table_stride
        to = scores + (row - first_row).to(gl.int64) * score_stride
        start, end = (tile - first_tile) * N, gl.minimum((end_tile - first_tile) * N, visible)

        # --- load the first tiles and the queries
        gl.thread_barrier()  # all threads have read what is overwritten now
        for stage in gl.static_range(STAGES - 1):
            page = tile_page(pages, start + stage * N, end, keys.PAGE_SIZE, N)
            _start_key_copy(
                keys, key_stages.index(stage), scale_stages.index(stage), pages, page, start + stage * N, end, N,
                BYTES, LINE,
            )  # fmt: skip
        page = tile_page(pages, start + (STAGES - 1) * N, end, keys.PAGE_SIZE, N)
        weights_H = gl.load(weights + row.to(gl.int64) * weights_stride + h_H).to(gl.float32) * key_scale
        _store_queries(q, row, queries, q_stride_T, q_stride_H, H, DIM, BYTES)
        fence_async_shared()
        gl.thread_barrier()
        full, empty = 0, STAGES - 1
        for first in range(start, end, N):
            # --- load
            async_copy.wait_group(STAGES - 2)
            gl.thread_barrier()
            stored = key_stages.index(full).load(KEYS)
            scale_N = key_scale
            if keys.SCALED:
                scale_N = scale_stages.index(full).load(ROW)
            in_fp16 = gl.inline_asm_elementwise(
                DECODE_FOUR, "=r,=r,r", [stored], gl.float16, is_pure=True, pack=4
            )
            _start_key_copy(
                keys, key_stages.index(empty), scale_stages.index(empty), pages, page, first + (STAGES - 1) * N, end, N,
                BYTES, LINE,
            )  # fmt: skip
            page = tile_page(pages, first + STAGES * N, end, keys.PAGE_SIZE, N)

            # --- scores
            operand = gl.convert_layout(_to_product_order(in_fp16), gl.DotOperandLayout(0, MMA, 2))
            products = warpgroup_mma(operand, queries.permute([1, 0]), zeros, use_acc=False, is_async=True)
            products = warpgroup_mma_wait(0, deps=[products])
            score_N = _weigh(products, weights_H)
            if keys.SCALED:
                score_N *= scale_N

            # --- store
            gl.store(to + first + n_N, score_N, mask=first + n_N < end)
            full = gl.where(full == STAGES - 1, 0, full + 1)
            empty = gl.where(empty == STAGES - 1, 0, empty + 1)
        tile = end_tile
    async_copy.wait_group(0)


# ---- many queries a request ------------------------------------------------------------------------------------------


@gluon.jit
def _start_query_copy(q, ring, first, row, stop, q_stride_T, q_stride_H, H: gl.constexpr, DIM: gl.constexpr,
                      STAGES: gl.constexpr, COPY: gl.constexpr):  # fmt: skip
    """Start to copy a row's queries to their place in the ring, which begins with row `first`."""
    h_H = gl.arange(0, H, layout=gl.SliceLayout(1, COPY))
    d_D = gl.arange(0, DIM, layout=gl.SliceLayout(0, COPY))
    at = q + row.to(gl.int64) * q_stride_T + h_H[:, None] * q_stride_H + d_D[None, :]
    keep = (h_H[:, None] >= 0) & (d_D[None, :] >= 0) & (row < stop)
    async_copy.async_copy_global_to_shared(ring.index((row - first) % STAGES), at, mask=keep)
    async_copy.commit_group()


@gluon.jit
def _score_row(products, keys, ring, q, weights, to, scale_N, first, row, stop, score_stride, q_stride_T, q_stride_H,
               weights_stride, keep_N, zeros, H: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
               COPY: gl.constexpr):  # fmt: skip
    """Start the products of row + 1, and meanwhile weigh those of `row`. Returns the products that were started."""
    COLUMN: gl.constexpr = gl.SliceLayout(0, zeros.type.layout)
    weights_H = gl.load(
        weights + row.to(gl.int64) * weights_stride + gl.arange(0, H, layout=COLUMN), mask=row < stop
    )
    async_copy.wait_group(STAGES - 3)
    fence_async_shared()
    gl.thread_barrier()
    _start_query_copy(q, ring, first, row + STAGES - 1, stop, q_stride_T, q_stride_H, H, DIM, STAGES, COPY)
    queries = ring.index((row + 1 - first) % STAGES)
    started = warpgroup_mma(keys, queries.permute([1, 0]), zeros, use_acc=False, is_async=True)
    products = warpgroup_mma_wait(1, deps=[products])
    score_N = _weigh(products, weights_H.to(gl.float32)) * scale_N
    gl.store(to + row.to(gl.int64) * score_stride, score_N, mask=keep_N & (row < stop))
    return started


@gluon.jit(
    do_not_specialize=["first_request", "first_row", "rows", "score_stride", "page_table_stride"],
    do_not_specialize_on_alignment=["page_table", "cu_seqlens_q", "seq_lens"],
)
def score_many_sm90_kernel(
    q, weights, scores, keys, global_scale, page_table, cu_seqlens_q, seq_lens, first_request, first_row, rows,
    score_stride, page_table_stride, q_stride_T, q_stride_H, weights_stride, HEADS: gl.constexpr, DIM: gl.constexpr,
    H: gl.constexpr, N: gl.constexpr, EACH: gl.constexpr, STAGES: gl.constexpr, MMA: gl.constexpr,
    BYTES: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """Score keys for many queries a request: keys stay in registers, queries go through a ring in shared memory.

    The grid is that of score_many_kernel in indexer/triton.py. Layouts: MMA of products, BYTES of loads of keys, COPY
    of copies of queries.
    """
    # --- partition
    first_key, request = gl.program_id(0) * N, gl.program_id(2) + first_request
    begin, end, seq_len = (
        gl.load(cu_seqlens_q + request),
        gl.load(cu_seqlens_q + request + 1),
        gl.load(seq_lens + request),
    )
    past = seq_len - (end - begin)
    first = gl.maximum(begin, first_row) + gl.program_id(1) * EACH
    stop = gl.minimum(gl.minimum(first + EACH, end), first_row + rows)
    first = gl.maximum(first, begin + first_key - past)  # the first row that sees one of these keys
    if (first >= stop) | (seq_len == 0):
        return

    # --- load: the first queries, and the keys
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    page_table += request.to(gl.int64) * page_table_stride
    ring = gl.allocate_shared_memory(keys.DTYPE, [STAGES, H, DIM], gl.NVMMASharedLayout(128, 16, 2))
    for stage in gl.static_range(STAGES - 1):
        _start_query_copy(q, ring, first, first + stage, stop, q_stride_T, q_stride_H, H, DIM, STAGES, COPY)
    page = tile_page(page_table, first_key, seq_len, keys.PAGE_SIZE, N)
    at, keep = tile_pointers(keys.items, page_table, page, first_key, seq_len, keys.PAGE_SIZE, N, BYTES)
    stored = gl.load(at, mask=keep, other=0)
    if stored.dtype == gl.uint8:
        stored = gl.inline_asm_elementwise(DECODE_FOUR, "=r,=r,r", [stored], gl.float16, is_pure=True, pack=4)
        stored = stored.to(gl.float32).to(keys.DTYPE)
    operand = gl.convert_layout(stored, gl.DotOperandLayout(0, MMA, 2))
    n_N = first_key + gl.arange(0, N, layout=ROW)
    keep_N = n_N < seq_len
    scale_N = gl.full([N], 1.0, gl.float32, layout=ROW) * gl.load(global_scale)
    if keys.SCALED:
        page_N = gl.load(page_table + n_N // keys.PAGE_SIZE, mask=keep_N, other=0).to(gl.int64)
        at_N = keys.scales.data + page_N * keys.scales.PAGE + n_N % keys.PAGE_SIZE * keys.scales.SLOT
        scale_N *= gl.load(at_N, mask=keep_N, other=0.0)

    # --- scores
    zeros = gl.full([N, H], 0.0, gl.float32, layout=MMA)
    to = scores - first_row.to(gl.int64) * score_stride + n_N
    async_copy.wait_group(STAGES - 2)
    fence_async_shared()
    gl.thread_barrier()
    even = warpgroup_mma(operand, ring.index(0).permute([1, 0]), zeros, use_acc=False, is_async=True)
    for row in range(
        first, stop, 2
    ):  # two rows a turn, so that no product in flight has to move to other registers
        odd = _score_row(even, operand, ring, q, weights, to, scale_N, first, row, stop, score_stride, q_stride_T,
                         q_stride_H, weights_stride, keep_N, zeros, H, DIM, STAGES, COPY)  # fmt: skip
        even = _score_row(odd, operand, ring, q, weights, to, scale_N, first, row + 1, stop, score_stride, q_stride_T,
                          q_stride_H, weights_stride, keep_N, zeros, H, DIM, STAGES, COPY)  # fmt: skip
    warpgroup_mma_wait(0, deps=[even])
    async_copy.wait_group(0)


# ---- the launches ----------------------------------------------------------------------------------------------------


def _layouts_few(requests: int, tile: int, heads: int, warps: int) -> tuple[Any, ...]:
    """Return layouts of requests, products, the keys that a thread multiplies, and copies of keys and scales."""
    assert tile % (16 * warps) == 0
    mma = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, heads, 16])
    registers = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [8, 0]]
    across = [[16 << i, 0] for i in range(warps.bit_length() - 1)]
    registers += [[row, 0] for row in (32, 64, 128) if 16 * warps <= row < tile]
    keys = gl.DistributedLinearLayout(
        registers, [[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]], across, [], [tile, 128]
    )
    of_requests = gl.BlockedLayout([max(requests // 32, 1)], [32], [warps], [0])
    line = gl.BlockedLayout([1], [32], [warps], [0])
    return of_requests, mma, keys, gl.BlockedLayout([1, 16], [4, 8], [warps, 1], [1, 0]), line


def _layouts_many(item: int, heads: int, warps: int) -> tuple[Any, ...]:
    """Return layouts of products, of loads of keys, whose values have `item` bytes, and of copies of queries."""
    mma = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, heads, 16])
    wide = gl.BlockedLayout([1, 16 // item], [4 // item, 8 * item], [warps, 1], [1, 0])
    return mma, wide, gl.BlockedLayout([1, 8], [2, 16], [warps, 1], [1, 0])


def launch(grid: tuple[int, ...], arguments: tuple[Any, ...], heads: int, warps: int, few: bool) -> None:
    """Launch score_few_sm90_kernel or score_many_sm90_kernel.

    Args:
        grid: That of the kernel in indexer/triton.py.
        arguments: The arguments of that kernel.
        heads: Heads, padded.
        warps: Warps of a program: 4, or 8 that share a tile.
        few: Whether requests have few queries.
    """
    if few:
        tile, requests = arguments[-3:-1]
        of_arguments = _layouts_few(requests, tile, heads, warps)
        score_few_sm90_kernel[grid](*arguments, *of_arguments, num_warps=warps)
    else:
        of_arguments = _layouts_many(arguments[3].items.data.element_size(), heads, warps)
        score_many_sm90_kernel[grid](*arguments, *of_arguments, num_warps=warps)

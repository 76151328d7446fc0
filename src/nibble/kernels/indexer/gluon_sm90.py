"""choose.py's kernels of scores on SM90, in Gluon, for keys of 128 values.

Keys stand on the side of the tensor cores that is read from registers: what is converted there never goes back to
shared memory, whose bandwidth the products would otherwise share with it. A sum over a key's values may take them in
any order, so a thread's values are 32 that lie together, which it reads by 16 bytes; queries are put in the same order
once.

There is no interpreter for Gluon: choose.py serves other GPUs, and is what tests on a CPU judge.

Shape suffixes: N keys of a tile, H heads, R requests. Names in capitals are constants of a kernel.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nibble.kernels.mla.gluon_sm90 import _at, _page, _sum2

NAN = gl.constexpr(tl.PropagateNan.ALL)
LARGEST_FP16 = gl.constexpr(65504.0)
FOUR = gl.constexpr(
    "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }"
)
"""Four values of E4M3, which float16 holds exactly."""


@gluon.jit
def _own(x):
    """Values of rows in the order of the products: of four threads that share a row, each has 32 that lie together."""
    parts = gl.reshape(x, [x.shape[0], 4, x.shape[1] // 8, 2])
    return gl.reshape(gl.permute(parts, [0, 2, 1, 3]), [x.shape[0], x.shape[1]])


@gluon.jit
def _entry(r_R, request, x_R):
    return gl.sum(gl.where(r_R == request, x_R, 0), 0)


@gluon.jit
def _sought(tile, turn, cu_seqlens_q, seq_lens, requests, first_row, rows, N: gl.constexpr, R: gl.constexpr,
            LAYOUT: gl.constexpr):  # fmt: skip
    """choose.py's. Read anew for each row: what is known of all requests would cost registers in between."""
    r_R = gl.arange(0, R, layout=LAYOUT)
    live_R = r_R < requests
    row_R = gl.load(cu_seqlens_q + r_R, mask=live_R, other=0) + turn
    end_R = gl.load(cu_seqlens_q + 1 + r_R, mask=live_R, other=0)
    seen_R = gl.load(seq_lens + r_R, mask=live_R, other=0) - end_R + row_R + 1
    asked_R = (row_R < end_R) & (row_R >= first_row) & (row_R < first_row + rows)
    tiles_R = gl.where(asked_R, (gl.maximum(seen_R, 0) + N - 1) // N, 0)
    next_R = gl.associative_scan(tiles_R, 0, _sum2)
    request = gl.sum((next_R <= tile).to(gl.int32), 0)
    row, seen, upto = _entry(r_R, request, row_R), _entry(r_R, request, seen_R), _entry(r_R, request, next_R)
    return gl.sum(tiles_R, 0), request, row, seen, upto - _entry(r_R, request, tiles_R), upto


@gluon.jit
def _copy(
    keys, values, scales, table, page, first, stop, N: gl.constexpr, BYTES: gl.constexpr, LINE: gl.constexpr
):
    """Begins to copy a tile of keys and their scales."""
    at, keep = _at(keys.words, table, page, first, stop, keys.PAGE_SIZE, N, BYTES)
    async_copy.async_copy_global_to_shared(values, at, mask=keep)
    if keys.SCALED:
        n_N = gl.arange(0, N, layout=LINE)
        keep_N = first + n_N < stop
        page_N = page
        if keys.PAGE_SIZE % N != 0:
            page_N = gl.load(table + (first + n_N) // keys.PAGE_SIZE, mask=keep_N, other=0)
        at_N = keys.scales.data + page_N.to(gl.int64) * keys.scales.PAGE
        at_N += (first + n_N) % keys.PAGE_SIZE * keys.scales.SLOT
        async_copy.async_copy_global_to_shared(scales, at_N, mask=keep_N)
    async_copy.commit_group()


@gluon.jit
def _keep_queries(
    q, row, buffer, q_stride_T, q_stride_H, H: gl.constexpr, DIM: gl.constexpr, LAYOUT: gl.constexpr
):
    """A token's queries into shared memory, as float16."""
    h_H = gl.arange(0, H, layout=gl.SliceLayout(1, LAYOUT))
    d_D = gl.arange(0, DIM, layout=gl.SliceLayout(0, LAYOUT))
    x = gl.load(q + row.to(gl.int64) * q_stride_T + h_H[:, None] * q_stride_H + d_D[None, :]).to(gl.float32)
    x = gl.where(x > LARGEST_FP16, LARGEST_FP16, gl.where(x < -LARGEST_FP16, -LARGEST_FP16, x))
    buffer.store(_own(x.to(gl.float16)))


@gluon.jit(
    do_not_specialize=["requests", "first_row", "rows", "score_stride", "table_stride"],
    do_not_specialize_on_alignment=["table", "cu_seqlens_q", "seq_lens"],
)
def few_hopper_kernel(  # noqa: PLR0915
    q, weights, scores, keys, global_scale, table, cu_seqlens_q, seq_lens, requests, first_row, rows, score_stride,
    table_stride, q_stride_T, q_stride_H, weights_stride, HEADS: gl.constexpr, DIM: gl.constexpr, H: gl.constexpr,
    N: gl.constexpr, R: gl.constexpr, STAGES: gl.constexpr, REQUESTS: gl.constexpr, MMA: gl.constexpr,
    OWN: gl.constexpr, BYTES: gl.constexpr, LINE: gl.constexpr,
):  # fmt: skip
    """Grid and line of tiles as few_kernel's. Layouts: REQUESTS of what is known of each, MMA of products, OWN of what
    a thread multiplies, BYTES and LINE of copies of keys and scales.
    """
    program, turn = gl.program_id(0), gl.program_id(1)
    total = _sought(0, turn, cu_seqlens_q, seq_lens, requests, first_row, rows, N, R, REQUESTS)[0].to(
        gl.int64
    )
    tile = (total * program // gl.num_programs(0)).to(gl.int32)
    stop = (total * (program + 1) // gl.num_programs(0)).to(gl.int32)
    if tile >= stop:
        return

    COLUMN: gl.constexpr = gl.SliceLayout(0, MMA)
    PLACE: gl.constexpr = gl.SliceLayout(1, MMA)
    values = gl.allocate_shared_memory(gl.uint8, [STAGES, N, DIM], gl.SwizzledSharedLayout(16, 1, 8, [1, 0]))
    scales = gl.allocate_shared_memory(gl.float32, [STAGES, N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    queries = gl.allocate_shared_memory(gl.float16, [H, DIM], gl.NVMMASharedLayout(128, 16, 2))
    nothing = gl.full([N, H], 0.0, gl.float32, layout=MMA)
    n_N = gl.arange(0, N, layout=PLACE)
    h_H = gl.arange(0, H, layout=COLUMN)
    unit = gl.load(global_scale)
    while tile < stop:
        _, request, row, seen, base, upto = _sought(
            tile, turn, cu_seqlens_q, seq_lens, requests, first_row, rows, N, R, REQUESTS
        )
        upto = gl.minimum(upto, stop)
        pages = table + request.to(gl.int64) * table_stride
        to = scores + (row - first_row).to(gl.int64) * score_stride
        start, end = (tile - base) * N, gl.minimum((upto - base) * N, seen)

        gl.thread_barrier()  # nobody reads what is overwritten now
        for stage in gl.static_range(STAGES - 1):
            page = _page(pages, start + stage * N, end, keys.PAGE_SIZE, N)
            _copy(
                keys,
                values.index(stage),
                scales.index(stage),
                pages,
                page,
                start + stage * N,
                end,
                N,
                BYTES,
                LINE,
            )
        page = _page(pages, start + (STAGES - 1) * N, end, keys.PAGE_SIZE, N)
        weights_H = gl.load(weights + row.to(gl.int64) * weights_stride + h_H).to(gl.float32) * unit
        _keep_queries(q, row, queries, q_stride_T, q_stride_H, H, DIM, BYTES)
        fence_async_shared()
        gl.thread_barrier()
        slot, free = 0, STAGES - 1
        for first in range(start, end, N):
            async_copy.wait_group(STAGES - 2)
            gl.thread_barrier()
            stored = values.index(slot).load(OWN)
            scale_N = unit
            if keys.SCALED:
                scale_N = scales.index(slot).load(PLACE)
            halves = gl.inline_asm_elementwise(FOUR, "=r,=r,r", [stored], gl.float16, is_pure=True, pack=4)
            _copy(
                keys, values.index(free), scales.index(free), pages, page, first + (STAGES - 1) * N, end, N, BYTES,
                LINE,
            )  # fmt: skip
            page = _page(pages, first + STAGES * N, end, keys.PAGE_SIZE, N)
            own = gl.convert_layout(_own(halves), gl.DotOperandLayout(0, MMA, 2))
            products = warpgroup_mma(own, queries.permute([1, 0]), nothing, use_acc=False, is_async=True)
            products = warpgroup_mma_wait(0, deps=[products])
            positive = gl.maximum(products, 0.0, propagate_nan=NAN)
            found_N = gl.sum(positive * weights_H[None, :], 1)
            if keys.SCALED:
                found_N *= scale_N
            gl.store(to + first + n_N, found_N, mask=first + n_N < end)
            slot = gl.where(slot == STAGES - 1, 0, slot + 1)
            free = gl.where(free == STAGES - 1, 0, free + 1)
        tile = upto
    async_copy.wait_group(0)


@gluon.jit
def _ahead(q, ring, row, now, stop, q_stride_T, q_stride_H, H: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
           COPY: gl.constexpr):  # fmt: skip
    """Begins to copy a token's queries to their place in the ring, which turns from `row` on."""
    h_H = gl.arange(0, H, layout=gl.SliceLayout(1, COPY))
    d_D = gl.arange(0, DIM, layout=gl.SliceLayout(0, COPY))
    at = q + now.to(gl.int64) * q_stride_T + h_H[:, None] * q_stride_H + d_D[None, :]
    keep = (h_H[:, None] >= 0) & (d_D[None, :] >= 0) & (now < stop)
    async_copy.async_copy_global_to_shared(ring.index((now - row) % STAGES), at, mask=keep)
    async_copy.commit_group()


@gluon.jit
def _turn(products, own, ring, q, weights, to, scale_N, row, now, stop, score_stride, q_stride_T, q_stride_H,
          weights_stride, keep_N, nothing, H: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
          COPY: gl.constexpr):  # fmt: skip
    """Begins the products of token now + 1, and meanwhile weighs those of `now`."""
    COLUMN: gl.constexpr = gl.SliceLayout(0, nothing.type.layout)
    weights_H = gl.load(
        weights + now.to(gl.int64) * weights_stride + gl.arange(0, H, layout=COLUMN), mask=now < stop
    )
    async_copy.wait_group(STAGES - 3)
    fence_async_shared()
    gl.thread_barrier()
    _ahead(q, ring, row, now + STAGES - 1, stop, q_stride_T, q_stride_H, H, DIM, STAGES, COPY)
    queries = ring.index((now + 1 - row) % STAGES)
    coming = warpgroup_mma(own, queries.permute([1, 0]), nothing, use_acc=False, is_async=True)
    products = warpgroup_mma_wait(1, deps=[products])
    positive = gl.maximum(products, 0.0, propagate_nan=NAN)
    found_N = gl.sum(positive * weights_H.to(gl.float32)[None, :], 1) * scale_N
    gl.store(to + now.to(gl.int64) * score_stride, found_N, mask=keep_N & (now < stop))
    return coming


@gluon.jit(
    do_not_specialize=["first_request", "first_row", "rows", "score_stride", "table_stride"],
    do_not_specialize_on_alignment=["table", "cu_seqlens_q", "seq_lens"],
)
def many_hopper_kernel(
    q, weights, scores, keys, global_scale, table, cu_seqlens_q, seq_lens, first_request, first_row, rows, score_stride,
    table_stride, q_stride_T, q_stride_H, weights_stride, HEADS: gl.constexpr, DIM: gl.constexpr, H: gl.constexpr,
    N: gl.constexpr, EACH: gl.constexpr, STAGES: gl.constexpr, MMA: gl.constexpr, BYTES: gl.constexpr,
    COPY: gl.constexpr,
):  # fmt: skip
    """Grid as many_kernel's. Keys stay in registers, queries go through a ring in shared memory."""
    first, request = gl.program_id(0) * N, gl.program_id(2) + first_request
    begin, end, length = (
        gl.load(cu_seqlens_q + request),
        gl.load(cu_seqlens_q + request + 1),
        gl.load(seq_lens + request),
    )
    past = length - (end - begin)
    row = gl.maximum(begin, first_row) + gl.program_id(1) * EACH
    stop = gl.minimum(gl.minimum(row + EACH, end), first_row + rows)
    row = gl.maximum(row, begin + first - past)
    if (row >= stop) | (length == 0):
        return
    PLACE: gl.constexpr = gl.SliceLayout(1, MMA)
    table += request.to(gl.int64) * table_stride
    ring = gl.allocate_shared_memory(keys.DTYPE, [STAGES, H, DIM], gl.NVMMASharedLayout(128, 16, 2))
    for stage in gl.static_range(STAGES - 1):
        _ahead(q, ring, row, row + stage, stop, q_stride_T, q_stride_H, H, DIM, STAGES, COPY)
    page = _page(table, first, length, keys.PAGE_SIZE, N)
    at, keep = _at(keys.words, table, page, first, length, keys.PAGE_SIZE, N, BYTES)
    stored = gl.load(at, mask=keep, other=0)
    if stored.dtype == gl.uint8:
        stored = gl.inline_asm_elementwise(FOUR, "=r,=r,r", [stored], gl.float16, is_pure=True, pack=4)
        stored = stored.to(gl.float32).to(keys.DTYPE)
    own = gl.convert_layout(stored, gl.DotOperandLayout(0, MMA, 2))
    n_N = first + gl.arange(0, N, layout=PLACE)
    keep_N = n_N < length
    scale_N = gl.full([N], 1.0, gl.float32, layout=PLACE) * gl.load(global_scale)
    if keys.SCALED:
        page_N = gl.load(table + n_N // keys.PAGE_SIZE, mask=keep_N, other=0).to(gl.int64)
        at_N = keys.scales.data + page_N * keys.scales.PAGE + n_N % keys.PAGE_SIZE * keys.scales.SLOT
        scale_N *= gl.load(at_N, mask=keep_N, other=0.0)

    nothing = gl.full([N, H], 0.0, gl.float32, layout=MMA)
    to = scores - first_row.to(gl.int64) * score_stride + n_N
    async_copy.wait_group(STAGES - 2)
    fence_async_shared()
    gl.thread_barrier()
    even = warpgroup_mma(own, ring.index(0).permute([1, 0]), nothing, use_acc=False, is_async=True)
    for now in range(row, stop, 2):  # two turns, so that no product that is under way has to move
        odd = _turn(even, own, ring, q, weights, to, scale_N, row, now, stop, score_stride, q_stride_T, q_stride_H,
                    weights_stride, keep_N, nothing, H, DIM, STAGES, COPY)  # fmt: skip
        even = _turn(odd, own, ring, q, weights, to, scale_N, row, now + 1, stop, score_stride, q_stride_T, q_stride_H,
                     weights_stride, keep_N, nothing, H, DIM, STAGES, COPY)  # fmt: skip
    warpgroup_mma_wait(0, deps=[even])
    async_copy.wait_group(0)


def layouts(requests: int, tile: int, heads: int, warps: int) -> tuple:
    """Of requests, of products, of what a thread multiplies, and of copies. warps: 4, or 8 that share a tile."""
    assert tile % (16 * warps) == 0
    mma = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, heads, 16])
    registers = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [8, 0]]
    across = [[16 << i, 0] for i in range(warps.bit_length() - 1)]
    registers += [[row, 0] for row in (32, 64, 128) if 16 * warps <= row < tile]
    own = gl.DistributedLinearLayout(
        registers, [[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]], across, [], [tile, 128]
    )
    known, line = (
        gl.BlockedLayout([max(requests // 32, 1)], [32], [warps], [0]),
        gl.BlockedLayout([1], [32], [warps], [0]),
    )
    return known, mma, own, gl.BlockedLayout([1, 16], [4, 8], [warps, 1], [1, 0]), line


def launch(
    grid: tuple[int, int], arguments: tuple, requests: int, shape, registers: int | None = None
) -> None:
    """few_kernel's arguments, and how many requests there are at most."""
    chosen = layouts(requests, shape.keys, arguments[-1], shape.warps)
    few_hopper_kernel[grid](*arguments, shape.keys, requests, shape.stages, *chosen, num_warps=shape.warps)


def launch_many(grid: tuple[int, int, int], arguments: tuple, each: int, shape) -> None:
    """many_kernel's arguments; `each` queries a program."""
    warps, heads = shape.warps, arguments[-1]
    mma = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, heads, 16])
    item = arguments[3].words.data.element_size()
    wide = gl.BlockedLayout([1, 16 // item], [4 // item, 8 * item], [warps, 1], [1, 0])
    copy = gl.BlockedLayout([1, 8], [2, 16], [warps, 1], [1, 0])
    many_hopper_kernel[grid](*arguments, shape.keys, each, shape.stages, mma, wide, copy, num_warps=warps)

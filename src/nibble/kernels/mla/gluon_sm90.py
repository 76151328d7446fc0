"""mla.py's kernel for few query heads on SM90, in Gluon: layouts, shared memory and copies are said, not inferred.

The compiler's own pipeline begins no copy before the tile at hand is done, and would store what it decodes twice, once
as keys and once as values. Here plain latents arrive in one buffer while another is worked on, and packed ones are
decoded into shared memory once, where the tensor cores read them both ways. Latents stand on the side of 64 rows, so
that few query heads leave none of it empty: scores are [N, M], sums [W, M].

There is no interpreter for Gluon: mla.py serves other GPUs, and is what tests on a CPU judge.

Shape suffixes: M rows of a tile (query tokens x heads), N latents of a tile, W words of a section, R requests. Names in
capitals are constants of a kernel.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nibble.kernels.codecs.tiles import ALIKE, APART, NO_ROPE

LOG2E = gl.constexpr(1.4426950408889634)
LOWEST = gl.constexpr(-1e30)
LARGEST_FP16 = gl.constexpr(65504.0)
LEAST_KEYS = gl.constexpr(256)
WAITING = gl.constexpr(0.3)
STARTING = gl.constexpr(80.0)


@gluon.jit
def _sum2(a, b):
    return a + b


@gluon.jit
def _assigned(program, seq_lens, requests, slots, R: gl.constexpr, K: gl.constexpr, LAYOUT: gl.constexpr):
    """attention_kernel's, one size of a share after the other: warps hold the same values, and need not meet."""
    r_R = gl.arange(0, R, layout=LAYOUT)
    keys_R = gl.load(seq_lens + r_R, mask=r_R < requests, other=0).to(gl.float32)
    fair = gl.sum(keys_R, 0) / slots
    best, best_R = 1e30, keys_R
    for k in gl.static_range(K):
        each = gl.maximum(fair * ((1.0 + k) * (2.0 / K)), LEAST_KEYS * 1.0)
        shares_R = gl.where(r_R < requests, gl.maximum(gl.ceil(keys_R / each), 1.0), 0.0)
        programs = gl.sum(shares_R, 0)
        longest = gl.max(keys_R / gl.maximum(shares_R, 1.0), 0)
        cost = gl.where(programs <= slots, longest, fair + WAITING * longest + STARTING * programs / slots)
        best_R = gl.where(cost < best, shares_R, best_R)
        best = gl.minimum(cost, best)
    shares_R = best_R.to(gl.int32)
    request = gl.sum((gl.associative_scan(shares_R, 0, _sum2) <= program).to(gl.int32), 0)
    before = gl.sum(gl.where(r_R < request, shares_R, 0), 0)
    return request, program - before, gl.sum(gl.where(r_R == request, shares_R, 0), 0)


@gluon.jit
def _bounds(past, last, split, splits, N: gl.constexpr):
    """A split's share [start, stop) of the latents that are seen; starts are at whole tiles."""
    whole = gl.maximum(past + last + 1, 0)
    each = (whole + N * splits - 1) // (N * splits) * N
    start = split * each
    return start, gl.minimum(start + each, whole)


@gluon.jit
def _page(table, first, stop, PAGE_SIZE: gl.constexpr, N: gl.constexpr):
    """The page of a tile that lies in one; else nothing is known ahead."""
    page = 0
    if PAGE_SIZE % N == 0:
        page = gl.load(table + first // PAGE_SIZE, mask=first < stop, other=0)
    return page


@gluon.jit
def _at(plane, table, page, first, stop, PAGE_SIZE: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Where the items of a tile lie, and which are there."""
    n_N = gl.arange(0, N, layout=gl.SliceLayout(1, LAYOUT))
    item_W = gl.arange(0, plane.WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    keep_N = first + n_N < stop
    if PAGE_SIZE % N == 0:
        row_N = (
            plane.data + page.to(gl.int64) * plane.PAGE + (first % PAGE_SIZE) * plane.SLOT + n_N * plane.SLOT
        )
    else:
        page_N = gl.load(table + (first + n_N) // PAGE_SIZE, mask=keep_N, other=0)
        row_N = plane.data + page_N.to(gl.int64) * plane.PAGE + (first + n_N) % PAGE_SIZE * plane.SLOT
    at = row_N[:, None] + item_W[None, :]
    keep = gl.expand_dims(keep_N, 1) & (item_W < plane.COUNT)[None, :]
    return at, keep


@gluon.jit
def _copy(section, buffer, table, page, first, stop, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Begins to copy a tile of plain values."""
    at, keep = _at(section.words, table, page, first, stop, section.PAGE_SIZE, N, LAYOUT)
    async_copy.async_copy_global_to_shared(buffer, at, mask=keep)


@gluon.jit
def _copy_packed(section, words, codes, table, page, first, stop, N: gl.constexpr, WORDS: gl.constexpr,
                 CODES: gl.constexpr):  # fmt: skip
    """Begins to copy a tile of packed values: words, and codes of block scales. Not through registers: a fence that
    makes decoded values visible would wait for loads, but for no copy."""
    _copy(section, words, table, page, first, stop, N, WORDS)
    if section.EACH:
        at, keep = _at(section.blocks, table, page, first, stop, section.PAGE_SIZE, N, CODES)
        async_copy.async_copy_global_to_shared(codes, at, mask=keep)


@gluon.jit
def _unpack(section, words, codes, buffers, WORDS: gl.constexpr, BLOCKS: gl.constexpr):
    """Decodes a tile into shared memory, part by part."""
    packed, wide = words.load(WORDS), 0
    if section.EACH:
        scales = section.DECODE_SCALE(codes.load(gl.SliceLayout(2, BLOCKS)), section.DTYPE)
        EACH: gl.constexpr = packed.shape[1] // scales.shape[1]
        spread = gl.expand_dims(scales, 2).broadcast_to([scales.shape[0], scales.shape[1], EACH])
        wide = gl.convert_layout(gl.reshape(spread, packed.shape), WORDS, assert_trivial=True)
    parts = section.DECODE(packed, wide, section.DTYPE)
    for j in gl.static_range(len(parts)):
        buffers[j].store(parts[j])


@gluon.jit
def _buffers(section, COUNT: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Tiles of values. Each on its own: between stores to parts of one the compiler would set barriers."""
    buffers = ()
    for _ in gl.static_range(COUNT):
        buffers += (gl.allocate_shared_memory(section.DTYPE, [N, section.words.WIDTH], LAYOUT),)  # type: ignore[assignment]
    return buffers


@gluon.jit
def _room(section, N: gl.constexpr):
    """Shared memory for a tile as it is stored: words, and codes of block scales."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    words = gl.allocate_shared_memory(section.words.data.dtype.element_ty, [N, section.words.WIDTH], PLAIN)
    codes = words
    if section.EACH:
        codes = gl.allocate_shared_memory(
            section.blocks.data.dtype.element_ty, [N, section.blocks.WIDTH], PLAIN
        )
    return words, codes


@gluon.jit
def _keep_queries(q, at_M, live_M, section, buffers, DIM: gl.constexpr, LAYOUT: gl.constexpr):
    """Query rows into shared memory, in the parts that those of latents meet."""
    for j in gl.static_range(section.PARTS):
        value = gl.arange(0, section.words.WIDTH, layout=gl.SliceLayout(0, LAYOUT)) * section.PARTS + j
        keep = gl.expand_dims(live_M, 1) & (value < DIM)[None, :]
        x = gl.load(q + at_M[:, None] + value[None, :], mask=keep, other=0.0)
        if x.dtype != gl.float16 and gl.float16 == section.DTYPE:
            x = x.to(gl.float32)
            x = gl.where(x > LARGEST_FP16, LARGEST_FP16, gl.where(x < -LARGEST_FP16, -LARGEST_FP16, x))
        buffers.index(j).store(x.to(section.DTYPE))


@gluon.jit
def _product(scores, buffers, queries, PARTS: gl.constexpr, ADD: gl.constexpr):
    """Begins to add the products of a tile of latents [N, W] and queries [M, W], part by part: [N, M]."""
    for j in gl.static_range(PARTS):
        scores = warpgroup_mma(
            buffers[j], queries.index(j).permute([1, 0]), scores, use_acc=ADD or j > 0, is_async=True
        )
    return scores


@gluon.jit
def _store(to, row_M, sums, factor_M, live_M, RANK: gl.constexpr, MMA: gl.constexpr):
    """Sums times a factor, to rows of RANK values: those of each part to where they belong between the others'."""
    PARTS: gl.constexpr = len(sums)
    for j in gl.static_range(PARTS):
        value = gl.arange(0, sums[j].shape[0], layout=gl.SliceLayout(1, MMA)) * PARTS + j
        keep = live_M[None, :] & (value < RANK)[:, None]
        mean = (sums[j] * factor_M[None, :]).to(to.dtype.element_ty)
        gl.store(to + row_M[None, :] * RANK + value[:, None], mean, mask=keep)


@gluon.jit
def _rows(first_token, group, count, GROUP: gl.constexpr, M: gl.constexpr, LAYOUT: gl.constexpr):
    """Tokens and heads of a tile's rows, and which of these there are."""
    row_M = gl.arange(0, M, layout=LAYOUT)
    token_M = first_token + row_M // GROUP
    live_M = (row_M < M // GROUP * GROUP) & (token_M < count)
    return row_M, token_M, group * GROUP + row_M % GROUP, live_M


@gluon.jit(
    do_not_specialize=["requests", "slots", "table_stride"],
    do_not_specialize_on_alignment=["table", "cu_seqlens_q", "seq_lens"],
)
def mla_hopper_kernel(  # noqa: PLR0912, PLR0915 (most are settled while it is compiled)
    q, out, parts, lse, plan, latent, rope, global_scale, table, cu_seqlens_q, seq_lens, scale, requests, slots,
    table_stride, q_stride_T, q_stride_H, GROUP: gl.constexpr, RANK: gl.constexpr, ROPE_DIM: gl.constexpr,
    ROPE: gl.constexpr, FOLD: gl.constexpr, SPLIT: gl.constexpr, M: gl.constexpr, N: gl.constexpr, R: gl.constexpr,
    K: gl.constexpr, REQUESTS: gl.constexpr, MMA: gl.constexpr, WORDS: gl.constexpr, BLOCKS: gl.constexpr,
    CODES: gl.constexpr, ROPE_WORDS: gl.constexpr, ROPE_BLOCKS: gl.constexpr, ROPE_CODES: gl.constexpr,
):  # fmt: skip
    """Grid as mla.py's kernel. Layouts: REQUESTS of what is known of each, MMA of scores and sums, the others of words
    and of blocks x words of a section.
    """
    TOKENS: gl.constexpr = M // GROUP
    PACKED: gl.constexpr = latent.PARTS > 1
    ROPE_PACKED: gl.constexpr = rope.PARTS > 1
    tile, group, program = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    request, split, splits = program, 0, 1
    if SPLIT:
        request, split, splits = _assigned(program, seq_lens, requests, slots, R, K, REQUESTS)
        if request >= requests:
            return
        if split == 0:
            gl.store(plan + 2 * request, program)
            gl.store(plan + 2 * request + 1, splits)
    begin = gl.load(cu_seqlens_q + request)
    count = gl.load(cu_seqlens_q + request + 1) - begin
    first_token = tile * TOKENS
    if first_token >= count:
        return
    past = gl.load(seq_lens + request) - count
    last = gl.minimum(first_token + TOKENS, count) - 1
    start, stop = _bounds(past, last, split, splits, N)
    table += request.to(gl.int64) * table_stride

    W: gl.constexpr = latent.words.WIDTH
    RW: gl.constexpr = rope.words.WIDTH
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ROPE_SHARED: gl.constexpr = gl.NVMMASharedLayout(128 if RW >= 64 else 2 * RW, 16, 2)
    ROUND: gl.constexpr = 1 if PACKED else 2  # buffers of plain values: this tile and the next
    unpacked, rope_unpacked = (), ()
    if PACKED:
        unpacked = _buffers(latent, latent.PARTS, N, SHARED)
        tiles = unpacked[0]
    else:
        tiles = gl.allocate_shared_memory(latent.DTYPE, [ROUND, N, W], SHARED)
    queries = gl.allocate_shared_memory(latent.DTYPE, [latent.PARTS, M, W], SHARED)
    rope_tiles, rope_queries = tiles, queries
    page = _page(table, start, stop, latent.PAGE_SIZE, N)
    words, codes, rope_words, rope_codes = tiles, tiles, tiles, tiles
    if PACKED:
        words, codes = _room(latent, N)
        _copy_packed(latent, words, codes, table, page, start, stop, N, WORDS, CODES)
    else:
        _copy(latent, tiles.index(0), table, page, start, stop, N, WORDS)
    if ROPE != NO_ROPE:
        if ROPE_PACKED:
            rope_unpacked = _buffers(rope, rope.PARTS, N, ROPE_SHARED)
        else:
            rope_tiles = gl.allocate_shared_memory(rope.DTYPE, [ROUND, N, RW], ROPE_SHARED)
        rope_queries = gl.allocate_shared_memory(rope.DTYPE, [rope.PARTS, M, RW], ROPE_SHARED)
        if ROPE_PACKED:
            rope_words, rope_codes = _room(rope, N)
            _copy_packed(rope, rope_words, rope_codes, table, page, start, stop, N, ROPE_WORDS, ROPE_CODES)
        else:
            _copy(rope, rope_tiles.index(0), table, page, start, stop, N, ROPE_WORDS)
    async_copy.commit_group()
    page = _page(table, start + N, stop, latent.PAGE_SIZE, N)

    row_M, token_M, head_M, live_M = _rows(first_token, group, count, GROUP, M, gl.SliceLayout(1, WORDS))
    at_M = (begin + token_M).to(gl.int64) * q_stride_T + head_M * q_stride_H
    _keep_queries(q, at_M, live_M, latent, queries, RANK, WORDS)
    if ROPE != NO_ROPE:
        _keep_queries(q + RANK, at_M, live_M, rope, rope_queries, ROPE_DIM, WORDS)

    COLUMN: gl.constexpr = gl.SliceLayout(0, MMA)
    row_M, token_M, head_M, live_M = _rows(first_token, group, count, GROUP, M, COLUMN)
    position_M = past + token_M
    n_N = gl.arange(0, N, layout=gl.SliceLayout(1, MMA))
    weights_shared = gl.allocate_shared_memory(
        latent.DTYPE, [N, M], gl.NVMMASharedLayout(2 * M if M <= 64 else 128, 16, 2)
    )
    whole, plain = gl.load(global_scale) * FOLD, scale * LOG2E
    unit = plain * whole

    peak_M = gl.full([M], LOWEST, gl.float32, layout=COLUMN)
    total = gl.full([N, M], 0.0, gl.float32, layout=MMA)
    nothing = gl.full([N, M], 0.0, gl.float32, layout=MMA)
    sums = ()
    for _ in gl.static_range(latent.PARTS):
        sums += (gl.full([W, M], 0.0, gl.float32, layout=MMA),)  # type: ignore[assignment]
    turn = 0
    for first in range(start, stop, N):
        # All threads have waited for the products of the tile before.
        async_copy.wait_group(0)
        gl.thread_barrier()
        if PACKED:
            _unpack(latent, words, codes, unpacked, WORDS, BLOCKS)
            if ROPE == ALIKE:
                _unpack(rope, rope_words, rope_codes, rope_unpacked, ROPE_WORDS, ROPE_BLOCKS)
            fence_async_shared()
            gl.thread_barrier()
            _copy_packed(latent, words, codes, table, page, first + N, stop, N, WORDS, CODES)
            if ROPE == ALIKE:
                _copy_packed(
                    rope, rope_words, rope_codes, table, page, first + N, stop, N, ROPE_WORDS, ROPE_CODES
                )
        else:
            _copy(latent, tiles.index(1 - turn), table, page, first + N, stop, N, WORDS)
            if ROPE != NO_ROPE:
                _copy(rope, rope_tiles.index(1 - turn), table, page, first + N, stop, N, ROPE_WORDS)
            fence_async_shared()
        async_copy.commit_group()
        rotary = nothing
        if ROPE != NO_ROPE:
            if ROPE_PACKED:
                rotary = _product(nothing, rope_unpacked, rope_queries, rope.PARTS, False)
            else:
                rotary = warpgroup_mma(
                    rope_tiles.index(0 if PACKED else turn), rope_queries.index(0).permute([1, 0]), nothing,
                    use_acc=False, is_async=True,
                )  # fmt: skip
        ONE: gl.constexpr = ROPE == ALIKE
        if PACKED:
            scores = _product(rotary if ONE else nothing, unpacked, queries, latent.PARTS, ONE)
        else:
            scores = warpgroup_mma(
                tiles.index(turn), queries.index(0).permute([1, 0]), rotary if ONE else nothing, use_acc=ONE,
                is_async=True,
            )  # fmt: skip
        if ROPE == APART:
            rotary, scores = warpgroup_mma_wait(0, deps=[rotary, scores])
            scores = scores * unit + rotary * plain
        else:
            scores = warpgroup_mma_wait(0, deps=[scores]) * unit
        scores = gl.where((first + n_N)[:, None] <= position_M[None, :], scores, float("-inf"))

        top_M = gl.maximum(peak_M, gl.max(scores, 0))
        weights = gl.exp2(scores - top_M[None, :])
        fade = gl.exp2(peak_M - top_M)[None, :]
        total = total * fade + weights
        peak_M = top_M
        weights_shared.store(weights.to(latent.DTYPE))
        fence_async_shared()
        gl.thread_barrier()
        if PACKED and ROPE == APART:  # all threads have waited for the products that read it
            _copy(rope, rope_tiles.index(0), table, page, first + N, stop, N, ROPE_WORDS)
            async_copy.commit_group()
        page = _page(table, first + 2 * N, stop, latent.PAGE_SIZE, N)
        faded = ()
        for j in gl.static_range(latent.PARTS):
            values = unpacked[j] if PACKED else tiles.index(turn)
            faded += (warpgroup_mma(values.permute([1, 0]), weights_shared, sums[j] * fade, is_async=True),)  # type: ignore[assignment]
        if latent.PARTS == 4:
            sums = warpgroup_mma_wait(0, deps=[faded[0], faded[1], faded[2], faded[3]])  # type: ignore[misc]
        elif latent.PARTS == 2:
            sums = warpgroup_mma_wait(0, deps=[faded[0], faded[1]])  # type: ignore[misc]
        else:
            sums = (warpgroup_mma_wait(0, deps=[faded[0]]),)  # type: ignore[assignment, misc]
        turn = 1 - turn
    async_copy.wait_group(0)

    total_M = gl.sum(total, 0)
    nothing_M = total_M == 0.0  # was seen
    total_M = gl.where(nothing_M, 1.0, total_M)
    factor_M = whole / total_M
    if splits == 1:
        out_M = (begin + token_M).to(gl.int64) * (gl.num_programs(1) * GROUP) + head_M
        _store(out, out_M, sums, factor_M, live_M, RANK, MMA)
    elif SPLIT:
        place_M = ((program * gl.num_programs(0) + tile) * gl.num_programs(1) + group).to(
            gl.int64
        ) * M + row_M
        _store(parts, place_M, sums, factor_M, live_M, RANK, MMA)
        lse_M = gl.where(nothing_M, float("-inf"), peak_M + gl.log2(total_M))
        gl.store(lse + place_M, lse_M, mask=live_M)


def layouts(rows: int, latent, rope, requests: int, warps: int) -> tuple:
    """Of requests, of products, and of each section's words and blocks."""
    # A second group of warps has half of the columns; or, of few columns, half of the sums, and all of the scores.
    across = [4, warps // 4] if rows > 16 else [warps, 1]
    mma = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=across, instr_shape=[16, rows // across[1], 16]
    )
    known = gl.BlockedLayout([max(requests // 32, 1)], [32], [warps], [0])
    return known, mma, *_of_words(latent, warps), *_of_words(rope, warps)


def _of_words(section, warps: int) -> tuple:
    """Words, 16 bytes a thread; the same in blocks; and codes of block scales."""
    width = section.words.WIDTH.value
    across = min(width // 8, 32)
    words = gl.BlockedLayout([1, 8], [32 // across, across], [warps, 1], [1, 0])
    if not section.EACH.value:
        return words, words, words
    count, item = section.blocks.WIDTH.value, section.blocks.data.element_size()
    each = width // count
    if each <= 8:
        blocks = gl.BlockedLayout([1, 8 // each, each], [32 // across, across, 1], [warps, 1, 1], [2, 1, 0])
    else:
        shape = [32 // across, across * 8 // each, each // 8]
        blocks = gl.BlockedLayout([1, 1, 8], shape, [warps, 1, 1], [2, 1, 0])
    vector = min(count, 16 // item)
    across = count // vector
    return words, blocks, gl.BlockedLayout([1, vector], [32 // across, across], [warps, 1], [1, 0])

"""The kernel of mla/triton.py for few query heads on SM90, in Gluon: layouts, shared memory and copies are explicit.

The compiler's own pipeline starts no copy before the current tile is done, and would store what it decodes twice, once
as keys and once as values. Here plain latents arrive in one buffer while another is computed on, and packed ones are
decoded into shared memory once, where the tensor cores read them both ways. Latents stand on the side of 64 rows, so
that few query heads leave none of it empty: scores are [N, M], sums [W, M].

There is no interpreter for Gluon: mla/triton.py serves other GPUs, and is what tests on a CPU judge.

Shape suffixes: M rows of a tile (query tokens x heads), N latents of a tile, W words of a section, R requests. Names in
capitals are constants of a kernel.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nibble.kernels.codecs.tiles import ALIKE, APART, NO_ROPE, Section
from nibble.kernels.flash import LAUNCH_COST_KEYS, LOG2E, MAX_FP16, MIN_KEYS_PER_SPLIT, MIN_PEAK, TAIL_COST

# ---- partition -------------------------------------------------------------------------------------------------------


@gluon.jit
def add(a, b):
    """Add two values, for scans."""
    return a + b


@gluon.jit
def _assign_split(
    program, seq_lens, requests, concurrency, MAX_KEYS: gl.constexpr, R: gl.constexpr, K: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Assign a share of a request's keys to a program, as flash.assign_split does. MAX_KEYS: 0 for no bound.

    Sizes of a share are tried one after the other: all warps have the same values, and need no barrier.
    """
    r_R = gl.arange(0, R, layout=LAYOUT)
    keys_R = gl.load(seq_lens + r_R, mask=r_R < requests, other=0)
    if MAX_KEYS:
        keys_R = gl.minimum(keys_R, MAX_KEYS)
    keys_R = keys_R.to(gl.float32)
    fair = gl.sum(keys_R, 0) / concurrency
    best_cost, best_R = 1e30, keys_R
    for k in gl.static_range(K):
        each = gl.maximum(fair * ((1.0 + k) * (2.0 / K)), MIN_KEYS_PER_SPLIT * 1.0)
        splits_R = gl.where(r_R < requests, gl.maximum(gl.ceil(keys_R / each), 1.0), 0.0)
        programs = gl.sum(splits_R, 0)
        longest = gl.max(keys_R / gl.maximum(splits_R, 1.0), 0)
        fits = programs <= concurrency
        queued = fair + TAIL_COST * longest + LAUNCH_COST_KEYS * programs / concurrency
        cost = gl.where(fits, longest, queued)
        best_R = gl.where(cost < best_cost, splits_R, best_R)
        best_cost = gl.minimum(cost, best_cost)
    splits_R = best_R.to(gl.int32)
    request = gl.sum((gl.associative_scan(splits_R, 0, add) <= program).to(gl.int32), 0)
    before = gl.sum(gl.where(r_R < request, splits_R, 0), 0)
    return request, program - before, gl.sum(gl.where(r_R == request, splits_R, 0), 0)


@gluon.jit
def _split_bounds(past, first, last, split, splits, WINDOW: gl.constexpr, N: gl.constexpr):
    """Return a split's share [start, stop) of the latents that are visible. Starts are at whole tiles."""
    start, stop = 0, gl.maximum(past + last + 1, 0)
    if WINDOW:
        start = gl.maximum(past + first + 1 - WINDOW, 0) // N * N
    each = (stop - start + N * splits - 1) // (N * splits) * N
    start += split * each
    return start, gl.minimum(start + each, stop)


@gluon.jit
def _tile_rows(first_token, group, count, GROUP: gl.constexpr, M: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the index, token and head of a tile's rows, and which of them there are."""
    row_M = gl.arange(0, M, layout=LAYOUT)
    token_M = first_token + row_M // GROUP
    live_M = (row_M < M // GROUP * GROUP) & (token_M < count)
    return row_M, token_M, group * GROUP + row_M % GROUP, live_M


# ---- load ------------------------------------------------------------------------------------------------------------


@gluon.jit
def tile_page(page_table, first, stop, PAGE_SIZE: gl.constexpr, N: gl.constexpr):
    """Load the page of a tile that lies in one. It is loaded a tile ahead, so that copies do not wait for it."""
    page = 0
    if PAGE_SIZE % N == 0:
        page = gl.load(page_table + first // PAGE_SIZE, mask=first < stop, other=0)
    return page


@gluon.jit
def tile_pointers(
    plane, page_table, page, first, stop, PAGE_SIZE: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr
):
    """Return pointers to the items of a tile, and which of them there are.

    Args:
        plane: The Plane.
        page_table: Pointer to the request's pages.
        page: As tile_page returned it.
        first: The tile's first token.
        stop: The token after the last that there is.
        PAGE_SIZE: Tokens of a page.
        N: Tokens of the tile.
        LAYOUT: Layout of the result.

    Returns:
        Pointers and a mask, [N, WIDTH] each.
    """
    n_N = gl.arange(0, N, layout=gl.SliceLayout(1, LAYOUT))
    item_W = gl.arange(0, plane.WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    keep_N = first + n_N < stop
    if PAGE_SIZE % N == 0:
        row_N = (
            plane.data + page.to(gl.int64) * plane.PAGE + (first % PAGE_SIZE) * plane.SLOT + n_N * plane.SLOT
        )
    else:
        page_N = gl.load(page_table + (first + n_N) // PAGE_SIZE, mask=keep_N, other=0)
        row_N = plane.data + page_N.to(gl.int64) * plane.PAGE + (first + n_N) % PAGE_SIZE * plane.SLOT
    at = row_N[:, None] + item_W[None, :]
    keep = gl.expand_dims(keep_N, 1) & (item_W < plane.COUNT)[None, :]
    return at, keep


@gluon.jit
def _start_copy(section, buffer, page_table, page, first, stop, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Start to copy the words of a tile."""
    at, keep = tile_pointers(section.items, page_table, page, first, stop, section.PAGE_SIZE, N, LAYOUT)
    async_copy.async_copy_global_to_shared(buffer, at, mask=keep)


@gluon.jit
def _start_packed_copy(section, items, codes, page_table, page, first, stop, N: gl.constexpr, ITEMS: gl.constexpr,
                       CODES: gl.constexpr):  # fmt: skip
    """Start to copy a tile of packed values: words, and codes of block scales."""
    # Not through registers: the fence that makes decoded values visible would wait for loads, but not for copies.
    _start_copy(section, items, page_table, page, first, stop, N, ITEMS)
    if section.EACH:
        at, keep = tile_pointers(section.blocks, page_table, page, first, stop, section.PAGE_SIZE, N, CODES)
        async_copy.async_copy_global_to_shared(codes, at, mask=keep)


@gluon.jit
def _decode(section, items, codes, buffers, ITEMS: gl.constexpr, BLOCKS: gl.constexpr):
    """Decode a stored tile into shared memory, part by part."""
    packed, wide = items.load(ITEMS), 0
    if section.EACH:
        scales = section.DECODE_SCALE(codes.load(gl.SliceLayout(2, BLOCKS)), section.DTYPE)
        EACH: gl.constexpr = packed.shape[1] // scales.shape[1]
        spread = gl.expand_dims(scales, 2).broadcast_to([scales.shape[0], scales.shape[1], EACH])
        wide = gl.convert_layout(gl.reshape(spread, packed.shape), ITEMS, assert_trivial=True)
    parts = section.DECODE(packed, wide, section.DTYPE)
    for j in gl.static_range(len(parts)):
        buffers[j].store(parts[j])


@gluon.jit
def _allocate_parts(section, COUNT: gl.constexpr, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Allocate shared memory for the parts of a decoded tile."""
    # Each on its own: between stores to parts of one allocation the compiler would set barriers.
    buffers = ()
    for _ in gl.static_range(COUNT):
        buffers += (gl.allocate_shared_memory(section.DTYPE, [N, section.items.WIDTH], LAYOUT),)  # type: ignore[assignment]
    return buffers


@gluon.jit
def _allocate_stored(section, N: gl.constexpr):
    """Allocate shared memory for a tile as it is stored: words, and codes of block scales."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    items = gl.allocate_shared_memory(section.items.data.dtype.element_ty, [N, section.items.WIDTH], PLAIN)
    codes = items
    if section.EACH:
        codes = gl.allocate_shared_memory(
            section.blocks.data.dtype.element_ty, [N, section.blocks.WIDTH], PLAIN
        )
    return items, codes


@gluon.jit
def _store_queries(q, at_M, live_M, section, buffers, DIM: gl.constexpr, LAYOUT: gl.constexpr):
    """Load query rows and store them in shared memory, in the parts that those of latents meet."""
    for j in gl.static_range(section.PARTS):
        value = gl.arange(0, section.items.WIDTH, layout=gl.SliceLayout(0, LAYOUT)) * section.PARTS + j
        keep = gl.expand_dims(live_M, 1) & (value < DIM)[None, :]
        x = gl.load(q + at_M[:, None] + value[None, :], mask=keep, other=0.0)
        if x.dtype != gl.float16 and gl.float16 == section.DTYPE:
            x = x.to(gl.float32)
            x = gl.where(x > MAX_FP16, MAX_FP16, gl.where(x < -MAX_FP16, -MAX_FP16, x))
        buffers.index(j).store(x.to(section.DTYPE))


# ---- scores, softmax, accumulate, store ------------------------------------------------------------------------------


@gluon.jit
def _start_products(scores, buffers, queries, PARTS: gl.constexpr, ADD: gl.constexpr):
    """Start to add the products of a tile of latents [N, W] and queries [M, W], part by part: [N, M]."""
    for j in gl.static_range(PARTS):
        scores = warpgroup_mma(
            buffers[j], queries.index(j).permute([1, 0]), scores, use_acc=ADD or j > 0, is_async=True
        )
    return scores


@gluon.jit
def _online_softmax(scores, peak_M, total):
    """Return weights of scores [N, M], what rescales earlier sums [1, M], and the state with the scores."""
    top_M = gl.maximum(peak_M, gl.max(scores, 0))
    weights = gl.exp2(scores - top_M[None, :])
    rescale = gl.exp2(peak_M - top_M)[None, :]
    # Totals stay [N, M] up to the end: a sum over warps would cost a barrier for each tile.
    return weights, rescale, top_M, total * rescale + weights


@gluon.jit
def _wait_sums(sums):
    """Wait for the products of all parts."""
    # The wait takes its operands one by one: as a tuple it would not see them.
    if len(sums) == 4:
        result = warpgroup_mma_wait(0, deps=[sums[0], sums[1], sums[2], sums[3]])
    elif len(sums) == 2:
        result = warpgroup_mma_wait(0, deps=[sums[0], sums[1]])
    else:
        result = (warpgroup_mma_wait(0, deps=[sums[0]]),)
    return result


@gluon.jit
def _store_sums(to, row_M, sums, factor_M, live_M, RANK: gl.constexpr, MMA: gl.constexpr):
    """Store sums times a factor to rows of RANK values. The values of a part stand PARTS apart."""
    PARTS: gl.constexpr = len(sums)
    for j in gl.static_range(PARTS):
        value = gl.arange(0, sums[j].shape[0], layout=gl.SliceLayout(1, MMA)) * PARTS + j
        keep = live_M[None, :] & (value < RANK)[:, None]
        mean = (sums[j] * factor_M[None, :]).to(to.dtype.element_ty)
        gl.store(to + row_M[None, :] * RANK + value[:, None], mean, mask=keep)


# ---- the kernel ------------------------------------------------------------------------------------------------------


@gluon.jit(
    do_not_specialize=["requests", "concurrency", "page_table_stride"],
    do_not_specialize_on_alignment=["page_table", "cu_seqlens_q", "seq_lens"],
)
def mla_sm90_kernel(  # noqa: PLR0912, PLR0915 (most are settled while it is compiled)
    q, out, out_lse, parts, lse, plan, latent, rope, global_scale, page_table, cu_seqlens_q, seq_lens, scale, requests,
    concurrency, page_table_stride, q_stride_T, q_stride_H, GROUP: gl.constexpr, RANK: gl.constexpr,
    ROPE_DIM: gl.constexpr, ROPE: gl.constexpr, FOLD: gl.constexpr, WINDOW: gl.constexpr, SPLIT: gl.constexpr,
    M: gl.constexpr, N: gl.constexpr, R: gl.constexpr, K: gl.constexpr, REQUESTS: gl.constexpr, MMA: gl.constexpr,
    ITEMS: gl.constexpr, BLOCKS: gl.constexpr, CODES: gl.constexpr, ROPE_ITEMS: gl.constexpr,
    ROPE_BLOCKS: gl.constexpr, ROPE_CODES: gl.constexpr,
):  # fmt: skip
    """Attend over a split of a request's latents. Grid and arguments are those of mla_kernel in mla/triton.py.

    Layouts: REQUESTS of values of each request, MMA of scores and sums; of the latent proper and of rotary values,
    ITEMS of words, BLOCKS of blocks x words, CODES of block scales.
    """
    # --- partition
    TOKENS: gl.constexpr = M // GROUP
    PACKED: gl.constexpr = latent.PARTS > 1
    ROPE_PACKED: gl.constexpr = rope.PARTS > 1
    tile, group, program = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    request, split, splits = program, 0, 1
    if SPLIT:
        MAX_KEYS: gl.constexpr = WINDOW + TOKENS if WINDOW else 0
        request, split, splits = _assign_split(
            program, seq_lens, requests, concurrency, MAX_KEYS, R, K, REQUESTS
        )
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
    start, stop = _split_bounds(past, first_token, last, split, splits, WINDOW, N)
    page_table += request.to(gl.int64) * page_table_stride

    # --- load the first tile
    W: gl.constexpr = latent.items.WIDTH
    ROPE_W: gl.constexpr = rope.items.WIDTH
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ROPE_SHARED: gl.constexpr = gl.NVMMASharedLayout(128 if ROPE_W >= 64 else 2 * ROPE_W, 16, 2)
    STAGES: gl.constexpr = 1 if PACKED else 2  # of plain values: the current tile and the next
    decoded, rope_decoded = (), ()
    if PACKED:
        decoded = _allocate_parts(latent, latent.PARTS, N, SHARED)
        tiles = decoded[0]
    else:
        tiles = gl.allocate_shared_memory(latent.DTYPE, [STAGES, N, W], SHARED)
    queries = gl.allocate_shared_memory(latent.DTYPE, [latent.PARTS, M, W], SHARED)
    rope_tiles, rope_queries = tiles, queries
    page = tile_page(page_table, start, stop, latent.PAGE_SIZE, N)
    items, codes, rope_items, rope_codes = tiles, tiles, tiles, tiles
    if PACKED:
        items, codes = _allocate_stored(latent, N)
        _start_packed_copy(latent, items, codes, page_table, page, start, stop, N, ITEMS, CODES)
    else:
        _start_copy(latent, tiles.index(0), page_table, page, start, stop, N, ITEMS)
    if ROPE != NO_ROPE:
        if ROPE_PACKED:
            rope_decoded = _allocate_parts(rope, rope.PARTS, N, ROPE_SHARED)
        else:
            rope_tiles = gl.allocate_shared_memory(rope.DTYPE, [STAGES, N, ROPE_W], ROPE_SHARED)
        rope_queries = gl.allocate_shared_memory(rope.DTYPE, [rope.PARTS, M, ROPE_W], ROPE_SHARED)
        if ROPE_PACKED:
            rope_items, rope_codes = _allocate_stored(rope, N)
            _start_packed_copy(
                rope, rope_items, rope_codes, page_table, page, start, stop, N, ROPE_ITEMS, ROPE_CODES
            )
        else:
            _start_copy(rope, rope_tiles.index(0), page_table, page, start, stop, N, ROPE_ITEMS)
    async_copy.commit_group()
    page = tile_page(page_table, start + N, stop, latent.PAGE_SIZE, N)

    # --- load queries
    row_M, token_M, head_M, live_M = _tile_rows(first_token, group, count, GROUP, M, gl.SliceLayout(1, ITEMS))
    at_M = (begin + token_M).to(gl.int64) * q_stride_T + head_M * q_stride_H
    _store_queries(q, at_M, live_M, latent, queries, RANK, ITEMS)
    if ROPE != NO_ROPE:
        _store_queries(q + RANK, at_M, live_M, rope, rope_queries, ROPE_DIM, ITEMS)

    COLUMN: gl.constexpr = gl.SliceLayout(0, MMA)
    row_M, token_M, head_M, live_M = _tile_rows(first_token, group, count, GROUP, M, COLUMN)
    position_M = past + token_M
    n_N = gl.arange(0, N, layout=gl.SliceLayout(1, MMA))
    weights_shared = gl.allocate_shared_memory(
        latent.DTYPE, [N, M], gl.NVMMASharedLayout(2 * M if M <= 64 else 128, 16, 2)
    )
    # Products of latents times score_scale are scores in powers of two; those of rotary values APART, which have no
    # global scale, are multiplied by rope_scale.
    latent_scale, rope_scale = gl.load(global_scale) * FOLD, scale * LOG2E
    score_scale = rope_scale * latent_scale

    peak_M = gl.full([M], MIN_PEAK, gl.float32, layout=COLUMN)
    total = gl.full([N, M], 0.0, gl.float32, layout=MMA)
    zeros = gl.full([N, M], 0.0, gl.float32, layout=MMA)
    sums = ()
    for _ in gl.static_range(latent.PARTS):
        sums += (gl.full([W, M], 0.0, gl.float32, layout=MMA),)  # type: ignore[assignment]
    stage = 0
    for first in range(start, stop, N):
        # --- load: this tile has arrived, and the next starts
        # All threads have waited for the products of the tile before, so that its buffers are empty.
        async_copy.wait_group(0)
        gl.thread_barrier()
        if PACKED:
            _decode(latent, items, codes, decoded, ITEMS, BLOCKS)
            if ROPE == ALIKE:
                _decode(rope, rope_items, rope_codes, rope_decoded, ROPE_ITEMS, ROPE_BLOCKS)
            # Decoded values are visible to the tensor cores, and all threads have read the stored tile.
            fence_async_shared()
            gl.thread_barrier()
            _start_packed_copy(latent, items, codes, page_table, page, first + N, stop, N, ITEMS, CODES)
            if ROPE == ALIKE:
                _start_packed_copy(
                    rope, rope_items, rope_codes, page_table, page, first + N, stop, N, ROPE_ITEMS, ROPE_CODES
                )
        else:
            _start_copy(latent, tiles.index(1 - stage), page_table, page, first + N, stop, N, ITEMS)
            if ROPE != NO_ROPE:
                _start_copy(
                    rope, rope_tiles.index(1 - stage), page_table, page, first + N, stop, N, ROPE_ITEMS
                )
            fence_async_shared()
        async_copy.commit_group()

        # --- scores
        rope_scores = zeros
        if ROPE != NO_ROPE:
            if ROPE_PACKED:
                rope_scores = _start_products(zeros, rope_decoded, rope_queries, rope.PARTS, False)
            else:
                rope_scores = warpgroup_mma(
                    rope_tiles.index(0 if PACKED else stage), rope_queries.index(0).permute([1, 0]), zeros,
                    use_acc=False, is_async=True,
                )  # fmt: skip
        ONE_SUM: gl.constexpr = ROPE == ALIKE  # one scale: rotary values and latents add up in one sum
        if PACKED:
            scores = _start_products(
                rope_scores if ONE_SUM else zeros, decoded, queries, latent.PARTS, ONE_SUM
            )
        else:
            scores = warpgroup_mma(
                tiles.index(stage), queries.index(0).permute([1, 0]), rope_scores if ONE_SUM else zeros,
                use_acc=ONE_SUM, is_async=True,
            )  # fmt: skip
        if ROPE == APART:
            rope_scores, scores = warpgroup_mma_wait(0, deps=[rope_scores, scores])
            scores = scores * score_scale + rope_scores * rope_scale
        else:
            scores = warpgroup_mma_wait(0, deps=[scores]) * score_scale
        visible = (first + n_N)[:, None] <= position_M[None, :]
        if WINDOW:
            visible = visible & ((first + n_N)[:, None] > position_M[None, :] - WINDOW)
        scores = gl.where(visible, scores, float("-inf"))

        # --- softmax
        weights, rescale, peak_M, total = _online_softmax(scores, peak_M, total)
        weights_shared.store(weights.to(latent.DTYPE))
        fence_async_shared()
        gl.thread_barrier()
        if PACKED and ROPE == APART:  # all threads have waited for the products that read the one buffer
            _start_copy(rope, rope_tiles.index(0), page_table, page, first + N, stop, N, ROPE_ITEMS)
            async_copy.commit_group()
        page = tile_page(page_table, first + 2 * N, stop, latent.PAGE_SIZE, N)

        # --- accumulate
        started = ()
        for j in gl.static_range(latent.PARTS):
            values = decoded[j] if PACKED else tiles.index(stage)
            started += (
                warpgroup_mma(values.permute([1, 0]), weights_shared, sums[j] * rescale, is_async=True),
            )  # type: ignore[assignment]
        sums = _wait_sums(started)
        stage = 1 - stage
    async_copy.wait_group(0)  # the copies that were started behind the last tile

    # --- store
    total_M = gl.sum(total, 0)
    empty_M = total_M == 0.0  # no latent was seen
    total_M = gl.where(empty_M, 1.0, total_M)
    factor_M = latent_scale / total_M
    if splits == 1:
        out_M = (begin + token_M).to(gl.int64) * (gl.num_programs(1) * GROUP) + head_M
        _store_sums(out, out_M, sums, factor_M, live_M, RANK, MMA)
        if out_lse is not None:
            lse_M = gl.where(empty_M, float("-inf"), (peak_M + gl.log2(total_M)) / LOG2E)
            gl.store(out_lse + out_M, lse_M, mask=live_M)
    elif SPLIT:
        part_M = ((program * gl.num_programs(0) + tile) * gl.num_programs(1) + group).to(gl.int64) * M + row_M
        _store_sums(parts, part_M, sums, factor_M, live_M, RANK, MMA)
        lse_M = gl.where(empty_M, float("-inf"), peak_M + gl.log2(total_M))
        gl.store(lse + part_M, lse_M, mask=live_M)


# ---- layouts ---------------------------------------------------------------------------------------------------------


def layouts(rows: int, latent: Section, rope: Section, requests: int, warps: int) -> tuple[Any, ...]:
    """Return the layouts of mla_sm90_kernel.

    Args:
        rows: Rows of a tile.
        latent: The section of the latent proper.
        rope: The section of rotary values.
        requests: Requests, padded to a power of two.
        warps: Warps of a program, 4 or 8.

    Returns:
        Layouts of requests, of products, and of each section's words, blocks and codes.
    """
    # A second warpgroup has half of the columns; or, of few columns, half of the sums, and all of the scores.
    across = [4, warps // 4] if rows > 16 else [warps, 1]
    mma = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=across, instr_shape=[16, rows // across[1], 16]
    )
    of_requests = gl.BlockedLayout([max(requests // 32, 1)], [32], [warps], [0])
    return of_requests, mma, *section_layouts(latent, warps), *section_layouts(rope, warps)


def section_layouts(section: Section, warps: int) -> tuple[Any, Any, Any]:
    """Return the layouts of a section's words, 16 bytes a thread; of blocks x words; and of codes of block scales."""
    width = section.items.WIDTH.value
    across = min(width // 8, 32)
    items_layout = gl.BlockedLayout([1, 8], [32 // across, across], [warps, 1], [1, 0])
    if not section.EACH.value:
        return items_layout, items_layout, items_layout
    count, item = section.blocks.WIDTH.value, section.blocks.data.element_size()
    each = width // count
    if each <= 8:
        blocks = gl.BlockedLayout([1, 8 // each, each], [32 // across, across, 1], [warps, 1, 1], [2, 1, 0])
    else:
        shape = [32 // across, across * 8 // each, each // 8]
        blocks = gl.BlockedLayout([1, 1, 8], shape, [warps, 1, 1], [2, 1, 0])
    vector = min(count, 16 // item)
    across = count // vector
    codes = gl.BlockedLayout([1, vector], [32 // across, across], [warps, 1], [1, 0])
    return items_layout, blocks, codes

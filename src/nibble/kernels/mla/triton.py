"""Triton kernels of MLA: flash attention in which a tile of latents is decoded once, and is both keys and values.

What is stored how is the codecs' business: no kernel names a format. SM90 has kernels of its own, which read the same
sections and are launched from here: gluon_sm90.py for few heads, and sparse_gluon_sm90.py.

mla_attention: a program takes a tile of rows, which are query tokens times query heads, and a share of the latents that
they see (flash.py).

sparse_mla_attention: a program takes a group of heads of one query token, and a split of its list of slots, whose
latents are gathered row by row. How many splits there are depends on the shapes alone, so a CUDA graph may keep them; a
second launch combines them. A list ends behind its last slot that is not padding.

Shape suffixes: T query tokens, H query heads, D values of a latent, K slots of a list, M rows of a tile, N latents of a
tile, W words of a section, S splits, R values of a row. Names in capitals are constants of a kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels import GPU, SM90, UNBOUNDED, cdiv, flash, gpu_of, next_power_of_2
from nibble.kernels.codecs import LATENTS, tiles
from nibble.kernels.types import AttentionBatch, Paged, is_aligned

serves_latents = tiles.serves_latents
MAX_ROWS = 64
"""Most rows of a tile, unless a token has more heads that no smaller number divides."""
FOUR_WARP_ROWS = 32
"""Rows up to which four warps do, where nothing is decoded."""
MIN_ROW_BYTES = 128
"""Bytes of packed values of a row that gluon_sm90.py reads at least."""
SCRATCH = 1024 + 256
"""Bytes of shared memory that a program takes beside its tiles, those that the hardware reserves included."""


# ---- MLA: kernel -----------------------------------------------------------------------------------------------------


@triton.jit
def _accumulate(
    state, q, q_rope, latent, rope, table, position_M, start, stop, unit, rope_unit, ROPE: tl.constexpr,
    STAGES: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Add latents [start, stop), in whole tiles, to the state of an online softmax: peaks, totals and sums.

    unit: what products of decoded values are multiplied by to be scores in powers of two; rope_unit: those of rotary
    values that are APART.
    """
    n_N = tl.arange(0, N)
    page = tiles.pages_of(table, start, n_N, stop, latent.PAGE_SIZE)
    for first in tl.range(start, stop, N, num_stages=STAGES):
        # --- load
        slot_N, keep_N = tiles.slots_of(first, n_N, latent.PAGE_SIZE), first + n_N < stop
        items, scales = tiles.read_section(latent, page, slot_N, keep_N, MASKED)
        parts = tiles.decode_tile(latent, items, scales, 1)
        # --- scores
        zeros = tl.zeros([M, N], tl.float32)
        rotary = zeros
        if ROPE:
            items, scales = tiles.read_section(rope, page, slot_N, keep_N, MASKED)
            rotary = flash.dot_parts(zeros, q_rope, tiles.decode_tile(rope, items, scales, 1))
        # A tile early, as loads depend on it.
        page = tiles.pages_of(table, first + N, n_N, stop, latent.PAGE_SIZE)
        if ROPE == tiles.APART:
            scores = flash.dot_parts(zeros, q, parts) * unit + rotary * rope_unit
        else:
            scores = flash.dot_parts(rotary, q, parts) * unit
        if MASKED:
            visible = (first + n_N)[None, :] <= position_M[:, None]
            if WINDOW:
                visible &= (first + n_N)[None, :] > position_M[:, None] - WINDOW
            scores = tl.where(visible, scores, float("-inf"))
        # --- softmax and accumulate: the decoded latents are the values too
        state = flash.update_state(state, scores, parts, latent.DTYPE)
    return state


@triton.jit
def _attend(
    state, q, q_rope, latent, rope, table, position_M, bounds, unit, rope_unit, ROPE: tl.constexpr,
    STAGES: tl.constexpr, WINDOW: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Add latents to the state of an online softmax; only the tiles at both ends need masks (flash.split_bounds)."""
    start, inner, outer, stop = bounds
    if WINDOW:
        state = _accumulate(state, q, q_rope, latent, rope, table, position_M, start, inner, unit, rope_unit, ROPE, 1,
                            WINDOW, True, M, N)  # fmt: skip
    state = _accumulate(state, q, q_rope, latent, rope, table, position_M, inner, outer, unit, rope_unit, ROPE, STAGES,
                        WINDOW, False, M, N)  # fmt: skip
    return _accumulate(state, q, q_rope, latent, rope, table, position_M, outer, stop, unit, rope_unit, ROPE, 1,
                       WINDOW, True, M, N)  # fmt: skip


@triton.jit(
    do_not_specialize=["requests", "concurrency", "table_stride"],
    do_not_specialize_on_alignment=["table", "cu_seqlens_q", "seq_lens"],
)
def mla_kernel(
    q, out, out_lse, parts, lse, plan, latent, rope, global_scale, table, cu_seqlens_q, seq_lens, scale, requests,
    concurrency, table_stride, q_stride_T, q_stride_H, GROUP: tl.constexpr, RANK: tl.constexpr, ROPE_DIM: tl.constexpr,
    ROPE: tl.constexpr, FOLD: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, R: tl.constexpr, K: tl.constexpr, FIXED: tl.constexpr,
):  # fmt: skip
    """Compute attention of a tile of queries over a split of a request's latents.

    Grid: tiles of a request's queries, groups of GROUP heads, and requests; if SPLIT, requests + K / 2 * concurrency.
    FIXED is attention_kernel's (kernels/attention/triton.py).
    """
    # --- which request, queries and latents
    TOKENS: tl.constexpr = M // GROUP
    tile, group, program = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    max_keys = WINDOW + TOKENS if WINDOW else 1 << 30
    request, split, splits = flash.take_split(
        program, seq_lens, requests, concurrency, max_keys, SPLIT, FIXED, R, K
    )
    # The grid has room for any division into splits, so some programs have nothing to do.
    if SPLIT and request >= requests:
        return
    flash.store_plan(plan, program, request, split, splits, SPLIT, FIXED)
    begin = tl.load(cu_seqlens_q + request)
    count = tl.load(cu_seqlens_q + request + 1) - begin
    first = tile * TOKENS
    if first >= count:
        return
    past = tl.load(seq_lens + request) - count
    last = tl.minimum(first + TOKENS, count) - 1
    low, high = 0, 0
    if FIXED:
        low, high = flash.fixed_splits(past, first, last, FIXED, WINDOW, N)
        if SPLIT:
            if (split < low) | (split >= high):
                return
            low, high = split, split + 1
    row_M = tl.arange(0, M)
    token_M, head_M = first + row_M // GROUP, group * GROUP + row_M % GROUP
    live_M = (row_M < TOKENS * GROUP) & (token_M < count)

    # --- load queries
    offset_M = (begin + token_M).to(tl.int64) * q_stride_T + head_M * q_stride_H
    queries = flash.load_queries(q, offset_M, live_M, latent.PARTS, latent.items.WIDTH, RANK, latent.DTYPE)
    q_rope = queries
    if ROPE:
        q_rope = flash.load_queries(
            q + RANK, offset_M, live_M, rope.PARTS, rope.items.WIDTH, ROPE_DIM, rope.DTYPE
        )
    state = flash.init_state(latent.PARTS, latent.items.WIDTH, M, N)

    # --- accumulate
    if not FIXED:
        bounds = flash.split_bounds(past, first, last, split, splits, WINDOW, N)
    table += request.to(tl.int64) * table_stride
    # exp2() is what the hardware computes
    latent_scale, rope_unit = tl.load(global_scale) * FOLD, scale * flash.LOG2E
    unit = rope_unit * latent_scale
    if FIXED:
        peak_M, total, sums = state
        merged = peak_M, tl.zeros([M], tl.float32), sums
        for part in range(low, high):
            bounds = flash.fixed_bounds(past, first, last, part, FIXED, WINDOW, N)
            fresh = flash.init_state(latent.PARTS, latent.items.WIDTH, M, N)
            peak_M, total, sums = _attend(fresh, queries, q_rope, latent, rope, table, past + token_M, bounds, unit,
                                          rope_unit, ROPE, STAGES, WINDOW, M, N)  # fmt: skip
            merged = flash.merge_states(merged, (peak_M, tl.sum(total, 1), sums))
        if SPLIT:
            flash.store_part(parts, lse, merged, latent_scale, split, begin + token_M, head_M, live_M, concurrency,
                             tl.num_programs(1) * GROUP, RANK)  # fmt: skip
            return
        peak_M, total_M, sums = merged
    else:
        peak_M, total, sums = _attend(state, queries, q_rope, latent, rope, table, past + token_M, bounds, unit,
                                      rope_unit, ROPE, STAGES, WINDOW, M, N)  # fmt: skip
        total_M = tl.sum(total, 1)

    # --- store
    empty_M = total_M == 0.0
    total_M = tl.where(empty_M, 1.0, total_M)
    factor_M = latent_scale / total_M
    flash.store_tile(out, out_lse, parts, lse, peak_M, total_M, empty_M, sums, factor_M, begin + token_M, head_M,
                     live_M, program, tile, group, splits, GROUP, RANK, SPLIT and not FIXED, M)  # fmt: skip


# ---- MLA: tiles ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LatentTile:
    """How a program over latents is tiled, and how its tile is computed."""

    rows: int
    latents: int
    warps: int
    stages: int
    """Stages of loads in flight."""
    programs: int
    """Programs that a processor is expected to run at a time."""
    sm90: bool = False
    """Whether it is computed by gluon_sm90.py, which has no stages."""


def tile_of(rows: int, group: int, latents: Paged, rope: int, query: torch.dtype, gpu: GPU) -> LatentTile:
    """Choose the fastest tile that fits into shared memory.

    Args:
        rows: Query tokens x heads of a request.
        group: Heads of one token in a tile.
        latents: Pages of latents.
        rope: Rotary values at the end of each.
        query: The query's dtype.
        gpu: Sizes of the GPU.

    Returns:
        The tile.
    """
    candidates: Iterable[LatentTile] = portable_tiles(rows, gpu.arch)
    if gpu.arch == SM90 and _suits_sm90(latents, query):
        # A chain, because every launch comes here: mostly the first tile fits, and no other is made.
        candidates = chain(_sm90_tiles(rows, latents), candidates)
    return first_fitting(candidates, group, latents, rope, query, gpu)


def first_fitting(
    candidates: Iterable[LatentTile], group: int, latents: Paged, rope: int, query: torch.dtype, gpu: GPU
) -> LatentTile:
    """Return the first tile, widened to the heads of a token, that fits into shared memory."""
    rows = padded_rows(group)
    wide = (tile if tile.rows >= rows else replace(tile, rows=rows) for tile in candidates)
    return next(
        tile for tile in wide if tile.programs * memory_of(tile, latents, rope, query.itemsize) <= gpu.memory
    )


def _sm90_tiles(rows: int, latents: Paged) -> Iterator[LatentTile]:
    """Yield tiles for gluon_sm90.py from the fastest to the smallest."""
    fitting, parts = min(padded_rows(rows), MAX_ROWS), _parts(latents)
    if parts == 4 and fitting == 16:
        yield LatentTile(16, 64, 4, 1, 2, True)
    yield LatentTile(fitting, 64, 4 if parts == 1 and fitting <= FOUR_WARP_ROWS else 8, 1, 1, True)


def portable_tiles(rows: int, arch: int) -> Iterator[LatentTile]:
    """Yield tiles for any GPU from the fastest to the smallest."""
    warps = 8 if rows > FOUR_WARP_ROWS else 4
    # What Triton 3.6 makes of two warp groups whose FP8 latents are loaded ahead computes wrong sums on Hopper.
    stages = 1 if warps == 8 and arch == SM90 else 2
    for size in (32, 16):
        yield LatentTile(min(MAX_ROWS, padded_rows(rows)), size, warps, stages, 1)
    yield LatentTile(16, 16, 4, 1, 1)


def _suits_sm90(latents: Paged, query: torch.dtype) -> bool:
    """Return whether gluon_sm90.py can read the latents: by 16 bytes, in full tiles, plain values as queries are."""
    kind, data = LATENTS[latents.format.name], latents.planes_PHS[0]
    packed = kind.decoder.parts > 1
    wide = data.shape[3] * data.itemsize >= MIN_ROW_BYTES if packed else data.dtype == query
    copied = (data, latents.planes_PHS[-1]) if kind.rope_apart else (data,)
    alike = not kind.rope_apart or latents.planes_PHS[-1].dtype == query
    scales = latents.planes_PHS[1:2] if packed and kind.decoder.block else ()
    aligned = all(is_aligned(plane, 16) for plane in copied) and all(is_aligned(plane, 4) for plane in scales)
    return query.itemsize == 2 and wide and alike and aligned


def _parts(latents: Paged) -> int:
    return LATENTS[latents.format.name].decoder.parts


def padded_rows(x: int) -> int:
    """Return the rows of a tile that holds x rows: a power of two, of 16 at least, as the tensor cores want."""
    return max(next_power_of_2(x), 16)


def memory_of(tile: LatentTile, latents: Paged, rope: int, item: int) -> int:
    """Return the bytes of shared memory of a program, roughly.

    Args:
        tile: The tile.
        latents: Pages of latents.
        rope: Rotary values at the end of each.
        item: Bytes of a query's value.

    Returns:
        Bytes of queries, weights, and tiles of latents as they are stored and as they are decoded.
    """
    rank = padded_rows(latents.dim - rope)
    width = rank + (padded_rows(rope) if rope else 0)
    stored = sum(plane[0, 0, 0].nbytes for plane in latents.planes_PHS)
    packed, apart = _parts(latents) > 1, LATENTS[latents.format.name].rope_apart
    size = (rank if apart else width) * item if packed else 0
    size += stored * ((1 if packed else 2) if tile.sm90 else tile.stages)
    return tile.latents * size + tile.rows * (width + tile.latents) * item + SCRATCH


def heads_per_tile(heads: int, most: int) -> int:
    """Return how many heads of a token one tile takes: as many as fit, in equal groups."""
    return next(group for group in range(min(heads, most), 0, -1) if heads % group == 0)


# ---- MLA: launch -----------------------------------------------------------------------------------------------------


def mla_attention(
    q_THD: Tensor, latents: Paged, rope: int, batch: AttentionBatch, scale: float, max_seq_len: int = UNBOUNDED,
    window: int | None = None, *, shape: LatentTile | None = None, concurrency: int | None = None,
    lse_TH: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return attention as naive.py defines it, in one launch, or two where latents are split.

    Args:
        q_THD: Queries with the projections of keys absorbed, request after request.
        latents: Pages of latents, one head.
        rope: Rotary values at the end of a latent.
        batch: The pages and lengths of requests.
        scale: What scores are multiplied by.
        max_seq_len: A bound on stored tokens where one is known, which is not so in a CUDA graph.
        window: Tokens that a query sees, if not all.
        shape: Another tile than the fastest.
        concurrency: Programs that run at a time for one tile of queries; latents are split among them if more than 1.
        lse_TH: Float32, contiguous: it receives the log-sum-exp.

    Returns:
        [T, H, R] in the query's dtype; in float32 if the log-sum-exp is wanted too, for merging.
    """
    (tokens, heads, dim), gpu = q_THD.shape, gpu_of(q_THD.device)
    rank, requests, max_query_len = dim - rope, len(batch.seq_lens_B), max(batch.query_lens)
    group = heads_per_tile(heads, shape.rows if shape else MAX_ROWS)
    shape = shape or tile_of(max_query_len * group, group, latents, rope, q_THD.dtype, gpu)
    num_tiles, groups = cdiv(max_query_len, shape.rows // group), heads // group
    if concurrency is None:
        running = shape.programs * gpu.processors // (num_tiles * groups)
        concurrency = flash.concurrency_of(running, max_seq_len)
    split = concurrency > 1
    out = q_THD.new_empty(tokens, heads, rank, dtype=q_THD.dtype if lse_TH is None else torch.float32)
    rows = num_tiles * groups * shape.rows
    programs, parts, lse, plan = flash.workspace(out, requests, concurrency, rows, rank)
    latent, rotary, kind = tiles.sections(latents, rope, q_THD.dtype)
    q_THD = q_THD if q_THD.stride(2) == 1 else q_THD.contiguous()
    common = (
        q_THD, out, lse_TH, parts, lse, plan, latent, rotary, latents.scale, batch.page_table_BN, batch.cu_seqlens_q_B1,
        batch.seq_lens_B, scale, requests, concurrency, batch.page_table_BN.stride(0), q_THD.stride(0), q_THD.stride(1),
        group, rank, rope, kind, LATENTS[latents.format.name].decoder.fold, window or 0, split,
    )  # fmt: skip
    sizes = shape.rows, shape.latents, flash.padded_requests(requests), flash.SHARE_SIZES
    grid = num_tiles, groups, programs
    if shape.sm90:
        from nibble.kernels.mla.gluon_sm90 import layouts, mla_sm90_kernel

        of_tile = layouts(shape.rows, latent, rotary, sizes[2], shape.warps)
        mla_sm90_kernel[grid](*common, *sizes, *of_tile, num_warps=shape.warps)
    else:
        mla_kernel[grid](*common, shape.stages, *sizes, 0, num_warps=shape.warps, num_stages=shape.stages)
    if split:
        flash.combine_kernel[(max_query_len, heads, requests)](
            out, lse_TH, parts, lse, plan, batch.cu_seqlens_q_B1, num_tiles,
            group, rank, next_power_of_2(rank), shape.rows, _splits_at_once(concurrency, requests),
        )  # fmt: skip
    return out


def _splits_at_once(concurrency: int, requests: int) -> int:
    """Return how many splits of a row are combined at a time: few where there are many requests, as rows are long."""
    return min(max(next_power_of_2(cdiv(concurrency, requests)), 4), 16)


# ---- sparse MLA: kernels ---------------------------------------------------------------------------------------------


@triton.jit
def _list_end(slots, count, L: tl.constexpr):
    """Return where a list of slots ends: behind the last that is not padding."""
    k_L = tl.arange(0, L)
    valid_L = tl.load(slots + k_L, mask=k_L < count, other=-1) >= 0
    return tl.max(tl.where(valid_L, k_L + 1, 0), 0)


@triton.jit
def _list_bounds(split, splits, stop, N: tl.constexpr):
    """Return a split [start, stop) of a list, in whole tiles."""
    each = tl.cdiv(stop, N * splits) * N
    start = split * each
    return start, tl.minimum(start + each, stop)


@triton.jit
def _gather_section(section, slot_N):
    """Load the parts of a tile, a row for each slot; zeros for padding."""
    keep_N = slot_N >= 0
    slot_N = tl.where(keep_N, slot_N, 0)
    page_N, slot_N = (slot_N // section.PAGE_SIZE).to(tl.int64), slot_N % section.PAGE_SIZE
    items = tiles.read_rows(section.items, page_N, slot_N, 0, keep_N, 1, True)
    scales = 0
    if section.EACH:
        codes = tiles.read_rows(section.blocks, page_N, slot_N, 0, keep_N, 1, True)
        scales = section.DECODE_SCALE(codes, section.DTYPE)
    return tiles.decode_tile(section, items, scales, 1)


@triton.jit
def _accumulate_list(
    state, q, q_rope, latent, rope, slots, start, stop, unit, rope_unit, ROPE: tl.constexpr, STAGES: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Add latents [start, stop) of a list to the state of an online softmax: peaks, totals and sums.

    unit: what products of decoded values are multiplied by to be scores in powers of two; rope_unit: those of rotary
    values that are APART.
    """
    n_N = tl.arange(0, N)
    slot_N = tl.load(slots + start + n_N, mask=start + n_N < stop, other=-1)
    for first in tl.range(start, stop, N, num_stages=STAGES):
        # --- load
        parts = _gather_section(latent, slot_N)
        # --- scores
        zeros = tl.zeros([M, N], tl.float32)
        rotary = zeros
        if ROPE:
            rotary = flash.dot_parts(zeros, q_rope, _gather_section(rope, slot_N))
        if ROPE == tiles.APART:
            scores = flash.dot_parts(zeros, q, parts) * unit + rotary * rope_unit
        else:
            scores = flash.dot_parts(rotary, q, parts) * unit
        scores = tl.where((slot_N >= 0)[None, :], scores, float("-inf"))
        slot_N = tl.load(slots + first + N + n_N, mask=first + N + n_N < stop, other=-1)  # a tile early
        # --- softmax and accumulate: the decoded latents are the values too
        state = flash.update_state(state, scores, parts, latent.DTYPE)
    return state


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["slots"])
def sparse_mla_kernel(
    q, out, parts, lse, latent, rope, global_scale, slots, scale, count, slots_stride, q_stride_T, q_stride_H,
    HEADS: tl.constexpr, GROUP: tl.constexpr, RANK: tl.constexpr, ROPE_DIM: tl.constexpr, ROPE: tl.constexpr,
    FOLD: tl.constexpr, STAGES: tl.constexpr, M: tl.constexpr, N: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Compute attention of some heads of a query over a split of its list.

    Grid: query tokens x groups of GROUP heads, and splits. L: a power of two that `count` is within.
    """
    # --- which token, heads and slots
    GROUPS: tl.constexpr = HEADS // GROUP
    program, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    token, group = (program // GROUPS).to(tl.int64), program % GROUPS
    slots += token * slots_stride
    start, stop = _list_bounds(split, splits, _list_end(slots, count, L), N)
    row_M = tl.arange(0, M)
    live_M, head_M = row_M < GROUP, group * GROUP + row_M

    # --- load queries
    offset_M = token * q_stride_T + head_M * q_stride_H
    queries = flash.load_queries(q, offset_M, live_M, latent.PARTS, latent.items.WIDTH, RANK, latent.DTYPE)
    q_rope = queries
    if ROPE:
        q_rope = flash.load_queries(
            q + RANK, offset_M, live_M, rope.PARTS, rope.items.WIDTH, ROPE_DIM, rope.DTYPE
        )

    # --- accumulate
    state = flash.init_state(latent.PARTS, latent.items.WIDTH, M, N)
    latent_scale, rope_unit = tl.load(global_scale) * FOLD, scale * flash.LOG2E
    unit = rope_unit * latent_scale
    state = _accumulate_list(
        state, queries, q_rope, latent, rope, slots, start, stop, unit, rope_unit, ROPE, STAGES, M, N
    )

    # --- store
    peak_M, total, sums = state
    total_M = tl.sum(total, 1)
    empty_M = total_M == 0.0
    total_M = tl.where(empty_M, 1.0, total_M)
    factor_M = latent_scale / total_M
    if splits == 1:
        flash.store_rows(out + (token * HEADS + head_M) * RANK, sums, factor_M, live_M, RANK)
    else:
        part_M = (token * splits + split) * HEADS + head_M
        flash.store_rows(parts + part_M * RANK, sums, factor_M, live_M, RANK)
        lse_M = tl.where(empty_M, float("-inf"), peak_M + tl.log2(total_M))
        tl.store(lse + part_M, lse_M, mask=live_M)


@triton.jit
def sparse_combine_kernel(
    out, out_lse, parts, lse, HEADS: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
    S: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Combine the splits of a row: their mean, weighted by what each saw. Grid: query tokens, and heads.

    PARTS: in how many pieces a row's values lie, value i in piece i % PARTS.
    """
    # --- load
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s_S, r_R = tl.arange(0, S), tl.arange(0, R)
    part_S = (token * SPLITS + s_S) * HEADS + head
    lse_S = tl.load(lse + part_S, mask=s_S < SPLITS, other=float("-inf"))
    nonempty_S = lse_S != float("-inf")
    # --- softmax
    peak = tl.maximum(tl.max(lse_S, 0), flash.MIN_PEAK)
    weight_S = tl.exp2(lse_S - peak)
    total = tl.sum(weight_S, 0)
    if out_lse is not None:
        tl.store(out_lse + token * HEADS + head, flash.natural_lse(peak, total, total == 0.0))
    weight_S /= tl.where(total == 0.0, 1.0, total)
    # --- accumulate: parts are read as they lie, many values at a time
    keep = nonempty_S[:, None] & (r_R < RANK)[None, :]
    part_SR = tl.load(parts + part_S[:, None] * RANK + r_R[None, :], mask=keep, other=0.0)
    mean_R = tl.sum(part_SR * weight_S[:, None], 0)
    # --- store: put in order now, as only one of each is left
    value_R = r_R % (RANK // PARTS) * PARTS + r_R // (RANK // PARTS)
    tl.store(out + (token * HEADS + head) * RANK + value_R, mean_R.to(out.dtype.element_ty), mask=r_R < RANK)


# ---- sparse MLA: launch ----------------------------------------------------------------------------------------------


def sparse_tile_of(group: int, latents: Paged, rope: int, query: torch.dtype, gpu: GPU) -> LatentTile:
    """Choose the fastest tile that fits into shared memory.

    Args:
        group: Heads of a token in a tile.
        latents: Pages of latents.
        rope: Rotary values at the end of each.
        query: The query's dtype.
        gpu: Sizes of the GPU.

    Returns:
        The tile.
    """
    if gpu.arch == SM90:
        from nibble.kernels.mla import sparse_gluon_sm90

        if sparse_gluon_sm90.serves(latents, rope, query, gpu.memory):
            return LatentTile(sparse_gluon_sm90.ROWS, sparse_gluon_sm90.TILE, 4, 1, 1, True)
    return first_fitting(portable_tiles(group, gpu.arch), group, latents, rope, query, gpu)


def sparse_mla_attention(
    q_THD: Tensor, latents: Paged, rope: int, topk_slots_TK: Tensor, scale: float, *,
    shape: LatentTile | None = None, splits: int | None = None, lse_TH: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return attention as naive.py defines it, in one launch, or two where lists are split.

    Args:
        q_THD: Queries with the projections of keys absorbed.
        latents: Pages of latents, one head.
        rope: Rotary values at the end of a latent.
        topk_slots_TK: Int32, page * page_size + offset; negative for padding.
        scale: What scores are multiplied by.
        shape: Another tile than the fastest.
        splits: Of a list, if not as many as are fastest.
        lse_TH: Float32, contiguous: it receives the log-sum-exp.

    Returns:
        [T, H, R] in the query's dtype; in float32 if the log-sum-exp is wanted too, for merging.
    """
    (tokens, heads, dim), gpu = q_THD.shape, gpu_of(q_THD.device)
    rank, group, most = dim - rope, heads_per_tile(heads, MAX_ROWS), topk_slots_TK.shape[1]
    out = q_THD.new_empty(tokens, heads, rank, dtype=q_THD.dtype if lse_TH is None else torch.float32)
    if tokens == 0:
        return out
    shape = shape or sparse_tile_of(group, latents, rope, q_THD.dtype, gpu)
    programs = tokens * heads // group
    if splits is None:
        splits = flash.splits_of(programs, cdiv(most, shape.latents), shape.programs * gpu.processors)
    if lse_TH is not None:
        splits = max(splits, 2)  # what combines them has the log-sum-exp, and kernels of one split leave none
    parts = lse = out
    if splits > 1:
        parts = out.new_empty(tokens, splits, heads, rank, dtype=torch.float32)
        lse = out.new_empty(tokens, splits, heads, dtype=torch.float32)
    latent, rotary, kind = tiles.sections(latents, rope, q_THD.dtype)
    q_THD = q_THD if q_THD.stride(2) == 1 else q_THD.contiguous()
    topk_slots_TK = topk_slots_TK if topk_slots_TK.stride(1) == 1 else topk_slots_TK.contiguous()
    common = (
        q_THD, out, parts, lse, latent, rotary, latents.scale, topk_slots_TK, scale, most, topk_slots_TK.stride(0),
        q_THD.stride(0), q_THD.stride(1), heads, group, rank, rope, kind,
        LATENTS[latents.format.name].decoder.fold,
    )  # fmt: skip
    padded_len, pieces = next_power_of_2(max(most, 16)), 1
    if shape.sm90:
        from nibble.kernels.mla import sparse_gluon_sm90

        pieces = sparse_gluon_sm90.launch((programs, splits), latents.format.name, common, padded_len)
    else:
        sparse_mla_kernel[(programs, splits)](
            *common, shape.stages, shape.rows, shape.latents, padded_len,
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
    if splits > 1:
        sparse_combine_kernel[(tokens, heads)](
            out, lse_TH, parts, lse, heads, rank, splits, pieces, next_power_of_2(splits), next_power_of_2(rank)
        )  # fmt: skip
    return out

"""Triton kernels of sparse MLA: flash attention over a list of slots, whose latents are gathered row by row.

A program takes a group of heads of one query token, and a split of its list. How many splits there are depends on the
shapes alone, so a CUDA graph may keep them; a second launch combines them. A list ends behind its last slot that is not
padding. SM90 has a kernel of its own (gluon_sm90.py), which reads the same sections and is launched from here.

Shape suffixes: T query tokens, H query heads, D values of a latent, K slots of a list, M rows of a tile (heads),
N latents of a tile, W words of a section, S splits, R values of a row. Names in capitals are constants of a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels import flash
from nibble.kernels.codecs import LATENTS, tiles
from nibble.kernels.mla.triton import (
    FOUR_WARP_ROWS,
    MAX_ROWS,
    LatentTile,
    heads_per_tile,
    memory_of,
    padded_rows,
)
from nibble.kernels.sizes import GPU, SM90, cdiv, gpu_of, next_power_of_2
from nibble.kernels.types import Paged

MAX_SPLITS = 32
LAUNCH_COST_TILES = 3.0
"""Tiles, in the time of which a program starts and leaves what it has to be combined."""


# ---- the kernels -----------------------------------------------------------------------------------------------------


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
def _accumulate(
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
    state = _accumulate(state, queries, q_rope, latent, rope, slots, start, stop, rope_unit * latent_scale, rope_unit,
                        ROPE, STAGES, M, N)  # fmt: skip

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
    out, parts, lse, HEADS: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
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
    weight_S = tl.exp2(lse_S - tl.maximum(tl.max(lse_S, 0), flash.MIN_PEAK))
    total = tl.sum(weight_S, 0)
    weight_S /= tl.where(total == 0.0, 1.0, total)
    # --- accumulate: parts are read as they lie, many values at a time
    keep = nonempty_S[:, None] & (r_R < RANK)[None, :]
    part_SR = tl.load(parts + part_S[:, None] * RANK + r_R[None, :], mask=keep, other=0.0)
    mean_R = tl.sum(part_SR * weight_S[:, None], 0)
    # --- store: put in order now, as only one of each is left
    value_R = r_R % (RANK // PARTS) * PARTS + r_R // (RANK // PARTS)
    tl.store(out + (token * HEADS + head) * RANK + value_R, mean_R.to(out.dtype.element_ty), mask=r_R < RANK)


# ---- the launch ------------------------------------------------------------------------------------------------------


def tile_of(group: int, latents: Paged, rope: int, query: torch.dtype, gpu: GPU) -> LatentTile:
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
    return next(
        tile
        for tile in _candidates(group, latents, rope, query, gpu)
        if tile.sm90 or memory_of(tile, latents, rope, query.itemsize) <= gpu.memory
    )


def _candidates(group: int, latents: Paged, rope: int, query: torch.dtype, gpu: GPU) -> Iterator[LatentTile]:
    """Yield tiles from the fastest to the smallest."""
    if gpu.arch == SM90:
        from nibble.kernels.sparse_mla import gluon_sm90

        if gluon_sm90.serves(latents, rope, query, gpu.memory):
            yield LatentTile(gluon_sm90.ROWS, gluon_sm90.TILE, 4, 1, 1, True)
    rows = padded_rows(group)
    for size in (32, 16):
        yield LatentTile(rows, size, 8 if rows > FOUR_WARP_ROWS else 4, 2, 1)
    yield LatentTile(rows, 16, 4, 1, 1)


def sparse_mla_attention(
    q_THD: Tensor, latents: Paged, rope: int, topk_slots_TK: Tensor, scale: float, *,
    shape: LatentTile | None = None, splits: int | None = None,
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

    Returns:
        [T, H, R] in the query's dtype.
    """
    (tokens, heads, dim), gpu = q_THD.shape, gpu_of(q_THD.device)
    rank, group, most = dim - rope, heads_per_tile(heads, MAX_ROWS), topk_slots_TK.shape[1]
    out = q_THD.new_empty(tokens, heads, rank)
    if tokens == 0:
        return out
    shape = shape or tile_of(group, latents, rope, q_THD.dtype, gpu)
    programs = tokens * heads // group
    if splits is None:
        splits = splits_of(programs, cdiv(most, shape.latents), shape.programs * gpu.processors)
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
        from nibble.kernels.sparse_mla import gluon_sm90

        pieces = gluon_sm90.launch((programs, splits), latents.format.name, common, padded_len)
    else:
        sparse_mla_kernel[(programs, splits)](
            *common, shape.stages, shape.rows, shape.latents, padded_len,
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
    if splits > 1:
        sparse_combine_kernel[(tokens, heads)](
            out, parts, lse, HEADS=heads, RANK=rank, SPLITS=splits, PARTS=pieces, S=next_power_of_2(splits),
            R=next_power_of_2(rank),
        )  # fmt: skip
    return out


def splits_of(programs: int, num_tiles: int, concurrency: int) -> int:
    """Choose the splits of a list that are done first.

    Args:
        programs: How many programs there are without splitting.
        num_tiles: Tiles of a list.
        concurrency: Programs that run at a time.

    Returns:
        Splits of each list.
    """

    def time(splits: int) -> float:
        waves = cdiv(programs * splits, concurrency)
        return waves * (cdiv(num_tiles, splits) + LAUNCH_COST_TILES) + (
            LAUNCH_COST_TILES if splits > 1 else 0.0
        )

    return min(range(1, min(MAX_SPLITS, max(num_tiles, 1)) + 1), key=time)

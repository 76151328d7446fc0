"""Triton kernel of MLA: flash attention in which a tile of latents is decoded once, and is both keys and values.

A program takes a tile of rows, which are query tokens times query heads, and a share of the latents that they see
(flash.py). What is stored how is the codecs' business: no kernel names a format. SM90 has a kernel of its own for
few heads (gluon_sm90.py), which reads the same sections and is launched from here.

Shape suffixes: T query tokens, H query heads, D values of a latent, M rows of a tile, N latents of a tile, W words of a
section. Names in capitals are constants of a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels import flash
from nibble.kernels.codecs import LATENTS, tiles
from nibble.kernels.sizes import GPU, SM90, UNBOUNDED, cdiv, gpu_of, next_power_of_2
from nibble.kernels.types import AttentionBatch, Paged

MAX_ROWS = 64
"""Most rows of a tile, unless a token has more heads that no smaller number divides."""
FOUR_WARP_ROWS = 32
"""Rows up to which four warps do, where nothing is decoded."""
MIN_ROW_BYTES = 128
"""Bytes of packed values of a row that gluon_sm90.py reads at least."""
SCRATCH = 1024 + 256
"""Bytes of shared memory that a program takes beside its tiles, those that the hardware reserves included."""


# ---- the kernel ------------------------------------------------------------------------------------------------------


@triton.jit
def _accumulate(
    state, q, q_rope, latent, rope, table, position_M, start, stop, unit, rope_unit, ROPE: tl.constexpr,
    STAGES: tl.constexpr, MASKED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
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
        page = tiles.pages_of(
            table, first + N, n_N, stop, latent.PAGE_SIZE
        )  # a tile early, as loads depend on it
        if ROPE == tiles.APART:
            scores = flash.dot_parts(zeros, q, parts) * unit + rotary * rope_unit
        else:
            scores = flash.dot_parts(rotary, q, parts) * unit
        if MASKED:
            scores = tl.where((first + n_N)[None, :] <= position_M[:, None], scores, float("-inf"))
        # --- softmax and accumulate: the decoded latents are the values too
        state = flash.update_state(state, scores, parts, latent.DTYPE)
    return state


@triton.jit(
    do_not_specialize=["requests", "concurrency", "table_stride"],
    do_not_specialize_on_alignment=["table", "cu_seqlens_q", "seq_lens"],
)
def mla_kernel(
    q, out, parts, lse, plan, latent, rope, global_scale, table, cu_seqlens_q, seq_lens, scale, requests, concurrency,
    table_stride, q_stride_T, q_stride_H, GROUP: tl.constexpr, RANK: tl.constexpr, ROPE_DIM: tl.constexpr,
    ROPE: tl.constexpr, FOLD: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Compute attention of a tile of queries over a split of a request's latents.

    Grid: tiles of a request's queries, groups of GROUP heads, and requests; if SPLIT, requests + K / 2 * concurrency.
    """
    # --- which request, queries and latents
    TOKENS: tl.constexpr = M // GROUP
    tile, group, program = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request, split, splits = program, 0, 1
    if SPLIT:
        request, split, splits = flash.assign_split(program, seq_lens, requests, concurrency, 1 << 30, R, K)
        # The grid has room for any division into splits, so some programs have nothing to do.
        if request >= requests:
            return
        # One program of each request tells combine_kernel where its parts are.
        if split == 0:
            tl.store(plan + 2 * request, program)
            tl.store(plan + 2 * request + 1, splits)
    begin = tl.load(cu_seqlens_q + request)
    count = tl.load(cu_seqlens_q + request + 1) - begin
    first = tile * TOKENS
    if first >= count:
        return
    past = tl.load(seq_lens + request) - count
    last = tl.minimum(first + TOKENS, count) - 1
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

    # --- accumulate: only the last tiles need masks
    _, inner, outer, stop = flash.split_bounds(past, first, last, split, splits, 0, N)
    table += request.to(tl.int64) * table_stride
    # Scores are in powers of two, because exp2() is what the hardware computes.
    latent_scale, rope_unit = tl.load(global_scale) * FOLD, scale * flash.LOG2E
    unit = rope_unit * latent_scale
    state = _accumulate(state, queries, q_rope, latent, rope, table, past + token_M, inner, outer, unit, rope_unit,
                        ROPE, STAGES, False, M, N)  # fmt: skip
    state = _accumulate(state, queries, q_rope, latent, rope, table, past + token_M, outer, stop, unit, rope_unit,
                        ROPE, 1, True, M, N)  # fmt: skip

    # --- store
    peak_M, total, sums = state
    total_M = tl.sum(total, 1)
    empty_M = total_M == 0.0
    total_M = tl.where(empty_M, 1.0, total_M)
    factor_M = latent_scale / total_M
    flash.store_tile(out, parts, lse, peak_M, total_M, empty_M, sums, factor_M, begin + token_M, head_M, live_M,
                     program, tile, group, splits, GROUP, RANK, SPLIT, M)  # fmt: skip


# ---- tiles -----------------------------------------------------------------------------------------------------------


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
    wide = (
        replace(tile, rows=max(tile.rows, padded_rows(group)))
        for tile in _candidates(rows, latents, query, gpu)
    )
    return next(
        tile for tile in wide if tile.programs * memory_of(tile, latents, rope, query.itemsize) <= gpu.memory
    )


def _candidates(rows: int, latents: Paged, query: torch.dtype, gpu: GPU) -> Iterator[LatentTile]:
    """Yield tiles from the fastest to the smallest."""
    if gpu.arch == SM90 and _suits_sm90(latents, query):
        fitting, parts = min(padded_rows(rows), MAX_ROWS), _parts(latents)
        if parts == 4 and fitting == 16:
            yield LatentTile(16, 64, 4, 1, 2, True)
        yield LatentTile(fitting, 64, 4 if parts == 1 and fitting <= FOUR_WARP_ROWS else 8, 1, 1, True)
    for size in (32, 16):
        yield LatentTile(min(MAX_ROWS, padded_rows(rows)), size, 8 if rows > FOUR_WARP_ROWS else 4, 2, 1)
    yield LatentTile(16, 16, 4, 1, 1)


def _suits_sm90(latents: Paged, query: torch.dtype) -> bool:
    """Return whether gluon_sm90.py can read the latents: by 16 bytes, in full tiles, plain values as queries are."""
    kind, data = LATENTS[latents.format.name], latents.planes_PHS[0]
    packed = kind.decoder.parts > 1
    wide = data.shape[3] * data.itemsize >= MIN_ROW_BYTES if packed else data.dtype == query
    copied = (data, latents.planes_PHS[-1]) if kind.rope_apart else (data,)
    alike = not kind.rope_apart or latents.planes_PHS[-1].dtype == query
    scales = latents.planes_PHS[1:2] if packed and kind.decoder.block else ()
    aligned = all(_aligned(plane, 16) for plane in copied) and all(_aligned(plane, 4) for plane in scales)
    return query.itemsize == 2 and wide and alike and aligned


def _aligned(plane_PHS: Tensor, size: int) -> bool:
    """Return whether rows begin at multiples of so many bytes, which is what an asynchronous copy takes at a time."""
    return all(x * plane_PHS.itemsize % size == 0 for x in (plane_PHS.storage_offset(), plane_PHS.stride(2)))


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


# ---- the launch ------------------------------------------------------------------------------------------------------


def mla_attention(
    q_THD: Tensor, latents: Paged, rope: int, batch: AttentionBatch, scale: float, max_seq_len: int = UNBOUNDED, *,
    shape: LatentTile | None = None, concurrency: int | None = None,
) -> Tensor:  # fmt: skip
    """Return attention as naive.py defines it, in one launch, or two where latents are split.

    Args:
        q_THD: Queries with the projections of keys absorbed, request after request.
        latents: Pages of latents, one head.
        rope: Rotary values at the end of a latent.
        batch: The pages and lengths of requests.
        scale: What scores are multiplied by.
        max_seq_len: A bound on stored tokens where one is known, which is not so in a CUDA graph.
        shape: Another tile than the fastest.
        concurrency: Programs that run at a time for one tile of queries; latents are split among them if more than 1.

    Returns:
        [T, H, R] in the query's dtype.
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
    out = q_THD.new_empty(tokens, heads, rank)
    rows = num_tiles * groups * shape.rows
    programs, parts, lse, plan = flash.workspace(out, requests, concurrency, rows, rank)
    latent, rotary, kind = tiles.sections(latents, rope, q_THD.dtype)
    q_THD = q_THD if q_THD.stride(2) == 1 else q_THD.contiguous()
    common = (
        q_THD, out, parts, lse, plan, latent, rotary, latents.scale, batch.page_table_BN, batch.cu_seqlens_q_B1,
        batch.seq_lens_B, scale, requests, concurrency, batch.page_table_BN.stride(0), q_THD.stride(0), q_THD.stride(1),
        group, rank, rope, kind, LATENTS[latents.format.name].decoder.fold, split,
    )  # fmt: skip
    sizes = shape.rows, shape.latents, flash.padded_requests(requests), flash.SHARE_SIZES
    grid = num_tiles, groups, programs
    if shape.sm90:
        from nibble.kernels.mla.gluon_sm90 import layouts, mla_sm90_kernel

        of_tile = layouts(shape.rows, latent, rotary, sizes[2], shape.warps)
        mla_sm90_kernel[grid](*common, *sizes, *of_tile, num_warps=shape.warps)
    else:
        mla_kernel[grid](*common, shape.stages, *sizes, num_warps=shape.warps, num_stages=shape.stages)
    if split:
        flash.combine_kernel[(max_query_len, heads, requests)](
            out, parts, lse, plan, batch.cu_seqlens_q_B1, num_tiles, GROUP=group, DIM=rank,
            WIDTH=next_power_of_2(rank), M=shape.rows, S=_splits_at_once(concurrency, requests),
        )  # fmt: skip
    return out


def _splits_at_once(concurrency: int, requests: int) -> int:
    """Return how many splits of a row are combined at a time: a few where there are many requests, as rows are long."""
    return min(max(next_power_of_2(cdiv(concurrency, requests)), 4), 16)

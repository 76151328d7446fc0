"""The kernel of sparse_mla_attention for SM90, in Gluon: producer warps beside warpgroups that multiply.

A program takes 64 heads of a token. Its warps are of three kinds. Producer warps, four, or eight if they decode, bring
a tile of 64 latents into one of two stages (sparse_gluon_sm90_producer.py). The score warpgroup multiplies them with
the queries, computes weights, and sums the first half of the values; the value warpgroup sums the second half. So the
tensor cores are kept busy while the next tile is decoded, and no warp has to hold more sums than it has registers. The
products of a tile's scores are started behind the sums of the tile before.

Barriers. full and empty, of each stage: a tile is there, and has been used by both warpgroups. weights_full and
weights_empty: the score warpgroup has stored the weights of a tile and what rescales sums, and the value warpgroup has
used them.

A row's values stand in parts: as those of packed words do (codecs/), or halves of plain rows. Scores are one sum over
parts and rotary values, though these are stored with scales of their own: a power of two of the ratio goes to the
rotary queries, the rest to the others, which are float16 and lose nothing that bfloat16 had.

There is no interpreter for Gluon: mla/triton.py serves other GPUs, and is what tests on a CPU judge.

Shape suffixes: M rows of a tile (heads), N latents of a tile, W words of a section, L slots of a list. Names in
capitals are constants of a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nibble.kernels.codecs import LATENTS
from nibble.kernels.codecs.tiles import APART, NO_ROPE
from nibble.kernels.flash import LOG2E, MAX_FP16, MIN_PEAK
from nibble.kernels.mla.sparse_gluon_sm90_producer import produce, producer_layouts, with_fp8_instructions
from nibble.kernels.types import Paged, is_aligned

ROWS, TILE = 64, 64
RANK = 512
ROPE_DIM = 64
WARPS = 4


@dataclass(frozen=True, slots=True)
class Specialization:
    """How warps and registers of a program are divided."""

    producer_warps: int
    columns: int
    """Most columns of a product."""
    registers: tuple[int, int]
    """Registers of a thread of the value warpgroup, and of a producer. The score warpgroup has the rest."""


# In programs of 16 warps the compiler takes no wider products, and with other registers for the warpgroups that
# multiply it lets each product wait for the one before it (docs/design/sparse-decode.md).
COPYING, DECODING = Specialization(4, 256, (160, 136)), Specialization(8, 128, (160, 72))
"""For plain latents, and for packed ones."""
MEMORY = 232448
"""Bytes of shared memory of a program, nearly all of which are used."""


# ---- queries and output, 16 bytes a thread, which the values of one part are not in a row ----------------------------


@gluon.jit
def _split_parts(x, PARTS: gl.constexpr):
    """Split rows of values into PARTS tensors, part j of which has the values j, j + PARTS, j + 2 * PARTS..."""
    if PARTS == 1:
        parts = (x,)
    elif PARTS == 2:
        parts = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    else:
        even, odd = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 4, 2, 2]))
        a, c = gl.split(even)
        b, d = gl.split(odd)
        parts = (a, b, c, d)  # type: ignore[assignment]
    return parts


@gluon.jit
def _join_parts(parts):
    """Join parts to rows, as they were before _split_parts."""
    if len(parts) == 2:
        rows = gl.join(parts[0], parts[1])
    else:
        rows = gl.join(gl.join(parts[0], parts[2]), gl.join(parts[1], parts[3]))
    return gl.reshape(rows, [parts[0].shape[0], parts[0].shape[1] * len(parts)])


@gluon.jit
def _load_queries(q, q_stride_H, row_M, live_M, factor, SKIP: gl.constexpr, DIM: gl.constexpr, WIDTH: gl.constexpr,
                  DTYPE: gl.constexpr, LAYOUT: gl.constexpr):  # fmt: skip
    """Load rows of WIDTH query values from SKIP on, of which those before DIM exist, times a factor."""
    value_W = SKIP + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    at = (q + row_M * q_stride_H)[:, None] + value_W[None, :]
    x = gl.load(at, mask=live_M[:, None] & (value_W < DIM)[None, :], other=0.0)
    x = x.to(gl.float32) * factor
    if gl.float16 == DTYPE:
        x = gl.where(x > MAX_FP16, MAX_FP16, gl.where(x < -MAX_FP16, -MAX_FP16, x))
    return x.to(DTYPE)


@gluon.jit
def _store_output(out, first, tiles, GROUP: gl.constexpr, RANK: gl.constexpr, PLAIN: gl.constexpr, M: gl.constexpr,
                  LAYOUT: gl.constexpr):  # fmt: skip
    """Store the means of all parts, which are in shared memory, as rows of the output."""
    OUT: gl.constexpr = out.dtype.element_ty
    COUNT: gl.constexpr = len(tiles)
    parts = ()
    for j in gl.static_range(COUNT):
        parts += (tiles[j].index(0).load(LAYOUT).to(OUT, bitcast=True),)  # type: ignore[assignment]
    if PLAIN:
        for j in gl.static_range(COUNT):
            _store_rows(out, first, parts[j], j * (RANK // COUNT), GROUP, RANK, M, LAYOUT)
    else:
        JOINED: gl.constexpr = gl.BlockedLayout([1, 8 * COUNT], [1, 32], [4, 1], [1, 0])
        values = gl.convert_layout(_join_parts(parts), JOINED)
        _store_rows(out, first, values, 0, GROUP, RANK, M, JOINED)


@gluon.jit
def _store_rows(out, first, values, SKIP: gl.constexpr, GROUP: gl.constexpr, RANK: gl.constexpr, M: gl.constexpr,
                LAYOUT: gl.constexpr):  # fmt: skip
    """Store values from SKIP on of GROUP rows."""
    row_M = gl.arange(0, M, layout=gl.SliceLayout(1, LAYOUT))
    value_W = SKIP + gl.arange(0, values.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    at = (out + (first + row_M) * RANK)[:, None] + value_W[None, :]
    gl.store(at, values, mask=(row_M < GROUP)[:, None].broadcast_to(values.shape))


# ---- products --------------------------------------------------------------------------------------------------------


@gluon.jit
def _zero_sums(COUNT: gl.constexpr, M: gl.constexpr, WIDTH: gl.constexpr, MMA: gl.constexpr):
    """Return the sums of COUNT parts over nothing."""
    sums = ()
    for _ in gl.static_range(COUNT):
        sums += (gl.full([M, WIDTH], 0.0, gl.float32, layout=MMA),)  # type: ignore[assignment]
    return sums


@gluon.jit
def _start_scores(queries, rope_queries, tiles, rope_tiles, stage, PLAIN: gl.constexpr, M: gl.constexpr,
                  N: gl.constexpr, SCORES: gl.constexpr):  # fmt: skip
    """Start the products of queries and a tile."""
    if PLAIN:
        fence_async_shared()  # the producer copied the tile, and has set no fence
    scores = gl.full([M, N], 0.0, gl.float32, layout=SCORES)
    for j in gl.static_range(len(rope_tiles)):
        tile = rope_tiles[j].index(stage).permute([1, 0])
        scores = warpgroup_mma(rope_queries.index(j), tile, scores, use_acc=j > 0, is_async=True)
    for j in gl.static_range(len(tiles)):
        tile = tiles[j].index(stage).permute([1, 0])
        scores = warpgroup_mma(queries.index(j), tile, scores, use_acc=j + len(rope_tiles) > 0, is_async=True)
    return scores


@gluon.jit
def _start_sums(weights, tiles, stage, sums, rescale, FIRST: gl.constexpr):
    """Rescale the sums of parts from FIRST on, and start to add the weighted values of a tile."""
    # All are rescaled before the first product: what is computed between products would wait for them.
    rescaled = ()
    for j in gl.static_range(len(sums)):
        rescaled += (sums[j] * rescale,)  # type: ignore[assignment]
    started = ()
    for j in gl.static_range(len(sums)):
        values = tiles[FIRST + j].index(stage)
        started += (warpgroup_mma(weights, values, rescaled[j], is_async=True),)  # type: ignore[assignment]
    return started


@gluon.jit
def _wait_sums(started, LATER: gl.constexpr):
    """Wait for sums; LATER products have been started since."""
    if len(started) == 2:
        sums = warpgroup_mma_wait(LATER, deps=[started[0], started[1]])
    else:
        sums = (warpgroup_mma_wait(LATER, deps=[started[0]]),)
    return sums


@gluon.jit
def _store_means(tiles, parts, part_M, live_M, sums, factor_M, OUT: gl.constexpr, FIRST: gl.constexpr,
                 SPLIT: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """Store sums times a factor: of splits part by part, others in shared memory, to be joined to rows."""
    WIDTH: gl.constexpr = tiles[0].shape[2]
    COUNT: gl.constexpr = len(tiles)
    for j in gl.static_range(len(sums)):
        mean = sums[j] * factor_M[:, None]
        if SPLIT:
            value_W = (FIRST + j) * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, MMA))
            at = parts + part_M[:, None] * (WIDTH * COUNT) + value_W[None, :]
            gl.store(at, mean, mask=live_M[:, None].broadcast_to(mean.shape))
        else:
            tiles[FIRST + j].index(0).store(mean.to(OUT).to(tiles[0].dtype, bitcast=True))


# ---- the loops of the warpgroups -------------------------------------------------------------------------------------


@gluon.jit
def _score_warpgroup(
    queries, rope_queries, tiles, rope_tiles, weights_shared, rescale_shared, biases, full, empty, weights_full,
    weights_empty, parts, lse, part, start, stop, score_scale, latent_scale, group_size, OUT: gl.constexpr,
    PLAIN: gl.constexpr, SPLIT: gl.constexpr, M: gl.constexpr, N: gl.constexpr, MMA: gl.constexpr,
    SCORES: gl.constexpr,
):  # fmt: skip
    """Compute scores and weights, and the sums of the first half of the parts."""
    HALF: gl.constexpr = len(tiles) // 2
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    COLUMN: gl.constexpr = gl.SliceLayout(0, SCORES)
    MMA_ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    peak_M = gl.full([M], MIN_PEAK, gl.float32, layout=ROW)
    total_M = gl.full([M], 0.0, gl.float32, layout=ROW)
    sums = _zero_sums(HALF, M, tiles[0].shape[2], MMA)
    mbarrier.wait(full.index(0), 0, pred=start < stop)
    started = _start_scores(queries, rope_queries, tiles, rope_tiles, 0, PLAIN, M, N, SCORES)
    for first in range(start, stop, N):
        # --- scores
        turn = (first - start) // N
        stage = turn % 2
        scores = warpgroup_mma_wait(0, deps=[started]) * score_scale
        scores += biases.index(stage).load(COLUMN)[None, :]

        # --- softmax
        top_M = gl.maximum(peak_M, gl.max(scores, 1))
        weights = gl.exp2(scores - top_M[:, None])
        rescale_M = gl.exp2(peak_M - top_M)
        total_M = total_M * rescale_M + gl.sum(weights, 1)
        peak_M = top_M
        weights = weights.to(tiles[0].dtype)
        mbarrier.wait(weights_empty, (turn & 1) ^ 1)
        weights_shared.store(weights)
        rescale_shared.store(rescale_M)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(weights_full)

        # --- accumulate
        rescale_M = gl.convert_layout(rescale_M, MMA_ROW, assert_trivial=True)
        adding = _start_sums(gl.convert_layout(weights, OPERAND), tiles, stage, sums, rescale_M[:, None], 0)
        # The next scores are started behind these sums. Behind the last tile nothing is waited for, and the products
        # of what is there are not used.
        mbarrier.wait(full.index(1 - stage), (turn + 1) // 2 & 1, pred=first + N < stop)
        started = _start_scores(queries, rope_queries, tiles, rope_tiles, 1 - stage, PLAIN, M, N, SCORES)
        sums = _wait_sums(adding, len(rope_tiles) + len(tiles))
        mbarrier.arrive(empty.index(stage))  # the compiler sets a barrier before it
    warpgroup_mma_wait(0, deps=[started])

    # --- store: the value warpgroup gets what normalises sums in place of what rescales them
    empty_M = total_M == 0.0  # no latent was seen
    total_M = gl.where(empty_M, 1.0, total_M)
    factor_M = latent_scale / total_M
    turns = (gl.maximum(stop - start, 0) + N - 1) // N
    mbarrier.wait(weights_empty, (turns & 1) ^ 1)
    rescale_shared.store(factor_M)
    gl.thread_barrier()
    mbarrier.arrive(weights_full)
    row_M = gl.arange(0, M, layout=ROW)
    if SPLIT:
        lse_M = gl.where(empty_M, float("-inf"), peak_M + gl.log2(total_M))
        gl.store(lse + part + row_M, lse_M, mask=row_M < group_size)
    row_M = gl.arange(0, M, layout=MMA_ROW)
    factor_M = gl.convert_layout(factor_M, MMA_ROW, assert_trivial=True)
    _store_means(tiles, parts, part + row_M, row_M < group_size, sums, factor_M, OUT, 0, SPLIT, MMA)


@gluon.jit
def _value_warpgroup(
    tiles, weights_shared, rescale_shared, full, empty, weights_full, weights_empty, parts, part, start, stop,
    group_size, OUT: gl.constexpr, PLAIN: gl.constexpr, SPLIT: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
    MMA: gl.constexpr,
):  # fmt: skip
    """Compute the sums of the second half of the parts, with the score warpgroup's weights."""
    HALF: gl.constexpr = len(tiles) // 2
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    sums = _zero_sums(HALF, M, tiles[0].shape[2], MMA)
    for first in range(start, stop, N):
        turn = (first - start) // N
        stage = turn % 2
        if PLAIN:  # the producer copied the tile, and has set no fence
            mbarrier.wait(full.index(stage), turn // 2 & 1)
            fence_async_shared()
        mbarrier.wait(weights_full, turn & 1)
        rescale_M = rescale_shared.load(ROW)
        sums = _wait_sums(_start_sums(weights_shared, tiles, stage, sums, rescale_M[:, None], HALF), 0)
        mbarrier.arrive(weights_empty)
        mbarrier.arrive(empty.index(stage))
    turns = (gl.maximum(stop - start, 0) + N - 1) // N
    mbarrier.wait(weights_full, turns & 1)
    row_M = gl.arange(0, M, layout=ROW)
    _store_means(
        tiles, parts, part + row_M, row_M < group_size, sums, rescale_shared.load(ROW), OUT, HALF, SPLIT, MMA
    )


# ---- the kernel ------------------------------------------------------------------------------------------------------


@gluon.jit
def _allocate_tiles(
    COUNT: gl.constexpr, N: gl.constexpr, WIDTH: gl.constexpr, DTYPE: gl.constexpr, LAYOUT: gl.constexpr
):
    """Allocate two stages of a tile in COUNT parts."""
    # Each part on its own: between stores to parts of one allocation the compiler would set barriers.
    tiles = ()
    for _ in gl.static_range(COUNT):
        tiles += (gl.allocate_shared_memory(DTYPE, [2, N, WIDTH], LAYOUT),)  # type: ignore[assignment]
    return tiles


@gluon.jit
def _allocate_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate COUNT barriers whose phases end with so many arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def _list_length(slots, count, L: gl.constexpr, WARPS_: gl.constexpr):
    """Return the length of a list of slots without the padding at its end."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS_], [0])
    k_L = gl.arange(0, L, layout=LAYOUT)
    exists_L = gl.load(slots + k_L, mask=k_L < count, other=-1) >= 0
    return gl.max(gl.where(exists_L, k_L + 1, 0), 0)


@gluon.jit
def _split_exponent(x):
    """Return the power of two below a positive float32, its inverse, and the factor between 1 and 2 that is left."""
    bits = x.to(gl.int32, bitcast=True)
    exponent = bits & 0x7F800000
    mantissa = (bits & 0x007FFFFF | 0x3F800000).to(gl.float32, bitcast=True)
    inverse = (0x7F000000 - exponent).to(gl.float32, bitcast=True)
    return exponent.to(gl.float32, bitcast=True), inverse, mantissa


@gluon.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["slots"])
def sparse_mla_sm90_kernel(  # noqa: PLR0915 (most is settled while it is compiled)
    q, out, parts, lse, latent, rope, global_scale, slots, scale, count, slots_stride, q_stride_T, q_stride_H,
    HEADS: gl.constexpr, GROUP: gl.constexpr, RANK: gl.constexpr, ROPE_DIM: gl.constexpr, ROPE: gl.constexpr,
    FOLD: gl.constexpr, SPLIT: gl.constexpr, M: gl.constexpr, N: gl.constexpr, L: gl.constexpr,
    PRODUCER_WARPS: gl.constexpr, COLUMNS: gl.constexpr, REGISTERS: gl.constexpr,
    ITEMS: gl.constexpr, PAIRS: gl.constexpr, BLOCKS: gl.constexpr,
    ROPE_ITEMS: gl.constexpr, ROPE_PAIRS: gl.constexpr, ROPE_BLOCKS: gl.constexpr,
):  # fmt: skip
    """Attend over a split of a token's list. Grid and arguments are those of sparse_mla_kernel in mla/triton.py.

    Layouts, of the latent proper and of rotary values: ITEMS of words, PAIRS of pairs of words, BLOCKS of blocks x
    words.
    """
    # --- partition
    GROUPS: gl.constexpr = HEADS // GROUP
    PLAIN: gl.constexpr = latent.PARTS == 1
    COUNT: gl.constexpr = 2 if PLAIN else latent.PARTS
    WIDTH: gl.constexpr = RANK // COUNT
    ROPE_COUNT: gl.constexpr = 0 if ROPE == NO_ROPE else rope.PARTS
    ROPE_WIDTH: gl.constexpr = rope.items.WIDTH
    DTYPE: gl.constexpr = latent.DTYPE
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ROPE_SHARED: gl.constexpr = gl.NVMMASharedLayout(128 if ROPE_WIDTH >= 64 else 2 * ROPE_WIDTH, 16, 2)
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, min(WIDTH, COLUMNS), 16])

    program, split, splits = gl.program_id(0), gl.program_id(1), gl.num_programs(1)
    token, group = (program // GROUPS).to(gl.int64), program % GROUPS
    slots += token * slots_stride
    stop = _list_length(slots, count, L, 4)
    each = (stop + N * splits - 1) // (N * splits) * N
    start = split * each
    stop = gl.minimum(start + each, stop)

    # --- shared memory and barriers
    tiles = _allocate_tiles(COUNT, N, WIDTH, DTYPE, SHARED)
    queries = gl.allocate_shared_memory(DTYPE, [COUNT, M, WIDTH], SHARED)
    rope_tiles, rope_queries = (), queries
    if ROPE != NO_ROPE:
        rope_tiles = _allocate_tiles(ROPE_COUNT, N, ROPE_WIDTH, rope.DTYPE, ROPE_SHARED)
        rope_queries = gl.allocate_shared_memory(rope.DTYPE, [ROPE_COUNT, M, ROPE_WIDTH], ROPE_SHARED)
    weights_shared = gl.allocate_shared_memory(DTYPE, [M, N], SHARED)
    rescale_shared = gl.allocate_shared_memory(gl.float32, [M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    index = gl.allocate_shared_memory(gl.int32, [N], LINE)
    biases = gl.allocate_shared_memory(gl.float32, [2, N], LINE)
    full = _allocate_barriers(2, PRODUCER_WARPS * 32 + 1 if PLAIN else 1)  # copies arrive thread by thread
    empty = _allocate_barriers(2, 2)
    weights_full, weights_empty = _allocate_barriers(1, 1).index(0), _allocate_barriers(1, 1).index(0)

    # --- load queries
    latent_scale, score_scale_of_one = gl.load(global_scale) * FOLD, scale * LOG2E
    score_scale, factor, rope_factor = score_scale_of_one * latent_scale, 1.0, 1.0
    if ROPE == APART:  # rotary values have no global scale: queries make up for it
        power, rope_factor, factor = _split_exponent(latent_scale)
        score_scale = score_scale_of_one * power
    ROW_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    row_M = gl.arange(0, M, layout=gl.SliceLayout(1, ROW_LAYOUT))
    live_M = row_M < GROUP
    q += token * q_stride_T + group * GROUP * q_stride_H
    if PLAIN:
        for j in gl.static_range(COUNT):
            x = _load_queries(q, q_stride_H, row_M, live_M, factor, j * WIDTH, RANK, WIDTH, DTYPE, ROW_LAYOUT)
            queries.index(j).store(x)
    else:
        x = _load_queries(q, q_stride_H, row_M, live_M, factor, 0, RANK, RANK, DTYPE, ROW_LAYOUT)
        query_parts = _split_parts(x, COUNT)
        for j in gl.static_range(COUNT):
            queries.index(j).store(query_parts[j])
    if ROPE != NO_ROPE:
        WIDE: gl.constexpr = ROPE_WIDTH * ROPE_COUNT
        x = _load_queries(
            q, q_stride_H, row_M, live_M, rope_factor, RANK, RANK + ROPE_DIM, WIDE, rope.DTYPE, ROW_LAYOUT
        )
        query_parts = _split_parts(x, ROPE_COUNT)
        for j in gl.static_range(ROPE_COUNT):
            rope_queries.index(j).store(query_parts[j])
    fence_async_shared()
    gl.thread_barrier()

    # --- scores, softmax, accumulate
    OUT: gl.constexpr = out.dtype.element_ty
    part = (token * splits + split) * HEADS + group * GROUP
    gl.warp_specialize(
        [
            (_score_warpgroup, (
                queries, rope_queries, tiles, rope_tiles, weights_shared, rescale_shared, biases, full, empty,
                weights_full, weights_empty, parts, lse, part, start, stop, score_scale, latent_scale, GROUP, OUT,
                PLAIN, SPLIT, M, N, MMA, SCORES,
            )),
            (_value_warpgroup, (
                tiles, weights_shared, rescale_shared, full, empty, weights_full, weights_empty, parts, part, start,
                stop, GROUP, OUT, PLAIN, SPLIT, M, N, MMA,
            )),
            (produce, (
                latent, rope, tiles, rope_tiles, index, biases, full, empty, slots, start, stop, ROPE, N, ITEMS,
                PAIRS, BLOCKS, ROPE_ITEMS, ROPE_PAIRS, ROPE_BLOCKS,
            )),
        ],
        [4, PRODUCER_WARPS],
        REGISTERS,
    )  # fmt: skip

    # --- store
    if not SPLIT:
        _store_output(out, token * HEADS + group * GROUP, tiles, GROUP, RANK, PLAIN, M, ROW_LAYOUT)


# ---- the launch ------------------------------------------------------------------------------------------------------


def serves(latents: Paged, rope: int, query: torch.dtype, memory: int) -> bool:
    """Return whether the kernel serves these latents.

    Rows must be as long as its tiles, be of 16 aligned bytes, and have the queries' dtype if they are plain.

    Args:
        latents: Pages of latents.
        rope: Rotary values at the end of each.
        query: The query's dtype.
        memory: Bytes of shared memory that a program can have.
    """
    codec, planes = LATENTS[latents.format.name], latents.planes_PHS
    fits = latents.dim - rope == RANK and rope in (0, ROPE_DIM) and memory >= MEMORY
    same_dtype = codec.decoder.parts > 1 or planes[0].dtype == query
    copied = (planes[0], planes[-1]) if codec.rope_apart else (planes[0],)
    return fits and same_dtype and query.itemsize == 2 and all(is_aligned(plane, 16) for plane in copied)


def launch(grid: tuple[int, int], format_name: str, common: tuple[Any, ...], padded_len: int) -> int:
    """Launch the kernel.

    Args:
        grid: Groups of heads of all tokens, and splits.
        format_name: The format of the latents.
        common: The arguments that sparse_mla_kernel takes too.
        padded_len: Slots of a list, padded to a power of two.

    Returns:
        In how many parts the values of splits are stored, if there are several splits.
    """
    (latent, fold), rotary = with_fp8_instructions(format_name, common[4]), common[5]
    warps = DECODING if latent.PARTS.value > 1 else COPYING
    plain = gl.BlockedLayout([1, 8], [1, 32], [warps.producer_warps, 1], [1, 0])
    latent_layouts = producer_layouts(latent, warps.producer_warps) if warps is DECODING else (plain,) * 3
    sparse_mla_sm90_kernel[grid](
        *common[:4], latent, *common[5:-1], fold, grid[1] > 1, ROWS, TILE, padded_len, warps.producer_warps,
        warps.columns, warps.registers, *latent_layouts, *producer_layouts(rotary, warps.producer_warps),
        num_warps=WARPS,
    )  # fmt: skip
    return int(latent.PARTS.value)

"""sparse.py's kernel for SM90, in Gluon: warps that gather and decode beside warps that multiply.

64 heads of a token make a program of three groups of warps. Four, or eight if they decode, gather a tile of 64 latents
in one of two buffers (sparse_hopper_gather.py). Four multiply them with the queries, work out weights, and sum half of
the values; four sum the other half. So the tensor cores are kept busy while the next tile is decoded, and no warp
has to hold more sums than its registers are. The products of a tile are begun behind the sums of the tile before.

A row's values stand in pieces: as the parts of packed words are (decoders.py), or halves of plain rows. Scores are one
sum over pieces and rotary values, though these are stored with scales of their own: a power of two of the ratio goes
to the rotary queries, the rest to the others, which are float16 and lose nothing that bfloat16 had.

There is no interpreter for Gluon: sparse.py serves other GPUs, and is what tests on a CPU judge.

Shape suffixes: M rows of a tile (heads), N latents of a tile, W words of a section, L slots of a list. Names in
capitals are constants of a kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nibble.kernels.codecs.decoders_latent import APART, LATENTS, NO_ROPE
from nibble.kernels.mla.gluon_sm90 import LOG2E, LOWEST
from nibble.kernels.sparse_mla.gluon_sm90_gather import gather, layouts, quicker
from nibble.kernels.sparse_mla.gluon_sm90_rows import dealt, rows_of, write
from nibble.kernels.types import Paged

ROWS, TILE = 64, 64
RANK = 512
MOST_ROPE = 64
WARPS = 4


@dataclass(frozen=True, slots=True)
class Crew:
    """gatherers: warps that gather. columns: most of a product's. registers: of a thread that sums the second half, and
    of one that gathers; the others have what is left.
    """

    gatherers: int
    columns: int
    registers: tuple[int, int]


COPYING, DECODING = Crew(4, 256, (160, 136)), Crew(8, 128, (160, 72))
"""For plain latents, and for packed ones. In programs of 16 warps the compiler takes no wider products, and with other
registers for those who multiply it lets each product wait for the one before it (docs/design/sparse-decode.md).
"""
MEMORY = 232448
"""Bytes of shared memory of a program, nearly all of which are taken."""


# ---- multiplying -----------------------------------------------------------------------------------------------------


@gluon.jit
def _begun(COUNT: gl.constexpr, M: gl.constexpr, WIDTH: gl.constexpr, MMA: gl.constexpr):
    sums = ()
    for _ in gl.static_range(COUNT):
        sums += (gl.full([M, WIDTH], 0.0, gl.float32, layout=MMA),)  # type: ignore[assignment]
    return sums


@gluon.jit
def _products(queries, rope_queries, pieces, rope_pieces, stage, PLAIN: gl.constexpr, M: gl.constexpr,
              N: gl.constexpr, SCORES: gl.constexpr):  # fmt: skip
    """Begins the products of queries and a tile."""
    if PLAIN:
        fence_async_shared()  # others copied it, and fenced nothing
    scores = gl.full([M, N], 0.0, gl.float32, layout=SCORES)
    for j in gl.static_range(len(rope_pieces)):
        tile = rope_pieces[j].index(stage).permute([1, 0])
        scores = warpgroup_mma(rope_queries.index(j), tile, scores, use_acc=j > 0, is_async=True)
    for j in gl.static_range(len(pieces)):
        tile = pieces[j].index(stage).permute([1, 0])
        scores = warpgroup_mma(
            queries.index(j), tile, scores, use_acc=j + len(rope_pieces) > 0, is_async=True
        )
    return scores


@gluon.jit
def _adding(weights, pieces, stage, sums, fade, FIRST: gl.constexpr):
    """Begins to add what a tile weighs to faded sums of the pieces from FIRST on."""
    faded = ()
    for j in gl.static_range(len(sums)):
        faded += (sums[j] * fade,)  # type: ignore[assignment]
    adding = ()
    for j in gl.static_range(len(sums)):
        values = pieces[FIRST + j].index(stage)
        adding += (warpgroup_mma(weights, values, faded[j], is_async=True),)  # type: ignore[assignment]
    return adding


@gluon.jit
def _added(adding, LATER: gl.constexpr):
    """Waits for sums, LATER products being begun since."""
    if len(adding) == 2:
        done = warpgroup_mma_wait(LATER, deps=[adding[0], adding[1]])
    else:
        done = (warpgroup_mma_wait(LATER, deps=[adding[0]]),)
    return done


@gluon.jit
def _leave(pieces, parts, place_M, live_M, sums, factor_M, OUT: gl.constexpr, FIRST: gl.constexpr,
           SPLIT: gl.constexpr, MMA: gl.constexpr):  # fmt: skip
    """Leaves means: of shares as they are, piece by piece; others in shared memory, to be put in order."""
    WIDTH: gl.constexpr = pieces[0].shape[2]
    COUNT: gl.constexpr = len(pieces)
    for j in gl.static_range(len(sums)):
        mean = sums[j] * factor_M[:, None]
        if SPLIT:
            value_W = (FIRST + j) * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, MMA))
            at = parts + place_M[:, None] * (WIDTH * COUNT) + value_W[None, :]
            gl.store(at, mean, mask=live_M[:, None].broadcast_to(mean.shape))
        else:
            pieces[FIRST + j].index(0).store(mean.to(OUT).to(pieces[0].dtype, bitcast=True))


@gluon.jit
def _lead(
    queries, rope_queries, pieces, rope_pieces, weights_shared, fades, biases, full, empty, ready, taken, parts, lse,
    place, start, stop, unit, whole, group_size, OUT: gl.constexpr, PLAIN: gl.constexpr, SPLIT: gl.constexpr,
    M: gl.constexpr, N: gl.constexpr, MMA: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Weights, and the sums of the first half."""
    HALF: gl.constexpr = len(pieces) // 2
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    COLUMN: gl.constexpr = gl.SliceLayout(0, SCORES)
    MMA_ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    peak_M = gl.full([M], LOWEST, gl.float32, layout=ROW)
    total_M = gl.full([M], 0.0, gl.float32, layout=ROW)
    sums = _begun(HALF, M, pieces[0].shape[2], MMA)
    mbarrier.wait(full.index(0), 0, pred=start < stop)
    scores = _products(queries, rope_queries, pieces, rope_pieces, 0, PLAIN, M, N, SCORES)
    for first in range(start, stop, N):
        turn = (first - start) // N
        stage = turn % 2
        products = warpgroup_mma_wait(0, deps=[scores]) * unit
        products += biases.index(stage).load(COLUMN)[None, :]
        top_M = gl.maximum(peak_M, gl.max(products, 1))
        weights = gl.exp2(products - top_M[:, None])
        fade_M = gl.exp2(peak_M - top_M)
        total_M = total_M * fade_M + gl.sum(weights, 1)
        peak_M = top_M
        weights = weights.to(pieces[0].dtype)
        mbarrier.wait(taken, (turn & 1) ^ 1)
        weights_shared.store(weights)
        fades.store(fade_M)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(ready)
        fade_M = gl.convert_layout(fade_M, MMA_ROW, assert_trivial=True)
        adding = _adding(gl.convert_layout(weights, OPERAND), pieces, stage, sums, fade_M[:, None], 0)
        # Behind the last tile there is nothing, of which the products are not looked at.
        mbarrier.wait(full.index(1 - stage), (turn + 1) // 2 & 1, pred=first + N < stop)
        scores = _products(queries, rope_queries, pieces, rope_pieces, 1 - stage, PLAIN, M, N, SCORES)
        sums = _added(adding, len(rope_pieces) + len(pieces))
        mbarrier.arrive(empty.index(stage))  # the compiler has a barrier before it
    warpgroup_mma_wait(0, deps=[scores])

    nothing_M = total_M == 0.0  # was seen
    total_M = gl.where(nothing_M, 1.0, total_M)
    factor_M = whole / total_M
    turns = (gl.maximum(stop - start, 0) + N - 1) // N
    mbarrier.wait(taken, (turns & 1) ^ 1)
    fades.store(factor_M)
    gl.thread_barrier()
    mbarrier.arrive(ready)
    row_M = gl.arange(0, M, layout=ROW)
    if SPLIT:
        lse_M = gl.where(nothing_M, float("-inf"), peak_M + gl.log2(total_M))
        gl.store(lse + place + row_M, lse_M, mask=row_M < group_size)
    row_M = gl.arange(0, M, layout=MMA_ROW)
    factor_M = gl.convert_layout(factor_M, MMA_ROW, assert_trivial=True)
    _leave(pieces, parts, place + row_M, row_M < group_size, sums, factor_M, OUT, 0, SPLIT, MMA)


@gluon.jit
def _follow(
    pieces, weights_shared, fades, full, empty, ready, taken, parts, place, start, stop, group_size,
    OUT: gl.constexpr, PLAIN: gl.constexpr, SPLIT: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
    MMA: gl.constexpr,
):  # fmt: skip
    """The sums of the second half."""
    HALF: gl.constexpr = len(pieces) // 2
    ROW: gl.constexpr = gl.SliceLayout(1, MMA)
    sums = _begun(HALF, M, pieces[0].shape[2], MMA)
    for first in range(start, stop, N):
        turn = (first - start) // N
        stage = turn % 2
        if PLAIN:
            mbarrier.wait(full.index(stage), turn // 2 & 1)
            fence_async_shared()
        mbarrier.wait(ready, turn & 1)
        fade_M = fades.load(ROW)
        sums = _added(_adding(weights_shared, pieces, stage, sums, fade_M[:, None], HALF), 0)
        mbarrier.arrive(taken)
        mbarrier.arrive(empty.index(stage))
    turns = (gl.maximum(stop - start, 0) + N - 1) // N
    mbarrier.wait(ready, turns & 1)
    row_M = gl.arange(0, M, layout=ROW)
    _leave(pieces, parts, place + row_M, row_M < group_size, sums, fades.load(ROW), OUT, HALF, SPLIT, MMA)


# ---- the kernel ------------------------------------------------------------------------------------------------------


@gluon.jit
def _rooms(
    COUNT: gl.constexpr, N: gl.constexpr, WIDTH: gl.constexpr, DTYPE: gl.constexpr, LAYOUT: gl.constexpr
):
    """Two tiles of values in COUNT pieces. Each piece on its own: between stores to parts of one the compiler would set
    barriers."""
    pieces = ()
    for _ in gl.static_range(COUNT):
        pieces += (gl.allocate_shared_memory(DTYPE, [2, N, WIDTH], LAYOUT),)  # type: ignore[assignment]
    return pieces


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit
def _end(slots, count, L: gl.constexpr, WARPS_: gl.constexpr):
    """Where a list of slots ends: behind the last that is somebody's."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS_], [0])
    k_L = gl.arange(0, L, layout=LAYOUT)
    there_L = gl.load(slots + k_L, mask=k_L < count, other=-1) >= 0
    return gl.max(gl.where(there_L, k_L + 1, 0), 0)


@gluon.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["slots"])
def sparse_hopper_kernel(  # noqa: PLR0915 (most is settled while it is compiled)
    q, out, parts, lse, latent, rope, global_scale, slots, scale, count, slots_stride, q_stride_T, q_stride_H,
    HEADS: gl.constexpr, GROUP: gl.constexpr, RANK: gl.constexpr, ROPE_DIM: gl.constexpr, ROPE: gl.constexpr,
    FOLD: gl.constexpr, SPLIT: gl.constexpr, M: gl.constexpr, N: gl.constexpr, L: gl.constexpr,
    GATHERERS: gl.constexpr, COLUMNS: gl.constexpr, REGISTERS: gl.constexpr,
    WORDS: gl.constexpr, PAIRS: gl.constexpr, BLOCKS: gl.constexpr,
    ROPE_WORDS: gl.constexpr, ROPE_PAIRS: gl.constexpr, ROPE_BLOCKS: gl.constexpr,
):  # fmt: skip
    """Grid as sparse.py's kernel. Layouts: of words and of blocks x words of a section."""
    GROUPS: gl.constexpr = HEADS // GROUP
    PLAIN: gl.constexpr = latent.PARTS == 1
    COUNT: gl.constexpr = 2 if PLAIN else latent.PARTS
    WIDTH: gl.constexpr = RANK // COUNT
    ROPE_COUNT: gl.constexpr = 0 if ROPE == NO_ROPE else rope.PARTS
    ROPE_WIDTH: gl.constexpr = rope.words.WIDTH
    DTYPE: gl.constexpr = latent.DTYPE
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ROPE_SHARED: gl.constexpr = gl.NVMMASharedLayout(128 if ROPE_WIDTH >= 64 else 2 * ROPE_WIDTH, 16, 2)
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, min(WIDTH, COLUMNS), 16])

    program, split, splits = gl.program_id(0), gl.program_id(1), gl.num_programs(1)
    token, group = (program // GROUPS).to(gl.int64), program % GROUPS
    slots += token * slots_stride
    stop = _end(slots, count, L, 4)
    each = (stop + N * splits - 1) // (N * splits) * N
    start = split * each
    stop = gl.minimum(start + each, stop)

    pieces = _rooms(COUNT, N, WIDTH, DTYPE, SHARED)
    queries = gl.allocate_shared_memory(DTYPE, [COUNT, M, WIDTH], SHARED)
    rope_pieces, rope_queries = (), queries
    if ROPE != NO_ROPE:
        rope_pieces = _rooms(ROPE_COUNT, N, ROPE_WIDTH, rope.DTYPE, ROPE_SHARED)
        rope_queries = gl.allocate_shared_memory(rope.DTYPE, [ROPE_COUNT, M, ROPE_WIDTH], ROPE_SHARED)
    weights_shared = gl.allocate_shared_memory(DTYPE, [M, N], SHARED)
    fades = gl.allocate_shared_memory(gl.float32, [M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    index = gl.allocate_shared_memory(gl.int32, [N], LINE)
    biases = gl.allocate_shared_memory(gl.float32, [2, N], LINE)
    full = _barriers(2, GATHERERS * 32 + 1 if PLAIN else 1)  # copies arrive thread by thread
    empty = _barriers(2, 2)
    ready, taken = _barriers(1, 1).index(0), _barriers(1, 1).index(0)

    whole, plain = gl.load(global_scale) * FOLD, scale * LOG2E
    unit, mantissa, inverse = plain * whole, 1.0, 1.0
    if ROPE == APART:
        bits = whole.to(gl.int32, bitcast=True)
        exponent = bits & 0x7F800000
        mantissa = (bits & 0x007FFFFF | 0x3F800000).to(gl.float32, bitcast=True)
        inverse = (0x7F000000 - exponent).to(gl.float32, bitcast=True)
        unit = plain * exponent.to(gl.float32, bitcast=True)
    ROW_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    row_M = gl.arange(0, M, layout=gl.SliceLayout(1, ROW_LAYOUT))
    live_M = row_M < GROUP
    q += token * q_stride_T + group * GROUP * q_stride_H
    if PLAIN:
        for j in gl.static_range(COUNT):
            x = rows_of(q, q_stride_H, row_M, live_M, mantissa, j * WIDTH, RANK, WIDTH, DTYPE, ROW_LAYOUT)
            queries.index(j).store(x)
    else:
        x = rows_of(q, q_stride_H, row_M, live_M, mantissa, 0, RANK, RANK, DTYPE, ROW_LAYOUT)
        parts_of_q = dealt(x, COUNT)
        for j in gl.static_range(COUNT):
            queries.index(j).store(parts_of_q[j])
    if ROPE != NO_ROPE:
        WIDE: gl.constexpr = ROPE_WIDTH * ROPE_COUNT
        x = rows_of(
            q, q_stride_H, row_M, live_M, inverse, RANK, RANK + ROPE_DIM, WIDE, rope.DTYPE, ROW_LAYOUT
        )
        parts_of_q = dealt(x, ROPE_COUNT)
        for j in gl.static_range(ROPE_COUNT):
            rope_queries.index(j).store(parts_of_q[j])
    fence_async_shared()
    gl.thread_barrier()

    OUT: gl.constexpr = out.dtype.element_ty
    place = (token * splits + split) * HEADS + group * GROUP
    gl.warp_specialize(
        [
            (_lead, (
                queries, rope_queries, pieces, rope_pieces, weights_shared, fades, biases, full, empty, ready, taken,
                parts, lse, place, start, stop, unit, whole, GROUP, OUT, PLAIN, SPLIT, M, N, MMA, SCORES,
            )),
            (_follow, (
                pieces, weights_shared, fades, full, empty, ready, taken, parts, place, start, stop, GROUP, OUT,
                PLAIN, SPLIT, M, N, MMA,
            )),
            (gather, (
                latent, rope, pieces, rope_pieces, index, biases, full, empty, slots, start, stop, ROPE, N, WORDS,
                PAIRS, BLOCKS, ROPE_WORDS, ROPE_PAIRS, ROPE_BLOCKS,
            )),
        ],
        [4, GATHERERS],
        REGISTERS,
    )  # fmt: skip
    if not SPLIT:
        write(out, token * HEADS + group * GROUP, pieces, GROUP, RANK, PLAIN, M, ROW_LAYOUT)


# ---- the launch ------------------------------------------------------------------------------------------------------


def serves(latents: Paged, rope: int, query: torch.dtype, memory: int) -> bool:
    """Whether rows are as long as the tiles here, can be read 16 bytes at a time, and plain values are as queries."""
    kind, planes = LATENTS[latents.format.name], latents.planes_PHS
    fits = latents.dim - rope == RANK and rope in (0, MOST_ROPE) and memory >= MEMORY
    alike = kind.decoder.parts > 1 or planes[0].dtype == query
    copied = (planes[0], planes[-1]) if kind.apart else (planes[0],)
    return fits and alike and query.itemsize == 2 and all(map(_aligned, copied))


def _aligned(plane_PHS: Tensor) -> bool:
    sizes = plane_PHS.storage_offset(), plane_PHS.stride(0), plane_PHS.stride(2)
    return all(x * plane_PHS.itemsize % 16 == 0 for x in sizes)


def launch(grid: tuple[int, int], format_name: str, common: tuple, longest: int) -> int:
    """Returns into how many pieces the values of shares are dealt, if there are several."""
    (latent, fold), rotary = quicker(format_name, common[4]), common[5]
    crew = DECODING if latent.PARTS.value > 1 else COPYING
    words = gl.BlockedLayout([1, 8], [1, 32], [crew.gatherers, 1], [1, 0])
    chosen = layouts(latent, crew.gatherers) if crew is DECODING else (words,) * 3
    sparse_hopper_kernel[grid](
        *common[:4], latent, *common[5:-1], fold, grid[1] > 1, ROWS, TILE, longest, crew.gatherers,
        crew.columns, crew.registers, *chosen, *layouts(rotary, crew.gatherers), num_warps=WARPS,
    )  # fmt: skip
    return latent.PARTS.value

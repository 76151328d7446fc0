"""Products and sums in Triton whose rows do not depend on one another; see __init__.py.

The weight is on the left of every product, where its rows fill the tensor cores' tile of 64; rows of x are the other
side, of 16 to 256. So one instruction serves steps of one token and of thousands (on Hopper wgmma m64nMk16), and a tile
of another size has the same sums: K from its beginning, 16 values at a time, added to what stands in the accumulator.
That needs tiles that give each warp group 64 outputs at least: fewer would make it another instruction. float32 has one
tile for all, computed without tensor cores.

Shape suffixes: B products of a batch, M rows of x, N values of the output, K of the input; S rows sorted by expert, E
experts; R values that are summed. In a kernel they are those of a tile.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels import GPU, cdiv, gpu_of, next_power_of_2

MIN_OUTPUTS = 64
"""Outputs of a warp group: rows of the smallest tile of Hopper's wgmma."""
NEIGHBOURS = 8
"""Tiles of rows that are computed one after another for a tile of the weight, which is then in the cache."""
SUMMED = 1024
"""Values of a row that are added at a time."""
SPARED = 16 << 10
"""Bytes of shared memory that loads leave for what else a program needs."""


@triton.jit
def _product(
    x_M, weight_N, keep_M, keep_N, x_stride_K, weight_stride_K, K, EVEN: tl.constexpr, BK: tl.constexpr
):
    """Return the sums over K of a tile of outputs, [N, M] in float32: from the first value to the last.

    Args:
        x_M: Pointers to rows of x.
        weight_N: Pointers to columns of the weight.
        keep_M: Which rows there are.
        keep_N: Which columns.
        x_stride_K: Between values of a row.
        weight_stride_K: Between values of a column.
        K: How many.
        EVEN: Whether BK divides K.
        BK: Values that are loaded at a time, which makes no difference to the sum.
    """
    k_K = tl.arange(0, BK)
    sum_NM = tl.zeros([weight_N.shape[0], x_M.shape[0]], tl.float32)
    for start in range(0, K, BK):
        at_K = start + k_K
        keep_NK, keep_MK = keep_N[:, None], keep_M[:, None]
        if not EVEN:  # zeros behind the end add nothing
            keep_NK, keep_MK = keep_NK & (at_K < K)[None, :], keep_MK & (at_K < K)[None, :]
        at_K = at_K.to(tl.int64)
        weight_NK = tl.load(weight_N[:, None] + (at_K * weight_stride_K)[None, :], mask=keep_NK, other=0.0)
        x_MK = tl.load(x_M[:, None] + (at_K * x_stride_K)[None, :], mask=keep_MK, other=0.0)
        sum_NM = tl.dot(weight_NK, tl.trans(x_MK), sum_NM, input_precision="ieee")
    return sum_NM


@triton.jit(do_not_specialize=["rows"])
def bmm_kernel(
    x, weight, bias, out, rows, N, K, x_stride_B, x_stride_M, x_stride_K, weight_stride_B, weight_stride_K,
    weight_stride_N, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NEXT: tl.constexpr,
):  # fmt: skip
    """Compute a tile of outputs. Grid: tiles of rows x tiles of columns, and products of the batch."""
    # --- which tile: some tiles of rows for one of columns, then the next columns
    row_tiles, column_tiles = tl.cdiv(rows, BM), tl.cdiv(N, BN)
    program, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first = program // (NEXT * column_tiles) * NEXT
    height = tl.minimum(row_tiles - first, NEXT)
    within = program % (NEXT * column_tiles)
    m = (first + within % height) * BM + tl.arange(0, BM)
    n = within // height * BN + tl.arange(0, BN)
    keep_M, keep_N = m < rows, n < N
    # --- accumulate
    x_M = x + batch * x_stride_B + m.to(tl.int64) * x_stride_M
    weight_N = weight + batch * weight_stride_B + n.to(tl.int64) * weight_stride_N
    sum_NM = _product(x_M, weight_N, keep_M, keep_N, x_stride_K, weight_stride_K, K, EVEN, BK)
    if bias is not None:
        sum_NM += tl.load(bias + n, mask=keep_N, other=0.0).to(tl.float32)[:, None]
    # --- store
    out_M = out + (batch * rows + m) * N
    y_MN = tl.trans(sum_NM).to(out.dtype.element_ty)
    tl.store(out_M[:, None] + n[None, :], y_MN, mask=keep_M[:, None] & keep_N[None, :])


@triton.jit(do_not_specialize=["rows"])
def grouped_kernel(
    x, weight, ends, out, rows, N, K, x_stride_M, x_stride_K, weight_stride_E, weight_stride_K, weight_stride_N,
    EXPERTS: tl.constexpr, EVEN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Compute a tile of outputs of one expert. Grid: tiles of columns, and as many tiles of rows as there may be.

    Tiles begin anew with each expert, so the last of each has room; rows behind all experts make one more group.
    """
    # --- which expert and rows
    tile, e_E = tl.program_id(1), tl.arange(0, E)
    # A group behind the last expert holds what belongs to none.
    end_E = tl.load(ends + e_E, mask=e_E < EXPERTS, other=rows)
    start_E = tl.load(ends + e_E - 1, mask=(e_E > 0) & (e_E <= EXPERTS), other=0)
    start_E = tl.where(e_E > EXPERTS, rows, start_E)
    tiles_E = tl.cdiv(end_E - start_E, BM)
    stop_E = tl.cumsum(tiles_E)
    expert = tl.sum((stop_E <= tile).to(tl.int32))
    if expert > EXPERTS:
        return
    is_mine_E = e_E == expert
    start, end = tl.sum(tl.where(is_mine_E, start_E, 0)), tl.sum(tl.where(is_mine_E, end_E, 0))
    m = start + (tile - tl.sum(tl.where(is_mine_E, stop_E - tiles_E, 0))) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    keep_M, keep_N = m < end, n < N
    out_MN = out + m.to(tl.int64)[:, None] * N + n[None, :]
    keep_MN = keep_M[:, None] & keep_N[None, :]
    if expert == EXPERTS:
        tl.store(out_MN, tl.zeros([BM, BN], out.dtype.element_ty), mask=keep_MN)
        return
    # --- accumulate
    x_M = x + m.to(tl.int64) * x_stride_M
    weight_N = weight + expert.to(tl.int64) * weight_stride_E + n.to(tl.int64) * weight_stride_N
    sum_NM = _product(x_M, weight_N, keep_M, keep_N, x_stride_K, weight_stride_K, K, EVEN, BK)
    # --- store
    tl.store(out_MN, tl.trans(sum_NM).to(out.dtype.element_ty), mask=keep_MN)


@triton.jit(do_not_specialize=["R"])
def sums_kernel(x, out, R, x_stride_M, x_stride_R, BLOCK: tl.constexpr):
    """Sum a row up. Grid: rows."""
    row, r = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, R, BLOCK):
        at = (start + r).to(tl.int64)
        sums += tl.load(x + row * x_stride_M + at * x_stride_R, mask=at < R, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(sums, 0))


# ---- tiles -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tile:
    """How a program is tiled. Nothing of it changes a sum."""

    rows: int
    outputs: int
    depth: int
    """Values of K that are loaded at a time."""
    warps: int
    stages: int
    """Stages of loads in flight."""


FULL = Tile(32, 32, 32, 4, 2)
"""The only tile of float32, whose products are not the tensor cores'."""


@functools.cache
def tile_of(rows: int, dtype: torch.dtype, gpu: GPU) -> Tile:
    """Choose the fastest tile for so many rows.

    Args:
        rows: Padded to a power of two, so that there are few kernels.
        dtype: Of both factors.
        gpu: Sizes of the GPU.
    """
    if dtype == torch.float32:
        return FULL
    return next(tile for tile in _tiles(rows) if _loaded(tile) <= gpu.memory - SPARED)


def _tiles(rows: int) -> Iterator[Tile]:
    """Yield tiles from the fastest to the smallest."""
    # Few rows: what counts is how much of the weight is on its way.
    if rows <= 64:
        yield from (Tile(max(rows, 16), MIN_OUTPUTS, 128, 4, stages) for stages in (8, 6, 5, 4, 3, 2))
    elif rows <= 512:
        yield from (Tile(128, 128, 64, 8, stages) for stages in (4, 3, 2))
    else:
        yield from (Tile(256, 128, 64, 8, stages) for stages in (3, 2))
    yield Tile(16, MIN_OUTPUTS, 32, 4, 2)


def _loaded(tile: Tile) -> int:
    return tile.stages * tile.depth * (tile.rows + tile.outputs) * 2


def all_tiles(dtype: torch.dtype, gpu: GPU) -> tuple[Tile, ...]:
    """Return every tile that is chosen for any number of rows."""
    return tuple(dict.fromkeys(tile_of(1 << n, dtype, gpu) for n in range(14)))


# ---- launches --------------------------------------------------------------------------------------------------------


def bmm(x_BMK: Tensor, weight_BKN: Tensor, bias_N: Tensor | None, *, tile: Tile | None = None) -> Tensor:
    """Return x weight + bias, as naive.py defines it, in one launch.

    Args:
        x_BMK: Rows.
        weight_BKN: Matrices, with any strides.
        bias_N: Added to each row, if there is one.
        tile: Another tile than the fastest.

    Returns:
        [B, M, N] in the dtype of x.
    """
    batch, rows, depth = x_BMK.shape
    columns, weight_BKN = weight_BKN.shape[2], weight_BKN.to(x_BMK.dtype)
    out_BMN = torch.empty(batch, rows, columns, dtype=x_BMK.dtype, device=x_BMK.device)
    if not out_BMN.numel():
        return out_BMN
    tile = tile or tile_of(next_power_of_2(rows), x_BMK.dtype, gpu_of(x_BMK.device))
    bmm_kernel[(cdiv(rows, tile.rows) * cdiv(columns, tile.outputs), batch)](
        x_BMK, weight_BKN, bias_N, out_BMN, rows, columns, depth, *x_BMK.stride(), *weight_BKN.stride(),
        depth % tile.depth == 0, tile.rows, tile.outputs, tile.depth, NEIGHBOURS,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out_BMN


def grouped_mm(x_SK: Tensor, weight_EKN: Tensor, ends_E: Tensor, *, tile: Tile | None = None) -> Tensor:
    """Return each row times the matrix of its expert, as naive.py defines it, in one launch.

    Args:
        x_SK: Rows in the order of experts.
        weight_EKN: Matrices, with any strides.
        ends_E: Int32, behind which row each expert's rows end.
        tile: Another tile than the fastest.

    Returns:
        [S, N] in the dtype of x.
    """
    (rows, depth), (experts, _, columns) = x_SK.shape, weight_EKN.shape
    out_SN = torch.empty(rows, columns, dtype=x_SK.dtype, device=x_SK.device)
    if not rows:
        return out_SN
    # By the rows that an expert has on average: how many each has is known to the device alone.
    tile = tile or tile_of(next_power_of_2(cdiv(rows, experts)), x_SK.dtype, gpu_of(x_SK.device))
    most = cdiv(rows, tile.rows) + experts
    grouped_kernel[(cdiv(columns, tile.outputs), most)](
        x_SK, weight_EKN, ends_E, out_SN, rows, columns, depth, *x_SK.stride(), *weight_EKN.stride(),
        experts, depth % tile.depth == 0, tile.rows, tile.outputs, tile.depth, next_power_of_2(experts + 1),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out_SN


def row_sums(x_MR: Tensor) -> Tensor:
    """Return the sum of each row, in float32 -> [M]."""
    out_M = torch.empty(len(x_MR), dtype=torch.float32, device=x_MR.device)
    if len(x_MR):
        sums_kernel[(len(x_MR),)](x_MR, out_M, x_MR.shape[1], *x_MR.stride(), SUMMED, num_warps=4)
    return out_M

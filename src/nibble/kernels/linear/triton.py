"""linear() for few rows and rotate() in Triton, and the tile function that a fused append rotates keys with.

linear: a program reads some rows of the weight once, from end to end, many loads ahead. There are as many programs as
keep every multiprocessor loading; none is split along K, which would take a second pass. Of a narrow weight, as routers
of experts have, a program reads a single row, and multiplies without tensor cores: a chain of their products along K
would take longer than loading.

rotate: a Hadamard matrix of 2^n rows is applied in n steps of sums and differences, in float32, between registers of a
warp.

Shape suffixes: M rows of x (padded to one tile), N values of the output, K of the input, B a block of each; T tokens,
H heads, D values of a head, R rows of a tile (a token's head each).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels import GPU, MMA_ROWS, cdiv, gpu_of, next_power_of_2
from nibble.kernels.dependent_launch import LINE, launch_options, prefetch, wait_for_inputs

LINE_VALUES = tl.constexpr(LINE // 2)


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(x, weight, bias, out, rows, x_stride, outputs, K: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
                  BK: tl.constexpr, STAGES: tl.constexpr, LINES: tl.constexpr, GATED: tl.constexpr,
                  PDL: tl.constexpr):  # fmt: skip
    """Multiply all rows with BN rows of the weight. Grid: rows of the weight / BN.

    LINES: lines of each row of the weight that are brought to the cache while the kernel in front still runs.
    GATED: the weight has `outputs` rows of gates, and as many of what they gate; of each a program has half.
    """
    m, k = tl.arange(0, M), tl.arange(0, BK)
    if GATED:
        HALF: tl.constexpr = BN // 2
        i = tl.arange(0, BN)
        n = tl.program_id(0) * HALF + i % HALF + i // HALF * outputs
    else:
        n = tl.program_id(0) * BN + tl.arange(0, BN)
    weight_at = weight + n[:, None].to(tl.int64) * K + k[None, :]
    if PDL:
        line = weight + n[:, None].to(tl.int64) * K + tl.arange(0, LINES)[None, :] * LINE_VALUES
        prefetch(line)
    wait_for_inputs(PDL)
    x_at, live = x + m[None, :] * x_stride + k[:, None], m[None, :] < rows
    sum_NM = tl.zeros((BN, M), tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        # The weight is read once: it must not push x out of the cache.
        weight_NK = tl.load(weight_at + start, eviction_policy="evict_first")
        # The weight is on the left, where its rows fill a tile; the few rows of x are the narrow side.
        sum_NM = tl.dot(weight_NK, tl.load(x_at + start, mask=live, other=0.0), sum_NM)
    if bias is not None:
        sum_NM += tl.load(bias + n)[:, None].to(tl.float32)
    y_NM = sum_NM.to(out.dtype.element_ty)
    if GATED:
        gate_NM, up_NM = tl.split(tl.permute(tl.reshape(y_NM, [2, HALF, M]), [1, 2, 0]))
        y_NM = silu_gate(gate_NM, up_NM)
        n = tl.program_id(0) * HALF + tl.arange(0, HALF)
    tl.store(out + m[None, :] * outputs + n[:, None], y_NM, mask=live)


@triton.jit
def silu_gate(gate, up):
    """Return silu(gate) * up, in float32, rounded as they are."""
    wide = gate.to(tl.float32)
    return (wide * tl.sigmoid(wide) * up.to(tl.float32)).to(gate.dtype)


@dataclass(frozen=True, slots=True)
class Tile:
    """How a program is tiled."""

    outputs: int
    inputs: int
    """Of a step."""
    stages: int
    """Steps that are loaded ahead."""
    warps: int = 4


MANY_PROGRAMS = 256
"""Programs from which on several share a processor, and each loads fewer steps ahead."""
LONG_ROW = 8192
"""Inputs from which on programs are narrow, so that there are more of them."""
FEW_OUTPUTS = 4096
"""Outputs below which they are, too."""
WIDE, NARROW = 64, 32
"""Outputs of a program."""


def tile_of(outputs: int, inputs: int, item: int, gpu: GPU, rows: int = MMA_ROWS) -> Tile:
    """Choose the tile of a weight of items of so many bytes, for so many rows of x, padded.

    These were fastest on an H200 (benchmarks/linear.py), but for those of fewer outputs than FEW_OUTPUTS, or of odd
    ones, which were not measured; smaller GPUs have room for fewer steps.
    """
    if outputs % WIDE or outputs < FEW_OUTPUTS:
        tile = Tile(NARROW, 256, stages=6)
    elif outputs >= WIDE * MANY_PROGRAMS:
        tile = Tile(WIDE, 128, stages=4)
    else:
        tile = Tile(WIDE, 128, stages=6) if inputs < LONG_ROW else Tile(NARROW, 256, stages=6)
    step = (tile.outputs + rows) * tile.inputs * item
    return replace(tile, stages=min(tile.stages, gpu.memory // step))


def linear(
    x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, *, tile: Tile | None = None, gated: bool = False
) -> Tensor:
    """Compute x W^T + b, or of it silu(the first half) * the second.

    Args:
        x: [..., K], of MMA_ROWS rows or a few times as many.
        weight_NK: Contiguous; N a multiple of 32 and K of 256.
        bias_N: Added to each row, if there is one.
        tile: Another tile than the fastest.
        gated: The halves of outputs are joined; N is a multiple of twice as many.

    Returns:
        [..., N] in the dtype of x, [..., N / 2] if gated.
    """
    n, k = weight_NK.shape
    outputs = n // 2 if gated else n
    x_MK = x.reshape(-1, k)
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    out = torch.empty(*x.shape[:-1], outputs, dtype=x.dtype, device=x.device)
    gpu = gpu_of(x.device)
    rows = max(next_power_of_2(len(x_MK)), MMA_ROWS)
    tile, options = tile or tile_of(n, k, x.itemsize, gpu, rows), launch_options(gpu)
    lines = _power_of_2_within(min(tile.stages * tile.inputs, k) * x.itemsize // LINE)
    linear_kernel[(n // tile.outputs,)](
        x_MK, weight_NK, bias_N, out, len(x_MK), x_MK.stride(0), outputs, k, rows, tile.outputs, tile.inputs,
        tile.stages, lines, gated, bool(options), num_warps=tile.warps, **options,
    )  # fmt: skip
    return out


def _power_of_2_within(n: int) -> int:
    return 1 << n.bit_length() - 1


NARROW_ROWS, NARROW_WARPS = 8, 4
"""Rows of x of a program at most, whose sums fit into registers, and its warps."""
NARROW_INPUTS = 1024
"""Of a step: 8 of each thread."""
UNROLL = tl.constexpr(2)
"""Steps that are loaded together."""


@triton.jit(do_not_specialize=["rows"])
def narrow_kernel(x, weight, bias, out, rows, x_stride, outputs, K: tl.constexpr, M: tl.constexpr, BK: tl.constexpr,
                  LINES: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Multiply M rows with one row of the weight. Grid: outputs, rows / M.

    LINES: a row's, which are brought to the cache while the kernel in front still runs.
    """
    n, m, k = tl.program_id(0).to(tl.int64), tl.program_id(1) * M + tl.arange(0, M), tl.arange(0, BK)
    weight_at, live_M1 = weight + n * K, (m < rows)[:, None]
    if PDL:
        prefetch(weight_at + tl.minimum(tl.arange(0, LINES), (K - 1) // LINE_VALUES) * LINE_VALUES)
    wait_for_inputs(PDL)
    x_at = x + m[:, None] * x_stride + k[None, :]
    sum_MK = tl.zeros((M, BK), tl.float32)
    for start in tl.range(0, K, BK, loop_unroll_factor=UNROLL):
        keep_K = start + k < K
        weight_K = tl.load(weight_at + start + k, mask=keep_K, other=0.0).to(tl.float32)
        x_MK = tl.load(x_at + start, mask=live_M1 & keep_K[None, :], other=0.0).to(tl.float32)
        sum_MK += x_MK * weight_K[None, :]
    sum_M = tl.sum(sum_MK, 1)
    if bias is not None:
        sum_M += tl.load(bias + n).to(tl.float32)
    tl.store(out + m * outputs + n, sum_M.to(out.dtype.element_ty), mask=m < rows)


def narrow_linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """Compute x W^T + b for few outputs -> [..., N] in the dtype of x.

    Args:
        x: [..., K], of few rows.
        weight_NK: Contiguous.
        bias_N: Added to each row, if there is one.
    """
    n, k = weight_NK.shape
    x_MK = x.reshape(-1, k)
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    out = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=x.device)
    options = launch_options(gpu_of(x.device))
    rows, lines = min(next_power_of_2(len(x_MK)), NARROW_ROWS), next_power_of_2(cdiv(k * x.itemsize, LINE))
    narrow_kernel[(n, cdiv(len(x_MK), rows))](
        x_MK, weight_NK, bias_N, out, len(x_MK), x_MK.stride(0), n, k, rows, NARROW_INPUTS, lines, bool(options),
        num_warps=NARROW_WARPS, **options,
    )  # fmt: skip
    return out


ROTATE_VALUES = 1024
"""Values of a tile, 8 to a thread: small enough that a few tokens spread over the GPU."""


@triton.jit
def rotate_tile(x_RD, BLOCK: tl.constexpr):
    """Multiply each block of BLOCK values of a float32 row (a power of two) with the orthogonal Hadamard matrix."""
    STEPS: tl.constexpr = BLOCK.bit_length() - 1
    y = x_RD
    for step in tl.static_range(STEPS):
        y = _butterfly(y, 1 << step)
    # One factor in the end makes the matrix orthogonal, in place of one in each step.
    return tl.reshape(y, x_RD.shape) * BLOCK**-0.5


@triton.jit
def _butterfly(y, STRIDE: tl.constexpr):
    """Replace two values that lie STRIDE apart by their sum and their difference."""
    pairs = tl.reshape(y, [y.numel // (2 * STRIDE), 2, STRIDE])
    # The exclusive or over a pair and one of its values is the other value: an exchange without shared memory.
    bits = pairs.to(tl.int32, bitcast=True)
    other = (bits ^ tl.xor_sum(bits, 1, keep_dims=True)).to(tl.float32, bitcast=True)
    second = tl.arange(0, 2)[None, :, None] == 1
    return other + tl.where(second, -pairs, pairs)


@triton.jit(do_not_specialize=["rows"])
def rotate_kernel(x, out, rows, stride_T, stride_H, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
                  R: tl.constexpr, D: tl.constexpr):  # fmt: skip
    """Rotate R rows. Grid: rows / R."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)[:, None]
    column = tl.arange(0, D)[None, :]
    keep = (row < rows) & (column < DIM)
    at = row // HEADS * stride_T + row % HEADS * stride_H + column
    x_RD = tl.load(x + at, mask=keep, other=0.0).to(tl.float32)
    tl.store(out + row * DIM + column, rotate_tile(x_RD, BLOCK), mask=keep)


def rotate(x_THD: Tensor) -> Tensor:
    """Multiply heads block by block with the Hadamard matrix, in one launch. The last dimension must be contiguous."""
    tokens, heads, dim = x_THD.shape
    out_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    width = next_power_of_2(dim)
    tile = max(1, ROTATE_VALUES // width)
    if rows := tokens * heads:
        rotate_kernel[(cdiv(rows, tile),)](
            x_THD, out_THD, rows, x_THD.stride(0), x_THD.stride(1), heads, dim, dim & -dim, tile, width
        )
    return out_THD

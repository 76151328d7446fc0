"""rotate() in Triton, and the tile function that a fused append rotates keys with.

A Hadamard matrix of 2^n rows is applied in n steps of sums and differences, in float32, between registers of a warp.

Shape suffixes: T tokens, H heads, D values of a head, R rows of a tile (a token's head each).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels.sizes import next_power_of_2

VALUES = 1024
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
def _rotate_kernel(x, out, rows, stride_T, stride_H, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
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
    tile = max(1, VALUES // width)
    if rows := tokens * heads:
        _rotate_kernel[(-(-rows // tile),)](
            x_THD, out_THD, rows, x_THD.stride(0), x_THD.stride(1), heads, dim, dim & -dim, tile, width
        )
    return out_THD

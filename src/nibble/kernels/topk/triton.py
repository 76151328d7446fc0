"""The largest values of rows in Triton.

Floats are compared as whole numbers in the same order, so that NaN has a place in it, and a warp finds the largest of
its numbers in one instruction. A short row is a warp's: the largest is taken out k times. A long row is cut into parts,
each the largest of a program; a second launch takes the largest of these.

Shape suffixes: E values of a short row, padded; K largest of these, padded; S rows, V values of a long row; B values of
a part, P parts, padded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels import cdiv, gpu_of, next_power_of_2
from nibble.kernels.dependent_launch import launch_options, wait_for_inputs

NONE = tl.constexpr(-(1 << 31))
"""Smaller than the number of any float."""
NO_PART = tl.constexpr(-(1 << 63))
LARGEST = tl.constexpr((1 << 31) - 1)
WARP = 32
PART, PART_WARPS = 4096, 8
"""Values of a part, and warps that read them: with 16 values of each thread, a few rows spread over the GPU."""


@triton.jit
def ordered(x):
    """Return int32 in the order of float32 values: both zeros are equal, NaN is the largest."""
    bits = x.to(tl.int32, bitcast=True)
    number = tl.where(x == 0, 0, bits ^ ((bits >> 31) & LARGEST))
    return tl.where(x != x, LARGEST, number)  # noqa: PLR0124 (NaN)


@triton.jit
def topk_kernel(x, values, indices, stride, WIDTH: tl.constexpr, TOP_K: tl.constexpr, E: tl.constexpr,
                K: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Find the TOP_K largest of WIDTH values. Grid: rows."""
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    e_E, k_K = tl.arange(0, E), tl.arange(0, K)
    x_at, live_E = x + row * stride, e_E < WIDTH
    number_E = tl.where(live_E, ordered(tl.load(x_at + e_E, mask=live_E, other=0.0).to(tl.float32)), NONE)
    index_K = tl.zeros((K,), tl.int32)
    for k in tl.static_range(TOP_K):
        index = tl.min(tl.where(number_E == tl.max(number_E, 0), e_E, E), 0)
        number_E = tl.where(e_E == index, NONE, number_E)
        index_K = tl.where(k_K == k, index, index_K)
    # --- store
    out, keep_K = row * TOP_K + k_K, k_K < TOP_K
    tl.store(values + out, tl.load(x_at + index_K, mask=keep_K), mask=keep_K)
    tl.store(indices + out, index_K.to(tl.int64), mask=keep_K)


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest values along the last dimension, descending, and their places [..., K]."""
    width, shape = x.shape[-1], (*x.shape[:-1], k)
    values = torch.empty(shape, dtype=x.dtype, device=x.device)
    indices = torch.empty(shape, dtype=torch.int64, device=x.device)
    if not values.numel():
        return values, indices
    x_RE = x.reshape(-1, width)
    x_RE = x_RE if x_RE.stride(1) == 1 else x_RE.contiguous()
    options = launch_options(gpu_of(x.device))
    # No fewer values than a warp has lanes: only all of them together find the largest in one instruction.
    padded = max(WARP, next_power_of_2(width))
    topk_kernel[(len(x_RE),)](
        x_RE, values, indices, x_RE.stride(0), width, k, padded, next_power_of_2(k), bool(options), num_warps=1,
        **options,
    )  # fmt: skip
    return values, indices


@triton.jit
def part_max_kernel(x, maxima, stride, width, B: tl.constexpr, PDL: tl.constexpr):
    """Find the largest of B values, and the first place where it is. Grid: parts, rows."""
    wait_for_inputs(PDL)
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    v_B = part * B + tl.arange(0, B)
    live_B = v_B < width
    x_B = tl.load(x + row * stride + v_B, mask=live_B, other=0.0).to(tl.float32)
    number_B = tl.where(live_B, ordered(x_B), NONE)
    largest = tl.max(number_B, 0)
    index = tl.min(tl.where(number_B == largest, v_B, LARGEST), 0)
    # The place is below the value, turned round: of equal values the first has the larger number.
    both = (largest.to(tl.int64) << 32) | (index ^ LARGEST).to(tl.int64)
    tl.store(maxima + row * tl.num_programs(0) + part, both)


@triton.jit(do_not_specialize=["parts"])
def row_max_kernel(x, maxima, values, indices, stride, parts, P: tl.constexpr, PDL: tl.constexpr):
    """Find the largest of a row's parts. Grid: rows."""
    wait_for_inputs(PDL)
    row, p_P = tl.program_id(0).to(tl.int64), tl.arange(0, P)
    both = tl.max(tl.load(maxima + row * parts + p_P, mask=p_P < parts, other=NO_PART), 0)
    index = (both & LARGEST) ^ LARGEST
    tl.store(indices + row, index)
    tl.store(values + row, tl.load(x + row * stride + index))


def row_max(x_SV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest value of each row, and its place, the first of several. Rows must be contiguous."""
    rows, width = x_SV.shape
    parts, device = cdiv(width, PART), x_SV.device
    maxima_SP = torch.empty(rows, parts, dtype=torch.int64, device=device)
    values_S = torch.empty(rows, dtype=x_SV.dtype, device=device)
    indices_S = torch.empty(rows, dtype=torch.int64, device=device)
    if not rows:
        return values_S, indices_S
    options = launch_options(gpu_of(device))
    stride, pdl = x_SV.stride(0), bool(options)
    part_max_kernel[(parts, rows)](x_SV, maxima_SP, stride, width, PART, pdl, num_warps=PART_WARPS, **options)
    row_max_kernel[(rows,)](
        x_SV,
        maxima_SP,
        values_S,
        indices_S,
        stride,
        parts,
        next_power_of_2(parts),
        pdl,
        num_warps=1,
        **options,
    )
    return values_S, indices_S

"""The largest values of rows in Triton.

Floats are compared as whole numbers in the same order, so that NaN has a place in it, and a warp finds the largest of
its numbers in one instruction. A short row is a warp's: the largest is taken out k times. A long row is cut into parts,
each the largest of a program; a second launch takes the largest of these.

Shape suffixes: E values of a short row, padded; K largest of these, padded; S rows, V values of a long row; B values of
a part, P parts, padded.
"""

from __future__ import annotations

from typing import Any

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
def float_of(number):
    """Return the float32 values that ordered() numbers: 0.0 for both zeros, NaN for the largest number."""
    return tl.where(number < 0, number ^ LARGEST, number).to(tl.float32, bitcast=True)


@triton.jit
def exp_over(number, largest):
    """Return exp(x - the largest x) by their numbers: 1 where these are equal, 0 where there is none."""
    x, most = float_of(number), float_of(largest)
    # Infinite values are equal, and their difference is no number.
    difference = tl.where(x == most, 0.0, x) - tl.where(x == most, 0.0, most)
    return tl.where(number == NONE, 0.0, tl.exp(difference))


@triton.jit
def part_max_kernel(x, maxima, sums, stride, width, B: tl.constexpr, SUMS: tl.constexpr, PDL: tl.constexpr):
    """Find the largest of B values and its first place; with SUMS, what exp() adds up to over it. Grid: parts, rows."""
    wait_for_inputs(PDL)
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    v_B, out = part * B + tl.arange(0, B), row * tl.num_programs(0) + part
    live_B = v_B < width
    x_B = tl.load(x + row * stride + v_B, mask=live_B, other=0.0).to(tl.float32)
    number_B = tl.where(live_B, ordered(x_B), NONE)
    largest = tl.max(number_B, 0)
    index = tl.min(tl.where(number_B == largest, v_B, LARGEST), 0)
    # The place is below the value, turned round: of equal values the first has the larger number.
    tl.store(maxima + out, (largest.to(tl.int64) << 32) | (index ^ LARGEST).to(tl.int64))
    if SUMS:
        tl.store(sums + out, tl.sum(exp_over(number_B, largest), 0))


@triton.jit(do_not_specialize=["parts"])
def likeliest_kernel(x, maxima, tokens, reported, stride, parts, P: tl.constexpr, PDL: tl.constexpr):
    """Find the largest of a row's parts. Grid: rows."""
    wait_for_inputs(PDL)
    row, p_P = tl.program_id(0).to(tl.int64), tl.arange(0, P)
    both = tl.max(tl.load(maxima + row * parts + p_P, mask=p_P < parts, other=NO_PART), 0)
    index = (both & LARGEST) ^ LARGEST
    tl.store(tokens + row, index)
    is_number = tl.abs(tl.load(x + row * stride + index).to(tl.float32)) <= float("inf")
    tl.store(reported + row, tl.where(is_number, index, -1))  # NO_TOKEN


@triton.jit(do_not_specialize=["parts"])
def draw_kernel(maxima, sums, ids, tokens, chances, parts, P: tl.constexpr, HAS_IDS: tl.constexpr,
                PDL: tl.constexpr):  # fmt: skip
    """Store the id of the largest of a row's parts, and its share of the exp() of all. Grid: rows."""
    wait_for_inputs(PDL)
    row, p_P = tl.program_id(0).to(tl.int64), tl.arange(0, P)
    both_P = tl.load(maxima + row * parts + p_P, mask=p_P < parts, other=NO_PART)
    both = tl.max(both_P, 0)
    token = (both & LARGEST) ^ LARGEST
    if HAS_IDS:
        token = tl.load(ids + token)
    tl.store(tokens + row, token)
    sum_P = tl.load(sums + row * parts + p_P, mask=p_P < parts, other=0.0)
    share_P = exp_over((both_P >> 32).to(tl.int32), (both >> 32).to(tl.int32))
    tl.store(chances + row, (1.0 / tl.sum(sum_P * share_P, 0)).to(tl.float64))


def likeliest(x_SV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the place of each row's largest value; see naive.py. Rows must be contiguous."""
    rows = len(x_SV)
    # Apart, since halves of one tensor would not always lie on a grid of 16 bytes, which kernels are compiled for.
    tokens_S, reported_S = (torch.empty(rows, dtype=torch.int64, device=x_SV.device) for _ in range(2))
    if not rows:
        return tokens_S, reported_S
    maxima_SP, _, options = _part_maxima(x_SV, with_sums=False)
    parts = maxima_SP.shape[1]
    likeliest_kernel[(rows,)](
        x_SV,
        maxima_SP,
        tokens_S,
        reported_S,
        x_SV.stride(0),
        parts,
        next_power_of_2(parts),
        bool(options),
        num_warps=1,
        **options,
    )
    return tokens_S, reported_S


def draw_likeliest(x_SV: Tensor, ids_V: Tensor | None, tokens_S: Tensor, chances_S: Tensor) -> None:
    """Write the id of each row's largest value, the first of several, and its chance. Rows must be contiguous."""
    if not len(x_SV):
        return
    maxima_SP, sums_SP, options = _part_maxima(x_SV, with_sums=True)
    parts = maxima_SP.shape[1]
    draw_kernel[(len(x_SV),)](
        maxima_SP,
        sums_SP,
        ids_V,
        tokens_S,
        chances_S,
        parts,
        next_power_of_2(parts),
        ids_V is not None,
        bool(options),
        num_warps=1,
        **options,
    )


def _part_maxima(x_SV: Tensor, *, with_sums: bool) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """Return the largest of all parts with their places, the sums of exp() over them, and the options of launches."""
    (rows, width), device = x_SV.shape, x_SV.device
    parts, options = cdiv(width, PART), launch_options(gpu_of(device))
    maxima_SP = torch.empty(rows, parts, dtype=torch.int64, device=device)
    sums_SP = torch.empty(rows, parts, dtype=torch.float32, device=device) if with_sums else None
    part_max_kernel[(parts, rows)](
        x_SV, maxima_SP, sums_SP, x_SV.stride(0), width, PART, with_sums, bool(options), num_warps=PART_WARPS,
        **options,
    )  # fmt: skip
    return maxima_SP, sums_SP, options

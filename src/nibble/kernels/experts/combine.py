"""What stands between and behind the products of a layer of experts, in Triton: the gate, and sums of tokens' rows.

Where a kernel of a product does not do it itself. The definitions are gate.gated() and naive.combined().

Shape suffixes: T tokens, K chosen experts of a token, S = T * K rows, N outputs; B a block of outputs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels import cdiv, gpu_of, next_power_of_2
from nibble.kernels.dependent_launch import launch_options, wait_for_inputs
from nibble.kernels.experts.gate import SILU, Gate

GATE_BLOCK, COMBINE_BLOCK = 1024, 512
"""Outputs of a program at most."""


@triton.jit
def gate_kernel(y, out, outputs, limit, factor, IS_SILU: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr):
    """Compute B outputs of a row. Grid: rows, outputs / B."""
    wait_for_inputs(PDL)
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    y_at, keep = y + row * 2 * outputs, n < outputs
    if IS_SILU:
        a = tl.load(y_at + n, mask=keep, other=0.0).to(tl.float32)
        b = tl.load(y_at + outputs + n, mask=keep, other=0.0).to(tl.float32)
        joined = a * tl.sigmoid(a) * b
    else:
        # Comparisons let NaN through.
        a = tl.load(y_at + 2 * n, mask=keep, other=0.0).to(tl.float32)
        b = tl.load(y_at + 2 * n + 1, mask=keep, other=0.0).to(tl.float32)
        a = tl.where(a > limit, limit, a)
        b = tl.where(b > limit, limit, tl.where(b < -limit, -limit, b))
        joined = a * tl.sigmoid(factor * a) * (b + 1)
    tl.store(out + row * outputs + n, joined.to(out.dtype.element_ty), mask=keep)


def gated(y_SN: Tensor, gate: Gate) -> Tensor:
    """Return what a gate leaves of contiguous outputs [S, 2 N] -> [S, N]."""
    rows, outputs = len(y_SN), y_SN.shape[1] // 2
    out_SN = y_SN.new_empty(rows, outputs)
    if rows:
        options, block = launch_options(gpu_of(y_SN.device)), min(GATE_BLOCK, next_power_of_2(outputs))
        gate_kernel[(rows, cdiv(outputs, block))](
            y_SN, out_SN, outputs, gate.limit, gate.factor, gate.kind == SILU, block, bool(options), **options
        )
    return out_SN


@triton.jit
def combine_kernel(y, places, chosen, weights, out, outputs, EXPERTS: tl.constexpr, TOP_K: tl.constexpr,
                   B: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Weight and sum up B outputs of a token's rows, in order. Grid: tokens, outputs / B."""
    wait_for_inputs(PDL)
    token, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    sum_B = tl.zeros((B,), tl.float32)
    for k in tl.static_range(TOP_K):
        choice = token * TOP_K + k
        row = choice
        if places is not None:
            row = tl.load(places + choice)
        # Rows of no expert hold anything.
        is_there = tl.load(chosen + choice) < EXPERTS
        y_B = tl.load(y + row * outputs + n, mask=n < tl.where(is_there, outputs, 0), other=0.0).to(
            tl.float32
        )
        weight = tl.load(weights + choice).to(tl.float32)
        sum_B += tl.where(is_there, weight, 0.0) * y_B
    tl.store(out + token * outputs + n, sum_B.to(out.dtype.element_ty), mask=n < outputs)


def combined(
    y_SN: Tensor, places_S: Tensor | None, experts_TK: Tensor, weights_TK: Tensor, experts: int
) -> Tensor:
    """Return the weighted sums of tokens' rows, as naive.combined() defines them."""
    (tokens, top_k), outputs = experts_TK.shape, y_SN.shape[1]
    out_TN = y_SN.new_empty(tokens, outputs)
    if tokens:
        options, block = launch_options(gpu_of(y_SN.device)), min(COMBINE_BLOCK, next_power_of_2(outputs))
        combine_kernel[(tokens, cdiv(outputs, block))](
            y_SN, places_S, experts_TK.contiguous(), weights_TK.contiguous(), out_TN, outputs, experts, top_k, block,
            bool(options), **options,
        )  # fmt: skip
    return out_TN

"""Triton twin of kernels/attention/merge.py: one launch, one pass over both parts.

Shape suffixes: T tokens, H query heads, D values of a head, R rows of a tile (a token's head each).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels.attention.merge import Part
from nibble.kernels.sizes import next_power_of_2

VALUES = 2048
"""Values of a tile."""


@triton.jit(do_not_specialize=["rows"])
def _merge(
    a, a_lse, b, b_lse, out, lse, rows, a_stride_T, a_stride_H, b_stride_T, b_stride_H,
    a_lse_stride_H, a_lse_stride_T, b_lse_stride_H, b_lse_stride_T,
    HEADS: tl.constexpr, DIM: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    token, head, keep_R = row // HEADS, row % HEADS, row < rows
    x = tl.load(a_lse + head * a_lse_stride_H + token * a_lse_stride_T, mask=keep_R, other=0.0)
    y = tl.load(b_lse + head * b_lse_stride_H + token * b_lse_stride_T, mask=keep_R, other=0.0)
    peak = tl.maximum(x, y)
    x, y = tl.exp(x - peak), tl.exp(y - peak)
    tl.store(lse + row, peak + tl.log(x + y), mask=keep_R)
    column = tl.arange(0, D)[None, :]
    keep = keep_R[:, None] & (column < DIM)
    from_a = tl.load(a + (token * a_stride_T + head * a_stride_H)[:, None] + column, mask=keep, other=0.0)
    from_b = tl.load(b + (token * b_stride_T + head * b_stride_H)[:, None] + column, mask=keep, other=0.0)
    values = from_a.to(tl.float32) * (x / (x + y))[:, None] + from_b.to(tl.float32) * (y / (x + y))[:, None]
    tl.store(out + row[:, None] * DIM + column, values.to(out.dtype.element_ty), mask=keep)


def merge(a: Part, b: Part, dtype: torch.dtype) -> Part:
    """See kernels/attention/merge.py. The last dimension of values must be contiguous."""
    tokens, heads, dim = a.values_THD.shape
    device = a.values_THD.device
    values_THD = torch.empty(tokens, heads, dim, dtype=dtype, device=device)
    lse_TH = torch.empty(tokens, heads, dtype=torch.float32, device=device)
    width = next_power_of_2(dim)
    tile = max(1, VALUES // width)
    if rows := tokens * heads:
        _merge[(-(-rows // tile),)](
            a.values_THD, a.lse_HT, b.values_THD, b.lse_HT, values_THD, lse_TH, rows,
            *_strides(a.values_THD), *_strides(b.values_THD), *_strides(a.lse_HT), *_strides(b.lse_HT),
            heads, dim, tile, width,
        )  # fmt: skip
    return Part(values_THD, lse_TH.T)


def _strides(x: Tensor) -> tuple[int, int]:
    return x.stride(0), x.stride(1)

"""linear() for few rows in Triton: a program reads some rows of the weight once, from end to end, many loads ahead.

There are as many programs as keep every multiprocessor loading; none is split along K, which would take a second pass.

Shape suffixes: M rows of x (padded to one tile), N values of the output, K of the input; B a block of each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16
WIDE, NARROW = (64, 128), (32, 256)
"""Outputs of a program and inputs of a step, where there are many outputs and few."""
MANY = 96
"""Programs of the wide kind that fill a GPU."""
STAGES = 4
"""Steps that are loaded ahead: 80 KiB of shared memory at most, which every GPU since Ampere has."""


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(x, weight, bias, out, rows, x_stride, N, K: tl.constexpr, M: tl.constexpr, BN: tl.constexpr,
                   BK: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Multiply all rows with BN rows of the weight. Grid: N / BN."""
    n, m, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, M), tl.arange(0, BK)
    weight_at = weight + n[:, None].to(tl.int64) * K + k[None, :]
    x_at, live = x + m[None, :] * x_stride + k[:, None], m[None, :] < rows
    sum_NM = tl.zeros((BN, M), tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        # The weight is read once: it must not push x out of the cache.
        weight_NK = tl.load(weight_at + start, eviction_policy="evict_first")
        # The weight is on the left, where its rows fill a tile; the few rows of x are the narrow side.
        sum_NM = tl.dot(weight_NK, tl.load(x_at + start, mask=live, other=0.0), sum_NM)
    if bias is not None:
        sum_NM += tl.load(bias + n)[:, None].to(tl.float32)
    tl.store(out + m[None, :] * N + n[:, None], sum_NM.to(out.dtype.element_ty), mask=live)


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """Compute x W^T + b.

    Args:
        x: [..., K], of ROWS rows at most.
        weight_NK: Contiguous; N a multiple of 64 and K of 256.
        bias_N: Added to each row, if there is one.

    Returns:
        [..., N] in the dtype of x.
    """
    n, k = weight_NK.shape
    x_MK = x.reshape(-1, k)
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    out = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=x.device)
    width, depth = WIDE if n >= MANY * WIDE[0] else NARROW
    _linear_kernel[(n // width,)](
        x_MK, weight_NK, bias_N, out, len(x_MK), x_MK.stride(0), n, k, ROWS, width, depth, STAGES, num_warps=4
    )
    return out

"""The sum and its norm in Triton: a program for each row.

Shape suffixes: T rows, N values of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels import gpu_of, next_power_of_2
from nibble.kernels.dependent_launch import launch_options, wait_for_inputs

THREAD_VALUES = 16
"""Values of a row for each thread: two loads of 16 bytes."""
MOST_WARPS = 16


@triton.jit(do_not_specialize=["eps"])
def add_norm_kernel(
    x, residual, weight, total, normed, eps, x_stride, residual_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add up and norm a row. Grid: T."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    live = at < WIDTH
    factors = tl.load(weight + at, mask=live, other=0.0).to(tl.float32) + OFFSET
    wait_for_inputs(PDL)
    a = tl.load(x + row * x_stride + at, mask=live, other=0.0).to(tl.float32)
    b = tl.load(residual + row * residual_stride + at, mask=live, other=0.0).to(tl.float32)
    rounded = (a + b).to(total.dtype.element_ty)
    tl.store(total + row * WIDTH + at, rounded, mask=live)
    y = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(y * y, 0) / WIDTH + eps)
    tl.store(normed + row * WIDTH + at, y * scale * factors, mask=live)


def add_norm(
    x: Tensor, residual: Tensor, weight_N: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the sum and its norm; see naive.py."""
    width, options = x.shape[-1], launch_options(gpu_of(x.device))
    rows, others = _rows(x, width), _rows(residual, width)
    total, normed = x.new_empty(x.shape), x.new_empty(x.shape)
    block = next_power_of_2(width)
    warps = min(max(block // (32 * THREAD_VALUES), 1), MOST_WARPS)
    if len(rows):
        add_norm_kernel[(len(rows),)](
            rows, others, weight_N, total, normed, eps, rows.stride(0), others.stride(0), width, block, offset,
            bool(options), num_warps=warps, **options,
        )  # fmt: skip
    return total, normed


def _rows(x: Tensor, width: int) -> Tensor:
    """Return [T, N] whose values lie side by side."""
    x_TN = x.reshape(-1, width)
    return x_TN if x_TN.stride(1) == 1 else x_TN.contiguous()

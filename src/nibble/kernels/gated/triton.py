"""The gate alone, in Triton: silu(the first half) * the second of each row, where a library computed the product.

Shape suffixes: T rows, N values of a half.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels import cdiv, gpu_of
from nibble.kernels.dependent_launch import launch_options, wait_for_inputs
from nibble.kernels.linear.triton import silu_gate

BLOCK, WARPS = 2048, 8
"""Values of a program: 16 bytes of each half for each thread."""


@triton.jit
def gate_kernel(y, out, y_stride, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Join BLOCK values of a row. Grid: T, N / BLOCK."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live, from_row = at < N, y + row * y_stride
    wait_for_inputs(PDL)
    gate = tl.load(from_row + at, mask=live)
    up = tl.load(from_row + N + at, mask=live)
    tl.store(out + row * N + at, silu_gate(gate, up), mask=live)


def gate(y_T2N: Tensor) -> Tensor:
    """Return silu(the first half) * the second half of each row, [T, N] in the dtype of `y_T2N`."""
    rows, width = y_T2N.shape
    out_TN = y_T2N.new_empty(rows, width // 2)
    options = launch_options(gpu_of(y_T2N.device))
    if rows:
        # Only the first dimension of a grid may be more than 65,535.
        gate_kernel[(rows, cdiv(width // 2, BLOCK))](
            y_T2N, out_TN, y_T2N.stride(0), width // 2, BLOCK, bool(options), num_warps=WARPS, **options
        )
    return out_TN

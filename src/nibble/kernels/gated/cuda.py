"""Gated products in CUDA C++ (gated_sm90.cu)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nibble.kernels import SM90, cdiv, gpu_of, import_problem

if TYPE_CHECKING:
    from nibble.kernels.nvrtc import Kernel

SOURCE = Path(__file__).with_name("gated_sm90.cu")
BLOCKS, ROWS, OUTPUTS, INPUTS = 2, 128, 88, 64
"""Blocks of a cluster, rows and outputs of a block's tile, inputs of a stage."""
THREADS, WARPS, WARP_ROWS, COLUMN = 384, 8, 16, 64
"""Threads of a block, warps that multiply, rows that a warp stores at a time, values of 16 bits in a row of a stage."""
STAGES, ALIGNMENT = 5, 1024
SHARED = 2 * (STAGES * (ROWS + 2 * OUTPUTS) * INPUTS + WARPS * WARP_ROWS * OUTPUTS) + ALIGNMENT
"""Bytes of shared memory of a block: stages, outputs, and room to align them."""
ALIGNED = 8
"""Values of 16 bytes, of which the tensor copy engine wants whole ones."""
BAND = 8
"""Rows of tiles, each of 256 rows, whose columns are taken together at most."""
ROUNDS_SILU = False
"""Inductor computes silu and the product behind it in float32, and rounds once (emulate_precision_casts is off)."""


def serves(shape: Sequence[int], dtype: torch.dtype, arch: int) -> bool:
    """Return whether the kernel multiplies with a contiguous weight.

    Args:
        shape: 2N and K.
        dtype: Of the weight, and of what it is multiplied with.
        arch: Compute capability, as GPU.arch has it.
    """
    rows, inputs = shape
    return (
        arch == SM90
        and dtype == torch.bfloat16
        and rows > 0 == rows % (2 * ALIGNED)
        and inputs > 0 == inputs % ALIGNED
        and not import_problem("cuda.bindings")
    )


def gated_linear(
    x: Tensor,
    weight: Tensor,
    *,
    rounds_silu: bool = ROUNDS_SILU,
    band: int = BAND,
    out_TN: Tensor | None = None,
) -> Tensor:
    """Return silu(x Wg^T) * (x Wu^T), as naive.gated_linear() does.

    Args:
        x: [..., K] in bfloat16.
        weight: [2N, K] in bfloat16, gates first; contiguous, from a multiple of 16 bytes on.
        rounds_silu: Whether silu is rounded before it is a factor.
        band: Rows of tiles that share columns of the weight.
        out_TN: Where to leave the result, as tensor maps want it: columns of a wider one, for instance.

    Returns:
        [..., N] in bfloat16, or `out_TN`.

    Raises:
        BackendError: The driver refuses the tensors or the launch.
    """
    from nibble.kernels.nvrtc import INT
    from nibble.kernels.tensor_map import copyable, tensor_map

    (double, inputs), device = weight.shape, weight.device
    out = x.new_empty(*x.shape[:-1], double // 2) if out_TN is None else out_TN
    if not out.numel():
        return out
    x_TK, out_TN = copyable(x.reshape(-1, inputs)), out.view(-1, double // 2)
    outputs, rows = out_TN.shape[1], cdiv(len(x_TK), BLOCKS * ROWS)
    columns, steps = cdiv(outputs, OUTPUTS), cdiv(inputs, INPUTS)
    # Bands of about the same size: a small one would read the whole weight for few rows.
    band = cdiv(rows, cdiv(rows, band))
    # Clusters stay for all their tiles. Processors come in pairs, so that each pair has one.
    clusters = min(gpu_of(device).processors // BLOCKS, rows * columns)
    maps = (
        tensor_map(x_TK, (ROWS, COLUMN)),
        tensor_map(weight, (OUTPUTS, COLUMN)),
        tensor_map(out_TN, (WARP_ROWS, OUTPUTS)),
    )
    sizes = rows, columns, band, steps, outputs
    types = (*(None,) * len(maps), *(INT,) * len(sizes))
    _kernel(device, rounds_silu).launch(BLOCKS * clusters, THREADS, SHARED, types, (*maps, *sizes))
    return out


def macros(rounds_silu: bool = ROUNDS_SILU) -> dict[str, int]:
    """Return the macros of gated_sm90.cu."""
    return {"STAGES": STAGES, "ROUND_SILU": int(rounds_silu)}


@cache
def _kernel(device: torch.device, rounds_silu: bool) -> Kernel:
    from nibble.kernels.nvrtc import Kernel, code_of

    return Kernel(code_of(SOURCE, f"{SM90}a", macros(rounds_silu)), "gated_linear", SHARED)

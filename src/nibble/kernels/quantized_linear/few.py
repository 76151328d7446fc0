"""Products of a few tokens with packed matrices in CUDA C++: few.cu, which reads the layout of humming.py.

A decode step does hardly anything but read weights. The library's kernels, made for any number of rows, read them at
half to three quarters of the speed of memory there.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nibble.kernels import SM90, gpu_of, import_problem
from nibble.kernels.quantized_linear.matrix import PackedMatrix

SOURCE = Path(__file__).with_name("few.cu")
TOKENS = 16
"""The most."""
CODES = {"e4m3": 0, "e2m1": 1, "uint4": 2}
SCALES = {"": 0, "e4m3": 1, "e8m0": 2}
GROUPS = (16, 32, 128)
OUTPUTS, INPUTS = 128, 128
"""What outputs and inputs are multiples of."""
WARPS = 4
MOST_SPLITS = 8
BLOCKS = 4
"""Of a processor that are resident: inputs are split among more blocks until there are about as many."""
STAGES, STAGE_CODES = 3, 4096
"""What a warp has in shared memory, and the bytes of codes of each."""


def serves(matrix: PackedMatrix) -> bool:
    """Return whether the kernel multiplies with this matrix."""
    format, (outputs, inputs) = matrix.format, matrix.shape
    return (
        matrix.codes.is_cuda
        and gpu_of(matrix.codes.device).arch == SM90
        and matrix.dtype == torch.bfloat16
        and format.codes in CODES
        and format.group in GROUPS
        and not format.has_zero
        and outputs % OUTPUTS == inputs % INPUTS == 0
        and not import_problem("cuda.bindings")
    )


def splits_of(outputs: int, inputs: int, processors: int) -> int:
    """Return among how many blocks the inputs of an output are split."""
    splits = 1
    while (
        splits < MOST_SPLITS
        and 2 * splits * (outputs // OUTPUTS) <= BLOCKS * processors
        and 2 * splits * WARPS <= inputs // INPUTS
    ):
        splits *= 2
    return splits


def macros(matrix: PackedMatrix, columns: int, splits: int, warps: int = WARPS) -> dict[str, int]:
    """Return the macros that few.cu is compiled with."""
    format, scale = matrix.format, matrix.global_scale
    return {
        "CODES": CODES[format.codes], "SCALES": SCALES[format.scales], "GROUP": format.group,
        "GLOBAL": 0 if scale is None else 1 if len(scale) == 1 else 2,
        "COLUMNS": columns, "WARPS": warps, "SPLITS": splits,
    }  # fmt: skip


def shared_bytes(matrix: PackedMatrix, warps: int = WARPS) -> int:
    """Return the dynamic shared memory of a block."""
    chunk = STAGE_CODES * 8 // (OUTPUTS * matrix.format.bits)
    scales = max(chunk // matrix.format.group, 1) * OUTPUTS * (1 if matrix.format.scales else 2)
    return warps * STAGES * (STAGE_CODES + scales)


@cache
def _kernel(arch: int, device: int, shared: int, settings: tuple[tuple[str, int], ...]) -> Any:
    from nibble.kernels.nvrtc import Kernel, cubin

    return Kernel(cubin(SOURCE, arch, dict(settings)), "few", shared)


def few_linear(
    x_TK: Tensor, matrix: PackedMatrix, *, splits: int | None = None, warps: int = WARPS
) -> Tensor:
    """Compute x W^T -> [T, N], for at most TOKENS tokens and a matrix that serves() accepts.

    Args:
        x_TK: bfloat16.
        matrix: In the layout of humming.py.
        splits: Among how many blocks inputs are split, in place of the fastest.
        warps: Of a block.

    Raises:
        BackendError: The driver refuses the launch.
    """
    from nibble.kernels.nvrtc import INT, POINTER

    (outputs, inputs), gpu = matrix.shape, gpu_of(x_TK.device)
    x_TK = x_TK if x_TK.stride(1) == 1 else x_TK.contiguous()
    out_TN = x_TK.new_empty(len(x_TK), outputs)
    splits = splits or splits_of(outputs, inputs, gpu.processors)
    settings = macros(matrix, 8 if len(x_TK) <= 8 else TOKENS, splits, warps)
    shared = shared_bytes(matrix, warps)
    kernel = _kernel(gpu.arch, x_TK.device.index or 0, shared, tuple(settings.items()))
    tensors = (matrix.codes, matrix.scale, matrix.global_scale, x_TK, out_TN)
    pointers = (0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    sizes = len(x_TK), outputs, inputs, x_TK.stride(0)
    kernel.launch(
        outputs // OUTPUTS * splits, 32 * warps, shared, (POINTER,) * 5 + (INT,) * 4, (*pointers, *sizes),
        starts_early=True,
    )  # fmt: skip
    return out_TN

"""Products with packed matrices in the layout of humming.py, in CUDA C++: few.cu for few tokens, unpack.cu for many.

A decode step does hardly anything but read weights, and a step of thousands of prompt tokens hardly anything but
multiply. The library's kernels, made for any number of rows, read FP8 at three quarters of the speed of memory, and
multiply FP8 and FP4 by a fourteenth slower than cuBLAS. So few.cu reads weights once, from end to end; and for many
tokens as many outputs as take little memory are dequantised, and multiplied by cuBLAS, or with the gate behind them by
gated/cuda.py.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nibble.kernels import SM90, gpu_of, import_problem
from nibble.kernels.gated import cuda as gated
from nibble.kernels.quantized_linear.matrix import KernelKey, PackedMatrix
from nibble.kernels.weight_formats import Activations

FEW, UNPACK = (Path(__file__).with_name(name) for name in ("few.cu", "unpack.cu"))
FEW_TOKENS = 8
"""The most that few.cu multiplies."""
MANY_TOKENS = 4096
"""Tokens from which on dequantising takes a few hundredths of the time of a product."""
CODES = {"e4m3": 0, "e2m1": 1}
SCALES = {"": 0, "e4m3": 1, "e8m0": 2}
GROUPS = {"e4m3": (32, 128), "e2m1": (16, 32, 128)}
"""By codes. The library multiplies with integers as fast."""
MULTIPLE = 128
"""What outputs and inputs are multiples of."""
WARPS, MOST_SPLITS = 4, 8
"""Warps of a block of few.cu, and blocks of a cluster, which share inputs."""
BUSY = 1.4
"""Inputs are split until there are so many blocks for each processor."""
STAGES, STAGE_CODES = 2, 4096
"""What a warp has in shared memory, and the bytes of codes of each."""
SLICE = 128 << 20
"""Bytes of weights that are dequantised at a time. Of 16 MiB the L2 cache would hold what is multiplied next, but short
products, one after another, take longer: 8,192 tokens times 4096 x 14336 1,540 us, and 1,452 at once (one H200)."""
UNPACK_SIZE = 64
"""Outputs and inputs of a block of unpack.cu."""
GATED_MULTIPLE = math.lcm(UNPACK_SIZE, gated.OUTPUTS)
"""What the gates of such a slice are a multiple of: whole tiles of gated/cuda.py."""


def serves(matrix: PackedMatrix) -> bool:
    """Return whether these kernels multiply with a matrix."""
    return serves_key(matrix.key, matrix.codes.device)


def serves_key(key: KernelKey, device: torch.device) -> bool:
    """Return whether these kernels multiply with matrices of a key."""
    format = key.format
    return (
        device.type == "cuda"
        and gpu_of(device).arch == SM90
        and key.dtype == torch.bfloat16
        and key.activations is Activations.NONE
        and format.group in GROUPS.get(format.codes, ())
        and not format.has_zero
        and not any(size % MULTIPLE for size in key.shape)
        and _has_driver()
    )


@cache
def _has_driver() -> bool:
    return not import_problem("cuda.bindings")


def is_few(matrix: PackedMatrix, tokens: int) -> bool:
    """Return whether few_linear() is the fastest."""
    return tokens <= FEW_TOKENS and serves(matrix)


def is_many(matrix: PackedMatrix, tokens: int) -> bool:
    """Return whether many_linear() is the fastest."""
    return tokens >= MANY_TOKENS and serves(matrix)


def splits_of(outputs: int, inputs: int, processors: int) -> int:
    """Return among how many blocks of a cluster the inputs of an output are split."""
    splits = 1
    while (
        2 * splits <= min(MOST_SPLITS, inputs // (MULTIPLE * WARPS))
        and splits * (outputs // MULTIPLE) < BUSY * processors
    ):
        splits *= 2
    return splits


def macros(matrix: PackedMatrix) -> dict[str, int]:
    """Return the macros of packed.cuh."""
    format, scale = matrix.format, matrix.global_scale
    kind = 0 if scale is None else 1 if len(scale) == 1 else 2
    return {
        "CODES": CODES[format.codes],
        "SCALES": SCALES[format.scales],
        "GROUP": format.group,
        "GLOBAL": kind,
    }


def shared_bytes(matrix: PackedMatrix) -> int:
    """Return the dynamic shared memory of a block of few.cu."""
    chunk = STAGE_CODES * 8 // (MULTIPLE * matrix.format.bits)
    scales = max(chunk // matrix.format.group, 1) * MULTIPLE * (1 if matrix.format.scales else 2)
    return WARPS * STAGES * (STAGE_CODES + scales)


@cache
def _kernel(source: Path, arch: int, device: int, shared: int, settings: tuple[tuple[str, int], ...]) -> Any:
    from nibble.kernels.nvrtc import Kernel, code_of

    return Kernel(code_of(source, arch, dict(settings)), source.stem, shared)


def few_linear(x_TK: Tensor, matrix: PackedMatrix, *, splits: int | None = None) -> Tensor:
    """Compute x W^T -> [T, N], for at most FEW_TOKENS tokens and a matrix that serves() accepts.

    Args:
        x_TK: bfloat16.
        matrix: In the layout of humming.py.
        splits: Among how many blocks inputs are split, a power of two, in place of the fastest.

    Raises:
        BackendError: The driver refuses the launch.
    """
    (outputs, inputs), gpu = matrix.shape, gpu_of(x_TK.device)
    # The kernel reads pairs.
    if x_TK.stride(1) != 1 or x_TK.stride(0) % 2 or x_TK.data_ptr() % 4:
        x_TK = x_TK.clone(memory_format=torch.contiguous_format)
    out_TN = x_TK.new_empty(len(x_TK), outputs)
    splits = splits or splits_of(outputs, inputs, gpu.processors)
    shared, settings = shared_bytes(matrix), macros(matrix) | {"WARPS": WARPS, "SPLITS": splits}
    kernel = _kernel(FEW, gpu.arch, x_TK.device.index or 0, shared, tuple(settings.items()))
    sizes = len(x_TK), outputs, inputs, x_TK.stride(0)
    _launch(kernel, outputs // MULTIPLE * splits, 32 * WARPS, shared, matrix, (x_TK, out_TN), sizes)
    return out_TN


def many_linear(x_TK: Tensor, matrix: PackedMatrix) -> Tensor:
    """Compute x W^T -> [T, N], some outputs after another; the matrix is one that serves() accepts.

    Args:
        x_TK: bfloat16.
        matrix: In the layout of humming.py.

    Raises:
        BackendError: The driver refuses the launch.
    """
    outputs, inputs = matrix.shape
    count = min(max(SLICE // (2 * inputs * MULTIPLE), 1) * MULTIPLE, outputs)
    out_TN, weight_NK = x_TK.new_empty(len(x_TK), outputs), x_TK.new_empty(count, inputs)
    for first in range(0, outputs, count):
        part_NK = weight_NK[: min(count, outputs - first)]
        unpack(matrix, first, part_NK)
        torch.mm(x_TK, part_NK.T, out=out_TN[:, first : first + len(part_NK)])
    return out_TN


def is_many_gated(matrix: PackedMatrix, tokens: int) -> bool:
    """Return whether many_gated_linear() is the fastest for a matrix whose first half of outputs are gates."""
    return is_many(matrix, tokens) and gated.serves(matrix.shape, matrix.dtype, SM90)


def many_gated_linear(x_TK: Tensor, matrix: PackedMatrix) -> Tensor:
    """Compute silu(x Wg^T) * (x Wu^T) -> [T, N], some outputs after another.

    Args:
        x_TK: bfloat16.
        matrix: In the layout of humming.py, [2N, K], gates first; one that is_many_gated() accepts.

    Raises:
        BackendError: The driver refuses the launch.
    """
    (outputs, inputs), dtype = matrix.shape, x_TK.dtype
    half = outputs // 2
    count = max(SLICE // (2 * dtype.itemsize * inputs * GATED_MULTIPLE), 1) * GATED_MULTIPLE
    out_TN, weight_NK = x_TK.new_empty(len(x_TK), half), x_TK.new_empty(2 * min(count, half), inputs)
    for first in range(0, half, count):
        rows = min(count, half - first)
        part_NK = weight_NK[: 2 * rows]
        for place, own_NK in enumerate(part_NK.split(rows)):
            unpack(matrix, place * half + first, own_NK)
        gated.gated_linear(x_TK, part_NK, out_TN=out_TN[:, first : first + rows])
    return out_TN


def launch_gated(matrix: PackedMatrix) -> None:
    """Launch the kernels of many_gated_linear() for little, where it serves a matrix: a rehearsal compiles them so."""
    if is_many_gated(matrix, MANY_TOKENS):
        x_TK, weight_NK = (
            matrix.codes.new_empty(rows, matrix.shape[1], dtype=matrix.dtype) for rows in (1, UNPACK_SIZE)
        )
        unpack(matrix, 0, weight_NK)
        gated.gated_linear(x_TK, weight_NK)


def unpack(matrix: PackedMatrix, first: int, out_NK: Tensor) -> None:
    """Dequantise the rows of a matrix from `first` on, as many as out [N, K] has; both are multiples of UNPACK_SIZE.

    Raises:
        BackendError: The driver refuses the launch.
    """
    (outputs, inputs), device = matrix.shape, out_NK.device
    kernel = _kernel(UNPACK, gpu_of(device).arch, device.index or 0, 0, tuple(macros(matrix).items()))
    blocks = len(out_NK) // UNPACK_SIZE * (inputs // UNPACK_SIZE)
    _launch(kernel, blocks, 32, 0, matrix, (out_NK,), (first, outputs, inputs))


def _launch(
    kernel: Any,
    blocks: int,
    threads: int,
    shared: int,
    matrix: PackedMatrix,
    others: tuple[Tensor, ...],
    sizes: tuple[int, ...],
) -> None:
    from nibble.kernels.nvrtc import INT, POINTER

    tensors = (matrix.codes, matrix.scale, matrix.global_scale, *others)
    pointers = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    types = (POINTER,) * len(pointers) + (INT,) * len(sizes)
    kernel.launch(blocks, threads, shared, types, (*pointers, *sizes), starts_early=True)

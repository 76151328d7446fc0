"""Products of a few tokens with packed matrices of experts in CUDA C++ (few.cu).

triton.py reads plain matrices as fast as memory, and packed ones at a third of that: a program of it must know its
expert before it loads anything, and multiplies one tile. Here a block takes one tile after another, and while it sums
up the one, codes of the next are on their way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nibble.kernels import cdiv, gpu_of, import_problem
from nibble.kernels.experts.matrices import PackedExperts
from nibble.kernels.weight_formats import WeightFormat

SOURCE = Path(__file__).with_name("few.cu")
FIRST_ARCH = 80
CODES = {"e4m3": 0, "e2m1": 1, "uint4": 2}
SCALES = {"": 0, "e4m3": 1, "e8m0": 2}
COLUMNS = (8, 16)
"""Tokens of an expert that are multiplied at a time."""
SPREAD = 2
"""Times the mean number of an expert's tokens that there is room for."""
WARPS = 4
"""Of a block."""
ROWS, BLOCKS = (32, 64), (5, 3)
"""Outputs that a block multiplies at a time, and blocks of a processor."""
RESERVED = 1 << 10
"""Bytes of shared memory that a block takes beside what it asks for, at most."""
LANES = 4
"""Lanes among which a step's inputs are split, 16 bytes of codes each."""


def serves(x: Tensor, experts_TK: Tensor, matrices: PackedExperts, bias_EN: Tensor | None) -> bool:
    """Return whether the kernel multiplies rows with matrices."""
    if not x.is_cuda or not _has_driver():
        return False
    format, gpu, (experts, outputs, inputs) = matrices.format, gpu_of(x.device), matrices.shape
    tile = tile_of(format, (experts, outputs), len(experts_TK), experts_TK.numel())
    return (
        gpu.arch >= FIRST_ARCH
        and x.dtype == matrices.dtype == torch.bfloat16
        and (bias_EN is None or (bias_EN.dtype == x.dtype and bias_EN.stride(1) == 1))
        and scales_fit(format)
        and row_fits(format, inputs)
        and outputs % ROWS[0] == 0
        and shared_bytes(format, tile, experts_TK.numel(), experts) + RESERVED <= gpu.memory
    )


def row_fits(format: WeightFormat, inputs: int) -> bool:
    """Return whether a row of codes is whole pieces of 16 bytes."""
    return inputs * format.bits % 128 == 0


def scales_fit(format: WeightFormat) -> bool:
    """Return whether scales are of single inputs' codes, or of all that are multiplied in a step."""
    return bool(format.scales) or format.group % (LANES * 128 // format.bits) == 0


@cache
def _has_driver() -> bool:
    return not import_problem("cuda.bindings")


def columns_of(tokens: int, choices: int, experts: int) -> int:
    """Return how many tokens of an expert are multiplied at a time."""
    tokens_each = min(tokens, cdiv(choices * SPREAD, experts))
    return next((n for n in COLUMNS if n >= tokens_each), COLUMNS[-1])


@dataclass(frozen=True, slots=True)
class Tile:
    """How a launch is tiled."""

    rows: int
    """Outputs."""
    columns: int
    """Tokens of an expert."""
    blocks: int
    """Of a processor, at most."""
    stages: int = 2
    """Steps that are copied at a time."""


def tile_of(format: WeightFormat, shape: tuple[int, int], tokens: int, choices: int) -> Tile:
    """Choose the tile: of codes that take longer to unpack than to read, as wide as can be.

    Args:
        format: Of the matrices.
        shape: Experts, and outputs of each.
        tokens: How many there are.
        choices: Experts that they chose, in all.
    """
    experts, outputs = shape
    is_wide = format.bits == 4 and outputs % ROWS[-1] == 0
    return Tile(ROWS[is_wide], columns_of(tokens, choices, experts), BLOCKS[is_wide])


def shared_bytes(format: WeightFormat, tile: Tile, choices: int, experts: int) -> int:
    """Return a block's dynamic shared memory: stages, sums, five numbers of a choice and one of an expert."""
    own, piece = tile.rows // 8, 128 // format.bits
    scales = own * (cdiv(piece, format.group) if format.scales else 2)
    stages = tile.stages * WARPS * 512 * (own + cdiv(scales, 16))
    return stages + 4 * WARPS * tile.columns * (tile.rows + 4) + 20 * choices + 4 * experts


def resident_blocks(memory: int, shared: int, tile: Tile) -> int:
    """Return how many blocks a processor has at a time, of its shared memory in bytes and that of a block."""
    return max(min(memory // (shared + RESERVED), tile.blocks), 1)


def macros(format: WeightFormat, tile: Tile) -> dict[str, int]:
    """Return the macros of few.cu."""
    names = {"CODES": CODES[format.codes], "SCALES": SCALES[format.scales], "GROUP": format.group}
    return {**names, "COLUMNS": tile.columns, "ROWS": tile.rows, "WARPS": WARPS, "STAGES": tile.stages}


@cache
def _kernel(arch: int, device: int, shared: int, settings: tuple[tuple[str, int], ...]) -> Any:
    from nibble.kernels.nvrtc import Kernel, cubin

    return Kernel(cubin(SOURCE, arch, dict(settings)), SOURCE.stem, shared)


def few_product(
    x: Tensor, experts_TK: Tensor, matrices: PackedExperts, bias_EN: Tensor | None, *,
    places_S: Tensor | None = None, tile: Tile | None = None,
) -> Tensor:  # fmt: skip
    """Multiply the row of each choice with the matrix of its expert, as naive.product defines it, in one launch.

    Args:
        x: bfloat16 [T, I] or [S, I]. Where it has a row for each choice, experts must have been written before the
            kernel that writes x began.
        experts_TK: int64, the experts that tokens chose; rows of E and more hold anything.
        matrices: What serves() accepts.
        bias_EN: Added to each row, if there is one.
        places_S: Int64: it receives which row of the result each choice has.
        tile: Another tile than the fastest.

    Raises:
        BackendError: The driver refuses the launch.
    """
    from nibble.kernels.nvrtc import INT, POINTER

    (tokens, top_k), (experts, outputs, inputs) = experts_TK.shape, matrices.shape
    choices, gpu = tokens * top_k, gpu_of(x.device)
    out_SN = x.new_empty(choices, outputs)
    if not choices:
        return out_SN
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    is_each, is_early = len(x) != tokens, len(x) != tokens and experts_TK.is_contiguous()
    tile = tile or tile_of(matrices.format, (experts, outputs), tokens, choices)
    most, settings = gpu.memory - RESERVED, tuple(macros(matrices.format, tile).items())
    kernel = _kernel(gpu.arch, x.device.index or 0, most, settings)
    tensors = (x, experts_TK.contiguous(), matrices.codes, matrices.scale, matrices.global_scale, bias_EN, out_SN,
               places_S)  # fmt: skip
    pointers = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    sizes = (choices, top_k, experts, outputs, inputs, x.stride(0), 0 if bias_EN is None else bias_EN.stride(0),
             int(is_each), int(is_early))  # fmt: skip
    shared = shared_bytes(matrices.format, tile, choices, experts)
    resident = gpu.processors * resident_blocks(gpu.memory, shared, tile)
    blocks = min(choices * (outputs // tile.rows), resident)
    types = (POINTER,) * len(pointers) + (INT,) * len(sizes)
    kernel.launch(blocks, 32 * WARPS, shared, types, (*pointers, *sizes), starts_early=True)
    return out_SN

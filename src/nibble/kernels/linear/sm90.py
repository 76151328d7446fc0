"""Products of few rows with large weights on SM90, gated ones too, and FP8 by FP8 (linear_sm90.cu).

Shape suffixes: T rows of x, K inputs, N outputs, rows of the weight, G groups of inputs, B blocks of outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nibble.errors import BackendError
from nibble.kernels import MMA_ROWS, SM90, cdiv, gpu_of, import_problem, next_power_of_2

if TYPE_CHECKING:
    from nibble.kernels.nvrtc import Kernel

SOURCE = Path(__file__).with_name("linear_sm90.cu")
MOST_ROWS, FEWEST_ROWS = 128, 8
"""Rows of x of a launch at most, and of the smallest tile."""
GROUP, INPUTS = 64, 64
"""Rows of the weight of a warpgroup, and inputs of a stage."""
ALIGNED = 8
"""Values of 16 bytes, of which the tensor copy engine wants whole ones."""
GROUPS, SPLITS, MOST_SPLITS = (1, 2, 4), (1, 2, 4, 8), 8
"""Warpgroups that a block may have, sizes of clusters that fill GPCs, and the largest."""
SCALED, MOST_SCALED_ROWS = 128, 64
"""Outputs and inputs of what has a scale in FP8, and rows of x at most there."""
ALIGNMENT, RESERVED, PROCESSOR = 1024, 1024, 228 << 10
"""Bytes of shared memory: to align stages, of a block for the system and likewise for barriers, and of a processor."""


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut."""

    groups: int
    """Warpgroups of a block, of 64 rows of the weight each."""
    splits: int
    """Parts of K, which the blocks of a cluster have."""
    stages: int
    """Steps of K that are loaded ahead."""

    def stage_bytes(self, rows: int) -> int:
        """Return the bytes of a stage for so many rows of x."""
        return 2 * INPUTS * (GROUP * self.groups + padded(rows))

    def shared(self, rows: int) -> int:
        """Return the bytes of shared memory that a block asks for."""
        return self.stages * self.stage_bytes(rows) + ALIGNMENT

    def per_processor(self, rows: int) -> int:
        """Return how many blocks a multiprocessor has room for."""
        most = 2 if self.groups < max(GROUPS) else 1  # as the kernel's bounds have it, but those of FP8
        return min(PROCESSOR // (self.shared(rows) + 2 * RESERVED), most)

    def fits(self, inputs: int, rows: int) -> bool:
        """Return whether a block has room, for its sums too, and each of a cluster a step of K."""
        sums = 4 * padded(rows) * (GROUP * self.groups + 4)
        return (
            self.groups in GROUPS
            and 1 <= self.splits <= min(MOST_SPLITS, cdiv(inputs, INPUTS))
            and self.stages >= 2  # one is multiplied while the next is filled
            and sums <= self.stages * self.stage_bytes(rows)
            and self.per_processor(rows) > 0
        )


def padded(rows: int) -> int:
    """Return the rows of a tile of x."""
    return max(next_power_of_2(rows), FEWEST_ROWS)


def serves(shape: Sequence[int], dtype: torch.dtype, arch: int) -> bool:
    """Return whether the kernel multiplies with a contiguous weight, gated too if it has 2N rows with N such a number.

    Args:
        shape: N and K.
        dtype: Of the weight, and of what it is multiplied with.
        arch: Compute capability, as GPU.arch has it.
    """
    outputs, inputs = shape
    return (
        arch == SM90
        and dtype == torch.bfloat16
        and outputs > 0 == outputs % ALIGNED
        and inputs > 0 == inputs % ALIGNED
        and not import_problem("cuda.bindings")
    )


LONG = 8192
"""Inputs that are few at most; of more, more blocks read the weight together."""
FULL = 0.9
"""Blocks for each multiprocessor from which on all are about busy."""
BUSY = 0.8
"""Blocks of 256 rows of the weight for each multiprocessor from which on they are read as fast as narrower ones."""
FEW_BLOCKS, MANY_BLOCKS = 64, 128
"""Blocks that read at the speed of memory, and those that do so for long."""


@cache
def tile_of(outputs: int, inputs: int, rows: int, processors: int) -> Tile:
    """Choose a tile: the fastest on an H200, or nearly, of those of benchmarks/linear.py.

    Where blocks of one warpgroup are about as many as multiprocessors, and K is cut, it is the one that was fastest in
    chains of layers (benchmarks/product_chains.py, weights of 4096 outputs): of many inputs from more than 16 rows on.

    Args:
        outputs: Rows of the weight, of both halves if gated.
        inputs: K.
        rows: Rows of x.
        processors: Multiprocessors of the GPU.

    Raises:
        BackendError: No tile fits.
    """
    columns, narrow_columns = cdiv(outputs, 2 * GROUP), cdiv(outputs, GROUP)
    splits = max(
        (n for n in SPLITS if n * narrow_columns <= processors and n <= cdiv(inputs, INPUTS)), default=1
    )
    is_full = splits > 1 and splits * narrow_columns >= FULL * processors
    if is_full and (inputs <= LONG or rows > MMA_ROWS):
        tile = _keep_alone(Tile(1, splits, (7 if rows > 64 else 8) if inputs > LONG else 6), rows)
    elif columns > processors:
        # All blocks at a time: two of a multiprocessor, or a wide one, which reads rows half as often. For 65 rows and
        # more that is slower for a moment and faster for long, at the limit of power, if nearly all of them have one.
        is_busy = BUSY * processors <= cdiv(outputs, 4 * GROUP) <= processors
        if rows > 64:
            tile = Tile(4, 1, 4) if is_busy else Tile(2, 1, 3)
        else:
            tile = Tile(4, 1, 5) if rows > 32 else Tile(2, 1, 5 if rows <= MMA_ROWS else 4)
    else:
        blocks = MANY_BLOCKS if inputs > LONG and rows <= 64 else FEW_BLOCKS
        splits = next((n for n in SPLITS if n * columns >= blocks), MOST_SPLITS)
        splits = min(splits, max(n for n in SPLITS if n <= cdiv(inputs, INPUTS)))
        tile = Tile(2, splits, 4 if splits > 2 else 5)
        if splits * columns <= processors:
            tile = _keep_alone(tile, rows)
    if not tile.fits(inputs, rows):
        raise BackendError(f"{rows} rows of {inputs} inputs do not fit into {tile} on SM90")
    return tile


def _keep_alone(tile: Tile, rows: int) -> Tile:
    """Return a tile, of more stages where it takes these to keep other blocks out of the block's multiprocessor.

    Blocks start before the kernel in front has ended, on multiprocessors that are free by then: there would be two of
    them, and later none on others. A step of 32 rows takes 5.35 ms with 10 stages of one warpgroup where it takes 5.44
    with 8 (Llama-3.1-8B, one H200).
    """
    # Tiles of few rows are as they were measured.
    while rows > MMA_ROWS and tile.per_processor(rows) > 1:
        tile = replace(tile, stages=tile.stages + 1)
    return tile


def linear(
    x: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    gated: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """Compute x W^T + b, or of it silu(the first half) * the second.

    Args:
        x: [..., K] in bfloat16, of MOST_ROWS rows at most.
        weight_NK: In bfloat16; contiguous, from a multiple of 16 bytes on, and not written by any kernel.
        bias_N: Added to each row, if there is one; not written by any kernel either.
        gated: The halves of outputs are joined.
        tile: Another tile than tile_of() chooses.

    Returns:
        [..., N] in bfloat16, [..., N / 2] if gated.

    Raises:
        BackendError: There are too many rows, the tile does not fit, or the driver refuses the tensors or the launch.
    """
    from nibble.kernels.tensor_map import copyable, tensor_map

    (n, inputs), device = weight_NK.shape, weight_NK.device
    outputs = n // 2 if gated else n
    out = x.new_empty(*x.shape[:-1], outputs)
    if not out.numel():
        return out
    x_TK = copyable(x.reshape(-1, inputs))
    rows = len(x_TK)
    tile = tile or tile_of(n, inputs, rows, gpu_of(device).processors)
    if rows > MOST_ROWS or not tile.fits(inputs, rows):
        raise BackendError(f"{rows} rows of {inputs} inputs do not fit into {tile} on SM90")
    is_known = bias_N is None or (bias_N.is_contiguous() and not bias_N.data_ptr() % 8)
    if bias_N is not None and not is_known:
        bias_N = bias_N.clone(memory_format=torch.contiguous_format)
    of_block = GROUP * tile.groups // (2 if gated else 1)
    maps = tensor_map(x_TK, (padded(rows), INPUTS)), tensor_map(weight_NK, (of_block, INPUTS))
    pointers = 0 if bias_N is None else bias_N.data_ptr(), out.data_ptr()
    arguments = (*maps, *pointers, rows, outputs, cdiv(inputs, INPUTS), 0, 0)
    kernel = _kernel(device, padded(rows), tile, gated)
    _launch(kernel, cdiv(outputs, of_block), tile, rows, arguments, starts_early=is_known)
    return out


def scaled_linear(
    codes_TK: Tensor,
    scale_GT: Tensor,
    weight_NK: Tensor,
    weight_scale_BG: Tensor,
    dtype: torch.dtype,
    *,
    tile: Tile | None = None,
) -> Tensor:
    """Compute x W^T of E4M3 codes with float32 scales.

    Args:
        codes_TK: Of x, MOST_SCALED_ROWS rows at most; contiguous.
        scale_GT: Of 128 inputs of a row each; contiguous.
        weight_NK: Codes of W as bytes, contiguous, with whole blocks of 128 x 128; not written by any kernel.
        weight_scale_BG: Of these blocks, likewise.
        dtype: Of the result, bfloat16.
        tile: Another tile than that of half as many inputs of 16 bits, which are as many bytes.

    Returns:
        [T, N].

    Raises:
        BackendError: There are too many rows, the tile does not fit, or the driver refuses the tensors or the launch.
    """
    from nibble.kernels.tensor_map import tensor_map

    (outputs, inputs), rows, device = weight_NK.shape, len(codes_TK), weight_NK.device
    out_TN = weight_NK.new_empty(rows, outputs, dtype=dtype)
    if not out_TN.numel():
        return out_TN
    tile = tile or tile_of(outputs, inputs // 2, rows, gpu_of(device).processors)
    if rows > MOST_SCALED_ROWS or dtype != torch.bfloat16 or not tile.fits(inputs // 2, rows):
        raise BackendError(f"{rows} rows of {inputs} inputs in FP8, {dtype}, do not fit into {tile} on SM90")
    of_block = GROUP * tile.groups
    maps = (
        tensor_map(codes_TK.view(torch.uint8), (padded(rows), SCALED)),
        tensor_map(weight_NK, (of_block, SCALED)),
    )
    sizes, scales = (rows, outputs, inputs // SCALED), (scale_GT.data_ptr(), weight_scale_BG.data_ptr())
    arguments = (*maps, 0, out_TN.data_ptr(), *sizes, *scales)
    kernel = _kernel(device, padded(rows), tile, gated=False, scaled=True)
    _launch(kernel, cdiv(outputs, of_block), tile, rows, arguments, starts_early=True)
    return out_TN


def _launch(
    kernel: Kernel, columns: int, tile: Tile, rows: int, arguments: tuple[Any, ...], *, starts_early: bool
) -> None:
    """Launch clusters for so many columns of tiles."""
    from nibble.kernels.nvrtc import INT, POINTER

    types = None, None, POINTER, POINTER, INT, INT, INT, POINTER, POINTER
    blocks, threads = columns * tile.splits, 128 * tile.groups + 32
    kernel.launch(blocks, threads, tile.shared(rows), types, arguments, starts_early=starts_early)


def macros(rows: int, tile: Tile, gated: bool = False, scaled: bool = False) -> dict[str, int]:
    """Return the macros of linear_sm90.cu; scaled: both sides are FP8."""
    return {
        "ROWS": padded(rows),
        "GROUPS": tile.groups,
        "SPLITS": tile.splits,
        "STAGES": tile.stages,
        "GATED": int(gated),
        "FP8": int(scaled),
    }


@cache
def _kernel(device: torch.device, rows: int, tile: Tile, gated: bool, scaled: bool = False) -> Kernel:
    from nibble.kernels.nvrtc import Kernel, code_of

    code = code_of(SOURCE, f"{SM90}a", macros(rows, tile, gated, scaled))
    return Kernel(code, "linear", tile.shared(rows))

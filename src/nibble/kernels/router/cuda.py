"""Routes in CUDA C++ (route.cu)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nibble.kernels import MMA_ROWS, SM90, cdiv, gpu_of, import_problem, triton_present

SOURCE, LOGITS = (Path(__file__).with_name(name) for name in ("route.cu", "logits.cu"))
WARPS, TOKENS = 16, 8
"""Of a block, and of a cluster."""
FEW_TOKENS = 64
"""Up to so many are multiplied here, and more by a library."""
MOST_BLOCKS, MOST_UNITS, UNIT = 8, 8, 32
"""Blocks of a cluster at most, and units of inputs whose weights a warp has room for in registers."""
ROW_THREADS, WARP = 128, 32
"""Threads that multiply a row for a single token, and those that clear its logit."""
MOST_CHOSEN = 32
"""A lane keeps each."""
MOST_EXPERTS = 1024
"""A warp keeps all logits of a token."""
ALIGNED = 8
"""Values of a vector that libraries store."""
NARROW_TOKENS = 16
"""Up to so many kernels/linear multiplies with a matrix that is too large for a cluster."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How a matrix is spread."""

    tiles: int
    """Of 16 experts, of a block."""
    cluster: int
    """Blocks."""
    units: int
    """Of inputs, of a warp."""


def shape_of(experts: int, inputs: int) -> Shape | None:
    """Return how a matrix is spread over blocks; None where registers have no room for it."""
    tiles = _tiles(experts)
    units = cdiv(cdiv(inputs, UNIT), WARPS // tiles) if tiles <= WARPS else MOST_UNITS + 1
    return Shape(tiles, cdiv(experts, MMA_ROWS * tiles), units) if units <= MOST_UNITS else None


def _tiles(experts: int) -> int:
    tiles = 1
    while cdiv(experts, MMA_ROWS * tiles) > MOST_BLOCKS:
        tiles *= 2
    return tiles


def choice_shape(experts: int) -> Shape:
    """Return the shape with which kernels are compiled that only choose."""
    tiles = _tiles(experts)
    return Shape(tiles, cdiv(experts, MMA_ROWS * tiles), 1)


def serves(weight_EI: Tensor, top_k: int) -> bool:
    """Return whether the kernels choose among a router's experts."""
    experts, inputs = weight_EI.shape
    return (
        weight_EI.is_cuda
        and gpu_of(weight_EI.device).arch == SM90
        and weight_EI.dtype == torch.bfloat16
        and weight_EI.is_contiguous()
        and inputs % 8 == 0
        and 0 < top_k <= min(experts, MOST_CHOSEN)
        and experts <= MOST_EXPERTS
        and _has_driver()
    )


@cache
def _has_driver() -> bool:
    return not import_problem("cuda.bindings")


def macros(shape: Shape) -> dict[str, int]:
    """Return the macros of route.cu."""
    return {"TILES": shape.tiles, "CLUSTER": shape.cluster, "UNITS": shape.units}


def vectors_of(inputs: int) -> int:
    """Return the macro of logits.cu: how many vectors of 8 inputs a thread multiplies."""
    return cdiv(inputs, 8 * ROW_THREADS)


@cache
def _logits_kernel(arch: int, device: int, vectors: int) -> Any:
    from nibble.kernels.nvrtc import Kernel, code_of

    # The kernel behind it starts beside it.
    return Kernel(code_of(LOGITS, arch, {"VECTORS": vectors}), "logits_of_token", 0, prefers_shared=True)


def logits_of_token(x_1I: Tensor, weight_EI: Tensor, bias_E: Tensor | None) -> Tensor:
    """Return a token's logits [1, E] of a matrix that serves() accepts, for kernels just behind that choose themselves.

    Raises:
        BackendError: The driver refuses the launch.
    """
    from nibble.kernels.nvrtc import INT, POINTER

    rows, inputs = weight_EI.shape
    logits_1E = x_1I.new_empty(1, rows)
    tensors = (x_1I, weight_EI, bias_E, logits_1E)
    pointers = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    kernel = _logits_kernel(gpu_of(x_1I.device).arch, x_1I.device.index or 0, vectors_of(inputs))
    types = (*(POINTER,) * len(pointers), INT)
    kernel.launch(rows, ROW_THREADS + WARP, 0, types, (*pointers, inputs), starts_early=True)
    return logits_1E


@cache
def _kernel(name: str, arch: int, device: int, shape: Shape) -> Any:
    from nibble.kernels.nvrtc import Kernel, code_of

    return Kernel(code_of(SOURCE, arch, macros(shape)), name, 0)


def route(
    x_TI: Tensor,
    weight_EI: Tensor,
    bias_E: Tensor | None,
    top_k: int,
    is_normalized: bool,
    has_shared: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose experts as naive.route() does, with a matrix that serves() accepts.

    Raises:
        BackendError: The driver refuses the launch.
    """
    from nibble.kernels.nvrtc import INT, POINTER

    tokens, (rows, inputs) = len(x_TI), weight_EI.shape
    shape = shape_of(rows, inputs) if tokens <= FEW_TOKENS else None
    logits_TE = x_TI.new_empty(tokens, rows) if shape else _product(x_TI, weight_EI, bias_E)
    weights_TK = x_TI.new_empty(tokens, top_k + has_shared)
    experts_TK = torch.empty(weights_TK.shape, dtype=torch.int64, device=x_TI.device)
    results = logits_TE, weights_TK, experts_TK
    if not tokens:
        return results
    tensors: tuple[Tensor | None, ...] = results
    choice = top_k, int(is_normalized), int(has_shared)
    sizes: tuple[int, ...] = tokens, rows - has_shared, *choice
    name, blocks, threads = "choose_of_logits", cdiv(tokens, TOKENS), 32 * TOKENS
    if shape:
        if x_TI.stride(1) != 1 or x_TI.stride(0) % 8 or x_TI.data_ptr() % 16:
            x_TI = x_TI.clone(memory_format=torch.contiguous_format)
        tensors = (x_TI, weight_EI, bias_E, *results)
        sizes = tokens, rows - has_shared, inputs, x_TI.stride(0), *choice
        name, blocks, threads = "route", blocks * shape.cluster, 32 * WARPS
    pointers = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    types = (POINTER,) * len(pointers) + (INT,) * len(sizes)
    kernel = _kernel(name, gpu_of(x_TI.device).arch, x_TI.device.index or 0, shape or choice_shape(rows))
    kernel.launch(blocks, threads, 0, types, (*pointers, *sizes), starts_early=True)
    return results


def _product(x_TI: Tensor, weight_EI: Tensor, bias_E: Tensor | None) -> Tensor:
    """Return logits, of few tokens by a kernel that reads a row of the matrix in each of its programs."""
    if 0 < len(x_TI) <= NARROW_TOKENS and triton_present():
        from nibble.kernels.linear.triton import narrow_linear

        return narrow_linear(x_TI, weight_EI, bias_E)
    odd = len(weight_EI) % ALIGNED
    if not odd or bias_E is not None:
        return F.linear(x_TI, weight_EI, bias_E)
    # Rows of results that are not whole vectors take a library several times as long (252 us for 8192 tokens and 513
    # rows of 2,048 on an H100).
    parts = weight_EI.split((len(weight_EI) - odd, odd))
    return torch.cat([F.linear(x_TI, part) for part in parts if len(part)], 1)

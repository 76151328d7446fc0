"""A layer of experts for a single token in one launch of CUDA C++ (one.cu), with its router if kernels know it.

Launches one behind the other wait for each other longer than a token's experts take to read: each must end before the
next one knows what it reads. Here a block of each multiprocessor reads all its codes without a pause.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nibble.kernels import SM90, cdiv, gpu_of, import_problem
from nibble.kernels.experts.cuda import CODES, GATES, PLAIN, SCALES, scales_fit
from nibble.kernels.experts.gate import Gate
from nibble.kernels.experts.matrices import PackedExperts
from nibble.kernels.weight_formats import WeightFormat

SOURCE = Path(__file__).with_name("one.cu")
WARPS = {4: 12, 8: 8, 16: 8}
"""That multiply, by bits of a code."""
ROUTER_WARPS = 4
MOST_SLOTS, MOST_EXPERTS = 8, 512
MOST_STAGES, LEAST_STAGES = 16, 2
MOST_PAIRS = 72
"""Registers with inputs, of a thread."""
ROWS, HALF, LANES = 16, 8, 4
"""Outputs of a tile and of half of one; lanes that share inputs."""
EMPTY = -1


@dataclass(frozen=True, slots=True)
class Shape:
    """What a kernel is compiled for."""

    format: WeightFormat
    gate: str
    hidden: int
    inner: int
    slots: int
    """Experts of a token."""
    experts: int
    """Of which the router chooses; 0 where choices are there."""
    blocks: int
    warps: int

    def tile_bytes(self, inputs: int) -> int:
        """Return the bytes of a tile's codes and scales in shared memory."""
        scales = 0
        if self.format != PLAIN:
            scales = (
                cdiv(
                    self.format.groups(inputs) * HALF * (1 if self.format.scales else 2),
                    16,
                )
                * 16
            )
        return cdiv(2 * (HALF * inputs * self.format.bits // 8 + scales), 128) * 128

    @property
    def stage_bytes(self) -> int:
        """Bytes of what is copied at a time."""
        return max(self.tile_bytes(self.hidden), self.tile_bytes(self.inner))

    @property
    def most(self) -> tuple[int, int]:
        """Tiles of the first product, and units of the layer's outputs, of a block at most."""
        return cdiv(self.slots * self.inner // HALF, self.blocks), cdiv(self.hidden // HALF, self.blocks)

    @property
    def static_bytes(self) -> int:
        """Shared memory that the kernel has beside its stages, at most."""
        tiles, units = self.most
        sums = (tiles + units * cdiv(self.slots, 2)) * self.warps * ROWS
        return 4 * (sums + self.slots * (HALF * units + 2) + self.warps) + 16 * MOST_STAGES + 256

    @property
    def pairs(self) -> int:
        """Registers with inputs, of a thread."""
        piece = 128 // self.format.bits
        quads = cdiv(max(self.hidden, self.inner), piece * LANES)
        return cdiv(quads, self.warps) * piece // 2

    def stages(self, memory: int) -> int:
        """Return how many are copied at a time, of a processor's shared memory in bytes."""
        return min((memory - self.static_bytes) // self.stage_bytes, MOST_STAGES)

    def macros(self, memory: int) -> dict[str, int]:
        """Return the macros of one.cu."""
        format = self.format
        return {
            "CODES": CODES[format.codes], "SCALES": SCALES[format.scales], "GROUP": format.group,
            "GATE": GATES[self.gate], "HIDDEN": self.hidden, "INNER": self.inner, "SLOTS": self.slots,
            "EXPERTS": self.experts, "BLOCKS": self.blocks, "WARPS": self.warps, "STAGES": self.stages(memory),
        }  # fmt: skip


def shape_of(
    x: Tensor,
    top_k: int,
    up: PackedExperts,
    down: PackedExperts,
    gate: Gate,
    *,
    routes: bool,
) -> Shape:
    """Return what the kernel for these arguments is compiled for."""
    return Shape(up.format, gate.kind, down.shape[1], down.shape[2], top_k, up.shape[0] if routes else 0,
                 gpu_of(x.device).processors, WARPS[up.format.bits])  # fmt: skip


def fits(shape: Shape, memory: int) -> bool:
    """Return whether there is a kernel of a shape, on a GPU with so much shared memory."""
    tiles, units = shape.most
    bits = shape.format.bits
    return (
        0 < shape.slots <= MOST_SLOTS
        and shape.experts <= MOST_EXPERTS
        and not any(size % HALF or size * bits % 128 for size in (shape.hidden, shape.inner))
        and scales_fit(shape.format)
        and shape.slots * shape.inner // HALF >= shape.blocks
        and units * HALF * shape.slots <= 32 * shape.warps
        and shape.pairs <= MOST_PAIRS
        and shape.stages(memory) >= LEAST_STAGES
        and tiles > 0
    )


def serves(
    x: Tensor, top_k: int, up: PackedExperts, up_bias: Tensor | None, down: PackedExperts,
    down_bias: Tensor | None, gate: Gate, *, router: Tensor | None = None,
) -> bool:  # fmt: skip
    """Return whether the kernel computes a layer."""
    if not x.is_cuda or len(x) != 1 or gpu_of(x.device).arch != SM90 or not _has_driver():
        return False
    shape = shape_of(x, top_k, up, down, gate, routes=router is not None)
    biases = (bias for bias in (up_bias, down_bias) if bias is not None)
    return (
        x.dtype == up.dtype == down.dtype == torch.bfloat16
        and up.format == down.format
        and (router is None or (router.dtype == x.dtype and router.is_contiguous()))
        and all(bias.dtype == x.dtype and bias.stride(1) == 1 for bias in biases)
        and fits(shape, gpu_of(x.device).memory)
        and _state(shape, up.codes) is not None
    )


@cache
def _has_driver() -> bool:
    return not import_problem("cuda.bindings")


@cache
def _kernel(arch: int, device: int, shared: int, shape: Shape, memory: int) -> Any:
    from nibble.kernels.nvrtc import Kernel, cubin

    return Kernel(cubin(SOURCE, arch, shape.macros(memory)), SOURCE.stem, shared)


_states: dict[tuple[Shape, torch.device, int], tuple[Tensor, Tensor]] = {}


def _state(shape: Shape, codes: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return what blocks of a kernel share from launch to launch; None where it cannot be made now.

    Each layer has its own, so that layers of two models may run at a time.
    """
    key = shape, codes.device, codes.data_ptr()
    if key not in _states:
        if codes.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        state = torch.full((4 + 2 * max(shape.experts, 1),), EMPTY, dtype=torch.int32, device=codes.device)
        state[0] = 0
        values = torch.full((2, shape.slots, shape.inner), EMPTY, dtype=torch.int16, device=codes.device)
        _states[key] = state, values
    return _states[key]


def layer(
    x: Tensor, experts_TK: Tensor | None, weights_TK: Tensor | None, up: PackedExperts, up_bias: Tensor | None,
    down: PackedExperts, down_bias: Tensor | None, gate: Gate, *, top_k: int, router: Tensor | None = None,
    router_bias: Tensor | None = None, is_normalized: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute a layer of experts that serves() accepts, for one token.

    Args:
        x: bfloat16 [1, I].
        experts_TK: int64, the experts that it chose; None with a router.
        weights_TK: Their weights; None with a router.
        up: First matrices.
        up_bias: Their biases, if there are some.
        down: Second matrices.
        down_bias: Their biases, if there are some.
        gate: What becomes of the outputs of the first.
        top_k: How many experts the token has.
        router: The router's matrix, where the kernel chooses.
        router_bias: Added to logits, if there is one.
        is_normalized: As in kernels/router.

    Returns:
        Logits, weights and experts that were chosen, empty without a router, and the result [1, I].

    Raises:
        BackendError: The driver refuses the launch.
    """
    from nibble.kernels.nvrtc import FLOAT, INT, POINTER

    shape, gpu = (
        shape_of(x, top_k, up, down, gate, routes=router is not None),
        gpu_of(x.device),
    )
    launch_state = _state(shape, up.codes)
    assert launch_state
    state, values = launch_state
    if x.stride(1) != 1 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    out = torch.empty_like(x)
    logits, here = (
        x.new_empty(1, shape.experts),
        x.new_empty(1, top_k if shape.experts else 0),
    )
    chosen_here = torch.empty(here.shape, dtype=torch.int64, device=x.device)
    tensors = (x, router, router_bias, logits, None if experts_TK is None else experts_TK.contiguous(),
               None if weights_TK is None else weights_TK.contiguous(), chosen_here, here, up.codes, up.scale,
               up.global_scale, up_bias, down.codes, down.scale, down.global_scale, down_bias, out, state,
               values)  # fmt: skip
    pointers = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    strides = (0 if bias is None else bias.stride(0) for bias in (up_bias, down_bias))
    is_float = weights_TK is not None and weights_TK.dtype == torch.float32
    sizes = (up.shape[0], *strides, int(is_float), int(is_normalized))
    types = (*(POINTER,) * len(pointers), *(INT,) * len(sizes), FLOAT, FLOAT)
    shared = shape.stages(gpu.memory) * shape.stage_bytes
    kernel = _kernel(gpu.arch, x.device.index or 0, shared, shape, gpu.memory)
    arguments = (*pointers, *sizes, gate.limit, gate.factor)
    kernel.launch(
        shape.blocks,
        32 * (shape.warps + 1),
        shared,
        types,
        arguments,
        starts_early=True,
    )
    return logits, here, chosen_here, out

"""Products of a few tokens with packed matrices of experts in CUDA C++ (few.cu).

triton.py reads plain matrices as fast as memory, and packed ones at a third of that: a program of it must know its
expert before it loads anything, and multiplies one tile. Here a block takes one tile after another, and while it sums
up the one, codes of the next are on their way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nibble.kernels import SM90, cdiv, gpu_of, import_problem
from nibble.kernels.experts.gate import CLAMPED, SILU, Gate
from nibble.kernels.experts.matrices import PackedExperts
from nibble.kernels.router import cuda as router
from nibble.kernels.weight_formats import WeightFormat

SOURCE = Path(__file__).with_name("few.cu")
FIRST_ARCH = 80
CODES = {"e4m3": 0, "e2m1": 1, "uint4": 2, "bfloat16": 3}
SCALES = {"": 0, "e4m3": 1, "e8m0": 2}
COLUMNS = (8, 16)
"""Tokens of an expert that are multiplied at a time."""
SPREAD = 2
"""Times the mean number of an expert's tokens that there is room for."""
WARPS = 4
"""Of a block."""
ROWS, BLOCKS = (32, 64), (5, 3)
"""Outputs that a block multiplies at a time, and blocks of a processor."""
MOST_STAGES = 6, 4
"""Steps that are copied at a time for a single token, at most, by the first product and the second."""
RESERVED = 1 << 10
"""Bytes of shared memory that a block takes beside what it asks for, at most."""
LANES = 4
"""Lanes among which a step's inputs are split, 16 bytes of codes each."""
GATES = {"": 0, SILU: 1, CLAMPED: 2}
MOST_COMBINED = 8
"""Choices of a single token whose outputs blocks of a cluster sum up, at most."""
PLAIN = WeightFormat("bfloat16")
"""The format of matrices that are not packed."""
PLAIN_TOKENS = 64
"""Tokens up to which the kernel is faster with plain matrices than triton.py."""


def matrices_of(weight: Tensor | PackedExperts, tokens: int) -> PackedExperts | None:
    """Return matrices as the kernel takes them, plain ones as codes that are values; None where it is not faster."""
    if isinstance(weight, PackedExperts):
        return weight
    if weight.dtype != torch.bfloat16 or not weight.is_contiguous() or tokens > PLAIN_TOKENS:
        return None
    return PackedExperts(PLAIN, weight.view(torch.int16), weight, weight.dtype)


def serves(x: Tensor, choices: tuple[int, int], matrices: PackedExperts, bias_EN: Tensor | None) -> bool:
    """Return whether the kernel multiplies rows with matrices, for so many tokens and choices of each."""
    if not x.is_cuda or not _has_driver():
        return False
    format, gpu, (experts, outputs, inputs) = (
        matrices.format,
        gpu_of(x.device),
        matrices.shape,
    )
    tile = _tile(x, choices, matrices)
    return (
        gpu.arch >= FIRST_ARCH
        and x.dtype == matrices.dtype == torch.bfloat16
        and (bias_EN is None or (bias_EN.dtype == x.dtype and bias_EN.stride(1) == 1))
        and scales_fit(format)
        and row_fits(format, inputs)
        and outputs % tile.rows == 0
        and max(
            shared_bytes(Use(format, (outputs, inputs), tile, is_one=is_one), math.prod(choices), experts)
            for is_one in (False, True)
        )
        + RESERVED
        <= gpu.memory
    )


def row_fits(format: WeightFormat, inputs: int) -> bool:
    """Return whether a row of codes is whole pieces of 16 bytes."""
    return inputs * format.bits % 128 == 0


def scales_fit(format: WeightFormat) -> bool:
    """Return whether scales are of single inputs' codes, or of all that are multiplied in a step."""
    is_step = format.group % (LANES * 128 // format.bits) == 0
    return format == PLAIN or bool(format.scales) or is_step


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
    start: int = 0
    """Of a product that chooses experts: the step of a warp at which the next product may start."""


@dataclass(frozen=True, slots=True)
class Use:
    """What a launch is for."""

    format: WeightFormat
    shape: tuple[int, int]
    """Outputs and inputs of a matrix."""
    tile: Tile
    gate: str = ""
    is_one: bool = False
    """Whether blocks have one row of x, of a single token."""
    combine: int = 0
    """Choices whose outputs are summed up; 0 where they are not."""
    routed: int = 0
    """Experts among which the kernel chooses by logits; 0 where choices are given."""
    is_early: bool = False
    """Whether the kernel in front writes x at the time, which is one that chooses."""


@dataclass(frozen=True, slots=True)
class Routing:
    """By what a kernel chooses a single token's experts."""

    logits_1E: Tensor
    """From router.cuda.logits_of_token(), just in front."""
    is_normalized: bool
    has_shared: bool
    """See kernels/router."""
    weights_1K: Tensor
    """It receives the weights of the experts that are chosen, as experts_TK these."""


def tile_of(matrices: PackedExperts, tokens: int, choices: int, *, is_second: bool) -> Tile:
    """Choose the tile: of codes that take longer to unpack than to read, as wide as can be.

    Args:
        matrices: Of the experts.
        tokens: How many there are.
        choices: Experts that they chose, in all.
        is_second: Whether each choice has a row.
    """
    (experts, outputs, inputs), bits = matrices.shape, matrices.format.bits
    if tokens == 1:
        # All that a warp reads is on its way at a time; where blocks have one tile each, there is nothing behind it.
        steps, is_only = cdiv(cdiv(inputs * bits, LANES * 128), WARPS), is_second and choices <= MOST_COMBINED
        most = MOST_STAGES[is_second]
        stages = max(steps, 2) if is_only and steps <= most else min(steps + 1, most)
        # Where codes take longer to unpack than to read, blocks of the next product would take time from this one's.
        start = 0 if is_second or bits > 4 else steps - 1
        return Tile(ROWS[0], COLUMNS[0], 4 if is_second else 3, stages, start)
    is_wide = bits == 4 and outputs % ROWS[-1] == 0
    return Tile(ROWS[is_wide], columns_of(tokens, choices, experts), BLOCKS[is_wide])


def _tile(x: Tensor, choices: tuple[int, int], matrices: PackedExperts) -> Tile:
    return tile_of(matrices, choices[0], math.prod(choices), is_second=len(x) != choices[0])


def combines(choices: tuple[int, int], x: Tensor) -> bool:
    """Return whether few_product() weights and sums up the outputs of a single token's experts."""
    tokens, top_k = choices
    return tokens == 1 and top_k <= MOST_COMBINED and gpu_of(x.device).arch == SM90


def routes(
    x: Tensor, router_EI: Tensor, choices: tuple[int, int], up: PackedExperts, down: PackedExperts
) -> bool:
    """Return whether few_product() chooses the experts of a single token by itself, from a router's matrix on."""
    experts = len(router_EI)
    return (
        x.is_cuda
        # Without a copy, whose memory others would get while it is read.
        and x.stride(1) == 1
        and x.data_ptr() % 16 == 0
        and combines(choices, x)
        and x.dtype == router_EI.dtype
        and experts == up.shape[0] == down.shape[0]
        and router.serves(router_EI, choices[1])
    )


def shared_bytes(use: Use, choices: int, experts: int) -> int:
    """Return a block's dynamic shared memory: stages, sums, numbers of choices and experts."""
    tile, own, piece = use.tile, use.tile.rows // 8, 128 // use.format.bits
    scales = (use.format != PLAIN) * own * (cdiv(piece, use.format.group) if use.format.scales else 2)
    room = scales if use.is_one and scales in {4, 8} else 16 * cdiv(scales, 16)
    stages = tile.stages * WARPS * 32 * (16 * own + room)
    summed = WARPS if use.is_one else WARPS // 2 * tile.columns
    sums = 4 * (summed * (tile.rows + 4) + use.combine * tile.rows)
    numbers = 16 * choices if use.is_one else 20 * choices + 4 * experts
    return stages + sums + 2 * use.shape[1] * use.is_one + numbers


def resident_blocks(memory: int, shared: int, tile: Tile) -> int:
    """Return how many blocks a processor has at a time, of its shared memory in bytes and that of a block."""
    return max(min(memory // (shared + RESERVED), tile.blocks), 1)


def macros(use: Use) -> dict[str, int]:
    """Return the macros of few.cu."""
    format, tile = use.format, use.tile
    return {
        "CODES": CODES[format.codes], "SCALES": SCALES[format.scales], "GROUP": format.group,
        "OUTPUTS": use.shape[0], "INPUTS": use.shape[1], "COLUMNS": tile.columns,
        "ROWS": tile.rows, "WARPS": WARPS, "STAGES": tile.stages, "GATE": GATES[use.gate], "ONE": int(use.is_one),
        "COMBINE": use.combine, "ROUTED": use.routed, "EARLY": int(use.is_early),
        "START": tile.start,
    }  # fmt: skip


@cache
def _kernel(arch: int, device: int, shared: int, settings: tuple[tuple[str, int], ...]) -> Any:
    from nibble.kernels.nvrtc import Kernel, code_of

    values = dict(settings)
    # Of a single token, whose kernels start beside one another.
    return Kernel(code_of(SOURCE, arch, values), SOURCE.stem, shared, prefers_shared=bool(values["ONE"]))


def few_product(
    x: Tensor, experts_TK: Tensor, matrices: PackedExperts, bias_EN: Tensor | None, *,
    places_S: Tensor | None = None, gate: Gate | None = None, weights_TK: Tensor | None = None,
    tile: Tile | None = None, routing: Routing | None = None, is_routed: bool = False, copies: int = 1,
) -> Tensor:  # fmt: skip
    """Multiply the row of each choice with the matrix of its expert, as naive.product defines it, in one launch.

    Args:
        x: bfloat16 [T, I] or [S, I]. Where it has a row for each choice, experts must have been written before the
            kernel that writes x began.
        experts_TK: int64, the experts that tokens chose; rows of E and more hold anything.
        matrices: What serves() accepts.
        bias_EN: Added to each row, if there is one.
        places_S: Int64: it receives which row of the result each choice has.
        gate: What becomes of outputs, if anything.
        weights_TK: Of a token for which combines() says so: weights of its experts, whose outputs are summed up.
        tile: Another tile than the fastest.
        routing: Where the kernel chooses experts_TK by itself, in the first product of a token.
        is_routed: Whether the launch in front was such a product, which gave x; with weights_TK.
        copies: Rows of the result, all alike; with weights_TK.

    Raises:
        BackendError: The driver refuses the launch.
    """
    from nibble.kernels.nvrtc import FLOAT, INT, POINTER

    (tokens, top_k), (experts, outputs, inputs) = experts_TK.shape, matrices.shape
    choices, gpu = tokens * top_k, gpu_of(x.device)
    is_combined = weights_TK is not None
    out_SN = x.new_empty(copies if is_combined else choices, outputs // 2 if gate else outputs)
    if not choices:
        return out_SN
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    is_each = len(x) != tokens
    is_early = is_routed or (is_each and experts_TK.is_contiguous())
    tile = tile or _tile(x, (tokens, top_k), matrices)
    is_one = tokens == 1 and (is_combined or not is_each)
    kind, summed = gate.kind if gate else "", top_k if is_combined else 0
    among = routing.logits_1E.shape[1] - routing.has_shared if routing else 0
    use = Use(matrices.format, (outputs, inputs), tile, kind, is_one, summed, among, is_routed)
    kernel = _kernel(gpu.arch, x.device.index or 0, gpu.memory - RESERVED, tuple(macros(use).items()))
    logits, weights = (routing.logits_1E, routing.weights_1K) if routing else (None, weights_TK)
    tensors = (x, experts_TK.contiguous(), weights, matrices.codes, matrices.scale, matrices.global_scale, bias_EN,
               out_SN, places_S, logits)  # fmt: skip
    pointers = tuple(0 if tensor is None else tensor.data_ptr() for tensor in tensors)
    is_float32 = weights_TK is not None and weights_TK.dtype == torch.float32
    sizes = (choices, top_k, experts, copies, x.stride(0), 0 if bias_EN is None else bias_EN.stride(0),
             int(is_each), int(is_early), int(is_float32), int(routing is not None and routing.is_normalized),
             int(routing is not None and routing.has_shared))  # fmt: skip
    values = (
        *pointers,
        *sizes,
        *((gate.limit, gate.factor) if gate else (0.0, 1.0)),
    )
    types = (*(POINTER,) * len(pointers), *(INT,) * len(sizes), FLOAT, FLOAT)
    shared = shared_bytes(use, choices, experts)
    blocks = choices * (outputs // tile.rows)
    if not is_combined:
        blocks = min(blocks, gpu.processors * resident_blocks(gpu.memory, shared, tile))
    kernel.launch(blocks, 32 * WARPS, shared, types, values, starts_early=gpu.arch >= SM90)
    return out_SN

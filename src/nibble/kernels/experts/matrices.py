"""Matrices of experts that are kept packed: codes in the order in which kernels read them, and scales.

A matrix is dequantised as kernels/weight_formats.py says, and its values are not rounded: in 16 bits, codes times
scales of their own format are exact, and scales in the compute dtype multiply sums.

    codes         int16 [E, N, K / parts]  a word has the codes of inputs that lie `run` apart; parts = 16 / bits
    scale         [E, G, N]                in the compute dtype, or bytes; outputs follow one another
    global_scale  float32 [E, N]

A word's codes go to different tiles of the tensor cores' operands, so words stay in their registers as they are
unpacked. Codes of E2M1 are spread over their word so that one shift and one mask make bfloat16 values of three of them
(times 2^-126), in both words of a register. The bits of the fourth come to their places by a product, (word >> 8 &
0x6C) * 0x421, of which one mask keeps them:

    bits of a word   15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0      s sign, e exponent, m mantissa
    code             0s 3m 3s 1s 3e 3e 2s 0e 0e 0m 1e 1e 1m 2e 2e 2m

Shape suffixes: E experts, N outputs, K inputs, G groups of inputs, W words of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nibble.kernels.quantized_linear.matrix import OnDevice, PackedMatrix
from nibble.kernels.quantized_linear.naive import dequantize, pack_words
from nibble.kernels.weight_formats import WeightFormat, experts_unserved, parts_of, run_of

TENSORS = ("codes", "scale", "global_scale")
"""Fields that lie on the device."""
MAX_EXPONENT = 128
"""Largest E8M0 code whose products with codes are made in bfloat16."""
_SPREAD = (((8, 12), (7, 6)), ((8, 9), (7, 3)), ((8, 6), (7, 0)), ((8, 10), (6, 9), (1, 14)))
"""Of the four E2M1 codes of a word: which of their bits are moved up by how much."""


@dataclass(frozen=True)
class PackedExperts(OnDevice):
    """One matrix of each expert of a layer."""

    format: WeightFormat
    codes: Tensor
    scale: Tensor
    """Bytes are uint8, whatever they mean."""
    dtype: torch.dtype
    """The compute dtype."""
    rounded: torch.dtype = torch.float32
    """What dequantised values are rounded to, in float32; see PackedMatrix."""
    global_scale: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, outputs and inputs."""
        experts, outputs, width = self.codes.shape
        return experts, outputs, width * parts_of(self.format)

    @property
    def facts(self) -> tuple[Any, ...]:
        """What operators are given beside tensors."""
        names = (str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.rounded))
        return self.format.codes, self.format.group, self.format.scales, *names

    def dequantize(self, expert: int) -> Tensor:
        """Return an expert's matrix -> float32 [N, K]."""
        format, scale = self.format, None if self.global_scale is None else self.global_scale[expert]
        codes, scale_NG = restored(self.codes[expert], format), self.scale[expert].T
        return dequantize(PackedMatrix(format, codes, scale_NG, self.dtype, self.rounded, global_scale=scale))


def packed_experts(matrices: Sequence[PackedMatrix]) -> PackedExperts | None:
    """Return matrices of one shape and format as experts; None where they cannot be.

    Args:
        matrices: One of each expert, in the layout NAIVE.
    """
    first = matrices[0]
    if any((m.format, m.shape, m.dtype, m.rounded) != _kind(first) for m in matrices):
        return None
    if experts_unserved(first.format, first.shape[1], str(first.dtype).removeprefix("torch.")):
        return None
    if first.format.scales == "e8m0" and max(int(m.scale.max()) for m in matrices) > MAX_EXPONENT:
        return None
    rows, columns = first.shape
    width = columns // parts_of(first.format)
    codes = torch.empty(len(matrices), rows, width, dtype=torch.int16, device=first.codes.device)
    for codes_NW, matrix in zip(codes, matrices, strict=True):
        codes_NW.copy_(arranged(matrix.codes, matrix.format))
    scale = torch.stack([m.scale.T for m in matrices])
    global_scale = None
    if first.format.has_global:
        global_scale = torch.stack(
            [m.global_scale.expand(rows) for m in matrices if m.global_scale is not None]
        )
    return PackedExperts(first.format, codes, scale, first.dtype, first.rounded, global_scale)


def _kind(matrix: PackedMatrix) -> tuple[Any, ...]:
    return matrix.format, matrix.shape, matrix.dtype, matrix.rounded


def joined(parts: Sequence[PackedExperts]) -> PackedExperts | None:
    """Return matrices with the outputs of all, part by part; None where they are of several kinds."""
    first = parts[0]
    if any((p.facts, p.shape[0], p.shape[2]) != (first.facts, first.shape[0], first.shape[2]) for p in parts):
        return None
    scales = [p.global_scale for p in parts if p.global_scale is not None]
    return replace(
        first,
        codes=torch.cat([p.codes for p in parts], 1),
        scale=torch.cat([p.scale for p in parts], 2),
        global_scale=torch.cat(scales, 1) if scales else None,
    )


def arranged(codes: Tensor, format: WeightFormat) -> Tensor:
    """Return a matrix's codes, int32 words as in kernels/weight_formats.py -> int16 [N, W] as kernels read them."""
    parts, bits = parts_of(format), format.bits
    bytes_ND = codes.contiguous().view(torch.uint8)
    if bits == 4:
        bytes_ND = torch.stack((bytes_ND & 15, bytes_ND >> 4), -1).flatten(1)
    # One run of inputs for each of the codes of a word.
    by_part = bytes_ND.unflatten(1, (-1, parts, run_of(format))).unbind(2)
    word = torch.zeros_like(by_part[0], dtype=torch.int32)
    for part, x in enumerate(by_part):
        for mask, up in _moves(format, part):
            word |= (x.int() & mask) << up
    return word.to(torch.int16).flatten(1)


def restored(codes_NW: Tensor, format: WeightFormat) -> Tensor:
    """Undo arranged()."""
    word = codes_NW.unflatten(1, (-1, run_of(format))).int()
    by_part = []
    for part in range(parts_of(format)):
        code = torch.zeros_like(word)
        for mask, up in _moves(format, part):
            code |= (word >> up) & mask
        by_part.append(code)
    return pack_words(torch.stack(by_part, 2).flatten(1), format.bits, 1)


def _moves(format: WeightFormat, part: int) -> Sequence[tuple[int, int]]:
    """Return which bits of a word's code `part` are moved up by how much."""
    if format.codes == "e2m1":
        return _SPREAD[part]
    return (((1 << format.bits) - 1, part * format.bits),)

"""A rank's part of a tensor: of a file, or of a matrix that is kept packed.

Shape suffixes: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nibble.errors import ConfigError
from nibble.kernels.quantized_linear.matrix import PackedMatrix
from nibble.kernels.quantized_linear.naive import pack_words, unpack_words


@dataclass(frozen=True, slots=True)
class Shard:
    """One of the ranks that a model is divided among."""

    rank: int
    size: int

    def part(self, whole: int, part: int) -> tuple[int, int]:
        """Return where this rank's part of a dimension begins and ends.

        Fewer parts than ranks are for as many ranks each that follow one another, as KV heads are.
        """
        first = self.rank * (whole // part) // self.size * part
        return first, first + part


@dataclass(frozen=True, slots=True)
class Split:
    """What a rank has of a tensor: in one dimension, these intervals one after the other."""

    dim: int
    parts: tuple[tuple[int, int], ...]

    def of(self, x: Tensor) -> Tensor:
        """Return the part of a tensor, which may be a view."""
        pieces = [x.narrow(self.dim, start, stop - start) for start, stop in self.parts]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def scaled(self, factor: int, what: str) -> Split:
        """Return the same over a dimension of which each entry stands for `factor` of these; raise ConfigError."""
        if any(start % factor or stop % factor for start, stop in self.parts):
            raise ConfigError(
                f"{what} cannot be divided among these GPUs: its inputs are quantised {factor} at a time, and a part "
                "has no whole number of them; choose a smaller --tp, or --quantized-weights unpacked"
            )
        return replace(self, parts=tuple((start // factor, stop // factor) for start, stop in self.parts))


class PartialSlice:
    """A part of a tensor of a file, with what Transformers' loader asks of safetensors' slices."""

    def __init__(self, stored: Any, split: Split) -> None:
        self._stored, self._split = stored, split

    def __getitem__(self, index: Any) -> Tensor:
        leading = (slice(None),) * self._split.dim
        pieces = [self._stored[(*leading, slice(*part))] for part in self._split.parts]
        whole: Tensor = pieces[0] if len(pieces) == 1 else torch.cat(pieces, self._split.dim)
        return whole if index is ... else whole[index]


class PartOfWhole:
    """The same of a tensor that can only be read as a whole."""

    def __init__(self, stored: Any, split: Split) -> None:
        self._stored, self._split = stored, split

    def __getitem__(self, index: Any) -> Tensor:
        # A copy, so that the whole is freed.
        part = self._split.of(self._stored[...]).clone()
        return part if index is ... else part[index]


def packed_part(matrix: PackedMatrix, split: Split, name: str) -> PackedMatrix:
    """Return a part of a packed matrix in the layout of weight_formats.py.

    Args:
        matrix: [N, K].
        split: of its outputs (dim 0) or inputs (dim 1).
        name: for errors.

    Raises:
        ConfigError: scales of inputs do not divide so.
    """
    format, (_, columns), groups = matrix.format, matrix.shape, matrix.scale.shape[1]
    if split.dim == 1:
        per_word = columns // matrix.codes.shape[1]
        by_group = split.scaled(columns // groups, name) if groups > 1 else None
        codes = split.scaled(per_word, name).of(matrix.codes).contiguous()
        scale, zero = matrix.scale, matrix.zero
        if by_group:
            scale = by_group.of(scale).contiguous()
            zero = None if zero is None else by_group.of(zero).contiguous()
            if scale.shape[1] == 1:
                format = replace(format, group=0)
        return replace(matrix, format=format, codes=codes, scale=scale, zero=zero, shape=(0, 0))
    zero = matrix.zero
    if zero is not None:
        # Zero points of several outputs lie in a word.
        zero = pack_words(split.of(unpack_words(zero, format.bits, 0)[: matrix.shape[0]]), format.bits, 0)
    row_globals = matrix.global_scale
    if row_globals is not None and len(row_globals) > 1:
        row_globals = split.of(row_globals).contiguous()
    blocks_fit = all(start % matrix.block_rows == 0 for start, _ in split.parts)
    return replace(
        matrix, codes=split.of(matrix.codes).contiguous(), scale=split.of(matrix.scale).contiguous(), zero=zero,
        global_scale=row_globals, block_rows=matrix.block_rows if blocks_fit else 1, shape=(0, 0),
    )  # fmt: skip


def intervals(shard: Shard, sections: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return a rank's intervals of a dimension that has several sections, each of which is divided.

    Args:
        shard: the rank.
        sections: whole and part of each, in their order.
    """
    result, start = list[tuple[int, int]](), 0
    for whole, part in sections:
        first, last = shard.part(whole, part)
        result.append((start + first, start + last))
        start += whole
    return tuple(result)

"""A matrix that is kept packed, on a device; and several in one.

Shape suffixes: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nibble.kernels.weight_formats import WORD, Activations, WeightFormat

NAIVE = ""
"""The layout that naive.py reads: that of kernels/weight_formats.py."""
TENSORS = ("codes", "scale", "zero", "global_scale")
"""Fields of a matrix that lie on the device."""


class KernelKey(NamedTuple):
    """What the kernels of a matrix are chosen by."""

    format: WeightFormat
    shape: tuple[int, int]
    dtype: torch.dtype
    has_row_globals: bool
    """Whether there is a global scale for each row."""
    activations: Activations
    is_blocked: bool
    """Whether scales are those of square blocks."""


class OnDevice:
    """What has TENSORS on a device, or some of them."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that lies on the device, by name."""
        return {name: x for name in TENSORS if (x := getattr(self, name, None)) is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class PackedMatrix(OnDevice):
    """A matrix that is kept packed."""

    format: WeightFormat
    codes: Tensor
    scale: Tensor
    """Bytes are uint8, whatever they mean."""
    dtype: torch.dtype
    """The compute dtype; scales have it, where the format has none of its own."""
    rounded: torch.dtype = torch.float32
    """What dequantised values are rounded to; float32: they are not."""
    zero: Tensor | None = None
    global_scale: Tensor | None = None
    block_rows: int = 1
    """Outputs that follow one another and have the same scales, in the layout NAIVE."""
    activations: Activations = Activations.NONE
    """How inputs are quantised before the product."""
    input_scale: Tensor | None = None
    """float32 [1], where activations have one scale."""
    layout: str = NAIVE
    """Which kernels read codes and scales: what humming.py calls them by, or NAIVE."""
    shape: tuple[int, int] = (0, 0)
    """Outputs and inputs; they follow from codes in the layout NAIVE."""

    def __post_init__(self) -> None:
        if self.layout == NAIVE:
            rows, columns = self.codes.shape
            object.__setattr__(self, "shape", (rows, columns * WORD // self.format.bits))

    @property
    def rows(self) -> int:
        """N."""
        return self.shape[0]

    @property
    def key(self) -> KernelKey:
        """What kernels are chosen by."""
        has_row_globals = self.global_scale is not None and len(self.global_scale) > 1
        is_blocked = self.format.group > 0 and self.block_rows % self.format.group == 0
        return KernelKey(self.format, self.shape, self.dtype, has_row_globals, self.activations, is_blocked)

    @property
    def facts(self) -> tuple[Any, ...]:
        """What the operator is given beside tensors."""
        format = self.format
        dtypes = (str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.rounded))
        return list(self.shape), format.codes, format.group, format.scales, *dtypes, self.layout


def merged(matrices: Sequence[PackedMatrix]) -> PackedMatrix:
    """Return one matrix with the rows of all; their formats and numbers of inputs are the same."""
    first = matrices[0]
    heights = {m.block_rows if m.rows % m.block_rows == 0 else 1 for m in matrices}
    inputs = [m.input_scale for m in matrices if m.input_scale is not None]
    scales = [m.global_scale.expand(1) for m in matrices if m.global_scale is not None]
    global_scale = torch.cat(scales) if scales else None
    if global_scale is not None:
        same = bool((global_scale == global_scale[0]).all())
        rows = torch.tensor([m.rows for m in matrices], device=global_scale.device)
        global_scale = global_scale[:1] if same else global_scale.repeat_interleave(rows)
    return replace(
        first,
        codes=torch.cat([m.codes for m in matrices]),
        scale=torch.cat([m.scale for m in matrices]),
        zero=None if first.zero is None else torch.cat([m.zero for m in matrices if m.zero is not None]),
        global_scale=global_scale,
        block_rows=heights.pop() if len(heights) == 1 else 1,
        # They see the same inputs; the largest scale clips none that one of them would keep.
        input_scale=torch.cat(inputs).amax(0, keepdim=True) if inputs else None,
    )

"""A matrix that is kept packed, on a device; and several in one.

Shape suffixes: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nibble.kernels.weight_formats import WORD, WeightFormat

NAIVE = ""
"""The layout that naive.py reads: that of kernels/weight_formats.py."""
TENSORS = ("codes", "scale", "zero", "global_scale")
"""Fields of a matrix that lie on the device."""


@dataclass(frozen=True)
class PackedMatrix:
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
    def tensors(self) -> dict[str, Tensor]:
        """All that lies on the device, by name."""
        return {name: x for name in TENSORS if (x := getattr(self, name)) is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def key(self) -> tuple[object, ...]:
        """What kernels are chosen by."""
        per_row = self.global_scale is not None and len(self.global_scale) > 1
        return self.format, self.shape, self.dtype, per_row

    @property
    def facts(self) -> tuple[Any, ...]:
        """What the operator is given beside tensors."""
        format = self.format
        dtypes = (str(dtype).removeprefix("torch.") for dtype in (self.dtype, self.rounded))
        return list(self.shape), format.codes, format.group, format.scales, *dtypes, self.layout


def merged(matrices: Sequence[PackedMatrix]) -> PackedMatrix:
    """Return one matrix with the rows of all; their formats and numbers of inputs are the same."""
    first = matrices[0]
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
    )

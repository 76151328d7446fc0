"""Formats of recurrent states in torch: tensors for them, and their codes (kernels/state_formats.py has the facts).

Shape suffixes: S slots, H heads, V rows, K columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nibble.kernels.recurrence.types import LayerState
from nibble.kernels.state_formats import MIN_SCALE, Shape, layer_shapes, plane_shapes, state_format

if TYPE_CHECKING:
    from nibble.model_spec import RecurrentGroup


def planes(
    format: str, slots: int, heads: int, rows: int, columns: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, ...]:
    """Return zeroed tensors for matrices: codes [S, H, V, K], and float32 scales [S, H, V] where there are any.

    Args:
        format: One of state_formats.FORMATS.
        slots: S.
        heads: H.
        rows: V.
        columns: K.
        device: Where they lie.

    Raises:
        ValueError: There is no such format.
    """
    return _allocate(plane_shapes(format, slots, heads, rows, columns), device)


def encode(format: str, x: Tensor) -> tuple[Tensor, ...]:
    """Return the codes of values [..., V, K], and a scale for each row [..., V] where the format has them.

    Codes are rounded to nearest, ties to even. What decode() returns is encoded as the same bytes. A row with an
    infinity or NaN is lost.
    """
    kind, x = state_format(format), x.float()
    dtype: torch.dtype = getattr(torch, kind.dtype)
    if not kind.max_code:
        return (x.to(dtype),)
    scale = (x.abs().amax(-1) / kind.max_code).clamp_min(MIN_SCALE)
    codes = x / scale.unsqueeze(-1)
    return (codes if dtype.is_floating_point else codes.round()).to(dtype), scale


def decode(format: str, planes: Sequence[Tensor]) -> Tensor:
    """Return the values of planes in float32 [..., V, K]."""
    codes = planes[0].float()
    return codes * planes[1].unsqueeze(-1) if state_format(format).max_code else codes


def layer_state(
    group: RecurrentGroup,
    slots: int,
    format: str,
    dtype: torch.dtype,
    max_drafts: int,
    device: torch.device | str,
) -> LayerState:
    """Return zeroed slots for one layer.

    Args:
        group: What the layer keeps.
        slots: Requests and snapshots that have a state at a time.
        format: Of matrices, one of state_formats.FORMATS.
        dtype: The compute dtype.
        max_drafts: Most tokens of a step that a later one may take back.
        device: Where they lie.

    Raises:
        ValueError: The format or dtype is unknown, or key heads do not divide heads.
    """
    shapes = layer_shapes(group, slots, format, str(dtype).removeprefix("torch."), max_drafts)
    tensors = {name: _allocate(shape, device) for name, shape in shapes.items()}
    matrices = tensors.pop("planes")
    return LayerState(matrices, format, **{name: tensor for name, (tensor,) in tensors.items()})


def _allocate(shapes: Sequence[Shape], device: torch.device | str) -> tuple[Tensor, ...]:
    return tuple(torch.zeros(shape, dtype=getattr(torch, dtype), device=device) for shape, dtype in shapes)

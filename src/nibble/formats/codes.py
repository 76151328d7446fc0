"""E2M1, the 4-bit float of all FP4 formats: codes 0..7 are 0, .5, 1, 1.5, 2, 3, 4, 6, and bit 3 is the sign.

Scales belong to the formats. The value set is OCP Microscaling Formats (MX) v1.0, section 5.3.3.

Shape suffixes: D values, P packed bytes (D / 2).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nibble.formats.lookup import look_up

if TYPE_CHECKING:
    import torch
    from torch import Tensor

MAX = 6.0
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)

TIES_TO_EVEN = (False, True, False, True, False, True, False)
"""For each midpoint between neighbouring codes, whether a value that lies on it goes to the upper code."""
TIES_AWAY = (True,) * 7


@functools.cache
def _thresholds(up: Sequence[bool], device: torch.device) -> Tensor:
    """Largest float32 values that still belong to the lower of two neighbouring codes."""
    import torch

    middle = torch.tensor(_MIDPOINTS, dtype=torch.float32)
    # bucketize() puts a value on a threshold into the lower bucket. One float below the midpoint,
    # the threshold sends the midpoint itself up.
    below = torch.nextafter(middle, torch.zeros(()))
    return torch.where(torch.tensor(up), below, middle).to(device)


@functools.cache
def _pairs(device: torch.device) -> Tensor:
    """int64 [256]: the two float32 values of every byte, side by side, to be looked up as one."""
    import torch

    values = torch.tensor((*_VALUES, *(-v for v in _VALUES)), dtype=torch.float32)
    byte = torch.arange(256)
    # The low half of a byte is the even value. Both values together are the 8 bytes of one int64.
    pairs = torch.stack((values[byte & 15], values[byte >> 4]), dim=-1)
    return pairs.view(torch.int64).flatten().to(device)


def pack(x_D: Tensor, negative_D: Tensor, up: Sequence[bool] = TIES_TO_EVEN) -> Tensor:
    """float32 [..., D] -> uint8 [..., P]: nearest codes of |x|, saturating at 6, with the signs of `negative_D`.

    Args:
        x_D: Values, already divided by their scale.
        negative_D: Bool, which codes get the sign bit.
        up: For each midpoint, whether a value on it goes to the upper code.
    """
    import torch

    codes_D = torch.bucketize(x_D.abs(), _thresholds(up, x_D.device), out_int32=True)
    # Callers differ in whether -0.0 has a sign, so they say what is negative.
    codes_D += negative_D.to(torch.int32) << 3
    return (codes_D[..., 0::2] + (codes_D[..., 1::2] << 4)).to(torch.uint8)


def unpack(packed_P: Tensor) -> Tensor:
    """uint8 [..., P] -> float32 [..., D]."""
    import torch

    return look_up(packed_P, _pairs(packed_P.device)).view(torch.float32)

"""PackedInts: all small integers of a step, packed into one tensor that travels to the device in one copy.

On a GPU the copy starts from pinned memory and nobody waits for it. Owns PackedInts and to_device(). Must not know what the
integers mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

ALIGNED = 4
"""Parts begin at multiples of so many: 16 bytes of int32. Triton compiles a kernel anew for pointers off that grid."""


class PackedInts:
    """Lists of integers, one after another."""

    def __init__(self) -> None:
        self._ints: list[int] = []

    def add(self, values: Iterable[int]) -> slice:
        """Puts a list in; returns where it lies."""
        self._ints += (0,) * (-len(self._ints) % ALIGNED)
        start = len(self._ints)
        self._ints += values
        return slice(start, len(self._ints))

    def send(self, device: torch.device) -> Tensor:
        """All of it as int64 on the device."""
        return to_device(self._ints, torch.int64, device)


def to_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A list of numbers as a tensor; the host does not wait until it has arrived."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)

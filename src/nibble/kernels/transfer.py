"""Numbers of the host, sent to a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a list of numbers as a tensor; the host does not wait until it has arrived.

    Args:
        values: the numbers.
        dtype: of the tensor.
        device: where it is to be.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    # The host can go on during a copy only if that reads from pinned memory.
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)

"""What of a GPU decides how a kernel is tiled."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from nibble.kernels.sizes import UNBOUNDED

SM90 = 90
"""Compute capability of Hopper, which has kernels of its own (gluon_sm90.py)."""


@dataclass(frozen=True, slots=True)
class GPU:
    """A GPU's sizes."""

    arch: int
    """Compute capability, 90 for SM90; 0 without a GPU."""
    processors: int
    memory: int
    """Bytes of shared memory that a program may have."""


@functools.cache
def gpu_of(device: torch.device) -> GPU:
    """Return a device's sizes; those of one processor where Triton interprets kernels on the CPU."""
    if device.type != "cuda":
        return GPU(0, 1, UNBOUNDED)
    from triton.runtime import driver

    properties = driver.active.utils.get_device_properties(device.index or 0)
    arch = driver.active.get_current_target().arch
    return GPU(arch, properties["multiprocessor_count"], properties["max_shared_mem"])

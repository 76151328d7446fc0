"""What a launch needs to know on the host: sizes of grids and tiles, and of the GPU.

Triton's own cdiv and next_power_of_2 also work inside kernels, but outside they take a hundred times as long. A decode
step calls several of them before each launch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

SM90 = 90
"""Compute capability of Hopper, which has kernels of its own (gluon_sm90.py)."""
UNBOUNDED = 1 << 30
"""In the place of a bound on stored tokens, or on shared memory, that is not known."""


def cdiv(n: int, size: int) -> int:
    """Return how many parts of `size` make up n; the last may be smaller."""
    return -(-n // size)


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is n or more; n is positive."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True, slots=True)
class GPU:
    """What decides how a kernel is tiled."""

    arch: int
    """Compute capability, 90 for SM90; 0 without a GPU."""
    processors: int
    memory: int
    """Bytes of shared memory that a program may have."""


@functools.cache
def gpu_of(device: torch.device) -> GPU:
    """Return the GPU's sizes; those of a machine of one processor where Triton interprets kernels on the CPU."""
    if device.type != "cuda":
        return GPU(0, 1, UNBOUNDED)
    from triton.runtime import driver

    properties = driver.active.utils.get_device_properties(device.index or 0)
    arch = driver.active.get_current_target().arch
    return GPU(arch, properties["multiprocessor_count"], properties["max_shared_mem"])

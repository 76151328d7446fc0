"""Sizes of grids and tiles, on the host, without torch.

Triton's own cdiv and next_power_of_2 also work inside kernels, but outside they take a hundred times as long. A decode
step calls several of them before each launch.

What of a GPU decides how a kernel is tiled.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

UNBOUNDED = 1 << 30
"""In the place of a bound on stored tokens, or on shared memory, that is not known."""
ALIGNED = 4
"""Lists begin at multiples of so many int32, 16 bytes. Triton compiles a kernel anew for pointers off that grid."""
PREFILL_WORKSPACE = 32768
"""Tokens that prefill attention dequantises at a time, but for what else their pages hold."""


def cdiv(n: int, size: int) -> int:
    """Return how many parts of `size` make up n; the last may be smaller."""
    # Floor division of the negated number rounds up, in integers alone.
    return -(-n // size)


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is n or more; n is positive."""
    # Of n - 1, so that a power of two stays what it is.
    return 1 << (n - 1).bit_length()


MMA_ROWS = 16
"""Rows of the smallest tile of the tensor cores."""
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

"""Sizes of grids and tiles, on the host, without torch.

Triton's own cdiv and next_power_of_2 also work inside kernels, but outside they take a hundred times as long. A decode
step calls several of them before each launch.
"""

from __future__ import annotations

UNBOUNDED = 1 << 30
"""In the place of a bound on stored tokens, or on shared memory, that is not known."""
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

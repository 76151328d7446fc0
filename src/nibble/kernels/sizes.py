"""Sizes of grids and tiles, on the host. Triton's own functions of these names also serve inside kernels, and take a
hundred times as long to find out that they are outside: several of them before each launch are felt.
"""

from __future__ import annotations

PREFILL_WORKSPACE = 32768
"""Tokens that prefill attention dequantises at a time, but for what else their pages hold."""


def cdiv(n: int, size: int) -> int:
    """Parts of `size` that n is made of, the last of which may be smaller."""
    return -(-n // size)


def next_power_of_2(n: int) -> int:
    """The least power of two that is n or more; n is positive."""
    return 1 << (n - 1).bit_length()

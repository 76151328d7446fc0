"""Launch kernels of Triton again, without looking at each argument: that takes the host longer than all else of a step.

Triton compiles a kernel for the kinds of its arguments: dtypes, addresses on a grid of 16 bytes, integers that are 1 or
multiples of 16. At each launch it looks at all of them, and at all constants. Here the caller says what may be of
another kind than before.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from nibble.kernels import ahead
from nibble.kernels.codecs.tiles import once_per_stream
from nibble.kernels.types import Paged

GRID = 15
"""Bits of an address, or of an integer, that are not on the grid."""
INT32 = 1 << 31


class Launches:
    """Launches of one kernel with constants that stay the same, on one device."""

    def __init__(self) -> None:
        self._compiled: dict[Hashable, Any] = {}

    def __call__(
        self, kernel: Any, grid: tuple[int, int, int], varying: tuple[Any, ...], arguments: tuple[Any, ...],
        **options: Any,
    ) -> None:  # fmt: skip
        """Launch the kernel.

        Args:
            kernel: a function of triton.jit.
            grid: its programs.
            varying: arguments that may be of another kind from launch to launch; in tuples, constants that may differ.
            arguments: all of the kernel's, in its order.
            options: of the launch; they belong to what does not vary, or depend on `varying`.
        """
        key = tuple([kind_of(x) for x in varying])
        compiled = self._compiled.get(key)
        if compiled is not None and not ahead.is_rehearsal():
            compiled[grid](*arguments)
            return
        launched = kernel[grid](*arguments, **options)
        # In a rehearsal, and on a CPU, nothing is compiled that can be launched.
        if hasattr(launched, "packed_metadata") and not ahead.is_rehearsal():
            self._compiled[key] = launched


@once_per_stream
def launches_of(stream: Paged, name: str) -> Launches:
    """Return the launches of a kernel that reads a stream, as long as the stream lives. name: of the kernel."""
    return Launches()


def kind_of(x: Any) -> Any:
    """Return what Triton compiles for, of an argument; a tuple of constants itself."""
    if isinstance(x, Tensor):
        return x.dtype, not x.data_ptr() & GRID
    if type(x) is int:
        return x == 1, not x & GRID, -INT32 <= x < INT32
    return float if isinstance(x, float) else x

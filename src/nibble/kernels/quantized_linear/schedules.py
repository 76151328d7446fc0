"""Settings of kernels of `humming-kernels` that were measured to be faster than those that the library chooses itself.

`benchmarks/weight_schedules.py` measures, and prints entries. A matrix without an entry, on another architecture, or
one that an entry's tiles do not divide, gets the library's own settings, as all do while there is no entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nibble.kernels.quantized_linear.matrix import KernelKey
from nibble.kernels.weight_formats import TILE, Activations, WeightFormat

Settings = Mapping[str, Any]
"""Arguments of the library's TuningConfig: `block_shape` and `warp_shape` of rows, outputs and inputs, `num_stages`."""
Entry = tuple[int, str, str, int]
"""The architecture, the format of weights and the activations, as name() writes them, and the size class."""
MEASURED: Mapping[Entry, Mapping[int, Settings]] = {}
"""For an entry settings by the most rows that they are for."""

COMMON: Mapping[int, Settings] = {90: {"use_pdl": True}}
"""By architecture settings that all kernels get besides; use_pdl: they start while the kernel in front ends."""


def size_class(shape: tuple[int, int]) -> int:
    """Return the class of a matrix: the power of two up to its number of tiles, which kernels share out."""
    return (shape[0] // TILE[0] * (shape[1] // TILE[1])).bit_length() - 1


def name(format: WeightFormat, activations: Activations) -> tuple[str, str]:
    """Return how an entry writes a format and activations."""
    return str(format), activations.value


def measured(key: KernelKey, arch: int) -> dict[int, Settings]:
    """Return the settings that were measured for a matrix on an architecture, by the most rows that they are for."""
    entry = MEASURED.get((arch, *name(key.format, key.activations), size_class(key.shape)), {})
    return {rows: settings for rows, settings in entry.items() if _fits(settings, key.shape)}


def _fits(settings: Settings, shape: tuple[int, int]) -> bool:
    _, outputs, inputs = settings["block_shape"]
    return shape[0] % outputs == 0 and shape[1] % inputs == 0

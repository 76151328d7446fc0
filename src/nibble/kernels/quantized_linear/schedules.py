"""Settings of kernels of `humming-kernels` that were measured to be faster than those that the library chooses itself.

`benchmarks/weight_schedules.py` measures, and prints entries. A matrix without an entry, on another architecture, or
one that an entry's tiles do not divide, gets the library's own settings.
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


def _wgmma(rows: int, outputs: int, programs: int = 1) -> Settings:
    """Return settings of a kernel in 16 bits: rows and outputs of a program's tile, and programs on a processor."""
    return {
        "mma_type": "wgmma",
        "block_shape": (rows, outputs, 64),
        "warp_shape": (128, 32, 64),
        "num_stages": 4,
        "num_ctas_per_sm": programs,
        "use_stream_k": True,
        "use_tma": True,
        "use_warp_spec": True,
    }


_FP8, _NVFP4 = "e4m3, groups of 128", "e2m1, groups of 16, e4m3, global scale"
_MXFP4 = "e2m1, groups of 32, e8m0"
# One run on one H200, 2026-11-28; behind each its matrices of Llama-3.1-8B, microseconds, and those with the library's
# own settings. Those that gain less than 3 % were added by hand, as a step has them all.
MEASURED: Mapping[Entry, Mapping[int, Settings]] = {
    (90, _FP8, "", 10): {256: _wgmma(128, 128, 2)},  # qkv 27.9 (29.2), o 21.1 (22.1)
    (90, _FP8, "", 11): {256: _wgmma(256, 128)},  # down 54.3 (55.7)
    (90, _FP8, "", 12): {256: _wgmma(256, 128)},  # gate_up 102.7 (105.4)
    (90, _NVFP4, "", 10): {256: _wgmma(128, 128, 2)},  # qkv 26.6 (28.7), o 20.1 (22.0)
    (90, _NVFP4, "", 11): {256: _wgmma(128, 256)},  # down 52.5 (54.2)
    (90, _NVFP4, "", 12): {256: _wgmma(128, 256)},  # gate_up 101.8 (103.8)
    (90, _MXFP4, "", 10): {256: _wgmma(128, 128, 2)},  # qkv 26.8 (27.4), o 20.3 (20.8)
}
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

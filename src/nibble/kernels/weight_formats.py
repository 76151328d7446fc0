"""How quantised matrices of linear layers are kept on a device, and which of them its kernels multiply. No torch.

A matrix W of N outputs and K inputs is kept as codes, with a scale for each group of inputs of a row:

    W[n, k] = (code[n, k] - zero[n, g]) * scale[n, g] * global_scale[n]        g = k // group

    codes         int32 [N, K * bits / 32], the first input of a word in its lowest bits
    scale         [N, K / group] in the compute dtype, or bytes of E4M3 (NVFP4) or E8M0 (MX formats)
    zero          int32 [N * bits / 32, K / group], packed as codes are, but along outputs
    global_scale  float32 [1]; after layers are merged [N]

Inputs are left in the compute dtype, or quantised to FP8 first (E4M3, scale = amax / 448), which kernels multiply by
FP8 weights as they are: with a scale for each token and GROUP inputs, for each token, or with one that the checkpoint
has (Activations).

Scales of the matrix and of blocks are written out for each row. In the compute dtype they are rounded by as much as
each unpacked value would be, so the error of a product is no larger than that of an unpacked matrix.

Shape suffixes: N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from math import ceil

BITS = {"uint4": 4, "uint8": 8, "e2m1": 4, "e4m3": 8, "bfloat16": 16}
"""Kinds of codes -> bits. Integers have half of their range subtracted, unless there are zero points."""
PACKAGE = "humming"
"""The module of the library that multiplies packed matrices on a GPU."""
DISTRIBUTION = "humming-kernels"
"""Its name in package registries."""
ARCHS = frozenset({75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121})
"""Compute capabilities that it has kernels for."""
GROUPS = (0, 16, 32, 64, 128)
"""Sizes of groups that it multiplies; 0: the whole row."""
GROUP = 128
"""Inputs that share a scale where activations are quantised in groups, as blocks of fine-grained FP8 are wide."""
FP8_ARCH = 89
"""The first compute capability whose tensor cores multiply FP8."""
E4M3_MAX = 448.0
TILE = (128, 128)
"""Outputs and inputs that the shape of a matrix must be a multiple of."""
WORD = 32
EXPERT_WORD = 16
"""Bits of a word of experts' codes (kernels/experts)."""
RUN = 8
"""Inputs that follow one another in words, at most: 16 bytes of an activation."""
EXPERT_FORMATS = {
    ("e4m3", ""): (0, 64, 128), ("e4m3", "e8m0"): (32,), ("e2m1", "e8m0"): (32,), ("e2m1", "e4m3"): (16,),
    ("uint4", ""): (0, 64, 128),
}  # fmt: skip
"""Codes and scales -> sizes of groups in which kernels/experts multiplies experts' matrices."""
FULL_DTYPE = "float32"
"""The compute dtype in which the definition multiplies, and no kernels."""


class Activations(StrEnum):
    """How inputs of a product are quantised to FP8."""

    NONE = ""  # left in the compute dtype
    GROUP = "group"  # a scale for each token and GROUP inputs
    TOKEN = "token"  # a scale for each token
    TENSOR = "tensor"  # one scale for all, which was measured before


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a matrix is kept."""

    codes: str
    """A key of BITS."""
    group: int = 0
    """Inputs of a row that share a scale; 0: all of them."""
    scales: str = ""
    """e4m3 or e8m0; empty: the compute dtype."""
    has_zero: bool = False
    """Whether there are zero points."""
    has_global: bool = False
    """Whether there is a global scale."""

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return BITS[self.codes]

    def groups(self, columns: int) -> int:
        """Return the groups of a row of `columns` inputs."""
        return columns // self.group if self.group else 1

    def size(self, rows: int, columns: int, scale_bytes: int) -> int:
        """Return the bytes of a matrix.

        Args:
            rows: Its outputs.
            columns: Its inputs.
            scale_bytes: Of a scale in the compute dtype.
        """
        groups = rows * self.groups(columns)
        scales = groups * (1 if self.scales else scale_bytes)
        zeros = groups * self.bits // 8 if self.has_zero else 0
        return rows * columns * self.bits // 8 + scales + zeros + 4 * self.has_global

    def __str__(self) -> str:
        parts = (
            self.codes, f"groups of {self.group}" if self.group else "rows", self.scales,
            "zero points" if self.has_zero else "", "global scale" if self.has_global else "",
        )  # fmt: skip
        return ", ".join(filter(None, parts))


def misfit(format: WeightFormat, rows: int, columns: int) -> str:
    """Return why a matrix cannot be kept in a format at all, empty if it can."""
    if format.group and columns % format.group:
        return f"{columns} inputs are no whole groups of {format.group}"
    values = WORD // format.bits
    if columns % values or (format.has_zero and rows % values):
        return f"{rows} x {columns} values of {format.bits} bits do not fill words"
    return ""


def unserved(format: WeightFormat, rows: int, columns: int, dtype: str) -> str:
    """Return why kernels do not multiply a matrix in a format, empty if they do. In float32 the definition does.

    Args:
        format: How it would be kept.
        rows: Its outputs.
        columns: Its inputs.
        dtype: The compute dtype.
    """
    if (problem := misfit(format, rows, columns)) or dtype == FULL_DTYPE:
        return problem
    if format.group not in GROUPS:
        return f"groups of {format.group}"
    if rows % TILE[0] or columns % TILE[1]:
        return f"{rows} x {columns} values, which are not in tiles of {TILE[0]} x {TILE[1]}"
    # Scales of such formats were made for the range of BF16.
    if dtype == "float16" and (format.codes == "e4m3" or format.scales == "e8m0"):
        return f"{format} in float16"
    return ""


def activations_unserved(format: WeightFormat, activations: Activations) -> str:
    """Return why kernels do not multiply FP8 activations by a matrix in a format, empty if they do."""
    if format.codes != "e4m3":
        return f"FP8 activations are multiplied by FP8 weights alone, and these are {format}"
    if format.scales or format.group not in (0, GROUP):
        return f"FP8 activations need weights with scales of {GROUP} inputs or rows, and these are {format}"
    if format.group and activations is not Activations.GROUP:
        return f"weights in groups of {GROUP} inputs are multiplied by activations in such groups"
    return ""


def bytes_kept(format: WeightFormat, rows: int, columns: int, dtype: str) -> int | None:
    """Return the bytes of a matrix that is kept packed; None where it is unpacked, as no kernels multiply it."""
    if unserved(format, rows, columns, dtype):
        return None
    return ceil(format.size(rows, columns, 4 if dtype == FULL_DTYPE else 2))


# Experts


def parts_of(format: WeightFormat) -> int:
    """Return the codes of a word."""
    return EXPERT_WORD // format.bits


def run_of(format: WeightFormat) -> int:
    """Return how many inputs lie between those whose codes share a word."""
    return min(RUN, format.group // parts_of(format)) if format.group else RUN


def experts_unserved(format: WeightFormat, columns: int, dtype: str) -> str:
    """Return why experts' matrices of so many inputs are not kept in a format, empty if they are.

    Args:
        format: How they would be kept.
        columns: Inputs.
        dtype: The compute dtype.
    """
    if format.has_zero or format.group not in EXPERT_FORMATS.get((format.codes, format.scales), ()):
        return str(format)
    if columns % (format.group or parts_of(format) * RUN):
        return f"{columns} inputs"
    return "" if dtype in ("bfloat16", FULL_DTYPE) else f"{format} in {dtype}"


def expert_bytes(format: WeightFormat, experts: int, rows: int, columns: int, dtype: str) -> int:
    """Return the bytes of experts' matrices that are kept packed.

    Args:
        format: One that experts_unserved() has nothing against.
        experts: How many.
        rows: Outputs of an expert.
        columns: Its inputs.
        dtype: The compute dtype.
    """
    each = replace(format, has_global=False).size(rows, columns, 4 if dtype == FULL_DTYPE else 2)
    # A global scale is written out by row.
    return experts * (each + 4 * rows * format.has_global)

"""quantized_linear: y = x W^T for a matrix that is kept packed (kernels/weight_formats.py).

naive.py defines it, and computes it on a CPU. On a GPU humming.py calls kernels of `humming-kernels`, for any number of
rows; preparation() compiles them, brings matrices into their layout, and holds each kernel against the definition.

Shape suffixes: T tokens, N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from nibble.errors import BackendError
from nibble.kernels.quantized_linear import naive
from nibble.kernels.weight_formats import WORD, WeightFormat

T = TypeVar("T")
NAIVE = ""
"""The layout that naive.py reads: that of kernels/weight_formats.py."""
TOLERANCE = 0.01
"""Largest error of a kernel, norm over norm; in 16 bits both round by a quarter of that."""
TENSORS = ("codes", "scale", "zero", "global_scale")
"""Fields of a matrix that lie on the device."""
MOST_ROWS = 8192
"""Most rows of a product that a kernel is tested with."""


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix that is kept packed."""

    format: WeightFormat
    codes: Tensor
    scale: Tensor
    """Bytes are uint8, whatever they mean."""
    dtype: torch.dtype
    """The compute dtype; scales have it, where the format has none of its own."""
    rounded: torch.dtype = torch.float32
    """What dequantised values are rounded to; float32: they are not."""
    zero: Tensor | None = None
    global_scale: Tensor | None = None
    layout: str = NAIVE
    """Which kernels read codes and scales: what humming.py calls them by, or NAIVE."""
    shape: tuple[int, int] = (0, 0)
    """Outputs and inputs; they follow from codes in the layout NAIVE."""

    def __post_init__(self) -> None:
        if self.layout == NAIVE:
            rows, words = self.codes.shape
            object.__setattr__(self, "shape", (rows, words * WORD // self.format.bits))

    @property
    def rows(self) -> int:
        """N."""
        return self.shape[0]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that lies on the device, by name."""
        return {name: x for name in TENSORS if (x := getattr(self, name)) is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def key(self) -> tuple[object, ...]:
        """What kernels are chosen by."""
        per_row = self.global_scale is not None and len(self.global_scale) > 1
        return self.format, self.shape, self.dtype, per_row

    @property
    def facts(self) -> tuple[Any, ...]:
        """What the operator is given beside tensors."""
        format = self.format
        return (
            list(self.shape),
            format.codes,
            format.group,
            format.scales,
            self.dtype,
            self.rounded,
            self.layout,
        )


def merged(matrices: Sequence[PackedMatrix]) -> PackedMatrix:
    """Return one matrix with the rows of all; their formats and numbers of inputs are the same."""
    first = matrices[0]
    scales = [m.global_scale.expand(1) for m in matrices if m.global_scale is not None]
    global_scale = torch.cat(scales) if scales else None
    if global_scale is not None:
        same = bool((global_scale == global_scale[0]).all())
        rows = torch.tensor([m.rows for m in matrices], device=global_scale.device)
        global_scale = global_scale[:1] if same else global_scale.repeat_interleave(rows)
    return replace(
        first,
        codes=torch.cat([m.codes for m in matrices]),
        scale=torch.cat([m.scale for m in matrices]),
        zero=None if first.zero is None else torch.cat([m.zero for m in matrices if m.zero is not None]),
        global_scale=global_scale,
    )


def quantized_linear(x: Tensor, matrix: PackedMatrix, locks: Tensor | None = None) -> Tensor:
    """Compute x W^T.

    Args:
        x: [..., K] in the compute dtype.
        matrix: W.
        locks: What preparation() gave with it; None in the layout NAIVE.

    Returns:
        [..., N] in the dtype of x.
    """
    y: Tensor = torch.ops.nibble.quantized_linear(
        x, matrix.codes, matrix.scale, matrix.zero, matrix.global_scale, locks, *matrix.facts
    )
    return y


def preparation(
    matrices: Iterable[PackedMatrix],
) -> Callable[[PackedMatrix], tuple[PackedMatrix, Tensor]]:
    """Compile the kernels of matrices on a GPU.

    Args:
        matrices: In the layout NAIVE.

    Returns:
        A function that brings one of them into the layout of its kernels, and returns it with the int32 locks of its
        products. With the first matrix of each shape and format it tests the kernels. It raises BackendError too.

    Raises:
        BackendError: A kernel does not compile.
    """
    kernels = _explained(lambda: _humming().compile_all(matrices))
    tested: set[tuple[object, ...]] = set()

    def prepare(matrix: PackedMatrix) -> tuple[PackedMatrix, Tensor]:
        packed = _humming().prepare(matrix)
        if matrix.key not in tested:
            _test(matrix, packed, kernels[matrix.key])
            tested.add(matrix.key)
        return packed

    return lambda matrix: _explained(lambda: prepare(matrix))


def _humming() -> Any:
    from nibble.kernels.quantized_linear import humming

    return humming


def _explained(call: Callable[[], T]) -> T:
    """Return what a call returns; raise BackendError for whatever else it raises but a lack of memory."""
    try:
        return call()
    except (BackendError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:  # of all kinds: this is foreign code, and a compiler
        raise BackendError(
            f"humming-kernels cannot multiply quantised weights here ({type(error).__name__}: "
            f"{str(error).strip()[:300]}); --quantized-weights unpacked serves them in the compute dtype"
        ) from error


def _test(matrix: PackedMatrix, packed: tuple[PackedMatrix, Tensor], rows: Sequence[int]) -> None:
    """Raise BackendError unless kernels compute what the definition says, for each of these numbers of rows."""
    generator = torch.Generator(matrix.codes.device).manual_seed(0)
    for tokens in sorted({min(n, MOST_ROWS) for n in rows}):
        x = torch.randn(tokens, matrix.shape[1], generator=generator, device=matrix.codes.device).to(
            matrix.dtype
        )
        expected = naive.quantized_linear(x, matrix).float()
        # Twice, as a kernel must leave its locks as they were.
        for _ in range(2):
            error = float((quantized_linear(x, *packed).float() - expected).norm() / expected.norm())
            if not error <= TOLERANCE:
                raise BackendError(
                    f"the start-up test failed: {tokens} rows times {matrix.shape[0]} x {matrix.shape[1]} weights "
                    f"({matrix.format}) are off by {error:.3g} of the definition's norm, where {TOLERANCE:g} is "
                    "allowed; serve with --quantized-weights unpacked, and please report this"
                )


# An operator, so that a compiler of models does not look into it.
def _quantized_linear(
    x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, global_scale: Tensor | None, locks: Tensor | None,
    shape: list[int], kind: str, group: int, scales: str, dtype: torch.dtype, rounded: torch.dtype, layout: str,
) -> Tensor:  # fmt: skip
    format = WeightFormat(kind, group, scales, zero is not None, global_scale is not None)
    facts = layout, (shape[0], shape[1])
    matrix = PackedMatrix(format, codes, scale, dtype, rounded, zero, global_scale, *facts)
    x_TK = x.reshape(-1, shape[1])
    if layout == NAIVE or not len(x_TK):
        y_TN = naive.quantized_linear(x_TK, matrix) if layout == NAIVE else x_TK.new_empty(0, shape[0])
    else:
        assert locks is not None
        y_TN = _humming().quantized_linear(x_TK, matrix, locks)
    return y_TN.view(*x.shape[:-1], shape[0])


def _shape(x: Tensor, *arguments: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], arguments[5][0])  # type: ignore[index]


_library = torch.library.Library("nibble", "FRAGMENT")  # its definitions live as long as it does
_library.define(
    "quantized_linear(Tensor x, Tensor codes, Tensor scale, Tensor? zero, Tensor? global_scale, Tensor? locks, "
    "int[] shape, str kind, int group, str scales, ScalarType dtype, ScalarType rounded, str layout) -> Tensor"
)
_library.impl("quantized_linear", _quantized_linear, "CompositeExplicitAutograd")
torch.library.register_fake("nibble::quantized_linear", _shape, lib=_library)

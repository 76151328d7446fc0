"""invariant: products and sums in which a row's result depends on no other row, nor on how many there are.

Libraries choose the tile and the split of K by the number of rows, so that the same row has other last bits in a step
of 3 tokens than in one of 300. Here every output is one sum over K in one order, whatever the tile: 16 values at a time
on the tensor cores, from the first to the last. Tiles differ in how many outputs they have, which no output's sum can
see. The torch references, in naive.py, are of the same form.

They are operators, so that a compiler leaves the tile to the time of the call, when the number of rows is known.

Shape suffixes: B products of a batch, M rows, N values of the output, K of the input; S rows sorted by expert, E
experts; R values that are summed.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from nibble.kernels import triton_present
from nibble.kernels.invariant import naive


def _implementation(x: Tensor) -> ModuleType:
    """Return the kernels in Triton on a GPU, else the definition."""
    if x.is_cuda and triton_present():
        from nibble.kernels.invariant import triton as fast

        return fast
    return naive


def mm(x_MK: Tensor, weight_KN: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Multiply two matrices.

    Args:
        x_MK: Rows.
        weight_KN: With any strides; mostly a transposed view.
        bias_N: Added to each row, before it is rounded.

    Returns:
        [M, N] in the dtype of x, summed up in float32.
    """
    y_MN: Tensor = torch.ops.nibble.invariant_bmm(x_MK[None], weight_KN[None], bias_N)
    return y_MN[0]


def bmm(x_BMK: Tensor, weight_BKN: Tensor) -> Tensor:
    """Multiply matrices one by one -> [B, M, N]; see mm()."""
    y_BMN: Tensor = torch.ops.nibble.invariant_bmm(x_BMK, weight_BKN, None)
    return y_BMN


def grouped_mm(x_SK: Tensor, weight_EKN: Tensor, ends_E: Tensor) -> Tensor:
    """Multiply each row with the matrix of its expert.

    Args:
        x_SK: Rows, those of an expert together, in the order of experts.
        weight_EKN: With any strides.
        ends_E: Int32, behind which row each expert's rows end.

    Returns:
        [S, N] in the dtype of x; zeros in rows behind the last expert's.
    """
    y_SN: Tensor = torch.ops.nibble.invariant_grouped_mm(x_SK, weight_EKN, ends_E)
    return y_SN


def row_sums(x_MR: Tensor) -> Tensor:
    """Sum each row up in float32 -> [M]."""
    y_M: Tensor = torch.ops.nibble.invariant_sums(x_MR)
    return y_M


def _bmm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = _implementation(x).bmm(x, weight, bias)
    return y


def _bmm_shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1], weight.shape[2])


def _grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    y: Tensor = _implementation(x).grouped_mm(x, weight, ends)
    return y


def _grouped_shape(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


def _sums(x: Tensor) -> Tensor:
    y: Tensor = _implementation(x).row_sums(x)
    return y


def _sums_shape(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], dtype=torch.float32)


_library = torch.library.Library("nibble", "FRAGMENT")  # its definitions live as long as it does
for _name, _schema, _implement, _shape in (
    ("invariant_bmm", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor", _bmm, _bmm_shape),
    ("invariant_grouped_mm", "(Tensor x, Tensor weight, Tensor ends) -> Tensor", _grouped, _grouped_shape),
    ("invariant_sums", "(Tensor x) -> Tensor", _sums, _sums_shape),
):
    _library.define(_name + _schema)
    _library.impl(_name, _implement, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nibble::{_name}", _shape, lib=_library)

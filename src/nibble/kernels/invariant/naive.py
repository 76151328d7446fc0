"""Products and sums by the book in torch and float32, row by row: the definition of what no other row may change.

Shape suffixes: B products of a batch, M rows, N values of the output, K of the input; S rows sorted by expert, E
experts; R values that are summed.
"""

from __future__ import annotations

import torch
from torch import Tensor


def bmm(x_BMK: Tensor, weight_BKN: Tensor, bias_N: Tensor | None) -> Tensor:
    """Return x weight + bias, one row at a time -> [B, M, N] in the dtype of x.

    Args:
        x_BMK: Rows.
        weight_BKN: Matrices.
        bias_N: Added to each row, if there is one.
    """
    weight_BKN = weight_BKN.float()
    y_BMN = x_BMK.new_empty(*x_BMK.shape[:2], weight_BKN.shape[2], dtype=torch.float32)
    for row in range(x_BMK.shape[1]):
        y_BMN[:, row] = (x_BMK[:, row, None].float() @ weight_BKN)[:, 0]
    return (y_BMN if bias_N is None else y_BMN + bias_N.float()).to(x_BMK.dtype)


def grouped_mm(x_SK: Tensor, weight_EKN: Tensor, ends_E: Tensor) -> Tensor:
    """Return each row times the matrix of its expert -> [S, N] in the dtype of x.

    Args:
        x_SK: Rows in the order of experts.
        weight_EKN: Matrices.
        ends_E: Int32, behind which row each expert's rows end.
    """
    y_SN, start = x_SK.new_zeros(len(x_SK), weight_EKN.shape[2]), 0
    for expert, end in enumerate(ends_E.tolist()):
        y_SN[start:end] = bmm(x_SK[None, start:end], weight_EKN[expert, None], None)[0]
        start = end
    return y_SN


def row_sums(x_MR: Tensor) -> Tensor:
    """Return the sum of each row, in float32 -> [M]."""
    sums = [row_R.float().sum() for row_R in x_MR]
    return torch.stack(sums) if sums else x_MR.new_empty(0, dtype=torch.float32)

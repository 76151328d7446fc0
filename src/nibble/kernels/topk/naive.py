"""The largest values of rows by the book: a stable sort, in which NaN is larger than all others.

Shape suffixes: K largest values; S rows, V values of a row.
"""

from __future__ import annotations

from torch import Tensor


def topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest values along the last dimension, descending, and their places [..., K]."""
    values, indices = x.sort(dim=-1, descending=True, stable=True)
    return values[..., :k].contiguous(), indices[..., :k].contiguous()


def row_max(x_SV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest value of each row, and its place, the first of several."""
    values_S, indices_S = x_SV.max(-1)
    return values_S, indices_S

"""Rotation of the query: what `rot` (formats/transforms.py) did to stored keys, done to the query that meets them.

Shape suffixes: T tokens, H heads, D values of a head.
"""

from __future__ import annotations

from torch import Tensor

from nibble.formats import transforms as transform
from nibble.kernels import triton_present


def rotate(x_THD: Tensor) -> Tensor:
    """x_THD block by block times the Hadamard matrix, in its own dtype, computed in float32.

    The result is a new tensor. On a GPU it is one launch, which can be captured. Sums have another order there: two
    results differ by at most a few units in the last place of float32, of the largest value of a block.
    """
    if x_THD.is_cuda and triton_present():
        from nibble.kernels.rotate import triton as twin

        return twin.rotate(x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous())
    return transform.rotate(x_THD).to(x_THD.dtype)

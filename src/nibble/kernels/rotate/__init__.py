"""rotate: the rotation that `rot` (formats/transforms.py) applied to stored keys, for the queries that meet them.

The torch reference is formats/transforms.py.

Shape suffixes: T tokens, H heads, D values of a head.
"""

from __future__ import annotations

from torch import Tensor

from nibble.formats import transforms
from nibble.kernels import triton_present


def rotate(x_THD: Tensor) -> Tensor:
    """Multiply heads block by block with the Hadamard matrix, in float32.

    On a GPU it is one launch, which can be captured. Sums have another order there: two results differ by at most a
    few units in the last place of float32, of the largest value of a block.

    Args:
        x_THD: Queries.

    Returns:
        A new tensor in the same dtype.
    """
    if x_THD.is_cuda and triton_present():
        from nibble.kernels.rotate import triton as implementation

        return implementation.rotate(x_THD if x_THD.stride(-1) == 1 else x_THD.contiguous())
    return transforms.rotate(x_THD).to(x_THD.dtype)

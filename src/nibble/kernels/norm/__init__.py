"""add_norm: the sum of a residual stream and what a layer adds to it, and the RMS norm of that sum, in one launch.

Code that a compiler makes of it reads a row of some thousand values twice, and adds residuals of earlier layers anew.

Shape suffixes: N values of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nibble.kernels import triton_present
from nibble.kernels.norm import naive

DTYPES = (torch.bfloat16, torch.float16)
MAX_WIDTH = 16384
"""Values of a row, which one program has in registers."""


def serves(x: Tensor) -> bool:
    """Return whether the kernel takes rows of this width and dtype."""
    return x.dtype in DTYPES and x.shape[-1] <= MAX_WIDTH


def add_norm(
    x: Tensor, residual: Tensor, weight_N: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the sum, and its RMS norm (Zhang and Sennrich 2019).

    Args:
        x: [..., N], what is added.
        residual: The same shape and dtype.
        weight_N: Factors of the norm.
        eps: What is added to the mean of squares.
        offset: What is added to the factors, as families do that store how far these are from 1.

    Returns:
        residual + x, rounded, and of these rounded values the norm, rounded once.
    """
    total, normed = torch.ops.nibble.add_norm(x, residual, weight_N, eps, offset)
    return total, normed


# An operator, so that it lies in the graph of a compiled model.
def _add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    if not (x.is_cuda and triton_present() and serves(x)):
        return naive.add_norm(x, residual, weight, eps, offset)
    from nibble.kernels.norm import triton as fast

    return fast.add_norm(x, residual, weight, eps, offset)


def _shapes(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


_library = torch.library.Library("nibble", "FRAGMENT")  # its definitions live as long as it does
_library.define(
    "add_norm(Tensor x, Tensor residual, Tensor weight, float eps, float offset) -> (Tensor, Tensor)"
)
_library.impl("add_norm", _add_norm, "CompositeExplicitAutograd")
torch.library.register_fake("nibble::add_norm", _shapes, lib=_library)

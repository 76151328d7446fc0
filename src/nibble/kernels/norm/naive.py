"""The definition of a sum and its norm, in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def add_norm(
    x: Tensor, residual: Tensor, weight_N: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the sum and its RMS norm; see add_norm() of the package."""
    total = residual + x
    y = total.float()
    normed = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * (weight_N.float() + offset)
    return total, normed.to(x.dtype)

"""The definition of gated products, in torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def gate(y: Tensor, *, rounds_silu: bool = False) -> Tensor:
    """Return silu(the first half) * the second half.

    Args:
        y: [..., 2N].
        rounds_silu: Whether silu is rounded before it is a factor, as it is in a model that is not compiled.

    Returns:
        [..., N] in the dtype of y.
    """
    first, second = y.float().chunk(2, -1)
    first = F.silu(first)
    if rounds_silu:
        first = first.to(y.dtype).float()
    return (first * second).to(y.dtype)


def gated_linear(x: Tensor, weight: Tensor, *, rounds_silu: bool = False) -> Tensor:
    """Return silu(x Wg^T) * (x Wu^T), of products that are rounded to the dtype of x.

    Args:
        x: [..., K].
        weight: [2N, K], gates first.
        rounds_silu: See gate().

    Returns:
        [..., N] in the dtype of x.
    """
    return gate(F.linear(x, weight), rounds_silu=rounds_silu)

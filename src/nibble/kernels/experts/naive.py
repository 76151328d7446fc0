"""The definition of products with experts, in torch. Values of packed matrices are not rounded (matrices.py).

Shape suffixes: T tokens, K chosen experts of a token, S = T * K rows, one for each choice; E experts, N outputs, I
inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nibble.kernels.experts.matrices import PackedExperts

SHORT = 1 << 15
"""What 16 bits have no number for."""


def product(
    x: Tensor, experts_TK: Tensor, weight_ENI: Tensor | PackedExperts, bias_EN: Tensor | None
) -> Tensor:
    """Multiply the row of each choice with the matrix of its expert.

    Args:
        x: [T, I], one row for all choices of a token, or [S, I].
        experts_TK: The experts that tokens chose, of any order. Choices of no expert, E or more, give zeros.
        weight_ENI: Matrices, with any strides, or packed.
        bias_EN: Added to each row, if there is one.

    Returns:
        [S, N] in the dtype of x, summed up in float32.
    """
    choices = experts_TK.flatten()
    x_SI = x if len(x) == len(choices) else x.repeat_interleave(experts_TK.shape[1], 0)
    y_SN = x.new_zeros(len(choices), weight_ENI.shape[1])
    for expert in choices.unique().tolist():
        if not 0 <= expert < weight_ENI.shape[0]:
            continue
        rows = choices == expert
        y_RN = x_SI[rows].float() @ _matrix(weight_ENI, expert).T
        y_SN[rows] = (y_RN if bias_EN is None else y_RN + bias_EN[expert].float()).to(x.dtype)
    return y_SN


def _matrix(weight_ENI: Tensor | PackedExperts, expert: int) -> Tensor:
    """Return an expert's matrix in float32."""
    if isinstance(weight_ENI, PackedExperts):
        return weight_ENI.dequantize(expert)
    return weight_ENI[expert].float()


def combined(
    y_SN: Tensor, places_S: Tensor | None, experts_TK: Tensor, weights_TK: Tensor, experts: int
) -> Tensor:
    """Weight and sum up the rows of each token -> [T, N], in float32 and in the order of experts_TK.

    Args:
        y_SN: Rows, of choices of no expert anything.
        places_S: Which row each choice has; None where they are in the order of choices.
        experts_TK: The experts that tokens chose.
        weights_TK: Their weights.
        experts: How many there are.
    """
    y_TKN = (y_SN if places_S is None else y_SN[places_S]).view(*experts_TK.shape, -1).float()
    y_TKN = y_TKN.where((experts_TK < experts).unsqueeze(-1), 0)
    return (y_TKN * weights_TK.unsqueeze(-1).float()).sum(1).to(y_SN.dtype)


def order(experts_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sort choices by their experts.

    Args:
        experts_TK: The experts that tokens chose.
        num_experts: How many experts there are.

    Returns:
        The choices in their new order, int64 [S], and int32 [E], behind which of them those of each expert end.
    """
    choices = experts_TK.flatten()
    if num_experts < SHORT:
        # A GPU sorts by bytes, in a launch or two for each.
        choices = choices.clamp(max=num_experts).to(torch.int16)
    sorted_S, order_S = torch.sort(choices, stable=True)
    # A number that the device counts: nothing waits for it.
    experts_E = torch.arange(num_experts, dtype=sorted_S.dtype, device=sorted_S.device)
    ends_E = torch.searchsorted(sorted_S, experts_E, right=True)
    return order_S, ends_E.int()

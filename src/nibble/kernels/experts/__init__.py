"""experts: products of tokens with the matrices of the experts that they chose, for any number of tokens.

A few tokens go to a kernel that reads each chosen expert once (triton.py); more are sorted by their experts, and
multiplied by torch's grouped product, or, in other dtypes than bfloat16, by kernels/invariant. Rows come back in an
order that up() chooses, so that nothing is moved between both products; nothing waits for the device.

Shape suffixes: T tokens, K chosen experts of a token, S = T * K rows, one for each choice; E experts, N outputs, I
inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nibble.kernels import invariant, triton_present
from nibble.kernels.experts import naive

MAX_TOKENS = 64
"""Tokens up to which chosen experts are read once each; the largest tile of triton.py (ROWS) has as many."""


def up(x_TI: Tensor, experts_TK: Tensor, weight_ENI: Tensor, bias_EN: Tensor | None) -> tuple[Tensor, Tensor]:
    """Multiply each token with the matrices of its experts.

    Args:
        x_TI: Tokens.
        experts_TK: Their experts. Rows of E and more, which are none, hold anything.
        weight_ENI: Matrices, with any strides.
        bias_EN: Added to each row, if there is one.

    Returns:
        [S, N] in the dtype of x, in some order, and int64 [S]: which row each choice has.
    """
    y_SN, places_S = torch.ops.nibble.experts_up(x_TI, experts_TK, weight_ENI, bias_EN)
    return y_SN, places_S


def down(x_SI: Tensor, experts_TK: Tensor, weight_ENI: Tensor, bias_EN: Tensor | None) -> Tensor:
    """Multiply each row, in the order of up(), with the matrix of its expert -> [S, N] in the same order."""
    y_SN: Tensor = torch.ops.nibble.experts_down(x_SI, experts_TK, weight_ENI, bias_EN)
    return y_SN


def _up(x: Tensor, experts: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    if _is_few(experts):
        places_S = torch.empty(experts.numel(), dtype=torch.int64, device=x.device)
        return _few(x, experts, weight, bias, places_S), places_S
    order_S, ends_E = naive.order(experts, len(weight))
    places_S = torch.empty_like(order_S)
    places_S[order_S] = torch.arange(len(order_S), device=x.device)
    return _grouped(x[order_S // experts.shape[1]], experts, order_S, ends_E, weight, bias), places_S


def _down(x: Tensor, experts: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if _is_few(experts):
        return _few(x, experts, weight, bias)
    return _grouped(x, experts, *naive.order(experts, len(weight)), weight, bias)


def _is_few(experts: Tensor) -> bool:
    return len(experts) <= MAX_TOKENS


def _few(
    x: Tensor, experts: Tensor, weight: Tensor, bias: Tensor | None, places_S: Tensor | None = None
) -> Tensor:
    """Multiply rows in the order of choices."""
    if x.is_cuda and triton_present():
        from nibble.kernels.experts.triton import few_product

        return few_product(x, experts, weight, bias, places_S=places_S)
    if places_S is not None:
        torch.arange(len(places_S), out=places_S)
    return naive.product(x, experts, weight, bias)


def _grouped(
    x: Tensor, experts: Tensor, order_S: Tensor, ends_E: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Multiply rows that are sorted by their experts."""
    matrices = weight.transpose(1, 2)
    # torch's product wants rows of whole 16 bytes.
    if x.is_cuda and x.dtype == torch.bfloat16 and not any(n % 8 for n in weight.shape[1:]):
        y = torch.nn.functional.grouped_mm(x, matrices, offs=ends_E)
    else:
        y = invariant.grouped_mm(x, matrices, ends_E)
    # Rows of no expert hold anything.
    return y if bias is None else y + bias[experts.flatten()[order_S].clamp(max=len(bias) - 1)]


def _up_shape(x: Tensor, experts: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    return _down_shape(x, experts, weight, bias), experts.new_empty(experts.numel(), dtype=torch.int64)


def _down_shape(x: Tensor, experts: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(experts.numel(), weight.shape[1])


_library = torch.library.Library("nibble", "FRAGMENT")  # its definitions live as long as it does
_ARGUMENTS = "(Tensor x, Tensor experts, Tensor weight, Tensor? bias)"
for _name, _result, _implement, _shape in (
    ("experts_up", "(Tensor, Tensor)", _up, _up_shape),
    ("experts_down", "Tensor", _down, _down_shape),
):
    _library.define(f"{_name}{_ARGUMENTS} -> {_result}")
    _library.impl(_name, _implement, "CompositeExplicitAutograd")
    torch.library.register_fake(f"nibble::{_name}", _shape, lib=_library)

"""router: which experts tokens choose, and with which weights, from their router's matrix on.

Logits are rounded to the compute dtype, as a linear layer leaves them, and exponentials of the largest ones are divided
by their sum, or by that of all. Compilers make three or four launches of it, which take longer than reading the matrix;
route.cu takes one for few tokens, and one behind a product for many, or where the matrix is too large.

Shape suffixes: T tokens, I inputs, E experts, K chosen experts of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nibble.kernels.router import cuda, naive


def route(
    x_TI: Tensor,
    weight_EI: Tensor,
    bias_E: Tensor | None,
    top_k: int,
    *,
    is_normalized: bool,
    has_shared: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the experts of tokens.

    Args:
        x_TI: Tokens.
        weight_EI: The router's matrix.
        bias_E: Added to logits, if there is one.
        top_k: How many experts a token chooses.
        is_normalized: Whether weights of a token add up to 1; else they are probabilities among all experts.
        has_shared: Whether the last of E is an expert that each token has beside those that it chooses, with the
            sigmoid of its logit for a weight.

    Returns:
        Logits [T, E], and weights [T, K], in descending order, in the dtype of x; int64 [T, K], whose they are. With a
        shared expert K is one more than top_k, and it is the last.
    """
    logits_TE, weights_TK, experts_TK = torch.ops.nibble.route(
        x_TI, weight_EI, bias_E, top_k, is_normalized, has_shared
    )
    return logits_TE, weights_TK, experts_TK


def _route(
    x: Tensor, weight: Tensor, bias: Tensor | None, top_k: int, is_normalized: bool, has_shared: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if not cuda.serves(weight, top_k + has_shared) or x.dtype != weight.dtype:
        return naive.route(x, weight, bias, top_k, is_normalized, has_shared)
    return cuda.route(x, weight, bias, top_k, is_normalized, has_shared)


def _shapes(
    x: Tensor, weight: Tensor, bias: Tensor | None, top_k: int, is_normalized: bool, has_shared: bool
) -> tuple[Tensor, Tensor, Tensor]:
    # Not len(), which makes a number of a size that a compiler leaves open.
    shape = x.shape[0], top_k + has_shared
    return x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


_library = torch.library.Library("nibble", "FRAGMENT")  # its definitions live as long as it does
_library.define(
    "route(Tensor x, Tensor weight, Tensor? bias, int top_k, bool is_normalized, bool has_shared) "
    "-> (Tensor, Tensor, Tensor)"
)
_library.impl("route", _route, "CompositeExplicitAutograd")
torch.library.register_fake("nibble::route", _shapes, lib=_library)

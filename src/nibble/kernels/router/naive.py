"""The definition of routes, in torch.

Shape suffixes: T tokens, I inputs, E experts, K chosen experts of a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nibble.kernels import topk


def route(
    x_TI: Tensor,
    weight_EI: Tensor,
    bias_E: Tensor | None,
    top_k: int,
    is_normalized: bool,
    has_shared: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits [T, E], weights [T, K], and int64 [T, K], whose they are; K with the shared expert's."""
    logits_TE = F.linear(x_TI, weight_EI, bias_E)
    if not has_shared:
        return (logits_TE, *choose(logits_TE, top_k, is_normalized))
    weights_TK, experts_TK = choose(logits_TE[:, :-1], top_k, is_normalized)
    shared_T1 = torch.full_like(experts_TK[:, :1], len(weight_EI) - 1)
    weights_TK = torch.cat((weights_TK, logits_TE[:, -1:].sigmoid()), 1)
    return logits_TE, weights_TK, torch.cat((experts_TK, shared_T1), 1)


def choose(logits_TE: Tensor, top_k: int, is_normalized: bool) -> tuple[Tensor, Tensor]:
    """Return weights [T, K] in the dtype of logits, and int64 [T, K], whose they are."""
    largest_TK, experts_TK = topk.naive.topk(logits_TE, top_k)
    over = largest_TK if is_normalized else logits_TE
    weights_TK = torch.exp(largest_TK.float() - over.float().logsumexp(-1, keepdim=True))
    return weights_TK.to(logits_TE.dtype), experts_TK

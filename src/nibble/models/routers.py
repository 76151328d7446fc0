"""Routers of a model that kernels/router computes: those that do what its definition does, as running them shows.

Shape suffixes: T tokens, I inputs, E experts, K chosen experts of a token.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from nibble.kernels import router

TOKENS = 32
"""Tokens of the trial."""
TOLERANCE = 0.02
"""Largest difference of a weight, over the largest weight; they are rounded to 16 bits."""


def serve_routers(model: nn.Module) -> int:
    """Let kernels/router compute the routers of a model on a GPU that it serves, in place; return their number."""
    count = 0
    for module in model.modules():
        if (is_normalized := normalization_of(module)) is not None:
            set_router(module, is_normalized)
            count += 1
    return count


def set_router(module: Any, is_normalized: bool) -> None:
    """Let kernels/router compute a router."""
    module.is_normalized = is_normalized
    module.forward = MethodType(_forward, module)


def _forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x_TI = hidden_states.reshape(-1, hidden_states.shape[-1])
    bias_E = getattr(self, "bias", None)
    return router.route(x_TI, self.weight, bias_E, self.top_k, is_normalized=self.is_normalized)


def normalization_of(module: Any) -> bool | None:
    """Return whether a module's weights are normalised, if it is a router that kernels compute, else None."""
    weight, top_k = getattr(module, "weight", None), getattr(module, "top_k", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not isinstance(top_k, int) or top_k < 1:
        return None
    if not router.cuda.serves(weight, top_k) or set(module.state_dict()) - {"weight", "bias"}:
        return None
    return observed_normalization(module, top_k)


@torch.inference_mode()
def observed_normalization(module: Any, top_k: int) -> bool | None:
    """Return the same of a module with one matrix, by what it computes for random tokens."""
    generator = torch.Generator().manual_seed(0)
    x_TI = torch.randn(TOKENS, module.weight.shape[1], generator=generator).to(module.weight)
    try:
        logits_TE, weights_TK, experts_TK = module(x_TI)
        return next((n for n in (True, False) if _is_same(logits_TE, weights_TK, experts_TK, top_k, n)), None)
    except Exception:  # of all kinds: this is foreign code, and may be no router
        return None


def _is_same(
    logits_TE: Tensor, weights_TK: Tensor, experts_TK: Tensor, top_k: int, is_normalized: bool
) -> bool:
    """Return whether weights and experts are what the definition chooses, but for those with equal logits."""
    expected_TK, own_TK = router.naive.choose(logits_TE, top_k, is_normalized)
    same = torch.equal(logits_TE.gather(1, experts_TK), logits_TE.gather(1, own_TK))
    difference_TK = (weights_TK.float() - expected_TK.float()).abs()
    return same and bool(difference_TK.max() <= TOLERANCE * expected_TK.float().max())

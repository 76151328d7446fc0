"""Experts on a CPU, whose result for a token does not depend on the other tokens.

The implementations of Transformers multiply as many rows as an expert happens to get, and sums of float32
come out another way for 1 row than for 8; see linear.py for why that matters and how packed weights avoid it.
Where weights cannot be packed, and on a GPU, experts stay as Transformers has them. Owns pack_experts(). Must
not know of attention or of caches.

Shape suffixes: T tokens, K experts of a token, N rows of one expert, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

from nibble.models import linear

NAME = "nibble_packed"
_PACKED = "nibble_packed_experts"
_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


def pack_experts(model: nn.Module) -> int:
    """Packs the float32 experts of a CPU model in place; returns how many modules hold some."""
    if not linear.available():
        return 0
    found = [module for module in model.modules() if _packable(module)]
    for module in found:
        setattr(module, _PACKED, {name: _pack(module, name) for name in _WEIGHTS if hasattr(module, name)})
        module.config._experts_implementation = NAME  # type: ignore[union-attr]
    return len(found)


def _packable(module: Any) -> bool:
    """Whether Transformers lets our experts function compute `module`, and its weights can be packed."""
    weights = [
        getattr(module, name) for name in _WEIGHTS if isinstance(getattr(module, name, None), nn.Parameter)
    ]
    return (
        hasattr(type(module), "_apply_gate")
        and bool(weights)
        and all(w.dim() == 3 and w.dtype == torch.float32 and w.device.type == "cpu" for w in weights)
    )


def _pack(module: Any, name: str) -> list[Tensor]:
    """The packed weights of each expert; the plain ones are let go."""
    weights = getattr(module, name).detach()
    setattr(module, name, None)
    return [linear.pack(w.T.contiguous() if module.is_transposed else w) for w in weights]


def _forward(self: Any, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """What each token's experts make of it, weighted and summed in the order of experts_TK."""
    packed = getattr(self, _PACKED)
    normed = getattr(self, "has_post_expert_norm", False)  # newer Transformers than 5.17 say so
    first = "gate_up_proj" if self.has_gate else "up_proj"
    out_TKH = x_TH.new_zeros(*experts_TK.shape, x_TH.shape[-1])
    for expert in sorted(set(experts_TK.flatten().tolist())):
        tokens, places = (experts_TK == expert).nonzero(as_tuple=True)
        y = linear.product(x_TH[tokens], packed[first][expert], _bias(self, first, expert))
        y = self._apply_gate(y) if self.has_gate else self.act_fn(y)
        y_NH = linear.product(y, packed["down_proj"][expert], _bias(self, "down_proj", expert))
        out_TKH[tokens, places] = self.post_expert_norm(y_NH) if normed else y_NH
    return (out_TKH * weights_TK.unsqueeze(-1)).sum(1).to(x_TH.dtype)


def _bias(self: Any, name: str, expert: int) -> Tensor | None:
    return getattr(self, f"{name}_bias")[expert] if self.has_bias else None


ExpertsInterface.register(NAME, _forward)

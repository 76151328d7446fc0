"""Experts on a CPU whose result for a token does not depend on the other tokens.

The implementations of Transformers multiply as many rows as an expert gets, and float32 sums differ between 1 row and
8; linear.py says why that matters and how packed weights avoid it. Experts stay as Transformers has them on a GPU, and
where weights cannot be packed.

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
    """Pack the float32 experts of a CPU model in place; return the number of modules with experts."""
    if not linear.is_available():
        return 0
    modules = [module for module in model.modules() if _packable(module)]
    for module in modules:
        setattr(module, _PACKED, {name: _pack(module, name) for name in _WEIGHTS if hasattr(module, name)})
        module.config._experts_implementation = NAME  # type: ignore[union-attr]
    return len(modules)


def _packable(module: Any) -> bool:
    """Return whether Transformers lets our function compute `module`, and its weights can be packed."""
    weights = [
        getattr(module, name) for name in _WEIGHTS if isinstance(getattr(module, name, None), nn.Parameter)
    ]
    return (
        # Transformers gives _apply_gate to the classes whose experts a registered function may compute.
        hasattr(type(module), "_apply_gate")
        and bool(weights)
        and all(w.dim() == 3 and w.dtype == torch.float32 and w.device.type == "cpu" for w in weights)
    )


def _pack(module: Any, name: str) -> list[Tensor]:
    """Return the packed weights of each expert and free the plain ones."""
    weights = getattr(module, name).detach()
    # The module lets go of the plain weights: both forms together would take twice the memory.
    setattr(module, name, None)
    # Some families store [in, out], and packing takes [out, in].
    return [linear.pack(w.T.contiguous() if module.is_transposed else w) for w in weights]


def _forward(self: Any, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return the experts' outputs, weighted and summed in the order of experts_TK."""
    packed = getattr(self, _PACKED)
    normed = getattr(self, "has_post_expert_norm", False)  # set by Transformers after 5.17
    first = "gate_up_proj" if self.has_gate else "up_proj"
    out_TKH = x_TH.new_zeros(*experts_TK.shape, x_TH.shape[-1])
    for expert in sorted(set(experts_TK.flatten().tolist())):
        tokens, places = (experts_TK == expert).nonzero(as_tuple=True)
        y = linear.packed_linear(x_TH[tokens], packed[first][expert], _bias(self, first, expert))
        y = self._apply_gate(y) if self.has_gate else self.act_fn(y)
        y_NH = linear.packed_linear(y, packed["down_proj"][expert], _bias(self, "down_proj", expert))
        out_TKH[tokens, places] = self.post_expert_norm(y_NH) if normed else y_NH
    # One sum over K, in the order of the token's own experts: other tokens do not change it.
    return (out_TKH * weights_TK.unsqueeze(-1)).sum(1).to(x_TH.dtype)


def _bias(self: Any, name: str, expert: int) -> Tensor | None:
    return getattr(self, f"{name}_bias")[expert] if self.has_bias else None


ExpertsInterface.register(NAME, _forward)

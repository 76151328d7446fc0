"""Experts of a model on a GPU, computed by kernels/experts: no way for few tokens waits for the host or sorts.

Transformers lets a registered function compute experts whose matrices lie in one tensor. What happens between both
products (the gate) stays the family's own code.

Shape suffixes: T tokens, K chosen experts of a token, S = T * K rows, one for each choice; H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

from nibble.kernels import experts, triton_present

_NAME = "nibble_experts"
_MATRICES = ("gate_up_proj", "up_proj", "down_proj")


def serve_experts(model: nn.Module) -> int:
    """Let kernels/experts compute the experts of a model on a GPU, in place; return the number of their modules."""
    modules = [module for module in model.modules() if _serves(module)]
    for module in modules:
        module.config._experts_implementation = _NAME  # type: ignore[union-attr]
    return len(modules)


def _serves(module: Any) -> bool:
    """Return whether Transformers lets our function compute `module`, and there are kernels for its matrices."""
    matrices = [getattr(module, name) for name in _MATRICES if hasattr(module, name)]
    return (
        # What Transformers gives to experts that a registered function may compute.
        hasattr(module, "is_transposed")
        and len(matrices) == 2
        and triton_present()
        and all(
            isinstance(x, nn.Parameter)
            and x.dim() == 3
            and x.is_cuda
            and x.dtype in (torch.bfloat16, torch.float16)
            for x in matrices
        )
    )


def compute(self: Any, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return the experts' outputs, weighted and summed in the order of experts_TK."""
    first = "gate_up_proj" if self.has_gate else "up_proj"
    y, places_S = experts.up(x_TH, experts_TK, *_matrices(self, first))
    y = self._apply_gate(y) if self.has_gate else self.act_fn(y)
    y_SH = experts.down(y, experts_TK, *_matrices(self, "down_proj"))
    if getattr(self, "has_post_expert_norm", False):  # set by Transformers after 5.17
        y_SH = self.post_expert_norm(y_SH)
    y_TKH = y_SH[places_S].view(*experts_TK.shape, -1)
    # Some families choose none by a number behind the last.
    y_TKH = y_TKH.where((experts_TK < len(self.down_proj)).unsqueeze(-1), 0)
    return (y_TKH * weights_TK.unsqueeze(-1)).sum(1).to(x_TH.dtype)


def _matrices(module: Any, name: str) -> tuple[Tensor, Tensor | None]:
    """Return matrices [E, out, in], and their biases."""
    weight = getattr(module, name)
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    return weight.transpose(1, 2) if module.is_transposed else weight, bias


ExpertsInterface.register(_NAME, compute)

"""Experts of a model that kernels/experts computes: on a GPU, and packed ones anywhere.

No way for few tokens waits for the host or sorts.

Transformers lets a registered function compute experts whose matrices lie in one tensor. What happens between both
products (the gate) is computed by kernels too where it is one that they know, as running it shows; else it stays the
family's own code.

Shape suffixes: T tokens, K chosen experts of a token, S = T * K rows, one for each choice; H hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

from nibble.kernels import experts, triton_present
from nibble.kernels.experts.gate import CLAMPED, SILU, Gate, gated
from nibble.kernels.experts.matrices import TENSORS, PackedExperts
from nibble.kernels.quantized_linear.quantize import rounded
from nibble.kernels.weight_formats import WeightFormat

NAME = "nibble_experts"
"""By which Transformers knows compute()."""
_MATRICES = ("gate_up_proj", "up_proj", "down_proj")
COUNT = 2
"""How many of these experts have."""
_GATE_ROWS, _GATE_SIZE = 64, 8.0
"""Rows and values of the trial of a gate, and how large these are: beyond usual limits."""


class ExpertMatrices(nn.Module):
    """One matrix of each expert, packed, in the place of the parameter of a module.

    The family's own code reads single matrices of it, which are then computed.
    """

    codes: Tensor
    scale: Tensor
    global_scale: Tensor | None

    def __init__(self, experts: PackedExperts, *, is_transposed: bool) -> None:
        super().__init__()
        self.format, self.dtype, self.facts = experts.format, experts.dtype, experts.facts
        self.packed_shape, self.is_packed_transposed = experts.shape, is_transposed
        for name in TENSORS:
            self.register_buffer(name, getattr(experts, name), persistent=False)

    @property
    def matrices(self) -> PackedExperts:
        """Return the matrices."""
        rounded = getattr(torch, self.facts[-1])
        return PackedExperts(self.format, self.codes, self.scale, self.dtype, rounded, self.global_scale)

    def __getitem__(self, expert: int | Tensor) -> Tensor:
        """Return an expert's matrix in the compute dtype, as the family has it."""
        weight_NI = self.matrices.dequantize(int(expert)).to(self.dtype)
        return weight_NI.T if self.is_packed_transposed else weight_NI


def expert_matrices(module: Any) -> dict[str, nn.Parameter]:
    """Return the plain matrices of experts that a registered function may compute; none of other modules."""
    # What Transformers gives to experts that a registered function may compute.
    if not hasattr(module, "is_transposed"):
        return {}
    candidates = {name: getattr(module, name, None) for name in _MATRICES}
    weights = {name: x for name, x in candidates.items() if isinstance(x, nn.Parameter) and x.dim() == 3}
    return weights if len(weights) == COUNT else {}


def single_matrices(name: str, weight_E: Tensor, *, is_transposed: bool) -> tuple[Tensor, ...]:
    """Return views of a parameter of expert_matrices() as most checkpoints have it: gate and up apart, [E, N, K] each.

    Families whose matrices have inputs first have both in one in their checkpoints too.

    Args:
        name: of the parameter.
        weight_E: [E, N, K], or [E, K, N] if is_transposed.
        is_transposed: whether inputs come before outputs.
    """
    if is_transposed:
        return (weight_E.transpose(1, 2),)
    return weight_E.chunk(2, 1) if name.endswith(_MATRICES[0]) else (weight_E,)


def round_experts(
    name: str, weight_E: Tensor, format: WeightFormat, block_rows: int, *, is_transposed: bool
) -> None:
    """Give matrices of all experts the errors of a format, in place; see single_matrices() and rounded()."""
    for x_ENK in single_matrices(name, weight_E, is_transposed=is_transposed):
        for x_NK in x_ENK:
            x_NK.copy_(rounded(x_NK, format, block_rows))


def packed_matrices(module: nn.Module) -> list[ExpertMatrices]:
    """Return the packed matrices of a module with experts, or of all modules of a model."""
    return [part for part in module.modules() if isinstance(part, ExpertMatrices)]


def has_packed_experts(module: nn.Module) -> bool:
    """Return whether a module itself has packed matrices."""
    return any(isinstance(part, ExpertMatrices) for part in module.children())


def set_packed_experts(module: Any, matrices: Mapping[str, PackedExperts]) -> None:
    """Replace the matrices of a module with experts by packed ones, which kernels/experts multiplies."""
    for name, packed in matrices.items():
        delattr(module, name)
        setattr(module, name, ExpertMatrices(packed, is_transposed=module.is_transposed))
    # Its own: layers that share it may have experts of another kind.
    module.config = copy.copy(module.config)
    module.config._experts_implementation = NAME
    _set_gate(module)


def serve_experts(model: nn.Module) -> int:
    """Let kernels/experts compute the plain experts of a model on a GPU; return the number of their modules."""
    modules: list[Any] = [module for module in model.modules() if _serves(module)]
    for module in modules:
        module.config._experts_implementation = NAME
        _set_gate(module)
    return len(modules)


def _serves(module: Any) -> bool:
    """Return whether Transformers lets our function compute `module`, and there are kernels for its matrices."""
    matrices = expert_matrices(module).values()
    return (
        bool(matrices)
        and triton_present()
        and all(x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) for x in matrices)
    )


def _set_gate(module: Any) -> None:
    gate = gate_of(module)
    module.nibble_gate = None if gate is None else (gate.kind, gate.limit, gate.factor)


@torch.inference_mode()
def gate_of(module: Any) -> Gate | None:
    """Return the gate of experts, if it is one that kernels compute, by what it makes of random values."""
    if not module.has_gate or getattr(module, "has_post_expert_norm", False):
        return None
    y_SN = torch.randn(_GATE_ROWS, _GATE_ROWS, generator=torch.Generator().manual_seed(0)) * _GATE_SIZE
    gates = [Gate(SILU)]
    if all(isinstance(getattr(module, name, None), float | int) for name in ("limit", "alpha")):
        gates.append(Gate(CLAMPED, float(module.limit), float(module.alpha)))
    try:
        actual_SN = module._apply_gate(y_SN)
        return next((gate for gate in gates if torch.allclose(actual_SN, gated(y_SN, gate), rtol=1e-4)), None)
    except Exception:  # of all kinds: this is foreign code, which may want another device
        return None


def compute(self: Any, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return the experts' outputs, weighted and summed in the order of experts_TK."""
    first = "gate_up_proj" if self.has_gate else "up_proj"
    if (gate := getattr(self, "nibble_gate", None)) is not None:
        matrices = _matrices(self, first), _matrices(self, "down_proj")
        return experts.layer(x_TH, experts_TK, weights_TK, *matrices, Gate(*gate)).to(x_TH.dtype)
    y, places_S = experts.up(x_TH, experts_TK, *_matrices(self, first))
    y = self._apply_gate(y) if self.has_gate else self.act_fn(y)
    y_SH = experts.down(y, experts_TK, *_matrices(self, "down_proj"))
    if getattr(self, "has_post_expert_norm", False):  # set by Transformers after 5.17
        y_SH = self.post_expert_norm(y_SH)
    y_TKH = y_SH[places_S].view(*experts_TK.shape, -1)
    # Some families choose none by a number behind the last.
    y_TKH = y_TKH.where((experts_TK < _count(self.down_proj)).unsqueeze(-1), 0)
    return (y_TKH * weights_TK.unsqueeze(-1)).sum(1).to(x_TH.dtype)


def _count(weight: Tensor | ExpertMatrices) -> int:
    return weight.packed_shape[0] if isinstance(weight, ExpertMatrices) else len(weight)


def _matrices(module: Any, name: str) -> tuple[Tensor | ExpertMatrices, Tensor | None]:
    """Return matrices [E, out, in], and their biases."""
    weight = getattr(module, name)
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    if isinstance(weight, ExpertMatrices):
        return weight, bias
    return weight.transpose(1, 2) if module.is_transposed else weight, bias


ExpertsInterface.register(NAME, compute)

"""Linear layers for the CPU whose result for a token does not depend on the number of tokens.

Plain float32 products sum in another order for 1 token than for 8. Quantised K and V can turn such a last-bit
difference into a whole step, and an answer would depend on the batch. oneDNN products over weights packed for small
batches do not have that, except for a single row, and are 2 to 3 times faster from 2 tokens on. Without oneDNN,
layers stay unchanged.

Experts on a CPU whose result for a token does not depend on the other tokens.

The implementations of Transformers multiply as many rows as an expert gets, and float32 sums differ between 1 row and
8; linear.py says why that matters and how packed weights avoid it. Experts stay as Transformers has them on a GPU, and
where weights cannot be packed.

Shape suffixes: T tokens, K experts of a token, N rows of one expert, H hidden size.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface
from transformers.pytorch_utils import Conv1D

PACKED_FOR = 8
"""Number of tokens that weights are packed for."""
VECTOR = 32
"""Most values that torch's vectorised functions take at once on a CPU."""


def is_available() -> bool:
    """Return whether this build of torch can pack weights."""
    has_onednn = torch.backends.mkldnn.is_available()
    return bool(has_onednn) and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


@functools.cache
def _linear() -> Any:
    """Return oneDNN's product, looked up once: the lookup costs as much as a small product."""
    return torch.ops.mkldnn._linear_pointwise.default


def pack(weight: Tensor) -> Tensor:
    """Pack `weight` [out, in] into an opaque tensor for packed_linear()."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), PACKED_FOR)
    return packed


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b for a packed W.

    Args:
        x: float32 [..., in].
        packed: from pack().
        bias: [out].
    """
    if x.numel() > x.shape[-1]:
        y: Tensor = _linear()(x, packed, bias, "none", [], "")
        return y
    # A single row is summed in another order than one of several, so it is doubled.
    pair: Tensor = _linear()(x.reshape(1, -1).repeat(2, 1), packed, bias, "none", [], "")
    return pair[:1].reshape(*x.shape[:-1], -1)


class PackedLinear(nn.Module):
    """y = x W^T + b with W [out, in] packed by oneDNN; the packed weight replaces the plain one."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = pack(weight)
        self.bias = bias

    @property
    def weight(self) -> Tensor:
        """Return the plain weight, unpacked at each access, for models that read its dtype or values."""
        plain: Tensor = self.packed.to_dense()
        return plain

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b."""
        return packed_linear(x, self.packed, self.bias)


class PackedWeight(Tensor):
    """The weight of a module that calls F.linear itself, as routers do: such calls use the packed form."""

    packed: Tensor

    @staticmethod
    def from_weight(weight: Tensor) -> PackedWeight:
        """Return `weight` with its packed form beside it."""
        packed_weight: PackedWeight = weight.detach().as_subclass(PackedWeight)
        packed_weight.packed = pack(weight)
        return packed_weight

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func is F.linear
            and len(args) > 1
            and hasattr(args[1], "packed")
            and args[0].dtype == torch.float32
        ):
            return packed_linear(args[0], args[1].packed, args[2] if len(args) > 2 else kwargs.get("bias"))
        # Without this, func() would come back to this method.
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        # A cast to the same dtype gives the same values, and must not lose the packed form.
        return args[0] if func in _CASTS and result.dtype == args[0].dtype else result


_CASTS = frozenset({Tensor.to, Tensor.type, Tensor.float})


def row_multiple(model: nn.Module) -> int:
    """Return the multiple to which a batch is padded, so that no row depends on the number of rows.

    torch computes the rest after full vectors of an activation function (silu, gelu) in another way, with other last
    bits, so rows times width should fill the vectors.
    """
    output = getattr(model, "lm_head", None)
    widths = {
        module.out_features
        for module in model.modules()
        if isinstance(module, (nn.Linear, PackedLinear)) and module is not output
    }
    # Gates narrower than VECTOR do not count: they would make every step many times larger.
    return math.lcm(*(VECTOR // math.gcd(width, VECTOR) for width in widths if width >= VECTOR))


def pack_linears(model: nn.Module) -> int:
    """Pack the float32 linear layers of a CPU model in place; return their number."""
    if not is_available():
        return 0
    # A list first, because replacing a layer changes what named_children() walks over.
    children = [(parent, *child) for parent in model.modules() for child in parent.named_children()]
    packed = [_replace(parent, name, child) for parent, name, child in children]
    return sum(packed)


def _replace(parent: nn.Module, name: str, child: nn.Module) -> bool:
    """Pack one module if it is a linear layer; return whether it was."""
    # From _parameters, because `weight` may also be a property, as PackedLinear's is.
    weight = child._parameters.get("weight")
    if weight is None or weight.dim() != 2 or weight.dtype != torch.float32 or weight.device.type != "cpu":
        return False
    # Exactly this class: a subclass may compute something else.
    if type(child) is nn.Linear:
        setattr(parent, name, PackedLinear(weight, child.bias))
    # Conv1D, the layer of GPT-2, stores [in, out].
    elif isinstance(child, Conv1D):
        setattr(parent, name, PackedLinear(weight.T, child.bias))
    # An embedding is looked up, not multiplied.
    elif isinstance(child, (nn.Embedding, nn.Linear)):
        return False
    else:
        # torch refuses a plain tensor under a name that belongs to a parameter.
        del child.weight
        child.weight = PackedWeight.from_weight(weight)
    return True


NAME = "nibble_packed"
_PACKED = "nibble_packed_experts"
_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


def pack_experts(model: nn.Module) -> int:
    """Pack the float32 experts of a CPU model in place; return the number of modules with experts."""
    if not is_available():
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
    return [pack(w.T.contiguous() if module.is_transposed else w) for w in weights]


def _forward(self: Any, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return the experts' outputs, weighted and summed in the order of experts_TK."""
    packed = getattr(self, _PACKED)
    normed = getattr(self, "has_post_expert_norm", False)  # set by Transformers after 5.17
    first = "gate_up_proj" if self.has_gate else "up_proj"
    out_TKH = x_TH.new_zeros(*experts_TK.shape, x_TH.shape[-1])
    for expert in sorted(set(experts_TK.flatten().tolist())):
        tokens, places = (experts_TK == expert).nonzero(as_tuple=True)
        y = packed_linear(x_TH[tokens], packed[first][expert], _bias(self, first, expert))
        y = self._apply_gate(y) if self.has_gate else self.act_fn(y)
        y_NH = packed_linear(y, packed["down_proj"][expert], _bias(self, "down_proj", expert))
        out_TKH[tokens, places] = self.post_expert_norm(y_NH) if normed else y_NH
    # One sum over K, in the order of the token's own experts: other tokens do not change it.
    return (out_TKH * weights_TK.unsqueeze(-1)).sum(1).to(x_TH.dtype)


def _bias(self: Any, name: str, expert: int) -> Tensor | None:
    return getattr(self, f"{name}_bias")[expert] if self.has_bias else None


ExpertsInterface.register(NAME, _forward)

"""Linear layers for the CPU whose result for a token does not depend on how many tokens are computed with it.

Plain float32 products sum in another order for 1 token than for 8; quantised K and V turn such a last-bit
difference into a whole step now and then, and an answer would depend on the batch. oneDNN products over
weights packed for small batches do not, but for a single row, and are 2 to 3 times faster from 2 tokens on.
Where torch brings no oneDNN, layers stay as they are. Owns pack_linears(), pack() and product(). Must not
know of attention or of caches.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

PACKED_FOR = 8
"""Tokens that weights are packed for."""
VECTOR = 32
"""Values that torch's vectorised functions take at once on a CPU, at most."""


def available() -> bool:
    """Whether this build of torch can pack weights."""
    found = torch.backends.mkldnn.is_available()
    return bool(found) and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


@functools.cache
def _linear() -> Any:
    """oneDNN's product, looked up once: the look-up costs as much as a small product."""
    return torch.ops.mkldnn._linear_pointwise.default


def pack(weight: Tensor) -> Tensor:
    """weight [out, in] -> an opaque tensor for product()."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), PACKED_FOR)
    return packed


def product(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b, for a packed W."""
    if x.numel() > x.shape[-1]:
        y: Tensor = _linear()(x, packed, bias, "none", [], "")
        return y
    # A row alone is summed in another order than among others, so it gets company.
    pair: Tensor = _linear()(x.reshape(1, -1).repeat(2, 1), packed, bias, "none", [], "")
    return pair[:1].reshape(*x.shape[:-1], -1)


class PackedLinear(nn.Module):
    """y = x W^T + b, with W [out, in] packed by oneDNN. The packed weight is opaque, and replaces the plain
    one.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = pack(weight)
        self.bias = bias

    @property
    def weight(self) -> Tensor:
        """The plain weight, unpacked anew at each reading: for models that look at it (its dtype, for
        one).
        """
        plain: Tensor = self.packed.to_dense()
        return plain

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.packed, self.bias)


class PackedWeight(Tensor):
    """The weight of a module that calls F.linear itself, as routers of experts do: such calls use its packed
    form.
    """

    packed: Tensor

    @staticmethod
    def of(weight: Tensor) -> PackedWeight:
        found: PackedWeight = weight.detach().as_subclass(PackedWeight)
        found.packed = pack(weight)
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            func is F.linear
            and len(args) > 1
            and hasattr(args[1], "packed")
            and args[0].dtype == torch.float32
        ):
            return product(args[0], args[1].packed, args[2] if len(args) > 2 else kwargs.get("bias"))
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
        # a cast to the dtype it has gives the very same values, and must not lose their packed form
        return args[0] if func in _CASTS and found.dtype == args[0].dtype else found


_CASTS = frozenset({Tensor.to, Tensor.type, Tensor.float})


def row_multiple(model: nn.Module) -> int:
    """Rows to compute at once, in multiples, so that no row's result depends on how many others there are.

    torch computes what is left over after full vectors of an activation function (silu, gelu) in another way, with
    other last bits, so rows times width should fill the vectors. Widths under VECTOR (gates of a few values) are left
    out: they would make every step that many times larger.
    """
    output = getattr(model, "lm_head", None)
    widths = {
        module.out_features
        for module in model.modules()
        if isinstance(module, (nn.Linear, PackedLinear)) and module is not output
    }
    return math.lcm(*(VECTOR // math.gcd(width, VECTOR) for width in widths if width >= VECTOR))


def pack_linears(model: nn.Module) -> int:
    """Replaces the float32 linear layers of a CPU model in place; returns how many."""
    if not available():
        return 0
    children = [(parent, *child) for parent in model.modules() for child in parent.named_children()]
    packed = [_replace(parent, name, child) for parent, name, child in children]
    return sum(packed)


def _replace(parent: nn.Module, name: str, child: nn.Module) -> bool:
    """Packs one module, if it is a linear layer of some kind."""
    weight = child._parameters.get("weight")
    if weight is None or weight.dim() != 2 or weight.dtype != torch.float32 or weight.device.type != "cpu":
        return False
    if type(child) is nn.Linear:
        setattr(parent, name, PackedLinear(weight, child.bias))
    elif isinstance(child, Conv1D):
        setattr(parent, name, PackedLinear(weight.T, child.bias))
    elif isinstance(child, (nn.Embedding, nn.Linear)):
        return False
    else:
        del child.weight
        child.weight = PackedWeight.of(weight)
    return True

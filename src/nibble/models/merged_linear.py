"""Linear layers on a GPU. Those that read the same input are one product: queries, keys and values; gate and up.

Which do is observed: the model runs once without weights, and notes which linear layers are handed the very same
tensor. One wide product reads its weights faster than several narrow ones, and a decode step is hardly more than
reading weights. Modules keep their places and names; the first that is called computes for all. Other large layers are
given the same kernel for few rows. On a CPU layers are packed one by one (linear.py). Owns widen(). Must not know of
attention or of any family.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nibble.kernels import linear
from nibble.models import hook
from nibble.models.adapt import mask_for
from nibble.models.guard import Unrouted
from nibble.models.observe import skeleton

_TOKENS = 2


class _Product:
    """The product of several layers that read the same input. What it holds between calls is let go at the last."""

    def __init__(self, weight: Tensor, bias: Tensor | None, parts: int) -> None:
        self.weight, self.bias, self.parts = weight, bias, parts
        self.multiply = linear.linear if linear.serves(weight) else F.linear
        self.x: Tensor | None = None
        self.y: Tensor | None = None
        self.left = 0

    def __call__(self, x: Tensor, start: int, stop: int) -> Tensor:
        if self.x is not x or self.y is None:
            self.x = self.y = None
            self.y = self.multiply(x, self.weight, self.bias)
            self.x, self.left = x, self.parts
        found = self.y[..., start:stop]
        self.left -= 1
        if not self.left:
            self.x = self.y = None
        return found


class MergedLinear(nn.Module):
    """One of the layers: rows [start, stop) of the product."""

    def __init__(self, product: _Product, start: int, stop: int) -> None:
        super().__init__()
        self.product, self.start, self.stop = product, start, stop
        self.weight = nn.Parameter(product.weight[start:stop], requires_grad=False)
        self.bias = (
            None if product.bias is None else nn.Parameter(product.bias[start:stop], requires_grad=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.start, self.stop)


class LargeLinear(nn.Module):
    """A layer by itself, computed by kernels/linear/__init__.py."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return linear.linear(x, self.weight, self.bias)


def widen(model: Any) -> None:
    """Makes the linear layers of `model` ready for steps of few tokens, in place. The layer of logits stays as it is:
    libraries read a weight that large at full speed.
    """
    merge_linears(model)
    output = _output(model)
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module is not output and linear.serves(module.weight):
            _put(model, name, LargeLinear(module))


def _output(model: Any) -> nn.Module | None:
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def merge_linears(model: Any) -> int:
    """Merges linear layers of `model` that read the same input, in place; returns how many it has merged."""
    groups = [names for names in together(model) if _alike([model.get_submodule(name) for name in names])]
    for names in groups:
        _merge(model, names)
    return sum(map(len, groups))


def together(model: Any) -> list[tuple[str, ...]]:
    """Names of linear layers that are handed the very same tensor, in the order of their calls."""
    bare: Any = skeleton(deepcopy(model.config))  # which it would change
    calls: dict[int, list[str]] = {}
    inputs = []  # kept alive, so that no two have the same id

    def note(name: str, x: Tensor) -> None:
        inputs.append(x)
        calls.setdefault(id(x), []).append(name)

    for name, module in bare.named_modules():
        if type(module) is nn.Linear:
            module.register_forward_pre_hook(lambda _, args, name=name: note(name, args[0]))
    ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
    context = {hook.CONTEXT: hook.Observer()}
    with torch.inference_mode(), Unrouted():
        bare(input_ids=ids, position_ids=ids, attention_mask=mask_for(bare, ids), use_cache=False, **context)
    seen = [name for names in calls.values() for name in names]
    return [
        tuple(names) for names in calls.values() if len(names) > 1 and all(seen.count(n) == 1 for n in names)
    ]


def _alike(modules: Sequence[nn.Module]) -> bool:
    """Whether layers can be one: plain linear layers, of one dtype, all with a bias or none."""
    if not all(type(module) is nn.Linear for module in modules):
        return False
    kinds = {(m.in_features, m.weight.dtype, m.weight.device, m.bias is None) for m in modules}
    return len(kinds) == 1


def _merge(model: Any, names: Sequence[str]) -> None:
    layers = [model.get_submodule(name) for name in names]
    weight = torch.cat([layer.weight.detach() for layer in layers])
    bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
    product, start = _Product(weight, bias, len(layers)), 0
    for name, layer in zip(names, layers, strict=True):
        stop = start + layer.out_features
        _put(model, name, MergedLinear(product, start, stop))
        start = stop


def _put(model: Any, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)

"""Linear layers on a GPU: those that read the same input become one product (queries, keys and values; gate and up).

Which layers do is observed: the model runs once without weights, and records which linear layers get the same tensor.
One wide product reads its weights faster than several narrow ones, and a decode step is hardly more than reading
weights. Modules keep their places and names; the first that is called computes for all. Other large layers use the
same kernel for few rows.
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
from nibble.models.hook import attention_mask_for
from nibble.models.observe import skeleton
from nibble.models.refusals import EmptyRouting

_TOKENS = 2


class _Product:
    """The product of several layers that read the same input; the result is freed after its last part is read."""

    def __init__(self, weight: Tensor, bias: Tensor | None, parts: int) -> None:
        self.weight, self.bias, self.parts = weight, bias, parts
        self.multiply = linear.linear if linear.serves(weight) else F.linear
        self.x: Tensor | None = None
        self.y: Tensor | None = None
        self.num_unread = 0

    def __call__(self, x: Tensor, start: int, stop: int) -> Tensor:
        # Identity is enough: these layers get the very same tensor.
        if self.x is not x or self.y is None:
            # An old result is freed first, so that two never exist at once.
            self.x = self.y = None
            self.y = self.multiply(x, self.weight, self.bias)
            self.x, self.num_unread = x, self.parts
        part = self.y[..., start:stop]
        self.num_unread -= 1
        if not self.num_unread:
            self.x = self.y = None
        return part


class MergedLinear(nn.Module):
    """One of several merged layers: rows [start, stop) of their product."""

    def __init__(self, product: _Product, start: int, stop: int) -> None:
        super().__init__()
        self.product, self.start, self.stop = product, start, stop
        # A view of the product's weight: families that read a layer's weight find it, and it takes no memory.
        self.weight = nn.Parameter(product.weight[start:stop], requires_grad=False)
        self.bias = (
            None if product.bias is None else nn.Parameter(product.bias[start:stop], requires_grad=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return this layer's part of the product."""
        return self.product(x, self.start, self.stop)


class LargeLinear(nn.Module):
    """A single layer that kernels/linear computes."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b."""
        return linear.linear(x, self.weight, self.bias)


def merge_and_tune_linears(model: Any) -> None:
    """Prepare the linear layers of `model` for steps of few tokens, in place.

    The output layer stays as it is: libraries read a weight that large at full speed.
    """
    merge_linears(model)
    output = _output(model)
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module is not output and linear.serves(module.weight):
            _replace(model, name, LargeLinear(module))


def _output(model: Any) -> nn.Module | None:
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def merge_linears(model: Any) -> int:
    """Merge linear layers of `model` that read the same input, in place; return the number of layers merged."""
    groups = [
        names
        for names in linears_by_input(model)
        if _can_merge([model.get_submodule(name) for name in names])
    ]
    for names in groups:
        _merge(model, names)
    return sum(map(len, groups))


def linears_by_input(model: Any) -> list[tuple[str, ...]]:
    """Return the names of linear layers that get the same tensor, in the order of their calls."""
    bare: Any = skeleton(deepcopy(model.config))  # a copy: skeleton() changes the config
    calls: dict[int, list[str]] = {}
    inputs = []  # kept alive, so that no two have the same id

    def note(name: str, x: Tensor) -> None:
        inputs.append(x)
        calls.setdefault(id(x), []).append(name)

    for name, module in bare.named_modules():
        if type(module) is nn.Linear:
            # name=name binds the name of this turn; the bare variable would be the last name for all hooks.
            module.register_forward_pre_hook(lambda _, args, name=name: note(name, args[0]))
    ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
    context = {hook.CONTEXT: hook.Observer()}
    with torch.inference_mode(), EmptyRouting():
        bare(
            input_ids=ids,
            position_ids=ids,
            attention_mask=attention_mask_for(bare, ids),
            use_cache=False,
            **context,
        )
    # A layer that is called twice may get other inputs at the other call.
    called = [name for names in calls.values() for name in names]
    return [
        tuple(names)
        for names in calls.values()
        if len(names) > 1 and all(called.count(n) == 1 for n in names)
    ]


def _can_merge(modules: Sequence[nn.Module]) -> bool:
    """Return whether layers can be merged: plain linear layers of one dtype, all with a bias or none."""
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
        _replace(model, name, MergedLinear(product, start, stop))
        start = stop


def _replace(model: Any, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)

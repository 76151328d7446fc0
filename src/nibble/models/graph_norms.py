"""RMS norms behind a sum, in the graph of a compiled model: one operator adds up and norms (kernels/norm).

The formula is read off the graph: y * rsqrt(mean(y ** 2) + eps) * weight in float32, of y = residual + x; families may
add 1 to the weight.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from nibble.kernels import norm
from nibble.models.graph_nodes import INPUTS, Node, both, call, erase, is_call, sizes

aten = torch.ops.aten
assert norm  # which defines the operator
_CONVERT = torch.ops.prims.convert_element_type.default


@dataclass(frozen=True)
class Norm:
    """An RMS norm over the last dimension."""

    source: Node
    """What is normed."""
    weight: Node
    eps: float
    offset: float
    """What is added to the weight."""


def join_norms(graph: fx.Graph, device: str) -> int:
    """Join sums with the norms behind them, in place, on one type of device; return how many."""
    count = 0
    for product in graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        if product.meta["val"].device.type == device and (match := matched_norm(product)):
            count += _join(graph, product, match)
    return count


def _join(graph: fx.Graph, product: Node, match: Norm) -> bool:
    """Put the operator in the place of a norm, and of what it is taken of, if that is a sum."""
    total, weight = match.source, match.weight
    if len(product.users) == 1 and is_call(user := next(iter(product.users)), _CONVERT):
        product = user  # of a product that is rounded behind its factor
    if not is_call(total, aten.add.Tensor) or total.kwargs or product.meta["val"].dtype != _dtype(total):
        return False
    residual, x = total.args
    if not all(isinstance(y, fx.Node) and _is_alike(y, total) for y in (residual, x)):
        return False
    if not norm.serves(total.meta["val"]) or weight.op != "placeholder":  # which stands in front of any sum
        return False
    with graph.inserting_before(total):
        pair = call(graph, torch.ops.nibble.add_norm.default, x, residual, weight, match.eps, match.offset)
        parts = [graph.call_function(operator.getitem, (pair, place)) for place in range(2)]
    for part, value, old in zip(parts, pair.meta["val"], (total, product), strict=True):
        part.meta["val"] = value
        old.replace_all_uses_with(part)
    erase(graph, product)
    erase(graph, total)
    return True


def _is_alike(x: Node, other: Node) -> bool:
    """Return whether two nodes are tensors of one shape and dtype."""
    return isinstance(x.meta["val"], Tensor) and _dtype(x) == _dtype(other) and sizes(x) == sizes(other)


def _dtype(x: Node) -> torch.dtype:
    dtype: torch.dtype = x.meta["val"].dtype
    return dtype


# ---- the formula -----------------------------------------------------------------------------------------------------


def matched_norm(x: Node) -> Norm | None:
    """Match the RMS norm over the last dimension."""
    for factors, rounded in both(x, aten.mul.Tensor):
        weight, offset = _weight(factors)
        # Kernels read as many as a row has values, side by side.
        if (
            weight.op not in INPUTS
            or sizes(weight) != sizes(x)[-1:]
            or not weight.meta["val"].is_contiguous()
        ):
            continue
        for heads, factor in both(unrounded(rounded), aten.mul.Tensor):
            y, eps = unrounded(heads), _eps(factor)
            if eps is not None and _is_mean_square(factor.args[0].args[0], y):
                return Norm(y, weight, eps, offset)
    return None


def _weight(factors: Node) -> tuple[Node, float]:
    """Match a weight, or a weight + a number -> (the weight, the number)."""
    if is_call(factors, aten.add.Tensor) and not factors.kwargs and isinstance(factors.args[1], int | float):
        return unrounded(factors.args[0]), float(factors.args[1])
    return unrounded(factors), 0.0


def _eps(factor: Node) -> float | None:
    """Match rsqrt(a node + eps) -> eps."""
    if not is_call(factor, aten.rsqrt.default) or not is_call(factor.args[0], aten.add.Tensor):
        return None
    _, eps = factor.args[0].args
    return eps if isinstance(eps, float) else None


def _is_mean_square(mean: Any, y: Node) -> bool:
    """Return whether a node is the mean of y ** 2 over the last dimension."""
    last = y.meta["val"].dim() - 1
    if not is_call(mean, aten.mean.dim) or mean.args[1:] not in (([-1], True), ([last], True)):
        return False
    square = mean.args[0]
    return is_call(square, aten.pow.Tensor_Scalar) and square.args[1] == 2 and unrounded(square.args[0]) is y


def unrounded(x: Node) -> Node:
    """Return what a node is in another dtype, or the node itself."""
    return x.args[0] if x.target is _CONVERT else x

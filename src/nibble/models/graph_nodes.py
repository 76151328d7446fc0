"""What graph passes share: what a node is, calls that are added, and nodes that nobody uses any more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from nibble.kernels import linear, quantized_linear

aten = torch.ops.aten
assert linear and quantized_linear  # which define the operators
Node = Any
"""An fx.Node, whose arguments have types that say nothing of them."""
INPUTS = ("placeholder", "get_attr")
"""What a parameter is in a graph."""
PRODUCTS = frozenset(
    {
        torch.ops.nibble.linear.default, torch.ops.nibble.quantized_linear.default, aten.mm.default, aten.addmm.default,
    }
)  # fmt: skip
"""Operators that multiply rows with a matrix."""


def both(x: Any, target: Any) -> list[tuple[Node, Node]]:
    """Return the two operands of a sum or product in both orders; none of another node."""
    if (
        not is_call(x, target)
        or x.kwargs
        or len(x.args) != 2
        or not all(isinstance(y, fx.Node) for y in x.args)
    ):
        return []
    return [(x.args[0], x.args[1]), (x.args[1], x.args[0])]


def sizes(x: Node) -> list[str]:
    """Return the shape of a node, by which nodes are compared: sizes that vary would become conditions of the model."""
    return [*map(str, x.meta["val"].shape)]


def is_call(x: Any, target: Any) -> bool:
    """Return whether an argument is a call of an operator."""
    return isinstance(x, fx.Node) and x.target is target


def call(graph: fx.Graph, target: Any, *arguments: Any, options: Mapping[str, Any] | None = None) -> Node:
    """Add a call, and what it is known to return."""
    node = graph.call_function(target, arguments, dict(options or {}))
    operands: Any = (node.args, node.kwargs)
    values, options = fx.map_arg(operands, lambda part: part.meta["val"])
    tensors: Any = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
    with tensors[0].fake_mode:
        node.meta["val"] = target(*values, **options)
    return node


def replace_arguments(graph: fx.Graph, node: Node, arguments: Sequence[Any]) -> None:
    """Put a call of the same operator with other arguments in the place of a node, which returns the same.

    A new node: the old one remembers which arguments, with which strides, it was traced with.
    """
    with graph.inserting_before(node):
        other = graph.call_function(node.target, tuple(arguments))
    other.meta["val"] = node.meta["val"]
    node.replace_all_uses_with(other)
    graph.erase_node(node)


def erase(graph: fx.Graph, node: Any) -> None:
    """Erase a node that nobody uses any more, and what it alone used."""
    if not isinstance(node, fx.Node) or node.users or node.op != "call_function":
        return
    sources = node.all_input_nodes
    graph.erase_node(node)
    for source in sources:
        erase(graph, source)

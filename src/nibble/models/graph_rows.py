"""The last layer for the rows that are asked for alone, in the graph of a compiled model.

Families compute their last layer for all tokens, and pick the rows whose logits are wanted just in front of the output
layer. What lies between the last attention and there treats each row by itself, so rows are picked behind the attention
instead: a prompt is spared most of a layer, and gets the same logits. That attention is told that nobody reads other
rows. Where hidden states of all tokens are wanted too, as by a checkpoint's own head, nothing changes.
"""

from __future__ import annotations

import logging
import math
import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from nibble.attention import operators
from nibble.kernels import collectives, experts, gated, linear, quantized_linear, router, topk
from nibble.models.graph_nodes import call, replace_arguments

aten = torch.ops.aten
assert operators and collectives and experts and gated and linear and quantized_linear and router and topk
# These define the operators.
_ATTENTION = torch.ops.nibble.attention.default
_MATMULS = {aten.mm.default: 0, aten.addmm.default: 1}
"""Which argument has rows."""
_LAYERS = frozenset(
    getattr(torch.ops.nibble, name).default
    for name in (
        "linear",
        "gated_linear",
        "quantized_linear",
        "quantized_gated_linear",
        "experts_layer",
        "experts_routed_layer",
    )
)
_OF_ROWS = _LAYERS | {
    getattr(torch.ops.nibble, name).default
    for name in ("route", "topk", "all_reduce", "quantize_activations")
}
"""Operators of tensors of rows, which are the last dimension but one."""
_VIEWS = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default})
_RESHAPES = _VIEWS | {aten.expand.default}
"""Operators whose second argument is the shape of the result."""
_MOVES = frozenset({aten.unsqueeze.default, aten.squeeze.dim, aten.permute.default, aten.transpose.int})
_OF_A_DIMENSION = {
    aten.slice.Tensor: 1, aten.select.int: 1, aten.cat.default: 1, aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2, aten._softmax.default: 1, aten.mean.dim: 1, aten.sum.dim_IntList: 1,
    aten.amax.default: 1, aten.var_mean.correction: 1,
}  # fmt: skip
"""Operators that mix, cut or join along some dimensions, and which argument these are."""
_SEVERAL = -1
log = logging.getLogger("nibble.compile")


def pick_rows_early(graph: fx.Graph) -> int:
    """Let what only serves the rows that are picked be computed for these, in place; return how many nodes are."""
    return sum(
        _pick_early(graph, node) for node in graph.find_nodes(op="call_function", target=aten.index.Tensor)
    )


def _pick_early(graph: fx.Graph, index: Any) -> int:
    source, (*others, rows) = index.args
    if any(others) or rows.op != "placeholder" or rows.meta["val"].dim() != 1:
        return 0
    tokens, picked = source.meta["val"].shape[len(others)], rows.meta["val"].shape[0]
    # Sizes of the same name cannot be told apart.
    if not isinstance(tokens, torch.SymInt) or _is_same(picked, tokens):
        return 0
    try:
        nodes = _serving(source, index, tokens)
        if not any(node.target in _MATMULS or node.target in _LAYERS for node in nodes):
            return 0
        _replace(graph, index, nodes, rows, tokens)
    except Exception as error:  # of all kinds: a graph that is left as it was is right
        log.info("the last layer is computed for all rows (%s: %s)", type(error).__name__, error)
        return 0
    _attend_for_rows(graph, rows)
    log.info("%d operators behind the last attention compute the rows that are asked for alone", len(nodes))
    return len(nodes)


def _attend_for_rows(graph: fx.Graph, rows: fx.Node) -> None:
    """Tell attention of which only these rows are read."""
    for node in graph.find_nodes(op="call_function", target=_ATTENTION):
        if node.users and all(
            user.target is aten.index.Tensor and list(user.args[1]) == [rows] for user in node.users
        ):
            replace_arguments(graph, node, (*node.args[:-1], True))


def _serving(source: fx.Node, index: fx.Node, tokens: torch.SymInt) -> list[fx.Node]:
    """Return the nodes that compute each row by itself, and that serve nothing but the index, in order."""
    serving: dict[fx.Node, None] = {index: None}
    node = index.prev
    while node.op != "root":
        if node.users and all(user in serving for user in node.users) and _is_by_row(node, tokens):
            serving[node] = None
        node = node.prev
    # Of several values that stay, the one that serves is picked from.
    nodes = list[fx.Node]()
    for node in [*reversed(serving)][:-1]:
        if node.target is not operator.getitem or node.args[0] in nodes:
            nodes.append(node)
    return nodes if source in nodes else []


def _replace(graph: fx.Graph, index: Any, nodes: list[fx.Node], rows: fx.Node, tokens: torch.SymInt) -> None:
    """Compute nodes again for rows, in the place of the index; a graph where that fails stays as it was."""
    before, twins = index.prev, dict[fx.Node, fx.Node]()
    try:
        with graph.inserting_before(index):
            _add_twins(graph, nodes, rows, tokens, twins)
    except Exception:
        while index.prev is not before:
            graph.erase_node(index.prev)
        raise
    index.replace_all_uses_with(twins[index.args[0]])
    for node in (index, *reversed(nodes)):
        graph.erase_node(node)


def _add_twins(
    graph: fx.Graph, nodes: list[fx.Node], rows: fx.Node, tokens: torch.SymInt, twins: dict[fx.Node, fx.Node]
) -> None:
    """Add what nodes compute for rows, and fill in which node has which twin."""
    count = call(graph, aten.sym_size.int, rows, 0)

    def twin(node: fx.Node) -> fx.Node:
        """Return the rows of a node; of what has none, itself."""
        if node not in twins and (at := _row_dimension(node.meta["val"], tokens)) is not None:
            twins[node] = call(graph, aten.index.Tensor, node, [*[None] * at, rows])
        return twins.get(node, node)

    for node in nodes:
        arguments: Any = fx.map_arg(node.args, twin)
        if node.target in _RESHAPES:
            shape, at = node.meta["val"].shape, _row_dimension(node.meta["val"], tokens)
            arguments = arguments[0], [count if i == at else size for i, size in enumerate(shape)]
        twins[node] = call(graph, node.target, *arguments, options=fx.map_arg(node.kwargs, twin))
        for value, of_rows in zip(
            tree_leaves(node.meta["val"]), tree_leaves(twins[node].meta["val"]), strict=True
        ):
            at = _row_dimension(value, tokens)
            if at is None or not _is_same(of_rows.shape[at], count.meta["val"]):
                raise ValueError(f"{node.target} has rows of {tuple(of_rows.shape)}")


def _is_by_row(node: Any, tokens: torch.SymInt) -> bool:
    """Return whether each row of a node's value is made of that row of other values, and of what has no rows."""
    if node.op != "call_function":
        return False
    values = tree_leaves([part.meta.get("val") for part in node.all_input_nodes])
    # Numbers that vary may be anything but sizes of a result.
    if node.target not in _RESHAPES and any(not isinstance(value, Tensor) for value in values):
        return False
    inputs = [(x, at) for x in values if (at := _row_dimension(x, tokens)) is not None]
    results = tree_leaves(node.meta.get("val"))
    outputs = [(y, to) for y in results if (to := _row_dimension(y, tokens)) is not None]
    if not inputs or not outputs or len(outputs) < len(results):
        return False
    return all(_keeps_rows(node, *one, *other) for one in inputs for other in outputs)


def _keeps_rows(node: Any, x: Tensor, at: int, y: Tensor, to: int) -> bool:
    """Return whether an operator takes row after row from dimension `at` of an input to `to` of its result."""
    target = node.target
    if _SEVERAL in (at, to):
        return False
    if torch.Tag.pointwise in getattr(target, "tags", ()) or target is aten.expand.default:
        return at - x.dim() == to - y.dim()
    if target in _VIEWS:
        (before, after), (first, last) = _around(x, at), _around(y, to)
        return _is_same(before, first) and _is_same(after, last)
    if target in _OF_ROWS or (target in _MATMULS and node.args[_MATMULS[target]].meta["val"] is x):
        return at == x.dim() - 2 and to == y.dim() - 2
    if target in _OF_A_DIMENSION:
        which = _OF_A_DIMENSION[target]
        dims = node.args[which] if len(node.args) > which else node.kwargs.get("dim", 0)
        return dims is not None and at not in {dim % x.dim() for dim in tree_leaves(dims)}
    return target in _MOVES or target is operator.getitem


def _around(x: Tensor, at: int) -> tuple[Any, Any]:
    """Return the number of values in front of a dimension, and behind it."""
    return math.prod(x.shape[:at]), math.prod(x.shape[at + 1 :])


def _row_dimension(value: object, tokens: torch.SymInt) -> int | None:
    """Return which dimension of a value is that of rows, _SEVERAL if more than one may be, None if there is none."""
    places = [i for i, size in enumerate(getattr(value, "shape", ())) if _is_same(size, tokens)]
    return places[0] if len(places) == 1 else _SEVERAL if places else None


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two sizes are the same number or formula; that two formulas are equal is not looked into."""
    symbols = [size.node.expr if isinstance(size, torch.SymInt) else size for size in (one, other)]
    return bool(symbols[0] == symbols[1])

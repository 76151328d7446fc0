"""Gates behind the first products of MLPs, in the graph of a compiled model: one operator computes both.

A family's MLP multiplies by two weights, which are one here (linear.py), and joins the halves of the outputs. A kernel
that has a value of each half joins them before it stores anything (kernels/gated); so do some with packed weights, and
others have a launch behind them (kernels/quantized_linear). As for projections (graph_projections.py), the formula is
not read off the graph: what stands behind a product must compute values one by one, and it is run over random ones.

Shape suffixes: T tokens, N values of a half.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from nibble.kernels import gated, linear, quantized_linear
from nibble.kernels.experts.gate import SILU, Gate
from nibble.kernels.experts.gate import gated as joined
from nibble.models.graph_convolutions import TOKENS
from nibble.models.graph_nodes import INPUTS, call
from nibble.models.graph_projections import Run, is_pointwise, is_tensor, shape_of, width_of

aten = torch.ops.aten
assert linear and quantized_linear  # which define the operators
_LINEAR, _GATED = torch.ops.nibble.linear.default, torch.ops.nibble.gated_linear.default
_QUANTIZED = torch.ops.nibble.quantized_linear.default
_QUANTIZED_GATED = torch.ops.nibble.quantized_gated_linear.default
_TOLERANCE, _MEAN_TOLERANCE = 0.02, 1e-3
"""Of values that are rounded to 16 bits, some of them twice; and of what all are off together, as by a factor."""
_SMALL = 1e-3
"""Of values whose rounding is not that of their size, as the tails of a sigmoid."""
_SIZES = {torch.bfloat16: (1.0, 30.0, 1e4), torch.float16: (1.0, 10.0, 50.0)}
"""Of random values: small ones tell gates apart, large ones whether a gate has bounds."""


def join_gates(graph: fx.Graph, device: str) -> int:
    """Join products with the gates behind them, in place, on one type of device; return how many."""
    count, are_gates = 0, dict[str, bool]()
    for target in (_LINEAR, _QUANTIZED, aten.mm.default):
        for product in graph.find_nodes(op="call_function", target=target):
            operands = _operands(product)
            if operands and product.meta["val"].device.type == device:
                count += _join(graph, product, operands, are_gates)
    return count


def _operands(product: fx.Node) -> tuple[Any, ...] | None:
    """Return x and the weight, or a packed one's facts, of a product that may be computed with what is behind it."""
    if product.target is _QUANTIZED:
        x, x_scale, *facts = product.args
        return (x, *facts) if x_scale is None and not product.kwargs else None
    x, weight, *bias = product.args
    if product.target is aten.mm.default:
        if not isinstance(weight, fx.Node) or weight.target is not aten.permute.default:
            return None
        weight = weight.args[0]
    elif any(bias):
        return None
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node) or weight.op not in INPUTS:
        return None
    return (x, weight) if gated.may_serve(weight.meta["val"]) else None


def _join(graph: fx.Graph, product: fx.Node, operands: tuple[Any, ...], are_gates: dict[str, bool]) -> bool:
    reached = _behind(product)
    for gate in reached:
        between = _between(gate, reached)
        users = {user for node in (product, *between) for user in node.users}
        if users == {*between, gate} and _is_gate(product, between, gate, are_gates):
            _replace(graph, gate, _QUANTIZED_GATED if product.target is _QUANTIZED else _GATED, operands)
            for node in (gate, *reversed(between), product):
                graph.erase_node(node)
            return True
    return False


def _behind(product: fx.Node) -> list[fx.Node]:
    """Return what is computed of a product alone, value by value, in the order of the graph."""
    reached, stack = {product}, [product]
    while stack:
        # Who reads several values is looked at again as each of them is reached.
        for user in stack.pop().users:
            if user in reached or user.op == "output" or not is_pointwise(user):
                continue
            if all(source in reached for source in user.all_input_nodes if is_tensor(source)):
                reached.add(user)
                stack.append(user)
    return sorted(reached - {product})


def _between(gate: fx.Node, reached: list[fx.Node]) -> list[fx.Node]:
    """Return what of `reached` a node is made of, in the order of the graph."""
    made_of, stack = set[fx.Node](), [gate]
    while stack:
        # Not what products are made of, which is all of the graph in front of them.
        new = set(stack.pop().all_input_nodes).intersection(reached) - made_of
        made_of |= new
        stack += new
    return [node for node in reached if node in made_of]


def _is_gate(product: fx.Node, between: list[fx.Node], gate: fx.Node, are_gates: dict[str, bool]) -> bool:
    """Return whether a node is the gate that kernels compute, of the halves of a product.

    are_gates: takes what was found of formulas; layers that are alike have the same.
    """
    value, y = gate.meta["val"], product.meta["val"]
    if not isinstance(value, Tensor) or value.dtype != y.dtype:
        return False
    try:
        # The rows are the same, with or without a dimension of 1 in front.
        sizes = (*_formulas(y.shape[:-1]), width_of(product) // 2)
        if _formulas(value.shape) not in (sizes, (1, *sizes), sizes[1:]):
            return False
        formula = _formula(product, [*between, gate])
        if formula not in are_gates:
            with unset_fake_temporarily():  # which compilers' passes run under
                are_gates[formula] = all(_is_gated(product, gate, size) for size in _SIZES[value.dtype])
        return are_gates[formula]
    # What is between may not run over other numbers of tokens, in ways of its own.
    except Exception:
        return False


def _formula(product: fx.Node, nodes: list[fx.Node]) -> str:
    """Return what is computed of a product: the same text for layers that are alike."""
    places = {node: f"#{place}" for place, node in enumerate((product, *nodes))}

    def place(node: fx.Node) -> str:
        return places.get(node) or f"size {node.meta['val']}"

    calls = [(node.target, fx.map_arg((node.args, node.kwargs), place)) for node in nodes]
    return repr((tuple(product.meta["val"].shape), product.meta["val"].dtype, calls))


def _formulas(sizes: Iterable[Any]) -> tuple[Any, ...]:
    """Return sizes as formulas: compared as they are, those that vary would become conditions of the model."""
    return tuple(size.node.expr if isinstance(size, torch.SymInt) else size for size in sizes)


def _is_gated(product: fx.Node, gate: fx.Node, size: float) -> bool:
    value, width = gate.meta["val"], width_of(product)
    y = size * torch.randn(TOKENS, width, generator=torch.Generator().manual_seed(0))
    y = y.to(value.dtype)
    expected = joined(y, Gate(SILU)).float()
    computed = Run({product: y.view(shape_of(product))})(gate).float().view(expected.shape)
    off = (computed * expected).sum() / expected.square().sum() - 1
    near = torch.allclose(computed, expected, rtol=_TOLERANCE, atol=_SMALL * size)
    return near and bool(off.abs() <= _MEAN_TOLERANCE)


def _replace(graph: fx.Graph, gate: fx.Node, operator: Any, operands: tuple[Any, ...]) -> None:
    """Put an operator in the place of a gate."""
    dims = gate.meta["val"].dim() - operands[0].meta["val"].dim()
    with graph.inserting_before(gate):
        node = call(graph, operator, *operands)
        if dims:
            node = call(graph, aten.unsqueeze.default if dims > 0 else aten.squeeze.dim, node, 0)
    gate.replace_all_uses_with(node)

"""Joined convolutions whose inputs and gates are parts of a layer's first products, in the graph of a compiled model.

Families bring such parts into the order of channels, and compute log decays and learning rates of others: one more
launch in a decode step, which reads the products itself instead (kernels/recurrence/decode.py). As for convolutions
(graph_convolutions.py), nothing of it is read off the graph. What stands between must only move values, or compute them
one by one; it is run over values that say where they came from, and gates over random parameters, of which they must
be what kernels/recurrence/types.Projection has.

Shape suffixes: T tokens, W values of a product, C channels, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from nibble.kernels.recurrence import Runs
from nibble.models.graph_convolutions import INPUT_VALUES, MOVES, TOKENS, NotMovedError, size_of
from nibble.models.graph_nodes import INPUTS, PRODUCTS

aten = torch.ops.aten
_JOINED, _PROJECTED = (
    getattr(torch.ops.nibble, name).default for name in ("conv_recurrence", "projected_recurrence")
)
_DIGITS = 128
"""Values that tell channels apart, in each of the tokens."""
_TOLERANCE = 1e-4
"""Of gates; those of neighbouring channels differ by more than ten times as much."""
_LARGE = 40.0
"""Times as large inputs of gates are a second time."""


def join_projections(graph: fx.Graph, device: str) -> int:
    """Join rules with what makes their inputs of products, in place, on one type of device; return how many."""
    count = 0
    for rule in graph.find_nodes(op="call_function", target=_JOINED):
        if rule.meta["val"].device.type == device:
            count += _join(graph, rule)
    return count


def _join(graph: fx.Graph, rule: fx.Node) -> bool:
    try:
        with unset_fake_temporarily():  # which compilers' passes run under
            inputs, runs = _projection_of(rule)
    # What is between may not run over other numbers of tokens, in ways of its own.
    except Exception:
        return False
    with graph.inserting_before(rule):
        joined = graph.call_function(_PROJECTED, _arguments((*inputs, runs), rule.args))
    joined.meta = dict(rule.meta)
    if INPUT_VALUES in rule.meta:
        values = *(node.meta["val"] for node in inputs), None
        joined.meta[INPUT_VALUES] = (_arguments(values, rule.meta[INPUT_VALUES][0]), {})
    rule.replace_all_uses_with(joined)
    _erase(graph, rule)
    return True


def _erase(graph: fx.Graph, rule: fx.Node) -> None:
    """Erase a node, and what was computed for it alone."""
    # What is between products and it has no effects, so each goes that nobody reads.
    stack, erased = [rule], set[fx.Node]()
    while stack:
        node = stack.pop()
        if node in erased or node.users or node.op in INPUTS or node.target in PRODUCTS:
            continue
        stack += node.all_input_nodes
        graph.erase_node(node)
        erased.add(node)


def _projection_of(rule: fx.Node) -> tuple[tuple[fx.Node, ...], list[int]]:
    """Return the products and parameters that everything is computed of, and where it is in them.

    Raises:
        NotMovedError: It is not, or not in runs.
    """
    arguments: Sequence[Any] = rule.args
    x, _, _, _, places, log_decay, beta, *_ = arguments
    if not isinstance(beta, fx.Node) or log_decay.meta["val"].dim() != 2:
        raise NotMovedError
    product, source_C = _channels(x)
    gates, columns = _gates(log_decay, beta)
    heads, rows = rule.meta["val"].shape[1:]
    runs = map(_runs, (*_cut(source_C, places, heads * rows), *columns))
    return (product, *gates), [n for part in runs for n in (part.first, part.length, part.stride)]


def _arguments(own: Sequence[Any], rule: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments by those of the joined convolution; own: products, parameters and runs."""
    return (*own, *rule[1:5], *rule[7:])


def _channels(x: fx.Node) -> tuple[fx.Node, Tensor]:
    """Return the product whose values are a convolution's inputs, and which of them each channel is."""
    (product,) = _leaves(x, MOVES | {aten.cat.default})
    width = width_of(product)
    numbers = torch.arange(TOKENS * width).view(1, TOKENS, width)
    numbers = numbers.view(shape_of(product))
    moved_TC = Run({product: numbers})(x)
    source_C = moved_TC[0]
    expected_TC = source_C + width * torch.arange(TOKENS)[:, None]
    if moved_TC.dim() != 2 or int(source_C.max()) >= width or not torch.equal(moved_TC, expected_TC):
        raise NotMovedError
    return product, source_C


def _gates(log_decay: fx.Node, beta: fx.Node) -> tuple[tuple[fx.Node, ...], tuple[Tensor, Tensor]]:
    """Return the products that gates are computed of, their paces and offsets, and where a's and b's are in these."""
    products, parameters = _sources(log_decay)
    b_products, others = _sources(beta)
    heads = log_decay.meta["val"].shape[1]
    shapes = [leaf.meta["val"].shape for leaf in parameters]
    if others or shapes != [(heads,)] * 2 or len(products) != 1 or len(b_products) != 1:
        raise NotMovedError
    generator = torch.Generator().manual_seed(0)
    numbers = {leaf: torch.randn(heads, generator=generator) for leaf in parameters}
    b_H = _columns(beta, b_products[0], {}, Tensor.sigmoid)
    for pace, offset in (parameters, parameters[::-1]):
        decay = partial(_log_decay, paces_H=numbers[pace], offsets_H=numbers[offset])
        a_H = _columns(log_decay, products[0], numbers, decay)
        if a_H is not None and b_H is not None:
            return (products[0], b_products[0], pace, offset), (a_H, b_H)
    raise NotMovedError


def _sources(gate: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the products and the parameters that a gate is computed of."""
    leaves = _leaves(gate, None)
    products = [leaf for leaf in leaves if leaf.op not in INPUTS]
    return products, [leaf for leaf in leaves if leaf.op in INPUTS]


def _log_decay(a_TW1: Tensor, paces_H: Tensor, offsets_H: Tensor) -> Tensor:
    return -paces_H.exp() * F.softplus(a_TW1 + offsets_H)


def _told_apart(width: int) -> Tensor:
    """Return values [T, W] of which no two columns are alike."""
    numbers = torch.arange(width)
    digits = [numbers // _DIGITS**n % _DIGITS for n in range(TOKENS)]
    return torch.stack(digits) / (_DIGITS / 2) - 1


def _columns(
    gate: fx.Node, product: fx.Node, numbers: Mapping[fx.Node, Tensor], compute: Callable[[Tensor], Tensor]
) -> Tensor | None:
    """Return of which column of a product each head's gate is computed, if each is so of one."""
    near_WH = None
    # Small values tell columns apart, and large ones whether a gate has bounds.
    for values_TW in (_told_apart(width_of(product)) * size for size in (1.0, _LARGE, -_LARGE)):
        gate_TH = Run({product: values_TW.view(shape_of(product)), **numbers})(gate)
        if gate_TH.dim() != 2 or len(gate_TH) != TOKENS:
            return None
        candidates_TWH = compute(values_TW.unsqueeze(-1)).expand(-1, -1, gate_TH.shape[1])
        off_TWH = (candidates_TWH - gate_TH.unsqueeze(1)).abs() / gate_TH.abs().unsqueeze(1)
        is_near_WH = (off_TWH < _TOLERANCE).all(0)
        near_WH = is_near_WH if near_WH is None else near_WH & is_near_WH
        if not bool((near_WH.sum(0) == 1).all()):
            return None
    return None if near_WH is None else near_WH.int().argmax(0)


def _cut(source_C: Tensor, places: Sequence[int], values: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sources of queries, keys and values."""
    q_at, k_at, v_at, _ = places
    keys = (len(source_C) - values) // 2
    sizes = (q_at, keys), (k_at, keys), (v_at, values)
    q, k, v = (source_C[at : at + size] for at, size in sizes)
    return q, k, v


def _runs(sources: Tensor) -> Runs:
    """Return where values are that lie in runs of one length and distance."""
    breaks = (sources.diff() != 1).nonzero().flatten() + 1
    length = int(breaks[0]) if len(breaks) else len(sources)
    stride = int(sources[length] - sources[0]) if length < len(sources) else length
    runs, numbers = Runs(int(sources[0]), length, stride), torch.arange(len(sources))
    expected = runs.first + numbers // length * stride + numbers % length
    if len(sources) % length or not torch.equal(sources, expected):
        raise NotMovedError
    return runs


def _leaves(node: fx.Node, between: frozenset[Any] | None) -> list[fx.Node]:
    """Return the products and parameters that a node is made of, by operators in `between`, or pointwise ones."""
    leaves, visited, stack = list[fx.Node](), {node}, [node]
    while stack:
        current = stack.pop()
        if current.target in PRODUCTS or (current.op in INPUTS and is_tensor(current)):
            leaves.append(current)
            continue
        if current.op in INPUTS:
            continue  # a size
        if not (is_pointwise(current) if between is None else current.target in between):
            if is_tensor(current):
                raise NotMovedError
            continue
        new = [source for source in current.all_input_nodes if source not in visited]
        visited.update(new)
        stack += new
    if between is not None and (len(leaves) != 1 or leaves[0].op in INPUTS):
        raise NotMovedError
    return leaves


def is_tensor(node: fx.Node) -> bool:
    """Return whether a node is no size."""
    return not isinstance(node.meta.get("val"), torch.SymInt | int)


def is_pointwise(node: fx.Node) -> bool:
    """Return whether a node computes value by value, or moves them."""
    if node.target is aten._to_copy.default:
        return set(node.kwargs) <= {"dtype"}
    is_cast = node.target is torch.ops.prims.convert_element_type.default
    return is_cast or node.target in MOVES or torch.Tag.pointwise in getattr(node.target, "tags", ())


def width_of(product: fx.Node) -> int:
    """Return how many values a row of a product has.

    Raises:
        NotMovedError: That varies.
    """
    width = product.meta["val"].shape[-1]
    if not isinstance(width, int):
        raise NotMovedError
    return width


def shape_of(product: fx.Node) -> tuple[int, ...]:
    """Return the shape of a product of so many tokens as the numbers have."""
    before = product.meta["val"].dim() - 2
    return (*(1,) * before, TOKENS, width_of(product))


class Run:
    """Runs what makes a node, with numbers in the place of products and parameters."""

    def __init__(self, numbers: Mapping[fx.Node, Tensor]) -> None:
        self.values: dict[fx.Node, Any] = dict(numbers)

    def __call__(self, node: fx.Node) -> Any:
        """Return what a node has."""
        if node not in self.values:
            self.values[node] = self._compute(node)
        return self.values[node]

    def _compute(self, node: fx.Node) -> Any:
        if not is_tensor(node) or node.op in INPUTS or not callable(node.target):
            return size_of(node, self._tokens())
        arguments, options = fx.map_arg((node.args, node.kwargs), self)
        return node.target(*arguments, **options)

    def _tokens(self) -> Any:
        product = next(node for node in self.values if node.target in PRODUCTS)
        return product.meta["val"].shape[-2]

"""Rotary positions of queries and keys, in the graph of a compiled model: attention's operator applies them.

A family's code rotates queries and keys, maybe behind a norm of each head, and hands them to attention, which stores
the keys and reads both again. The kernel that stores keys has them at hand, so it can do all of it (kernels/append).

The formula is read off the graph: x * cos + cat(-x[half:], x[:half]) * sin, of whole heads or of their first values, or
the same written half by half; and in front of it x * rsqrt(mean(x ** 2) + eps) * weight, in float32. What is written
otherwise stays as it is, and so does what has the formula but comes from anything else than a product: a kernel is then
there in any case, which may as well rotate.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from nibble.attention.operators import SEPARATOR
from nibble.models.graph_nodes import PRODUCTS, Node, both, call, erase, is_call, replace_arguments, sizes
from nibble.models.graph_norms import Norm, matched_norm, unrounded

aten = torch.ops.aten
_ATTENTION = torch.ops.nibble.attention.default
_STREAMS, _NAMES, _ROPE, _EPS, _OFFSET = 1, 2, 12, 13, 14
"""Places of the operator's arguments."""
_VIEWS = (
    aten.select.int, aten.permute.default, aten.transpose.int, aten.view.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.slice.Tensor, aten.alias.default, aten.reshape.default,
)  # fmt: skip
_PARTS = (operator.getitem, aten.split_with_sizes.default, aten.split.Tensor)
_HEADS_FIRST = [0, 2, 1, 3]


@dataclass(frozen=True)
class _Heads:
    """Where rotated heads come from."""

    source: Node
    views: tuple[Node, ...]
    """What the graph does to them before attention, the first one first."""
    cos: Node
    sin: Node
    """[1, 1, T, R]."""
    is_halved: bool = False
    """Whether these are of one half, as both halves turn by the same angles."""
    norm: Norm | None = None
    """Of each head, before it is rotated."""


def join_rope(graph: fx.Graph, device: str) -> int:
    """Let attention rotate queries and keys where the graph does, in place, on one type of device; return how often."""
    count, tables = 0, dict[tuple[Node, bool], Node]()
    node: Node
    for node in graph.find_nodes(op="call_function", target=_ATTENTION):
        names = node.args[_NAMES].split(SEPARATOR)
        if names != ["k", "v"] or node.meta["val"].device.type != device:
            continue
        q, k = _heads(node.args[0]), _heads(node.args[_STREAMS][0])
        if q and k and _fit(q, k):
            keys = [(part, q.is_halved) for part in (q.cos, q.sin)]
            for key in keys:
                if key not in tables:  # which all layers share
                    tables[key] = _rows(graph, *key)
            _join(graph, node, q, k, [tables[key] for key in keys])
            count += 1
    return count


def _fit(q: _Heads, k: _Heads) -> bool:
    """Return whether one call can rotate queries and keys: by the same numbers, both normed or neither."""
    first, second = (
        (heads.cos, heads.sin, heads.is_halved, heads.norm and (heads.norm.eps, heads.norm.offset))
        for heads in (q, k)
    )
    return first == second


def _join(graph: fx.Graph, node: Node, q: _Heads, k: _Heads, tables: Sequence[Node]) -> None:
    arguments = list(node.args)
    queries, (keys, values) = arguments[0], arguments[_STREAMS]
    with graph.inserting_before(node):
        arguments[0] = _with_views(graph, q.source, q.views)
        arguments[_STREAMS] = [_with_views(graph, k.source, k.views), values]
        arguments[_ROPE] = [*tables, *(heads.norm.weight for heads in (q, k) if heads.norm)]
        if q.norm:
            arguments[_EPS], arguments[_OFFSET] = q.norm.eps, q.norm.offset
    replace_arguments(graph, node, arguments)
    for unused in (queries, keys):
        erase(graph, unused)


def _with_views(graph: fx.Graph, source: Node, views: Sequence[Node]) -> Node:
    """Return the same views of another node."""
    for view in views:
        source = call(graph, view.target, source, *view.args[1:])
    return source


def _rows(graph: fx.Graph, part: Node, is_halved: bool) -> Node:
    """Return cosines or sines [1, 1, T, R or half of it] as [T, R]."""
    rows = part
    for _ in range(2):
        with graph.inserting_after(rows):
            rows = call(graph, aten.select.int, rows, 0, 0)
    if is_halved:
        with graph.inserting_after(rows):
            rows = call(graph, aten.cat.default, [rows, rows], -1)
    return rows


# ---- the formula -----------------------------------------------------------------------------------------------------


def _heads(x: Any) -> _Heads | None:
    """Return where rotated heads come from, None where they are not rotated as kernels do it, or for others as well."""
    views, rows = list[Node](), x
    while isinstance(x, fx.Node) and x.target in (*_VIEWS, aten.clone.default):
        # A copy only gives memory another order, of which kernels take any.
        if x.target in _VIEWS:
            views.insert(0, x)
        if len(x.users) > 1:
            return None
        x = x.args[0]
    heads = _partly(x) or _in_halves(x) or _rotated(x)
    if heads is None or len(x.users) > 1 or not _is_in_order(rows, x):
        return None
    order = heads.source
    is_moved = order.target is aten.permute.default and order.args[1] == _HEADS_FIRST
    if norm := matched_norm(unrounded(order.args[0] if is_moved else order)):
        heads = replace(heads, source=norm.source, norm=norm)
        if is_moved:
            views.insert(0, order)
    return replace(heads, views=tuple(views)) if _is_product(heads.source) else None


def _is_in_order(rows: Node, heads: Node) -> bool:
    """Return whether rows [T, H, D] are all of heads [1, H, T, D]."""
    return len(sizes(heads)) == 4 and sizes(rows) == [sizes(heads)[place] for place in (2, 1, 3)]


def _is_product(x: Node) -> bool:
    while x.target in (*_VIEWS, *_PARTS):
        x = x.args[0]
    return x.target in PRODUCTS


def _rotated(x: Any) -> _Heads | None:
    """Match x * cos + cat(-x[half:], x[:half]) * sin."""
    for straight, turned in both(x, aten.add.Tensor):
        for source, cos in both(straight, aten.mul.Tensor):
            for halves, sin in both(turned, aten.mul.Tensor):
                if _is_turned(halves, source) and _is_table(cos, source) and _is_table(sin, source):
                    return _Heads(source, (), cos, sin)
    return None


def _partly(x: Any) -> _Heads | None:
    """Match cat(rotated(x[:R]), x[R:])."""
    first, rest = _two_parts(x)
    heads = _rotated(first)
    if heads is None or not is_call(heads.source, aten.slice.Tensor) or not is_call(rest, aten.slice.Tensor):
        return None
    source, width = heads.source.args[0], heads.source.meta["val"].shape[-1]
    is_first = source is rest.args[0] and _is_slice(heads.source, source, 0, width)
    if not is_first or not _is_slice(rest, source, width, source.meta["val"].shape[-1]):
        return None
    return replace(heads, source=source)


def _in_halves(x: Any) -> _Heads | None:
    """Match cat(low * cos - high * sin, high * cos + low * sin)."""
    difference, total = _two_parts(x)
    if not is_call(difference, aten.sub.Tensor) or difference.kwargs or len(difference.args) != 2:
        return None
    for low, cos in both(difference.args[0], aten.mul.Tensor):
        for high, sin in both(difference.args[1], aten.mul.Tensor):
            source = _half(low, 0)
            if (
                source is None
                or source is not _half(high, 1)
                or not _is_table(cos, low)
                or not _is_table(sin, low)
            ):
                continue
            if _is_sum(total, {high, cos}, {low, sin}):
                return _Heads(source, (), cos, sin, is_halved=True)
    return None


def _two_parts(x: Any) -> tuple[Node, Node]:
    """Return the two nodes that the values of each head are joined of; None twice where there are no two."""
    if not is_call(x, aten.cat.default) or len(x.args[0]) != 2 or _dim(x, 1) != 3:
        return None, None
    return x.args[0][0], x.args[0][1]


def _is_sum(x: Any, one: set[Node], other: set[Node]) -> bool:
    """Return whether a node is the sum of the product of two nodes and that of two others."""
    return any(
        is_call(first, aten.mul.Tensor) and is_call(second, aten.mul.Tensor)
        and (set(first.args), set(second.args)) == (one, other)
        for first, second in both(x, aten.add.Tensor)
    )  # fmt: skip


def _half(x: Any, place: int) -> Node | None:
    """Return what a node is the lower or the upper half of the values of."""
    if is_call(x, aten.slice.Tensor):
        source, width = x.args[0], x.meta["val"].shape[-1]
        is_half = source.meta["val"].shape[-1] == 2 * width
        return source if is_half and _is_slice(x, source, place * width, (place + 1) * width) else None
    if not is_call(x, operator.getitem) or x.args[1] != place or not is_call(x.args[0], aten.split.Tensor):
        return None
    source, width, *dim = x.args[0].args
    is_half = source.meta["val"].shape[-1] == 2 * width
    return source if is_half and dim in ([-1], [source.meta["val"].dim() - 1]) else None


def _is_turned(halves: Any, source: Node) -> bool:
    """Return whether a node is cat(-x[half:], x[:half])."""
    high, low = _two_parts(halves)
    width = source.meta["val"].shape[-1]
    return (
        is_call(high, aten.neg.default)
        and _is_slice(high.args[0], source, width // 2, width)
        and _is_slice(low, source, 0, width // 2)
    )


def _is_slice(x: Any, source: Node, start: int, stop: int) -> bool:
    """Return whether a node is values [start, stop) of each head of another."""
    if not is_call(x, aten.slice.Tensor) or x.args[0] is not source or _dim(x, 1) != 3:
        return False
    first, last, step = (*x.args[2:], None, None, None)[:3]
    width = source.meta["val"].shape[-1]
    return (first or 0, min(last or width, width), step or 1) == (start, stop, 1)


def _is_table(x: Any, source: Node) -> bool:
    """Return whether a node is cosines or sines [1, 1, T, R] in the dtype of heads [1, H, T, R]."""
    if x.meta["val"].dtype != source.meta["val"].dtype or len(sizes(source)) != 4:
        return False
    return sizes(x) == ["1", "1", *sizes(source)[2:]]


def _dim(x: Node, place: int) -> int:
    """Return the dimension that an argument names, of a tensor of four."""
    dim = x.args[place] if len(x.args) > place else 0
    return dim % 4 if isinstance(dim, int) else -1

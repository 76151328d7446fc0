"""Convolutions in the graph of a compiled model that make nothing but queries, keys and values of the rule behind them.

Such a pair of operators becomes one, which a decode step computes in one launch (kernels/recurrence/decode.py). Which
channels go where is not read off the graph: what stands between both operators must only move values, and it is run
over numbers that say where they came from.

Shape suffixes: T tokens, C channels.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from nibble.attention import operators

aten = torch.ops.aten
_CONV, _RULE, _JOINED = (
    getattr(torch.ops.nibble, name).default for name in ("causal_conv", "recurrence", "conv_recurrence")
)
MOVES = frozenset(
    {
        aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.permute.default, aten.transpose.int,
        aten.t.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
        aten.slice.Tensor, aten.select.int, aten.expand.default, aten.split.Tensor, aten.split_with_sizes.default,
        aten.clone.default, aten.alias.default, operator.getitem,
    }
)  # fmt: skip
"""Operators that move values and change none."""
INPUT_VALUES = "eager_input_vals"
"""Where a node has its arguments as they were traced: inductor gives an operator inputs with their strides."""
TOKENS = 3
"""Of the run over numbers."""
assert operators  # which defines the operators


class NotMovedError(Exception):
    """Something else than a move, or what else is allowed, stands between two operators."""


def join_convolutions(graph: fx.Graph, device: str) -> int:
    """Join convolutions with the rules behind them, in place, on one type of device; return how many."""
    count = 0
    for rule in graph.find_nodes(op="call_function", target=_RULE):
        q, k, x = rule.args[:3]
        conv = _source(x)
        if conv is None or rule.meta["val"].device.type != device or conv.args[4:6] != rule.args[5:7]:
            continue
        moves = list(_moves_behind(conv))
        if any(user is not rule and user not in moves for node in (conv, *moves) for user in node.users):
            continue
        try:
            # A compiler's graph passes run where tensors have no values.
            with unset_fake_temporarily():
                (q_at, q_share), (k_at, k_share), (v_at, v_share) = (
                    _channels(part, conv) for part in (q, k, x)
                )
        # What is between may not run over another number of tokens.
        except (NotMovedError, RuntimeError):
            continue
        if q_share != k_share or v_share != 1:
            continue
        _replace(graph, conv, rule, [q_at, k_at, v_at, q_share])
        for node in (*reversed(moves), conv):
            graph.erase_node(node)
        count += 1
    return count


def _source(node: Any) -> fx.Node | None:
    """Return the convolution whose values a node has, moved at most."""
    while isinstance(node, fx.Node) and node.target in MOVES:
        node = node.args[0]
    return node if isinstance(node, fx.Node) and node.target is _CONV else None


def _moves_behind(conv: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that move what a convolution has made, in the order of the graph."""
    reached, node = {conv}, conv.next
    while node.op != "output":
        if node.target in MOVES and node.args[0] in reached:
            reached.add(node)
            yield node
        node = node.next


def _channels(part: Any, conv: fx.Node) -> tuple[int, int]:
    """Return the channel of the first value of queries, keys or values, and how many heads share channels.

    Heads follow one another; those that a family has repeated share theirs.

    Raises:
        NotMovedError: They are not moved alone, or lie otherwise.
    """
    channels = conv.meta["val"].shape[1]
    numbers_TC = torch.arange(TOKENS * channels).view(TOKENS, channels)
    moved = _run(part, conv, numbers_TC)
    if moved.dim() != 3 or len(moved) != TOKENS:
        raise NotMovedError
    first, (heads, width) = int(moved[0, 0, 0]), moved.shape[1:]
    share = int((moved[0, :, 0] == first).sum())
    own = heads // share
    if heads % share or first + own * width > channels:
        raise NotMovedError
    expected = numbers_TC[:, first : first + own * width].view(TOKENS, own, width)
    if not torch.equal(moved, expected.repeat_interleave(share, 1)):
        raise NotMovedError
    return first, share


def _run(node: Any, conv: fx.Node, numbers_TC: Tensor) -> Any:
    """Return what a node has if the convolution's output is `numbers_TC`."""
    if node is conv:
        return numbers_TC
    if not isinstance(node, fx.Node) or node.target not in MOVES or not callable(node.target):
        raise NotMovedError
    source, *rest = node.args
    tokens = conv.meta["val"].shape[0]
    arguments = fx.map_arg(rest, lambda size: size_of(size, tokens))
    return node.target(_run(source, conv, numbers_TC), *arguments)


def size_of(node: fx.Node, tokens: Any) -> int:
    """Return a size that a compiler leaves open, for TOKENS tokens."""
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt) and isinstance(tokens, torch.SymInt):
        size = value.node.expr.subs(tokens.node.expr, TOKENS)
        if size.is_number:
            return int(size)
    raise NotMovedError


def _replace(graph: fx.Graph, conv: fx.Node, rule: fx.Node, places: list[int]) -> None:
    """Put the joined operator in the place of both; places: as Convolution has them, and `share`."""
    heads, rows = rule.meta["val"].shape[1:]
    with graph.inserting_before(rule):
        joined = graph.call_function(_JOINED, _join(conv.args, rule.args, places, heads, rows))
    joined.meta = dict(rule.meta)
    if INPUT_VALUES in rule.meta:
        values = (node.meta[INPUT_VALUES][0] for node in (conv, rule))
        joined.meta[INPUT_VALUES] = (_join(*values, None, None, None), {})
    rule.replace_all_uses_with(joined)
    graph.erase_node(rule)


def _join(conv: Sequence[Any], rule: Sequence[Any], *own: Any) -> tuple[Any, ...]:
    """Return the joined operator's arguments by those of both; own: places, heads, rows."""
    places, heads, rows = own
    return (*conv[:4], places, *rule[3:], heads, rows)

"""What is replaced in the graph of a compiled model before inductor makes code of it.

Families' own code stays as it is; only the operator that computes a node is another, with the same result: torch.topk
of short rows, products with narrow weights where modules call F.linear themselves, as routers of experts do both, and
convolutions in front of recurrent rules (graph_convolutions.py), with what makes their inputs (graph_projections.py).
The first products of an MLP and the gate behind them become one operator (graph_gates.py), and so can a router and the
layer of experts behind it, where Nibble computes both. Attention rotates its queries and keys itself (graph_rope.py).
What several layers gather of all ranks is gathered once. What only serves rows whose logits are wanted is computed for
these (graph_rows.py), and last, sums and the norms behind them become one operator (graph_norms.py).
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from nibble.kernels import experts, linear, router, topk
from nibble.models import (
    compile_cache,
    graph_convolutions,
    graph_gates,
    graph_norms,
    graph_projections,
    graph_rope,
    graph_rows,
    parallel_rows,
)
from nibble.models.graph_nodes import INPUTS
from nibble.models.linear import narrow_weights

log = logging.getLogger("nibble.compile")
aten = torch.ops.aten
PASS_OPTION = "joint_custom_post_pass"
"""Inductor's option for a pass behind its joint ones, in front of its propagation of shapes and all others.

It has a later one, behind that propagation. The graph is half as large after this pass, and what a later one replaces
is propagated again; the code is the same in the end."""
assert experts and linear and router and parallel_rows  # which define the operators


@dataclass(frozen=True)
class ReplaceOperators(CustomGraphPass):
    """Replaces operators by Nibble's own."""

    weights: tuple[tuple[int, int, str], ...] = ()
    """Outputs, inputs and dtype of the weights that kernels/linear multiplies faster."""
    device: str = "cuda"

    def __call__(self, graph: fx.Graph) -> None:
        """Replace what is served, in place."""
        # As inductor does next: what is seen otherwise may not be contiguous.
        for node in graph.find_nodes(op="call_function", target=aten.view.default):
            node.target = aten.reshape.default
        for node in graph.find_nodes(op="call_function", target=aten.topk.default):
            if self._serves_topk(*node.args, **node.kwargs):
                node.target, node.args, node.kwargs = torch.ops.nibble.topk.default, node.args[:2], {}
        graph_convolutions.join_convolutions(graph, self.device)
        graph_projections.join_projections(graph, self.device)
        for node in graph.find_nodes(op="call_function", target=aten.mm.default):
            self._replace_product(node, None, *node.args)
        for node in graph.find_nodes(op="call_function", target=aten.addmm.default):
            # Not where the bias is a matrix or computed, which kernels read ahead, or a factor is beside it.
            bias = node.args[0]
            if not node.kwargs and bias.op in INPUTS and bias.meta["val"].dim() == 1:
                self._replace_product(node, *node.args)
        graph_gates.join_gates(graph, self.device)
        self._try(graph_rope.join_rope, graph)
        for node in graph.find_nodes(op="call_function", target=torch.ops.nibble.experts_layer.default):
            _join_router(graph, node)
        _share_gathered_rows(graph)
        graph_rows.pick_rows_early(graph)
        self._try(graph_norms.join_norms, graph)

    def _try(self, join: Callable[[fx.Graph, str], int], graph: fx.Graph) -> None:
        """Join operators, where nothing of the kind goes wrong; a graph that is left as it was is right."""
        try:
            join(graph, self.device)
        except Exception as error:  # of all kinds: of formulas that families write in ways of their own
            log.info("%s: %s: %s", join.__name__, type(error).__name__, error)

    def _serves_topk(
        self, x: fx.Node, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True
    ) -> bool:
        """Return whether kernels/topk computes these arguments of torch.topk."""
        value = x.meta["val"]
        if value.device.type != self.device or not value.dim() or not largest:
            return False
        width, is_last = value.shape[-1], dim in (-1, value.dim() - 1)
        # A size that varies is no int.
        return (
            is_last and isinstance(width, int) and isinstance(k, int) and topk.serves(value.dtype, width, k)
        )

    def _replace_product(self, node: fx.Node, bias: fx.Node | None, x: fx.Node, weight_KN: fx.Node) -> None:
        weight = weight_KN.args[0] if weight_KN.target is aten.permute.default else None
        if not isinstance(weight, fx.Node) or weight.op not in INPUTS or weight_KN.args[1] != [1, 0]:
            return
        value = weight.meta["val"]
        if value.device.type == self.device and value.is_contiguous() and _facts(value) in self.weights:
            node.target, node.args = torch.ops.nibble.linear.default, (x, weight, bias)

    def uuid(self) -> tuple[str, bytes]:
        """Return what inductor's cache tells passes apart by."""
        return repr(self), get_hash_for_files(tuple(map(str, compile_cache.sources())))


def _join_router(graph: fx.Graph, layer: fx.Node) -> None:
    """Make one operator of a layer of experts and its router, if nothing else wants what the router chose."""
    x, choices, weights, *operands = layer.args
    route = _source(choices, 2)
    if route is None or route is not _source(weights, 1) or not _is_same(x, route.args[0]):
        return
    users = {user for part in route.users for user in part.users}
    if users != {layer}:
        return
    with graph.inserting_before(layer):
        joined = graph.call_function(
            torch.ops.nibble.experts_routed_layer.default, (x, *route.args[1:], *operands)
        )
    joined.meta["val"] = layer.meta["val"]
    layer.replace_all_uses_with(joined)
    for node in (layer, *route.users, route):
        graph.erase_node(node)


def _share_gathered_rows(graph: fx.Graph) -> None:
    """Let layers that gather the same rows of all ranks share them, as experts and shared experts do."""
    gathered = list[fx.Node]()
    for node in graph.find_nodes(op="call_function", target=torch.ops.nibble.gather_rows.default):
        x, _, *others = node.args
        first = next(
            (one for one in gathered if _is_same(x, one.args[0]) and [*one.args[2:]] == others), None
        )
        if first is None:
            gathered.append(node)
        else:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _source(value: Any, index: int) -> fx.Node | None:
    """Return the router that a node is result number `index` of, None where there is none."""
    if not isinstance(value, fx.Node) or value.target is not operator.getitem or value.args[1] != index:
        return None
    source = value.args[0]
    return source if isinstance(source, fx.Node) and source.target is torch.ops.nibble.route.default else None


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two nodes are the same rows, seen twice."""
    if one is other:
        return True
    views = aten.view.default, aten.reshape.default
    first, second = (node.args[0] if node.target in views else node for node in (one, other))
    return first is second and one.meta["val"].shape == other.meta["val"].shape


def _facts(weight: Tensor) -> tuple[int, int, str]:
    outputs, inputs = weight.shape
    return outputs, inputs, str(weight.dtype)


def options(model: nn.Module) -> dict[str, Any]:
    """Return the options of inductor that replace all of this in a model."""
    weights = sorted({_facts(weight) for weight in narrow_weights(model)})
    return {PASS_OPTION: ReplaceOperators(tuple(weights))}

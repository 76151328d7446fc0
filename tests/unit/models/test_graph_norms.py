"""Norms behind sums, in graphs of compiled models: which become one operator, and that results stay the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.decomposition import select_decomp_table

from nibble.models import graph_passes

HIDDEN = 64
RNG = torch.Generator().manual_seed(0)
WEIGHT = (1 + torch.randn(HIDDEN, generator=RNG)).bfloat16()
PRODUCT = torch.randn(HIDDEN, HIDDEN, generator=RNG).bfloat16() / 8
Function = Callable[[Tensor, Tensor, Tensor], Any]


def norm(y: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """As families write it: the value is rounded before its factor."""
    y32 = y.float()
    return weight * (y32 * torch.rsqrt(y32.pow(2).mean(-1, keepdim=True) + eps)).to(y.dtype)


def joined(function: Function) -> int:
    """How many norms of a function become one operator with their sums; results must be the same."""
    torch.compiler.reset()
    graphs: list[fx.Graph] = []

    def compile(module: fx.GraphModule, _: list[Any]) -> Any:
        graph_passes.ReplaceOperators((), "cpu")(module.graph)
        module.graph.lint()
        module.recompile()
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    def of_pair(pair: Tensor) -> Any:
        return function(*pair.split(HIDDEN, -1), WEIGHT)

    backend = aot_autograd(fw_compiler=compile, decompositions=select_decomp_table())
    run = torch.compile(of_pair, backend=backend, fullgraph=True)
    with torch.no_grad():
        for tokens in (6, 3):
            pair = torch.randn(1, tokens, 2 * HIDDEN, generator=RNG).bfloat16()
            torch._dynamo.mark_dynamic(pair, 1)
            for one, other in zip(run(pair), of_pair(pair), strict=True):
                assert (one - other).float().norm() <= 0.01 * other.float().norm()
    (graph,) = graphs
    return sum("add_norm" in str(node.target) for node in graph.nodes)


def test_a_layer() -> None:
    """Two norms, whose sums are added to again."""

    def layer(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        residual = residual + x
        residual = F.linear(norm(residual, weight), PRODUCT) + residual
        return F.linear(norm(residual, weight, 1e-6), PRODUCT) + residual, residual

    assert joined(layer) == 2


def test_factors_that_are_stored_less_one() -> None:
    """As Gemma has them; not a factor of the sum, nor of two weights."""

    def less(y: Tensor, weight: Tensor, one: Any = 1.0) -> Tensor:
        y32 = y.float()
        normed = y32 * torch.rsqrt(y32.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (normed * (one + weight.float())).to(y.dtype)

    assert joined(lambda x, residual, weight: (less(x + residual, weight), x + residual)) == 1
    assert joined(lambda x, residual, weight: (less(x + residual, weight, weight.float().cos()),)) == 0


def test_a_factor_in_front_of_rounding() -> None:
    def late(y: Tensor, weight: Tensor) -> Tensor:
        y32 = y.float()
        return (weight.float() * (y32 * torch.rsqrt(y32.pow(2).mean(-1, keepdim=True) + 1e-5))).to(y.dtype)

    assert joined(lambda x, residual, weight: (late(x + residual, weight), x + residual)) == 1
    assert joined(lambda x, residual, weight: (late(x + residual, weight).float(),)) == 1


@pytest.mark.parametrize(
    ("function", "count"),
    [
        # No sum, a sum with a number, of other shapes, of other dtypes, and a difference.
        (lambda x, residual, weight: (norm(x * residual, weight),), 0),
        (lambda x, residual, weight: (norm(x + 1, weight),), 0),
        (lambda x, residual, weight: (norm(x + residual[:, :1], weight),), 0),
        (lambda x, residual, weight: (norm(x + residual.float(), weight),), 0),
        (lambda x, residual, weight: (norm(torch.add(x, residual, alpha=2), weight),), 0),
        # Other norms: of the mean's distance, of part of a row, with one added to factors, with factors of rows.
        (lambda x, residual, weight: (F.layer_norm(x + residual, (HIDDEN,), weight),), 0),
        (lambda x, residual, weight: (norm((x + residual).unflatten(-1, (2, -1)), weight[:32]),), 0),
        (lambda x, residual, weight: (norm(x + residual, weight * 2),), 0),
        (lambda x, residual, weight: (norm(x + residual, x),), 0),
        # A factor for all values.
        (lambda x, residual, weight: (norm(x + residual, weight[:1].clone()),), 0),
        (lambda x, residual, weight: (norm(x + residual, weight) / (x + residual).float().abs().mean(-1, True),), 1),
        (lambda x, residual, weight: (weight * (x + residual) * torch.rsqrt(x.float().pow(2).mean(-1, True) + 1).bfloat16(),), 0),
    ],
)  # fmt: skip
def test_other_formulas(function: Function, count: int) -> None:
    """What has a norm in it keeps that; nothing else is taken for one."""
    assert joined(function) == count

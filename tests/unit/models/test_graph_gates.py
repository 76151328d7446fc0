"""Gates behind products, in graphs of compiled models: which become one operator, and that results stay the same."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.decomposition import select_decomp_table

from nibble.kernels import gated, linear, quantized_linear
from nibble.kernels.quantized_linear.matrix import PackedMatrix
from nibble.models import graph_gates, graph_passes

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from packed_weights import KINDS, quantize

HIDDEN, HALF = 256, 64
_SEED = torch.Generator().manual_seed(0)
X = torch.randn(1, 5, HIDDEN, generator=_SEED).bfloat16()
WEIGHT = (torch.randn(2 * HALF, HIDDEN, generator=_SEED) / 8).bfloat16()
DOWN = torch.randn(HIDDEN, HALF, generator=_SEED).bfloat16()


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated, "MIN_BYTES", 0)


class Compiler:
    """Runs graphs as they are after the pass, and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[fx.Graph] = []
        self.guards: list[str] = []
        """What graphs are true of alone, of numbers of tokens."""

    def __call__(self, module: fx.GraphModule, inputs: list[Any]) -> Any:
        graph_passes.ReplaceOperators((), "cpu")(module.graph)
        module.graph.lint()
        module.recompile()
        self.graphs.append(module.graph)
        sizes = (size for x in inputs if isinstance(x, Tensor) for size in x.shape)
        envs = {size.node.shape_env for size in sizes if isinstance(size, torch.SymInt)}
        self.guards += [str(guard.expr) for env in envs for guard in env.guards]
        return make_boxed_func(module.forward)


def names(function: Callable[[Tensor, Tensor], Tensor], weight: Tensor = WEIGHT) -> list[str]:
    """The operators of a function after the pass, which must compute the same, for other numbers of tokens too."""
    torch.compiler.reset()
    compiler = Compiler()
    backend = aot_autograd(fw_compiler=compiler, decompositions=select_decomp_table())
    run = torch.compile(function, backend=backend, fullgraph=True)
    x = X.clone()
    torch._dynamo.mark_dynamic(x, 1)
    with torch.no_grad():
        for tokens in (x, torch.cat([x, x], 1)):
            found, expected = run(tokens, weight).float(), function(tokens, weight).float()
            assert (found - expected).norm() <= 0.01 * expected.norm()
    (graph,) = compiler.graphs
    assert not compiler.guards
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def joins(operators: list[str]) -> bool:
    return "nibble.gated_linear.default" in operators


def by_module(x: Tensor, weight: Tensor) -> Tensor:
    y = linear.linear(x, weight)
    return F.linear(F.silu(y[..., :HALF]) * y[..., HALF:], DOWN)


def by_torch(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = F.linear(x, weight).chunk(2, -1)
    return F.linear(up * F.silu(gate), DOWN)


def by_sigmoid(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = F.linear(x, weight).split(HALF, -1)
    return (gate.float() * torch.sigmoid(gate.float()) * up.float()).to(x.dtype) + 1


@pytest.mark.parametrize("function", [by_module, by_torch, by_sigmoid])
def test_a_gate_is_joined(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    operators = names(function)
    assert joins(operators) and operators.count("aten.mm.default") == (function is not by_sigmoid)
    assert not any("sigmoid" in name or "exp.default" in name or "slice" in name for name in operators)


def test_layers_that_are_alike_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are not taken for them: of other halves, or with a bound."""
    tried = []
    own = graph_gates._is_gated
    monkeypatch.setattr(
        graph_gates, "_is_gated", lambda *arguments: tried.append(arguments) or own(*arguments)
    )

    def layers(x: Tensor, weight: Tensor) -> Tensor:
        made = (by_torch, by_torch, swapped, bounded, by_torch, swapped)
        return torch.cat([layer(x.roll(i, -1), weight) for i, layer in enumerate(made)])

    def swapped(x: Tensor, weight: Tensor) -> Tensor:
        gate, up = F.linear(x, weight).chunk(2, -1)
        return F.linear(F.silu(up) * gate, DOWN)

    def bounded(x: Tensor, weight: Tensor) -> Tensor:
        gate, up = F.linear(x, weight).chunk(2, -1)
        return F.linear(F.silu(gate) * up.clamp(-3, 3), DOWN)

    operators = names(layers)
    assert operators.count("nibble.gated_linear.default") == 3
    # Three sizes of what is a gate; the others differ sooner or later.
    assert 5 <= len(tried) <= 9


@pytest.mark.parametrize(
    "gate",
    [
        lambda y: F.gelu(y[..., :HALF], approximate="tanh") * y[..., HALF:],
        lambda y: F.relu(y[..., :HALF]) * y[..., HALF:],
        # The halves the other way round.
        lambda y: F.silu(y[..., HALF:]) * y[..., :HALF],
        # Neighbours.
        lambda y: F.silu(y[..., ::2]) * y[..., 1::2],
        # Bounds.
        lambda y: F.silu(y[..., :HALF].clamp(max=7)) * y[..., HALF:],
        lambda y: F.silu(y[..., :HALF]) * y[..., HALF:].clamp(-200, 200),
        # A factor.
        lambda y: (F.silu(y[..., :HALF].float()) * y[..., HALF:].float() * 1.01).to(y.dtype),
        # The product is wanted, too; then what is between.
        lambda y: F.silu(y[..., :HALF]) * y[..., HALF:] * y.amax(),
        lambda y: F.silu(y[..., :HALF]) * y[..., HALF:] + F.silu(y[..., :HALF]).amax(),
        # Rows change places.
        lambda y: F.silu(y[..., :HALF]) * y[..., HALF:].flip(1),
        # No gates: heads of queries, and an MLP with one product.
        lambda y: torch.cat(
            [part.cos() for part in y.view(1, -1, 8, 16).transpose(1, 2).split([12, 4], -1)], -1
        ),
        lambda y: F.linear(F.relu(y).square(), y.new_ones(HALF, 2 * HALF)),
    ],
)
def test_other_gates_stay(gate: Callable[[Tensor], Tensor]) -> None:
    assert not joins(names(lambda x, weight: gate(F.linear(x, weight))))


@pytest.mark.slow
def test_products_with_a_bias_stay() -> None:
    def biased(x: Tensor, weight: Tensor) -> Tensor:
        y = linear.linear(x, weight, weight[:, 0].contiguous())
        return F.silu(y[..., :HALF]) * y[..., HALF:]

    assert not joins(names(biased))


def test_small_and_odd_weights_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(x: Tensor, weight: Tensor) -> Tensor:
        y = F.linear(x, weight[:40])
        return F.silu(y[..., :20]) * y[..., 20:]

    assert not joins(names(odd))
    monkeypatch.setattr(gated, "MIN_BYTES", WEIGHT.nbytes + 1)
    assert not joins(names(by_torch))


def matrix_of(name: str) -> PackedMatrix:
    weight = torch.randn(2 * HIDDEN, HIDDEN, generator=_SEED).bfloat16()
    return replace(quantize(weight, KINDS[name].format), activations=KINDS[name].activations)


@pytest.mark.parametrize("name", ["fp8", "nvfp4", "int4"])
def test_a_gate_is_joined_with_a_packed_weight(name: str) -> None:
    matrix = matrix_of(name)

    def mlp(x: Tensor, weight: Tensor) -> Tensor:
        y = quantized_linear.quantized_linear(x, matrix)
        return F.silu(y[..., :HIDDEN]) * y[..., HIDDEN:]

    operators = names(mlp)
    assert operators.count("nibble.quantized_gated_linear.default") == 1
    assert "nibble.quantized_linear.default" not in operators


def test_a_gate_stays_where_inputs_are_quantised() -> None:
    matrix = matrix_of("fp8a8")

    def mlp(x: Tensor, weight: Tensor) -> Tensor:
        y = quantized_linear.quantized_linear(x, matrix)
        return F.silu(y[..., :HIDDEN]) * y[..., HIDDEN:]

    assert "nibble.quantized_linear.default" in names(mlp)

"""The last layer of a compiled model is computed for the rows that are asked for alone, and gives the same logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd

from families import tiny_model
from nibble.kernels import experts, router
from nibble.kernels.experts.gate import SILU, Gate
from nibble.kernels.quantized_linear import quantized_linear
from nibble.kernels.quantized_linear.quantize import quantize
from nibble.kernels.weight_formats import Activations, WeightFormat
from nibble.models import graph_rows
from nibble.models.graph_rows import pick_rows_early

HIDDEN, VOCABULARY, TOKENS = 16, 24, 9
ROWS = torch.tensor([2, 8, 3])
X = torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(1))
HEAD = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(2))


class Compiler:
    """Runs graphs as they are after the pass, and keeps them."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.graphs: list[fx.Graph] = []

    def __call__(self, module: fx.GraphModule, inputs: list[Any]) -> Any:
        self.counts.append(pick_rows_early(module.graph))
        module.graph.lint()
        module.recompile()
        self.graphs.append(module.graph)
        return make_boxed_func(module.forward)


def compiled(function: Callable[..., Any], *inputs: Tensor, rows: Tensor = ROWS) -> tuple[Any, Compiler]:
    """What a function returns, and its graph."""
    torch.compiler.reset()
    compiler = Compiler()
    for x, dim in ((inputs[0], 1), (rows, 0)):
        torch._dynamo.mark_dynamic(x, dim)
    run = torch.compile(function, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)
    with torch.no_grad():
        return run(*inputs, rows), compiler


def products(graph: fx.Graph) -> list[Any]:
    """How many rows each product has, as a size."""
    return [
        str(node.meta["val"].shape[-2])
        for node in graph.nodes
        if str(node.target) in ("aten.mm.default", "aten.addmm.default") or "experts" in str(node.target)
    ]


def normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def plain(x: Tensor, rows: Tensor) -> Tensor:
    mixed = x.cumsum(1)  # as attention does, rows depend on one another
    x = x + F.linear(mixed.view(1, x.shape[1], -1, 4).reshape(1, x.shape[1], -1), WEIGHT)
    gate, up = F.linear(normed(x), torch.cat([WEIGHT, -WEIGHT])).chunk(2, -1)
    x = x + F.linear(F.silu(gate) * up, WEIGHT)
    return F.linear(normed(x)[:, rows], HEAD)[0]


def test_what_lies_behind_attention_is_computed_for_rows() -> None:
    found, compiler = compiled(plain, X)
    assert torch.allclose(found, plain(X, ROWS), atol=1e-5)
    assert compiler.counts[0] > 10
    sizes = products(compiler.graphs[0])
    assert len(sizes) == 4 and len(set(sizes)) == 1
    assert "cumsum" in str(compiler.graphs[0])


def test_other_numbers_of_tokens_and_rows_run_the_same_code() -> None:
    torch.compiler.reset()
    compiler = Compiler()
    run = torch.compile(plain, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)
    for tokens, rows in ((9, [2, 8, 3]), (30, [29, 0]), (5, [0, 1, 2, 3, 4]), (4, [3, 3])):
        x, chosen = torch.randn(1, tokens, HIDDEN), torch.tensor(rows)
        torch._dynamo.mark_dynamic(x, 1)
        torch._dynamo.mark_dynamic(chosen, 0)
        with torch.no_grad():
            assert torch.allclose(run(x, chosen), plain(x, chosen), atol=1e-5)
    assert len(compiler.counts) == 1


@pytest.mark.parametrize("activations", [Activations.GROUP, Activations.TOKEN])
def test_inputs_in_fp8_are_quantised_for_rows(activations: Activations) -> None:
    weight = torch.randn(HIDDEN, 256, generator=torch.Generator().manual_seed(3))
    matrix = quantize(weight, WeightFormat("e4m3", 128), torch.float32)
    matrix = replace(matrix, activations=activations)

    def quantised(x: Tensor, rows: Tensor) -> Tensor:
        x = x.cumsum(1)
        y = quantized_linear(torch.cat([x.relu()] * 16, -1), matrix)
        return F.linear((x + y)[:, rows], HEAD)[0]

    found, compiler = compiled(quantised, X)
    assert torch.allclose(found, quantised(X, ROWS), atol=1e-4)
    graph = compiler.graphs[0]
    (node,) = (node for node in graph.nodes if "quantize_activations" in str(node.target))
    codes, scale = node.meta["val"]
    assert str(codes.shape[1]) == str(scale.shape[1]) == products(graph)[-1]


@pytest.mark.parametrize("groups", [1, 2])
def test_the_operator_of_inputs_in_fp8_is_what_compilers_are_told(groups: int) -> None:
    x = torch.randn(3, 256, 5, generator=torch.Generator().manual_seed(4)).transpose(1, 2)
    for some in (x, x.contiguous(), x[0]):
        torch.library.opcheck(torch.ops.nibble.quantize_activations.default, (some, 256 // groups))


def test_experts_are_asked_for_rows() -> None:
    up, down = torch.randn(6, 2 * HIDDEN, HIDDEN), torch.randn(6, HIDDEN, HIDDEN)
    gate = torch.randn(6, HIDDEN)

    def sparse(x: Tensor, rows: Tensor) -> Tensor:
        x = x.cumsum(1)
        flat = normed(x).view(-1, HIDDEN)
        _, weights, chosen = router.route(flat, gate, None, 2, is_normalized=True)
        y = experts.layer(flat, chosen, weights, (up, None), (down, None), Gate(SILU))
        return F.linear((x + y.view(x.shape))[:, rows], HEAD)[0]

    found, compiler = compiled(sparse, X)
    assert torch.allclose(found, sparse(X, ROWS), atol=1e-4)
    assert len(set(products(compiler.graphs[0]))) == 1 and compiler.counts[0]


def test_halves_of_what_stays_are_picked_from() -> None:
    """A projection's one half goes to attention, the other gates what it gives; as does one of several results."""

    def gated(x: Tensor, rows: Tensor) -> Tensor:
        query, gate = F.linear(x, torch.cat([WEIGHT, -WEIGHT])).chunk(2, -1)
        first, second = F.linear(x, WEIGHT).unflatten(-1, (2, -1)).unbind(2)
        peak = x.max(-1, keepdim=True)
        mixed = (query + torch.cat([second, second], -1)).cumsum(1) + peak.indices
        y = F.linear(mixed * gate.sigmoid() * peak.values + torch.cat([first, first], -1), WEIGHT)
        return F.linear(y[:, rows], HEAD)[0]

    found, compiler = compiled(gated, X)
    assert torch.allclose(found, gated(X, ROWS), atol=1e-4)
    assert compiler.counts[0] > 3


def test_choices_of_an_operator_that_is_not_known_are_picked_from() -> None:
    up, down = torch.randn(6, 2 * HIDDEN, HIDDEN), torch.randn(6, HIDDEN, HIDDEN)
    gate = torch.randn(6, HIDDEN)

    def sparse(x: Tensor, rows: Tensor) -> Tensor:
        flat = normed(x.cumsum(1)).view(-1, HIDDEN)
        weights, chosen = F.linear(flat, gate).softmax(-1).topk(2)
        y = experts.layer(flat, chosen, weights, (up, None), (down, None), Gate(SILU))
        return F.linear((x + y.view(x.shape))[:, rows], HEAD)[0]

    found, compiler = compiled(sparse, X)
    assert torch.allclose(found, sparse(X, ROWS), atol=1e-4) and compiler.counts[0]
    assert len(set(products(compiler.graphs[0])) - {str(X.shape[1])}) <= 2


def test_a_graph_that_cannot_be_changed_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(graph_rows, "_add_twins", fails)
    found, compiler = compiled(plain, X)
    assert torch.allclose(found, plain(X, ROWS), atol=1e-5) and compiler.counts == [0]


STAYS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "states of all tokens are wanted": lambda x, rows: (
        (y := F.linear(x.cumsum(1), WEIGHT)),
        F.linear(y[:, rows], HEAD),
    ),
    "rows depend on those before": lambda x, rows: F.linear(F.linear(x, WEIGHT).cumsum(1)[:, rows], HEAD),
    "rows are made equal": lambda x, rows: F.linear(F.linear(x, WEIGHT).softmax(1)[:, rows], HEAD),
    "a mean over rows": lambda x, rows: F.linear((x - F.linear(x, WEIGHT).mean(1, True))[:, rows], HEAD),
    "rows are moved": lambda x, rows: F.linear(F.linear(x, WEIGHT).flip(1)[:, rows], HEAD),
    "rows are values": lambda x, rows: (F.linear(x, WEIGHT).transpose(1, 2) @ x)[:, rows],
    "a view mixes rows": lambda x, rows: F.linear(x, WEIGHT).view(1, -1, x.shape[1]).transpose(1, 2)[:, rows],
    "the number of tokens is a value": lambda x, rows: F.linear(
        (F.linear(x, WEIGHT) * x.shape[1]).cumsum(1)[:, rows], HEAD
    ),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_mixes_rows_stays(name: str) -> None:
    found, compiler = compiled(STAYS[name], X, rows=ROWS)
    for one, other in zip(found, STAYS[name](X, ROWS), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    assert compiler.counts == [0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gemma2",
        "cohere2",
        "glm4",
        "phi3",
        "deepseek_v3",
        "gemma4_text",
        "qwen2_moe",
        "qwen3_next, attention only",
    ],
)
def test_families(name: str) -> None:
    """As they compute themselves: attention mixes rows, and what is behind the last of it is for few."""
    model = tiny_model(name).eval()
    ids, rows = torch.arange(1, 13)[None], torch.tensor([11, 4])

    def run(ids: Tensor, rows: Tensor) -> Tensor:
        out: Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=rows).logits[0]
        return out

    found, compiler = compiled(run, ids, rows=rows)
    assert compiler.counts[0] > 10
    assert torch.allclose(found, run(ids, rows), atol=1e-4)

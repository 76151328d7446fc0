"""What is replaced in graphs of compiled models: which nodes of torch's operators, and that results stay the same."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from families import FAMILIES, make
from nibble.kernels import experts, linear, router, topk
from nibble.kernels.experts.gate import SILU, Gate
from nibble.models import compile_cache, graph_passes
from nibble.models.graph_passes import ReplaceOperators
from nibble.models.linear import merge_and_tune_linears
from nibble.models.parallel_rows import Rows


def targets(graph: fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def replaced(
    function: Callable[..., Any], *inputs: Tensor, weights: Any = (), device: str = "cpu", **options: bool
) -> list[str]:
    """The operators of a function after the pass, which must compute the same."""
    module = make_fx(function, tracing_mode="fake")(*inputs)
    ReplaceOperators(weights, device, **options)(module.graph)
    module.graph.lint()
    module.recompile()
    for found, expected in zip(module(*inputs), function(*inputs), strict=True):
        assert torch.allclose(found, expected, atol=1e-5)
    return targets(module.graph)


@pytest.mark.parametrize(
    "choose",
    [
        lambda x: torch.topk(x, 8, dim=-1),
        lambda x: x.topk(8),
        lambda x: torch.topk(x, k=8, dim=1, sorted=True),
        lambda x: x.unsqueeze(1).view(-1, 8, 16).topk(2, dim=-1),
        lambda x: x.half().topk(4),
    ],
)
def test_a_short_last_dimension_is_replaced(choose: Callable[[Tensor], Any]) -> None:
    x = torch.randperm(5 * 128).view(5, 128).float()  # none are equal
    names = replaced(choose, x)
    assert "nibble.topk.default" in names and "aten.topk.default" not in names
    assert "nibble.topk.default" not in replaced(choose, x, device="cuda")


@pytest.mark.parametrize(
    "choose",
    [
        lambda x: x.topk(3, dim=0),
        lambda x: x.topk(3, largest=False),
        lambda x: x.double().topk(3),
        lambda x: x.topk(topk.MAX_K + 1),
        lambda x: x.repeat(1, 17).topk(3),
        lambda x: x.sum().topk(1),
    ],
)
def test_what_is_not_served_stays(choose: Callable[[Tensor], Any]) -> None:
    names = replaced(choose, torch.randn(4, 64))
    assert "aten.topk.default" in names and "nibble.topk.default" not in names


def test_a_size_that_varies_stays() -> None:
    module = make_fx(lambda x: x.topk(3), tracing_mode="symbolic")(torch.randn(5, 64))
    ReplaceOperators(device="cpu")(module.graph)
    assert "aten.topk.default" in targets(module.graph)


def test_caches_tell_the_pass_apart() -> None:
    one, other = ReplaceOperators(), ReplaceOperators(device="cpu")
    assert one.uuid() == pickle.loads(pickle.dumps(one)).uuid() == ReplaceOperators().uuid() != other.uuid()
    assert one.uuid() != ReplaceOperators(((4, 8, "torch.float32"),)).uuid()
    name = "ReplaceOperators(weights=(), device='cuda')"
    assert repr(one) == name, "it is part of a compiled model's name"


WEIGHT, OTHER = torch.randn(6, 40), torch.randn(6, 41)
NARROW = graph_passes._facts(WEIGHT)


@pytest.mark.parametrize("bias", [None, torch.randn(6)])
def test_a_product_with_a_narrow_weight_is_replaced(bias: Tensor | None) -> None:
    def multiply(x: Tensor, weight: Tensor, *bias: Tensor) -> tuple[Tensor, ...]:
        # As inductor has F.linear.
        transposed = torch.ops.aten.permute.default(weight, [1, 0])
        return (torch.addmm(*bias, x, transposed) if bias else torch.mm(x, transposed),)

    inputs = [x for x in (torch.randn(5, 40), WEIGHT, bias) if x is not None]
    assert "nibble.linear.default" in replaced(multiply, *inputs, weights=(NARROW,))
    assert "nibble.linear.default" not in replaced(multiply, *inputs)
    assert "nibble.linear.default" not in replaced(multiply, *inputs, weights=(NARROW,), device="cuda")


@pytest.mark.parametrize(
    ("multiply", "weight"),
    [
        (lambda x, w: (x @ w.T.permute(1, 0).permute(1, 0)[:40],), OTHER),
        (lambda x, w: (x @ (2 * w).permute(1, 0),), WEIGHT),
        (lambda x, w: (x @ w,), WEIGHT.T.contiguous()),
        (lambda x, w: (x @ w.permute(1, 0),), WEIGHT.T.contiguous().T),
        (lambda x, w: (torch.addmm(x[:, :6], x, w.permute(1, 0)),), WEIGHT),
        (lambda x, w: (torch.addmm(x[0, :6], x, w.permute(1, 0), beta=2.0),), WEIGHT),
    ],
    ids=["another shape", "computed", "transposed", "not contiguous", "no bias", "factor"],
)
def test_other_products_stay(multiply: Callable[..., Any], weight: Tensor) -> None:
    names = replaced(multiply, torch.randn(5, 40), weight, weights=(NARROW,))
    assert "nibble.linear.default" not in names and any("mm.default" in name for name in names)


EXPERTS = torch.randn(6, 16, 40) / 6, torch.randn(6, 40, 8) / 6


def routed_layer(x: Tensor, weight: Tensor, up: Tensor, down: Tensor, kind: str = "") -> tuple[Tensor, ...]:
    """A layer of experts; of some kind: with other weights or rows than its router's, or with logits."""
    logits, weights, chosen = router.route(x.view(-1, 40), weight, None, 2, is_normalized=True)
    rows = (2 * x if kind == "rows" else x).view(-1, 40)
    weights = 2 * weights if kind == "weights" else weights
    y = experts.layer(rows, chosen, weights, (up, None), (down, None), Gate(SILU))
    return (y, logits) if kind == "logits" else (y,)


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_router_and_its_layer_become_one_operator(tokens: int) -> None:
    inputs = torch.randn(1, tokens, 40), WEIGHT, *EXPERTS
    names = replaced(partial(routed_layer, kind=""), *inputs)
    assert "nibble.experts_routed_layer.default" in names
    assert not {"nibble.route.default", "nibble.experts_layer.default"} & set(names)


def test_a_joined_router_is_compiled() -> None:
    options = {
        graph_passes.PASS_OPTION: ReplaceOperators((), "cpu"),
        "fx_graph_cache": False,
    }
    run = torch.compile(partial(routed_layer, kind=""), fullgraph=True, options=options)
    inputs = torch.randn(1, 5, 40), WEIGHT, *EXPERTS
    with torch.inference_mode():
        for found, expected in zip(run(*inputs), routed_layer(*inputs), strict=True):
            assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["rows", "weights", "logits"])
def test_layers_of_other_rows_or_weights_stay(kind: str) -> None:
    inputs = torch.randn(1, 5, 40), WEIGHT, *EXPERTS
    names = replaced(partial(routed_layer, kind=kind), *inputs)
    assert {"nibble.route.default", "nibble.experts_layer.default"} <= set(names)


class Doubled:
    """Two ranks, of which the other has the same rows."""

    rank, size = 0, 2

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack((x, x))


def test_the_same_rows_are_gathered_once() -> None:
    rows = Rows(Doubled(), 1 << 20)  # type: ignore[arg-type]

    def block(x: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        """Experts and shared experts, and logits, which are other rows."""
        experts, shared = (rows.gather(y) for y in (x.view(-1, 8), x.reshape(-1, 8)))
        return experts + shared, rows.gather(other), rows.gather(x.view(-1, 8), of_logits=True)

    names = replaced(block, torch.randn(1, 5, 8), torch.randn(5, 8))
    assert names.count("nibble.gather_rows.default") == 3


def test_inductor_sees_what_was_replaced() -> None:
    """Before it looks at a graph itself, whose views are those that it would make of them."""
    assert hasattr(torch._inductor.config, graph_passes.PASS_OPTION)
    names = replaced(lambda x: (x.view(4, 2, 8).transpose(0, 1).topk(2)[0],), torch.randn(8, 8))
    assert "aten.reshape.default" in names and "aten.view.default" not in names


def test_weights_that_win_a_trial_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("qwen3_moe", FAMILIES["qwen3_moe"].config("qwen3_moe"))
    assert graph_passes.options(model)[graph_passes.PASS_OPTION].weights == (), "on a CPU none does"
    router = next(p for name, p in model.named_parameters() if name.endswith("mlp.gate.weight"))
    monkeypatch.setattr(linear, "serves", lambda weight: weight.shape == router.shape)
    weights = graph_passes.options(model)[graph_passes.PASS_OPTION].weights
    assert weights == ((*router.shape, "torch.float32"),)


def test_trials_are_run_when_weights_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when the model is compiled: the cache has the memory then."""
    model = make("qwen3_moe", FAMILIES["qwen3_moe"].config("qwen3_moe"))
    router = next(p for name, p in model.named_parameters() if name.endswith("mlp.gate.weight"))
    trials = []
    monkeypatch.setattr(linear, "serves", lambda weight: trials.append(weight.shape))
    merge_and_tune_linears(model)
    assert router.shape in trials


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_compiled_models_choose_experts_by_it(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By inductor, as on a GPU, for any number of tokens."""
    torch.manual_seed(0)
    model = make(family, FAMILIES[family].config(family)).eval().requires_grad_(False)
    model.set_experts_implementation("batched_mm")
    calls, products = [], []
    monkeypatch.setattr(topk.naive, "topk", lambda x, k: calls.append(x.shape) or torch.topk(x, k))
    torch._dynamo.reset()
    routers = [module for name, module in model.named_modules() if name.endswith((".gate", ".router"))]
    weights = tuple({graph_passes._facts(router.weight) for router in routers})
    monkeypatch.setattr(linear, "_triton_linear", lambda x, *rest: products.append(x) or F.linear(x, *rest))
    options = {graph_passes.PASS_OPTION: ReplaceOperators(weights, "cpu"), "fx_graph_cache": False}
    run = torch.compile(
        lambda ids: model(input_ids=ids, use_cache=False).logits, fullgraph=True, options=options
    )
    with torch.inference_mode():
        for tokens in (9, 30):
            ids = torch.randint(0, 200, (1, tokens))
            torch._dynamo.mark_dynamic(ids, 1)
            expected = model(input_ids=ids, use_cache=False).logits
            calls.clear()
            assert torch.allclose(run(ids), expected, atol=1e-4)
            assert len(calls) >= len(routers) > 0
            assert {shape[0] for shape in calls} == {tokens}
    assert len(products) >= len(routers), "of the step of few tokens"


def routed(model: torch.nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    values, indices = torch.topk((x @ model.weight).softmax(-1), 2, dim=-1)
    return values / values.sum(-1, keepdim=True), indices


class Router(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(4, 16, generator=generator), requires_grad=False)
        self.config: Any = type("Config", (), {"to_dict": lambda self: {}})()


@pytest.mark.slow
def test_it_is_kept_with_a_compiled_model(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIBBLE_CACHE", str(tmp_path))
    monkeypatch.setenv(compile_cache.CACHE_VARIABLE, str(tmp_path / "inductor"))
    calls = []
    monkeypatch.setattr(topk.naive, "topk", lambda x, k: calls.append(len(x)) or torch.topk(x, k))
    model, options = Router(), {graph_passes.PASS_OPTION: ReplaceOperators(device="cpu")}
    path = compile_cache.path_of(model, options)
    assert path != compile_cache.path_of(model, graph_passes.options(model))
    x = torch.randn(5, 4)
    torch._dynamo.mark_dynamic(x, 0)
    for run in (
        compile_cache.compile_into(path, routed, (model, x), options),
        compile_cache.load(path, routed, (model, torch.randn(7, 4))),
    ):
        for rows in (3, 11):
            other = torch.randn(rows, 4)
            for found, expected in zip(run(model, other), routed(model, other), strict=True):
                assert torch.allclose(found, expected)
    assert calls == [3, 11] * 2

"""What is replaced in graphs of compiled models: which nodes of torch's operators, and that results stay the same."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from families import FAMILIES, make
from nibble.kernels import topk
from nibble.models import compile_cache, graph_passes
from nibble.models.graph_passes import ReplaceTopk


def targets(graph: fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def replaced(function: Callable[..., Any], *inputs: Tensor, device: str = "cpu") -> list[str]:
    """The operators of a function after the pass, which must compute the same."""
    module = make_fx(function, tracing_mode="fake")(*inputs)
    ReplaceTopk(device)(module.graph)
    module.graph.lint()
    module.recompile()
    for found, expected in zip(module(*inputs), function(*inputs), strict=True):
        assert torch.equal(found, expected)
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
    ReplaceTopk("cpu")(module.graph)
    assert "aten.topk.default" in targets(module.graph)


def test_caches_tell_the_pass_apart() -> None:
    one, other = ReplaceTopk(), ReplaceTopk("cpu")
    assert one.uuid() == pickle.loads(pickle.dumps(one)).uuid() == ReplaceTopk().uuid() != other.uuid()
    assert repr(one) == "ReplaceTopk(device='cuda')", "it is part of the name of a compiled model"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_compiled_models_choose_experts_by_it(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By inductor, as on a GPU, for any number of tokens."""
    torch.manual_seed(0)
    model = make(family, FAMILIES[family].config(family)).eval().requires_grad_(False)
    model.set_experts_implementation("batched_mm")
    calls = []
    monkeypatch.setattr(topk.naive, "topk", lambda x, k: calls.append(x.shape) or torch.topk(x, k))
    torch._dynamo.reset()
    options = {"post_grad_custom_pre_pass": ReplaceTopk("cpu"), "fx_graph_cache": False}
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
            routers = [name for name, _ in model.named_modules() if name.endswith((".gate", ".router"))]
            assert len(calls) >= len(routers) > 0
            assert {shape[0] for shape in calls} == {tokens}


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
    model, options = Router(), {"post_grad_custom_pre_pass": ReplaceTopk("cpu")}
    path = compile_cache.path_of(model, options)
    assert path != compile_cache.path_of(model, graph_passes.options())
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

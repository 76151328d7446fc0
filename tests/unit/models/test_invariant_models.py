"""What a deterministic model's arithmetic is made of: everything that rounds is replaced, and what nobody knows is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from families import FAMILIES, make
from nibble.errors import ConfigError
from nibble.models import invariant
from nibble.models.forward import compiled

aten = torch.ops.aten


class Recorder(invariant.InvariantMode):
    """Notes what reaches torch in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(func)
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma3_text", "deepseek_v3", "gpt_oss", "gpt2"])
def test_a_model_as_written_computes_the_same(name: str) -> None:
    torch.manual_seed(0)
    model, ids = make(name, FAMILIES[name].config(name)).eval(), torch.randint(0, 500, (1, 9))
    with torch.inference_mode():
        expected = model(input_ids=ids, use_cache=False).logits
        with Recorder() as mode:
            found = model(input_ids=ids, use_cache=False).logits
    assert float((found - expected).abs().max()) < 1e-4
    assert torch.ops.nibble.invariant_bmm.default not in mode.seen, "kernels are called, not looked into"
    assert mode.seen & {aten.mm.default, aten.addmm.default, aten.linear.default}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3"])
def test_a_compiled_graph_has_no_products_of_torchs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []
    check = invariant.check_graph
    monkeypatch.setattr(invariant, "check_graph", lambda graph: graphs.append(graph) or check(graph))
    model = make(name, FAMILIES[name].config(name)).eval().requires_grad_(False)
    if name == "qwen3_moe":
        model.set_experts_implementation("grouped_mm")
    ids = torch.randint(0, 500, (1, 9))

    def run(model: nn.Module, ids: Tensor) -> Tensor:
        return model(input_ids=ids, use_cache=False).logits

    torch._dynamo.reset()
    with torch.inference_mode():
        expected = run(model, ids)
        torch._dynamo.mark_dynamic(ids, 1)
        found = torch.compile(run, fullgraph=True, backend=invariant.interpreted)(model, ids)
    assert float((found - expected).abs().max()) < 1e-4
    targets = {str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function"}
    assert "nibble.invariant_bmm.default" in targets
    assert ("nibble.invariant_grouped_mm.default" in targets) == (name != "llama")
    assert not targets & {f"aten.{op}.default" for op in ("mm", "addmm", "bmm", "topk", "_grouped_mm")}


def test_sums_and_norms_are_replaced() -> None:
    x = torch.randn(5, 3, 40)
    norm = nn.LayerNorm(40)
    for compute in (
        lambda: x.sum(-1), lambda: x.mean((0, 2)), lambda: x.sum(1, keepdim=True), lambda: x.softmax(-1),
        lambda: norm(x), lambda: F.rms_norm(x, (40,)), lambda: x.logsumexp(1), lambda: x.var(-1),
        lambda: x.half().mean(-1, dtype=torch.float32),
    ):  # fmt: skip
        with torch.inference_mode():
            expected = compute()
            with Recorder() as mode:
                found = compute()
        assert found.dtype == expected.dtype and found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert mode.seen


def test_ties_go_to_the_first() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0]])
    with invariant.InvariantMode():  # type: ignore[no-untyped-call]
        values, indices = scores.topk(2)
    assert indices.tolist() == [[1, 2]] and values.tolist() == [[3.0, 3.0]]


def test_what_adds_in_an_unknown_order_is_refused() -> None:
    x, index = torch.randn(4, 3), torch.tensor([0, 0, 1, 2])
    for compute in (
        lambda: torch.zeros(3, 3).index_add(0, index, x),
        lambda: torch.zeros(3, 3).index_put((index,), x, accumulate=True),
        lambda: torch.zeros(3, 3).scatter_reduce(0, index[:, None].expand(4, 3), x, "sum"),
        lambda: F.conv1d(torch.randn(1, 2, 8), torch.randn(2, 2, 3)),
    ):
        mode = invariant.InvariantMode()  # type: ignore[no-untyped-call]
        with torch.inference_mode(), pytest.raises(ConfigError, match="deterministic"), mode:
            compute()
    with torch.inference_mode(), invariant.InvariantMode():  # type: ignore[no-untyped-call]
        assert torch.equal(torch.zeros(3, 3).index_put((index[1:],), x[1:])[1], x[2])


class Adding(nn.Module):
    """A model that adds rows up with atomics."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        added = torch.zeros(1, 8, 3).index_add(
            1, input_ids[0] % 8, self.weight.expand(1, input_ids.shape[1], 3)
        )
        return CausalLMOutput(logits=added)


def test_a_graph_with_something_unknown_is_refused() -> None:
    torch._dynamo.reset()
    ids = torch.arange(5)[None]
    with torch.inference_mode(), pytest.raises(ConfigError, match="runs aten"):
        compiled(Adding(), invariant.interpreted)(ids, ids, torch.arange(2), None)  # type: ignore[arg-type]

"""Experts as a GPU serves them, on a CPU by the definition of their products: against the family's own code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from families import FAMILIES, make
from nibble.kernels.experts.gate import CLAMPED, SILU
from nibble.models import experts

NAMES = [
    "qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "gpt_oss", "olmoe", "qwen2_moe", "llama4_text", "dbrx", "phimoe",
]  # fmt: skip


def served(model: nn.Module) -> int:
    """Let our function compute the model's experts, as serve_experts does on a GPU."""
    modules = [module for module in model.modules() if hasattr(module, "is_transposed")]
    for module in modules:
        module.config._experts_implementation = experts.NAME  # type: ignore[union-attr]
        experts._set_gate(module)
    return len(modules)


def run(model: nn.Module, ids: Tensor) -> Tensor:
    return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("name", [name for name in NAMES if name in FAMILIES])
def test_experts_compute_what_the_family_does(name: str) -> None:
    """Few tokens, and many that are sorted."""
    torch.manual_seed(0)
    model = make(name, FAMILIES[name].config(name)).eval()
    if any(hasattr(module, "is_transposed") for module in model.modules()):
        model.set_experts_implementation("eager")
    with torch.inference_mode():
        for tokens in (1, 9, 70):
            ids = torch.randint(0, 500, (1, tokens))
            model.set_experts_implementation("eager")
            expected = run(model, ids)
            if not served(model):
                pytest.skip("its experts are code of its own")
            assert float((run(model, ids) - expected).abs().max()) < 1e-5 * float(expected.abs().max()) + 1e-5


GATES = {"qwen3_moe": SILU, "gpt_oss": CLAMPED, "mixtral": SILU, "deepseek_v3": SILU, "dbrx": None}
"""None: their experts are code of their own."""


@pytest.mark.parametrize("name", [name for name in GATES if name in FAMILIES])
def test_gates_are_observed(name: str) -> None:
    model = make(name, FAMILIES[name].config(name)).eval()
    modules = [module for module in model.modules() if hasattr(module, "is_transposed")]
    gates = {experts.gate_of(module) for module in modules}
    assert {gate and gate.kind for gate in gates} == ({GATES[name]} if GATES[name] else set())
    if GATES[name] == CLAMPED:
        (gate,) = gates
        assert gate and gate.limit == modules[0].limit and gate.factor == modules[0].alpha


def test_other_gates_stay_the_familys_own(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = make("qwen3_moe", FAMILIES["qwen3_moe"].config("qwen3_moe")).eval()
    modules = [module for module in model.modules() if hasattr(module, "is_transposed")]
    for module in modules:
        module.act_fn = nn.GELU()
    ids = torch.randint(0, 500, (1, 9))
    with torch.inference_mode():
        model.set_experts_implementation("eager")
        expected = run(model, ids)
        served(model)
        assert all(module.nibble_gate is None for module in modules)
        assert torch.allclose(run(model, ids), expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_graph_has_the_layer_and_is_whole(name: str, gate: bool) -> None:
    """Compiled once for all lengths."""
    model = make(name, FAMILIES[name].config(name)).eval().requires_grad_(False)
    served(model)
    for module in model.modules():
        if hasattr(module, "nibble_gate") and not gate:
            module.nibble_gate = None
    targets: set[str] = set()

    def look(module: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        targets.update(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return module.forward

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend=look)
    with torch.inference_mode():
        for tokens in (9, 70, 3):
            ids = torch.randint(0, 500, (1, tokens))
            torch._dynamo.mark_dynamic(ids, 1)
            expected = run(model, ids)
            assert torch.allclose(compiled(model, ids), expected, atol=1e-4)
    expected_names = {"nibble.experts_layer"} if gate else {"nibble.experts_up", "nibble.experts_down"}
    assert expected_names <= {name.removesuffix(".default") for name in targets}

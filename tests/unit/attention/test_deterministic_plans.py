"""--deterministic in plans: one backend for all phases, nothing staged, and clear refusals."""

from __future__ import annotations

from typing import Any

import pytest

from nibble import ConfigError, Unsupported
from nibble.attention.planner.plan import Plan
from nibble.config import Config
from nibble.engine.plan import as_text, plan_cache, plan_engine
from nibble.hardware import lookup_gpu

H200 = lookup_gpu("h200")
QWEN, MOE, DEEPSEEK, SPARSE = (
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-30B-A3B",
    "deepseek-ai/DeepSeek-V3",
    "deepseek-ai/DeepSeek-V3.2",
)


def plan(model: str, **options: Any) -> Plan:
    return plan_cache(Config(model=model, deterministic=True, **options), H200, published=True).plan


@pytest.mark.slow
@pytest.mark.parametrize("model", [QWEN, DEEPSEEK])
@pytest.mark.parametrize("scheme", ["bf16", "nvfp4", "fp8_e4m3"])
def test_one_kernel_serves_all_phases(model: str, scheme: str) -> None:
    found = plan(model, kv_format=scheme)
    assert {str(route) for route in found.routes} == {"triton_invariant"}
    assert any("deterministic: the same bits" in note for note in found.notes)
    plain = plan_cache(Config(model=model, kv_format=scheme), H200, published=True).plan
    assert "triton_invariant" not in {route.backend for route in plain.routes}


def test_memory_for_splits_is_planned() -> None:
    """Float32 results of every split of the longest request, for as many tokens as are decoded."""
    options: dict[str, Any] = {"model": QWEN, "max_context": 32768, "max_running": 300, "deterministic": True}
    engine_plan = plan_engine(Config(**options), H200, published=True)
    context = engine_plan.budget.table_width * engine_plan.plan.page_size
    assert engine_plan.budget.staging == -(-context // 1024) * 300 * 4 * 32 * (128 + 3)
    assert (
        "deterministic: the same bits" in as_text(engine_plan, engine_plan.budget) or engine_plan.plan.notes
    )


@pytest.mark.parametrize("name", ["triton", "sdpa", "cuda", "torch_ref"])
def test_other_backends_are_refused(name: str) -> None:
    with pytest.raises(Unsupported, match="no batch_invariance") as refusal:
        plan(QWEN, attention_backend=name)
    assert refusal.value.refusal.suggestion is not None


@pytest.mark.slow
def test_sparse_attention_is_refused() -> None:
    with pytest.raises(Unsupported, match="batch_invariance"):
        plan(SPARSE)


def test_an_exact_window_is_refused() -> None:
    """Its two parts would have another arithmetic in prompts than in decode steps."""
    with pytest.raises(
        Unsupported, match="does not return the log-sum-exp that an exact window needs"
    ) as refusal:
        plan(QWEN, kv_format="nvfp4", kv_window=128)
    assert refusal.value.refusal.suggestion is not None


def test_a_cpu_keeps_its_definition(tiny: Any) -> None:
    config = Config(model=str(tiny), device="cpu", kv_format="nvfp4", deterministic=True)
    assert {route.backend for route in plan_cache(config).plan.routes} == {"torch_ref"}
    with pytest.raises(Unsupported, match="sdpa"):
        plan_cache(Config(model=str(tiny), device="cpu", attention_backend="sdpa", deterministic=True))


def test_a_cpu_refuses_what_varies_there(tmp_path: Any) -> None:
    from tiny import save_model

    model = str(save_model(tmp_path, "jetmoe", kv_channels=16, num_experts_per_tok=2, num_local_experts=4))
    with pytest.raises(ConfigError, match="last bits of jetmoe depend on how a prompt is cut"):
        plan_cache(Config(model=model, device="cpu", deterministic=True))
    assert plan_cache(Config(model=model, device="cpu")).plan.routes

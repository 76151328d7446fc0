"""Plans of models that are divided among GPUs: no GPU and no weights are needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nibble.config import Config
from nibble.engine.parallel_plan import whole_layout, with_rows
from nibble.engine.plan import as_text, plan_engine
from nibble.errors import CapacityError, ConfigError
from nibble.evals.precision_report import Goal
from nibble.evals.tune_precision import tune
from nibble.hardware import lookup_gpu

GPU = lookup_gpu("h100")


def planned(tp: int, model: str = "qwen3-8b", **options: Any) -> Any:
    return plan_engine(Config(model=model, kv_format="nvfp4", tp=tp, **options), GPU, published=True)


@pytest.mark.slow
def test_a_rank_has_its_part_of_heads_and_weights() -> None:
    one, four = planned(1), planned(4)
    assert [plan.model_spec.groups[0].q_heads for plan in (one, four)] == [32, 8]
    assert [plan.model_spec.groups[0].streams[0].heads for plan in (one, four)] == [8, 2]
    assert one.model_spec.vocab_size == four.model_spec.vocab_size
    # Norms alone are not divided.
    whole, part = (plan.model_spec.weight_bytes for plan in (one, four))
    assert whole < 4 * part < 1.001 * whole
    assert four.budget.tokens > 4 * one.budget.tokens
    assert any("each layer is divided among 4 GPUs" in note for note in four.plan.notes)


def test_kv_heads_are_kept_by_several_ranks_where_they_are_fewer() -> None:
    plan = planned(16)
    assert plan.model_spec.groups[0].streams[0].heads == 1
    assert any("KV heads (8) are kept by several GPUs" in note for note in plan.plan.notes)


@pytest.mark.slow
def test_a_model_that_one_gpu_does_not_hold_says_how_many_do() -> None:
    with pytest.raises(CapacityError, match="it needs --tp 4"):
        planned(1, "llama-3.3-70b")


def test_heads_that_do_not_divide_name_the_nearest_number() -> None:
    with pytest.raises(ConfigError, match=r"32 heads over 8 KV heads .* --tp 2"):
        planned(3)


def test_what_needs_the_whole_model_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tune-precision with --tp 2 is not served: .*--device cpu"):
        tune(Config(model="demo", tp=2), Goal(budget="4.5bits"), tmp_path / "scheme.json")


@pytest.mark.parametrize("tp", [2, 16])
def test_all_ranks_together_store_what_one_does(tp: int) -> None:
    plan = planned(tp)
    assert plan.plan.layout.bytes_per_token < planned(1).plan.layout.bytes_per_token
    assert whole_layout(plan.plan.layout, plan.model_spec) == planned(1).plan.layout


# Experts by number, attention by requests


@pytest.mark.slow
def test_whole_experts_take_the_bytes_of_parts() -> None:
    parts, whole = planned(2, "gpt-oss-20b"), planned(2, "gpt-oss-20b", expert_parallel=True)
    ratio = whole.model_spec.weight_bytes / parts.model_spec.weight_bytes
    assert 0.99 < ratio < 1.01
    assert any("equal number of whole experts" in note for note in whole.plan.notes)


def test_experts_that_do_not_divide_name_the_nearest_number() -> None:
    with pytest.raises(ConfigError, match=r"128 experts cannot be divided evenly among 3 GPUs .* --tp 2"):
        planned(3, "qwen3-235b-a22b", expert_parallel=True, attention_dp=True)


def test_latents_are_kept_once_where_attention_is_divided_by_requests() -> None:
    replicated, once = (
        plan_engine(
            Config(model="demo-mla", kv_format="fp8_e4m3", tp=2, kv_memory="64MiB", **options),
            GPU,
            published=True,
        )
        for options in ({}, {"attention_dp": True})
    )
    assert 2 * once.budget.tokens >= 1.9 * replicated.budget.tokens
    assert f"all 2 GPUs keep {2 * once.budget.tokens:,} tokens" in as_text(once, once.budget)
    assert any("latents are kept by several GPUs" in note for note in replicated.plan.notes)
    assert not any("latents are kept by several GPUs" in note for note in once.plan.notes)
    # Attention is whole, and all else divided.
    assert once.model_spec.groups[0].q_heads == 2 * replicated.model_spec.groups[0].q_heads
    assert once.model_spec.weight_bytes > replicated.model_spec.weight_bytes
    assert any("attention (each GPU attends" in note for note in once.plan.notes)


def test_logits_of_all_ranks_requests_are_planned() -> None:
    """As they are kept, gathered, and put side by side: of two ranks, but for those of one that every plan has."""
    model_spec = planned(2, attention_dp=True).model_spec
    few, many = (
        with_rows(GPU, Config(model="qwen3-8b", tp=2, attention_dp=True, max_running=running), model_spec)
        for running in (256, 512)
    )
    assert few.memory - many.memory == 5 * 256 * model_spec.vocab_size * 2
    assert with_rows(GPU, Config(model="qwen3-8b", tp=2), model_spec) is GPU


def test_what_attention_by_requests_is_not_served_with_is_refused() -> None:
    with pytest.raises(ConfigError, match="recurrent states with --attention-dp is not served"):
        planned(2, "demo-hybrid", attention_dp=True)

"""Plans of models that are divided among GPUs: no GPU and no weights are needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nibble.config import Config
from nibble.engine.parallel_plan import whole_layout
from nibble.engine.plan import plan_engine
from nibble.errors import CapacityError, ConfigError
from nibble.evals.precision_report import Goal
from nibble.evals.tune_precision import tune
from nibble.hardware import lookup_gpu

GPU = lookup_gpu("h100")


def planned(tp: int, model: str = "qwen3-8b", **options: Any) -> Any:
    return plan_engine(Config(model=model, kv_format="nvfp4", tp=tp, **options), GPU, published=True)


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

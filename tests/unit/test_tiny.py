"""One test for each promise of the README's first screen, in seconds, on a tiny random model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import nibble
from nibble import LLM, ConfigError, Unsupported
from nibble.engine.plan import plan_engine
from nibble.hardware import lookup_gpu


def test_a_four_bit_cache_takes_the_bytes_it_promises(tiny: Path) -> None:
    bf16, nvfp4 = (
        LLM(str(tiny), kv_format=name, kv_scales="one", kv_memory="1MiB").plan.layout
        for name in ("bf16", "nvfp4")
    )
    assert bf16.bytes_per_token / nvfp4.bytes_per_token == pytest.approx(512 / 144)


def test_six_lines_of_python(tiny: Path) -> None:
    llm = LLM(str(tiny), kv_format="nvfp4", kv_scales="one", kv_memory="1MiB")
    output = llm.generate("def fibonacci(n):", max_tokens=8)
    assert len(output.completions[0].token_ids) <= 8 and isinstance(output.text, str)


def test_scales_never_default_to_one(tiny: Path) -> None:
    llm = LLM(str(tiny), kv_format="nvfp4", kv_memory="1MiB")
    assert llm.engine.startup.kv_scales.startswith("KV scales: measured on 1,024 tokens")
    scales = [
        view.scale for layer in range(3) for view in llm.engine.runner.pool.view(layer).streams.values()
    ]
    assert len({float(scale) for scale in scales}) == len(scales) == 6


def test_a_plan_needs_no_gpu_and_no_vendor_package(tiny: Path) -> None:
    config = nibble.Config(model=str(tiny), kv_format="nvfp4", attention_backend="trtllm_mha")
    with pytest.raises(Unsupported) as refusal:
        plan_engine(config, lookup_gpu("h200"))
    assert "trtllm_mha" in refusal.value.refusal.reasons
    suggestion = refusal.value.refusal.suggestion
    assert suggestion and suggestion.as_command().startswith("nibble plan ") and not suggestion.shortfall


def test_the_answer_does_not_depend_on_the_prefix_cache(tiny: Path) -> None:
    llm = LLM(str(tiny), kv_format="nvfp4", kv_scales="one", kv_memory="1MiB")
    first, again = (llm.generate("0123456789" * 10, max_tokens=8) for _ in range(2))
    assert first.cached_tokens == 0 and again.cached_tokens > 80
    assert first.completions[0].token_ids == again.completions[0].token_ids


def test_a_broken_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nothing_like_it"}))
    with pytest.raises((ConfigError, nibble.WeightError), match="nothing_like_it"):
        LLM(str(tmp_path))

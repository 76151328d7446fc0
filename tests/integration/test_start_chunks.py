"""What a start runs so that kernels for short prompts are compiled: steps like a request's, which leave nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nibble import LLM
from nibble.engine import warmup_steps
from nibble.model_spec import Phase
from tiny import MLA, SPARSE, save_tiny

MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "heads": ("qwen3", {}, {"kv_format": "nvfp4"}),
    "heads without a window": ("qwen3", {}, {"kv_format": "bf16"}),
    "latents": ("deepseek_v3", MLA, {"kv_format": "nvfp4"}),
    "sparse": ("glm_moe_dsa", SPARSE, {"kv_format": "nvfp4", "kv_window": 32}),
    "host tier": (
        "glm_moe_dsa", SPARSE,
        {"kv_format": "nvfp4", "hisparse": "buffer=32", "kv_memory": "700KiB"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_few_tokens_after_few_and_after_many(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, changes, options = MODELS[name]
    usual = {"kv_memory": "8MiB", "max_running": 8, "max_context": 400, "page_size": 16}
    folder = save_tiny(tmp_path, family, **changes)
    with LLM(str(folder), **{**usual, **options}) as llm:
        runner = llm.engine.runner
        assert (runner.tier is not None) is (name == "host tier")
        prompt = torch.arange(5, 70).tolist()
        before = llm.generate([prompt], max_tokens=8, ignore_eos=True)[0].completions[0].token_ids
        llm.engine.scheduler.manager.clear()  # as at a start
        steps, forward = [], type(runner).forward

        def recorded(self: Any, batch: Any, **options: Any) -> Any:
            (item,) = batch.scheduled
            steps.append((item.start, item.num_tokens, item.phase))
            logits = forward(self, batch, **options)
            assert logits.isfinite().all()
            return logits

        monkeypatch.setattr(type(runner), "forward", recorded)
        warmup_steps.run_chunks(runner, 8192, 300)
        monkeypatch.undo()
        assert [count for _, count, _ in steps] == [
            24,
            *warmup_steps.CHUNKS,
            300 - sum(warmup_steps.CHUNKS),
            *warmup_steps.CHUNKS,
        ]
        assert {phase for _, _, phase in steps} == {Phase.PREFILL, Phase.EXTEND}
        assert max(start for start, _, _ in steps) == 300 - warmup_steps.CHUNKS[-1]
        after = llm.generate([prompt[:-1], prompt], max_tokens=8, ignore_eos=True)[1].completions[0].token_ids
        assert after == before

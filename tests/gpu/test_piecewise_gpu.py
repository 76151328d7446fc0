"""Steps with prompts that are recorded piecewise, on a GPU: answers of steps that are computed kernel by kernel.

Skipped where there is no GPU, or it is not asked for: NIBBLE_TEST_GPU=1 pytest tests/gpu/test_piecewise_gpu.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_answers import divergence, near_share, save_wide
from nibble import LLM
from nibble.engine import piecewise

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PROMPTS = [
    [(7 * i + j * j) % 250 + 1 for j in range(n)] for i, n in enumerate((40, 3, 161, 17, 390, 2, 700, 64, 33))
]
KL = 1e-3


@pytest.mark.parametrize(
    ("name", "scheme"),
    [("demo", "bf16"), ("demo", "nvfp4"), ("demo-mla", "fp8_ds_mla"), ("demo-hybrid", "nvfp4"), ("qwen3_moe", "bf16"),
     ("gpt_oss", "bf16")],
)  # fmt: skip
def test_pieces_give_the_answers_of_steps_as_they_are(
    name: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(__file__).parents[2] / "models" / name
    if name.startswith("demo") and not list(folder.glob("*.safetensors")):
        pytest.skip("the model is not here")
    path = name if name.startswith("demo") else str(save_wide(name, tmp_path))
    replays, replay = list[int](), piecewise._Size.replay

    def counted(size: Any, ctx: Any) -> None:
        replays.append(len(size.ids_T))
        replay(size, ctx)

    monkeypatch.setattr(piecewise._Size, "replay", counted)
    options: dict[str, Any] = {"kv_memory": "512MiB", "max_running": 16, "token_budget": 300}
    with LLM(path, kv_format=scheme, device="cuda", **options) as llm:
        runner = llm.engine.runner
        assert runner.pieces, llm.engine.startup.notes
        replays.clear()
        prompts = [prompt[: llm.engine.scheduler.limit - 32] for prompt in PROMPTS]
        share = min(
            near_share(llm, some) for some in (prompts, prompts[1:4:2])
        )  # in steps of any size, and small ones
        assert share > 0.97 and len(set(replays)) >= 2, (share, replays)
        for prompt in prompts[:2]:  # of few rows, which pieces compute too
            found_TV = llm.logits(prompt).float().cpu()
            pieces, runner.pieces = runner.pieces, None
            expected_TV = llm.logits(prompt).float().cpu()
            runner.pieces = pieces
            assert divergence(expected_TV, found_TV) < KL

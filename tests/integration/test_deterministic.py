"""The way of --deterministic through an engine, as on a GPU but with the kernels' definitions: products are replaced,
in the model as written and in its graph, and logits are the same bits in any chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nibble import LLM
from nibble.engine.build import run_prompt
from nibble.models import hook, invariant
from nibble.models.forward import compiled, plain, plain_invariant
from tiny import MLA, save_tiny

PROMPT = torch.randint(0, 256, (60,), generator=torch.Generator().manual_seed(1)).tolist()
# Queries read near tokens exactly, and others quantised.
OPTIONS: dict[str, Any] = {
    "kv_scales": "one",
    "kv_memory": "4MiB",
    "max_running": 4,
    "kv_window": 24,
    "deterministic": True,
}


def logits(llm: LLM, chunk: int) -> torch.Tensor:
    return torch.cat(list(run_prompt(llm.engine.runner, llm.engine.scheduler.manager, PROMPT, chunk)))


@pytest.mark.parametrize("family", ["llama", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_same_bits_in_any_chunks(family: str, is_compiled: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = MLA if family == "deepseek_v3" else {}
    path, scheme = str(save_tiny(tmp_path, family, **options)), "nvfp4"
    llm = LLM(path, kv_format=scheme, **OPTIONS)
    experts = {"experts_implementation": "grouped_mm"} if family == "deepseek_v3" else {}
    model = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation=hook.NAME, dtype=torch.float32, **experts
    )
    model = hook.adapt(model).eval().requires_grad_(False)
    torch._dynamo.reset()
    llm.engine.runner._run = plain(model)
    expected = logits(llm, 60)
    run = compiled(model, invariant.interpreted) if is_compiled else plain_invariant(model)
    llm.engine.runner._run = run
    whole = logits(llm, 60)
    # A last bit of K may be a whole step of its code.
    assert float((whole - expected).norm() / expected.norm()) < 0.2
    for chunk in (7, 32):
        assert torch.equal(logits(llm, chunk), whole), f"chunks of {chunk}"


def test_samples_do_not_depend_on_company(tiny: Path) -> None:
    llm = LLM(str(tiny), kv_format="nvfp4", **OPTIONS)
    assert any(note.startswith("deterministic") for note in llm.plan.notes)

    def sampled(*prompts: list[int]) -> Any:
        params: dict[str, Any] = {
            "max_tokens": 8,
            "ignore_eos": True,
            "seed": 3,
            "temperature": 0.9,
            "logprobs": 2,
        }
        return llm.generate(list(prompts), progress=False, **params)[0].completions[0]

    alone, together = sampled(PROMPT), sampled(PROMPT, PROMPT[:9], PROMPT[:33])
    assert alone.token_ids == together.token_ids and alone.logprobs == together.logprobs

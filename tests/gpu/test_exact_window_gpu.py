"""The exact window on a GPU: its error shrinks with the window, and steps of all kinds agree, recorded ones too.

Skipped where there is no GPU, or it is not asked for: NIBBLE_TEST_GPU=1 pytest tests/gpu

Shape suffixes: T tokens, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nibble import LLM
from nibble.engine.build import run_prompt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TEXT = (Path(__file__).parents[2] / "models" / "demo" / "heldout.txt").read_text()[:12000]
SCHEMES = {
    "demo": ("nvfp4", "nvfp4+kmean+rot", "mxfp4"),
    "demo-mla": ("nvfp4", "nvfp4_ds_mla"),
}
TOKENS, ANSWER = 900, 40
ARITHMETIC = 0.03
"""Difference of log-probabilities that bfloat16 alone brings."""


def opened(model: str, kv_format: str, window: int, **options: Any) -> LLM:
    usual = {"device": "cuda", "kv_memory": "768MiB", "compile": False, "max_running": 8, "max_context": 2048}
    return LLM(model, kv_format=kv_format, kv_window=window, **{**usual, **options})


def logits(llm: LLM, ids: list[int], chunk: int) -> Tensor:
    """Teacher-forced, [T, V]."""
    return torch.cat(run_prompt(llm.engine.runner, llm.engine.scheduler.manager, ids, chunk)).float()


def kl(expected_TV: Tensor, found_TV: Tensor) -> float:
    """Mean divergence of the next token's distribution."""
    expected, found = (x.log_softmax(-1) for x in (expected_TV, found_TV))
    return float((expected.exp() * (expected - found)).sum(-1).mean())


@pytest.mark.parametrize(("model", "kv_format"), [(m, f) for m, formats in SCHEMES.items() for f in formats])
def test_errors_shrink_with_the_window(model: str, kv_format: str) -> None:
    with opened(model, "bf16", 0) as plain:
        ids = plain.tokenizer.encode(TEXT)[:TOKENS]
        expected = logits(plain, ids, 512)
    errors, decoding = {}, {}
    for window in (0, 64, 1024):
        with opened(model, kv_format, window) as llm:
            errors[window] = [kl(expected, logits(llm, ids, chunk)) for chunk in (512, 100)]
            decoding[window] = decoding_error(llm, ids)
        print(model, kv_format, window, errors[window], decoding[window])
    # With all tokens near, what is left is the arithmetic of other kernels.
    assert max(errors[1024]) < 0.1 * min(errors[0])
    assert max(errors[64]) < 0.8 * min(errors[0])
    # Other chunks round otherwise; a query that reads the wrong tokens would show as an error of another size.
    assert abs(errors[64][0] - errors[64][1]) < 0.35 * max(errors[64])
    # Decode steps and prompts may have kernels of other arithmetic, or the same ones.
    assert decoding[1024] < ARITHMETIC and decoding[64] < max(decoding[0], ARITHMETIC)


def decoding_error(llm: LLM, ids: list[int]) -> float:
    """Mean difference of log-probabilities between recorded decode steps and the same tokens as a prompt.

    Codes flip where arithmetic differs in a last bit, so it is about as large as what quantisation costs.
    """
    prompts = [ids[: 70 + 150 * i] for i in range(5)]
    differences = []
    for is_hit in (False, True):
        answers = llm.generate(
            prompts, max_tokens=ANSWER, temperature=0.0, ignore_eos=True, logprobs=0, progress=False
        )
        assert answers[-1].cached_tokens > 0 or not is_hit
        for prompt, answer in zip(prompts, answers, strict=True):
            completion = answer.completions[0]
            forced = logits(llm, [*prompt, *completion.token_ids], 512).log_softmax(-1)[len(prompt) - 1 : -1]
            chosen = forced[torch.arange(ANSWER), list(completion.token_ids)].cpu()
            assert completion.logprobs is not None
            differences.append(
                (chosen - torch.tensor([entry.logprob for entry in completion.logprobs])).abs()
            )
    llm.engine.scheduler.check_integrity()
    return float(torch.cat(differences).mean())

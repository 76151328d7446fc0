"""Drafts on a GPU: answers are those without, but where two tokens are nearly as likely, and graphs go on to serve.

Skipped where there is no GPU, or it is not asked for: NIBBLE_TEST_GPU=1 pytest tests/gpu
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from nibble import LLM, SamplingParams
from nibble.engine.request import Completion
from toys.oracle_drafter import oracle

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

TEXT = (Path(__file__).parents[2] / "models" / "demo" / "heldout.txt").read_text()[:9000]
SCHEMES = [
    ("demo", "bf16"),
    ("demo", "nvfp4"),
    ("demo", "k8v4"),
    ("demo-mla", "nvfp4"),
    ("demo-mla", "nvfp4_ds_mla"),
]
ANSWER, ARITHMETIC = 96, 0.06
"""Difference of log-probabilities between two tokens that bfloat16 may exchange."""


def opened(model: str, kv_format: str, **options: Any) -> LLM:
    usual = {"device": "cuda", "kv_memory": "768MiB", "compile": False, "max_running": 8, "max_context": 2048}
    return LLM(model, kv_format=kv_format, **{**usual, **options})


def prompts(llm: LLM) -> list[list[int]]:
    ids = llm.tokenizer.encode(TEXT)
    return [ids[start : start + length] for start, length in ((0, 700), (700, 90), (900, 17), (950, 330))]


def answers(llm: LLM, asked: Sequence[list[int]], params: SamplingParams) -> list[Completion]:
    found = [output.completions[0] for output in llm.generate(asked, params)]
    llm.engine.scheduler.check_integrity()
    return found


def compare(ours: Sequence[Completion], theirs: Sequence[Completion]) -> int:
    """Return how many answers differ; where they first do, both tokens must be nearly as likely."""
    differing = 0
    for one, other in zip(ours, theirs, strict=True):
        assert one.error is None and len(one.token_ids) == len(other.token_ids) == ANSWER
        for mine, yours in zip(one.logprobs or (), other.logprobs or (), strict=True):
            if mine.token != yours.token:
                assert abs(mine.logprob - yours.logprob) < ARITHMETIC, "another token than the likeliest"
                differing += 1
                break
            assert abs(mine.logprob - yours.logprob) < 0.5
    return differing


@pytest.mark.parametrize("window", [0, None])
@pytest.mark.parametrize(("model", "kv_format"), SCHEMES)
def test_answers_are_those_without(model: str, kv_format: str, window: int | None) -> None:
    params = SamplingParams(max_tokens=ANSWER, temperature=0, logprobs=1, ignore_eos=True)
    with opened(model, kv_format, kv_window=window) as plain:
        asked = prompts(plain)
        expected = answers(plain, asked, params)
        repeated = compare(answers(plain, asked, params), expected)
    known = {tuple(prompt): one.token_ids for prompt, one in zip(asked, expected, strict=True)}
    with (
        oracle(known, 0.2, most=7) as name,
        opened(model, kv_format, kv_window=window, speculative=name) as llm,
    ):
        for _ in range(2):
            differing = compare(answers(llm, asked, params), expected)
        print(
            f"{model} {kv_format}: {differing} of {len(asked)} differ ({repeated} without drafts)", end="; "
        )
        print(llm.speculation.summary)  # type: ignore[union-attr]
        counts = llm.speculation.counts  # type: ignore[union-attr]
        assert counts.accepted > 0.3 * counts.drafted
        graphs = llm.engine.runner.graphs
        replayed = 0
        if graphs:
            replay = graphs.replay

            def count(size: int) -> None:
                nonlocal replayed
                replayed += 1
                replay(size)

            graphs.replay = count  # type: ignore[method-assign]
            # Nobody knows the answers to these.
            answers(llm, [prompt[:-1] for prompt in asked], params)
            assert replayed > ANSWER // 2


def test_lookup_and_a_model_that_drafts() -> None:
    params = SamplingParams(max_tokens=ANSWER, temperature=0, logprobs=1, ignore_eos=True)
    with opened("demo", "nvfp4") as plain:
        asked = prompts(plain)
        expected = answers(plain, asked, params)
    for drafter in ("lookup", "draft:demo"):
        with opened("demo", "nvfp4", speculative=drafter) as llm:
            compare(answers(llm, asked, params), expected)
            print(llm.speculation.summary)  # type: ignore[union-attr]

"""LLM.score: how likely continuations and whole prompts are, against plain Transformers in float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from nibble import LLM, PromptTooLong, RequestError, Score

PROMPT = "def total(values):\n    return "
CONTINUATIONS = ["sum(values)", "max(values)", "x", "sum(values) + 1"]


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return LLM(str(tiny), kv_format="fp32", kv_memory="2MiB", max_running=8, token_budget=64)


@pytest.fixture(scope="module")
def model(tiny: Path) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)


def check(score: Score, model: AutoModelForCausalLM, ids: Sequence[int], start: int) -> None:
    with torch.no_grad():
        rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)[start - 1 : -1]
    expected = rows[range(len(ids) - start), ids[start:]]
    assert score.logprob == pytest.approx(float(expected.sum()), abs=1e-4)
    assert [entry.logprob for entry in score.token_logprobs] == pytest.approx(expected.tolist(), abs=1e-4)
    assert [entry.token for entry in score.token_logprobs] == list(ids[start:])
    assert score.is_greedy == (rows.argmax(-1).tolist() == list(ids[start:]))


def test_continuations(llm: LLM, model: AutoModelForCausalLM) -> None:
    before = llm.engine.scheduler.metrics.cache.hit_tokens
    scores = llm.score([PROMPT] * len(CONTINUATIONS), CONTINUATIONS, progress=False)
    # White space before it belongs to the continuation.
    start = len(PROMPT) - 1
    for score, continuation in zip(scores, CONTINUATIONS, strict=True):
        check(score, model, llm.tokenizer.encode(PROMPT + continuation), start)
    assert llm.engine.scheduler.metrics.cache.hit_tokens > before
    assert llm.score(PROMPT, CONTINUATIONS[0]) == scores[0]
    encode = llm.tokenizer.encode
    as_tokens = llm.score(encode(PROMPT[:-1]), encode(f" {CONTINUATIONS[0]}"))
    assert as_tokens == scores[0]


def test_whole_prompts(llm: LLM, model: AutoModelForCausalLM) -> None:
    one, two = llm.score([PROMPT, "ab"])
    check(one, model, llm.tokenizer.encode(PROMPT), 1)
    check(two, model, llm.tokenizer.encode("ab"), 1)


def test_greedy_continuations_are_known(llm: LLM) -> None:
    ids = list(PROMPT.encode())
    answer = llm.generate(ids, max_tokens=5, ignore_eos=True).completions[0].token_ids
    assert llm.score(ids, list(answer)).is_greedy
    assert not llm.score(ids, [*answer[:-1], (answer[-1] + 1) % 256]).is_greedy


def test_the_whole_context(llm: LLM) -> None:
    limit = llm.engine.scheduler.limit
    assert len(llm.score([65] * limit).token_logprobs) == limit - 1
    with pytest.raises(PromptTooLong):
        llm.score([65] * limit, [66])


@pytest.mark.parametrize(
    ("prompts", "continuations", "message"),
    [
        ("a", None, "one token cannot be scored"),
        ("", "b", "needs a prompt of one token"),
        ("ab", "", "continuation is empty"),
        (["a", "b"], ["c"], "2 prompts need as many continuations, not 1"),
        ([[1]], [[99999]], "token 99999 is out of range"),
    ],
)
def test_nothing_to_score(llm: LLM, prompts: object, continuations: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.score(prompts, continuations)  # type: ignore[arg-type]
    assert not llm.engine.busy

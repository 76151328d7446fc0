"""Log-probabilities of prompts: equal to plain Transformers, however a prompt is cut, cached, batched or preempted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nibble import LLM, RequestError, SamplingParams
from nibble.engine.engine import NOT_A_NUMBER
from nibble.engine.request import Logprob, Output
from nibble.engine.sampler import RowLogprobs

TEXTS = ["def f(x):", "the quick brown fox jumps over the lazy dog", "ab", "0123456789" * 9]
PROMPTS = [list(text.encode()) for text in TEXTS]


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[torch.Tensor]:
    """Of each prompt log-probabilities [T, V] of plain Transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    with torch.no_grad():
        return [model(torch.tensor([ids])).logits[0].log_softmax(-1) for ids in PROMPTS]


def served(tiny: Path, **options: Any) -> LLM:
    options = {"kv_format": "fp32", "kv_memory": "2MiB", "max_running": 8, "token_budget": 64, **options}
    return LLM(str(tiny), **options)


@pytest.fixture(scope="module")
def llm(tiny: Path) -> LLM:
    return served(tiny)


def check(
    output: Output, ids: Sequence[int], expected_TV: torch.Tensor, top: int = 3, start: int = 0
) -> None:
    entries = output.prompt_logprobs
    assert entries is not None and len(entries) == len(ids)
    first = max(start, 1)
    assert all(entry is None for entry in entries[:first])
    for position in range(first, len(ids)):
        entry, row_V = entries[position], expected_TV[position - 1]
        assert isinstance(entry, Logprob) and entry.token == ids[position]
        assert entry.logprob == pytest.approx(float(row_V[ids[position]]), abs=1e-4)
        assert entry.rank == 1 + int((row_V > row_V[ids[position]]).sum())
        values, tokens = row_V.topk(top)
        assert [token for token, _ in entry.top] == tokens.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"token_budget": 7},
        {"prefix_cache": False},
        # Pages for about one prompt, so that requests lose theirs and come back.
        {"max_context": 112, "kv_memory": "192KiB", "page_size": 16, "token_budget": 24},
    ],
    ids=["whole", "chunks of 7", "no prefix cache", "preempted"],
)
def test_equal_to_transformers(tiny: Path, expected: list[torch.Tensor], options: dict[str, Any]) -> None:
    llm = served(tiny, **options)
    length = 40 if "kv_memory" in options else 6
    outputs = llm.generate([*PROMPTS, *PROMPTS], max_tokens=length, prompt_logprobs=3, ignore_eos=True)
    for output, ids, expected_TV in zip(outputs, [*PROMPTS, *PROMPTS], [*expected, *expected], strict=True):
        check(output, ids, expected_TV)
        assert len(output.completions[0].token_ids) == min(length, llm.engine.scheduler.limit - len(ids))
    if "kv_memory" in options:
        assert llm.engine.scheduler.metrics.preemptions
    assert llm.engine.scheduler.manager.stats.in_use == 0


def test_no_more_logits_at_once_than_planned(
    tiny: Path, expected: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nibble.engine.build.STEP_LOGITS", 5 * 320)
    llm = served(tiny)
    most, forward = [0], llm.engine.runner.forward

    def counted(batch: Any, **options: Any) -> torch.Tensor:
        logits = forward(batch, **options)
        most.append(len(logits) - sum(item.samples_token for item in batch.scheduled))
        return logits

    monkeypatch.setattr(llm.engine.runner, "forward", counted)
    outputs = llm.generate(PROMPTS, max_tokens=1, prompt_logprobs=3)
    for output, ids, expected_TV in zip(outputs, PROMPTS, expected, strict=True):
        check(output, ids, expected_TV)
    assert max(most) == 5


def test_a_prompt_alone(llm: LLM, expected: list[torch.Tensor]) -> None:
    """max_tokens=0: nothing is generated, and the prompt may fill the whole context."""
    for ids, expected_TV in zip(PROMPTS, expected, strict=True):
        output = llm.generate(ids, max_tokens=0, prompt_logprobs=3)
        check(output, ids, expected_TV)
        (answer,) = output.completions
        assert (answer.token_ids, answer.text, answer.finish_reason) == ((), "", "length")
    longest = [65] * llm.engine.scheduler.limit
    assert len(llm.generate(longest, max_tokens=0, prompt_logprobs=0).prompt_logprobs) == len(longest)
    assert llm.generate([7], max_tokens=0, prompt_logprobs=1).prompt_logprobs == (None,)
    assert llm.generate([7], max_tokens=0).prompt_logprobs is None


def test_beside_others_and_for_several_answers(llm: LLM, expected: list[torch.Tensor]) -> None:
    alone = llm.generate(PROMPTS[1], max_tokens=8).completions[0].token_ids
    answers = llm.generate(PROMPTS[1], max_tokens=8, n=3, prompt_logprobs=3)
    check(answers, PROMPTS[1], expected[1])
    assert [answer.token_ids for answer in answers.completions] == [alone] * 3
    pieces = list(llm.stream(PROMPTS[1], max_tokens=8, prompt_logprobs=3))
    assert [piece.prompt_logprobs is not None for piece in pieces] == [True] + [False] * (len(pieces) - 1)


def test_from_a_position_on(llm: LLM, expected: list[torch.Tensor]) -> None:
    """What lies before it comes from the prefix cache."""
    ids = PROMPTS[3]
    llm.generate(ids, max_tokens=1)
    for start in (0, 1, 2, 70, len(ids) - 1):
        output = llm.generate(ids, max_tokens=1, prompt_logprobs=3, logprob_start_len=start)
        check(output, ids, expected[3], start=start)
        page = llm.plan.page_size
        assert output.cached_tokens == max(start - 1, 0) // page * page
    with pytest.raises(RequestError, match="logprob_start_len is 90, and the prompt has 90 tokens"):
        llm.generate(ids, prompt_logprobs=0, logprob_start_len=len(ids))


def test_equal_logits_are_ranked_as_greedy_decoding_takes_them() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]] * 4)
    entries = RowLogprobs(logits, torch.arange(4), [1, 0, 2, 4]).read()
    assert [entry.rank for entry in entries] == [3, 1, 2, 4]
    assert [len(entry.top) for entry in entries] == [1, 0, 2, 4]


def test_logits_that_are_no_numbers_end_the_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = llm.engine.runner.forward
    monkeypatch.setattr(
        llm.engine.runner, "forward", lambda *args, **more: forward(*args, **more) * float("nan")
    )
    with pytest.raises(Exception, match=NOT_A_NUMBER):
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=0, prompt_logprobs=0))

"""Sampling: filters against definitions written out, distributions against probabilities, seeds."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from nibble.config import SamplingParams
from nibble.engine.request import Request
from nibble.engine.sampler import Sampler
from sampling import sample, uniform

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
PROBS = LOGITS.softmax(-1)


def ask(**params: object) -> Request:
    return Request("r", [0, 1], SamplingParams(temperature=1.0, **params))  # type: ignore[arg-type]


def draw(count: int, **params: object) -> Counter[int]:
    """Tokens drawn with `count` seeds."""
    requests = [ask(seed=seed, **params) for seed in range(count)]
    return Counter(pick.token for pick in sample(Sampler(), LOGITS.expand(count, -1), requests) if pick)


def test_draws_follow_the_distribution() -> None:
    found = draw(20000)
    for token, p in enumerate(PROBS.tolist()):
        assert abs(found[token] / 20000 - p) < 4 * (p * (1 - p) / 20000) ** 0.5


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 1}, {0}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": float(PROBS[0]) + 0.01}, {0, 1}),
        ({"min_p": 0.3}, {0, 1}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 4, "top_p": 0.9, "min_p": 0.2}, {0, 1, 2}),
        ({"logit_bias": {0: -100.0, 1: -100.0}}, {2, 3, 4, 5}),
    ],
)
def test_filters(params: dict[str, object], allowed: set[int]) -> None:
    assert set(draw(3000, **params)) == allowed


def test_temperature_sharpens_and_flattens() -> None:
    cold = Counter(
        pick.token
        for pick in sample(
            Sampler(),
            LOGITS.expand(2000, -1),
            [Request("r", [0], SamplingParams(temperature=0.2, seed=seed)) for seed in range(2000)],
        )
        if pick
    )
    assert cold[0] / 2000 == pytest.approx(float((LOGITS / 0.2).softmax(-1)[0]), abs=0.02)


def test_penalties() -> None:
    request = Request("r", [0, 3], SamplingParams(repetition_penalty=4.0, temperature=0))
    assert sample(Sampler(), LOGITS[None], [request])[0].token == 1  # type: ignore[union-attr]
    request = Request("r", [5], SamplingParams(presence_penalty=0.6, frequency_penalty=0.3, temperature=0))
    request.token_ids += [0, 0]
    assert sample(Sampler(), LOGITS[None], [request])[0].token == 1  # type: ignore[union-attr]
    request = Request("r", [0, 0], SamplingParams(presence_penalty=5.0, temperature=0))
    assert sample(Sampler(), LOGITS[None], [request])[0].token == 0, "the prompt is not penalised by presence"  # type: ignore[union-attr]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rows = torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    requests = [
        Request(str(i), [1], SamplingParams(temperature=i % 3 * 0.7, seed=i, top_p=0.9, top_k=20))
        for i in range(7)
    ]
    together = [pick.token for pick in sample(Sampler(), rows, requests) if pick]
    alone = [sample(Sampler(), rows[i : i + 1], requests[i : i + 1])[0].token for i in range(7)]  # type: ignore[union-attr]
    assert together == alone


def test_logits_are_not_written() -> None:
    logits = LOGITS[None].clone()
    sample(Sampler(), logits, [ask(seed=1, repetition_penalty=2.0, logit_bias={3: 5.0})])
    assert torch.equal(logits[0], LOGITS)


def test_not_a_number_is_no_token() -> None:
    assert sample(Sampler(), torch.full((1, 6), float("nan")), [ask()]) == [None]


def test_uniform_is_uniform() -> None:
    values = torch.tensor([uniform(seed, position) for seed in range(100) for position in range(100)])
    assert float(values.min()) >= 0 and float(values.max()) < 1
    assert torch.histc(values, 10, 0, 1).sub(1000).abs().max() < 150
    assert uniform(1, 2) == uniform(1, 2) != uniform(2, 1)


def greedy(
    logits: list[float], count: int = 0, *, stops: frozenset[int] = frozenset(), **params: object
) -> int:
    """The likeliest token after `count` others."""
    words = params.pop("words", ())
    params = {"temperature": 0.0} | params
    request = Request("r", [5], SamplingParams(**params), stop_ids=stops, bad_words=words)  # type: ignore[arg-type]
    request.token_ids += [4] * count
    picked = Sampler().launch(torch.tensor([logits]), [request], [count]).read()[0]
    assert picked
    return picked.token


def test_no_stop_token_before_min_tokens() -> None:
    logits, stops = [3.0, 2.0, 1.0, 0.0], frozenset({0, 1, 99})
    found = [greedy(logits, count, stops=stops, min_tokens=3) for count in range(5)]
    assert found == [2, 2, 2, 0, 0]


def test_min_tokens_counts_tokens_that_the_host_does_not_know() -> None:
    # The request's own tokens lag behind while a step is in flight.
    request = Request("r", [5], SamplingParams(min_tokens=2, temperature=0.0), stop_ids=frozenset({0}))
    for count, token in enumerate((1, 1, 0)):
        picked = Sampler().launch(torch.tensor([[2.0, 1.0]]), [request], [count]).read()[0]
        assert picked and picked.token == token


def test_min_tokens_in_a_batch_that_stays_the_same() -> None:
    sampler, row = Sampler(), [2.0, 1.0]
    params = [SamplingParams(min_tokens=least, temperature=0.0) for least in (0, 1, 2)]
    requests = [Request(str(i), [5], one, stop_ids=frozenset({0})) for i, one in enumerate(params)]
    for count, expected in enumerate(([0, 1, 1], [0, 0, 1], [0, 0, 0])):
        picked = sampler.launch(torch.tensor([row] * 3), requests, [count] * 3).read()
        assert [one and one.token for one in picked] == expected


def test_a_grammar_that_is_complete_ends_before_min_tokens() -> None:
    class Complete:
        error = ""

        def allowed(self, answer: object, drafts: object) -> bytes:
            return bytes([0b0001])

    request = Request("r", [5], SamplingParams(min_tokens=9, temperature=0), stop_ids=frozenset({0}))
    request.matcher = Complete()  # type: ignore[assignment]
    assert sample(Sampler(), torch.tensor([[0.0, 5.0, 5.0]]), [request])[0].token == 0  # type: ignore[union-attr]


def test_bad_words_end_nowhere() -> None:
    logits = [3.0, 2.0, 1.0, 0.0]
    assert greedy(logits, words=[[0], [1]], bad_words=("a", "b")) == 2
    # A word of several tokens bans its last one, and only behind the others; the prompt does not count.
    assert greedy(logits, words=[[5, 0]], bad_words=("a",)) == 0
    assert greedy(logits, 2, words=[[4, 4, 0]], bad_words=("a",)) == 1
    assert greedy(logits, 1, words=[[4, 4, 0]], bad_words=("a",)) == 0


def test_bans_leave_log_probabilities_alone() -> None:
    request = Request("r", [0], SamplingParams(bad_words=("x",), logprobs=1, temperature=0), bad_words=[[0]])
    picked = sample(Sampler(), LOGITS[None], [request])[0]
    assert picked and picked.token == 1 and picked.top[0] == (0, pytest.approx(float(PROBS[0].log())))


@pytest.mark.parametrize("filters", [{}, {"top_k": 20, "top_p": 0.9, "min_p": 0.01}], ids=str)
def test_fixed_shapes_draw_the_same_tokens(filters: dict[str, Any]) -> None:
    """Rows are computed in parts of one shape: the same tokens in any company, and ids of the vocabulary for NaN."""
    torch.manual_seed(0)
    logits_SV = torch.randn(11, 307)
    logits_SV[4] = float("nan")
    params = [SamplingParams(temperature=0.8, seed=i, logprobs=2, **filters) for i in range(11)]
    requests = [Request(str(i), [1], entry) for i, entry in enumerate(params)]
    plain, fixed = (
        Sampler(fixed_shapes=flag).launch(logits_SV, requests, [3] * 11) for flag in (False, True)
    )
    rows = [i for i in range(11) if i != 4]
    assert torch.equal(plain.tokens_S[rows], fixed.tokens_S[rows]) and int(fixed.tokens_S.max()) < 307
    together = fixed.read()
    assert together[4] is None
    for i in rows:
        alone = Sampler(fixed_shapes=True).launch(logits_SV[i, None], requests[i : i + 1], [3]).read()
        assert alone == [together[i]]

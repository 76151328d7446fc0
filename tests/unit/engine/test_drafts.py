"""Verification by its definition, look-up, and how many tokens are drafted. Distributions are held by chi-square."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nibble.config import SamplingParams
from nibble.drafts import SpeculativeSpec
from nibble.engine.drafters.base import DraftTask
from nibble.engine.drafters.lookup import NGRAM, Lookup, NgramIndex
from nibble.engine.request import Request, ScheduledRequest
from nibble.engine.sampler import Sampler
from nibble.engine.speculative import DraftLength, Speculation, accepted_run
from nibble.errors import ConfigError
from nibble.kernels.topk import NO_TOKEN
from nibble.model_spec import Phase

VOCAB, DRAFTS, DRAWS = 5, 2, 100_000
TABLE = torch.randn(VOCAB + 1, VOCAB, generator=torch.Generator().manual_seed(3))
"""Logits after each token, and after the prompt."""
CRITICAL = 165.0
"""Of chi-square with 124 degrees of freedom: one in a hundred is above."""


def test_the_first_difference_ends_a_run() -> None:
    drawn = [4, 5, 6]
    assert accepted_run((), drawn[:1]) == drawn[:1]
    assert accepted_run((4, 5), drawn) == drawn
    assert accepted_run((4, 9), drawn) == drawn[:2]
    assert accepted_run((9, 5), drawn) == drawn[:1]
    invalid = [4, NO_TOKEN, 6]
    assert accepted_run((4, 5), invalid) == invalid[:2], "logits that are not numbers show"
    assert accepted_run((9, 5), invalid) == drawn[:1], "behind a rejected draft they do not matter"


def one_by_one(seeds: Sequence[int], params: dict[str, Any]) -> dict[int, list[int]]:
    """Answers of three tokens, one token a step."""
    requests = [Request(str(seed), [0], SamplingParams(seed=seed, **params)) for seed in seeds]
    last = [VOCAB] * len(requests)
    for count in range(DRAFTS + 1):
        drawn = Sampler().launch(TABLE[last], requests, [count] * len(requests)).read()
        last = [token.token for token in drawn if token]
        for request, token in zip(requests, last, strict=True):
            request.token_ids.append(token)
    return {seed: request.output_token_ids for seed, request in zip(seeds, requests, strict=True)}


def drafted(seeds: Sequence[int], params: dict[str, Any], verify: Any = accepted_run) -> dict[int, list[int]]:
    """The same with drafts of one token or two, which are as often right as chance has it."""
    requests = [Request(str(seed), [0], SamplingParams(seed=seed, **params)) for seed in seeds]
    dice, open_ = random.Random(1), list(requests)
    while open_:
        rows, drafts, counts, logits, guesses = [], {}, [], [], {}
        for request in open_:
            room = DRAFTS - request.num_output_tokens
            guess = guesses[request] = tuple(dice.randrange(VOCAB) for _ in range(dice.randint(0, room)))
            before = request.token_ids[-1] if request.num_output_tokens else VOCAB
            for count, token in enumerate((before, *guess)):
                if count:
                    drafts[len(rows)] = guess[:count]
                rows.append(request)
                counts.append(request.num_output_tokens + count)
                logits.append(token)
        drawn = iter(Sampler().launch(TABLE[logits], rows, counts, drafts).read_ids())
        for request in open_:
            sampled = [next(drawn) for _ in range(1 + len(guesses[request]))]
            request.token_ids += verify(guesses[request], sampled)
        open_ = [request for request in open_ if request.num_output_tokens <= DRAFTS]
    return {seed: request.output_token_ids for seed, request in zip(seeds, requests, strict=True)}


def probabilities() -> Tensor:
    """Of all answers of three tokens [V, V, V], by the table."""
    first, then = TABLE[VOCAB].softmax(-1), TABLE[:VOCAB].softmax(-1)
    return first[:, None, None] * then[:, :, None] * then[None]


def chi_square(answers: Sequence[list[int]]) -> float:
    expected = probabilities().flatten().double() * len(answers)
    counts = torch.zeros(VOCAB**3, dtype=torch.float64)
    for (a, b, c), count in Counter(map(tuple, answers)).items():
        counts[(a * VOCAB + b) * VOCAB + c] = count
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.slow
def test_answers_are_distributed_as_without_drafts() -> None:
    """100,000 answers, each with drafts of another length, against their probabilities."""
    answers = drafted(range(DRAWS), {"temperature": 1.0})
    assert chi_square(list(answers.values())) < CRITICAL


@pytest.mark.slow
def test_a_bias_is_noticed() -> None:
    """A draft that is accepted once in ten times although another token was drawn."""
    dice = random.Random(2)

    def biased(drafts: Sequence[int], sampled: list[int]) -> list[int]:
        run = accepted_run(drafts, sampled)
        if len(run) <= len(drafts) and dice.random() < 0.1:
            return [*run[:-1], drafts[len(run) - 1]]
        return run

    answers = drafted(range(DRAWS), {"temperature": 1.0}, biased)
    assert chi_square(list(answers.values())) > CRITICAL


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.3, "top_k": 3},
        {"temperature": 0.7, "top_p": 0.8, "min_p": 0.05},
        {"temperature": 1.0, "repetition_penalty": 1.7, "presence_penalty": 0.6, "frequency_penalty": 0.3},
        {"temperature": 1.0, "logit_bias": {2: 1.5}, "min_tokens": 2, "stop_token_ids": (1,)},
    ],
)
def test_each_seed_gives_the_answer_that_it_gives_without_drafts(params: dict[str, Any]) -> None:
    seeds = range(300)
    assert drafted(seeds, params) == one_by_one(seeds, params)


def propose(tokens: list[int], limit: int = 8, drafter: Lookup | None = None) -> list[int]:
    return (drafter or Lookup()).propose([DraftTask(Request("r", tokens), limit)])[0]


def test_lookup_takes_what_followed() -> None:
    assert propose([1, 2, 3, 4, 5, 6, 1, 2, 3]) == [4, 5, 6, 1, 2, 3, 4, 5], "and repeats what repeats itself"
    assert propose([1, 2, 3, 4, 9, 1, 2, 3], limit=2) == [4, 9]
    assert propose([7, 7, 7, 7], limit=3) == [7, 7, 7]
    assert propose([1, 2, 3, 4, 5]) == propose([1]) == propose([1, 2, 3]) == []


def test_lookup_prefers_the_longest_match_and_then_the_newest() -> None:
    assert propose([9, 1, 2, 3, 40, 0, 8, 1, 2, 3, 50, 0, 9, 1, 2, 3], limit=1) == [40]
    assert propose([1, 2, 3, 40, 1, 2, 3, 50, 0, 1, 2, 3], limit=1) == [50]


def test_lookup_goes_on_with_its_index() -> None:
    """Token by token as all at once, against a search of everything."""
    dice, drafter = random.Random(0), Lookup()
    request = Request("r", [dice.randrange(3) for _ in range(20)])
    for _ in range(300):
        request.token_ids.append(dice.randrange(3))
        tokens = request.token_ids
        found = drafter.propose([DraftTask(request, 1)])[0]
        assert found == propose(tokens, 1)
        places = [i for i in range(NGRAM, len(tokens)) if tokens[i - NGRAM : i] == tokens[-NGRAM:]]
        assert bool(found) == bool(places) and (not found or found[0] in {tokens[i] for i in places})


def test_drafts_grow_while_all_are_accepted_and_pause_when_none_is() -> None:
    length = DraftLength(most=15, length=4)
    for proposed in (4, 8, 15):
        assert length.at(100) == proposed
        length.update(proposed, proposed, 100)
    length.update(15, 3, 120)
    assert length.at(120) == 4
    pauses = []
    for _ in range(12):
        while length.at(200):
            length.update(length.at(200), 0, 200)
        pauses.append(next(n for n in range(200, 1000) if length.at(n)) - 200)
        length._resumes_at = 0
    assert pauses[0] == 4 and pauses[1] == 8 and pauses[-1] == 64


def test_lookup_knows_when_no_token_can_match() -> None:
    """Whatever token comes next: else a step on a GPU would wait for it in vain."""
    dice, drafter, foreseen = random.Random(4), Lookup(), 0
    request = Request("r", [dice.randrange(6) for _ in range(20)])
    for _ in range(200):
        may_propose = drafter.may_propose(request)
        assert may_propose == any(propose([*request.token_ids, token]) for token in range(6))
        foreseen += not may_propose
        request.token_ids.append(dice.randrange(6))
    assert foreseen > 10 and not Lookup().may_propose(Request("r", [1]))


def test_lookup_looks_at_few_tokens_of_a_text_that_repeats_itself() -> None:
    """A long match ends the search of 16 places, each of which would match as long."""

    class Counting(list[int]):
        reads = 0

        def __getitem__(self, key: Any) -> Any:
            Counting.reads += 1
            return super().__getitem__(key)

    index, tokens = NgramIndex(), [1, 2, 3, 4] * 200
    index.extend(tokens)
    found = index.match(Counting(tokens))
    assert found[1] == 32 and Counting.reads < 120


def test_what_cannot_be_accepted_is_not_proposed() -> None:
    class Says:
        def propose(self, tasks: Sequence[DraftTask]) -> list[list[int]]:
            return [[1, 2, 3, 4] for _ in tasks]

    def speculation(**options: Any) -> Speculation:
        return Speculation(
            **{
                "name": "says", "drafter": Says(), "max_tokens": 4, "adapts": False, "step_tokens": 64,
                "vocab_size": 9, **options,
            }
        )  # fmt: skip

    plain, stops = Request("a", [0]), Request("b", [0], stop_ids=frozenset({3}))
    found = speculation().propose([plain, stops], lambda request: 4)
    assert found == {plain: (1, 2, 3, 4), stops: (1, 2)}
    assert speculation(vocab_size=2).propose([plain], lambda request: 4) == {plain: (1,)}
    assert speculation().propose([plain], lambda request: 0) == {}
    # Only a head that leaves its drafts on the device says what is no token.
    for wrong in ([-7, 2], [-1], [1, -7]):
        with mock.patch.object(Says, "propose", lambda self, tasks, wrong=wrong: [wrong for _ in tasks]):
            said = speculation().propose([plain], lambda request: 4)
        assert said == ({plain: (1,)} if wrong[0] > 0 else {})
    assert speculation(step_tokens=2).propose([plain, stops], lambda request: 4) == {}


def test_counts_by_position() -> None:
    speculation = Speculation("says", Lookup(), 4, True, 64, 9)
    request = Request("a", [0])
    for drafts, accepted in (((1, 2, 3), 2), ((1,), 1), ((1, 2), 0)):
        item = ScheduledRequest(request, 5, 1 + len(drafts), Phase.VERIFY, True, drafts=drafts)
        speculation.note(item, accepted, len(drafts))
    assert speculation.numbers() == {
        "drafts_steps": 3, "drafts_drafted": 6, "drafts_accepted": 3,
        "drafts_accepted_at_0": 2, "drafts_accepted_at_1": 1, "drafts_accepted_at_2": 0,
    }  # fmt: skip
    assert "3 of 6 tokens accepted (50%), 2.00 tokens a verification" in speculation.summary


def test_parsed() -> None:
    assert SpeculativeSpec.parse("") is SpeculativeSpec.parse("off") is None
    assert SpeculativeSpec.parse("lookup") == SpeculativeSpec(drafter="lookup")
    assert SpeculativeSpec.parse("draft:a:b", "3") == SpeculativeSpec(drafter="draft", path="a:b", tokens=3)
    for text, tokens in (("draft:", "auto"), ("lookup", "0"), ("lookup", "16"), ("lookup", "x"), ("", "3")):
        with pytest.raises(ConfigError):
            SpeculativeSpec.parse(text, tokens)

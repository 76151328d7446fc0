"""Structured answers: whatever the model would say, it says what the grammar allows."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from nibble import LLM, RequestError, SamplingParams
from nibble.engine.request import Delta
from nibble.engine.structured_output import Matcher

PROMPT = "The answer is "
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", kv_format="nvfp4", kv_memory="16MiB", max_running=8, device="cpu")


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.2, "seed": 3}, {"ignore_eos": True}], ids=str)
def test_a_schema(llm: LLM, sampling: dict[str, Any]) -> None:
    # After others the model may write spaces without end, which a schema allows.
    grammar = f"json_schema:{json.dumps(SCHEMA)}"
    output = llm.generate("A person: ", max_tokens=200, grammar=grammar, **sampling)
    assert output.completions[0].finish_reason == "stop"
    found = json.loads(output.text)
    assert set(found) == {"name", "age"} and 0 <= found["age"] <= 99 and len(found["name"]) <= 12


def test_a_regex_and_choices(llm: LLM) -> None:
    assert re.fullmatch(
        r"[0-9]{3}-[a-f]{2}", llm.generate(PROMPT, max_tokens=20, grammar="regex:[0-9]{3}-[a-f]{2}").text
    )
    words = ["maybe", "certainly not", "yes"]
    assert llm.generate(PROMPT, max_tokens=20, grammar=f"choice:{json.dumps(words)}").text in words


def test_many_answers_each_follow_their_own(llm: LLM) -> None:
    output = llm.generate(PROMPT, max_tokens=20, n=3, temperature=1.5, seed=1, grammar="regex:[a-z]{4,9}")
    texts = [answer.text for answer in output.completions]
    assert all(re.fullmatch("[a-z]{4,9}", text) for text in texts) and len(set(texts)) > 1
    free = llm.generate([PROMPT, PROMPT], max_tokens=8)
    assert free[0].text == free[1].text, "others are not held to it"


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("no colon", "KIND:BODY"),
        ("xml:<a/>", "KIND:BODY"),
        ("json_schema:{", "cannot be read"),
        ('lark:leaf ::= "a"', "No 'root' rule"),
        ('json_schema:{"type": "nothing"}', "cannot be"),
        ("regex:(", "cannot be"),
        ("choice:[]", "list of texts"),
        ("choice:[1]", "list of texts"),
        ("lark:start: (", "cannot be"),
    ],
)
def test_what_cannot_be_followed_is_refused(llm: LLM, grammar: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.generate(PROMPT, grammar=grammar)
    assert not llm.engine.busy


def test_too_complex_in_the_middle_ends_that_answer_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when llguidance reaches a limit: it allows the end from there on, which must not pass for an answer."""
    usual = Matcher.allowed

    def allowed(self: Matcher, answer: Any, *drafts: Any) -> bytes:
        if len(answer) == 3:
            monkeypatch.setattr(Matcher, "error", property(lambda one: "too complex" if one is self else ""))
        return usual(self, answer, *drafts)

    monkeypatch.setattr(Matcher, "allowed", allowed)
    pieces: list[list[Delta]] = [[], []]
    ids = llm.tokenizer.encode(PROMPT)
    for said, grammar in zip(pieces, ("regex:[a-z]{30}", None), strict=True):
        llm.engine.submit(ids, SamplingParams(max_tokens=12, grammar=grammar, temperature=0), said.append)
    while llm.engine.busy:
        llm.engine.step()
    held, free = pieces
    assert held[-1].finish_reason == "abort" and "cannot be followed on: too complex" in str(held[-1].error)
    assert held[-1].status == 400, "the request is to blame, and not the server"
    assert len("".join(piece.text for piece in held)) >= 3
    assert free[-1].finish_reason == "length" and sum(len(piece.token_ids) for piece in free) == 12

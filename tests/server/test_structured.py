"""What requests say of an answer's form, in the words of several servers, and the grammars that come of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from nibble.engine import structured_output as grammar
from nibble.engine.structured_output import Grammars
from nibble.engine.tokenizer import Tokenizer
from nibble.errors import RequestError
from nibble.server.chat_format import GrammarCheck
from nibble.server.protocol import StructuredFields

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA)
TAG = {"structures": [{"begin": "<f=1>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f="]}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(str(Path(__file__).parents[2] / "models/demo"))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, len(tokenizer), tokenizer.eos_ids)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, "json_object:"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, f"json_schema:{TEXT}"),
        ({"guided_json": SCHEMA}, f"json_schema:{TEXT}"),
        ({"guided_json": TEXT}, f"json_schema:{TEXT}"),
        ({"guided_json": True}, "json_schema:true"),
        ({"guided_regex": "a+"}, "regex:a+"),
        ({"guided_choice": ["a", "b"]}, 'choice:["a", "b"]'),
        ({"guided_grammar": "start: A"}, "lark:start: A"),
        ({"structured_outputs": {"json": SCHEMA}}, f"json_schema:{TEXT}"),
        ({"structured_outputs": {"regex": "a+"}}, "regex:a+"),
        ({"structured_outputs": {"choice": ["a"]}}, 'choice:["a"]'),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "lark:root ::= x"),
        ({"structured_outputs": {"json_object": True}}, "json_object:"),
        ({"structured_outputs": {}}, None),
        ({"json_schema": TEXT}, f"json_schema:{TEXT}"),
        ({"regex": "a+"}, "regex:a+"),
        ({"ebnf": "root ::= x"}, "lark:root ::= x"),
    ],
)  # fmt: skip
def test_one_form_in_many_words(fields: dict[str, Any], expected: str | None, grammars: Grammars) -> None:
    assert StructuredFields.model_validate(fields).grammar() == expected
    if expected and "::=" not in expected and "start: A" not in expected:
        grammars.check(expected)


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "a", "guided_choice": ["b"]},
        {"regex": "a", "response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a", "json_object": True}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "structural_tag"}},
        {"structural_tag": "{}"},
        {"structural_tag": json.dumps({**TAG, "triggers": ["<g"]})},
    ],
)
def test_more_than_one_or_none(fields: dict[str, Any]) -> None:
    with pytest.raises((RequestError, ValidationError)):
        StructuredFields.model_validate(fields).grammar()


def takes(grammars: Grammars, tokenizer: Tokenizer, said: str, text: str) -> bool:
    matcher, ids = grammars.matcher(said), tokenizer.encode(text)
    for i, token in enumerate([*ids, next(iter(tokenizer.eos_ids))]):
        if not matcher.allowed(ids[:i])[token // 8] >> token % 8 & 1:
            return False
    return True


@pytest.mark.parametrize("fields", [
    {"response_format": {"type": "structural_tag", **TAG}},
    {"structural_tag": json.dumps(TAG)},
    {"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag", **TAG})}},
])  # fmt: skip
def test_structural_tags(fields: dict[str, Any], tokenizer: Tokenizer, grammars: Grammars) -> None:
    said = StructuredFields.model_validate(fields).grammar()
    assert said
    for text, good in (
        ("plain", True),
        ('so <f=1>{"a": 1}</f> and <f=1>{}</f>.', True),
        ('so <f=1>{"a": "x"}</f>', False),
        ("<f=2>{}</f>", False),
        ("<f=1>{}", False),
    ):
        assert takes(grammars, tokenizer, said, text) == good, text


def test_gbnf_is_understood(tokenizer: Tokenizer, grammars: Grammars) -> None:
    said = 'lark:root ::= "a" digit+\ndigit ::= [0-9]'
    assert takes(grammars, tokenizer, said, "a12") and not takes(grammars, tokenizer, said, "a")
    with pytest.raises(RequestError, match="cannot be read"):
        grammars.check('lark:root ::= "a')


def test_parts_of_a_grammar(tokenizer: Tokenizer, grammars: Grammars) -> None:
    for part, text in (("json_schema:" + TEXT, '{"a": 1}'), ("regex:[0-9]+", "12"), ('choice:["x", "y"]', "y"),
                       ('lark:start: "q"', "q")):  # fmt: skip
        said = "composed:" + json.dumps({"lark": 'start: "<" @body ">"', "parts": {"body": part}})
        assert takes(grammars, tokenizer, said, f"<{text}>") and not takes(grammars, tokenizer, said, text)
    for wrong in ("{}", '{"lark": "start: @x", "parts": {}}', '{"lark": 1, "parts": []}', "[]"):
        with pytest.raises(RequestError):
            grammars.check(f"composed:{wrong}")


def test_what_takes_long_is_refused(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MAX_SECONDS", 0.0)
    with pytest.raises(RequestError, match="too complex"):
        grammars.check("regex:[a-z]{5}")


def test_grammars_are_tried_before_the_engine_gets_them(tokenizer: Tokenizer) -> None:
    async def test() -> None:
        check = GrammarCheck(tokenizer)
        await asyncio.gather(*(check.check("regex:a+", len(tokenizer)) for _ in range(4)))
        for bad in (
            "regex:(",
            "json_schema:{",
            'json_schema:{"type": "integer", "minimum": 5, "maximum": 3}',
        ):
            for _ in range(2):
                with pytest.raises(RequestError):
                    await check.check(bad, len(tokenizer))
        await GrammarCheck(None).check("regex:(", 5)

    asyncio.run(test())


def test_a_tokenizer_that_grammars_cannot_follow(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    for error, words in (
        (ValueError("only fast ones"), "only fast ones"),
        (ImportError(), "pip install llguidance"),
    ):

        def fails(*_: Any, error: Exception = error) -> Any:
            raise error

        monkeypatch.setattr(tokenizer, "for_grammars", fails)
        found = Grammars(tokenizer, len(tokenizer), tokenizer.eos_ids)
        found.prepare()
        with pytest.raises(RequestError, match=words) as told:
            found.check("regex:a")
        assert told.value.status == 501

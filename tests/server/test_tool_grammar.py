"""Grammars of tool calls: what they take is what the format's reader reads, marks being tokens or not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from nibble.engine.structured_output import Grammars
from nibble.engine.tokenizer import Tokenizer
from nibble.server.chat_format import CALL_FORMATS, JSON_LIST
from nibble.server.chat_grammar import Marks, possible_calls, required_calls
from nibble.server.chat_parser import AnswerParser, CallFormat
from nibble.server.protocol import Function
from nibble.server.streaming import message_of

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["c", "f"]},
        "brief": {"type": "boolean"},
        "place": {"$ref": "#/$defs/place"},
        "note": {},
    },
    "required": ["city", "days"],
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}
TOOLS = [
    Function(name="get_weather", parameters=SCHEMA, strict=True),
    Function(name="ping"),
    Function(name="NAME_ARGUMENTS"),
]
ALL = [*CALL_FORMATS.values(), JSON_LIST]
NAMES = [parser.name for parser in ALL]
SOME = {"city": "Málaga <b>", "days": 3}
MANY = {**SOME, "unit": "f", "brief": True, "place": {"x": 1.5}, "note": "go\nnow"}


def tokenizer_of(parser: CallFormat, special: bool | None) -> tuple[Tokenizer, Marks]:
    """The bundled one; the format's marks are added to it, special or not, or are plain text (None)."""
    found = Tokenizer(str(Path(__file__).parents[2] / "models/demo"))
    if special is not None:
        found._inner.add_tokens([AddedToken(word, special=special) for word in parser.tokens])
    found._added = {token.content: i for i, token in found._inner.added_tokens_decoder.items()}
    marks = {word: token for word in parser.tokens if (token := found.token_of(word)) is not None}
    assert len(marks) == (0 if special is None else len(parser.tokens))
    return found, marks


def written(parser: CallFormat, made: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Calls as the format's layout has them."""
    layout, said = parser.layout, []
    for number, (name, arguments) in enumerate(made):
        given = json.dumps(arguments, ensure_ascii=False)
        if layout.argument:
            given = layout.argument_separator.join(
                layout.argument.replace("KEY", key)
                .replace("FLAG", str(isinstance(value, str)).lower())
                .replace(
                    "VALUE",
                    value
                    if isinstance(value, str) and not layout.argument_separator
                    else as_text(value, parser),
                )
                for key, value in arguments.items()
            )
        text = layout.call.replace("ARGUMENTS", "@A").replace("NUMBER", str(number)).replace("NAME", name)
        said.append(text.replace("@A", given))
    return layout.begin + (layout.separator or "").join(said) + layout.end


def as_text(value: Any, parser: CallFormat) -> str:
    return (
        str(value)
        if parser.name == "pythonic" and isinstance(value, bool)
        else json.dumps(value, ensure_ascii=False)
    )


class Taker:
    """Says whether a grammar takes a text."""

    def __init__(self, parser: CallFormat, special: bool | None, start: str, rules: Sequence[str]) -> None:
        self.tokenizer, self.marks = tokenizer_of(parser, special)
        self._grammars = Grammars(self.tokenizer, len(self.tokenizer), self.tokenizer.eos_ids)
        self._lark = "lark:" + "\n".join([f"start: {start}", *rules])

    def takes(self, text: str) -> bool:
        matcher = self._grammars.matcher(self._lark)
        ids = self.tokenizer.encode(text)
        for i in range(len(ids) + 1):
            mask = matcher.allowed(ids[:i])
            token = ids[i] if i < len(ids) else next(iter(self.tokenizer.eos_ids))
            if not mask[token // 8] >> token % 8 & 1:
                return False
        return True


def taker(
    parser: CallFormat, special: bool | None, max_calls: int | None = None, free: bool = False
) -> Taker:
    marks = tokenizer_of(parser, special)[1]
    rules = (possible_calls if free else required_calls)(parser, TOOLS, max_calls, marks)
    return Taker(parser, special, "mixed" if free else "calls", rules)


def read(parser: CallFormat, text: str) -> list[tuple[str, Any]]:
    reader = AnswerParser(parser, tools={tool.name: tool.parameters for tool in TOOLS})
    message = message_of(reader.feed(text) + reader.feed("", last=True))
    shown, found = message["content"] or "", message.get("tool_calls", [])
    assert not shown.strip()
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found]


@pytest.mark.parametrize("special", [None, False, True])
@pytest.mark.parametrize("parser", ALL, ids=NAMES)
def test_what_a_format_writes_is_taken_and_read(parser: CallFormat, special: bool | None) -> None:
    found = taker(parser, special)
    made: list[tuple[str, Mapping[str, Any]]] = [("get_weather", MANY)]
    if parser.layout.separator is not None:
        made += [("ping", {}), ("NAME_ARGUMENTS", {}), ("get_weather", SOME)]
    text = written(parser, made)
    assert found.takes(text), text
    assert read(parser, text) == [(name, dict(arguments)) for name, arguments in made]
    assert not found.takes("Hello") and not found.takes("")
    for wrong in ({"city": "x"}, {"city": "x", "days": "many"}, {**SOME, "unit": "k"}, {**SOME, "brief": 1}):
        assert not found.takes(written(parser, [("get_weather", wrong)])), wrong
    assert not found.takes(written(parser, [("other", {})]))
    one = taker(parser, special, max_calls=1)
    assert one.takes(written(parser, made[:1]))
    assert len(made) == 1 or not one.takes(text)


@pytest.mark.parametrize("special", [None, True])
@pytest.mark.parametrize("parser", CALL_FORMATS.values(), ids=CALL_FORMATS)
def test_calls_that_may_come_between_text(parser: CallFormat, special: bool | None) -> None:
    found = taker(parser, special, free=True)
    good, bad = (written(parser, [("get_weather", said)]) for said in (SOME, {"city": "x", "days": "many"}))
    assert found.takes("Hello, 1 < 2.") and found.takes("") and found.takes(good)
    assert not found.takes(bad)
    marked = (parser.layout.begin + parser.layout.call).startswith(parser.markers)
    if marked:
        assert (
            found.takes(f"So: {good}")
            and found.takes(f"{good} and {good} too")
            and not found.takes(f"So: {bad}")
        )


def test_what_is_lenient_and_what_is_not() -> None:
    odd = {"type": "object", "properties": {"x": {"type": "string", "format": "odd"}}, "required": ["x"]}
    for strict in (True, False):
        rules = required_calls(JSON_LIST, [Function(name="f", parameters=odd, strict=strict)], None, {})
        grammar = "lark:" + "\n".join(["start: calls", *rules])
        tokenizer, _ = tokenizer_of(JSON_LIST, None)
        grammars = Grammars(tokenizer, len(tokenizer), tokenizer.eos_ids)
        if strict:
            with pytest.raises(Exception, match="odd"):
                grammars.check(grammar)
        else:
            grammars.check(grammar)

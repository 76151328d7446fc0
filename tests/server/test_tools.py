"""Tool calls in answers: every format, whole and cut anywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nibble.errors import ConfigError
from nibble.server import chat_format
from nibble.server.chat_format import CALL_FORMATS
from nibble.server.chat_parser import AnswerParser
from nibble.server.streaming import CallDelta, Event, Text, merge_events, message_of
from nibble.server.tool_arguments import LiteralScan, to_json

Calls = list[tuple[str, str]]
WEATHER = '{"location": "San Francisco, CA", "format": "celsius"}'
NESTED = '{"a": {"b": [1, -2.5e3, {"c": "}]\\"{ </tool_call> \\\\"}], "d": null}, "e": true}'
UNICODE = '{"ciudad": "Málaga 🌞", "城市": "\\u5317\\u4eac", "nothing": ""}'
BEGIN, ONE, SEP, END, LAST = chat_format.DEEPSEEK
K_BEGIN, K_ONE, K_SEP, K_END, K_LAST = chat_format.KIMI


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def v3(name: str, arguments: str) -> str:
    return f"{ONE}function{SEP}{name}\n```json\n{arguments}\n```{END}"


def v31(name: str, arguments: str) -> str:
    return f"{ONE}{name}{SEP}{arguments}{END}"


def llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def mistral(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "arguments": {arguments}}}'


def kimi(name: str, arguments: str, number: int = 0) -> str:
    return f"{K_ONE}functions.{name}:{number}{K_SEP}{arguments}{K_END}"


def qwen(name: str, *arguments: tuple[str, str]) -> str:
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def glm(name: str, *arguments: tuple[str, str]) -> str:
    inside = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments
    )
    return f"<tool_call>{name}\n{inside}</tool_call>"


def minimax(name: str, *arguments: tuple[str, str]) -> str:
    inside = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in arguments)
    return f'<invoke name="{name}">\n{inside}</invoke>\n'


def dsml(name: str, *arguments: tuple[str, str, bool]) -> str:
    inside = "".join(
        f'<｜DSML｜parameter name="{key}" string="{str(text).lower()}">{value}</｜DSML｜parameter>\n'
        for key, value, text in arguments
    )
    return f'<｜DSML｜invoke name="{name}">\n{inside}</｜DSML｜invoke>\n'


SCHEMA = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "i": {"type": "integer"},
        "b": {"type": "boolean"},
        "o": {"type": "object"},
        "u": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
}
TYPED = {"f": SCHEMA, "g": {}}


def read(
    name: str, pieces: Sequence[str], eager: bool = True, **options: Any
) -> tuple[str, Calls, list[Event]]:
    """Text, calls, and all events."""
    reader = AnswerParser(CALL_FORMATS[name], eager=eager, **options)
    events = [event for piece in pieces for event in reader.feed(piece)] + reader.feed("", last=True)
    message = message_of(events)
    text, calls = message["content"] or "", message.get("tool_calls", [])
    assert all(call["type"] == "function" and call["id"] for call in calls)
    assert reader.num_calls <= len(calls)
    return text, [(call["function"]["name"], call["function"]["arguments"]) for call in calls], events


def everywhere(text: str) -> list[list[str]]:
    """The text whole, cut once at each place, and letter by letter."""
    return [[text], *([text[:i], text[i:]] for i in range(1, len(text))), list(text)]


GOOD: list[tuple[str, str, str, Calls]] = [
    ("hermes", "Plain text, 1 < 2 and <tool_callx> [a].", "Plain text, 1 < 2 and <tool_callx> [a].", []),
    ("hermes", "", "", []),
    ("hermes", "  \n ", "  \n ", []),
    ("hermes", hermes("get_weather", WEATHER), "", [("get_weather", WEATHER)]),
    ("hermes", "I look.\n\n" + hermes("f", NESTED) + "\n", "I look.", [("f", NESTED)]),
    (
        "hermes",
        f"One\n{hermes('f', '{}')}\n{hermes('g', UNICODE)} and so on",
        "One" + "and so on",
        [("f", "{}"), ("g", UNICODE)],
    ),
    ("hermes", '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", [("f", '{"x": 1}')]),
    ("hermes", '<tool_call>{"name":"f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name":"f","arguments":null}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name":"f","arguments":"{\\"x\\": 1}"}</tool_call>', "", [("f", '{"x": 1}')]),
    ("hermes", '<tool_call>{"name":"f","arguments":{"x":1},"id":7}</tool_call>', "", [("f", '{"x":1}')]),
    ("hermes", hermes("f", '{"code": "a\nb\tc"}'), "", [("f", '{"code": "a\\nb\\tc"}')]),
    ("hermes", '<tool_call>{"name":"f","arguments":{}</tool_call>', "", [("f", "{}")]),  # a brace is missing
    ("hermes", '<tool_call>{"name":"f","arguments":{}}', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"na\\u006de":"f","arguments":{}}', "", [("f", "{}")]),
    ("llama3", llama("get_current_conditions", WEATHER), "", [("get_current_conditions", WEATHER)]),
    ("llama3", "<|python_tag|>" + llama("f", NESTED), "", [("f", NESTED)]),
    (
        "llama3",
        f"<|python_tag|>{llama('f', '{}')}; {llama('g', UNICODE)}",
        "",
        [("f", "{}"), ("g", UNICODE)],
    ),
    ("llama3", '\n{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
    ("llama3", 'See {"name": "f", "parameters": {}}', 'See {"name": "f", "parameters": {}}', []),
    ("deepseek_v3", f"{BEGIN}{v3('get_weather', WEATHER)}{LAST}", "", [("get_weather", WEATHER)]),
    (
        "deepseek_v3",
        f"Both.{BEGIN}{v3('f', NESTED)}\n{v3('g', UNICODE)}{LAST}",
        "Both.",
        [("f", NESTED), ("g", UNICODE)],
    ),
    ("deepseek_v31", f"{BEGIN}{v31('get_weather', WEATHER)}{LAST}", "", [("get_weather", WEATHER)]),
    (
        "deepseek_v31",
        f"So: {BEGIN}{v31('f', NESTED)}{v31('g', '{}')}{LAST}",
        "So:",
        [("f", NESTED), ("g", "{}")],
    ),
    ("mistral", f"[TOOL_CALLS][{mistral('get_weather', WEATHER)}]", "", [("get_weather", WEATHER)]),
    (
        "mistral",
        f"Ok [1] [TOOL_CALLS] [{mistral('f', NESTED)}, {mistral('g', UNICODE)}]",
        "Ok [1]",
        [("f", NESTED), ("g", UNICODE)],
    ),
    ("mistral", f"[TOOL_CALLS]add{NESTED}[TOOL_CALLS]sub[ARGS]{{}}", "", [("add", NESTED), ("sub", "{}")]),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}", "", [("f", "{}")]),
    ("mistral", f"[{mistral('f', '{}')}]", "", [("f", "{}")]),  # the marker was a special token, and is lost
    ("kimi_k2", f"Hm.{K_BEGIN}{kimi('get_weather', WEATHER)}{K_LAST}", "Hm.", [("get_weather", WEATHER)]),
    (
        "qwen3_coder",
        "I look.\n\n"
        + qwen("f", ("s", "12"), ("i", "12"), ("b", "True"), ("o", '{"x": [1]}'), ("u", "null")),
        "I look.",
        [("f", '{"s": "12", "i": 12, "b": true, "o": {"x": [1]}, "u": null}')],
    ),
    (
        "qwen3_coder",
        qwen("f", ("s", '\n a <b>\n</b> "é🌞"\n'), ("u", "x"), ("any", "word"), ("more", "[1, 2]"))
        + "\n"
        + qwen("g"),
        "",
        [
            ("f", '{"s": "\\n a <b>\\n</b> \\"é🌞\\"\\n", "u": "x", "any": "word", "more": [1, 2]}'),
            ("g", "{}"),
        ],
    ),
    (
        "qwen3_coder",
        "<function=f>\n<parameter=s></parameter>\n</function>\n</tool_call>ok <function=g>\n</function>",
        "ok",
        [("f", '{"s": ""}'), ("g", "{}")],
    ),
    (
        "qwen3_coder",
        qwen("f", ("i", "7.0"), ("s", "a"), ("s", "b"), ("i", "8")),
        "",
        [("f", '{"i": 7, "s": "a"}')],
    ),
    (
        "qwen3_coder",
        "<tool_call><function=f><parameter=i>1</parameter></function><function=g></function></tool_call>",
        "",
        [("f", '{"i": 1}'), ("g", "{}")],
    ),
    (
        "glm45",
        "So" + glm("f", ("s", " 1\n"), ("i", "2"), ("o", "{'x': None}")),
        "So",
        [("f", '{"s": " 1\\n", "i": 2, "o": {"x": null}}')],
    ),
    ("glm45", glm("g") + "\n" + glm("f", ("i", "lots")), "", [("g", "{}"), ("f", '{"i": "lots"}')]),
    (
        "glm45",
        "<tool_call>f<arg_key>s</arg_key><arg_value>a b</arg_value><arg_key>b</arg_key><arg_value>false</arg_value></tool_call>",
        "",
        [("f", '{"s": "a b", "b": false}')],
    ),
    (
        "minimax_m2",
        "Hm\n<minimax:tool_call>\n"
        + minimax("f", ("s", "1"), ("i", "1"))
        + minimax("g")
        + "</minimax:tool_call>",
        "Hm",
        [("f", '{"s": "1", "i": 1}'), ("g", "{}")],
    ),
    (
        "deepseek_v32",
        "\n\n<｜DSML｜function_calls>\n"
        + dsml("f", ("s", "1", True), ("x", "1", False), ("y", "1", True))
        + dsml("g")
        + "</｜DSML｜function_calls>",
        "",
        [("f", '{"s": "1", "x": 1, "y": "1"}'), ("g", "{}")],
    ),
    ("pythonic", '[f(s="a, (b)", i=-1.5e3)]', "", [("f", '{"s": "a, (b)", "i": -1.5e3}')]),
    (
        "pythonic",
        "<|python_start|>[f(o={'x': [True, None, (1, 2),], \"y\": {}}, s='it\\'s \\x41é\\n'), g()]<|python_end|>",
        "",
        [("f", '{"o": {"x": [true, null, [1, 2]], "y": {}}, "s": "it\'s Aé\\n"}'), ("g", "{}")],
    ),
    ("pythonic", "Hello [f(s=1)]", "Hello [f(s=1)]", []),
    ("pythonic", "\n[ f ( i = 1 , s = 'a' , ) ] ", "", [("f", '{"i": 1 , "s": "a" }')]),
    (
        "kimi_k2",
        f"{K_BEGIN}{kimi('f', NESTED)}{kimi('g', '{}', 1)}{K_LAST}",
        "",
        [("f", NESTED), ("g", "{}")],
    ),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), GOOD)
@pytest.mark.parametrize("eager", [True, False])
def test_every_format_cut_anywhere(name: str, text: str, content: str, calls: Calls, eager: bool) -> None:
    for pieces in everywhere(text):
        assert read(name, pieces, eager, tools=None if name in UNTYPED else TYPED)[:2] == (content, calls), (
            pieces
        )


UNTYPED = {"llama3", "mistral"}
"""Whose examples call other functions without a mark."""


BROKEN = [
    ("hermes", "<tool_call>"),
    ("hermes", " <tool_call> hello </tool_call> \n"),
    ("hermes", "<tool_call>[]</tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "a b", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": "}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": \\"\\ud800\\"}"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "argum'),
    ("hermes", '<tool_call>{"name": "f\\'),
    ("llama3", '{"title": "x", "parameters": {}}'),
    ("llama3", '{"name": "f"}'),
    ("llama3", '{"name": "f", "title": 1}'),
    ("llama3", '<|python_tag|>brave_search.call(query="x")'),
    ("llama3", "[1, 2]"),
    ("deepseek_v3", f"{BEGIN}{LAST}"),
    ("deepseek_v3", f"{BEGIN}{ONE}function{SEP}f\n```json\n[]\n```{END}{LAST}"),
    ("deepseek_v3", f"a {ONE}function f {SEP}"),
    ("deepseek_v31", f"{ONE}{'x' * 300}{SEP}{{}}"),
    ("mistral", "[TOOL_CALLS] none of them"),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": 1}]'),
    ("mistral", "[1, 2, 3]"),
    ("mistral", "[TOOL_CALLS]f()"),
    ("kimi_k2", f"{K_BEGIN}{K_ONE}functions.f:0{K_END}"),
    ("qwen3_coder", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'),
    ("qwen3_coder", "a <function=f>\nhello"),
    ("qwen3_coder", "<tool_call><function=f <parameter=x>"),
    ("qwen3_coder", "<tool_call><function=a b></function>"),
    ("qwen3_coder", "<function=f><parameter=" + "x" * 300 + "></parameter></function>"),
    ("qwen3_coder", "<function=f><parameter=></parameter></function>"),
    ("glm47", "<tool_call>f<arg_value>x</arg_value></tool_call>"),
    ("glm45", "<tool_call>some words </tool_call>"),
    ("glm45", "<tool_call>f\n<arg_key>x</arg_key>\n1</tool_call>"),
    ("minimax_m2", "<minimax:tool_call>\n</minimax:tool_call>"),
    ("deepseek_v32", '<｜DSML｜function_calls><｜DSML｜invoke name="f">x'),
    ("pythonic", "[1, 2]"),
    ("pythonic", "[link](to)"),
    ("pythonic", "[f(1)]"),
    ("pythonic", "[other(x=1)]"),
    ("pythonic", "[]"),
    ("pythonic", "<|python_start|>print(1)<|python_end|>"),
]


@pytest.mark.parametrize(("name", "text"), BROKEN)
@pytest.mark.parametrize("eager", [True, False])
def test_what_is_malformed_is_text(name: str, text: str, eager: bool) -> None:
    for pieces in everywhere(text):
        assert read(name, pieces, eager, tools=TYPED)[:2] == (text, []), pieces


@pytest.mark.parametrize(
    ("name", "text", "begun", "rest"),
    [
        ("qwen3_coder", "<function=f><parameter=s>\nab\n</param", '{"s": "ab', "\n</param"),
        ("qwen3_coder", "<function=f><parameter=s>\nab\n</parameter>oops", '{"s": "ab"', "oops"),
        ("glm45", "<tool_call>f\n<arg_key>s</arg_key><arg_value>ab</arg_value> oops", '{"s": "ab"', " oops"),
        ("pythonic", '[f(s="ab", i=[1, oops])] x', '{"s": "ab", "i": [1', "oops])] x"),
        ("pythonic", '[f(s="ab", i=[1:])] x', '{"s": "ab", "i": [1', ":])] x"),
        ("pythonic", '[f(s="ab", i="un', '{"s": "ab", "i": "un', ""),
        ("pythonic", '[f(s="ab", i="un\\', '{"s": "ab", "i": "un', "\\"),
    ],
)
def test_arguments_that_break_off(name: str, text: str, begun: str, rest: str) -> None:
    """What came stays, and the rest is text; held back, all is text."""
    for pieces in everywhere(text):
        assert read(name, pieces, eager=False, tools=TYPED)[:2] == (text, []), pieces
        assert read(name, pieces, tools=TYPED)[:2] == (rest, [("f", begun)]), pieces


@pytest.mark.parametrize(
    ("inner", "begun", "rest"),
    [
        ('{"a": [1, 2}}', '{"a": [1, 2', "}}</tool_call>"),
        ('{"a": 1, oops}}', '{"a": 1, ', "oops}}</tool_call>"),
        ('{"a": "x\\q"}}', '{"a": "x', '\\q"}}</tool_call>'),
        ('{"a": None}}', '{"a": ', "None}}</tool_call>"),
        ('{"a": 01}}', '{"a": ', "01}}</tool_call>"),
    ],
)
def test_broken_arguments(inner: str, begun: str, rest: str) -> None:
    """Held back, the call is text; as they grow, what came stays, and the rest is text. A call after it is found."""
    broken = f'<tool_call>{{"name": "f", "arguments": {inner}</tool_call>'
    for pieces in everywhere(broken + hermes("g", "{}")):
        assert read("hermes", pieces, eager=False)[:2] == (broken, [("g", "{}")])
        assert read("hermes", pieces)[:2] == (rest, [("f", begun), ("g", "{}")])


def test_an_answer_that_is_cut_short() -> None:
    text = "Hm. " + hermes("f", NESTED)
    for end in range(len(text)):
        shown, calls, _ = read("hermes", [text[:end]], eager=False)
        assert (shown == text[:end] and not calls) or (shown == "Hm." and calls == [("f", NESTED)])
        shown, calls, _ = read("hermes", [text[:end]])
        assert shown == text[:end] or (shown == "Hm." and NESTED.startswith(calls[0][1]))


def test_arguments_come_as_they_grow() -> None:
    reader = AnswerParser(CALL_FORMATS["hermes"])
    found = [
        reader.feed(piece)
        for piece in ("Hi <tool", '_call>{"name": "f", "arg', 'uments": {"a', '": [1', ", 2]}")
    ]
    assert found[0] == [Text("Hi")] and found[1] == []
    first, more = found[2][0], found[4][0]
    assert isinstance(first, CallDelta) and isinstance(more, CallDelta)
    assert first.id and first.id.startswith("call_")
    assert first.openai() == {
        "index": 0,
        "id": first.id,
        "type": "function",
        "function": {"name": "f", "arguments": '{"a'},
    }
    assert reader.num_calls == 1
    assert found[3] == [CallDelta(0, None, None, '": [')]  # a number is said when it is whole
    assert found[4] == [CallDelta(0, None, None, "1, 2]}")]
    assert more.openai() == {"index": 0, "function": {"arguments": "1, 2]}"}}
    assert reader.feed("}</tool_call>") == [] == reader.feed("", last=True)


def test_ids_are_as_models_want_them() -> None:
    def ids(name: str, text: str) -> list[str]:
        return [event.id for event in read(name, [text])[2] if isinstance(event, CallDelta) and event.id]

    assert ids("kimi_k2", kimi("f", "{}") + kimi("f", "{}", 1)) == ["functions.f:0", "functions.f:1"]
    assert re.fullmatch("[a-zA-Z0-9]{9}", ids("mistral", "[TOOL_CALLS]f{}")[0])
    assert ids("mistral", "[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}") == ["abcdefghi"]
    two = ids("hermes", hermes("f", "{}") + hermes("f", "{}"))
    assert len(set(two)) == 2


def test_a_bare_object_names_a_tool_that_is_there() -> None:
    text = llama("Ann", '{"x": 1}')
    for pieces in everywhere(text):
        assert read("llama3", pieces, tools={"f": None})[:2] == (text, [])
        assert read("llama3", pieces, tools={"Ann": None})[:2] == ("", [("Ann", '{"x": 1}')])
    assert read("llama3", ["<|python_tag|>" + text], tools={"f": None})[1] == [("Ann", '{"x": 1}')]


def test_no_more_calls_than_asked_for() -> None:
    text = f"a{hermes('f', '{}')}b{hermes('g', '{}')}c"
    for pieces in everywhere(text):
        assert read("hermes", pieces, max_calls=1)[:2] == ("abc", [("f", "{}")])


def test_depth_and_length_do_no_harm() -> None:
    deep = '{"a":' + "[" * 50_000
    assert read("hermes", [hermes("f", deep)[:-14]], eager=False)[1] == []
    assert read("hermes", ['<tool_call>{"name":"f","arguments":' + deep] * 2)[1][0][1].startswith(deep)
    many = '<tool_call>{"a":[' * 5_000
    assert read("hermes", [many], eager=False)[:2] == (many, [])
    nested = "[f(o=" + "[" * 50_000
    assert read("pythonic", [nested], eager=False, tools=TYPED)[:2] == (nested, [])
    assert read("pythonic", [nested] * 2, tools=TYPED)[1][0][1].endswith("[" * 50_000)
    many = "<function=f><parameter=s>" * 5_000
    assert read("qwen3_coder", [many], eager=False, tools=TYPED)[:2] == (many, [])
    spaces = " " * 10_000
    assert read("hermes", [spaces, "x", spaces])[0] == f"{spaces}x{spaces}"


# Any cutting gives the same

FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<tool", "_call>", '{"name": "f", "arguments": ', '{"name":"f"', "{", "}", "}}", '"',
    ",", ":", "\\", "\\u12", "[", "]", ";", '"a": ', '"name"', '"arguments"', "null", "1", "e5", "\n", "  ", " " * 70,
    "text", "é🌞", "function", "name", "```json", "```", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    "functions.f:0", WEATHER, NESTED, llama("f", "{}"), *chat_format.DEEPSEEK, *chat_format.KIMI, hermes("f", NESTED),
    v3("f", "{}"), v31("f", "{}"), kimi("f", "{}"), "<think>", "</think>", "</thi",
    qwen("f", ("s", "x"), ("i", "1")), glm("f", ("s", "x"), ("i", "1")), "<function=f>", "<parameter=s>", "<parameter=i>",
    "</parameter>", "</function>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_call>f",
    "<minimax:tool_call>", minimax("f", ("i", "1")), "<｜DSML｜function_calls>", dsml("f", ("i", "1", False)), "[f(s=", "[f(",
    "s='a'", "i=1", ", ", ")", "(", "'", "True", "None", "<|python_start|>", ")]",
]  # fmt: skip
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=14).map("".join)


def cut(data: st.DataObject, text: str) -> list[str]:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def plain(events: Sequence[Any]) -> list[Any]:
    """Events joined, without ids, which are random."""
    return [
        CallDelta(event.index, "id" if event.id else None, event.name, event.arguments)
        if isinstance(event, CallDelta)
        else event
        for event in merge_events(events)
    ]


@settings(deadline=None)
@given(st.sampled_from(sorted(CALL_FORMATS)), st.booleans(), st.sampled_from([None, 1]), texts, st.data())
def test_any_cutting_gives_the_same(
    name: str, eager: bool, most: int | None, text: str, data: st.DataObject
) -> None:
    whole, calls, events = read(name, [text], eager, max_calls=most, tools=TYPED)
    assert plain(read(name, cut(data, text), eager, max_calls=most, tools=TYPED)[2]) == plain(events)
    assert plain(read(name, list(text), eager, max_calls=most, tools=TYPED)[2]) == plain(events)
    if not calls and most is None:
        assert whole == text
    if not eager:
        for _, arguments in calls:
            assert isinstance(json.loads(arguments), dict)


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda v: st.lists(v) | st.dictionaries(st.text(), v),
    )
)
def test_any_arguments_come_through(value: Any) -> None:
    for arguments in (json.dumps({"a": value}), json.dumps({"a": value}, ensure_ascii=False, indent=1)):
        for name, text in (
            ("hermes", hermes("f", arguments)),
            ("llama3", llama("f", arguments)),
            ("mistral", f"[TOOL_CALLS][{mistral('f', arguments)}]"),
            ("deepseek_v3", v3("f", arguments)),
            ("deepseek_v31", v31("f", arguments)),
            ("kimi_k2", kimi("f", arguments)),
        ):
            assert read(name, [text])[:2] == ("", [("f", arguments)])
        (_, said), *more = read("pythonic", [f"[f(a={json.dumps(value)}, b={json.dumps(value, indent=1)})]"])[
            1
        ]
        assert json.loads(said) == {"a": value, "b": value} and not more
        texts = [(key, json.dumps(value).replace("<", "\\u003c")) for key in ("any", "other")]
        for name, text in (("qwen3_coder", qwen("f", *texts)), ("glm45", glm("f", *texts))):
            ((_, said),) = read(name, [text], tools=TYPED)[1]
            assert json.loads(said) == {"any": value, "other": value}


json_pieces = st.sampled_from(
    [
        '"a"',
        '"',
        "\\n",
        "\\",
        "\\u00e9",
        ":",
        ",",
        "{",
        "}",
        "[",
        "]",
        "1",
        "-",
        ".5",
        "e+3",
        "01",
        "true",
        "nul",
        " ",
        "é",
    ]
)


@settings(deadline=None)
@given(st.lists(json_pieces, max_size=12).map(lambda pieces: "{" + "".join(pieces) + "}"))
def test_the_scan_takes_what_json_takes(text: str) -> None:
    def refuse(word: str) -> None:
        raise ValueError(word)

    try:
        json.loads(text, parse_constant=refuse)
        good = True
    except ValueError:
        good = False
    scan, at, value = LiteralScan(), 0, ""
    with suppress(ValueError):
        while (step := scan.feed(text, at))[1] > at:
            value, at = value + step[0], step[1]
    assert (scan.done and at == len(text)) == good
    assert not good or value == text
    call = f'<tool_call>{{"name": "f", "other": {text}, "arguments": {text}}}</tool_call>'
    shown, calls, _ = read("hermes", [call])
    assert (not shown and calls == [("f", text)]) == good
    if good:
        assert json.loads(calls[0][1]).keys() == json.loads(text).keys()


# Which format


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, None),
        ("", None),
        ("{{ messages }}", None),
        ("<|start_header_id|>{{ message.role }}<|end_header_id|>", None),
        ("within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>", "hermes"),
        ("{{- '\n<tool_call>\n<function=' + tool_call.name + '>\n' }}{{- '<parameter=' + k }}", "qwen3_coder"),
        ("{{- '<tool_call>' + tc.name -}}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>", "glm47"),
        ("{{ '\n<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>", "glm45"),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '\n```json\n'", "deepseek_v3"),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ name + '<｜tool▁sep｜>'", "deepseek_v31"),
        ("<｜DSML｜function_calls>\n<｜DSML｜invoke name=", "deepseek_v32"),
        ('<|start_header_id|>{{ \'{"name": "\' + tool_call.name + \'", \' }}{{ \'"parameters": \' }}', "llama3"),
        ('<|header_start|>assistant<|header_end|>{{ \'"parameters": \' }}', "llama3"),
        ("{{- '<|python_tag|>' + tool_call.name }}", "llama3"),
        ("You should return [func_name1(params_name1=params_value1), func_name2(params)]", "pythonic"),
        ("[AVAILABLE_TOOLS] {{ '[TOOL_CALLS] [' }}", "mistral"),
        ("{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", "mistral_v13"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>{{ tool_call['id'] }}<|tool_call_argument_begin|>", "kimi_k2"),
        ("{%- set toolcall_begin_token = '<minimax:tool_call>' -%}<invoke name=", "minimax_m2"),
    ],
)  # fmt: skip
def test_guesses_by_the_template(template: str | None, name: str | None) -> None:
    assert getattr(chat_format.guess_format(CALL_FORMATS, template), "name", None) == name


def test_formats_by_name() -> None:
    assert chat_format.find_format(CALL_FORMATS, "hermes") is CALL_FORMATS["hermes"]
    with pytest.raises(ConfigError, match="did you mean 'hermes'"):
        chat_format.find_format(CALL_FORMATS, "herms")


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("5.0", {"type": "integer"}, 5),
        ("5.5", {"type": "integer"}, 5.5),
        ("5", {"type": "number"}, 5),
        ("1e999", {"type": "integer"}, None),
        ("five", {"type": "integer"}, "five"),
        ("NaN", {"type": "number"}, "NaN"),
        ("TRUE", {"type": "boolean"}, True),
        ("1", {"type": ["string", "null"]}, "1"),
        ("null", {"type": ["string", "null"]}, None),
        ("none", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("5", {"enum": ["5", "6"]}, "5"),
        ("5", {"enum": [5, 6]}, 5),
        ("5", {"const": "5"}, "5"),
        ("5", {"$ref": "#/$defs/a~1b"}, "5"),
        ("5", {"$ref": "#/$defs/loop"}, 5),
        ("5", {"$ref": "#/$defs/none"}, 5),
        ("5", {"allOf": [{}, {"type": "string"}]}, "5"),
        ("{'a': [True, 'it\\'s', (1,)]}", {"type": "object"}, {"a": [True, "it's", [1]]}),
        ("{'a': b}", {"type": "object"}, "{'a': b}"),
        ("1, 2", {}, "1, 2"),
        ('"x"', {}, "x"),
        ("", {"type": "object"}, ""),
        ("'\\ud83d'", {}, "\ud83d"),
        ("[" * 100_000, {"type": "array"}, "[" * 100_000),
        ("5", {"type": 5}, 5),
        ("5", {"type": [[]], "anyOf": 3, "enum": {}}, 5),
        ("5", None, 5),
    ],
)
def test_types_of_arguments(text: str, schema: Any, expected: Any) -> None:
    root = {"$defs": {"a/b": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}}
    found = to_json(text, schema, root)
    if expected is None and text == "1e999":
        assert found == text
    else:
        assert json.loads(found) == expected and type(json.loads(found)) is type(expected)
    found.encode()

"""Grammars of answers with calls, in Lark.

StructTag of llguidance cannot write these: it knows a marker by its text, not as a token of any name and place, has
nothing for arguments between tags, and no form for an answer that must be a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nibble.server.chat_parser import CallFormat, Layout
from nibble.server.protocol import Function
from nibble.server.tool_arguments import types_of

TEXT = r"/(.|\n)*/"
"""Any text, in Lark."""
PLACES = re.compile("(NAME|NUMBER|ARGUMENTS)")
DEFINITIONS = ("$defs", "definitions")
"""What a schema's parts refer to."""
Marks = Mapping[str, int]
"""Markers that are one token each, which text in a grammar would not be taken for."""


def lark_text(text: str, marks: Marks) -> str:
    """Return a text in Lark, marks as the tokens that they are."""
    parts = re.split("(" + "|".join(map(re.escape, marks)) + ")", text) if marks else [text]
    return " ".join(
        f"<[{marks[part]}]>" if part in marks else json.dumps(part, ensure_ascii=False)
        for part in parts
        if part
    )


def text_until(rule: str, end: str, marks: Marks) -> str:
    """Return a rule: any text up to a mark, and the mark.

    Args:
        rule: its name.
        end: the mark, text before it included.
        marks: markers that are tokens.
    """
    # A lazy lexeme ends with the first mark that is text; a token ends any text by itself.
    mark = next((mark for mark in marks if mark in end), None)
    if mark is None:
        return f"{rule}[lazy]: {TEXT} {lark_text(end, {})}"
    before = re.escape(end[: end.index(mark)]).replace("/", r"\/")
    return f"{rule}: {TEXT[:-1]}{before}/ {lark_text(end[end.index(mark) :], marks)}"


def required_calls(
    call_format: CallFormat, tools: Sequence[Function], max_calls: int | None, marks: Marks
) -> list[str]:
    """Return rule `calls`: one or more calls, and no text.

    Args:
        call_format: how the model writes calls.
        tools: what may be called.
        max_calls: 1 or any number.
        marks: markers that are tokens.
    """
    layout = call_format.layout
    calls = f"{lark_text(layout.begin, marks)} {_several(layout, max_calls, marks)}"
    return [f"calls: {calls}", *_call_rules(layout, layout.call, "call", tools, marks)]


def possible_calls(
    call_format: CallFormat, tools: Sequence[Function], max_calls: int | None, marks: Marks
) -> list[str]:
    """Return rule `mixed`: text, in which a marker begins a call.

    Args:
        call_format: how the model writes calls.
        tools: what may be called.
        max_calls: 1 or any number.
        marks: markers that are tokens.
    """
    layout = call_format.layout
    opening = layout.begin + layout.call
    marker = next((marker for marker in call_format.markers if opening.startswith(marker)), None)
    # Without a marker a call is the complete answer, known by its first character.
    if marker is None:
        other = rf'other: /[^\s{re.escape(call_format.bare_start)}](.|\n)*/ | ""'
        return ["mixed: calls | other", other, *required_calls(call_format, tools, max_calls, marks)]
    repeat = "?" if max_calls == 1 else "*"
    rules = [f"mixed: block{repeat} TAIL", f"TAIL: {TEXT}", text_until("before", marker, marks)]
    if layout.begin:
        begin = lark_text(layout.begin.removeprefix(marker), marks)
        rules.append(f"block: before {begin} {_several(layout, max_calls, marks)}")
        return rules + _call_rules(layout, layout.call, "call", tools, marks)
    rules.append("block: before rest")
    return rules + _call_rules(layout, layout.call.removeprefix(marker), "rest", tools, marks)


def _several(layout: Layout, max_calls: int | None, marks: Marks) -> str:
    one = max_calls == 1 or layout.separator is None
    more = "" if one else f"({lark_text(layout.separator or '', marks)} call)*"
    return f"call {more} {lark_text(layout.end, marks)}"


def _call_rules(layout: Layout, text: str, rule: str, tools: Sequence[Function], marks: Marks) -> list[str]:
    """Return rule `rule`, one of the tools' calls, and those of the arguments."""
    rules = [f"{rule}: " + " | ".join(f"{rule}_{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        places = {"NAME": json.dumps(tool.name), "NUMBER": "/[0-9]{1,3}/", "ARGUMENTS": f"arguments_{i}"}
        parts = [places.get(part) or lark_text(part, marks) for part in PLACES.split(text) if part]
        rules.append(f"{rule}_{i}: " + " ".join(parts))
        if layout.argument:
            rules += _argument_rules(layout, tool, f"arguments_{i}", marks)
        else:
            rules.append(f"arguments_{i}: %json {json.dumps(tool.argument_schema())}")
    return rules


def _argument_rules(layout: Layout, tool: Function, rule: str, marks: Marks) -> Iterator[str]:
    """Yield rule `rule`: arguments between tags or in Python, in the schema's order, some of them optional."""
    schema = tool.parameters or {}
    properties = schema.get("properties") or {}
    required = [key for key in schema.get("required") or () if isinstance(key, str)]
    keys = list(dict.fromkeys([*properties, *required]))
    for i, key in enumerate(keys):
        yield from _value_rules(layout, tool, key, properties.get(key), f"{rule}_{i}", marks)
    if not layout.argument_separator:
        optional = (f"{rule}_{i}" + "?" * (key not in required) for i, key in enumerate(keys))
        yield f"{rule}: " + (" ".join(optional) or '""')
        return
    # `first_i` are arguments from i on, `more_i` are those after another one: so no separator stands alone.
    yield f'{rule}_first_{len(keys)}: ""'
    yield f'{rule}_more_{len(keys)}: ""'
    for i, key in enumerate(keys):
        skip = ["", ""] if key in required else [f" | {rule}_first_{i + 1}", f" | {rule}_more_{i + 1}"]
        here = f"{rule}_{i} {rule}_more_{i + 1}"
        yield f"{rule}_first_{i}: {here}{skip[0]}"
        yield f"{rule}_more_{i}: {json.dumps(layout.argument_separator)} {here}{skip[1]}"
    yield f"{rule}: {rule}_first_0"


def _value_rules(
    layout: Layout, tool: Function, key: str, schema: Any, rule: str, marks: Marks
) -> Iterator[str]:
    """Yield rule `rule`: one argument with its key."""
    root = tool.parameters or {}
    types = types_of(schema, root)
    is_text = not layout.argument_separator and (not types or "string" in types)
    places = {"KEY": key, "FLAG": str(is_text).lower()}
    around = layout.argument.split("VALUE")
    before, after = (re.sub("KEY|FLAG", lambda place: places[place[0]], part) for part in around)
    choices = schema.get("enum") if isinstance(schema, Mapping) else None
    if is_text and isinstance(choices, list) and choices and all(isinstance(one, str) for one in choices):
        value = "(" + " | ".join(json.dumps(one, ensure_ascii=False) for one in choices) + ")"
    elif is_text:
        end = after.strip("\n")
        yield text_until(f"{rule}_text", end, marks)
        value, after = f"{rule}_text", after.partition(end)[2]
    elif layout.argument_separator and types == {"boolean"}:
        value = '("True" | "False")'
    else:
        definitions = {name: root[name] for name in DEFINITIONS if name in root}
        schema = schema if isinstance(schema, Mapping) else {}
        value = f"%json {json.dumps(tool.with_options({**definitions, **schema}))}"
    yield f"{rule}: {lark_text(before, marks)} {value} {lark_text(after, marks)}"

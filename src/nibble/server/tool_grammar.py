"""Grammars that make a model write calls as its format has them, with arguments by the functions' schemas.

Owns what is said in Lark: texts with marks as tokens, calls that must come, and calls that may come between text. Must
not know of requests, HTTP, or how grammars are followed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nibble.server.tool_args import types_of
from nibble.server.tool_reader import Layout, Parser

PLACES = re.compile("(NAME|NUMBER|ARGUMENTS)")
TEXT = r"/(.|\n)*/"
SPACE = {"whitespace_pattern": "[ \\n]{0,16}"}
"""Of arguments: without a bound a model may write white space for ever."""
NEIGHBOURS = ("$defs", "definitions")
"""What a schema's parts refer to."""

Marks = Mapping[str, int]
"""Words that are one token each, which text in a grammar would not be taken for."""


@dataclass(frozen=True, slots=True)
class Signature:
    """A function that may be called. schema: of its arguments; strict: as it stands, whatever it may hold, else what is
    not known in it is passed over."""

    name: str
    schema: Mapping[str, Any]
    strict: bool = False

    def arguments(self) -> dict[str, Any]:
        """The schema that is followed: properties that are not named are not made up, unless it asks for them."""
        said = {"additionalProperties": False, **self.schema, "type": "object"}
        return self.guided(said)

    def guided(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        return {"x-guidance": {**SPACE, "lenient": not self.strict}, **schema}


def words(text: str, marks: Marks) -> str:
    """A text in Lark, marks as the tokens that they are."""
    parts = re.split("(" + "|".join(map(re.escape, marks)) + ")", text) if marks else [text]
    return " ".join(
        f"<[{marks[part]}]>" if part in marks else json.dumps(part, ensure_ascii=False)
        for part in parts
        if part
    )


def until(name: str, mark: str, marks: Marks) -> list[str]:
    """Rule `name`: any text up to a mark, and the mark."""
    token = next((word for word in marks if word in mark), None)
    if token is None:
        return [f"{name}[lazy]: {TEXT} {words(mark, {})}"]
    before = re.escape(mark[: mark.index(token)]).replace("/", r"\/")
    return [f"{name}: {TEXT[:-1]}{before}/ {words(mark[mark.index(token) :], marks)}"]


def calls(parser: Parser, tools: Sequence[Signature], most: int | None, marks: Marks) -> list[str]:
    """Rule `calls`: one or more of these calls, and no text."""
    layout = parser.layout
    more = "" if most == 1 or layout.between is None else f"({words(layout.between, marks)} call)*"
    rules = [f"calls: {words(layout.begin, marks)} call {more} {words(layout.end, marks)}"]
    return [*rules, *_call(layout, layout.call, "call", tools, marks), *_arguments(layout, tools, marks)]


def mixed(parser: Parser, tools: Sequence[Signature], most: int | None, marks: Marks) -> list[str]:
    """Rule `mixed`: text, in which calls may come: a format's mark begins one. Where there is no mark a call is the
    whole answer, known by its first character."""
    layout = parser.layout
    mark = next((mark for mark in parser.markers if (layout.begin + layout.call).startswith(mark)), None)
    if mark is None:
        return [
            "mixed: calls | other",
            rf'other: /[^\s{re.escape(parser.bare)}](.|\n)*/ | ""',
            *calls(parser, tools, most, marks),
        ]
    once = "?" if most == 1 else "*"
    rules = [f"mixed: block{once} TAIL", f"TAIL: {TEXT}", *until("before", mark, marks)]
    if layout.begin:
        more = "" if most == 1 or layout.between is None else f"({words(layout.between, marks)} call)*"
        rest = words(layout.begin.removeprefix(mark), marks)
        rules += [f"block: before {rest} call {more} {words(layout.end, marks)}"]
        rules += _call(layout, layout.call, "call", tools, marks)
    else:
        rules += ["block: before rest", *_call(layout, layout.call.removeprefix(mark), "rest", tools, marks)]
    return [*rules, *_arguments(layout, tools, marks)]


def _call(layout: Layout, text: str, rule: str, tools: Sequence[Signature], marks: Marks) -> Iterator[str]:
    """Rule `rule`: one of the tools' calls."""
    yield f"{rule}: " + " | ".join(f"{rule}_{i}" for i in range(len(tools)))
    for i, tool in enumerate(tools):
        said = {"NAME": json.dumps(tool.name), "NUMBER": "/[0-9]{1,3}/", "ARGUMENTS": f"arguments_{i}"}
        yield f"{rule}_{i}: " + " ".join(
            said[part] if part in said else words(part, marks) for part in PLACES.split(text) if part
        )


def _arguments(layout: Layout, tools: Sequence[Signature], marks: Marks) -> Iterator[str]:
    for i, tool in enumerate(tools):
        if not layout.argument:
            yield f"arguments_{i}: %json {json.dumps(tool.arguments())}"
            continue
        properties = tool.schema.get("properties") or {}
        needed = [key for key in tool.schema.get("required") or () if isinstance(key, str)]
        keys = [*properties, *(key for key in needed if key not in properties)]
        for j, key in enumerate(keys):
            yield from _argument(layout, tool, key, properties.get(key), f"value_{i}_{j}", marks)
        yield from _ordered(
            f"arguments_{i}", layout, [(f"value_{i}_{j}", key in needed) for j, key in enumerate(keys)]
        )


def _ordered(name: str, layout: Layout, rules: Sequence[tuple[str, bool]]) -> Iterator[str]:
    """Rule `name`: arguments in the schema's order, some of them optional."""
    if not layout.joined:
        yield f"{name}: " + (" ".join(rule + ("" if must else "?") for rule, must in rules) or '""')
        return
    joined = json.dumps(layout.joined)
    for i, (rule, must) in enumerate([*rules, ("", False)]):  # _first_i: from i on, _more_i: after another
        last = i == len(rules)
        skip = [] if must else ['""'] if last else [f"{name}_first_{i + 1}"]
        go_on = [] if must else ['""'] if last else [f"{name}_more_{i + 1}"]
        here = [] if last else [f"{rule} {name}_more_{i + 1}"]
        yield f"{name}_first_{i}: " + " | ".join([*here, *skip])
        yield f"{name}_more_{i}: " + " | ".join([*(f"{joined} {one}" for one in here), *go_on])
    yield f"{name}: {name}_first_0"


def _argument(
    layout: Layout, tool: Signature, key: str, schema: Any, rule: str, marks: Marks
) -> Iterator[str]:
    types = types_of(schema, tool.schema)
    texts = not layout.joined and (not types or "string" in types)
    given = {"KEY": key, "FLAG": "true" if texts else "false"}
    around = layout.argument.partition("VALUE")[::2]
    before, after = (re.sub("KEY|FLAG", lambda found: given[found.group()], part) for part in around)
    choices = schema.get("enum") if isinstance(schema, Mapping) else None
    if texts and isinstance(choices, list) and choices and all(isinstance(one, str) for one in choices):
        value = "(" + " | ".join(json.dumps(one, ensure_ascii=False) for one in choices) + ")"
    elif texts:
        end = after.strip("\n")
        yield from until(f"{rule}_text", end, marks)
        value, after = f"{rule}_text", after[after.index(end) + len(end) :]
    elif layout.joined and types == {"boolean"}:
        value = '("True" | "False")'
    else:
        near = {name: tool.schema[name] for name in NEIGHBOURS if name in tool.schema}
        own = schema if isinstance(schema, Mapping) else {}
        value = f"%json {json.dumps(tool.guided({**near, **own}))}"
    yield f"{rule}: {words(before, marks)} {value} {words(after, marks)}"

"""Calls whose arguments are not one JSON object: written between tags, or as Python.

Owns Tags and the readings that tools.py makes formats of. Must not know of HTTP, requests or engines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nibble.server.json_scan import ObjectScan
from nibble.server.tool_args import PythonScan, quoted, typed, types_of
from nibble.server.tool_reader import LONGEST_NAME, Malformed, Steps, ToolReader, overlap

PYTHON = ("<|python_start|>", "<|python_end|>")


@dataclass(frozen=True, slots=True)
class Tags:
    """call, named: what stands around a function's name; key, keyed: around an argument's; value, valued: around its
    value; ended: after the arguments; closed: after the last call. keyed may have two forms: of a string, and of JSON;
    else the schema tells. lines: a line break after and before a value is not part of it."""

    call: str
    named: str
    key: str
    keyed: tuple[str, ...]
    valued: str
    ended: str
    closed: str = ""
    value: str = ""
    lines: bool = False


def tagged(tags: Tags) -> Callable[[ToolReader, str], Steps[None]]:
    """Reads one or more calls, after a marker."""

    def read(reader: ToolReader, marker: str) -> Steps[None]:
        if tags.call not in ("", marker) and not (yield from reader.literal(tags.call)):
            raise Malformed
        yield from _call(reader, tags)
        while tags.call and tags.call != marker and (yield from reader.literal(tags.call)):
            yield from _call(reader, tags)
        if tags.closed:
            yield from reader.passed(tags.closed)

    return read


def _call(reader: ToolReader, tags: Tags) -> Steps[None]:
    name = yield from reader.name()
    if tags.named and not (yield from reader.literal(tags.named)):
        raise Malformed
    reader.begin(name)
    schema = reader.schema(name)
    said, seen = "{", set[str]()
    while not (yield from reader.literal(tags.ended)):
        if not (yield from reader.literal(tags.key)):
            raise Malformed
        key, form = yield from _key(reader, tags.keyed)
        if tags.value and not (yield from reader.literal(tags.value)):
            raise Malformed
        take = _Value(reader, schema, key, len(tags.keyed) > 1, form, key not in seen)
        take.gain(said + (", " if seen else "") + quoted(key) + ": " if key not in seen else said)
        seen.add(key)
        said = ""
        yield from _value(reader, tags, take)
    reader.gain(said + "}", whole=True)


def _key(reader: ToolReader, ends: tuple[str, ...]) -> Steps[tuple[str, int]]:
    """A key, and which end it has."""
    start = reader.at
    while True:
        found = [(at, i) for i, end in enumerate(ends) if (at := reader.text.find(end, start)) >= 0]
        if found:
            at, form = min(found)
            key = reader.text[start:at].strip()
            if not key or at - start > LONGEST_NAME:
                raise Malformed
            reader.at = at + len(ends[form])
            return key, form
        if len(reader.text) - start > LONGEST_NAME + max(map(len, ends)) or not (yield from reader.more()):
            raise Malformed


class _Value:
    """Takes an argument's text: a string's as it grows, other types' when they are whole. first: its key was not there
    before; an argument that comes twice counts once."""

    def __init__(self, reader: ToolReader, schema: Any, key: str, told: bool, form: int, first: bool) -> None:
        properties = schema.get("properties") if isinstance(schema, dict) else None
        self._schema = properties.get(key) if isinstance(properties, dict) else None
        if told:
            self._schema = {"type": "string"} if form == 0 else None
        self._reader, self._root, self._first = reader, schema, first
        self.grows = types_of(self._schema, schema) == {"string"}
        self._held: list[str] = []

    def gain(self, piece: str) -> None:
        self._reader.gain(piece)

    def begin(self) -> None:
        if self.grows and self._first:
            self.gain('"')

    def add(self, text: str) -> None:
        if not self.grows:
            self._held.append(text)
        elif self._first:
            self.gain(quoted(text)[1:-1])

    def end(self) -> None:
        if self._first:
            self.gain('"' if self.grows else typed("".join(self._held), self._schema, self._root))


def _value(reader: ToolReader, tags: Tags, take: _Value) -> Steps[None]:
    """Passes a value and its end tag."""
    end = tags.valued
    while tags.lines and reader.at == len(reader.text) and (yield from reader.more()):
        pass
    if tags.lines and reader.text.startswith("\n", reader.at):
        reader.at += 1
    take.begin()
    while True:
        start = reader.at
        at = reader.text.find(end, start)
        if at >= 0:
            text = reader.text[start:at]
            reader.at = at + len(end)
            take.add(text.removesuffix("\n") if tags.lines else text)
            return take.end()
        rest = reader.text[start:]
        held = max(overlap(rest, end), overlap(rest, "\n" + end) if tags.lines else 0)
        reader.at = len(reader.text) - held
        take.add(reader.text[start : reader.at])
        if not (yield from reader.more()):
            raise Malformed


def python_calls(reader: ToolReader, marker: str) -> Steps[None]:
    """[f(a=1, b="x"), g()], perhaps between marks."""
    if not (yield from reader.literal("[")):
        raise Malformed
    yield from _python_call(reader)
    while (yield from reader.literal(",")):
        yield from _python_call(reader)
    yield from reader.passed("]", PYTHON[1])


def _python_call(reader: ToolReader) -> Steps[None]:
    name = yield from reader.name()
    if not (yield from reader.literal("(")):
        raise Malformed
    reader.begin(name)
    said, json = "{", _Json(reader)
    while not (yield from reader.literal(")")):
        key = yield from reader.name()
        if not (key and (yield from reader.literal("="))):
            raise Malformed
        json.gain(said + quoted(key) + ": ")
        yield from _python_value(reader, json)
        said = ", " if (yield from reader.literal(",")) else ""
    json.gain("{}" if said == "{" else "}", whole=True)


def _python_value(reader: ToolReader, json: _Json) -> Steps[None]:
    python = PythonScan()
    yield from reader.spaces()
    while True:
        try:
            piece, end = python.feed(reader.text, reader.at, ended=reader.ended)
        except ValueError:
            raise Malformed from None
        if python.done:
            return
        if end == reader.at:
            yield from reader.more()
        else:
            json.gain(piece, took=end - reader.at)


class _Json:
    """Sees to it that a call's arguments are JSON, whatever they were made of."""

    def __init__(self, reader: ToolReader) -> None:
        self._reader, self._scan = reader, ObjectScan(members=False)

    def gain(self, piece: str, *, took: int = 0, whole: bool = False) -> None:
        """Says a piece of whole tokens, which were `took` characters. Raises Malformed before what does not fit."""
        at = self._scan.feed(piece + " ", 0)  # which ends a number, and does no harm in a string
        if self._scan.broken or self._scan.done != whole:
            self._reader.gain(piece[:at])
            raise Malformed
        self._reader.at += took
        self._reader.gain(piece, whole=whole)

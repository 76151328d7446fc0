"""Arguments of tool calls as JSON: values that grow, Python's literals, and texts that a schema gives a type."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any

MAX_REFS = 16
MAX_WORD = 1024
"""Characters of a number or a word."""
ANY: frozenset[str] = frozenset()
"""The types of a value that may have any."""
JSON_TYPES = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
"""A value's type by its first character."""
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
PYTHON_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
PUNCTUATION = "[]{}(),:\"'"
CLOSERS = {"(": ")", "[": "]", "{": "}"}

SPACE = re.compile(r"[ \t\r\n]+")
TOKEN = re.compile(r"[\[\]{}(),:\"']|[-+.\w]+")
SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
UNESCAPED = {quote: re.compile(rf"[^\\{quote}]+") for quote in "\"'"}
CONTROL = re.compile(r"[\x00-\x1f]")
JSON_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
PYTHON_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL)
CUT_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}|[0-7]{1,2})?\Z")
SURROGATES = re.compile("[\ud800-\udfff]")

# What may come next in a value.
VALUE, ITEM, KEY, FIRST_KEY, COLON, AFTER = "value", "value close", "key", "key close", "colon", "comma close"


class LiteralScan:
    """A place in one growing value of JSON or Python, which it gives as JSON, token by token.

    It follows the grammar strictly, without recursion, whatever the depth. Models write line breaks into strings: those
    are escaped. Python's tuples become lists, and its commas before an end are dropped.
    """

    def __init__(self, *, python: bool = False) -> None:
        self.done, self._python = False, python
        self._closers: list[str] = []
        self._next = VALUE
        self._quote, self._is_key = "", False
        # Python's comma is held back until it is clear that no end follows.
        self._comma = False

    def feed(self, text: str, at: int) -> tuple[str, int]:
        """Translate the token at `text[at]`.

        Returns:
            The token's JSON and where it ends; `at` itself where more text is needed or the value is complete.

        Raises:
            ValueError: the token cannot stand here.
        """
        if at == len(text) or self.done:
            return "", at
        if self._quote:
            return self._string(text, at)
        if space := SPACE.match(text, at):
            return "" if self._comma else space[0], space.end()
        match = TOKEN.match(text, at)
        if not match or len(match[0]) > MAX_WORD:
            raise ValueError(f"{text[at]!r} begins no value")
        token, end = match[0], match.end()
        # There may be more of a word.
        if end == len(text) and token[0] not in PUNCTUATION:
            return "", at
        had_comma, self._comma = self._comma, False
        piece = self._token(token)
        return (", " if had_comma and token not in ")]}" else "") + piece, end

    def _token(self, token: str) -> str:
        place = self._next
        if token == '"' or (token == "'" and self._python):
            if "value" in place or "key" in place:
                self._quote, self._is_key = token, "key" in place
                return '"'
        elif "close" in place and token == self._closers[-1]:
            self._closers.pop()
            self._end_value()
            return "]" if token == ")" else token
        elif "value" in place and token in CLOSERS and (self._python or token != "("):
            self._closers.append(CLOSERS[token])
            self._next = FIRST_KEY if token == "{" else ITEM
            return "[" if token == "(" else token
        elif "comma" in place and token == ",":
            self._comma = self._python
            after = (KEY, FIRST_KEY) if self._closers[-1] == "}" else (VALUE, ITEM)
            # Python may end after a comma.
            self._next = after[self._python]
            return "" if self._python else token
        elif place == COLON and token == ":":
            self._next = VALUE
            return token
        elif "value" in place and SCALAR.fullmatch(
            word := PYTHON_WORDS.get(token, token) if self._python else token
        ):
            self._end_value()
            return word
        raise ValueError(f"{token!r} cannot stand here")

    def _string(self, text: str, at: int) -> tuple[str, int]:
        if text[at] == self._quote:
            self._quote = ""
            if self._is_key:
                self._next = COLON
            else:
                self._end_value()
            return '"', at + 1
        if run := UNESCAPED[self._quote].match(text, at):
            if self._python:
                return quote(run[0])[1:-1], run.end()
            return CONTROL.sub(lambda control: json.dumps(control[0])[1:-1], run[0]), run.end()
        if CUT_ESCAPE.match(text, at):
            return "", at
        escape = (PYTHON_ESCAPE if self._python else JSON_ESCAPE).match(text, at)
        if not escape:
            raise ValueError(f"{text[at : at + 2]!r} escapes nothing")
        return quote(_character(escape[0]))[1:-1] if self._python else escape[0], escape.end()

    def _end_value(self) -> None:
        self._next, self.done = AFTER, not self._closers


def _character(escape: str) -> str:
    """Return what one of Python's escapes stands for; itself where it stands for nothing."""
    code = escape[1:]
    if len(code) > 1 and code[0] in "xuU":
        number = int(code[1:], 16)
        return chr(number) if number <= sys.maxunicode else escape
    if code[0] in "01234567":
        return chr(int(code, 8))
    return PYTHON_ESCAPES.get(code, code if code in "\\'\"" else escape)


def quote(text: str) -> str:
    """Return a text as a JSON string. Halves of characters, which no encoding can carry, are escaped."""
    return json.dumps(text, ensure_ascii=bool(SURROGATES.search(text)))


def to_json(text: str, schema: Any, root: Any = None) -> str:
    """Return the JSON of an argument's text. What is no value of its type becomes a string, so nothing is lost.

    Args:
        text: the argument, written as JSON, as Python, or as plain text.
        schema: the argument's JSON Schema.
        root: the schema that `$ref` refers to.
    """
    types = types_of(schema, root)
    value = None
    if types != {"string"}:
        bare = text.strip()
        value = as_json(bare) or as_json(PYTHON_WORDS.get(bare.capitalize(), bare), python=True)
    if value is None:
        return quote(text)
    kind = _type_of(value)
    if kind == "number" and "integer" in types and "number" not in types and float(value).is_integer():
        value, kind = str(int(float(value))), "integer"
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    return value if fits or "string" not in types else quote(text)


def types_of(schema: Any, root: Any = None, depth: int = 0) -> frozenset[str]:
    """Return the JSON types that a schema allows; ANY where it does not say.

    Args:
        schema: a JSON Schema.
        root: the schema that `$ref` refers to.
        depth: references and alternatives that led here.
    """
    if not isinstance(schema, Mapping) or depth > MAX_REFS:
        return ANY
    if isinstance(ref := schema.get("$ref"), str):
        return types_of(_resolve(ref, root), root, depth + 1)
    kind = schema.get("type")
    if isinstance(kind, str | list):
        kinds = [kind] if isinstance(kind, str) else kind
        return frozenset(name for name in kinds if isinstance(name, str))
    values = schema.get("enum") if isinstance(schema.get("enum"), list) else None
    if values := values or ([schema["const"]] if "const" in schema else []):
        return frozenset(_type_of(json.dumps(value)) for value in values)
    for key in ("anyOf", "oneOf"):
        if isinstance(choices := schema.get(key), list):
            types = [types_of(choice, root, depth + 1) for choice in choices]
            return frozenset().union(*types) if all(types) else ANY
    parts = schema.get("allOf")
    each = (types_of(part, root, depth + 1) for part in parts) if isinstance(parts, list) else ()
    return next((types for types in each if types), ANY)


def _resolve(ref: str, root: Any) -> Any:
    for name in ref.removeprefix("#").split("/")[1:]:
        root = root.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root


def as_json(text: str, *, python: bool = False) -> str | None:
    """Return a value's JSON, written as JSON or as Python; None where it is neither."""
    scan, pieces, at = LiteralScan(python=python), list[str](), 0
    # A number ends where something else begins.
    text += " "
    try:
        while not scan.done:
            piece, end = scan.feed(text, at)
            if end == at:
                return None
            pieces.append(piece)
            at = end
    except ValueError:
        return None
    return None if text[at:].strip() else "".join(pieces)


def _type_of(value: str) -> str:
    return JSON_TYPES.get(value[0]) or ("number" if re.search("[.eE]", value) else "integer")

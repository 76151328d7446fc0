"""Arguments that a model did not write as JSON: texts that stand between tags, and Python's literals.

Owns typed(), which gives a text the type that a function's schema asks for, and PythonScan, which turns literals into
JSON as they grow. What is no value of the type is a string, so nothing is lost. Must not know of formats or readers.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from nibble.server.json_scan import SCALAR

MOST_REFS = 16
ANY: frozenset[str] = frozenset()
"""The types of a value that may be any."""
WORDS = {"True": "true", "False": "false", "None": "null"}
FIRST = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
TOKEN = re.compile(r"\s+|[\[\]{}(),:]|[-+.\w]+")
LONGEST_WORD, LONGEST_ESCAPE = 1024, 10
ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL)
LETTERS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
CLOSERS = {"(": ")", "[": "]", "{": "}"}
SURROGATES = re.compile("[\ud800-\udfff]")


def typed(text: str, schema: Any, root: Any = None) -> str:
    """The JSON of a text, by the schema of its argument. root: the schema that `$ref` refers to."""
    types = types_of(schema, root)
    if types == {"string"}:
        return quoted(text)
    found = _json(text.strip())
    if found is None:
        return quoted(text)
    kind = _type(found)
    if kind == "number" and "integer" in types and "number" not in types:
        found, kind = _whole(found)
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    return found if fits or "string" not in types else quoted(text)


def types_of(schema: Any, root: Any = None, depth: int = 0) -> frozenset[str]:
    """The JSON types that a schema allows; ANY where it does not say."""
    if not isinstance(schema, Mapping) or depth > MOST_REFS:
        return ANY
    if isinstance(ref := schema.get("$ref"), str):
        return types_of(_referred(ref, root), root, depth + 1)
    kind = schema.get("type")
    if isinstance(kind, str | list):
        return frozenset(
            name for name in ([kind] if isinstance(kind, str) else kind) if isinstance(name, str)
        )
    values = (
        schema["enum"]
        if isinstance(schema.get("enum"), list)
        else [schema[k] for k in ("const",) if k in schema]
    )
    if values:
        return frozenset(_type(json.dumps(value)) for value in values)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            found = [types_of(one, root, depth + 1) for one in schema[key]]
            return frozenset().union(*found) if all(found) else ANY
    return next(
        (types for one in _list(schema.get("allOf")) if (types := types_of(one, root, depth + 1))), ANY
    )


def quoted(text: str) -> str:
    """A JSON string; halves of characters that no encoding can carry are escaped."""
    return json.dumps(text, ensure_ascii=bool(SURROGATES.search(text)))


def _referred(ref: str, root: Any) -> Any:
    for name in ref.removeprefix("#").split("/")[1:]:
        root = root.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _json(text: str) -> str | None:
    """A value's JSON, written as JSON or as Python; None where it is neither."""
    for form in (text, WORDS.get(text.capitalize()), _from_python(text)):
        if form is not None and _is_json(form):
            return form
    return None


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError):
        return False
    return True


def _refused(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


def _from_python(text: str) -> str | None:
    scan, said, at = PythonScan(), "", 0
    try:
        while at < len(text) and not scan.done:
            piece, at = scan.feed(text, at, ended=True)
            said += piece
    except ValueError:
        return None
    return None if scan.done else said


def _type(text: str) -> str:
    return FIRST.get(text[0]) or ("number" if re.search("[.eE]", text) else "integer")


def _whole(text: str) -> tuple[str, str]:
    """A number, as an integer if it is one."""
    try:
        value = float(text)
        return (str(int(value)), "integer") if value.is_integer() else (text, "number")
    except (ValueError, OverflowError):
        return text, "number"


class PythonScan:
    """Turns Python's literals into JSON, token by token, and strings as they grow: tuples are lists, commas before an
    end are dropped. Whether the result is JSON is for others to see. Ends before a comma or `)` that is not its own:
    done."""

    def __init__(self) -> None:
        self.done = False
        self._closers: list[str] = []
        self._comma = False
        self._quote = ""  # of the string that has begun

    def feed(self, text: str, at: int, *, ended: bool = False) -> tuple[str, int]:
        """(the JSON of the token at `at`, where it ends); ends at `at` where more text is needed, or all is done.
        Raises ValueError where it is no literal."""
        end = self._token(text, at, ended) if at < len(text) else at
        if ended and end == at and not self.done:
            raise ValueError("the literal is not whole")
        return (self._said(text[at:end]) if end > at else ""), end

    def _token(self, text: str, at: int, ended: bool) -> int:
        """Where the token ends; `at` where more text is needed, or the end is here."""
        letter = text[at]
        if self._quote and letter == "\\":
            found = ESCAPE.match(text, at) if ended or len(text) - at >= LONGEST_ESCAPE else None
            return found.end() if found else at
        if letter in "'\"" and self._quote in ("", letter):
            return at + 1
        if self._quote:
            end = re.compile(rf"[^\\{self._quote}]+").match(text, at)
            return end.end() if end else at
        if not self._closers and letter in ",)":
            self.done = True
            return at
        found = TOKEN.match(text, at)
        if not found or found.end() - at > LONGEST_WORD:
            raise ValueError(f"{letter!r} begins no literal")
        word = not (letter.isspace() or letter in "[]{}(),:")
        return at if word and found.end() == len(text) and not ended else found.end()

    def _said(self, token: str) -> str:
        if self._quote:
            return self._in_string(token)
        if token == ",":
            self._comma = True
            return ""
        if token.isspace():
            return "" if self._comma else token
        before = ", " if self._comma and token not in ")]}" else ""
        self._comma = False
        return before + self._json(token)

    def _in_string(self, piece: str) -> str:
        if piece == self._quote:
            self._quote = ""
            return '"'
        return quoted(ESCAPE.sub(_letter, piece))[1:-1]

    def _json(self, token: str) -> str:
        if token in CLOSERS:
            self._closers.append(CLOSERS[token])
            return "[" if token == "(" else token
        if token in ")]}":
            if not self._closers or self._closers.pop() != token:
                raise ValueError(f"{token!r} closes nothing")
            return "]" if token == ")" else token
        if token in "'\"":
            self._quote = token
            return '"'
        word = WORDS.get(token, token)
        if word not in ":" and not SCALAR.fullmatch(word):
            raise ValueError(f"{token!r} is no literal")
        return word


def _letter(found: re.Match[str]) -> str:
    said = found.group()[1:]
    if len(said) > 1 and said[0] in "xuU":
        code = int(said[1:], 16)
        return chr(code) if code <= sys.maxunicode else found.group()
    if said[0] in "01234567":
        return chr(int(said, 8))
    return LETTERS.get(said, said if said in "\\'\"" else "\\" + said)

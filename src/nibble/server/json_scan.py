"""Where a JSON object ends in a text that still grows, and what its members' texts are.

Owns ObjectScan, which follows the grammar strictly and without recursion, whatever the depth. It takes whole numbers
and words, but strings as they grow; control characters in strings, which models write, are escaped. Must not know what
the object is.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

SPACE = re.compile(r"[ \t\r\n]*")
STRING = re.compile(r'[^"\\\x00-\x1f]*')
ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
BEGUN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
WORD = re.compile(r"[-+.0-9A-Za-z]*")
SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
CLOSERS = {"{": "}", "[": "]"}


class Place(Enum):
    """What may stand next."""

    VALUE = auto()
    ITEM = auto()  # a value, or the list's end
    KEY = auto()
    FIRST_KEY = auto()  # a key, or the object's end
    COLON = auto()
    AFTER = auto()  # a comma, or an end
    STRING = auto()  # more of a string


class ObjectScan:
    """Follows one object. values: text so far of its members, or of the whole as member "" if not `members`; whole:
    those that are complete. A member that comes twice counts once. seen: all keys. done, broken: how it ended."""

    def __init__(self, *, members: bool) -> None:
        self.values: dict[str, str] = {}
        self.whole: set[str] = set()
        self.seen: set[str] = set()
        self.done = self.broken = False
        self._depth = int(members)
        self._closers: list[str] = []
        self._place, self._in_key, self._paused = Place.VALUE, False, False
        self._key = ""
        self._member: str | None = None if members else ""

    def feed(self, text: str, at: int) -> int:
        """Goes on at `text[at]`; up to where it came: to what is broken, to the end, to a member's colon or its end
        (call again), or as far as the text goes."""
        self._paused = False
        while at < len(text) and not (self.done or self.broken or self._paused):
            now = self._string(text, at) if self._place is Place.STRING else self._token(text, at)
            if now == at:
                break
            at = now
        return at

    def _string(self, text: str, at: int) -> int:
        end = _end(STRING, text, at)
        if end > at:
            return self._took(text[at:end], end)
        letter = text[at]
        if letter == '"':
            self._took(letter, at)
            self._string_ended()
            return at + 1
        if letter != "\\":
            return self._took(json.dumps(letter)[1:-1], at + 1)
        end = _end(ESCAPE, text, at)
        if end > at:
            return self._took(text[at:end], end)
        self.broken = not BEGUN_ESCAPE.match(text, at)
        return at

    def _token(self, text: str, at: int) -> int:
        end = _end(SPACE, text, at)
        if end > at:
            return self._took(text[at:end], end) if self._member in self.values else end
        letter, place = text[at], self._place
        if not self._closers and letter != "{":
            self.broken = True
        elif letter == '"' and place in {Place.VALUE, Place.ITEM, Place.KEY, Place.FIRST_KEY}:
            self._in_key, self._place = place in {Place.KEY, Place.FIRST_KEY}, Place.STRING
            self._key = "" if self._in_key else self._key
            self._took(letter, at)
        elif letter in CLOSERS and place in {Place.VALUE, Place.ITEM}:
            self._closers.append(CLOSERS[letter])
            self._place = Place.FIRST_KEY if letter == "{" else Place.ITEM
            self._took(letter, at)
        elif letter in "}]":
            self._close(letter)
        elif letter == "," and place is Place.AFTER:
            self._place = Place.KEY if self._closers[-1] == "}" else Place.VALUE
            self._took(letter, at)
        elif letter == ":" and place is Place.COLON:
            self._place = Place.VALUE
            self._took(letter, at)
            self._key_ended()
        elif place in {Place.VALUE, Place.ITEM}:
            return self._scalar(text, at)
        else:
            self.broken = True
        return at if self.broken else at + 1

    def _close(self, letter: str) -> None:
        may = self._place in {Place.AFTER, Place.FIRST_KEY, Place.ITEM}
        if not (may and self._closers[-1] == letter):
            self.broken = True
            return
        self._closers.pop()
        self._took(letter, 0)
        self._value_ended()
        self.done = not self._closers

    def _scalar(self, text: str, at: int) -> int:
        end = _end(WORD, text, at)
        if at < end == len(text):  # there may be more of it
            return at
        self.broken = not SCALAR.fullmatch(text, at, end)
        if self.broken:
            return at
        self._took(text[at:end], end)
        self._value_ended()
        return end

    def _took(self, piece: str, end: int) -> int:
        if self._member is not None:
            self.values[self._member] = self.values.get(self._member, "") + piece
        elif self._in_key:
            self._key += piece
        return end

    def _string_ended(self) -> None:
        if self._in_key:
            self._place, self._in_key = Place.COLON, False
        else:
            self._value_ended()

    def _key_ended(self) -> None:
        if self._member is None and len(self._closers) == self._depth:
            key = json.loads(self._key)
            self._member = None if key in self.seen else key
            self.seen.add(key)
            self._paused = True

    def _value_ended(self) -> None:
        self._place = Place.AFTER
        if self._member is not None and len(self._closers) == self._depth:
            self.whole.add(self._member)
            self._member, self._paused = None, True


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at

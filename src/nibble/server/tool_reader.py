"""Tool calls in the text of an answer: found as the text grows, however it is cut, in OpenAI's streaming shape.

Owns ToolReader, its events, and what formats are read with. What may begin a call is held back; what turns out to be
none is text again. Only white space that touches a call is dropped. Must not know of HTTP, requests, engines, or the
formats (tools.py).
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from nibble.server.json_scan import ObjectScan

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A reading that pauses where it needs more text."""
MOST_SPACE, LONGEST_NAME = 64, 256
NAME = re.compile(r"[A-Za-z0-9_.:/-]*")
SPACE = re.compile(r"\s*")
SURROGATES = re.compile("[\ud800-\udfff]")
ARGUMENTS = ("arguments", "parameters")
NEVER = r"(?!)"
BARE_KEYS = {"name", "type", "id", *ARGUMENTS}
"""An object without a marker around it is a call only if it has no other members."""


@dataclass(frozen=True, slots=True)
class Text:
    """Text to show."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of call `index`: id and name come with its first, then more of `arguments`, a JSON object's text."""

    index: int
    id: str | None
    name: str | None
    arguments: str

    def openai(self) -> dict[str, Any]:
        """An entry of a chunk's `tool_calls`."""
        if self.id is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


Event = Text | CallDelta


class Malformed(Exception):
    """What was begun is no call."""


class Cursor:
    """A place in a growing text. What these methods decide depends on the text alone, not on how it came."""

    def __init__(self) -> None:
        self.text, self.at, self.ended = "", 0, False

    def more(self) -> Steps[bool]:
        """Waits for more text; False at the end."""
        if not self.ended:
            yield
            return True
        return False

    def spaces(self) -> Steps[None]:
        while True:
            self.at = _end(SPACE, self.text, self.at)
            if self.at < len(self.text) or not (yield from self.more()):
                return

    def literal(self, word: str) -> Steps[bool]:
        """Passes `word` and white space before it, if it stands here."""
        before = self.at
        yield from self.spaces()
        while not self.text.startswith(word, self.at):
            if not word.startswith(self.text[self.at :]) or not (yield from self.more()):
                self.at = before
                return False
        self.at += len(word)
        return True

    def name(self) -> Steps[str]:
        """A word of a name's characters, perhaps an empty one."""
        yield from self.spaces()
        while True:
            end = _end(NAME, self.text, self.at)
            if end - self.at > LONGEST_NAME:
                raise Malformed
            if end < len(self.text) or not (yield from self.more()):
                word, self.at = self.text[self.at : end], end
                return word


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model is used to write calls, for grammars. call: with NAME, NUMBER and ARGUMENTS in their places. begin,
    between, end: around all calls; between None: there can be one only. argument: one argument, with KEY and VALUE,
    where arguments are no JSON object; FLAG is whether it is a string. joined: between arguments."""

    call: str
    begin: str = ""
    between: str | None = ""
    end: str = ""
    argument: str = ""
    joined: str = ""


@dataclass(frozen=True, slots=True)
class Parser:
    """How a model writes calls. markers: what a call begins with; bare: or the first character of the whole answer.
    tokens: markers that must not be missing from the text though tokenizers may call them special."""

    name: str
    markers: tuple[str, ...]
    read: Callable[[ToolReader, str], Steps[None]]
    tokens: tuple[str, ...]
    layout: Layout
    bare: str = ""
    new_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}"


class ToolReader(Cursor):
    """Reads calls out of one answer. eager: arguments come as they grow, so a call whose arguments turn out to be
    broken stays as far as it came, and the rest is text; else a call comes when it is complete, and a broken one is
    text as a whole. tools: those there are, and the schemas of their arguments; a call without markers must name one of
    them. most: calls beyond so many are dropped. complete: calls so far."""

    def __init__(
        self,
        parser: Parser,
        *,
        eager: bool = True,
        tools: Mapping[str, Any] | None = None,
        most: int | None = None,
    ) -> None:
        super().__init__()
        self.complete = 0
        self._parser, self._eager, self._tools, self._most = parser, eager, tools, most
        self._marker = re.compile("|".join(map(re.escape, parser.markers)) or NEVER)
        self._out: list[Event] = []
        self._index, self._bare = -1, False
        self._touching = False  # a call stands right before
        self._open = self._good = False  # the present call: has begun, is complete
        self._sent = 0
        self._name, self._kept = "", list[str]()
        self._steps = self._run()

    def add(self, text: str) -> list[Event]:
        """What `text` adds to the answer."""
        self.text += text
        return self._went_on()

    def finish(self) -> list[Event]:
        """What was held back."""
        self.ended = True
        return self._went_on()

    # What parsers are made of

    def call(self) -> Steps[None]:
        """A call as one object: {"name": ..., "arguments": {...}}; `parameters` is as good."""
        yield from self._follow(ObjectScan(members=True), None, None)

    def arguments(self, name: str, known: str | None = None) -> Steps[None]:
        """The arguments, an object, of a call whose name stood before. known: its id."""
        self._check_name(name)
        yield from self._follow(ObjectScan(members=False), name, known)

    def schema(self, name: str) -> Any:
        """Of the arguments of a tool; None where it is not known."""
        return self._tools.get(name) if self._tools else None

    def begin(self, name: str) -> None:
        """A call begins whose arguments the format puts together itself, as gain() is told."""
        self._check_name(name)
        self._open = self._good = False
        self._name, self._kept = name, []

    def gain(self, piece: str, *, whole: bool = False) -> None:
        """More of its arguments' JSON; whole: that is all of them."""
        self._kept.append(piece)
        if whole or self._eager:
            self._put(self._name, None, "".join(self._kept), whole)
            self._kept = []

    def passed(self, *words: str) -> Steps[None]:
        """Drops these words, each if it is there, after a call; or half of one where the answer ends in it."""
        for word in words:
            if (yield from self.literal(word)):
                self._drop()
            elif self.ended and self._touching and word.startswith(self.text[self.at :].lstrip()):
                self.at = len(self.text)
                self._drop()

    # The reading

    def _went_on(self) -> list[Event]:
        next(self._steps, None)
        out, self._out = self._out, []
        return out

    def _run(self) -> Steps[None]:
        if self._parser.bare and (yield from self._begins_bare()):
            self._bare = True
            yield from self._try("")
            self._bare = False
        while marker := (yield from self._next_marker()):
            yield from self._try(marker)
        self._show(len(self.text))

    def _begins_bare(self) -> Steps[bool]:
        for marker in self._parser.markers:  # which may begin with the same character
            if (yield from self.literal(marker)):
                return False
        yield from self.spaces()
        return self.text.startswith(self._parser.bare, self.at)

    def _try(self, marker: str) -> Steps[None]:
        """Reads calls from here on. Where it fails all up to there is text, so that time is linear in the text."""
        try:
            yield from self._parser.read(self, marker)
        except Malformed:
            self._show(self.at)

    def _next_marker(self) -> Steps[str]:
        """Shows the text up to the next marker, and passes it; "" at the end."""
        while True:
            if found := self._marker.search(self.text):
                self.at = found.end()
                self._show(shown(self.text[: found.start()]))
                return found.group()
            held = max((overlap(self.text, marker) for marker in self._parser.markers), default=0)
            self._show(shown(self.text[: len(self.text) - held]))
            if not (yield from self.more()):
                return ""

    def _follow(self, scan: ObjectScan, name: str | None, known: str | None) -> Steps[None]:
        yield from self.spaces()
        self._open = self._good = False
        while not scan.done:
            before = self.at
            self.at = after = scan.feed(self.text, before)
            self._look(scan, name, known)
            if scan.broken or (after == before and not (yield from self.more())):
                return self._gave_up(cut_short=not scan.broken)
        if not self._good:
            if self._bare or "name" not in scan.whole:
                raise Malformed
            self._grow(self._name_in(scan), None, "{}", whole=True)
        return self._drop()

    def _gave_up(self, cut_short: bool) -> None:
        """Of an object that does not end."""
        if self._good:  # what is missing is the end around the arguments
            self._show(self.at)
        elif cut_short and self._open:
            self._say(CallDelta(self._index, None, None, self.text[self.at :]))
            self.text, self.at = "", 0
        else:
            raise Malformed

    def _look(self, scan: ObjectScan, name: str | None, known: str | None) -> None:
        """Says what is known of a call by now."""
        if self._bare and not scan.seen <= BARE_KEYS:
            raise Malformed
        if self._good or (name is None and "name" not in scan.whole):
            return
        keys = ARGUMENTS if name is None else ("",)
        name = self._name_in(scan) if name is None else name
        key = next((key for key in scan.values if key in keys), None)
        if key is None:
            return
        said, whole = scan.values[key], key in scan.whole
        if not said.startswith("{") and whole:
            said = _unwrapped(said)
        if whole or (self._eager and said.startswith("{")):
            self._grow(name, known, said, whole)

    def _grow(self, name: str, known: str | None, said: str, whole: bool) -> None:
        piece = said[self._sent :] if self._open else said
        self._sent = len(said)
        self._put(name, known, piece, whole)

    def _put(self, name: str, known: str | None, piece: str, whole: bool) -> None:
        if not self._open:
            self._open = True
            self._index += 1
            self._say(CallDelta(self._index, known or self._parser.new_id(), name, piece))
        elif piece:
            self._say(CallDelta(self._index, None, None, piece))
        self._drop()
        self._touching = self._good = whole
        self.complete += whole and (self._most is None or self._index < self._most)

    def _name_in(self, scan: ObjectScan) -> str:
        value = scan.values["name"]
        name = json.loads(value) if value.startswith('"') else ""
        self._check_name(name)
        return str(name)

    def _check_name(self, name: str) -> None:
        known = not self._bare or self._tools is None or name in self._tools
        if not (name and known and len(name) <= LONGEST_NAME and NAME.fullmatch(name)):
            raise Malformed

    def _drop(self) -> None:
        """Forgets the text up to here, which was a call's."""
        self.text, self.at = self.text[self.at :], 0
        self._touching = True

    def _show(self, end: int) -> None:
        """Says the text up to `end`, and forgets it."""
        text, self.text, self.at = self.text[:end], self.text[end:], max(0, self.at - end)
        if self._touching:
            text = text.lstrip()
        if text:
            self._touching = False
            self._say(Text(text))

    def _say(self, event: Event) -> None:
        if isinstance(event, CallDelta) and self._most is not None and event.index >= self._most:
            return
        self._out[-1:] = joined([*self._out[-1:], event])


def joined(events: Iterable[Event]) -> list[Event]:
    """Neighbours of one kind as one."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, Text) and isinstance(last, Text):
            out[-1] = Text(last.text + event.text)
        elif isinstance(event, CallDelta) and isinstance(last, CallDelta) and last.index == event.index:
            out[-1] = replace(last, arguments=last.arguments + event.arguments)
        else:
            out.append(event)
    return out


def gathered(events: Iterable[Event]) -> tuple[str, list[dict[str, Any]]]:
    """All of an answer -> (its text, the `tool_calls` of its message)."""
    text, calls = "", dict[int, CallDelta]()
    for event in events:
        if isinstance(event, Text):
            text += event.text
        else:
            first = calls.get(event.index)
            calls[event.index] = (
                replace(first, arguments=first.arguments + event.arguments) if first else event
            )
    said = [call.openai() for call in calls.values()]
    return text, [{key: value for key, value in call.items() if key != "index"} for call in said]


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker`."""
    most = min(len(marker) - 1, len(text))
    return next((n for n in range(most, 0, -1) if text.endswith(marker[:n])), 0)


def shown(text: str) -> int:
    """How much can be shown: white space at the end may turn out to touch a marker."""
    return max(len(text.rstrip()), len(text) - MOST_SPACE)


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at


def _unwrapped(value: str) -> str:
    """Arguments that are no object: null means none, and a string may hold an object's text."""
    if value == "null":
        return "{}"
    held = json.loads(value).strip() if value.startswith('"') else ""
    scan = ObjectScan(members=False)
    if not held or SURROGATES.search(held) or scan.feed(held, 0) != len(held) or not scan.done:
        raise Malformed
    return scan.values[""]

"""Answers as they grow: reasoning, text and tool calls apart, in OpenAI's streaming shape, however the text is cut.

What may begin a call is held back; what turns out to be none is text again. Only white space that touches a marker is
dropped. Transformers' chat_parsing was tried and cannot do this: it gives a call at its end, parsed, so that arguments
neither stream nor keep their text, it stops at an end marker inside a string, and it raises where a call is broken.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from nibble.server.streaming import CallDelta, Event, Text, Thought, merge_events
from nibble.server.tool_arguments import SURROGATES, LiteralScan, as_json, quote, to_json, types_of

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A reading that pauses where it needs more text."""
MAX_SPACE, MAX_NAME = 64, 256
NAME = re.compile(r"[A-Za-z0-9_.:/-]*")
SPACE = re.compile(r"\s*")
NEVER = r"(?!)"
ARGUMENTS = ("arguments", "parameters")
BARE_KEYS = {"name", "type", "id", *ARGUMENTS}
"""An object without a marker around it is a call only if it has no other members."""
CALL_ID = "[CALL_ID]"


class MalformedCallError(Exception):
    """What began like a call is none."""


class CutShortError(MalformedCallError):
    """The answer ends within a value that is good so far."""


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to write calls, as a template: grammars write it, and the parser reads it with any white space."""

    call: str
    """One call, with NAME, NUMBER and ARGUMENTS in their places."""
    begin: str = ""
    separator: str | None = ""
    """What stands between calls; None where there can be one only."""
    end: str = ""
    argument: str = ""
    """One argument, with KEY and VALUE, where arguments are no JSON object; FLAG is whether it is a string."""
    argument_separator: str = ""
    """What stands between arguments, which are Python's."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls."""

    name: str
    markers: tuple[str, ...]
    """What a call begins with."""
    tokens: tuple[str, ...]
    """Markers that must not be missing from the text though tokenizers may call them special."""
    layouts: tuple[Layout, ...]
    """The way that the model is used to, and others that are read too."""
    signs: tuple[str, ...] = ()
    """Patterns of what its chat templates have in them."""
    bare_start: str = ""
    """A call may also begin with this, the first character of the whole answer."""
    last_marker: str = ""
    """A marker that may follow the calls, but is not written."""
    new_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}"

    @property
    def layout(self) -> Layout:
        """The way that the model is used to."""
        return self.layouts[0]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model marks its reasoning."""

    name: str
    start: str = "<think>"
    end: str = "</think>"
    signs: tuple[str, ...] = ()
    """Patterns of what its chat templates have in them."""
    always: bool = False
    """It stands first in every answer, even without its start."""

    def starts_in(self, prompt: str, continued: str | None = None) -> bool:
        """Return whether an answer begins inside the reasoning.

        Args:
            prompt: what stands before it; its end is enough.
            continued: the message that it goes on with, if there is one.
        """
        if continued is not None:
            return continued.rfind(self.start) > continued.rfind(self.end)
        tail = prompt.rstrip()
        return tail.endswith(self.start) or (self.always and not tail.endswith(self.end))


@dataclass(frozen=True, slots=True)
class Literals:
    """The literals of a layout, without white space."""

    opening: tuple[str, ...]
    """Before a call's name or object."""
    middle: tuple[str, ...]
    """Between name and arguments."""
    closing: tuple[str, ...]
    separator: str
    """What another call begins with."""


@lru_cache
def literals_of(layout: Layout) -> Literals:
    """Return the literals of a layout."""
    before, call, after = re.split(r"(\{.*\}|NAME.*?ARGUMENTS)", layout.call, maxsplit=1, flags=re.DOTALL)
    opening = _literals(layout.begin + before)
    # Kimi's `functions.` is read with the name: both are the call's id, and models forget it.
    if opening and NAME.fullmatch(opening[-1]):
        opening = opening[:-1]
    middle = () if call.startswith("{") else _literals(re.sub("NAME|:NUMBER|ARGUMENTS", "", call))
    # Where grammars allow one call only (Llama), models may still write several, with semicolons between them.
    separator = ";" if layout.separator is None else layout.separator.strip()
    # Between tags, several calls may share what is around them: the innermost tag begins another one.
    if layout.argument and not layout.argument_separator:
        separator = opening[-1]
    return Literals(opening, middle, (*_literals(after), *_literals(layout.end)), separator)


def _literals(text: str) -> tuple[str, ...]:
    """Return the tags and words of a template: white space may stand between them."""
    parts = re.split(r"\s*(?=<)|(?<=[>\]])\s*|\n", text)
    return tuple(part.strip() for part in parts if part.strip())


class AnswerParser:
    """A place in one growing answer, and the events that came of it.

    What it decides depends on the text alone, not on how it came: `_run` pauses where it needs more. Reasoning stands
    first or nowhere, and goes to the answer's end where it does not end before.

    Args:
        calls: how the model writes calls; None: there are none.
        reasoning: how the model marks reasoning; None: there is none.
        starts_inside: the answer begins inside the reasoning (`ReasoningFormat.starts_in`).
        eager: arguments come as they grow: a call whose arguments break stays as far as it came, and the rest is text.
            Else a call comes when it is complete, and a broken one is text.
        tools: the tools there are, with the schemas of their arguments. A call without a marker must name one of them.
        max_calls: calls beyond so many are dropped.
    """

    def __init__(
        self,
        calls: CallFormat | None = None,
        reasoning: ReasoningFormat | None = None,
        *,
        starts_inside: bool = False,
        eager: bool = True,
        tools: Mapping[str, Any] | None = None,
        max_calls: int | None = None,
    ) -> None:
        self.num_calls = 0
        """Complete calls so far: an answer with some finishes with reason `tool_calls`."""
        self._format, self._reasoning, self._starts_inside = calls, reasoning, starts_inside
        self._eager, self._tools, self._max_calls = eager, tools, max_calls
        self._text, self._at, self._is_last = "", 0, False
        # Where the text begins that was neither shown nor dropped.
        self._start = 0
        # White space that comes now touches a marker.
        self._after_marker = False
        self._events: list[Event] = []
        # Of the present call: its number, whether it has no marker, whether an event of it was sent, and all arguments.
        self._index, self._is_bare, self._is_sent, self._is_complete = -1, False, False, False
        self._name, self._id, self._pieces = "", "", list[str]()
        self._new_id = calls.new_id if calls else str
        self._steps = self._run()

    def feed(self, text: str, *, last: bool = False) -> list[Event]:
        """Return what `text` adds to the answer; last: it is all."""
        self._text += text
        self._is_last = last
        next(self._steps, None)
        events, self._events = merge_events(self._events), []
        return events

    def _run(self) -> Steps[None]:
        if self._reasoning and ((yield from self._literal(self._reasoning.start)) or self._starts_inside):
            self._drop()
            if not (yield from self._next_marker((self._reasoning.end,), Thought)):
                self._show(len(self._text), Thought)
            self._drop()
        if self._format:
            yield from self._calls(self._format)
        # Where no calls are expected nothing is held back, not even white space.
        while True:
            self._show(len(self._text))
            self._text, self._at, self._start = "", 0, 0
            if not (yield from self._more()):
                return

    def _calls(self, calls: CallFormat) -> Steps[None]:
        if calls.bare_start and (yield from self._starts_bare(calls)):
            self._is_bare = True
            yield from self._try(calls, "")
            self._is_bare = False
        while marker := (yield from self._next_marker(calls.markers)):
            yield from self._try(calls, marker)

    def _starts_bare(self, calls: CallFormat) -> Steps[bool]:
        # A marker may begin with the same character.
        for marker in calls.markers:
            if (yield from self._literal(marker)):
                return False
        yield from self._spaces()
        return self._text.startswith(calls.bare_start, self._at)

    def _try(self, calls: CallFormat, marker: str) -> Steps[None]:
        """Read calls from here on. Where that fails all up to there is text, so that time is linear in the text."""
        try:
            yield from self._read(calls, marker)
        except MalformedCallError:
            self._show(self._at)

    # Parts of a text

    def _more(self) -> Steps[bool]:
        """Wait for more text; False at the end."""
        if not self._is_last:
            yield
            return True
        return False

    def _spaces(self) -> Steps[None]:
        while True:
            self._at = _match_end(SPACE, self._text, self._at)
            if self._at < len(self._text) or not (yield from self._more()):
                return

    def _literal(self, literal: str) -> Steps[bool]:
        """Pass a literal and white space before it, if it stands here."""
        start = self._at
        yield from self._spaces()
        while not self._text.startswith(literal, self._at):
            if not literal.startswith(self._text[self._at :]) or not (yield from self._more()):
                self._at = start
                return False
        self._at += len(literal)
        return True

    def _expect(self, *literals: str) -> Steps[None]:
        for literal in literals:
            _check((yield from self._literal(literal)))

    def _next_marker(self, markers: Sequence[str], kind: type[Thought | Text] = Text) -> Steps[str]:
        """Show the text up to the next marker, and pass it; "" at the end, where the rest is not shown yet."""
        pattern = re.compile("|".join(map(re.escape, markers)) or NEVER)
        while True:
            # Only here, between calls: within a call places in the text must stay.
            self._text, self._at, self._start = self._text[self._start :], 0, 0
            match = pattern.search(self._text)
            end = match.start() if match else len(self._text) - _overlap(self._text, markers)
            self._show(_safe_length(self._text[:end]), kind)
            if match:
                self._at = match.end()
                return match.group()
            if not (yield from self._more()):
                return ""

    def _show(self, end: int, kind: type[Thought | Text] = Text) -> None:
        text, self._start = self._text[self._start : end], end
        self._at = max(self._at, end)
        if self._after_marker:
            text = text.lstrip()
        if text:
            self._after_marker = False
            self._events.append(kind(text))

    def _drop(self) -> None:
        """Forget the text up to here, which was a marker's or a call's."""
        self._start, self._after_marker = self._at, True

    # Calls

    def _read(self, calls: CallFormat, marker: str) -> Steps[None]:
        layout = yield from self._open(calls, marker)
        literals = literals_of(layout)
        if layout.argument:
            read = self._python_call if layout.argument_separator else self._tagged_call
        else:
            read = self._object_call if "{" in layout.call else self._named_call
        yield from read(layout)
        while literals.separator and (yield from self._literal(literals.separator)):
            yield from read(layout)
        # The first literal after arguments that are no object was a part of the call.
        yield from self._skip(*literals.closing[bool(layout.argument) :], calls.last_marker)

    def _open(self, calls: CallFormat, marker: str) -> Steps[Layout]:
        """Pass what stands before the first call, and return the layout that begins so."""
        start, openings = self._at, list[tuple[tuple[str, ...], Layout]]()
        for layout in calls.layouts:
            opening = literals_of(layout).opening
            if marker in opening:
                opening = opening[opening.index(marker) + 1 :]
            elif not marker:
                opening = tuple(literal for literal in opening if literal not in calls.markers)
            openings.append((opening, layout))
        # The longest first: Mistral's list begins with a bracket, its other layout with nothing.
        for opening, layout in sorted(openings, key=lambda one: -len(one[0])):
            try:
                yield from self._expect(*opening)
                return layout
            except MalformedCallError:
                self._at = start
        raise MalformedCallError

    # One call

    def _object_call(self, layout: Layout) -> Steps[None]:
        """Read {"name": ..., "arguments": {...}}; `parameters` is as good."""
        self._is_sent = self._is_complete = False
        try:
            yield from self._members()
        except MalformedCallError:
            # Behind complete arguments a brace is missing at most: the call counts.
            if not self._is_complete:
                raise
            self._show(self._at)
        else:
            self._drop()

    def _members(self) -> Steps[None]:
        name, arguments, keys = "", "", set[str]()
        yield from self._expect("{")
        at_end = yield from self._literal("}")
        while not at_end:
            yield from self._spaces()
            _check(self._text.startswith('"', self._at))
            key = json.loads((yield from self._value()))
            _check(not self._is_bare or key in BARE_KEYS)
            yield from self._expect(":")
            yield from self._spaces()
            # The first member of a name counts; arguments are held back until the call's name is there.
            if key in keys:
                yield from self._value()
            elif key == "name":
                name = json.loads((yield from self._value()))
                self._begin(name if isinstance(name, str) else "")
            elif key not in ARGUMENTS or arguments:
                yield from self._value()
            elif name and self._text.startswith("{", self._at):
                arguments = "streamed"
                yield from self._stream(LiteralScan())
            else:
                arguments = _unwrap((yield from self._value()))
            keys.add(key)
            if name and arguments and not self._is_complete:
                self._add(arguments, last=True)
            at_end = not (yield from self._literal(","))
        yield from self._expect("}")
        if not self._is_complete:
            _check(name and not self._is_bare)
            self._add("{}", last=True)

    def _named_call(self, layout: Layout) -> Steps[None]:
        """Read a name and an object."""
        name, call_id = (yield from self._read_name()), ""
        # functions.NAME:NUMBER is the id too.
        if "NUMBER" in layout.call:
            call_id, name = name, name.removeprefix("functions.")
            name = name.rpartition(":")[0] or name
        elif (yield from self._literal(CALL_ID)):
            call_id = yield from self._read_name()
        # None of these must be there: the brace says where arguments begin.
        for literal in literals_of(layout).middle:
            yield from self._literal(literal)
        self._begin(name, call_id)
        yield from self._spaces()
        _check(self._text.startswith("{", self._at))
        yield from self._stream(LiteralScan())

    def _tagged_call(self, layout: Layout) -> Steps[None]:
        """Read a name, and arguments that stand between tags."""
        literals = literals_of(layout)
        before, between, after = re.split("KEY|VALUE", layout.argument)
        key_end, *value_start = [part for text in between.split("FLAG") for part in _literals(text)]
        name, keys = (yield from self._read_name()), set[str]()
        yield from self._expect(*literals.middle)
        self._begin(name)
        root = self._tools.get(name) if self._tools else None
        properties = root.get("properties") if isinstance(root, dict) else None
        while not (yield from self._literal(literals.closing[0])):
            yield from self._expect(before.strip())
            key = yield from self._key(key_end)
            schema = properties.get(key) if isinstance(properties, dict) else None
            # A flag says what the schema says in other formats.
            if "FLAG" in between:
                schema = {"type": "string"} if (yield from self._read_name()) == "true" else None
            yield from self._expect(*value_start)
            # An argument that comes twice counts once.
            first = key not in keys
            if first:
                self._add((", " if keys else "{") + quote(key) + ": ")
            keys.add(key)
            yield from self._tagged_value(after, schema, root, first)
        self._add("}" if keys else "{}", last=True)

    def _key(self, end: str) -> Steps[str]:
        while (stop := self._text.find(end, self._at)) < 0:
            _check(len(self._text) - self._at <= MAX_NAME + len(end) and (yield from self._more()))
        key = self._text[self._at : stop].strip()
        _check(key and stop - self._at <= MAX_NAME)
        self._at = stop + len(end)
        return key

    def _tagged_value(self, after: str, schema: Any, root: Any, first: bool) -> Steps[None]:
        """Read a value and its end tag: a string's text as it streams, other types' when it is complete.

        Args:
            after: what stands after the value. A line break there, and one before the value, is not part of it.
            schema: the argument's JSON Schema.
            root: the schema of all arguments.
            first: whether the argument counts.
        """
        end, lines, pieces = after.strip(), after.startswith("\n"), list[str]()
        ends = (end, "\n" + end) if lines else (end,)
        pattern = re.compile(("\n?" if lines else "") + re.escape(end))
        streams = types_of(schema, root) == {"string"}
        # The line break before the value may not have come yet.
        while lines and self._at == len(self._text) and (yield from self._more()):
            pass
        self._at += lines and self._text.startswith("\n", self._at)
        if streams and first:
            self._add('"')
        match = None
        while not match:
            match = pattern.search(self._text, self._at)
            stop = match.start() if match else len(self._text) - _overlap(self._text[self._at :], ends)
            piece, self._at = self._text[self._at : stop], match.end() if match else stop
            if not streams:
                pieces.append(piece)
            elif first:
                self._add(quote(piece)[1:-1])
            _check(match or (yield from self._more()))
        if first:
            self._add('"' if streams else to_json("".join(pieces), schema, root))

    def _python_call(self, layout: Layout) -> Steps[None]:
        """Read f(a=1, b="x")."""
        self._begin((yield from self._read_name()))
        yield from self._expect("(")
        lead, at_end = "{", (yield from self._literal(")"))
        while not at_end:
            key = yield from self._read_name()
            yield from self._expect("=")
            _check(key)
            self._add(lead + quote(key) + ": ")
            yield from self._spaces()
            yield from self._stream(LiteralScan(python=True), part=True)
            end, lead = self._at, ", "
            yield from self._spaces()
            self._add(" " * (self._at > end))
            comma = yield from self._literal(",")
            at_end = yield from self._literal(")")
            _check(comma or at_end)
        self._add("{}" if lead == "{" else "}", last=True)

    # Parts of a call

    def _read_name(self) -> Steps[str]:
        """Read a word of a name's characters, perhaps an empty one."""
        yield from self._spaces()
        while True:
            end = _match_end(NAME, self._text, self._at)
            _check(end - self._at <= MAX_NAME)
            if end < len(self._text) or not (yield from self._more()):
                name, self._at = self._text[self._at : end], end
                return name

    def _piece(self, scan: LiteralScan) -> Steps[str]:
        """Read more of a value, as JSON."""
        while True:
            try:
                piece, end = scan.feed(self._text, self._at)
            except ValueError:
                raise MalformedCallError from None
            if end > self._at:
                self._at = end
                return piece
            if not (yield from self._more()):
                raise CutShortError

    def _value(self) -> Steps[str]:
        scan, pieces = LiteralScan(), list[str]()
        while not scan.done:
            pieces.append((yield from self._piece(scan)))
        return "".join(pieces)

    def _stream(self, scan: LiteralScan, *, part: bool = False) -> Steps[None]:
        """Read a value as it streams: all arguments, or a part of them."""
        while not scan.done:
            try:
                piece = yield from self._piece(scan)
            except CutShortError:
                # Half a number or an escape is left: it belongs to the arguments, not to the text.
                if self._is_sent and not part:
                    self._send(CallDelta(self._index, None, None, self._text[self._at :]))
                    self._at = len(self._text)
                    self._drop()
                raise
            self._add(piece, last=scan.done and not part)

    def _skip(self, *literals: str) -> Steps[None]:
        """Drop these literals, each if it is there, after a call; or half of one where the answer ends in it."""
        for literal in filter(None, literals):
            if (yield from self._literal(literal)):
                self._drop()
            elif self._is_last and self._after_marker and literal.startswith(self._text[self._at :].lstrip()):
                self._at = len(self._text)
                self._drop()

    def _begin(self, name: str, call_id: str = "") -> None:
        """Begin a call, whose arguments `_add` is to get."""
        _check(name and len(name) <= MAX_NAME and NAME.fullmatch(name))
        _check(not self._is_bare or self._tools is None or name in self._tools)
        self._is_sent = self._is_complete = False
        self._name, self._id, self._pieces = name, call_id, []

    def _add(self, piece: str, *, last: bool = False) -> None:
        """Add to the arguments' JSON; last: that is all of them."""
        self._pieces.append(piece)
        if not (last or self._eager):
            return
        # Held back they come as one piece, when they are complete.
        arguments, self._pieces = "".join(self._pieces), []
        if not self._is_sent:
            self._is_sent = True
            self._index += 1
            self._send(CallDelta(self._index, self._id or self._new_id(), self._name, arguments))
        elif arguments:
            self._send(CallDelta(self._index, None, None, arguments))
        self._drop()
        self._after_marker = self._is_complete = last
        self.num_calls += last and (self._max_calls is None or self._index < self._max_calls)

    def _send(self, delta: CallDelta) -> None:
        if self._max_calls is None or delta.index < self._max_calls:
            self._events.append(delta)


def _check(fits: object) -> None:
    """Raise MalformedCallError where something does not fit a call."""
    if not fits:
        raise MalformedCallError


def _overlap(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that begins one of the markers."""
    lengths = (n for marker in markers for n in range(1, len(marker)) if text.endswith(marker[:n]))
    return max(lengths, default=0)


def _safe_length(text: str) -> int:
    """Return how much can be shown: white space at the end may turn out to touch a marker."""
    return max(len(text.rstrip()), len(text) - MAX_SPACE)


def _match_end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at


def _unwrap(value: str) -> str:
    """Return arguments that are not streamed: an object, or null for none, or a string that holds an object's text."""
    if value == "null":
        return "{}"
    if value.startswith("{"):
        return value
    text = json.loads(value).strip() if value.startswith('"') else ""
    arguments = as_json(text) if text.startswith("{") and not SURROGATES.search(text) else None
    if arguments is None:
        raise MalformedCallError
    return arguments

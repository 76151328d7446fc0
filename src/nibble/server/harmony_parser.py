"""Answers in harmony, the format of gpt-oss, as they grow: messages on channels become reasoning, text and tool calls.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

The format: https://github.com/openai/harmony, docs/format.md. That package's StreamableParser raises where a header is
malformed and takes no stop strings into account, so answers are read here; tests hold them to be the same.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Iterator

from nibble.engine.tokenizer import MARK
from nibble.server.streaming import CallDelta, Event, Text, Thought, merge_events

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CONSTRAIN, RETURN, CALL = "<|constrain|>", "<|return|>", "<|call|>"
MARKERS = (START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL)
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
FUNCTIONS = "functions."
"""What the recipient of a call to one of the request's tools begins with."""
MAX_HEADER = 256
"""Characters after which a text that begins like a header is taken for none."""

SPLIT = re.compile(f"({MARK}(?:{'|'.join(map(re.escape, MARKERS))}))")
CHANNEL_NAME = re.compile(rf"{re.escape(CHANNEL)}\s*([A-Za-z_]*)")
RECIPIENT = re.compile(r"(?:^|\s)to=(\S*)")
ROLE = re.compile(r"\s*(?:assistant)?\s*")
CONTENT_TYPES = ("", "json", "code")


class HarmonyParser:
    """A place in one growing answer, and the events that came of it. Markers are told from text by MARK before them.

    Analysis is reasoning, and so are calls to tools that are not the request's; a message without a recipient on
    another channel is text, and one to `functions.NAME` is a call. What is malformed is text rather than lost.

    Args:
        channel: of the message that the answer goes on with, if it does.
        tools: the names of the request's tools; empty: there can be no calls.
        max_calls: calls beyond so many are dropped.
    """

    def __init__(
        self, *, channel: str | None = None, tools: Collection[str] = (), max_calls: int | None = None
    ) -> None:
        self.num_calls = 0
        """Complete calls so far: an answer with some finishes with reason `tool_calls`."""
        self._tools, self._max_calls = tools, max_calls
        self._pending = ""
        # A header is read until <|message|>; None within a message.
        self._header: str | None = "" if channel is None else None
        self._kind: type[Text | Thought] | None = Thought if channel == ANALYSIS else Text
        """Of the message that is read; None for a call."""
        self._index, self._has_arguments = -1, False
        # A second message of a kind begins on a line of its own.
        self._kinds: set[type[Text | Thought] | None] = set()
        self._is_new = False
        self._events: list[Event] = []

    def feed(self, text: str, *, last: bool = False) -> list[Event]:
        """Return what `text` adds to the answer; last: it is all."""
        for piece in self._pieces(text, last):
            if piece.startswith(MARK):
                self._mark(piece.removeprefix(MARK))
            elif self._header is not None:
                self._header += piece
                if len(self._header) > MAX_HEADER:
                    self._open(self._header)
            else:
                self._show(piece)
        if last:
            self._end()
        events, self._events = merge_events(self._events), []
        return events

    def _pieces(self, text: str, last: bool) -> Iterator[str]:
        """Yield markers and the texts between them; half a marker is held back."""
        *pieces, tail = SPLIT.split(self._pending + text)
        start = tail.rfind(MARK)
        half = tail[start + 1 :] if start >= 0 else ""
        is_half = start >= 0 and not last and any(marker.startswith(half) for marker in MARKERS)
        self._pending = tail[start:] if is_half else ""
        for piece in (*pieces, tail[:start] if is_half else tail):
            if piece:
                yield piece

    def _mark(self, marker: str) -> None:
        if marker in {START, END, RETURN, CALL}:
            self._end()
        elif marker == CHANNEL:
            # A message whose end was forgotten.
            if self._header is None:
                self._end()
            self._header = (self._header or "") + CHANNEL
        elif marker == CONSTRAIN and self._header is not None:
            self._header += " "
        elif marker == MESSAGE and self._header is not None:
            self._open(self._header)

    def _open(self, header: str) -> None:
        """Begin the message of a header. What a header cannot have in it is the message's beginning."""
        rest, self._header, self._is_new = header, None, True
        channel = CHANNEL_NAME.search(header)
        if channel:
            rest = ROLE.sub("", header[: channel.start()], count=1) + header[channel.end() :]
        recipient = RECIPIENT.search(rest)
        name = recipient[1] if recipient else ""
        rest = RECIPIENT.sub("", rest, count=1)
        self._kind = Thought if name or (channel and channel[1] == ANALYSIS) else Text
        if name.startswith(FUNCTIONS) or name in self._tools:
            self._begin_call(name.removeprefix(FUNCTIONS))
        text = rest if channel else ROLE.sub("", rest, count=1)
        if text.strip() not in CONTENT_TYPES:
            self._show(text.lstrip() if channel else text)

    def _begin_call(self, name: str) -> None:
        self._kind = None if self._tools else Text
        if self._tools:
            self._index, self._has_arguments = self._index + 1, False
            self._call(CallDelta(self._index, f"call_{secrets.token_hex(12)}", name, ""))

    def _show(self, text: str) -> None:
        if self._kind is None:
            self._has_arguments = True
            self._call(CallDelta(self._index, None, None, text))
        else:
            line = "\n" if self._is_new and self._kind in self._kinds else ""
            self._kinds.add(self._kind)
            self._events.append(self._kind(line + text))
        self._is_new = False

    def _call(self, piece: CallDelta) -> None:
        if self._max_calls is None or piece.index < self._max_calls:
            self._events.append(piece)

    def _end(self) -> None:
        """End the message; a header without one may have been text, but half of it begins no call."""
        header = self._header or ""
        if header and (not RECIPIENT.search(header) or "{" in header):
            self._open(header)
        if self._header is None and self._kind is None:
            if not self._has_arguments:
                self._call(CallDelta(self._index, None, None, "{}"))
            self.num_calls += self._max_calls is None or self._index < self._max_calls
            self._kind = Text
        self._header = ""

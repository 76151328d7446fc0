"""Events of an answer: reasoning, text and tool calls, and their shape in OpenAI's API."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any


@dataclass(frozen=True, slots=True)
class Text:
    """Text to show."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a call: its id and name come with the first piece."""

    index: int
    id: str | None
    name: str | None
    arguments: str
    """More of a JSON object's text."""

    def openai(self) -> dict[str, Any]:
        """Return an entry of a chunk's `tool_calls`."""
        if self.id is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


Event = Thought | Text | CallDelta


def merge_events(events: Iterable[Event]) -> list[Event]:
    """Return the events with neighbours of one kind, or of one call, as one."""
    merged: list[Event] = []
    for _, group in groupby(events, key=lambda event: (type(event), getattr(event, "index", 0))):
        first, *more = group
        if isinstance(first, CallDelta):
            pieces = (event.arguments for event in (first, *more) if isinstance(event, CallDelta))
            merged.append(replace(first, arguments="".join(pieces)))
        else:
            merged.append(replace(first, text=_text((first, *more), type(first))))
    return merged


def delta_of(events: Sequence[Event]) -> dict[str, Any]:
    """Return a chunk's delta in OpenAI's shape; an empty one where there is nothing to show."""
    # Merging needs the pieces of a call side by side; sorting is stable, so their order stays.
    pieces = sorted(_pieces(events), key=lambda piece: piece.index)
    calls = [call.openai() for call in _pieces(merge_events(pieces))]
    delta = {"reasoning_content": _text(events, Thought), "content": _text(events, Text), "tool_calls": calls}
    return {key: value for key, value in delta.items() if value}


def message_of(events: Sequence[Event]) -> dict[str, Any]:
    """Return the message of a complete answer in OpenAI's shape, from all its events."""
    message = {"role": "assistant", "content": "", "refusal": None, **delta_of(events)}
    if "tool_calls" in message:
        # OpenAI's message has null beside calls, and calls without an index.
        message["content"] = message["content"] or None
        for call in message["tool_calls"]:
            del call["index"]
    return message


def _text(events: Iterable[Event], kind: type[Thought | Text]) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


def _pieces(events: Iterable[Event]) -> list[CallDelta]:
    return [event for event in events if isinstance(event, CallDelta)]

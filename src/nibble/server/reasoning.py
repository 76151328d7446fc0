"""What a model thinks before it answers, apart from the answer: found as the text grows, however it is cut.

Owns ReasoningReader with the markers that models use (STYLES), and AnswerReader, which reads reasoning and then tool
calls. White space that touches a marker is dropped. Must not know of HTTP, requests or engines.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nibble.errors import ConfigError, unknown
from nibble.server.tool_reader import CallDelta, Event, Text, ToolReader, gathered, joined, overlap, shown


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Style:
    """How a model marks its reasoning. always: it stands first in every answer, even without its start."""

    name: str
    start: str = "<think>"
    end: str = "</think>"
    always: bool = False

    def inside(self, prompt: str) -> bool:
        """Whether an answer to this prompt (its end is enough) begins inside the reasoning."""
        tail = prompt.rstrip()
        return tail.endswith(self.start) or (self.always and not tail.endswith(self.end))


STYLES = {
    style.name: style
    for style in (
        Style("deepseek_r1", always=True),
        Style("deepseek_v31"),
        Style("qwen3"),
        Style("magistral", "[THINK]", "[/THINK]"),
    )
}


def style_of(name: str) -> Style:
    """A style by its name; raises ConfigError."""
    if name not in STYLES:
        raise ConfigError(unknown("reasoning parser", name, STYLES))
    return STYLES[name]


def guess(chat_template: str | None) -> str | None:
    """The style of a model with this template; None where it tells of no reasoning."""
    said = chat_template or ""
    if "[THINK]" in said:
        return "magistral"
    if "think>" not in said:
        return None
    if "<｜Assistant｜>" in said and "thinking" in said:
        return "deepseek_v31"
    return "deepseek_r1" if "<｜Assistant｜><think>" in said else "qwen3"


class ReasoningReader:
    """Reads one answer. inside: as Style.inside() says of the prompt. Reasoning stands first or nowhere; one that does
    not end is reasoning to the end of the answer."""

    def __init__(self, style: Style, *, inside: bool) -> None:
        self._style, self._inside = style, inside
        self._text, self._began, self._answers = "", False, False
        self._touching = True  # a marker, or the answer's beginning, stands right before

    def add(self, text: str) -> list[Thought | Text]:
        """What `text` adds to the answer."""
        self._text += text
        return self._read(ended=False)

    def finish(self) -> list[Thought | Text]:
        """What was held back."""
        return self._read(ended=True)

    def _read(self, ended: bool) -> list[Thought | Text]:
        if not self._began and not self._begin(ended):
            return []
        thoughts: list[Thought | Text] = [] if self._answers else self._think(ended)
        return thoughts + self._answer() if self._answers else thoughts

    def _begin(self, ended: bool) -> bool:
        """Passes the start marker; whether it is known by now if there is one."""
        there, start = self._text.lstrip(), self._style.start
        if start.startswith(there) and there != start and not ended:
            return False
        self._began = True
        if there.startswith(start):
            self._text = there.removeprefix(start)
        elif not self._inside:
            self._answers, self._touching = True, False
        return True

    def _think(self, ended: bool) -> list[Thought | Text]:
        end = self._style.end
        thought, marker, rest = self._text.partition(end)
        if marker:
            said, self._text, self._answers = thought[: shown(thought)], rest, True
        elif ended:
            said, self._text = self._text, ""
        else:
            cut = shown(self._text[: len(self._text) - overlap(self._text, end)])
            said, self._text = self._text[:cut], self._text[cut:]
        said = self._stripped(said)
        self._touching = self._touching or self._answers
        return [Thought(said)] if said else []

    def _answer(self) -> list[Thought | Text]:
        said, self._text = self._stripped(self._text), ""
        return [Text(said)] if said else []

    def _stripped(self, text: str) -> str:
        said = text.lstrip() if self._touching else text
        self._touching = self._touching and not said
        return said


class AnswerReader:
    """Reads an answer's reasoning, then its text and tool calls; either reader may be None."""

    def __init__(self, reasoning: ReasoningReader | None, tools: ToolReader | None) -> None:
        self._reasoning, self._tools = reasoning, tools

    @property
    def called(self) -> bool:
        """Whether the answer has a complete call, so that it finishes with reason `tool_calls`."""
        return self._tools is not None and self._tools.complete > 0

    def add(self, text: str, *, last: bool = False) -> list[Thought | Event]:
        """What `text` adds to the answer; last: it is all."""
        found: list[Thought | Text] = [Text(text)] if text else []
        if self._reasoning:
            found = self._reasoning.add(text) + (self._reasoning.finish() if last else [])
        if self._tools is None:
            return list(found)
        out: list[Thought | Event] = []
        for event in found:
            out += self._tools.add(event.text) if isinstance(event, Text) else [event]
        if last:
            out += self._tools.finish()
        return out


def delta_of(events: Iterable[Thought | Event]) -> dict[str, Any]:
    """A chunk's delta in OpenAI's shape; empty where there is nothing to say."""
    events = list(events)
    thought = "".join(event.text for event in events if isinstance(event, Thought))
    text = "".join(event.text for event in events if isinstance(event, Text))
    pieces = joined(event for event in events if isinstance(event, CallDelta))
    calls = [event.openai() for event in pieces if isinstance(event, CallDelta)]
    said = {"reasoning_content": thought, "content": text, "tool_calls": calls}
    return {key: value for key, value in said.items() if value}


def message_of(events: Iterable[Thought | Event]) -> dict[str, Any]:
    """The message of a whole answer in OpenAI's shape, from all its events."""
    events = list(events)
    text, calls = gathered(event for event in events if not isinstance(event, Thought))
    message: dict[str, Any] = {
        "role": "assistant",
        "content": text or None if calls else text,
        "refusal": None,
    }
    thought = "".join(event.text for event in events if isinstance(event, Thought))
    return (
        message
        | ({"reasoning_content": thought} if thought else {})
        | ({"tool_calls": calls} if calls else {})
    )

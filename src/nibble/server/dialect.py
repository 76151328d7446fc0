"""How a model writes what is not plain text: reasoning, tool calls, and answers that a grammar holds to a form.

Owns Dialect, which knows a model's formats by its chat template or by name, and AnswerFormat, which says for one
conversation which special tokens are text, what grammar the answer follows, and what reads it. Must not know of HTTP or
engines.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from nibble.config import SamplingParams
from nibble.errors import RequestError
from nibble.server import reasoning, tools
from nibble.server.reasoning import AnswerReader, ReasoningReader, Style
from nibble.server.tool_grammar import Marks, Signature, calls, mixed, until, words
from nibble.server.tool_reader import Parser, ToolReader
from nibble.server.tool_types import Tool, ToolFields

AUTO, NONE = "auto", "none"
LOOKED_AT = 16
"""Tokens at the end of a conversation in which reasoning may have been begun."""


class Tokens(Protocol):
    """What is asked of a tokenizer here."""

    def decode(self, ids: Sequence[int], shown: frozenset[int] | None = ...) -> str: ...
    def token_of(self, word: str) -> int | None: ...
    @property
    def chat_template(self) -> str | None: ...


class Dialect:
    """A model's. tool_format, reasoning_format: names, `auto` (by the chat template) or `none`. Raises ConfigError."""

    def __init__(self, tokens: Tokens | None, tool_format: str, reasoning_format: str) -> None:
        self._tokens = tokens
        template = tokens.chat_template if tokens else None
        parser = (tools.guess(template) or NONE) if tool_format == AUTO else tool_format
        style = (reasoning.guess(template) or NONE) if reasoning_format == AUTO else reasoning_format
        self.parser = None if parser == NONE else tools.parser_of(parser)
        self.style = None if style == NONE else reasoning.style_of(style)

    def answer_format(self, asked: ToolFields, prompt: Sequence[int]) -> AnswerFormat:
        """What holds for the answers to one conversation. Raises RequestError where there are tools that the model has
        no format for, and may call or not."""
        offered, forced = asked.open_tools(), asked.forced_tools()
        parser = self.parser if offered else None
        if offered and parser is None:
            if not forced:
                raise RequestError(
                    "no format of tool calls is known for this model: start with --tool-format, or say tool_choice"
                    " 'required'"
                )
            parser = tools.PLAIN
        assert self._tokens
        ending = self._tokens.decode(list(prompt[-LOOKED_AT:]), None)
        inside = self.style is not None and self.style.inside(ending)
        marked = (
            *(parser.tokens if parser else ()),
            *((self.style.start, self.style.end) if self.style else ()),
        )
        marks = {word: token for word in marked if (token := self._tokens.token_of(word)) is not None}
        return AnswerFormat(parser, self.style, inside, marks, offered, forced, asked.most_calls())


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How the answers to one conversation are written. parser: of tool calls, where there may be some. inside: the
    answer begins inside the reasoning. marks: words that are one token. offered, forced: tools that may be called, of
    which one must be."""

    parser: Parser | None
    style: Style | None
    inside: bool
    marks: Marks
    offered: Sequence[Tool]
    forced: Sequence[Tool]
    most: int | None

    def params(self, params: SamplingParams) -> SamplingParams:
        """How to sample: with the marks as text, and a grammar where calls must come, or must be well formed."""
        shown = tuple(sorted({*params.shown_tokens, *self.marks.values()}))
        return replace(params, shown_tokens=shown, grammar=self._grammar(params.grammar))

    def reader(self, eager: bool) -> Callable[[], AnswerReader]:
        """Makes readers of answers. eager: arguments of calls come as they grow."""
        schemas = {tool.function.name: tool.function.parameters for tool in self.offered}

        def made() -> AnswerReader:
            thoughts = ReasoningReader(self.style, inside=self.inside) if self.style else None
            calls = (
                ToolReader(self.parser, eager=eager, tools=schemas, most=self.most) if self.parser else None
            )
            return AnswerReader(thoughts, calls)

        return made

    def _grammar(self, body: str | None) -> str | None:
        """What the whole answer follows. body: what is asked of its text."""
        rules, start = self._rules(body)
        if not start:
            return None
        parts = {"body": body} if "@body" in start else {}
        if self.style:
            rules += until("thought", self.style.end, self.marks)
            rules.append(r"gap: /[ \n]{0,3}/")
            opened = words(self.style.start, self.marks)
            lead = f"({opened})? thought gap" if self.inside else f"({opened} thought gap)?"
            start = f"{lead} ({start})"
        elif start == "@body":
            return body
        lark = "\n".join([f"start: {start}", *rules])
        return "composed:" + json.dumps({"lark": lark, "parts": parts}) if parts else f"lark:{lark}"

    def _rules(self, body: str | None) -> tuple[list[str], str]:
        """(rules, what the answer is after its reasoning)."""
        if self.parser and self.forced:
            return calls(self.parser, _signatures(self.forced), self.most, self.marks), "calls"
        if self.parser and body:
            return calls(self.parser, _signatures(self.offered), self.most, self.marks), "calls | @body"
        if self.parser and any(tool.function.strict for tool in self.offered):
            return mixed(self.parser, _signatures(self.offered), self.most, self.marks), "mixed"
        return [], "@body" if body else ""


def _signatures(tools: Sequence[Tool]) -> list[Signature]:
    found = [tool.function for tool in tools]
    return [Signature(one.name, one.parameters or {}, bool(one.strict)) for one in found]

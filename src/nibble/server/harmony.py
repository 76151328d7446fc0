"""gpt-oss's format as the server's conversations use it: how prompts are made, answers read, and forms asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from nibble.config import SamplingParams
from nibble.engine.tokenizer import Tokenizer
from nibble.errors import ConfigError, RequestError
from nibble.server.chat_grammar import TEXT, Marks, lark_text, text_until
from nibble.server.harmony_parser import (
    ANALYSIS,
    CALL,
    CHANNEL,
    COMMENTARY,
    CONSTRAIN,
    END,
    FINAL,
    FUNCTIONS,
    MARKERS,
    MESSAGE,
    RETURN,
    START,
    HarmonyParser,
)
from nibble.server.harmony_prompt import HarmonyPrompt, load_encoding
from nibble.server.logging import log_event
from nibble.server.protocol import Tool, ToolFields
from nibble.server.streaming import Parser

HARMONY = "harmony"
"""Its name, as a tool format and as a reasoning parser."""
AUTO = "auto"


@dataclass(frozen=True)
class Harmony:
    """What a model with this format needs."""

    marks: Marks
    """Its special tokens by their texts."""
    encode: Callable[..., list[int]] | None
    """HarmonyPrompt.encode; None: the chat template makes prompts, as the tokenizer has another vocabulary."""

    @classmethod
    def find(cls, tokens: Tokenizer, names: Collection[str]) -> Harmony | None:
        """Return the format where it is named, or where `auto` finds it in the chat template.

        Args:
            tokens: the model's tokenizer.
            names: the tool format and the reasoning parser; one of them is enough, as both are in the channels.

        Raises:
            ConfigError: it is named, and the tokenizer lacks its tokens; or its package is missing.
        """
        marks = {mark: token for mark in MARKERS if (token := tokens.token_of(mark)) is not None}
        if HARMONY in names and len(marks) < len(MARKERS):
            missing = ", ".join(mark for mark in MARKERS if mark not in marks)
            raise ConfigError(f"the model's tokenizer has not the special tokens of harmony: {missing}")
        is_found = (
            AUTO in names and len(marks) == len(MARKERS) and CHANNEL in (tokens.chat_template or CHANNEL)
        )
        if not (HARMONY in names or is_found):
            return None
        encoding = load_encoding(tokens)
        log_event("harmony", prompts="openai-harmony" if encoding else "the chat template")
        return cls(marks, HarmonyPrompt(encoding).encode if encoding else None)

    def answers(self, request: ToolFields, continued: str | None) -> HarmonyAnswers:
        """Return what holds for the answers to one conversation.

        Args:
            request: the tools, and which must be called.
            continued: the text of the message that answers go on with, if they do; "" is one of reasoning alone.
        """
        channel = None if continued is None else FINAL if continued else ANALYSIS
        tools, required = request.callable_tools(), request.required_tools()
        if required and channel:
            raise RequestError(
                "an answer that goes on with a message cannot be held to a call: leave tool_choice out"
            )
        return HarmonyAnswers(self.marks, channel, tools, required, request.max_calls())


@dataclass(frozen=True, slots=True)
class HarmonyAnswers:
    """How the answers to one conversation are written; see AnswerFormat."""

    marks: Marks
    channel: str | None
    """Of the message that an answer goes on with, if it does."""
    tools: Sequence[Tool]
    """What may be called."""
    required_tools: Sequence[Tool]
    """What must be called: one of these, if there are some."""
    max_calls: int | None

    def params(self, params: SamplingParams) -> SamplingParams:
        """Return how to sample: with marks in the text, ended by those that end a turn, and by a grammar, if any."""
        ends = () if params.ignore_eos else (self.marks[RETURN], self.marks[CALL])
        return replace(
            params,
            skip_special_tokens=True,
            shown_tokens=tuple(sorted(self.marks.values())),
            mark_tokens=True,
            stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *ends))),
            grammar=self._grammar(params.grammar),
        )

    def parsers(self, eager: bool) -> Callable[[], Parser]:
        """Return a function that makes parsers of answers; arguments of calls come as they grow, eager or not."""
        names = [tool.function.name for tool in self.tools]
        return partial(HarmonyParser, channel=self.channel, tools=names, max_calls=self.max_calls)

    def _grammar(self, body: str | None) -> str | None:
        """Return what the answer follows; body: what its final message must follow. Reasoning is free."""
        is_strict = any(tool.function.strict for tool in self.tools)
        if not (self.required_tools or body or is_strict):
            return None
        end = "@body" if body else TEXT
        if self.channel:
            thought = "thought next final" if self.channel == ANALYSIS else end
            return self._compose([f"start: {thought}", *self._thought(), self._final(end)], body)
        tools = self.required_tools or self.tools
        answers = [] if self.required_tools else ["final"]
        answers += ["call"] if tools else []
        lead = self._text(CHANNEL + ANALYSIS + MESSAGE)
        rules = [f"start: ({lead} thought next)* ({' | '.join(answers)})", *self._thought(), self._final(end)]
        return self._compose([*rules, *self._calls(tools)], body)

    def _compose(self, rules: Sequence[str], body: str | None) -> str:
        lark = "\n".join(rules)
        if not body or "@body" not in lark:
            return f"lark:{lark}"
        return "composed:" + json.dumps({"lark": lark, "parts": {"body": body}})

    def _text(self, text: str) -> str:
        return lark_text(text, self.marks)

    def _thought(self) -> list[str]:
        return [text_until("thought", END, self.marks), f"next: {self._text(f'{START}assistant')}"]

    def _final(self, end: str) -> str:
        constrain = self._text(f" {CONSTRAIN}json")
        return f"final: {self._text(CHANNEL + FINAL)} ({constrain})? {self._text(MESSAGE)} {end}"

    def _calls(self, tools: Sequence[Tool]) -> list[str]:
        """Return rule `call`, with the recipient before the channel or after it."""
        rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))] if tools else []
        constrain = f'({self._text(f" {CONSTRAIN}json")} | " json")'
        for i, tool in enumerate(tools):
            recipient = f" to={FUNCTIONS}{tool.function.name}"
            headers = (CHANNEL + COMMENTARY + recipient, recipient + CHANNEL + COMMENTARY)
            header = " | ".join(map(self._text, headers))
            schema = json.dumps(tool.function.argument_schema())
            rules.append(f"call_{i}: ({header}) {constrain}? {self._text(MESSAGE)} %json {schema}")
        return rules

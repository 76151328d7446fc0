"""Answers in OpenAI's shape: from pieces of the engine to choices, chunks, usage and log-probabilities."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar

from nibble.engine.request import Delta, Logprob
from nibble.server.chat_parser import AnswerParser
from nibble.server.streaming import Event, delta_of, message_of

Choice = dict[str, Any]


@dataclass
class Writer(ABC):
    """One request's answers, which are numbered prompt by prompt."""

    model: str
    decode: Callable[[Sequence[int]], str]
    """Returns the text of tokens."""
    prompt_tokens: int
    """Of all prompts."""
    logprobs: bool = False
    """Report log-probabilities."""
    collect: bool = True
    """For body(), where no chunks are sent."""
    cached: int = field(default=0, init=False)
    """Prompt tokens from the prefix cache."""
    completion_tokens: int = field(default=0, init=False)
    _choices: defaultdict[int, list[Choice]] = field(default_factory=lambda: defaultdict(list), init=False)
    """Those of chunks, by answer."""

    prefix: ClassVar[str]
    """Of the answer's id."""
    body_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __post_init__(self) -> None:
        self.id, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())

    def take(self, index: int, delta: Delta) -> Choice | None:
        """Add a piece to an answer, and return the choice of a chunk; None where there is nothing to show yet."""
        self.completion_tokens += len(delta.token_ids)
        choice = self._choice(index, delta)
        if choice and self.collect:
            self._choices[index].append(choice)
        return choice

    def chunk_fields(self) -> dict[str, Any]:
        """Return the fields of all chunks."""
        return self._common(self.chunk_object)

    def usage_chunk(self) -> dict[str, Any]:
        """Return the chunk with usage."""
        return self.chunk_fields() | {"choices": [], "usage": self.usage()}

    def body(self) -> dict[str, Any]:
        """Return all answers at once."""
        choices = [self._join(index, choices) for index, choices in sorted(self._choices.items())]
        return self._common(self.body_object) | {"choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Return the tokens used so far."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

    def _common(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    @abstractmethod
    def _choice(self, index: int, delta: Delta) -> Choice | None: ...

    @abstractmethod
    def _join(self, index: int, choices: Sequence[Choice]) -> Choice:
        """Return an answer from the choices of its chunks."""


@dataclass
class TextWriter(Writer):
    """Answers of /v1/completions."""

    echoes: Sequence[str] = ()
    """By answer, the text before it; none without echo."""
    _offsets: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int), init=False)

    prefix, body_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._echoes = dict(enumerate(self.echoes))

    def _choice(self, index: int, delta: Delta) -> Choice:
        text = self._echoes.pop(index, "") + delta.text
        logprobs = self._logprob_lists(index, delta.logprobs) if self.logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": delta.finish_reason}

    def _join(self, index: int, choices: Sequence[Choice]) -> Choice:
        text, last = "".join(choice["text"] for choice in choices), choices[-1]
        logprobs = last["logprobs"] and {
            key: list(chain.from_iterable(choice["logprobs"][key] for choice in choices))
            for key in last["logprobs"]
        }
        return {**last, "text": text, "logprobs": logprobs}

    def _logprob_lists(self, index: int, logprobs: Sequence[Logprob]) -> dict[str, list[Any]]:
        texts = [self.decode([entry.token]) for entry in logprobs]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob for entry in logprobs],
            # The sampled token is always one of them.
            "top_logprobs": [
                {self.decode([token]): value for token, value in entry.top} | {text: entry.logprob}
                for text, entry in zip(texts, logprobs, strict=True)
            ],
            "text_offset": offsets,
        }


@dataclass
class ChatWriter(Writer):
    """Answers of /v1/chat/completions."""

    new_parser: Callable[[], AnswerParser] = AnswerParser
    """Returns a parser of one answer's text, for reasoning and tool calls."""
    _parsers: dict[int, AnswerParser] = field(default_factory=dict, init=False)
    _events: defaultdict[int, list[Event]] = field(default_factory=lambda: defaultdict(list), init=False)

    prefix, body_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _choice(self, index: int, delta: Delta) -> Choice | None:
        first, reason = index not in self._parsers, delta.finish_reason
        # A marker, or a half of one, may stand in several deltas, so each answer has a parser of its own.
        parser = self._parsers[index] = self.new_parser() if first else self._parsers[index]
        events = parser.feed(delta.text, last=reason is not None)
        if self.collect:
            self._events[index] += events
        chat_delta = delta_of(events)
        if first:
            chat_delta = {"role": "assistant", "content": "", **chat_delta}
        # The parser holds back text that may be a marker.
        if not (chat_delta or reason or delta.logprobs):
            return None
        logprobs = {"content": [self._entry(entry) for entry in delta.logprobs]} if self.logprobs else None
        finish_reason = "tool_calls" if reason == "stop" and parser.num_calls else reason
        return {"index": index, "delta": chat_delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _join(self, index: int, choices: Sequence[Choice]) -> Choice:
        logprobs = None
        if self.logprobs:
            entries = chain.from_iterable(choice["logprobs"]["content"] for choice in choices)
            logprobs = {"content": list(entries), "refusal": None}
        message, reason = message_of(self._events[index]), choices[-1]["finish_reason"]
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _entry(self, entry: Logprob) -> dict[str, Any]:
        token = self._token(entry.token, entry.logprob)
        return {**token, "top_logprobs": [self._token(token, value) for token, value in entry.top]}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

"""Answers in the shape of an API: from pieces of the engine to chunks of a stream, or to one body, with usage.

An answer is the same to every API: its parser makes events of it, which are reasoning, text and pieces of calls
(streaming.py). A writer gives them their shape. Here are those of /v1/completions and /v1/chat/completions, and what
those of /v1/responses and /v1/messages have in common.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar

from nibble.engine.request import Delta, FinishReason, Logprob, PromptLogprobs
from nibble.server.chat_parser import AnswerParser
from nibble.server.middleware import response_of
from nibble.server.protocol import StreamOptions
from nibble.server.streaming import (
    CallDelta,
    Event,
    Events,
    Parser,
    Thought,
    delta_of,
    encode_event,
    message_of,
)

Chunk = dict[str, Any]
"""What a stream sends at a time: a choice of OpenAI's completions, or an event."""
Choice = Chunk
LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have; vLLM's number."""
DONE = b"data: [DONE]\n\n"


@dataclass
class Writer(ABC):
    """One request's answers, which are numbered prompt by prompt.

    Of a stream, `start()` is called when the first piece has been taken, `encode()` for each list of chunks, then
    `finish()`, or `fail()` where it breaks off.
    """

    model: str
    prompt_tokens: int
    """Of all prompts."""
    cached: int = field(default=0, init=False)
    """Prompt tokens from the prefix cache."""
    completion_tokens: int = field(default=0, init=False)
    accepted_drafts: int = field(default=0, init=False)
    """Draft tokens that were accepted, and below those that were not."""
    rejected_drafts: int = field(default=0, init=False)

    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict, init=False)
    """By prompt, where they were asked for."""

    prefix: ClassVar[str]
    """Of the answer's id."""

    def __post_init__(self) -> None:
        self.id, self.created = f"{self.prefix}{uuid.uuid4().hex}", int(time.time())

    def take(self, index: int, delta: Delta) -> list[Chunk]:
        """Add a piece to an answer, and return what a stream sends of it."""
        self.completion_tokens += len(delta.token_ids)
        self.accepted_drafts += delta.accepted_drafts
        self.rejected_drafts += delta.rejected_drafts
        return self._take(index, delta)

    @abstractmethod
    def _take(self, index: int, delta: Delta) -> list[Chunk]: ...

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """Return all answers at once."""

    def start(self) -> bytes:
        """Return what a stream begins with."""
        return b""

    @abstractmethod
    def encode(self, chunks: Sequence[Chunk]) -> bytes:
        """Return chunks as server-sent events, to be sent together."""

    @abstractmethod
    def finish(self) -> bytes:
        """Return what a stream ends with."""

    @abstractmethod
    def fail(self, error: Exception) -> bytes:
        """Return what a stream ends with that breaks off."""


@dataclass
class ChoiceWriter(Writer):
    """Answers as choices of OpenAI's completions."""

    decode: Callable[[Sequence[int]], str]
    """Returns the text of tokens."""
    logprobs: bool = False
    """Report log-probabilities."""
    collect: bool = True
    """For body(), where no chunks are sent."""
    stream_options: StreamOptions | None = None
    top_prompt_logprobs: int | None = field(default=None, kw_only=True)
    """For body(): report vLLM's prompt_logprobs, with so many of the likeliest tokens."""
    answers: int = field(default=1, kw_only=True)
    """To each prompt."""
    _choices: defaultdict[int, list[Choice]] = field(default_factory=lambda: defaultdict(list), init=False)
    """Those of chunks, by answer."""
    _texts: dict[int, str] = field(default_factory=dict, init=False)
    """By token."""

    body_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def _take(self, index: int, delta: Delta) -> list[Choice]:
        # They come with the first answer to a prompt, which the others wait for.
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs[index // self.answers] = delta.prompt_logprobs
        choice = self._choice(index, delta)
        if choice and self.collect:
            self._choices[index].append(choice)
        # There may be nothing to show yet.
        return [choice] if choice else []

    def start(self) -> bytes:
        """Note what all chunks have in common."""
        options = self.stream_options or StreamOptions()
        usage = self.usage if options.continuous_usage_stats else None
        null_usage = {"usage": None} if options.include_usage and not usage else {}
        self._encoder = Events(self._common(self.chunk_object) | null_usage, usage)
        return b""

    def encode(self, chunks: Sequence[Choice]) -> bytes:
        """Return a chunk for each choice."""
        return self._encoder.encode(chunks)

    def finish(self) -> bytes:
        """Return the chunk with usage, if it is requested, and OpenAI's last line."""
        if self.stream_options is None or not self.stream_options.include_usage:
            return DONE
        return encode_event(self._common(self.chunk_object) | {"choices": [], "usage": self.usage()}) + DONE

    def fail(self, error: Exception) -> bytes:
        """Return the error, and OpenAI's last line."""
        return b"data: " + bytes(response_of(error).body) + b"\n\n" + DONE

    def body(self) -> dict[str, Any]:
        """Return all answers at once."""
        choices = [self._join(index, choices) for index, choices in sorted(self._choices.items())]
        return self._common(self.body_object) | {"choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Return the tokens used so far."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
        if self.accepted_drafts + self.rejected_drafts:
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": self.accepted_drafts,
                "rejected_prediction_tokens": self.rejected_drafts,
            }
        return usage

    def _common(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self.decode([token])
        return self._texts[token]

    def _prompt_logprobs(self, entries: PromptLogprobs) -> list[dict[str, Any] | None]:
        """Return log-probabilities of a prompt in vLLM's shape: by token id, the prompt's own token first."""
        return [None if entry is None else self._alternatives(entry) for entry in entries]

    def _alternatives(self, entry: Logprob) -> dict[str, Any]:
        ranked = [(entry.rank, entry.token, entry.logprob)]
        for rank, (token, value) in enumerate(entry.top[: self.top_prompt_logprobs], 1):
            if token != entry.token:
                ranked.append((rank, token, value))
        return {
            str(token): {"logprob": finite(value), "rank": rank, "decoded_token": self._text(token)}
            for rank, token, value in ranked
        }

    @abstractmethod
    def _choice(self, index: int, delta: Delta) -> Choice | None: ...

    @abstractmethod
    def _join(self, index: int, choices: Sequence[Choice]) -> Choice:
        """Return an answer from the choices of its chunks."""


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can have."""
    return max(logprob, LEAST_LOGPROB)


@dataclass(frozen=True)
class Echo:
    """A prompt that is sent back before each of its answers."""

    text: str
    token_ids: Sequence[int] = ()
    offsets: Sequence[int] = ()
    """Where each token begins in the text."""
    top: int = 0
    """How many of the likeliest tokens are reported."""


def text_offsets(text: str, pieces: Iterable[str], special: Iterable[str]) -> Iterator[int]:
    """Yield where each token begins in a text. One that is not part of it, as a first <s>, takes no place.

    Args:
        text: of all tokens.
        pieces: what each token adds to it; nothing for special tokens.
        special: by token, its text where it adds nothing.
    """
    at = 0
    for piece, mark in zip(pieces, special, strict=True):
        yield at
        at += len(piece) or (len(mark) if text.startswith(mark, at) else 0)


@dataclass
class TextWriter(ChoiceWriter):
    """Answers of /v1/completions."""

    echoes: Sequence[Echo] = ()
    """By prompt; none without echo."""
    _offsets: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int), init=False)

    prefix, body_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._echoes = {i: self.echoes[i // self.answers] for i in range(len(self.echoes) * self.answers)}

    def _choice(self, index: int, delta: Delta) -> Choice:
        echo, lists = self._echoes.pop(index, None), []
        if self.logprobs and echo:
            lists.append(self._echo_lists(index, echo))
        if self.logprobs:
            lists.append(self._logprob_lists(index, delta.logprobs))
        text, logprobs = (echo.text if echo else "") + delta.text, _concatenate(lists)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": delta.finish_reason}

    def _join(self, index: int, choices: Sequence[Choice]) -> Choice:
        text, last = "".join(choice["text"] for choice in choices), choices[-1]
        if self.top_prompt_logprobs is not None:
            entries = self.prompt_logprobs[index // self.answers]
            last = {**last, "prompt_logprobs": self._prompt_logprobs(entries)}
        lists = [choice["logprobs"] for choice in choices] if self.logprobs else []
        return {**last, "text": text, "logprobs": _concatenate(lists)}

    def _echo_lists(self, index: int, echo: Echo) -> LogprobLists:
        entries = self.prompt_logprobs[index // self.answers]
        self._offsets[index] = len(echo.text)
        return {
            "tokens": list(map(self._text, echo.token_ids)),
            "token_logprobs": [entry and finite(entry.logprob) for entry in entries],
            "top_logprobs": [entry and self._top(entry, echo.top) for entry in entries],
            "text_offset": list(echo.offsets),
        }

    def _logprob_lists(self, index: int, logprobs: Sequence[Logprob]) -> LogprobLists:
        texts = [self._text(entry.token) for entry in logprobs]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [finite(entry.logprob) for entry in logprobs],
            "top_logprobs": [self._top(entry, len(entry.top)) for entry in logprobs],
            "text_offset": offsets,
        }

    def _top(self, entry: Logprob, count: int) -> dict[str, float]:
        """Return the likeliest tokens by their texts, and the token itself, which is always one of them."""
        top: dict[str, float] = {}
        for token, value in (*entry.top[:count], (entry.token, entry.logprob)):
            # Several tokens may have one text, as parts of a character do: the likeliest stands for them.
            top.setdefault(self._text(token), finite(value))
        return top


LogprobLists = dict[str, list[Any]]
"""OpenAI's lists of completions, by name, one entry for each token."""


def _concatenate(lists: Sequence[LogprobLists]) -> LogprobLists | None:
    """Return the lists one after the other; None for none."""
    return (
        {key: list(chain.from_iterable(part[key] for part in lists)) for key in lists[0]} if lists else None
    )


@dataclass
class ChatWriter(ChoiceWriter):
    """Answers of /v1/chat/completions."""

    new_parser: Callable[[], Parser] = AnswerParser
    """Returns a parser of one answer's text, for reasoning and tool calls."""
    _parsers: dict[int, Parser] = field(default_factory=dict, init=False)
    _events: defaultdict[int, list[Event]] = field(default_factory=lambda: defaultdict(list), init=False)

    prefix, body_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

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

    def body(self) -> dict[str, Any]:
        """Return all answers at once, and vLLM's prompt_logprobs beside them."""
        if self.top_prompt_logprobs is None:
            return super().body()
        return super().body() | {"prompt_logprobs": self._prompt_logprobs(self.prompt_logprobs[0])}

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
        text = self._text(token)
        return {"token": text, "logprob": finite(logprob), "bytes": list(text.encode())}


@dataclass
class Item:
    """A part of an answer that belongs together: reasoning, a text, or a call."""

    index: int
    """Its place in the answer."""
    first: Event
    """What it began with; of a call, its id and name."""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of its text; of a call, its arguments."""
        return "".join(self.pieces)

    def holds(self, event: Event) -> bool:
        """Return whether an event goes on with this item."""
        if isinstance(event, CallDelta):
            return isinstance(self.first, CallDelta) and self.first.index == event.index
        return type(event) is type(self.first)


@dataclass
class ItemWriter(Writer):
    """One answer as a list of items, each of which begins, grows and ends."""

    parser: Parser
    """Of the answer's text."""
    num_tokens: Callable[[str], int]
    """Returns the tokens of a text."""
    items: list[Item] = field(default_factory=list, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    stop_string: str | None = field(default=None, init=False)

    def _take(self, index: int, delta: Delta) -> list[Chunk]:
        events: list[Chunk] = []
        is_last = delta.finish_reason is not None
        for event in self.parser.feed(delta.text, last=is_last):
            events += self._add(event)
        if is_last:
            self.finish_reason, self.stop_string = delta.finish_reason, delta.stop_string
            events += self._end_item()
        return events

    def _add(self, event: Event) -> list[Chunk]:
        text = event.arguments if isinstance(event, CallDelta) else event.text
        events: list[Chunk] = []
        if not self.items or not self.items[-1].holds(event):
            events += self._end_item()
            self.items.append(Item(len(self.items), event))
            events += self._begin(self.items[-1])
        self.items[-1].pieces.append(text)
        return events + (self._grow(self.items[-1], text) if text else [])

    def _end_item(self) -> list[Chunk]:
        return self._end(self.items[-1]) if self.items else []

    def encode(self, chunks: Sequence[Chunk]) -> bytes:
        """Return server-sent events, each named by its type."""
        return b"".join(encode_event(chunk, chunk["type"]) for chunk in chunks)

    def reasoning_tokens(self) -> int:
        """Return how many tokens the reasoning has."""
        texts = [item.text for item in self.items if isinstance(item.first, Thought)]
        # What is counted is the text: marks around it are no part of it, and it may be cut otherwise.
        return min(sum(map(self.num_tokens, texts)), self.completion_tokens)

    @abstractmethod
    def _begin(self, item: Item) -> list[Chunk]: ...

    @abstractmethod
    def _grow(self, item: Item, text: str) -> list[Chunk]: ...

    @abstractmethod
    def _end(self, item: Item) -> list[Chunk]: ...

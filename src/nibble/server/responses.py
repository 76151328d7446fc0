"""Answers in OpenAI's shape: from pieces of the engine to choices, chunks, usage and log-probabilities.

Owns Writer and its two kinds. Must not know of HTTP or of engines.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from nibble.engine.outputs import Delta, Logprob
from nibble.server.chat_events import delta_of, message_of
from nibble.server.chat_parser import AnswerParser

Decode = Callable[[Sequence[int]], str]


class Writer(ABC):
    """One request's answers. prompts: tokens of its prompts; answers are numbered prompt by prompt. kept: for body(),
    where no chunks are sent."""

    prefix: str
    whole: str
    chunk: str

    def __init__(self, model: str, decode: Decode, prompts: Sequence[int], kept: bool) -> None:
        self.id, self.model, self.created = f"{self.prefix}-{uuid.uuid4().hex}", model, int(time.time())
        self.decode, self._kept = decode, kept
        self.prompt_tokens, self.cached = sum(prompts), 0
        self.completion_tokens = 0
        self._choices: dict[int, dict[str, Any]] = {}

    def take(self, index: int, delta: Delta) -> dict[str, Any] | None:
        """Adds a piece to answer `index` -> the choice of a chunk; None where there is nothing to show yet."""
        self.completion_tokens += len(delta.token_ids)
        return self._added(index, delta, delta.finish_reason)

    def about(self) -> dict[str, Any]:
        """What every chunk says beside its choices."""
        return self._about(self.chunk)

    def last(self) -> dict[str, Any]:
        """The chunk with usage."""
        return self.about() | {"choices": [], "usage": self.usage()}

    def body(self) -> dict[str, Any]:
        """All answers at once."""
        choices = [self._choices[index] for index in sorted(self._choices)]
        return self._about(self.whole) | {"choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

    def _about(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    @abstractmethod
    def _added(self, index: int, delta: Delta, reason: str | None) -> dict[str, Any] | None: ...


class TextWriter(Writer):
    """Of /v1/completions. echoes: by answer, what stands before it."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        model: str,
        decode: Decode,
        prompts: Sequence[int],
        echoes: Sequence[str],
        logprobs: bool,
        kept: bool = True,
    ) -> None:
        super().__init__(model, decode, prompts, kept)
        self._echoes, self._logprobs = dict(enumerate(echoes)), logprobs
        self._offsets: dict[int, int] = {}

    def _added(self, index: int, delta: Delta, reason: str | None) -> dict[str, Any]:
        text = self._echoes.pop(index, "") + delta.text
        found = self._listed(index, delta.logprobs) if self._logprobs else None
        choice = {"index": index, "text": text, "logprobs": found, "finish_reason": reason}
        there = self._choices.get(index)
        if not self._kept:
            return choice
        if there is None:
            self._choices[index] = {**choice, "logprobs": found and {k: list(v) for k, v in found.items()}}
        else:
            there["text"] += text
            there["finish_reason"] = reason
            for key, values in (found or {}).items():
                there["logprobs"][key] += values
        return choice

    def _listed(self, index: int, logprobs: Sequence[Logprob]) -> dict[str, list[Any]]:
        texts = [self.decode([entry.token]) for entry in logprobs]
        offsets = []
        for text in texts:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(text)
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob for entry in logprobs],
            "top_logprobs": [
                {self.decode([token]): value for token, value in entry.top} | {text: entry.logprob}
                for text, entry in zip(texts, logprobs, strict=True)
            ],  # the token that was chosen is always one of them
            "text_offset": offsets,
        }


class ChatWriter(Writer):
    """Of /v1/chat/completions. reader: makes what reads an answer's text for reasoning and tool calls."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        model: str,
        decode: Decode,
        prompts: Sequence[int],
        logprobs: bool,
        reader: Callable[[], AnswerParser],
        kept: bool = True,
    ) -> None:
        super().__init__(model, decode, prompts, kept)
        self._logprobs, self._reader = logprobs, reader
        self._readers: dict[int, AnswerParser] = {}
        self._events: dict[int, list[Any]] = {}

    def _added(self, index: int, delta: Delta, reason: str | None) -> dict[str, Any] | None:
        first = index not in self._readers
        if first:
            self._begin(index)
        reader = self._readers[index]
        events = reader.feed(delta.text, last=delta.finish_reason is not None)
        if reason == "stop" and reader.num_calls:
            reason = "tool_calls"
        found = {"content": [self._entry(entry) for entry in delta.logprobs]} if self._logprobs else None
        if self._kept:
            there = self._choices[index]
            there["finish_reason"] = reason
            self._events[index] += events
            if found:
                there["logprobs"]["content"] += found["content"]
        said = delta_of(events)
        if first:
            said = {"role": "assistant", "content": "", **said}
        if not (said or reason or delta.logprobs):
            return None  # text that may be a marker is held back
        return {"index": index, "delta": said, "logprobs": found, "finish_reason": reason}

    def _begin(self, index: int) -> None:
        self._readers[index], self._events[index] = self._reader(), []
        logprobs: Any = {"content": [], "refusal": None} if self._logprobs else None
        self._choices[index] = {"index": index, "message": {}, "logprobs": logprobs, "finish_reason": None}

    def body(self) -> dict[str, Any]:
        for index, choice in self._choices.items():
            choice["message"] = message_of(self._events[index])
        return super().body()

    def _entry(self, entry: Logprob) -> dict[str, Any]:
        told = self._token(entry.token, entry.logprob)
        return {**told, "top_logprobs": [self._token(token, value) for token, value in entry.top]}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

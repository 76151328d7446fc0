"""Answers in OpenAI's shape: from pieces of the engine to choices, chunks, usage and log-probabilities.

Views of the engine's counts: the cache for `GET /v1/cache`, the fidelity watch for Prometheus and for `/health`.

They are made of `messages.Stats.numbers` and `messages.Ready.about`. Counters run over the engine's life, so a client
that wants rates takes the difference of two answers.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from nibble.engine.request import Delta, Logprob
from nibble.server.chat_parser import AnswerParser
from nibble.server.streaming import delta_of, message_of

Decode = Callable[[Sequence[int]], str]


class Writer(ABC):
    """One request's answers, which are numbered prompt by prompt.

    Args:
        model: its name.
        decode: returns the text of tokens.
        prompts: tokens of each prompt.
        collect: for body(), where no chunks are sent.
    """

    prefix: str
    """Of the answer's id."""
    body_object: str
    chunk_object: str

    def __init__(self, model: str, decode: Decode, prompts: Sequence[int], collect: bool) -> None:
        self.id, self.model, self.created = f"{self.prefix}-{uuid.uuid4().hex}", model, int(time.time())
        self.decode, self._collect = decode, collect
        self.prompt_tokens, self.cached = sum(prompts), 0
        self.completion_tokens = 0
        self._choices: dict[int, dict[str, Any]] = {}

    def take(self, index: int, delta: Delta) -> dict[str, Any] | None:
        """Add a piece to an answer, and return the choice of a chunk; None where there is nothing to show yet."""
        self.completion_tokens += len(delta.token_ids)
        return self._choice(index, delta, delta.finish_reason)

    def chunk_fields(self) -> dict[str, Any]:
        """Return the fields of all chunks."""
        return self._common(self.chunk_object)

    def usage_chunk(self) -> dict[str, Any]:
        """Return the chunk with usage."""
        return self.chunk_fields() | {"choices": [], "usage": self.usage()}

    def body(self) -> dict[str, Any]:
        """Return all answers at once."""
        choices = [self._choices[index] for index in sorted(self._choices)]
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
    def _choice(self, index: int, delta: Delta, reason: str | None) -> dict[str, Any] | None: ...


class TextWriter(Writer):
    """Answers of /v1/completions.

    Args:
        model: its name.
        decode: returns the text of tokens.
        prompts: tokens of each prompt.
        echoes: by answer, the text before it; none without echo.
        logprobs: report log-probabilities.
        collect: for body(), where no chunks are sent.
    """

    prefix, body_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        model: str,
        decode: Decode,
        prompts: Sequence[int],
        echoes: Sequence[str],
        logprobs: bool,
        collect: bool = True,
    ) -> None:
        super().__init__(model, decode, prompts, collect)
        self._echoes, self._logprobs = dict(enumerate(echoes)), logprobs
        self._offsets: dict[int, int] = {}

    def _choice(self, index: int, delta: Delta, reason: str | None) -> dict[str, Any]:
        text = self._echoes.pop(index, "") + delta.text
        logprobs = self._logprob_lists(index, delta.logprobs) if self._logprobs else None
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        if not self._collect:
            return choice
        total = self._choices.get(index)
        if total is None:
            # A copy: its lists grow with the answer.
            lists = logprobs and {key: list(values) for key, values in logprobs.items()}
            self._choices[index] = {**choice, "logprobs": lists}
        else:
            total["text"] += text
            total["finish_reason"] = reason
            for key, values in (logprobs or {}).items():
                total["logprobs"][key] += values
        return choice

    def _logprob_lists(self, index: int, logprobs: Sequence[Logprob]) -> dict[str, list[Any]]:
        texts = [self.decode([entry.token]) for entry in logprobs]
        offsets = []
        for text in texts:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(text)
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


class ChatWriter(Writer):
    """Answers of /v1/chat/completions.

    Args:
        model: its name.
        decode: returns the text of tokens.
        prompts: tokens of each prompt.
        logprobs: report log-probabilities.
        new_parser: returns a parser of one answer's text, for reasoning and tool calls.
        collect: for body(), where no chunks are sent.
    """

    prefix, body_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        model: str,
        decode: Decode,
        prompts: Sequence[int],
        logprobs: bool,
        new_parser: Callable[[], AnswerParser],
        collect: bool = True,
    ) -> None:
        super().__init__(model, decode, prompts, collect)
        self._logprobs, self._new_parser = logprobs, new_parser
        self._parsers: dict[int, AnswerParser] = {}
        self._events: dict[int, list[Any]] = {}

    def _choice(self, index: int, delta: Delta, reason: str | None) -> dict[str, Any] | None:
        first = index not in self._parsers
        if first:
            self._begin(index)
        # A marker, or a half of one, may stand in several deltas, so each answer has a parser of its own.
        parser = self._parsers[index]
        events = parser.feed(delta.text, last=delta.finish_reason is not None)
        if reason == "stop" and parser.num_calls:
            reason = "tool_calls"
        logprobs = {"content": [self._entry(entry) for entry in delta.logprobs]} if self._logprobs else None
        if self._collect:
            total = self._choices[index]
            total["finish_reason"] = reason
            self._events[index] += events
            if logprobs:
                total["logprobs"]["content"] += logprobs["content"]
        chat_delta = delta_of(events)
        if first:
            chat_delta = {"role": "assistant", "content": "", **chat_delta}
        # The parser holds back text that may be a marker.
        if not (chat_delta or reason or delta.logprobs):
            return None
        return {"index": index, "delta": chat_delta, "logprobs": logprobs, "finish_reason": reason}

    def _begin(self, index: int) -> None:
        self._parsers[index], self._events[index] = self._new_parser(), []
        logprobs: Any = {"content": [], "refusal": None} if self._logprobs else None
        self._choices[index] = {"index": index, "message": {}, "logprobs": logprobs, "finish_reason": None}

    def body(self) -> dict[str, Any]:
        """Return all answers at once."""
        for index, choice in self._choices.items():
            choice["message"] = message_of(self._events[index])
        return super().body()

    def _entry(self, entry: Logprob) -> dict[str, Any]:
        token = self._token(entry.token, entry.logprob)
        return {**token, "top_logprobs": [self._token(token, value) for token, value in entry.top]}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

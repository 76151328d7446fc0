"""Answers of POST /v1/messages: Anthropic's message with its blocks, and the events of its stream.

See https://docs.claude.com/en/docs/build-with-claude/streaming.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from nibble.server.middleware import response_of
from nibble.server.streaming import CallDelta, Text, Thought, encode_event
from nibble.server.writers import Chunk, Item, ItemWriter


@dataclass
class MessagesWriter(ItemWriter):
    """Answers of /v1/messages."""

    max_tokens: int

    prefix = "msg_"

    def start(self) -> bytes:
        """Return the message without its content; `ping` is an event that Anthropic's streams have too."""
        message = self._message([], None) | {"stop_sequence": None}
        return self.encode([{"type": "message_start", "message": message}, {"type": "ping"}])

    def finish(self) -> bytes:
        """Return why the answer ended, and usage."""
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": self.stop_string}
        end = {"type": "message_delta", "delta": delta, "usage": self.usage()}
        return self.encode([end, {"type": "message_stop"}])

    def fail(self, error: Exception) -> bytes:
        """Return the error as an event."""
        return encode_event(response_of(error).anthropic(), "error")

    def body(self) -> dict[str, Any]:
        """Return the message."""
        content = [self._block(item, item.text) for item in self.items]
        return self._message(content, self._stop_reason()) | {"stop_sequence": self.stop_string}

    def usage(self) -> dict[str, Any]:
        """Return the tokens used so far; Anthropic counts those from the cache apart."""
        usage: dict[str, Any] = {
            "input_tokens": self.prompt_tokens - self.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.cached,
            "output_tokens": self.completion_tokens,
        }
        thinking = self.reasoning_tokens()
        return usage | ({"output_tokens_details": {"thinking_tokens": thinking}} if thinking else {})

    def _message(self, content: list[dict[str, Any]], stop_reason: str | None) -> dict[str, Any]:
        message = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        return message | {"content": content, "stop_reason": stop_reason, "usage": self.usage()}

    def _stop_reason(self) -> str:
        if self.finish_reason == "length":
            cut = self.completion_tokens < self.max_tokens
            return "model_context_window_exceeded" if cut else "max_tokens"
        if self.parser.num_calls:
            return "tool_use"
        return "end_turn" if self.stop_string is None else "stop_sequence"

    def _block(self, item: Item, text: str) -> dict[str, Any]:
        if isinstance(item.first, CallDelta):
            call = {"type": "tool_use", "id": item.first.id, "name": item.first.name}
            return call | {"input": json.loads(text) if text else {}}
        if isinstance(item.first, Thought):
            return {"type": "thinking", "thinking": text, "signature": self._signature(text)}
        return {"type": "text", "text": text}

    def _signature(self, text: str) -> str:
        # Clients hand it back with the text, which is not checked; some drop thoughts without one.
        return self.id if text else ""

    def _begin(self, item: Item) -> list[Chunk]:
        return [{"type": "content_block_start", "index": item.index, "content_block": self._block(item, "")}]

    def _grow(self, item: Item, text: str) -> list[Chunk]:
        kinds = {Text: ("text_delta", "text"), Thought: ("thinking_delta", "thinking")}
        kind, name = kinds.get(type(item.first), ("input_json_delta", "partial_json"))
        return [{"type": "content_block_delta", "index": item.index, "delta": {"type": kind, name: text}}]

    def _end(self, item: Item) -> list[Chunk]:
        events: list[Chunk] = []
        if isinstance(item.first, Thought):
            delta = {"type": "signature_delta", "signature": self._signature(item.text)}
            events.append({"type": "content_block_delta", "index": item.index, "delta": delta})
        return [*events, {"type": "content_block_stop", "index": item.index}]

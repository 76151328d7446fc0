"""Answers of POST /v1/responses: a response with its items, and the events of its stream.

See https://platform.openai.com/docs/api-reference/responses-streaming.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nibble.config import SamplingParams
from nibble.server.middleware import response_of
from nibble.server.responses_api import CUSTOM_INPUT, ResponsesRequest, ToolName
from nibble.server.streaming import CallDelta, Thought
from nibble.server.writers import Chunk, Item, ItemWriter


@dataclass
class ResponsesWriter(ItemWriter):
    """Answers of /v1/responses."""

    common: dict[str, Any]
    """Fields of the request that a response repeats."""
    names: Mapping[str, ToolName]
    """How the API names the tools, by their functions."""
    _sequence: int = field(default=0, init=False)

    prefix = "resp_"

    def encode(self, chunks: Sequence[Chunk]) -> bytes:
        """Return server-sent events, which are numbered."""
        numbered = []
        for chunk in chunks:
            numbered.append(chunk | {"sequence_number": self._sequence})
            self._sequence += 1
        return super().encode(numbered)

    def start(self) -> bytes:
        """Return the events that begin a response."""
        response = self._response("in_progress", [])
        kinds = ("response.created", "response.in_progress")
        return self.encode([{"type": kind, "response": response} for kind in kinds])

    def finish(self) -> bytes:
        """Return the event that ends a response, with all of it."""
        body = self.body()
        return self.encode([{"type": f"response.{body['status']}", "response": body}])

    def fail(self, error: Exception) -> bytes:
        """Return the event of a response that failed."""
        cause = response_of(error).error
        code = cause.code or ("server_error" if cause.type == "server_error" else "invalid_prompt")
        output = [self._item(item, "incomplete") for item in self.items]
        response = self._response("failed", output) | {"error": {"code": code, "message": cause.message}}
        return self.encode([{"type": "response.failed", "response": response}])

    def body(self) -> dict[str, Any]:
        """Return the response."""
        output = [self._item(item, self._item_status(item)) for item in self.items]
        if self.finish_reason == "length":
            details = {"incomplete_details": {"reason": "max_output_tokens"}}
            return self._response("incomplete", output) | details | {"usage": self.usage()}
        return self._response("completed", output) | {"completed_at": int(time.time()), "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Return the tokens used so far."""
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.cached, "cache_write_tokens": 0},
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens()},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }

    def _response(self, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.id, "object": "response", "created_at": self.created, "status": status}
        state = {
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": output,
            "usage": None,
        }
        return head | state | self.common

    def _item_status(self, item: Item) -> str:
        return "incomplete" if self.finish_reason == "length" and item is self.items[-1] else "completed"

    def _item(self, item: Item, status: str) -> dict[str, Any]:
        """Return an item of the output."""
        if isinstance(item.first, CallDelta):
            return self._call(item, item.first, status)
        parts = [] if status == "in_progress" else [self._part(item, item.text)]
        common = {"id": self._id_of(item), "status": status, "content": parts}
        if isinstance(item.first, Thought):
            return {"type": "reasoning", "summary": [], **common}
        return {"type": "message", "role": "assistant", **common}

    def _call(self, item: Item, call: CallDelta, status: str) -> dict[str, Any]:
        tool = self._tool(call)
        fields = {"id": self._id_of(item), "call_id": call.id, "name": tool.name, "status": status}
        fields |= {"namespace": tool.namespace} if tool.namespace is not None else {}
        text = "" if status == "in_progress" else item.text
        if tool.is_custom:
            return {"type": "custom_tool_call", **fields, "input": _custom_input(text)}
        return {"type": "function_call", **fields, "arguments": text}

    def _tool(self, call: CallDelta) -> ToolName:
        return self.names.get(call.name or "") or ToolName(call.name or "")

    def _id_of(self, item: Item) -> str:
        prefix = {CallDelta: "fc", Thought: "rs"}.get(type(item.first), "msg")
        return f"{prefix}_{self.id.removeprefix(self.prefix)}_{item.index}"

    def _part(self, item: Item, text: str) -> dict[str, Any]:
        if isinstance(item.first, Thought):
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _event(self, kind: str, item: Item, **fields: Any) -> Chunk:
        """Return an event of an item; those of texts say which part of its content it is."""
        where = {"item_id": self._id_of(item), "output_index": item.index}
        where |= {} if isinstance(item.first, CallDelta) else {"content_index": 0}
        return {"type": f"response.{kind}", **where, **fields}

    def _item_event(self, kind: str, item: Item, status: str) -> Chunk:
        return {"type": f"response.{kind}", "output_index": item.index, "item": self._item(item, status)}

    def _begin(self, item: Item) -> list[Chunk]:
        events = [self._item_event("output_item.added", item, "in_progress")]
        if not isinstance(item.first, CallDelta):
            events.append(self._event("content_part.added", item, part=self._part(item, "")))
        return events

    def _grow(self, item: Item, text: str) -> list[Chunk]:
        if isinstance(item.first, Thought):
            return [self._event("reasoning_text.delta", item, delta=text)]
        if not isinstance(item.first, CallDelta):
            return [self._event("output_text.delta", item, delta=text, logprobs=[])]
        # The input of a custom tool is a part of the arguments: it comes when it is complete.
        is_custom = self._tool(item.first).is_custom
        return [] if is_custom else [self._event("function_call_arguments.delta", item, delta=text)]

    def _end(self, item: Item) -> list[Chunk]:
        status, text = self._item_status(item), item.text
        if isinstance(item.first, CallDelta):
            events = self._end_call(item, item.first, text)
        else:
            done = {"text": text} if isinstance(item.first, Thought) else {"text": text, "logprobs": []}
            kind = "reasoning_text.done" if isinstance(item.first, Thought) else "output_text.done"
            events = [self._event(kind, item, **done)]
            events.append(self._event("content_part.done", item, part=self._part(item, text)))
        return [*events, self._item_event("output_item.done", item, status)]

    def _end_call(self, item: Item, call: CallDelta, text: str) -> list[Chunk]:
        tool = self._tool(call)
        if not tool.is_custom:
            return [self._event("function_call_arguments.done", item, name=tool.name, arguments=text)]
        text, kind = _custom_input(text), "custom_tool_call_input"
        return [self._event(f"{kind}.delta", item, delta=text), self._event(f"{kind}.done", item, input=text)]


def _custom_input(arguments: str) -> str:
    """Return the input of a custom tool; of a call that is cut short, as it stands."""
    try:
        value = json.loads(arguments or "{}", strict=False).get(CUSTOM_INPUT, "")
    except ValueError:
        return arguments
    return value if isinstance(value, str) else json.dumps(value)


def common_fields(body: ResponsesRequest, params: SamplingParams) -> dict[str, Any]:
    """Return the fields of a request that its response repeats.

    Args:
        body: the request.
        params: how is sampled.
    """
    sent = body.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "tools": sent.get("tools", []),
        "tool_choice": sent.get("tool_choice", "auto"),
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning": sent.get("reasoning", {"effort": None}),
        "text": sent.get("text") or {"format": {"type": "text"}},
        "truncation": body.truncation or "disabled",
        "metadata": body.metadata or {},
        "user": body.user,
        "prompt_cache_key": body.prompt_cache_key,
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "previous_response_id": None,
        "background": False,
        "store": False,
    }

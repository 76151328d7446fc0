"""Requests of other APIs as a request for a chat completion, which is the one form that the server works on.

What is sampled, which grammar an answer follows and how a chat template is called is decided there, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from nibble.errors import RequestError
from nibble.server.middleware import describe_invalid
from nibble.server.protocol import ChatRequest, GenerationFields, MediaPart

Content = str | MediaPart
"""A text, or what is no text, of which the type is passed on to be refused by its name."""


class Lenient(BaseModel):
    """An object whose other fields (ids, status, cache_control...) change nothing here."""

    model_config = ConfigDict(extra="ignore")


class Unserved(Lenient):
    """An object that is refused by its type. Subclasses say what it is."""

    kind: ClassVar[str]
    """In the plural."""
    type: str

    @model_validator(mode="after")
    def _refuse(self) -> Self:
        raise ValueError(f"{self.kind} of type {self.type!r} are not served")


@dataclass
class Turn:
    """A message that grows."""

    role: str
    fields: dict[str, Any] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    media: list[MediaPart] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def message(self) -> dict[str, Any]:
        """Return the message of a chat completion."""
        content: Any = [{"type": part.type} for part in self.media] or "\n".join(self.texts)
        reasoning = {"reasoning_content": "\n".join(self.reasoning)} if self.reasoning else {}
        calls = {"tool_calls": self.calls} if self.calls else {}
        return {"role": self.role, "content": content, **self.fields, **reasoning, **calls}


class Conversation:
    """Messages of a chat completion that grow item by item.

    Items of one role that follow each other are one message: a model's reasoning, text and calls are one turn, and
    many chat templates refuse two turns of one role.
    """

    def __init__(self) -> None:
        self._turns: list[Turn] = []

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages."""
        return [turn.message() for turn in self._turns]

    def add(self, role: str, contents: Iterable[Content]) -> None:
        """Add texts to a turn, a line each."""
        # Templates know one role for both.
        turn = self._turn("system" if role == "developer" else role)
        for content in contents:
            turn.texts += [content] if isinstance(content, str) and content else []
            turn.media += [content] if isinstance(content, MediaPart) else []

    def add_reasoning(self, text: str) -> None:
        """Add reasoning to the assistant's turn."""
        self._turn("assistant").reasoning.append(text)

    def add_call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a tool call, with its arguments' JSON, to the assistant's turn."""
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._turn("assistant").calls.append(call)

    def add_result(self, call_id: str, contents: Iterable[Content]) -> None:
        """Add what a tool call returned."""
        self._turns.append(Turn("tool", {"tool_call_id": call_id}))
        self.add("tool", contents)

    def _turn(self, role: str) -> Turn:
        if not self._turns or self._turns[-1].role != role:
            self._turns.append(Turn(role))
        return self._turns[-1]

    def ends_with_answer(self) -> bool:
        """Return whether the last turn is an answer's beginning: a text of the assistant, and no calls."""
        last = self._turns[-1] if self._turns else Turn("")
        return last.role == "assistant" and bool(last.texts) and not last.calls


def chat_request(
    body: GenerationFields, conversation: Conversation, fields: Mapping[str, Any], source: str
) -> ChatRequest:
    """Return a request as one for a chat completion.

    Args:
        body: the request, whose fields that all requests share are taken over.
        conversation: what has been said.
        fields: others of a chat completion; None where they are left out.
        source: the request's field that the conversation comes from.

    Raises:
        RequestError: the fields do not fit together.
    """
    messages = conversation.messages()
    if not messages:
        raise RequestError(f"{source} is empty")
    shared = body.model_dump(include=set(GenerationFields.model_fields), exclude_unset=True)
    values = shared | {"messages": messages}
    values |= {name: value for name, value in fields.items() if value is not None}
    try:
        return ChatRequest.model_validate(values)
    except ValidationError as error:
        where, message = describe_invalid(error.errors(), values)
        raise RequestError(f"{where}: {message}" if where else message) from None


def thinking_arguments(own: Mapping[str, Any] | None, thinking: bool | None) -> dict[str, Any] | None:
    """Return chat_template_kwargs that say whether to reason, of models that can do both.

    Args:
        own: what the request itself tells its chat template, which counts.
        thinking: None where it is left to the template.
    """
    # The templates of Qwen and GLM know the first name, those of DeepSeek the second.
    arguments = {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}
    return arguments | dict(own or {}) or None

"""Requests of POST /v1/messages, Anthropic's, as chat completions.

See https://docs.claude.com/en/api/messages. Fields that Anthropic does not have are those of the other routes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from nibble.errors import RequestError
from nibble.server.conversation import (
    Content,
    Conversation,
    Lenient,
    Unserved,
    chat_request,
    thinking_arguments,
)
from nibble.server.protocol import (
    MAX_STOPS,
    MAX_TOOLS,
    MEDIA,
    NAME,
    ChatRequest,
    GenerationFields,
    MediaPart,
    type_of,
)

BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n?")
"""A line that Claude Code puts first in its system prompt, for Anthropic's books. It is another one with each request,
so that no prefix would ever be found in the cache."""


class Block(Lenient):
    """A part of a message; `cache_control`, `citations` and the like change nothing here."""


class TextBlock(Block):
    """A text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Block):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Block):
    """Reasoning that nobody can read, and that is left out."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Block):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class OtherBlock(Unserved):
    """A block that is refused by its name."""

    kind = "blocks"


def _tag(block: Any) -> str:
    kind = type_of(block)
    return "media" if kind in MEDIA else kind if kind in BLOCK_TYPES else "other"


BLOCK_TYPES = {"text", "thinking", "redacted_thinking", "tool_use", "tool_result"}
ResultBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[MediaPart, Tag("media")]
    | Annotated[OtherBlock, Tag("other")],
    Discriminator(lambda block: tag if (tag := _tag(block)) in {"text", "media"} else "other"),
]


def _text_block(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


# A text stands for a list with one block: so a complaint is about the block that is wrong, and not about both kinds.
Texts = Annotated[list[TextBlock], BeforeValidator(_text_block, json_schema_input_type=str | list[TextBlock])]
Results = Annotated[
    list[ResultBlock],
    Field(fail_fast=True),
    BeforeValidator(_text_block, json_schema_input_type=str | list[ResultBlock]),
]


class ToolResultBlock(Block):
    """What a call returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Results | None = None
    is_error: bool = False


AnyBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[MediaPart, Tag("media")]
    | Annotated[OtherBlock, Tag("other")],
    Discriminator(_tag),
]


Blocks = Annotated[
    list[AnyBlock],
    Field(fail_fast=True),
    BeforeValidator(_text_block, json_schema_input_type=str | list[AnyBlock]),
]


class MessageParam(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(extra="ignore")
    role: Literal["user", "assistant", "system"]
    content: Blocks


class ToolParam(BaseModel):
    """A tool that the client runs."""

    model_config = ConfigDict(extra="ignore")
    type: str | None = None
    name: str = Field(pattern=NAME)
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_type(self) -> ToolParam:
        if self.type not in (None, "custom"):
            raise ValueError(
                f"tools of type {self.type!r} are not served: only those that have an input_schema, and that the "
                "client runs"
            )
        if self.input_schema is None:
            raise ValueError("a tool needs an input_schema")
        return self

    def chat_tool(self) -> dict[str, Any]:
        """Return the tool as a chat completion has it."""
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function | {"strict": self.strict}}


class ToolChoice(BaseModel):
    """Whether, and which, tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _check_name(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("tool_choice needs a name where its type is 'tool', and only there")
        return self

    def chat_choice(self) -> str | dict[str, Any]:
        """Return the choice as a chat completion has it."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class Thinking(BaseModel):
    """Whether to reason before the answer; how long is the model's own choice."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]

    def is_enabled(self) -> bool | None:
        """Return whether to reason; None: as the chat template has it."""
        return {"enabled": True, "disabled": False}.get(self.type)


class OutputFormat(BaseModel):
    """A schema that the answer follows."""

    type: Literal["json_schema"]
    body: dict[str, Any] = Field(alias="schema")


class OutputConfig(BaseModel):
    """How much to reason, and the answer's form."""

    model_config = ConfigDict(extra="forbid")
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None

    def response_format(self) -> dict[str, Any] | None:
        """Return the form as a chat completion has it."""
        if self.format is None:
            return None
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": self.format.body}}


class CountTokensRequest(GenerationFields):
    """POST /v1/messages/count_tokens: a conversation."""

    system: Texts | None = None
    messages: list[MessageParam] = Field(min_length=1, max_length=100_000, fail_fast=True)
    tools: list[ToolParam] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thread: dict[str, Any] | None = None
    """A conversation that the server holds, which is refused: Anthropic's client sends all of it then."""

    # Clients send these; they change nothing here.
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None
    inference_geo: str | None = None
    speed: Literal["standard", "fast"] | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None

    def chat(self) -> ChatRequest:
        """Return the request as one for a chat completion; raises RequestError."""
        if self.thread:
            message = (
                "no threads are held here: leave out `thread`, and send all messages of the conversation"
            )
            raise RequestError(message, 400, "thread_unsupported_request")
        conversation = self._conversation()
        choice, output = self.tool_choice, self.output_config or OutputConfig()
        thinking = self.thinking.is_enabled() if self.thinking else None
        fields = {
            "tools": [tool.chat_tool() for tool in self.tools or ()] or None,
            "tool_choice": choice and choice.chat_choice(),
            "parallel_tool_calls": choice and not choice.disable_parallel_tool_use,
            "response_format": output.response_format(),
            "chat_template_kwargs": thinking_arguments(self.chat_template_kwargs, thinking),
            "reasoning_effort": output.effort,
        }
        # Anthropic's models go on with a text that ends the conversation; OpenAI's answer it.
        if conversation.ends_with_answer():
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        return chat_request(self, conversation, fields | self._limits(), "messages")

    def _limits(self) -> dict[str, Any]:
        return {}

    def _conversation(self) -> Conversation:
        conversation = Conversation()
        for part in self.system or ():
            start = BILLING.match(part.text)
            conversation.add("system", [part.text[start.end() if start else 0 :]])
        for message in self.messages:
            for block in message.content:
                _add_block(conversation, message.role, block)
        return conversation


class MessagesRequest(CountTokensRequest):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1, le=1 << 30)
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None

    def _limits(self) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens, "stop": self.stop_sequences}


def _contents(blocks: Iterable[Lenient | MediaPart]) -> list[Content]:
    """Return texts, and what is to be refused by its name."""
    return [
        block.text if isinstance(block, TextBlock) else block
        for block in blocks
        if isinstance(block, TextBlock | MediaPart)
    ]


def _add_block(conversation: Conversation, role: str, block: Lenient | MediaPart) -> None:
    if isinstance(block, ThinkingBlock):
        conversation.add_reasoning(block.thinking)
    elif isinstance(block, ToolUseBlock):
        conversation.add_call(block.id, block.name, json.dumps(block.input, ensure_ascii=False))
    elif isinstance(block, ToolResultBlock):
        conversation.add_result(block.tool_use_id, _contents(block.content or ()))
    elif not isinstance(block, RedactedThinkingBlock):
        conversation.add(role, _contents([block]))

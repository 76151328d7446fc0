"""Requests of POST /v1/responses, as chat completions.

See https://platform.openai.com/docs/api-reference/responses. Tools that the client runs are served: functions, custom
tools, and namespaces of both, which a model is shown as functions. Tools that OpenAI's servers run are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from nibble.errors import RequestError
from nibble.server.conversation import Content, Conversation, Lenient, Unserved, chat_request
from nibble.server.protocol import MAX_TOOLS, MEDIA, NAME, ChatRequest, GenerationFields, MediaPart, type_of

MAX_ITEMS = 100_000
CUSTOM_INPUT = "input"
"""The one argument of the function that a custom tool is shown as."""


class InputText(Lenient):
    """A text."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


class Refusal(Lenient):
    """What an earlier answer said in place of an answer."""

    type: Literal["refusal"]
    refusal: str


class OtherPart(Unserved):
    """A part that is refused by its name."""

    kind = "parts"


def _part_tag(part: Any) -> str:
    kind = type_of(part)
    if kind in MEDIA:
        return "media"
    return "refusal" if kind == "refusal" else "text" if kind.endswith("text") else "other"


Part = Annotated[
    Annotated[InputText, Tag("text")]
    | Annotated[Refusal, Tag("refusal")]
    | Annotated[MediaPart, Tag("media")]
    | Annotated[OtherPart, Tag("other")],
    Discriminator(_part_tag),
]


def _text_part(value: Any) -> Any:
    return [InputText(type="input_text", text=value)] if isinstance(value, str) else value


# A text stands for a list with one part: so a complaint is about the part that is wrong, and not about both kinds.
Parts = Annotated[
    list[Part], Field(fail_fast=True), BeforeValidator(_text_part, json_schema_input_type=str | list[Part])
]


class MessageItem(Lenient):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts


class ReasoningItem(Lenient):
    """Reasoning of an earlier answer; what is encrypted is left out, as nobody here can read it."""

    type: Literal["reasoning"]
    summary: list[Part] = Field(default_factory=list)
    content: list[Part] | None = None


class CallItem(Lenient):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class CustomCallItem(Lenient):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class OutputItem(Lenient):
    """What a call returned."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: Parts


class OtherItem(Unserved):
    """An item that is refused by its name."""

    kind = "items"


ITEM_TAGS = {
    "": "message", "message": "message", "reasoning": "reasoning", "function_call": "call",
    "custom_tool_call": "custom_call", "function_call_output": "output", "custom_tool_call_output": "output",
}  # fmt: skip
InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[CallItem, Tag("call")]
    | Annotated[CustomCallItem, Tag("custom_call")]
    | Annotated[OutputItem, Tag("output")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(lambda item: ITEM_TAGS.get(type_of(item), "other")),
]


def _text_item(value: Any) -> Any:
    is_text = isinstance(value, str)
    return [{"role": "user", "content": value}] if is_text and value else [] if is_text else value


Items = Annotated[
    list[InputItem],
    Field(max_length=MAX_ITEMS, fail_fast=True),
    BeforeValidator(_text_item, json_schema_input_type=str | list[InputItem]),
]


@dataclass(frozen=True, slots=True)
class ToolName:
    """How the API names a tool that a model knows as a function."""

    name: str
    namespace: str | None = None
    is_custom: bool = False

    @property
    def function(self) -> str:
        """The function's name."""
        if self.namespace is None:
            return self.name
        return f"{self.namespace.removesuffix('__')}__{self.name}"


class FunctionTool(Lenient):
    """A function that the client runs."""

    type: Literal["function"]
    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tools(self, namespace: str | None = None) -> Iterator[tuple[ToolName, dict[str, Any]]]:
        """Yield the tool's name, and the function that a model is shown."""
        name = ToolName(self.name, namespace)
        function = {"description": self.description, "parameters": self.parameters, "strict": self.strict}
        yield name, {"name": name.function, **function}


class CustomTool(Lenient):
    """A tool that takes a text; a grammar of its input is told to the model, and not enforced."""

    type: Literal["custom"]
    name: str = Field(pattern=NAME)
    description: str | None = None
    format: dict[str, Any] | None = None

    def tools(self, namespace: str | None = None) -> Iterator[tuple[ToolName, dict[str, Any]]]:
        """Yield the tool's name, and the function that a model is shown."""
        name = ToolName(self.name, namespace, is_custom=True)
        grammar = (self.format or {}).get("definition")
        text = {"type": "string"} | (
            {"description": f"It follows this grammar:\n{grammar}"} if grammar else {}
        )
        parameters = {"type": "object", "properties": {CUSTOM_INPUT: text}, "required": [CUSTOM_INPUT]}
        yield name, {"name": name.function, "description": self.description, "parameters": parameters}


class OtherTool(Lenient):
    """A tool that is refused by its name."""

    type: str

    @model_validator(mode="after")
    def _refuse(self) -> Any:
        hint = ' (Codex: web_search = "disabled" in config.toml)' if self.type == "web_search" else ""
        raise ValueError(
            f"tools of type {self.type!r} are not served: this server runs none itself; leave it out{hint}"
        )


def _tool_tag(tool: Any) -> str:
    kind = type_of(tool)
    return kind if kind in {"function", "custom", "namespace"} else "other"


class NamespaceTool(Lenient):
    """Tools under a common name, such as those of one MCP server."""

    type: Literal["namespace"]
    name: str = Field(pattern=NAME)
    description: str | None = None
    inner: list[
        Annotated[
            Annotated[FunctionTool, Tag("function")]
            | Annotated[CustomTool, Tag("custom")]
            | Annotated[OtherTool, Tag("other")],
            Discriminator(lambda tool: tag if (tag := _tool_tag(tool)) != "namespace" else "other"),
        ]
    ] = Field(alias="tools", max_length=MAX_TOOLS)

    def tools(self) -> Iterator[tuple[ToolName, dict[str, Any]]]:
        """Yield the tools' names, and the functions that a model is shown."""
        for tool in self.inner:
            if not isinstance(tool, OtherTool):
                yield from tool.tools(self.name)


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[OtherTool, Tag("other")],
    Discriminator(_tool_tag),
]


class NamedChoice(Lenient):
    """The one tool that must be called."""

    type: Literal["function", "custom"]
    name: str


class AllowedChoice(Lenient):
    """Some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: list[NamedChoice] = Field(min_length=1, max_length=MAX_TOOLS)


class Reasoning(Lenient):
    """How much to reason; reasoning is told as it is, and never summarised."""

    effort: str | None = Field(None, max_length=64)


class TextFormat(BaseModel):
    """The answer's form."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["text", "json_object", "json_schema"]
    name: str = "answer"
    body: dict[str, Any] | None = Field(None, alias="schema")

    def response_format(self) -> dict[str, Any]:
        """Return the form as a chat completion has it."""
        if self.type != "json_schema":
            return {"type": self.type}
        if self.body is None:
            raise RequestError("text.format json_schema needs a schema")
        return {"type": self.type, "json_schema": {"name": self.name, "schema": self.body}}


class TextConfig(Lenient):
    """The answer's form; `verbosity` is for models of OpenAI."""

    format: TextFormat | None = None


class ResponsesRequest(GenerationFields):
    """POST /v1/responses."""

    input: Items = Field(default_factory=list)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=1 << 30)
    tools: list[AnyTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | AllowedChoice | None = None
    parallel_tool_calls: bool = True
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # Clients send these; they change nothing here.
    include: list[str] | None = Field(None, max_length=64)
    truncation: Literal["auto", "disabled"] | None = None
    max_tool_calls: int | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    stream_options: dict[str, Any] | None = None
    client_metadata: dict[str, Any] | None = None

    # Known and not served, unless they ask for nothing.
    background: bool = False
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    top_logprobs: int | None = None

    @model_validator(mode="after")
    def _check_served(self) -> ResponsesRequest:
        if self.background:
            raise ValueError("background is not served: leave it out, and read the answer as it comes")
        if self.previous_response_id or self.conversation:
            raise ValueError(
                "responses are not stored here: leave out previous_response_id and conversation, and send all items "
                "of the conversation as input"
            )
        if self.prompt:
            raise ValueError(
                "prompt is not served: there are no stored prompts here, send instructions and input"
            )
        if self.top_logprobs or "message.output_text.logprobs" in (self.include or ()):
            raise ValueError("log-probabilities are told by /v1/chat/completions, and not here")
        return self

    def tool_names(self) -> dict[str, ToolName]:
        """Return how the API names the tools, by their functions."""
        return {name.function: name for name, _ in self._functions()}

    def chat(self) -> ChatRequest:
        """Return the request as one for a chat completion; raises RequestError."""
        text = self.text.format if self.text else None
        effort = self.reasoning.effort if self.reasoning else None
        fields = {
            "tools": [{"type": "function", "function": function} for _, function in self._functions()]
            or None,
            "tool_choice": self._choice(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": text.response_format() if text else None,
            "chat_template_kwargs": self.chat_template_kwargs,
            "reasoning_effort": effort,
        }
        return chat_request(self, self._conversation(), fields, "input")

    def _functions(self) -> Iterator[tuple[ToolName, dict[str, Any]]]:
        for tool in self.tools or ():
            if not isinstance(tool, OtherTool):
                yield from tool.tools()

    def _choice(self) -> str | dict[str, Any] | None:
        choice = self.tool_choice
        if isinstance(choice, NamedChoice):
            return _named(choice)
        if isinstance(choice, AllowedChoice):
            allowed = {"mode": choice.mode, "tools": [_named(tool) for tool in choice.tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
        return choice

    def _conversation(self) -> Conversation:
        conversation = Conversation()
        if self.instructions:
            conversation.add("system", [self.instructions])
        for item in self.input:
            _add_item(conversation, item)
        return conversation


def _named(choice: NamedChoice) -> dict[str, Any]:
    return {"type": "function", "function": {"name": choice.name}}


def _contents(parts: Sequence[InputText | Refusal | MediaPart | OtherPart]) -> list[Content]:
    """Return texts, and what is to be refused by its name."""
    contents: list[Content] = []
    for part in parts:
        if isinstance(part, InputText):
            contents.append(part.text)
        elif isinstance(part, Refusal):
            contents.append(part.refusal)
        elif isinstance(part, MediaPart):
            contents.append(part)
    return contents


def _add_item(conversation: Conversation, item: Any) -> None:
    if isinstance(item, MessageItem):
        conversation.add(item.role, _contents(item.content))
    elif isinstance(item, ReasoningItem):
        for text in _contents(item.content or item.summary):
            if isinstance(text, str):
                conversation.add_reasoning(text)
    elif isinstance(item, OutputItem):
        conversation.add_result(item.call_id, _contents(item.output))
    elif isinstance(item, CallItem | CustomCallItem):
        name = ToolName(item.name, item.namespace).function
        arguments = item.arguments if isinstance(item, CallItem) else json.dumps({CUSTOM_INPUT: item.input})
        conversation.add_call(item.call_id, name, arguments)

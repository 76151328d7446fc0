"""Tools in requests: what clients may say of them, what is refused, and how they are handed to chat templates.

Owns Tool, ToolChoice and ToolFields, which ChatRequest inherits. Must not know of HTTP, engines or of how calls look in
an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from nibble.errors import RequestError

MOST_TOOLS = 512
NAME = r"^[a-zA-Z0-9_-]{1,64}$"
JOINED = re.compile(r"""\barguments['"]?\]?\s*(?:\+|~|-?\}\})""")
PRINTED = re.compile(r"""\barguments['"]?\]?\s*\|\s*(?:tojson|items|dictsort)""")
NO_PARAMETERS = {"type": "object", "properties": {}}


class Function(BaseModel):
    """What a tool does. strict: once a call has begun, its arguments are held to the schema."""

    model_config = ConfigDict(extra="ignore")

    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _an_object(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        """Arguments are an object, so its schema must be one's."""
        for name, kind, words in (("properties", dict, "an object"), ("required", list, "a list")):
            if not isinstance((schema or {}).get(name, kind()), kind):
                raise ValueError(f"`{name}` of a JSON Schema must be {words}")
        if (schema or {}).get("type", "object") != "object":
            raise ValueError("the JSON Schema of parameters must have type 'object'")
        return schema


class Tool(BaseModel):
    """A function that the model may call."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """As chat templates print it."""
        said = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {
            "type": "function",
            "function": {**said, "parameters": said.get("parameters") or NO_PARAMETERS},
        }


class Named(BaseModel):
    name: str


class NamedTool(BaseModel):
    """The one tool that must be called."""

    type: Literal["function"]
    function: Named


class Allowed(BaseModel):
    mode: Literal["auto", "required"] = "auto"
    tools: list[NamedTool] = Field(min_length=1, max_length=MOST_TOOLS)


class AllowedTools(BaseModel):
    """Some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


class ToolFields(BaseModel):
    """The fields of a request that are about tools."""

    tools: list[Tool] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
        if twice is not None:
            raise ValueError(f"two tools are named {twice!r}")
        choice = self.tool_choice
        if choice in (None, "none", "auto"):
            return self
        if not names:
            raise ValueError("this tool_choice needs tools")
        beyond = [name for name in self._chosen() if name not in names]
        if beyond:
            raise ValueError(f"tool_choice names {beyond[0]!r}, which is none of the tools")
        return self

    def _chosen(self) -> list[str]:
        """The tools that tool_choice names."""
        if isinstance(self.tool_choice, AllowedTools):
            return [tool.function.name for tool in self.tool_choice.allowed_tools.tools]
        return [self.tool_choice.function.name] if isinstance(self.tool_choice, NamedTool) else []

    def open_tools(self) -> list[Tool]:
        """The tools that the model may call: none for tool_choice `none`, some where they are listed."""
        if self.tool_choice == "none" or not self.tools:
            return []
        allowed = self._chosen() if isinstance(self.tool_choice, AllowedTools) else None
        return [tool for tool in self.tools if allowed is None or tool.function.name in allowed]

    def forced_tools(self) -> list[Tool]:
        """Those of which the answer must call one: all for `required`, or the one that is named."""
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            return [tool for tool in self.open_tools() if tool.function.name in self._chosen()]
        required = isinstance(choice, AllowedTools) and choice.allowed_tools.mode == "required"
        return self.open_tools() if required or choice == "required" else []

    def most_calls(self) -> int | None:
        """How many calls an answer may have; None: any number."""
        return None if self.parallel_tool_calls and not isinstance(self.tool_choice, NamedTool) else 1


def tools_for_template(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    """The argument `tools` of a chat template; None, as templates expect it, where there are none."""
    return [tool.for_template() for tool in tools] or None


def arguments_as_text(chat_template: str | None) -> bool:
    """Whether a template joins a call's arguments to other text as they are (DeepSeek's do), and so needs JSON's text,
    where others print them as JSON, and need a mapping."""
    said = chat_template or ""
    return bool(JOINED.search(said)) and not PRINTED.search(said)


def message_for_template(message: Mapping[str, Any], *, as_text: bool = False) -> dict[str, Any]:
    """A message (Message.plain()) as templates take it: with the arguments of its calls, text in OpenAI's API, as a
    mapping, unless `as_text`. Raises RequestError where calls are malformed."""
    said = dict(message)
    calls = said.pop("tool_calls", None)
    if not calls:
        return said
    if not isinstance(calls, list):
        raise RequestError("tool_calls of a message must be a list")
    return said | {"tool_calls": [_call_for_template(call, as_text) for call in calls]}


def _call_for_template(call: Any, as_text: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError("each of a message's tool_calls must have a function with a name")
    arguments = function.get("arguments") or "{}"
    with suppress(ValueError, RecursionError):  # what a model wrote wrong is told to it as it was
        if isinstance(arguments, str) and not as_text:
            arguments = json.loads(arguments)
        elif not isinstance(arguments, str) and as_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}

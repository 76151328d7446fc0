"""Tools in requests: what is taken, what is refused, and what chat templates are given."""

from __future__ import annotations

import json
from typing import Any

import jinja2
import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from nibble.errors import RequestError
from nibble.server.chat_format import arguments_as_text, message_for_template, tools_for_template
from nibble.server.protocol import ToolFields


class Other(BaseModel):
    model_config = ConfigDict(extra="forbid")
    model: str = "m"


class Request(ToolFields, Other):
    """As ChatRequest is put together."""


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def test_tools_of_requests() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
    asked = Request.model_validate(
        {
            "tools": [tool("f", description="d", parameters=schema, strict=True), tool("g")],
            "tool_choice": "auto",
        }
    )
    assert tools_for_template(asked.callable_tools()) == [
        tool("f", description="d", parameters=schema),
        tool("g", parameters={"type": "object", "properties": {}}),
    ]
    assert asked.max_calls() is None
    asked = Request.model_validate({"tools": [tool()], "tool_choice": "none", "parallel_tool_calls": False})
    assert tools_for_template(asked.callable_tools()) is None and asked.max_calls() == 1
    bare: list[dict[str, Any]] = [
        {},
        {"tools": []},
        {"tool_choice": "auto"},
        {"tools": None, "tool_choice": "none"},
    ]
    for fields in bare:
        assert Request.model_validate(fields).callable_tools() == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [tool("a b")]}, "match pattern"),
        ({"tools": [tool("x" * 129)]}, "match pattern"),
        ({"tools": [tool("")]}, "match pattern"),
        ({"tools": [{"type": "retrieval"}]}, "'function'"),
        ({"tools": [tool(), tool()]}, "two tools are named 'f'"),
        ({"tools": [tool(parameters=[])]}, "valid dictionary"),
        ({"tools": [tool(parameters={"type": "string"})]}, "must have type 'object'"),
        ({"tools": [tool(parameters={"properties": []})]}, "must be an object"),
        ({"tools": [tool(parameters={"required": "x"})]}, "must be a list"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"tools": [tool()], "tool_choice": tool("g")}, "'g', which is none"),
        ({"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
        ({"extra": 1}, "not permitted"),
    ],
)
def test_refused_tools(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Request.model_validate(fields)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_some_tools_are_allowed(mode: str) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [tool("g")]}}
    asked = Request.model_validate({"tools": [tool("f"), tool("g")], "tool_choice": choice})
    assert [one.function.name for one in asked.callable_tools()] == ["g"] and asked.max_calls() is None
    assert len(asked.required_tools()) == (mode == "required")
    with pytest.raises(ValidationError, match="'g', which is none"):
        Request.model_validate({"tools": [tool("f")], "tool_choice": choice})


@pytest.mark.parametrize(
    ("choice", "forced", "most"),
    [
        (None, [], None),
        ("auto", [], None),
        ("none", [], None),
        ("required", ["f", "g"], None),
        (tool("g"), ["g"], 1),
    ],
)
def test_calls_that_must_come(choice: Any, forced: list[str], most: int | None) -> None:
    asked = Request.model_validate({"tools": [tool("f"), tool("g")], "tool_choice": choice})
    assert [one.function.name for one in asked.required_tools()] == forced and asked.max_calls() == most
    assert len(asked.callable_tools()) == (0 if choice == "none" else 2)


MAPPED = "{{ '<tool_call>' }}{{ tool_call.arguments | tojson }}{{ tool_call.arguments }}"
PASTED = "{{ m['tool_calls'][0]['function']['name'] + m['tool_calls'][0]['function']['arguments'] + '!' }}"


def test_calls_in_messages_for_templates_of_both_kinds() -> None:
    assert arguments_as_text(PASTED) and arguments_as_text("{{- call.arguments -}}")
    assert not arguments_as_text(MAPPED) and not arguments_as_text(None)
    assert not arguments_as_text("{{ tool['function']['arguments']|tojson + '!' }}")
    text = '{"city": "Málaga"}'
    for arguments in (text, json.loads(text)):
        call = {"id": "i", "function": {"name": "f", "arguments": arguments}}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        said = message_for_template(message)
        assert said["tool_calls"][0]["function"]["arguments"] == {"city": "Málaga"}
        assert said["tool_calls"][0]["type"] == "function" and "type" not in call
        said = message_for_template(message, as_text=True)
        assert jinja2.Template(PASTED).render(m=said) == f"f{text}!"


def test_calls_in_messages_that_are_odd() -> None:
    def given(**function: Any) -> Any:
        said = message_for_template(
            {"role": "assistant", "content": "x", "tool_calls": [{"function": function}]}
        )
        assert said["content"] == "x"
        return said["tool_calls"][0]["function"]["arguments"]

    assert given(name="f") == {} and given(name="f", arguments="") == {}
    assert given(name="f", arguments='{"a": ') == '{"a": '
    assert given(name="f", arguments="[" * 100_000) == "[" * 100_000
    assert given(name="f", arguments={"a": 1}) == {"a": 1}
    assert message_for_template({"role": "user", "content": "x", "tool_calls": []}) == {
        "role": "user",
        "content": "x",
    }
    odd: list[Any] = ["x", [1], [{"function": {}}], [{"function": {"name": 1}}]]
    for calls in odd:
        with pytest.raises(RequestError):
            message_for_template({"role": "assistant", "tool_calls": calls})

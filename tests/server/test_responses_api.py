"""/v1/responses through OpenAI's own client: translation over an engine that says its prompt back, and a real server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from conftest import FakeEngine, FakeTokens, listening  # type: ignore[attr-defined]
from nibble.errors import RequestError
from nibble.server import worker as wire
from nibble.server.app import make_app
from nibble.server.responses_api import ResponsesRequest
from nibble.server.settings import Settings

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "parameters": SCHEMA}
ANSWER = f"<think>Rain or sun?</think>I look. {CALL}"


@contextmanager
def echo(reason: str = "stop", **settings: Any) -> Iterator[tuple[openai.OpenAI, FakeEngine]]:
    """A client of a server that says prompts back."""
    engine = FakeEngine()
    engine.ready, engine.reason = wire.Ready(4096, 256, {}), reason
    app = make_app(engine, FakeTokens(), "demo", Settings(**settings))
    with listening(app) as url, openai.OpenAI(base_url=f"{url}v1", api_key="k", max_retries=0) as client:
        yield client, engine


def messages(**fields: Any) -> list[dict[str, Any]]:
    """The messages of a chat completion that a request becomes."""
    chat = ResponsesRequest.model_validate({"model": "m", **fields}).chat()
    return [message.model_dump(exclude_none=True) for message in chat.messages]


# Requests


def test_a_text_and_instructions() -> None:
    assert messages(input="Hi") == [{"role": "user", "content": "Hi"}]
    assert messages(input="Hi", instructions="Be kind.")[0] == {"role": "system", "content": "Be kind."}
    # As Codex asks whether anybody is there.
    assert messages(input=[], instructions="Be kind.") == [{"role": "system", "content": "Be kind."}]
    with pytest.raises(RequestError, match="input is empty"):
        messages(input=[])


def test_the_items_of_a_turn_are_one_message() -> None:
    found = messages(
        instructions="Be kind.",
        input=[
            {"role": "developer", "content": [{"type": "input_text", "text": "Be short."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "I am in Oslo."}]},
            {"type": "message", "role": "user", "content": "Weather?", "id": "msg_1", "status": None},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Ask."}]},
            {"type": "message", "role": "assistant", "id": "m", "status": "completed", "phase": None,
             "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
            {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}", "id": "fc_1"},
            {"type": "function_call", "call_id": "b", "name": "open", "namespace": "mcp__doors__", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "rain"},
            {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "open"}]},
            {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "*** \"x\""},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Enough."}], "encrypted_content": "x"},
        ],
    )  # fmt: skip
    assert [message["role"] for message in found] == [
        "system", "user", "assistant", "tool", "tool", "assistant", "tool", "assistant",
    ]  # fmt: skip
    assert found[0]["content"] == "Be kind.\nBe short." and found[1]["content"] == "I am in Oslo.\nWeather?"
    assert (found[2]["content"], found[2]["reasoning_content"]) == ("I look.", "Ask.")
    names = [call["function"]["name"] for call in found[2]["tool_calls"]]
    assert names == ["weather", "mcp__doors__open"]
    assert (found[4]["tool_call_id"], found[4]["content"]) == ("b", "open")
    assert json.loads(found[5]["tool_calls"][0]["function"]["arguments"]) == {"input": '*** "x"'}
    assert found[7]["reasoning_content"] == "Enough."


def test_fields_of_a_request() -> None:
    request = ResponsesRequest.model_validate(
        {
            "model": "m", "input": "Hi", "max_output_tokens": 7, "temperature": 0.5, "top_k": 3, "seed": None,
            "reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "low", "format": {
                "type": "json_schema", "name": "place", "strict": True, "schema": SCHEMA}},
            "tools": [WEATHER, {"type": "namespace", "name": "mcp", "description": "d", "tools": [WEATHER]},
                      {"type": "custom", "name": "patch", "format": {"type": "grammar", "definition": "start: X"}}],
            "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "patch"}]},
            "parallel_tool_calls": False, "store": False, "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "k", "service_tier": "auto", "truncation": "auto", "metadata": {"a": "b"},
        }
    )  # fmt: skip
    chat = request.chat()
    assert (chat.max_completion_tokens, chat.temperature, chat.top_k, chat.seed) == (7, 0.5, 3, None)
    assert chat.model_fields_set & {"top_p", "stop"} == set(), (
        "what is left out is left to the chat completion"
    )
    assert chat.reasoning_effort == "low"
    assert chat.grammar() == f"json_schema:{json.dumps(SCHEMA)}"
    assert [tool.function.name for tool in chat.tools or ()] == ["weather", "mcp__weather", "patch"]
    assert [tool.function.name for tool in chat.required_tools()] == ["patch"] and chat.max_calls() == 1
    assert "start: X" in json.dumps((chat.tools or [])[2].function.parameters)


REFUSED = [
    ({"input": [{"type": "web_search_call", "id": "x"}]}, "input.0: items of type 'web_search_call' are not"),
    ({"tools": [WEATHER, {"type": "web_search"}]}, 'tools.1: tools of type .* web_search = "disabled"'),
    ({"tools": [WEATHER, WEATHER]}, "two tools are named 'weather'"),
    ({"tool_choice": "required"}, "this tool_choice needs tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "'x', which is none of the tools"),
    ({"previous_response_id": "resp_1"}, "responses are not stored here"),
    ({"background": True}, "background is not served"),
    ({"prompt": {"id": "x"}}, "prompt is not served"),
    ({"include": ["message.output_text.logprobs"]}, "told by /v1/chat/completions"),
    ({"text": {"format": {"type": "json_schema"}}}, "needs a schema"),
    ({"temperature": 9}, "temperature: must be less"),
    ({"no_such_field": 1}, "no_such_field"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "must not have 'chat_template'"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]}, "images are not"),
    ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "files are not served"),
    ({"input": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, "audio is not served"),
    ({"input": [{"type": "function_call_output", "call_id": "a", "output": [
        {"type": "input_image", "image_url": "data:"}]}]}, "images are not served: demo is served for text"),
    ({"input": [{"role": "user", "content": [{"type": "smell"}]}]}, "parts of type 'smell' are not served"),
]  # fmt: skip


def test_what_is_not_served_is_refused_by_its_name() -> None:
    with echo() as (client, engine):
        for fields, message in REFUSED:
            extra: dict[str, Any] = {"input": "Hi", **fields}
            with pytest.raises(openai.BadRequestError, match=message):
                client.responses.create(model="demo", extra_body=extra)
        with pytest.raises(openai.NotFoundError, match="'gpt' is not served here"):
            client.responses.create(model="gpt", input="Hi")
        assert not engine.requests


# Answers


def test_reasoning_text_and_calls_are_items() -> None:
    with echo() as (client, _):
        whole = client.responses.create(model="demo", input=ANSWER, tools=[WEATHER], metadata={"a": "b"})
        assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
        thought, message, call = whole.output
        assert (
            thought.content[0].text == "Rain or sun?"
            and message.content[0].text == whole.output_text == "I look."
        )
        assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"}) and call.call_id
        assert (
            whole.status == "completed" and whole.metadata == {"a": "b"} and whole.tools[0].name == "weather"
        )
        usage = whole.usage
        assert (usage.input_tokens, usage.output_tokens) == (len(ANSWER), len(ANSWER))
        assert usage.output_tokens_details.reasoning_tokens == len("Rain or sun?")
        assert usage.input_tokens_details.cached_tokens == 2
        # What came goes back as it is.
        again = client.responses.create(
            model="demo",
            input=[*whole.output, {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}],
        )
        assert again.output_text == "I look.|sun"


def test_a_stream_has_all_events_in_order() -> None:
    with echo() as (client, _):
        events = list(client.responses.create(model="demo", input=ANSWER, tools=[WEATHER], stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type.removeprefix("response.") for event in events]
        order = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
        assert order == [
            "created", "in_progress",
            "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
            "content_part.done", "output_item.done",
            "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
            "content_part.done", "output_item.done",
            "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
            "completed",
        ]  # fmt: skip
        joined = {kind: "".join(event.delta for event in events if event.type == f"response.{kind}.delta")
                  for kind in ("reasoning_text", "output_text", "function_call_arguments")}  # fmt: skip
        whole = client.responses.create(model="demo", input=ANSWER, tools=[WEATHER])
        assert joined["output_text"] == whole.output_text and joined["reasoning_text"] == "Rain or sun?"
        assert joined["function_call_arguments"] == whole.output[2].arguments
        end, done = events[-1].response, [event.item for event in events if event.type.endswith("item.done")]
        assert end.output == done and end.usage == whole.usage
        with client.responses.stream(model="demo", input=ANSWER, tools=[WEATHER]) as stream:
            assert (
                "".join(event.delta for event in stream if event.type == "response.output_text.delta")
                == "I look."
            )
            assert stream.get_final_response().output_text == "I look."


def test_custom_tools_and_namespaces_get_their_own_names_back() -> None:
    patch = '<tool_call>{"name": "patch", "arguments": {"input": "*** Begin\\n\\"x\\""}}</tool_call>'
    said = patch + CALL.replace("weather", "mcp__sky__weather")
    tools: list[Any] = [
        {"type": "custom", "name": "patch", "description": "d"},
        {"type": "namespace", "name": "mcp__sky", "description": "d", "tools": [WEATHER]},
    ]
    with echo() as (client, _):
        whole = client.responses.create(model="demo", input=said, tools=tools)
        events = list(client.responses.create(model="demo", input=said, tools=tools, stream=True))
    custom, call = whole.output
    assert (custom.type, custom.name, custom.input) == ("custom_tool_call", "patch", '*** Begin\n"x"')
    assert (call.type, call.name, call.namespace) == ("function_call", "weather", "mcp__sky")
    assert [item.type for item in events[-1].response.output] == ["custom_tool_call", "function_call"]
    (done,) = (event for event in events if event.type == "response.custom_tool_call_input.done")
    assert done.input == custom.input
    (done,) = (event for event in events if event.type == "response.function_call_arguments.done")
    assert done.name == "weather" and json.loads(done.arguments) == {"city": "Oslo"}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_short_is_incomplete(stream: bool) -> None:
    with echo("length") as (client, engine):
        found = client.responses.create(model="demo", input=ANSWER, max_output_tokens=40, stream=stream)
        response = list(found)[-1].response if stream else found
        assert engine.requests[0].params.max_tokens == 40
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert [item.status for item in response.output] == ["completed", "incomplete"]


def test_an_engine_that_dies() -> None:
    with echo() as (client, engine):
        engine.dies_after = 30
        *_, end = client.responses.create(model="demo", input=ANSWER, stream=True)
        assert end.type == "response.failed" and end.response.status == "failed"
        assert end.response.error.code == "server_error" and "process ended" in end.response.error.message
        with pytest.raises(openai.InternalServerError, match="process ended") as caught:
            client.responses.create(model="demo", input=ANSWER)
        assert caught.value.status_code == 503
        engine.dies_after, engine.pause = None, 0.05
        with pytest.raises(openai.APIStatusError, match="within its time") as late:
            client.responses.create(model="demo", input=ANSWER, extra_body={"timeout": 0.1})
        assert late.value.status_code == 408


def test_what_codex_sends_is_served() -> None:
    """The fields of codex-rs (ResponsesApiRequest, ToolSpec), with web search off."""
    body = {
        "model": "demo", "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context>"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
            {"type": "function_call", "name": "exec_command", "arguments": "{\"cmd\":\"ls\"}", "call_id": "c1"},
            {"type": "function_call_output", "call_id": "c1", "output": "README.md"},
        ],
        "tools": [
            {"type": "function", "name": "exec_command", "description": "Runs", "strict": False, "parameters": SCHEMA},
            {"type": "custom", "name": "apply_patch", "description": "Edits", "format": {
                "type": "grammar", "syntax": "lark", "definition": "start: /x/"}},
            {"type": "namespace", "name": "mcp__docs__", "description": "Docs", "tools": [
                {"type": "function", "name": "search", "description": "", "strict": False, "defer_loading": True,
                 "parameters": SCHEMA}]},
        ],
        "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False, "stream": True, "include": ["reasoning.encrypted_content"], "service_tier": "auto",
        "prompt_cache_key": "0199", "text": {"verbosity": "low"}, "client_metadata": {"x": "y"},
    }  # fmt: skip
    with echo() as (client, _):
        response = httpx.post(f"{client.base_url}responses", json=body)
    assert response.status_code == 200
    names = [
        line.removeprefix("event: ") for line in response.text.splitlines() if line.startswith("event: ")
    ]
    assert names[0] == "response.created" and names[-1] == "response.completed"


# A real server

Ask = Callable[..., Any]


class Place(BaseModel):
    """A city."""

    city: str = Field(max_length=8)
    size: Literal[1, 2, 3]


@pytest.fixture(scope="module")
def client(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_response_says_what_a_chat_completion_says(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "temperature": 0}
    chat = client.chat.completions.create(
        **asked, messages=[{"role": "user", "content": "Hello"}], max_tokens=24
    )
    whole = client.responses.create(**asked, input="Hello", max_output_tokens=24)
    assert whole.output_text == chat.choices[0].message.content != ""
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (7, 24) and whole.status == "incomplete"
    with client.responses.stream(**asked, input="Hello", max_output_tokens=24) as stream:
        assert (
            "".join(event.delta for event in stream if event.type == "response.output_text.delta")
            == whole.output_text
        )


def test_forms_and_forced_calls(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "demo",
        "input": "Hello",
        "max_output_tokens": 200,
        "extra_body": {"seed": 2},
    }
    assert isinstance(client.responses.parse(**asked, text_format=Place).output_parsed, Place)
    with client.responses.stream(**asked, text_format=Place) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Place)
    whole = client.responses.create(
        **asked, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = whole.output
    assert call.type == "function_call" and set(json.loads(call.arguments)) == {"city"}
    choice: Any = {"type": "function", "name": "Place"}
    parsed = client.responses.parse(**asked, tools=[openai.pydantic_function_tool(Place)], tool_choice=choice)
    assert isinstance(parsed.output[0].parsed_arguments, Place)


def test_a_prompt_that_is_too_long(client: openai.OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="context length is 8192") as caught:
            client.responses.create(model="demo", input="x = 1\n" * 8000, stream=stream)
        assert caught.value.code == "context_length_exceeded"

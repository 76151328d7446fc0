"""/v1/messages through Anthropic's own client: translation over an engine that says its prompt back, a real server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import httpx
import pytest
from pydantic import BaseModel

from conftest import FakeEngine, FakeTokens, listening  # type: ignore[attr-defined]
from nibble.server import worker as wire
from nibble.server.app import make_app
from nibble.server.messages_api import MessagesRequest
from nibble.server.settings import Settings

anthropic = pytest.importorskip("anthropic")
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}
WEATHER = {"name": "weather", "input_schema": SCHEMA}
ANSWER = f"<think>Rain or sun?</think>I look. {CALL}"


@contextmanager
def echo(reason: str = "stop", key: str = "k", **settings: Any) -> Iterator[tuple[Any, FakeEngine]]:
    """A client of a server that says prompts back."""
    engine = FakeEngine()
    engine.ready, engine.reason = wire.Ready(4096, 256, {}), reason
    app = make_app(engine, FakeTokens(), "demo", Settings(**settings))
    with listening(app) as url, anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as client:
        yield client, engine


def user(content: Any) -> list[Any]:
    return [{"role": "user", "content": content}]


def ask(client: Any, content: Any, **fields: Any) -> Any:
    return client.messages.create(**{"model": "demo", "max_tokens": 500, "messages": user(content), **fields})


# Requests


def messages(**fields: Any) -> list[dict[str, Any]]:
    """The messages of a chat completion that a request becomes."""
    chat = MessagesRequest.model_validate({"model": "m", "max_tokens": 9, **fields}).chat()
    return [message.model_dump(exclude_none=True) for message in chat.messages]


def test_blocks_become_turns() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    found = messages(
        system=[{"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=a1b2c;"},
                {"type": "text", "text": "Be kind.", **cached}, {"type": "text", "text": "Be short."}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "<system-reminder>"}, {"type": "text", "text": "Hi", **cached}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Ask.", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look.", "citations": None},
                {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Tromsø"}},
                {"type": "tool_use", "id": "b", "name": "ping", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "rain"},
                {"type": "tool_result", "tool_use_id": "b", "is_error": True, "content": [{"type": "text", "text": "no"}]},
                {"type": "text", "text": "Go on."}]},
            {"role": "user", "content": "Now."},
        ],
    )  # fmt: skip
    assert [message["role"] for message in found] == ["system", "user", "assistant", "tool", "tool", "user"]
    texts = [message["content"] for message in found]
    assert texts == ["Be kind.\nBe short.", "<system-reminder>\nHi", "I look.", "rain", "no", "Go on.\nNow."]
    assert found[2]["reasoning_content"] == "Ask." and found[4]["tool_call_id"] == "b"
    calls = [(call["id"], json.loads(call["function"]["arguments"])) for call in found[2]["tool_calls"]]
    assert calls == [("a", {"city": "Tromsø"}), ("b", {})]


def test_fields_of_a_request() -> None:
    request: dict[str, Any] = {
        "model": "m", "messages": user("Hi"), "max_tokens": 9, "stop_sequences": ["."], "temperature": 0.5, "top_k": 3,
        "tools": [{**WEATHER, "type": "custom", "strict": True, "cache_control": {"type": "ephemeral"}}],
        "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}},
        "metadata": {"user_id": "u"}, "context_management": {"edits": []}, "service_tier": "auto",
    }  # fmt: skip
    chat = MessagesRequest.model_validate(request).chat()
    assert (chat.max_tokens, chat.stop, chat.temperature, chat.top_k) == (9, ["."], 0.5, 3)
    assert [tool.function.name for tool in chat.required_tools()] == ["weather"] and chat.max_calls() == 1
    assert chat.tools and chat.tools[0].function.strict and chat.tools[0].function.parameters == SCHEMA
    assert chat.grammar() == f"json_schema:{json.dumps(SCHEMA)}"
    assert chat.reasoning_effort == "high"
    assert chat.chat_template_kwargs == {"enable_thinking": True, "thinking": True}
    for kind, thinking in (("disabled", False), ("adaptive", None)):
        chat = MessagesRequest.model_validate(request | {"thinking": {"type": kind}}).chat()
        assert (chat.chat_template_kwargs or {}).get("enable_thinking") is thinking
    for kind, choice in (("auto", "auto"), ("any", "required"), ("none", "none")):
        chat = MessagesRequest.model_validate(request | {"tool_choice": {"type": kind}}).chat()
        assert chat.tool_choice == choice


REFUSED = [
    ({"max_tokens": 0}, "max_tokens: must be greater"),
    ({"temperature": 9}, "temperature: must be less"),
    ({"no_such_field": 1}, "no_such_field"),
    ({"messages": []}, "messages"),
    ({"messages": user([{"type": "smell"}])}, "messages.0.content.0: blocks of type 'smell' are not served"),
    ({"messages": user([{"type": "image", "source": {}}])}, "images are not served: demo is served for text"),
    ({"messages": user([{"type": "document", "source": {}}])}, "documents are not served: demo is served for text"),
    ({"messages": user([{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}])}, "images are"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305' are not served"),
    ({"tools": [{"name": "f"}]}, "needs an input_schema"),
    ({"tools": [WEATHER, WEATHER]}, "two tools are named 'weather'"),
    ({"tool_choice": {"type": "any"}}, "this tool_choice needs tools"),
    ({"tool_choice": {"type": "tool"}}, "needs a name"),
]  # fmt: skip


def test_errors_have_anthropics_form() -> None:
    with echo(api_key="k", max_body="64KiB") as (client, engine):
        for fields, message in REFUSED:
            with pytest.raises(anthropic.BadRequestError, match=message) as caught:
                ask(client, "Hi", extra_body=fields)
            assert caught.value.body["type"] == "error" and set(caught.value.body["error"]) == {
                "type",
                "message",
            }
            assert caught.value.body["error"]["type"] == "invalid_request_error"
        with pytest.raises(anthropic.NotFoundError, match="'claude' is not served here") as missing:
            ask(client, "Hi", model="claude")
        assert missing.value.body["error"]["type"] == "not_found_error"
        with pytest.raises(anthropic.RequestTooLargeError) as large:
            ask(client, "x" * 100_000)
        assert large.value.body["error"]["type"] == "request_too_large"
        with pytest.raises(anthropic.AuthenticationError, match="x-api-key") as locked:
            ask(client.with_options(api_key="wrong"), "Hi")
        assert locked.value.body["error"]["type"] == "authentication_error"
        assert not engine.requests
        headers = {"Authorization": "Bearer k", "x-api-key": "wrong"}
        assert httpx.get(f"{client.base_url}v1/models", headers=headers).status_code == 200
        unread = httpx.post(f"{client.base_url}v1/messages", headers={"x-api-key": "k"}, content=b"{")
        assert unread.status_code == 400 and unread.json()["error"]["type"] == "invalid_request_error"


def test_a_server_that_is_full_or_down() -> None:
    with echo(max_queue=1) as (client, engine):
        engine.stays_at = 1
        with client.messages.stream(model="demo", max_tokens=9, messages=user("Hello there")) as stream:
            next(iter(stream))
            with pytest.raises(anthropic.RateLimitError, match="requests are open") as full:
                ask(client, "Hi")
        assert (
            full.value.body["error"]["type"] == "rate_limit_error"
            and full.value.response.headers["retry-after"]
        )
        engine.dies_after, engine.stays_at = 0, None
        while engine.open:  # until the server knows that the stream's reader is gone
            time.sleep(0.01)
        with pytest.raises(anthropic.APIStatusError, match="process ended") as died:
            ask(client, "Hi", extra_headers={"x-request-id": "r1"})
        assert died.value.status_code == 503 and died.value.body["error"]["type"] == "overloaded_error"
        assert died.value.response.headers["x-request-id"] == "r1"


# Answers


def test_reasoning_text_and_calls_are_blocks() -> None:
    with echo() as (client, _):
        whole = ask(client, ANSWER, tools=[WEATHER])
        thinking, text, call = whole.content
        assert (thinking.thinking, text.text) == ("Rain or sun?", "I look.") and thinking.signature
        assert (call.name, call.input) == ("weather", {"city": "Oslo"}) and call.id
        assert (whole.stop_reason, whole.stop_sequence, whole.role) == ("tool_use", None, "assistant")
        usage = whole.usage
        assert (usage.input_tokens, usage.cache_read_input_tokens) == (len(ANSWER) - 2, 2)
        assert usage.output_tokens == len(ANSWER)
        assert usage.output_tokens_details.thinking_tokens == len("Rain or sun?")
        # What came goes back as it is.
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sun"}
        again = client.messages.create(
            model="demo", max_tokens=500, messages=[whole.to_param(), *user([result])]
        )
        assert again.content[0].text == "I look.|sun" and again.stop_reason == "end_turn"


def test_a_stream_has_all_events_in_order() -> None:
    with echo() as (client, _):
        events = list(ask(client, ANSWER, tools=[WEATHER], stream=True))
        kinds = [event.type for event in events]
        order = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
        block = ["content_block_start", "content_block_delta", "content_block_stop"]
        assert order == ["message_start", *block * 3, "message_delta", "message_stop"]
        assert events[0].message.content == [] and events[0].message.stop_reason is None
        assert events[0].message.usage.input_tokens == len(ANSWER) - 2
        whole = ask(client, ANSWER, tools=[WEATHER])
        with client.messages.stream(
            model="demo", max_tokens=500, messages=user(ANSWER), tools=[WEATHER]
        ) as stream:
            assert "".join(stream.text_stream) == "I look."
            final = stream.get_final_message()
        assert [block.type for block in final.content] == [block.type for block in whole.content]
        assert final.content[2].input == whole.content[2].input and final.stop_reason == "tool_use"
        assert final.content[0].signature and final.usage == whole.usage
        raw = httpx.post(
            f"{client.base_url}v1/messages?beta=true",
            json={"model": "demo", "max_tokens": 9, "messages": user("Hi"), "stream": True},
        )
        names = [line.removeprefix("event: ") for line in raw.text.splitlines() if line.startswith("event: ")]
        assert names[:2] == ["message_start", "ping"] and names[-1] == "message_stop"


@pytest.mark.parametrize("stream", [False, True])
def test_why_an_answer_ended(stream: bool) -> None:
    def end(client: Any, **fields: Any) -> Any:
        found = ask(client, "Hello", stream=stream, **fields)
        return next(event.delta for event in found if event.type == "message_delta") if stream else found

    with echo() as (client, engine):
        assert end(client).stop_reason == "end_turn"
        engine.stop_string = "lo"
        found = end(client, stop_sequences=["lo"])
        assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", "lo")
        assert engine.requests[-1].params.stop == ("lo",)
        engine.reason, engine.stop_string = "length", ""
        assert end(client, max_tokens=5).stop_reason == "max_tokens"
        assert end(client, max_tokens=50).stop_reason == "model_context_window_exceeded"


def test_an_engine_that_dies_ends_the_stream_with_an_error() -> None:
    with echo() as (client, engine):
        engine.dies_after = 30
        seen = []
        with pytest.raises(anthropic.APIStatusError, match="process ended") as died:
            for event in ask(client, ANSWER, stream=True):
                seen.append(event.type)
        assert "content_block_delta" in seen and "message_stop" not in seen
        assert died.value.body["error"]["type"] == "overloaded_error"


def test_tokens_are_counted() -> None:
    with echo() as (client, engine):
        found = client.messages.count_tokens(
            model="demo", system="Be kind.", messages=user("Hi"), tools=[WEATHER]
        )
        assert found.input_tokens == len("Be kind.|Hi") and not engine.requests
        with pytest.raises(anthropic.NotFoundError):
            client.messages.count_tokens(model="claude", messages=user("Hi"))


def test_what_claude_code_sends_is_served() -> None:
    body: dict[str, Any] = {
        "model": "demo", "max_tokens": 32000, "stream": True, "temperature": 1,
        "system": [{"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            *user([{"type": "text", "text": "<system-reminder>x</system-reminder>"},
                   {"type": "text", "text": "List", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]),
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "Bash", "input": {"command": "ls"},
                                               "caller": {"type": "direct"}}]},
            *user([{"type": "tool_result", "tool_use_id": "t", "content": "README.md", "is_error": False}]),
        ],
        "tools": [{"name": "Bash", "description": "Runs", "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema", "additionalProperties": False, **SCHEMA},
            "eager_input_streaming": True, "defer_loading": False}],
        "metadata": {"user_id": "user_x_session_y"}, "thinking": {"type": "adaptive"},
        "output_config": {"effort": "medium"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }  # fmt: skip
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219", "x-api-key": "k"}
    with echo(api_key="k") as (client, _):
        url = f"{client.base_url}v1/messages"
        assert httpx.head(str(client.base_url), headers=headers).status_code == 200
        response = httpx.post(f"{url}?beta=true", json=body, headers=headers)
        assert response.status_code == 200 and "event: message_stop" in response.text
        del body["max_tokens"], body["stream"], body["temperature"], body["metadata"]
        counted = httpx.post(f"{url}/count_tokens?beta=true", json=body, headers=headers)
        assert counted.json()["input_tokens"] > 20


# A real server


class Place(BaseModel):
    """A city."""

    # The SDK sends no lengths, so a text could be of any.
    city: Literal["Oslo", "Rome"]
    size: Literal[1, 2, 3]


@pytest.fixture(scope="module")
def client(server: str) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server, api_key="none", max_retries=0) as client:
        yield client


def test_a_message_says_what_a_chat_completion_says(client: Any, server: str) -> None:
    body: dict[str, Any] = {"model": "demo", "messages": user("Hello"), "max_tokens": 24, "temperature": 0}
    chat = httpx.post(f"{server}/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    body["extra_body"] = {"temperature": body.pop("temperature")}  # which this client has no name for
    whole = client.messages.create(**body)
    assert whole.content[0].text == chat != "" and whole.stop_reason == "max_tokens"
    assert (whole.usage.input_tokens + whole.usage.cache_read_input_tokens, whole.usage.output_tokens) == (
        7,
        24,
    )
    with client.messages.stream(**body) as stream:
        assert "".join(stream.text_stream) == chat
    stopped = client.messages.create(**body, stop_sequences=["zz", "l"])
    assert (
        stopped.content[0].text == "He"
        and stopped.stop_sequence == "l"
        and stopped.stop_reason == "stop_sequence"
    )
    count = client.messages.count_tokens(model="demo", messages=user("Hello"))
    assert count.input_tokens == 7


def test_the_prefix_cache_holds_over_the_requests_of_claude_code(client: Any) -> None:
    def usage(nonce: str) -> Any:
        system = (
            f"x-anthropic-billing-header: cc_version=2.1; cch={nonce};\n" + "You are a coding agent. " * 20
        )
        return client.messages.create(model="demo", max_tokens=2, system=system, messages=user("Hello")).usage

    first, second = usage("a1b2c"), usage("d3e4f")
    assert second.cache_read_input_tokens > 64 > second.input_tokens
    assert (
        second.input_tokens + second.cache_read_input_tokens
        == first.input_tokens + first.cache_read_input_tokens
    )


def test_an_answer_that_was_begun_goes_on(client: Any, server: str) -> None:
    start = "def read_lines(path):\n    with"
    turns = [*user("Hello"), {"role": "assistant", "content": start}]
    body: dict[str, Any] = {"model": "demo", "max_tokens": 8, "extra_body": {"temperature": 0}}
    begun = client.messages.create(**body, messages=turns)
    prompt = f"<|user|>\nHello<|end|>\n<|assistant|>\n{start}"
    asked = {"model": "demo", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    expected = httpx.post(f"{server}/v1/completions", json=asked, timeout=300).json()["choices"][0]["text"]
    assert begun.content[0].text == expected != ""


def test_forms_and_forced_calls(client: Any) -> None:
    asked: dict[str, Any] = {
        "model": "demo",
        "messages": user("Hello"),
        "max_tokens": 200,
        "extra_body": {"seed": 2},
    }
    assert isinstance(client.messages.parse(**asked, output_format=Place).parsed_output, Place)
    choice = {"type": "any", "disable_parallel_tool_use": True}
    whole = client.messages.create(**asked, tools=[WEATHER], tool_choice=choice)
    (call,) = whole.content
    assert call.type == "tool_use" and set(call.input) == {"city"} and whole.stop_reason == "tool_use"
    with client.messages.stream(**asked, tools=[WEATHER], tool_choice=choice) as stream:
        assert stream.get_final_message().content[0].input == call.input


def test_a_tool_runner(client: Any) -> None:
    cities = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Say the weather."""
        cities.append(city)
        return "rain"

    choice = {"type": "any", "disable_parallel_tool_use": True}
    runner = client.beta.messages.tool_runner(
        model="demo", max_tokens=100, messages=user("Hello"), tools=[weather], tool_choice=choice, max_iterations=2,
        extra_body={"seed": 2},
    )  # fmt: skip
    turns = list(runner)
    assert len(turns) == 2 and len(cities) >= 1
    assert all(block.type == "tool_use" for turn in turns for block in turn.content)

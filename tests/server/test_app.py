"""The routes over a fake engine: limits, errors, and what happens when clients or engines go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from conftest import FakeEngine, FakeTokens  # type: ignore[attr-defined]
from nibble.engine.request import Delta, Logprob
from nibble.engine.tokenizer import Tokenizer
from nibble.errors import ConfigError
from nibble.server import worker as wire
from nibble.server.app import Api, make_app
from nibble.server.chat_parser import AnswerParser
from nibble.server.engine_client import State
from nibble.server.middleware import BodyLimit
from nibble.server.settings import Settings
from nibble.server.writers import ChatWriter, TextWriter

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
TEXT = {"model": "m", "prompt": "hello"}
Test = Callable[[httpx.AsyncClient, FakeEngine], Awaitable[None]]


def with_app(test: Test, engine: FakeEngine | None = None, **settings: Any) -> FakeEngine:
    """Runs `test` with a client of an application over a fake engine."""
    engine = engine or FakeEngine()

    async def run() -> None:
        app = make_app(engine, FakeTokens(), "m", Settings(**settings))
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            await test(client, engine)
        assert app.state.api.limiter.num_open == 0, "a request is still counted"

    asyncio.run(run())
    assert engine.open == 0, "a request is still open in the engine"
    return engine


def events(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_answers_whole_and_in_pieces() -> None:
    async def test(client: httpx.AsyncClient, _: FakeEngine) -> None:
        body = (await client.post("/v1/chat/completions", json=CHAT)).json()
        assert body["choices"][0]["message"] == {"role": "assistant", "content": "hello", "refusal": None}
        assert body["usage"] == {
            "prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 2},
        }  # fmt: skip
        asked = {**CHAT, "stream": True, "n": 2, "stream_options": {"include_usage": True}}
        found = events(await client.post("/v1/chat/completions", json=asked))
        texts = ["", ""]
        for chunk in found[:-1]:
            choice = chunk["choices"][0]
            texts[choice["index"]] += choice["delta"].get("content", "")
        assert texts == ["hello", "hello"] and found[-1]["choices"] == []
        assert found[-1]["usage"]["completion_tokens"] == 10
        assert all(chunk["usage"] is None for chunk in found[:-1])
        asked["stream_options"]["continuous_usage_stats"] = True
        again = events(await client.post("/v1/chat/completions", json=asked))
        counts = [chunk["usage"]["completion_tokens"] for chunk in again]
        assert counts == sorted(counts) and counts[-1] == 10 and counts[0] < 10

    with_app(test)


def test_several_prompts_with_echo() -> None:
    async def test(client: httpx.AsyncClient, _: FakeEngine) -> None:
        asked = {"model": "m", "prompt": ["ab", "xyz"], "n": 2, "echo": True}
        body = (await client.post("/v1/completions", json=asked)).json()
        assert [(c["index"], c["text"]) for c in body["choices"]] == [
            (0, "abab"), (1, "abab"), (2, "xyzxyz"), (3, "xyzxyz")
        ]  # fmt: skip
        assert body["usage"]["prompt_tokens"] == 5

    with_app(test)


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/chat/completions", {**CHAT, "model": "other"}, 404, "'other' is not served here; 'm' is"),
        ("/v1/chat/completions", {"model": "m", "messages": []}, 400, "messages"),
        ("/v1/chat/completions", {**CHAT, "temperature": "hot"}, 400, "temperature"),
        ("/v1/chat/completions", {**CHAT, "no_such_field": 1}, 400, "no_such_field"),
        ("/v1/chat/completions", {**CHAT, "top_logprobs": 3}, 400, "logprobs to be true"),
        ("/v1/chat/completions", {**CHAT, "logit_bias": {"x": 1}}, 400, "token ids"),
        ("/v1/chat/completions", {**CHAT, "stop": ["a"] * 40}, 400, "stop"),
        ("/v1/completions", {"model": "m", "prompt": []}, 400, "prompt is empty"),
        ("/v1/completions", {"model": "m", "prompt": "x" * 70}, 400, "too long"),
        ("/v1/completions", {"model": "m", "prompt": [1] * 70}, 400, "maximum context length is 64"),
        ("/v1/completions", {"model": "m", "prompt": [1, -2]}, 400, "prompt.1: must be greater"),
        (
            "/v1/completions",
            {"model": "m", "prompt": [[1], ["x"]]},
            400,
            "prompt.1.0: must be an integer",
        ),
        ("/v1/completions", {"model": "m", "prompt": ["a"] * 1025}, 400, "1024 items"),
        ("/v1/chat/completions", {**CHAT, "stop": ["a", 3]}, 400, "stop.1: must be a string"),
        (
            "/v1/chat/completions",
            {**CHAT, "tools": [], "tool_choice": {"type": "function"}},
            400,
            "function: is missing",
        ),
        (
            "/v1/chat/completions",
            {**CHAT, "logit_bias": {str(i): "x" for i in range(20_000)}},
            400,
            "logit_bias may",
        ),
        ("/v1/chat/completions", {**CHAT, **dict.fromkeys(map(str, range(2000)))}, 400, "1000 entries"),
        (
            "/v1/chat/completions",
            {**CHAT, "chat_template_kwargs": {"chat_template": "x"}},
            400,
            "'chat_template'",
        ),
        ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"self": 1}}, 400, "'self'"),
        (
            "/v1/completions",
            {"model": "m", "prompt": ["a"] * 1024},
            400,
            "1024 prompts are more than the 1000",
        ),
        (
            "/v1/chat/completions",
            {"model": "m", "messages": [{"role": "user", "content": "x" * 70}]},
            400,
            "too long",
        ),
        ("/v1/completions", {"model": "m", "prompt": "x" * 70, "stream": True}, 400, "too long"),
        ("/v1/completions", {**TEXT, "n": 2, "best_of": 3}, 400, "best_of is not served, unless it is n"),
        ("/v1/completions", {**TEXT, "stream": True, "prompt_logprobs": 0}, 400, "leave out stream"),
        ("/v1/completions", {**TEXT, "prompt_logprobs": 21}, 400, "prompt_logprobs: must be less"),
        ("/tokenize", {}, 400, "either prompt or messages"),
        ("/tokenize", {"prompt": "x", "return_token_strs": True}, 400, "return_token_strs"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "x", "tool_calls": 1}]},
            400,
            "must be a list",
        ),
        ("/detokenize", {"tokens": [1, 999]}, 400, "999 is out of range"),
        ("/v1/embeddings", {}, 404, "nothing is served at /v1/embeddings"),
    ],
)
def test_bad_requests_are_told_so(path: str, body: Any, status: int, words: str) -> None:
    async def test(client: httpx.AsyncClient, _: FakeEngine) -> None:
        response = await client.post(path, json=body)
        assert response.status_code == status and words in response.json()["error"]["message"]

    with_app(test, max_queue=1000)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b'"' + b"\xff" * 9 + b'"',
        b"null",
        b'{"model": "m", "prompt": 1e999}',
        b'{"model": "m", "prompt": "x", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"model": "m", "prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
        "{}".encode("utf-16"),
    ],
)
def test_hostile_bodies_are_refused(content: bytes) -> None:
    async def test(client: httpx.AsyncClient, _: FakeEngine) -> None:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
            response = await client.post(path, content=content, headers={"content-type": "application/json"})
            assert response.status_code == 400, response.text
        assert (await client.post("/v1/completions", json=TEXT)).status_code == 200

    with_app(test)


def test_bodies_that_are_too_large() -> None:
    async def parts() -> Any:
        for _ in range(40):
            yield b"x" * 1000

    async def test(client: httpx.AsyncClient, _: FakeEngine) -> None:
        for content in (b"x" * 40_000, parts()):
            response = await client.post(
                "/v1/completions", content=content, headers={"content-type": "application/json"}
            )
            assert (
                response.status_code == 413 and "10240 bytes at most" in response.json()["error"]["message"]
            )

    with_app(test, max_body="10KiB")


@pytest.mark.parametrize("value", [b"1,", b"[],", b'{"":1},', b'[[["'])
def test_bodies_of_too_many_values(value: bytes) -> None:
    """All wait while one is read."""

    async def test(client: httpx.AsyncClient, _: FakeEngine) -> None:
        response = await client.post("/v1/completions", content=b'{"prompt": [' + value * 66_000)
        assert response.status_code == 413 and "too many values" in response.json()["error"]["message"]
        assert response.headers["connection"] == "close"
        assert (
            await client.post("/v1/completions", json={"model": "m", "prompt": [[1]] * 500})
        ).status_code == 200

    with_app(test, max_queue=500, max_body="512KiB")


def test_a_body_that_does_not_come() -> None:
    async def test() -> None:
        async def never() -> Any:
            await asyncio.sleep(9)

        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        app = make_app(FakeEngine(), FakeTokens(), "m", Settings())
        guard = BodyLimit(app, 1000, 0.05)
        headers = [(b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": headers,
            "query_string": b"",
        }
        await guard(scope, never, send)
        assert sent[0]["status"] == 408 and b"did not come within" in sent[1]["body"]

    asyncio.run(test())


def test_a_key_is_asked_for() -> None:
    async def test(client: httpx.AsyncClient, _: FakeEngine) -> None:
        for sent in (
            {},
            {"authorization": "Bearer no"},
            {"authorization": "Basic right"},
            {"authorization": "right"},
        ):
            response = await client.post("/v1/completions", json=TEXT, headers=sent)
            assert response.status_code == 401, sent
        for name in ("Bearer", "bearer"):
            right = {"authorization": f"{name} right"}
            assert (await client.post("/v1/completions", json=TEXT, headers=right)).status_code == 200
        assert (await client.get("/health")).status_code == 200

    with_app(test, api_key="right")


@pytest.mark.parametrize(
    ("name", "value"), [("max_queue", 0), ("timeout", 0.0), ("drain", -1.0), ("port", 1 << 16)]
)
def test_settings_that_make_no_sense(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be"):
        Settings(**{name: value})  # type: ignore[arg-type]


def test_too_many_requests_are_turned_away() -> None:
    async def test(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.stays_at = 0
        asked = [asyncio.create_task(client.post("/v1/completions", json=TEXT)) for _ in range(6)]
        while sum(task.done() for task in asked) < 4:
            await asyncio.sleep(0.01)
        engine.goes_on.set()
        found = await asyncio.gather(*asked)
        assert sorted(response.status_code for response in found) == [200] * 2 + [429] * 4
        refused = next(response for response in found if response.status_code == 429)
        assert refused.headers["retry-after"] and "2 requests are open" in refused.json()["error"]["message"]

    with_app(test, max_queue=2)


def test_or_wait() -> None:
    async def test(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.pause = 0.01
        found = await asyncio.gather(*(client.post("/v1/completions", json=TEXT) for _ in range(6)))
        assert {response.status_code for response in found} == {200}

    with_app(test, max_queue=2, wait_when_full=True)


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_ends_a_request(stream: bool) -> None:
    async def test(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.stays_at = 1
        response = await client.post("/v1/completions", json={**TEXT, "timeout": 1.0, "stream": stream})
        if stream:
            assert events(response)[-1]["error"]["code"] == "timeout"
        else:
            assert response.status_code == 408

    assert with_app(test).aborted == 1


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies(stream: bool) -> None:
    async def test(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.dies_after = 2
        response = await client.post("/v1/completions", json={**TEXT, "stream": stream})
        if stream:
            assert response.status_code == 200 and "ended" in events(response)[-1]["error"]["message"]
        else:
            assert response.status_code == 503 and response.headers["retry-after"]
        engine.state = State.STARTING
        assert (await client.post("/v1/completions", json=TEXT)).status_code == 503
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/health/live")).status_code == 200

    with_app(test)


def test_null_is_as_good_as_nothing() -> None:
    async def test(client: httpx.AsyncClient, _: FakeEngine) -> None:
        names = ("n", "stream", "stream_options", "temperature", "top_p", "presence_penalty", "logprobs", "seed", "stop",
                 "tools", "tool_choice", "parallel_tool_calls", "response_format", "user", "ignore_eos")  # fmt: skip
        for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
            known = {name for name in names if path.endswith("chat/completions") or "tool" not in name}
            assert (await client.post(path, json={**body, **dict.fromkeys(known)})).status_code == 200
            assert (await client.post(path, json={**body, "no_such_field": None})).status_code == 400
        schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
        properties = schemas["ChatRequest"]["properties"]
        assert {"type": "null"} in properties["n"]["anyOf"] and properties["n"]["default"] == 1
        # What the model's own file may fill in has no default that is known before.
        assert {"type": "null"} in properties["temperature"]["anyOf"]
        assert properties["temperature"].get("default") is None
        assert properties["messages"]["type"] == "array"

    requests = with_app(test).requests
    assert all((ask.params.n, ask.params.temperature, ask.params.top_p) == (1, 1.0, 1.0) for ask in requests)


@pytest.mark.parametrize("stream", [False, True])
def test_a_mistake_of_the_servers_is_answered_too(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(client: httpx.AsyncClient, _: FakeEngine) -> None:
        def fails(writer: TextWriter, index: int, delta: Any) -> Any:
            if delta.finish_reason:
                raise ZeroDivisionError
            return taken(writer, index, delta)

        taken = TextWriter.take
        monkeypatch.setattr(TextWriter, "take", fails)
        response = await client.post(
            "/v1/completions", json={**TEXT, "stream": stream}, headers={"x-request-id": "r1"}
        )
        said = events(response)[-1] if stream else response.json()
        assert response.status_code == (200 if stream else 500) and response.headers["x-request-id"] == "r1"
        assert said["error"]["type"] == "server_error" and "its log says more" in said["error"]["message"]

    with_app(test)


def test_waiting_to_be_let_in_counts_towards_the_timeout() -> None:
    async def test(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.stays_at = 0
        first = asyncio.create_task(client.post("/v1/completions", json=TEXT))
        while not engine.open:
            await asyncio.sleep(0.01)
        second = await client.post("/v1/completions", json={**TEXT, "timeout": 0.05})
        assert second.status_code == 408 and not first.done()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first

    assert len(with_app(test, max_queue=1, wait_when_full=True).requests) == 1


def test_a_client_that_goes_away_while_its_grammar_is_tried() -> None:
    async def run() -> None:
        engine = FakeEngine()
        app = make_app(engine, FakeTokens(), "m", Settings())
        begun, gone, sent = asyncio.Event(), asyncio.Event(), list[Any]()

        async def never(*_: Any) -> None:
            begun.set()
            await asyncio.Event().wait()

        app.state.api.grammars.check = never
        bodies = [{"type": "http.request", "body": json.dumps({**TEXT, "guided_regex": "a"}).encode()}]

        async def receive() -> Any:
            if bodies:
                return bodies.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": headers,
            "query_string": b"",
        }
        served = asyncio.create_task(app(scope, receive, send))
        await begun.wait()
        gone.set()
        async with asyncio.timeout(20):
            await served
        assert sent[0]["status"] == 499 and not engine.requests and app.state.api.limiter.num_open == 0

    asyncio.run(run())


def test_the_chosen_token_is_among_the_likeliest() -> None:
    writer = TextWriter("m", 1, lambda ids: chr(ids[0]), True)
    for token, top in ((97, ((98, -0.1),)), (98, ((98, -0.1), (99, -2.0))), (97, ())):
        writer.take(
            0, Delta(0, chr(token), (token,), None, (Logprob(token, -0.1 if token == 98 else -3.0, top),))
        )
    found = writer.body()["choices"][0]["logprobs"]
    assert found["top_logprobs"] == [{"b": -0.1, "a": -3.0}, {"b": -0.1, "c": -2.0}, {"a": -3.0}]
    assert (found["tokens"], found["text_offset"]) == (["a", "b", "a"], [0, 1, 2])


@pytest.mark.parametrize("kept", [True, False])
def test_what_is_streamed_is_not_kept(kept: bool) -> None:
    readers = AnswerParser()
    for writer in (
        TextWriter("m", 1, lambda ids: "x", True, kept),
        ChatWriter("m", 1, lambda ids: "x", True, kept, None, lambda: readers),
    ):
        for end in (None, "stop"):
            (choice,) = writer.take(0, Delta(0, "ab", (5,), end, (Logprob(5, -1.0, ()),)))  # type: ignore[arg-type]
            assert choice["finish_reason"] == end and choice["logprobs"]
        assert ("abab" in json.dumps(writer.body())) is kept and writer.usage()["completion_tokens"] == 2


def test_log_probabilities_name_special_tokens() -> None:
    tokens = Tokenizer(str(Path(__file__).parents[2] / "models/demo"))
    api = Api(FakeEngine(), tokens, "m", Settings())
    for token in tokens.eos_ids:
        assert api._token_text([token]) and not tokens.decode([token])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("image_url", "images are not served: m is served for text"),
        ("input_audio", "audio is not served: m is served for text"),
        ("video_url", "video is not served: m is served for text"),
        ("file", "files are not served: m is served for text"),
        ("texts", "messages.0.content.1: a part must be an object of type 'text'"),
    ],
)
def test_what_is_no_text_is_refused_by_its_name(kind: str, message: str) -> None:
    async def test(client: httpx.AsyncClient, _: FakeEngine) -> None:
        content = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": "https://a/b"}}]
        body = {"model": "m", "messages": [{"role": "user", "content": content}]}
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 400 and response.json()["error"]["message"] == message

    assert not with_app(test).requests


def test_models_plan_and_tokens() -> None:
    async def test(client: httpx.AsyncClient, _: FakeEngine) -> None:
        (entry,) = (await client.get("/v1/models")).json()["data"]
        assert (entry["id"], entry["max_model_len"]) == ("m", 64)
        assert (await client.get("/v1/models/m")).json() == entry
        assert (await client.get("/v1/models/none")).status_code == 404
        assert (await client.get("/v1/plan")).json() == {"model": "m", "dtype": "none"}
        assert (await client.post("/tokenize", json={"prompt": "ab"})).json()["tokens"] == [97, 98]
        assert (await client.post("/detokenize", json={"tokens": [97, 98]})).json() == {"prompt": "ab"}

    with_app(test)


def test_priorities() -> None:
    async def test(client: httpx.AsyncClient, _: FakeEngine) -> None:
        for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
            assert (await client.post(path, json={**body, "priority": -3})).status_code == 200
            assert (await client.post(path, json={**body, "priority": 1 << 31})).status_code == 400

    assert [ask.priority for ask in with_app(test).requests] == [-3, -3]


def test_priorities_are_refused_where_they_are_not_honoured() -> None:
    async def test(client: httpx.AsyncClient, _: FakeEngine) -> None:
        response = await client.post("/v1/completions", json={**TEXT, "priority": 1})
        assert response.status_code == 400 and "--scheduling priority" in response.text
        assert (await client.post("/v1/completions", json={**TEXT, "priority": 0})).status_code == 200

    with_app(test, scheduling="fcfs")
    with pytest.raises(ConfigError, match="fcfs"):
        Settings(scheduling="fair")


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'


def test_tool_calls_and_reasoning() -> None:
    async def test(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.ready = wire.Ready(1000, 256, {})
        said = {"role": "user", "content": f"<think>hm</think>So: {CALL}"}
        asked: dict[str, Any] = {"model": "m", "messages": [said], "tools": [TOOL]}
        (choice,) = (await client.post("/v1/chat/completions", json=asked)).json()["choices"]
        message = choice["message"]
        assert (message["reasoning_content"], message["content"].strip()) == ("hm", "So:")
        (call,) = message["tool_calls"]
        assert call["function"]["name"] == "look" and json.loads(call["function"]["arguments"]) == {"at": 1}
        chunks = events(await client.post("/v1/chat/completions", json={**asked, "stream": True}))
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        pieces = [piece for delta in deltas for piece in delta.get("tool_calls", [])]
        assert "".join(piece["function"].get("arguments") or "" for piece in pieces) == '{"at": 1}'
        assert "".join(delta.get("content") or "" for delta in deltas).strip() == "So:"
        plain = (await client.post("/v1/chat/completions", json={"model": "m", "messages": [said]})).json()
        assert CALL in plain["choices"][0]["message"]["content"], "calls are read where tools are offered"

    with_app(test)


def deep(count: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(count):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


HOSTILE = [
    {
        "type": "object",
        "properties": {"VALUE": {"enum": ["\ud800"]}, 'KEY"\n/>': {"$ref": "#/$defs"}},
        "required": [1, "x"],
    },
    {"type": "object", "properties": {"a": {"type": [[]], "anyOf": [1], "enum": {}}}},
    {"type": "object", "properties": {"a": True, "b": None, "c": []}, "$defs": 5},
    deep(60),
    deep(400),
]


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic", "hermes", "deepseek_v32"])
def test_hostile_schemas_of_tools(name: str) -> None:
    """They are followed or refused, and never an error of the server's."""

    async def test(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.ready = wire.Ready(1000, 256, {})
        for schema in HOSTILE:
            for choice in ("auto", "required"):
                tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
                asked = {**CHAT, "tools": [tool], "tool_choice": choice}
                response = await client.post("/v1/chat/completions", content=json.dumps(asked).encode(),
                                             headers={"content-type": "application/json"})  # fmt: skip
                assert response.status_code in {200, 400}, response.text

    with_app(test, tool_format=name)


def test_a_body_that_is_not_said_to_be_json_is_told_so() -> None:
    async def test(client: httpx.AsyncClient, _: FakeEngine) -> None:
        response = await client.post("/v1/completions", content=b'{"prompt": "a"}')
        message = response.json()["error"]["message"]
        assert response.status_code == 400 and "Content-Type: application/json" in message

    with_app(test)

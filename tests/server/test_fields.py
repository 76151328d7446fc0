"""Fields that other servers have beside OpenAI's, and the routes of operators: over a fake engine."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from test_app import CHAT, TEXT, with_app

from conftest import FakeEngine, FakeTokens  # type: ignore[attr-defined]
from nibble.engine.tokenizer import Tokenizer
from nibble.server.engine_client import State

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


def test_fields_reach_the_engine() -> None:
    asked = {"min_tokens": 2, "bad_words": ["x"], "include_stop_str_in_output": True}

    async def test(client: httpx.AsyncClient, _: FakeEngine) -> None:
        for path, body in ((COMPLETIONS, TEXT), (CHATS, CHAT)):
            assert (await client.post(path, json={**body, **asked})).status_code == 200

    for request in with_app(test).requests:
        params = request.params
        assert (params.min_tokens, params.bad_words, params.include_stop_str_in_output) == (2, ("x",), True)


def test_the_only_model_need_not_be_named() -> None:
    async def test(client: httpx.AsyncClient, _: FakeEngine) -> None:
        for path, body in ((COMPLETIONS, TEXT), (CHATS, CHAT)):
            for model in ({}, {"model": None}):
                asked = {key: value for key, value in body.items() if key != "model"} | model
                answer = await client.post(path, json=asked)
                assert answer.status_code == 200 and answer.json()["model"] == "m"

    with_app(test)


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({"prompt": "abcdef", "truncate_prompt_tokens": 4}, "cdef"),
        ({"prompt": [97, 98, 99], "truncate_prompt_tokens": 9}, "abc"),
        ({"prompt": "ab" * 100, "truncate_prompt_tokens": -1, "max_tokens": 8}, "ab" * 28),
        ({"prompt": "ab" * 100, "truncate_prompt_tokens": -1, "max_tokens": 99}, "b"),
    ],
)
def test_prompts_keep_their_ends(asked: dict[str, Any], kept: str) -> None:
    async def test(client: httpx.AsyncClient, _: FakeEngine) -> None:
        body = (await client.post(COMPLETIONS, json={"echo": True, **asked})).json()
        assert body["choices"][0]["text"].startswith(kept) and body["usage"]["prompt_tokens"] == len(kept)
        turns = [{"role": "user", "content": "ab" * 100}]
        answer = await client.post(CHATS, json={"messages": turns, "truncate_prompt_tokens": 10})
        assert answer.json()["choices"][0]["message"]["content"] == "ab" * 5

    engine = with_app(test)
    assert "".join(map(chr, engine.requests[0].prompt)) == kept


class Templates(FakeTokens):
    """Notes what a chat template would get."""

    kwargs: dict[str, Any]

    def chat(self, messages: Any, tools: Any = None, **kwargs: Any) -> list[int]:
        Templates.kwargs = kwargs
        return super().chat(messages, tools)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, {"add_generation_prompt": True}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "max", "a": 1}},
            {"reasoning_effort": "max", "a": 1},
        ),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        ({"continue_final_message": True}, {"continue_final_message": True}),
        (
            {"continue_final_message": True, "add_generation_prompt": False},
            {"continue_final_message": True, "add_generation_prompt": False},
        ),
    ],
)
def test_what_templates_get(
    asked: dict[str, Any], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("test_app.FakeTokens", Templates)

    async def test(client: httpx.AsyncClient, _: FakeEngine) -> None:
        assert (await client.post(CHATS, json={**CHAT, **asked})).status_code == 200

    with_app(test)
    usual = {"add_generation_prompt": True, "continue_final_message": False}
    assert Templates.kwargs == {**usual, **expected}


def test_an_answer_that_goes_on_with_a_message(tiny: Any) -> None:
    tokenizer = Tokenizer(str(tiny))
    tokenizer._inner.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well, the"}]
    texts = [
        tokenizer.decode(tokenizer.chat(turns, **kwargs))
        for kwargs in ({}, {"continue_final_message": True}, {"add_generation_prompt": False})
    ]
    whole = "<user>hi</><assistant>well, the</>"
    assert texts == [whole + "<assistant>", whole.removesuffix("</>"), whole]


@pytest.mark.parametrize(
    ("message", "reasoning"), [("<think>\nwell", "ab"), ("<think>a</think>b", None), ("b", None)]
)
def test_reasoning_goes_on_where_a_message_ends_in_it(message: str, reasoning: str | None) -> None:
    engine = FakeEngine()

    async def test(client: httpx.AsyncClient, _: FakeEngine) -> None:
        turns = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": message}]
        asked = {"messages": turns, "continue_final_message": True, "max_tokens": 2}
        body = (await client.post(CHATS, json=asked)).json()
        assert body["choices"][0]["message"].get("reasoning_content") == reasoning

    with_app(test, engine)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (COMPLETIONS, {**TEXT, "suffix": "y"}, "suffix: is not served"),
        (COMPLETIONS, {**TEXT, "min_token": 1}, "min_token: unknown field; did you mean 'min_tokens'?"),
        (COMPLETIONS, {**TEXT, "colour": 1}, "colour: unknown field"),
        (COMPLETIONS, {"prompt": {}}, "prompt: must be a string or a list"),
        (COMPLETIONS, {}, "prompt: is missing"),
        (
            COMPLETIONS,
            {**TEXT, "min_tokens": 17},
            "min_tokens must be at most max_tokens, and 17 is more than 16",
        ),
        (COMPLETIONS, {**TEXT, "bad_words": [""]}, "bad_words must be words, not empty strings"),
        (COMPLETIONS, {**TEXT, "truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be at least 1"),
        (CHATS, {**CHAT, "logit_bias": [1]}, "logit_bias: must be an object"),
        (CHATS, {**CHAT, "n": 1.5}, "n: must be an integer"),
        (CHATS, [], "must be an object"),
        (CHATS, {**CHAT, "reasoning_effort": "much"}, "reasoning_effort: must be 'none', 'minimal', 'low'"),
        (
            CHATS,
            {**CHAT, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message and add_generation_prompt cannot both be true",
        ),
    ],
)
def test_refusals_in_plain_words(path: str, body: Any, message: str) -> None:
    async def test(client: httpx.AsyncClient, _: FakeEngine) -> None:
        response = await client.post(path, json=body)
        assert response.status_code == 400 and response.json()["error"]["message"].startswith(message)

    with_app(test)


def test_routes_of_operators() -> None:
    engine = FakeEngine()

    async def test(client: httpx.AsyncClient, _: FakeEngine) -> None:
        assert (await client.get("/version")).json()["version"]
        assert (await client.get("/load")).json() == {"server_load": 0}
        assert (await client.post("/reset_prefix_cache")).status_code == 200 and engine.resets == 1
        assert [(await client.request(verb, "/ping")).status_code for verb in ("GET", "POST")] == [200, 200]
        engine.state = State.STARTING
        assert [(await client.request(verb, "/ping")).status_code for verb in ("GET", "POST")] == [503, 503]
        assert (await client.post("/reset_prefix_cache")).status_code == 503

    with_app(test, engine)


def test_only_ping_needs_no_key() -> None:
    async def test(client: httpx.AsyncClient, _: FakeEngine) -> None:
        assert (await client.get("/ping")).status_code == 200
        for verb, path in (("GET", "/load"), ("GET", "/version"), ("POST", "/reset_prefix_cache")):
            assert (await client.request(verb, path)).status_code == 401

    with_app(test, api_key="k")

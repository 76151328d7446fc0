"""Clients of the ecosystem beside OpenAI's own, each where it is installed: LangChain's and LiteLLM's.

The bundled model answers what a model must answer; an engine that says its prompt back stands in where an answer must
hold a tool call, and where a server is locked, full or late.
"""

from __future__ import annotations

import gc
import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from conftest import FakeEngine, FakeTokens, listening  # type: ignore[attr-defined]
from nibble.server import worker as wire
from nibble.server.app import make_app
from nibble.server.settings import Settings

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs, not ours
HELLO = [{"role": "user", "content": "Hello"}]
LONG = "x = 1\n" * 8000
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": WEATHER}]


class Place(BaseModel):
    """A city, as it is asked for."""

    city: str = Field(max_length=8)
    size: Literal[1, 2, 3]


SCHEMA = {**Place.model_json_schema(), "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}


@contextmanager
def echo(engine: FakeEngine | None = None, **settings: Any) -> Iterator[str]:
    """The address of a server that says prompts back."""
    engine = engine or FakeEngine()
    engine.ready = wire.Ready(4096, 256, {})
    with listening(make_app(engine, FakeTokens(), "demo", Settings(**settings))) as url:
        yield f"{url}v1"


# LangChain

Chat = Callable[..., Any]


@pytest.fixture(scope="module")
def chat_at() -> Chat:
    """Makes a chat model of an address."""
    found = pytest.importorskip("langchain_openai", exc_type=ImportError)

    def make(url: str, **fields: Any) -> Any:
        asked = {"model": "demo", "api_key": "none", "max_retries": 0, "temperature": 0, "max_tokens": 24}
        return found.ChatOpenAI(**{**asked, "base_url": url, **fields})

    return make


@pytest.fixture(scope="module")
def chat(server: str, chat_at: Chat) -> Chat:
    return partial(chat_at, f"{server}/v1")


def test_langchain_chats_and_streams(chat: Chat) -> None:
    whole = chat().invoke("Hello")
    pieces = list(chat(stream_usage=True).stream("Hello"))
    assert whole.content and whole.content == "".join(piece.content for piece in pieces)
    usages = [piece.usage_metadata for piece in pieces if piece.usage_metadata]
    assert len(pieces) > 3 and len(usages) == 1
    for usage in (*usages, whole.usage_metadata):
        assert (usage["input_tokens"], usage["output_tokens"]) == (7, 24)
    assert [answer.content for answer in chat().batch(["Hello", "Hello"])] == [whole.content] * 2


def test_langchain_sampling(chat: Chat) -> None:
    def texts(seed: int) -> list[str]:
        found = chat(n=3, temperature=1.0, seed=seed).generate([chat()._convert_input("Hello").to_messages()])
        return [one.text for one in found.generations[0]]

    assert texts(3) == texts(3) and len(set(texts(3))) > 1
    assert chat(stop=["l"]).invoke("Hello").content == "He"
    told = chat(max_tokens=3, logprobs=True, top_logprobs=2).invoke("Hello").response_metadata["logprobs"]
    assert [len(entry["top_logprobs"]) for entry in told["content"]] == [2, 2, 2]


@pytest.mark.parametrize("strict", [None, True])
def test_langchain_structured_answers(chat: Chat, strict: bool | None) -> None:
    asked = chat(max_tokens=80).with_structured_output(Place, method="json_schema", strict=strict)
    assert isinstance(asked.invoke("Hello"), Place)


def test_langchain_completions(server: str) -> None:
    found = pytest.importorskip("langchain_openai", exc_type=ImportError)
    asked = {
        "model": "demo",
        "base_url": f"{server}/v1",
        "api_key": "none",
        "max_tokens": 8,
        "temperature": 0,
    }
    llm = found.OpenAI(**asked)
    assert "".join(llm.stream("import")) == llm.invoke("import") != ""


def test_langchain_tools(chat_at: Chat) -> None:
    with echo(tool_format="hermes") as url:
        asked = chat_at(url, max_tokens=200).bind_tools(TOOLS)
        answer = asked.invoke(CALL)
        joined = None
        for piece in asked.stream(CALL):
            joined = piece if joined is None else joined + piece
        for found in (answer, joined):
            (call,) = found.tool_calls
            assert (call["name"], call["args"]) == ("weather", {"city": "Oslo"}) and call["id"]
        turns = [
            "What?",
            answer,
            {"role": "tool", "tool_call_id": answer.tool_calls[0]["id"], "content": "rain"},
        ]
        assert asked.invoke(turns).content == "What?||rain"
        assert not chat_at(url, max_tokens=200).bind_tools(TOOLS, tool_choice="none").invoke(CALL).tool_calls


def test_langchain_knows_what_went_wrong(chat: Chat, server: str) -> None:
    found = pytest.importorskip("langchain_openai", exc_type=ImportError)
    from langchain_core import exceptions

    for text in (LONG, LONG * 100):  # refused by the engine, and before it is made into tokens
        with pytest.raises(exceptions.ContextOverflowError, match="maximum context length is 8192"):
            chat().invoke(text)
        with pytest.raises(exceptions.ContextOverflowError):
            next(chat().stream(text))
    with pytest.raises(openai.NotFoundError, match="'gpt' is not served here") as caught:
        chat(model="gpt").invoke("Hello")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="top_p") as caught:
        chat(top_p=7).invoke("Hello")
    assert caught.value.param == "top_p" and caught.value.code is None
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    with pytest.raises(openai.BadRequestError, match="images are not served: demo is served for text"):
        chat().invoke([("user", image)])
    vectors = found.OpenAIEmbeddings(
        model="demo", base_url=f"{server}/v1", api_key="none", check_embedding_ctx_length=False
    )
    with pytest.raises(openai.NotFoundError, match="nothing is served at /v1/embeddings"):
        vectors.embed_query("x")


def test_langchain_at_a_server_that_is_locked_or_late(chat_at: Chat) -> None:
    slow = FakeEngine()
    slow.pause = 0.2
    with echo(slow, api_key="right", timeout=0.3) as url:
        with pytest.raises(openai.AuthenticationError, match="Bearer KEY"):
            chat_at(url).invoke("Hello")
        with pytest.raises(openai.APIStatusError, match="within its time") as caught:
            chat_at(url, api_key="right").invoke("Hello")
        assert (caught.value.status_code, caught.value.code) == (408, "timeout")
        with pytest.raises(openai.APIError, match="within its time"):
            list(chat_at(url, api_key="right").stream("Hello"))


# LiteLLM


@pytest.fixture(scope="module")
def litellm() -> Iterator[Any]:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the internet when it is imported
    found = pytest.importorskip("litellm", exc_type=ImportError)
    found.suppress_debug_info = True
    yield found
    with warnings.catch_warnings():  # it leaves connections open, which are not to be later tests' failures
        warnings.simplefilter("ignore")
        gc.collect()


@pytest.fixture(params=["openai", "hosted_vllm"])
def complete(request: pytest.FixtureRequest, litellm: Any, server: str) -> Chat:
    """Asks for a chat completion, as of OpenAI's server or of vLLM's. at: of another server."""

    def ask(at: str = f"{server}/v1", model: str = "demo", **fields: Any) -> Any:
        asked = {"api_key": "none", "messages": HELLO, "temperature": 0, "max_tokens": 24, "max_retries": 0}
        return litellm.completion(**{**asked, "model": f"{request.param}/{model}", "api_base": at, **fields})

    return ask


def test_litellm_chats_and_streams(complete: Chat) -> None:
    whole = complete()
    pieces = list(complete(stream=True, stream_options={"include_usage": True}))
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == whole.choices[0].message.content != ""
    usage = next(piece.usage for piece in pieces if getattr(piece, "usage", None))
    assert usage.completion_tokens == whole.usage.completion_tokens == 24


def test_litellm_sampling(complete: Chat) -> None:
    def texts(seed: int) -> list[str]:
        return [choice.message.content for choice in complete(n=3, temperature=1.0, seed=seed).choices]

    assert texts(4) == texts(4) and len(set(texts(4))) > 1
    assert complete(stop=["l"]).choices[0].message.content == "He"
    told = complete(max_tokens=3, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in told] == [2, 2, 2]
    found = complete(max_tokens=80, response_format=FORM).choices[0].message.content
    assert Place.model_validate(json.loads(found))


def test_litellm_tools(complete: Chat) -> None:
    with echo(tool_format="hermes") as url:
        said = [{"role": "user", "content": CALL}]
        asked = {"at": url, "messages": said, "max_tokens": 200, "tools": TOOLS}
        (call,) = complete(**asked).choices[0].message.tool_calls
        assert call.function.name == "weather" and json.loads(call.function.arguments) == {"city": "Oslo"}
        pieces = [
            piece.choices[0].delta.tool_calls for piece in complete(**asked, stream=True) if piece.choices
        ]
        told = "".join(call.function.arguments or "" for calls in pieces for call in calls or ())
        assert json.loads(told) == {"city": "Oslo"}


def test_litellm_knows_what_went_wrong(litellm: Any, complete: Chat) -> None:
    for text in (LONG, LONG * 100):
        for stream in (False, True):
            with pytest.raises(litellm.ContextWindowExceededError):
                complete(messages=[{"role": "user", "content": text}], stream=stream)
    with pytest.raises(litellm.NotFoundError, match="not served here"):
        complete(model="gpt")
    with pytest.raises(litellm.BadRequestError, match="top_p"):
        complete(top_p=7)
    slow = FakeEngine()
    slow.pause = 0.2
    with echo(slow, api_key="right", timeout=0.3) as url:
        with pytest.raises(litellm.AuthenticationError):
            complete(at=url)
        with pytest.raises(litellm.Timeout):
            complete(at=url, api_key="right")
    body = {"model": "demo", "prompt": "long enough", "stream": True}
    slow.pause, slow.stays_at = 0.0, 1
    with echo(slow, max_queue=1) as url, httpx.stream("POST", f"{url}/completions", json=body) as taken:
        assert taken.status_code == 200
        with pytest.raises(litellm.RateLimitError):
            complete(at=url)

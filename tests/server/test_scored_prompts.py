"""Log-probabilities of prompts over HTTP: echo with logprobs, prompt_logprobs, max_tokens 0, whole and streamed."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from test_app import CHAT, events, with_app

from conftest import FakeEngine  # type: ignore[attr-defined]
from nibble.engine.request import Delta, Logprob
from nibble.server.engine_client import GenerationRequest, Piece
from nibble.server.writers import text_offsets

TOP = ((97, -0.5), (98, -1.5))
"""What every token is among, beside itself: `a` and `b`."""


class ScoringEngine(FakeEngine):  # type: ignore[misc]
    """Says `xy`; the log-probability of a token is minus its place in the prompt, and infinitely small for `z`."""

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[Piece]]:
        self.requests.append(request)
        params = request.params
        for index in range(params.n):
            answer = "xy"[: params.max_tokens]
            deltas = [
                Delta(index, letter, (ord(letter),), None, self._of(letter, params.logprobs))
                for letter in answer
            ]
            deltas.append(Delta(index, "", (), "length"))
            for number, delta in enumerate(deltas):
                of_prompt = None
                if params.prompt_logprobs is not None and (index, number) == (0, 0):
                    entries = [
                        self._entry(token, -float(i), params.prompt_logprobs)
                        for i, token in enumerate(request.prompt)
                    ]
                    of_prompt = (None, *entries[1:])
                whole = Delta(
                    index,
                    delta.text,
                    delta.token_ids,
                    delta.finish_reason,
                    delta.logprobs,
                    prompt_logprobs=of_prompt,
                )
                yield [Piece(whole, 0, ((time.monotonic(), 1),), time.monotonic())]

    def _of(self, letter: str, count: int | None) -> tuple[Logprob, ...]:
        return () if count is None else (self._entry(ord(letter), -0.25, count),)

    def _entry(self, token: int, logprob: float, count: int) -> Logprob:
        return Logprob(token, float("-inf") if token == ord("z") else logprob, TOP[:count], 7)


def ask(path: str, **body: Any) -> Any:
    found: list[Any] = []

    async def test(client: httpx.AsyncClient, _: FakeEngine) -> None:
        answer = await client.post(path, json={"model": "m", **body})
        found.append(events(answer) if body.get("stream") else (answer.status_code, answer.json()))

    with_app(test, ScoringEngine())
    return found[0]


ECHOED = {
    "tokens": ["c", "d", "z", "x", "y"],
    "token_logprobs": [None, -1.0, -9999.0, -0.25, -0.25],
    "top_logprobs": [None, {"a": -0.5, "d": -1.0}, {"a": -0.5, "z": -9999.0}, {"a": -0.5, "x": -0.25}, {"a": -0.5, "y": -0.25}],
    "text_offset": [0, 1, 2, 3, 4],
}  # fmt: skip


@pytest.mark.parametrize("prompt", ["cdz", [99, 100, 122]])
def test_echo_with_logprobs(prompt: Any) -> None:
    _, body = ask("/v1/completions", prompt=prompt, echo=True, logprobs=1, max_tokens=5)
    (choice,) = body["choices"]
    assert choice["text"] == "cdzxy" and choice["logprobs"] == ECHOED and "prompt_logprobs" not in choice
    assert body["usage"]["completion_tokens"] == 2


def test_echo_in_a_stream() -> None:
    chunks = ask("/v1/completions", prompt="cdz", echo=True, logprobs=1, max_tokens=5, stream=True)
    parts = [chunk["choices"][0] for chunk in chunks]
    assert parts[0]["text"] == "cdzx" and "".join(part["text"] for part in parts) == "cdzxy"
    assert {key: [one for part in parts for one in part["logprobs"][key]] for key in ECHOED} == ECHOED


def test_a_prompt_alone_and_several_of_them() -> None:
    _, body = ask(
        "/v1/completions", prompt=[[99, 100], [122, 99, 100]], echo=True, logprobs=0, max_tokens=0, n=2
    )
    texts = [choice["text"] for choice in body["choices"]]
    assert texts == ["cd", "cd", "zcd", "zcd"]
    logprobs = [choice["logprobs"]["token_logprobs"] for choice in body["choices"]]
    assert logprobs == [[None, -1.0]] * 2 + [[None, -1.0, -2.0]] * 2
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [None, {"d": -1.0}]
    assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    assert body["usage"]["completion_tokens"] == 0
    _, bare = ask("/v1/completions", prompt="cd", max_tokens=0)
    assert (bare["choices"][0]["text"], bare["choices"][0]["logprobs"]) == ("", None)


SHAPE = [
    None,
    {
        "100": {"logprob": -1.0, "rank": 7, "decoded_token": "d"},
        "97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
        "98": {"logprob": -1.5, "rank": 2, "decoded_token": "b"},
    },
]


def test_vllms_field() -> None:
    _, body = ask("/v1/completions", prompt="cd", prompt_logprobs=2, max_tokens=1)
    assert body["choices"][0]["prompt_logprobs"] == SHAPE and body["choices"][0]["logprobs"] is None
    # The two fields may ask for different numbers of alternatives.
    _, body = ask("/v1/completions", prompt="cd", prompt_logprobs=2, max_tokens=0, echo=True, logprobs=1)
    assert body["choices"][0]["prompt_logprobs"] == SHAPE
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [None, {"a": -0.5, "d": -1.0}]
    _, body = ask("/v1/chat/completions", messages=[{"role": "user", "content": "cd"}], prompt_logprobs=2)
    assert body["prompt_logprobs"] == SHAPE and "prompt_logprobs" not in body["choices"][0]
    _, body = ask("/v1/chat/completions", messages=CHAT["messages"])
    assert "prompt_logprobs" not in body


def test_no_more_than_one_answer_can_have() -> None:
    status, body = ask("/v1/completions", prompt=[[1] * 60] * 1000, logprobs=20, echo=True)
    assert (
        status == 400
        and "1260000 log-probabilities of prompts are more than the 1048576" in body["error"]["message"]
    )


def test_places_in_the_text() -> None:
    # A first <s> is no part of the text; <b> is, and so is a character of two tokens.
    pieces, marks = ["", "Hi", "", "", "é", "!"], ["<s>", "", "<b>", "\ufffd", "", ""]
    assert list(text_offsets("Hi<b>é!", pieces, marks)) == [0, 0, 2, 5, 5, 6]

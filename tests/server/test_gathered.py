"""Answers that are not streamed: the engine sends what it gathered, and nothing is lost of it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import zmq

from conftest import FakeEngine, FakeTokens, listening
from families import make, tiny_config
from nibble import LLM, SamplingParams
from nibble.engine.request import Delta, join_deltas
from nibble.models.hub import quiet
from nibble.server import worker as wire
from nibble.server.app import make_app
from nibble.server.settings import Settings
from nibble.server.worker import GATHER_S, GenerationRequest


def test_the_first_piece_goes_at_once_and_others_together(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(wire, "time", SimpleNamespace(monotonic=lambda: now))
    gathered = wire._Gathered()

    def sent(index: int, text: str, **fields: Any) -> str:
        return "".join(delta.text for delta in gathered.add(Delta(index, text, (ord(text),), **fields)))

    assert sent(0, "a") == "a" and sent(1, "x") == "x"
    assert not sent(0, "b") and not sent(1, "y")
    now = GATHER_S
    assert sent(0, "c") == "bc" and not sent(0, "d")
    assert sent(1, "z", finish_reason="length") == "yz"
    assert sent(0, "e", error="broken") == "de"


def test_deltas_are_joined_with_all_that_they_have() -> None:
    first = Delta(1, "a", (1,), prompt_logprobs=(None,))
    last = Delta(1, "b", (2, 3), "stop", stop_string="b", accepted_drafts=2)
    joined = join_deltas([first, last])
    assert joined == Delta(
        1, "ab", (1, 2, 3), "stop", prompt_logprobs=(None,), stop_string="b", accepted_drafts=2
    )
    assert join_deltas([first]) is first


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    with quiet():
        make("qwen3", tiny_config("qwen3")).save_pretrained(folder)
    with LLM(str(Path(folder)), kv_format="bf16", kv_memory="4MiB", device="cpu", max_running=8) as llm:
        yield llm


@pytest.mark.parametrize("n", [1, 3])
def test_an_engine_sends_less_often_and_as_much(llm: LLM, n: int) -> None:
    context = zmq.Context()
    ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    ours.bind("inproc://gathered")
    theirs.connect("inproc://gathered")
    worker = wire.Worker(llm, ours, os.getppid())
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, n=n, logprobs=1)
    answers, messages = dict[int, dict[int, list[Delta]]](), dict[int, int]()
    for number, is_streamed in enumerate((True, False)):
        worker._execute(wire.Submit(number, GenerationRequest([5, 6, 7], params, is_streamed=is_streamed)))
        while worker._num_open:
            llm.engine.step()
        worker._send(wire.Pieces(worker._outbox))
        worker._outbox = []
        event = wire.decode_event(theirs.recv())
        assert isinstance(event, wire.Pieces)
        messages[number] = len(event.items)
        for _, _, _, delta in event.items:
            answers.setdefault(number, {}).setdefault(delta.index, []).append(delta)
    assert messages[0] == 20 * n and messages[1] <= 4 * n
    for index in range(n):
        streamed, gathered = (join_deltas(answers[number][index]) for number in (0, 1))
        assert streamed == gathered and len(streamed.token_ids) == len(streamed.logprobs) == 20
    context.destroy(linger=0)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_the_server_says_which_requests_are_streamed(is_streamed: bool) -> None:
    engine = FakeEngine()
    app = make_app(engine, FakeTokens(), "m", Settings())  # type: ignore[arg-type]
    with listening(app) as url:
        body = {"model": "m", "prompt": "abc", "stream": is_streamed}
        assert httpx.post(f"{url}v1/completions", json=body).status_code == 200
    assert [request.is_streamed for request in engine.requests] == [is_streamed]

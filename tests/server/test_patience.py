"""Connections that say nothing are closed; those whose answer takes its time are not."""

from __future__ import annotations

import socket

import httpx
import pytest

from conftest import FakeEngine, FakeTokens, listening  # type: ignore[attr-defined]
from nibble.server.app import make_app
from nibble.server.middleware import HeadTimeoutProtocol
from nibble.server.settings import Settings

ANSWERED = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"


class Hasty(HeadTimeoutProtocol):
    timeout_s = 0.1


@pytest.mark.parametrize(
    "said", [b"", b"POST /v1/completions HTTP/1.1\r\nX: ", ANSWERED, ANSWERED + b"GET /"]
)
def test_a_connection_that_begins_no_request_is_closed(said: bytes) -> None:
    app = make_app(FakeEngine(), FakeTokens(), "m", Settings())
    with listening(app, http=Hasty) as url:
        address = httpx.URL(url)
        with socket.create_connection((address.host, address.port), timeout=20) as connection:
            connection.sendall(said)
            got = b""
            while part := connection.recv(1000):
                got += part
    assert got.startswith(b"HTTP/1.1 200" if said.startswith(ANSWERED) else b"")


def test_an_answer_may_take_longer() -> None:
    engine = FakeEngine()
    engine.pause = 0.1
    with listening(make_app(engine, FakeTokens(), "m", Settings()), http=Hasty) as url:
        for stream in (False, True):
            asked = {"model": "m", "prompt": "hello", "stream": stream}
            response = httpx.post(f"{url}v1/completions", json=asked)
            assert response.status_code == 200 and ("[DONE]" in response.text) is stream

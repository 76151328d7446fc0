"""Connections that say nothing are closed; those whose answer takes its time are not."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator
from typing import ClassVar
from urllib.parse import urlsplit

import httpx
import pytest

from conftest import FakeEngine, FakeTokens, listening  # type: ignore[attr-defined]
from nibble.server.app import make_app
from nibble.server.engine_client import GenerationRequest, Piece
from nibble.server.middleware import HeadTimeoutProtocol
from nibble.server.settings import Settings

ANSWERED = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"


class Watched(HeadTimeoutProtocol):
    """Its time is up when the test says so."""

    timeout_s = 3600.0
    made: ClassVar[list[Watched]] = []

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.made.append(self)

    def pass_time(self) -> None:
        """Let the time be up now, in the event loop, and then each tenth of a second."""
        timer, self.timeout_s = self._timer, 0.1
        check, arguments = timer._callback, timer._args
        timer.cancel()
        check(*arguments)


class Hearing(FakeEngine):
    """Lets the time of connections be up once their request is there."""

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[Piece]]:
        Watched.made.pop().pass_time()
        async for pieces in super().generate(request):
            yield pieces


@pytest.mark.parametrize(
    "said", [b"", b"POST /v1/completions HTTP/1.1\r\nX: ", ANSWERED, ANSWERED + b"GET /"]
)
def test_a_connection_that_begins_no_request_is_closed(said: bytes) -> None:
    app = make_app(FakeEngine(), FakeTokens(), "m", Settings())
    with listening(app, http=Watched) as url:
        address = httpx.URL(url)
        with socket.create_connection((address.host, address.port), timeout=300) as connection:
            connection.sendall(said)
            got = connection.recv(1000) if said.startswith(ANSWERED) else b""
            while not Watched.made:
                time.sleep(0.01)
            protocol = Watched.made.pop()
            protocol.loop.call_soon_threadsafe(protocol.pass_time)
            while part := connection.recv(1000):
                got += part
    assert got.startswith(b"HTTP/1.1 200" if said.startswith(ANSWERED) else b"")


def test_an_answer_may_take_longer() -> None:
    engine = Hearing()
    engine.pause = 0.1
    with listening(make_app(engine, FakeTokens(), "m", Settings()), http=Watched) as url:
        for stream in (False, True):
            asked = {"model": "m", "prompt": "hello", "stream": stream}
            response = httpx.post(f"{url}v1/completions", json=asked)
            assert response.status_code == 200 and ("[DONE]" in response.text) is stream


def test_a_head_without_an_end_is_refused() -> None:
    with listening(make_app(FakeEngine(), FakeTokens(), "m", Settings()), http=HeadTimeoutProtocol) as url:
        place = urlsplit(url)
        for path in ("health", "v1/completions"):  # on the same connection a whole request comes before
            with socket.create_connection((place.hostname, place.port), timeout=20) as connection:
                connection.sendall(ANSWERED)
                assert connection.recv(1000).startswith(b"HTTP/1.1 ")
                connection.sendall(f"POST /{path} HTTP/1.1\r\nHost: x\r\n".encode())
                with pytest.raises(OSError):
                    for _ in range(1000):
                        connection.sendall(b"X-A: " + b"a" * 4000 + b"\r\n")
                        time.sleep(0.001)
        # A body is none of it, nor are heads one after the other.
        asked = {"model": "m", "prompt": "hello", "user": "u" * 60}
        head = {"X-A": "a" * 30_000}
        with httpx.Client() as client:
            for _ in range(4):
                assert client.post(f"{url}v1/completions", json=asked, headers=head).status_code == 200
        long = {**asked, "prompt": "hello", "metadata": {"x": "y" * 200_000}}
        assert httpx.post(f"{url}v1/completions", json=long).status_code in {200, 400}

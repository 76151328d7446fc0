"""Servers for tests: a real one in processes of its own, and an application over a fake engine."""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from nibble.engine.request import Delta
from nibble.engine.tokenizer import Tokenizer
from nibble.errors import RequestError
from nibble.server import worker as wire
from nibble.server.engine_client import EngineDiedError, GenerationRequest, Piece, State

# Five seconds by default, which an answer of a busy machine may take longer than.
for name in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, name, 300.0)

PORTS = range(20000, 32000)
"""Below those that the system gives to connections, any of which could take a port before its server does."""


def free_port(count: int = 1) -> int:
    """Return the first of so many ports in a row, which no other call returns while this process lives.

    It keeps them with UDP, so that other processes of tests find them taken, and servers do not.
    """
    for first in range(PORTS.start + os.getpid() * 16 % len(PORTS), PORTS.stop - count):
        with ExitStack() as probes:
            keepers = list[socket.socket]()
            try:
                for port in range(first, first + count):
                    probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
                    keepers.append(socket.socket(type=socket.SOCK_DGRAM))
                    keepers[-1].bind(("127.0.0.1", port))
            except OSError:
                for keeper in keepers:
                    keeper.close()
                continue
            for keeper in keepers:
                atexit.register(keeper.close)
            return first
    raise AssertionError("no port is free")


class Address(str):
    """Of a server. pid: its process."""

    pid: int


@contextmanager
def running(*options: str, model: str = "demo", log: Path | None = None) -> Iterator[Address]:
    """A server's address. It must end by itself when it is told to. log: takes its standard error."""
    port = free_port()
    command = [sys.executable, "-m", "nibble", "serve", model, "--port", str(port), *options]
    with log.open("w") if log else nullcontext() as stderr:
        process = subprocess.Popen(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=stderr, start_new_session=True
        )
    url = Address(f"http://127.0.0.1:{port}")
    url.pid = process.pid
    try:
        wait_ready(url, process)
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()


def wait_ready(url: str, process: subprocess.Popen[bytes] | None = None, seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if process and process.poll() is not None:
            raise AssertionError(f"the server ended with code {process.returncode}")
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError("the server is not ready")


@contextmanager
def listening(app: FastAPI, **options: Any) -> Iterator[str]:
    """The address of an application, which is served in a thread. options: uvicorn's."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", **options))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.should_exit = server.force_exit = True
        thread.join()
        listener.close()


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    with running("--kv-format", "nvfp4", "--kv-memory", "64MiB", "--max-running", "32") as url:
        yield url


class FakeEngine:
    """Says its prompt back, token by token. pause: seconds between tokens; state: as an engine's; reason: why it ends;
    stays_at: the number of a token that comes when `goes_on` is set."""

    def __init__(self) -> None:
        self.state, self.restarts, self.pause = State.READY, 0, 0.0
        self.ready: wire.Ready | None = wire.Ready(64, 256, {"dtype": "none"})
        self.stats: Mapping[str, float] = {}
        self.open = self.aborted = self.resets = 0
        self.requests: list[GenerationRequest] = []
        self.dies_after: int | None = None
        self.stays_at: int | None = None
        self.goes_on = asyncio.Event()
        self.reason, self.stop_string = "length", ""

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[Piece]]:
        if self.state is not State.READY:
            raise EngineDiedError(f"the engine is {self.state}")
        if self.ready and len(request.prompt) >= self.ready.max_context:
            raise RequestError("the prompt is too long")
        self.open += 1
        self.requests.append(request)
        left, started = request.params.n, time.monotonic()
        try:
            for index in range(request.params.n):
                tokens = list(request.prompt)[: request.params.max_tokens]
                for i, token in enumerate(tokens):
                    await asyncio.sleep(self.pause)
                    if self.stays_at == i:
                        await self.goes_on.wait()
                    if self.dies_after is not None and i >= self.dies_after:
                        raise EngineDiedError("the engine's process ended; this request is lost")
                    reason = self.reason if i == len(tokens) - 1 else None
                    left -= reason is not None
                    stop_string = self.stop_string or None if reason else None
                    delta = Delta(index, chr(token), (token,), reason, stop_string=stop_string)  # type: ignore[arg-type]
                    yield [Piece(delta, 2, ((time.monotonic(), 1),), started)]
        finally:
            self.open -= 1
            self.aborted += left > 0

    async def reset_prefix_cache(self) -> None:
        if self.state is not State.READY:
            raise EngineDiedError(f"the engine is {self.state}")
        self.resets += 1


class FakeTokens:
    """A token is a character."""

    def encode(self, text: str, **options: Any) -> list[int]:
        return [min(ord(letter), 255) for letter in text]

    def decode(self, ids: Any, shown: Any = None) -> str:
        return "".join(map(chr, ids))

    longest = 1
    chat_template = "<tool_call> tools <think>"

    def chat(self, messages: Any, tools: Any = None, **kwargs: Any) -> list[int]:
        return self.encode("|".join(message["content"] for message in messages))

    def token_of(self, word: str) -> int | None:
        return None

    eos_ids = frozenset({0})

    def for_grammars(self, vocabulary: int, eos_ids: list[int]) -> Any:
        """The bundled model's view."""
        found = Tokenizer(str(Path(__file__).parents[2] / "models/demo"))
        return found.for_grammars(len(found), eos_ids)

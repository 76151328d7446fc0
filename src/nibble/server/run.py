"""The server as a program: starts the engine's process, listens, and drains when a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

import nibble
from nibble.config import Config
from nibble.engine.tokenizer import Tokenizer
from nibble.errors import WeightError
from nibble.server.app import make_app
from nibble.server.chat_format import ChatFormat
from nibble.server.engine_client import EngineDiedError, ProcessClient
from nibble.server.logging import configure, log_event
from nibble.server.middleware import KEEP_ALIVE_S, HeadTimeoutProtocol
from nibble.server.settings import Settings
from nibble.server.tracing import tracer_to

END_SIGNALS = (signal.SIGINT, signal.SIGTERM)
Announce = Callable[[str, str], None]


def serve(config: Config, settings: Settings, folder: str, announce: Announce | None) -> None:
    """Serve until a signal ends the server.

    Args:
        config: of the engine.
        settings: of the server.
        folder: of the tokenizer.
        announce: called with the model's name and the address when the server serves.

    Raises:
        ConfigError: a name in the config or the settings is unknown, or OpenTelemetry is missing for traces.
        EngineDiedError: the engine cannot start, or died and is not to be started again.
    """
    # A signal before the server listens cancels the task.
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_serve(config, settings, folder, announce))


async def _serve(config: Config, settings: Settings, folder: str, announce: Announce | None) -> None:
    configure(settings.log_format)
    # Unknown names are refused before anything is started.
    ChatFormat(None, settings.tool_format, settings.reasoning_parser)
    tracer = tracer_to(settings.otlp_traces_endpoint) if settings.otlp_traces_endpoint else None
    name = settings.served_model_name or Path(config.model).name
    client = ProcessClient(config, restart=settings.restart, log_format=settings.log_format)
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task
    # Until the server listens, and handles signals itself.
    with _signals_to(lambda *_: loop.call_soon_threadsafe(task.cancel)):
        start = asyncio.create_task(client.start())
        try:
            tokenizer = await asyncio.to_thread(_load_tokenizer, config, folder)
            if start.done():
                await start
            app = make_app(client, tokenizer, name, settings, sinks=[tracer] if tracer else [])

            def on_ready() -> None:
                url = f"http://{settings.host}:{settings.port}"
                log_event("serving", model=name, url=url, version=nibble.__version__)
                if announce:
                    announce(name, url)

            await _listen(app, client, start, settings, on_ready)
        finally:
            start.cancel()
            await client.stop()
            if tracer:
                await asyncio.to_thread(tracer.close)


async def _listen(
    app: FastAPI,
    client: ProcessClient,
    start: asyncio.Task[None],
    settings: Settings,
    on_ready: Callable[[], None],
) -> None:
    """Answer requests until a signal ends the server. start: the engine's."""
    config = uvicorn.Config(
        app,
        settings.host,
        settings.port,
        log_config=None,
        timeout_graceful_shutdown=math.ceil(settings.drain),
        access_log=False,
        timeout_keep_alive=int(KEEP_ALIVE_S),
        http=HeadTimeoutProtocol,
    )
    server = Server(config)
    listening = asyncio.create_task(server.serve())
    # What lives as long as the server need not be looked through when a large body is read.
    gc.collect()
    gc.freeze()
    try:
        await asyncio.wait((start, listening), return_when=asyncio.FIRST_COMPLETED)
        if not start.done():
            return  # ended before it served
        await start
        await app.state.api.grammars.prepare(client.ready.vocab_size if client.ready else 0)
        on_ready()
        assert client.supervisor
        await asyncio.wait((listening, client.supervisor), return_when=asyncio.FIRST_COMPLETED)
        if client.supervisor.done():
            raise EngineDiedError("the engine's process ended, and is not to be started again (--no-restart)")
    finally:
        server.should_exit = True
        with contextlib.suppress(SystemExit):
            await listening


@contextlib.contextmanager
def _signals_to(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Let a function handle the signals that end the server."""
    before = {number: signal.signal(number, handler) for number in END_SIGNALS}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


class Server(uvicorn.Server):
    """uvicorn's server, which logs that it drains and leaves the process alive."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals as uvicorn does, without raising them again at the end."""
        # The engine's process is still to be stopped then.
        with _signals_to(self.handle_exit):
            yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for open requests."""
        num_open, seconds = len(self.server_state.tasks), self.config.timeout_graceful_shutdown
        log_event("draining", open_requests=num_open, at_most_s=seconds)
        await super().shutdown(sockets)
        log_event("drained")


def _load_tokenizer(config: Config, folder: str) -> Tokenizer | None:
    """Return the tokenizer, None where the model has none; raises ConfigError for unknown names in the config."""
    # Seconds of imports, while the engine's process is at its own.
    from nibble.attention.planner.resolve import check_names

    check_names(config)
    try:
        return Tokenizer(folder)
    except WeightError:
        return None

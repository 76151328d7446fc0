"""The server as a program: starts the engine's process, listens, and drains when a signal ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
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
from nibble.garbage import freeze_gc
from nibble.server.app import make_app
from nibble.server.chat_format import ChatFormat
from nibble.server.engine_client import EngineDiedError
from nibble.server.listen import url_of
from nibble.server.logging import configure, log_event
from nibble.server.middleware import KEEP_ALIVE_S, HeadTimeoutProtocol
from nibble.server.replicas import Client, environments, make_client
from nibble.server.settings import Settings
from nibble.server.tracing import tracer_to

LAST_WORDS_S = 2.0
"""That ended requests have to say so to their clients."""
END_SIGNALS = (signal.SIGINT, signal.SIGTERM)
Announce = Callable[[str, str], None]


def serve(
    config: Config,
    settings: Settings,
    folder: str,
    sockets: list[socket.socket],
    announce: Announce | None,
) -> None:
    """Serve until a signal ends the server.

    Args:
        config: of the engine.
        settings: of the server.
        folder: of the tokenizer.
        sockets: that listen (server/listen.py).
        announce: called with the model's name and the address when the server serves.

    Raises:
        ConfigError: a name in the config or the settings is unknown, or OpenTelemetry is missing for traces.
        EngineDiedError: the engine cannot start, or died and is not to be started again.
    """
    # A signal before the server listens cancels the task.
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_serve(config, settings, folder, sockets, announce))


async def _serve(
    config: Config,
    settings: Settings,
    folder: str,
    sockets: list[socket.socket],
    announce: Announce | None,
) -> None:
    configure(settings.log_format)
    # Unknown names are refused before anything is started.
    ChatFormat(None, settings.tool_format, settings.reasoning_parser)
    tracer = tracer_to(settings.otlp_traces_endpoint) if settings.otlp_traces_endpoint else None
    name = next(iter(settings.served_model_name), Path(config.model).name)
    client = make_client(
        config,
        environments(config.device, settings.replicas, config.tp) if settings.replicas > 1 else [{}],
        restart=settings.restart,
        log_format=settings.log_format,
        kv_events=settings.endpoints,
    )
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
                url = url_of(settings, sockets)
                log_event("serving", model=name, url=url, version=nibble.__version__)
                if announce:
                    announce(name, url)

            await _listen(app, client, start, settings, sockets, on_ready)
        finally:
            start.cancel()
            await client.stop()
            if tracer:
                await asyncio.to_thread(tracer.close)


async def _listen(
    app: FastAPI,
    client: Client,
    start: asyncio.Task[None],
    settings: Settings,
    sockets: list[socket.socket],
    on_ready: Callable[[], None],
) -> None:
    """Answer requests until a signal ends the server. start: the engine's."""
    config = uvicorn.Config(
        app,
        log_config=None,
        # A last resort, which leaves tracebacks: Server ends requests before.
        timeout_graceful_shutdown=math.ceil(settings.drain + 3 * LAST_WORDS_S),
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_ca_certs=settings.ssl_ca_certs,
        ssl_cert_reqs=settings.ssl_cert_reqs,
        access_log=False,
        timeout_keep_alive=int(KEEP_ALIVE_S),
        http=HeadTimeoutProtocol,
    )
    server = Server(config, client, settings.drain)
    listening = asyncio.create_task(server.serve(sockets))
    freeze_gc()
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
    """uvicorn's server, which drains: open requests have some time to end, and are then ended with an error.

    Args:
        config: of uvicorn.
        client: whose requests are ended.
        drain: seconds that they have.
    """

    def __init__(self, config: uvicorn.Config, client: Client, drain: float) -> None:
        super().__init__(config)
        self._client, self._drain = client, drain

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals as uvicorn does, without raising them again at the end."""
        # The engine's process is still to be stopped then.
        with _signals_to(self.handle_exit):
            yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for open requests, and end those that take too long by an error: cancelled, they could not say why."""
        log_event("draining", open_requests=len(self.server_state.tasks), at_most_s=self._drain)
        call_later = asyncio.get_running_loop().call_later
        timers = [
            call_later(self._drain, self._end_requests),
            call_later(self._drain + LAST_WORDS_S, self._close_connections),
        ]
        await super().shutdown(sockets)
        for timer in timers:
            timer.cancel()
        log_event("drained")

    def _end_requests(self) -> None:
        log_event("drain ran out", logging.WARNING, ended_requests=self._client.end_requests())

    def _close_connections(self) -> None:
        """Close connections whose clients do not read what they are sent."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _load_tokenizer(config: Config, folder: str) -> Tokenizer | None:
    """Return the tokenizer, None where the model has none; raises ConfigError for unknown names in the config."""
    # Seconds of imports, while the engine's process is at its own.
    from nibble.attention.planner.resolve import check_names

    check_names(config)
    try:
        return Tokenizer(folder, config.chat_template, config.trust_remote_code)
    except WeightError:
        return None

"""The server as a program: starts the engine's process, listens, and drains when a signal ends it.

How the server behaves towards its clients: a frozen dataclass whose fields' docs are the command line's help.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import uvicorn
from fastapi import FastAPI

import nibble
from nibble.config import Config, option, parse_bytes
from nibble.engine.tokenizer import Tokenizer
from nibble.errors import ConfigError, WeightError, unknown
from nibble.server.app import make_app
from nibble.server.chat_format import ChatFormat
from nibble.server.engine_client import EngineDiedError, ProcessClient
from nibble.server.logging import configure, log_event
from nibble.server.middleware import KEEP_ALIVE_S, HeadTimeoutProtocol
from nibble.server.tracing import tracer_to

PRIORITY = "priority"
SCHEDULING = (PRIORITY, "fcfs")
LOG_FORMATS = ("text", "json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The server's options; raises ConfigError where a value is malformed."""

    host: str = option("127.0.0.1", "Address to listen at; 0.0.0.0 for all of this machine's.")
    port: int = option(8000, "Port to listen at.")
    served_model_name: str | None = option(None, "What clients call the model; its own name if left out.")
    api_key: str | None = option(
        None, "What clients must send as a bearer token; NIBBLE_API_KEY, if left out."
    )
    max_queue: int = option(1024, "Most requests that are open at a time; one more gets status 429.")
    wait_when_full: bool = option(False, "Let requests wait where they would get status 429.")
    scheduling: str = option(
        PRIORITY,
        "priority: requests with a lower `priority` are served before, equal ones as they come; fcfs: a request that "
        "names one is refused.",
    )
    max_body: str = option("8MiB", "Largest body of a request.")
    timeout: float | None = option(
        None, "Seconds after which a request ends with an error, unless it says less."
    )
    restart: bool = option(True, "Start the engine's process again when it dies; else the server ends.")
    tool_format: str = option("auto", "Format of tool calls: auto (by the chat template), none, or a name.")
    reasoning_parser: str = option("auto", "Format of reasoning: auto (by the template), none, or a name.")
    log_format: str = option("text", "Lines of the log, on standard error: text, or json.")
    log_requests: bool = option(False, "Log what was asked too, prompts and all.")
    otlp_traces_endpoint: str | None = option(
        None,
        "Where traces go, by OTLP over HTTP, as http://localhost:4318/v1/traces; needs the extra `otel`.",
    )
    drain: float = option(30.0, "Seconds that open requests are given when the server is told to end.")

    def __post_init__(self) -> None:
        # Malformed sizes are refused at the start, not with the first body.
        parse_bytes(self.max_body)
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"port must be from 0 to 65535, not {self.port}")
        if self.scheduling not in SCHEDULING:
            raise ConfigError(unknown("scheduling", self.scheduling, SCHEDULING))
        if self.log_format not in LOG_FORMATS:
            raise ConfigError(unknown("log format", self.log_format, LOG_FORMATS))
        if self.otlp_traces_endpoint and not self.otlp_traces_endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"otlp_traces_endpoint must be a URL as http://localhost:4318/v1/traces, "
                f"not {self.otlp_traces_endpoint!r}"
            )
        if self.max_queue < 1:
            raise ConfigError(f"max_queue must be at least 1, not {self.max_queue}")
        if self.timeout is not None and not self.timeout > 0:
            raise ConfigError(f"timeout must be more than 0 seconds, not {self.timeout}")
        if not self.drain >= 0:
            raise ConfigError(f"drain must be at least 0 seconds, not {self.drain}")

    @property
    def body_bytes(self) -> int:
        """The largest body of a request."""
        return parse_bytes(self.max_body)


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
    with _cancel_on_signal():
        start = asyncio.create_task(client.start())
        try:
            tokenizer = await asyncio.to_thread(_load_tokenizer, config, folder)
            if start.done():
                await start
            app = make_app(client, tokenizer, name, settings, sinks=[tracer] if tracer else [])
            await _listen(app, client, start, settings, partial(_announce, name, settings, announce))
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
    server = Server(_uvicorn_config(app, settings))
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
        died = asyncio.create_task(client.died.wait())
        await asyncio.wait((listening, died), return_when=asyncio.FIRST_COMPLETED)
        died.cancel()
        if client.died.is_set():
            raise EngineDiedError("the engine's process ended, and is not to be started again (--no-restart)")
    finally:
        server.should_exit = True
        with contextlib.suppress(SystemExit):
            await listening


def _uvicorn_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        settings.host,
        settings.port,
        log_config=None,
        timeout_graceful_shutdown=math.ceil(settings.drain),
        access_log=False,
        timeout_keep_alive=int(KEEP_ALIVE_S),
        http=HeadTimeoutProtocol,
    )


def _announce(name: str, settings: Settings, announce: Announce | None) -> None:
    url = f"http://{settings.host}:{settings.port}"
    log_event("serving", model=name, url=url, version=nibble.__version__)
    if announce:
        announce(name, url)


@contextlib.contextmanager
def _cancel_on_signal() -> Iterator[None]:
    """Let a signal cancel the current task, until the server listens and handles signals itself."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task
    before = {
        number: signal.signal(number, lambda *_: loop.call_soon_threadsafe(task.cancel))
        for number in END_SIGNALS
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Server(uvicorn.Server):
    """uvicorn's server, which logs that it drains and leaves the process alive."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals as uvicorn does, without raising them again at the end."""
        # The engine's process is still to be stopped then.
        before = {number: signal.signal(number, self.handle_exit) for number in END_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for open requests."""
        log_event(
            "draining",
            open_requests=len(self.server_state.tasks),
            at_most_s=self.config.timeout_graceful_shutdown,
        )
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

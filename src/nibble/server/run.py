"""The server as a program: starts the engine's process, listens, and drains when it is told to end.

Owns serve(). Must not know of routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

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
from nibble.server.patience import SECONDS, Patient
from nibble.server.settings import Settings
from nibble.server.tracing import tracer_to

ENDS = (signal.SIGINT, signal.SIGTERM)
Told = Callable[[str, str], None]


def serve(config: Config, settings: Settings, folder: str, told: Told | None) -> None:
    """Serves until it is told to end. folder: of the tokenizer. told: hears the model's name and the address, once it
    serves; so does the log.

    Raises ConfigError where a name in the config or the settings is nobody's, or traces are wanted and OpenTelemetry is
    missing; EngineDiedError where the engine cannot start, or died and is not to be started again.
    """
    with contextlib.suppress(asyncio.CancelledError):  # it was told to end before it listened
        asyncio.run(_serve(config, settings, folder, told))


async def _serve(config: Config, settings: Settings, folder: str, told: Told | None) -> None:
    configure(settings.log_format)
    # Names that nobody has are refused before everything else.
    ChatFormat(None, settings.tool_format, settings.reasoning_parser)
    tracer = tracer_to(settings.otlp_traces_endpoint) if settings.otlp_traces_endpoint else None
    name = settings.served_model_name or Path(config.model).name
    client = ProcessClient(config, restart=settings.restart, log_format=settings.log_format)
    with _cancelled_when_told():
        starting = asyncio.create_task(client.start())
        try:
            tokenizer = await asyncio.to_thread(_looked_up, config, folder)
            if starting.done():
                await starting
            app = make_app(client, tokenizer, name, settings, sinks=[tracer] if tracer else [])
            await _listen(app, client, starting, settings, partial(_say, name, settings, told))
        finally:
            starting.cancel()
            await client.stop()
            if tracer:
                await asyncio.to_thread(tracer.close)


async def _listen(
    app: FastAPI,
    client: ProcessClient,
    starting: asyncio.Task[None],
    settings: Settings,
    serves: Callable[[], None],
) -> None:
    """Answers until it is told to end. starting: the engine's start. serves: is called once it serves."""
    server = Server(
        uvicorn.Config(
            app,
            settings.host,
            settings.port,
            log_config=None,
            timeout_graceful_shutdown=math.ceil(settings.drain),
            access_log=False,
            timeout_keep_alive=int(SECONDS),
            http=Patient,
        )
    )
    listening = asyncio.create_task(server.serve())
    gc.collect()
    gc.freeze()  # what lives as long as the server need not be looked through when a large body is read
    try:
        await asyncio.wait((starting, listening), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return  # it was told to end before it served
        await starting
        await app.state.api.grammars.prepare(client.ready.vocab_size if client.ready else 0)
        serves()
        died = asyncio.create_task(client.died.wait())
        await asyncio.wait((listening, died), return_when=asyncio.FIRST_COMPLETED)
        died.cancel()
        if client.died.is_set():
            raise EngineDiedError("the engine's process ended, and is not to be started again (--no-restart)")
    finally:
        server.should_exit = True
        with contextlib.suppress(SystemExit):
            await listening


def _say(name: str, settings: Settings, told: Told | None) -> None:
    url = f"http://{settings.host}:{settings.port}"
    log_event("serving", model=name, url=url, version=nibble.__version__)
    if told:
        told(name, url)


@contextlib.contextmanager
def _cancelled_when_told() -> Iterator[None]:
    """Within, a signal that ends the server cancels the task, until the server listens and takes them itself."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task
    before = {
        number: signal.signal(number, lambda *_: loop.call_soon_threadsafe(task.cancel)) for number in ENDS
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Server(uvicorn.Server):
    """Tells that it drains, and leaves the process alive: the engine's is still to be stopped."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's own, which raises the signal again when all has been answered."""
        before = {number: signal.signal(number, self.handle_exit) for number in ENDS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log_event(
            "draining",
            open_requests=len(self.server_state.tasks),
            at_most_s=self.config.timeout_graceful_shutdown,
        )
        await super().shutdown(sockets)
        log_event("drained")


def _looked_up(config: Config, folder: str) -> Tokenizer | None:
    """The tokenizer, if there is one; raises ConfigError where a name in the config is nobody's. Seconds of imports, to
    be spent while the engine's process is at its own: it refuses the rest, once it has looked at the model."""
    from nibble.attention.planner.resolve import check_names

    check_names(config)
    try:
        return Tokenizer(folder)
    except WeightError:
        return None

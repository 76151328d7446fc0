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
from pathlib import Path

import uvicorn

import nibble
from nibble.config import Config
from nibble.engine.tokenizer import Tokenizer
from nibble.errors import WeightError
from nibble.server.app import make_app
from nibble.server.client import EngineDiedError, ProcessClient
from nibble.server.logs import configure, tell
from nibble.server.patience import SECONDS, Patient
from nibble.server.settings import Settings
from nibble.server.traces import traces_to

ENDS = (signal.SIGINT, signal.SIGTERM)
Told = Callable[[str, str], None]


def serve(config: Config, settings: Settings, folder: str, told: Told | None) -> None:
    """Serves until it is told to end. folder: of the tokenizer. told: hears the model's name and the address, once it
    serves; so does the log.

    Raises ConfigError where traces are wanted and OpenTelemetry is missing, EngineDiedError where the engine cannot
    start, or died and is not to be started again.
    """
    asyncio.run(_serve(config, settings, folder, told))


async def _serve(config: Config, settings: Settings, folder: str, told: Told | None) -> None:
    configure(settings.log_format)
    client = ProcessClient(config, restart=settings.restart, log_format=settings.log_format)
    name = settings.served_model_name or Path(config.model).name
    traces = traces_to(settings.otlp_traces_endpoint) if settings.otlp_traces_endpoint else None
    app = make_app(client, _tokenizer(folder), name, settings, sinks=[traces] if traces else [])
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
    starting = asyncio.create_task(client.start())
    try:
        await asyncio.wait((starting, listening), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return  # it was told to end before it served
        await starting
        await app.state.api.grammars.prepare(client.ready.vocab_size if client.ready else 0)
        url = f"http://{settings.host}:{settings.port}"
        tell("serving", model=name, url=url, version=nibble.__version__)
        if told:
            told(name, url)
        died = asyncio.create_task(client.died.wait())
        await asyncio.wait((listening, died), return_when=asyncio.FIRST_COMPLETED)
        died.cancel()
        if client.died.is_set():
            raise EngineDiedError("the engine's process ended, and is not to be started again (--no-restart)")
    finally:
        starting.cancel()
        server.should_exit = True
        with contextlib.suppress(SystemExit):
            await listening
        await client.stop()
        if traces:
            await asyncio.to_thread(traces.close)


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
        tell(
            "draining",
            open_requests=len(self.server_state.tasks),
            at_most_s=self.config.timeout_graceful_shutdown,
        )
        await super().shutdown(sockets)
        tell("drained")


def _tokenizer(folder: str) -> Tokenizer | None:
    try:
        return Tokenizer(folder)
    except WeightError:
        return None

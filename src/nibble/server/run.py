"""The server as a program: starts the engine's process, listens, and drains when it is told to end.

Owns serve(). Must not know of routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable
from pathlib import Path

import uvicorn

from nibble.config import Config
from nibble.engine.tokenizer import Tokenizer
from nibble.errors import WeightError
from nibble.server.app import make_app
from nibble.server.client import EngineDiedError, ProcessClient
from nibble.server.patience import SECONDS, Patient
from nibble.server.settings import Settings

Told = Callable[[str, str], None]


def serve(config: Config, settings: Settings, folder: str, told: Told) -> None:
    """Serves until it is told to end. folder: of the tokenizer. told: hears the model's name and the address, once it
    serves.

    Raises EngineDiedError where the engine cannot start, or died and is not to be started again.
    """
    asyncio.run(_serve(config, settings, folder, told))


async def _serve(config: Config, settings: Settings, folder: str, told: Told) -> None:
    client = ProcessClient(config, restart=settings.restart)
    name = settings.served_model_name or Path(config.model).name
    app = make_app(client, _tokenizer(folder), name, settings)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            settings.host,
            settings.port,
            log_level="warning",
            timeout_graceful_shutdown=int(settings.drain),
            access_log=False,
            timeout_keep_alive=int(SECONDS),
            http=Patient,
        )
    )
    listening = asyncio.create_task(server.serve())
    gc.collect()
    gc.freeze()  # what lives as long as the server need not be looked through when a large body is read
    try:
        await client.start()
        await app.state.api.grammars.prepare(client.ready.vocab_size if client.ready else 0)
        told(name, f"http://{settings.host}:{settings.port}")
        died = asyncio.create_task(client.died.wait())
        await asyncio.wait((listening, died), return_when=asyncio.FIRST_COMPLETED)
        died.cancel()
        if client.died.is_set():
            raise EngineDiedError("the engine's process ended, and is not to be started again (--no-restart)")
    finally:
        server.should_exit = True
        with contextlib.suppress(SystemExit):
            await listening
        await client.stop()


def _tokenizer(folder: str) -> Tokenizer | None:
    try:
        return Tokenizer(folder)
    except WeightError:
        return None

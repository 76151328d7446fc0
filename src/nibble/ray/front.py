"""A front of a cluster: the application of `nibble serve` over engines elsewhere, mounted in Ray Serve."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from nibble.attention.planner.resolve import check_names
from nibble.config import Config
from nibble.engine.tokenizer import Tokenizer
from nibble.errors import ConfigError, WeightError
from nibble.models.hub import locate, pinned
from nibble.ray.client import ClusterClient
from nibble.server.app import make_app
from nibble.server.chat_format import ChatFormat
from nibble.server.logging import configure
from nibble.server.settings import Settings
from nibble.server.tracing import tracer_to


class Front:
    """Reads requests, tokenises them, and writes answers in the shape of OpenAI's and Anthropic's APIs.

    Args:
        config: of the engines.
        settings: of the server.
        client: the engines.
    """

    def __init__(self, config: Config, settings: Settings, client: ClusterClient) -> None:
        configure(settings.log_format)
        # A key in the environment is not seen in the Serve config, which the dashboard shows.
        if settings.api_key is None:
            settings = replace(settings, api_key=os.environ.get("NIBBLE_API_KEY"))
        self._tracer = tracer_to(settings.otlp_traces_endpoint) if settings.otlp_traces_endpoint else None
        name = next(iter(settings.served_model_name), Path(config.model).name)
        self.app = make_app(
            client, load_tokenizer(config), name, settings, [self._tracer] if self._tracer else []
        )
        self.app.add_middleware(Mounted)
        self._client = client
        self._tasks: list[asyncio.Task[Any]] = []

    def start(self) -> None:
        """Begin to look after the engines."""
        self._tasks = [asyncio.create_task(self._client.watch()), asyncio.create_task(self._prepare())]

    async def _prepare(self) -> None:
        """Prepare grammars, as soon as the vocabulary is known."""
        await self._client.changed.wait()
        assert self._client.ready
        await self.app.state.api.grammars.prepare(self._client.ready.vocab_size)

    async def stop(self) -> None:
        """End what start() began."""
        for task in self._tasks:
            task.cancel()
        if self._tracer:
            await asyncio.to_thread(self._tracer.close)


class Mounted:
    """Middleware that takes the prefix off paths under which Serve shows the application: guards know none.

    Args:
        app: the application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        prefix = scope.get("root_path", "")
        if scope["type"] == "http" and prefix:
            scope = {**scope, "root_path": "", "path": scope["path"].removeprefix(prefix) or "/"}
        await self._app(scope, receive, send)


def check(config: Config, settings: Settings) -> None:
    """Raise ConfigError for unknown names, and what goes not together, before anything is started."""
    check_names(config)
    if settings.kv_events and not config.prefix_cache:
        raise ConfigError("kv_events tell of the prefix cache, which prefix_cache: false turns off")
    ChatFormat(None, settings.tool_format, settings.reasoning_parser)


def load_tokenizer(config: Config) -> Tokenizer | None:
    """Return the model's tokenizer, None where it has none."""
    try:
        return Tokenizer(locate(pinned(config).model), config.chat_template, config.trust_remote_code)
    except WeightError:
        return None

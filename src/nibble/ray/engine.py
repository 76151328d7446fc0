"""One engine of a cluster: what a replica of Serve runs. The engine is a process of its own, as under `nibble serve`.

A front sends a GenerationRequest and gets encoded events: pieces, and at the end of one that failed why. The replica
ends when its engine's process does, so that Serve starts another one, and no request is sent to one that cannot answer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import ExitStack, aclosing
from hashlib import sha256
from typing import Any

from nibble.config import Config
from nibble.engine.kv_events import Endpoints
from nibble.errors import NibbleError, RequestError
from nibble.ray.choice import SOURCE_KEY
from nibble.ray.client import as_tokens
from nibble.server import worker as wire
from nibble.server.engine_client import EngineDiedError, ProcessClient, State
from nibble.server.logging import configure, log_event
from nibble.server.settings import Settings

LAST_WORDS_S = 0.5
"""That requests have to say that their engine ended, before the replica does."""


class Engine:
    """A replica: an engine's process, and the requests that fronts have sent it.

    Args:
        config: of the engine.
        settings: of the server.
        address: of this host, as others reach it.
        rank: of this replica among those of its host.
        environment: variables of the engine's process.
        new_client: makes the engine's client; tests have another.
        end: ends the replica's process.
    """

    def __init__(
        self,
        config: Config,
        settings: Settings,
        address: str = "127.0.0.1",
        rank: int = 0,
        environment: Mapping[str, str] | None = None,
        new_client: Callable[..., Any] = ProcessClient,
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        configure(settings.log_format)
        self._endpoints = endpoints_of(settings, rank) if config.prefix_cache else None
        # Not started again here: Serve does it, perhaps on another host.
        self._client = new_client(
            config,
            restart=False,
            log_format=settings.log_format,
            place=wire.Place(rank, kv_events=self._endpoints),
            environment=environment,
        )
        self._address, self._end = address, end
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the engine, and wait until it serves; raises EngineDiedError with the cause where it cannot."""
        await self._client.start()
        self._watching = asyncio.create_task(self._watch(self._client.supervisor))

    async def _watch(self, supervisor: asyncio.Task[None]) -> None:
        """End the replica after its engine: Serve notices at once that a process ended, and not that one is idle."""
        # Not awaited itself: to cancel this task would cancel that one.
        await asyncio.wait((supervisor,))
        log_event("the engine ended; this replica ends too", logging.ERROR)
        await asyncio.sleep(LAST_WORDS_S)
        self._end(1)

    async def generate(self, request: wire.GenerationRequest) -> AsyncGenerator[bytes]:
        """Yield encoded events: Pieces, and Refused or Failed where there is no more to come.

        Times of Pieces are seconds since the request came, for clocks of hosts differ.
        """
        arrival = time.monotonic()
        try:
            async with aclosing(self._client.generate(as_tokens(request))) as stream:
                async for pieces in stream:
                    items = [
                        (
                            0,
                            piece.cached,
                            None if piece.started is None else piece.started - arrival,
                            piece.delta,
                        )
                        for piece in pieces
                    ]
                    yield wire.encode(wire.Pieces(items))
        except RequestError as error:
            yield wire.encode(wire.Refused(0, error.status, str(error), error.code))
        except NibbleError as error:
            yield wire.encode(wire.Failed(str(error), getattr(error, "kind", "")))

    async def ready(self) -> bytes:
        """Return what is served, as an encoded Ready."""
        return wire.encode(self._client.ready)

    def cache_source(self) -> dict[str, Any]:
        """Return what routers need to follow the prefix cache (choice.Source); nothing where it is off."""
        if self._endpoints is None:
            return {}
        ready, ends = self._client.ready, self._endpoints
        events, replay = (end and end.replace("*", self._address) for end in (ends.events, ends.replay))
        source = {
            "namespace": ready.namespace,
            "page_size": ready.page_size,
            "events": events,
            "replay": replay,
        }
        return {SOURCE_KEY: source}

    async def stats(self) -> dict[str, float]:
        """Return the engine's counts; nothing where it does not serve."""
        return dict(self._client.stats)

    async def report(self) -> tuple[str, dict[str, float]]:
        """Return what tells this engine from one that serves with other options, and its counts."""
        return sha256(await self.ready()).hexdigest(), await self.stats()

    async def reset_prefix_cache(self) -> None:
        """Let the engine forget all prefixes."""
        await self._client.reset_prefix_cache()

    async def check_health(self) -> None:
        """Raise EngineDiedError where the engine does not serve; Serve then replaces the replica."""
        if self._client.state is not State.READY:
            raise EngineDiedError(f"the engine is {self._client.state}")

    async def stop(self) -> None:
        """End the engine's process."""
        if self._watching:
            self._watching.cancel()
        await self._client.stop()


def endpoints_of(settings: Settings, rank: int) -> Endpoints:
    """Return where a replica publishes its KV events: as the settings say, else at free ports of its host."""
    if settings.endpoints:
        return settings.endpoints.of_rank(rank)
    events, replay = free_ports(2)
    return Endpoints(f"tcp://*:{events}", f"tcp://*:{replay}")


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens at."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("", 0))
        return [int(one.getsockname()[1]) for one in sockets]

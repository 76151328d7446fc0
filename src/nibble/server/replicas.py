"""Several engines behind one server: a process each, and a router that knows their prefix trees.

A replica that dies ends its own requests with an error, gets none while it is started again, and begins with an empty
tree. The others go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing

from nibble.cache.events import KVEvent
from nibble.config import Config
from nibble.engine.kv_events import Endpoints
from nibble.errors import ConfigError
from nibble.hardware import MACHINE_SHARE, visible_gpus
from nibble.routing.router import Route, Router
from nibble.server import worker as wire
from nibble.server.engine_client import EngineDiedError, Piece, ProcessClient, State
from nibble.server.worker import GenerationRequest

LARGEST = ("fidelity_error_", "fidelity_own_", "fidelity_limit_")
"""Beginnings of the names of counts of which several engines have the largest, not the sum."""
ALIKE = ("time", "fidelity_alert", "fidelity_uncovered_layers")
"""Names of others: the newest, whether any, what all have alike."""
Environment = Mapping[str, str]


def environments(device: str, replicas: int, gpus_each: int = 1) -> list[Environment]:
    """Return the variables that give each replica its part of this machine.

    Args:
        device: of Config.
        replicas: number of engines.
        gpus_each: GPUs of an engine.

    Raises:
        ConfigError: there are too few GPUs.
    """
    share = {MACHINE_SHARE: str(replicas)}
    gpus = [] if device == "cpu" else visible_gpus()
    if not gpus and device != "cuda":
        return [share] * replicas
    needed = replicas * gpus_each
    if needed > len(gpus):
        most = len(gpus) // gpus_each
        cure = f"use --replicas {most}" if most else "use --device cpu"
        each = "a GPU each" if gpus_each == 1 else f"{gpus_each} GPUs each"
        raise ConfigError(
            f"{replicas} replicas need {needed} GPUs, {each}, and {len(gpus)} can be seen (nvidia-smi, "
            f"CUDA_VISIBLE_DEVICES): {cure}"
        )
    groups = [gpus[i * gpus_each : (i + 1) * gpus_each] for i in range(replicas)]
    return [share | {"CUDA_VISIBLE_DEVICES": ",".join(group)} for group in groups]


def merge_stats(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the counts of several engines as if they were one's: sums, the newest time, and the largest errors."""
    merged: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            if name in ALIKE or name.startswith(LARGEST):
                merged[name] = max(merged.get(name, value), value)
            else:
                merged[name] = merged.get(name, 0.0) + value
    return merged


class ReplicaClient:
    """Engines in processes of their own, as if they were one (EngineClient).

    Args:
        config: of each engine.
        places: environment variables of each (`environments`).
        restart: start one again when it dies; else it stays dead, and with the last of them all is over.
        log_format: of what the processes log themselves.
        kv_events: where the first one publishes what happens to its prefix cache; the others count ports up.
    """

    def __init__(
        self,
        config: Config,
        places: Sequence[Environment],
        *,
        restart: bool = True,
        log_format: str = "text",
        kv_events: Endpoints | None = None,
    ) -> None:
        self.router = Router[int]()
        self._has_started = False
        self.supervisor: asyncio.Task[None] | None = None
        """Ends when no process is left that is to be started again."""
        self.replicas = tuple(
            ProcessClient(
                config,
                restart=restart,
                log_format=log_format,
                place=wire.Place(i, forwards_events=True, kv_events=kv_events and kv_events.of_rank(i)),
                environment=environment,
                label={"replica": i},
            )
            for i, environment in enumerate(places)
        )
        for i, client in enumerate(self.replicas):
            client.on_state, client.on_cache = self._state_watch(i), self._cache_watch(i)

    @property
    def state(self) -> State:
        """Whether any engine serves; before the first time, whether all do."""
        states = [client.state for client in self.replicas]
        if self._has_started and State.READY in states:
            return State.READY
        return State.DEAD if all(state is State.DEAD for state in states) else State.STARTING

    @property
    def ready(self) -> wire.Ready | None:
        """What is served: all serve the same."""
        ready = next((client.ready for client in self.replicas if client.ready), None)
        if ready is None:
            return None
        limit = min(client.ready.max_context for client in self.replicas if client.ready)
        about = {**ready.about, "replicas": len(self.replicas)}
        return wire.Ready(
            limit, ready.vocab_size, about, ready.sampling_defaults, ready.namespace, ready.page_size
        )

    @property
    def stats(self) -> Mapping[str, float]:
        """The counts of the engines that serve, added up."""
        return merge_stats([client.stats for client in self.replicas])

    @property
    def restarts(self) -> int:
        """How often an engine was started again."""
        return sum(client.restarts for client in self.replicas)

    async def start(self) -> None:
        """Start all processes, and wait until all serve; raises EngineDiedError where one cannot."""
        await asyncio.gather(*(client.start() for client in self.replicas))
        self._has_started = True
        supervisors = [client.supervisor for client in self.replicas if client.supervisor]
        self.supervisor = asyncio.create_task(_all_done(supervisors))

    async def stop(self) -> None:
        """End all processes."""
        await asyncio.gather(*(client.stop() for client in self.replicas))

    def end_requests(self) -> int:
        """End open requests with an error, and refuse those that follow; return how many were open."""
        return sum(client.end_requests() for client in self.replicas)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[Piece]]:
        """Yield the pieces of the answers as they come; see EngineClient."""
        client, route = self._route(request)
        num_open, tokens = request.params.n, 0
        try:
            async with aclosing(client.generate(request)) as source:
                async for pieces in source:
                    self.router.start(route)
                    num_open -= sum(piece.delta.finish_reason is not None for piece in pieces)
                    tokens += sum(len(piece.delta.token_ids) for piece in pieces)
                    yield pieces
        finally:
            self.router.end(route, None if num_open else tokens)

    async def reset_prefix_cache(self) -> None:
        """Let all engines forget all prefixes; raises EngineDiedError where none serves."""
        serving = [client for client in self.replicas if client.state is State.READY]
        if not serving:
            raise EngineDiedError(f"the engines are {self.state}; try again in a while")
        await asyncio.gather(*(client.reset_prefix_cache() for client in serving))

    def _route(self, request: GenerationRequest) -> tuple[ProcessClient, Route[int]]:
        among = [
            i
            for i, client in enumerate(self.replicas)
            if client.state is State.READY and i in self.router.replicas
        ]
        if not among:
            raise EngineDiedError(f"the engines are {self.state}; try again in a while")
        route = self.router.route(request.prompt, request.salt, request.params.n, among)
        return self.replicas[route.replica], route

    def _state_watch(self, i: int) -> Callable[[State], None]:
        def watch(state: State) -> None:
            ready = self.replicas[i].ready
            if state is State.READY and ready:
                self.router.add(i, ready.namespace, ready.page_size)
            else:
                self.router.remove(i)

        return watch

    def _cache_watch(self, i: int) -> Callable[[Sequence[KVEvent]], None]:
        return lambda events: self.router.update(i, events)


async def _all_done(tasks: Sequence[asyncio.Task[None]]) -> None:
    await asyncio.wait(tasks)


Client = ProcessClient | ReplicaClient
"""What a server runs: one engine, or several."""


def make_client(
    config: Config,
    places: Sequence[Environment],
    *,
    restart: bool,
    log_format: str,
    kv_events: Endpoints | None,
) -> Client:
    """Return the engine, or the engines, that a server runs; see ReplicaClient for the arguments."""
    if len(places) > 1:
        return ReplicaClient(config, places, restart=restart, log_format=log_format, kv_events=kv_events)
    place = wire.Place(kv_events=kv_events) if kv_events else None
    return ProcessClient(config, restart=restart, log_format=log_format, place=place)

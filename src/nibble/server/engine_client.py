"""The engine as the server sees it: a protocol, and its implementation over a process that may die.

When the process dies, open requests end with an error at once, and it is started again after growing pauses.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain, count
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio

from nibble.cache.events import KVEvent
from nibble.config import Config
from nibble.engine.request import Delta, join_deltas
from nibble.errors import NibbleError, RequestError
from nibble.processes import ending, group_lives, is_stopped, kill_group
from nibble.server import worker as wire
from nibble.server.logging import decode_costs, log_event, plan_summary
from nibble.server.worker import GenerationRequest

FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
"""Before a process that died is started again."""
STOP_S = 5.0
"""Given to a process to end by itself."""
LAST_MESSAGES_S = 0.05
"""Given to the last messages of a process that has ended to be read."""
LOOK_S, FROZEN_S = 1.0, 10.0
"""Between two looks at a process, and how long one may be stopped."""
LEFT_S = 10.0
"""How long processes that are left of an engine, which may hold a GPU, are waited for."""
log = logging.getLogger("nibble.server")
PROCESS_ENDED = "the engine's process ended; this request is lost"
SHUTTING_DOWN = "the server is shutting down"


class State(StrEnum):
    """Whether an engine serves."""

    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"


class EngineDiedError(NibbleError):
    """The engine's process ended while a request was open, or is not there to take one."""

    status = 503

    def __init__(self, message: str, kind: str = "") -> None:
        self.kind = kind
        """The class of nibble.errors for which the engine could not start."""
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Piece:
    """An addition to one answer."""

    delta: Delta
    cached: int
    """Prompt tokens from the prefix cache."""
    marks: tuple[tuple[float, int], ...]
    """When tokens arrived at the server, by time.monotonic(), and how many."""
    started: float | None = None
    """When the engine took the request up, by the same clock, which all processes of a machine share."""


class EngineClient(Protocol):
    """What the server needs of an engine."""

    @property
    def state(self) -> State:
        """Whether it serves."""
        ...

    @property
    def ready(self) -> wire.Ready | None:
        """What is served, once the engine has been ready."""
        ...

    @property
    def stats(self) -> Mapping[str, float]:
        """The engine's counts; empty while it does not serve."""
        ...

    @property
    def restarts(self) -> int:
        """How often the engine was started again."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[list[Piece]]:
        """Yield the pieces of the answers as they come, at most one of each answer.

        Pieces of one answer that were not fetched in time are joined; so are those of a request that is not streamed,
        by the engine. Closing the iterator aborts the request. Raises RequestError or EngineDiedError.
        """
        ...

    async def reset_prefix_cache(self) -> None:
        """Let the engine forget all prefixes. Raises EngineDiedError."""
        ...


def engines_of(client: EngineClient) -> Sequence[EngineClient]:
    """Return the engines behind a client: its replicas, or the one that it is."""
    replicas: Sequence[EngineClient] = getattr(client, "replicas", (client,))
    return replicas


class OutputQueue:
    """Pieces that have not been fetched yet: those of one answer are joined, so a slow reader costs little memory."""

    def __init__(self) -> None:
        self._pieces: dict[int, list[Piece]] = {}
        self._error: NibbleError | None = None
        self._filled = asyncio.Event()

    def put(self, piece: Piece) -> None:
        """Add a piece."""
        self._pieces.setdefault(piece.delta.index, []).append(piece)
        self._filled.set()

    def fail(self, error: NibbleError) -> None:
        """End the queue with an error, after the pieces in it."""
        self._error = error
        self._filled.set()

    async def get(self) -> list[Piece]:
        """Return all pieces, at least one; raises the queue's error after the last."""
        await self._filled.wait()
        self._filled.clear()
        pieces, self._pieces = [join_pieces(parts) for parts in self._pieces.values()], {}
        if self._error:
            if not pieces:
                raise self._error
            self._filled.set()
        return pieces


def join_pieces(pieces: Sequence[Piece]) -> Piece:
    """Return consecutive pieces of one answer as one."""
    last = pieces[-1]
    if len(pieces) == 1:
        return last
    delta = join_deltas([piece.delta for piece in pieces])
    return replace(last, delta=delta, marks=tuple(chain.from_iterable(piece.marks for piece in pieces)))


class ProcessClient:
    """An engine in a process of its own.

    Args:
        config: of the engine.
        restart: start it again when it dies; else it stays dead.
        log_format: of what the process logs itself.
        place: what the process is told beside its config.
        environment: variables of the process, beside the server's.
        label: names it in the log, where there are several.
    """

    def __init__(
        self,
        config: Config,
        *,
        restart: bool = True,
        log_format: str = "text",
        place: wire.Place | None = None,
        environment: Mapping[str, str] | None = None,
        label: Mapping[str, Any] | None = None,
    ) -> None:
        self._config, self._restart, self._log_format = config, restart, log_format
        self._place, self._environment, self._label = place, environment or {}, label or {}
        self.on_state: Callable[[State], None] = lambda _: None
        """Called in the event loop when the engine comes to serve, and when it does so no more."""
        self.on_cache: Callable[[Sequence[KVEvent]], None] = lambda _: None
        """Called in the event loop with what happened to the prefix cache, where the place asks for it."""
        self._open: dict[int, OutputQueue] = {}
        self._resets: dict[int, asyncio.Future[None]] = {}
        self._ids = count(1)
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self.supervisor: asyncio.Task[None] | None = None
        """Ends when the process ended and is not to be started again."""
        # For the sockets, one of each life of the process.
        self._folder = tempfile.TemporaryDirectory(prefix="nibble-")
        self._state_changed = asyncio.Condition()
        self.state, self._failure = State.STARTING, wire.Failed("", "")
        self.ready: wire.Ready | None = None
        self.stats: Mapping[str, float] = {}
        self.restarts = 0
        self._has_served = False
        """Whether the process of now came to serve."""
        self._cause = ""
        """Why it ended, by its own words."""
        self._ending, self._refusing = asyncio.Event(), False

    async def start(self) -> None:
        """Start the process, and wait until it serves; raises EngineDiedError where it cannot."""
        self.supervisor = asyncio.create_task(self._supervise())
        async with self._state_changed:
            await self._state_changed.wait_for(lambda: self.state is not State.STARTING)
        if self.state is State.DEAD:
            raise EngineDiedError(self._failure.error, self._failure.kind)

    async def stop(self) -> None:
        """End the process, at once where it does not serve."""
        self._ending.set()
        if self._process and self._process.returncode is None:
            if self.state is State.READY and self._socket:
                with suppress(TimeoutError):
                    async with asyncio.timeout(STOP_S):
                        await self._socket.send(wire.encode(wire.Stop()))
                        await self._process.wait()
            if self._process.returncode is None:
                self._process.kill()
        if self.supervisor:
            await self.supervisor
        self._context.destroy(linger=0)
        self._folder.cleanup()

    def end_requests(self) -> int:
        """End open requests with an error, and refuse those that follow; return how many were open."""
        self._refusing = True
        for queue in self._open.values():
            queue.fail(EngineDiedError(SHUTTING_DOWN))
        return len(self._open)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[Piece]]:
        """Yield the pieces of the answers as they come; see EngineClient."""
        self._check_ready()
        number, queue = next(self._ids), OutputQueue()
        self._open[number] = queue
        num_open = request.params.n
        try:
            await self._send(wire.Submit(number, request))
            while num_open:
                pieces = await queue.get()
                num_open -= sum(piece.delta.finish_reason is not None for piece in pieces)
                yield pieces
        finally:
            del self._open[number]
            if num_open and self.state is State.READY:
                with suppress(EngineDiedError):
                    await self._send(wire.Abort(number))

    async def reset_prefix_cache(self) -> None:
        """Let the engine forget all prefixes; see EngineClient."""
        self._check_ready()
        number = next(self._ids)
        done = self._resets[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send(wire.ResetPrefixCache(number))
            await done
        finally:
            del self._resets[number]

    def _check_ready(self) -> None:
        if self._refusing:
            raise EngineDiedError(SHUTTING_DOWN)
        if self.state is not State.READY:
            raise EngineDiedError(f"the engine is {self.state}; try again in a while")

    async def _send(self, command: wire.Command) -> None:
        assert self._socket
        try:
            # Without a process at the other end, send() would wait until the socket is closed.
            await self._socket.send(wire.encode(command), zmq.NOBLOCK)
        except zmq.ZMQError:
            # Nobody is at the other end, though the system has not said yet that the process ended.
            self.state = State.STARTING
            raise EngineDiedError(PROCESS_ENDED) from None

    async def _supervise(self) -> None:
        """Run the process again and again."""
        pause = FIRST_PAUSE_S
        for generation in count():
            served = await self._run(generation)
            self._lose_requests()
            # A config that cannot start at first will not start later.
            never_served = generation == 0 and not served
            if never_served or not self._restart or self._ending.is_set():
                break
            await self._set_state(State.STARTING)
            pause = FIRST_PAUSE_S if served else min(2 * pause, MAX_PAUSE_S)
            log_event(
                "engine restarts", logging.ERROR, restart=self.restarts + 1, pause_s=pause, **self._label
            )
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), pause)
                break
            self.restarts += 1
        await self._set_state(State.DEAD)

    def _lose_requests(self) -> None:
        """End what is open with an error: the engine of now answers no more."""
        # First of all: /health must not say that this engine serves.
        self.state, self.stats = State.STARTING, {}
        self.on_state(State.STARTING)
        error = EngineDiedError(f"{PROCESS_ENDED} ({self._cause})" if self._cause else PROCESS_ENDED)
        for queue in self._open.values():
            queue.fail(error)
        for done in self._resets.values():
            if not done.done():
                done.set_exception(error)

    async def _run(self, generation: int) -> bool:
        """Run the process until it ends; return whether it came to serve."""
        address = f"ipc://{Path(self._folder.name) / str(generation)}"
        socket = self._socket = self._context.socket(zmq.PAIR)
        # No bound: the server's limit of open requests is one.
        socket.linger = socket.sndhwm = 0
        socket.bind(address)
        self._has_served, self._cause = False, ""
        process = self._process = await self._spawn(address)
        listener = asyncio.create_task(self._listen(socket, process))
        guard = asyncio.create_task(self._guard(process))
        try:
            assert process.stdin
            values = {name: getattr(self._config, name) for name in Config.__slots__}
            process.stdin.write(json.dumps(values).encode())
            process.stdin.close()
            await process.wait()
            # From now on, before anything is waited for: /health must not say that this engine serves.
            self.state = State.STARTING
            # The listener may still have the last messages to read.
            await asyncio.sleep(LAST_MESSAGES_S)
            num_open = len(self._open)
            if self._has_served and not self._ending.is_set():
                self._cause = self._cause or self._rank_0(ending(process.returncode or 0))
                self._lose_requests()
            await _end_group(process.pid)
            facts: dict[str, Any] = {"code": process.returncode, "open_requests": num_open, **self._label}
            if self._cause:
                facts["cause"] = self._cause
            log_event("engine ended", **facts)
            return self._has_served
        finally:
            for task in (listener, guard):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            socket.close()
            if not self._failure.error:
                self._failure = wire.Failed(f"the engine's process ended with code {process.returncode}", "")

    async def _guard(self, process: asyncio.subprocess.Process) -> None:
        """Kill a process that is stopped, as nothing in it could say so, or that has said why it ends and does not."""
        waited_s = 0.0
        # Looks are counted, for this process may be stopped too.
        while waited_s < FROZEN_S:
            await asyncio.sleep(LOOK_S)
            waited_s = waited_s + LOOK_S if self._cause or is_stopped(process.pid) else 0.0
        self._cause = self._cause or self._rank_0(f"is stopped, as by SIGSTOP, for {waited_s:.0f} s")
        with suppress(ProcessLookupError):
            process.kill()

    def _rank_0(self, what: str) -> str:
        """Return what became of the engine's process, which is a rank where a model is divided."""
        ranks = self._config.tp
        return f"rank 0 of {ranks}, the engine's own process, {what}" if ranks > 1 else f"it {what}"

    async def _spawn(self, address: str) -> asyncio.subprocess.Process:
        command = [sys.executable, "-m", "nibble.server.worker", address, self._log_format]
        if self._place:
            command.append(msgspec.json.encode(self._place).decode())
        # In a session of its own: Ctrl-C is for the server, which lets requests end first.
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **self._environment},
        )
        log_event("engine starts", model=self._config.model, pid=process.pid, **self._label)
        # stop() may have been called before there was a process to end.
        if self._ending.is_set():
            process.kill()
        return process

    async def _listen(self, socket: zmq.asyncio.Socket, process: asyncio.subprocess.Process) -> None:
        try:
            while True:
                await self._handle(wire.decode_event(await socket.recv()))
        except Exception:
            log.exception("what the engine's process says cannot be understood")
            # Its answers would never reach their clients.
            if process.returncode is None:
                process.kill()

    async def _handle(self, event: wire.Event) -> None:
        if isinstance(event, wire.Pieces):
            now = time.monotonic()
            for number, cached, started, delta in event.items:
                if queue := self._open.get(number):
                    queue.put(Piece(delta, cached, ((now, len(delta.token_ids)),), started))
        elif isinstance(event, wire.Refused):
            if refused_queue := self._open.get(event.id):
                refused_queue.fail(RequestError(event.error, event.status, event.code))
        elif isinstance(event, wire.PrefixCacheReset):
            if (done := self._resets.get(event.id)) and not done.done():
                done.set_result(None)
        elif isinstance(event, wire.Stats):
            self.stats = event.numbers
        elif isinstance(event, wire.CacheChange):
            self.on_cache(event.events)
        elif isinstance(event, wire.Ready):
            self.ready = event
            _log_start(event, self._label)
            self._has_served = True
            self.on_state(State.READY)
            await self._set_state(State.READY)
        elif isinstance(event, wire.Failed):
            self._failure, self._cause = event, event.error
            if self._has_served:
                # Nobody needs to wait for the end of the process.
                self._lose_requests()

    async def _set_state(self, state: State) -> None:
        async with self._state_changed:
            self.state = state
            self._state_changed.notify_all()


async def _end_group(group: int) -> None:
    """End what is left of an engine: what a new one needs, as the memory of a GPU, is free only then."""
    kill_group(group)
    until = time.monotonic() + LEFT_S
    while group_lives(group) and time.monotonic() < until:
        await asyncio.sleep(LAST_MESSAGES_S)


def _log_start(ready: wire.Ready, label: Mapping[str, Any]) -> None:
    """Log what the engine serves with, and what users should know of it."""
    log_event("engine ready", **plan_summary(ready.about), **label)
    defaults = ready.sampling_defaults
    if certificate := ready.about.get("certificate"):
        log_event("certificate", quality=certificate["line"])
    facts: dict[str, Any] = {"source": defaults.source or "none", **defaults.values}
    log_event("sampling defaults", **facts)
    for warning in ready.about.get("warnings", ()):
        log_event("engine note", logging.WARNING, note=warning)
    for cost in decode_costs(ready.about):
        log_event("decode is staged", logging.WARNING, **cost)

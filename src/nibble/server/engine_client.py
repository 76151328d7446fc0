"""The engine as the server sees it: a protocol, and its implementation over a process that may die.

Owns EngineClient, ProcessClient and Mailbox. If the process dies, open requests end with an error at once, and it is
started again, ever later if it keeps dying. Must not know of HTTP or torch.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, TypeVar

import zmq
import zmq.asyncio

from nibble.config import Config, SamplingParams
from nibble.engine.outputs import Delta
from nibble.errors import NibbleError, RequestError
from nibble.server import messages as wire
from nibble.server.logging import decode_costs, log_event, plan_summary

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
"""Before a process that died is started again."""
STOP_S = 5.0
"""That a process has to end when it is told to."""
log = logging.getLogger("nibble.server")
T = TypeVar("T")
LOST = "the engine's process ended; this request is lost"


class State(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"


class EngineDiedError(NibbleError):
    """The engine's process ended while a request was open, or is not there to take one. kind: of the error for which it
    could not start, a class of nibble.errors."""

    def __init__(self, message: str, kind: str = "") -> None:
        self.kind = kind
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: prompt tokens, how to answer, whose pages it may share, and when it is served: lower ones before."""

    prompt: Sequence[int]
    params: SamplingParams
    salt: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """What was added to an answer. cached: prompt tokens that came from the prefix cache. marks: when the server heard
    of how many tokens, by time.monotonic(): a slow reader does not make the engine look slow. started: when the engine
    took the request up, by the same clock, which all processes of a machine share."""

    delta: Delta
    cached: int
    marks: tuple[tuple[float, int], ...]
    started: float | None = None


class EngineClient(Protocol):
    """What the server asks of an engine."""

    @property
    def state(self) -> State: ...
    @property
    def ready(self) -> wire.Ready | None:
        """What is served, once the engine has been ready."""
        ...

    @property
    def stats(self) -> Mapping[str, float]: ...
    @property
    def restarts(self) -> int: ...
    def generate(self, ask: Ask) -> AsyncGenerator[list[Piece]]:
        """The pieces of the answers as they come, at most one of each; several of one answer that were not fetched are
        joined. Raises RequestError or EngineDiedError. Closing the iterator aborts the request."""
        ...


class Mailbox:
    """Pieces that nobody has fetched yet: those of one answer are joined, so a slow reader costs its answer at most."""

    def __init__(self) -> None:
        self._pieces: dict[int, list[Piece]] = {}
        self._error: NibbleError | None = None
        self._filled = asyncio.Event()

    def put(self, piece: Piece) -> None:
        self._pieces.setdefault(piece.delta.index, []).append(piece)
        self._filled.set()

    def fail(self, error: NibbleError) -> None:
        self._error = error
        self._filled.set()

    async def get(self) -> list[Piece]:
        """All that has come; waits for something. Raises what it was told to, after the last piece."""
        await self._filled.wait()
        self._filled.clear()
        found, self._pieces = [joined(pieces) for pieces in self._pieces.values()], {}
        if self._error:
            if not found:
                raise self._error
            self._filled.set()
        return found


def joined(pieces: Sequence[Piece]) -> Piece:
    """Pieces of one answer, in their order, as one."""
    last = pieces[-1]
    if len(pieces) == 1:
        return last
    deltas = [piece.delta for piece in pieces]
    delta = replace(
        last.delta,
        text="".join(delta.text for delta in deltas),
        token_ids=_chained(delta.token_ids for delta in deltas),
        logprobs=_chained(delta.logprobs for delta in deltas),
    )
    return Piece(delta, last.cached, _chained(piece.marks for piece in pieces), last.started)


def _chained(parts: Iterable[tuple[T, ...]]) -> tuple[T, ...]:
    return tuple(itertools.chain.from_iterable(parts))


class ProcessClient:
    """An engine in a process of its own. restart: start it again when it dies; else it stays dead, `died` is set.
    log_format: of what the process logs itself."""

    def __init__(self, config: Config, *, restart: bool = True, log_format: str = "text") -> None:
        self._config, self._restart, self._log_format = config, restart, log_format
        self._open: dict[int, Mailbox] = {}
        self._ids = itertools.count(1)
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="nibble-")
        self._changed = asyncio.Condition()
        self._state, self._failure = State.STARTING, wire.Failed("", "")
        self.ready: wire.Ready | None = None
        self.stats: Mapping[str, float] = {}
        self.restarts = 0
        self.died = asyncio.Event()
        self._ending = asyncio.Event()

    @property
    def state(self) -> State:
        return self._state

    async def start(self) -> None:
        """Starts the process, and waits until it serves; raises EngineDiedError with its reason where it cannot."""
        self._keeper = asyncio.create_task(self._keep())
        async with self._changed:
            await self._changed.wait_for(lambda: self._state is not State.STARTING)
        if self._state is State.DEAD:
            raise EngineDiedError(self._failure.error, self._failure.kind)

    async def stop(self) -> None:
        """Ends the process; at once where it does not serve yet, and has nothing to end well."""
        self._ending.set()
        serves = self._state is State.READY
        if serves and self._socket and self._process and self._process.returncode is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await self._socket.send(wire.encode(wire.Stop()))
                    await self._process.wait()
        if self._process and self._process.returncode is None:
            self._process.kill()
        if self._keeper:
            await self._keeper
        self._context.destroy(linger=0)
        self._folder.cleanup()

    async def generate(self, ask: Ask) -> AsyncGenerator[list[Piece]]:
        if self._state is not State.READY:
            raise EngineDiedError(f"the engine is {self._state}; try again in a while")
        number, mailbox = next(self._ids), Mailbox()
        self._open[number] = mailbox
        left = ask.params.n
        try:
            await self._say(wire.Submit(number, list(ask.prompt), ask.params, ask.salt, ask.priority))
            while left:
                pieces = await mailbox.get()
                left -= sum(piece.delta.finish_reason is not None for piece in pieces)
                yield pieces
        finally:
            del self._open[number]
            if left and self._state is State.READY:
                with suppress(EngineDiedError):
                    await self._say(wire.Abort(number))

    async def _say(self, order: wire.Order) -> None:
        """Raises EngineDiedError where nobody is there to hear it, for it would wait until the socket is closed."""
        assert self._socket
        try:
            await self._socket.send(wire.encode(order), zmq.NOBLOCK)
        except zmq.ZMQError:
            raise EngineDiedError(LOST) from None

    # The process

    async def _keep(self) -> None:
        """Runs the process, again and again."""
        pause = FIRST_PAUSE_S
        for generation in itertools.count():
            served = await self._run(generation)
            self.stats = {}
            error = EngineDiedError(LOST)
            for mailbox in self._open.values():
                mailbox.fail(error)
            first = generation == 0 and not served
            if first or not self._restart or self._ending.is_set():
                break
            await self._become(State.STARTING)
            pause = FIRST_PAUSE_S if served else min(2 * pause, LONGEST_PAUSE_S)
            log_event("engine restarts", logging.ERROR, restart=self.restarts + 1, pause_s=pause)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), pause)
                break
            self.restarts += 1
        await self._become(State.DEAD)
        self.died.set()

    async def _run(self, generation: int) -> bool:
        """One life of the process; whether it came to serve."""
        address = f"ipc://{Path(self._folder.name) / str(generation)}"
        socket = self._socket = self._context.socket(zmq.PAIR)
        socket.linger = socket.sndhwm = 0  # no bound: the gate has one
        socket.bind(address)
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "nibble.server.worker",
            address,
            self._log_format,
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the server, which lets requests end first
        )
        log_event("engine starts", model=self._config.model, pid=process.pid)
        if self._ending.is_set():  # stop() has not seen this process
            process.kill()
        listener = asyncio.create_task(self._listen(socket, process))
        try:
            assert process.stdin
            process.stdin.write(json.dumps(values_of(self._config)).encode())
            process.stdin.close()
            await process.wait()
            await asyncio.sleep(0)  # what it said last
            log_event("engine ended", code=process.returncode, open_requests=len(self._open))
            return self._state is State.READY
        finally:
            listener.cancel()
            with suppress(asyncio.CancelledError):
                await listener
            socket.close()
            if not self._failure.error:
                self._failure = wire.Failed(f"the engine's process ended with code {process.returncode}", "")

    async def _listen(self, socket: zmq.asyncio.Socket, process: asyncio.subprocess.Process) -> None:
        """Hears what the process says. One that cannot be understood is ended, as nobody would hear of its answers."""
        try:
            while True:
                await self._hear(wire.news(await socket.recv()))
        except Exception:
            log.exception("what the engine's process says cannot be understood")
            if process.returncode is None:
                process.kill()

    async def _hear(self, news: wire.News) -> None:
        if isinstance(news, wire.Pieces):
            now = time.monotonic()
            for number, cached, started, delta in news.items:
                if mailbox := self._open.get(number):
                    mailbox.put(Piece(delta, cached, ((now, len(delta.token_ids)),), started))
        elif isinstance(news, wire.Refused):
            if number_open := self._open.get(news.id):
                number_open.fail(RequestError(news.error, news.status, news.code))
        elif isinstance(news, wire.Stats):
            self.stats = news.numbers
        elif isinstance(news, wire.Ready):
            self.ready = news
            log_event("engine ready", **plan_summary(news.about))
            for warning in news.about.get("warnings", ()):
                log_event("engine note", logging.WARNING, note=warning)
            for cost in decode_costs(news.about):
                log_event("decode is staged", logging.WARNING, **cost)
            await self._become(State.READY)
        elif isinstance(news, wire.Failed):
            self._failure = news

    async def _become(self, state: State) -> None:
        async with self._changed:
            self._state = state
            self._changed.notify_all()


def values_of(config: Config) -> dict[str, Any]:
    """A config as JSON has it."""
    return {name: getattr(config, name) for name in Config.__slots__}

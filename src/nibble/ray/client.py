"""A front's view of all engines as one: requests go through Serve's handle, whose router chooses a replica.

A request whose replica died before its answer began is sent again; one that had begun ends with an error, for its
client has seen a part of the answer.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import random
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import msgspec

from nibble.errors import NibbleError, RequestError
from nibble.server import worker as wire
from nibble.server.engine_client import PROCESS_ENDED, EngineDiedError, Piece, State
from nibble.server.logging import decode_costs, log_event, plan_summary
from nibble.server.replicas import merge_stats

RETRIES = 4
"""Times that a request is sent again whose answer has not begun."""
DEATHS = 2
"""Engines' processes that may end under one request: perhaps it is why."""
PAUSE_S = 0.25
"""Before it is sent again the first time; it doubles."""
POLL_S, POLL_TIMEOUT_S = 1.0, 5.0
"""Between two looks at the engines' counts, and how long they are waited for."""
FIRST_CHARACTER = 0x10000
"""The character of token 0, where tokens travel as text: above all that are no characters."""
REPLICA_DIED = "the engine that answered this request ended; the rest of the answer is lost"


class ClusterClient:
    """All engines of an application, as an EngineClient.

    Args:
        handle: of the deployment of engines: a DeploymentHandle, or what behaves alike.
        deaths: errors that say that a replica has died, or cannot be reached.
        as_text: send prompts as text, for routers that read nothing else.
        on_start: called with a request whose answer begins.
        on_finish: called with one that was answered, and the tokens of its answers.
    """

    def __init__(
        self,
        handle: Any,
        deaths: tuple[type[BaseException], ...],
        *,
        as_text: bool = False,
        on_start: Callable[[wire.GenerationRequest], None] = lambda _: None,
        on_finish: Callable[[wire.GenerationRequest, int], None] = lambda *_: None,
    ) -> None:
        self._handle, self._deaths, self._as_text = handle, deaths, as_text
        self._on_start, self._on_finish = on_start, on_finish
        self._streams = handle.options(stream=True)
        self.state = State.STARTING
        self.ready: wire.Ready | None = None
        self.stats: Mapping[str, float] = {}
        self.restarts = 0
        """Not known here: Ray's metrics count replicas that were started."""
        self._kinds: set[str] = set()
        """Of engines that `ready` is of."""
        self.num_engines = 0
        """That answered when they were last asked."""
        self.changed = asyncio.Event()
        """Set when what is served becomes known."""

    async def watch(self) -> None:
        """Keep `ready`, `state` and `stats` true, until cancelled."""
        while True:
            try:
                if self.ready is None:
                    # Waits for a replica; where there may be none (min_replicas 0), this request starts one.
                    self._set_ready([await self._handle.options(method_name="ready").remote()])
                await self._poll()
            except Exception as error:
                if isinstance(error, (*self._deaths, TimeoutError)):
                    log_event("engines cannot be asked", logging.WARNING, error=str(error).partition("\n")[0])
                else:
                    logging.getLogger("nibble.server").exception("engines cannot be asked")
            await asyncio.sleep(POLL_S)

    async def _call_all(self, method: str) -> list[Any]:
        """Return what the engines answer, those that do."""
        call = self._handle.broadcast(method)
        answers = await call.results_async(timeout_s=POLL_TIMEOUT_S, return_exceptions=True)
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def _poll(self) -> None:
        reports = await self._call_all("report")
        self.num_engines, self.stats = len(reports), merge_stats([stats for _, stats in reports])
        self.state = State.READY if reports else State.STARTING
        kinds = {kind for kind, _ in reports}
        # While Serve exchanges engines for others, there are both kinds.
        if reports and kinds != self._kinds and (answers := await self._call_all("ready")):
            self._set_ready(answers)
            self._kinds = kinds

    def _set_ready(self, answers: Sequence[bytes]) -> None:
        events = [wire.decode_event(answer) for answer in answers]
        kinds = [event for event in events if isinstance(event, wire.Ready)]
        # What is admitted must be served, whichever engine gets it.
        limit = min(event.max_context for event in kinds)
        before, self.ready = self.ready, msgspec.structs.replace(kinds[-1], max_context=limit)
        self.state = State.READY
        self.changed.set()
        # Engines differ in how long their start took, which is no news.
        if before and plan_summary(before.about) == plan_summary(self.ready.about):
            return
        log_event("engine ready", **plan_summary(self.ready.about))
        for cost in decode_costs(self.ready.about):
            log_event("decode is staged", logging.WARNING, **cost)

    async def generate(self, request: wire.GenerationRequest) -> AsyncGenerator[list[Piece]]:
        """Yield the pieces of the answers as they come; see EngineClient. Waits where no engine is there yet."""
        sent = as_text(request) if self._as_text else request
        pause, deaths = PAUSE_S, 0
        for attempt in range(1 + RETRIES):
            has_begun = False
            try:
                async with aclosing(self._attempt(sent)) as source:
                    async for pieces in source:
                        has_begun = True
                        yield pieces
                return
            except EngineDiedError as error:
                deaths += str(error).startswith(PROCESS_ENDED)
                if has_begun or attempt == RETRIES or deaths == DEATHS:
                    raise
                log_event("sent again", logging.WARNING, attempt=attempt + 1, error=str(error))
            await asyncio.sleep(pause)
            pause *= 2

    async def _attempt(self, request: wire.GenerationRequest) -> AsyncGenerator[list[Piece]]:
        """Send a request once."""
        start = time.monotonic()
        # In a context of its own: Serve's router confuses calls that were made for one request of HTTP, by its id.
        stream = contextvars.Context().run(self._streams.generate.remote, request)
        num_open, num_tokens = request.params.n, 0
        try:
            async for message in stream:
                pieces = _pieces(wire.decode_event(message), start)
                if not num_tokens:
                    self._on_start(request)
                num_tokens += sum(len(piece.delta.token_ids) for piece in pieces)
                num_open -= sum(piece.delta.finish_reason is not None for piece in pieces)
                yield pieces
        except self._deaths as error:
            log_event("engine lost", logging.WARNING, error=str(error).partition("\n")[0])
            raise EngineDiedError(REPLICA_DIED) from None
        finally:
            if num_open > 0:
                with suppress(Exception):
                    stream.cancel()
        if num_open > 0:
            raise EngineDiedError(REPLICA_DIED)
        self._on_finish(request, num_tokens)

    async def reset_prefix_cache(self) -> None:
        """Let all engines forget all prefixes; see EngineClient."""
        answers = await self._handle.broadcast("reset_prefix_cache").results_async(return_exceptions=True)
        if not answers or any(isinstance(answer, BaseException) for answer in answers):
            raise EngineDiedError("not all engines could be reached: some may know prefixes still")


def _pieces(event: wire.Event, start: float) -> list[Piece]:
    """Return an engine's event as pieces; raise the error that it is. start: when the request was sent."""
    now = time.monotonic()
    if isinstance(event, wire.Refused):
        raise RequestError(event.error, event.status, event.code)
    if isinstance(event, wire.Failed):
        raise EngineDiedError(event.error, event.kind)
    if not isinstance(event, wire.Pieces):
        raise NibbleError(f"an engine sent {type(event).__name__} for an answer: versions of replicas differ")
    return [
        Piece(delta, cached, ((now, len(delta.token_ids)),), None if waited is None else start + waited)
        for _, cached, waited, delta in event.items
    ]


def as_text(request: wire.GenerationRequest) -> Any:
    """Return a request whose prompt is a text, a character for each token: what Ray's prefix router can compare."""
    text = "".join(chr(FIRST_CHARACTER + token) for token in request.prompt)
    travelling: Any = text
    return replace(request, prompt=travelling)


def as_tokens(request: wire.GenerationRequest) -> wire.GenerationRequest:
    """Return the request that as_text() was given; others unchanged."""
    if not isinstance(request.prompt, str):
        return request
    return replace(request, prompt=[ord(character) - FIRST_CHARACTER for character in request.prompt])


def sample_two(replicas: Sequence[Any]) -> list[Any]:
    """Return two replicas at random, of which Serve takes the less busy one; fewer where there are fewer."""
    return random.sample(list(replicas), min(2, len(replicas)))

"""How pieces flow from the engine to whoever waits for them: one source or several, deadlines, clients that go away.

Owns Gate, merged(), unless_gone() and Events. Nothing here waits for more than is there: what has come goes on at once,
and what has come meanwhile goes on together. Must not know of routes or of what an answer says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
from fastapi import Request
from fastapi.responses import Response

from nibble.errors import RequestError
from nibble.server.engine_client import Piece
from nibble.server.errors import failure
from nibble.server.http_log import CLIENT_GONE

Pieces = list[Piece]
_json = msgspec.json.Encoder()


class Gate:
    """Counts open requests, and turns away, or holds back, those that are too many."""

    def __init__(self, most: int, wait: bool) -> None:
        self.open, self._most, self._wait = 0, most, wait
        self._left = asyncio.Condition()

    @asynccontextmanager
    async def passed(self, count: int, deadline: float | None = None) -> AsyncIterator[None]:
        """For so many requests at once; raises RequestError, with status 429 where there is no room now, and
        TimeoutError where they have waited until `deadline`, by the loop's clock."""
        async with self._left:
            if count > self._most:
                raise RequestError(
                    f"{count} prompts are more than the {self._most} that may be open here: send fewer"
                )
            if self.open + count > self._most and not self._wait:
                raise RequestError(
                    f"{self.open} requests are open, and {self._most} may be; try again later", 429
                )
            async with asyncio.timeout_at(deadline):
                await self._left.wait_for(lambda: self.open + count <= self._most)
            self.open += count
        try:
            yield
        finally:
            self.open -= count
            async with self._left:
                self._left.notify_all()


async def merged(
    sources: Sequence[AsyncGenerator[Pieces]], deadline: float | None
) -> AsyncGenerator[tuple[int, Pieces]]:
    """Pieces of several iterators as they come, with the number of each; an error of one ends all. Raises TimeoutError
    at `deadline`, by the loop's clock."""
    rest = _one(sources[0], deadline) if len(sources) == 1 else _several(sources, deadline)
    try:
        async for found in rest:
            yield found
    finally:
        await rest.aclose()
        for source in sources:
            await source.aclose()


async def _one(source: AsyncGenerator[Pieces], deadline: float | None) -> AsyncGenerator[tuple[int, Pieces]]:
    """Without a task for each piece, which would cost more than all else that is done with it."""
    if deadline is None:
        async for pieces in source:
            yield 0, pieces
        return
    while True:
        async with asyncio.timeout_at(deadline):
            found = await anext(source, None)
        if found is None:
            return
        yield 0, found


async def _several(
    sources: Sequence[AsyncGenerator[Pieces]], deadline: float | None
) -> AsyncGenerator[tuple[int, Pieces]]:
    loop = asyncio.get_running_loop()
    waiting = {asyncio.ensure_future(anext(source)): which for which, source in enumerate(sources)}
    try:
        while waiting:
            left = None if deadline is None else max(0.0, deadline - loop.time())
            done, _ = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise TimeoutError
            for task in done:
                which = waiting.pop(task)
                try:
                    pieces = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(sources[which]))] = which
                yield which, pieces
    finally:
        for task in waiting:
            task.cancel()
        for task in waiting:
            with suppress(asyncio.CancelledError, StopAsyncIteration, Exception):
                await task


async def unless_gone(request: Request, work: Awaitable[Response]) -> Response:
    """What `work` gives; it is given up when the client is gone."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else failure(CLIENT_GONE, "the client went away")
    finally:
        for one in (task, gone):
            one.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await one


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Events:
    """Server-sent events of one answer's chunks. about: what all of them say; it is written as JSON once. usage: what
    was used so far, if each is to say it."""

    def __init__(self, about: dict[str, Any], usage: Callable[[], dict[str, Any]] | None = None) -> None:
        self._head = b"data: " + _json.encode(about)[:-1] + b',"choices":'
        self._usage = usage

    def of(self, choices: Sequence[dict[str, Any]]) -> bytes:
        """An event for each choice, to be sent together."""
        tail = b',"usage":' + _json.encode(self._usage()) if self._usage else b""
        return b"".join(self._head + _json.encode([choice]) + tail + b"}\n\n" for choice in choices)


def event(body: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + _json.encode(body) + b"\n\n"

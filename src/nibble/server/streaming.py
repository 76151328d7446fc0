"""Streams from the engine to a client: admission, several sources as one, deadlines, disconnects, server-sent events.

Pieces are passed on as soon as they come; those that came meanwhile are passed on together. Events of an answer are
reasoning, text and tool calls; they get their shape in OpenAI's API here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Protocol

import msgspec
from fastapi import Request
from fastapi.responses import Response

from nibble.errors import RequestError
from nibble.server.engine_client import Piece
from nibble.server.middleware import error_response
from nibble.server.tracing import CLIENT_GONE


@dataclass(frozen=True, slots=True)
class Text:
    """Text to show."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of a call: its id and name come with the first piece."""

    index: int
    id: str | None
    name: str | None
    arguments: str
    """More of a JSON object's text."""

    def openai(self) -> dict[str, Any]:
        """Return an entry of a chunk's `tool_calls`."""
        if self.id is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


Event = Thought | Text | CallDelta


class Parser(Protocol):
    """Reads one answer as it grows."""

    num_calls: int
    """Complete calls so far: an answer with some finishes with reason `tool_calls`."""

    def feed(self, text: str, *, last: bool = False) -> list[Event]:
        """Return what `text` adds to the answer; last: it is all."""
        ...


def merge_events(events: Iterable[Event]) -> list[Event]:
    """Return the events with neighbours of one kind, or of one call, as one."""
    merged: list[Event] = []
    for _, group in groupby(events, key=lambda event: (type(event), getattr(event, "index", 0))):
        first, *_ = same = list(group)
        if isinstance(first, CallDelta):
            merged.append(replace(first, arguments="".join(call.arguments for call in _calls(same))))
        else:
            merged.append(replace(first, text=_text(same, type(first))))
    return merged


def delta_of(events: Sequence[Event]) -> dict[str, Any]:
    """Return a chunk's delta in OpenAI's shape; an empty one where there is nothing to show."""
    # Merging needs the pieces of a call side by side; sorting is stable, so their order stays.
    pieces = sorted(_calls(events), key=lambda piece: piece.index)
    calls = [call.openai() for call in _calls(merge_events(pieces))]
    delta = {"reasoning_content": _text(events, Thought), "content": _text(events, Text), "tool_calls": calls}
    return {key: value for key, value in delta.items() if value}


def message_of(events: Sequence[Event]) -> dict[str, Any]:
    """Return the message of a complete answer in OpenAI's shape, from all its events."""
    message = {"role": "assistant", "content": "", "refusal": None, **delta_of(events)}
    if "tool_calls" in message:
        # OpenAI's message has null beside calls, and calls without an index.
        message["content"] = message["content"] or None
        for call in message["tool_calls"]:
            del call["index"]
    return message


def _text(events: Iterable[Event], kind: type[Thought | Text]) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


def _calls(events: Iterable[Event]) -> list[CallDelta]:
    return [event for event in events if isinstance(event, CallDelta)]


Pieces = list[Piece]
_json = msgspec.json.Encoder()


class AdmissionLimiter:
    """A bound on open requests: those above it are refused, or wait."""

    def __init__(self, max_open: int, wait: bool) -> None:
        self.num_open, self._max_open, self._wait = 0, max_open, wait
        self._closed = asyncio.Condition()

    @asynccontextmanager
    async def acquire(self, count: int, deadline: float | None = None) -> AsyncIterator[None]:
        """Hold places for requests.

        Args:
            count: requests, which are admitted together.
            deadline: by the loop's clock; until then they wait.

        Raises:
            RequestError: they never fit, or with status 429 not now.
            TimeoutError: they waited until the deadline.
        """
        async with self._closed:
            if count > self._max_open:
                raise RequestError(
                    f"{count} prompts are more than the {self._max_open} that may be open here: send fewer"
                )
            if self.num_open + count > self._max_open and not self._wait:
                raise RequestError(
                    f"{self.num_open} requests are open, and {self._max_open} may be; try again later", 429
                )
            async with asyncio.timeout_at(deadline):
                await self._closed.wait_for(lambda: self.num_open + count <= self._max_open)
            self.num_open += count
        try:
            yield
        finally:
            # Before the lock, which a cancelled task might never get.
            self.num_open -= count
            async with self._closed:
                self._closed.notify_all()


async def merge_streams(
    sources: Sequence[AsyncGenerator[Pieces]], deadline: float | None
) -> AsyncGenerator[tuple[int, Pieces]]:
    """Yield the pieces of several iterators as they come, with the number of their iterator.

    Raises TimeoutError at `deadline`, by the loop's clock. An error of one iterator ends all.
    """
    stream = _single(sources[0], deadline) if len(sources) == 1 else _multiple(sources, deadline)
    try:
        async for numbered_pieces in stream:
            yield numbered_pieces
    finally:
        await stream.aclose()
        for source in sources:
            await source.aclose()


async def _single(
    source: AsyncGenerator[Pieces], deadline: float | None
) -> AsyncGenerator[tuple[int, Pieces]]:
    # A task or a timeout for each piece would cost more than all else that is done with it.
    if deadline is None:
        async for all_pieces in source:
            yield 0, all_pieces
        return
    while True:
        async with asyncio.timeout_at(deadline):
            pieces = await anext(source, None)
        if pieces is None:
            return
        yield 0, pieces


async def _multiple(
    sources: Sequence[AsyncGenerator[Pieces]], deadline: float | None
) -> AsyncGenerator[tuple[int, Pieces]]:
    tasks = {asyncio.ensure_future(anext(source, None)): i for i, source in enumerate(sources)}
    try:
        while tasks:
            async with asyncio.timeout_at(deadline):
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            # All that is there goes on before the next wait.
            for task in done:
                i = tasks.pop(task)
                if (pieces := task.result()) is not None:
                    tasks[asyncio.ensure_future(anext(sources[i], None))] = i
                    yield i, pieces
    finally:
        for task in tasks:
            task.cancel()
        # A generator that still runs cannot be closed by merge_streams().
        await asyncio.gather(*tasks, return_exceptions=True)


async def cancel_on_disconnect(request: Request, response: Awaitable[Response]) -> Response:
    """Return the response, or status 499 where the client goes away before; then its task is cancelled."""
    task, disconnect = asyncio.ensure_future(response), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else error_response(CLIENT_GONE, "the client went away")
    finally:
        task.cancel()
        disconnect.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Events:
    """Server-sent events of one answer's chunks.

    Args:
        common: the fields of all chunks.
        usage: returns usage so far, where each chunk has it.
    """

    def __init__(self, common: dict[str, Any], usage: Callable[[], dict[str, Any]] | None = None) -> None:
        # Encoded once: a chunk costs only its choice.
        self._head = b"data: " + _json.encode(common)[:-1] + b',"choices":'
        self._usage = usage

    def encode(self, choices: Sequence[dict[str, Any]]) -> bytes:
        """Return an event for each choice, to be sent together."""
        tail = b',"usage":' + _json.encode(self._usage()) if self._usage else b""
        return b"".join(self._head + _json.encode([choice]) + tail + b"}\n\n" for choice in choices)


def encode_event(body: dict[str, Any], name: str | None = None) -> bytes:
    """Return a server-sent event. name: of the event, where the API names them."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + _json.encode(body) + b"\n\n"

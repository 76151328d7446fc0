"""One HTTP exchange from its first byte to its last: who it is, what it asked for, when what happened, how it ended.

Owns Exchange and Journal, the outermost piece of the application: it names every exchange, by the X-Request-Id that
came with it if that is a plain word, and hands each one that ended to whoever writes about it (logs.py, traces.py).
Must not know of the engine, nor of how anything is written.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nibble.server.metrics import NO_STATUS, Timer

KEY = "nibble.exchange"
"""Of an exchange in its scope."""
HEADER = b"x-request-id"
PLAIN = re.compile(r"[A-Za-z0-9._:=+/@-]{1,128}")
"""What an id may be that a client chose: it goes into logs, and back into a header."""


@dataclass(slots=True)
class Exchange:
    """arrived, ended: by time.monotonic(), as timers have it; began: the same moment as arrived, in ns since 1970.

    operation: `chat` or `text_completion`, if answers were asked for; asked: gives the fields that the request named;
    answer: the id of what was answered; timers: of its prompts.
    """

    id: str
    method: str
    path: str
    headers: Mapping[str, str]
    arrived: float = field(default_factory=time.monotonic)
    began: int = field(default_factory=time.time_ns)
    ended: float = 0.0
    status: int = NO_STATUS
    operation: str = ""
    model: str = ""
    answer: str = ""
    asked: Callable[[], Mapping[str, Any]] = dict
    timers: Sequence[Timer] = ()

    @property
    def finish_reasons(self) -> list[str]:
        """Of all answers; one that did not come to its end was aborted, unless it was never begun."""
        found = [reason for timer in self.timers for reason in timer.reasons]
        return found or (["abort"] if self.operation and self.status < 400 else [])

    @property
    def first(self) -> float | None:
        """When the first token of any answer came."""
        return min((timer.first for timer in self.timers if timer.first is not None), default=None)


Sink = Callable[[Exchange], None]


def exchange_of(scope: Scope) -> Exchange:
    """The exchange that a request belongs to."""
    found: Exchange = scope[KEY]
    return found


class Journal:
    """Names exchanges, and tells `sinks` of each that has ended."""

    def __init__(self, app: ASGIApp, sinks: Sequence[Sink]) -> None:
        self._app, self._sinks = app, sinks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        exchange = Exchange(_id(headers.get(HEADER.decode())), scope["method"], scope["path"], headers)
        scope[KEY] = exchange

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                named = (HEADER, exchange.id.encode())
                message = {**message, "headers": [*message.get("headers", ()), named]}
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except Exception:
            exchange.status = 500 if exchange.status == NO_STATUS else exchange.status
            raise
        finally:
            exchange.ended = time.monotonic()
            for sink in self._sinks:
                sink(exchange)


def _id(given: str | None) -> str:
    return given if given and PLAIN.fullmatch(given) else uuid.uuid4().hex

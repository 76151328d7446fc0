"""One HTTP exchange from its first byte to its last: who it is, what it asked for, when what happened, how it ended.

Owns Exchange and Journal, the outermost piece of the application: it names every exchange, by the X-Request-Id that
came with it if that is a plain word, and hands each one that ended to whoever counts it or writes about it (metrics.py,
logs.py, traces.py). Must not know of the engine, nor of how anything is written.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

if TYPE_CHECKING:
    from nibble.server.metrics import Timer

KEY = "nibble.exchange"
"""Of an exchange in its scope."""
HEADER = b"x-request-id"
CLIENT_GONE = 499
"""Status of an exchange that ended before it had one: its client went away. nginx's word."""
ELSEWHERE = "other"
"""Route of what reached none."""
PLAIN = re.compile(r"[A-Za-z0-9._:=+/@-]{1,128}")
"""What an id may be that a client chose: it goes into logs, and back into a header."""


@dataclass(slots=True)
class Exchange:
    """arrived, ended: by time.monotonic(), as timers have it; began: the same moment as arrived, in ns since 1970.

    route: the path as the application has it, so that there are few; operation: `chat` or `text_completion`, if answers
    were asked for; asked: gives the fields that the request named; answer: the id of what was answered; timers: of its
    prompts.
    """

    id: str
    method: str
    path: str
    headers: Mapping[str, str]
    arrived: float = field(default_factory=time.monotonic)
    began: int = field(default_factory=time.time_ns)
    ended: float = 0.0
    status: int = CLIENT_GONE
    route: str = ELSEWHERE
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
        self._paths: frozenset[str] = frozenset()

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
            exchange.status = 500 if exchange.status == CLIENT_GONE else exchange.status
            raise
        finally:
            exchange.ended, exchange.route = time.monotonic(), self._route(scope)
            for sink in self._sinks:
                sink(exchange)

    def _route(self, scope: Scope) -> str:
        """The path of the route; of what was refused before it, the path if there is such a route."""
        found = scope.get("route")
        if found is not None:
            return str(found.path)
        if not self._paths and "app" in scope:
            self._paths = frozenset(getattr(route, "path", "") for route in scope["app"].routes)
        return scope["path"] if scope["path"] in self._paths else ELSEWHERE


def _id(given: str | None) -> str:
    return given if given and PLAIN.fullmatch(given) else uuid.uuid4().hex

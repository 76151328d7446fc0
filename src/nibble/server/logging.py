"""The log's two formats, text and JSON. A record's message is the event's name; its `facts` are what is known of it.

The log of one HTTP request, and the middleware that writes it and hands it on at the request's end.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nibble.server.metrics import RequestTimer

log = logging.getLogger("nibble.server")
BARE = re.compile(r"[^\s\"'=\\\x00-\x1f\x7f-\x9f]+")
"""A value that needs no quotes. Others are quoted, so no client can begin a line of its own."""


def log_event(event: str, level: int = logging.INFO, **facts: Any) -> None:
    """Log an event of the server."""
    log.log(level, event, extra={"facts": facts})


def configure(log_format: str) -> None:
    """Let the loggers of Nibble and of uvicorn write to standard error, as text or json."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(as_json if log_format == "json" else as_text))
    for name, level in (("nibble", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        # Without propagation no handler of the root writes a line a second time.
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)


class LineFormatter(logging.Formatter):
    """Records as lines, by a function from facts to text."""

    def __init__(self, line: Callable[[Mapping[str, Any]], str]) -> None:
        super().__init__()
        self._line = line

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record; its exception is one of the facts."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        head = {"time": f"{moment}.{int(record.msecs):03d}Z", "level": record.levelname.lower()}
        facts: dict[str, Any] = dict(getattr(record, "facts", {}))
        if record.exc_info:
            facts["exception"] = self.formatException(record.exc_info)
        return self._line({**head, "event": record.getMessage(), **facts})


def as_json(facts: Mapping[str, Any]) -> str:
    """Return one JSON object."""
    return json.dumps(facts, ensure_ascii=False, separators=(",", ":"), default=str)


def as_text(facts: Mapping[str, Any]) -> str:
    """Return `TIME LEVEL EVENT key=value ...`; an exception stands below, as Python shows it."""
    rest = dict(facts)
    # These have no spaces and the same place in each line, so they need no names.
    head = " ".join(str(rest.pop(name)) for name in ("time", "level", "event"))
    exception = rest.pop("exception", None)
    line = " ".join((head, *(f"{name}={_quoted(value)}" for name, value in rest.items())))
    return f"{line}\n{exception}" if exception else line


def _quoted(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if BARE.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def plan_summary(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the few facts of an engine's plan (as in its Ready message) that are logged when it is ready."""
    groups, budget = about.get("groups", ()), about.get("budget", {})
    routes = [group["routes"] for group in groups]
    return {
        "kv_format": ",".join(dict.fromkeys(group["scheme"] for group in groups)),
        "prefill": ",".join(dict.fromkeys(route["prefill"]["backend"] for route in routes)),
        "decode": ",".join(dict.fromkeys(route["decode"]["backend"] for route in routes)),
        "dtype": about.get("dtype"),
        "page_size": about.get("page_size"),
        "cache_tokens": budget.get("tokens"),
        "bytes_per_token": about.get("bytes_per_token"),
        "startup_s": round(sum(about.get("startup", {}).values()), 2),
    }


def decode_costs(about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what every generated token costs with a backend that cannot read the cache; [] where all can."""
    return [
        {name: cost[name] for name in ("group", "scheme", "backend", "factor", "words")}
        for cost in about.get("staging", ())
        if cost["phase"] == "decode"
    ]


SCOPE_KEY = "nibble.http_log"
ID_HEADER = b"x-request-id"
CLIENT_GONE = 499
"""Status of a request whose client went away before it had one; nginx's number."""
NO_ROUTE = "other"
"""Route of what reached none."""
CLIENT_ID = re.compile(r"[A-Za-z0-9._:=+/@-]{1,128}")
"""Ids of clients that are accepted: they go into logs, and back into a header."""
POLLING_METHODS = ("GET", "HEAD")
"""Requests that are logged as debug lines only, unless the client made a mistake."""


@dataclass(slots=True)
class HttpLog:
    """Notes about one HTTP request."""

    id: str
    method: str
    path: str
    headers: Mapping[str, str]
    arrived: float = field(default_factory=time.monotonic)
    """By time.monotonic(), as `ended` and the timers have it."""
    arrived_ns: int = field(default_factory=time.time_ns)
    """The same moment in nanoseconds since 1970."""
    ended: float = 0.0
    status: int = CLIENT_GONE
    route: str = NO_ROUTE
    """The path as the application has it, so that there are few."""
    operation: str = ""
    """`chat` or `text_completion`; empty where no answer was requested."""
    model: str = ""
    response_id: str = ""
    fields: Callable[[], Mapping[str, Any]] = dict
    """Return the fields that the request's body named."""
    timers: Sequence[RequestTimer] = ()
    """One for each prompt."""

    @property
    def finish_reasons(self) -> list[str]:
        """The reasons of all answers; one that did not come to its end was aborted, unless it was refused."""
        reasons = [reason for timer in self.timers for reason in timer.reasons]
        return reasons or (["abort"] if self.operation and self.status < 400 else [])

    @property
    def first_token(self) -> float | None:
        """When the first token of any answer came."""
        return min((timer.first for timer in self.timers if timer.first is not None), default=None)

    def summary(self, *, texts: bool) -> dict[str, Any]:
        """Return a line of the log. Seconds count from the arrival. texts: with the body, prompts and all."""
        facts: dict[str, Any] = {"id": self.id, "method": self.method, "path": self.path}
        facts |= {"status": self.status, "total_s": round(self.ended - self.arrived, 4)}
        if not self.operation:
            return facts
        started = max((timer.started for timer in self.timers if timer.started is not None), default=None)
        facts |= {
            "model": self.model,
            "prompt_tokens": sum(timer.prompt for timer in self.timers),
            "cached_tokens": sum(timer.cached for timer in self.timers),
            "output_tokens": sum(timer.tokens for timer in self.timers),
            "queue_s": None if started is None else round(started - self.arrived, 4),
            "ttft_s": None if self.first_token is None else round(self.first_token - self.arrived, 4),
            "finish": ",".join(dict.fromkeys(self.finish_reasons)) or None,
        }
        return facts | ({"request": self.fields()} if texts else {})


Sink = Callable[[HttpLog], None]


def http_log_of(scope: Scope) -> HttpLog:
    """Return the log of the request that a scope belongs to."""
    http_log: HttpLog = scope[SCOPE_KEY]
    return http_log


def access_log(http_log: HttpLog, *, texts: bool) -> None:
    """Log one request that ended. texts: with its body."""
    # Dashboards poll: their requests would hide all others.
    quiet = http_log.method in POLLING_METHODS and not 400 <= http_log.status < 500
    log_event("request", logging.DEBUG if quiet else logging.INFO, **http_log.summary(texts=texts))


class RequestLogMiddleware:
    """The outermost middleware: gives each request its id, and hands its log to `sinks` when it has ended."""

    def __init__(self, app: ASGIApp, sinks: Sequence[Sink]) -> None:
        self._app, self._sinks = app, sinks
        self._paths: frozenset[str] = frozenset()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, and note its status and times."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        # A client's own id lets it find the request in the log.
        client_id = headers.get(ID_HEADER.decode(), "")
        request_id = client_id if CLIENT_ID.fullmatch(client_id) else uuid.uuid4().hex
        scope[SCOPE_KEY] = http_log = HttpLog(request_id, scope["method"], scope["path"], headers)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                http_log.status = message["status"]
                id_header = (ID_HEADER, http_log.id.encode())
                message = {**message, "headers": [*message.get("headers", ()), id_header]}
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            # Starlette's outermost handler answers 500 after this middleware has seen the error.
            http_log.status = 500 if http_log.status == CLIENT_GONE else http_log.status
            raise
        finally:
            http_log.ended, http_log.route = time.monotonic(), self._route(scope)
            for sink in self._sinks:
                sink(http_log)

    def _route(self, scope: Scope) -> str:
        """Return the route's path; for what was refused before it, the path if there is such a route."""
        route = scope.get("route")
        if route is not None:
            return str(route.path)
        # Paths that no route has are one label in metrics: clients may send any.
        if not self._paths and "app" in scope:
            self._paths = frozenset(getattr(route, "path", "") for route in scope["app"].routes)
        return scope["path"] if scope["path"] in self._paths else NO_ROUTE

"""The log of one HTTP request, the middleware that hands it on at the request's end, and OpenTelemetry's spans of it.

The only file that knows OpenTelemetry, which is an extra; spans follow its conventions for generative AI. They are made
when a request has ended, from the times noted on the way, so tracing costs nothing while tokens flow. They carry no
text of prompts or answers.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

import nibble
from nibble.errors import ConfigError
from nibble.server.logging import log_event
from nibble.server.metrics import RequestTimer

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

INSTALL = "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
NAME = "nibble"
REQUEST_ATTRIBUTES = {
    name: name
    for name in (
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "frequency_penalty",
        "presence_penalty",
        "seed",
    )
} | {"max_completion_tokens": "max_tokens", "max_output_tokens": "max_tokens", "n": "choice.count"}
"""Fields of requests, and their names behind `gen_ai.request.`."""


class Tracer:
    """A sink of HTTP logs that makes spans. processor: takes the spans."""

    def __init__(self, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider

        defaults = Resource({"service.name": NAME, "service.version": nibble.__version__})
        # OTEL_SERVICE_NAME and its like win.
        resource = defaults.merge(OTELResourceDetector().detect())
        # run.py closes it, when all requests have ended.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(NAME, nibble.__version__)

    def __call__(self, http_log: HttpLog) -> None:
        """Make the spans of a request for answers: one, and a child for each phase of each prompt."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if not http_log.operation:
            return

        def nanoseconds(moment: float) -> int:
            # Timers have time.monotonic(); spans have nanoseconds since 1970.
            return http_log.arrived_ns + round(1e9 * (moment - http_log.arrived))

        span = self._tracer.start_span(
            f"{http_log.operation} {http_log.model}",
            # A malformed traceparent is none.
            TraceContextTextMapPropagator().extract(dict(http_log.headers)),
            trace.SpanKind.SERVER,
            attributes=span_attributes(http_log),
            start_time=nanoseconds(http_log.arrived),
        )
        if http_log.status >= 500 or "error" in http_log.finish_reasons:
            span.set_status(trace.StatusCode.ERROR)
        context = trace.set_span_in_context(span)
        for timer in http_log.timers:
            counts = {"gen_ai.usage.input_tokens": timer.prompt, "gen_ai.usage.output_tokens": timer.tokens}
            for name, start, end in phases_of(timer, http_log.ended):
                child = self._tracer.start_span(
                    name, context, trace.SpanKind.INTERNAL, attributes=counts, start_time=nanoseconds(start)
                )
                child.end(nanoseconds(end))
        span.end(nanoseconds(http_log.ended))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def tracer_to(endpoint: str) -> Tracer:
    """Return a tracer that sends OTLP over HTTP; raises ConfigError where OpenTelemetry is not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(f"traces need OpenTelemetry ({error}): {INSTALL}") from error
    return Tracer(BatchSpanProcessor(OTLPSpanExporter(endpoint)))


def phases_of(timer: RequestTimer, ended: float) -> list[tuple[str, float, float]]:
    """Return name, start and end of each phase that one prompt reached."""
    phases = (
        ("queue", timer.arrived, timer.started),
        ("prefill", timer.started, timer.first),
        ("decode", timer.first, timer.last),
    )
    return [(name, start, ended if end is None else end) for name, start, end in phases if start is not None]


def span_attributes(http_log: HttpLog) -> dict[str, Any]:
    """Return a request's attributes. https://opentelemetry.io/docs/specs/semconv/gen-ai"""
    timers, fields = http_log.timers, http_log.fields()
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": http_log.operation,
        "gen_ai.provider.name": NAME,
        "gen_ai.request.model": http_log.model,
        "gen_ai.response.model": http_log.model,
        "gen_ai.response.id": http_log.response_id,
        "gen_ai.response.finish_reasons": http_log.finish_reasons,
        "gen_ai.usage.input_tokens": sum(timer.prompt for timer in timers),
        "gen_ai.usage.output_tokens": sum(timer.tokens for timer in timers),
        "gen_ai.usage.cache_read.input_tokens": sum(timer.cached for timer in timers),
        "http.request.method": http_log.method,
        "http.response.status_code": http_log.status,
        "url.path": http_log.path,
        "nibble.request.id": http_log.id,
        "nibble.request.priority": fields.get("priority", 0),
    }
    for name, value in fields.items():
        if name in REQUEST_ATTRIBUTES and value is not None:
            attributes[f"gen_ai.request.{REQUEST_ATTRIBUTES[name]}"] = value
    if http_log.first_token is not None:
        # The conventions have no name for it; this one is vLLM's.
        attributes["gen_ai.latency.time_to_first_token"] = http_log.first_token - http_log.arrived
    if http_log.status >= 400:
        attributes["error.type"] = str(http_log.status)
    return attributes


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
    error: str = ""
    """Why it was refused, or failed, without any text of the request."""

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
        facts |= {"error": self.error} if self.error else {}
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

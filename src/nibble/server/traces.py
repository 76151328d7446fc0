"""OpenTelemetry's spans of requests, by its conventions for generative AI, sent to a collector.

Owns Traces: the only file that knows OpenTelemetry, which is an extra. A request's span is made when it has ended, out
of the times that were noted on the way, so that tracing costs nothing while tokens flow. It continues the trace that a
W3C traceparent names, and has a child each for waiting, prefill and decoding. No text of prompts or answers is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import nibble
from nibble.errors import ConfigError
from nibble.server.exchange import Exchange

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor

    from nibble.server.metrics import Timer

INSTALL = "pip install 'nibble-llm[otel]'"
NAME = "nibble"
ASKED = {
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "seed": "seed",
    "n": "choice.count",
}
"""Fields of requests, and what they are called behind `gen_ai.request.`."""


class Traces:
    """A sink of exchanges. processor: takes the spans."""

    def __init__(self, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider

        named = Resource({"service.name": NAME, "service.version": nibble.__version__})
        resource = named.merge(OTELResourceDetector().detect())  # OTEL_SERVICE_NAME and its like win
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(NAME, nibble.__version__)

    def __call__(self, exchange: Exchange) -> None:
        """Makes the spans of an exchange in which answers were asked for."""
        from opentelemetry import trace

        if not exchange.operation:
            return
        kinds, moment = trace.SpanKind, _clock(exchange)
        span = self._tracer.start_span(
            f"{exchange.operation} {exchange.model}",
            _context(exchange.headers),
            kinds.SERVER,
            attributes=attributes_of(exchange),
            start_time=moment(exchange.arrived),
        )
        if exchange.status >= 500 or "error" in exchange.finish_reasons:
            span.set_status(trace.StatusCode.ERROR)
        inside = trace.set_span_in_context(span)
        for timer in exchange.timers:
            for name, begin, end in parts_of(timer, exchange.ended):
                child = self._tracer.start_span(
                    name, inside, kinds.INTERNAL, attributes=_counts(timer), start_time=moment(begin)
                )
                child.end(moment(end))
        span.end(moment(exchange.ended))

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()


def traces_to(endpoint: str) -> Traces:
    """Traces that go to a collector by OTLP over HTTP; raises ConfigError where OpenTelemetry is not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(f"traces need OpenTelemetry ({error}): {INSTALL}") from error
    return Traces(BatchSpanProcessor(OTLPSpanExporter(endpoint)))


def parts_of(timer: Timer, ended: float) -> list[tuple[str, float, float]]:
    """What became of one prompt, each with its begin and end: a part that never came is left out."""
    found = [("queue", timer.arrived, ended if timer.started is None else timer.started)]
    if timer.started is not None:
        found.append(("prefill", timer.started, ended if timer.first is None else timer.first))
    if timer.first is not None and timer.last is not None:
        found.append(("decode", timer.first, timer.last))
    return found


def attributes_of(exchange: Exchange) -> dict[str, Any]:
    """What is told of a request. https://opentelemetry.io/docs/specs/semconv/gen-ai"""
    timers, asked = exchange.timers, exchange.asked()
    found: dict[str, Any] = {
        "gen_ai.operation.name": exchange.operation,
        "gen_ai.provider.name": NAME,
        "gen_ai.request.model": exchange.model,
        "gen_ai.response.model": exchange.model,
        "gen_ai.response.id": exchange.answer,
        "gen_ai.response.finish_reasons": exchange.finish_reasons,
        "gen_ai.usage.input_tokens": sum(timer.prompt for timer in timers),
        "gen_ai.usage.output_tokens": sum(timer.tokens for timer in timers),
        "gen_ai.usage.cache_read.input_tokens": sum(timer.cached for timer in timers),
        "http.request.method": exchange.method,
        "http.response.status_code": exchange.status,
        "url.path": exchange.path,
        "nibble.request.id": exchange.id,
        "nibble.request.priority": asked.get("priority", 0),
    }
    given = {f"gen_ai.request.{ASKED[name]}": value for name, value in asked.items() if name in ASKED}
    found |= {name: value for name, value in given.items() if value is not None}
    if exchange.first is not None:
        found["gen_ai.latency.time_to_first_token"] = exchange.first - exchange.arrived  # as vLLM calls it
    if exchange.status >= 400:
        found["error.type"] = str(exchange.status)
    return found


def _counts(timer: Timer) -> dict[str, int]:
    return {"gen_ai.usage.input_tokens": timer.prompt, "gen_ai.usage.output_tokens": timer.tokens}


def _context(headers: Mapping[str, str]) -> Context:
    """The trace that a client's request is part of; a malformed one is no trace."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(dict(headers))


def _clock(exchange: Exchange) -> Any:
    """From time.monotonic(), as timers have it, to nanoseconds since 1970, as spans have it."""
    return lambda moment: exchange.began + round(1e9 * (moment - exchange.arrived))

"""OpenTelemetry's spans of requests, by its conventions for generative AI, sent to a collector.

The only file that knows OpenTelemetry, which is an extra. A request's spans are made when it has ended, from the times
noted on the way, so tracing costs nothing while tokens flow. They carry no text of prompts or answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import nibble
from nibble.errors import ConfigError
from nibble.server.logging import HttpLog
from nibble.server.metrics import RequestTimer

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor

INSTALL = "pip install 'nibble-llm[otel]'"
NAME = "nibble"
REQUEST_ATTRIBUTES = {
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

        if not http_log.operation:
            return

        def nanoseconds(moment: float) -> int:
            # Timers have time.monotonic(); spans have nanoseconds since 1970.
            return http_log.arrived_ns + round(1e9 * (moment - http_log.arrived))

        span = self._tracer.start_span(
            f"{http_log.operation} {http_log.model}",
            _parent_context(http_log.headers),
            trace.SpanKind.SERVER,
            attributes=span_attributes(http_log),
            start_time=nanoseconds(http_log.arrived),
        )
        if http_log.status >= 500 or "error" in http_log.finish_reasons:
            span.set_status(trace.StatusCode.ERROR)
        context = trace.set_span_in_context(span)
        for timer in http_log.timers:
            counts = {
                "gen_ai.usage.input_tokens": timer.prompt,
                "gen_ai.usage.output_tokens": timer.tokens,
            }
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
    phases = [("queue", timer.arrived, ended if timer.started is None else timer.started)]
    if timer.started is not None:
        phases.append(("prefill", timer.started, ended if timer.first is None else timer.first))
    if timer.first is not None and timer.last is not None:
        phases.append(("decode", timer.first, timer.last))
    return phases


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


def _parent_context(headers: Mapping[str, str]) -> Context:
    """Return the trace that a W3C traceparent names; a malformed one is none."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract(dict(headers))

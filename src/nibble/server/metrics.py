"""What the server counts and times, as Prometheus reads it. Names are vLLM's, with `nibble:` for `vllm:`.

Owns Meters and Timer. Requests are counted here as they go by, HTTP requests when they have ended; what the
engine counts is read from its client when somebody asks. Must not know of routes, of answers' text or of sockets.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import nibble
from nibble.errors import NibbleError, RequestError
from nibble.server.engine_client import EngineClient, Piece, State
from nibble.server.fidelity_view import FidelityCollector

if TYPE_CHECKING:
    from nibble.server.http_log import HttpLog

FIRST_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0,
)  # fmt: skip
BETWEEN_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 10.0, 40.0,
)  # fmt: skip
WHOLE_S = (
    0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
TOKENS = tuple(
    float(digit * 10**power) for power in range(7) for digit in (1, 2, 5) if digit * 10**power <= 2e6
)
"""Bounds of the histograms' buckets: vLLM's, and finer where small models are."""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
REASONS = ("stop", "length", "abort", "error")
MODEL = "model_name"
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Clock = Callable[[], float]


class Meters:
    """All metrics of one server, in a registry of its own. clock: seconds that only grow."""

    def __init__(self, client: EngineClient, model: str, clock: Clock = time.monotonic) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # one more series for each, which no dashboard reads
        self.clock, self._model = clock, model
        self._registry = CollectorRegistry()
        self.first = self._histogram(
            "time_to_first_token_seconds", "Time from a request's arrival to its first token.", FIRST_S
        )
        self.between = self._histogram(
            "inter_token_latency_seconds",
            "Time between tokens of one answer; tokens that come together share it.",
            BETWEEN_S,
        )
        self.mean_between = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time of an answer's tokens after the first.",
            BETWEEN_S,
        )
        self.whole = self._histogram(
            "e2e_request_latency_seconds", "Time from a request's arrival to its end.", WHOLE_S
        )
        self.queued = self._histogram(
            "request_queue_time_seconds",
            "Time from a request's arrival until the engine took it up.",
            WHOLE_S,
        )
        self.prefill = self._histogram(
            "request_prefill_time_seconds", "Time from there to its first token.", WHOLE_S
        )
        self.decode = self._histogram(
            "request_decode_time_seconds", "Time from its first token to its last.", WHOLE_S
        )
        self.inference = self._histogram(
            "request_inference_time_seconds",
            "Time from when the engine took it up to its last token.",
            WHOLE_S,
        )
        self.prompt = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request that ended.", TOKENS
        )
        self.generation = self._histogram(
            "request_generation_tokens", "Tokens of all answers of a request that ended.", TOKENS
        )
        self.prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens of requests, counted with the first piece of an answer."
        ).labels(model)
        self.generation_tokens = self._counter("generation_tokens", "Tokens of answers.").labels(model)
        ended = self._counter("request_success", "Requests that ended, by reason.", "finished_reason")
        self.ended = {reason: ended.labels(model, reason) for reason in REASONS}
        self._http = self._counter(
            "http_requests", "Exchanges by route and status.", "method", "path", "status"
        )
        self._registry.register(EngineCollector(client, model))
        self._registry.register(FidelityCollector(client, model))
        ProcessCollector(registry=self._registry)

    def request(self, prompt_tokens: int, answers: int = 1) -> Timer:
        """The timer of a request that has just come."""
        return Timer(self, prompt_tokens, answers)

    def count_http(self, http_log: HttpLog) -> None:
        """Count an HTTP request that has ended."""
        method = http_log.method if http_log.method in METHODS else "other"
        self._http.labels(self._model, method, http_log.route, str(http_log.status)).inc()

    def render(self) -> tuple[bytes, str]:
        """All of it as text, and the text's media type: the one that every Prometheus reads."""
        return generate_latest(self._registry), MEDIA_TYPE

    def _histogram(self, name: str, doc: str, bounds: tuple[float, ...]) -> Histogram:
        made = Histogram(f"nibble:{name}", doc, [MODEL], registry=self._registry, buckets=bounds)
        return made.labels(self._model)

    def _counter(self, name: str, doc: str, *labels: str) -> Counter:
        return Counter(f"nibble:{name}", doc, [MODEL, *labels], registry=self._registry)


@dataclass(slots=True)
class _Answer:
    """Times of one answer. later: tokens after its first piece."""

    first: float
    last: float
    later: int = 0


class Timer:
    """The times of one request: a prompt, and so many answers. One that is refused leaves nothing behind in metrics.

    prompt, cached, tokens: how many of the prompt, of those found in the prefix cache, and of all answers. arrived,
    started, first, last: when it came, when the engine took it up, when its first and newest tokens came. reasons: why
    answers ended.
    """

    def __init__(self, meters: Meters, prompt: int, answers: int) -> None:
        self.prompt, self.cached, self.tokens = prompt, 0, 0
        self.arrived = meters.clock()
        self.started: float | None = None
        self.first: float | None = None
        self.last: float | None = None
        self.reasons: list[str] = []
        self._meters, self._left = meters, answers
        self._answers: dict[int, _Answer] = {}
        self._begun = self._ended = False

    def piece(self, tokens: int, answer: int = 0, reason: str | None = None, at: float | None = None) -> None:
        """So many tokens of an answer have come, together. reason: why it ended, with its last piece; the request
        ends with the last of its answers, and with that one's reason. at: when, if not now."""
        now = self._meters.clock() if at is None else at
        if not self._begun:
            self._begun = True
            self._meters.prompt_tokens.inc(self.prompt)
        if tokens:
            self._count(tokens, answer, now)
        if reason:
            self.reasons.append(reason)
            self._left -= 1
            if not self._left:
                self.end(reason, now)

    def end(self, reason: str, at: float | None = None) -> None:
        """The request ended, with one of REASONS. Only the first end counts. at: when, if not now."""
        if self._ended:
            return
        self._ended = True
        self.reasons += [reason] * self._left
        self._meters.whole.observe((self._meters.clock() if at is None else at) - self.arrived)
        self._meters.prompt.observe(self.prompt)
        self._meters.generation.observe(self.tokens)
        self._meters.ended[reason].inc()
        self._phases()
        for answer in self._answers.values():
            if answer.later:
                self._meters.mean_between.observe((answer.last - answer.first) / answer.later)

    def _phases(self) -> None:
        """How long it waited, was read, and was answered, as far as it came."""
        if self.started is None:
            return
        self._meters.queued.observe(self.started - self.arrived)
        if self.first is not None and self.last is not None:
            self._meters.prefill.observe(self.first - self.started)
            self._meters.decode.observe(self.last - self.first)
            self._meters.inference.observe(self.last - self.started)

    async def over(self, source: AsyncGenerator[list[Piece]]) -> AsyncGenerator[list[Piece]]:
        """The same pieces, timed. Closed before its end is an abort."""
        try:
            async with aclosing(source):
                async for pieces in source:
                    for piece in pieces:
                        self._note(piece)
                    yield pieces
        except RequestError:
            self._ended = True  # refused: the status of its HTTP request says so
            raise
        except NibbleError:
            self.end("error")
            raise
        finally:
            self.end("abort")

    def _note(self, piece: Piece) -> None:
        """Counts a piece by the times at which the server heard of its parts."""
        self.cached, self.started = piece.cached, piece.started
        delta, reason = piece.delta, "error" if piece.delta.error else piece.delta.finish_reason
        *before, (last, tokens) = piece.marks
        for at, count in before:
            self.piece(count, delta.index, None, at)
        self.piece(tokens, delta.index, reason, last)

    def _count(self, tokens: int, answer: int, now: float) -> None:
        there = self._answers.get(answer)
        self.last = now
        if self.first is None:
            self.first = now
            self._meters.first.observe(now - self.arrived)
        self.tokens += tokens
        self._meters.generation_tokens.inc(tokens)
        if there is None:
            self._answers[answer] = _Answer(now, now)
            return
        for _ in range(tokens):
            self._meters.between.observe((now - there.last) / tokens)
        there.last = now
        there.later += tokens


@dataclass(frozen=True, slots=True)
class _Row:
    """One number of the engine. key: in its stats. state: the value of the label, where numbers share a name."""

    name: str
    key: str
    doc: str
    state: str = ""


RUNNING = (
    _Row("num_requests_running", "running", "Answers that are being computed."),
    _Row("num_requests_waiting", "waiting", "Answers that wait for room."),
    _Row("kv_cache_pages", "cache_held", "Pages of the KV cache.", "held"),
    _Row("kv_cache_pages", "cache_idle", "", "idle"),
    _Row("kv_cache_pages", "cache_free", "", "free"),
    _Row("host_tier_frames", "tier_free", "Frames of the device before the host tier.", "free"),
    _Row("host_tier_frames", "tier_idle", "", "idle"),
    _Row("host_tier_frames", "tier_hot", "", "hot"),
    _Row("host_tier_frames", "tier_held", "", "held"),
)
"""Gauges. Pages and frames are held by open requests, idle in the prefix cache, or free; hot: of hot buffers."""
COUNTED = (
    _Row("engine_steps", "steps", "Steps of the engine."),
    _Row("num_preemptions", "preemptions", "Answers that had to give up their pages for a while."),
    _Row("preempted_tokens", "preempted_tokens", "Stored tokens that preempted answers gave up."),
    _Row("prefill_tokens_computed", "prompt_tokens", "Prompt tokens computed: not those that were cached."),
    _Row("prefix_cache_queries", "cache_lookup_tokens", "Tokens looked up in the prefix cache."),
    _Row("prefix_cache_hits", "cache_hit_tokens", "Tokens found in the prefix cache."),
    _Row("prefix_cache_evicted_pages", "cache_evicted", "Pages that the prefix cache gave up."),
    _Row("host_tier_saved_pages", "tier_saved", "Pages copied to the host."),
    _Row("host_tier_loaded_pages", "tier_loaded", "Pages copied back to the device."),
    _Row("host_tier_dropped_pages", "tier_dropped", "Pages whose frames were given up."),
    _Row("host_tier_spilled_requests", "tier_spilled", "Answers that went on with a hot buffer."),
)
"""Counters of one life of the engine. A new one starts at nothing, as Prometheus knows of counters."""


class EngineCollector(Collector):
    """What the engine counts, as its client heard it last. How things stand is left out while it does not serve."""

    def __init__(self, client: EngineClient, model: str) -> None:
        self._client, self._model = client, model

    def collect(self) -> Iterator[Metric]:
        serves, stats = self._client.state is State.READY, numbers_of(self._client.stats)
        yield self._gauge("engine_up", "Whether the engine serves.", float(serves))
        about = GaugeMetricFamily("nibble:build_info", "The version, as a label.", labels=["version"])
        about.add_metric([nibble.__version__], 1.0)
        yield about
        yield self._counter("engine_restarts", "Times the engine was started again.", self._client.restarts)
        for row in COUNTED:
            if row.key in stats or not row.key.startswith("tier_"):
                yield self._counter(row.name, row.doc, stats.get(row.key, 0.0))
        if serves:
            yield from self._standing(stats)

    def _standing(self, stats: Mapping[str, float]) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily] = {}
        for row in RUNNING:
            if row.key in stats:
                labels = [MODEL, "state"] if row.state else [MODEL]
                family = families.setdefault(
                    row.name, GaugeMetricFamily(f"nibble:{row.name}", row.doc, labels=labels)
                )
                family.add_metric([self._model, row.state] if row.state else [self._model], stats[row.key])
        yield from families.values()
        if stats.get("cache_total"):
            used = stats["cache_held"] / stats["cache_total"]
            yield self._gauge(
                "kv_cache_usage_perc", "Share of the KV cache's pages that are held: 1 is all.", used
            )

    def _gauge(self, name: str, doc: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"nibble:{name}", doc, labels=[MODEL])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, doc: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(f"nibble:{name}", doc, labels=[MODEL])
        family.add_metric([self._model], value)
        return family


def numbers_of(stats: Mapping[str, float]) -> dict[str, float]:
    """The engine's numbers, and those that follow from them."""
    found = dict(stats)
    if "tier_frames" in found:
        rest = sum(found.get(f"tier_{state}", 0.0) for state in ("free", "idle", "hot"))
        found["tier_held"] = found["tier_frames"] - rest
    return found

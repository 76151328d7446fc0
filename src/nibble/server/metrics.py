"""The metrics of the server, as Prometheus reads them. Names are vLLM's, with `nibble:` for `vllm:`.

Requests are counted as they go by, and HTTP requests at their end; the engine's counts are read when somebody asks.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, Protocol

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

import nibble
from nibble.errors import NibbleError, RequestError
from nibble.server.engine_client import EngineClient, Piece, State, engines_of
from nibble.server.fidelity import fidelity_parts

# Bounds of the histograms' buckets: vLLM's, and finer where small models are.
FIRST_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0,
)  # fmt: skip
GAP_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 10.0, 40.0,
)  # fmt: skip
TOTAL_S = (
    0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
TOKENS = tuple(
    float(digit * 10**power) for power in range(7) for digit in (1, 2, 5) if digit * 10**power <= 2e6
)
HISTOGRAMS = {
    "time_to_first_token_seconds": ("Time from a request's arrival to its first token.", FIRST_S),
    "inter_token_latency_seconds": (
        "Time between tokens of one answer; tokens that come together share it, as those of half a second where an "
        "answer is not streamed.",
        GAP_S,
    ),
    "request_time_per_output_token_seconds": ("Mean time of an answer's tokens after the first.", GAP_S),
    "e2e_request_latency_seconds": ("Time from a request's arrival to its end.", TOTAL_S),
    "request_queue_time_seconds": ("Time from a request's arrival until the engine took it up.", TOTAL_S),
    "request_prefill_time_seconds": ("Time from there to its first token.", TOTAL_S),
    "request_decode_time_seconds": ("Time from its first token to its last.", TOTAL_S),
    "request_inference_time_seconds": ("Time from when the engine took it up to its last token.", TOTAL_S),
    "request_prompt_tokens": ("Prompt tokens of a request that ended.", TOKENS),
    "request_generation_tokens": ("Tokens of all answers of a request that ended.", TOKENS),
}
"""Help and buckets, by name."""
MODEL_LABEL, REPLICA_LABEL = "model_name", "replica"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
REASONS = ("stop", "length", "abort", "error")
MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The text format that every Prometheus reads."""
Clock = Callable[[], float]


class HttpRequest(Protocol):
    """The facts of an HTTP request that are counted."""

    method: str
    route: str
    status: int


class Metrics:
    """All metrics of one server, in a registry of its own.

    Args:
        client: the engine.
        model: the value of the label `model_name`.
        clock: seconds that only grow.
    """

    def __init__(self, client: EngineClient, model: str, clock: Clock = time.monotonic) -> None:
        # They would be one more series for each, which no dashboard reads.
        prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.clock, self._model = clock, model
        self._registry = prometheus.CollectorRegistry()
        self._histograms = {}
        for name, (doc, bounds) in HISTOGRAMS.items():
            family = prometheus.Histogram(
                f"nibble:{name}", doc, [MODEL_LABEL], registry=self._registry, buckets=bounds
            )
            self._histograms[name] = family.labels(model)
        self.prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens of requests, counted with the first piece of an answer."
        ).labels(model)
        self.generation_tokens = self._counter("generation_tokens", "Tokens of answers.").labels(model)
        ended = self._counter("request_success", "Requests that ended, by reason.", "finished_reason")
        # With all labels from the start: a series that appears with its first event has no rate.
        self.ended = {reason: ended.labels(model, reason) for reason in REASONS}
        self._http = self._counter(
            "http_requests", "Exchanges by route and status.", "method", "path", "status"
        )
        self._registry.register(EnginesCollector(client, model))
        version = prometheus.Info("nibble:build", "The version, as a label.", registry=self._registry)
        version.info({"version": nibble.__version__})
        prometheus.ProcessCollector(registry=self._registry)

    def start_request(self, prompt_tokens: int, num_answers: int = 1) -> RequestTimer:
        """Return the timer of a request that has just arrived."""
        return RequestTimer(self, prompt_tokens, num_answers)

    def observe(self, name: str, value: float) -> None:
        """Add a value to one of HISTOGRAMS."""
        self._histograms[name].observe(value)

    def count_http(self, request: HttpRequest) -> None:
        """Count an HTTP request that has ended."""
        # A client may send any method, and each would be a series for ever.
        method = request.method if request.method in METHODS else "other"
        self._http.labels(self._model, method, request.route, str(request.status)).inc()

    def render(self) -> tuple[bytes, str]:
        """Return all metrics as text, and the text's media type."""
        return prometheus.generate_latest(self._registry), MEDIA_TYPE

    def _counter(self, name: str, doc: str, *labels: str) -> prometheus.Counter:
        return prometheus.Counter(f"nibble:{name}", doc, [MODEL_LABEL, *labels], registry=self._registry)


@dataclass(slots=True)
class AnswerTimes:
    """Times of one answer."""

    first: float
    last: float
    num_later: int = 0
    """Tokens after the first piece."""


class RequestTimer:
    """The times of one request; a refused one leaves nothing behind in the metrics.

    Args:
        metrics: where the times go.
        prompt: tokens.
        num_answers: the request ends with the last of them.
    """

    def __init__(self, metrics: Metrics, prompt: int, num_answers: int) -> None:
        self.prompt = prompt
        self.cached = 0
        """Prompt tokens from the prefix cache."""
        self.tokens = 0
        """Tokens of all answers."""
        self.arrived = metrics.clock()
        self.started: float | None = None
        """When the engine took the request up."""
        self.first: float | None = None
        self.last: float | None = None
        """When the first and the newest token came."""
        self.reasons: list[str] = []
        """Why answers ended."""
        self._metrics, self._num_open = metrics, num_answers
        self._answers: dict[int, AnswerTimes] = {}
        self._prompt_counted = self._ended = False

    def add_tokens(
        self, count: int, answer: int = 0, reason: str | None = None, at: float | None = None
    ) -> None:
        """Note tokens that came together.

        Args:
            count: tokens.
            answer: its number.
            reason: why the answer ended, with its last tokens.
            at: when, by the clock; now where left out.
        """
        now = self._metrics.clock() if at is None else at
        if not self._prompt_counted:
            self._prompt_counted = True
            self._metrics.prompt_tokens.inc(self.prompt)
        if count:
            self._count(count, answer, now)
        if reason:
            self.reasons.append(reason)
            self._num_open -= 1
            if not self._num_open:
                self.end(reason, now)

    def end(self, reason: str, at: float | None = None) -> None:
        """Note the request's end, with one of REASONS. Only the first end counts."""
        if self._ended:
            return
        self._ended = True
        self.reasons += [reason] * self._num_open
        observe = self._metrics.observe
        end = self._metrics.clock() if at is None else at
        observe("e2e_request_latency_seconds", end - self.arrived)
        observe("request_prompt_tokens", self.prompt)
        observe("request_generation_tokens", self.tokens)
        self._metrics.ended[reason].inc()
        if self.started is not None:
            observe("request_queue_time_seconds", self.started - self.arrived)
            if self.first is not None and self.last is not None:
                observe("request_prefill_time_seconds", self.first - self.started)
                observe("request_decode_time_seconds", self.last - self.first)
                observe("request_inference_time_seconds", self.last - self.started)
        for times in self._answers.values():
            if times.num_later:
                mean = (times.last - times.first) / times.num_later
                observe("request_time_per_output_token_seconds", mean)

    async def observe(self, source: AsyncGenerator[list[Piece]]) -> AsyncGenerator[list[Piece]]:
        """Yield the same pieces, and note their times; closed before its end, the request is aborted."""
        try:
            async with aclosing(source):
                async for pieces in source:
                    for piece in pieces:
                        self._add_piece(piece)
                    yield pieces
        except RequestError:
            self._ended = True  # refused: the status of its HTTP request says so
            raise
        except NibbleError:
            self.end("error")
            raise
        finally:
            self.end("abort")

    def _add_piece(self, piece: Piece) -> None:
        self.cached, self.started = piece.cached, piece.started
        delta, reason = piece.delta, "error" if piece.delta.error else piece.delta.finish_reason
        # A joined piece has the times of its parts: a slow reader does not make the engine look slow.
        *earlier, (last, tokens) = piece.marks
        for at, count in earlier:
            self.add_tokens(count, delta.index, None, at)
        self.add_tokens(tokens, delta.index, reason, last)

    def _count(self, count: int, answer: int, now: float) -> None:
        self.last = now
        if self.first is None:
            self.first = now
            self._metrics.observe("time_to_first_token_seconds", now - self.arrived)
        self.tokens += count
        self._metrics.generation_tokens.inc(count)
        times = self._answers.get(answer)
        if times is None:
            self._answers[answer] = AnswerTimes(now, now)
            return
        for _ in range(count):
            self._metrics.observe("inter_token_latency_seconds", (now - times.last) / count)
        times.last = now
        times.num_later += count


@dataclass(frozen=True, slots=True)
class Row:
    """One number of the engine."""

    name: str
    key: str
    """In the engine's counts."""
    doc: str
    state: str = ""
    """The value of the label, where numbers share a name."""


GAUGES = (
    Row("num_requests_running", "running", "Answers that are being computed."),
    Row("num_requests_waiting", "waiting", "Answers that wait for room."),
    Row("kv_cache_pages", "cache_in_use", "Pages of the KV cache.", "held"),
    Row("kv_cache_pages", "cache_idle", "", "idle"),
    Row("kv_cache_pages", "cache_free", "", "free"),
    Row(
        "kv_window_pages", "window_in_use", "Exact pages, of the newest tokens in the compute dtype.", "held"
    ),
    Row("kv_window_pages", "window_idle", "", "idle"),
    Row("kv_window_pages", "window_free", "", "free"),
    Row(
        "kv_window_snapshot_pages",
        "window_attached",
        "Exact pages of snapshots in the prefix cache, held or idle.",
    ),
    Row("recurrent_state_slots", "states_in_use", "Slots of recurrent states.", "held"),
    Row("recurrent_state_slots", "states_idle", "", "idle"),
    Row("recurrent_state_slots", "states_free", "", "free"),
    Row(
        "recurrent_state_snapshots",
        "states_attached",
        "Slots of snapshots in the prefix cache, held or idle.",
    ),
    Row("host_tier_frames", "tier_free", "Frames of the device before the host tier.", "free"),
    Row("host_tier_frames", "tier_idle", "", "idle"),
    Row("host_tier_frames", "tier_hot", "", "hot"),
    Row("host_tier_frames", "tier_held", "", "held"),
)
"""Gauges. Pages, slots and frames are held by open requests, idle in the prefix cache, or free; hot: of hot buffers.
Those of the exact window, of recurrent states and of the host tier are there where these are."""
COUNTERS = (
    Row("engine_steps", "steps", "Steps of the engine."),
    Row("num_preemptions", "preemptions", "Answers that had to give up their pages for a while."),
    Row("preempted_tokens", "preempted_tokens", "Stored tokens that preempted answers gave up."),
    Row("prefill_tokens_computed", "prompt_tokens", "Prompt tokens computed: not those that were cached."),
    Row("prefix_cache_queries", "cache_lookup_tokens", "Tokens looked up in the prefix cache."),
    Row("prefix_cache_hits", "cache_hit_tokens", "Tokens found in the prefix cache."),
    Row("prefix_cache_evicted_pages", "cache_evicted", "Pages that the prefix cache gave up."),
    Row("kv_window_snapshot_hits", "window_snapshot_hits", "Cached prefixes that went on at their end."),
    Row("kv_window_snapshot_misses", "window_snapshot_misses", "Cached prefixes that were replayed in part."),
    Row("kv_window_replayed_tokens", "window_replayed_tokens", "Cached tokens that were computed again."),
    Row("kv_window_evicted_pages", "window_evicted", "Exact pages that snapshots gave up."),
    Row("recurrent_state_hits", "states_snapshot_hits", "Cached prefixes whose states went on at their end."),
    Row("recurrent_state_misses", "states_snapshot_misses", "Cached prefixes whose states were replayed."),
    Row("recurrent_state_replayed_tokens", "states_replayed_tokens", "Tokens computed again for states."),
    Row("recurrent_state_evicted_slots", "states_evicted", "Slots that snapshots gave up."),
    Row("host_tier_saved_pages", "tier_saved", "Pages copied to the host."),
    Row("host_tier_loaded_pages", "tier_loaded", "Pages copied back to the device."),
    Row("host_tier_dropped_pages", "tier_dropped", "Pages whose frames were given up."),
    Row("host_tier_spilled_requests", "tier_spilled", "Answers that went on with a hot buffer."),
)
"""Counters of one life of the engine. A new one starts at nothing, as Prometheus knows of counters."""
FIDELITY_COUNTERS = (
    Row("kv_fidelity_samples", "fidelity_samples", "Requests whose attention was compared."),
    Row("kv_fidelity_alerts", "fidelity_alerts", "Times that the error of a layer rose above its limit."),
)
"""Present only with --watch-fidelity, as the gauges are."""
FIDELITY_ROWS = (
    Row("kv_fidelity_alert", "fidelity_alert", "Whether a layer is above its limit."),
    Row("kv_fidelity_uncovered_layers", "fidelity_uncovered_layers", "Layers with states: not compared."),
)
FIDELITY_GAUGES = {
    "error": "Error of a layer's attention over the cache, relative to rows in the model's precision.",
    "own": "The same for what the layer's format makes of these rows, with scales that fit them.",
    "limit": "The error from which the watch warns.",
}
DRAFTS = {
    "drafts_steps": ("spec_decode_num_drafts", "Drafts that were verified."),
    "drafts_drafted": ("spec_decode_num_draft_tokens", "Draft tokens that were verified."),
    "drafts_accepted": ("spec_decode_num_accepted_tokens", "Draft tokens that became part of an answer."),
}
"""Name and help of the counts of drafts, where there is a drafter."""
DRAFTS_AT = "drafts_accepted_at_"
Family = type[CounterMetricFamily | GaugeMetricFamily]
Samples = Mapping[Any, float]
"""Values of a metric, by the tuple of its labels' values, without the model's."""


class EnginesCollector(Collector):
    """The counts of all engines: of several, each sample has the number of its engine as label `replica`."""

    def __init__(self, client: EngineClient, model: str) -> None:
        engines = engines_of(client)
        labels = [{}] if len(engines) == 1 else [{REPLICA_LABEL: str(i)} for i in range(len(engines))]
        self._collectors = [
            EngineCollector(engine, {MODEL_LABEL: model, **label})
            for engine, label in zip(engines, labels, strict=True)
        ]

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, each once, with the samples of all engines."""
        metrics: dict[str, Metric] = {}
        for metric in (metric for collector in self._collectors for metric in collector.collect()):
            if (first := metrics.setdefault(metric.name, metric)) is not metric:
                first.samples += metric.samples
        yield from metrics.values()


class EngineCollector(Collector):
    """One engine's counts and those of its fidelity watch (engine/error_monitor.py), as it last sent them.

    Args:
        client: the engine.
        labels: of all samples.
    """

    def __init__(self, client: EngineClient, labels: Mapping[str, str]) -> None:
        self._client, self._labels = client, labels

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; gauges only while the engine serves: else they would look like its present state."""
        serves, stats = self._client.state is State.READY, with_derived(self._client.stats)
        yield self._family(GaugeMetricFamily, "engine_up", "Whether the engine serves.", {(): float(serves)})
        restarts, doc = self._client.restarts, "Times the engine was started again."
        yield self._family(CounterMetricFamily, "engine_restarts", doc, {(): restarts})
        for row in (*COUNTERS, *FIDELITY_COUNTERS):
            # Counters without events are 0; those of parts that an engine has not are missing.
            if row.key in stats or not row.key.startswith(("window_", "states_", "tier_", "fidelity_")):
                yield self._family(CounterMetricFamily, row.name, row.doc, {(): stats.get(row.key, 0.0)})
        if skipped := fidelity_parts(stats, "skipped"):
            samples = {(reason,): count for reason, count in skipped.items()}
            doc = "Requests that were drawn and not compared."
            yield self._family(CounterMetricFamily, "kv_fidelity_skipped", doc, samples, "reason")
        yield from self._drafts(stats)
        if serves:
            yield from self._gauges(stats)

    def _drafts(self, stats: Mapping[str, float]) -> Iterator[Metric]:
        """Yield the counts of drafts, with the drafter as a label, and accepted ones by position too."""
        drafter = str(self._client.ready.about.get("drafter", "")) if self._client.ready else ""
        for key, (name, doc) in DRAFTS.items():
            if key in stats:
                yield self._family(CounterMetricFamily, name, doc, {(drafter,): stats[key]}, "drafter")
        places = {key.removeprefix(DRAFTS_AT): stats[key] for key in stats if key.startswith(DRAFTS_AT)}
        if places:
            doc = "Draft tokens that became part of an answer, by position; 0 is the first of a draft."
            samples = {(drafter, place): count for place, count in places.items()}
            name = "spec_decode_num_accepted_tokens_per_pos"
            yield self._family(CounterMetricFamily, name, doc, samples, "drafter", "position")

    def _gauges(self, stats: Mapping[str, float]) -> Iterator[Metric]:
        rows = (row for row in (*GAUGES, *FIDELITY_ROWS) if row.key in stats)
        for name, group in groupby(rows, key=attrgetter("name")):
            first, *more = group
            samples = {(row.state,) if row.state else (): stats[row.key] for row in (first, *more)}
            labels = ["state"] if first.state else []
            yield self._family(GaugeMetricFamily, name, first.doc, samples, *labels)
        if stats.get("cache_total"):
            usage = stats["cache_in_use"] / stats["cache_total"]
            doc = "Share of the KV cache's pages that are held: 1 is all."
            yield self._family(GaugeMetricFamily, "kv_cache_usage_perc", doc, {(): usage})
        groups = self._client.ready.about.get("groups", ()) if self._client.ready else ()
        schemes = {str(layer): group["scheme"] for group in groups for layer in group["layers"]}
        for name, doc in FIDELITY_GAUGES.items():
            if parts := fidelity_parts(stats, name):
                errors = {(layer, schemes.get(layer, "")): value for layer, value in parts.items()}
                yield self._family(GaugeMetricFamily, f"kv_fidelity_{name}", doc, errors, "layer", "scheme")

    def _family(self, kind: Family, name: str, doc: str, samples: Samples, *labels: str) -> Metric:
        family = kind(f"nibble:{name}", doc, labels=[*self._labels, *labels])
        for values, value in samples.items():
            family.add_metric([*self._labels.values(), *values], value)
        return family


def with_derived(stats: Mapping[str, float]) -> dict[str, float]:
    """Return the engine's counts, and those that follow from them."""
    derived = dict(stats)
    if "tier_frames" in derived:
        rest = sum(derived.get(f"tier_{state}", 0.0) for state in ("free", "idle", "hot"))
        derived["tier_held"] = derived["tier_frames"] - rest
    return derived


def cache_view(stats: Mapping[str, float], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of `GET /v1/cache`, made of what the engine last sent (`worker.Stats`, `worker.Ready.about`).

    `at` is in seconds on the engine's clock, None before the first counts. Counters run over the engine's life: a
    client that wants rates takes the difference of two answers. The hit rate is None before the first lookup.
    """
    lookups, hits = int(stats.get("cache_lookup_tokens", 0)), int(stats.get("cache_hit_tokens", 0))
    requests = ("running", "waiting", "finished", "preemptions", "preempted_tokens")
    return {
        "at": stats.get("time"),
        "pages": _pages(stats, about),
        "prefix": {
            "lookup_tokens": lookups,
            "hit_tokens": hits,
            "hit_rate": hits / lookups if lookups else None,
            "evicted_pages": int(stats.get("cache_evicted", 0)),
        },
        "requests": {name: int(stats.get(name, 0)) for name in requests},
        "tokens": {name: int(stats.get(f"{name}_tokens", 0)) for name in ("prompt", "decode")},
        "steps": int(stats.get("steps", 0)),
        "bytes_per_token": about.get("bytes_per_token"),
        "bytes_per_token_16bit": about.get("bytes_per_token_16bit"),
        "groups": [_group(group) for group in about.get("groups", ())],
        "window": _window(stats, about),
        "states": _states(stats, about),
        "host": _host(stats, about),
        "drafts": _drafts(stats, about),
    }


def _pages(stats: Mapping[str, float], about: Mapping[str, Any]) -> dict[str, int]:
    """Return counts of pages, where total = free + held + idle and held = own + shared; size: tokens of a page."""
    total = int(stats.get("cache_total", about.get("budget", {}).get("pages", 0)))
    free, idle = int(stats.get("cache_free", total)), int(stats.get("cache_idle", 0))
    num_held = total - free - idle
    # Cached pages are idle, or shared by the prefix cache and open requests.
    shared = min(num_held, int(stats.get("cache_cached", 0)) - idle)
    return {
        "total": total,
        "free": free,
        "held": num_held,
        "own": num_held - shared,
        "shared": shared,
        "idle": idle,
        "size": int(about.get("page_size", 0)),
    }


def _group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return one group of layers; bytes_per_token: of one layer, 0 where the layers read the pages of others."""
    streams: Mapping[str, Mapping[str, Any]] = group["streams"]
    return {
        "name": group["name"],
        "kind": group["kind"],
        "layers": len(group["layers"]),
        "window": group["window"],
        "format": group["scheme"],
        "streams": {name: stream["format"] for name, stream in streams.items()},
        "bytes_per_token": sum(stream["bytes_per_token"] for stream in streams.values()),
    }


def _window(stats: Mapping[str, float], about: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return counts of the exact window, where pages = free + held + idle; None without one.

    `snapshots`: exact pages in the prefix cache, held or idle; hits and misses: prefixes that went on at their end, or
    were replayed in part.
    """
    if not about.get("kv_window") or "window_total" not in stats:
        return None
    counts = _snapshot_counts(stats, "window", "pages")
    return {"tokens": int(about["kv_window"]), "dtype": about.get("dtype"), **counts}


def _states(stats: Mapping[str, float], about: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return counts of the slots of recurrent states, named as those of the exact window; None without states."""
    budget = about.get("states")
    if not budget or "states_total" not in stats:
        return None
    return {
        "format": budget["format"],
        "bytes_per_slot": budget["bytes_per_slot"],
        "unwatched_layers": int(stats.get("fidelity_uncovered_layers", 0)),
        **_snapshot_counts(stats, "states", "slots"),
    }


def _snapshot_counts(stats: Mapping[str, float], prefix: str, unit: str) -> dict[str, int]:
    names = {
        unit: "total", "free": "free", "held": "in_use", "idle": "idle", "snapshots": "attached",
        f"evicted_{unit}": "evicted", "hits": "snapshot_hits", "misses": "snapshot_misses",
        "replayed_tokens": "replayed_tokens",
    }  # fmt: skip
    return {name: int(stats.get(f"{prefix}_{key}", 0)) for name, key in names.items()}


def _drafts(stats: Mapping[str, float], about: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return counts of draft tokens, None without a drafter; tokens_per_step: of an answer, in a verification."""
    if not about.get("drafter"):
        return None
    steps, drafted, accepted = (int(stats.get(key, 0)) for key in DRAFTS)
    return {
        "drafter": about["drafter"],
        "steps": steps,
        "drafted": drafted,
        "accepted": accepted,
        "accept_rate": accepted / drafted if drafted else None,
        "tokens_per_step": 1 + accepted / steps if steps else None,
    }


def _host(stats: Mapping[str, float], about: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return counts of the host tier, where frames = free + idle + hot + pinned; None without one."""
    tier = about.get("hisparse")
    if not tier:
        return None
    frames = int(stats.get("tier_frames", tier["frames"]))
    free, idle = int(stats.get("tier_free", frames)), int(stats.get("tier_idle", 0))
    hot = int(stats.get("tier_hot", 0))
    used_pages = int(stats.get("cache_total", 0)) - int(stats.get("cache_free", 0))
    return {
        "frames": frames,
        "free": free,
        "idle": idle,
        "hot": hot,
        "pinned": frames - free - idle - hot,
        "only_host_pages": max(0, used_pages - (frames - free - hot)),
        "host_bytes": tier["host"],
        "formats": list(tier["host_format"]),
        **{name: int(stats.get(f"tier_{name}", 0)) for name in ("spilled", "saved", "loaded", "dropped")},
    }

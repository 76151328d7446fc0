"""Views of the engine's counts: the cache for `GET /v1/cache`, the fidelity watch for Prometheus and for `/health`.

They are made of `messages.Stats.numbers` and `messages.Ready.about`. Counters run over the engine's life, so a client
that wants rates takes the difference of two answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nibble.server.engine_client import EngineClient, State

MODEL_LABEL = "model_name"
FIDELITY_PREFIX = "fidelity_"
FIDELITY_KEY = f"{FIDELITY_PREFIX}samples"
"""Present in the counts only with --watch-fidelity."""
FIDELITY_GAUGES = {
    "error": "Error of a layer's attention over the cache, relative to rows in the model's precision.",
    "own": "The same for what the layer's format makes of these rows, with scales that fit them.",
    "limit": "The error from which the watch warns.",
}
FIDELITY_COUNTERS = {
    "samples": "Requests whose attention was compared.",
    "alerts": "Times that the error of a layer rose above its limit.",
}
MAX_LIMIT = 1e9


def cache_view(stats: Mapping[str, float], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of `GET /v1/cache`; `at` is in seconds on the engine's clock, None before the first counts."""
    return {
        "at": stats.get("time"),
        "pages": _pages(stats, about),
        "prefix": _prefix(stats),
        "requests": {
            name: int(stats.get(name, 0))
            for name in ("running", "waiting", "finished", "preemptions", "preempted_tokens")
        },
        "tokens": {
            "prompt": int(stats.get("prompt_tokens", 0)),
            "decode": int(stats.get("decode_tokens", 0)),
        },
        "steps": int(stats.get("steps", 0)),
        "bytes_per_token": about.get("bytes_per_token"),
        "bytes_per_token_16bit": about.get("bytes_per_token_16bit"),
        "groups": [_group(group) for group in about.get("groups", ())],
        "host": _host(stats, about),
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


def _prefix(stats: Mapping[str, float]) -> dict[str, Any]:
    """Return counts of the prefix cache; hit_rate is None before the first lookup."""
    lookups, hits = int(stats.get("cache_lookup_tokens", 0)), int(stats.get("cache_hit_tokens", 0))
    return {
        "lookup_tokens": lookups,
        "hit_tokens": hits,
        "hit_rate": hits / lookups if lookups else None,
        "evicted_pages": int(stats.get("cache_evicted", 0)),
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


class FidelityCollector(Collector):
    """The results of the fidelity watch (engine/error_monitor.py), as the engine last sent them."""

    def __init__(self, client: EngineClient, model: str) -> None:
        self._client, self._model = client, model

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; none without --watch-fidelity."""
        stats = self._client.stats
        if FIDELITY_KEY not in stats:
            return
        for name, doc in FIDELITY_COUNTERS.items():
            counter = CounterMetricFamily(f"nibble:kv_fidelity_{name}", doc, labels=[MODEL_LABEL])
            counter.add_metric([self._model], stats[FIDELITY_PREFIX + name])
            yield counter
        skipped = CounterMetricFamily(
            "nibble:kv_fidelity_skipped",
            "Requests that were drawn and not compared.",
            labels=[MODEL_LABEL, "reason"],
        )
        for reason, count in _fidelity_parts(stats, "skipped").items():
            skipped.add_metric([self._model, reason], count)
        yield skipped
        # The gauges of an engine that is gone would look like its present state.
        if self._client.state is State.READY:
            yield from self._gauges(stats)

    def _gauges(self, stats: Mapping[str, float]) -> Iterator[Metric]:
        alert = GaugeMetricFamily(
            "nibble:kv_fidelity_alert", "Whether a layer is above its limit.", labels=[MODEL_LABEL]
        )
        alert.add_metric([self._model], stats[f"{FIDELITY_PREFIX}alert"])
        yield alert
        groups = self._client.ready.about.get("groups", ()) if self._client.ready else ()
        schemes = {str(layer): group["scheme"] for group in groups for layer in group["layers"]}
        for name, doc in FIDELITY_GAUGES.items():
            labels = [MODEL_LABEL, "layer", "scheme"]
            family = GaugeMetricFamily(f"nibble:kv_fidelity_{name}", doc, labels=labels)
            for layer, value in _fidelity_parts(stats, name).items():
                family.add_metric([self._model, layer, schemes.get(layer, "")], value)
            yield family


def fidelity_warning(stats: Mapping[str, float]) -> str | None:
    """Return the warning of /health while a layer is above its limit; None else."""
    if not stats.get(f"{FIDELITY_PREFIX}alert"):
        return None
    limits, errors = _fidelity_parts(stats, "limit"), _fidelity_parts(stats, "error")
    # A limit may be infinite, and quotients of two such layers could not be compared.
    layer = max(errors, key=lambda layer: errors[layer] / min(limits[layer], MAX_LIMIT))
    return (
        f"attention over the KV cache is off by {errors[layer]:.1%} of its norm in layer {layer}, where "
        f"{limits[layer]:.1%} is allowed; the engine's log and docs/serving.md say more"
    )


def _fidelity_parts(stats: Mapping[str, float], name: str) -> dict[str, float]:
    """Return the numbers `fidelity_NAME_PART`, by part."""
    prefix = f"{FIDELITY_PREFIX}{name}_"
    return {key.removeprefix(prefix): value for key, value in stats.items() if key.startswith(prefix)}

"""What the fidelity watch found (engine/error_monitor.py), as Prometheus reads it and as /health warns of it.

Owns FidelityCollector and warning(). Both are made of the engine's counts (wire.Stats) and of what it is
(wire.Ready.about); there is nothing of either without --watch-fidelity. Must not know of HTTP or engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nibble.server.engine_client import EngineClient, State

MODEL = "model_name"
PREFIX = "fidelity_"
ON = f"{PREFIX}samples"
"""In the counts where there is a watch."""
BY_LAYER = {
    "error": "Error of a layer's attention over the cache, relative to rows in the model's precision.",
    "own": "The same for what the layer's format makes of these rows, with scales that fit them.",
    "limit": "The error from which the watch warns.",
}
LARGEST = 1e9
"""Of a limit: infinities can be compared then."""
COUNTED = {
    "samples": "Requests whose attention was compared.",
    "alerts": "Times that the error of a layer rose above its limit.",
}


class FidelityCollector(Collector):
    """What the watch of an engine found, as its client heard it last."""

    def __init__(self, client: EngineClient, model: str) -> None:
        self._client, self._model = client, model

    def collect(self) -> Iterator[Metric]:
        stats = self._client.stats
        if ON not in stats:
            return
        for name, doc in COUNTED.items():
            counter = CounterMetricFamily(f"nibble:kv_fidelity_{name}", doc, labels=[MODEL])
            counter.add_metric([self._model], stats[PREFIX + name])
            yield counter
        skipped = CounterMetricFamily(
            "nibble:kv_fidelity_skipped",
            "Requests that were drawn and not compared.",
            labels=[MODEL, "reason"],
        )
        for reason, count in _parts(stats, "skipped").items():
            skipped.add_metric([self._model, reason], count)
        yield skipped
        if self._client.state is State.READY:
            yield from self._standing(stats)

    def _standing(self, stats: Mapping[str, float]) -> Iterator[Metric]:
        alert = GaugeMetricFamily(
            "nibble:kv_fidelity_alert", "Whether a layer is above its limit.", labels=[MODEL]
        )
        alert.add_metric([self._model], stats[f"{PREFIX}alert"])
        yield alert
        schemes = _schemes(self._client.ready.about if self._client.ready else {})
        for name, doc in BY_LAYER.items():
            family = GaugeMetricFamily(f"nibble:kv_fidelity_{name}", doc, labels=[MODEL, "layer", "scheme"])
            for layer, value in _parts(stats, name).items():
                family.add_metric([self._model, layer, schemes.get(layer, "")], value)
            yield family


def fidelity_warning(stats: Mapping[str, float]) -> str | None:
    """What /health says while a layer is above its limit. The engine serves all the same."""
    if not stats.get(f"{PREFIX}alert"):
        return None
    limits, errors = _parts(stats, "limit"), _parts(stats, "error")
    layer = max(errors, key=lambda layer: errors[layer] / min(limits[layer], LARGEST))
    return (
        f"attention over the KV cache is off by {errors[layer]:.1%} of its norm in layer {layer}, where "
        f"{limits[layer]:.1%} is allowed; the engine's log and docs/serving.md say more"
    )


def _parts(stats: Mapping[str, float], name: str) -> dict[str, float]:
    """The numbers `fidelity_NAME_PART`, by part."""
    begin = f"{PREFIX}{name}_"
    return {key.removeprefix(begin): value for key, value in stats.items() if key.startswith(begin)}


def _schemes(about: Mapping[str, Any]) -> dict[str, str]:
    """The scheme of each layer."""
    return {str(layer): group["scheme"] for group in about.get("groups", ()) for layer in group["layers"]}

"""What a model needs of attention under a spec: layer groups split by scheme, and whether they can be stored at all.

A SchemeGroup becomes a GroupPlan once it has routes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from nibble.attention.planner.support import Need, Phase
from nibble.cache.layout import CacheLayout, LayerLayout, StreamLayout
from nibble.errors import ConfigError
from nibble.formats import scheme as schemes
from nibble.formats import transforms as transform
from nibble.formats.scheme import Scheme
from nibble.hardware import Hardware
from nibble.model_spec import LayerGroup, ModelSpec, Stream
from nibble.spec import CacheSpec


class UnstorableError(ConfigError):
    """A scheme refuses a stream of the model, or a transform its layer group."""


@dataclass(frozen=True, slots=True)
class SchemeGroup:
    """Layers of one group that share a scheme."""

    group: LayerGroup
    layers: tuple[int, ...]
    scheme: Scheme

    def stored_layer(self, layer: int) -> LayerLayout:
        """Return what a layer of this part stores."""
        streams = tuple(
            StreamLayout(stream, self.scheme.format_of(stream).name) for stream in self.group.streams
        )
        return LayerLayout(layer, streams, self.scheme.transforms)

    def need(
        self, phase: Phase, hardware: Hardware, dtype: str, page: int | None, packing: str | None
    ) -> Need:
        """Return what this part needs in `phase`.

        Args:
            phase: The phase.
            hardware: The machine.
            dtype: The compute dtype.
            page: Tokens of a page, None while that is open.
            packing: How planes lie in a page, None while that is open.
        """
        group = self.group
        return Need(
            phase, group.kind, self.stored_layer(0).format_key, packing, hardware.arch, page, group.head_dim,
            group.group_size, dtype, group.window is not None, group.softcap, group.sinks,
            kv_heads=group.streams[0].heads,
        )  # fmt: skip


def scheme_groups(spec: CacheSpec, model_spec: ModelSpec) -> tuple[SchemeGroup, ...]:
    """Split the model's layer groups where layers differ in scheme; raise UnstorableError and ConfigError.

    A layer that reads another's pages has that layer's scheme.
    """
    scheme_by_layer = spec.scheme_by_layer(model_spec.layers)
    groups = []
    for group in model_spec.groups:
        # Layers of one group may store differently (kv_layers), and then have routes of their own.
        by_scheme: dict[Scheme, list[int]] = {}
        for layer in group.layers:
            # Of a layer that shares KV the owner decides, whatever its own rule says.
            by_scheme.setdefault(scheme_by_layer[model_spec.owner[layer]], []).append(layer)
        groups += [SchemeGroup(group, tuple(layers), scheme) for scheme, layers in by_scheme.items()]
    for part in groups:
        _check(part)
    return tuple(groups)


def shared_kv_notes(spec: CacheSpec, model_spec: ModelSpec) -> tuple[str, ...]:
    """Return a note for each layer whose own rule has no effect, because it reads another layer's pages."""
    schemes = spec.scheme_by_layer(model_spec.layers)
    return tuple(
        f"layer {layer} reads the pages of layer {owner}, so it has that layer's scheme {schemes[owner].name}"
        for layer, owner in enumerate(model_spec.owner)
        if schemes[layer] != schemes[owner]
    )


def layout(parts: Iterable[SchemeGroup], model_spec: ModelSpec, page_size: int, packing: str) -> CacheLayout:
    """Return the cache's layout: what every layer with pages of its own stores.

    Args:
        parts: All layers, by scheme.
        model_spec: The model.
        page_size: Tokens of a page.
        packing: How planes lie in a page.
    """
    stored = {layer: part.stored_layer(layer) for part in parts for layer in part.layers}
    return CacheLayout(tuple(stored[layer] for layer in model_spec.stored_layers), page_size, packing)


def _check(part: SchemeGroup) -> None:
    where = f"group {part.group.name} (layers {format_layers(part.layers)})"
    for stream in part.group.streams:
        if reason := part.scheme.refuses(stream):
            raise UnstorableError(f"stream {stream.name} of {where}: {reason}; {_fitting(part.group)}")
    for name in part.scheme.transforms:
        if reason := transform.get(name).refuses(part.group):
            raise UnstorableError(f"{part.scheme.name} for {where}: {reason}; leave +{name} out")


def _fitting(group: LayerGroup) -> str:
    shapes = ", ".join(_shape(stream) for stream in group.streams)
    return f"formats that fit {shapes}: {', '.join(schemes.fitting(*group.streams))}"


def _shape(stream: Stream) -> str:
    return f"{stream.name} {stream.heads}x{stream.dim}"


def format_layers(layers: Iterable[int]) -> str:
    """Return layers in short: `0, 1, 2, 5` -> `0-2,5`; `0, 2, 4, 6` -> `0-6 by 2`."""
    ordered, runs = sorted(layers), list[list[int]]()
    steps = {high - low for low, high in pairwise(ordered)}
    if len(ordered) > 3 and len(steps) == 1 and steps != {1}:
        return f"{ordered[0]}-{ordered[-1]} by {steps.pop()}"
    for layer in ordered:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)

"""Measure KV scales: record how large K and V become in each layer while texts run through the model.

One pass serves every scheme: largest magnitudes of K under each set of transforms follow from per-channel minima and
maxima of K and of its rotation. What scales mean is in cache/scales.py.

Shape suffixes: T tokens, H heads, D values of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nibble.cache.layout import CacheLayout
from nibble.cache.pool import PagedPool
from nibble.cache.scales import NONE, KVScales, LayerScales, StreamScale
from nibble.errors import ScaleError
from nibble.formats import transforms as transform
from nibble.model_spec import LATENT

HEADROOM = 1.25
"""Scales leave room for values this much larger than any that was measured; a float format loses no precision by it."""
MIN_TOKENS = 64
"""Tokens below which scales are not trusted."""


class _Range:
    """Per-channel minimum, maximum and sum of [T, H, D] values."""

    def __init__(self) -> None:
        self.low = self.high = self.total = torch.zeros(())
        self.count = 0

    def add(self, x_THD: Tensor) -> None:
        x_THD = x_THD.float()
        # A float32 sum over thousands of tokens would cost the mean its last digits.
        low, high, total = x_THD.amin(0), x_THD.amax(0), x_THD.double().sum(0)
        if self.count:
            low, high, total = self.low.minimum(low), self.high.maximum(high), self.total + total
        self.low, self.high, self.total = low, high, total
        self.count += len(x_THD)

    @property
    def mean(self) -> Tensor:
        return (self.total / self.count).float()

    def amax(self, shift: Tensor | float = 0.0) -> float:
        """Return the largest magnitude after `shift` is subtracted."""
        return float(torch.maximum(self.high - shift, shift - self.low).max())


class Recorder(PagedPool):
    """A pool that records the ranges of what is written to it."""

    def __init__(self, layout: CacheLayout, pages: int, device: str) -> None:
        super().__init__(layout, pages, NONE, device)
        self._ranges: dict[tuple[int, str], _Range] = {}

    def write(self, layer: int, streams: Mapping[str, Tensor], slot_mapping_T: Tensor) -> None:
        """Record the values, and store them.

        Args:
            layer: whose values these are.
            streams: [T, H, D] by name.
            slot_mapping_T: where they are stored.
        """
        for name, x_THD in streams.items():
            self._ranges.setdefault((layer, name), _Range()).add(x_THD)
            # The largest value of rotated keys does not follow from that of keys, so both are recorded.
            if name == "k":
                rotated = transform.get("rot").key(x_THD, None)
                self._ranges.setdefault((layer, "k+rot"), _Range()).add(rotated)
        super().write(layer, streams, slot_mapping_T)

    def scales(self, source: str) -> KVScales:
        """Return the scales of all layers.

        Raises:
            ScaleError: nothing was written, or nothing but zeros.
        """
        layers = {layer: self._layer(layer) for layer, name in self._ranges if name == "k"}
        # Transforms are for keys alone, so a latent has one scale.
        latents = {
            layer: LayerScales(_scales({LATENT: values.amax()}, layer))
            for (layer, name), values in self._ranges.items()
            if name == LATENT
        }
        return KVScales(source, {**layers, **latents})

    def _layer(self, layer: int) -> LayerScales:
        k, v, rotated = (self._ranges[layer, name] for name in ("k", "v", "k+rot"))
        mean_HD = k.mean
        amax = {
            "k": k.amax(),
            "v": v.amax(),
            "k+rot": rotated.amax(),
            "k+kmean": k.amax(mean_HD),
            # A rotation is linear, so the rotated mean is the mean of rotated keys.
            "k+kmean+rot": rotated.amax(transform.get("rot").key(mean_HD, None)),
        }
        return LayerScales(_scales(amax, layer), tuple(tuple(head) for head in mean_HD.tolist()))


def _scales(amax: Mapping[str, float], layer: int) -> dict[str, StreamScale]:
    if not all(0 < value < float("inf") for value in amax.values()):
        raise ScaleError(f"calibration saw {amax} as the largest values of layer {layer}; is the text empty?")
    return {name: StreamScale(value * HEADROOM, 1.0) for name, value in amax.items()}


def builtin_texts(characters: int = 1 << 16) -> Sequence[str]:
    """Return English and code that comes with every Python: the language reference of `help()`."""
    from pydoc_data.topics import topics

    return ["\n\n".join(topics[name] for name in sorted(topics))[:characters]]

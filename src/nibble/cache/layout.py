"""What each layer stores: streams, formats and packing. All sizes derive from the formats' planes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from nibble import formats
from nibble.formats import KVFormat
from nibble.model_spec import INDEX, Stream

INDEX_PACKING = "nhd"
"""Packing of index keys, whatever the packing of the pool: every step reads all of them, by whole words."""


@dataclass(frozen=True, slots=True)
class StreamLayout:
    """One stream of one layer, and the name of the format that stores it."""

    stream: Stream
    format: str

    @property
    def codec(self) -> KVFormat:
        """Return the format, bound to the stream."""
        return formats.get(self.format).bound(self.stream)

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of one token."""
        return self.codec.bytes_per_token(self.stream)


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """What one layer stores per token."""

    layer: int
    streams: tuple[StreamLayout, ...]
    transforms: tuple[str, ...] = ()
    """Names of the transforms of keys before they are encoded (formats/transforms.py)."""

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of one token."""
        return sum(stream.bytes_per_token for stream in self.streams)

    def bytes_in(self, name: str) -> int:
        """Return the bytes of one token if the same streams were stored in the format `name`."""
        return sum(formats.get(name).bytes_per_token(entry.stream) for entry in self.streams)

    @property
    def without_index(self) -> LayerLayout:
        """Return the layout of what attention reads: without index keys."""
        return replace(self, streams=tuple(entry for entry in self.streams if entry.stream.name != INDEX))

    @property
    def format_key(self) -> str:
        """Return the formats of the streams that attention reads, as support tables name them: one name, or `k:v`."""
        # dict.fromkeys() drops duplicates and keeps the order: K before V.
        return ":".join(dict.fromkeys(entry.format for entry in self.without_index.streams))


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The layout of every stored layer."""

    layers: tuple[LayerLayout, ...]
    page_size: int
    packing: str
    """Name of the packing (cache/packing.py)."""

    @property
    def bytes_per_token(self) -> int:
        """Return the bytes of one token in all layers together."""
        return sum(layer.bytes_per_token for layer in self.layers)

    @property
    def bytes_per_page(self) -> int:
        """Return the bytes of one page in all layers together."""
        return self.bytes_per_token * self.page_size

    @property
    def without_index(self) -> CacheLayout:
        """Return the layout of what attention reads: without index keys."""
        return replace(self, layers=tuple(layer.without_index for layer in self.layers))

    def packing_of(self, entry: StreamLayout) -> str:
        """Return the name of a stream's packing."""
        return INDEX_PACKING if entry.stream.name == INDEX else self.packing

    def stored_as(self, format: str | None, packing: str) -> CacheLayout:
        """Return the layout of the same streams in another packing, and in `format` unless that is None."""
        layers = tuple(
            replace(layer, streams=tuple(replace(x, format=format or x.format) for x in layer.streams))
            for layer in self.layers
        )
        return CacheLayout(layers, self.page_size, packing)

    @property
    def fingerprint(self) -> str:
        """Return 16 hex digits that differ if the meaning of a page's bytes differs; part of every prefix key."""
        # Not hash(): Python salts the hashes of strings, so they differ from process to process.
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

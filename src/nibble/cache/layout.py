"""Where each byte of the cache belongs: which streams each layer stores, in which format and packing.

Owns StreamLayout, LayerLayout and CacheLayout. Sizes are derived from the formats' planes, never typed. The pool
(pool.py) allocates exactly what is said here, and `nibble plan` prints it. Must not know of backends or requests.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from nibble import formats
from nibble.formats import KVFormat
from nibble.model_spec import INDEX, Stream

INDEX_PACKING = "nhd"


@dataclass(frozen=True, slots=True)
class StreamLayout:
    """One stream of one layer: what it is, and the name of the format that stores it."""

    stream: Stream
    format: str

    @property
    def codec(self) -> KVFormat:
        return formats.get(self.format).bound(self.stream)

    @property
    def bytes_per_token(self) -> int:
        return self.codec.bytes_per_token(self.stream)


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """What one layer stores per token. transforms: applied to keys before they are encoded (formats/transforms.py)."""

    layer: int
    streams: tuple[StreamLayout, ...]
    transforms: tuple[str, ...] = ()

    @property
    def bytes_per_token(self) -> int:
        return sum(stream.bytes_per_token for stream in self.streams)

    def bytes_in(self, name: str) -> int:
        """Bytes that a token of the same streams takes in the format `name`."""
        return sum(formats.get(name).bytes_per_token(entry.stream) for entry in self.streams)

    @property
    def attended(self) -> LayerLayout:
        """Without what only an indexer reads."""
        return replace(self, streams=tuple(entry for entry in self.streams if entry.stream.name != INDEX))

    @property
    def format_key(self) -> str:
        """What capability rows call the formats of the streams that attention reads: one name, or `k:v` where they
        differ."""
        return ":".join(dict.fromkeys(entry.format for entry in self.attended.streams))


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The layout of every stored layer. packing: how planes lie in a page (cache/packing.py)."""

    layers: tuple[LayerLayout, ...]
    page_size: int
    packing: str

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers together."""
        return sum(layer.bytes_per_token for layer in self.layers)

    @property
    def bytes_per_page(self) -> int:
        return self.bytes_per_token * self.page_size

    @property
    def attended(self) -> CacheLayout:
        """What attention reads, without index keys."""
        return replace(self, layers=tuple(layer.attended for layer in self.layers))

    def packing_of(self, entry: StreamLayout) -> str:
        """How a stream is packed. Index keys never are records: all of them are read in every step, by whole words."""
        return INDEX_PACKING if entry.stream.name == INDEX else self.packing

    def stored_as(self, format: str | None, packing: str) -> CacheLayout:
        """The same streams in another packing, and in `format` if one is named."""
        layers = tuple(
            replace(layer, streams=tuple(replace(x, format=format or x.format) for x in layer.streams))
            for layer in self.layers
        )
        return CacheLayout(layers, self.page_size, packing)

    @property
    def fingerprint(self) -> str:
        """16 hex digits that differ whenever the meaning of a page's bytes differs; part of every prefix key."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

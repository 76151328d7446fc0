"""What each layer stores: streams, their formats, and the packing. All sizes derive from the formats' planes.

A packing says how the planes of a format lie in a page:

    nhd      [page, token, head, values]   one token's heads together
    hnd      [page, head, token, values]   one head's tokens together
    record   [page, token, head, bytes]    all planes of a token together, in their order
    trtllm   [page, head, token, values]   as hnd, but V's block scales interleaved by four tokens

`trtllm` is what TensorRT-LLM's NVFP4 kernels for SM100 read (FlashInfer, nvfp4_quantize_paged_kv_cache): of a page and
head, scale s of token t lies at 4 * S * (t // 4) + 4 * s + t % 4, where S scales belong to a token.

Shape suffixes: P pages, S slots in a page, H heads, B requests, N pages of a request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nibble import formats
from nibble.errors import ConfigError, unknown
from nibble.formats import KVFormat
from nibble.formats.base import Plane, in_token_order, raw
from nibble.model_spec import INDEX, Stream

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Packing:
    """One way to lay out planes in pages."""

    name: str
    heads_first: bool
    """Whether a page holds [head, token, ...] and not [token, head, ...]."""
    record: bool = False
    """Whether planes are columns of one array of bytes."""
    interleave: int = 0
    """Tokens by which block scales of V are interleaved, 0 for none."""

    def allocate(
        self,
        planes: Sequence[Plane],
        pages: int,
        page_size: int,
        device: torch.device,
        empty: Callable[..., Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """Return uninitialised storage for a stream's planes.

        Args:
            planes: the planes of the stream's format.
            pages: number of pages.
            page_size: tokens of a page.
            device: where the storage lies.
            empty: allocates it, with the signature of torch.empty, which is the default.
        """
        import torch  # plans know packings without it

        empty = empty or torch.empty
        if self.record:
            # All planes have the same heads, so a record has equally many bytes for each head.
            width = sum(plane.bytes_per_token for plane in planes) // planes[0].shape[0]
            shape = (pages, page_size, planes[0].shape[0], width)
            return tuple(_columns(planes, empty(shape, dtype=torch.uint8, device=device)))
        storage = []
        for plane in planes:
            heads, *rest = plane.shape
            inner = (heads, page_size) if self.heads_first else (page_size, heads)
            storage.append(empty((pages, *inner, *rest), dtype=plane.torch_dtype, device=device))
        return tuple(storage)

    def gather(self, storage: Tensor, page_table_BN: Tensor, interleave: int = 0) -> Tensor:
        """Read whole pages.

        Args:
            storage: A plane.
            page_table_BN: Page ids, integers.
            interleave: Tokens by which the plane is interleaved.

        Returns:
            [B, N * page_size, H, ...]
        """
        # As integers: index_select() is not defined for float8 everywhere.
        values = raw(storage).index_select(0, page_table_BN.flatten()).view(storage.dtype)
        values = in_token_order(values, interleave)
        if self.heads_first:
            values = values.transpose(1, 2)
        return values.reshape(len(page_table_BN), -1, *values.shape[2:])


def _columns(planes: Sequence[Plane], records_PSHB: Tensor) -> Iterator[Tensor]:
    heads = planes[0].shape[0]
    widths = [plane.bytes_per_token // heads for plane in planes]
    for plane, column in zip(planes, records_PSHB.split(widths, -1), strict=True):
        # A column is a view: what is written to the plane lands in the records.
        values = column.view(plane.torch_dtype)
        # A plane of one item a head, such as a scale, has no dimension for items.
        yield values if len(plane.shape) > 1 else values.squeeze(-1)


_PACKINGS = (
    Packing("nhd", False),
    Packing("hnd", True),
    Packing("record", False, record=True),
    Packing("trtllm", True, interleave=4),
)
_TABLE = {packing.name: packing for packing in _PACKINGS}


def names() -> tuple[str, ...]:
    """Return the names of all packings."""
    return tuple(_TABLE)


def get(name: str) -> Packing:
    """Return the packing called `name`; raise ConfigError if there is none."""
    if name not in _TABLE:
        raise ConfigError(unknown("packing", name, names()))
    return _TABLE[name]


INDEX_PACKING = "nhd"
"""Packing of index keys, whatever the packing of the pool: every step reads all of them, by whole words."""


@dataclass(frozen=True, slots=True)
class StreamLayout:
    """One stream of one layer, and the names of the format that stores it and of its encoder."""

    stream: Stream
    format: str
    encoder: str = ""
    """One that the format lacks means its default."""

    @classmethod
    def of(cls, stream: Stream, format: KVFormat) -> StreamLayout:
        """Return the layout of `stream` in a format, with the encoder that it goes by."""
        return cls(stream, format.name, format.encoder)

    def __post_init__(self) -> None:
        # Of what means the same there is one form, and so one fingerprint.
        object.__setattr__(self, "encoder", formats.get(self.format).encoded_by(self.encoder).encoder)

    @property
    def codec(self) -> KVFormat:
        """Return the format, bound to the stream."""
        return formats.get(self.format).encoded_by(self.encoder).bound(self.stream)

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
    """Name of the packing (cache/layout.py)."""

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

"""What a backend reads of one layer: planes, scales, format, packing and page size.

Shape suffixes: B requests, N pages of a request, L tokens (N * page_size), H heads, D values of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nibble.cache.packing import Packing
from nibble.formats import KVFormat
from nibble.formats.base import raw
from nibble.formats.transforms import Transform
from nibble.kernels.gather import dequantize_pages
from nibble.kernels.rotate import rotate
from nibble.kernels.types import Paged
from nibble.model_spec import INDEX, Stream


@dataclass(frozen=True, slots=True)
class StreamView:
    """One stored stream of one layer."""

    stream: Stream
    format: KVFormat
    packing: Packing
    planes: tuple[Tensor, ...]
    """The format's planes, as `packing` lays them out."""
    scale: Tensor
    """float32, () or [H, 1]."""
    paged: Paged = field(init=False)
    """The same as kernels take it."""

    def __post_init__(self) -> None:
        # Kernels address [page, head, slot] by strides, so a transposed view is enough and nothing is copied.
        planes_PHS = tuple(p if self.packing.heads_first else p.transpose(1, 2) for p in self.planes)
        object.__setattr__(self, "paged", Paged(self.format, self.stream.dim, planes_PHS, self.scale))

    def gather_reference(self, page_table_BN: Tensor) -> Tensor:
        """Dequantise whole pages by the definition: integer page_table_BN -> float32 [B, L, H, D]."""
        planes = tuple(self.packing.gather(plane, page_table_BN) for plane in self.planes)
        return self.format.decode(planes, self.scale)

    def dequantize(self, page_table_BN: Tensor, dtype: torch.dtype) -> Tensor:
        """Dequantise whole pages: int32 page_table_BN -> [B, L, H, D] in `dtype`, in one launch on a GPU."""
        return (
            dequantize_pages(self.paged, page_table_BN, dtype)
            if self.scale.is_cuda
            else self.gather_reference(page_table_BN).to(dtype)
        )


@dataclass(frozen=True, slots=True)
class KVView:
    """The stored streams of one layer."""

    streams: Mapping[str, StreamView]
    page_size: int
    transforms: tuple[Transform, ...] = ()
    """Transforms of K before it was encoded."""
    k_mean_HD: Tensor | None = None
    """The mean that was subtracted from K."""
    joint_scale: Tensor | None = None
    """The scales of all streams as one tensor, if the streams are so alike that they are encoded together."""

    @property
    def keys(self) -> StreamView:
        """Return the stream that queries are scored with: the first."""
        return next(iter(self.streams.values()))

    def query(self, q_THD: Tensor) -> Tensor:
        """Return the query after the counterpart of the transforms of the stored keys."""
        # Only a rotation needs a counterpart: a subtracted mean shifts all scores of a query alike.
        return rotate(q_THD) if any(transform.rotates for transform in self.transforms) else q_THD

    def dequantize_heads(
        self, page_table_BN: Tensor, first: int, counts: Sequence[int], length: int
    ) -> tuple[Tensor, ...]:
        """Dequantise keys and values with heads in front -> float32 [B, H, length, D] each.

        Args:
            page_table_BN: int32 pages.
            first: slot of each request's first token in its first page.
            counts: tokens of each request; zeros follow them.
            length: tokens of the result.
        """
        # Heads are moved and zeros filled in before decoding: zero bytes decode to zeros in every format.
        views = tuple(entry for name, entry in self.streams.items() if name != INDEX)
        packed = [_heads(entry, page_table_BN, first, counts, length) for entry in views]
        if self.joint_scale is None:
            pairs = zip(views, packed, strict=True)
            return _keys_and_values(
                tuple(entry.format.decode(planes, _per_head(entry.scale)) for entry, planes in pairs),
                views[0],
            )
        joint = tuple(torch.stack(planes) for planes in zip(*packed, strict=True))
        return _keys_and_values(
            views[0].format.decode(joint, self.joint_scale.unsqueeze(-1)).unbind(), views[0]
        )


def _keys_and_values(streams: tuple[Tensor, ...], entry: StreamView) -> tuple[Tensor, ...]:
    """Return keys and values. A latent is both: its rotary part belongs to the key alone."""
    if len(streams) > 1:
        return streams
    return streams[0], streams[0][..., : entry.stream.dim - entry.stream.rope]


def _per_head(scale: Tensor) -> Tensor:
    """Return a scale [H, 1] in the shape that [B, H, L, D] needs."""
    return scale.unsqueeze(-1) if scale.dim() else scale


def _heads(
    entry: StreamView, page_table_BN: Tensor, first: int, counts: Sequence[int], length: int
) -> tuple[Tensor, ...]:
    longest = max(counts)
    planes = []
    for plane in entry.planes:
        x_BLH = raw(entry.packing.gather(plane, page_table_BN))
        filled = x_BLH.new_empty(len(counts), x_BLH.shape[2], length, *x_BLH.shape[3:])
        filled[:, :, :longest] = x_BLH[:, first : first + longest].transpose(1, 2)
        # Slots after the last token may hold anything, NaN included, which a mask alone would not remove.
        for row, count in zip(filled, counts, strict=True):
            if count < length:
                row[:, count:] = 0
        planes.append(filled.view(plane.dtype))
    return tuple(planes)

"""KVView: what a backend reads of one layer. Planes, scales, format, packing and page size, and nothing else.

Owns StreamView and KVView. Must not know of requests, routes or backends.

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
    """planes: the format's planes as `packing` lays them out. scale: float32, () or [H, 1]. paged: for kernels."""

    stream: Stream
    format: KVFormat
    packing: Packing
    planes: tuple[Tensor, ...]
    scale: Tensor
    paged: Paged = field(init=False)

    def __post_init__(self) -> None:
        planes_PHS = tuple(p if self.packing.heads_first else p.transpose(1, 2) for p in self.planes)
        object.__setattr__(self, "paged", Paged(self.format, self.stream.dim, planes_PHS, self.scale))

    def gather(self, page_table_BN: Tensor) -> Tensor:
        """Dequantises whole pages: integer page_table_BN -> float32 [B, L, H, D]."""
        planes = tuple(self.packing.gather(plane, page_table_BN) for plane in self.planes)
        return self.format.decode(planes, self.scale)

    def values(self, page_table_BN: Tensor, dtype: torch.dtype) -> Tensor:
        """Dequantises whole pages: int32 page_table_BN -> [B, L, H, D] in `dtype`, in one launch on a GPU."""
        return (
            dequantize_pages(self.paged, page_table_BN, dtype)
            if self.scale.is_cuda
            else self.gather(page_table_BN).to(dtype)
        )


@dataclass(frozen=True, slots=True)
class KVView:
    """The streams of one layer by name. transforms, k_mean_HD: what was done to K before it was encoded.

    joint_scale: the streams' scales as one tensor, where the streams are so alike that they are encoded together.
    """

    streams: Mapping[str, StreamView]
    page_size: int
    transforms: tuple[Transform, ...] = ()
    k_mean_HD: Tensor | None = None
    joint_scale: Tensor | None = None

    @property
    def keys(self) -> StreamView:
        """The stream that queries are compared with: the first."""
        return next(iter(self.streams.values()))

    def query(self, q_THD: Tensor) -> Tensor:
        """The query's counterpart of the transforms that the stored keys went through."""
        return rotate(q_THD) if any(transform.rotates for transform in self.transforms) else q_THD

    def heads(
        self, page_table_BN: Tensor, first: int, counts: Sequence[int], length: int
    ) -> tuple[Tensor, ...]:
        """Dequantised keys and values with heads in front -> float32 [B, H, length, D] each.

        Request b has counts[b] tokens, from slot `first` of its first page on; what follows them is zeros. Heads are
        moved, and zeros filled in, while values are packed: zero bytes decode to zeros in every format.
        """
        views = tuple(entry for name, entry in self.streams.items() if name != INDEX)
        packed = [_heads(entry, page_table_BN, first, counts, length) for entry in views]
        if self.joint_scale is None:
            pairs = zip(views, packed, strict=True)
            return _both(
                tuple(entry.format.decode(planes, _per_head(entry.scale)) for entry, planes in pairs),
                views[0],
            )
        joint = tuple(torch.stack(planes) for planes in zip(*packed, strict=True))
        return _both(views[0].format.decode(joint, self.joint_scale.unsqueeze(-1)).unbind(), views[0])


def _both(found: tuple[Tensor, ...], entry: StreamView) -> tuple[Tensor, ...]:
    """Keys and values. Those of a latent are one: its rotary part is of the key alone."""
    return found if len(found) > 1 else (found[0], found[0][..., : entry.stream.dim - entry.stream.rope])


def _per_head(scale: Tensor) -> Tensor:
    """A scale [H, 1] made to fit [B, H, L, D]."""
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
        for row, count in zip(filled, counts, strict=True):
            if count < length:
                row[:, count:] = 0
        planes.append(filled.view(plane.dtype))
    return tuple(planes)

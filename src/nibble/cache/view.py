"""KVView: what a backend reads of one layer. Planes, scales, format, packing and page size, and nothing else.

Owns StreamView and KVView. Must not know of requests, routes or backends.

Shape suffixes: B requests, N pages of a request, L tokens (N * page_size), H heads, D values of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nibble.cache.packing import Packing
from nibble.formats import KVFormat
from nibble.formats.transform import Transform
from nibble.geometry import Stream


@dataclass(frozen=True, slots=True)
class StreamView:
    """planes: the format's planes as `packing` lays them out. scale: float32, () or [H, 1]."""

    stream: Stream
    format: KVFormat
    packing: Packing
    planes: tuple[Tensor, ...]
    scale: Tensor

    def gather(self, pages_BN: Tensor) -> Tensor:
        """Dequantises whole pages: integer pages_BN -> float32 [B, L, H, D]."""
        planes = tuple(self.packing.gather(plane, pages_BN) for plane in self.planes)
        return self.format.decode(planes, self.scale)


@dataclass(frozen=True, slots=True)
class KVView:
    """The streams of one layer by name. transforms, k_mean_HD: what was done to K before it was encoded."""

    streams: Mapping[str, StreamView]
    page_size: int
    transforms: tuple[Transform, ...] = ()
    k_mean_HD: Tensor | None = None

    def query(self, q_THD: Tensor) -> Tensor:
        """The query's counterpart of the transforms that the stored keys went through."""
        for transform in self.transforms:
            q_THD = transform.query(q_THD, self.k_mean_HD).to(q_THD.dtype)
        return q_THD

    @property
    def device(self) -> torch.device:
        return next(iter(self.streams.values())).scale.device

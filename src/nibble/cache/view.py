"""KVView: what a backend reads of one layer. Planes, scales, format, packing and page size, and nothing else.

Owns StreamView and KVView. Must not know of requests, routes or backends.

Shape suffixes: B requests, N pages of a request, L tokens (N * page_size), H heads, D values of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nibble.cache.packing import Packing, raw
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

    def gather_heads(
        self, pages_BN: Tensor, first: int, count: int, length: int, unused_BL: Tensor | None
    ) -> Tensor:
        """Tokens [first, first + count) of whole pages -> float32 [B, H, length, D], zeros past `count`.

        unused_BL: bool [B, count], tokens that are to be zeros too. Heads are put first, and zeros filled in, while
        the values are still packed: zero bytes decode to zeros in every format.
        """
        planes = []
        for plane in self.planes:
            x_BLH = raw(self.packing.gather(plane, pages_BN))[:, first : first + count]
            if unused_BL is not None:
                x_BLH = x_BLH.masked_fill(unused_BL.view(*unused_BL.shape, *[1] * (x_BLH.dim() - 2)), 0)
            filled = x_BLH.new_zeros(len(pages_BN), x_BLH.shape[2], length, *x_BLH.shape[3:])
            filled[:, :, :count] = x_BLH.transpose(1, 2)
            planes.append(filled.view(plane.dtype))
        return self.format.decode(tuple(planes), self.scale.unsqueeze(-1) if self.scale.dim() else self.scale)


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

    def key(self, k_THD: Tensor) -> Tensor:
        """Keys as they are to be encoded."""
        for transform in self.transforms:
            k_THD = transform.key(k_THD, self.k_mean_HD)
        return k_THD

    def query(self, q_THD: Tensor) -> Tensor:
        """The query's counterpart of the transforms that the stored keys went through."""
        for transform in self.transforms:
            q_THD = transform.query(q_THD, self.k_mean_HD).to(q_THD.dtype)
        return q_THD

    @property
    def device(self) -> torch.device:
        return next(iter(self.streams.values())).scale.device

"""Call Nibble's own decode kernel in CUDA C++ (kernels/attention/decode.cu).

Shape suffixes: T tokens, H query heads, D values of a head.
"""

from __future__ import annotations

from torch import Tensor

from nibble.attention.layer import AttentionBackend
from nibble.cache.pool import KVView
from nibble.kernels.attention.cuda import Decode
from nibble.kernels.types import AttentionBatch, AttentionParams


class Cuda(AttentionBackend):
    """The adapter. Its workspace serves one step at a time."""

    def __init__(self) -> None:
        self._decode: Decode | None = None

    def forward(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: None
    ) -> Tensor:
        """Call the kernel over pages in their own bytes."""
        # Its counters and workspace lie on the queries' device, which only a call tells.
        if self._decode is None:
            self._decode = Decode(q_THD.device)
        return self._decode(
            q_THD.contiguous(), view.streams["k"].paged, view.streams["v"].paged, batch, params
        )

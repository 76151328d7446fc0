"""Call Nibble's own decode kernel in CUDA C++ (kernels/attention/decode.cu).

Shape suffixes: T tokens, H query heads, D values of a head.
"""

from __future__ import annotations

from torch import Tensor

from nibble.attention.layer import AttentionBackend
from nibble.cache.pool import KVView
from nibble.errors import BackendError
from nibble.kernels.attention.cuda import COLUMNS, Decode
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
        k, v = view.streams["k"], view.streams["v"]
        queries = max(batch.query_lens)
        columns = queries * q_THD.shape[1] // k.stream.heads
        if columns > COLUMNS:
            raise BackendError(f"{queries} tokens a request make {columns} query rows; {COLUMNS} is the most")
        return self._decode(
            q_THD.contiguous(),
            k.planes,
            v.planes,
            (k.format.name, v.format.name),
            columns,
            batch.seq_lens_B,
            None if queries == 1 else batch.cu_seqlens_q_B1,
            batch.page_table_BN,
            (k.scale, v.scale),
            params.scale,
            params.window,
            params.softcap,
            None if params.sinks_H is None else params.sinks_H.float(),
        )

"""Call Nibble's own Triton kernels.

Shape suffixes: T tokens, H query heads, D values of a head.
"""

from __future__ import annotations

from torch import Tensor

from nibble.attention.layer import AttentionBackend
from nibble.cache.pool import KVView
from nibble.kernels import mla
from nibble.kernels import mla as sparse
from nibble.kernels.attention.triton import paged_attention
from nibble.kernels.types import AttentionBatch, AttentionParams
from nibble.model_spec import LATENT


class Triton(AttentionBackend):
    """The adapter."""

    def forward(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: None
    ) -> Tensor:
        """Call the kernel of the view's kind of attention."""
        # A decode step may be recorded in a CUDA graph, where the host does not know lengths.
        longest = () if batch.phase.decodes else (max(batch.seq_lens),)
        keys = view.keys
        if params.topk_slots_TK is not None:
            return sparse.sparse_mla_attention(
                q_THD, keys.paged, keys.stream.rope, params.topk_slots_TK, params.scale
            )
        if LATENT in view.streams:
            return mla.mla_attention(q_THD, keys.paged, keys.stream.rope, batch, params.scale, *longest)
        return paged_attention(
            q_THD, view.streams["k"].paged, view.streams["v"].paged, batch, params, *longest
        )

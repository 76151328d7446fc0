"""Call Nibble's own Triton kernels.

Shape suffixes: T tokens, H query heads, D values of a head.
"""

from __future__ import annotations

from torch import Tensor

from nibble.attention.metadata import AttentionBatch, AttentionParams
from nibble.cache.view import KVView
from nibble.kernels import mla
from nibble.kernels import sparse_mla as sparse
from nibble.model_spec import LATENT


class Triton:
    """The adapter."""

    def __init__(self) -> None:
        from nibble.kernels.attention import triton as attention

        self._kernel = attention.paged_attention

    def attend(self, q_THD: Tensor, view: KVView, segment: AttentionBatch, spec: AttentionParams) -> Tensor:
        # a decode step may be recorded in a CUDA graph, where lengths are not known
        longest = () if segment.phase.decodes else (max(segment.seq_lens),)
        keys = view.keys
        if spec.topk_slots_TK is not None:
            return sparse.sparse_mla_attention(
                q_THD, keys.paged, keys.stream.rope, spec.topk_slots_TK, spec.scale
            )
        if LATENT in view.streams:
            return mla.mla_attention(q_THD, keys.paged, keys.stream.rope, segment, spec.scale, *longest)
        return self._kernel(q_THD, view.streams["k"].paged, view.streams["v"].paged, segment, spec, *longest)

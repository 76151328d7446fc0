"""Call Nibble's own kernels: those in Triton, and those in CUDA C++ (kernels/attention: decode.cu, prefill_sm90.cu).

Shape suffixes: T tokens, H query heads, D values of a head.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor

from nibble.attention.step import AttentionBackend
from nibble.cache.pool import KVView
from nibble.kernels import UNBOUNDED, gpu_of
from nibble.kernels.attention.fixed import fixed_attention
from nibble.kernels.attention.naive import PartialAttention
from nibble.kernels.attention.triton import paged_attention, partial_attention
from nibble.kernels.mla import (
    mla_attention,
    partial_mla_attention,
    partial_sparse_mla_attention,
    sparse_mla_attention,
)
from nibble.kernels.mla.fixed import fixed_mla_attention
from nibble.kernels.types import AttentionBatch, AttentionParams, Paged
from nibble.model_spec import LATENT


class Triton(AttentionBackend):
    """The adapter of the kernels in Triton."""

    def forward(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: None
    ) -> Tensor:
        """Call the kernel of the view's kind of attention."""
        longest = _bound(batch)
        keys, rope = view.keys.paged, view.keys.stream.rope
        if params.topk_slots_TK is not None:
            return sparse_mla_attention(q_THD, keys, rope, params.topk_slots_TK, params.scale)
        if LATENT in view.streams:
            return mla_attention(q_THD, keys, rope, batch, params.scale, longest, params.window)
        return paged_attention(q_THD, keys, view.streams["v"].paged, batch, params, longest)

    def forward_partial(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: None
    ) -> PartialAttention:
        """Call the same kernels -> float32 values."""
        longest = _bound(batch)
        keys, rope = view.keys.paged, view.keys.stream.rope
        if params.topk_slots_TK is not None:
            return partial_sparse_mla_attention(q_THD, keys, rope, params.topk_slots_TK, params.scale)
        if LATENT in view.streams:
            return partial_mla_attention(q_THD, keys, rope, batch, params.scale, longest, params.window)
        return partial_attention(q_THD, keys, view.streams["v"].paged, batch, params, longest)


def _bound(batch: AttentionBatch) -> int:
    """Return a bound on stored tokens."""
    # A decode step may be recorded in a CUDA graph, where the host does not know lengths.
    return UNBOUNDED if batch.phase.decodes else max(batch.seq_lens)


class TritonInvariant(AttentionBackend):
    """The adapter of the same kernels with fixed splits: a query's result does not depend on the batch or the phase."""

    def forward(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: None
    ) -> Tensor:
        """Call the kernel of the view's kind of attention."""
        keys = view.keys.paged
        if LATENT in view.streams:
            return fixed_mla_attention(q_THD, keys, view.keys.stream.rope, batch, params.scale, params.window)
        return fixed_attention(q_THD, keys, view.streams["v"].paged, batch, params)


class Cuda(AttentionBackend):
    """The adapter of the kernels in CUDA C++. The workspace for decoding serves one step at a time.

    Drafts with more query rows than the decode kernel has columns go to the kernel in Triton, which reads the same
    pages. Its state: how a batch of prompts is cut, None for other batches.
    """

    def __init__(self) -> None:
        from nibble.kernels.attention import cuda, prefill_sm90  # which import cuda-bindings

        self._kernels, self._prompts = cuda, prefill_sm90
        self._decode: Any = None
        self._wide = Triton()

    def kind(self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams) -> Hashable:
        """Return the window and the number of heads, by which prompts are cut."""
        return None if batch.phase.decodes else (params.window, q_THD.shape[1])

    def prepare(self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams) -> Any:
        """Cut a batch of prompts."""
        if batch.phase.decodes:
            return None
        processors = gpu_of(q_THD.device).processors
        return self._prompts.plan_blocks(batch, params.window, q_THD.shape[1], processors)

    def forward(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: Any
    ) -> Tensor:
        """Call the kernel of the phase."""
        return self._forward(q_THD, view, batch, params, state, None)

    def forward_into(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: Any,
        out_THD: Tensor,
    ) -> None:  # fmt: skip
        """Let the kernel store the output there, where it can."""
        output = self._forward(q_THD, view, batch, params, state, out_THD)
        if output is not out_THD:
            out_THD.copy_(output)

    def _forward(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: Any,
        out_THD: Tensor | None,
    ) -> Tensor:  # fmt: skip
        k, v = view.streams["k"].paged, view.streams["v"].paged
        if state is not None:
            return self._prompts.prefill_attention(q_THD, k, v, batch, state, params, out_THD)
        if self._is_wide(q_THD, k, batch):
            return self._wide.forward(q_THD, view, batch, params, None)
        return self._decoder(q_THD)(q_THD.contiguous(), k, v, batch, params, out_THD)

    def forward_partial(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: Any
    ) -> PartialAttention:
        """Call the kernel that stores the log-sum-exp too -> float32 values, or of prompts the query's dtype."""
        k, v = view.streams["k"].paged, view.streams["v"].paged
        if state is not None:
            return self._prompts.partial_prefill_attention(q_THD, k, v, batch, state, params)
        if self._is_wide(q_THD, k, batch):
            return self._wide.forward_partial(q_THD, view, batch, params, None)
        return self._decoder(q_THD).partial(q_THD.contiguous(), k, v, batch, params)

    def forward_merged(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: Any,
        other: PartialAttention,
    ) -> Tensor:  # fmt: skip
        """Call the decode kernel that merges as it stores: no launch for merging."""
        k, v = view.streams["k"].paged, view.streams["v"].paged
        if state is not None:
            return super().forward_merged(q_THD, view, batch, params, state, other)
        if self._is_wide(q_THD, k, batch):
            return self._wide.forward_merged(q_THD, view, batch, params, None, other)
        return self._decoder(q_THD).merged(q_THD.contiguous(), k, v, batch, params, other)

    def _is_wide(self, q_THD: Tensor, k: Paged, batch: AttentionBatch) -> bool:
        columns = self._kernels.columns_of(batch, q_THD.shape[1], k.heads)
        return bool(columns > self._kernels.most_columns(q_THD.shape[2]))

    def _decoder(self, q_THD: Tensor) -> Any:
        # Its counters and workspace lie on the queries' device, which only a call tells.
        if self._decode is None:
            self._decode = self._kernels.Decode(q_THD.device)
        return self._decode

"""Call TensorRT-LLM's MLA kernels by way of FlashInfer. One new token to a request, or a few.

Shape suffixes: T tokens, B requests, H query heads, D values of a head.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from nibble.attention.backends.adapters.vendor import Workspace, latents, some_tokens
from nibble.attention.backends.flashinfer import PACKAGE, import_flashinfer
from nibble.attention.backends.trtllm_mla import WORKSPACE
from nibble.attention.backends.vendor import RANK, ROPE
from nibble.attention.planner.support import Phase
from nibble.cache.view import KVView
from nibble.kernels.types import AttentionBatch, AttentionParams

UNUSED = 128
"""The width of a head before absorption, which nothing here has, and only checks of other kernels read."""


class TrtllmMla:
    """The adapter. Its workspace serves one step at a time, and nobody else: kernels keep counters in it."""

    def __init__(self) -> None:
        self._mla = import_flashinfer(f"{PACKAGE}.mla")
        self._workspace = Workspace(WORKSPACE)
        self._known: WeakKeyDictionary[AttentionBatch, tuple[Tensor, Tensor]] = WeakKeyDictionary()

    def attend(self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams) -> Tensor:
        latent = latents(view, "trtllm-gen")
        if batch not in self._known:
            self._known[batch] = some_tokens(batch.seq_lens_B)
        lens_B, padding_B11 = self._known[batch]
        most = max(batch.query_lens)
        options: dict[str, Any] = {}
        if min(batch.query_lens) == most:
            query = q_THD.unflatten(0, (-1, most))
        else:
            query, options = q_THD, {"cum_seq_lens_q": batch.cu_seqlens_q_B1, "max_q_len": most}
        out: Tensor = self._mla.trtllm_batch_decode_with_kv_cache_mla(
            query=query.contiguous(),
            kv_cache=latent.planes[0][:, :, 0],
            workspace_buffer=self._workspace.on(q_THD.device),
            qk_nope_head_dim=UNUSED,
            kv_lora_rank=RANK,
            qk_rope_head_dim=ROPE,
            block_tables=batch.page_table_BN.contiguous(),
            seq_lens=lens_B,
            max_seq_len=max(batch.seq_lens),
            bmm1_scale=params.scale,
            bmm2_scale=1.0,
            backend="trtllm-gen",
            **options,
        )
        out_THD = out.view(*q_THD.shape[:2], RANK)
        # only a step of one token each may have padding
        return out_THD.masked_fill_(padding_B11, 0.0) if batch.phase is Phase.DECODE else out_THD

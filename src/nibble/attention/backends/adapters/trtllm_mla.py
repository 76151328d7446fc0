"""Call TensorRT-LLM's MLA kernels by way of FlashInfer. One new token to a request, or a few.

Shape suffixes: T tokens, B requests, H query heads, D values of a head.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nibble.attention.backends.adapters.vendor import Workspace, check_latents, clamp_lens
from nibble.attention.backends.flashinfer import PACKAGE, import_flashinfer
from nibble.attention.backends.trtllm_mla import WORKSPACE
from nibble.attention.backends.vendor import RANK, ROPE
from nibble.attention.layer import AttentionBackend
from nibble.cache.pool import KVView
from nibble.kernels.types import AttentionBatch, AttentionParams
from nibble.model_spec import Phase

UNUSED = 128
"""The width of a head before absorption, which nothing here has, and only checks of other kernels read."""


class TrtllmMla(AttentionBackend):
    """The adapter. Its workspace serves one step at a time, and nobody else: kernels keep counters in it."""

    def __init__(self) -> None:
        self._mla = import_flashinfer(f"{PACKAGE}.mla")
        self._workspace = Workspace(WORKSPACE)

    def prepare(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams
    ) -> tuple[Tensor, Tensor]:
        """Return lengths of at least 1, and which rows are padding."""
        return clamp_lens(batch.seq_lens_B)

    def forward(
        self,
        q_THD: Tensor,
        view: KVView,
        batch: AttentionBatch,
        params: AttentionParams,
        state: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Call the kernel with one number of tokens for all requests, or with offsets where they differ."""
        latent, (lens_B, padding_B11) = check_latents(view, "trtllm-gen"), state
        longest = max(batch.query_lens)
        options: dict[str, Any] = {}
        if min(batch.query_lens) == longest:
            query = q_THD.unflatten(0, (-1, longest))
        else:
            query, options = q_THD, {"cum_seq_lens_q": batch.cu_seqlens_q_B1, "max_q_len": longest}
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
        # Only a step of one token each may have padding.
        return out_THD.masked_fill_(padding_B11, 0.0) if batch.phase is Phase.DECODE else out_THD

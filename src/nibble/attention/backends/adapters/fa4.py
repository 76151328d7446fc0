"""Call FlashAttention 4.

Shape suffixes: T tokens, H query heads, D values of a head, P pages, S slots of a page, G KV heads.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nibble.attention.backends.adapters.vendor import check_latents
from nibble.attention.backends.fa4 import INSTALL, PACKAGE
from nibble.attention.backends.vendor import RANK, import_package
from nibble.attention.layer import AttentionBackend
from nibble.cache.pool import KVView
from nibble.kernels.types import AttentionBatch, AttentionParams
from nibble.model_spec import LATENT


class FA4(AttentionBackend):
    """The adapter."""

    def __init__(self) -> None:
        self._package = import_package(PACKAGE, INSTALL)

    def forward(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: None
    ) -> Tensor:
        """Call the package's function; a latent is key and value in one."""
        options: dict[str, Any] = {
            "cu_seqlens_q": batch.cu_seqlens_q_B1,
            "max_seqlen_q": max(batch.query_lens),
            "max_seqlen_k": max(batch.seq_lens),
            "seqused_k": batch.seq_lens_B,
            "page_table": batch.page_table_BN,
            "softmax_scale": params.scale,
            "causal": True,
            # Theirs does not count the present token.
            "window_size": (None, None) if params.window is None else (params.window - 1, 0),
            # The package takes no other dtype.
            "learnable_sink": None if params.sinks_H is None else params.sinks_H.bfloat16(),
            "softcap": params.softcap or 0.0,
        }
        if LATENT in view.streams:
            data_PSGD = check_latents(view, "FA4").planes[0]
            options |= {"q": q_THD[..., RANK:], "qv": q_THD[..., :RANK]}
            options |= {"k": data_PSGD[..., RANK:], "v": data_PSGD[..., :RANK]}
        else:
            options |= {"q": q_THD, "k": view.streams["k"].planes[0], "v": view.streams["v"].planes[0]}
        out_THD, *_ = self._package.flash_attn_varlen_func(**options)
        return out_THD

"""Call FlashAttention 4.

Shape suffixes: T tokens, H query heads, D values of a head, P pages, S slots of a page, G KV heads.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nibble.attention.backends.adapters.vendor import latents
from nibble.attention.backends.fa4 import INSTALL, PACKAGE
from nibble.attention.backends.vendor import RANK, import_package
from nibble.attention.metadata import AttentionBatch, AttentionParams
from nibble.cache.view import KVView
from nibble.model_spec import LATENT


class FA4:
    """The adapter."""

    def __init__(self) -> None:
        self._package = import_package(PACKAGE, INSTALL)

    def attend(self, q_THD: Tensor, view: KVView, segment: AttentionBatch, spec: AttentionParams) -> Tensor:
        options: dict[str, Any] = {
            "cu_seqlens_q": segment.cu_seqlens_q_B1,
            "max_seqlen_q": max(segment.query_lens),
            "max_seqlen_k": max(segment.seq_lens),
            "seqused_k": segment.seq_lens_B,
            "page_table": segment.page_table_BN,
            "softmax_scale": spec.scale,
            "causal": True,
            "window_size": (None, None) if spec.window is None else (spec.window - 1, 0),
            "learnable_sink": None if spec.sinks_H is None else spec.sinks_H.bfloat16(),  # they take no other
            "softcap": spec.softcap or 0.0,
        }
        if LATENT in view.streams:
            data_PSGD = latents(view, "FA4").planes[0]
            options |= {"q": q_THD[..., RANK:], "qv": q_THD[..., :RANK]}
            options |= {"k": data_PSGD[..., RANK:], "v": data_PSGD[..., :RANK]}
        else:
            options |= {"q": q_THD, "k": view.streams["k"].planes[0], "v": view.streams["v"].planes[0]}
        out_THD, *_ = self._package.flash_attn_varlen_func(**options)
        return out_THD

"""Call FlashAttention 3 and 4.

Lengths and pages are read on the device, so a CUDA graph may hold a decode step of FA3; rows of requests without tokens
are zeros, as the kernel leaves them.

Shape suffixes: T tokens, H query heads, D values of a head, P pages, S slots of a page, G KV heads, B requests, N pages
of a request.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nibble.attention.backends.adapters import check_latents
from nibble.attention.backends.flash_attention import FA3_KERNELS, FA4_INSTALL, FA4_MODULE
from nibble.attention.backends.vendor import RANK, import_package
from nibble.attention.step import AttentionBackend
from nibble.cache.pool import KVView
from nibble.kernels.attention.naive import PartialAttention
from nibble.kernels.types import AttentionBatch, AttentionParams
from nibble.model_spec import LATENT

VLLM_NAMES = {
    "k_cache": "k",
    "v_cache": "v",
    "cache_seqlens": "seqused_k",
    "page_table": "block_table",
    "qv": "q_v",
}
"""What vLLM calls arguments that have other names elsewhere."""
LARGEST, NARROW = 64, 192
"""Slots of the largest page that no kernel for heads of up to NARROW values fetches whole; half as many for wider ones,
and for latents."""


class FA3(AttentionBackend):
    """The adapter of FlashAttention 3. Its state: the page table that the kernels are given."""

    def __init__(self) -> None:
        self._kernels = FA3_KERNELS.load()

    def kind(self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams) -> int:
        """Return how many pages the kernels see in one."""
        return split_pages(view)

    def prepare(self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams) -> Tensor:
        """Return the pages of each request, each cut into as many as the kernels see in it."""
        return _split_table(batch.page_table_BN, split_pages(view))

    def forward(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: Tensor
    ) -> Tensor:
        """Call the package's function over the pages, and add the sinks to what it returns."""
        with_lse = params.sinks_H is not None
        return self._attend(q_THD, view, batch, params, state, with_lse)[0]

    def forward_partial(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: Tensor
    ) -> PartialAttention:
        """Call the same function -> values in the query's dtype."""
        values_THD, lse_HT = self._attend(q_THD, view, batch, params, state, True)
        # Natural logarithms, -inf where a query sees nothing (FlashAttention hopper/softmax.h, finalize).
        assert lse_HT is not None
        return PartialAttention(values_THD, lse_HT)

    def _attend(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: Tensor,
        with_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        page_size = view.page_size // split_pages(view)
        planes = [entry.planes[0] for entry in view.streams.values()]
        planes = [plane.view(-1, page_size, *plane.shape[2:]) for plane in planes]
        options: dict[str, Any] = {
            "cache_seqlens": batch.seq_lens_B,
            "page_table": state,
            "cu_seqlens_q": batch.cu_seqlens_q_B1,
            "max_seqlen_q": max(batch.query_lens),
            "softmax_scale": params.scale,
            "causal": True,
            # Theirs does not count the present token.
            "window_size": (-1, -1) if params.window is None else (params.window - 1, 0),
            "softcap": params.softcap or 0.0,
            "return_softmax_lse": with_lse,
        }
        if LATENT in view.streams:
            check_latents(view, "FA3")
            (data_PSGD,) = planes
            options |= {"q": q_THD[..., RANK:], "qv": q_THD[..., :RANK]}
            options |= {"k_cache": data_PSGD[..., RANK:], "v_cache": data_PSGD[..., :RANK]}
        else:
            options |= {"q": q_THD, "k_cache": planes[0], "v_cache": planes[1]}
        output = self._call(options, max(batch.seq_lens))
        if not with_lse:
            return output, None
        out_THD, lse_HT, *_ = output
        if params.sinks_H is None:
            return out_THD, lse_HT
        # Not all packages take sinks, nor all numbers of heads. This is exact: the sink takes its share of the
        # softmax's sum, and exp(lse) of exp(lse) + exp(sink) is left.
        sinks_H1 = params.sinks_H.float()[:, None]
        share_TH = (lse_HT - sinks_H1).sigmoid().t()
        return (out_THD * share_TH[..., None]).to(out_THD.dtype), torch.logaddexp(lse_HT, sinks_H1)

    def _call(self, options: dict[str, Any], longest: int) -> Any:
        """Call the package's function. vLLM's has other names of arguments, and asks for the longest context."""
        if hasattr(self._kernels, "flash_attn_with_kvcache"):
            return self._kernels.flash_attn_with_kvcache(**options)
        renamed = {VLLM_NAMES.get(name, name): value for name, value in options.items()}
        return self._kernels.flash_attn_varlen_func(**renamed, max_seqlen_k=longest, fa_version=3)


def split_pages(view: KVView) -> int:
    """Return how many pages the kernels see in one of the pool's, so that none is a multiple of a tile."""
    # A page that holds a whole tile of keys may be fetched whole, rows beyond a request's end with it, and a NaN that
    # lies there gets into the sum of values. Other pages are read row by row. A tile is of 64 keys for MLA and for
    # windows over heads of 256 values, and of 80 to 192 otherwise.
    dim = max(entry.planes[0].shape[-1] for entry in view.streams.values())
    return _splits(view.page_size, dim)


def _split_table(page_table_BN: Tensor, splits: int) -> Tensor:
    """Return the page table of a pool whose pages were cut into `splits`."""
    if splits == 1:
        return page_table_BN
    order = torch.arange(splits, dtype=torch.int32, device=page_table_BN.device)
    return (page_table_BN[..., None] * splits + order).flatten(1)


def _splits(page_size: int, dim: int) -> int:
    return max(page_size // (LARGEST if dim <= NARROW else LARGEST // 2), 1)


class FA4(AttentionBackend):
    """The adapter of FlashAttention 4."""

    def __init__(self) -> None:
        self._package = import_package(FA4_MODULE, FA4_INSTALL)

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

"""Call FlashAttention 3.

A page that holds a whole tile of keys may be fetched whole, rows beyond a request's end with it, and a NaN that lies
there gets into the sum of values. So the kernels are told of pages that are no multiple of a tile, which are read row
by row: a larger page is several of those, one behind the other. A tile is of 64 keys for MLA and for windows over heads
of 256 values, and of 80 to 192 otherwise.

Attention sinks join by the log-sum-exp that the kernel returns, which is exact: not all packages take them, nor all
numbers of heads. Lengths and pages are read on the device, so a CUDA graph may hold a decode step; rows of requests
without tokens are zeros, as the kernel leaves them.

Shape suffixes: T tokens, H query heads, D values of a head, P pages, S slots of a page, G KV heads, B requests, N pages
of a request.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nibble.attention.backends.adapters.vendor import latents
from nibble.attention.backends.fa3 import KERNELS
from nibble.attention.backends.vendor import RANK
from nibble.cache.view import KVView
from nibble.kernels.types import AttentionBatch, AttentionParams
from nibble.model_spec import LATENT

VLLM_NAMES = {
    "k_cache": "k",
    "v_cache": "v",
    "cache_seqlens": "seqused_k",
    "page_table": "block_table",
    "qv": "q_v",
}
LARGEST, NARROW = 64, 192
"""Slots of the largest page that no kernel for heads of up to NARROW values fetches whole; half as many for wider ones,
and for latents."""


class FA3:
    """The adapter."""

    def __init__(self) -> None:
        self._call = _bound(KERNELS.load())
        self._tables: WeakKeyDictionary[AttentionBatch, dict[int, Tensor]] = WeakKeyDictionary()

    def attend(self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams) -> Tensor:
        planes = [entry.planes[0] for entry in view.streams.values()]
        parts = _parts(view.page_size, max(plane.shape[-1] for plane in planes))
        planes = [x.view(-1, view.page_size // parts, *x.shape[2:]) for x in planes]
        options: dict[str, Any] = {
            "cache_seqlens": batch.seq_lens_B,
            "page_table": self._table(batch, parts),
            "cu_seqlens_q": batch.cu_seqlens_q_B1,
            "max_seqlen_q": max(batch.query_lens),
            "softmax_scale": params.scale,
            "causal": True,
            "window_size": (-1, -1) if params.window is None else (params.window - 1, 0),
            "softcap": params.softcap or 0.0,
            "return_softmax_lse": params.sinks_H is not None,
        }
        if LATENT in view.streams:
            latents(view, "FA3")
            (data_PSGD,) = planes
            options |= {"q": q_THD[..., RANK:], "qv": q_THD[..., :RANK]}
            options |= {"k_cache": data_PSGD[..., RANK:], "v_cache": data_PSGD[..., :RANK]}
        else:
            options |= {"q": q_THD, "k_cache": planes[0], "v_cache": planes[1]}
        found = self._call(max(batch.seq_lens), options)
        if params.sinks_H is None:
            return found
        out_THD, lse_HT, *_ = found
        # the sink takes its share of what the softmax gave away: exp(lse) of exp(lse) + exp(sink)
        kept_TH = (lse_HT - params.sinks_H.float()[:, None]).sigmoid().t()
        return (out_THD * kept_TH[..., None]).to(out_THD.dtype)

    def _table(self, batch: AttentionBatch, parts: int) -> Tensor:
        """The pages of each request where each is cut into `parts`: made once for all layers of a step."""
        if parts == 1:
            return batch.page_table_BN
        known = self._tables.setdefault(batch, {})
        if parts not in known:
            order = torch.arange(parts, dtype=torch.int32, device=batch.page_table_BN.device)
            known[parts] = (batch.page_table_BN[..., None] * parts + order).flatten(1)
        return known[parts]


def _parts(page: int, dim: int) -> int:
    """How many pages the kernels are told of for one: none of them a multiple of a tile."""
    return max(page // (LARGEST if dim <= NARROW else LARGEST // 2), 1)


def _bound(kernels: ModuleType) -> Callable[[int, dict[str, Any]], Any]:
    """The package's function, under the names that it has for things. The first argument is the longest context."""
    if hasattr(kernels, "flash_attn_with_kvcache"):
        return lambda longest, options: kernels.flash_attn_with_kvcache(**options)
    varlen = kernels.flash_attn_varlen_func

    def vllm(longest: int, options: dict[str, Any]) -> Any:
        named = {VLLM_NAMES.get(name, name): value for name, value in options.items()}
        return varlen(**named, max_seqlen_k=longest, fa_version=3)

    return vllm

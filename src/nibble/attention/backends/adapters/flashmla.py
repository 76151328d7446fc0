"""Call DeepSeek's FlashMLA.

Sparse kernels name tokens by slots; -1 is nobody, and the last heads of 64 or 128 are zeros where a model has fewer.
Over a 16-bit pool the cache is one flat axis of tokens (`paged`), and so are staged pages (`ragged`). In FP8 the kernel
reads records of 656 bytes where they lie, one query token to a request.

How a call is cut over the chip is worked out on the device, once for a batch, so a CUDA graph may hold a decode step.

Shape suffixes: T tokens, B requests, n tokens of the longest request, H query heads, D values of a head, K chosen
tokens, P pages, S slots of a page.
"""

from __future__ import annotations

from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nibble.attention.backends.adapters.vendor import latents
from nibble.attention.backends.flashmla import HEADS, KERNELS
from nibble.attention.backends.vendor import RANK
from nibble.cache.view import KVView, StreamView
from nibble.kernels.types import AttentionBatch, AttentionParams

CHOSEN = 128
"""They take tokens in such numbers only."""


class FlashMLA:
    """The adapter. schedules: how calls of a batch are cut, made by the first layer that asks so."""

    def __init__(self) -> None:
        self._kernels = KERNELS.load()
        legacy = "use_legacy" in signature(self._kernels.flash_mla_with_kvcache).parameters
        self._options = {"use_legacy": True} if legacy else {}
        self._schedules: WeakKeyDictionary[AttentionBatch, dict[tuple[int, ...], Any]] = WeakKeyDictionary()
        self._places: WeakKeyDictionary[AttentionBatch, Tensor] = WeakKeyDictionary()

    def attend(self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams) -> Tensor:
        latent = latents(view, "FlashMLA")
        if params.topk_slots_TK is None:
            return self._dense(q_THD, latent, batch, params.scale)
        heads, topk_slots_T1K = q_THD.shape[1], _in_steps(params.topk_slots_TK)[:, None]
        full = next(size for size in HEADS if heads <= size)
        q_THD = torch.nn.functional.pad(q_THD, (0, 0, 0, full - heads)) if heads < full else q_THD
        attend = self._records if latent.packing.record else self._flat
        out_THD = attend(q_THD, latent, batch, topk_slots_T1K, params.scale)
        return out_THD if heads == full else out_THD[:, :heads].contiguous()

    def _dense(self, q_THD: Tensor, latent: StreamView, batch: AttentionBatch, scale: float) -> Tensor:
        count, most = len(batch.query_lens), max(batch.query_lens)
        place_T = self._place(batch, q_THD.device)
        if place_T is None:
            q_BnHD = q_THD.reshape(count, most, *q_THD.shape[1:])
        else:
            q_BnHD = q_THD.new_zeros(count, most, *q_THD.shape[1:])
            q_BnHD.flatten(0, 1)[place_T] = q_THD
        out_BnHD, _ = self._kernels.flash_mla_with_kvcache(
            q=q_BnHD.contiguous(),
            k_cache=latent.planes[0],
            block_table=batch.page_table_BN,
            cache_seqlens=batch.seq_lens_B,
            head_dim_v=RANK,
            tile_scheduler_metadata=self._schedule(batch, *q_BnHD.shape[:3]),
            softmax_scale=scale,
            causal=True,
            is_fp8_kvcache=False,
            **self._options,
        )
        out: Tensor = out_BnHD.flatten(0, 1)
        return out if place_T is None else out[place_T]

    def _place(self, batch: AttentionBatch, device: torch.device) -> Tensor | None:
        """Where a token goes in [B * n]: at the end of its request's rows, which see the most. None if all are full."""
        most = max(batch.query_lens)
        if min(batch.query_lens) == most:
            return None
        if batch not in self._places:
            rows = [i * most + most - n + j for i, n in enumerate(batch.query_lens) for j in range(n)]
            self._places[batch] = torch.tensor(rows, device=device)
        return self._places[batch]

    def _records(
        self, q_THD: Tensor, latent: StreamView, batch: AttentionBatch, topk_slots_T1K: Tensor, scale: float
    ) -> Tensor:
        codes_PS1 = latent.planes[0]
        record = codes_PS1.stride(1)
        out_T1HD, _ = self._kernels.flash_mla_with_kvcache(
            q=q_THD[:, None],
            k_cache=codes_PS1.as_strided((*codes_PS1.shape[:3], record), codes_PS1.stride()),
            block_table=None,
            cache_seqlens=None,
            head_dim_v=RANK,
            tile_scheduler_metadata=self._schedule(batch, *q_THD.shape[:2], topk_slots_T1K.shape[2]),
            softmax_scale=scale,
            causal=False,
            is_fp8_kvcache=True,
            indices=topk_slots_T1K,
            **self._options,
        )
        return out_T1HD[:, 0]

    def _flat(
        self, q_THD: Tensor, latent: StreamView, batch: AttentionBatch, topk_slots_T1K: Tensor, scale: float
    ) -> Tensor:
        tokens_L1D = latent.planes[0].flatten(0, 1)
        out_THD, *_ = self._kernels.flash_mla_sparse_fwd(
            q=q_THD, kv=tokens_L1D, indices=topk_slots_T1K, sm_scale=scale, d_v=RANK, **self._options
        )
        return out_THD

    def _schedule(self, batch: AttentionBatch, *shape: int) -> Any:
        known = self._schedules.setdefault(batch, {})
        if shape not in known:
            known[shape] = self._kernels.get_mla_metadata()[0]
        return known[shape]


def _in_steps(topk_slots_TK: Tensor) -> Tensor:
    lacking = -topk_slots_TK.shape[1] % CHOSEN
    return (
        torch.nn.functional.pad(topk_slots_TK, (0, lacking), value=-1)
        if lacking
        else topk_slots_TK.contiguous()
    )

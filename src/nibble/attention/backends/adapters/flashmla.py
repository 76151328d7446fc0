"""Call DeepSeek's FlashMLA.

Sparse kernels name tokens by slots; -1 is no token, and the last heads of 64 or 128 are zeros where a model has fewer.
Over a 16-bit pool the cache is one flat axis of tokens (`paged`), and so are staged pages (`ragged`). In FP8 the kernel
reads records of 656 bytes where they lie, one query token to a request.

How a call is cut over the chip is computed on the device, once for a batch, so a CUDA graph may hold a decode step.

Shape suffixes: T tokens, B requests, n tokens of the longest request, H query heads, D values of a head, K chosen
tokens, P pages, S slots of a page.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from nibble.attention.backends.adapters import check_latents
from nibble.attention.backends.flashmla import KERNELS, SPARSE_HEADS
from nibble.attention.backends.vendor import RANK
from nibble.attention.step import AttentionBackend
from nibble.cache.pool import KVView, StreamView
from nibble.kernels.types import AttentionBatch, AttentionParams
from nibble.model_spec import LATENT

TOPK_MULTIPLE = 128
"""The sparse kernels take a multiple of so many chosen tokens."""


@dataclass(frozen=True, slots=True)
class _State:
    """What the calls for one batch and kind of layer share."""

    schedule: Any
    """How a call is cut over the chip, for the kernels that ask for it. The first call fills it in."""
    row_T: Tensor | None = None
    """Where each token goes in [B * n]; None if all requests have n tokens, or tokens are chosen."""


class FlashMLA(AttentionBackend):
    """The adapter."""

    def __init__(self) -> None:
        self._kernels = KERNELS.load()
        legacy = "use_legacy" in signature(self._kernels.flash_mla_with_kvcache).parameters
        self._options = {"use_legacy": True} if legacy else {}

    def kind(self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams) -> Hashable:
        """Return the numbers of query heads and of chosen tokens."""
        top_k = None if params.topk_slots_TK is None else params.topk_slots_TK.shape[1]
        return q_THD.shape[1], top_k

    def prepare(self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams) -> _State:
        """Make a schedule, and look up where tokens go among the rows of dense decoding."""
        if params.topk_slots_TK is None:
            return _State(self._kernels.get_mla_metadata()[0], _end_aligned_rows(batch, q_THD.device))
        return _State(self._kernels.get_mla_metadata()[0] if view.streams[LATENT].packing.record else None)

    def forward(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams, state: _State
    ) -> Tensor:
        """Call the dense kernel, or one of the sparse ones with as many heads as it is built for."""
        latent = check_latents(view, "FlashMLA")
        if params.topk_slots_TK is None:
            return self._dense(q_THD, latent, batch, params.scale, state)
        heads, topk_slots_T1K = q_THD.shape[1], _pad_topk(params.topk_slots_TK)[:, None]
        padded_heads = next(size for size in SPARSE_HEADS if heads <= size)
        if heads < padded_heads:
            q_THD = torch.nn.functional.pad(q_THD, (0, 0, 0, padded_heads - heads))
        if latent.packing.record:
            out_THD = self._records(q_THD, latent, topk_slots_T1K, params.scale, state)
        else:
            out_THD, *_ = self._kernels.flash_mla_sparse_fwd(
                q=q_THD,
                kv=latent.planes[0].flatten(0, 1),
                indices=topk_slots_T1K,
                sm_scale=params.scale,
                d_v=RANK,
                **self._options,
            )
        return out_THD if heads == padded_heads else out_THD[:, :heads].contiguous()

    def _dense(
        self, q_THD: Tensor, latent: StreamView, batch: AttentionBatch, scale: float, state: _State
    ) -> Tensor:
        count, longest = len(batch.query_lens), max(batch.query_lens)
        if state.row_T is None:
            q_BnHD = q_THD.reshape(count, longest, *q_THD.shape[1:])
        else:
            # The dense kernel takes one number of tokens for all requests.
            q_BnHD = q_THD.new_zeros(count, longest, *q_THD.shape[1:])
            q_BnHD.flatten(0, 1)[state.row_T] = q_THD
        out_BnHD, _ = self._kernels.flash_mla_with_kvcache(
            q=q_BnHD.contiguous(),
            k_cache=latent.planes[0],
            block_table=batch.page_table_BN,
            cache_seqlens=batch.seq_lens_B,
            head_dim_v=RANK,
            tile_scheduler_metadata=state.schedule,
            softmax_scale=scale,
            causal=True,
            is_fp8_kvcache=False,
            **self._options,
        )
        out: Tensor = out_BnHD.flatten(0, 1)
        return out if state.row_T is None else out[state.row_T]

    def _records(
        self, q_THD: Tensor, latent: StreamView, topk_slots_T1K: Tensor, scale: float, state: _State
    ) -> Tensor:
        codes_PS1 = latent.planes[0]
        record = codes_PS1.stride(1)
        out_T1HD, _ = self._kernels.flash_mla_with_kvcache(
            q=q_THD[:, None],
            # The plane is a view of the codes; the kernel takes each record with its scales behind them.
            k_cache=codes_PS1.as_strided((*codes_PS1.shape[:3], record), codes_PS1.stride()),
            block_table=None,
            cache_seqlens=None,
            head_dim_v=RANK,
            tile_scheduler_metadata=state.schedule,
            softmax_scale=scale,
            # The tokens are chosen, and none of them lies after its query.
            causal=False,
            is_fp8_kvcache=True,
            indices=topk_slots_T1K,
            **self._options,
        )
        return out_T1HD[:, 0]


def _end_aligned_rows(batch: AttentionBatch, device: torch.device) -> Tensor | None:
    """Return where a token goes in [B * n]: at the end of its request's rows, which see the most."""
    longest = max(batch.query_lens)
    if min(batch.query_lens) == longest:
        return None
    rows = [i * longest + longest - n + j for i, n in enumerate(batch.query_lens) for j in range(n)]
    return torch.tensor(rows, device=device)


def _pad_topk(topk_slots_TK: Tensor) -> Tensor:
    """Return the slots with -1, which is no token, up to a multiple of TOPK_MULTIPLE."""
    padding = -topk_slots_TK.shape[1] % TOPK_MULTIPLE
    if not padding:
        return topk_slots_TK.contiguous()
    return torch.nn.functional.pad(topk_slots_TK, (0, padding), value=-1)

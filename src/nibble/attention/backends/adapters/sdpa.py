"""Call the attention that torch brings: on a GPU its fused kernels, for new tokens over a prefix in any format.

Elsewhere, and where a window asks for a mask, torch.nn.functional.scaled_dot_product_attention request by request; for
that quantised pages are staged (attention/layer.py). No score capping and no sinks: torch's functions have
neither.

Shape suffixes: T tokens, n new tokens of a request, L stored tokens, H query heads, G KV heads, D values of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nibble.attention.backends.sdpa import CUDNN_DIM
from nibble.attention.layer import AttentionBackend
from nibble.cache.pool import KVView
from nibble.kernels import attention
from nibble.kernels.types import AttentionBatch, AttentionParams

HALVES = (torch.bfloat16, torch.float16)


class SDPA(AttentionBackend):
    """The adapter. Its state: how a batch is cut into blocks for the fused kernels, None where those do not serve."""

    def kind(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams
    ) -> bool | None:
        """Return whether cuDNN's kernel is used; None where a mask is needed."""
        k, v = view.streams["k"].paged, view.streams["v"].paged
        fused = q_THD.is_cuda and q_THD.dtype in HALVES and attention.serves(k, v)
        # A window needs a mask, which the fused kernels do not take; and they are made for prompts.
        if not fused or params.window is not None or batch.phase.decodes:
            return None
        return _has_cudnn(q_THD)

    def prepare(
        self, q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams
    ) -> tuple[attention.QueryBlock, ...] | None:
        """Cut the batch, unless a mask is needed."""
        cudnn = self.kind(q_THD, view, batch, params)
        if cudnn is None:
            return None
        return attention.plan_blocks(
            batch.query_lens, batch.seq_lens, batch.page_table_BN, view.page_size, cudnn=cudnn
        )

    def forward(
        self,
        q_THD: Tensor,
        view: KVView,
        batch: AttentionBatch,
        params: AttentionParams,
        state: tuple[attention.QueryBlock, ...] | None,
    ) -> Tensor:
        """Attend by the fused kernels where the batch was cut for them, else request by request."""
        if state is None:
            return _masked(q_THD, view, batch, params)
        return attention.prefill_attention(
            q_THD, view.streams["k"].paged, view.streams["v"].paged, state, params
        )


def _has_cudnn(q_THD: Tensor) -> bool:
    """Return whether cuDNN's kernel is the faster one here: on data centre GPUs since Hopper."""
    major, _ = torch.cuda.get_device_capability(q_THD.device)
    return major in {9, 10} and q_THD.shape[2] <= CUDNN_DIM and torch.backends.cudnn.is_available()


def _masked(q_THD: Tensor, view: KVView, batch: AttentionBatch, params: AttentionParams) -> Tensor:
    """Attend request by request, with a mask."""
    outputs = []
    for i, q_nHD in enumerate(q_THD.split(batch.query_lens)):
        length = batch.seq_lens[i]
        pages = batch.page_table_BN[i : i + 1, : -(-length // view.page_size)]
        k_GLD, v_GLD = (
            view.streams[name].dequantize(pages, q_THD.dtype)[0, :length].transpose(0, 1) for name in "kv"
        )
        out_HnD = F.scaled_dot_product_attention(
            q_nHD.transpose(0, 1)[None],
            k_GLD[None],
            v_GLD[None],
            attn_mask=_mask(len(q_nHD), length, params.window, q_THD.device),
            scale=params.scale,
            enable_gqa=True,
        )[0]
        outputs.append(out_HnD.transpose(0, 1))
    return torch.cat(outputs)


def _mask(n: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """Return bool [n, L]: which stored tokens each new token sees."""
    query = torch.arange(length - n, length, device=device)[:, None]
    key = torch.arange(length, device=device)
    visible = key <= query
    return visible if window is None else visible & (key > query - window)

"""Attention over exact pages, to be merged with attention over far tokens, by the book in torch.

Shape suffixes: T query tokens, H query heads, D values of a head.
"""

from __future__ import annotations

from torch import Tensor

from nibble.kernels.attention.naive import PartialAttention, partial_attention
from nibble.kernels.types import AttentionBatch, AttentionParams, Paged


def near_attention(
    q_THD: Tensor,
    k: Paged,
    v: Paged,
    batch: AttentionBatch,
    params: AttentionParams,
    k_mean_HD: Tensor | None = None,
) -> PartialAttention:
    """Return attention over near tokens, in float32.

    Args:
        q_THD: Queries, one of each request.
        k: Exact pages of the keys.
        v: Exact pages of the values.
        batch: The requests, over exact pages.
        params: The scale, capping, sinks, and as window what is near.
        k_mean_HD: What was subtracted from far keys before they were stored, if anything was.
    """
    part = partial_attention(q_THD, k, v, batch, params)
    return without_mean(part, q_THD, k_mean_HD, params.scale)


def without_mean(
    near: PartialAttention, q_THD: Tensor, k_mean_HD: Tensor | None, scale: float
) -> PartialAttention:
    """Return the near part as if the mean of keys had been subtracted, as it was from far keys.

    Args:
        near: Attention over near tokens.
        q_THD: The queries.
        k_mean_HD: The mean of each KV head, if it was subtracted.
        scale: Of scores.
    """
    if k_mean_HD is None:
        return near
    # A mean shifts all scores of a query alike, by q . mean.
    mean_HD = k_mean_HD.repeat_interleave(q_THD.shape[1] // len(k_mean_HD), 0)
    shift_TH = (q_THD.float() * mean_HD).sum(-1) * scale
    return near._replace(lse_HT=near.lse_HT - shift_TH.T)

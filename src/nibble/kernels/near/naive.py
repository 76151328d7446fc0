"""Attention over exact pages joined with attention over far tokens, by the book in torch.

Shape suffixes: T query tokens, H query heads, D values of a head.
"""

from __future__ import annotations

from torch import Tensor

from nibble.kernels.attention.naive import PartialAttention, merge_lse, partial_attention
from nibble.kernels.types import AttentionBatch, AttentionParams, Paged


def near_attention(
    q_THD: Tensor,
    k: Paged,
    v: Paged,
    batch: AttentionBatch,
    params: AttentionParams,
    far: PartialAttention | None,
    k_mean_HD: Tensor | None = None,
) -> Tensor:
    """Return attention over near and far tokens; see __init__.py for the arguments."""
    near = partial_attention(q_THD, k, v, batch, params)
    if far is None:
        return near.values_THD.to(q_THD.dtype)
    far = with_mean(far, q_THD, k_mean_HD, params.scale)
    return merge_lse(near, far, q_THD.dtype).values_THD


def with_mean(
    far: PartialAttention, q_THD: Tensor, k_mean_HD: Tensor | None, scale: float
) -> PartialAttention:
    """Return the far part with scores as they would be without a mean subtracted from keys.

    Args:
        far: Attention over far tokens.
        q_THD: The queries.
        k_mean_HD: The mean of each KV head, if it was subtracted.
        scale: Of scores.
    """
    if k_mean_HD is None:
        return far
    # All keys of a query lack the same: q . mean.
    mean_HD = k_mean_HD.repeat_interleave(q_THD.shape[1] // len(k_mean_HD), 0)
    shift_TH = (q_THD.float() * mean_HD).sum(-1) * scale
    return far._replace(lse_HT=far.lse_HT + shift_TH.T)

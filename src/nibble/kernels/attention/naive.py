"""Attention over paged keys and values by the book, in torch and float32.

Shape suffixes: T query tokens, n query tokens of a request, L its stored tokens, H query heads, G KV heads, D values of
a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nibble.kernels import cdiv
from nibble.kernels.append.naive import dequantize_pages
from nibble.kernels.types import AttentionBatch, AttentionParams, Paged


class PartialAttention(NamedTuple):
    """Attention over some of the keys."""

    values_THD: Tensor
    lse_HT: Tensor
    """Float32: the logarithm of the sum of exp(score) over these keys."""


def paged_attention(
    q_THD: Tensor, k: Paged, v: Paged, batch: AttentionBatch, params: AttentionParams
) -> Tensor:
    """Return attention of each request's last tokens over its pages.

    Args:
        q_THD: Queries, request after request.
        k: Pages of the keys, [G, D].
        v: Pages of the values, [G, D].
        batch: The pages and lengths of requests. One of no stored tokens is padding.
        params: Scale, window, capping and sinks.

    Returns:
        [T, H, D] in the query's dtype; zeros for padding.
    """
    out_THD = torch.zeros_like(q_THD)
    for i, length in enumerate(batch.seq_lens_B.tolist()):
        if length:
            rows = slice(*batch.cu_seqlens_q_B1[i : i + 2].tolist())
            pages = batch.page_table_BN[i : i + 1, : cdiv(length, k.page_size)]
            k_GLD, v_GLD = (
                dequantize_pages(x, pages, torch.float32, heads_first=True)[0, :, :length] for x in (k, v)
            )
            out_THD[rows] = _dense(q_THD[rows].float(), k_GLD, v_GLD, params).to(q_THD.dtype)
    return out_THD


def _dense(q_nHD: Tensor, k_GLD: Tensor, v_GLD: Tensor, params: AttentionParams) -> Tensor:
    n, heads, _ = q_nHD.shape
    length, group = k_GLD.shape[1], heads // len(k_GLD)
    k_HLD, v_HLD = k_GLD.repeat_interleave(group, 0), v_GLD.repeat_interleave(group, 0)
    scores = q_nHD.transpose(0, 1) @ k_HLD.transpose(1, 2) * params.scale
    if params.softcap:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    key = torch.arange(length, device=scores.device)
    # Queries are the last tokens of their request.
    query = key[length - n :, None]
    hidden = (key > query) | (key <= query - (params.window or length))
    scores = scores.masked_fill(hidden, float("-inf"))
    if params.sinks_H is not None:  # a key without a value
        scores = torch.cat((scores, params.sinks_H.float().view(-1, 1, 1).expand(-1, n, 1)), -1)
    return (scores.softmax(-1)[..., :length] @ v_HLD).transpose(0, 1)


def merge_lse(a: PartialAttention, b: PartialAttention, dtype: torch.dtype) -> PartialAttention:
    """Merge attention over different keys into attention over the keys of both.

    Args:
        a: Attention over some keys.
        b: Attention of the same queries over other keys.
        dtype: Of the values returned; they are computed in float32.

    Returns:
        Attention over all of the keys.
    """
    # exp(a) / (exp(a) + exp(b)), written so that no exponential can overflow.
    share_TH1 = torch.sigmoid(a.lse_HT - b.lse_HT).T.unsqueeze(-1)
    values_THD = torch.lerp(b.values_THD.float(), a.values_THD.float(), share_TH1)
    return PartialAttention(values_THD.to(dtype), torch.logaddexp(a.lse_HT, b.lse_HT))

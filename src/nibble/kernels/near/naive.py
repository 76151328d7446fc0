"""Attention over exact pages, to be merged with attention over far tokens, by the book in torch.

Shape suffixes: T query tokens, H query heads, D values of a head.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nibble.kernels import cdiv
from nibble.kernels.append.naive import dequantize_pages
from nibble.kernels.attention.naive import PartialAttention, dense_attention, merge_lse, partial_attention
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
        q_THD: Queries, one of each request, or a few.
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


def near_prompt_attention(
    q_THD: Tensor,
    streams: Mapping[str, Tensor],
    k: Paged,
    v: Paged,
    batch: AttentionBatch,
    params: AttentionParams,
    k_mean_HD: Tensor | None = None,
    far: PartialAttention | None = None,
) -> Tensor:
    """Return attention over near tokens and far ones.

    Args:
        q_THD: Queries, the new tokens of each request.
        streams: Their keys `k` and values `v` [T, G, D], as the model gave them.
        k: Exact pages of the keys of tokens before them.
        v: Exact pages of the values.
        batch: The requests; exact_table_BN has their exact pages.
        params: The scale, capping, sinks, and as window what is near.
        k_mean_HD: What was subtracted from far keys before they were stored, if anything was.
        far: Attention of the last rows over far tokens, if there are any: rows before them see none.

    Returns:
        [T, H, D] in the query's dtype.
    """
    assert batch.exact_table_BN is not None
    values, lse = [], []
    for i, length in enumerate(batch.seq_lens_B.tolist()):
        rows = slice(*batch.cu_seqlens_q_B1[i : i + 2].tolist())
        past = length - (rows.stop - rows.start)
        pages = batch.exact_table_BN[i : i + 1, : cdiv(past, k.page_size)]
        keys_values = list[Tensor]()
        for name, stored in (("k", k), ("v", v)):
            old_GLD = dequantize_pages(stored, pages, torch.float32, heads_first=True)[0, :, :past]
            new_GLD = streams[name][rows].float().transpose(0, 1)
            # Pages before the window hold anything.
            old_GLD[:, : max(past - (params.window or past) + 1, 0)] = 0
            keys_values.append(torch.cat((old_GLD, new_GLD), 1))
        k_GLD, v_GLD = keys_values
        part = dense_attention(q_THD[rows].float(), k_GLD, v_GLD, params)
        values.append(part.values_THD)
        lse.append(part.lse_HT)
    near = PartialAttention(torch.cat(values), torch.cat(lse, 1))
    out_THD = near.values_THD.to(q_THD.dtype)
    if far is None:
        return out_THD
    near, first = without_mean(near, q_THD, k_mean_HD, params.scale), len(q_THD) - len(far.values_THD)
    near = PartialAttention(near.values_THD[first:], near.lse_HT[:, first:])
    return torch.cat((out_THD[:first], merge_lse(near, far, q_THD.dtype).values_THD))

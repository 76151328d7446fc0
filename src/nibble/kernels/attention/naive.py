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

MIN_LSE = -1e30
"""What stands in for -inf where a difference is taken, as -inf less -inf is NaN."""


class PartialAttention(NamedTuple):
    """Attention over some of the keys."""

    values_THD: Tensor
    """Zeros where a query sees no key. Float32, or the query's dtype."""
    lse_HT: Tensor
    """Float32: the natural logarithm of the sum of exp(score) over these keys, and of exp(sink) where the part has
    sinks. Scores are scaled and capped. -inf where that sum is empty."""


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
    return partial_attention(q_THD, k, v, batch, params).values_THD.to(q_THD.dtype)


def partial_attention(
    q_THD: Tensor, k: Paged, v: Paged, batch: AttentionBatch, params: AttentionParams
) -> PartialAttention:
    """Return what paged_attention returns, in float32, with its log-sum-exp.

    Args:
        q_THD: Queries, request after request. There may be more of a request than it has stored tokens: the first of
            them then see none.
        k: Pages of the keys, [G, D].
        v: Pages of the values, [G, D].
        batch: The pages and lengths of requests.
        params: Scale, window, capping and sinks.
    """
    tokens, heads, _ = q_THD.shape
    values_THD = torch.zeros(tokens, heads, v.dim, device=q_THD.device)
    lse_HT = torch.full((heads, tokens), float("-inf"), device=q_THD.device)
    for i, length in enumerate(batch.seq_lens_B.tolist()):
        rows = slice(*batch.cu_seqlens_q_B1[i : i + 2].tolist())
        pages = batch.page_table_BN[i : i + 1, : cdiv(length, k.page_size)]
        k_GLD, v_GLD = (
            dequantize_pages(x, pages, torch.float32, heads_first=True)[0, :, :length] for x in (k, v)
        )
        values_THD[rows], lse_HT[:, rows] = dense_attention(q_THD[rows].float(), k_GLD, v_GLD, params)
    return PartialAttention(values_THD, lse_HT)


def dense_attention(q_nHD: Tensor, k_GLD: Tensor, v_GLD: Tensor, params: AttentionParams) -> PartialAttention:
    """Return attention of a request's last tokens over its keys and values, all in float32.

    Args:
        q_nHD: Queries.
        k_GLD: Keys of all of its tokens.
        v_GLD: Values.
        params: Scale, window, capping and sinks.
    """
    n, heads, _ = q_nHD.shape
    length, group = k_GLD.shape[1], heads // len(k_GLD)
    k_HLD, v_HLD = k_GLD.repeat_interleave(group, 0), v_GLD.repeat_interleave(group, 0)
    scores = q_nHD.transpose(0, 1) @ k_HLD.transpose(1, 2) * params.scale
    if params.softcap:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    scores = scores.masked_fill(hidden_keys(n, length, params.window, scores.device), float("-inf"))
    return softmax_lse(scores, v_HLD, params.sinks_H)


def hidden_keys(n: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """Return which keys each of a request's last n tokens does not see: bool [n, length].

    Args:
        n: Queries.
        length: Stored tokens.
        window: Tokens that a query sees, itself included, if not all.
        device: Of the result.
    """
    query, key = torch.arange(length - n, length, device=device)[:, None], torch.arange(length, device=device)
    return (key > query) | (key <= query - (window or length + n))


def softmax_lse(scores_HnL: Tensor, v_HLD: Tensor, sinks_H: Tensor | None = None) -> PartialAttention:
    """Return the values weighted by the softmax of scores, with the log-sum-exp.

    Args:
        scores_HnL: Scores, -inf where a key is hidden.
        v_HLD: Values of each head, or [L, D] of all heads.
        sinks_H: Logits that join the softmax, if there are any.
    """
    lse_Hn = scores_HnL.logsumexp(-1)
    if sinks_H is not None:  # a key without a value
        lse_Hn = torch.logaddexp(lse_Hn, sinks_H.to(lse_Hn).unsqueeze(-1))
    # The logarithm of an empty sum is -inf, and -inf less -inf would be NaN.
    weights_HnL = (scores_HnL - lse_Hn.clamp(min=MIN_LSE).unsqueeze(-1)).exp()
    return PartialAttention((weights_HnL @ v_HLD).transpose(0, 1), lse_Hn)


def merge_lse(a: PartialAttention, b: PartialAttention, dtype: torch.dtype) -> PartialAttention:
    """Merge attention over different keys into attention over the keys of both.

    A part whose log-sum-exp is -inf weighs nothing, whatever its values hold: the other's values stay as they are, and
    two such parts become zeros. Only functions are used whose result for a row does not depend on how many there are.

    Args:
        a: Attention over some keys.
        b: Attention of the same queries over other keys.
        dtype: Of the values returned; they are computed in float32.

    Returns:
        Attention over all of the keys.
    """
    peak_HT = torch.maximum(a.lse_HT, b.lse_HT).clamp(min=MIN_LSE)
    weights_HT = [(part.lse_HT - peak_HT).exp() for part in (a, b)]
    # The larger weight is 1, unless both are 0.
    total_HT = weights_HT[0] + weights_HT[1]
    shares_HT = (weight_HT / total_HT.clamp(min=1.0) for weight_HT in weights_HT)
    first_THD, second_THD = (
        part.values_THD.float().masked_fill((share_HT == 0).T.unsqueeze(-1), 0.0) * share_HT.T.unsqueeze(-1)
        for part, share_HT in zip((a, b), shares_HT, strict=True)
    )
    return PartialAttention((first_THD + second_THD).to(dtype), peak_HT + total_HT.log())

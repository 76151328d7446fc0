"""Attention over the latents of multi-head latent attention, all or selected ones, by the book in torch and float32.

Shape suffixes: T query tokens, n of a request or at a time, H query heads, L stored tokens, K slots of a list, D values
of a latent, R of them that are values (the rank); the rest is rotary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nibble.kernels import cdiv
from nibble.kernels.append.naive import dequantize_pages, dequantize_tokens
from nibble.kernels.attention.naive import PartialAttention, hidden_keys, softmax_lse
from nibble.kernels.types import AttentionBatch, Paged


def mla_attention(
    q_THD: Tensor, latents: Paged, rope: int, batch: AttentionBatch, scale: float, window: int | None = None
) -> Tensor:
    """Return softmax(scale * q . latent) @ latent[:R] over each request's tokens.

    Args:
        q_THD: Queries with the projections of keys absorbed, request after request.
        latents: Pages of latents, one head.
        rope: Rotary values at the end of a latent.
        batch: The pages and lengths of requests. One of no stored tokens is padding.
        scale: What scores are multiplied by.
        window: Tokens that a query sees, itself included, if not all.

    Returns:
        [T, H, R] in the query's dtype; zeros for padding.
    """
    return partial_mla_attention(q_THD, latents, rope, batch, scale, window).values_THD.to(q_THD.dtype)


def partial_mla_attention(
    q_THD: Tensor, latents: Paged, rope: int, batch: AttentionBatch, scale: float, window: int | None = None
) -> PartialAttention:
    """Return what mla_attention returns, in float32, with its log-sum-exp.

    Args:
        q_THD: Queries with the projections of keys absorbed, request after request. There may be more of a request than
            it has stored tokens: the first of them then see none.
        latents: Pages of latents, one head.
        rope: Rotary values at the end of a latent.
        batch: The pages and lengths of requests.
        scale: What scores are multiplied by.
        window: Tokens that a query sees, itself included, if not all.
    """
    tokens, heads, _ = q_THD.shape
    values_THR = torch.zeros(tokens, heads, latents.dim - rope, device=q_THD.device)
    lse_HT = torch.full((heads, tokens), float("-inf"), device=q_THD.device)
    for i, length in enumerate(batch.seq_lens_B.tolist()):
        if length:
            rows = slice(*batch.cu_seqlens_q_B1[i : i + 2].tolist())
            pages = batch.page_table_BN[i : i + 1, : cdiv(length, latents.page_size)]
            latents_LD = dequantize_pages(latents, pages, torch.float32)[0, :length, 0]
            values_THR[rows], lse_HT[:, rows] = dense(q_THD[rows].float(), latents_LD, rope, scale, window)
    return PartialAttention(values_THR, lse_HT)


def dense(
    q_nHD: Tensor, latents_LD: Tensor, rope: int, scale: float, window: int | None = None
) -> PartialAttention:
    """Return attention of one request, in the dtype of its arguments.

    Args:
        q_nHD: Queries, the last n of the request's tokens.
        latents_LD: All its latents.
        rope: Rotary values at the end of a latent.
        scale: What scores are multiplied by.
        window: Tokens that a query sees, itself included, if not all.

    Returns:
        Values [n, H, R].
    """
    hidden_nL = hidden_keys(len(q_nHD), len(latents_LD), window, q_nHD.device)
    scores_HnL = (q_nHD.transpose(0, 1) @ latents_LD.T * scale).masked_fill(hidden_nL, float("-inf"))
    return softmax_lse(scores_HnL, latents_LD[:, : latents_LD.shape[1] - rope])


MAX_VALUES = 1 << 22
"""Bound on the values that are dequantised at a time."""
MIN_ROWS = 8
"""Rows of a matrix product: with fewer, the sum of a row may have another order, and depend on their number."""


def sparse_mla_attention(
    q_THD: Tensor,
    latents: Paged,
    rope: int,
    topk_slots_TK: Tensor,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return softmax(scale * q . latent) @ latent[:R] over each query's slots.

    Args:
        q_THD: Queries with the projections of keys absorbed.
        latents: Pages of latents, one head.
        rope: Rotary values at the end of a latent.
        topk_slots_TK: Int32, page * page_size + offset; a negative slot is padding, wherever it stands.
        scale: What scores are multiplied by.
        sinks_H: Logits that join the softmax, if there are any.

    Returns:
        [T, H, R] in the query's dtype; zeros where all slots are padding.
    """
    partial = partial_sparse_mla_attention(q_THD, latents, rope, topk_slots_TK, scale, sinks_H)
    return partial.values_THD.to(q_THD.dtype)


def partial_sparse_mla_attention(
    q_THD: Tensor,
    latents: Paged,
    rope: int,
    topk_slots_TK: Tensor,
    scale: float,
    sinks_H: Tensor | None = None,
) -> PartialAttention:
    """Return what sparse_mla_attention returns, in float32, with its log-sum-exp.

    Args:
        q_THD: Queries with the projections of keys absorbed.
        latents: Pages of latents, one head.
        rope: Rotary values at the end of a latent.
        topk_slots_TK: Int32, page * page_size + offset; a negative slot is padding, wherever it stands.
        scale: What scores are multiplied by.
        sinks_H: Logits that join the softmax, if there are any.
    """
    (tokens, heads, _), rank, device = q_THD.shape, latents.dim - rope, q_THD.device
    step = max(1, MAX_VALUES // max(topk_slots_TK.shape[1] * latents.dim, 1))
    values_THR = torch.empty(tokens, heads, rank, device=device)
    lse_HT = torch.empty(heads, tokens, device=device)
    for start in range(0, len(q_THD), step):
        rows = slice(start, start + step)
        slots_nK = topk_slots_TK[rows]
        # Padding reads slot 0, and dense_topk() hides what is read there.
        latents_nKD = dequantize_tokens(latents, slots_nK.clamp(min=0).long()).squeeze(-2)
        q_nHD = q_THD[rows].float()
        part = dense_topk(q_nHD, latents_nKD, slots_nK < 0, rank, scale, sinks_H)
        values_THR[rows], lse_HT[:, rows] = part
    return PartialAttention(values_THR, lse_HT)


def dense_topk(
    q_nHD: Tensor,
    latents_nKD: Tensor,
    hidden_nK: Tensor,
    rank: int,
    scale: float,
    sinks_H: Tensor | None = None,
) -> PartialAttention:
    """Return attention of each query over latents of its own, in the dtype of its arguments.

    Args:
        q_nHD: Queries.
        latents_nKD: Each query's latents.
        hidden_nK: Which of them do not count.
        rank: Values of a latent that are not rotary.
        scale: What scores are multiplied by.
        sinks_H: Logits that join the softmax, if there are any.

    Returns:
        Values [n, H, R].
    """
    heads, padding_n = q_nHD.shape[1], hidden_nK.all(1)
    # A weight of 0 does not remove a NaN, so what is hidden becomes zeros too.
    latents_nKD = latents_nKD.masked_fill(hidden_nK.unsqueeze(-1), 0.0)
    padding = max(MIN_ROWS - heads, 0)
    q_nHD = F.pad(q_nHD, (0, 0, 0, padding))
    scores_nHK = (q_nHD @ latents_nKD.transpose(1, 2) * scale).masked_fill(
        hidden_nK.unsqueeze(1), float("-inf")
    )
    if sinks_H is not None:
        # A sink takes weight and has no value: its column is cut off after the softmax.
        sinks_nH1 = F.pad(sinks_H.to(scores_nHK), (0, padding)).expand(len(q_nHD), -1).unsqueeze(-1)
        scores_nHK = torch.cat((scores_nHK, sinks_nH1), -1)
    # The softmax of a row of -inf is NaN.
    weights_nHK = scores_nHK.softmax(-1).masked_fill(padding_n[:, None, None], 0.0)
    values_nHR = weights_nHK[..., : latents_nKD.shape[1]] @ latents_nKD[..., :rank]
    return PartialAttention(values_nHR[:, :heads], scores_nHK.logsumexp(-1)[:, :heads].T)

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
from nibble.kernels.types import AttentionBatch, Paged


def mla_attention(q_THD: Tensor, latents: Paged, rope: int, batch: AttentionBatch, scale: float) -> Tensor:
    """Return softmax(scale * q . latent) @ latent[:R] over each request's tokens.

    Args:
        q_THD: Queries with the projections of keys absorbed, request after request.
        latents: Pages of latents, one head.
        rope: Rotary values at the end of a latent.
        batch: The pages and lengths of requests. One of no stored tokens is padding.
        scale: What scores are multiplied by.

    Returns:
        [T, H, R] in the query's dtype; zeros for padding.
    """
    out_THR = q_THD.new_zeros(*q_THD.shape[:2], latents.dim - rope)
    for i, length in enumerate(batch.seq_lens_B.tolist()):
        if length:
            rows = slice(*batch.cu_seqlens_q_B1[i : i + 2].tolist())
            pages = batch.page_table_BN[i : i + 1, : cdiv(length, latents.page_size)]
            latents_LD = dequantize_pages(latents, pages, torch.float32)[0, :length, 0]
            out_THR[rows] = dense(q_THD[rows].float(), latents_LD, rope, scale).to(q_THD.dtype)
    return out_THR


def dense(q_nHD: Tensor, latents_LD: Tensor, rope: int, scale: float) -> Tensor:
    """Return attention of one request, in the dtype of its arguments.

    Args:
        q_nHD: Queries, the last n of the request's tokens.
        latents_LD: All its latents.
        rope: Rotary values at the end of a latent.
        scale: What scores are multiplied by.

    Returns:
        [n, H, R].
    """
    n, length = len(q_nHD), len(latents_LD)
    token = torch.arange(length, device=q_nHD.device)
    # Queries are the last tokens of the request, and each sees the tokens up to its own.
    hidden = token > token[length - n :, None, None]
    scores = (q_nHD @ latents_LD.T * scale).masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ latents_LD[:, : latents_LD.shape[1] - rope]


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
    rank = latents.dim - rope
    step = max(1, MAX_VALUES // max(topk_slots_TK.shape[1] * latents.dim, 1))
    out_THR = q_THD.new_empty(*q_THD.shape[:2], rank)
    for start in range(0, len(q_THD), step):
        rows = slice(start, start + step)
        slots_nK = topk_slots_TK[rows]
        # Padding reads slot 0, and dense_topk() hides what is read there.
        latents_nKD = dequantize_tokens(latents, slots_nK.clamp(min=0).long()).squeeze(-2)
        q_nHD = q_THD[rows].float()
        out_THR[rows] = dense_topk(q_nHD, latents_nKD, slots_nK < 0, rank, scale, sinks_H).to(q_THD.dtype)
    return out_THR


def dense_topk(
    q_nHD: Tensor,
    latents_nKD: Tensor,
    hidden_nK: Tensor,
    rank: int,
    scale: float,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return attention of each query over latents of its own, in the dtype of its arguments.

    Args:
        q_nHD: Queries.
        latents_nKD: Each query's latents.
        hidden_nK: Which of them do not count.
        rank: Values of a latent that are not rotary.
        scale: What scores are multiplied by.
        sinks_H: Logits that join the softmax, if there are any.

    Returns:
        [n, H, R].
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
    weights_nHK = weights_nHK[..., : latents_nKD.shape[1]]
    return (weights_nHK @ latents_nKD[..., :rank])[:, :heads]

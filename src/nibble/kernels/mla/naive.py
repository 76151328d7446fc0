"""Attention over the paged latents of multi-head latent attention by the book, in torch and float32.

Shape suffixes: T query tokens, n query tokens of a request, H query heads, L stored tokens, D values of a latent, R of
them that are values (the rank); the rest is rotary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nibble.kernels.append.naive import dequantize_pages
from nibble.kernels.sizes import cdiv
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

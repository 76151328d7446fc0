"""mla: queries over the paged latents of multi-head latent attention, with its projections absorbed.

A token's latent is its key, and but for the rotary values at its end its value too: the same bytes, which a kernel need
read and dequantise only once. Queries are the last tokens of their requests, so each sees the stored tokens up to its
own.

Sparse: every query token has its own list of slots, and reads no others. They are those that the lightning indexer of
DeepSeek V3.2 selects.

Shape suffixes: T query tokens, H query heads, K slots of a list, D values of a latent, R of them that are values (the
rank).
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from nibble.kernels import UNBOUNDED, triton_present
from nibble.kernels.attention.naive import PartialAttention
from nibble.kernels.mla import naive
from nibble.kernels.types import AttentionBatch, Paged

MAX_SHORT_LEN = 2048
"""Stored tokens up to which the kernel in CUDA C++ was not measured to be faster."""


def mla_attention(
    q_THD: Tensor,
    latents: Paged,
    rope: int,
    batch: AttentionBatch,
    scale: float,
    max_seq_len: int = UNBOUNDED,
    window: int | None = None,
) -> Tensor:
    """Return softmax(scale * q . latent) @ latent[:R] over each request's tokens.

    Args:
        q_THD: Queries with the projections of keys absorbed, request after request.
        latents: Pages of latents, one head.
        rope: Rotary values at the end of a latent.
        batch: The pages and lengths of requests. One of no stored tokens is padding.
        scale: What scores are multiplied by.
        max_seq_len: A bound on stored tokens where one is known, which is not so in a CUDA graph.
        window: Tokens that a query sees, itself included, if not all.

    Returns:
        [T, H, R] in the query's dtype; zeros for padding.
    """
    if q_THD.is_cuda and triton_present():
        from nibble.kernels.mla import triton as fast

        cuda = _cuda() if max_seq_len > MAX_SHORT_LEN and window is None else None
        if cuda is not None and cuda.serves(q_THD, latents, rope, batch):
            return cuda.attend(q_THD, latents, batch, scale)
        if fast.serves_latents(latents, rope):
            return fast.mla_attention(q_THD, latents, rope, batch, scale, max_seq_len, window)
    return naive.mla_attention(q_THD, latents, rope, batch, scale, window)


def partial_mla_attention(
    q_THD: Tensor,
    latents: Paged,
    rope: int,
    batch: AttentionBatch,
    scale: float,
    max_seq_len: int = UNBOUNDED,
    window: int | None = None,
) -> PartialAttention:
    """Return what mla_attention returns, in float32, with its log-sum-exp.

    Args:
        q_THD: Queries with the projections of keys absorbed, request after request. There may be more of a request than
            it has stored tokens: the first of them then see none.
        latents: Pages of latents, one head.
        rope: Rotary values at the end of a latent.
        batch: The pages and lengths of requests.
        scale: What scores are multiplied by.
        max_seq_len: A bound on stored tokens where one is known, which is not so in a CUDA graph.
        window: Tokens that a query sees, itself included, if not all.
    """
    if q_THD.is_cuda and triton_present():
        from nibble.kernels.mla import triton as fast

        if fast.serves_latents(latents, rope):
            lse_TH = _empty_lse(q_THD)
            values_THR = fast.mla_attention(
                q_THD, latents, rope, batch, scale, max_seq_len, window, lse_TH=lse_TH
            )
            return PartialAttention(values_THR, lse_TH.T)
    return naive.partial_mla_attention(q_THD, latents, rope, batch, scale, window)


def _empty_lse(q_THD: Tensor) -> Tensor:
    """Return room for the log-sum-exps of queries, float32 [T, H]."""
    return q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32)


@cache
def _cuda() -> ModuleType | None:
    """Return the implementation in CUDA C++, if its package is here and not broken."""
    try:
        from nibble.kernels.mla import cuda
    except Exception:  # the loader's errors are of many kinds
        return None
    return cuda


def sparse_mla_attention(
    q_THD: Tensor, latents: Paged, rope: int, topk_slots_TK: Tensor, scale: float
) -> Tensor:
    """Return softmax(scale * q . latent) @ latent[:R] over each query's slots.

    Args:
        q_THD: Queries with the projections of keys absorbed.
        latents: Pages of latents, one head.
        rope: Rotary values at the end of a latent.
        topk_slots_TK: Int32, page * page_size + offset; a negative slot is padding, wherever it stands.
        scale: What scores are multiplied by.

    Returns:
        [T, H, R] in the query's dtype; zeros where all slots are padding.
    """
    if q_THD.is_cuda and triton_present():
        from nibble.kernels.mla import triton as fast

        if fast.serves_latents(latents, rope):
            return fast.sparse_mla_attention(q_THD, latents, rope, topk_slots_TK, scale)
    return naive.sparse_mla_attention(q_THD, latents, rope, topk_slots_TK, scale)


def partial_sparse_mla_attention(
    q_THD: Tensor, latents: Paged, rope: int, topk_slots_TK: Tensor, scale: float
) -> PartialAttention:
    """Return what sparse_mla_attention returns, in float32, with its log-sum-exp.

    Args:
        q_THD: Queries with the projections of keys absorbed.
        latents: Pages of latents, one head.
        rope: Rotary values at the end of a latent.
        topk_slots_TK: Int32, page * page_size + offset; a negative slot is padding, wherever it stands.
        scale: What scores are multiplied by.
    """
    if q_THD.is_cuda and triton_present():
        from nibble.kernels.mla import triton as fast

        if fast.serves_latents(latents, rope):
            lse_TH = _empty_lse(q_THD)
            values_THR = fast.sparse_mla_attention(q_THD, latents, rope, topk_slots_TK, scale, lse_TH=lse_TH)
            return PartialAttention(values_THR, lse_TH.T)
    return naive.partial_sparse_mla_attention(q_THD, latents, rope, topk_slots_TK, scale)

"""mla: queries over the paged latents of multi-head latent attention, with its projections absorbed.

A token's latent is its key, and but for the rotary values at its end its value too: the same bytes, which a kernel need
read and dequantise only once. Owns the operation's signature, its torch reference, and the choice of a twin. Queries
are the last tokens of their requests, so each sees the stored tokens up to its own. Must not know of pools or plans.

Shape suffixes: T query tokens, n query tokens of a request, H query heads, L stored tokens, D values of a latent, R of
them that are values (the rank); the rest is rotary.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from nibble.kernels import triton_present
from nibble.kernels.gather import reference as gathered
from nibble.kernels.types import AttentionBatch, Paged

MANY = 1 << 30
SHORT = 2048
"""Stored tokens up to which the twin in CUDA C++ has not been seen to be faster."""


def mla_attention(
    q_THD: Tensor, latents: Paged, rope: int, batch: AttentionBatch, scale: float, longest: int = MANY
) -> Tensor:
    """softmax(scale * q . latent) @ latent[:R] over each request's tokens -> [T, H, R] in the query's dtype.

    latents: one head. rope: rotary values at the end of a latent. longest: a bound on stored tokens where one is known,
    which is not so in a CUDA graph. A request of no stored tokens is padding: its rows are zeros.
    """
    if q_THD.is_cuda and triton_present():
        from nibble.kernels.mla import triton as twin

        fast = _cuda_twin() if longest > SHORT else None
        if fast is not None and fast.serves(q_THD, latents, rope, batch):
            return fast.attend(q_THD, latents, batch, scale)
        if twin.serves(latents, rope):
            return twin.attend(q_THD, latents, rope, batch, scale, longest)
    return reference(q_THD, latents, rope, batch, scale)


@cache
def _cuda_twin() -> ModuleType | None:
    """The twin in CUDA C++, if its package is here and not broken."""
    try:
        from nibble.kernels.mla import cuda as twin
    except Exception:  # the loader's errors are of many kinds
        return None
    return twin


def reference(q_THD: Tensor, latents: Paged, rope: int, batch: AttentionBatch, scale: float) -> Tensor:
    """The definition, in torch and float32."""
    out_THR = q_THD.new_zeros(*q_THD.shape[:2], latents.dim - rope)
    for i, length in enumerate(batch.seq_lens_B.tolist()):
        if length:
            rows = slice(*batch.cu_seqlens_q_B1[i : i + 2].tolist())
            pages = batch.page_table_BN[i : i + 1, : -(-length // latents.page_size)]
            latents_LD = gathered(latents, pages, torch.float32)[0, :length, 0]
            out_THR[rows] = dense(q_THD[rows].float(), latents_LD, rope, scale).to(q_THD.dtype)
    return out_THR


def dense(q_nHD: Tensor, latents_LD: Tensor, rope: int, scale: float) -> Tensor:
    """Attention of one request, by the book, in the dtype of its arguments."""
    n, length = len(q_nHD), len(latents_LD)
    token = torch.arange(length, device=q_nHD.device)
    hidden = token > token[length - n :, None, None]
    scores = (q_nHD @ latents_LD.T * scale).masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ latents_LD[:, : latents_LD.shape[1] - rope]

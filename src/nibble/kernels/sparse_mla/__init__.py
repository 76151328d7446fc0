"""sparse: queries over chosen latents of multi-head latent attention, with its projections absorbed.

Every query token has its own list of slots, and looks at no others: what the lightning indexer of DeepSeek V3.2 leaves
to be looked at. Owns the operation's signature, its torch reference, and the choice of a twin. Must not know of pools,
plans, requests, nor of how tokens were chosen.

Shape suffixes: T query tokens, n of them at a time, H query heads, K slots of a list, D values of a latent, R of them
that are values (the rank); the rest is rotary.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from nibble.kernels import triton_present
from nibble.kernels.gather import gather_tokens
from nibble.kernels.types import Paged

VALUES = 1 << 22
"""Bound on the chosen values that the reference dequantises at a time."""
LEAST_ROWS = 8
"""Rows of a matrix product: with fewer, the sum of a row may have another order, and depend on their number."""


def sparse_mla_attention(
    q_THD: Tensor, latents: Paged, rope: int, topk_slots_TK: Tensor, scale: float
) -> Tensor:
    """softmax(scale * q . latent) @ latent[:R] over each query's slots -> [T, H, R] in the query's dtype.

    latents: one head. rope: rotary values at the end of a latent. topk_slots_TK: int32, page * page_size + offset; a
    negative one is nobody, wherever it stands. Where all are, the query is padding: its rows are zeros.
    """
    if q_THD.is_cuda and triton_present():
        from nibble.kernels.sparse_mla import triton as twin

        if twin.serves(latents, rope):
            return twin.attend(q_THD, latents, rope, topk_slots_TK, scale)
    return reference(q_THD, latents, rope, topk_slots_TK, scale)


def reference(q_THD: Tensor, latents: Paged, rope: int, topk_slots_TK: Tensor, scale: float) -> Tensor:
    """The definition, in torch and float32."""
    rank = latents.dim - rope
    step = max(1, VALUES // max(topk_slots_TK.shape[1] * latents.dim, 1))
    out_THR = q_THD.new_empty(*q_THD.shape[:2], rank)
    for start in range(0, len(q_THD), step):
        rows = slice(start, start + step)
        slots_nK = topk_slots_TK[rows]
        latents_nKD = gather_tokens(latents, slots_nK.clamp(min=0).long()).squeeze(-2)
        out_THR[rows] = dense(q_THD[rows].float(), latents_nKD, slots_nK < 0, rank, scale).to(q_THD.dtype)
    return out_THR


def dense(q_nHD: Tensor, latents_nKD: Tensor, hidden_nK: Tensor, rank: int, scale: float) -> Tensor:
    """Attention of each query over latents of its own, by the book, in the dtype of its arguments."""
    heads, nobody_n = q_nHD.shape[1], hidden_nK.all(1)
    latents_nKD = latents_nKD.masked_fill(hidden_nK.unsqueeze(-1), 0.0)
    q_nHD = F.pad(q_nHD, (0, 0, 0, max(LEAST_ROWS - heads, 0)))
    scores_nHK = (q_nHD @ latents_nKD.transpose(1, 2) * scale).masked_fill(
        hidden_nK.unsqueeze(1), float("-inf")
    )
    weights_nHK = scores_nHK.softmax(-1).masked_fill(nobody_n[:, None, None], 0.0)
    return (weights_nHK @ latents_nKD[..., :rank])[:, :heads]

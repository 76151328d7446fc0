"""attention: queries over paged keys and values, for every phase.

Owns the operation's signature and its torch reference. Queries are the last tokens of their requests, so each sees the
stored tokens up to its own, itself included. Must not know of pools, plans or engines.

Shape suffixes: T query tokens, B requests, N pages of a request, n query tokens of a request, L its stored tokens,
H query heads, G KV heads, D values of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nibble.kernels.gather import reference as gathered
from nibble.kernels.types import AttentionBatch, AttentionParams, Paged


def reference(q_THD: Tensor, k: Paged, v: Paged, batch: AttentionBatch, params: AttentionParams) -> Tensor:
    """The definition, in torch and float32 -> [T, H, D] in the query's dtype; zeros for padding."""
    out_THD = torch.zeros_like(q_THD)
    for i, length in enumerate(batch.seq_lens_B.tolist()):
        if length:
            rows = slice(*batch.cu_seqlens_q_B1[i : i + 2].tolist())
            pages = batch.page_table_BN[i : i + 1, : -(-length // k.page_size)]
            k_GLD, v_GLD = (
                gathered(x, pages, torch.float32, heads_first=True)[0, :, :length] for x in (k, v)
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
    query = key[length - n :, None]
    hidden = (key > query) | (key <= query - (params.window or length))
    scores = scores.masked_fill(hidden, float("-inf"))
    if params.sinks_H is not None:
        scores = torch.cat((scores, params.sinks_H.float().view(-1, 1, 1).expand(-1, n, 1)), -1)
    return (scores.softmax(-1)[..., :length] @ v_HLD).transpose(0, 1)

"""choose: the tokens that sparse attention looks at, by the lightning indexer of DeepSeek V3.2.

    score(query, token) = sum over heads of weight_h * relu(q_h . key)

Of the tokens that a query sees, the top_k with the largest scores, exactly; of equal ones those that come first. Owns
the operation's signature, its torch reference, and the choice of a twin. Must not know of pools, plans or engines.

Shape suffixes: T query tokens, n of one request, H heads of the indexer, D values of a key, L stored tokens, K = top_k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nibble.kernels import triton_present
from nibble.kernels.gather import dequantize_pages
from nibble.kernels.types import AttentionBatch, Paged

PAD_INDEX = -1
"""In the place of a token, where a query sees fewer than top_k."""
SCORES = 1 << 24
"""Bound on the scores held at a time."""


def select_topk(
    keys: Paged,
    batch: AttentionBatch,
    q_THD: Tensor,
    weights_TH: Tensor,
    top_k: int,
    longest: int | None = None,
) -> Tensor:
    """The tokens of each query, ascending, as positions in its request -> int32 [T, K], PAD_INDEX at the end.

    keys: stored index keys, one head. q_THD, weights_TH: any float dtype. longest: a bound on stored tokens, if one is
    known that is less than what the pages hold; a CUDA graph keeps it. A request of no stored tokens is padding: its
    queries choose PAD_INDEX. Where nothing can be longer than top_k all are chosen, and no score is computed.
    """
    if longest is not None and longest <= top_k:
        return everything(batch, len(q_THD), top_k)
    if q_THD.is_cuda and triton_present():
        from nibble.kernels.indexer import triton as twin

        if twin.serves(keys, q_THD):
            return twin.choose(keys, batch, q_THD, weights_TH, top_k, longest)
    return reference(keys, batch, q_THD, weights_TH, top_k)


def everything(batch: AttentionBatch, tokens: int, top_k: int) -> Tensor:
    """All tokens that each query sees, where these are top_k at most."""
    ends_B, seq_lens_B = batch.cu_seqlens_q_B1[1:], batch.seq_lens_B
    row_T = torch.arange(tokens, dtype=torch.int32, device=ends_B.device)
    request_T = torch.searchsorted(ends_B, row_T, right=True).clamp(max=len(ends_B) - 1)
    length_T = seq_lens_B[request_T]
    seen_T = torch.where(length_T > 0, length_T - ends_B[request_T] + row_T + 1, 0)
    token_K = torch.arange(top_k, dtype=torch.int32, device=ends_B.device)
    return torch.where(token_K < seen_T[:, None], token_K, PAD_INDEX)


def reference(keys: Paged, batch: AttentionBatch, q_THD: Tensor, weights_TH: Tensor, top_k: int) -> Tensor:
    """The definition, in torch and float32."""
    topk_indices_TK = torch.full((len(q_THD), top_k), PAD_INDEX, dtype=torch.int32, device=q_THD.device)
    starts = batch.cu_seqlens_q_B1.tolist()
    for i, length in enumerate(batch.seq_lens_B.tolist()):
        if not length:
            continue
        begin, end = starts[i : i + 2]
        used = -(-length // keys.page_size)
        keys_LD = dequantize_pages(keys, batch.page_table_BN[i : i + 1, :used], torch.float32)[0, :length, 0]
        step = max(1, SCORES // (length * q_THD.shape[1]))
        for start in range(begin, end, step):
            rows = slice(start, min(start + step, end))
            scores_nL = scores(q_THD[rows], weights_TH[rows], keys_LD)
            topk_indices_TK[rows] = largest(scores_nL, length - end + start, top_k)
    return topk_indices_TK


def scores(q_nHD: Tensor, weights_nH: Tensor, keys_LD: Tensor) -> Tensor:
    """float32 [n, L]. The products have the shape of one query's, so that a score does not depend on the others."""
    products_nHL = (q_nHD.float() @ keys_LD.T).relu_()
    return (weights_nH.float().unsqueeze(1) @ products_nHL).squeeze(1)


def largest(scores_nL: Tensor, first: int, top_k: int) -> Tensor:
    """The best tokens of queries at positions first, first + 1, ..., each of which sees itself and what is before."""
    n, length = scores_nL.shape
    tokens = torch.arange(length, device=scores_nL.device)
    seen_nL = tokens <= first + torch.arange(n, device=scores_nL.device)[:, None]
    ranked = scores_nL.masked_fill(~seen_nL, float("-inf")).sort(dim=1, descending=True, stable=True).indices
    best_nK = ranked[:, :top_k]
    best_nK = torch.where(seen_nL.gather(1, best_nK), best_nK, length).sort(dim=1).values
    best_nK = best_nK.masked_fill(best_nK == length, PAD_INDEX).int()
    return torch.nn.functional.pad(best_nK, (0, top_k - best_nK.shape[1]), value=PAD_INDEX)

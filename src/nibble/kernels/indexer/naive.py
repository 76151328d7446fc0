"""Selecting the tokens that sparse attention reads by the book, in torch and float32.

Shape suffixes: T query tokens, n of one request, H heads of the indexer, D values of a key, L stored tokens, K = top_k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nibble.kernels import cdiv
from nibble.kernels.append.naive import dequantize_pages
from nibble.kernels.types import AttentionBatch, Paged

PAD_INDEX = -1
"""In the place of a token, where a query sees fewer than top_k."""
MAX_SCORES = 1 << 24
"""Bound on the scores held at a time."""


def select_topk(keys: Paged, batch: AttentionBatch, q_THD: Tensor, weights_TH: Tensor, top_k: int) -> Tensor:
    """Return the top_k tokens of each query; of equal scores those that come first.

    Args:
        keys: Pages of index keys, one head.
        batch: The pages and lengths of requests. One of no stored tokens is padding.
        q_THD: Queries of the indexer, any float dtype.
        weights_TH: Weights of its heads, any float dtype.
        top_k: How many tokens are selected.

    Returns:
        Int32 [T, K], ascending positions in the request, PAD_INDEX at the end.
    """
    topk_indices_TK = torch.full((len(q_THD), top_k), PAD_INDEX, dtype=torch.int32, device=q_THD.device)
    starts = batch.cu_seqlens_q_B1.tolist()
    for i, length in enumerate(batch.seq_lens_B.tolist()):
        if not length:
            continue
        begin, end = starts[i : i + 2]
        pages = batch.page_table_BN[i : i + 1, : cdiv(length, keys.page_size)]
        keys_LD = dequantize_pages(keys, pages, torch.float32)[0, :length, 0]
        step = max(1, MAX_SCORES // (length * q_THD.shape[1]))
        for start in range(begin, end, step):
            rows = slice(start, min(start + step, end))
            scores_nL = scores(q_THD[rows], weights_TH[rows], keys_LD)
            topk_indices_TK[rows] = largest(scores_nL, length - end + start, top_k)
    return topk_indices_TK


def scores(q_nHD: Tensor, weights_nH: Tensor, keys_LD: Tensor) -> Tensor:
    """Return the scores of some queries.

    Args:
        q_nHD: Queries of the indexer.
        weights_nH: Weights of its heads.
        keys_LD: Keys of the request.

    Returns:
        Float32 [n, L].
    """
    # the products have the shape of one query's, so that a score does not depend on the others
    products_nHL = (q_nHD.float() @ keys_LD.T).relu_()
    return (weights_nH.float().unsqueeze(1) @ products_nHL).squeeze(1)


def largest(scores_nL: Tensor, first: int, top_k: int) -> Tensor:
    """Return the tokens with the largest scores, each query seeing itself and what is before.

    Args:
        scores_nL: Float32 scores of queries at positions first, first + 1, ...
        first: Position of the first query.
        top_k: How many tokens are selected.

    Returns:
        Int32 [n, K], ascending, PAD_INDEX at the end.
    """
    n, length = scores_nL.shape
    tokens = torch.arange(length, device=scores_nL.device)
    visible_nL = tokens <= first + torch.arange(n, device=scores_nL.device)[:, None]
    # A stable sort: of equal scores the first tokens win, and topk() promises no order.
    ranked = (
        scores_nL.masked_fill(~visible_nL, float("-inf")).sort(dim=1, descending=True, stable=True).indices
    )
    top_nK = ranked[:, :top_k]
    # What is not visible sorts to the end, behind all tokens.
    top_nK = torch.where(visible_nL.gather(1, top_nK), top_nK, length).sort(dim=1).values
    top_nK = top_nK.masked_fill(top_nK == length, PAD_INDEX).int()
    return torch.nn.functional.pad(top_nK, (0, top_k - top_nK.shape[1]), value=PAD_INDEX)


def select_all(batch: AttentionBatch, tokens: int, top_k: int) -> Tensor:
    """Return all tokens that each query sees, where these are top_k at most.

    Args:
        batch: The lengths of requests.
        tokens: Query tokens.
        top_k: Width of the result.

    Returns:
        Int32 [T, K], ascending, PAD_INDEX at the end.
    """
    ends_B, seq_lens_B = batch.cu_seqlens_q_B1[1:], batch.seq_lens_B
    row_T = torch.arange(tokens, dtype=torch.int32, device=ends_B.device)
    request_T = torch.searchsorted(ends_B, row_T, right=True).clamp(max=len(ends_B) - 1)
    length_T = seq_lens_B[request_T]
    visible_T = torch.where(length_T > 0, length_T - ends_B[request_T] + row_T + 1, 0)
    token_K = torch.arange(top_k, dtype=torch.int32, device=ends_B.device)
    return torch.where(token_K < visible_T[:, None], token_K, PAD_INDEX)

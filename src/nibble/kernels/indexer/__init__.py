"""indexer: the tokens that sparse attention reads, selected by the lightning indexer of DeepSeek V3.2.

    score(query, token) = sum over heads of weight_h * relu(q_h . key)

Of the tokens that a query sees, the top_k with the largest scores, exactly; of equal ones those that come first.

Shape suffixes: T query tokens, H heads of the indexer, D values of a key, K = top_k.
"""

from __future__ import annotations

from torch import Tensor

from nibble.kernels import triton_present
from nibble.kernels.indexer import naive
from nibble.kernels.indexer.naive import PAD_INDEX
from nibble.kernels.types import AttentionBatch, Paged

__all__ = ["PAD_INDEX", "select_topk"]


def select_topk(
    keys: Paged,
    batch: AttentionBatch,
    q_THD: Tensor,
    weights_TH: Tensor,
    top_k: int,
    max_seq_len: int | None = None,
) -> Tensor:
    """Return the top_k tokens of each query.

    Args:
        keys: Pages of index keys, one head.
        batch: The pages and lengths of requests. One of no stored tokens is padding.
        q_THD: Queries of the indexer, any float dtype.
        weights_TH: Weights of its heads, any float dtype.
        top_k: How many tokens are selected.
        max_seq_len: A bound on stored tokens, if one is known that is less than what the pages hold; a CUDA graph
            keeps it.

    Returns:
        Int32 [T, K], ascending positions in the request, PAD_INDEX at the end.
    """
    if max_seq_len is not None and max_seq_len <= top_k:  # all are selected, so no score is needed
        return naive.select_all(batch, len(q_THD), top_k)
    if q_THD.is_cuda and triton_present():
        from nibble.kernels.indexer import triton as fast

        if fast.serves(keys, q_THD):
            return fast.select_topk(keys, batch, q_THD, weights_TH, top_k, max_seq_len)
    return naive.select_topk(keys, batch, q_THD, weights_TH, top_k)

"""near: attention of decode steps over exact pages, which hold the newest tokens, joined with that over the rest."""

from __future__ import annotations

from torch import Tensor

from nibble.kernels import triton_present
from nibble.kernels.attention.naive import PartialAttention
from nibble.kernels.types import AttentionBatch, AttentionParams, Paged
from nibble.model_spec import Phase

__all__ = ["near_attention", "serves"]


def serves(q_THD: Tensor, batch: AttentionBatch) -> bool:
    """Return whether there is a kernel for these queries; backends serve the others, and parts are merged after it."""
    return q_THD.is_cuda and batch.phase is Phase.DECODE and triton_present()


def near_attention(
    q_THD: Tensor,
    k: Paged,
    v: Paged,
    batch: AttentionBatch,
    params: AttentionParams,
    far: PartialAttention | None,
    k_mean_HD: Tensor | None = None,
) -> Tensor:
    """Return attention over near and far tokens [T, H, D] in the query's dtype, zeros for padding.

    Args:
        q_THD: Queries, one of each request.
        k: Exact pages of the keys.
        v: Exact pages of the values.
        batch: The requests, over exact pages.
        params: The scale, capping, sinks, and as window what is near; no further tokens are read here.
        far: Attention over far tokens; None where there are none.
        k_mean_HD: What was subtracted from far keys before they were stored, if anything was.
    """
    from nibble.kernels.near import triton as fast

    return fast.near_attention(q_THD, k, v, batch, params, far, k_mean_HD)

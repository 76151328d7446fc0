"""near: attention of decode steps over exact pages, which hold the newest tokens in the compute dtype."""

from __future__ import annotations

from collections.abc import Container

from torch import Tensor

from nibble.kernels import triton_present
from nibble.kernels.attention.naive import PartialAttention
from nibble.kernels.types import AttentionBatch, AttentionParams, Paged
from nibble.model_spec import Phase

__all__ = ["near_attention", "serves"]


def serves(q_THD: Tensor, batch: AttentionBatch, streams: Container[str]) -> bool:
    """Return whether there is a kernel for these queries and streams; a backend serves others.

    Args:
        q_THD: Queries.
        batch: Their requests.
        streams: The names of what is cached.
    """
    return "v" in streams and q_THD.is_cuda and batch.phase is Phase.DECODE and triton_present()


def near_attention(
    q_THD: Tensor,
    k: Paged,
    v: Paged,
    batch: AttentionBatch,
    params: AttentionParams,
    k_mean_HD: Tensor | None = None,
) -> PartialAttention:
    """Return attention over near tokens, in float32; see naive.py for the arguments."""
    from nibble.kernels.near import triton as fast

    return fast.near_attention(q_THD, k, v, batch, params, k_mean_HD)

"""near: attention over the newest tokens in the compute dtype: in exact pages, or as the model gave them.

Decode steps and those with drafts have a part that is to be merged with that over far tokens; prompts merge it
themselves.

without_mean: what makes attention over them comparable with that over far keys less their mean.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from torch import Tensor

from nibble.kernels import triton_present
from nibble.kernels.attention.naive import PartialAttention
from nibble.kernels.near import naive
from nibble.kernels.types import AttentionBatch, AttentionParams, Paged

__all__ = ["near_attention", "near_prompt_attention", "serves", "without_mean"]


def serves(q_THD: Tensor, batch: AttentionBatch, streams: Container[str]) -> bool:
    """Return whether there is a kernel for these queries and streams; a backend serves others.

    Args:
        q_THD: Queries.
        batch: Their requests.
        streams: The names of what is cached.
    """
    return "v" in streams and q_THD.is_cuda and triton_present()


def near_attention(
    q_THD: Tensor,
    k: Paged,
    v: Paged,
    batch: AttentionBatch,
    params: AttentionParams,
    k_mean_HD: Tensor | None = None,
) -> PartialAttention:
    """Return attention of a step without prompts over near tokens, in float32; see naive.py for the arguments."""
    from nibble.kernels.near import triton as fast

    return fast.near_attention(q_THD, k, v, batch, params, k_mean_HD)


def near_prompt_attention(
    q_THD: Tensor,
    streams: Mapping[str, Tensor],
    k: Paged,
    v: Paged,
    batch: AttentionBatch,
    params: AttentionParams,
    k_mean_HD: Tensor | None = None,
    far: PartialAttention | None = None,
) -> Tensor:
    """Return attention of new tokens over near and far ones; see naive.py for the arguments."""
    from nibble.kernels.near import triton as fast

    return fast.near_prompt_attention(q_THD, streams, k, v, batch, params, k_mean_HD, far)


def without_mean(
    near: PartialAttention, q_THD: Tensor, k_mean_HD: Tensor | None, scale: float
) -> PartialAttention:
    """Return the near part as if the mean of keys had been subtracted, as it was from far keys; see naive.py."""
    if k_mean_HD is not None and q_THD.is_cuda and triton_present():
        from nibble.kernels.near import triton as fast

        return fast.without_mean(near, q_THD, k_mean_HD, scale)
    return naive.without_mean(near, q_THD, k_mean_HD, scale)

"""attention: queries over paged keys and values, for every phase; and the merging of attention over different keys.

Queries are the last tokens of their requests, so each sees the stored tokens up to its own, itself included.
"""

from __future__ import annotations

import torch

from nibble.kernels import triton_present
from nibble.kernels.attention import naive
from nibble.kernels.attention.naive import PartialAttention

__all__ = ["PartialAttention", "merge_lse"]


def merge_lse(a: PartialAttention, b: PartialAttention, dtype: torch.dtype) -> PartialAttention:
    """Merge attention over different keys; see naive.py.

    Args:
        a: Attention over some keys.
        b: Attention of the same queries over other keys.
        dtype: Dtype of the values returned.
    """
    if a.lse_HT.is_cuda and triton_present():
        from nibble.kernels.attention.triton import merge_lse as fast

        return fast(a, b, dtype)
    return naive.merge_lse(a, b, dtype)

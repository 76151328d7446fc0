"""append: new tokens of a layer, transformed, encoded and stored in its pages, maybe behind rotary positions.

gather: whole pages of one stream, dequantised for backends that cannot read the stored format.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from nibble.kernels import triton_present
from nibble.kernels.append import naive
from nibble.kernels.append.naive import KVAppend, NaiveAppend, Target
from nibble.kernels.types import Paged

__all__ = ["KVAppend", "Target", "prepare"]


def prepare(targets: Mapping[str, Target], joint_scale: Tensor | None = None) -> KVAppend:
    """Return what appends to these streams of a layer: one launch on a GPU, where there is a kernel for them.

    Args:
        targets: Where each stream is stored.
        joint_scale: Float32 [streams, 1, 1, 1] where streams have one shape and format, and can be encoded as one.

    Returns:
        A callable.
    """
    if all(target.pages.scale.is_cuda for target in targets.values()) and triton_present():
        from nibble.kernels.append import triton as fast

        for implementation in (fast.HeadsAppend, fast.RowAppend):
            if implementation.serves(targets):
                return implementation(targets)
    return NaiveAppend(targets, joint_scale)


def dequantize_pages(
    stream: Paged, page_table_BN: Tensor, dtype: torch.dtype, *, heads_first: bool = False
) -> Tensor:
    """Return whole pages, dequantised: [B, L, H, D], or [B, H, L, D] where heads come first.

    Args:
        stream: Pages of one stream.
        page_table_BN: Int32 page ids.
        dtype: Of the values.
        heads_first: Whether heads come before tokens.

    Returns:
        A new tensor; see naive.py.
    """
    if stream.scale.is_cuda and triton_present():
        from nibble.kernels.append import triton as fast

        if fast.serves(stream):
            return fast.dequantize_pages(stream, page_table_BN, dtype, heads_first=heads_first)
    return naive.dequantize_pages(stream, page_table_BN, dtype, heads_first=heads_first)

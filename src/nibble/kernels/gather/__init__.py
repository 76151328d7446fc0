"""gather: whole pages of one stream, dequantised for backends that cannot read the stored format."""

from __future__ import annotations

import torch
from torch import Tensor

from nibble.kernels import triton_present
from nibble.kernels.gather import naive
from nibble.kernels.types import Paged


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
        from nibble.kernels.gather import triton as fast

        if fast.serves(stream):
            return fast.dequantize_pages(stream, page_table_BN, dtype, heads_first=heads_first)
    return naive.dequantize_pages(stream, page_table_BN, dtype, heads_first=heads_first)

"""Pages and tokens of one stream, dequantised by the book in torch.

Shape suffixes: P pages, H heads, S slots of a page, B requests, N pages of a request, L tokens (N * S), D values of a
head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nibble.formats.base import raw
from nibble.kernels.types import Paged


def dequantize_pages(
    stream: Paged, page_table_BN: Tensor, dtype: torch.dtype, *, heads_first: bool = False
) -> Tensor:
    """Return whole pages, dequantised.

    Args:
        stream: Pages of one stream.
        page_table_BN: Int32 page ids.
        dtype: Of the values.
        heads_first: Whether heads come before tokens.

    Returns:
        [B, L, H, D], or [B, H, L, D] where heads come first.
    """
    planes = tuple(_pages(plane, page_table_BN) for plane in stream.planes_PHS)
    scale = stream.scale.unsqueeze(-1) if stream.scale.dim() else stream.scale
    values_BHLD = stream.format.decode(planes, scale)
    return (values_BHLD if heads_first else values_BHLD.transpose(1, 2)).to(dtype).contiguous()


def dequantize_tokens(stream: Paged, slots: Tensor) -> Tensor:
    """Return single tokens: int64 slots [...], page * page_size + offset -> float32 [..., H, D]."""
    page, offset = slots // stream.page_size, slots % stream.page_size
    planes = tuple(raw(plane)[page, :, offset].view(plane.dtype) for plane in stream.planes_PHS)
    return stream.format.decode(planes, stream.scale)


def _pages(plane_PHS: Tensor, page_table_BN: Tensor) -> Tensor:
    """Return [B, H, L, ...] of a plane."""
    pages = raw(plane_PHS)[page_table_BN.long()]
    return pages.transpose(1, 2).flatten(2, 3).view(plane_PHS.dtype)

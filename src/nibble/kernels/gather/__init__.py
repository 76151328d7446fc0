"""gather: whole pages of one stream, dequantised into a plain dtype. What staging is made of.

Shape suffixes: P pages, H heads, S slots of a page, B requests, N pages of a request, L tokens (N * S), D values of a
head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nibble.formats.base import raw
from nibble.kernels import triton_present
from nibble.kernels.types import Paged


def dequantize_pages(
    stream: Paged, page_table_BN: Tensor, dtype: torch.dtype, *, heads_first: bool = False
) -> Tensor:
    """Pages page_table_BN (int32) -> values in `dtype`, [B, L, H, D], or [B, H, L, D] where heads come first."""
    if stream.scale.is_cuda and triton_present():
        from nibble.kernels.gather import triton as twin

        if twin.serves(stream):
            return twin.gather(stream, page_table_BN, dtype, heads_first=heads_first)
    return reference(stream, page_table_BN, dtype, heads_first=heads_first)


def reference(
    stream: Paged, page_table_BN: Tensor, dtype: torch.dtype, *, heads_first: bool = False
) -> Tensor:
    """The definition, in torch."""
    planes = tuple(_pages(plane, page_table_BN) for plane in stream.planes_PHS)
    values_BHLD = stream.format.decode(
        planes, stream.scale.unsqueeze(-1) if stream.scale.dim() else stream.scale
    )
    return (values_BHLD if heads_first else values_BHLD.transpose(1, 2)).to(dtype).contiguous()


def gather_tokens(stream: Paged, slots: Tensor) -> Tensor:
    """Single tokens: int64 slots [...], page * page_size + offset -> float32 [..., H, D]."""
    page, offset = slots // stream.page_size, slots % stream.page_size
    planes = tuple(raw(plane)[page, :, offset].view(plane.dtype) for plane in stream.planes_PHS)
    return stream.format.decode(planes, stream.scale)


def _pages(plane_PHS: Tensor, page_table_BN: Tensor) -> Tensor:
    """[B, H, L, ...] of a plane."""
    found = raw(plane_PHS)[page_table_BN.long()]
    return found.transpose(1, 2).flatten(2, 3).view(plane_PHS.dtype)

"""Triton kernel that dequantises pages in one launch, at the speed of memory.

Shape suffixes: B requests, N pages of a request, L tokens (N * page size), H heads, D values of a head, R tokens of a
program. Names in capitals are constants of a kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels.codecs import DECODERS
from nibble.kernels.codecs.tiles import (
    Tiles,
    decode_tile,
    global_scale,
    interleave,
    pages_of,
    read_scales,
    read_words,
    serves,
    slots_of,
)
from nibble.kernels.sizes import cdiv, next_power_of_2
from nibble.kernels.types import Paged

__all__ = ["dequantize_pages", "serves"]

TILE_VALUES = 4096
"""Values of a program's tile."""


@triton.jit(do_not_specialize=["length", "pages_stride"], do_not_specialize_on_alignment=["pages"])
def gather_kernel(
    tiles, pages, out, length, pages_stride, out_stride, head_stride, token_stride,
    DIM: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Dequantise R tokens of a head. Grid: tiles of tokens, heads, requests."""
    head, request = tl.program_id(1), tl.program_id(2).to(tl.int64)
    start, n_R = tl.program_id(0) * R, tl.arange(0, R)
    keep_R = start + n_R < length
    # --- load
    page = pages_of(pages + request * pages_stride, start, n_R, length, tiles.PAGE_SIZE)
    slot_R = slots_of(start, n_R, tiles.PAGE_SIZE)
    items = read_words(tiles, page, slot_R, head, keep_R, 1, True)
    scales = read_scales(tiles, page, slot_R, head, keep_R, 1, True)
    # --- decode
    values_RD = interleave(decode_tile(tiles, items, scales, 1), tiles.PARTS).to(tl.float32)
    values_RD *= global_scale(tiles, head)
    # --- store
    d = tl.arange(0, tiles.words.WIDTH * tiles.PARTS)[None, :]
    out += request * out_stride + head.to(tl.int64) * head_stride
    row_R = out + (start + n_R).to(tl.int64) * token_stride
    tl.store(row_R[:, None] + d, values_RD.to(out.dtype.element_ty), mask=keep_R[:, None] & (d < DIM))


def dequantize_pages(
    stream: Paged, page_table_BN: Tensor, dtype: torch.dtype, *, heads_first: bool = False
) -> Tensor:
    """Return whole pages, dequantised as naive.py defines it.

    Args:
        stream: Pages of one stream.
        page_table_BN: Int32 page ids.
        dtype: Of the values.
        heads_first: Whether heads come before tokens.

    Returns:
        [B, L, H, D], or [B, H, L, D] where heads come first.
    """
    # what words are decoded into holds every value exactly
    tiles = Tiles.of(stream, DECODERS[stream.format.name].half or torch.float32)
    (count, pages), heads, dim = page_table_BN.shape, stream.heads, stream.dim
    length = pages * stream.page_size
    inner = (heads, length) if heads_first else (length, heads)
    out = torch.empty(count, *inner, dim, dtype=dtype, device=page_table_BN.device)
    head_stride, token_stride = (length * dim, dim) if heads_first else (dim, heads * dim)
    rows = max(1, TILE_VALUES // next_power_of_2(dim))
    if out.numel():
        gather_kernel[(cdiv(length, rows), heads, count)](
            tiles, page_table_BN, out, length, page_table_BN.stride(0), length * heads * dim, head_stride, token_stride,
            dim, rows,
        )  # fmt: skip
    return out

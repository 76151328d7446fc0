"""Keys and values for prefill_sm90.cu, dequantised from the pages of several requests into one workspace, in Triton.

The workspace has tiles of KEYS tokens, each of one request; behind a request's tokens it has zeros, since what lies
there in a page may be NaN.

Shape suffixes: I tiles, N tokens of a tile, L tokens of the workspace (I * N), G KV heads, D values of a head. Names in
capitals are constants of a kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels.codecs import DECODERS, tiles
from nibble.kernels.launches import launches_of
from nibble.kernels.types import Paged

KEYS = 128
"""Tokens of a tile."""
WARPS = 8
"""Of a program."""


@triton.jit(do_not_specialize=["pages_stride"], do_not_specialize_on_alignment=["pages", "spans"])
def stage_kernel(k, v, pages, pages_stride, spans, out_k, out_v, DIM: tl.constexpr, N: tl.constexpr):
    """Dequantise a tile of a head's keys, or of its values. Grid: tiles, heads, 2.

    Args:
        k: Tiles of the keys.
        v: Tiles of the values.
        pages: Pointer to the page table.
        pages_stride: Of the table, from request to request.
        spans: Pointer to int32 [I, 4]: the row of the table, the first token, and where the request's tokens end.
        out_k: Pointer to [L, G, D].
        out_v: Likewise.
        DIM: D.
        N: Tokens of a tile.
    """
    span = spans + 4 * tl.program_id(0)
    table = pages + tl.load(span).to(tl.int64) * pages_stride
    if tl.program_id(2) == 0:
        _stage_tile(k, table, tl.load(span + 1), tl.load(span + 2), out_k, DIM, N)
    else:
        _stage_tile(v, table, tl.load(span + 1), tl.load(span + 2), out_v, DIM, N)


@triton.jit
def _stage_tile(stream, table, start, stop, out, DIM: tl.constexpr, N: tl.constexpr):
    """Dequantise tokens [start, start + N) of a head, with zeros from `stop` on."""
    head, n_N = tl.program_id(1), tl.arange(0, N)
    values_ND = tiles.dequantized(stream, table, start, n_N, stop, head)
    # --- store
    d = tl.arange(0, stream.items.WIDTH * stream.PARTS)[None, :]
    row_N = out + ((tl.program_id(0) * N + n_N).to(tl.int64) * tl.num_programs(1) + head) * DIM
    tl.store(row_N[:, None] + d, values_ND.to(out.dtype.element_ty), mask=d < DIM)


def stage(
    k: Paged, v: Paged, page_table_BN: Tensor, spans_I4: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the tokens of keys and of values, [L, G, D] each.

    Args:
        k: Pages of the keys.
        v: Pages of the values.
        page_table_BN: Int32 page ids.
        spans_I4: Int32: of each tile, the row of the table, the first token, where the request's tokens end, and 0. A
            tile begins at a multiple of KEYS.
        dtype: Of the result.
    """
    assert k.dim == v.dim, "keys and values are of one size here"
    count, device = spans_I4.shape[0], page_table_BN.device
    shape = count * KEYS, k.heads, k.dim
    out_k, out_v = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
    # What words are decoded into holds every value exactly.
    stored = (tiles.Tiles.of(x, DECODERS[x.format.name].half or torch.float32) for x in (k, v))
    arguments = (*stored, page_table_BN, page_table_BN.stride(0), spans_I4, out_k, out_v, k.dim, KEYS)
    launches_of(k, "stage")(stage_kernel, (count, k.heads, 2), (out_k, (id(v),)), arguments, num_warps=WARPS)
    return out_k, out_v

"""Encoders of rows that are one head: latents of multi-head latent attention, and index keys of sparse attention.

EXTENSION POINT: an entry of ROW_ENCODERS gives a format its fused append of latents or index keys, and lets rows of
other formats be moved into it. Owns Span, the argument through which a kernel receives where a part of a row goes, and
how a row is cut into parts. The functions follow the protocol of encoders.py. Must not know where values come from.

Shape suffixes: R rows, D values of a row, B blocks of a row, P pages, H heads, S slots of a page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction

from nibble.kernels.codecs.encoders import (
    ENCODERS,
    EXPONENT,
    MAX_E4M3,
    NAN_FP8,
    bits_of,
    blocks,
    float_of,
    magnitude,
    nearest,
    nvfp4,
    plain,
    rows,
)
from nibble.kernels.codecs.tiles import Plane
from nibble.kernels.sizes import next_power_of_2
from nibble.kernels.types import Paged

LEAST_LATENT, LEAST_INDEX = tl.constexpr(1e-4), tl.constexpr(1e-4 / 448.0)
MOST = tl.constexpr(2.0**118)


@triton.jit
def _scaled_e4m3(x_RBS, LEAST: tl.constexpr):
    """Codes in E4M3, and the scale of each block: amax / 448, up to a power of two. It is rounded up by its bits, and
    undone by its inverse: both are exact. NaN is kept in codes and scale, with the sign of a code that was NaN itself.
    """
    amax = tl.max(magnitude(x_RBS), 2, keep_dims=True)
    damaged = amax > EXPONENT
    ideal = tl.div_rn(float_of(tl.where(damaged, 0, amax)), tl.full(amax.shape, 448.0, tl.float32))
    bits = (bits_of(tl.minimum(tl.maximum(ideal, LEAST), MOST)) + 0x7FFFFF) & EXPONENT
    y_RD = rows(x_RBS * float_of((254 << 23) - bits))
    _, code = nearest(magnitude(y_RD), MAX_E4M3, 3, -6)
    lost = rows(tl.broadcast_to(damaged, x_RBS.shape))
    sign = (bits_of(y_RD) >> 24) & 0x80
    own = magnitude(y_RD) > EXPONENT
    code = tl.where(lost, NAN_FP8 | tl.where(own, sign, 0), code | sign)
    return code.to(tl.uint8), rows(float_of(tl.where(damaged, 0x7FC00000, bits)))


@triton.jit
def tiles_of_128(x_RD, scale_R1):
    return _scaled_e4m3(blocks(x_RD, 128), LEAST_LATENT)


@triton.jit
def whole_rows(x_RD, scale_R1):
    return _scaled_e4m3(blocks(x_RD, x_RD.shape[1]), LEAST_INDEX)


@dataclass(frozen=True, slots=True)
class RowEncoder:
    """encode: see encoders.py. block: values that share a scale; 0 where a whole row does. apart: whether rotary values
    are a plain plane of their own, the last.
    """

    encode: JITFunction
    block: int = 1
    apart: bool = False


ROW_ENCODERS: dict[str, RowEncoder] = {
    **{name: RowEncoder(ENCODERS[name]) for name in ("fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2")},
    **{name: RowEncoder(ENCODERS[name], 16) for name in ("nvfp4", "fp4_mx16")},
    "mxfp4": RowEncoder(ENCODERS["mxfp4"], 32),
    "fp8_ds_mla": RowEncoder(tiles_of_128, 128, apart=True),
    "nvfp4_ds_mla": RowEncoder(nvfp4, 16, apart=True),
    "index_fp8": RowEncoder(whole_rows, 0),
}
"""The encoder of each format whose rows can be written by themselves."""


class Span(NamedTuple):
    """Neighbouring values of a row, as they are stored. planes: those items of each plane that hold them. scale: the
    global one. FIRST, COUNT, WIDTH: which values, and to how many they are padded.
    """

    planes: tuple[Plane, ...]
    scale: Tensor
    ENCODE: Any
    FIRST: Any
    COUNT: Any
    WIDTH: Any
    PAGE_SIZE: Any


def writes(pages: Paged) -> bool:
    """Whether there is an encoder for rows of these pages."""
    encoder = ROW_ENCODERS.get(pages.format.name)
    if encoder is None or pages.heads != 1:
        return False
    if pages.planes_PHS[0].shape[0] * pages.page_size >= 1 << 31:
        return False
    return rank_of(pages) % max(encoder.block, 1) == 0 and all(
        plane.dim() == 3 or plane.stride(3) == 1 for plane in pages.planes_PHS
    )


def rank_of(pages: Paged) -> int:
    """How many values come before rotary ones that are stored apart."""
    apart = ROW_ENCODERS[pages.format.name].apart and len(pages.planes_PHS) > 2
    return pages.dim - pages.planes_PHS[-1].shape[3] if apart else pages.dim


def parts_of(first: int, stop: int, whole: bool) -> Iterator[tuple[int, int]]:
    """Values first..stop as (first, count), each of which fills most of the power of two that it is padded to."""
    while first < stop:
        count = stop - first
        below = 1 << count.bit_length() - 1
        if not whole and count <= below * 7 // 4:
            count = below
        yield first, count
        first += count


def parts(pages: Paged, *cuts: int) -> Iterator[tuple[int, int]]:
    """The parts of a row of `pages`, in order, as (first, count). cuts: where else a row must be cut."""
    whole = ROW_ENCODERS[pages.format.name].block == 0
    for start, stop in pairwise(sorted({0, *cuts, rank_of(pages), pages.dim})):
        yield from parts_of(start, stop, whole)


def span(pages: Paged, scale: Tensor, first: int, count: int) -> Span:
    """Values first..first + count of a row of `pages`."""
    encoder, rank = ROW_ENCODERS[pages.format.name], rank_of(pages)
    planes = tuple(map(_items, pages.planes_PHS))
    if first >= rank:
        encode, found = plain, [planes[-1][..., first - rank : first - rank + count]]
    else:
        encode = encoder.encode
        found = [_share(plane, rank, first, count) for plane in planes[: 2 if encoder.apart else None]]
    width = next_power_of_2(count)
    constants = map(tl.constexpr, (first, count, width, pages.page_size))
    return Span(tuple(Plane.of(plane, plane.shape[3]) for plane in found), scale, encode, *constants)


def _items(plane_PHS: Tensor) -> Tensor:
    """A plane with items in a row, in a dtype that Triton stores: one-byte floats as integers."""
    plane = plane_PHS if plane_PHS.dim() == 4 else plane_PHS.unsqueeze(-1)
    return plane.view(torch.uint8) if plane.dtype.itemsize == 1 else plane


def _share(plane: Tensor, rank: int, first: int, count: int) -> Tensor:
    """The items of a plane that belong to some of a row's values."""
    items = plane.shape[3]
    return plane[..., first * items // rank : (first + count) * items // rank]


@triton.jit
def put(span, x_RD, slot_R):
    """Stores values of a span, padded with zeros or not, in rows' slots (int64); nothing where negative."""
    keep_R = slot_R >= 0
    slot_R = slot_R.to(tl.uint32)
    page_R = (slot_R // span.PAGE_SIZE).to(tl.int64)
    offset_R = (slot_R % span.PAGE_SIZE).to(tl.int64)
    tiles = span.ENCODE(x_RD, tl.full([1, 1], tl.load(span.scale), tl.float32))
    for i in tl.static_range(len(span.planes)):
        plane = span.planes[i]
        item = tl.arange(0, tiles[i].shape[1])[None, :]
        at = plane.data + (page_R * plane.PAGE + offset_R * plane.SLOT)[:, None] + item
        tl.store(at, tiles[i], mask=keep_R[:, None] & (item < plane.COUNT))

"""Tiles: reading rows of a stream's pages inside a kernel, in the stream's own format.

Owns Tiles, the argument through which a kernel receives a stream, and how a token's row is found in its page. What the
words of a row mean is the decoders' business (decoders.py). Must not know of attention.

Shape suffixes: N rows (tokens of a head), W words of a row, B block scales of a row. A tile is [N, W], or [W, N] where
its AXIS, along which a row lies, is 0. Names in capitals are constants of a kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels.codecs.decoders import DECODERS
from nibble.kernels.sizes import next_power_of_2
from nibble.kernels.types import Paged

LEAST_WIDTH = 16
"""The least that a product of tiles sums over."""

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_INTEGERS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Plane(NamedTuple):
    """One plane: items of a row, the width to which they are padded, and the strides of page, head and slot."""

    data: Tensor
    COUNT: Any
    WIDTH: Any
    PAGE: Any
    HEAD: Any
    SLOT: Any

    @classmethod
    def of(cls, plane_PHS: Tensor, width: int) -> Plane:
        return cls(plane_PHS, *map(tl.constexpr, (plane_PHS.shape[3], width, *plane_PHS.stride()[:3])))


class Tiles(NamedTuple):
    """words, blocks: the planes. scale: the global one. EACH: block scales in an item of `blocks`, 0 where there are
    none. The rest is the decoder's (decoders.py).
    """

    words: Plane
    blocks: Plane
    scale: Tensor
    DECODE: Any
    DECODE_SCALE: Any
    SCALE_STRIDE: Any
    DTYPE: Any
    PARTS: Any
    FOLD: Any
    EACH: Any
    PAGE_SIZE: Any

    @classmethod
    def of(cls, stream: Paged, dtype: torch.dtype, *, copied: bool = False) -> Tiles:
        """The tiles of `stream`, decoded into `dtype`. Worked out once. copied: whether block scales are to be read by
        asynchronous copies, which are of 4 bytes at least; else a byte at a time.
        """
        known = _known.setdefault(stream, {})
        if (dtype, copied) not in known:
            known[dtype, copied] = cls._of(stream, dtype, copied)
        return known[dtype, copied]

    @classmethod
    def _of(cls, stream: Paged, dtype: torch.dtype, copied: bool) -> Tiles:
        decoder = DECODERS[stream.format.name]
        data = stream.planes_PHS[0].view(torch.int16) if decoder.parts > 1 else stream.planes_PHS[0]
        width = max(next_power_of_2(data.shape[3]), LEAST_WIDTH)
        words, blocks, each = Plane.of(data, width), Plane.of(data, width), 0
        if decoder.block:
            scales = _widened(stream.planes_PHS[1]) if copied else stream.planes_PHS[1].view(torch.uint8)
            each = scales.dtype.itemsize
            blocks = Plane.of(scales, width * decoder.parts // decoder.block // each)
        per_head = stream.scale.stride(0) if stream.scale.dim() else 0
        constants = per_head, _DTYPES[dtype], decoder.parts, decoder.fold, each, stream.page_size
        # Functions go bare: only so does the compiler's cache notice that they were edited.
        return cls(words, blocks, stream.scale, decoder.decode, decoder.scale, *map(tl.constexpr, constants))


_known: WeakKeyDictionary[Paged, dict[tuple[torch.dtype, bool], Tiles]] = WeakKeyDictionary()


def serves(stream: Paged) -> bool:
    """Whether there is a decoder for the stream."""
    decoder = DECODERS.get(stream.format.name)
    return decoder is not None and decoder.serves(stream.dim)


def _widened(plane_PHS: Tensor) -> Tensor:
    """Bytes as the widest integers that rows are made of."""
    sizes = plane_PHS.shape[3], *plane_PHS.stride()[:3]
    size = next(size for size in _INTEGERS if all(x % size == 0 for x in sizes))
    return plane_PHS.view(_INTEGERS[size])


@triton.jit
def pages_of(table, start, n_N, stop, PAGE_SIZE: tl.constexpr):
    """Page ids of tokens start + n_N that come before `stop`. Start is a multiple of their count: where that fits into
    a page, one id stands for all.
    """
    if PAGE_SIZE % n_N.shape[0] == 0:
        page = tl.load(table + start // PAGE_SIZE, mask=start < stop, other=0)
    else:
        page = tl.load(table + (start + n_N) // PAGE_SIZE, mask=start + n_N < stop, other=0)
    return page.to(tl.int64)


@triton.jit
def slots_of(start, n_N, PAGE_SIZE: tl.constexpr):
    """Where in their pages tokens start + n_N lie."""
    if PAGE_SIZE % n_N.shape[0] == 0:
        slot_N = start - start // PAGE_SIZE * PAGE_SIZE + n_N
    else:
        slot_N = (start + n_N) % PAGE_SIZE
    return slot_N


@triton.jit
def _rows(plane, page, slot_N, head, keep_N, AXIS: tl.constexpr, MASKED: tl.constexpr):
    """Rows of a head, padded with zeros. If MASKED, those that are not kept are zeros."""
    row_N = plane.data + (page * plane.PAGE + head * plane.HEAD) + slot_N * plane.SLOT
    item = tl.expand_dims(tl.arange(0, plane.WIDTH), 1 - AXIS)
    at = tl.expand_dims(row_N, AXIS) + item
    keep = tl.broadcast_to(item < plane.COUNT, at.shape)
    if MASKED:
        keep &= tl.expand_dims(keep_N, AXIS)
    return tl.load(at, mask=keep, other=0) if MASKED or plane.COUNT != plane.WIDTH else tl.load(at)


@triton.jit
def read_words(tiles, page, slot_N, head, keep_N, AXIS: tl.constexpr, MASKED: tl.constexpr):
    return _rows(tiles.words, page, slot_N, head, keep_N, AXIS, MASKED)


@triton.jit
def read_scales(tiles, page, slot_N, head, keep_N, AXIS: tl.constexpr, MASKED: tl.constexpr):
    """Block scales of rows, decoded: [N, B] or [B, N]; 0 where the format has none."""
    scales = 0
    if tiles.EACH:
        codes = _rows(tiles.blocks, page, slot_N, head, keep_N, AXIS, MASKED)
        scales = tiles.DECODE_SCALE(_bytes(codes, tiles.EACH, AXIS), tiles.DTYPE)
    return scales


@triton.jit
def _bytes(items, EACH: tl.constexpr, AXIS: tl.constexpr):
    """The bytes of integers, along AXIS."""
    if EACH == 1:
        codes = items
    elif AXIS == 0:
        split = items[:, None, :] >> (8 * tl.arange(0, EACH))[None, :, None]
        codes = tl.reshape(split, [items.shape[0] * EACH, items.shape[1]])
    else:
        split = items[:, :, None] >> (8 * tl.arange(0, EACH))[None, None, :]
        codes = tl.reshape(split, [items.shape[0], items.shape[1] * EACH])
    return codes.to(tl.uint8)


@triton.jit
def decoded(tiles, words, scales, AXIS: tl.constexpr):
    """Words and their block scales -> a tuple of PARTS tiles of values, but for the global scale."""
    wide = scales
    if tiles.EACH:
        wide = _spread(scales, words.shape, AXIS)
    return tiles.DECODE(words, wide, tiles.DTYPE)


@triton.jit
def _spread(scales, LIKE: tl.constexpr, AXIS: tl.constexpr):
    """Block scales along AXIS, each repeated for the words that share it -> a tile of shape LIKE."""
    EACH: tl.constexpr = LIKE[AXIS] // scales.shape[AXIS]
    if AXIS == 0:
        wide = tl.broadcast_to(scales[:, None, :], [scales.shape[0], EACH, scales.shape[1]])
    else:
        wide = tl.broadcast_to(scales[:, :, None], [scales.shape[0], scales.shape[1], EACH])
    return tl.reshape(wide, LIKE)


@triton.jit
def interleaved(parts, PARTS: tl.constexpr):
    """Parts [N, W] -> the rows' values in order, [N, W * PARTS]."""
    if PARTS == 1:
        joined = parts[0]
    elif PARTS == 2:
        joined = tl.join(parts[0], parts[1])
    else:
        joined = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))
    return tl.reshape(joined, [parts[0].shape[0], parts[0].shape[1] * PARTS])


@triton.jit
def global_scale(tiles, head):
    """What decoded values of a head are still to be multiplied by."""
    return tl.load(tiles.scale + head * tiles.SCALE_STRIDE) * tiles.FOLD

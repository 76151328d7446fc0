"""Read and write a stream's pages inside a kernel, in the stream's own format.

A kernel receives a stream as Tiles (heads), as two Sections (the latent proper and its rotary values), or as IndexKeys.
What it writes, latents and index keys, it receives as Spans: a row is cut into some, each of which goes to the format's
encoder by itself. All of them name functions of the format's codec, so that no kernel names a format. Planes may have
any strides, so columns of records are served too.

Shape suffixes: P pages, H heads, S slots of a page, N rows (tokens of a head), W words of a row, B block scales of a
row. A tile is [N, W], or [W, N] where its AXIS, along which a row lies, is 0. Names in capitals are constants of a
kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import wraps
from itertools import pairwise
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels import next_power_of_2
from nibble.kernels.codecs import DECODERS, INDEX_KEYS, LATENTS, ROW_ENCODERS, plain
from nibble.kernels.codecs.base import Decoder
from nibble.kernels.types import Paged

MIN_WIDTH = 16
"""The least that a product of tiles sums over."""
NO_ROPE, ALIKE, APART = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Rotary values: none, in the latent's own format and scale, or plain values in a plane of their own."""

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_INTEGERS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}

_P = ParamSpec("_P")
_T = TypeVar("_T")
_memo: WeakKeyDictionary[Paged, dict[Hashable, Any]] = WeakKeyDictionary()


def once_per_stream(make: Callable[Concatenate[Paged, _P], _T]) -> Callable[Concatenate[Paged, _P], _T]:
    """Keep what a function returns for a stream as long as the stream lives: launches must not wait for it."""

    @wraps(make)
    def of_memo(stream: Paged, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        memo, key = _memo.setdefault(stream, {}), (make, *args, *kwargs.items())
        if key not in memo:
            memo[key] = make(stream, *args, **kwargs)
        return cast(_T, memo[key])

    return of_memo


# ---- arguments of kernels --------------------------------------------------------------------------------------------


class Plane(NamedTuple):
    """One plane of a format, as a kernel's argument."""

    data: Tensor
    COUNT: Any
    """Items of a row."""
    WIDTH: Any
    """Items to which a row is padded."""
    PAGE: Any
    """Stride from page to page; HEAD and SLOT likewise."""
    HEAD: Any
    SLOT: Any

    @classmethod
    def of(cls, plane_PHS: Tensor, width: int) -> Plane:
        """Return a plane whose rows are padded to `width` items."""
        return cls(plane_PHS, *map(tl.constexpr, (plane_PHS.shape[3], width, *plane_PHS.stride()[:3])))


class Tiles(NamedTuple):
    """A stream of heads, as a kernel's argument."""

    items: Plane
    blocks: Plane
    """Block scales; the words again where there are none."""
    scale: Tensor
    """The global one."""
    DECODE: Any
    """What the decoder (base.py) says, from here to FOLD."""
    DECODE_SCALE: Any
    SCALE_STRIDE: Any
    """Of the global scale, from head to head."""
    DTYPE: Any
    """What words are decoded into."""
    PARTS: Any
    FOLD: Any
    EACH: Any
    """Block scales in an item of `blocks`, 0 where there are none."""
    PAGE_SIZE: Any

    @staticmethod
    @once_per_stream
    def of(stream: Paged, dtype: torch.dtype, *, copied: bool = False) -> Tiles:
        """Return the tiles of a stream.

        Args:
            stream: Pages of heads.
            dtype: What they are decoded into.
            copied: Whether block scales are to be read by asynchronous copies, which are of 4 bytes at least; else a
                byte at a time.

        Returns:
            A kernel's argument.
        """
        decoder = DECODERS[stream.format.name]
        data = _items(stream, decoder)
        width = max(next_power_of_2(data.shape[3]), MIN_WIDTH)
        items, blocks, each = Plane.of(data, width), Plane.of(data, width), 0
        if decoder.block:
            scales = _widened(stream.planes_PHS[1]) if copied else stream.planes_PHS[1].view(torch.uint8)
            each = scales.dtype.itemsize
            blocks = Plane.of(scales, width * decoder.parts // decoder.block // each)
        per_head = stream.scale.stride(0) if stream.scale.dim() else 0
        constants = per_head, _DTYPES[dtype], decoder.parts, decoder.fold, each, stream.page_size
        # Functions go bare: only so does the compiler's cache notice that they were edited.
        return Tiles(
            items, blocks, stream.scale, decoder.decode, decoder.scale, *map(tl.constexpr, constants)
        )


class Section(NamedTuple):
    """Neighbouring values of a latent, as a kernel's argument. Fields are those of Tiles."""

    items: Plane
    blocks: Plane
    DECODE: Any
    DECODE_SCALE: Any
    DTYPE: Any
    PARTS: Any
    EACH: Any
    PAGE_SIZE: Any

    @classmethod
    def of(cls, data: Tensor, scales: Tensor | None, decoder: Decoder, dtype: torch.dtype) -> Section:
        """Return a section.

        Args:
            data: The plane of the section's words alone.
            scales: The plane of its block scales alone, if there are any.
            decoder: How words become values.
            dtype: What they are decoded into.

        Returns:
            A kernel's argument.
        """
        width = max(next_power_of_2(data.shape[3]), MIN_WIDTH)
        items = blocks = Plane.of(data, width)
        if scales is not None:
            blocks = Plane.of(scales, width * decoder.parts // decoder.block)
        constants = _DTYPES[dtype], decoder.parts, int(scales is not None), data.shape[2]
        return cls(items, blocks, decoder.decode, decoder.scale, *map(tl.constexpr, constants))

    @classmethod
    def of_values(
        cls, latents: Paged, decoder: Decoder, first: int, count: int, dtype: torch.dtype
    ) -> Section:
        """Return values first..first + count of the first plane, which are whole words and blocks.

        Args:
            latents: Pages of latents.
            decoder: How words become values.
            first: The first value of a row.
            count: How many there are.
            dtype: What they are decoded into.

        Returns:
            A kernel's argument.
        """
        items = _items(latents, decoder)[..., first // decoder.parts : (first + count) // decoder.parts]
        if not decoder.block:
            return cls.of(items, None, decoder, dtype)
        scales = latents.planes_PHS[1][..., first // decoder.block : (first + count) // decoder.block]
        scales = scales.view(torch.uint8) if scales.dtype.itemsize == 1 else scales
        return cls.of(items, scales, decoder, dtype)


class IndexKeys(NamedTuple):
    """Index keys, as a kernel's argument. DECODE gives PARTS tiles of DTYPE."""

    items: Plane
    scales: Plane
    """Scales of keys, if SCALED; else the words again."""
    DECODE: Any
    DTYPE: Any
    PARTS: Any
    SCALED: Any
    PAGE_SIZE: Any

    @staticmethod
    @once_per_stream
    def of(keys: Paged, dtype: torch.dtype, *, as_bytes: bool = False) -> IndexKeys:
        """Return the keys of a stream.

        Args:
            keys: Pages of index keys.
            dtype: What they are decoded into.
            as_bytes: Whether words are of one byte.

        Returns:
            A kernel's argument.
        """
        kind, data = INDEX_KEYS[keys.format.name], keys.planes_PHS[0]
        if kind.decoder.parts > 1:
            data = data.view(torch.uint8 if as_bytes else torch.int16)
        items = Plane.of(data, max(next_power_of_2(data.shape[3]), MIN_WIDTH))
        scales = Plane.of(keys.planes_PHS[1].unsqueeze(3), 1) if kind.scaled else items
        constants = _DTYPES[dtype], kind.decoder.parts, kind.scaled, keys.page_size
        return IndexKeys(items, scales, kind.decoder.decode, *map(tl.constexpr, constants))


def serves(stream: Paged) -> bool:
    """Return whether there is a decoder for a stream of heads."""
    decoder = DECODERS.get(stream.format.name)
    return decoder is not None and decoder.serves(stream.dim) and not stream.interleave


def serves_latents(latents: Paged, rope: int) -> bool:
    """Return whether there is a decoder for the latents, and both their sections are whole words and blocks."""
    kind = LATENTS.get(latents.format.name)
    if kind is None or latents.heads != 1:
        return False
    return kind.decoder.serves(latents.dim - rope) and (kind.rope_apart or kind.decoder.serves(rope))


def serves_index_keys(keys: Paged) -> bool:
    """Return whether there is a decoder for the index keys."""
    kind = INDEX_KEYS.get(keys.format.name)
    if kind is None or keys.heads != 1 or not kind.decoder.serves(keys.dim):
        return False
    plane = keys.planes_PHS[0]
    places = plane.storage_offset(), *plane.stride()[:3]
    return plane.itemsize > 1 or all(x % 2 == 0 for x in places)  # bytes are read as words of two


@once_per_stream
def sections(latents: Paged, rope: int, query: torch.dtype) -> tuple[Section, Section, int]:
    """Cut latents into their sections.

    Args:
        latents: Pages of latents.
        rope: Rotary values at the end of each.
        query: The query's dtype.

    Returns:
        The latent proper, its rotary values, and which kind these are: NO_ROPE, ALIKE or APART.
    """
    kind, rank = LATENTS[latents.format.name], latents.dim - rope
    decoder = kind.decoder
    dtype = query if decoder.half is None or query == torch.float32 else decoder.half
    proper = Section.of_values(latents, decoder, 0, rank, dtype)
    if not rope:
        return proper, proper, NO_ROPE.value
    if kind.rope_apart:
        return proper, Section.of(latents.planes_PHS[2], None, plain.DECODER, query), APART.value
    return proper, Section.of_values(latents, decoder, rank, rope, dtype), ALIKE.value


def _items(stream: Paged, decoder: Decoder) -> Tensor:
    """Return the plane of values as what the decoder reads."""
    data = stream.planes_PHS[0]
    return data.view(torch.int16) if decoder.parts > 1 else data


def _widened(plane_PHS: Tensor) -> Tensor:
    """Return bytes as the widest integers that rows are made of."""
    sizes = plane_PHS.shape[3], *plane_PHS.stride()[:3]
    size = next(size for size in _INTEGERS if all(x % size == 0 for x in sizes))
    return plane_PHS.view(_INTEGERS[size])


# ---- inside kernels --------------------------------------------------------------------------------------------------


@triton.jit
def pages_of(table, start, n_N, stop, PAGE_SIZE: tl.constexpr):
    """Load the page ids of tokens start + n_N that come before `stop`; start is a multiple of their count."""
    if PAGE_SIZE % n_N.shape[0] == 0:  # all lie in one page
        page = tl.load(table + start // PAGE_SIZE, mask=start < stop, other=0)
    else:
        page = tl.load(table + (start + n_N) // PAGE_SIZE, mask=start + n_N < stop, other=0)
    # A page times its stride can exceed 32 bits.
    return page.to(tl.int64)


@triton.jit
def slots_of(start, n_N, PAGE_SIZE: tl.constexpr):
    """Return where in their pages tokens start + n_N lie."""
    if PAGE_SIZE % n_N.shape[0] == 0:
        # All tokens are in one page, so one division serves them all.
        slot_N = start - start // PAGE_SIZE * PAGE_SIZE + n_N
    else:
        slot_N = (start + n_N) % PAGE_SIZE
    return slot_N


@triton.jit
def read_rows(plane, page, slot_N, head, keep_N, AXIS: tl.constexpr, MASKED: tl.constexpr):
    """Load rows of a head, padded with zeros.

    Args:
        plane: A Plane.
        page: The page of all rows, or of each.
        slot_N: Their slots.
        head: The head.
        keep_N: Which rows there are; if MASKED, the others are zeros.
        AXIS: Along which a row lies.
        MASKED: Whether some rows may be missing.

    Returns:
        [N, WIDTH], or [WIDTH, N] where AXIS is 0.
    """
    row_N = plane.data + (page * plane.PAGE + head * plane.HEAD) + slot_N * plane.SLOT
    item = tl.expand_dims(tl.arange(0, plane.WIDTH), 1 - AXIS)
    at = tl.expand_dims(row_N, AXIS) + item
    keep = tl.broadcast_to(item < plane.COUNT, at.shape)
    if MASKED:
        keep &= tl.expand_dims(keep_N, AXIS)
    return tl.load(at, mask=keep, other=0) if MASKED or plane.COUNT != plane.WIDTH else tl.load(at)


@triton.jit
def read_words(tiles, page, slot_N, head, keep_N, AXIS: tl.constexpr, MASKED: tl.constexpr):
    """Load the words of rows; arguments are those of read_rows."""
    return read_rows(tiles.items, page, slot_N, head, keep_N, AXIS, MASKED)


@triton.jit
def read_scales(tiles, page, slot_N, head, keep_N, AXIS: tl.constexpr, MASKED: tl.constexpr):
    """Load the block scales of rows, decoded: [N, B] or [B, N]; 0 where the format has none."""
    scales = 0
    if tiles.EACH:
        codes = read_rows(tiles.blocks, page, slot_N, head, keep_N, AXIS, MASKED)
        scales = tiles.DECODE_SCALE(_bytes(codes, tiles.EACH, AXIS), tiles.DTYPE)
    return scales


@triton.jit
def read_section(section, page, slot_N, keep_N, MASKED: tl.constexpr):
    """Load the words of latents, and their block scales, decoded before they are spread; 0 where there are none."""
    scales = 0
    if section.EACH:
        codes = read_rows(section.blocks, page, slot_N, 0, keep_N, 1, MASKED)
        scales = section.DECODE_SCALE(codes, section.DTYPE)
    return read_rows(section.items, page, slot_N, 0, keep_N, 1, MASKED), scales


@triton.jit
def read_key_scales(keys, page, slot_N, keep_N):
    """Load the scales of index keys that are SCALED."""
    at_N = keys.scales.data + page * keys.scales.PAGE + slot_N * keys.scales.SLOT
    return tl.load(at_N, mask=keep_N, other=0.0)


@triton.jit
def _bytes(items, EACH: tl.constexpr, AXIS: tl.constexpr):
    """Return the bytes of integers, along AXIS."""
    if EACH == 1:
        codes = items
    elif AXIS == 0:
        # The lowest byte of an integer comes first in memory.
        split = items[:, None, :] >> (8 * tl.arange(0, EACH))[None, :, None]
        codes = tl.reshape(split, [items.shape[0] * EACH, items.shape[1]])
    else:
        split = items[:, :, None] >> (8 * tl.arange(0, EACH))[None, None, :]
        codes = tl.reshape(split, [items.shape[0], items.shape[1] * EACH])
    return codes.to(tl.uint8)


@triton.jit
def decode_tile(tiles, items, scales, AXIS: tl.constexpr):
    """Decode words and their block scales -> a tuple of PARTS tiles of values, but for the global scale."""
    wide = scales
    if tiles.EACH:
        wide = _spread(scales, items.shape, AXIS)
    return tiles.DECODE(items, wide, tiles.DTYPE)


@triton.jit
def _spread(scales, LIKE: tl.constexpr, AXIS: tl.constexpr):
    """Repeat block scales along AXIS for the words that share them -> a tile of shape LIKE."""
    EACH: tl.constexpr = LIKE[AXIS] // scales.shape[AXIS]
    if AXIS == 0:
        wide = tl.broadcast_to(scales[:, None, :], [scales.shape[0], EACH, scales.shape[1]])
    else:
        wide = tl.broadcast_to(scales[:, :, None], [scales.shape[0], scales.shape[1], EACH])
    return tl.reshape(wide, LIKE)


@triton.jit
def interleave(parts, PARTS: tl.constexpr):
    """Interleave parts [N, W] -> the rows' values in order, [N, W * PARTS]."""
    if PARTS == 1:
        joined = parts[0]
    elif PARTS == 2:
        joined = tl.join(parts[0], parts[1])
    else:
        # Each join() adds a last dimension, so parts 0 and 1 become neighbours, with 2 and 3 after them.
        joined = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))
    return tl.reshape(joined, [parts[0].shape[0], parts[0].shape[1] * PARTS])


@triton.jit
def dequantized(tiles, table, start, n_N, stop, head):
    """Load and decode tokens start + n_N of a head, by the page table of their request -> float32 [N, values].

    Rows are padded as words are; tokens from `stop` on are zeros.
    """
    keep_N = start + n_N < stop
    page = pages_of(table, start, n_N, stop, tiles.PAGE_SIZE)
    slot_N = slots_of(start, n_N, tiles.PAGE_SIZE)
    items = read_words(tiles, page, slot_N, head, keep_N, 1, True)
    scales = read_scales(tiles, page, slot_N, head, keep_N, 1, True)
    values_ND = interleave(decode_tile(tiles, items, scales, 1), tiles.PARTS).to(tl.float32)
    return values_ND * global_scale(tiles, head)


@triton.jit
def global_scale(tiles, head):
    """Load what decoded values of a head are still to be multiplied by."""
    return tl.load(tiles.scale + head * tiles.SCALE_STRIDE) * tiles.FOLD


class Span(NamedTuple):
    """Neighbouring values of a row, as they are stored: a kernel's argument."""

    planes: tuple[Plane, ...]
    """Those items of each plane that hold them."""
    scale: Tensor
    """The global one."""
    ENCODE: Any
    FIRST: Any
    """Which values, COUNT of them, padded to WIDTH."""
    COUNT: Any
    WIDTH: Any
    PAGE_SIZE: Any


def serves_rows(pages: Paged) -> bool:
    """Return whether there is an encoder for rows of these pages."""
    encoder = ROW_ENCODERS.get(pages.format.name)
    if encoder is None or pages.format.encoder not in encoder.encoders or pages.heads != 1:
        return False
    if pages.planes_PHS[0].shape[0] * pages.page_size >= 1 << 31:  # slots are unsigned numbers of 32 bits
        return False
    return rank_of(pages) % max(encoder.block, 1) == 0 and all(
        plane.dim() == 3 or plane.stride(3) == 1 for plane in pages.planes_PHS
    )


def rank_of(pages: Paged) -> int:
    """Return how many values come before rotary ones that are stored apart."""
    apart = ROW_ENCODERS[pages.format.name].rope_apart and len(pages.planes_PHS) > 2
    return pages.dim - pages.planes_PHS[-1].shape[3] if apart else pages.dim


def cut(first: int, stop: int, undivided: bool) -> Iterator[tuple[int, int]]:
    """Cut values first..stop into spans, each of which fills most of the power of two that it is padded to.

    Args:
        first: The first value.
        stop: The end of the values.
        undivided: Whether all of them are one span.

    Yields:
        The first value of a span, and how many it has.
    """
    while first < stop:
        count = stop - first
        below = 1 << count.bit_length() - 1
        # What fills 7/8 of its power of two or less is cut at the power of two below.
        if not undivided and count <= below * 7 // 4:
            count = below
        yield first, count
        first += count


def spans_of(pages: Paged, *cuts: int) -> Iterator[tuple[int, int]]:
    """Yield the spans of a row of `pages`, in order, as (first, count). cuts: where else a row must be cut."""
    undivided = ROW_ENCODERS[pages.format.name].block == 0
    for start, stop in pairwise(sorted({0, *cuts, rank_of(pages), pages.dim})):
        yield from cut(start, stop, undivided)


def span(pages: Paged, scale: Tensor, first: int, count: int) -> Span:
    """Return a kernel's argument for values first..first + count of a row.

    Args:
        pages: Where rows are stored.
        scale: Their global scale, on the device of the kernel.
        first: The first value.
        count: How many there are.

    Returns:
        The span.
    """
    encoder, rank = ROW_ENCODERS[pages.format.name], rank_of(pages)
    planes = tuple(map(_span_items, pages.planes_PHS))
    if first >= rank:
        encode, parts = plain.encode, [planes[-1][..., first - rank : first - rank + count]]
    else:
        encode, parts = encoder.encoders[pages.format.encoder], []
        for plane in planes[: 2 if encoder.rope_apart else None]:
            items = plane.shape[3]
            parts.append(plane[..., first * items // rank : (first + count) * items // rank])
    constants = map(tl.constexpr, (first, count, next_power_of_2(count), pages.page_size))
    return Span(tuple(Plane.of(plane, plane.shape[3]) for plane in parts), scale, encode, *constants)


def _span_items(plane_PHS: Tensor) -> Tensor:
    """Return a plane with items in a row, in a dtype that Triton stores: one-byte floats as integers."""
    plane = plane_PHS if plane_PHS.dim() == 4 else plane_PHS.unsqueeze(-1)
    return plane.view(torch.uint8) if plane.dtype.itemsize == 1 else plane


@triton.jit
def store_span(span, x_RD, slot_R):
    """Encode and store values of a span in rows' slots (int64); nothing where negative. Padding may hold anything."""
    keep_R = slot_R >= 0
    # 32 bits divide faster; offsets into a pool need 64.
    slot_R = slot_R.to(tl.uint32)
    page_R = (slot_R // span.PAGE_SIZE).to(tl.int64)
    offset_R = (slot_R % span.PAGE_SIZE).to(tl.int64)
    tiles = span.ENCODE(x_RD, tl.full([1, 1], tl.load(span.scale), tl.float32))
    for i in tl.static_range(len(span.planes)):
        plane = span.planes[i]
        item = tl.arange(0, tiles[i].shape[1])[None, :]
        at = plane.data + (page_R * plane.PAGE + offset_R * plane.SLOT)[:, None] + item
        tl.store(at, tiles[i], mask=keep_R[:, None] & (item < plane.COUNT))

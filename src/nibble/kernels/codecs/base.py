"""What a codec provides for its format: encoders and decoders for Triton, and traits for CUDA C++.

An encoder is a `@triton.jit` function (x_RD, scale_R1) -> one [R, W] tile per plane, in the plane's order: x_RD in
float32, scale_R1 the format's global scale of each row. Bytes are returned as integers.

A decoder is a `@triton.jit` function (items, scale, DTYPE) -> a tuple of `parts` tiles of the items' shape. A packed
format is read in items of 16 bits, each of which holds `parts` values of a row: 4 of E2M1, 2 of FP8. Part j has the
values j, j + parts, j + 2 * parts... of the row. A sum over a row is a sum over its parts, so attention permutes the
query once instead of interleaving every tile. Two neighbouring items stand in one register wherever the tile came
from, and PTX decodes both at once (ptx.py).

Block scales are decoded apart, by a function (codes, DTYPE), before they are spread over the items that share them.
What is common to a whole stream stays off the element path: the global scale, and a power of two (`fold`) by which
decoded values are too small. Nothing needs FP8 instructions, which GPUs before SM89 lack.

Shape suffixes: R rows, D values of a row, B blocks of a row, W values of a plane's row.

Writing rows that are one head inside a kernel: latents of multi-head latent attention, and index keys.

A row is cut into spans, each of which goes to the format's encoder by itself. A kernel receives where a span goes as a
Span. Planes may have any strides, so columns of records are served too.

Shape suffixes: R rows, D values of a row, P pages, H heads, S slots of a page.
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

from nibble.kernels.codecs import ROW_ENCODERS
from nibble.kernels.codecs.plain import encode as encode_plain
from nibble.kernels.codecs.tiles import Plane
from nibble.kernels.sizes import next_power_of_2
from nibble.kernels.types import Paged


@triton.jit
def no_scale(codes, DTYPE: tl.constexpr):
    """Stand for the block scales of a format that has none."""
    return codes


@dataclass(frozen=True, slots=True)
class Decoder:
    """How stored items become values."""

    decode: JITFunction
    """(items, scale, DTYPE) -> `parts` tiles. Items are int16, or the plane's own values where parts is 1."""
    scale: JITFunction = no_scale
    """(codes, DTYPE) -> block scales for `decode`, which gets them in the items' shape."""
    parts: int = 1
    block: int = 0
    """Values that share a block scale, 0 for none."""
    fold: float = 1.0
    """What decoded values must still be multiplied by."""
    half: torch.dtype | None = None
    """The dtype that decodes with the least work, if any, and holds every value exactly."""

    def serves(self, dim: int) -> bool:
        """Return whether rows of `dim` values are whole items and blocks."""
        return dim % self.parts == 0 and dim % max(self.block, 1) == 0


@dataclass(frozen=True, slots=True)
class LatentDecoder:
    """How latents become values: the latent proper, and its rotary values."""

    decoder: Decoder
    """Of the latent proper."""
    rope_apart: bool = False
    """Whether rotary values are a plain plane of their own, the last; else they are stored as the latent is."""


@dataclass(frozen=True, slots=True)
class IndexDecoder:
    """How index keys become values. A key's own scale is positive, so it multiplies the key's score instead."""

    decoder: Decoder
    scaled: bool = False
    """Whether the last plane is a float32 scale of each key."""
    bytes: bool = False
    """Whether a key is 8-bit floats that indexer/gluon_sm90.py can convert."""


@dataclass(frozen=True, slots=True)
class RowEncoder:
    """How values of one row (a latent, an index key) become stored bytes."""

    encode: JITFunction
    block: int = 1
    """Values that share a scale; 0 where a whole row does."""
    rope_apart: bool = False
    """Whether rotary values are a plain plane of their own, the last."""


@dataclass(frozen=True, slots=True)
class CudaFormat:
    """How attention/decode.cu names a format, and the sizes that its launch needs."""

    name: str
    bits: int
    """Of a value."""
    block: int = 0
    """Values that share a block scale of one byte, 0 for none."""

    def token_bytes(self, dim: int) -> int:
        """Return the bytes of a token's head."""
        return dim * self.bits // 8 + (dim // self.block if self.block else 0)


RANK, ROPE, HEADS, TILE = 512, 64, 16, 64
"""Of the MLA kernels in CUDA C++: values and rotary values of a latent, query heads, and latents of a tile."""
LENGTH_BYTES = 4
"""Bytes of shared memory for each request, and one more."""


@dataclass(frozen=True, slots=True)
class CudaLatent:
    """Which MLA kernel in CUDA C++ reads a format, and how it is compiled and launched."""

    source: str
    """A file in kernels/mla/."""
    macros: tuple[tuple[str, int], ...]
    threads: int
    """Of a block."""
    shared: int
    """Bytes of its dynamic shared memory, but for what a batch takes."""
    in_runs: bool = False
    """Whether it fetches tokens in runs."""

    def shared_bytes(self, batch: int) -> int:
        """Return the bytes of dynamic shared memory of a block, for so many requests."""
        return self.shared + LENGTH_BYTES * (batch + 1)


@dataclass(frozen=True, slots=True)
class Codec:
    """What kernels know of one format; None where they do not serve it."""

    encode: JITFunction | None = None
    """Writes heads."""
    decoder: Decoder | None = None
    """Reads heads."""
    row: RowEncoder | None = None
    """Writes latents and index keys."""
    latent: LatentDecoder | None = None
    """Reads latents."""
    index: IndexDecoder | None = None
    """Reads index keys."""
    cuda: CudaFormat | None = None
    """Reads heads in CUDA C++."""
    cuda_latent: CudaLatent | None = None
    """Reads latents in CUDA C++."""


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
    if encoder is None or pages.heads != 1:
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
    planes = tuple(map(_items, pages.planes_PHS))
    if first >= rank:
        encode, parts = encode_plain, [planes[-1][..., first - rank : first - rank + count]]
    else:
        encode = encoder.encode
        parts = [_share(plane, rank, first, count) for plane in planes[: 2 if encoder.rope_apart else None]]
    width = next_power_of_2(count)
    constants = map(tl.constexpr, (first, count, width, pages.page_size))
    return Span(tuple(Plane.of(plane, plane.shape[3]) for plane in parts), scale, encode, *constants)


def _items(plane_PHS: Tensor) -> Tensor:
    """Return a plane with items in a row, in a dtype that Triton stores: one-byte floats as integers."""
    plane = plane_PHS if plane_PHS.dim() == 4 else plane_PHS.unsqueeze(-1)
    return plane.view(torch.uint8) if plane.dtype.itemsize == 1 else plane


def _share(plane: Tensor, rank: int, first: int, count: int) -> Tensor:
    """Return the items of a plane that belong to some of a row's values."""
    items = plane.shape[3]
    return plane[..., first * items // rank : (first + count) * items // rank]


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

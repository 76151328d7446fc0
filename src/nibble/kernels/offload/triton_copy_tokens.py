"""Triton twin of kernels/offload/copy_tokens.py: one launch, whose reads saturate the link to a host.

Where bytes mean the same, rows are runs of bytes: planes that follow each other in both stores are one run, and so a
record is. All units of all rows are one list, which programs take in tiles, so that threads side by side read bytes
side by side, across rows too where slots are neighbours. Where formats differ, a part of a row is read in its words,
decoded, and encoded by what appends (encoders_latent.py): only what is stored crosses the link.

Programs stride through the tiles; how many there are bounds what a move takes from what runs beside it.

Shape suffixes: M tokens that are moved, N units of a tile, R rows of a tile, D values of a row, P pages, H heads,
S slots of a page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.formats.base import raw
from nibble.kernels.codecs import encoders_latent as encoders
from nibble.kernels.codecs.decoders import Decoder, plain
from nibble.kernels.codecs.decoders_latent import LATENTS, Section
from nibble.kernels.codecs.encoders_latent import Span, put
from nibble.kernels.codecs.tiles import _rows, decoded, interleaved
from nibble.kernels.offload.copy_tokens import alike
from nibble.kernels.offload.host_memory import reachable
from nibble.kernels.sizes import cdiv
from nibble.kernels.types import Paged

UNITS, COPY_WARPS = 1024, 4
"""Units of a tile that is copied."""
ROWS, RECODE_WARPS = 16, 4
"""Rows of a tile that is encoded anew."""
PROGRAMS = 48
"""More than this move nothing faster, and single tokens slower: where rows lie all over a host's memory, looking up
addresses is what takes time, and fewer rows at a time, which are of fewer requests, share more of it (on an H200,
copying a step's misses: 39 GB/s with 48 programs, 33 with 264).
"""
_WORDS = {16: torch.int32, 8: torch.int32, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""What a unit of so many bytes is made of."""


class Run(NamedTuple):
    """Units FIRST and up of a row, in both stores; strides count words."""

    source: Tensor
    target: Tensor
    FIRST: Any
    FROM_PAGE: Any
    FROM_SLOT: Any
    TO_PAGE: Any
    TO_SLOT: Any


class Part(NamedTuple):
    """Neighbouring values of a row: how they are read, and where they go. scale: the global one, if SCALED.
    FOLD: what decoded values must still be multiplied by beside it.
    """

    section: Section
    scale: Tensor
    span: Span
    SCALED: Any
    FOLD: Any


@dataclass(frozen=True, slots=True)
class Copied:
    """runs: of a row, in order. units: of a row. words: of a unit."""

    runs: tuple[Run, ...]
    units: int
    words: int


@dataclass(frozen=True, slots=True)
class Recoded:
    parts: tuple[Part, ...]


_Way = Copied | Recoded | None
_known: WeakKeyDictionary[Paged, WeakKeyDictionary[Paged, _Way]] = WeakKeyDictionary()


def serves(source: Paged, target: Paged, device: torch.device) -> bool:
    """Whether the kernels can move rows between these stores, and `device` reaches both."""
    return _way(source, target, device) is not None


def move(
    source: Paged,
    from_M: Tensor,
    target: Paged,
    to_M: Tensor,
    count: Tensor | None = None,
    *,
    programs: int | None = None,
) -> None:
    """See kernels/offload/copy_tokens.py."""
    way, tokens = _way(source, target, from_M.device), len(from_M)
    sizes = source.page_size, target.page_size
    if not tokens:
        return
    if isinstance(way, Copied):
        tiles = cdiv(tokens * way.units, UNITS)
        _copy[min(tiles, programs or PROGRAMS),](
            way.runs, from_M, to_M, count, tokens, *sizes, way.units, way.words, UNITS, num_warps=COPY_WARPS
        )
    elif way:
        tiles = cdiv(tokens, ROWS)
        _recode[min(tiles, programs or PROGRAMS),](
            way.parts, from_M, to_M, count, tokens, sizes[0], ROWS, num_warps=RECODE_WARPS
        )


@triton.jit
def _entries(count, tokens):
    """How many entries count."""
    if count is not None:
        tokens = tl.minimum(tokens, tl.load(count))
    return tokens


@triton.jit
def _place(slot, SIZE: tl.constexpr):
    """Page and offset of slots; of negative ones, anything."""
    slot = slot.to(tl.uint32)
    return (slot // SIZE).to(tl.int64), (slot % SIZE).to(tl.int64)


@triton.jit(do_not_specialize=["tokens"])
def _copy(
    runs, from_M, to_M, count, tokens, FROM_SIZE: tl.constexpr, TO_SIZE: tl.constexpr,
    UNITS: tl.constexpr, WORDS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    tokens = _entries(count, tokens)
    for tile in range(tl.program_id(0), tl.cdiv(tokens.to(tl.int64) * UNITS, N), tl.num_programs(0)):
        start = tile * N  # of 64 bits, as the loop's end is
        unit_N = (start % UNITS).to(tl.int32) + tl.arange(0, N)
        row_N = start // UNITS + unit_N // UNITS
        unit_N = unit_N % UNITS
        from_N = tl.load(from_M + row_N, mask=row_N < tokens, other=-1)
        to_N = tl.load(to_M + row_N, mask=row_N < tokens, other=-1)
        page_N, slot_N = _place(from_N, FROM_SIZE)
        source_N = _source(runs[0], page_N, slot_N, unit_N, WORDS)
        for i in tl.static_range(1, len(runs)):
            other_N = _source(runs[i], page_N, slot_N, unit_N, WORDS)
            source_N = tl.where(unit_N >= runs[i].FIRST, other_N, source_N)
        page_N, slot_N = _place(to_N, TO_SIZE)
        target_N = _target(runs[0], page_N, slot_N, unit_N, WORDS)
        for i in tl.static_range(1, len(runs)):
            other_N = _target(runs[i], page_N, slot_N, unit_N, WORDS)
            target_N = tl.where(unit_N >= runs[i].FIRST, other_N, target_N)
        word = tl.arange(0, WORDS)[None, :]
        keep = tl.broadcast_to(((from_N >= 0) & (to_N >= 0))[:, None], [N, WORDS])
        values = tl.load(source_N[:, None] + word, mask=keep)
        tl.store(target_N[:, None] + word, values, mask=keep)


@triton.jit
def _source(run, page_N, slot_N, unit_N, WORDS: tl.constexpr):
    return run.source + (page_N * run.FROM_PAGE + slot_N * run.FROM_SLOT + (unit_N - run.FIRST) * WORDS)


@triton.jit
def _target(run, page_N, slot_N, unit_N, WORDS: tl.constexpr):
    return run.target + (page_N * run.TO_PAGE + slot_N * run.TO_SLOT + (unit_N - run.FIRST) * WORDS)


@triton.jit(do_not_specialize=["tokens"])
def _recode(parts, from_M, to_M, count, tokens, FROM_SIZE: tl.constexpr, R: tl.constexpr):
    tokens = _entries(count, tokens)
    for tile in range(tl.program_id(0), tl.cdiv(tokens, R), tl.num_programs(0)):
        row_R = tile * R + tl.arange(0, R)
        from_R = tl.load(from_M + row_R, mask=row_R < tokens, other=-1).to(tl.int64)
        to_R = tl.load(to_M + row_R, mask=row_R < tokens, other=-1).to(tl.int64)
        keep_R = (from_R >= 0) & (to_R >= 0)
        page_R, slot_R = _place(from_R, FROM_SIZE)
        # All reads are under way before the first is waited for.
        read = [_read(part.section, page_R, slot_R, keep_R) for part in parts]
        for i in tl.static_range(len(parts)):
            values_RD = _values(parts[i], read[i][0], read[i][1])
            put(parts[i].span, values_RD, tl.where(keep_R, to_R, -1))


@triton.jit
def _read(section, page_R, slot_R, keep_R):
    """Words and block scales, as they are stored."""
    words = _rows(section.words, page_R, slot_R, 0, keep_R, 1, True)
    codes = words
    if section.EACH:
        codes = _rows(section.blocks, page_R, slot_R, 0, keep_R, 1, True)
    return words, codes


@triton.jit
def _values(part, words, codes):
    """Values in float32. The global scale goes to block scales first, so that roundings are those of the definition."""
    scale = part.FOLD
    if part.SCALED:
        scale = tl.load(part.scale) * part.FOLD
    scales = 0
    if part.section.EACH:
        scales = part.section.DECODE_SCALE(codes, part.section.DTYPE) * scale
    values_RD = interleaved(decoded(part.section, words, scales, 1), part.section.PARTS).to(tl.float32)
    if not part.section.EACH and (part.SCALED or part.FOLD != 1):
        values_RD *= scale
    return values_RD


def _way(source: Paged, target: Paged, device: torch.device) -> _Way:
    """How rows go from one store to the other, None where the kernels cannot. Worked out once."""
    known = _known.setdefault(source, WeakKeyDictionary())
    if target not in known:
        known[target] = _worked_out(source, target, device)
    return known[target]


def _worked_out(source: Paged, target: Paged, device: torch.device) -> _Way:
    if not all(reachable(plane, device) for pages in (source, target) for plane in pages.planes_PHS):
        return None
    if source.heads != 1 or max(_slots(source), _slots(target)) >= 1 << 31:
        return None
    if alike(source, target):
        return _copied(source, target)
    return _recoded(source, target, device)


def _slots(pages: Paged) -> int:
    return pages.planes_PHS[0].shape[0] * pages.page_size


def _copied(source: Paged, target: Paged) -> Copied:
    pairs = [(_items(a), _items(b)) for a, b in zip(source.planes_PHS, target.planes_PHS, strict=True)]
    facts = {fact for pair in pairs for plane in pair for fact in (plane.data_ptr(), *_sizes(plane))}
    unit = next(size for size in _WORDS if all(fact % size == 0 for fact in facts))
    runs, first = list[Run](), 0
    for i, (a, b) in enumerate(pairs):
        if i == 0 or not all(map(_follows, (a, b), pairs[i - 1])):
            runs.append(_run(a, b, first // unit, _WORDS[unit]))
        first += _sizes(a)[0]
    return Copied(tuple(runs), first // unit, unit // _WORDS[unit].itemsize)


def _run(source: Tensor, target: Tensor, first: int, dtype: torch.dtype) -> Run:
    source, target = source.view(dtype), target.view(dtype)
    strides = source.stride(0), source.stride(2), target.stride(0), target.stride(2)
    return Run(source, target, *map(tl.constexpr, (first, *strides)))


def _items(plane_PHS: Tensor) -> Tensor:
    """A plane with items in a row."""
    return raw(plane_PHS if plane_PHS.dim() == 4 else plane_PHS.unsqueeze(-1))


def _sizes(plane: Tensor) -> tuple[int, int, int]:
    """Bytes of a row, and from page to page and from slot to slot."""
    size = plane.itemsize
    return plane.shape[3] * size, plane.stride(0) * size, plane.stride(2) * size


def _follows(plane: Tensor, before: Tensor) -> bool:
    """Whether a row's bytes in `plane` come right after those in `before`."""
    row, *strides = _sizes(before)
    return plane.data_ptr() == before.data_ptr() + row and strides == [*_sizes(plane)[1:]]


def _recoded(source: Paged, target: Paged, device: torch.device) -> Recoded | None:
    found = LATENTS.get(source.format.name)
    if found is None or source.dim != target.dim or not encoders.writes(target):
        return None
    rank = source.dim - _apart(source)
    pieces = list(encoders.parts(target, rank))
    if encoders.ROW_ENCODERS[target.format.name].block == 0 and len(pieces) > 1:
        return None
    if not all(first >= rank or found.decoder.serves(count) for first, count in pieces):
        return None
    return Recoded(tuple(_parts(source, target, pieces, device)))


def _apart(pages: Paged) -> int:
    """Values at the end of a row that are stored plainly, in a plane of their own."""
    apart = LATENTS[pages.format.name].apart and len(pages.planes_PHS) > 2
    return pages.planes_PHS[-1].shape[3] if apart else 0


def _parts(
    source: Paged, target: Paged, pieces: list[tuple[int, int]], device: torch.device
) -> Iterator[Part]:
    rank, decoder = source.dim - _apart(source), LATENTS[source.format.name].decoder
    scale, target_scale = (pages.scale.to(device) for pages in (source, target))
    for first, count in pieces:
        span = encoders.span(target, target_scale, first, count)
        if first >= rank:
            rotary = source.planes_PHS[-1][..., first - rank : first - rank + count]
            section = Section.of(rotary, None, Decoder(plain), torch.float32)
            yield Part(section, scale, span, *map(tl.constexpr, (False, 1.0)))
        else:
            section, scaled = _section(source, decoder, first, count), source.format.needs_scale
            yield Part(section, scale, span, *map(tl.constexpr, (scaled, decoder.fold)))


def _section(pages: Paged, decoder: Decoder, first: int, count: int) -> Section:
    """How values first..first + count of a row are read."""
    data = pages.planes_PHS[0].view(torch.int16) if decoder.parts > 1 else pages.planes_PHS[0]
    words = data[..., first // decoder.parts : (first + count) // decoder.parts]
    scales = None
    if decoder.block:
        scales = pages.planes_PHS[1][..., first // decoder.block : (first + count) // decoder.block]
        scales = scales.view(torch.uint8) if scales.dtype.itemsize == 1 else scales
    return Section.of(words, scales, decoder, torch.float32)

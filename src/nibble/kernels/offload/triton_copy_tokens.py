"""Triton kernels of copy_tokens: one launch, whose reads saturate the link to a host.

Where bytes mean the same, rows are runs of bytes: planes that follow each other in both stores are one run, and so a
record is. Where formats differ, a part of a row is read in its words, decoded, and encoded as appending does
(codecs/spans.py): only what is stored crosses the link. Programs stride through tiles of rows; how many programs there
are bounds what a copy takes from what runs beside it.

Shape suffixes: M tokens that are copied, N units of a tile, R rows of a tile, D values of a row, P pages, H heads,
S slots of a page. Names in capitals are constants of a kernel.
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
from nibble.kernels.codecs import LATENTS, ROW_ENCODERS
from nibble.kernels.codecs.plain import DECODER as PLAIN
from nibble.kernels.codecs.spans import Span, serves_rows, span, spans_of, store_span
from nibble.kernels.codecs.tiles import Section, decode_tile, interleave, read_rows
from nibble.kernels.offload.host_memory import reachable
from nibble.kernels.offload.naive import alike
from nibble.kernels.sizes import cdiv
from nibble.kernels.types import Paged

UNITS, COPY_WARPS = 1024, 4
"""Units of a tile that is copied."""
ROWS, RECODE_WARPS = 16, 4
"""Rows of a tile that is encoded anew."""
PROGRAMS = 48
"""More than this copy nothing faster, and single tokens slower: where rows lie all over a host's memory, looking up
addresses is what takes time, and fewer rows at a time, which are of fewer requests, share more of it (on an H200,
copying a step's misses: 39 GB/s with 48 programs, 33 with 264).
"""
_UNIT_DTYPES = {16: torch.int32, 8: torch.int32, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""What a unit of so many bytes is made of."""


# ---- how rows go from one store to the other -------------------------------------------------------------------------


class Run(NamedTuple):
    """Units FIRST and up of a row, in both stores; strides count words."""

    source: Tensor
    target: Tensor
    FIRST: Any
    FROM_PAGE: Any
    FROM_SLOT: Any
    TO_PAGE: Any
    TO_SLOT: Any


class Piece(NamedTuple):
    """Neighbouring values of a row: how they are read, and where they go."""

    section: Section
    scale: Tensor
    """The global one, if SCALED."""
    span: Span
    SCALED: Any
    FOLD: Any
    """What decoded values must still be multiplied by beside it."""


@dataclass(frozen=True, slots=True)
class ByteCopy:
    """How rows are copied that mean the same in both stores."""

    runs: tuple[Run, ...]
    """Of a row, in order."""
    units: int
    """Of a row."""
    unit_width: int
    """Words of a unit."""


@dataclass(frozen=True, slots=True)
class Recode:
    """How rows are encoded anew."""

    pieces: tuple[Piece, ...]


_Plan = ByteCopy | Recode | None
_plans: WeakKeyDictionary[Paged, WeakKeyDictionary[Paged, _Plan]] = WeakKeyDictionary()


def plan_of(source: Paged, target: Paged, device: torch.device) -> _Plan:
    """Return how rows go from one store to the other, None where the kernels cannot; settled by the first call.

    Args:
        source: Pages that are read.
        target: Pages that are written.
        device: The GPU that copies.
    """
    plans = _plans.setdefault(source, WeakKeyDictionary())
    if target not in plans:
        plans[target] = _plan(source, target, device)
    return plans[target]


def _plan(source: Paged, target: Paged, device: torch.device) -> _Plan:
    if not all(reachable(plane, device) for pages in (source, target) for plane in pages.planes_PHS):
        return None
    # Slots are numbers of 32 bits in the kernels.
    if source.heads != 1 or max(_slots(source), _slots(target)) >= 1 << 31:
        return None
    if alike(source, target):
        return _byte_copy(source, target)
    return _recode(source, target, device)


def _slots(pages: Paged) -> int:
    return pages.planes_PHS[0].shape[0] * pages.page_size


def _byte_copy(source: Paged, target: Paged) -> ByteCopy:
    pairs = [(_items(a), _items(b)) for a, b in zip(source.planes_PHS, target.planes_PHS, strict=True)]
    numbers = {number for pair in pairs for plane in pair for number in (plane.data_ptr(), *_sizes(plane))}
    # The widest unit that divides everything, so that a thread moves as much as it can at a time.
    unit = next(size for size in _UNIT_DTYPES if all(number % size == 0 for number in numbers))
    runs, first = list[Run](), 0
    for i, (a, b) in enumerate(pairs):
        if i == 0 or not all(map(_follows, (a, b), pairs[i - 1])):
            runs.append(_run(a, b, first // unit, _UNIT_DTYPES[unit]))
        first += _sizes(a)[0]
    return ByteCopy(tuple(runs), first // unit, unit // _UNIT_DTYPES[unit].itemsize)


def _run(source: Tensor, target: Tensor, first: int, dtype: torch.dtype) -> Run:
    source, target = source.view(dtype), target.view(dtype)
    strides = source.stride(0), source.stride(2), target.stride(0), target.stride(2)
    return Run(source, target, *map(tl.constexpr, (first, *strides)))


def _items(plane_PHS: Tensor) -> Tensor:
    """Return a plane with items in a row."""
    return raw(plane_PHS if plane_PHS.dim() == 4 else plane_PHS.unsqueeze(-1))


def _sizes(plane: Tensor) -> tuple[int, int, int]:
    """Return the bytes of a row, and from page to page and from slot to slot."""
    size = plane.itemsize
    return plane.shape[3] * size, plane.stride(0) * size, plane.stride(2) * size


def _follows(plane: Tensor, before: Tensor) -> bool:
    """Return whether a row's bytes in `plane` come right after those in `before`."""
    row, *strides = _sizes(before)
    return plane.data_ptr() == before.data_ptr() + row and strides == [*_sizes(plane)[1:]]


def _recode(source: Paged, target: Paged, device: torch.device) -> Recode | None:
    kind = LATENTS.get(source.format.name)
    if kind is None or source.dim != target.dim or not serves_rows(target):
        return None
    rank = _rank(source)
    spans = list(spans_of(target, rank))
    # A block of 0 means one scale for a whole row, which several spans cannot share.
    if ROW_ENCODERS[target.format.name].block == 0 and len(spans) > 1:
        return None
    if not all(first >= rank or kind.decoder.serves(count) for first, count in spans):
        return None
    return Recode(tuple(_pieces(source, target, spans, device)))


def _rank(pages: Paged) -> int:
    """Return how many values come before those at the end that are stored plainly, in a plane of their own."""
    apart = LATENTS[pages.format.name].rope_apart and len(pages.planes_PHS) > 2
    return pages.dim - (pages.planes_PHS[-1].shape[3] if apart else 0)


def _pieces(
    source: Paged, target: Paged, spans: list[tuple[int, int]], device: torch.device
) -> Iterator[Piece]:
    rank, decoder = _rank(source), LATENTS[source.format.name].decoder
    scale, target_scale = (pages.scale.to(device) for pages in (source, target))
    for first, count in spans:
        to = span(target, target_scale, first, count)
        if first >= rank:
            rotary = source.planes_PHS[-1][..., first - rank : first - rank + count]
            section = Section.of(rotary, None, PLAIN, torch.float32)
            yield Piece(section, scale, to, *map(tl.constexpr, (False, 1.0)))
        else:
            section = Section.of_values(source, decoder, first, count, torch.float32)
            yield Piece(section, scale, to, *map(tl.constexpr, (source.format.needs_scale, decoder.fold)))


# ---- the kernels -----------------------------------------------------------------------------------------------------


@triton.jit
def _num_entries(count, tokens):
    """Return how many entries count."""
    if count is not None:
        tokens = tl.minimum(tokens, tl.load(count))
    return tokens


@triton.jit
def _place(slot, SIZE: tl.constexpr):
    """Return page and offset of slots; of negative ones, anything."""
    slot = slot.to(tl.uint32)
    return (slot // SIZE).to(tl.int64), (slot % SIZE).to(tl.int64)


@triton.jit(do_not_specialize=["tokens"])
def copy_kernel(
    runs, from_M, to_M, count, tokens, FROM_SIZE: tl.constexpr, TO_SIZE: tl.constexpr,
    UNITS: tl.constexpr, WIDTH: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Copy rows, unit by unit. Grid: programs that stride through tiles of units.

    All units of all rows are one list, so that threads side by side copy bytes side by side, across rows too where
    slots are neighbours.
    """
    tokens = _num_entries(count, tokens)
    for tile in range(tl.program_id(0), tl.cdiv(tokens.to(tl.int64) * UNITS, N), tl.num_programs(0)):
        start = tile * N  # of 64 bits, as the loop's end is
        unit_N = (start % UNITS).to(tl.int32) + tl.arange(0, N)
        row_N = start // UNITS + unit_N // UNITS
        unit_N = unit_N % UNITS
        from_N = tl.load(from_M + row_N, mask=row_N < tokens, other=-1)
        to_N = tl.load(to_M + row_N, mask=row_N < tokens, other=-1)
        # --- where units are read
        page_N, slot_N = _place(from_N, FROM_SIZE)
        source_N = _source(runs[0], page_N, slot_N, unit_N, WIDTH)
        # Runs are in order, so the last one that begins at or before a unit has it.
        for i in tl.static_range(1, len(runs)):
            other_N = _source(runs[i], page_N, slot_N, unit_N, WIDTH)
            source_N = tl.where(unit_N >= runs[i].FIRST, other_N, source_N)
        # --- where units are written
        page_N, slot_N = _place(to_N, TO_SIZE)
        target_N = _target(runs[0], page_N, slot_N, unit_N, WIDTH)
        for i in tl.static_range(1, len(runs)):
            other_N = _target(runs[i], page_N, slot_N, unit_N, WIDTH)
            target_N = tl.where(unit_N >= runs[i].FIRST, other_N, target_N)
        # --- load and store
        word = tl.arange(0, WIDTH)[None, :]
        keep = tl.broadcast_to(((from_N >= 0) & (to_N >= 0))[:, None], [N, WIDTH])
        values = tl.load(source_N[:, None] + word, mask=keep)
        tl.store(target_N[:, None] + word, values, mask=keep)


@triton.jit
def _source(run, page_N, slot_N, unit_N, WIDTH: tl.constexpr):
    return run.source + (page_N * run.FROM_PAGE + slot_N * run.FROM_SLOT + (unit_N - run.FIRST) * WIDTH)


@triton.jit
def _target(run, page_N, slot_N, unit_N, WIDTH: tl.constexpr):
    return run.target + (page_N * run.TO_PAGE + slot_N * run.TO_SLOT + (unit_N - run.FIRST) * WIDTH)


@triton.jit(do_not_specialize=["tokens"])
def recode_kernel(pieces, from_M, to_M, count, tokens, FROM_SIZE: tl.constexpr, R: tl.constexpr):
    """Decode rows, and encode them anew. Grid: programs that stride through tiles of rows."""
    tokens = _num_entries(count, tokens)
    for tile in range(tl.program_id(0), tl.cdiv(tokens, R), tl.num_programs(0)):
        row_R = tile * R + tl.arange(0, R)
        from_R = tl.load(from_M + row_R, mask=row_R < tokens, other=-1).to(tl.int64)
        to_R = tl.load(to_M + row_R, mask=row_R < tokens, other=-1).to(tl.int64)
        keep_R = (from_R >= 0) & (to_R >= 0)
        page_R, slot_R = _place(from_R, FROM_SIZE)
        # All reads are under way before the first is waited for.
        stored = [_read(piece.section, page_R, slot_R, keep_R) for piece in pieces]
        for i in tl.static_range(len(pieces)):
            values_RD = _values(pieces[i], stored[i][0], stored[i][1])
            store_span(pieces[i].span, values_RD, tl.where(keep_R, to_R, -1))


@triton.jit
def _read(section, page_R, slot_R, keep_R):
    """Load words and block scales, as they are stored."""
    items = read_rows(section.items, page_R, slot_R, 0, keep_R, 1, True)
    codes = items
    if section.EACH:
        codes = read_rows(section.blocks, page_R, slot_R, 0, keep_R, 1, True)
    return items, codes


@triton.jit
def _values(piece, items, codes):
    """Decode values to float32."""
    scale = piece.FOLD
    if piece.SCALED:
        scale = tl.load(piece.scale) * piece.FOLD
    scales = 0
    if piece.section.EACH:
        # the global scale goes to block scales first, so that roundings are those of the definition
        scales = piece.section.DECODE_SCALE(codes, piece.section.DTYPE) * scale
    values_RD = interleave(decode_tile(piece.section, items, scales, 1), piece.section.PARTS).to(tl.float32)
    if not piece.section.EACH and (piece.SCALED or piece.FOLD != 1):
        values_RD *= scale
    return values_RD


# ---- launches --------------------------------------------------------------------------------------------------------


def serves(source: Paged, target: Paged, device: torch.device) -> bool:
    """Return whether the kernels can copy rows between these stores, and `device` reaches both.

    Args:
        source: Pages that are read.
        target: Pages that are written.
        device: The GPU that copies.
    """
    return plan_of(source, target, device) is not None


def copy_tokens(
    source: Paged,
    from_M: Tensor,
    target: Paged,
    to_M: Tensor,
    count: Tensor | None = None,
    *,
    programs: int | None = None,
) -> None:
    """Copy tokens from one store to another, as naive.py defines it.

    Args:
        source: Pages that are read.
        from_M: Slots that are read.
        target: Pages that are written.
        to_M: Slots that are written.
        count: Int32 [1] on the device, how many entries count; None for all.
        programs: How many blocks of the GPU it may take at a time; None for as many as are of use.
    """
    plan, tokens = plan_of(source, target, from_M.device), len(from_M)
    if not tokens:
        return
    if isinstance(plan, ByteCopy):
        tiles = cdiv(tokens * plan.units, UNITS)
        copy_kernel[min(tiles, programs or PROGRAMS),](
            plan.runs, from_M, to_M, count, tokens, source.page_size, target.page_size, plan.units, plan.unit_width,
            UNITS, num_warps=COPY_WARPS,
        )  # fmt: skip
    elif plan:
        tiles = cdiv(tokens, ROWS)
        recode_kernel[min(tiles, programs or PROGRAMS),](
            plan.pieces, from_M, to_M, count, tokens, source.page_size, ROWS, num_warps=RECODE_WARPS
        )

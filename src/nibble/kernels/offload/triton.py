"""Triton kernels of a host tier: copies of tokens that saturate the link to a host, and the lookup of hot buffers.

copy_tokens: where bytes mean the same, rows are runs of bytes. Planes that follow each other in both stores are one
run, and so a record is. Where formats differ, a part of a row is read in its words, decoded, and encoded as appending
does (codecs/tiles.py): only what is stored crosses the link. Programs stride through tiles of rows; how many programs
there are bounds what a copy takes from what runs beside it.

lookup_hot: selected tokens ascend, so a hot slot finds its token among them by bisection; nothing is hashed or sorted.
What one lane finds for another goes through global memory, behind a barrier.

Shape suffixes: M tokens that are copied, N units of a tile or pages of a request, R rows of a tile, D values of a row;
T query tokens, K tokens that a request looks at, B slots of its hot buffer, both padded to powers of two; P pages in
all, H heads, S slots of a page. Names in capitals are constants of a kernel.
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
from nibble.kernels import cdiv, next_power_of_2
from nibble.kernels.codecs import LATENTS, ROW_ENCODERS, tiles
from nibble.kernels.codecs.plain import DECODER as PLAIN
from nibble.kernels.indexer.naive import PAD_INDEX as HOST_PAD_INDEX
from nibble.kernels.offload.host_memory import reachable
from nibble.kernels.offload.naive import HotBuffer, HotLookup, alike
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

    section: tiles.Section
    scale: Tensor
    """The global one, if SCALED."""
    span: tiles.Span
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


_Plan = ByteCopy | tuple[Piece, ...] | None
"""How bytes are copied, or the pieces that are encoded anew; None where the kernels cannot."""
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
    slots = max(len(pages.planes_PHS[0]) * pages.page_size for pages in (source, target))
    if source.heads != 1 or slots >= 1 << 31:
        return None
    return _byte_copy(source, target) if alike(source, target) else _recode(source, target, device)


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


def _recode(source: Paged, target: Paged, device: torch.device) -> tuple[Piece, ...] | None:
    kind = LATENTS.get(source.format.name)
    if kind is None or source.dim != target.dim or not tiles.serves_rows(target):
        return None
    rank = _rank(source)
    spans = list(tiles.spans_of(target, rank))
    # A block of 0 means one scale for a whole row, which several spans cannot share.
    if ROW_ENCODERS[target.format.name].block == 0 and len(spans) > 1:
        return None
    if not all(first >= rank or kind.decoder.serves(count) for first, count in spans):
        return None
    return tuple(_pieces(source, target, spans, device))


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
        to = tiles.span(target, target_scale, first, count)
        if first >= rank:
            rotary = source.planes_PHS[-1][..., first - rank : first - rank + count]
            section = tiles.Section.of(rotary, None, PLAIN, torch.float32)
            yield Piece(section, scale, to, *map(tl.constexpr, (False, 1.0)))
        else:
            section = tiles.Section.of_values(source, decoder, first, count, torch.float32)
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
            tiles.store_span(pieces[i].span, values_RD, tl.where(keep_R, to_R, -1))


@triton.jit
def _read(section, page_R, slot_R, keep_R):
    """Load words and block scales, as they are stored."""
    items = tiles.read_rows(section.items, page_R, slot_R, 0, keep_R, 1, True)
    codes = items
    if section.EACH:
        codes = tiles.read_rows(section.blocks, page_R, slot_R, 0, keep_R, 1, True)
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
    values_RD = tiles.interleave(tiles.decode_tile(piece.section, items, scales, 1), piece.section.PARTS).to(
        tl.float32
    )
    if not piece.section.EACH and (piece.SCALED or piece.FOLD != 1):
        values_RD *= scale
    return values_RD


# ---- launches --------------------------------------------------------------------------------------------------------


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
        copy_kernel[min(cdiv(tokens * plan.units, UNITS), programs or PROGRAMS),](
            plan.runs, from_M, to_M, count, tokens, FROM_SIZE=source.page_size, TO_SIZE=target.page_size,
            UNITS=plan.units, WIDTH=plan.unit_width, N=UNITS, num_warps=COPY_WARPS,
        )  # fmt: skip
    elif plan:
        recode_kernel[min(cdiv(tokens, ROWS), programs or PROGRAMS),](
            plan, from_M, to_M, count, tokens, FROM_SIZE=source.page_size, R=ROWS, num_warps=RECODE_WARPS
        )


# ---- hot buffers -----------------------------------------------------------------------------------------------------

PAD_INDEX = tl.constexpr(HOST_PAD_INDEX)
TOKENS_AT_ONCE = 1024
"""Tokens that a program of resident_kernel finds."""
MAX_POSITION = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _bisect(selected, token_B, TOP_K: tl.constexpr, STEPS: tl.constexpr):
    """Return the first place in `selected`, ascending with PAD_INDEX at the end, that is not before each of token_B."""
    low_B, high_B = tl.zeros_like(token_B), tl.full(token_B.shape, TOP_K, tl.int32)
    for _ in tl.static_range(STEPS):
        middle_B = (low_B + high_B) // 2
        value_B = tl.load(selected + middle_B, mask=middle_B < TOP_K, other=MAX_POSITION)
        below_B = (value_B >= 0) & (value_B < token_B) & (low_B < high_B)
        low_B = tl.where(below_B, middle_B + 1, low_B)
        high_B = tl.where(below_B, high_B, middle_B)
    return low_B


@triton.jit
def _find_in_pages(selected, pages, frames, k_K, TOP_K: tl.constexpr, PAGE: tl.constexpr):
    """Return tokens, their pages, and their slots in these. frames: None where those are the pages themselves."""
    token_K = tl.load(selected + k_K, mask=k_K < TOP_K, other=PAD_INDEX)
    page_K = tl.load(pages + token_K // PAGE, mask=token_K >= 0, other=PAD_INDEX)
    frame_K = page_K
    if frames is not None:
        frame_K = tl.load(frames + page_K, mask=token_K >= 0, other=PAD_INDEX)
    return token_K, page_K, tl.where(frame_K >= 0, frame_K * PAGE + token_K % PAGE, PAD_INDEX)


@triton.jit
def resident_kernel(
    selected, pages, frames, slots, pages_stride, TOP_K: tl.constexpr, PAGE: tl.constexpr, K: tl.constexpr
):
    """Find tokens in their pages. Grid: query tokens, and tiles of the tokens that each looks at."""
    request, k_K = tl.program_id(0).to(tl.int64), tl.program_id(1) * K + tl.arange(0, K)
    selected, pages = selected + request * TOP_K, pages + request * pages_stride
    _, _, slot_K = _find_in_pages(selected, pages, frames, k_K, TOP_K, PAGE)
    tl.store(slots + request * TOP_K + k_K, slot_K, mask=k_K < TOP_K)


@triton.jit
def _use_hits(
    selected, slots, hot_frames, tokens, used, b_B, TOP_K: tl.constexpr, SLOTS: tl.constexpr, PAGE: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """Give tokens that are in the hot buffer their slots, and note in `used` which of its slots these are."""
    # Other threads of the program stored `slots`, and must be done before they are read.
    tl.debug_barrier()
    token_B = tl.load(tokens + b_B, mask=b_B < SLOTS, other=PAD_INDEX)
    at_B = _bisect(selected, token_B, TOP_K, STEPS)
    hit_B = (token_B >= 0) & (at_B < TOP_K)
    hit_B = hit_B & (tl.load(selected + at_B, mask=hit_B, other=PAD_INDEX) == token_B)
    # A token may have come back with its page.
    hit_B = hit_B & (tl.load(slots + at_B, mask=hit_B, other=0) < 0)
    frame_B = tl.load(hot_frames + b_B // PAGE, mask=b_B < SLOTS, other=0)
    # All threads have read `slots` before any of them changes it.
    tl.debug_barrier()
    tl.store(slots + at_B, frame_B * PAGE + b_B % PAGE, mask=hit_B)
    tl.store(used + b_B, hit_B.to(tl.int32), mask=b_B < SLOTS)
    tl.debug_barrier()


@triton.jit
def _reorder(lru, used, missed, b_B, SLOTS: tl.constexpr):
    """Move slots that are used, or will be for `missed` tokens, to the end -> how many are not used.

    The order is then: stale slots that stay, slots for missed tokens, slots that were used.
    """
    slot_B = tl.load(lru + b_B, mask=b_B < SLOTS, other=0)
    stale_B = (b_B < SLOTS) & (tl.load(used + slot_B, mask=b_B < SLOTS, other=1) == 0)
    rank_B = tl.cumsum(stale_B.to(tl.int32), 0) - 1
    stale = tl.sum(stale_B.to(tl.int32), 0)
    place_B = tl.where(rank_B < missed, stale - missed + rank_B, rank_B - missed)
    place_B = tl.where(stale_B, place_B, stale + b_B - rank_B - 1)
    # Slots move within one list, so all are read before any is stored.
    tl.debug_barrier()
    tl.store(lru + place_B, slot_B, mask=b_B < SLOTS)
    tl.debug_barrier()
    return stale


@triton.jit
def lookup_kernel(
    selected, rows, pages, frames, hot_frames, tokens, lru, counts, slots, sources, targets, count, used,
    pages_stride, TOP_K: tl.constexpr, SLOTS: tl.constexpr, PAGE: tl.constexpr, K: tl.constexpr, B: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """Find slots for the tokens of one request, and list what must be copied. Grid: query tokens."""
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request)
    selected += request * TOP_K
    slots += request * TOP_K
    used += request * SLOTS
    tokens += row * SLOTS
    lru += row * SLOTS
    hot_frames += row * (SLOTS // PAGE)
    pages += request * pages_stride
    k_K, b_B = tl.arange(0, K), tl.arange(0, B)

    # --- in pages
    token_K, page_K, slot_K = _find_in_pages(selected, pages, frames, k_K, TOP_K, PAGE)
    tl.store(slots + k_K, slot_K, mask=k_K < TOP_K)
    tl.atomic_add(counts, tl.sum((slot_K >= 0).to(tl.int64), 0))
    absent_K = (token_K >= 0) & (slot_K < 0)
    if (tl.sum(absent_K.to(tl.int32), 0) == 0) | (tl.load(hot_frames) < 0):
        return

    # --- in the hot buffer
    _use_hits(selected, slots, hot_frames, tokens, used, b_B, TOP_K, SLOTS, PAGE, STEPS)

    # --- the rest, into the slots that were not used for longest
    missed_K = absent_K & (tl.load(slots + k_K, mask=absent_K, other=0) < 0)
    missed = tl.sum(missed_K.to(tl.int32), 0)
    stale = _reorder(lru, used, missed, b_B, SLOTS)
    nth_K = tl.cumsum(missed_K.to(tl.int32), 0) - 1
    evicted_K = tl.load(lru + stale - missed + nth_K, mask=missed_K, other=0)
    to_K = tl.load(hot_frames + evicted_K // PAGE, mask=missed_K, other=0) * PAGE + evicted_K % PAGE
    # --- store
    tl.store(tokens + evicted_K, token_K, mask=missed_K)
    tl.store(slots + k_K, to_K, mask=missed_K)
    # The programs of all requests append to one list, so each reserves its part of it.
    first = tl.atomic_add(count, missed)
    tl.store(sources + first + nth_K, page_K * PAGE + token_K % PAGE, mask=missed_K)
    tl.store(targets + first + nth_K, to_K, mask=missed_K)
    tl.atomic_add(counts + 1, tl.sum(absent_K.to(tl.int64), 0) - missed)
    tl.atomic_add(counts + 2, missed.to(tl.int64))


def resident_slots(
    topk_indices_TK: Tensor, page_table_TN: Tensor, frames_P: Tensor | None, page_size: int
) -> Tensor:
    """Return the slots of tokens in their pages, as naive.py defines them.

    Args:
        topk_indices_TK: Int32 positions, PAD_INDEX where no token is selected.
        page_table_TN: Int32 pages of each request.
        frames_P: Int32, the frame of each page; None where pages lie in the frames of their own numbers.
        page_size: Tokens of a page.

    Returns:
        Int32 [T, K].
    """
    tokens, top_k = topk_indices_TK.shape
    topk_slots_TK = torch.empty_like(topk_indices_TK)
    if tokens:
        each = min(next_power_of_2(top_k), TOKENS_AT_ONCE)
        resident_kernel[(tokens, cdiv(top_k, each))](
            topk_indices_TK, page_table_TN, frames_P, topk_slots_TK, page_table_TN.stride(0), TOP_K=top_k,
            PAGE=page_size, K=each,
        )  # fmt: skip
    return topk_slots_TK


def lookup_hot(topk_indices_TK: Tensor, rows_T: Tensor, page_table_TN: Tensor, hot: HotBuffer) -> HotLookup:
    """Find slots for the selected tokens, as naive.py defines them. from_M and to_M have room for all tokens.

    Args:
        topk_indices_TK: Int32 positions, ascending, PAD_INDEX at the end.
        rows_T: Int64 rows of `hot`, each once.
        page_table_TN: Int32 pages of each request.
        hot: The hot buffers, which are changed.

    Returns:
        The slots, and the copies that must be made.
    """
    tokens, top_k = topk_indices_TK.shape
    size = hot.tokens_RB.shape[1]
    topk_slots_TK, used = torch.empty_like(topk_indices_TK), topk_indices_TK.new_empty(tokens, size)
    from_M, to_M = topk_indices_TK.new_empty(tokens * top_k), topk_indices_TK.new_empty(tokens * top_k)
    count = topk_indices_TK.new_zeros(1)
    wide = next_power_of_2(max(size, top_k))
    lookup_kernel[(tokens,)](
        topk_indices_TK, rows_T, page_table_TN, hot.frames_P, hot.frames_RF, hot.tokens_RB, hot.lru_RB, hot.counts,
        topk_slots_TK, from_M, to_M, count, used, page_table_TN.stride(0),
        TOP_K=top_k, SLOTS=size, PAGE=hot.page_size, K=next_power_of_2(top_k), B=next_power_of_2(size),
        # As many steps as halve top_k places down to one.
        STEPS=top_k.bit_length(), num_warps=max(1, min(16, wide // 128)),
    )  # fmt: skip
    return HotLookup(topk_slots_TK, from_M, to_M, count)

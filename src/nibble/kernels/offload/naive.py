"""Moving tokens between stores, and looking up hot buffers, by the book in torch.

Shape suffixes: T query tokens, each of another request, K tokens that each looks at, N pages of a request, P pages in
all, H heads, S slots of a page, R rows of the state, F frames of a hot buffer, B slots of it (F * page_size), M tokens
to copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nibble.formats.base import raw
from nibble.kernels.indexer.naive import PAD_INDEX
from nibble.kernels.types import Paged

RESIDENT, HIT, MISS = 0, 1, 2
"""Places of the counters."""


# ---- tokens ----------------------------------------------------------------------------------------------------------


def copy_tokens(
    source: Paged, from_M: Tensor, target: Paged, to_M: Tensor, count: Tensor | None = None
) -> None:
    """Copy tokens from one store to another.

    Bytes are copied where both stores mean the same by them; else values are decoded to float32 and encoded anew.

    Args:
        source: Pages that are read.
        from_M: Slots that are read, page * page_size + offset, int64 or int32; nothing is copied where negative.
        target: Pages that are written.
        to_M: Slots that are written, likewise. They differ from each other, and from those that are read if both
            stores are one.
        count: Int32 [1], how many entries count; None for all.
    """
    if count is not None:
        from_M, to_M = from_M[: int(count)], to_M[: int(count)]
    moved_M = (from_M >= 0) & (to_M >= 0)
    planes = _read(source, from_M[moved_M])
    if not alike(source, target):
        values = source.format.decode(planes, source.scale.to(planes[0].device))
        planes = target.format.encode(values, target.scale.to(values.device))
    _write(target, to_M[moved_M], planes)


def alike(source: Paged, target: Paged) -> bool:
    """Return whether both stores mean the same by the same bytes."""
    return (
        (source.format.name, source.dim, _shapes(source)) == (target.format.name, target.dim, _shapes(target))
    ) and (not source.format.needs_scale or _equal(source.scale, target.scale))


def _shapes(pages: Paged) -> list[tuple[int, ...]]:
    return [(plane.shape[1], *plane.shape[3:]) for plane in pages.planes_PHS]


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two scales are equal; they may lie on different devices."""
    return a is b or torch.equal(a.cpu().expand(b.shape), b.cpu())


def _read(pages: Paged, slots_M: Tensor) -> tuple[Tensor, ...]:
    """Return the planes of some tokens, [M, H, ...]."""
    return tuple(raw(plane)[_places(plane, slots_M)].view(plane.dtype) for plane in pages.planes_PHS)


def _write(pages: Paged, slots_M: Tensor, planes: tuple[Tensor, ...]) -> None:
    for stored, plane in zip(pages.planes_PHS, planes, strict=True):
        raw(stored)[_places(stored, slots_M)] = raw(plane.contiguous()).to(stored.device)


def _places(plane_PHS: Tensor, slots_M: Tensor) -> tuple[Tensor, slice, Tensor]:
    """Return what a plane is indexed with."""
    slots_M, size = slots_M.long().to(plane_PHS.device), plane_PHS.shape[2]
    return slots_M // size, slice(None), slots_M % size


# ---- hot buffers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class HotBuffer:
    """Hot buffers of requests, one to a row; all int32 but the counters."""

    frames_P: Tensor
    """The frame of each page of the pool, PAD_INDEX where it has none."""
    frames_RF: Tensor
    """Their frames, PAD_INDEX in rows that have none."""
    tokens_RB: Tensor
    """The token in each slot, by its position, or PAD_INDEX."""
    lru_RB: Tensor
    """Slots in the order in which they are given up: the least recently used first."""
    counts: Tensor
    """Int64 [3]: tokens that were resident in their page, hit in the buffer, and missed."""

    @property
    def page_size(self) -> int:
        """Return the number of slots in a frame."""
        return self.tokens_RB.shape[1] // self.frames_RF.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class HotLookup:
    """Where selected tokens lie, and which must be copied there first."""

    topk_slots_TK: Tensor
    """Int32: where each selected token lies once copies are made; PAD_INDEX where none is selected."""
    from_M: Tensor
    """Int32 slots of the host, whose pages are numbered as all pages are."""
    to_M: Tensor
    """Int32 slots of the device."""
    count: Tensor
    """Int32 [1]: how many entries of from_M and to_M count."""


def resident_slots(
    topk_indices_TK: Tensor, page_table_TN: Tensor, frames_P: Tensor | None, page_size: int
) -> Tensor:
    """Return the slots of tokens in their pages.

    Args:
        topk_indices_TK: Int32 positions, PAD_INDEX where no token is selected.
        page_table_TN: Int32 pages of each request.
        frames_P: Int32, the frame of each page, PAD_INDEX where it has none; None where pages lie in the frames of
            their own numbers.
        page_size: Tokens of a page.

    Returns:
        Int32 [T, K]; PAD_INDEX where no token is selected, or its page has no frame.
    """
    # PAD_INDEX would count from the end; the last line masks it.
    token_TK = topk_indices_TK.clamp(min=0).long()
    frame_TK = page_table_TN.gather(1, token_TK // page_size)
    if frames_P is not None:
        frame_TK = frames_P[frame_TK.long()]
    topk_slots_TK = frame_TK * page_size + (token_TK % page_size).int()
    return topk_slots_TK.masked_fill((topk_indices_TK < 0) | (frame_TK < 0), PAD_INDEX)


def lookup_hot(topk_indices_TK: Tensor, rows_T: Tensor, page_table_TN: Tensor, hot: HotBuffer) -> HotLookup:
    """Find slots for the selected tokens, and change `hot` to what it will hold.

    Args:
        topk_indices_TK: Int32 positions, ascending, PAD_INDEX at the end; no more than B of one request are off the
            device.
        rows_T: Int64 rows of `hot`, each once.
        page_table_TN: Int32 pages of each request.
        hot: The hot buffers.

    Returns:
        The slots, and the copies that must be made.
    """
    page_size = hot.page_size
    topk_slots_TK = resident_slots(topk_indices_TK, page_table_TN, hot.frames_P, page_size)
    hot.counts[RESIDENT] += (topk_slots_TK != PAD_INDEX).sum()
    sources, targets = [topk_indices_TK.new_empty(0)], [topk_indices_TK.new_empty(0)]
    for t, row in enumerate(rows_T.tolist()):
        absent_M = ((topk_indices_TK[t] != PAD_INDEX) & (topk_slots_TK[t] == PAD_INDEX)).nonzero()[:, 0]
        if not len(absent_M) or hot.frames_RF[row, 0] == PAD_INDEX:  # padding looks at nothing that is there
            continue
        positions_M = topk_indices_TK[t, absent_M]
        places_M, missed_M = _place(positions_M, hot, row)
        frames_M = hot.frames_RF[row, places_M // page_size]
        topk_slots_TK[t, absent_M] = frames_M * page_size + places_M % page_size
        copied_M = positions_M[missed_M].long()
        pages_M = page_table_TN[t, copied_M // page_size]
        sources.append(pages_M * page_size + (copied_M % page_size).int())
        targets.append(topk_slots_TK[t, absent_M[missed_M]])
        hot.counts[HIT] += len(positions_M) - len(copied_M)
        hot.counts[MISS] += len(copied_M)
    from_M, to_M = torch.cat(sources), torch.cat(targets)
    return HotLookup(topk_slots_TK, from_M, to_M, torch.tensor([len(from_M)], dtype=torch.int32))


def _place(positions_M: Tensor, hot: HotBuffer, row: int) -> tuple[Tensor, Tensor]:
    """Return the place of each token in its hot buffer, and whether it has to be copied there."""
    tokens_B, lru_B = hot.tokens_RB[row], hot.lru_RB[row]
    same_MB = tokens_B == positions_M[:, None]
    # argmax() gives the slot of the match. Rows without a match get another slot below.
    missed_M, places_M = ~same_MB.any(1), same_MB.int().argmax(1).int()
    used_B = same_MB.any(0)[lru_B.long()]
    stale = lru_B[~used_B]
    count = int(missed_M.sum())
    assert count <= len(stale), "a hot buffer is smaller than what is looked at"
    evicted = stale[:count]
    # Oldest first: slots that stay unused, slots that are filled now, slots that were hit.
    lru_B.copy_(torch.cat((stale[count:], evicted, lru_B[used_B])))
    places_M[missed_M] = evicted
    tokens_B[evicted.long()] = positions_M[missed_M]
    return places_M, missed_M

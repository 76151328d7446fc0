"""swap: where the chosen tokens of decoding requests lie on the device, and which must be brought there first.

With a host tier a page of tokens may be off the device. A request that decodes then has a hot buffer: slots in which
single tokens are kept, the one that was not looked at for longest given up first (LRU). A chosen token lies

    in its page, if that is on the device;  else in a hot slot that holds it;  else in one that it is to be copied into.

Owns Hot and Swap, the torch references, and the choice of the Triton twins. Must not know of pools, nor who copies.

Shape suffixes: T query tokens, each of another request, K tokens that each looks at, N pages of a request, P pages in
all, R rows of the state, F frames of a hot buffer, B slots of it (F * page_size), M tokens to copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nibble.kernels import triton_present
from nibble.kernels.indexer import PAD_INDEX

RESIDENT, HIT, MISS = 0, 1, 2
"""Places of the counters."""


@dataclass(frozen=True, slots=True, eq=False)
class HotBuffer:
    """Hot buffers of requests, one to a row; all int32.

    frames_RF: their frames, PAD_INDEX in rows that have none. held_RB: the token in each slot, by its position, or PAD_INDEX.
    order_RB: slots in the order in which they are given up. counts: int64 [3], tokens found by way of their page, found
    hot, and copied.
    """

    frames_RF: Tensor
    held_RB: Tensor
    order_RB: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class HotLookup:
    """topk_slots_TK: int32, where each chosen token lies once copies are made; PAD_INDEX where none is chosen. from_M, to_M:
    int32, slots to copy from (of the host, whose pages are numbered as all pages are) and to; the first count, int32
    [1], are meant.
    """

    topk_slots_TK: Tensor
    from_M: Tensor
    to_M: Tensor
    count: Tensor


def lookup_hot(
    topk_indices_TK: Tensor,
    rows_T: Tensor,
    page_table_TN: Tensor,
    frames_P: Tensor,
    hot: HotBuffer,
    page_size: int,
) -> HotLookup:
    """Finds slots for the chosen tokens, and changes `hot` to what it will hold.

    topk_indices_TK: int32 positions, ascending, PAD_INDEX at the end; no more than B of one request are off the device.
    rows_T: int64 rows of `hot`, each once. page_table_TN: int32 pages of each request. frames_P: int32, the frame of each
    page, PAD_INDEX where it has none.
    """
    if topk_indices_TK.is_cuda and triton_present():
        from nibble.kernels.offload import triton_hot_buffer as twin

        return twin.swap(topk_indices_TK, rows_T, page_table_TN, frames_P, hot, page_size)
    return reference(topk_indices_TK, rows_T, page_table_TN, frames_P, hot, page_size)


def resident_slots(
    topk_indices_TK: Tensor, page_table_TN: Tensor, frames_P: Tensor | None, page_size: int
) -> Tensor:
    """int32 slots [T, K] of tokens by way of their pages; PAD_INDEX where none is chosen, or its page has no frame.

    frames_P: None where pages lie in the frames of their own numbers.
    """
    if topk_indices_TK.is_cuda and triton_present():
        from nibble.kernels.offload import triton_hot_buffer as twin

        return twin.resident(topk_indices_TK, page_table_TN, frames_P, page_size)
    return resident_reference(topk_indices_TK, page_table_TN, frames_P, page_size)


def resident_reference(
    topk_indices_TK: Tensor, page_table_TN: Tensor, frames_P: Tensor | None, page_size: int
) -> Tensor:
    """The definition, in torch."""
    token_TK = topk_indices_TK.clamp(min=0).long()
    frame_TK = page_table_TN.gather(1, token_TK // page_size)
    if frames_P is not None:
        frame_TK = frames_P[frame_TK.long()]
    topk_slots_TK = frame_TK * page_size + (token_TK % page_size).int()
    return topk_slots_TK.masked_fill((topk_indices_TK < 0) | (frame_TK < 0), PAD_INDEX)


def reference(
    topk_indices_TK: Tensor,
    rows_T: Tensor,
    page_table_TN: Tensor,
    frames_P: Tensor,
    hot: HotBuffer,
    page_size: int,
) -> HotLookup:
    """The definition, in torch."""
    topk_slots_TK = resident_reference(topk_indices_TK, page_table_TN, frames_P, page_size)
    hot.counts[RESIDENT] += (topk_slots_TK != PAD_INDEX).sum()
    sources, targets = [topk_indices_TK.new_empty(0)], [topk_indices_TK.new_empty(0)]
    for t, row in enumerate(rows_T.tolist()):
        away_M = ((topk_indices_TK[t] != PAD_INDEX) & (topk_slots_TK[t] == PAD_INDEX)).nonzero()[:, 0]
        if not len(away_M) or hot.frames_RF[row, 0] == PAD_INDEX:  # padding looks at nothing that is there
            continue
        positions_M = topk_indices_TK[t, away_M]
        places_M, copied_M = _placed(positions_M, hot, row)
        frames_M = hot.frames_RF[row, places_M // page_size]
        topk_slots_TK[t, away_M] = frames_M * page_size + places_M % page_size
        missed_M = positions_M[copied_M].long()
        pages_M = page_table_TN[t, missed_M // page_size]
        sources.append(pages_M * page_size + (missed_M % page_size).int())
        targets.append(topk_slots_TK[t, away_M[copied_M]])
        hot.counts[HIT] += len(positions_M) - len(missed_M)
        hot.counts[MISS] += len(missed_M)
    from_M, to_M = torch.cat(sources), torch.cat(targets)
    return HotLookup(topk_slots_TK, from_M, to_M, torch.tensor([len(from_M)], dtype=torch.int32))


def _placed(positions_M: Tensor, hot: HotBuffer, row: int) -> tuple[Tensor, Tensor]:
    """The place of each token in its hot buffer, and whether it has to be copied there."""
    held_B, order_B = hot.held_RB[row], hot.order_RB[row]
    same_MB = held_B == positions_M[:, None]
    missing_M, places_M = ~same_MB.any(1), same_MB.int().argmax(1).int()
    used_B = same_MB.any(0)[order_B.long()]
    stale = order_B[~used_B]
    count = int(missing_M.sum())
    assert count <= len(stale), "a hot buffer is smaller than what is looked at"
    given_up = stale[:count]
    order_B.copy_(torch.cat((stale[count:], given_up, order_B[used_B])))
    places_M[missing_M] = given_up
    held_B[given_up.long()] = positions_M[missing_M]
    return places_M, missing_M

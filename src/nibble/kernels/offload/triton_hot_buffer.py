"""Triton kernels of hot buffers: where selected tokens lie, and which must be copied.

Selected tokens ascend, so a hot slot finds its token among them by bisection; nothing is hashed or sorted. What one
lane finds for another goes through global memory, behind a barrier.

Shape suffixes: T query tokens, K tokens that a request looks at, B slots of its hot buffer, both padded to powers of
two; N pages of a request, P pages in all. Names in capitals are constants of a kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels.indexer.naive import PAD_INDEX as HOST_PAD_INDEX
from nibble.kernels.offload.naive import HotBuffer, HotLookup
from nibble.kernels.sizes import cdiv, next_power_of_2

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
    hit_B = hit_B & (
        tl.load(slots + at_B, mask=hit_B, other=0) < 0
    )  # a token may have come back with its page
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
            topk_indices_TK, page_table_TN, frames_P, topk_slots_TK, page_table_TN.stride(0), top_k, page_size, each
        )  # fmt: skip
    return topk_slots_TK


def lookup_hot(
    topk_indices_TK: Tensor,
    rows_T: Tensor,
    page_table_TN: Tensor,
    frames_P: Tensor,
    hot: HotBuffer,
    page_size: int,
) -> HotLookup:
    """Find slots for the selected tokens, as naive.py defines them. from_M and to_M have room for all tokens.

    Args:
        topk_indices_TK: Int32 positions, ascending, PAD_INDEX at the end.
        rows_T: Int64 rows of `hot`, each once.
        page_table_TN: Int32 pages of each request.
        frames_P: Int32, the frame of each page, PAD_INDEX where it has none.
        hot: The hot buffers, which are changed.
        page_size: Tokens of a page.

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
        topk_indices_TK, rows_T, page_table_TN, frames_P, hot.frames_RF, hot.tokens_RB, hot.lru_RB, hot.counts,
        topk_slots_TK, from_M, to_M, count, used, page_table_TN.stride(0),
        top_k, size, page_size, next_power_of_2(top_k), next_power_of_2(size),
        # As many steps as halve top_k places down to one.
        top_k.bit_length(), num_warps=max(1, min(16, wide // 128)),
    )  # fmt: skip
    return HotLookup(topk_slots_TK, from_M, to_M, count)

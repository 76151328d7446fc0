"""Triton twins of kernels/offload/hot_buffer.py. In swap() one program finds the slots of one request's tokens.

Chosen tokens ascend, so a hot slot finds its token among them by bisection; nothing is hashed or sorted. What one lane
finds for another goes through global memory, behind a barrier.

Shape suffixes: K tokens that a request looks at, B slots of its hot buffer, both padded to powers of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels.offload.hot_buffer import HotBuffer, HotLookup
from nibble.kernels.sizes import cdiv, next_power_of_2

PAD_INDEX = tl.constexpr(-1)
AT_ONCE = 1024
"""Tokens that a program of resident() finds."""
LATE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _bisected(chosen, held_B, TOP_K: tl.constexpr, STEPS: tl.constexpr):
    """The first place in `chosen`, ascending with PAD_INDEX at the end, that is not before each of held_B."""
    low_B, high_B = tl.zeros_like(held_B), tl.full(held_B.shape, TOP_K, tl.int32)
    for _ in tl.static_range(STEPS):
        middle_B = (low_B + high_B) // 2
        there_B = tl.load(chosen + middle_B, mask=middle_B < TOP_K, other=LATE)
        below_B = (there_B >= 0) & (there_B < held_B) & (low_B < high_B)
        low_B = tl.where(below_B, middle_B + 1, low_B)
        high_B = tl.where(below_B, high_B, middle_B)
    return low_B


@triton.jit
def _by_page(chosen, pages, frames, k_K, TOP_K: tl.constexpr, PAGE: tl.constexpr):
    """Tokens, their pages, and their slots by way of these. frames: None where those are the pages themselves."""
    token_K = tl.load(chosen + k_K, mask=k_K < TOP_K, other=PAD_INDEX)
    page_K = tl.load(pages + token_K // PAGE, mask=token_K >= 0, other=PAD_INDEX)
    frame_K = page_K
    if frames is not None:
        frame_K = tl.load(frames + page_K, mask=token_K >= 0, other=PAD_INDEX)
    return token_K, page_K, tl.where(frame_K >= 0, frame_K * PAGE + token_K % PAGE, PAD_INDEX)


@triton.jit
def _resident(
    chosen, pages, frames, slots, pages_stride, TOP_K: tl.constexpr, PAGE: tl.constexpr, K: tl.constexpr
):
    request, k_K = tl.program_id(0).to(tl.int64), tl.program_id(1) * K + tl.arange(0, K)
    chosen, pages = chosen + request * TOP_K, pages + request * pages_stride
    _, _, slot_K = _by_page(chosen, pages, frames, k_K, TOP_K, PAGE)
    tl.store(slots + request * TOP_K + k_K, slot_K, mask=k_K < TOP_K)


@triton.jit
def _swap(
    chosen, rows, pages, frames, hot_frames, held, order, counts, slots, sources, targets, count, used,
    pages_stride, TOP_K: tl.constexpr, SLOTS: tl.constexpr, PAGE: tl.constexpr, K: tl.constexpr, B: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request)
    chosen += request * TOP_K
    slots += request * TOP_K
    used += request * SLOTS
    held += row * SLOTS
    order += row * SLOTS
    hot_frames += row * (SLOTS // PAGE)
    pages += request * pages_stride
    k_K, b_B = tl.arange(0, K), tl.arange(0, B)

    token_K, page_K, slot_K = _by_page(chosen, pages, frames, k_K, TOP_K, PAGE)
    tl.store(slots + k_K, slot_K, mask=k_K < TOP_K)
    tl.atomic_add(counts, tl.sum((slot_K >= 0).to(tl.int64), 0))
    away_K = (token_K >= 0) & (slot_K < 0)
    if (tl.sum(away_K.to(tl.int32), 0) == 0) | (tl.load(hot_frames) < 0):
        return

    # hot already
    tl.debug_barrier()
    held_B = tl.load(held + b_B, mask=b_B < SLOTS, other=PAD_INDEX)
    at_B = _bisected(chosen, held_B, TOP_K, STEPS)
    found_B = (held_B >= 0) & (at_B < TOP_K)
    found_B = found_B & (tl.load(chosen + at_B, mask=found_B, other=PAD_INDEX) == held_B)
    found_B = found_B & (tl.load(slots + at_B, mask=found_B, other=0) < 0)
    frame_B = tl.load(hot_frames + b_B // PAGE, mask=b_B < SLOTS, other=0)
    tl.debug_barrier()
    tl.store(slots + at_B, frame_B * PAGE + b_B % PAGE, mask=found_B)
    tl.store(used + b_B, found_B.to(tl.int32), mask=b_B < SLOTS)
    tl.debug_barrier()

    # the rest, into the slots that were not used for longest
    missed_K = away_K & (tl.load(slots + k_K, mask=away_K, other=0) < 0)
    missed = tl.sum(missed_K.to(tl.int32), 0)
    slot_B = tl.load(order + b_B, mask=b_B < SLOTS, other=0)
    stale_B = (b_B < SLOTS) & (tl.load(used + slot_B, mask=b_B < SLOTS, other=1) == 0)
    rank_B = tl.cumsum(stale_B.to(tl.int32), 0) - 1
    stale = tl.sum(stale_B.to(tl.int32), 0)
    place_B = tl.where(rank_B < missed, stale - missed + rank_B, rank_B - missed)
    place_B = tl.where(stale_B, place_B, stale + b_B - rank_B - 1)
    tl.debug_barrier()
    tl.store(order + place_B, slot_B, mask=b_B < SLOTS)
    tl.debug_barrier()
    nth_K = tl.cumsum(missed_K.to(tl.int32), 0) - 1
    given_K = tl.load(order + stale - missed + nth_K, mask=missed_K, other=0)
    to_K = tl.load(hot_frames + given_K // PAGE, mask=missed_K, other=0) * PAGE + given_K % PAGE
    tl.store(held + given_K, token_K, mask=missed_K)
    tl.store(slots + k_K, to_K, mask=missed_K)
    first = tl.atomic_add(count, missed)
    tl.store(sources + first + nth_K, page_K * PAGE + token_K % PAGE, mask=missed_K)
    tl.store(targets + first + nth_K, to_K, mask=missed_K)
    tl.atomic_add(counts + 1, tl.sum(away_K.to(tl.int64), 0) - missed)
    tl.atomic_add(counts + 2, missed.to(tl.int64))


def resident(
    topk_indices_TK: Tensor, page_table_TN: Tensor, frames_P: Tensor | None, page_size: int
) -> Tensor:
    """See kernels/offload/hot_buffer.py."""
    tokens, top_k = topk_indices_TK.shape
    topk_slots_TK = torch.empty_like(topk_indices_TK)
    if tokens:
        each = min(next_power_of_2(top_k), AT_ONCE)
        _resident[(tokens, cdiv(top_k, each))](
            topk_indices_TK,
            page_table_TN,
            frames_P,
            topk_slots_TK,
            page_table_TN.stride(0),
            top_k,
            page_size,
            each,
        )
    return topk_slots_TK


def swap(
    topk_indices_TK: Tensor,
    rows_T: Tensor,
    page_table_TN: Tensor,
    frames_P: Tensor,
    hot: HotBuffer,
    page_size: int,
) -> HotLookup:
    """See kernels/offload/hot_buffer.py. from_M and to_M have room for all tokens."""
    tokens, top_k = topk_indices_TK.shape
    size = hot.held_RB.shape[1]
    topk_slots_TK, used = torch.empty_like(topk_indices_TK), topk_indices_TK.new_empty(tokens, size)
    from_M, to_M = topk_indices_TK.new_empty(tokens * top_k), topk_indices_TK.new_empty(tokens * top_k)
    count = topk_indices_TK.new_zeros(1)
    wide = next_power_of_2(max(size, top_k))
    _swap[(tokens,)](
        topk_indices_TK, rows_T, page_table_TN, frames_P, hot.frames_RF, hot.held_RB, hot.order_RB, hot.counts,
        topk_slots_TK, from_M, to_M, count, used, page_table_TN.stride(0),
        top_k, size, page_size, next_power_of_2(top_k), next_power_of_2(size),
        top_k.bit_length(), num_warps=max(1, min(16, wide // 128)),
    )  # fmt: skip
    return HotLookup(topk_slots_TK, from_M, to_M, count)

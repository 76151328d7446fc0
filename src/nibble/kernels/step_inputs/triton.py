"""The inputs of recorded steps in Triton: programs copy parts of rows of the page tables, and the first does the rest.

Shape suffixes: B requests, L rows of each in a step with drafts, T rows of all, N pages of a request, S rows that are
sampled, R rows of the page tables, K drafts.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels import cdiv, gpu_of, next_power_of_2
from nibble.kernels.dependent_launch import launch_options, wait_for_inputs
from nibble.kernels.step_inputs.naive import ON_DEVICE, DraftInputs, StepInputs, Tables, Verified

PART = 512
"""Pages that a program copies."""
MOST_REQUESTS = 256
"""Most requests of a step with drafts: such a step has no more tokens (drafts.verify_tokens)."""


@triton.jit
def _copy_pages(pages, exact, out_pages, out_exact, row, request, width, PART: tl.constexpr):
    """Copy a part of a request's rows of both page tables, if there are two."""
    at = tl.program_id(1) * PART + tl.arange(0, PART)
    live = at < width
    tl.store(out_pages + request * width + at, tl.load(pages + row * width + at, mask=live), mask=live)
    if exact is not None:
        tl.store(out_exact + request * width + at, tl.load(exact + row * width + at, mask=live), mask=live)


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["rows", "positions", "ids"])
def decode_inputs_kernel(
    rows, positions, ids, latest, pages, exact, out_ids, out_positions, out_lens, out_pages, out_slots, out_exact,
    out_exact_slots, width, PAGE: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Look up a request. Grid: requests, parts of PART pages."""
    wait_for_inputs(PDL)
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request)
    _copy_pages(pages, exact, out_pages, out_exact, row, request, width, PART)
    if tl.program_id(1) == 0:
        token, position = tl.load(ids + request), tl.load(positions + request)
        tl.store(out_ids + request, tl.where(token < 0, tl.load(latest + row), token))
        valid = tl.maximum(position, 0)
        tl.store(out_positions + request, valid)
        tl.store(out_lens + request, (position + 1).to(tl.int32))
        slot = tl.load(pages + row * width + valid // PAGE).to(tl.int64) * PAGE + valid % PAGE
        tl.store(out_slots + request, tl.where(position < 0, -1, slot))
        if exact is not None:
            slot = tl.load(exact + row * width + valid // PAGE).to(tl.int64) * PAGE + valid % PAGE
            tl.store(out_exact_slots + request, tl.where(position < 0, -1, slot))


def decode_inputs(rows_B: Tensor, positions_B: Tensor, ids_B: Tensor, tables: Tables) -> StepInputs:
    """Return the inputs of a step of one token for each request; see the package."""
    count, width, options = len(rows_B), tables.pages_RN.shape[1], launch_options(gpu_of(rows_B.device))
    empty = partial(_empty, rows_B.device)
    pages_BN, exact_BN, exact_slots_B = empty(count, width, dtype=torch.int32), None, None
    if tables.exact_RN is not None:
        exact_BN, exact_slots_B = empty(count, width, dtype=torch.int32), empty(count)
    out = StepInputs(
        empty(count),
        empty(count),
        empty(count, dtype=torch.int32),
        pages_BN,
        empty(count),
        exact_BN,
        exact_slots_B,
    )
    decode_inputs_kernel[(count, cdiv(width, PART))](
        rows_B, positions_B, ids_B, tables.latest_R, tables.pages_RN, tables.exact_RN, out.ids_B, out.positions_B,
        out.seq_lens_B, pages_BN, out.slots_B, exact_BN, exact_slots_B, width, tables.page_size, PART,
        bool(options), num_warps=4, **options,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["rows", "ends", "new", "ids"])
def verify_inputs_kernel(
    rows, ends, new, ids, latest, drafts, pages, exact, out_ids, out_positions, out_slots, out_pages, out_exact,
    out_exact_slots, out_lens, out_new, width,
    LENGTH: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, PART: tl.constexpr, ON_DEVICE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Look up a request. Grid: requests, parts of PART pages."""
    wait_for_inputs(PDL)
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request)
    _copy_pages(pages, exact, out_pages, out_exact, row, request, width, PART)
    if tl.program_id(1) == 0:
        end, count, i = tl.load(ends + request), tl.load(new + request), tl.arange(0, BLOCK)
        to, has_row = request * LENGTH + i, i < LENGTH
        token = tl.load(ids + to, mask=has_row, other=0)
        unsent = tl.load(latest + row)
        if drafts is not None:
            is_draft = has_row & (token < ON_DEVICE)
            draft = tl.load(drafts + (ON_DEVICE - 1 - token), mask=is_draft, other=0)
            unsent = tl.where(is_draft, draft, unsent)
        tl.store(out_ids + to, tl.where(token < 0, unsent, token), mask=has_row)
        position = tl.maximum(end - LENGTH + i, end - count)
        tl.store(out_positions + to, position, mask=has_row)
        is_new = has_row & (i >= LENGTH - count)
        slot = tl.load(pages + row * width + position // PAGE, mask=is_new, other=0).to(tl.int64) * PAGE
        tl.store(out_slots + to, tl.where(is_new, slot + position % PAGE, -1), mask=has_row)
        if exact is not None:
            slot = tl.load(exact + row * width + position // PAGE, mask=is_new, other=0).to(tl.int64) * PAGE
            tl.store(out_exact_slots + to, tl.where(is_new, slot + position % PAGE, -1), mask=has_row)
        tl.store(out_lens + request, end.to(tl.int32))
        tl.store(out_new + request, count.to(tl.int32))


def verify_inputs(
    rows_B: Tensor, ends_B: Tensor, new_B: Tensor, ids_BL: Tensor, tables: Tables
) -> DraftInputs:
    """Return the inputs of a step of several rows for each request; see the package."""
    (count, length), width = ids_BL.shape, tables.pages_RN.shape[1]
    options, empty = launch_options(gpu_of(rows_B.device)), partial(_empty, rows_B.device)
    short, total = partial(empty, dtype=torch.int32), count * length
    has_exact = tables.exact_RN is not None
    out = DraftInputs(
        empty(total), empty(total), empty(total), short(count, width), short(count, width) if has_exact else None,
        empty(total) if has_exact else None, short(count), short(count),
    )  # fmt: skip
    verify_inputs_kernel[(count, cdiv(width, PART))](
        rows_B, ends_B, new_B, ids_BL, tables.latest_R, tables.drafts_KR, tables.pages_RN, tables.exact_RN, out.ids_T,
        out.positions_T, out.slots_T, out.pages_BN, out.exact_BN, out.exact_slots_T, out.seq_lens_B, out.new_B,
        width, length, next_power_of_2(length), tables.page_size, PART, ON_DEVICE, bool(options),
        num_warps=4, **options,
    )  # fmt: skip
    return out


@triton.jit
def _newer(copied, sent_ahead, is_ahead, at, mask):
    return tl.where(
        is_ahead, tl.load(sent_ahead + at, mask=mask, other=0), tl.load(copied + at, mask=mask, other=0)
    )


@triton.jit(do_not_specialize=["requests", "length", "target_rows_at", "others"])
def settle_inputs_kernel(
    copied, sent_ahead, settled, stored, counts, runs, requests, length, target_rows_at, others,
    HEADER: tl.constexpr, K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Settle the inputs of a request. Grid: requests."""
    wait_for_inputs(PDL)
    request, i = tl.program_id(0).to(tl.int64), tl.arange(0, K)
    is_ahead, has_row, live = tl.load(sent_ahead) > tl.load(copied), i < length, request < requests
    copied += HEADER
    sent_ahead += HEADER
    end_at, new_at = requests + request, 2 * requests + request
    target_row = _newer(copied, sent_ahead, is_ahead, target_rows_at + request, live)
    end, new = (
        _newer(copied, sent_ahead, is_ahead, end_at, live),
        _newer(copied, sent_ahead, is_ahead, new_at, live),
    )
    count = tl.load(counts + target_row)
    tl.store(settled + request, _newer(copied, sent_ahead, is_ahead, request, live))
    tl.store(settled + end_at, tl.where(end < 0, tl.load(stored + target_row) - 1 - end, end))
    tl.store(settled + new_at, tl.where(new < 0, count, new))
    id_at = 3 * requests + request * length + i
    ids = _newer(copied, sent_ahead, is_ahead, id_at, has_row)
    place = tl.maximum(i - (length - count), 0)
    run = tl.load(runs + target_row * K + place, mask=has_row, other=0)
    tl.store(settled + id_at, tl.where(new < 0, run, ids), mask=has_row)
    # Behind the ids: as many rows of logits, and others of which each request has one.
    row_at = id_at + requests * length
    tl.store(settled + row_at, _newer(copied, sent_ahead, is_ahead, row_at, has_row), mask=has_row)
    for other in range(others):
        at = (3 + 2 * length + other) * requests + request
        tl.store(settled + at, _newer(copied, sent_ahead, is_ahead, at, live))


def settle_inputs(
    copied: Tensor,
    sent_ahead: Tensor,
    settled: Tensor,
    size: tuple[int, int],
    target_rows_at: int,
    verified: Verified,
) -> None:
    """Choose the newer inputs of a step with drafts, and fill in what the host did not know; see the package."""
    (requests, length), options = size, launch_options(gpu_of(copied.device))
    others = len(settled) // requests - 3 - 2 * length
    settle_inputs_kernel[(requests,)](
        copied, sent_ahead, settled, verified.stored_R, verified.counts_R, verified.runs_RK, requests, length,
        target_rows_at, others, len(sent_ahead) - len(settled), verified.runs_RK.shape[1], bool(options),
        num_warps=1, **options,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["length"], do_not_specialize_on_alignment=["rows", "ends", "new", "ids", "tokens"]
)
def accept_kernel(
    rows, ends, new, ids, tokens, latest, stored, counts, runs, drafts, length,
    REQUESTS: tl.constexpr, K: tl.constexpr, ON_DEVICE: tl.constexpr,
):  # fmt: skip
    """Note what a request gained. Grid: requests."""
    request, i, other = tl.program_id(0).to(tl.int64), tl.arange(0, K), tl.arange(0, REQUESTS)
    first = tl.sum(tl.load(new + other, mask=other < request, other=0))
    row, end, count = tl.load(rows + request), tl.load(ends + request), tl.load(new + request)
    token = tl.load(tokens + first + i, mask=i < count, other=0)
    is_verified = i < count - 1
    draft = tl.load(ids + (request + 1) * length - count + 1 + i, mask=is_verified, other=0)
    unread = tl.load(drafts + (ON_DEVICE - 1 - draft), mask=is_verified & (draft < ON_DEVICE), other=0)
    draft = tl.where(draft < ON_DEVICE, unread, draft)
    last = tl.min(tl.where(is_verified & (token == draft), K, i))
    is_real = count > 0
    tl.store(latest + row, tl.sum(tl.where(i == last, token, 0)), mask=is_real)
    tl.store(stored + row, end - count + 1 + last, mask=is_real)
    tl.store(counts + row, (1 + last).to(tl.int64), mask=is_real)
    tl.store(runs + row * K + i, token, mask=i < count)


def accept(
    rows_B: Tensor, ends_B: Tensor, new_B: Tensor, ids_BL: Tensor, tokens_S: Tensor, verified: Verified,
    drafts_KR: Tensor,
) -> None:  # fmt: skip
    """Note what requests gained by a step with drafts; see the package."""
    requests, length = ids_BL.shape
    assert requests <= MOST_REQUESTS, f"{requests} requests"
    accept_kernel[(requests,)](
        rows_B, ends_B, new_B, ids_BL, tokens_S, verified.latest_R, verified.stored_R, verified.counts_R,
        verified.runs_RK, drafts_KR, length, MOST_REQUESTS, verified.runs_RK.shape[1],
        ON_DEVICE, num_warps=1,
    )  # fmt: skip


def _empty(device: torch.device, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)

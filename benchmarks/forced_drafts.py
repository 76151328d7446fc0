"""Sampled tokens that make as many drafts of each request count as a coin says, for verify_steps.py: in one launch.

In torch it is forty small operations, which would have the device for 85 us of each step that is measured (one H200).

Shape suffixes: B requests, L rows of each, S rows that are sampled, R rows of the page tables, K drafts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.drafts import MAX_DRAFTS
from nibble.kernels import next_power_of_2
from nibble.kernels.step_inputs import ON_DEVICE, Verified


@triton.jit(do_not_specialize=["length"], do_not_specialize_on_alignment=["new", "ids", "tokens", "counts"])
def forced_kernel(
    counts, new, ids, tokens, drafts, out, length,
    REQUESTS: tl.constexpr, K: tl.constexpr, ON_DEVICE: tl.constexpr,
):  # fmt: skip
    """Force the tokens of a request. Grid: requests."""
    request, i, other = tl.program_id(0).to(tl.int64), tl.arange(0, K), tl.arange(0, REQUESTS)
    first = tl.sum(tl.load(new + other, mask=other < request, other=0))
    count, accepted = tl.load(new + request), tl.load(counts + request)
    token = tl.load(tokens + first + i, mask=i < count, other=0)
    is_verified = i < count - 1
    draft = tl.load(ids + (request + 1) * length - count + 1 + i, mask=is_verified, other=0)
    unread = tl.load(drafts + (ON_DEVICE - 1 - draft), mask=is_verified & (draft < ON_DEVICE), other=0)
    draft = tl.where(draft < ON_DEVICE, unread, draft)
    token = tl.where(is_verified & (i < accepted), draft, token)
    token = tl.where(is_verified & (i == accepted) & (token == draft), token ^ 1, token)
    tl.store(out + first + i, token, mask=i < count)


def force(
    counts_B: Tensor, rows_B: Tensor, new_B: Tensor, ids_BL: Tensor, tokens_S: Tensor, verified: Verified,
    drafts_KR: Tensor,
) -> Tensor:  # fmt: skip
    """Return the sampled tokens [S], but that so many drafts of each request count, and no more.

    Args:
        counts_B: how many.
        rows_B: rows of the page tables, which it does without.
        new_B: new tokens of each.
        ids_BL: ids of a step's rows, as step_inputs.accept() takes them.
        tokens_S: what was sampled.
        verified: as accept() takes it.
        drafts_KR: drafts that the host does not know.
    """
    (requests, length), out = ids_BL.shape, torch.empty_like(tokens_S)
    forced_kernel[(requests,)](
        counts_B, new_B, ids_BL, tokens_S, drafts_KR, out, length, next_power_of_2(requests),
        next_power_of_2(1 + MAX_DRAFTS), ON_DEVICE, num_warps=1,
    )  # fmt: skip
    return out

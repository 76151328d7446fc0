"""step_inputs: what a recorded step makes of the few integers that it is sent, in one launch.

In torch it is a dozen operations and more, each of which takes a small launch longer than its work.

Where a head drafts, a step may be launched before the one that it follows is read. What the host does not know then,
how many tokens each request has and which they are, is filled in from what that step left (`accept`).

Shape suffixes: B requests, L rows of each in a step with drafts, S rows that are sampled, R rows of the page tables,
K drafts.
"""

from __future__ import annotations

from torch import Tensor

from nibble.kernels import triton_present
from nibble.kernels.step_inputs import naive
from nibble.kernels.step_inputs.naive import ON_DEVICE, DraftInputs, StepInputs, Tables, Verified, resolve_ids

__all__ = [
    "ON_DEVICE",
    "DraftInputs",
    "StepInputs",
    "Tables",
    "Verified",
    "accept",
    "decode_inputs",
    "resolve_ids",
    "settle_inputs",
    "verify_inputs",
]


def decode_inputs(rows_B: Tensor, positions_B: Tensor, ids_B: Tensor, tables: Tables) -> StepInputs:
    """Return the inputs of a step of one token for each request.

    Args:
        rows_B: int64 rows of the page tables.
        positions_B: int64 positions; -1: padding, which reads as position 0, and is stored nowhere.
        ids_B: int64 tokens; negative ones are what was sampled last.
        tables: of requests.
    """
    if rows_B.is_cuda and triton_present():
        from nibble.kernels.step_inputs import triton as fast

        return fast.decode_inputs(rows_B, positions_B, ids_B, tables)
    return naive.decode_inputs(rows_B, positions_B, ids_B, tables)


def verify_inputs(
    rows_B: Tensor, ends_B: Tensor, new_B: Tensor, ids_BL: Tensor, tables: Tables
) -> DraftInputs:
    """Return the inputs of a step of several rows for each request, of which the last ones are its new tokens.

    Rows of padding in front of these stand at the request's first new token, but see the fewer tokens the further they
    are before that; they are stored nowhere.

    Args:
        rows_B: int64 rows of the page tables.
        ends_B: int64 stored tokens, the new ones included; 0: padding.
        new_B: int64 new tokens of each.
        ids_BL: int64 tokens; negative ones as resolve_ids() has them.
        tables: of requests.
    """
    if rows_B.is_cuda and triton_present():
        from nibble.kernels.step_inputs import triton as fast

        return fast.verify_inputs(rows_B, ends_B, new_B, ids_BL, tables)
    return naive.verify_inputs(rows_B, ends_B, new_B, ids_BL, tables)


def settle_inputs(
    copied: Tensor,
    sent_ahead: Tensor,
    settled: Tensor,
    size: tuple[int, int],
    target_rows_at: int,
    verified: Verified,
) -> None:
    """Choose the newer inputs of a step with drafts, and fill in what the host did not know.

    Args:
        copied: int64: a header that begins with the number of these inputs, then rows, ends, new tokens and ids as
            verify_inputs() takes them, and whatever else. An end e below 0 stands for -1 - e tokens behind what is
            stored, and new tokens below 0 for those that the request gained last: their ids are not here.
        sent_ahead: others, of the same shape.
        settled: where the newer ones go, without the header.
        size: requests and rows of each.
        target_rows_at: where it lies in `settled` which row of `verified` is each request's.
        verified: what the step before brought.
    """
    arguments = copied, sent_ahead, settled, size, target_rows_at, verified
    if copied.is_cuda and triton_present():
        from nibble.kernels.step_inputs import triton as fast

        return fast.settle_inputs(*arguments)
    return naive.settle_inputs(*arguments)


def accept(
    rows_B: Tensor, ends_B: Tensor, new_B: Tensor, ids_BL: Tensor, tokens_S: Tensor, verified: Verified,
    drafts_KR: Tensor,
) -> None:  # fmt: skip
    """Note what requests gained by a step with drafts: those that are what was sampled, and the token behind these.

    Args:
        rows_B: int64 rows of the page tables.
        ends_B: int64 stored tokens, the new ones included.
        new_B: int64 new tokens of each; 0: padding.
        ids_BL: int64 tokens, of which the new ones are the last; negative ones as resolve_ids() has them.
        tokens_S: int64, what was sampled behind each new token, one request after the other.
        verified: where it is noted.
        drafts_KR: see Tables.
    """
    arguments = rows_B, ends_B, new_B, ids_BL, tokens_S, verified, drafts_KR
    if rows_B.is_cuda and triton_present():
        from nibble.kernels.step_inputs import triton as fast

        return fast.accept(*arguments)
    return naive.accept(*arguments)

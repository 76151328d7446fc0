"""step_inputs: what a recorded step makes of the few integers that it is sent, in one launch.

In torch it is a dozen operations and more, each of which takes a small launch longer than its work.

Shape suffixes: B requests, L rows of each in a step with drafts.
"""

from __future__ import annotations

from torch import Tensor

from nibble.kernels import triton_present
from nibble.kernels.step_inputs import naive
from nibble.kernels.step_inputs.naive import ON_DEVICE, DraftInputs, StepInputs, Tables, resolve_ids

__all__ = [
    "ON_DEVICE",
    "DraftInputs",
    "StepInputs",
    "Tables",
    "decode_inputs",
    "resolve_ids",
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

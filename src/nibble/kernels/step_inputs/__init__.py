"""step_inputs: what a recorded decode step makes of the few integers that it is sent, in one launch.

In torch it is a dozen operations, each of which takes a small launch longer than its work.

Shape suffixes: B requests.
"""

from __future__ import annotations

from torch import Tensor

from nibble.kernels import triton_present
from nibble.kernels.step_inputs import naive
from nibble.kernels.step_inputs.naive import StepInputs, Tables

__all__ = ["StepInputs", "Tables", "decode_inputs"]


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

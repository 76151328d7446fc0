"""The inputs of a decode step in Triton: programs copy parts of rows of the page tables, and the first does the rest.

Shape suffixes: B requests, N pages of a request.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels import cdiv, gpu_of
from nibble.kernels.dependent_launch import launch_options, wait_for_inputs
from nibble.kernels.step_inputs.naive import StepInputs, Tables

PART = 512
"""Pages that a program copies."""


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=["rows", "positions", "ids"])
def decode_inputs_kernel(
    rows, positions, ids, latest, pages, exact, out_ids, out_positions, out_lens, out_pages, out_slots, out_exact,
    out_exact_slots, width, PAGE: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Look up a request. Grid: requests, parts of PART pages."""
    wait_for_inputs(PDL)
    request, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * PART + tl.arange(0, PART)
    row, live = tl.load(rows + request), at < width
    tl.store(out_pages + request * width + at, tl.load(pages + row * width + at, mask=live), mask=live)
    if exact is not None:
        tl.store(out_exact + request * width + at, tl.load(exact + row * width + at, mask=live), mask=live)
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
    count, width, device = len(rows_B), tables.pages_RN.shape[1], rows_B.device
    options = launch_options(gpu_of(device))

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

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

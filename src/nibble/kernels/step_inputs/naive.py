"""The inputs of a decode step by the book, in torch.

Shape suffixes: B requests, R rows of the page tables, N pages of a request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """What the device remembers of requests (engine/page_tables.py)."""

    pages_RN: Tensor
    """int32 page ids."""
    latest_R: Tensor
    """int64: the token that each sampled last."""
    exact_RN: Tensor | None
    """int32 exact pages, with an exact window."""
    page_size: int


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """One token for each request."""

    ids_B: Tensor
    """int64."""
    positions_B: Tensor
    """int64; 0 in rows of padding."""
    seq_lens_B: Tensor
    """int32: stored tokens, the new one included; 0 in rows of padding."""
    pages_BN: Tensor
    """int32 page ids."""
    slots_B: Tensor
    """int64: page * page_size + offset of the new token; -1 in rows of padding."""
    exact_BN: Tensor | None
    """int32 exact pages, with an exact window."""
    exact_slots_B: Tensor | None
    """int64 slots in these."""


def decode_inputs(rows_B: Tensor, positions_B: Tensor, ids_B: Tensor, tables: Tables) -> StepInputs:
    """Return the inputs of a step of one token for each request; see the package."""
    valid_B = positions_B.clamp(min=0)

    def look_up(table_RN: Tensor) -> tuple[Tensor, Tensor]:
        pages_BN = table_RN.index_select(0, rows_B)
        page_B = pages_BN.gather(1, (valid_B // tables.page_size)[:, None])[:, 0].long()
        slots_B = page_B * tables.page_size + valid_B % tables.page_size
        return pages_BN, torch.where(positions_B < 0, -1, slots_B)

    return StepInputs(
        torch.where(ids_B < 0, tables.latest_R[rows_B], ids_B),
        valid_B,
        (positions_B + 1).int(),
        *look_up(tables.pages_RN),
        *((None, None) if tables.exact_RN is None else look_up(tables.exact_RN)),
    )

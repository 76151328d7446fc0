"""The inputs of recorded steps by the book, in torch.

Shape suffixes: B requests, L rows of each in a step with drafts, T rows of all, R rows of the page tables, N pages of a
request, K drafts, S rows that are sampled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ON_DEVICE = -1
"""The id of a token whose value only the device knows: the step before samples it. Smaller ones are drafts."""


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
    drafts_KR: Tensor | None = None
    """int64 drafts that the host does not know, by their place in a draft, where there are any."""


@dataclass(frozen=True, slots=True, eq=False)
class Verified:
    """What the last step with drafts brought each request, which the device knows before the host does."""

    latest_R: Tensor
    """int64: the token that each sampled last."""
    stored_R: Tensor
    """int64 tokens that are stored and count."""
    counts_R: Tensor
    """int64 tokens that it gained."""
    runs_RK: Tensor
    """int64, these tokens."""


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


@dataclass(frozen=True, slots=True, eq=False)
class DraftInputs:
    """Several rows for each request, one request after the other."""

    ids_T: Tensor
    """int64."""
    positions_T: Tensor
    """int64."""
    slots_T: Tensor
    """int64: page * page_size + offset of new tokens; -1 in rows of padding."""
    pages_BN: Tensor
    """int32 page ids."""
    exact_BN: Tensor | None
    """int32 exact pages, with an exact window."""
    exact_slots_T: Tensor | None
    """int64 slots in these."""
    seq_lens_B: Tensor
    """int32: stored tokens, the new ones included; 0 in rows of padding."""
    new_B: Tensor
    """int32 new tokens."""


def resolve_ids(ids: Tensor, rows: Tensor, latest_R: Tensor, drafts_KR: Tensor | None) -> Tensor:
    """Return the ids of tokens, as the device knows them.

    Args:
        ids: of any shape; ON_DEVICE is what was sampled last, smaller ones count places in `drafts_KR` downwards.
        rows: of their requests in the page tables, of a shape that fits.
        latest_R: the token that each request sampled last.
        drafts_KR: see Tables.
    """
    latest = latest_R[rows]
    if drafts_KR is not None:
        drafts = drafts_KR.view(-1)[(ON_DEVICE - 1 - ids).clamp(min=0)]
        latest = torch.where(ids < ON_DEVICE, drafts, latest)
    return torch.where(ids < 0, latest, ids)


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


def verify_inputs(
    rows_B: Tensor, ends_B: Tensor, new_B: Tensor, ids_BL: Tensor, tables: Tables
) -> DraftInputs:
    """Return the inputs of a step of several rows for each request; see the package."""
    length = ids_BL.shape[1]
    row_L = torch.arange(length, device=rows_B.device)
    positions_BL = (ends_B[:, None] - length + row_L).maximum((ends_B - new_B)[:, None])
    is_new_BL = row_L >= length - new_B[:, None]

    def look_up(table_RN: Tensor) -> tuple[Tensor, Tensor]:
        table_BN = table_RN.index_select(0, rows_B)
        pages_BL = table_BN.gather(1, positions_BL // tables.page_size).long()
        slots_BL = pages_BL * tables.page_size + positions_BL % tables.page_size
        return table_BN, torch.where(is_new_BL, slots_BL, -1).flatten()

    pages_BN, slots_T = look_up(tables.pages_RN)
    exact_BN, exact_slots_T = (None, None) if tables.exact_RN is None else look_up(tables.exact_RN)
    return DraftInputs(
        resolve_ids(ids_BL, rows_B[:, None], tables.latest_R, tables.drafts_KR).flatten(), positions_BL.flatten(),
        slots_T, pages_BN, exact_BN, exact_slots_T, ends_B.int(), new_B.int(),
    )  # fmt: skip


def settle_inputs(
    copied: Tensor,
    sent_ahead: Tensor,
    settled: Tensor,
    size: tuple[int, int],
    target_rows_at: int,
    verified: Verified,
) -> None:
    """Choose the newer inputs of a step with drafts, and fill in what the host did not know; see the package."""
    (requests, length), header = size, len(sent_ahead) - len(settled)
    newer = torch.where(sent_ahead[0] > copied[0], sent_ahead, copied)[header:]
    settled.copy_(newer)
    ends_B, new_B = settled[requests : 2 * requests], settled[2 * requests : 3 * requests]
    ids_BL = settled[3 * requests :][: requests * length].view(requests, length)
    target_rows_B = settled[target_rows_at : target_rows_at + requests]
    counts_B = verified.counts_R[target_rows_B]
    is_run_B = new_B < 0
    ends_B.copy_(torch.where(ends_B < 0, verified.stored_R[target_rows_B] - 1 - ends_B, ends_B))
    places_BL = torch.arange(length, device=settled.device) - (length - counts_B[:, None])
    runs_BL = verified.runs_RK[target_rows_B].gather(1, places_BL.clamp(min=0))
    ids_BL.copy_(torch.where(is_run_B[:, None], runs_BL, ids_BL))
    new_B.copy_(torch.where(is_run_B, counts_B, new_B))


def compared(
    rows_B: Tensor, new_B: Tensor, ids_BL: Tensor, tokens_S: Tensor, verified: Verified, drafts_KR: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return where in `tokens_S` lies what was sampled for each request [B, L], those tokens, and the drafts beside.

    Of the L places the first ones count, as many as a request has new tokens, and no draft stands beside the last.
    """
    length = ids_BL.shape[1]
    places_L = torch.arange(length, device=ids_BL.device)
    at_BL = (new_B.cumsum(0) - new_B)[:, None] + places_L
    tokens_BL = tokens_S[at_BL.clamp(max=len(tokens_S) - 1)]
    # The draft that follows each row stands one further on, as new tokens are the last ones.
    drafts_BL = ids_BL.gather(1, (length - new_B[:, None] + 1 + places_L).clamp(max=length - 1))
    return at_BL, tokens_BL, resolve_ids(drafts_BL, rows_B[:, None], verified.latest_R, drafts_KR)


def accept(
    rows_B: Tensor, ends_B: Tensor, new_B: Tensor, ids_BL: Tensor, tokens_S: Tensor, verified: Verified,
    drafts_KR: Tensor,
) -> None:  # fmt: skip
    """Note what requests gained by a step with drafts; see the package."""
    length = ids_BL.shape[1]
    places_L = torch.arange(length, device=ids_BL.device)
    _, tokens_BL, drafts_BL = compared(rows_B, new_B, ids_BL, tokens_S, verified, drafts_KR)
    is_wrong_BL = (tokens_BL != drafts_BL) | (places_L >= new_B[:, None] - 1)
    last_B1 = is_wrong_BL.int().argmax(1, keepdim=True)
    gained = (
        (verified.latest_R, tokens_BL.gather(1, last_B1)[:, 0]),
        (verified.stored_R, (ends_B - new_B) + 1 + last_B1[:, 0]),
        (verified.counts_R, 1 + last_B1[:, 0]),
        (
            verified.runs_RK[:, :length],
            tokens_BL.where(places_L < new_B[:, None], verified.runs_RK[rows_B, :length]),
        ),
    )
    for table, values in gained:
        is_real = (new_B > 0).view(-1, *[1] * (table.dim() - 1))
        table.index_copy_(0, rows_B, torch.where(is_real, values, table[rows_B]))

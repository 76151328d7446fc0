"""From a batch as Transformers has it to a step as Nibble computes it, and back.

Transformers gives a rectangle of tokens, some of them padding; a step is a list of tokens without padding, requests of
one phase side by side.

Shape suffixes: B rows of the batch, Q new columns, C columns whose logits are returned, T tokens of the step, S tokens
whose logits are computed, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from nibble.attention.planner.support import Phase
from nibble.engine.request import PHASE_ORDER
from nibble.engine.transfer import ALIGNED
from nibble.kernels.types import AttentionBatch, AttentionMetadata
from nibble.transformers.store import Row


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What the model is called with, and how its logits become Transformers'."""

    token_ids_T: Tensor
    positions_T: Tensor
    logit_rows_S: Tensor
    """Tokens whose logits are computed."""
    meta: AttentionMetadata
    token_at_BC: Tensor
    """The token of each column whose logits are returned, on the host; negative for padding."""

    def unpack(self, logits_SV: Tensor) -> Tensor:
        """Return logits as Transformers has them -> [B, C, V]; zeros for padding."""
        # Without padding the logits lie as they should already.
        if len(logits_SV) == self.token_at_BC.numel():
            return logits_SV.view(*self.token_at_BC.shape, -1)
        logits_BCV = logits_SV.new_zeros(*self.token_at_BC.shape, logits_SV.shape[-1])
        logits_BCV[(self.token_at_BC >= 0).to(logits_SV.device)] = logits_SV
        return logits_BCV


def _phase_of(num_stored: int, count: int) -> Phase:
    if not num_stored:
        return Phase.PREFILL
    return Phase.DECODE if count == 1 else Phase.EXTEND


def count_tokens(new_BQ: Tensor) -> tuple[int, ...]:
    """Return the number of new tokens of each row."""
    return tuple(new_BQ.sum(1).tolist())


def pack(
    rows: Sequence[Row],
    page_size: int,
    new_BQ: Tensor,
    ids_BQ: Tensor,
    positions_BQ: Tensor | None,
    columns_C: Tensor,
) -> Step:
    """Return the step of new tokens.

    Args:
        rows: of the batch, with pages for the new tokens.
        page_size: tokens of a page.
        new_BQ: which columns are tokens, on the host.
        ids_BQ: token ids.
        positions_BQ: as the caller counts them; None: as they are stored.
        columns_C: columns whose logits are returned, on the host.
    """
    counts, width, device = count_tokens(new_BQ), new_BQ.shape[1], ids_BQ.device
    phases = [_phase_of(row.num_stored_tokens, count) for row, count in zip(rows, counts, strict=True)]
    # A row whose new columns are all padding has no part in the step.
    order = sorted((i for i, count in enumerate(counts) if count), key=lambda i: PHASE_ORDER.index(phases[i]))
    places_T = torch.cat([new_BQ[i].nonzero()[:, 0] + i * width for i in order])
    positions = [
        torch.arange(rows[i].num_stored_tokens, rows[i].num_stored_tokens + counts[i]) for i in order
    ]
    slots = [_slots(rows[i], at, page_size) for i, at in zip(order, positions, strict=True)]
    device_places_T = places_T.to(device)
    # Of each place in the batch the token that lies there, -1 for padding.
    token_at = torch.full((new_BQ.numel(),), -1)
    token_at[places_T] = torch.arange(len(places_T))
    token_at_BC = token_at.view(new_BQ.shape)[:, columns_C]
    return Step(
        ids_BQ.reshape(-1)[device_places_T],
        torch.cat(positions).to(device)
        if positions_BQ is None
        else positions_BQ.reshape(-1)[device_places_T],
        token_at_BC[token_at_BC >= 0].to(device),
        AttentionMetadata(torch.cat(slots).to(device), _batches(rows, order, phases, counts, device)),
        token_at_BC,
    )


def _slots(row: Row, at: Tensor, page_size: int) -> Tensor:
    """Return where the tokens at positions `at` of a row are stored."""
    return torch.tensor(row.pages)[at // page_size] * page_size + at % page_size


def _batches(
    rows: Sequence[Row],
    order: Sequence[int],
    phases: Sequence[Phase],
    counts: Sequence[int],
    device: torch.device,
) -> tuple[AttentionBatch, ...]:
    """Return an attention batch for each phase."""
    batches: list[AttentionBatch] = []
    for phase, group in groupby(order, key=lambda i: phases[i]):
        members = tuple(group)
        start = batches[-1].stop if batches else 0
        pages = [rows[i].pages for i in members]
        width = max(map(len, pages))
        # Triton compiles a kernel anew for rows that are not on a grid of 16 bytes.
        stride = -(-width // ALIGNED) * ALIGNED
        table = torch.tensor([row + [0] * (stride - len(row)) for row in pages], dtype=torch.int32)
        page_table_BN = table.to(device)[:, :width]
        query_lens = [counts[i] for i in members]
        seq_lens = [rows[i].num_stored_tokens + counts[i] for i in members]
        batches.append(AttentionBatch.from_lens(phase, start, query_lens, seq_lens, page_table_BN))
    return tuple(batches)

"""From a batch as Transformers has it to a step as Nibble computes it, and back.

Transformers gives a rectangle of tokens, some of them padding; a step is a list of tokens without padding, requests of
one phase side by side. Owns Step and pack(). Must not know of models, nor who holds pages.

Shape suffixes: B rows of the batch, Q new columns, C columns whose logits are asked for, T tokens of the step, S tokens
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
    """ids_T, positions_T, keep_S: what the model is called with. kept_BC: which token a column asked for is; negative
    for padding."""

    ids_T: Tensor
    positions_T: Tensor
    keep_S: Tensor
    meta: AttentionMetadata
    kept_BC: Tensor

    def unpacked(self, logits_SV: Tensor) -> Tensor:
        """Logits as Transformers has them -> [B, C, V]; zeros for padding."""
        if len(logits_SV) == self.kept_BC.numel():
            return logits_SV.view(*self.kept_BC.shape, -1)
        logits_BCV = logits_SV.new_zeros(*self.kept_BC.shape, logits_SV.shape[-1])
        logits_BCV[(self.kept_BC >= 0).to(logits_SV.device)] = logits_SV
        return logits_BCV


def phase_of(stored: int, count: int) -> Phase:
    if not stored:
        return Phase.PREFILL
    return Phase.DECODE if count == 1 else Phase.EXTEND


def counted(new_BQ: Tensor) -> tuple[int, ...]:
    """How many new tokens each row has."""
    return tuple(new_BQ.sum(1).tolist())


def pack(
    rows: Sequence[Row],
    page_size: int,
    new_BQ: Tensor,
    ids_BQ: Tensor,
    positions_BQ: Tensor | None,
    columns_C: Tensor,
) -> Step:
    """The step of new tokens, for which `rows` have pages. new_BQ: which columns are tokens, on the host, as is
    columns_C. positions_BQ: as the caller counts them; None: as they are stored."""
    counts, width, device = counted(new_BQ), new_BQ.shape[1], ids_BQ.device
    phases = [phase_of(row.num_stored_tokens, count) for row, count in zip(rows, counts, strict=True)]
    order = sorted((i for i, count in enumerate(counts) if count), key=lambda i: PHASE_ORDER.index(phases[i]))
    places_T = torch.cat([new_BQ[i].nonzero()[:, 0] + i * width for i in order])
    stored = [torch.arange(rows[i].num_stored_tokens, rows[i].num_stored_tokens + counts[i]) for i in order]
    slots = [_slots(rows[i], at, page_size) for i, at in zip(order, stored, strict=True)]
    at_T = places_T.to(device)
    kept_BC = _inverse(places_T, new_BQ.numel()).view(new_BQ.shape)[:, columns_C]
    return Step(
        ids_BQ.reshape(-1)[at_T],
        torch.cat(stored).to(device) if positions_BQ is None else positions_BQ.reshape(-1)[at_T],
        kept_BC[kept_BC >= 0].to(device),
        AttentionMetadata(torch.cat(slots).to(device), _segments(rows, order, phases, counts, device)),
        kept_BC,
    )


def _slots(row: Row, at: Tensor, page_size: int) -> Tensor:
    """Where the tokens numbered `at` of a row are stored."""
    return torch.tensor(row.pages)[at // page_size] * page_size + at % page_size


def _inverse(places_T: Tensor, size: int) -> Tensor:
    """For each place of the batch the token that lies there, or -1."""
    found = torch.full((size,), -1)
    found[places_T] = torch.arange(len(places_T))
    return found


def _segments(
    rows: Sequence[Row],
    order: Sequence[int],
    phases: Sequence[Phase],
    counts: Sequence[int],
    device: torch.device,
) -> tuple[AttentionBatch, ...]:
    segments: list[AttentionBatch] = []
    for phase, part in groupby(order, key=lambda i: phases[i]):
        found = tuple(part)
        start = segments[-1].stop if segments else 0
        pages = [rows[i].pages for i in found]
        width = max(map(len, pages))
        stride = -(-width // ALIGNED) * ALIGNED
        table = torch.tensor([row + [0] * (stride - len(row)) for row in pages], dtype=torch.int32)
        page_table_BN = table.to(device)[:, :width]
        query_lens, seq_lens = (
            [counts[i] for i in found],
            [rows[i].num_stored_tokens + counts[i] for i in found],
        )
        segments.append(AttentionBatch.from_lens(phase, start, query_lens, seq_lens, page_table_BN))
    return tuple(segments)

"""What sparse attention has chosen, in a near and a far part."""

from __future__ import annotations

import torch

from nibble.attention.window import split_choice
from nibble.kernels.indexer import PAD_INDEX
from nibble.kernels.types import AttentionBatch
from nibble.model_spec import Phase

WINDOW, CHOSEN = 8, 6


def batch_of(query_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> AttentionBatch:
    pages_BN = torch.zeros(len(seq_lens), 4, dtype=torch.int32)
    return AttentionBatch.from_lens(Phase.EXTEND, 0, query_lens, seq_lens, pages_BN)


def test_near_and_far_parts_are_what_was_chosen() -> None:
    random, batch = torch.Generator().manual_seed(0), batch_of((3, 1, 9), (30, 5, 40))
    base_B = torch.tensor([16, 0, 16], dtype=torch.int32)
    lens = zip(batch.query_lens, batch.seq_lens, base_B.tolist(), strict=True)
    rows = [(length - new + row, base) for new, length, base in lens for row in range(new)]
    chosen = [torch.randperm(at + 1, generator=random)[:CHOSEN].sort().values.tolist() for at, _ in rows]
    padded_TK = torch.tensor([row + [PAD_INDEX] * (CHOSEN - len(row)) for row in chosen], dtype=torch.int32)
    parts = split_choice(padded_TK, batch, base_B, WINDOW)
    for (at, base), row, far_K, near_W in zip(rows, chosen, parts.far_TK, parts.near_TW, strict=True):
        assert [token for token in far_K.tolist() if token >= 0] == [x for x in row if at - x >= WINDOW]
        near = sorted(token + base for token in near_W.tolist() if token != PAD_INDEX)
        assert near == [x for x in row if at - x < WINDOW]


def test_rows_that_pad_a_step_have_chosen_nothing() -> None:
    """They have no tokens, and what is said of them may be anything."""
    batch, anything = batch_of((1, 1), (12, 0)), torch.zeros(2, CHOSEN, dtype=torch.int32)
    parts = split_choice(anything, batch, torch.zeros(2, dtype=torch.int32), WINDOW)
    assert (parts.near_TW[1] == PAD_INDEX).all() and (parts.far_TK[1] == PAD_INDEX).all()

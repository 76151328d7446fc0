"""What one step asks of attention: where tokens are written, and which pages each request reads.

Owns AttentionBatch, AttentionMetadata and AttentionParams. All frozen: a backend reads them, nobody edits them. Must not
know of requests or models.

Shape suffixes: T tokens of the step, B requests of a segment, N pages of its longest request, H query heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from nibble.attention.planner.support import Phase


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class AttentionBatch:
    """The requests of one phase; their tokens are rows [start, stop) of the step, request after request.

    query_lens, seq_lens: new tokens of each request, and stored tokens, the new ones included.
    page_table_BN: int32 page ids in order; entries beyond a request's pages are 0 and must not be read as its own.
    cu_seqlens_q_B1, seq_lens_B: the same lengths as int32 on the device: where each request's rows begin, counted from
    `start`, with the end of the last; and stored tokens. A step that is replayed from a CUDA graph changes these and
    page_table_BN in place, while query_lens stay and seq_lens are bounds: a kernel that can be captured reads lengths from here
    only. A request of 0 stored tokens is padding: its rows of the output are zeros. rows_B: int64 rows of the tables of
    requests, for a host tier.
    """

    phase: Phase
    start: int
    stop: int
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    page_table_BN: Tensor
    cu_seqlens_q_B1: Tensor
    seq_lens_B: Tensor
    rows_B: Tensor | None = None

    @classmethod
    def from_lens(
        cls,
        phase: Phase,
        start: int,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        page_table_BN: Tensor,
    ) -> AttentionBatch:
        """The segment of requests whose first row is `start`."""
        starts = tuple(accumulate(query_lens, initial=0))
        device = page_table_BN.device
        return cls(
            phase,
            start,
            start + starts[-1],
            tuple(query_lens),
            tuple(seq_lens),
            page_table_BN,
            torch.tensor(starts, dtype=torch.int32, device=device),
            torch.tensor(seq_lens, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """slot_mapping_T: int64, page * page_size + offset of every new token; negative where nothing is to be stored, which only
    steps for a CUDA graph have. Rows past the last segment are padding. frame_slot_mapping_T: with a host tier, slots of the frames
    in which those pages lie, for what attention reads."""

    slot_mapping_T: Tensor
    batches: tuple[AttentionBatch, ...]
    frame_slot_mapping_T: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What a layer asks of one call. window: tokens seen, the present one included. softcap: scores become
    softcap * tanh(score / softcap). sinks_H: a learned logit per query head that joins the softmax.

    Sparse attention: topk_indices_TK, the tokens that each query looks at, as positions (kernels/indexer/__init__.py); chooser, the
    layer that chose them; topk_slots_TK, int32, where they lie in the view at hand, which is what a backend reads."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None
    topk_indices_TK: Tensor | None = None
    index_layer: int = -1
    topk_slots_TK: Tensor | None = None

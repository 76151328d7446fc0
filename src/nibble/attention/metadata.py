"""What one step asks of attention: where tokens are written, and which pages each request reads.

Owns Segment, AttentionMetadata and AttentionSpec. All frozen: a backend reads them, nobody edits them. Must not
know of requests or models.

Shape suffixes: T tokens of the step, B requests of a segment, N pages of its longest request, H query heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from nibble.attention.capability import Phase


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Segment:
    """The requests of one phase; their tokens are rows [start, stop) of the step, request after request.

    q_lens, kv_lens: new tokens of each request, and stored tokens, the new ones included.
    pages_BN: int32 page ids in order; entries beyond a request's pages are 0 and must not be read as its own.
    q_starts_B1, kv_lens_B: the same lengths as int32 on the device: where each request's rows begin, counted from
    `start`, with the end of the last; and stored tokens. A step that is replayed from a CUDA graph changes these and
    pages_BN in place, while q_lens stay and kv_lens are bounds: a kernel that can be captured reads lengths from here
    only. A request of 0 stored tokens is padding: its rows of the output are zeros. rows_B: int64 rows of the tables of
    requests, for a host tier.
    """

    phase: Phase
    start: int
    stop: int
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    pages_BN: Tensor
    q_starts_B1: Tensor
    kv_lens_B: Tensor
    rows_B: Tensor | None = None

    @classmethod
    def of(
        cls, phase: Phase, start: int, q_lens: Sequence[int], kv_lens: Sequence[int], pages_BN: Tensor
    ) -> Segment:
        """The segment of requests whose first row is `start`."""
        starts = tuple(accumulate(q_lens, initial=0))
        device = pages_BN.device
        return cls(
            phase,
            start,
            start + starts[-1],
            tuple(q_lens),
            tuple(kv_lens),
            pages_BN,
            torch.tensor(starts, dtype=torch.int32, device=device),
            torch.tensor(kv_lens, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """slots_T: int64, page * page_size + offset of every new token; negative where nothing is to be stored, which only
    steps for a CUDA graph have. Rows past the last segment are padding. placed_T: with a host tier, slots of the frames
    in which those pages lie, for what attention reads."""

    slots_T: Tensor
    segments: tuple[Segment, ...]
    placed_T: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a layer asks of one call. window: tokens seen, the present one included. softcap: scores become
    softcap * tanh(score / softcap). sinks_H: a learned logit per query head that joins the softmax.

    Sparse attention: chosen_TK, the tokens that each query looks at, as positions (kernels/choose.py); chooser, the
    layer that chose them; slots_TK, int32, where they lie in the view at hand, which is what a backend reads."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None
    chosen_TK: Tensor | None = None
    chooser: int = -1
    slots_TK: Tensor | None = None

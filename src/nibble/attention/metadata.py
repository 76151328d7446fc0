"""What one step asks of attention: where tokens are written, and which pages each request reads.

Owns Segment, AttentionMetadata and AttentionSpec. All frozen: a backend reads them, nobody edits them. Must not
know of requests or models.

Shape suffixes: T tokens of the step, B requests of a segment, N pages of its longest request, H query heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nibble.attention.capability import Phase


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Segment:
    """The requests of one phase; their tokens are rows [start, stop) of the step, request after request.

    q_lens, kv_lens: new tokens of each request, and stored tokens, the new ones included.
    pages_BN: int32 page ids in order; entries beyond a request's pages are 0 and must not be read as its own.
    """

    phase: Phase
    start: int
    stop: int
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    pages_BN: Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """slots_T: int64, page * page_size + offset of every new token. Rows past the last segment are padding."""

    slots_T: Tensor
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a layer asks of one call. window: tokens seen, the present one included. softcap: scores become
    softcap * tanh(score / softcap). sinks_H: a learned logit per query head that joins the softmax."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None

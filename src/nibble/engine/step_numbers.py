"""A step as plain numbers, which one rank makes of a batch and every rank computes from.

Shape suffixes: S rows that are sampled from, B requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from torch import Tensor

from nibble.engine.page_tables import PackedInts, SentUpdates
from nibble.engine.request import ScheduledRequest
from nibble.kernels.recurrence.types import StateMetadata


@dataclass(slots=True)
class StepNumbers:
    """A step as plain numbers: all that a device, this one or another rank's, needs to compute it."""

    ints: PackedInts
    inputs: tuple[slice, ...]
    """Where token ids, positions, rows of tokens, rows of logits and rows that are sampled for lie; of a replayed step
    its three inputs in one."""
    num_tokens: int
    num_logits: int
    updates: SentUpdates
    takes_sampled: bool = False
    """Whether any token is the one that the step before has sampled."""
    replay_size: int = 0
    """Rows of the recorded step that computes it; 0: none does."""
    skipped: tuple[slice, slice] = (slice(0), slice(0))
    """Tokens that are not written to pages, and those that are not kept in exact pages."""
    state_rows: StateRows | None = None
    groups: Sequence[PhaseGroup] = ()
    state_copies: Sequence[tuple[int, int]] = ()
    """Slots of recurrent states that are copied before the step."""


class Followers(Protocol):
    """The other ranks of a model whose layers are divided among GPUs: they compute what this one does."""

    def compute(self, numbers: StepNumbers) -> None:
        """Let them compute a step, which this rank computes next."""
        ...

    def record(self, sizes: Sequence[int], *, captured: bool) -> None:
        """Let them record decode steps, which this rank records next."""
        ...

    def store_sampled(self, tokens_S: Tensor) -> None:
        """Let them store what was sampled."""
        ...

    def run(self, name: str) -> None:
        """Let them do something else, which this rank does next."""
        ...

    def failed(self, error: Exception) -> Exception:
        """Return what a failure of this rank in a step comes from; no further step can be computed."""
        ...


class PhaseGroup:
    """What is scheduled of one phase, and where its numbers lie in the packed integers."""

    def __init__(self, pairs: Sequence[tuple[ScheduledRequest, int]], packed: PackedInts) -> None:
        scheduled = [item for item, _ in pairs]
        self.phase = scheduled[0].phase
        self.query_lens = tuple(item.num_tokens for item in scheduled)
        self.seq_lens = tuple(item.end for item in scheduled)
        self.cu_seqlens_q = packed.add(accumulate(self.query_lens, initial=0))
        self.seq_lens_at = packed.add(self.seq_lens)
        self.rows = packed.add(row for _, row in pairs)


class StateRows:
    """Where the numbers of a step's recurrent states lie in the packed integers."""

    def __init__(self, scheduled: Sequence[ScheduledRequest], packed: PackedInts) -> None:
        lengths = [item.num_tokens for item in scheduled]
        self._max_length = max(lengths)
        self._slots = packed.add(_state_slot(item) for item in scheduled)
        self._starts = packed.add(item.start for item in scheduled)
        self._cu_seqlens = packed.add(accumulate(lengths, initial=0))
        self._settled: slice | None = None
        if any(item.drafts for item in scheduled):
            self._settled = packed.add(item.num_tokens - len(item.drafts) for item in scheduled)

    def metadata(self, sent: Tensor, invariant: bool) -> StateMetadata:
        """Return the same on the device."""
        slots_B, starts_B, cu_seqlens_B1 = (
            sent[part].int() for part in (self._slots, self._starts, self._cu_seqlens)
        )
        settled_B = None if self._settled is None else sent[self._settled].int()
        return StateMetadata(
            slots_B, starts_B, cu_seqlens_B1, self._max_length, settled_B, invariant=invariant
        )


def _state_slot(item: ScheduledRequest) -> int:
    slot = item.request.lease.state_slot
    assert slot is not None, "a lease has a slot of recurrent states from its first step on"
    return slot

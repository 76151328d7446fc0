"""A step as plain numbers, which one rank makes of a batch and every rank computes from.

Shape suffixes: S rows that are sampled from, B requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from nibble.cache.residency import Copy
from nibble.engine.page_tables import PackedInts, SentUpdates
from nibble.engine.step_tokens import PhaseGroup, StateRows


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
    replay_size: int | tuple[int, int] = 0
    """Rows of the recorded step that computes it, or requests and rows of each with drafts; 0: none does."""
    skipped: tuple[slice, slice] = (slice(0), slice(0))
    """Tokens that are not written to pages, and those that are not kept in exact pages."""
    state_rows: StateRows | None = None
    groups: Sequence[PhaseGroup] = ()
    logit_rows: PhaseGroup | None = None
    """Rows of logits as requests that decode, where a layer may attend for them alone."""
    state_copies: Sequence[tuple[int, int]] = ()
    """Slots of recurrent states that are copied before the step."""
    rank_rows: tuple[tuple[int, ...], ...] = ()
    """Tokens and rows of logits of each rank, where ranks attend for requests of their own."""
    sampled_at: slice | None = None
    """Then, where it lies which of the tokens that the step samples are this rank's."""
    is_ahead: bool = False
    """Whether it begins behind what the step before brings, which the host does not know."""
    batch_rows: slice | None = None
    """And at rank 0, which rows of all ranks' logits are those of the batch, in its order."""


class Followers(Protocol):
    """The other ranks of a model whose layers are divided among GPUs: they compute what this one does."""

    def compute(self, numbers: StepNumbers | list[StepNumbers]) -> None:
        """Let them compute a step, which this rank computes next; each its own, where there is one for each rank."""
        ...

    def record(
        self, sizes: Sequence[int], verify_sizes: Sequence[tuple[int, int]], *, captured: bool
    ) -> None:
        """Let them record decode steps, which this rank records next."""
        ...

    def store_sampled(self, tokens_S: Tensor) -> None:
        """Let them store what was sampled."""
        ...

    def save(self, copies: Sequence[Copy]) -> None:
        """Let them save pages to the host."""
        ...

    def run(self, name: str) -> None:
        """Let them do something else, which this rank does next."""
        ...

    def together(self) -> AbstractContextManager[None]:
        """Let what all ranks do in the body end for all of them, or no further step be computed."""
        ...

    def settle(self) -> None:
        """Wait for what this rank computes, and raise RankError if another failed meanwhile."""
        ...

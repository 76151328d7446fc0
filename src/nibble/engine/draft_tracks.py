"""What a head that drafts knows of each request, and of drafts that the host has not read.

Shape suffixes: H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from nibble.engine.draft_books import Draft
from nibble.engine.draft_steps import NewRows
from nibble.engine.page_tables import PageTables
from nibble.engine.request import Request, ScheduledRequest


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Rows of a request that a step computes."""

    track: Track
    start: int
    count: int
    samples: bool = False
    """Whether a token is drawn behind the last."""

    @property
    def states(self) -> Tensor | None:
        """Return their hidden states [n, H], None where these wait."""
        track, first = self.track, self.start - self.track.start
        if track.next_states is not None:
            return track.next_states
        return None if track.states is None else track.states[first : first + self.count]


@dataclass(eq=False)
class Chain:
    """Drafts of some requests that the host has not read."""

    tracks: Sequence[Track]
    steps: int
    buffer: int = 0
    """Of what chains are drawn into."""
    is_ahead: bool = False
    """Whether it was launched before the host knew the tokens that it begins with."""
    drafts: dict[Request, list[tuple[int, float]]] = field(default_factory=dict)
    """Tokens of each request and their chances, once they were read."""
    seconds: float = 0.0
    """What drawing them took, once they were read."""


@dataclass(eq=False)
class Track(Draft):
    """What the head knows of a request: its twin's pages, and which rows have a hidden state and are not computed."""

    slot: int | None = None
    """Where hidden states wait (WaitingStates)."""
    end: int = 0
    """Rows, from the first on, that have had a hidden state."""
    states: Tensor | None = None
    """[n, H], of the rows from `start` on, while they are too many to wait."""
    next_states: Tensor | None = None
    """[1, H], that the newest draft's row is computed from, where drafts go step by step."""
    unread: Sequence[int] = ()
    """Ids that stand for drafts which only the device knows."""
    unsettled: ScheduledRequest | None = None
    """What the model computes now, launched before its start was known: its hidden states come behind all others."""
    is_drafted: bool = False
    """Whether the rows before that are computed: drafts were launched behind them."""
    is_lost: bool = False
    """Whether nothing can be drafted: rows are missing, or pages."""

    @property
    def num_known(self) -> int:
        """Return the number of rows, from the first on, that are stored or could be computed now."""
        return min(max(self.start, self.end), len(self.twin.token_ids))

    @property
    def num_waiting(self) -> int:
        """Return how many of those are not stored."""
        return self.num_known - self.start

    def new_rows(self, count: int) -> NewRows:
        """Return the next rows for a recorded step."""
        assert self.slot is not None
        return NewRows(
            self.twin.lease, self.slot, self.start, self.twin.token_ids[self.start : self.start + count]
        )

    def unknown_rows(self, tables: PageTables) -> NewRows:
        """Return the rows that the request gains by the step in flight; tables: of the model."""
        assert self.slot is not None
        return NewRows(self.twin.lease, self.slot, self.start, [], tables.row_of(self.request.lease))

    def waits_for(self, item: ScheduledRequest) -> bool:
        """Return whether the rows that are not computed are those of a step in flight."""
        is_next = self.start == item.start and self.end == item.end
        return is_next and self.slot is not None and self.states is None and not self.is_lost

    def follow(self) -> None:
        """Add what is new of the request to the twin: its tokens only grow."""
        self.twin.token_ids += self.request.token_ids[1 + len(self.twin.token_ids) :]

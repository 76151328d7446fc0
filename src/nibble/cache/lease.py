"""A lease: the pages of one request."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from nibble.cache.radix_cache import Node


class Place(Enum):
    """What is at the boundary of a snapshot, which says by whom it will be read."""

    BRANCH = "branch"
    """Several requests go on from here, each in its own way."""
    PROMPT_END = "prompt end"
    """The next turn of a conversation goes on from here where its template rewrites the answer."""
    ANSWER_END = "answer end"
    """The next turn goes on from here where the answer is part of its prompt as it was generated."""
    PREEMPTION = "preemption"
    """The request itself will go on from here."""


@dataclass(eq=False, slots=True)
class Lease:
    """One request's pages, in the order of its tokens. The manager and its books change it.

    `pages` only grows, but for pages of drafts that do not count, which are given back.

    The pages of an open lease, as half-open intervals:

        [0, num_shared_pages)                               full, in the radix tree, never written again
        [num_shared_pages, num_stored_tokens / page_size)   stored, private; the last one may be full in part
        [num_stored_tokens / page_size, len(pages))         reserved, private, to be written

    num_shared_pages * page_size <= num_stored_tokens <= len(pages) * page_size. A closed lease has no pages.

    With an exact window or recurrent states a lease may be in a replay: num_stored_tokens < replay_until. Its pages
    hold the first replay_until tokens, most often all shared, but computation goes on at num_stored_tokens, and what it
    computes below replay_until is written to exact pages and states only. Then num_shared_pages * page_size may exceed
    num_stored_tokens.
    """

    namespace: str = ""
    pages: list[int] = field(default_factory=list)
    num_stored_tokens: int = 0
    """Leading tokens after which computation goes on; the pages hold their KV."""
    num_hit_tokens: int = 0
    """Tokens of those that came from the prefix cache."""
    num_shared_pages: int = 0
    """Leading pages that are in the radix tree."""
    is_sharing: bool = True
    """Whether pages that fill up still enter the tree."""
    hot_frames: list[int] = field(default_factory=list)
    """With a host tier: frames of the hot buffer; none while all pages are on the device."""
    num_offloadable: int = 0
    """With a host tier: leading pages that need not be on the device."""
    num_saved: int = 0
    """With a host tier: leading pages that were offered to the host. The host tier sets this."""
    num_kept_pages: int | None = None
    """Leading pages that are the same as when the page tables last looked; None: all. Those set it back to that."""
    num_reserved_tokens: int = 0
    """Tokens that have been computed once all chunks that were reserved are committed."""
    num_ahead_tokens: int = 0
    """Tokens that a later step may have, for which there are pages until these are short."""
    exact_pages: dict[int, int] = field(default_factory=dict)
    """With an exact window: the exact page of each page, by its place in `pages`, as far as this lease holds it."""
    resumed_at: int = 0
    """Where computation was to go on when pages of the tree were last added."""
    replay_until: int = 0
    """Tokens that pages held before they were to be computed: they are not written to pages again."""
    clean_from: int = 0
    """The first token whose exact copy is right in all layers."""
    snapshot_boundaries: dict[int, Place] = field(default_factory=dict)
    """Page boundaries to come at which a snapshot is kept, and what is there."""
    state_slot: int | None = None
    """With recurrent states: the slot that steps read and write; None before the first."""
    state_source: int | None = None
    """A slot of a snapshot, held, from which the next step goes on."""
    state_copies: list[tuple[int, int]] = field(default_factory=list)
    """Slots that the next step copies before it computes: from, to."""
    are_states_lost: bool = False
    """Whether a step raised midway, so that nobody knows what the slot holds."""
    saved_states: dict[int, int] = field(default_factory=dict)
    """Slots that hold, or will with the next step, the states at a page boundary; held, and not in the tree."""
    state_boundaries: dict[int, Place] = field(default_factory=dict)
    """Page boundaries to come at which a snapshot of states is kept, and what is there."""
    rank: int = 0
    """Whose pages these are, where ranks keep those of their own requests."""
    number: int = 0
    """Counts leases, so that snapshots of the same one are known."""
    resumed_place: Place = Place.BRANCH
    """What was at the snapshot after which computation went on."""

    @property
    def resident_pages(self) -> list[int]:
        """Return the pages that must be on the device."""
        return self.pages[self.num_offloadable :]

    @property
    def is_replaying(self) -> bool:
        """Return whether the next token lies in a page already."""
        return self.num_stored_tokens < self.replay_until

    @property
    def has_begun(self) -> bool:
        """Return whether tokens were computed since pages of the tree were last added."""
        return self.num_reserved_tokens > self.resumed_at

    @property
    def last_node(self) -> Node:
        """Return the last page of this lease that is in the tree, or the namespace where none is."""
        return self.pages[self.num_shared_pages - 1] if self.num_shared_pages else self.namespace

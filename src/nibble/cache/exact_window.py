"""The exact window: the newest tokens of each lease in exact pages, and snapshots of them in the prefix tree.

Exact pages are a second pool; each is the copy of one page of a lease in the model's own precision. A prefix that ends
at page boundary `b` can be continued where the exact copies of the pages before `b` are at hand, as many as the window
covers. They are the snapshot at `b`: attached to pages of the tree, and shared like these. Where there is none, tokens
before `b` are replayed: computed again, without being written to pages, which have them already, until copies of them
are right. Two rules keep copies right:

- A replay that begins without a snapshot saw none of the window before its first tokens, so their copies are wrong in
  all layers but the first. Such a copy is never attached to the tree.
- An exact page is given back only by what is committed: steps in flight read what was held when they were reserved.

The first pages of a lease, its sinks, may be read exactly by all tokens after them. A lease holds their copies until it
is closed, and the tree has them beside its pages. Nothing goes on after pages of the tree whose sinks it lacks: these
are computed again from the first that is missing. So copies of sinks are always right.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from nibble.cache.lease import Lease, Place
from nibble.cache.snapshots import SnapshotPages
from nibble.cache.turns import Group, group_at, note_kept, note_use
from nibble.errors import OutOfPages
from nibble.kernels import cdiv


@dataclass(frozen=True, slots=True)
class ExactWindow:
    """The newest tokens of a request, which are kept in the model's own precision too."""

    tokens: int
    """A query at position p reads tokens j with p - j < tokens exactly, and all others from pages."""
    num_layers: int
    """Layers that attend so, one after another."""
    num_pages: int
    """Exact pages of the pool: num_copies() + 1 for each lease that may run, max_pages() for prompts, and max_idle or,
    where that is less, one for each lease to grow into."""
    max_idle: int
    """Most exact pages that only the prefix cache holds."""
    max_drafts: int = 0
    """Most draft tokens of a step, which may be taken back."""
    num_sinks: int = 0
    """Leading pages of a request whose exact copies stay until it ends."""

    def num_copies(self, page_size: int) -> int:
        """Return how many pages before a page boundary have exact copies in a snapshot there."""
        return cdiv(self.tokens, page_size)

    def max_pages(self, page_size: int) -> int:
        """Return the most exact pages that one lease cannot do without: three chunks, two of them in flight."""
        return self.num_sinks + 3 * (self.num_copies(page_size) + 1 + cdiv(self.max_drafts, page_size))

    def clean_from(self, start: int) -> int:
        """Return the first token whose copies are right in all layers, where a replay begins without a snapshot."""
        # Each layer reads the window before a token from the layer below it, so errors reach a window further.
        return start + (self.num_layers - 1) * self.tokens

    def replay_start(self, boundary: int, page_size: int) -> int:
        """Return the last token, at a page's beginning, from which a replay makes a right snapshot.

        Args:
            boundary: where the snapshot is, in pages.
            page_size: tokens of a page.
        """
        # Whole pages must be right: one may become part of another snapshot, that reads it in full.
        first = (boundary - self.num_copies(page_size)) * page_size - self.clean_from(0)
        return max(first, 0) // page_size * page_size


@dataclass(slots=True)
class WindowStats:
    """Counts of exact pages and, over the manager's life, of prefixes and tokens."""

    total: int
    free: int = 0
    in_use: int = 0
    """Exact pages of open leases."""
    idle: int = 0
    """Exact pages of snapshots that only the tree holds."""
    attached: int = 0
    """Exact pages of snapshots, in use or idle."""
    evicted: int = 0
    snapshot_hits: int = 0
    """Prefixes from the cache that were continued at their end."""
    snapshot_misses: int = 0
    """Prefixes from the cache that were replayed in part."""
    replayed_tokens: int = 0


class WindowBooks:
    """The books of all exact pages. The manager calls them as pages of a lease change.

    Args:
        window: what is kept.
        page_size: tokens of a page, and of an exact page.
    """

    def __init__(self, window: ExactWindow, page_size: int) -> None:
        smallest = window.max_pages(page_size)
        assert window.num_pages >= smallest, f"{window.num_pages} exact pages, a lease takes up to {smallest}"
        self.window, self.page_size = window, page_size
        self.num_copies = window.num_copies(page_size)
        """Pages of a snapshot."""
        self.snapshots = SnapshotPages[Group](window.num_pages, window.max_idle)
        self._stats = WindowStats(window.num_pages)

    @property
    def stats(self) -> WindowStats:
        """Return the current counts."""
        snapshots = self.snapshots
        free, idle = snapshots.num_free, snapshots.num_idle
        in_use, attached = snapshots.num_pages - free - idle, len(snapshots)
        return replace(
            self._stats, free=free, in_use=in_use, idle=idle, attached=attached, evicted=snapshots.num_evicted
        )

    def check_lease_room(self, num_leases: int) -> None:
        """Raise OutOfPages where one more lease would leave too few exact pages to so many open ones."""
        # A lease that decodes holds the copies before its last page boundary, that page, and what it grows into.
        growth = max(1, cdiv(self.window.max_drafts, self.page_size))
        needed = (num_leases + 1) * (self.window.num_sinks + self.num_copies + 1 + growth)
        # A lease that is alone has enough.
        if num_leases and needed > self.window.num_pages:
            raise OutOfPages(f"{needed} exact pages are needed, there are {self.window.num_pages}")

    def resume(self, lease: Lease, has_state: Callable[[Lease, int], bool] | None = None) -> None:
        """Choose where computation goes on: at the last snapshot of the shared pages, or a replay before their end.

        Args:
            lease: a lease that has pages of the tree.
            has_state: with recurrent states, whether there is a snapshot of them at a boundary too. A replay then
                begins at both or at the first token: states would remember what it reads without exact copies.
        """
        size, end, previous = self.page_size, lease.num_shared_pages, lease.num_stored_tokens
        was_replaying, rebuild = lease.is_replaying, self.window.replay_start(end, size)
        # To replay sinks from their midst would make wrong copies of them.
        if rebuild < self.window.num_sinks * size or self._sinks(lease, self.window.num_sinks) is None:
            rebuild = 0
        rebuild = 0 if has_state else rebuild
        # A lease that has computed tokens itself can go on after these, too.
        least = max(cdiv(max(previous, rebuild), size), 1)
        usable = (b for b in range(end, least - 1, -1) if has_state is None or has_state(lease, b))
        boundary = next((b for b in usable if self._has_snapshot(lease, b)), None)
        lease.snapshot_boundaries.pop(lease.replay_until // size, None)
        lease.replay_until = end * size
        is_turn = False
        if boundary is not None:
            self._hold(lease, range(max(boundary - self.num_copies, 0), boundary), boundary)
            lease.num_stored_tokens, lease.clean_from = boundary * size, 0
            is_turn = note_use(self.snapshots, lease, lease.exact_pages[boundary - 1])
        elif rebuild > previous:
            self._hold(lease, range(0), self.window.num_sinks)
            lease.num_stored_tokens, lease.clean_from = rebuild, self.window.clean_from(rebuild)
        if lease.num_stored_tokens > previous or not was_replaying:
            lease.resumed_at = lease.num_stored_tokens
        # Others may branch where this one does, unless that is only where a conversation goes on.
        if lease.is_replaying and not is_turn:
            lease.snapshot_boundaries[end] = Place.BRANCH

    def keep_snapshot(self, lease: Lease, boundary: int, place: Place) -> None:
        """Keep a snapshot once `lease` passes `boundary`, if all copies for it are held or still to be computed."""
        size = self.page_size
        if boundary * size <= lease.num_stored_tokens:
            return
        computed = max(lease.num_reserved_tokens, lease.num_stored_tokens)
        places = range(max(boundary - self.num_copies, 0), boundary)
        if all(i in lease.exact_pages or i * size >= computed for i in places):
            # Where prefixes branch, more than the next turn will go on.
            lease.snapshot_boundaries[boundary] = (
                Place.BRANCH if lease.snapshot_boundaries.get(boundary) is Place.BRANCH else place
            )

    def is_ready(self, lease: Lease, upto: int) -> bool:
        """Return whether the chunk before this one was reserved into the same page, as most often in a decode."""
        is_same_page = (upto - 1) // self.page_size * self.page_size < lease.num_reserved_tokens < upto
        return is_same_page and lease.has_begun and not lease.snapshot_boundaries

    def check_room(self, lease: Lease, upto: int, num_drafts: int = 0) -> None:
        """Raise OutOfPages unless the exact pages that `lease` needs for `upto` tokens can be had."""
        needed, snapshots = len(self._required(lease, upto, num_drafts)), self.snapshots
        if needed > snapshots.num_available:
            raise OutOfPages(
                f"{needed} more exact pages are needed, {snapshots.num_available} of {snapshots.num_pages} can be had"
            )

    def reserve(self, lease: Lease, upto: int, num_drafts: int = 0) -> None:
        """Allocate exact pages for the newest of `upto` tokens, and for snapshots before them if there is room.

        Whatever part of the last `num_drafts` is taken back, the newest of those that stay have exact pages.
        """
        if required := self._required(lease, upto, num_drafts):
            self._allocate(lease, required)
        for boundary in sorted(lease.snapshot_boundaries):
            first = boundary - self.num_copies
            # The other pages before this boundary come with a later chunk.
            missing = self._missing(lease, first, min(boundary, cdiv(upto, self.page_size)))
            # Not the last ones, without which a lease that is alone cannot go on.
            if len(missing) + self.window.max_pages(self.page_size) <= self.snapshots.num_available:
                self._allocate(lease, missing)
            else:
                del lease.snapshot_boundaries[boundary]
        if lease.num_shared_pages and not lease.has_begun:
            self._stats.snapshot_hits += not lease.is_replaying
            self._stats.snapshot_misses += lease.is_replaying

    def commit(self, lease: Lease, previous: int) -> None:
        """Keep snapshots at boundaries that `lease` has passed, and give back exact pages that are not needed any more.

        Its full pages are in the tree already; `previous` tokens were stored before.
        """
        stored, pending = lease.num_stored_tokens, lease.snapshot_boundaries
        self._stats.replayed_tokens += max(min(stored, lease.replay_until) - previous, 0)
        full = stored // self.page_size
        if full == previous // self.page_size:
            return
        for boundary in [boundary for boundary in pending if boundary <= full]:
            self._attach(lease, boundary, pending.pop(boundary))
        if previous < self.window.num_sinks * self.page_size:
            self._attach_sinks(lease, full)
        # Only what is committed counts: a step in flight may read the copies before its first token.
        old = [i for i in lease.exact_pages if self._is_old(lease, i, full)]
        self.snapshots.release([lease.exact_pages.pop(i) for i in old])

    def release(self, lease: Lease, is_preempted: bool) -> None:
        """Keep a snapshot at the last full page, and give back all exact pages."""
        place = Place.PREEMPTION if is_preempted else Place.ANSWER_END
        self._attach(lease, lease.num_stored_tokens // self.page_size, place)
        self._hold(lease, range(0))
        lease.snapshot_boundaries.clear()

    def check_integrity(self, leases: Collection[Lease], is_node: Sequence[bool]) -> None:
        """Assert that the books balance, and that each lease holds the copies that its window covers.

        Args:
            leases: all that are open.
            is_node: of each page, whether it is in the tree.
        """
        num_users = [0] * self.snapshots.num_pages
        for lease in leases:
            for page in lease.exact_pages.values():
                num_users[page] += 1
            # Before a replay that begins without a snapshot there are no copies.
            begin = max(lease.clean_from - self.window.clean_from(0), 0)
            stored, size = lease.num_stored_tokens, self.page_size
            places = [
                *range(min(self.window.num_sinks, cdiv(stored, size))),
                *range(max(stored // size - self.num_copies, begin // size, 0), cdiv(stored, size)),
            ]
            missing = [i for i in places if i not in lease.exact_pages]
            assert not missing, f"pages {missing} have no exact copy, with {stored} tokens stored"
        self.snapshots.check_integrity(num_users, is_node)

    def _has_snapshot(self, lease: Lease, boundary: int) -> bool:
        nodes = lease.pages[max(boundary - self.num_copies, 0) : boundary]
        is_whole = all(self.snapshots.value_of(node) is not None for node in nodes)
        return is_whole and self._sinks(lease, boundary) is not None

    def _sinks(self, lease: Lease, boundary: int) -> dict[int, int] | None:
        """Return exact pages of the sinks before `boundary`, of `lease` or of the tree; None where one is missing."""
        num_own, sinks = lease.num_stored_tokens // self.page_size, dict[int, int]()
        for place in range(min(self.window.num_sinks, boundary)):
            own = lease.exact_pages.get(place) if place < num_own else None
            page = self.snapshots.value_of(lease.pages[place]) if own is None else own
            if page is None:
                return None
            sinks[place] = page
        return sinks

    def _hold(self, lease: Lease, places: range, boundary: int = 0) -> None:
        """Hold the attached copies of these pages and the sinks before `boundary`, in place of all that are held."""
        values = {i: self.snapshots.value_of(lease.pages[i]) for i in places}
        copies = {i: value for i, value in values.items() if value is not None}
        copies |= self._sinks(lease, boundary) or {}
        self.snapshots.retain(tuple(copies.values()))
        # Sinks last: all that goes on after them needs them.
        ordered = sorted(lease.exact_pages, key=lambda place: place < self.window.num_sinks)
        self.snapshots.release([lease.exact_pages[place] for place in ordered])
        lease.exact_pages = copies

    def _required(self, lease: Lease, upto: int, num_drafts: int) -> list[int]:
        """Return the pages that need an exact page before `upto` tokens are computed."""
        stop = cdiv(upto, self.page_size)
        first = (upto - num_drafts) // self.page_size - self.num_copies
        num_sinks = min(self.window.num_sinks, stop)
        return self._missing(lease, 0, num_sinks) + self._missing(lease, max(first, num_sinks), stop)

    def _missing(self, lease: Lease, first: int, stop: int) -> list[int]:
        """Return those of the pages first to stop - 1 that have no exact page, and are not computed yet."""
        # A page that is computed in part has its exact page, so no page is missing that steps in flight compute.
        first = max(first, lease.num_stored_tokens // self.page_size)
        return [i for i in range(first, stop) if i not in lease.exact_pages]

    def _allocate(self, lease: Lease, places: Sequence[int]) -> None:
        lease.exact_pages.update(zip(places, self.snapshots.allocate(len(places)), strict=True))

    def _is_pending(self, lease: Lease, place: int) -> bool:
        """Return whether a snapshot to come has a copy of the page at `place`."""
        return any(b - self.num_copies <= place < b for b in lease.snapshot_boundaries)

    def _is_old(self, lease: Lease, place: int, full: int) -> bool:
        """Return whether a lease with `full` full pages needs the copy of the page at `place` no more."""
        is_before = self.window.num_sinks <= place < full - self.num_copies
        return is_before and not self._is_pending(lease, place)

    def _attach_sinks(self, lease: Lease, full: int) -> None:
        """Attach the sinks of `full` full pages, where the tree has these pages."""
        for place in range(min(self.window.num_sinks, full, lease.num_shared_pages)):
            value = self.snapshots.value_of(lease.pages[place])
            if value is None:
                self.snapshots.attach(lease.pages[place], lease.exact_pages[place])
            else:
                # All go on from there, so it belongs to no turn.
                self.snapshots.regroup(value, None)

    def _attach(self, lease: Lease, boundary: int, place: Place) -> None:
        """Keep a snapshot at `boundary`, if the tree has the pages before it and all copies are right."""
        if boundary > lease.num_shared_pages:
            return
        places = range(max(boundary - self.num_copies, 0), boundary)
        missing = [i for i in places if self.snapshots.value_of(lease.pages[i]) is None]
        if not all(i in lease.exact_pages and i * self.page_size >= lease.clean_from for i in missing):
            return
        group = group_at(lease, place)
        for i in places:
            value = self.snapshots.value_of(lease.pages[i])
            if value is None:
                self.snapshots.attach(lease.pages[i], lease.exact_pages[i], group)
            elif self.snapshots.group_of(value) is not None:
                # It is to be used again. What others branch from stays as it is.
                self.snapshots.regroup(value, group)
        note_kept(self.snapshots, lease, place)

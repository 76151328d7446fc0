"""Leases of pages: match a prefix, reserve pages, commit what was computed, release.

Pages are numbers and tokens are plain integers here. These rules make sharing safe:

- Only full pages enter the radix tree, and a page in the tree is never written again.
- A page that is written has one user.
- A lease shares pages only below pages of the tree that it holds itself. Where another request shared an equal page
  first, a lease keeps its own copy private, and all pages that follow it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from nibble.cache.exact_window import ExactWindow, WindowBooks, WindowStats
from nibble.cache.lease import Lease, Place
from nibble.cache.radix_cache import Key, Observer, PageAllocator, RadixCache
from nibble.cache.residency import Residency, TierStats
from nibble.cache.states import StateBooks, StateSlots, StateStats
from nibble.drafts import MAX_DRAFTS
from nibble.errors import OutOfPages


@dataclass(slots=True)
class CacheStats:
    """Counts of pages and, over the manager's life, of tokens."""

    total: int
    free: int = 0
    in_use: int = 0
    """Pages of open leases."""
    cached: int = 0
    """Pages in the tree, in use or idle."""
    idle: int = 0
    """Pages that only the tree holds."""
    evicted: int = 0
    lookup_tokens: int = 0
    """Tokens of all leases that were opened."""
    hit_tokens: int = 0
    """Tokens of those that the prefix cache saved; tokens of a replay are not among them."""
    tier: TierStats | None = None
    window: WindowStats | None = None
    states: StateStats | None = None


class CacheManager:
    """The books of one pool. Not thread-safe: the scheduler owns it.

    Args:
        num_pages: pages of the pool.
        page_size: tokens of a page.
        prefix_cache: whether leases share pages.
        residency: with a host tier, which pages are on the device. A lease then needs all of its pages there, until
            offload() gives it a hot buffer.
        window: the exact window, if any.
        states: slots of recurrent states, if layers have any.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        prefix_cache: bool = True,
        residency: Residency | None = None,
        window: ExactWindow | None = None,
        states: StateSlots | None = None,
    ) -> None:
        assert page_size > 0, f"a page of {page_size} tokens"
        self.rank = 0
        """Whose books these are, where ranks keep pages of their own requests (rank_managers.py)."""
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.residency = residency
        self.leases: set[Lease] = set()
        """All open leases."""
        self.window = window
        self._window = WindowBooks(window, page_size) if window else None
        self._states = StateBooks(states, page_size) if states else None
        self._allocator = PageAllocator(num_pages, residency.free if residency else None)
        self._radix = RadixCache(
            self._allocator, page_size, self._drop_snapshots if window or states else None
        )
        self._stats = CacheStats(num_pages)
        self._num_releases = 0
        self._lease_numbers = itertools.count()

    @property
    def num_pages(self) -> int:
        """Return the number of pages of the pool."""
        return self._allocator.num_pages

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that the pool has room for."""
        return self._allocator.num_pages * self.page_size

    @property
    def num_available_pages(self) -> int:
        """Return the number of pages that can be allocated now: free ones, and idle ones of the tree."""
        return self._allocator.num_free + self._radix.num_idle

    @property
    def num_releases(self) -> int:
        """Return a number that goes up whenever pages or frames may have become free."""
        return self._num_releases + (self.residency.num_releases if self.residency else 0)

    @property
    def stats(self) -> CacheStats:
        """Return the current counts."""
        free, idle = self._allocator.num_free, self._radix.num_idle
        in_use, tier = self._stats.total - free - idle, self.residency.stats if self.residency else None
        return replace(
            self._stats,
            free=free,
            in_use=in_use,
            cached=len(self._radix),
            idle=idle,
            tier=tier,
            window=self._window.stats if self._window else None,
            states=self._states.stats if self._states else None,
        )

    @property
    def keeps_snapshots(self) -> bool:
        """Return whether a prefix goes on from a snapshot: of the newest tokens, of recurrent states, or of both."""
        return self._window is not None or self._states is not None

    def observe(self, observer: Observer) -> None:
        """Tell what happens to the prefix cache from now on, which is emptied first."""
        self.clear()
        self._radix.observer = observer

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages that `tokens` tokens take."""
        return -(-tokens // self.page_size)

    def min_frames(self, leases: Iterable[tuple[int, bool]]) -> int:
        """Return the frames that leases need under pressure, room to grow included; 0 without a host tier.

        Args:
            leases: of each its tokens, and whether it can be reduced to a hot buffer, as a decoding one can.
        """
        if self.residency is None:
            return 0
        # A decoding lease gets by with its hot buffer, the page that it writes, and one to grow into.
        smallest, num_frames = self.residency.frames_per_hot_buffer + 2, 0
        for tokens, decodes in leases:
            # One frame more than the tokens fill: the next token may begin a page.
            needed = self.pages_for(tokens) + 1
            num_frames += min(needed, smallest) if decodes else needed
        return num_frames

    def open(
        self,
        tokens: Sequence[int],
        namespace: str,
        *,
        spare_pages: Mapping[int, int] | int | None = None,
        reserved_frames: int = 0,
        private: bool = False,
        reusable: int | None = None,
    ) -> Lease:
        """Return a lease with the pages of the longest cached prefix of `tokens`, without the last token.

        With an exact window and no snapshot at the prefix's end, computation begins before that.

        Args:
            tokens: the prompt.
            namespace: only leases of the same namespace share pages.
            spare_pages: require that all of `tokens` fit now and leave so many pages free; by rank, or a number.
            reserved_frames: frames that other leases keep, with a host tier.
            private: share no pages.
            reusable: most tokens that cached pages may hold, where it is fewer.

        Raises:
            OutOfPages: the requirement of `spare_pages` does not hold; nothing has changed.
            OutOfFrames: the prefix cannot be loaded back to the device now; nothing has changed.
        """
        sharing = self.prefix_cache and not private
        # The last token is always computed: its logits give the first new token.
        limit = len(tokens) - 1 if reusable is None else reusable
        prefix = self._radix.match(namespace, tokens, limit) if sharing else []
        if spare_pages is not None:
            spare = spare_pages if isinstance(spare_pages, int) else spare_pages.get(self.rank, 0)
            # Idle pages of the prefix are about to be in use, so they cannot be evicted for new pages.
            available = self.num_available_pages - self._radix.num_idle_of(prefix)
            needed = self.pages_for(len(tokens)) - len(prefix)
            if needed + spare > available:
                raise OutOfPages(f"{needed} pages and {spare} to spare are needed, {available} can be had")
            num_frames = self.min_frames([(len(tokens), False)]) + reserved_frames
            # A lease that is alone fits onto the device if it fits into the pool.
            if self.residency and reserved_frames and num_frames > self.residency.num_frames:
                raise OutOfPages(
                    f"{num_frames} frames of the device are needed, there are {self.residency.num_frames}"
                )
            for books in (self._window, self._states):
                if books:
                    books.check_lease_room(len(self.leases))
        lease = Lease(namespace, is_sharing=sharing, number=next(self._lease_numbers), rank=self.rank)
        # Before the lease is in the books: this raises if the prefix does not fit onto the device.
        self._adopt(lease, prefix)
        self.leases.add(lease)
        self._stats.lookup_tokens += len(tokens)
        return lease

    def num_hit_pages(self, tokens: Sequence[int], namespace: str, reusable: int | None) -> int:
        """Return how many pages of the prefix cache open() would find; nothing changes."""
        limit = len(tokens) - 1 if reusable is None else reusable
        return len(self._radix.match(namespace, tokens, limit)) if self.prefix_cache else 0

    def advance(self, lease: Lease, tokens: Sequence[int], reusable: int | None = None) -> int:
        """Add pages of `tokens` that other leases have shared since, and return how many tokens they save.

        With an exact window, a snapshot that has been kept since saves tokens of a replay.

        Args:
            lease: an open lease.
            tokens: the request's tokens.
            reusable: most tokens that cached pages may hold, where it is fewer than all but the last.
        """
        start, num_shared = lease.num_stored_tokens, lease.num_shared_pages
        # Only a lease that has nothing of its own after its last shared page can go on with pages of the tree, and
        # none whose tokens are on their way.
        if not lease.is_sharing or len(lease.pages) > num_shared or lease.num_reserved_tokens > start:
            return 0
        limit = len(tokens) - 1 if reusable is None else reusable
        pages = self._radix.match(lease.last_node, tokens, limit, num_shared * self.page_size)
        # To compute them again is better than to wait for frames.
        if self.residency and self.residency.cost(pages) > self.residency.num_available:
            return 0
        if pages or lease.is_replaying:
            self._adopt(lease, pages)
        return lease.num_stored_tokens - start

    def next_page_key(self, lease: Lease, tokens: Sequence[int]) -> Key | None:
        """Return the key of the next page that `lease` will share; None if `tokens` do not fill it.

        While it replays tokens, that is the page after those that it shares already.
        """
        start = lease.num_shared_pages * self.page_size
        if not lease.is_sharing or start + self.page_size > len(tokens):
            return None
        return self._radix.key(lease.last_node, tokens[start : start + self.page_size])

    def replay_target(self, lease: Lease) -> int | None:
        """Return the page of the tree at whose end a replay of `lease` makes a snapshot; None where there is none."""
        if not lease.is_replaying or not lease.is_sharing:
            return None
        return lease.pages[lease.replay_until // self.page_size - 1]

    def keep_snapshot(self, lease: Lease, tokens: int, place: Place) -> None:
        """Keep a snapshot, if there are any, at the page boundary before `tokens` once `lease` gets there.

        Nothing is kept where it has passed that already, or where exact pages or slots of states are short then.

        Args:
            lease: an open lease.
            tokens: leading tokens of its request.
            place: what is there.
        """
        boundary = tokens // self.page_size
        if not lease.is_sharing:
            return
        # With an exact window, too: computation goes on where both have a snapshot.
        on_the_way = self._states.intervals(boundary) if self._states and place is Place.PROMPT_END else ()
        for books in (self._window, self._states):
            if books:
                for at in on_the_way:
                    books.keep_snapshot(lease, at, Place.BRANCH)
                books.keep_snapshot(lease, boundary, place)

    def next_stop(self, lease: Lease) -> int | None:
        """Return the next token at which a chunk of `lease` ends, so that a snapshot can be kept; None for none."""
        return self._states.next_stop(lease) if self._states else None

    def snapshot_of(self, page: int) -> int | None:
        """Return the exact page that is attached to a page of the tree, None if there is none."""
        return self._window.snapshots.value_of(page) if self._window else None

    def reserve(self, lease: Lease, upto: int, num_drafts: int = 0, *, start: int | None = None) -> None:
        """Allocate pages until `lease` has room for `upto` tokens, and what else its next step needs.

        Args:
            lease: an open lease.
            upto: tokens that are stored once the next chunk is computed.
            num_drafts: the last ones of them, of which a commit may take back any part.
            start: the chunk's first token; None: what follows after all that was reserved.

        Raises:
            OutOfPages: there are too few pages or frames; nothing has changed.
        """
        if self._window is None and self._states is None and upto <= len(lease.pages) * self.page_size:
            lease.num_reserved_tokens = max(lease.num_reserved_tokens, upto)
            return
        needed, window = self.pages_for(upto) - len(lease.pages), self._window
        if window and window.is_ready(lease, upto):
            window = None
        # All checks come before the first change, so that an error leaves nothing half done.
        if window:
            window.check_room(lease, upto, num_drafts)
        if needed > 0:
            self._reserve_pages(lease, needed)
        if window:
            window.reserve(lease, upto, num_drafts)
        if self._states:
            self._states.reserve(lease, lease.num_reserved_tokens if start is None else start)
        lease.num_reserved_tokens = max(lease.num_reserved_tokens, upto)

    def commit(self, lease: Lease, tokens: Sequence[int], upto: int) -> None:
        """Record that the KV of tokens[:upto] is stored, and share the pages that are full.

        Args:
            lease: an open lease with room for `upto` tokens.
            tokens: the request's tokens.
            upto: tokens that are stored, at least as many as before; fewer than reserved where drafts are taken back.
        """
        assert lease.num_stored_tokens <= upto <= min(len(tokens), len(lease.pages) * self.page_size), (
            f"cannot commit {upto}: {lease.num_stored_tokens} stored, {len(tokens)} tokens, {len(lease.pages)} pages"
        )
        previous, lease.num_stored_tokens = lease.num_stored_tokens, upto
        # A page that is not full will be written again, so it stays private.
        full = upto // self.page_size
        while lease.is_sharing and lease.num_shared_pages < full:
            start = lease.num_shared_pages * self.page_size
            page, page_tokens = lease.pages[lease.num_shared_pages], tokens[start : start + self.page_size]
            # If another request shared an equal page first, this lease keeps its own copy and shares no more:
            # a shared page must lie below pages of the tree that the lease itself holds.
            lease.is_sharing = self._radix.insert(lease.last_node, page_tokens, page) == page
            lease.num_shared_pages += lease.is_sharing
        for books in (self._window, self._states):
            if books:
                books.commit(lease, previous)

    def draft_room(self, lease: Lease, start: int) -> int:
        """Return the most draft tokens that a step may have after the token at `start`."""
        # A hot buffer has room for what one token looks at.
        if lease.hot_frames:
            return 0
        return self._states.draft_room(lease, start) if self._states else MAX_DRAFTS

    def reserve_ahead(self, lease: Lease, upto: int) -> None:
        """Allocate pages for `upto` tokens that a later step may have, where so many can be had; see trim()."""
        needed = self.pages_for(upto) - len(lease.pages)
        if needed <= self.num_available_pages and not self.residency:
            lease.num_ahead_tokens = upto
            if needed > 0:
                self._reserve_pages(lease, needed)

    def take_back(self, lease: Lease) -> None:
        """Give back what is reserved behind the last stored token: of drafts that do not count.

        Args:
            lease: an open lease. A step in flight may read what is given back: whoever gets it writes it behind that.
        """
        assert not lease.hot_frames, "a hot buffer is for one new token"
        assert not lease.is_replaying, "a replay has no drafts"
        lease.num_reserved_tokens = lease.num_stored_tokens
        self._shrink(lease, max(lease.num_stored_tokens, lease.num_ahead_tokens))

    def trim(self, lease: Lease) -> None:
        """Give back what reserve_ahead() has allocated, and nobody has reserved since."""
        if lease.num_ahead_tokens:
            lease.num_ahead_tokens = 0
            self._shrink(lease, lease.num_reserved_tokens)

    def _shrink(self, lease: Lease, tokens: int) -> None:
        """Give back pages behind so many tokens."""
        count = self.pages_for(tokens)
        if len(lease.pages) > count:
            surplus = lease.pages[count:]
            del lease.pages[count:]
            if self.residency:
                self.residency.release(surplus)
            self._allocator.release(reversed(surplus))
            lease.num_kept_pages = min(count, count if lease.num_kept_pages is None else lease.num_kept_pages)
            self._num_releases += 1

    def release(self, lease: Lease, is_preempted: bool = False) -> None:
        """Close `lease`; its pages are free unless other leases or the tree hold them.

        A snapshot at its last full page stays, where there are any. is_preempted: the request will come back.
        """
        self.leases.remove(lease)
        for books in (self._window, self._states):
            if books:
                # While the tree has the pages of this lease.
                books.release(lease, is_preempted)
        if self.residency:
            # The residency comes first: a page must have no users there when the allocator frees it.
            # In reverse, so that the beginning of a prefix is evicted last.
            self.residency.release(reversed(lease.resident_pages))
            self.residency.release_hot_buffer(lease.hot_frames)
            lease.hot_frames, lease.num_offloadable = [], 0
        shared, private = lease.pages[: lease.num_shared_pages], lease.pages[lease.num_shared_pages :]
        # In reverse, so that the stack of free pages hands them out in their old order.
        self._allocator.release(reversed(private))
        self._radix.release(shared)
        lease.pages, lease.num_stored_tokens, lease.num_shared_pages = [], 0, 0
        lease.num_reserved_tokens = lease.replay_until = 0
        self._num_releases += 1

    def offload(self, leases: Iterable[Lease]) -> bool:
        """Give hot buffers to the first of these leases, to as many as it takes to free frames.

        A lease with a hot buffer needs only its last page on the device. All leases must be decoding.

        Returns:
            False, with nothing changed, if all of them together would free none.
        """
        assert self.residency
        frames_per_buffer, users, num_freed = self.residency.frames_per_hot_buffer, Counter[int](), 0
        candidates: list[Lease] = []
        for lease in leases:
            # A lease this small would not need fewer frames with a hot buffer.
            if lease.hot_frames or len(lease.pages) <= frames_per_buffer + 1:
                continue
            candidates.append(lease)
            # A page that several leases share becomes free with the last of them.
            for page in lease.pages[:-1]:
                users[page] += 1
                num_freed += users[page] == self.residency.num_users(page)
            # The buffers take frames themselves, so only what goes beyond them is gained.
            if num_freed > frames_per_buffer * len(candidates):
                # All leases give up their pages before the first buffer is allocated: it takes frames of those.
                for candidate in candidates:
                    self._mark_offloadable(candidate)
                for candidate in candidates:
                    candidate.hot_frames = self.residency.allocate_hot_buffer()
                return True
        return False

    def round_trip(self, lease: Lease) -> None:
        """Send a lease's full pages to the host tier, if there is one, and load them back."""
        if self.residency and not lease.hot_frames:
            full = lease.pages[: lease.num_stored_tokens // self.page_size]
            self.residency.release(full)
            # Evicting plans saves and retaining plans loads; the next step applies them in that order.
            self.residency.evict(full)
            self.residency.retain(full)

    def clear(self) -> None:
        """Empty the prefix cache. Open leases keep their pages, which are private from now on."""
        self._radix.clear()
        for books in (self._window, self._states):
            if books:
                books.snapshots.clear()
        for lease in self.leases:
            # Pages that left the tree cannot be parents in it, so these leases share no more.
            lease.num_shared_pages, lease.is_sharing = 0, False
        self._num_releases += 1

    def check_integrity(self) -> None:
        """Assert that a recount of all pages, from the open leases and the tree, agrees with the books."""
        # The tree itself is one user of each of its pages.
        counts = [int(page in self._radix) for page in range(self._allocator.num_pages)]
        for lease in self.leases:
            for page in lease.pages:
                counts[page] += 1
        self._allocator.check_integrity(counts)
        self._radix.check_integrity()
        if self.residency:
            resident = (lease.resident_pages for lease in self.leases)
            self.residency.check_integrity(resident, (lease.hot_frames for lease in self.leases))
        for lease in self.leases:
            self._check_lease(lease)
        nodes = [page in self._radix for page in range(self._allocator.num_pages)]
        for books in (self._window, self._states):
            if books:
                books.check_integrity(self.leases, nodes)

    def _drop_snapshots(self, page: int) -> None:
        """Detach what is attached to a page that leaves the tree."""
        for books in (self._window, self._states):
            if books:
                books.snapshots.drop(page)

    def _reserve_pages(self, lease: Lease, needed: int) -> None:
        """Allocate `needed` more pages. Raises OutOfPages, with nothing changed."""
        assert lease in self.leases, "the lease is not open"
        short = needed - self._allocator.num_free
        if short > self._radix.num_idle:
            total = self._allocator.num_pages
            raise OutOfPages(
                f"{needed} more pages are needed, {self.num_available_pages} of {total} can be had"
            )
        if self.residency:
            # After the check of pages: giving a hot buffer frees frames, but no pages.
            self.residency.check_room(needed)
        if short > 0:
            self._stats.evicted += self._radix.evict(short)
        pages = self._allocator.allocate(needed)
        lease.pages += pages
        if self.residency:
            self.residency.allocate(pages)
            if lease.hot_frames:
                # Only the newest page is written; the pages before it are read through the hot buffer.
                self._mark_offloadable(lease)

    def _mark_offloadable(self, lease: Lease) -> None:
        """Mark all pages but the last as offloadable."""
        assert self.residency
        last = len(lease.pages) - 1
        self.residency.release(lease.pages[lease.num_offloadable : last])
        lease.num_offloadable = last

    def _adopt(self, lease: Lease, pages: list[int]) -> None:
        """Append `pages` of the tree to those of `lease`. Raises OutOfFrames, with nothing changed."""
        if self.residency:
            self.residency.retain(pages)
        self._radix.retain(pages)
        lease.pages += pages
        lease.num_shared_pages += len(pages)
        start = lease.num_stored_tokens
        if self._window:
            end = lease.replay_until
            self._window.resume(lease, self._states.has_snapshot if self._states else None)
            if self._states:
                self._states.follow(lease, start, end)
        elif self._states:
            self._states.resume(lease)
        else:
            lease.num_stored_tokens = lease.num_shared_pages * self.page_size
        lease.num_reserved_tokens = lease.num_stored_tokens
        lease.num_hit_tokens += lease.num_stored_tokens - start
        self._stats.hit_tokens += lease.num_stored_tokens - start

    def _check_lease(self, lease: Lease) -> None:
        pages, num_shared, num_stored = lease.pages, lease.num_shared_pages, lease.num_stored_tokens
        assert len(set(pages)) == len(pages), f"a page is twice in one lease: {pages}"
        # In a replay, pages hold more than the tokens after which computation goes on.
        num_filled = max(num_stored, lease.replay_until) // self.page_size
        assert num_shared <= num_filled, f"{num_shared} pages in the tree, {num_stored} tokens stored"
        assert num_stored <= len(pages) * self.page_size, f"{num_stored} tokens in {len(pages)} pages"
        shared = pages[:num_shared]
        assert self._radix.is_path(lease.namespace, shared), f"{shared} is no path of the tree"
        for page in pages[num_shared:]:
            assert page not in self._radix, f"page {page} is in the tree, but its lease takes it for private"
        # A page that can still be written must have one user, or another request would read half of it.
        for page in pages[num_filled:]:
            users = self._allocator.ref_count(page)
            assert users == 1, f"page {page} can be written by {users} users"

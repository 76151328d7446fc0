"""Who holds which pages: match, reserve, commit, release.

Owns CacheManager and Lease, one request's claim on pages. Knows pages by number and tokens as plain ints.
Must not know what a page's bytes are (pool.py), how requests are scheduled, or torch.

The rules that make sharing safe: only full pages enter the tree, and what is in the tree is never written
again; a page that is written has one holder; a lease enters pages only below pages of the tree that it
holds itself. Where another request was quicker to enter an equal page, a lease keeps its own copy private,
and all that follows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from nibble.cache.offload.residency import Residency, TierStats
from nibble.cache.page_allocator import PageAllocator
from nibble.cache.radix_cache import Key, Node, RadixCache
from nibble.errors import OutOfPages


@dataclass(eq=False, slots=True)
class Lease:
    """One request's pages, in the order of its tokens; `pages` only ever grows. Only the manager changes it, but for
    `offered`, which is the host tier's.

    stored: leading tokens whose KV the pages hold. hit: how many of them came from the prefix cache.
    published: leading pages that are in the tree. publishing: whether pages that fill up still enter it.

    With a host tier: hot, the frames of its hot buffer, none while all of its pages are on the device; dispensable, the
    leading pages that need not be there; offered, those that were offered to the host.
    """

    namespace: str
    pages: list[int] = field(default_factory=list)
    num_stored_tokens: int = 0
    num_hit_tokens: int = 0
    num_shared_pages: int = 0
    publishing: bool = True
    hot: list[int] = field(default_factory=list)
    num_offloadable: int = 0
    num_saved: int = 0

    @property
    def needed(self) -> list[int]:
        """Pages that must be on the device."""
        return self.pages[self.num_offloadable :]

    @property
    def cursor(self) -> Node:
        """The last page of this lease that is in the tree; the namespace, where none is."""
        return self.pages[self.num_shared_pages - 1] if self.num_shared_pages else self.namespace


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts of pages and, over the manager's life, of tokens.

    held: pages of open leases. cached: pages in the tree, in use or idle. idle: those only the tree holds.
    lookup_tokens: tokens of all opened leases. hit_tokens: those found in the prefix cache.
    tier: of the host tier, if there is one.
    """

    total: int
    free: int
    held: int
    cached: int
    idle: int
    evicted: int
    lookup_tokens: int
    hit_tokens: int
    tier: TierStats | None = None


class CacheManager:
    """The books of one pool. Not thread-safe: whoever schedules owns it.

    residency: of its pages, where they share fewer frames on the device; a lease then needs all of its pages there,
    until spill() gives it a hot buffer.
    """

    def __init__(
        self, total_pages: int, page_size: int, prefix_cache: bool = True, residency: Residency | None = None
    ) -> None:
        assert page_size > 0, f"a page of {page_size} tokens"
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.releases = 0  # changes whenever pages may have come free
        self.residency = residency
        self._pages = PageAllocator(total_pages, residency.forget if residency else None)
        self._tree = RadixCache(self._pages, page_size)
        self._leases: set[Lease] = set()
        self._evicted = self._lookup_tokens = self._hit_tokens = 0

    @property
    def capacity(self) -> int:
        """Tokens that the whole pool holds."""
        return self._pages.total * self.page_size

    @property
    def available(self) -> int:
        """Pages that can be had now: free, or idle in the tree."""
        return self._pages.free + self._tree.idle

    @property
    def stats(self) -> CacheStats:
        """How things stand."""
        free, idle, total = self._pages.free, self._tree.idle, self._pages.total
        tokens = (self._lookup_tokens, self._hit_tokens)
        tier = self.residency.stats if self.residency else None
        return CacheStats(
            total, free, total - free - idle, len(self._tree), idle, self._evicted, *tokens, tier
        )

    def pages_for(self, tokens: int) -> int:
        """How many pages `tokens` tokens take."""
        return -(-tokens // self.page_size)

    def least_frames(self, tokens: int, decodes: bool) -> int:
        """Frames that a lease of so many tokens keeps, and grows into, under pressure; 0 without a host tier."""
        if self.residency is None:
            return 0
        needed = self.pages_for(tokens) + 1
        return min(needed, self.residency.hot + 2) if decodes else needed

    def open(
        self,
        tokens: Sequence[int],
        namespace: str,
        *,
        spare: int | None = None,
        kept: int = 0,
        private: bool = False,
    ) -> Lease:
        """A lease with the pages of the longest cached prefix of `tokens`; the last token is never in it.

        spare: raise OutOfPages, with nothing changed, unless all of `tokens` fit now and leave so many
        pages over. kept: frames that others keep. private: share no pages. Raises OutOfFrames, with nothing changed,
        where the prefix cannot be brought back to the device now.
        """
        sharing = self.prefix_cache and not private
        found = self._tree.match(namespace, tokens, len(tokens) - 1) if sharing else []
        if spare is not None:
            left = self.available - self._tree.count_idle(found)
            needed = self.pages_for(len(tokens)) - len(found)
            if needed + spare > left:
                raise OutOfPages(f"{needed} pages and {spare} to spare are needed, {left} can be had")
            if kept:  # alone, whatever fits into the pool fits onto the device
                self._check_frames(self.least_frames(len(tokens), False) + kept)
        if self.residency:
            self.residency.need(found)
        lease = Lease(namespace, publishing=sharing)
        self._leases.add(lease)
        self._lookup_tokens += len(tokens)
        self._join(lease, found)
        return lease

    def _check_frames(self, needed: int) -> None:
        if self.residency and needed > self.residency.frames:
            raise OutOfPages(f"{needed} frames of the device are needed, there are {self.residency.frames}")

    def advance(self, lease: Lease, tokens: Sequence[int]) -> int:
        """Takes over pages of `tokens` that others have entered since; returns how many tokens that saves."""
        at = lease.num_stored_tokens
        if (
            not lease.publishing
            or at != lease.num_shared_pages * self.page_size
            or len(lease.pages) > lease.num_shared_pages
        ):
            return 0  # it has work of its own after its last page in the tree
        found = self._tree.match(lease.cursor, tokens, len(tokens) - 1, at)
        if self.residency:
            if self.residency.cost(found) > self.residency.available:
                return 0  # it computes them anew
            self.residency.need(found)
        self._join(lease, found)
        return len(found) * self.page_size

    def next_page(self, lease: Lease, tokens: Sequence[int]) -> Key | None:
        """What the next page that `lease` enters will stand for; None if `tokens` are too few to fill it."""
        start = lease.num_shared_pages * self.page_size
        if not lease.publishing or start + self.page_size > len(tokens):
            return None
        return self._tree.key(lease.cursor, tokens[start : start + self.page_size])

    def reserve(self, lease: Lease, upto: int) -> None:
        """Gives `lease` pages for `upto` tokens in all; where it raises OutOfPages, nothing has changed."""
        needed = -(-upto // self.page_size) - len(lease.pages)
        if needed <= 0:
            return
        assert lease in self._leases, "the lease is not open"
        short = needed - self._pages.free
        if short > self._tree.idle:
            total = self._pages.total
            raise OutOfPages(f"{needed} more pages are needed, {self.available} of {total} can be had")
        if self.residency:
            self.residency.check_room(needed)  # after pages, which no spill brings
        if short > 0:
            self._evicted += self._tree.evict(short)
        taken = self._pages.allocate(needed)
        lease.pages += taken
        if self.residency:
            self.residency.enter(taken)
            if lease.hot:
                self._dispense(lease)

    def offload(self, leases: Iterable[Lease]) -> bool:
        """Gives the first of these leases, which decode, hot buffers: as many as it takes for that to make room. Of its
        pages each then needs the last alone. False, with nothing changed, where all of them together make none.
        """
        assert self.residency
        hot, held, gain = self.residency.hot, Counter[int](), 0
        chosen: list[Lease] = []
        for lease in leases:
            if lease.hot or len(lease.pages) <= hot + 1:
                continue
            chosen.append(lease)
            for page in lease.pages[:-1]:  # what several share comes free with the last of them
                held[page] += 1
                gain += held[page] == self.residency.needs(page)
            if gain > hot * len(chosen):
                self._spill(chosen)
                return True
        return False

    def _spill(self, leases: Sequence[Lease]) -> None:
        assert self.residency
        for lease in leases:
            self._dispense(lease)
        for lease in leases:
            lease.hot = self.residency.take()

    def _dispense(self, lease: Lease) -> None:
        """All pages but the last become dispensable."""
        assert self.residency
        last = len(lease.pages) - 1
        self.residency.release(lease.pages[lease.num_offloadable : last])
        lease.num_offloadable = last

    def round_trip(self, lease: Lease) -> None:
        """Sends a lease's full pages to the host tier, if there is one, and back: what it reads then has been there."""
        if self.residency and not lease.hot:
            full = lease.pages[: lease.num_stored_tokens // self.page_size]
            self.residency.release(full)
            self.residency.drop(full)
            self.residency.need(full)

    def commit(self, lease: Lease, tokens: Sequence[int], upto: int) -> None:
        """Says that the KV of tokens[:upto] is stored now; pages that it fills enter the tree."""
        assert lease.num_stored_tokens <= upto <= min(len(tokens), len(lease.pages) * self.page_size), (
            f"cannot commit {upto}: {lease.num_stored_tokens} stored, {len(tokens)} known, {len(lease.pages)} pages"
        )
        lease.num_stored_tokens = upto
        full = upto // self.page_size
        while lease.publishing and lease.num_shared_pages < full:
            self._publish(lease, tokens)

    def release(self, lease: Lease) -> None:
        """Closes `lease`: its pages are free, but for those that others or the tree hold."""
        self._leases.remove(lease)
        if self.residency:
            self.residency.release(reversed(lease.needed))  # what a prefix begins with is dropped last
            self.residency.give_back(lease.hot)
            lease.hot, lease.num_offloadable = [], 0
        shared, private = lease.pages[: lease.num_shared_pages], lease.pages[lease.num_shared_pages :]
        self._pages.release(reversed(private))
        self._tree.release(shared)
        lease.pages, lease.num_stored_tokens, lease.num_shared_pages = [], 0, 0
        self.releases += 1

    def clear(self) -> None:
        """Forgets the prefix cache. Open leases keep their pages, but none of these is shared any more."""
        self._tree.clear()
        for lease in self._leases:
            lease.num_shared_pages, lease.publishing = 0, False
        self.releases += 1

    def check_integrity(self) -> None:
        """Recounts all pages from the open leases and the tree; an AssertionError says what is off."""
        counts = [int(page in self._tree) for page in range(self._pages.total)]
        for lease in self._leases:
            for page in lease.pages:
                counts[page] += 1
        self._pages.check(counts)
        self._tree.check()
        if self.residency:
            leases = self._leases
            self.residency.check((lease.needed for lease in leases), (lease.hot for lease in leases))
        for lease in self._leases:
            self._check_lease(lease)

    def _join(self, lease: Lease, found: list[int]) -> None:
        self._tree.retain(found)
        lease.pages += found
        lease.num_shared_pages += len(found)
        lease.num_stored_tokens = lease.num_shared_pages * self.page_size
        lease.num_hit_tokens += len(found) * self.page_size
        self._hit_tokens += len(found) * self.page_size

    def _publish(self, lease: Lease, tokens: Sequence[int]) -> None:
        """Enters the first page that is not in the tree yet, unless an equal one is there."""
        start = lease.num_shared_pages * self.page_size
        page, digit = lease.pages[lease.num_shared_pages], tokens[start : start + self.page_size]
        lease.publishing = self._tree.insert(lease.cursor, digit, page) == page
        lease.num_shared_pages += lease.publishing

    def _check_lease(self, lease: Lease) -> None:
        pages, shown = lease.pages, lease.num_shared_pages
        assert len(set(pages)) == len(pages), f"a page is twice in one lease: {pages}"
        assert shown <= lease.num_stored_tokens // self.page_size, (
            f"{shown} pages in the tree, {lease.num_stored_tokens} tokens stored"
        )
        assert lease.num_stored_tokens <= len(pages) * self.page_size, (
            f"{lease.num_stored_tokens} tokens in {len(pages)} pages"
        )
        assert self._tree.is_path(lease.namespace, pages[:shown]), f"{pages[:shown]} is no path of the tree"
        for page in pages[shown:]:
            assert page not in self._tree, (
                f"page {page} is in the tree, but its lease takes it for a private one"
            )
        for page in pages[lease.num_stored_tokens // self.page_size :]:
            assert self._pages.count(page) == 1, (
                f"page {page} can be written by {self._pages.count(page)} holders"
            )

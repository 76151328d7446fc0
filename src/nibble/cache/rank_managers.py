"""The books of several pools, one of each rank: with data-parallel attention a rank keeps pages of its own requests.

A lease belongs to the rank that open() gives it, and so do its page numbers; prefixes are shared within a rank. To the
scheduler this is one manager: what it asks of a lease is asked of that rank's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from nibble.cache.lease import Lease, Place
from nibble.cache.manager import CacheManager, CacheStats
from nibble.cache.radix_cache import Key, Node, Observer
from nibble.errors import OutOfPages


class RankManagers:
    """One CacheManager for each rank, all of the same size. Without a host tier and recurrent states.

    Args:
        managers: by rank.
    """

    residency = None

    def __init__(self, managers: Sequence[CacheManager]) -> None:
        assert len({(one.num_tokens, one.page_size) for one in managers}) == 1, "ranks have equal pools"
        self.managers = tuple(managers)
        for rank, one in enumerate(managers):
            one.rank = rank
        self.page_size, self.prefix_cache = managers[0].page_size, managers[0].prefix_cache
        self.window = managers[0].window

    def _of(self, lease: Lease) -> CacheManager:
        return self.managers[lease.rank]

    @property
    def leases(self) -> set[Lease]:
        """Return all open leases."""
        return set().union(*(one.leases for one in self.managers))

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that one request may have: those that a rank has room for."""
        return self.managers[0].num_tokens

    @property
    def num_available_pages(self) -> int:
        """Return the number of pages that can be allocated now, of all ranks."""
        return sum(one.num_available_pages for one in self.managers)

    @property
    def num_releases(self) -> int:
        """Return a number that goes up whenever pages may have become free."""
        return sum(one.num_releases for one in self.managers)

    @property
    def stats(self) -> CacheStats:
        """Return the current counts of all ranks together."""
        total: CacheStats = _sum([one.stats for one in self.managers])
        return total

    @property
    def keeps_snapshots(self) -> bool:
        """Return whether a prefix goes on from a snapshot."""
        return self.managers[0].keeps_snapshots

    def observe(self, observer: Observer) -> None:
        """Tell what happens to the prefix caches from now on, which are emptied first.

        A page that several ranks store is told of as often; one of them may remove it while another has it.
        """
        for rank, one in enumerate(self.managers):
            one.observe(_Numbered(observer, rank * one.num_pages))

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages that `tokens` tokens take."""
        return self.managers[0].pages_for(tokens)

    def min_frames(self, leases: Iterable[tuple[int, bool]]) -> int:
        """Return the frames that leases need: 0, as there is no host tier."""
        return 0

    def open(
        self, tokens: Sequence[int], namespace: str, *, spare_pages: Mapping[int, int] | int | None = None,
        reserved_frames: int = 0, private: bool = False, reusable: int | None = None,
    ) -> Lease:  # fmt: skip
        """Return a lease of the rank that is best off with it; see CacheManager.open() and ranks_for().

        Raises:
            OutOfPages: the requirement of `spare_pages` holds for no rank; nothing has changed.
        """
        spare = spare_pages if isinstance(spare_pages, Mapping) else {}
        reasons = list[OutOfPages]()
        for rank in self.ranks_for(tokens, namespace, spare, private=private, reusable=reusable):
            try:
                return self.managers[rank].open(
                    tokens, namespace, spare_pages=spare_pages, private=private, reusable=reusable
                )
            except OutOfPages as error:
                reasons.append(error)
        raise reasons[0]

    def ranks_for(
        self, tokens: Sequence[int], namespace: str, spare: Mapping[int, int], *, private: bool,
        reusable: int | None,
    ) -> list[int]:  # fmt: skip
        """Return the ranks in the order of how little they would have to keep with another request.

        That is the one which has its prefix, unless that is busier than another by more pages than it saves.

        Args:
            tokens: the prompt.
            namespace: only leases of the same namespace share pages.
            spare: pages that running requests take soon, by rank.
            private: it shares no pages.
            reusable: most tokens that cached pages may hold.
        """

        def load(rank: int) -> tuple[int, int]:
            manager = self.managers[rank]
            hit = 0 if private else manager.num_hit_pages(tokens, namespace, reusable)
            held = sum(len(lease.pages) for lease in manager.leases)
            return held + spare.get(rank, 0) - hit, rank

        return sorted(range(len(self.managers)), key=load)

    def advance(self, lease: Lease, tokens: Sequence[int], reusable: int | None = None) -> int:
        """Add pages of `tokens` that other leases have shared since, and return how many tokens they save."""
        return self._of(lease).advance(lease, tokens, reusable)

    def next_page_key(self, lease: Lease, tokens: Sequence[int]) -> Key | None:
        """Return the key of the next page that `lease` will share; None if `tokens` do not fill it."""
        key = self._of(lease).next_page_key(lease, tokens)
        # Nobody waits for a page of another rank.
        return None if key is None else b"%d " % lease.rank + key

    def replay_target(self, lease: Lease) -> int | None:
        """Return the page at whose end a replay of `lease` makes a snapshot, by a number among those of all ranks."""
        page = self._of(lease).replay_target(lease)
        return None if page is None else lease.rank * self._of(lease).num_pages + page

    def keep_snapshot(self, lease: Lease, tokens: int, place: Place) -> None:
        """Keep a snapshot, if there are any, at the page boundary before `tokens` once `lease` gets there."""
        self._of(lease).keep_snapshot(lease, tokens, place)

    def next_stop(self, lease: Lease) -> int | None:
        """Return the next token at which a chunk of `lease` ends; None for none."""
        return self._of(lease).next_stop(lease)

    def reserve(self, lease: Lease, upto: int, num_drafts: int = 0, *, start: int | None = None) -> None:
        """Allocate pages until `lease` has room for `upto` tokens; raise OutOfPages."""
        self._of(lease).reserve(lease, upto, num_drafts, start=start)

    def commit(self, lease: Lease, tokens: Sequence[int], upto: int) -> None:
        """Record that the KV of tokens[:upto] is stored, and share the pages that are full."""
        self._of(lease).commit(lease, tokens, upto)

    def draft_room(self, lease: Lease, start: int) -> int:
        """Return the most draft tokens that a step may have after the token at `start`."""
        return self._of(lease).draft_room(lease, start)

    def reserve_ahead(self, lease: Lease, upto: int) -> None:
        """Allocate pages for `upto` tokens that a later step may have, where so many are free."""
        self._of(lease).reserve_ahead(lease, upto)

    def take_back(self, lease: Lease) -> None:
        """Give back what is reserved behind the last stored token."""
        self._of(lease).take_back(lease)

    def trim(self, lease: Lease) -> None:
        """Give back what reserve_ahead() has allocated, and nobody has reserved since."""
        self._of(lease).trim(lease)

    def release(self, lease: Lease, is_preempted: bool = False) -> None:
        """Close `lease`; its pages are free unless other leases or the tree hold them."""
        self._of(lease).release(lease, is_preempted)

    def offload(self, leases: Iterable[Lease]) -> bool:
        """Give hot buffers to none: there is no host tier."""
        return False

    def round_trip(self, lease: Lease) -> None:
        """Do nothing: there is no host tier."""

    def clear(self) -> None:
        """Empty the prefix caches."""
        for one in self.managers:
            one.clear()

    def check_integrity(self) -> None:
        """Assert that a recount of all pages agrees with the books."""
        for one in self.managers:
            one.check_integrity()


class _Numbered:
    """Tells of the pages of one rank by numbers among those of all ranks."""

    def __init__(self, observer: Observer, first: int) -> None:
        self._observer, self._first = observer, first

    def stored(self, parent: Node, page_tokens: Sequence[int], packed_tokens: bytes, page: int) -> None:
        """Note a page that entered the tree, below `parent`."""
        above = parent + self._first if isinstance(parent, int) else parent
        self._observer.stored(above, page_tokens, packed_tokens, page + self._first)

    def removed(self, page: int) -> None:
        """Note a page that left the tree."""
        self._observer.removed(page + self._first)

    def cleared(self) -> None:
        """Note that all pages left the tree: those of all ranks do at once."""
        self._observer.cleared()


def _sum(parts: Sequence[Any]) -> Any:
    """Return the counts of all ranks added up; what has parts of its own is added up likewise."""
    first = parts[0]
    if not hasattr(first, "__dataclass_fields__"):
        return first if first is None else sum(parts)
    values = {entry.name: _sum([getattr(part, entry.name) for part in parts]) for entry in fields(first)}
    return replace(first, **values)

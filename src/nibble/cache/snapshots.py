"""Values of fixed size that are valid at one place of a prefix, each attached to a page of the prefix tree.

Such a value lies in a page of a pool of its own, its value page. Here are that pool's books: which value pages are
free, which belong to which page of the tree, and which of them only the tree holds. Nothing here knows what a value
is: the manager attaches exact copies of recent tokens, and recurrent states could be attached alike.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from nibble.cache.radix_cache import PageAllocator
from nibble.errors import OutOfPages

Group = TypeVar("Group", bound=Hashable)
"""What an owner names several snapshots by."""


class SnapshotPages(Generic[Group]):
    """Value pages 0 to num_pages - 1: free, held by users, attached to a page of the tree, or both.

    An attachment is one user of its value page. A value page without other users is idle: it is evicted, the longest
    idle first, where more than `max_idle` are idle or where no page is free. What expire() names comes before that.

    Args:
        num_pages: value pages of the pool, at least 1.
        max_idle: most value pages that only the tree holds.
    """

    __slots__ = (
        "_allocator",
        "_expired",
        "_groups",
        "_idle",
        "_nodes",
        "_pages_by_group",
        "_values",
        "max_idle",
        "num_evicted",
    )

    def __init__(self, num_pages: int, max_idle: int) -> None:
        assert max_idle >= 0, f"at most {max_idle} idle pages"
        self.max_idle = max_idle
        self.num_evicted = 0
        self._allocator = PageAllocator(num_pages)
        self._values: dict[int, int] = {}
        self._nodes: dict[int, int] = {}
        self._groups: dict[int, Group] = {}
        self._pages_by_group: dict[Group, set[int]] = {}
        self._expired: set[int] = set()
        self._idle: OrderedDict[int, None] = OrderedDict()  # the first is evicted first

    def __len__(self) -> int:
        return len(self._values)

    @property
    def num_pages(self) -> int:
        """Return the number of value pages of the pool."""
        return self._allocator.num_pages

    @property
    def num_free(self) -> int:
        """Return the number of free value pages."""
        return self._allocator.num_free

    @property
    def num_idle(self) -> int:
        """Return the number of value pages that only the tree holds."""
        return len(self._idle)

    @property
    def num_available(self) -> int:
        """Return the number of value pages that can be allocated now: free ones, and idle ones."""
        return self.num_free + self.num_idle

    def allocate(self, n: int) -> list[int]:
        """Return `n` value pages, which have one user each from now on; idle ones are evicted where none is free.

        Raises:
            OutOfPages: fewer can be had; nothing has changed.
        """
        short = n - self.num_free
        if short > self.num_idle:
            raise OutOfPages(
                f"{n} more pages of snapshots are needed, {self.num_available} of {self.num_pages} can be had"
            )
        self._evict(short)
        return self._allocator.allocate(n)

    def retain(self, pages: Sequence[int]) -> None:
        """Add a user to each of these value pages."""
        self._allocator.retain(pages)
        for page in pages:
            self._idle.pop(page, None)

    def release(self, pages: Iterable[int]) -> None:
        """Remove a user from each of these value pages; of those that become idle, the first is evicted first."""
        for page in pages:
            self._allocator.release((page,))
            if page in self._nodes and self._allocator.ref_count(page) == 1:
                self._idle[page] = None
                if page in self._expired:
                    self._idle.move_to_end(page, last=False)
        self._evict(self.num_idle - self.max_idle)

    def attach(self, node_page: int, page: int, group: Group | None = None) -> bool:
        """Attach a value page, which has a user, to a page of the tree; an older attachment stays.

        Args:
            node_page: the page of the tree.
            page: the value page.
            group: what expire() will name it by.

        Returns:
            Whether it is attached now.
        """
        assert page not in self._nodes, f"page {page} is attached to page {self._nodes[page]} already"
        if node_page in self._values:
            return False
        self._allocator.retain((page,))
        self._values[node_page], self._nodes[page] = page, node_page
        self.regroup(page, group)
        return True

    def regroup(self, page: int, group: Group | None) -> None:
        """Move an attached value page to another group, in which it is not expired."""
        self._expired.discard(page)
        if (previous := self._groups.pop(page, None)) is not None:
            self._pages_by_group[previous].discard(page)
            if not self._pages_by_group[previous]:
                del self._pages_by_group[previous]
        if group is not None:
            self._groups[page] = group
            self._pages_by_group.setdefault(group, set()).add(page)

    def expire(self, group: Group) -> None:
        """Evict what is attached in `group` before all others, once it is idle."""
        for page in self._pages_by_group.get(group, ()):
            self._expired.add(page)
            if page in self._idle:
                self._idle.move_to_end(page, last=False)

    def group_of(self, page: int) -> Group | None:
        """Return the group of an attached value page, None if it has none."""
        return self._groups.get(page)

    def value_of(self, node_page: int) -> int | None:
        """Return the value page that is attached to a page of the tree, None if there is none."""
        return self._values.get(node_page)

    def drop(self, node_page: int) -> None:
        """Detach what is attached to `node_page`, which leaves the tree; other users keep their value page."""
        page = self._values.pop(node_page, None)
        if page is not None:
            self.regroup(page, None)
            del self._nodes[page]
            self._idle.pop(page, None)
            self._allocator.release((page,))

    def clear(self) -> None:
        """Detach everything."""
        for node_page in tuple(self._values):
            self.drop(node_page)

    def check_integrity(self, num_users: Sequence[int], is_node: Sequence[bool]) -> None:
        """Assert that a recount agrees with the books.

        Args:
            num_users: users of each value page, its attachment not counted.
            is_node: of each page that can be in the tree, whether it is.
        """
        assert {page: node for node, page in self._values.items()} == self._nodes, "values and nodes differ"
        grouped = {page: group for group, pages in self._pages_by_group.items() for page in pages}
        assert grouped == self._groups, "groups differ"
        assert self._expired | set(self._groups) <= set(self._nodes), "a value is detached, but in a group"
        strays = [node for node in self._values if not is_node[node]]
        assert not strays, f"values are attached to pages {strays}, which are not in the tree"
        self._allocator.check_integrity([n + (page in self._nodes) for page, n in enumerate(num_users)])
        idle = {page for page in self._nodes if not num_users[page]}
        assert set(self._idle) == idle, f"idle pages are {sorted(idle)}, in the books {sorted(self._idle)}"
        assert self.num_idle <= self.max_idle, f"{self.num_idle} pages are idle, of {self.max_idle} at most"

    def _evict(self, n: int) -> None:
        """Free `n` idle value pages, the longest idle first."""
        for _ in range(n):
            self.drop(self._nodes[next(iter(self._idle))])
            self.num_evicted += 1

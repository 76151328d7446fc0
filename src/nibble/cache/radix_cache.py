"""The prefix cache: a radix tree over whole pages, so that requests with the same beginning share its pages.

Owns RadixCache. A digit of the tree is the tokens of one page, so a node is a page, and a cursor is the page
at which one stands, or a namespace (a string) at the root. Namespaces never mix. Must not know of requests
or torch.

Whoever holds a page of the tree holds the pages above it too; the manager sees to that. So nothing below an
idle page (one that only the tree holds) is in use. As a request's pages become idle last page first, each
idle page stands behind all that hang below it: eviction takes the longest idle page, and that one is always
a leaf.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from struct import Struct

from nibble.cache.page_allocator import PageAllocator

Node = int | str
"""Where one stands in the tree: at a page, or at the root of a namespace."""

Key = bytes
"""The tokens of a page, then the name of the cursor above it. Bytes, as the garbage collector would walk
through millions of tuples, and stop the engine for a tenth of a second.
"""

ROOT = b"/"
"""What the name of a namespace's root starts with, and that of a page does not."""


class RadixCache:
    """Full pages by their tokens and all tokens before them. The tree itself is one holder of its pages."""

    __slots__ = ("_above", "_digit", "_edges", "_idle", "_page_size", "_pages")

    def __init__(self, pages: PageAllocator, page_size: int) -> None:
        self._pages = pages
        self._page_size = page_size
        self._digit = Struct(f"{page_size}q")
        self._edges: dict[Key, int] = {}
        self._above: dict[int, Key] = {}  # the edge that leads to a page
        self._idle: OrderedDict[int, None] = OrderedDict()  # the page that has been idle longest comes first

    def __len__(self) -> int:
        return len(self._above)

    def __contains__(self, page: int) -> bool:
        return page in self._above

    @property
    def idle(self) -> int:
        """How many pages only the tree holds; all of them can be evicted."""
        return len(self._idle)

    def key(self, cursor: Node, digit: Sequence[int]) -> Key:
        """The key of the page that stands for `digit`, the tokens of one full page, below `cursor`."""
        return self._digit.pack(*digit) + _name(cursor)

    def match(self, cursor: Node, tokens: Sequence[int], limit: int, start: int = 0) -> list[int]:
        """The pages that hold tokens[start:limit], as far as the tree has them below `cursor`."""
        edges, edge, size = self._edges, self.key, self._page_size
        found: list[int] = []
        for end in range(start + size, limit + 1, size):
            page = edges.get(edge(cursor, tokens[end - size : end]))
            if page is None:
                break
            found.append(page)
            cursor = page
        return found

    def insert(self, cursor: Node, digit: Sequence[int], page: int) -> int:
        """The page that stands for `digit` below `cursor` from now on: one that was there, else `page`."""
        edge = self.key(cursor, digit)
        there = self._edges.setdefault(edge, page)
        if there == page:
            assert page not in self._above, f"page {page} is in the tree already"
            assert isinstance(cursor, str) or cursor in self._above, f"page {cursor} is not in the tree"
            self._above[page] = edge
            self._pages.retain((page,))
        return there

    def retain(self, pages: Sequence[int]) -> None:
        """One more holder for each of `pages` of the tree."""
        self._pages.retain(pages)
        for page in pages:
            self._idle.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """One holder less for each of `pages`, in order down the tree; those left to the tree are idle."""
        lowest_first = pages[::-1]
        self._pages.release(lowest_first)
        count = self._pages.count
        for page in lowest_first:
            if count(page) == 1:
                self._idle[page] = None

    def count_idle(self, pages: Sequence[int]) -> int:
        """How many of `pages` are idle."""
        return sum(page in self._idle for page in pages)

    def evict(self, n: int) -> int:
        """Frees `n` idle pages, or as many as there are: the longest unused first. Returns how many."""
        evicted = [self._idle.popitem(last=False)[0] for _ in range(min(n, len(self._idle)))]
        for page in evicted:
            del self._edges[self._above.pop(page)]
        self._pages.release(evicted)
        return len(evicted)

    def clear(self) -> None:
        """Forgets all pages, those in use too (they stay with their holders)."""
        self._pages.release(self._above)
        for book in (self._edges, self._above, self._idle):
            book.clear()

    def is_path(self, namespace: str, pages: Sequence[int]) -> bool:
        """Whether `pages` lead down the tree from the root of `namespace`."""
        cursors: list[Node] = [namespace, *pages]
        return all(self._name_above(page) == _name(cursors[i]) for i, page in enumerate(pages))

    def check(self) -> None:
        """Asserts that the tree agrees with itself and with the counts of its pages."""
        assert self._edges == {edge: page for page, edge in self._above.items()}, "edges and pages differ"
        idle = {page for page in self._above if self._pages.count(page) == 1}
        assert set(self._idle) == idle, f"idle pages are {sorted(idle)}, in the books {sorted(self._idle)}"
        place = {page: i for i, page in enumerate(self._idle)}
        for page in self._above:
            name = self._name_above(page)
            if name.startswith(ROOT):
                continue
            above = int(name)
            assert above in self._above, f"page {page} hangs below page {above}, which is gone"
            if above in place:
                assert page in place, f"page {page} is in use below the idle page {above}"
                assert place[page] < place[above], f"page {above} would be evicted before {page} below it"

    def _name_above(self, page: int) -> bytes:
        return self._above.get(page, b"")[self._digit.size :]


def _name(cursor: Node) -> bytes:
    return b"%d" % cursor if isinstance(cursor, int) else ROOT + cursor.encode()

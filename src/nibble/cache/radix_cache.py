"""Free pages with reference counts, and the prefix cache: a radix tree over full pages, which requests share.

In the tree each node is a page: the tokens of that page are its edge. The root is a namespace (a string), and
namespaces never mix.

A user of a page also holds all pages above it; the manager sees to that. So nothing below an idle page (one that only
the tree holds) is in use, and eviction takes leaves only: release() orders the queue of idle pages for that.

Pages are plain numbers here: nothing knows their bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from struct import Struct
from typing import Protocol

from nibble.errors import OutOfPages

Node = int | str
"""A node of the tree: a page, or the root of a namespace."""

Key = bytes
"""The tokens of a page, then the name of its parent. Bytes and not tuples: the garbage collector would walk through
millions of tuples, and stop the engine for a tenth of a second."""

ROOT = b"/"
"""Prefix of the name of a namespace's root; names of pages are digits."""


class PageAllocator:
    """Pages 0 to num_pages - 1, each of them free or held by a number of users.

    Args:
        num_pages: pages of the pool, at least 1.
        on_free: called with each page that becomes free.
    """

    __slots__ = ("_free", "_on_free", "_ref_counts", "num_pages")

    def __init__(self, num_pages: int, on_free: Callable[[int], None] | None = None) -> None:
        assert num_pages > 0, f"a pool of {num_pages} pages"
        self.num_pages = num_pages
        self._on_free = on_free
        self._ref_counts = [0] * num_pages
        # A stack: low pages come first, then the pages that were released last, which caches still hold.
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Return the number of free pages."""
        return len(self._free)

    def ref_count(self, page: int) -> int:
        """Return the number of users of `page`; 0 is free."""
        return self._ref_counts[page]

    def allocate(self, n: int) -> list[int]:
        """Return `n` free pages, which have one user each from now on.

        Raises:
            OutOfPages: fewer pages are free; none is allocated then.
        """
        assert n >= 0, f"cannot allocate {n} pages"
        remaining = len(self._free) - n
        if remaining < 0:
            raise OutOfPages(f"{n} pages are needed, {len(self._free)} of {self.num_pages} are free")
        # From the top of the stack down, as so many single pops would give them.
        pages = self._free[remaining:][::-1]
        del self._free[remaining:]
        for page in pages:
            self._ref_counts[page] = 1
        return pages

    def grow(self, n: int) -> None:
        """Add `n` pages, all of them free."""
        # Below the stack: pages that were in use before are handed out first.
        self._free[:0] = range(self.num_pages + n - 1, self.num_pages - 1, -1)
        self._ref_counts += [0] * n
        self.num_pages += n

    def retain(self, pages: Iterable[int]) -> None:
        """Add a user to each of `pages`, none of which may be free."""
        counts = self._ref_counts
        for page in pages:
            assert counts[page] > 0, f"page {page} is free and cannot be shared"
            counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove a user from each of `pages`; those without users are free."""
        counts, free = self._ref_counts, self._free
        for page in pages:
            remaining = counts[page] - 1
            assert remaining >= 0, f"page {page} is released but has no user"
            counts[page] = remaining
            if not remaining:
                free.append(page)
                if self._on_free:
                    self._on_free(page)

    def check_integrity(self, ref_counts: Sequence[int]) -> None:
        """Assert that a recount, `ref_counts[page]` users of each page, agrees with the books."""
        assert len(ref_counts) == self.num_pages, f"{len(ref_counts)} pages were counted of {self.num_pages}"
        differing = {
            page: counts
            for page, counts in enumerate(zip(self._ref_counts, ref_counts, strict=True))
            if counts[0] != counts[1]
        }
        assert not differing, f"users of pages, as (in the books, recounted): {differing}"
        assert len(set(self._free)) == len(self._free), "a page is twice in the free list"
        unused = {page for page, count in enumerate(self._ref_counts) if not count}
        assert set(self._free) == unused, "free list is off"


class Observer(Protocol):
    """Is told what happens to the tree (cache/events.py)."""

    def stored(self, parent: Node, page_tokens: Sequence[int], packed_tokens: bytes, page: int) -> None:
        """Note a page that entered the tree, below `parent`."""
        ...

    def removed(self, page: int) -> None:
        """Note a page that left the tree."""
        ...

    def cleared(self) -> None:
        """Note that all pages left the tree."""
        ...


class RadixCache:
    """Full pages by their tokens and all tokens before them. The tree itself is one user of its pages.

    Args:
        allocator: of the pages.
        page_size: tokens of a page.
        on_evict: called with each page that evict() takes out of the tree.
    """

    __slots__ = (
        "_allocator",
        "_idle",
        "_keys_by_page",
        "_on_evict",
        "_page_size",
        "_page_tokens",
        "_pages_by_key",
        "observer",
    )

    def __init__(
        self, allocator: PageAllocator, page_size: int, on_evict: Callable[[int], None] | None = None
    ) -> None:
        self._allocator = allocator
        self._on_evict = on_evict
        self._page_size = page_size
        self._page_tokens = Struct(f"{page_size}q")
        self._pages_by_key: dict[Key, int] = {}
        self._keys_by_page: dict[int, Key] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # longest idle first
        self.observer: Observer | None = None

    def __len__(self) -> int:
        return len(self._keys_by_page)

    def __contains__(self, page: int) -> bool:
        return page in self._keys_by_page

    @property
    def num_idle(self) -> int:
        """Return the number of pages that only the tree holds; all of them can be evicted."""
        return len(self._idle)

    def key(self, parent: Node, page_tokens: Sequence[int]) -> Key:
        """Return the key of the page with `page_tokens`, the tokens of one full page, below `parent`."""
        # Each token takes 8 bytes, so the name of the parent begins at a fixed offset.
        return self._page_tokens.pack(*page_tokens) + _name(parent)

    def match(self, node: Node, tokens: Sequence[int], limit: int, start: int = 0) -> list[int]:
        """Return the pages below `node` that hold tokens[start:limit], as far as the tree has them.

        Nothing changes: the next eviction may take them, unless retain() comes first.

        Args:
            node: where the search starts.
            tokens: all tokens of the prompt, those above `node` included.
            limit: end of the search, in tokens.
            start: tokens above `node`, a multiple of the page size.
        """
        pages_by_key, key, size = self._pages_by_key, self.key, self._page_size
        pages: list[int] = []
        # Only full pages are in the tree, so the search ends before a page that `limit` cuts.
        for end in range(start + size, limit + 1, size):
            page = pages_by_key.get(key(node, tokens[end - size : end]))
            if page is None:
                break
            pages.append(page)
            node = page
        return pages

    def insert(self, parent: Node, page_tokens: Sequence[int], page: int) -> int:
        """Return the page of `page_tokens` below `parent` from now on: an older one if there is one, else `page`.

        Args:
            parent: a page of the tree, or a namespace.
            page_tokens: the tokens of one full page.
            page: the page that stores them, which is not in the tree yet.
        """
        key = self.key(parent, page_tokens)
        # The first page with these tokens stays: other requests may read it already.
        owner = self._pages_by_key.setdefault(key, page)
        if owner == page:
            assert page not in self._keys_by_page, f"page {page} is in the tree already"
            assert isinstance(parent, str) or parent in self._keys_by_page, (
                f"page {parent} is not in the tree"
            )
            self._keys_by_page[page] = key
            # The tree is a user of its own, so the page outlives its request.
            self._allocator.retain((page,))
            if self.observer:
                self.observer.stored(parent, page_tokens, key[: self._page_tokens.size], page)
        return owner

    def retain(self, pages: Sequence[int]) -> None:
        """Add a user to each of `pages`, which are in the tree."""
        self._allocator.retain(pages)
        for page in pages:
            self._idle.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """Remove a user from each of `pages`, a path down the tree; pages without other users become idle."""
        # A page enters the idle queue behind all pages below it, so the front of the queue is always a leaf.
        lowest_first = pages[::-1]
        self._allocator.release(lowest_first)
        ref_count = self._allocator.ref_count
        for page in lowest_first:
            # The one user left is the tree.
            if ref_count(page) == 1:
                self._idle[page] = None

    def num_idle_of(self, pages: Sequence[int]) -> int:
        """Return how many of `pages` are idle."""
        return sum(page in self._idle for page in pages)

    def evict(self, n: int) -> int:
        """Free up to `n` idle pages, the longest unused first, and return how many there were."""
        # From the front of the queue, where there are only leaves: no page loses its parent.
        evicted = [self._idle.popitem(last=False)[0] for _ in range(min(n, len(self._idle)))]
        for page in evicted:
            del self._pages_by_key[self._keys_by_page.pop(page)]
            if self._on_evict:
                self._on_evict(page)
            if self.observer:
                self.observer.removed(page)
        self._allocator.release(evicted)
        return len(evicted)

    def clear(self) -> None:
        """Remove all pages from the tree. Pages in use stay with their other users."""
        self._allocator.release(self._keys_by_page)
        for book in (self._pages_by_key, self._keys_by_page, self._idle):
            book.clear()
        if self.observer:
            self.observer.cleared()

    def is_path(self, namespace: str, pages: Sequence[int]) -> bool:
        """Return whether `pages` lead down the tree from the root of `namespace`."""
        parents: list[Node] = [namespace, *pages]
        return all(self._parent_name(page) == _name(parents[i]) for i, page in enumerate(pages))

    def check_integrity(self) -> None:
        """Assert that the tree agrees with itself and with the reference counts of its pages."""
        keys = {key: page for page, key in self._keys_by_page.items()}
        assert self._pages_by_key == keys, "keys and pages differ"
        idle = {page for page in self._keys_by_page if self._allocator.ref_count(page) == 1}
        assert set(self._idle) == idle, f"idle pages are {sorted(idle)}, in the books {sorted(self._idle)}"
        place = {page: i for i, page in enumerate(self._idle)}
        for page in self._keys_by_page:
            name = self._parent_name(page)
            if name.startswith(ROOT):
                continue
            parent = int(name)
            assert parent in self._keys_by_page, f"page {page} hangs below page {parent}, which is gone"
            if parent in place:
                assert page in place, f"page {page} is in use below the idle page {parent}"
                assert place[page] < place[parent], f"page {parent} would be evicted before {page} below it"

    def _parent_name(self, page: int) -> bytes:
        return self._keys_by_page.get(page, b"")[self._page_tokens.size :]


def _name(node: Node) -> bytes:
    return b"%d" % node if isinstance(node, int) else ROOT + node.encode()

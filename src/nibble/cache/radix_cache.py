"""Prefix cache: a radix tree over full pages, so that requests with the same beginning share its pages.

Each node is a page: the tokens of that page are its edge. The root is a namespace (a string), and namespaces never mix.

A user of a page also holds all pages above it; the manager sees to that. So nothing below an idle page (one that only
the tree holds) is in use, and eviction takes leaves only: release() orders the queue of idle pages for that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from struct import Struct

from nibble.cache.page_allocator import PageAllocator

Node = int | str
"""A node of the tree: a page, or the root of a namespace."""

Key = bytes
"""The tokens of a page, then the name of its parent. Bytes and not tuples: the garbage collector would walk through
millions of tuples, and stop the engine for a tenth of a second."""

ROOT = b"/"
"""Prefix of the name of a namespace's root; names of pages are digits."""


class RadixCache:
    """Full pages by their tokens and all tokens before them. The tree itself is one user of its pages."""

    __slots__ = ("_allocator", "_idle", "_keys_by_page", "_page_size", "_page_tokens", "_pages_by_key")

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        self._allocator = allocator
        self._page_size = page_size
        self._page_tokens = Struct(f"{page_size}q")
        self._pages_by_key: dict[Key, int] = {}
        self._keys_by_page: dict[int, Key] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # longest idle first

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
        self._allocator.release(evicted)
        return len(evicted)

    def clear(self) -> None:
        """Remove all pages from the tree. Pages in use stay with their other users."""
        self._allocator.release(self._keys_by_page)
        for book in (self._pages_by_key, self._keys_by_page, self._idle):
            book.clear()

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

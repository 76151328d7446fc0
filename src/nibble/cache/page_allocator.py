"""Free list of the pool's pages, with reference counts: plain numbers, no bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from nibble.errors import OutOfPages


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

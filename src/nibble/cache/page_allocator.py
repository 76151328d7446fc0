"""The free list: which pages are free, and how many holders each other page has.

Owns Pages, plain numbers with reference counts. Must not know what a page holds, who its holders are, or
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from nibble.errors import OutOfPages


class PageAllocator:
    """`total` pages, each free or held by a number of holders. Drop what was taken or shared exactly once.

    freed: told of each page that comes free.
    """

    __slots__ = ("_counts", "_free", "_freed", "total")

    def __init__(self, total: int, freed: Callable[[int], None] | None = None) -> None:
        assert total > 0, f"a pool of {total} pages"
        self.total = total
        self._freed = freed
        self._counts = [0] * total
        self._free = list(range(total - 1, -1, -1))  # a stack: low pages first, then what was dropped last

    @property
    def free(self) -> int:
        """How many pages are free."""
        return len(self._free)

    def count(self, page: int) -> int:
        """How many holders `page` has; 0 is free."""
        return self._counts[page]

    def allocate(self, n: int) -> list[int]:
        """`n` free pages, with one holder each; where there are fewer, raises OutOfPages and takes none."""
        assert n >= 0, f"cannot take {n} pages"
        keep = len(self._free) - n
        if keep < 0:
            raise OutOfPages(f"{n} pages are needed, {len(self._free)} of {self.total} are free")
        taken = self._free[keep:][::-1]
        del self._free[keep:]
        for page in taken:
            self._counts[page] = 1
        return taken

    def extend(self, n: int) -> None:
        """`n` more pages, all of them free."""
        self._free[:0] = range(self.total + n - 1, self.total - 1, -1)
        self._counts += [0] * n
        self.total += n

    def retain(self, pages: Iterable[int]) -> None:
        """One more holder for each of `pages`."""
        counts = self._counts
        for page in pages:
            assert counts[page] > 0, f"page {page} is free and cannot be shared"
            counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder less for each of `pages`; those that have none left are free."""
        counts, free = self._counts, self._free
        for page in pages:
            left = counts[page] - 1
            assert left >= 0, f"page {page} is dropped but has no holder"
            counts[page] = left
            if not left:
                free.append(page)
                if self._freed:
                    self._freed(page)

    def check(self, counts: Sequence[int]) -> None:
        """Asserts that the books say what a recount found: `counts[page]` holders of each page."""
        assert len(counts) == self.total, f"{len(counts)} pages were counted, there are {self.total}"
        wrong = {
            page: (kept, found)
            for page, (kept, found) in enumerate(zip(self._counts, counts, strict=True))
            if kept != found
        }
        assert not wrong, f"holders of pages, as (in the books, recounted): {wrong}"
        assert len(set(self._free)) == len(self._free), "a page is twice in the free list"
        assert set(self._free) == {page for page, kept in enumerate(self._counts) if not kept}, (
            "free list is off"
        )

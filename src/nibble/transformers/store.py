"""The pages of a cache for Transformers: a pool, and who holds which page of it.

Rows of a batch share pages where they have a common past, and a page that several hold is copied before one of them
writes to it: so a beam, a copied cache and a repeated row cost nothing until they differ. Without a bound the pool
grows as it fills up. Owns Row and Store. Must not know of models or batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from nibble.cache.layout import CacheLayout
from nibble.cache.page_allocator import PageAllocator
from nibble.cache.pool import PagedPool
from nibble.cache.scales import KVScales
from nibble.errors import CapacityError, OutOfPages
from nibble.kernels.offload import copy_tokens
from nibble.kernels.types import Paged

FIRST = 1024
"""Tokens that a pool without a bound begins with."""


@dataclass(eq=False, slots=True)
class Row:
    """What one row of a batch has stored: `stored` tokens, in pages in their order."""

    pages: list[int] = field(default_factory=list)
    num_stored_tokens: int = 0


class Store:
    """memory: bytes for pages, which are taken at once; None: as much as it comes to take."""

    def __init__(
        self, layout: CacheLayout, scales: KVScales, device: torch.device, memory: int | None = None
    ) -> None:
        self.layout, self._scales, self._device, self.bounded = layout, scales, device, memory is not None
        pages = -(-FIRST // layout.page_size) if memory is None else memory // layout.bytes_per_page
        if not pages:
            raise CapacityError(
                f"kv_memory {memory} has room for no page of {layout.page_size} tokens, which takes "
                f"{layout.bytes_per_page} bytes"
            )
        self.pool = self._allocate(pages)
        self.pages = PageAllocator(pages)
        self._left: deque[Row] = deque()

    def _allocate(self, pages: int) -> PagedPool:
        try:
            return PagedPool(self.layout, pages, self._scales, self._device)
        except (torch.OutOfMemoryError, RuntimeError) as error:  # the latter on a CPU
            raise CapacityError(
                f"there is no memory for {pages} pages of {self.layout.bytes_per_page} bytes ({error}); a smaller "
                "kv_memory, a kv_format with fewer bytes, or a smaller batch would help"
            ) from error

    @property
    def held(self) -> int:
        """Pages that somebody holds."""
        self._drop_left()
        return self.pages.num_pages - self.pages.num_free

    def reserve(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        """Room for counts[i] more tokens of each row, in pages of its own. Where it raises OutOfPages, nothing has
        changed."""
        self._drop_left()
        size = self.layout.page_size
        for row in rows:
            self.cut(row, row.num_stored_tokens)  # what a step had reserved that broke off
        fresh = [
            -(-(row.num_stored_tokens + count) // size) - len(row.pages)
            for row, count in zip(rows, counts, strict=True)
        ]
        shared = list(self._written_by_several(rows))
        self._make_room(sum(fresh) + len(shared))
        copies = [(row, row.pages[-1], self.pages.allocate(1)[0]) for row in shared]
        for row, _, page in copies:
            row.pages[-1] = page
        self._copy(self.pool, [old for _, old, _ in copies], self.pool, [new for _, _, new in copies])
        self.pages.release(old for _, old, _ in copies)
        for row, count in zip(rows, fresh, strict=True):
            row.pages += self.pages.allocate(count)

    def _written_by_several(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Rows whose last page has room left, and other holders; the last of its holders among them may keep it."""
        holders: dict[int, int] = {}
        for row in rows:
            if row.num_stored_tokens % self.layout.page_size:
                page = row.pages[-1]
                left = holders.setdefault(page, self.pages.ref_count(page))
                if left > 1:
                    holders[page] = left - 1
                    yield row

    def _make_room(self, needed: int) -> None:
        total, free, size = self.pages.num_pages, self.pages.num_free, self.layout.page_size
        if needed <= free:
            return
        if self.bounded:
            raise OutOfPages(
                f"the cache is full: {needed} more pages of {size} tokens are needed, and {free} of its {total} are "
                "free; a larger kv_memory (or none: it then grows), a kv_format with fewer bytes, shorter answers or "
                "a smaller batch would help, and reset() frees what is held"
            )
        grown = max(2 * total, total - free + needed)
        pool = self._allocate(grown)
        every = range(total)
        self._copy(self.pool, every, pool, every)
        self.pool = pool
        self.pages.grow(grown - total)

    def _copy(self, source: PagedPool, old: Sequence[int], target: PagedPool, new: Sequence[int]) -> None:
        """Copies whole pages."""
        if not old:
            return
        from_M, to_M = self._slots(old), self._slots(new)
        for here, there in zip(_streams(source), _streams(target), strict=True):
            copy_tokens(here, from_M, there, to_M)

    def _slots(self, pages: Sequence[int]) -> torch.Tensor:
        size = self.layout.page_size
        first = torch.tensor(pages, dtype=torch.int64, device=self._device) * size
        return (first[:, None] + torch.arange(size, device=self._device)).flatten()

    def fork(self, row: Row) -> Row:
        """Another row with the same past."""
        self.cut(row, row.num_stored_tokens)
        self.pages.retain(row.pages)
        return Row(list(row.pages), row.num_stored_tokens)

    def cut(self, row: Row, stored: int) -> None:
        """Forgets all tokens of `row` but the first `stored`."""
        keep = -(-stored // self.layout.page_size)
        self.pages.release(reversed(row.pages[keep:]))
        del row.pages[keep:]
        row.num_stored_tokens = stored

    def leave(self, rows: Iterable[Row]) -> None:
        """Rows that nobody will ask for again. May be said at any time, in the middle of anything: a garbage collector
        does."""
        self._left.extend(rows)

    def _drop_left(self) -> None:
        while self._left:
            self.cut(self._left.popleft(), 0)


def _streams(pool: PagedPool) -> Iterator[Paged]:
    return (entry.paged for view in pool.views.values() for entry in view.streams.values())

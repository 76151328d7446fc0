"""The pages of a cache for Transformers: a pool, and who holds which page of it.

Rows of a batch share pages where they have a common past, and a page that several hold is copied before one of them
writes to it: so a beam, a copied cache and a repeated row cost nothing until they differ. Without a bound the pool
grows as it fills up.
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

FIRST_TOKENS = 1024
"""Tokens that a pool without a bound begins with."""


@dataclass(eq=False, slots=True)
class Row:
    """What one row of a batch has stored: tokens in pages, in their order."""

    pages: list[int] = field(default_factory=list)
    num_stored_tokens: int = 0


class Store:
    """A pool and the books of its pages.

    Args:
        layout: of the pages.
        scales: of the pool.
        device: where pages are.
        memory: bytes for pages, allocated at once; None: the pool grows.

    Raises:
        CapacityError: there is no memory for the pages, or `memory` has room for none.
    """

    def __init__(
        self, layout: CacheLayout, scales: KVScales, device: torch.device, memory: int | None = None
    ) -> None:
        self.layout, self._scales, self._device, self.bounded = layout, scales, device, memory is not None
        pages = -(-FIRST_TOKENS // layout.page_size) if memory is None else memory // layout.bytes_per_page
        if not pages:
            raise CapacityError(
                f"kv_memory {memory} has room for no page of {layout.page_size} tokens, which takes "
                f"{layout.bytes_per_page} bytes"
            )
        self.pool = self._allocate(pages)
        self.pages = PageAllocator(pages)
        self._dropped: deque[Row] = deque()

    def _allocate(self, pages: int) -> PagedPool:
        try:
            return PagedPool(self.layout, pages, self._scales, self._device)
        except (torch.OutOfMemoryError, RuntimeError) as error:  # the latter on a CPU
            raise CapacityError(
                f"there is no memory for {pages} pages of {self.layout.bytes_per_page} bytes ({error}); a smaller "
                "kv_memory, a kv_format with fewer bytes, or a smaller batch would help"
            ) from error

    @property
    def num_used_pages(self) -> int:
        """Return the number of pages of all rows."""
        self._release_dropped()
        return self.pages.num_pages - self.pages.num_free

    def reserve(self, rows: Sequence[Row], counts: Sequence[int]) -> None:
        """Reserve room for more tokens of each row, in pages of its own.

        Args:
            rows: of a batch.
            counts: new tokens of each.

        Raises:
            OutOfPages: there are too few pages; nothing has changed.
        """
        self._release_dropped()
        size = self.layout.page_size
        # A step that failed may have left reserved pages.
        for row in rows:
            self.cut(row, row.num_stored_tokens)
        new_pages = [
            -(-(row.num_stored_tokens + count) // size) - len(row.pages)
            for row, count in zip(rows, counts, strict=True)
        ]
        shared = list(self._rows_to_copy(rows))
        self._make_room(sum(new_pages) + len(shared))
        copies = [(row, row.pages[-1], self.pages.allocate(1)[0]) for row in shared]
        for row, _, page in copies:
            row.pages[-1] = page
        self._copy(self.pool, [old for _, old, _ in copies], self.pool, [new for _, _, new in copies])
        self.pages.release(old for _, old, _ in copies)
        for row, count in zip(rows, new_pages, strict=True):
            row.pages += self.pages.allocate(count)

    def _rows_to_copy(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yield rows whose last page has room left and other users; the last of its users may keep it."""
        users: dict[int, int] = {}
        for row in rows:
            if row.num_stored_tokens % self.layout.page_size:
                page = row.pages[-1]
                count = users.setdefault(page, self.pages.ref_count(page))
                if count > 1:
                    users[page] = count - 1
                    yield row

    def _make_room(self, needed: int) -> None:
        """Grow the pool until `needed` pages are free, or raise OutOfPages where it is bounded."""
        total, free, size = self.pages.num_pages, self.pages.num_free, self.layout.page_size
        if needed <= free:
            return
        if self.bounded:
            raise OutOfPages(
                f"the cache is full: {needed} more pages of {size} tokens are needed, and {free} of its {total} are "
                "free; a larger kv_memory (or none: it then grows), a kv_format with fewer bytes, shorter answers or "
                "a smaller batch would help, and reset() frees what is held"
            )
        # Twice as many, so that growing pools are copied rarely.
        new_total = max(2 * total, total - free + needed)
        pool = self._allocate(new_total)
        old_pages = range(total)
        self._copy(self.pool, old_pages, pool, old_pages)
        self.pool = pool
        self.pages.grow(new_total - total)

    def _copy(self, source: PagedPool, old: Sequence[int], target: PagedPool, new: Sequence[int]) -> None:
        """Copy pages in full."""
        if not old:
            return
        from_M, to_M = self._slots(old), self._slots(new)
        for old_plane, new_plane in zip(_streams(source), _streams(target), strict=True):
            copy_tokens(old_plane, from_M, new_plane, to_M)

    def _slots(self, pages: Sequence[int]) -> torch.Tensor:
        size = self.layout.page_size
        first = torch.tensor(pages, dtype=torch.int64, device=self._device) * size
        return (first[:, None] + torch.arange(size, device=self._device)).flatten()

    def fork(self, row: Row) -> Row:
        """Return another row with the same past."""
        # Pages that are reserved and empty must not be shared.
        self.cut(row, row.num_stored_tokens)
        self.pages.retain(row.pages)
        return Row(list(row.pages), row.num_stored_tokens)

    def cut(self, row: Row, num_tokens: int) -> None:
        """Drop all tokens of `row` but the first `num_tokens`."""
        keep = -(-num_tokens // self.layout.page_size)
        self.pages.release(reversed(row.pages[keep:]))
        del row.pages[keep:]
        row.num_stored_tokens = num_tokens

    def release_later(self, rows: Iterable[Row]) -> None:
        """Release rows before the next step. May be called at any time: a garbage collector does, amid anything."""
        # Only noted: to release pages here could fall into the midst of another release.
        self._dropped.extend(rows)

    def _release_dropped(self) -> None:
        while self._dropped:
            self.cut(self._dropped.popleft(), 0)


def _streams(pool: PagedPool) -> Iterator[Paged]:
    return (entry.paged for view in pool.views.values() for entry in view.streams.values())

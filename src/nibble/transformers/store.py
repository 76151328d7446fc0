"""What a cache for Transformers stores in pages, and the steps that store it.

Rows of a batch share pages where they have a common past, and a page that several hold is copied before one of them
writes to it: so a beam, a copied cache and a repeated row cost nothing until they differ. Without a bound the pool
grows as it fills up.

Transformers gives a rectangle of tokens, some of them padding; a step is a list of tokens without padding, requests of
one phase side by side, and its logits go back into the rectangle.

Shape suffixes: B rows of the batch, Q new columns, C columns whose logits are returned, T tokens of the step, S tokens
whose logits are computed, V vocabulary, M tokens that are copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from nibble.attention.recurrent import RecurrentStates
from nibble.cache.layout import CacheLayout
from nibble.cache.pool import PagedPool
from nibble.cache.radix_cache import PageAllocator
from nibble.cache.scales import KVScales
from nibble.engine.request import PHASE_ORDER
from nibble.errors import CapacityError, OutOfPages
from nibble.kernels import ALIGNED, cdiv
from nibble.kernels.offload import copy_tokens
from nibble.kernels.types import AttentionBatch, AttentionMetadata, Paged
from nibble.model_spec import Phase
from nibble.transformers.states import RowState, StateStore


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What the model is called with, and how its logits become Transformers'."""

    token_ids_T: Tensor
    positions_T: Tensor
    logit_rows_S: Tensor
    """Tokens whose logits are computed."""
    meta: AttentionMetadata
    token_at_BC: Tensor
    """The token of each column whose logits are returned, on the host; negative for padding."""
    order: tuple[int, ...]
    """Rows of the batch that have new tokens, in the order of the step."""

    def unpack(self, logits_SV: Tensor) -> Tensor:
        """Return logits as Transformers has them -> [B, C, V]; zeros for padding."""
        # Without padding the logits lie as they should already.
        if len(logits_SV) == self.token_at_BC.numel():
            return logits_SV.view(*self.token_at_BC.shape, -1)
        logits_BCV = logits_SV.new_zeros(*self.token_at_BC.shape, logits_SV.shape[-1])
        logits_BCV[(self.token_at_BC >= 0).to(logits_SV.device)] = logits_SV
        return logits_BCV


def _phase_of(num_stored: int, count: int) -> Phase:
    if not num_stored:
        return Phase.PREFILL
    return Phase.DECODE if count == 1 else Phase.EXTEND


def count_tokens(new_BQ: Tensor) -> tuple[int, ...]:
    """Return the number of new tokens of each row."""
    return tuple(new_BQ.sum(1).tolist())


def kept_columns(keep: Any, width: int) -> Tensor:
    """Return logits_to_keep as columns: the last so many, 0 or None for all, or a tensor of them."""
    if isinstance(keep, Tensor):
        return torch.arange(width)[keep.cpu()]
    return torch.arange(width)[-keep:] if keep else torch.arange(width)


def pack(
    rows: Sequence[Row],
    page_size: int,
    new_BQ: Tensor,
    ids_BQ: Tensor,
    positions_BQ: Tensor | None,
    columns_C: Tensor,
) -> Step:
    """Return the step of new tokens.

    Args:
        rows: of the batch, with pages for the new tokens.
        page_size: tokens of a page.
        new_BQ: which columns are tokens, on the host.
        ids_BQ: token ids.
        positions_BQ: as the caller counts them, perhaps one row for all; None: as they are stored.
        columns_C: columns whose logits are returned, on the host.
    """
    counts, width, device = count_tokens(new_BQ), new_BQ.shape[1], ids_BQ.device
    phases = [_phase_of(row.num_stored_tokens, count) for row, count in zip(rows, counts, strict=True)]
    # A row whose new columns are all padding has no part in the step.
    order = sorted((i for i, count in enumerate(counts) if count), key=lambda i: PHASE_ORDER.index(phases[i]))
    places_T = torch.cat([new_BQ[i].nonzero()[:, 0] + i * width for i in order])
    positions = [
        torch.arange(rows[i].num_stored_tokens, rows[i].num_stored_tokens + counts[i]) for i in order
    ]
    slots = [
        torch.tensor(rows[i].pages)[at // page_size] * page_size + at % page_size
        for i, at in zip(order, positions, strict=True)
    ]
    device_places_T = places_T.to(device)
    # Of each place in the batch the token that lies there, -1 for padding.
    token_at = torch.full((new_BQ.numel(),), -1)
    token_at[places_T] = torch.arange(len(places_T))
    token_at_BC = token_at.view(new_BQ.shape)[:, columns_C]
    if positions_BQ is None:
        positions_T = torch.cat(positions).to(device)
    else:
        positions_T = positions_BQ.to(device).expand(ids_BQ.shape).reshape(-1)[device_places_T]
    return Step(
        ids_BQ.reshape(-1)[device_places_T],
        positions_T,
        token_at_BC[token_at_BC >= 0].to(device),
        AttentionMetadata(torch.cat(slots).to(device), _batches(rows, order, phases, counts, device)),
        token_at_BC,
        tuple(order),
    )


def _batches(
    rows: Sequence[Row],
    order: Sequence[int],
    phases: Sequence[Phase],
    counts: Sequence[int],
    device: torch.device,
) -> tuple[AttentionBatch, ...]:
    """Return an attention batch for each phase."""
    batches: list[AttentionBatch] = []
    for phase, group in groupby(order, key=lambda i: phases[i]):
        members = tuple(group)
        start = batches[-1].stop if batches else 0
        pages = [rows[i].pages for i in members]
        width = max(map(len, pages))
        # Triton compiles a kernel anew for rows that are not on a grid of 16 bytes.
        stride = cdiv(width, ALIGNED) * ALIGNED
        table = torch.tensor([row + [0] * (stride - len(row)) for row in pages], dtype=torch.int32)
        page_table_BN = table.to(device)[:, :width]
        query_lens = [counts[i] for i in members]
        seq_lens = [rows[i].num_stored_tokens + counts[i] for i in members]
        batches.append(AttentionBatch.from_lens(phase, start, query_lens, seq_lens, page_table_BN))
    return tuple(batches)


FIRST_TOKENS = 1024
"""Tokens that a pool without a bound begins with."""


@dataclass(eq=False, slots=True)
class Row:
    """What one row of a batch has stored: tokens in pages, in their order."""

    pages: list[int] = field(default_factory=list)
    num_stored_tokens: int = 0
    state: RowState | None = None
    """Of recurrent layers, once there are tokens."""


class Store:
    """A pool and the books of its pages.

    Args:
        layout: of the pages.
        scales: of the pool.
        device: where pages are.
        memory: bytes for pages, allocated at once; None: the pool grows.
        states: slots of recurrent states, if layers have any.

    Raises:
        CapacityError: there is no memory for the pages, or `memory` has room for none.
    """

    def __init__(
        self,
        layout: CacheLayout,
        scales: KVScales,
        device: torch.device,
        memory: int | None = None,
        states: StateStore | None = None,
    ) -> None:
        self.layout, self._scales, self._device, self.bounded = layout, scales, device, memory is not None
        pages = cdiv(FIRST_TOKENS, layout.page_size) if memory is None else memory // layout.bytes_per_page
        if not pages:
            raise CapacityError(
                f"kv_memory {memory} has room for no page of {layout.page_size} tokens, which takes "
                f"{layout.bytes_per_page} bytes"
            )
        self.pool = self._allocate(pages)
        self.pages = PageAllocator(pages)
        self.states = states
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
            cdiv(row.num_stored_tokens + count, size) - len(row.pages)
            for row, count in zip(rows, counts, strict=True)
        ]
        shared = list(self._rows_to_copy(rows))
        self._make_room(sum(new_pages) + len(shared))
        old_pages, copies = [row.pages[-1] for row in shared], self.pages.allocate(len(shared))
        self._copy(self.pool, old_pages, self.pool, copies)
        for row, page in zip(shared, copies, strict=True):
            row.pages[-1] = page
        self.pages.release(old_pages)
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
        if self.states and row.state:
            self.states.retain(row.state)
        return Row(list(row.pages), row.num_stored_tokens, row.state)

    def cut(self, row: Row, num_tokens: int) -> None:
        """Drop all tokens of `row` but the first `num_tokens`."""
        keep = cdiv(num_tokens, self.layout.page_size)
        self.pages.release(reversed(row.pages[keep:]))
        del row.pages[keep:]
        row.num_stored_tokens = num_tokens
        if self.states and row.state and not num_tokens:
            self.states.release(row.state)
            row.state = None

    def least_tokens(self, row: Row) -> int:
        """Return the fewest tokens to which `row` can be cut, beside none at all."""
        return row.state.settled if row.state else 0

    @contextmanager
    def recurrent(
        self, rows: Sequence[Row], order: Sequence[int], counts: Sequence[int]
    ) -> Iterator[RecurrentStates | None]:
        """Lend a call the recurrent states of its rows, if there are any; a call that fails changes none.

        Args:
            rows: of the batch.
            order: those with new tokens, in the order of the step.
            counts: new tokens of each row.
        """
        if self.states is None:
            yield None
            return
        starts, lengths = [rows[i].num_stored_tokens for i in order], [counts[i] for i in order]
        step = self.states.begin([rows[i].state for i in order], starts, lengths)
        try:
            yield step.states
        except BaseException:
            self.states.withdraw(step)
            raise
        self.states.commit(step)
        for i, state in zip(order, step.after, strict=True):
            rows[i].state = state

    def release_later(self, rows: Iterable[Row]) -> None:
        """Release rows before the next step. May be called at any time: a garbage collector does, amid anything."""
        # Only noted: to release pages here could fall into the midst of another release.
        self._dropped.extend(rows)

    def _release_dropped(self) -> None:
        while self._dropped:
            self.cut(self._dropped.popleft(), 0)


def _streams(pool: PagedPool) -> Iterator[Paged]:
    return (entry.paged for view in pool.views.values() for entry in view.streams.values())

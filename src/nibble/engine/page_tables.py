"""What the device remembers of open leases between steps, and the integers that a step sends there.

Shape suffixes: R rows of the tables, one for each open lease and one for padding, N pages of a request.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nibble.cache.lease import Lease
from nibble.drafts import MAX_DRAFTS
from nibble.kernels import ALIGNED, cdiv
from nibble.kernels.step_inputs import ON_DEVICE, Tables, Verified, resolve_ids
from nibble.kernels.transfer import HostInputs, PinnedBuffers, to_device


class PackedInts:
    """All small integers of a step, one list after another, which go to the device in one copy."""

    def __init__(self) -> None:
        self._ints = array("q")

    def add(self, values: Iterable[int]) -> slice:
        """Append a list, and return where it lies."""
        # Triton compiles a kernel anew for pointers that are not on a grid of 16 bytes.
        start = cdiv(len(self._ints), ALIGNED) * ALIGNED
        self._ints.extend((0,) * (start - len(self._ints)))
        self._ints.extend(values)
        return slice(start, len(self._ints))

    def on_host(self) -> Tensor:
        """Return all integers as one int64 tensor on the host; nothing can be added from then on."""
        if not self._ints:  # which frombuffer() refuses
            return torch.empty(0, dtype=torch.int64)
        return torch.frombuffer(self._ints, dtype=torch.int64)

    def add_inputs(self, values: Iterable[int]) -> slice:
        """Append the inputs of a recorded step with drafts, with their header in front, and return where both lie."""
        return self.add((*(0,) * HostInputs.HEADER, *values))

    def number(self, part: slice, number: int) -> None:
        """Give inputs their number."""
        self._ints[part.start] = number

    def write(self, part: slice, to: HostInputs) -> None:
        """Write a list to where a recorded step copies it from."""
        to.write(self._ints, part)


@dataclass(frozen=True, slots=True)
class SentUpdates:
    """Where a step's updates of page tables lie in its integers."""

    places: slice
    pages: slice
    slot_rows: slice
    slots: slice
    exact: tuple[slice, slice, slice] | None
    tier: Any
    """Of the host tier."""

    @property
    def any_pages(self) -> bool:
        """Return whether there are any, but those of the host tier."""
        parts = (self.places, self.slot_rows, *(self.exact or ()))
        return any(part.start < part.stop for part in parts)


NO_UPDATES = SentUpdates(slice(0, 0), slice(0, 0), slice(0, 0), slice(0, 0), None, None)


class PageTables:
    """What the device remembers of open leases between steps: page ids, and the token that each sampled last.

    Args:
        rows: most leases that are open at a time.
        width: most pages of a lease.
        device: where the tables lie.
        empty_page: with an exact window, the exact page that stands for one that is not kept.
        has_states: whether leases have slots of recurrent states.
    """

    def __init__(
        self,
        rows: int,
        width: int,
        device: torch.device | str,
        empty_page: int | None = None,
        has_states: bool = False,
    ) -> None:
        self.table_RN = torch.zeros(rows + 1, width, dtype=torch.int32, device=device)
        """Page ids. A step sends only those that are new."""
        self.latest_R = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        """The token sampled last: the next step takes it from here before the host knows it."""
        self.drafts_KR: Tensor | None = None
        """Drafts of a head that the host has not read, of two steps, by their place in a draft; where there are any."""
        self.verified: Verified | None = None
        """What the last step with drafts brought, where the next may be launched before that is read."""
        self.device = self.table_RN.device
        self.padding_row = rows
        """The row of no lease; it pads steps that have too few requests."""
        self._rows: dict[Lease, int] = {}
        self._num_filled = [0] * rows
        self._free = list(range(rows - 1, -1, -1))
        self._new_places: list[int] = []
        self._new_pages: list[int] = []
        self.exact: ExactTable | None = None
        """The exact pages of leases, with an exact window."""
        if empty_page is not None:
            self.exact = ExactTable(self.table_RN, empty_page)
        self.slots_R: Tensor | None = None
        """int32 slots of recurrent states, where there are any; -1 in the row of padding."""
        if has_states:
            self.slots_R = torch.full((rows + 1,), -1, dtype=torch.int32, device=device)
        self._pinned = PinnedBuffers(self.device) if self.device.type == "cuda" else None
        self._slots: dict[int, int] = {}
        """What the device knows of them by row."""
        self._new_slots: dict[int, int] = {}

    @torch.inference_mode()
    def keep_drafts(self) -> None:
        """Make room for drafts that are verified before the host knows them, and for what they bring."""
        shape = 2 * MAX_DRAFTS, len(self.latest_R)
        self.drafts_KR = torch.zeros(shape, dtype=torch.int64, device=self.device)
        stored_R, counts_R = (torch.zeros_like(self.latest_R) for _ in range(2))
        runs_RK = torch.zeros(shape[1], 1 + MAX_DRAFTS, dtype=torch.int64, device=self.device)
        self.verified = Verified(self.latest_R, stored_R, counts_R, runs_RK)

    def unread(self, place: int, column: int) -> int:
        """Return the id that stands for a draft that the device has in drafts_KR."""
        return ON_DEVICE - 1 - place * len(self.latest_R) - column

    def buffer_of(self, unread: int) -> int:
        """Return which of two steps a draft is of, by the id that stands for it."""
        return (ON_DEVICE - 1 - unread) // len(self.latest_R) // MAX_DRAFTS

    @torch.inference_mode()
    def counts_behind(self, leases: Iterable[Lease], counts: Iterable[int]) -> Tensor:
        """Return counts [S] to which what is stored of leases is added, which the host does not know."""
        rows_S, counts_S = (
            to_device(x, torch.int64, self.device) for x in ([self.row_of(one) for one in leases], [*counts])
        )
        return self.stored(rows_S) + counts_S

    def stored(self, rows_S: Tensor) -> Tensor:
        """Return what rows have stored behind the step whose accept() was launched last: where the next one begins."""
        assert self.verified
        return self.verified.stored_R[rows_S]

    def resolve_ids(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Return the ids of tokens, as the device knows them.

        Args:
            ids: of any shape; negative ones stand for what the host does not know.
            rows: of their requests, of a shape that fits.
        """
        return resolve_ids(ids, rows, self.latest_R, self.drafts_KR)

    def on_device(self, page_size: int) -> Tables:
        """Return what a recorded step looks up."""
        exact_RN = self.exact.table_RN if self.exact else None
        return Tables(self.table_RN, self.latest_R, exact_RN, page_size, self.drafts_KR)

    def row_of(self, lease: Lease) -> int:
        """Return the row of a lease that has one."""
        return self._rows[lease]

    def row(self, lease: Lease) -> int:
        """Return the row of `lease`, and note its new pages for take_updates()."""
        row = self._rows.get(lease)
        if row is None:
            row = self._rows[lease] = self._allocate_row()
        num_filled, pages = self._num_filled[row], lease.pages
        if lease.num_kept_pages is not None:
            # Pages of drafts were given back, and others may be in their place.
            num_filled, lease.num_kept_pages = min(num_filled, lease.num_kept_pages), None
            self._num_filled[row] = num_filled
        if num_filled < len(pages):
            first = row * self.table_RN.shape[1]
            self._new_places += range(first + num_filled, first + len(pages))
            self._new_pages += pages[num_filled:]
            self._num_filled[row] = len(pages)
        if self.exact:
            self.exact.update(row, lease)
        if (slot := lease.state_slot) is not None and self._slots.get(row) != slot:
            self._slots[row] = self._new_slots[row] = slot
        return row

    def take_updates(self) -> tuple[list[int], list[int]]:
        """Return places in the flat table and page ids that the device does not have yet, each once."""
        updates = self._new_places, self._new_pages
        self._new_places, self._new_pages = [], []
        return updates

    def take_slots(self) -> tuple[list[int], list[int]]:
        """Return rows and their slots of recurrent states that the device does not have yet, each once."""
        updates, self._new_slots = self._new_slots, {}
        return list(updates), list(updates.values())

    def apply(self, places: Tensor, pages: Tensor) -> None:
        """Write new page ids into the table."""
        self.table_RN.view(-1).index_copy_(0, places, pages)

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Take the device to know nothing of open leases if the body raises: updates may not have come there."""
        try:
            yield
        except BaseException:
            self.forget_sent()
            raise

    def forget_sent(self) -> None:
        """Take the device to know nothing of open leases."""
        self._num_filled = [0] * len(self._num_filled)
        self._new_places, self._new_pages = [], []
        self._slots, self._new_slots = {}, {}
        if self.exact:
            self.exact.forget(self._rows.values())

    def pack_updates(self, packed: PackedInts, tier: Any = None) -> SentUpdates:
        """Add all that the device does not have yet to the integers of a step; return where it lies.

        Args:
            packed: the integers of the step.
            tier: where updates of the host tier lie.
        """
        is_known = not (self._new_places or self._new_slots or tier) and self.exact is None
        if is_known:
            return NO_UPDATES
        places, pages = map(packed.add, self.take_updates())
        slot_rows, slots = map(packed.add, self.take_slots())
        exact = self.exact.add_updates(packed) if self.exact else None
        return SentUpdates(places, pages, slot_rows, slots, exact, tier)

    def send(self, packed: PackedInts) -> Tensor:
        """Return the integers of a step as one int64 tensor on the device."""
        return self.on_host(packed).to(self.device, non_blocking=True)

    def send_inputs(
        self,
        packed: PackedInts,
        inputs: slice,
        host_inputs: HostInputs,
        updates: SentUpdates,
        *,
        is_ahead: bool = False,
    ) -> None:
        """Put a recorded step's inputs where it finds them, and write what was added into the tables.

        Args:
            packed: the integers of the step.
            inputs: where its inputs lie (PackedInts.add_inputs).
            host_inputs: where it finds them.
            updates: of the tables.
            is_ahead: the step before may not have copied its own.
        """
        packed.number(inputs, host_inputs.next_number())
        if updates.any_pages:
            self.apply_updates(self.send(packed), updates)
        if is_ahead:
            host_inputs.send(self.on_host(packed)[inputs])
        else:
            packed.write(inputs, host_inputs)

    def on_host(self, packed: PackedInts) -> Tensor:
        """Return the integers of a step in memory from where a copy to the device waits for nothing."""
        return self._pinned.put(packed.on_host()) if self._pinned else packed.on_host()

    def apply_updates(self, sent: Tensor, updates: SentUpdates) -> None:
        """Write what was added into the tables."""
        if updates.places.start < updates.places.stop:
            self.apply(sent[updates.places], sent[updates.pages].int())
        if self.slots_R is not None and updates.slots.start < updates.slots.stop:
            self.slots_R.index_copy_(0, sent[updates.slot_rows], sent[updates.slots].int())
        if self.exact and updates.exact:
            self.exact.apply(sent, updates.exact)

    def _allocate_row(self) -> int:
        if not self._free:
            # A lease without pages was released.
            for lease in [lease for lease in self._rows if not lease.pages]:
                self._free.append(self._rows.pop(lease))
        row = self._free.pop()
        self._num_filled[row] = 0
        if self.exact:
            self.exact.reset(row)
        return row


class ExactTable:
    """Which exact page holds each page of a lease, on the device.

    Args:
        table_RN: the page table beside it.
        empty_page: stands for a page that is not kept.
    """

    def __init__(self, table_RN: Tensor, empty_page: int) -> None:
        self.table_RN = torch.full_like(table_RN, empty_page)
        self._empty_page = empty_page
        # What the device knows of each row: exact pages by page.
        self._sent_by_row: dict[int, dict[int, int]] = {}
        self._new_rows: list[int] = []
        self._new_places: list[int] = []
        self._new_pages: list[int] = []

    def reset(self, row: int) -> None:
        """Note that another lease has the row."""
        self._sent_by_row[row] = {}
        self._new_rows.append(row)

    def forget(self, rows: Iterable[int]) -> None:
        """Take the device to know nothing of the leases of `rows`."""
        self._new_rows, self._new_places, self._new_pages = [], [], []
        for row in rows:
            self.reset(row)

    def update(self, row: int, lease: Lease) -> None:
        """Note the exact pages of `lease` that the device does not know."""
        last = self._sent_by_row[row]
        if last == lease.exact_pages:
            return
        first = row * self.table_RN.shape[1]
        for page, exact_page in lease.exact_pages.items():
            if last.get(page) != exact_page:
                self._new_places.append(first + page)
                self._new_pages.append(exact_page)
        self._sent_by_row[row] = dict(lease.exact_pages)

    def add_updates(self, packed: PackedInts) -> tuple[slice, slice, slice]:
        """Add what the device does not know to the integers of a step; return where it lies."""
        # Rows first: a new lease's pages come after its row is empty.
        updates = self._new_rows, self._new_places, self._new_pages
        self._new_rows, self._new_places, self._new_pages = [], [], []
        rows, places, pages = map(packed.add, updates)
        return rows, places, pages

    def apply(self, sent: Tensor, updates: tuple[slice, slice, slice]) -> None:
        """Write what was added into the table."""
        rows, places, pages = updates
        if rows.start < rows.stop:
            self.table_RN.index_fill_(0, sent[rows], self._empty_page)
        if places.start < places.stop:
            self.table_RN.view(-1).index_copy_(0, sent[places], sent[pages].int())

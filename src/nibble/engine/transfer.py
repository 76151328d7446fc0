"""Integers between host and device: one packed copy a step, and page tables that stay on the device.

On a GPU a copy starts from pinned memory and the host does not wait for it.

Shape suffixes: R rows, one for each open lease and one for padding; N pages of a row; T tokens of a step; S rows whose
logits are computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nibble.cache.manager import Lease

ALIGNED = 4
"""Lists begin at multiples of so many int32, 16 bytes. Triton compiles a kernel anew for pointers off that grid."""


class PackedInts:
    """All small integers of a step, one list after another, which go to the device in one copy."""

    def __init__(self) -> None:
        self._ints: list[int] = []

    def add(self, values: Iterable[int]) -> slice:
        """Append a list, and return where it lies."""
        # Triton compiles a kernel anew for pointers that are not on a grid of 16 bytes.
        self._ints += (0,) * (-len(self._ints) % ALIGNED)
        start = len(self._ints)
        self._ints += values
        return slice(start, len(self._ints))

    def send(self, device: torch.device) -> Tensor:
        """Return all integers as one int64 tensor on the device."""
        return to_device(self._ints, torch.int64, device)


@dataclass(frozen=True, slots=True, eq=False)
class StepTensors:
    """The integers of a step on the device: int64 views of one packed tensor."""

    token_ids_T: Tensor
    positions_T: Tensor
    rows_T: Tensor
    """Row of the page table of each token's request."""
    logit_rows_S: Tensor
    """Tokens whose logits are computed."""
    sampled_rows_S: Tensor
    """Rows of the page table of the requests that a token is sampled for."""


def to_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a list of numbers as a tensor; the host does not wait until it has arrived.

    Args:
        values: the numbers.
        dtype: of the tensor.
        device: where it is to be.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    # The host can go on during a copy only if that reads from pinned memory.
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy on the host, complete once an event that is recorded after this call has passed."""
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class PageTables:
    """What the device remembers of open leases between steps: page ids, and the token that each sampled last.

    Args:
        rows: most leases that are open at a time.
        width: most pages of a lease.
        device: where the tables lie.
    """

    def __init__(self, rows: int, width: int, device: torch.device | str) -> None:
        self.table_RN = torch.zeros(rows + 1, width, dtype=torch.int32, device=device)
        """Page ids. A step sends only those that are new."""
        self.latest_R = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        """The token sampled last: the next step takes it from here before the host knows it."""
        self.padding_row = rows
        """The row of no lease; it pads steps that have too few requests."""
        self._rows: dict[Lease, int] = {}
        self._num_filled = [0] * rows
        self._free = list(range(rows - 1, -1, -1))
        self._new_places: list[int] = []
        self._new_pages: list[int] = []

    @property
    def device(self) -> torch.device:
        """Return where the tables lie."""
        return self.table_RN.device

    def row(self, lease: Lease) -> int:
        """Return the row of `lease`, and note its new pages for take_updates()."""
        row = self._rows.get(lease)
        if row is None:
            row = self._rows[lease] = self._allocate_row()
        num_filled, pages = self._num_filled[row], lease.pages
        if num_filled < len(pages):
            first = row * self.table_RN.shape[1]
            self._new_places += range(first + num_filled, first + len(pages))
            self._new_pages += pages[num_filled:]
            self._num_filled[row] = len(pages)
        return row

    def take_updates(self) -> tuple[list[int], list[int]]:
        """Return places in the flat table and page ids that the device does not have yet, each once."""
        updates = self._new_places, self._new_pages
        self._new_places, self._new_pages = [], []
        return updates

    def apply(self, places: Tensor, pages: Tensor) -> None:
        """Write new page ids into the table."""
        self.table_RN.view(-1).index_copy_(0, places, pages)

    def _allocate_row(self) -> int:
        if not self._free:
            # A lease without pages was released.
            for lease in [lease for lease in self._rows if not lease.pages]:
                self._free.append(self._rows.pop(lease))
        row = self._free.pop()
        self._num_filled[row] = 0
        return row

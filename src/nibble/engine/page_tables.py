"""What the device remembers of open leases between steps: their page ids, and the token that each sampled last.

Owns PageTables. Must not know of requests, phases or models.

Shape suffixes: R rows, one for each open lease and one for nobody; N pages of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nibble.cache.manager import Lease


class PageTables:
    """Leases as rows of tensors on the device. The last row is nobody's: it pads steps that have too few requests.

    table_RN: int32 page ids, of which a step sends only those that are new. latest_R: the token sampled last, which
    the next step may take from here before the host knows it.
    """

    def __init__(self, rows: int, width: int, device: torch.device | str) -> None:
        self.table_RN = torch.zeros(rows + 1, width, dtype=torch.int32, device=device)
        self.latest_R = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self.padding_row = rows
        self._rows: dict[Lease, int] = {}
        self._filled = [0] * rows
        self._free = list(range(rows - 1, -1, -1))
        self._places: list[int] = []
        self._pages: list[int] = []

    @property
    def device(self) -> torch.device:
        return self.table_RN.device

    def row(self, lease: Lease) -> int:
        """The row of `lease`. Pages that are new in it are noted, for news()."""
        row = self._rows.get(lease)
        if row is None:
            row = self._rows[lease] = self._take()
        known, pages = self._filled[row], lease.pages
        if known < len(pages):
            first = row * self.table_RN.shape[1]
            self._places += range(first + known, first + len(pages))
            self._pages += pages[known:]
            self._filled[row] = len(pages)
        return row

    def take_updates(self) -> tuple[list[int], list[int]]:
        """Pages that the device has not been told of: their places in the flat table, and their ids. Once each."""
        found = self._places, self._pages
        self._places, self._pages = [], []
        return found

    def apply(self, places: Tensor, pages: Tensor) -> None:
        """Tells the device of new pages."""
        self.table_RN.view(-1).index_copy_(0, places, pages)

    def _take(self) -> int:
        if not self._free:
            for lease in [
                lease for lease in self._rows if not lease.pages
            ]:  # released: it holds no page any more
                self._free.append(self._rows.pop(lease))
        row = self._free.pop()
        self._filled[row] = 0
        return row

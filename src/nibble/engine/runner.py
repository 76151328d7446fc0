"""From a Batch to logits: fills the tensors of a step and calls the model.

Owns Runner and its page tables. Must not know of text, sampling or the order of requests.

Shape suffixes: T tokens of the step, B requests of a segment, N pages of a request, S sampled rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from nibble.attention.layer import Attend, StepContext
from nibble.attention.metadata import AttentionMetadata, Segment
from nibble.attention.plan import Plan
from nibble.cache.manager import Lease
from nibble.cache.pool import PagedPool
from nibble.engine.batch import Batch, Work
from nibble.models.hook import CONTEXT
from nibble.models.linear import row_multiple


class PageTables:
    """The page ids of open leases as rows of one int32 table, so that a step writes only pages that are new."""

    def __init__(self, rows: int, width: int, device: torch.device | str) -> None:
        self.table = torch.zeros(rows, width, dtype=torch.int32, device=device)
        self._rows: dict[Lease, int] = {}
        self._filled = [0] * rows
        self._free = list(range(rows - 1, -1, -1))

    def row(self, lease: Lease) -> int:
        """The row of `lease`, brought up to date."""
        row = self._rows.get(lease)
        if row is None:
            row = self._rows[lease] = self._take()
        known = self._filled[row]
        if known < len(lease.pages):
            self.table[row, known : len(lease.pages)] = torch.tensor(lease.pages[known:], dtype=torch.int32)
            self._filled[row] = len(lease.pages)
        return row

    def _take(self) -> int:
        if not self._free:
            for lease in [
                lease for lease in self._rows if not lease.pages
            ]:  # released: it holds no page any more
                self._free.append(self._rows.pop(lease))
        row = self._free.pop()
        self._filled[row] = 0
        return row


class Runner:
    """Runs a model's steps over a pool. model: Transformers' own, with Nibble's attention function."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        pool: PagedPool,
        backends: Mapping[str, Attend],
        tables: PageTables,
    ) -> None:
        self.model = model
        self.plan = plan
        self.pool = pool
        self.backends = backends
        self.tables = tables
        self.device = tables.table.device
        self.multiple = row_multiple(model) if self.device.type == "cpu" else 1

    @torch.inference_mode()
    def forward(self, batch: Batch, *, every: bool = False) -> Tensor:
        """Logits [S, V]: of the last token of each work that samples, or of every token."""
        works = batch.works
        rows = [self.tables.row(work.request.lease) for work in works if work.request.lease]
        ids = [token for work in works for token in work.request.tokens[work.start : work.end]]
        positions = [position for work in works for position in range(work.start, work.end)]
        meta = self._metadata(works, rows, torch.tensor(positions, device=self.device))
        keep = list(range(len(ids))) if every else _last_rows(works)
        logits = self.model(
            input_ids=torch.tensor([self._in_company(ids)], device=self.device),
            position_ids=torch.tensor([self._in_company(positions)], device=self.device),
            use_cache=False,
            logits_to_keep=torch.tensor(self._in_company(keep or [0]), device=self.device),
            **{CONTEXT: StepContext(self.plan, self.pool, self.backends, meta)},
        ).logits[0]
        assert isinstance(logits, Tensor)
        return logits[: len(keep)]

    def _in_company(self, values: list[int]) -> list[int]:
        """The last row is repeated where the result of a row would else depend on their number (models/linear.py)."""
        missing = 1 if len(values) == self.multiple == 1 else -len(values) % self.multiple
        return values + values[-1:] * missing

    def _metadata(self, works: Sequence[Work], rows: Sequence[int], positions_T: Tensor) -> AttentionMetadata:
        counts = torch.tensor([work.count for work in works], device=self.device)
        rows_B = torch.tensor(rows, device=self.device)
        size = self.plan.page_size
        pages_T = self.tables.table[rows_B.repeat_interleave(counts), positions_T // size]
        segments, row, first = [], 0, 0
        for phase, part in groupby(works, key=lambda work: work.phase):
            part_works = tuple(part)
            q_lens = tuple(work.count for work in part_works)
            kv_lens = tuple(work.end for work in part_works)
            width = -(-max(kv_lens) // size)
            pages_BN = self.tables.table[rows_B[first : first + len(part_works)], :width]
            segments.append(Segment.of(phase, row, q_lens, kv_lens, pages_BN))
            row, first = segments[-1].stop, first + len(part_works)
        return AttentionMetadata(pages_T.long() * size + positions_T % size, tuple(segments))


def _last_rows(works: Sequence[Work]) -> list[int]:
    """The row of the last token of every work that samples."""
    rows, end = [], 0
    for work in works:
        end += work.count
        if work.samples:
            rows.append(end - 1)
    return rows

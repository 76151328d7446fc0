"""From a Batch to logits: fills the tensors of a step and runs the model.

A step of decodes alone goes over stable buffers, where it can be recorded (engine/cuda_graphs.py) and replayed; every other
step over tensors of its own. Nothing here waits for the device. Owns Runner. Must not know of text, sampling or the
order of requests.

Shape suffixes: T tokens of the step, B requests of a segment, N pages of a request, R rows of the page tables, S rows
that are sampled, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor, nn

from nibble.attention.layer import AttentionBackend, AttentionObserver, StepContext
from nibble.attention.planner.plan import Plan
from nibble.attention.planner.support import Phase
from nibble.cache.offload.hot_buffer import HotBuffers
from nibble.cache.pool import PagedPool
from nibble.engine.batch import Batch, ScheduledRequest
from nibble.engine.cuda_graphs import Buffers, Graphs
from nibble.engine.error_monitor import ErrorMonitor
from nibble.engine.page_tables import PageTables
from nibble.engine.transfer import PackedInts
from nibble.kernels.types import AttentionBatch, AttentionMetadata
from nibble.models.forward import Forward, plain
from nibble.models.linear import row_multiple

ON_DEVICE = -1
"""The id of a token whose value only the device knows: the step before samples it."""
HALVED, ALIGNED = 32, 8
"""With a host tier steps of so many requests are cut in two, at a multiple of ALIGNED."""


class ModelRunner:
    """Runs a model's steps over a pool. model: Transformers' own, with Nibble's attention function.

    tier: the pool's, where a host tier holds what it has no room for. run: how the model is run, if not as it is.
    graphs: recorded decode steps, once record() was called. watch: compares what some requests get with rows of their
    own precision, if anybody asked for it.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        pool: PagedPool,
        backends: Mapping[str, AttentionBackend],
        tables: PageTables,
        run: Forward | None = None,
        tier: HotBuffers | None = None,
    ) -> None:
        self.model = model
        self.plan = plan
        self.pool = pool
        self.backends = backends
        self.tables = tables
        self.tier = tier
        self.device = tables.device
        self.row_multiple = row_multiple(model) if self.device.type == "cpu" else 1
        self.graphs: Graphs | None = None
        self.error_monitor: ErrorMonitor | None = None
        self._run = run or plain(model)
        self._sampled_S: Tensor | None = None

    @torch.inference_mode()
    def forward(self, batch: Batch, *, every: bool = False) -> Tensor:
        """Logits [S, V]: of the last token of each work that samples, or of every token."""
        try:
            return self._forward(batch.scheduled, every)
        except BaseException:
            if self.tier:
                self.tier.invalidate(self._rows(batch.scheduled))
            raise

    def _forward(self, works: Sequence[ScheduledRequest], every: bool) -> Tensor:
        look = self.error_monitor.probe(works) if self.error_monitor and not every else None
        if self.graphs and not every and all(work.phase is Phase.DECODE for work in works):
            logits = self._replay(works, self.graphs, look)
        else:
            logits = self._step(works, every, look)
        if self.tier:
            self.tier.backup((work.request.lease, work.end) for work in works if work.request.lease)
        return logits

    @torch.inference_mode()
    def store_sampled(self, tokens_S: Tensor) -> None:
        """Keeps what was sampled from the last forward(), for a step that runs before the host knows it."""
        assert self._sampled_S is not None
        self.tables.latest_R.index_copy_(0, self._sampled_S, tokens_S)

    # Any step

    def _step(self, works: Sequence[ScheduledRequest], every: bool, look: AttentionObserver | None) -> Tensor:
        rows = self._rows(works)
        ids = [token for work in works for token in _known(work)]
        keep = list(range(len(ids))) if every else _last_rows(works)
        parcel = PackedInts()
        ids_at = parcel.add(self._pad_rows(ids))
        positions_at = parcel.add(self._pad_rows([p for work in works for p in range(work.start, work.end)]))
        rows_at = parcel.add(
            self._pad_rows(
                [row for row, work in zip(rows, works, strict=True) for _ in range(work.num_tokens)]
            )
        )
        keep_at = parcel.add(self._pad_rows(keep or [0]))
        sampled_at = parcel.add(row for row, work in zip(rows, works, strict=True) if work.samples_token)
        parts = _parts(works, rows, parcel)
        sent = self._send(parcel, works)
        ids_T, positions_T, rows_T = sent[ids_at], sent[positions_at], sent[rows_at]
        if ON_DEVICE in ids:
            ids_T = torch.where(ids_T < 0, self.tables.latest_R[rows_T], ids_T)
        meta = self._metadata(sent, parts, rows_T[: len(ids)], positions_T[: len(ids)])
        self._sampled_S = sent[sampled_at]
        ctx = self._context(meta, look)
        return self._run(ids_T[None], positions_T[None], sent[keep_at], ctx)[: len(keep)]

    def _metadata(
        self, sent: Tensor, parts: Sequence[_Part], rows_T: Tensor, positions_T: Tensor
    ) -> AttentionMetadata:
        size = self.plan.page_size
        pages_T = self.tables.table_RN[rows_T, positions_T // size]
        small, segments, start = sent.int(), [], 0
        for part in parts:
            width = -(-max(part.seq_lens) // size)
            # rows are gathered whole and cut then, so that their stride is always the same
            page_table_BN = self.tables.table_RN.index_select(0, sent[part.rows])[:, :width]
            stop = start + sum(part.query_lens)
            segments.append(
                AttentionBatch(
                    part.phase,
                    start,
                    stop,
                    part.query_lens,
                    part.seq_lens,
                    page_table_BN,
                    small[part.starts],
                    small[part.ends],
                    sent[part.rows],
                )
            )
            start = stop
        return self._placed(pages_T.long() * size + positions_T % size, segments)

    def _placed(self, slot_mapping_T: Tensor, segments: Sequence[AttentionBatch]) -> AttentionMetadata:
        frame_slot_mapping_T = self.tier.frame_slots(slot_mapping_T) if self.tier else None
        return AttentionMetadata(slot_mapping_T, tuple(segments), frame_slot_mapping_T)

    def _pad_rows(self, values: list[int]) -> list[int]:
        """The last row is repeated where the result of a row would else depend on their number (models/linear.py), or
        where there would be one alone (models/forward.py)."""
        missing = 1 if len(values) == self.row_multiple == 1 else -len(values) % self.row_multiple
        return values + values[-1:] * missing

    def _rows(self, works: Sequence[ScheduledRequest]) -> list[int]:
        return [self.tables.row(work.request.lease) for work in works if work.request.lease]

    def _send(self, parcel: PackedInts, works: Sequence[ScheduledRequest]) -> Tensor:
        """Everything to the device in one go; what is new of tables and tier travels along, and takes effect."""
        places, pages = map(parcel.add, self.tables.take_updates())
        leases = [work.request.lease for work in works if work.request.lease] if self.tier else []
        news = (
            self.tier.take_updates(parcel.add, {self.tables.row(x): x for x in leases}) if self.tier else None
        )
        sent = parcel.send(self.device)
        if places.start < places.stop:
            self.tables.apply(sent[places], sent[pages].int())
        if self.tier and news:
            self.tier.apply_updates(sent, news)
        return sent

    def _context(self, meta: AttentionMetadata, look: AttentionObserver | None = None) -> StepContext:
        return StepContext(self.plan, self.pool, self.backends, meta, self.tier, observer=look)

    # Steps of decodes alone

    def record(self, graphs: Graphs) -> None:
        """Records a decode step of each size; from now on decodes are replayed."""
        graphs.record(self._decode)
        self.graphs = graphs

    def _replay(
        self, works: Sequence[ScheduledRequest], graphs: Graphs, look: AttentionObserver | None
    ) -> Tensor:
        size = graphs.size_for(len(works))
        padding = size - len(works)
        parcel = PackedInts()
        at = parcel.add(
            (
                *self._rows(works), *[self.tables.padding_row] * padding,
                *[work.start for work in works], *[-1] * padding,
                *[token for work in works for token in _known(work)], *[0] * padding,
            )
        )  # fmt: skip
        sent = self._send(parcel, works)
        self._sampled_S = sent[at][: len(works)]
        graphs.buffers.inputs[: 3 * size].copy_(sent[at])
        if look:  # of a replay Python sees nothing: the same step over the same buffers is computed
            self._decode(size, graphs.buffers, look)
        else:
            graphs.replay(size)
        return graphs.buffers.logits[: len(works)]

    @torch.inference_mode()
    def _decode(self, size: int, buffers: Buffers, look: AttentionObserver | None = None) -> None:
        """One step of `size` rows, from buffer to buffer: what is recorded. Position -1 is padding."""
        rows_B, positions_B, sent_B = buffers.inputs[: 3 * size].view(3, size)
        page, tables = self.plan.page_size, self.tables
        ids_B = torch.where(sent_B < 0, tables.latest_R[rows_B], sent_B)
        page_table_BN = tables.table_RN.index_select(0, rows_B)
        seen_B = positions_B.clamp(min=0)
        pages_B = page_table_BN.gather(1, (seen_B // page)[:, None])[:, 0].long()
        slots_B = torch.where(positions_B < 0, -1, pages_B * page + seen_B % page)
        longest, ends_B = page_table_BN.shape[1] * page, (positions_B + 1).int()
        segments = [
            AttentionBatch(
                Phase.DECODE, first, last, (1,) * (last - first), (longest,) * (last - first), page_table_BN[first:last],
                buffers.starts[: last - first + 1], ends_B[first:last], rows_B[first:last],
            )
            for first, last in pairwise(self._cuts(size))
        ]  # fmt: skip
        ctx = self._context(self._placed(slots_B, segments), look)
        logits = self._run(ids_B[None], seen_B[None], buffers.rows[:size], ctx)
        buffers.keep(logits)

    def _cuts(self, size: int) -> tuple[int, ...]:
        """Where segments of decodes begin and end. With a host tier there are two: what one has chosen comes while the
        other chooses, and the first attends while the rest comes."""
        half = -(-size // (2 * ALIGNED)) * ALIGNED
        return (0, half, size) if self.tier and size >= HALVED else (0, size)


class _Part:
    """The works of one phase, and where their numbers lie in the parcel."""

    def __init__(self, works: Sequence[ScheduledRequest], rows: Sequence[int], parcel: PackedInts) -> None:
        self.phase = works[0].phase
        self.query_lens = tuple(work.num_tokens for work in works)
        self.seq_lens = tuple(work.end for work in works)
        self.starts = parcel.add(accumulate(self.query_lens, initial=0))
        self.ends = parcel.add(self.seq_lens)
        self.rows = parcel.add(rows)


def _parts(works: Sequence[ScheduledRequest], rows: Sequence[int], parcel: PackedInts) -> list[_Part]:
    """Neighbours of one phase, together."""
    parts, first = [], 0
    for _, part in groupby(works, key=lambda work: work.phase):
        found = tuple(part)
        parts.append(_Part(found, rows[first : first + len(found)], parcel))
        first += len(found)
    return parts


def _known(work: ScheduledRequest) -> list[int]:
    """The ids of a work's tokens; the last may be unknown still."""
    ids = work.request.token_ids[work.start : work.end]
    return ids if len(ids) == work.num_tokens else [*ids, ON_DEVICE]


def _last_rows(works: Sequence[ScheduledRequest]) -> list[int]:
    """The row of the last token of every work that samples."""
    ends = accumulate(work.num_tokens for work in works)
    return [end - 1 for end, work in zip(ends, works, strict=True) if work.samples_token]

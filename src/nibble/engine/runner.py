"""From a Batch to logits: fills the tensors of a step and runs the model.

A step of decodes alone goes over stable buffers, where it can be recorded (engine/graphs.py) and replayed; every other
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

from nibble.attention.capability import Phase
from nibble.attention.layer import Attend, StepContext, Watch
from nibble.attention.metadata import AttentionMetadata, Segment
from nibble.attention.plan import Plan
from nibble.cache.hot import HotTier
from nibble.cache.pool import PagedPool
from nibble.engine.batch import Batch, Work
from nibble.engine.fidelity import Fidelity
from nibble.engine.graphs import Buffers, Graphs
from nibble.engine.parcel import Parcel
from nibble.engine.tables import PageTables
from nibble.models.forward import Forward, plain
from nibble.models.linear import row_multiple

UNKNOWN = -1
"""The id of a token whose value only the device knows: the step before samples it."""
HALVED, ALIGNED = 32, 8
"""With a host tier steps of so many requests are cut in two, at a multiple of ALIGNED."""


class Runner:
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
        backends: Mapping[str, Attend],
        tables: PageTables,
        run: Forward | None = None,
        tier: HotTier | None = None,
    ) -> None:
        self.model = model
        self.plan = plan
        self.pool = pool
        self.backends = backends
        self.tables = tables
        self.tier = tier
        self.device = tables.device
        self.multiple = row_multiple(model) if self.device.type == "cpu" else 1
        self.graphs: Graphs | None = None
        self.watch: Fidelity | None = None
        self._run = run or plain(model)
        self._sampled_S: Tensor | None = None

    @torch.inference_mode()
    def forward(self, batch: Batch, *, every: bool = False) -> Tensor:
        """Logits [S, V]: of the last token of each work that samples, or of every token."""
        try:
            return self._forward(batch.works, every)
        except BaseException:
            if self.tier:
                self.tier.distrust(self._rows(batch.works))
            raise

    def _forward(self, works: Sequence[Work], every: bool) -> Tensor:
        look = self.watch.look(works) if self.watch and not every else None
        if self.graphs and not every and all(work.phase is Phase.DECODE for work in works):
            logits = self._replay(works, self.graphs, look)
        else:
            logits = self._step(works, every, look)
        if self.tier:
            self.tier.backup((work.request.lease, work.end) for work in works if work.request.lease)
        return logits

    @torch.inference_mode()
    def remember(self, tokens_S: Tensor) -> None:
        """Keeps what was sampled from the last forward(), for a step that runs before the host knows it."""
        assert self._sampled_S is not None
        self.tables.latest_R.index_copy_(0, self._sampled_S, tokens_S)

    # Any step

    def _step(self, works: Sequence[Work], every: bool, look: Watch | None) -> Tensor:
        rows = self._rows(works)
        ids = [token for work in works for token in _known(work)]
        keep = list(range(len(ids))) if every else _last_rows(works)
        parcel = Parcel()
        ids_at = parcel.add(self._in_company(ids))
        positions_at = parcel.add(
            self._in_company([p for work in works for p in range(work.start, work.end)])
        )
        rows_at = parcel.add(
            self._in_company([row for row, work in zip(rows, works, strict=True) for _ in range(work.count)])
        )
        keep_at = parcel.add(self._in_company(keep or [0]))
        sampled_at = parcel.add(row for row, work in zip(rows, works, strict=True) if work.samples)
        parts = _parts(works, rows, parcel)
        sent = self._send(parcel, works)
        ids_T, positions_T, rows_T = sent[ids_at], sent[positions_at], sent[rows_at]
        if UNKNOWN in ids:
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
            width = -(-max(part.kv_lens) // size)
            # rows are gathered whole and cut then, so that their stride is always the same
            pages_BN = self.tables.table_RN.index_select(0, sent[part.rows])[:, :width]
            stop = start + sum(part.q_lens)
            segments.append(
                Segment(
                    part.phase,
                    start,
                    stop,
                    part.q_lens,
                    part.kv_lens,
                    pages_BN,
                    small[part.starts],
                    small[part.ends],
                    sent[part.rows],
                )
            )
            start = stop
        return self._placed(pages_T.long() * size + positions_T % size, segments)

    def _placed(self, slots_T: Tensor, segments: Sequence[Segment]) -> AttentionMetadata:
        placed_T = self.tier.place(slots_T) if self.tier else None
        return AttentionMetadata(slots_T, tuple(segments), placed_T)

    def _in_company(self, values: list[int]) -> list[int]:
        """The last row is repeated where the result of a row would else depend on their number (models/linear.py), or
        where there would be one alone (models/forward.py)."""
        missing = 1 if len(values) == self.multiple == 1 else -len(values) % self.multiple
        return values + values[-1:] * missing

    def _rows(self, works: Sequence[Work]) -> list[int]:
        return [self.tables.row(work.request.lease) for work in works if work.request.lease]

    def _send(self, parcel: Parcel, works: Sequence[Work]) -> Tensor:
        """Everything to the device in one go; what is new of tables and tier travels along, and takes effect."""
        places, pages = map(parcel.add, self.tables.news())
        leases = [work.request.lease for work in works if work.request.lease] if self.tier else []
        news = self.tier.news(parcel.add, {self.tables.row(x): x for x in leases}) if self.tier else None
        sent = parcel.send(self.device)
        if places.start < places.stop:
            self.tables.put(sent[places], sent[pages].int())
        if self.tier and news:
            self.tier.settle(sent, news)
        return sent

    def _context(self, meta: AttentionMetadata, look: Watch | None = None) -> StepContext:
        return StepContext(self.plan, self.pool, self.backends, meta, self.tier, watch=look)

    # Steps of decodes alone

    def record(self, graphs: Graphs) -> None:
        """Records a decode step of each size; from now on decodes are replayed."""
        graphs.record(self._decode)
        self.graphs = graphs

    def _replay(self, works: Sequence[Work], graphs: Graphs, look: Watch | None) -> Tensor:
        size = graphs.size_for(len(works))
        padding = size - len(works)
        parcel = Parcel()
        at = parcel.add(
            (
                *self._rows(works), *[self.tables.nobody] * padding,
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
    def _decode(self, size: int, buffers: Buffers, look: Watch | None = None) -> None:
        """One step of `size` rows, from buffer to buffer: what is recorded. Position -1 is padding."""
        rows_B, positions_B, sent_B = buffers.inputs[: 3 * size].view(3, size)
        page, tables = self.plan.page_size, self.tables
        ids_B = torch.where(sent_B < 0, tables.latest_R[rows_B], sent_B)
        pages_BN = tables.table_RN.index_select(0, rows_B)
        seen_B = positions_B.clamp(min=0)
        pages_B = pages_BN.gather(1, (seen_B // page)[:, None])[:, 0].long()
        slots_B = torch.where(positions_B < 0, -1, pages_B * page + seen_B % page)
        longest, ends_B = pages_BN.shape[1] * page, (positions_B + 1).int()
        segments = [
            Segment(
                Phase.DECODE, first, last, (1,) * (last - first), (longest,) * (last - first), pages_BN[first:last],
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

    def __init__(self, works: Sequence[Work], rows: Sequence[int], parcel: Parcel) -> None:
        self.phase = works[0].phase
        self.q_lens = tuple(work.count for work in works)
        self.kv_lens = tuple(work.end for work in works)
        self.starts = parcel.add(accumulate(self.q_lens, initial=0))
        self.ends = parcel.add(self.kv_lens)
        self.rows = parcel.add(rows)


def _parts(works: Sequence[Work], rows: Sequence[int], parcel: Parcel) -> list[_Part]:
    """Neighbours of one phase, together."""
    parts, first = [], 0
    for _, part in groupby(works, key=lambda work: work.phase):
        found = tuple(part)
        parts.append(_Part(found, rows[first : first + len(found)], parcel))
        first += len(found)
    return parts


def _known(work: Work) -> list[int]:
    """The ids of a work's tokens; the last may be unknown still."""
    ids = work.request.tokens[work.start : work.end]
    return ids if len(ids) == work.count else [*ids, UNKNOWN]


def _last_rows(works: Sequence[Work]) -> list[int]:
    """The row of the last token of every work that samples."""
    ends = accumulate(work.count for work in works)
    return [end - 1 for end, work in zip(ends, works, strict=True) if work.samples]

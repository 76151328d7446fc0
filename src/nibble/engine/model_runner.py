"""From a Batch to logits: fill the tensors of a step and run the model. Nothing here waits for the device.

All integers of a step go to the device in one packed copy. Page tables and the tokens sampled last stay there.
A step of decodes alone runs over buffers that stay where they are, so that it can be recorded as a CUDA graph, one for
each size, and replayed. Every other step runs over tensors of its own.

Shape suffixes: T tokens of the step, B requests of an attention batch or rows of a recorded step, N pages of a request,
R rows of the page tables, one for each open lease and one for padding, S rows whose logits are computed, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from nibble.attention import backends
from nibble.attention.layer import AttentionBackend, AttentionObserver, StepContext
from nibble.attention.planner.plan import Plan
from nibble.attention.window import ExactCache
from nibble.cache.hot_buffer import HotBuffers
from nibble.cache.lease import Lease
from nibble.cache.pool import PagedPool
from nibble.engine.error_monitor import ErrorMonitor
from nibble.engine.request import Batch, ScheduledRequest
from nibble.errors import BackendError
from nibble.kernels import ALIGNED, cdiv
from nibble.kernels.types import AttentionBatch, AttentionMetadata
from nibble.model_spec import Phase
from nibble.models.forward import Forward, plain

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Runs a function, and returns one that repeats over the same memory all that it did on the device."""
ON_DEVICE = -1
"""The id of a token whose value only the device knows: the step before samples it."""
MIN_SPLIT, SPLIT_MULTIPLE = 32, 8
"""With a host tier, steps of so many requests are split in two, at a multiple of SPLIT_MULTIPLE."""


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


class PageTables:
    """What the device remembers of open leases between steps: page ids, and the token that each sampled last.

    Args:
        rows: most leases that are open at a time.
        width: most pages of a lease.
        device: where the tables lie.
        empty_page: with an exact window, the exact page that stands for one that is not kept.
    """

    def __init__(
        self, rows: int, width: int, device: torch.device | str, empty_page: int | None = None
    ) -> None:
        self.table_RN = torch.zeros(rows + 1, width, dtype=torch.int32, device=device)
        """Page ids. A step sends only those that are new."""
        self.latest_R = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        """The token sampled last: the next step takes it from here before the host knows it."""
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
        if self.exact:
            self.exact.update(row, lease)
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
        self._known: dict[int, dict[int, int]] = {}
        self._new_rows: list[int] = []
        self._new_places: list[int] = []
        self._new_pages: list[int] = []

    def reset(self, row: int) -> None:
        """Note that another lease has the row."""
        self._known[row] = {}
        self._new_rows.append(row)

    def update(self, row: int, lease: Lease) -> None:
        """Note the exact pages of `lease` that the device does not know."""
        known = self._known[row]
        if known == lease.exact_pages:
            return
        first = row * self.table_RN.shape[1]
        for page, exact_page in lease.exact_pages.items():
            if known.get(page) != exact_page:
                self._new_places.append(first + page)
                self._new_pages.append(exact_page)
        self._known[row] = dict(lease.exact_pages)

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


class Graphs:
    """Decode steps of several sizes, over buffers that stay where they are.

    Args:
        sizes: rows of a step, ascending.
        device: where steps run.
        record: how a step is recorded.
    """

    # All tensors of steps are made in inference mode: to a compiled model others look different.
    @torch.inference_mode()
    def __init__(self, sizes: Sequence[int], device: torch.device, record: Record) -> None:
        self.sizes, max_rows = tuple(sizes), sizes[-1]
        self.inputs = torch.zeros(3 * max_rows, dtype=torch.int64, device=device)
        """Of a step of B rows: rows of the page tables, positions and token ids, B int64 each."""
        self.cu_seqlens_q = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        """0, 1, 2, ...: where requests of one token begin."""
        self.rows = torch.arange(max_rows, device=device)
        """0, 1, 2, ...: the rows whose logits are computed."""
        self.logits = torch.empty(0, device=device)
        """[max_rows, V], allocated by the first step."""
        self._record = record
        self._replays: dict[int, Callable[[], None]] = {}

    def store_logits(self, logits_BV: Tensor) -> None:
        """Copy a step's logits, so that their own memory serves the next graph too."""
        if not len(self.logits):
            self.logits = logits_BV.new_empty(len(self.rows), logits_BV.shape[1])
        self.logits[: len(logits_BV)].copy_(logits_BV)

    @torch.inference_mode()
    def record(self, decode: Callable[[int, Graphs], None]) -> None:
        """Record decode(size, graphs) for all sizes.

        Raises:
            BackendError: a graph cannot hold a step.
        """
        # The largest first: the others then fit into its memory.
        for size in reversed(self.sizes):
            self.inputs.zero_()
            # Positions are the second third. They must be -1, as in padding, since 0 is a real token's position.
            self.inputs[size : 2 * size] = -1
            try:
                self._replays[size] = self._record(partial(decode, size, self))
            # The start explains it by the memory plan (explain_out_of_memory).
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a kernel does that a graph cannot hold
                raise BackendError(
                    f"a decode step of {size} requests cannot be recorded as a CUDA graph ({error}); "
                    "serve without graphs: --no-graphs"
                ) from error

    def replay(self, size: int) -> None:
        """Compute a step of `size` rows from inputs to logits."""
        self._replays[size]()


class CudaGraphs:
    """Records on a stream of its own, into memory that all its graphs share."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record `run` and return what replays it."""
        # The buffers were filled on the current stream.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            # What happens the first time only, loading and tuning of kernels, must not be recorded.
            run()
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads of the process may call CUDA in the meantime.
        with torch.cuda.graph(
            graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"
        ):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay


def live(run: Callable[[], None]) -> Callable[[], None]:
    """Record nothing: the step over the same buffers is computed each time."""
    return run


def adapters(plan: Plan) -> dict[str, Any]:
    """Return one adapter for every backend of the plan; its constructor imports the vendor's package."""
    names = {route.backend for group in plan.groups for route in group.routes}
    infos = [backends.get(name) for name in sorted(names)]
    return {info.name: backends.create(info) for info in infos if info.runnable}


@dataclass(eq=False)
class ModelRunner:
    """Runs a model's steps over a pool.

    Args:
        model: Transformers' own, with Nibble's attention function.
        plan: routes and layout.
        pool: the pages.
        backends: by name, all that the plan needs.
        tables: page tables on the device.
        run: how the model is run; None: as it is.
        tier: the pool's, where a host tier holds what it has no room for.
        exact: the newest tokens in the compute dtype, with an exact window.
    """

    model: nn.Module
    plan: Plan
    pool: PagedPool
    backends: Mapping[str, AttentionBackend]
    tables: PageTables
    run: Forward | None = None
    tier: HotBuffers | None = None
    exact: ExactCache | None = None
    graphs: Graphs | None = field(default=None, init=False)
    """Decode steps over stable buffers, after record()."""
    error_monitor: ErrorMonitor | None = field(default=None, init=False)
    """Compares what attention answers with rows of the model's own precision."""
    _sampled_rows_S: Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.device = self.tables.device
        self._run = self.run or plain(self.model)

    @torch.inference_mode()
    def forward(self, batch: Batch, *, every: bool = False) -> Tensor:
        """Return logits [S, V] of tokens that are sampled from, then of all logprob_rows; or of `every` token."""
        try:
            return self._forward(batch.scheduled, every)
        except BaseException:
            if self.tier:
                # The step raised midway, so nobody knows what these hot buffers hold.
                self.tier.invalidate(self._rows(batch.scheduled))
            raise

    def _forward(self, scheduled: Sequence[ScheduledRequest], every: bool) -> Tensor:
        # `every` is for scoring and calibration, whose prompts are no requests of a client.
        probe = self.error_monitor.probe(scheduled) if self.error_monitor and not every else None
        if self.graphs and not every and all(item.phase is Phase.DECODE for item in scheduled):
            logits = self._replay(scheduled, self.graphs, probe)
        else:
            logits = self._step(scheduled, every, probe)
        if self.tier:
            # After the launch, so that pages are saved while the step runs.
            self.tier.backup((item.request.lease, item.end) for item in scheduled)
        return logits

    @torch.inference_mode()
    def store_sampled(self, tokens_S: Tensor) -> None:
        """Store what was sampled from the last forward(), for a step that runs before the host knows it."""
        assert self._sampled_rows_S is not None
        self.tables.latest_R.index_copy_(0, self._sampled_rows_S, tokens_S)

    # Any step

    def _step(
        self, scheduled: Sequence[ScheduledRequest], every: bool, probe: AttentionObserver | None
    ) -> Tensor:
        rows, token_ids = self._rows(scheduled), _token_ids(scheduled)
        logit_rows = list(range(len(token_ids))) if every else _logit_rows(scheduled)
        token_rows = [row for row, item in zip(rows, scheduled, strict=True) for _ in range(item.num_tokens)]
        packed = PackedInts()
        slices = (
            packed.add(self._pad_rows(token_ids)),
            packed.add(self._pad_rows([p for item in scheduled for p in range(item.start, item.end)])),
            packed.add(self._pad_rows(token_rows)),
            # A step of prompt chunks may sample nothing, and the model cannot compute an empty set of logits.
            packed.add(self._pad_rows(logit_rows or [0])),
            packed.add(row for row, item in zip(rows, scheduled, strict=True) if item.samples_token),
        )
        unwritten, unkept = (
            _unwritten(scheduled),
            _unkept(scheduled, self.plan.page_size) if self.exact else [],
        )
        skipped = packed.add(unwritten), packed.add(unkept)
        # A batch is in the order of phases (Batch.from_scheduled), so each phase is one group.
        groups = [
            _PhaseGroup(tuple(pairs), packed)
            for _, pairs in groupby(zip(scheduled, rows, strict=True), key=lambda pair: pair[0].phase)
        ]
        sent = self._send(packed, scheduled)
        token_ids_T, positions_T, rows_T, logit_rows_S, sampled_rows_S = (sent[part] for part in slices)
        if ON_DEVICE in token_ids:
            # A negative id stands for the token that the step before has sampled for this row.
            token_ids_T = torch.where(token_ids_T < 0, self.tables.latest_R[rows_T], token_ids_T)
        # The model computes padding rows too, but they have no slot and attention does not see them.
        count = len(token_ids)
        meta = self._metadata(sent, groups, rows_T[:count], positions_T[:count])
        for slots_T, rows_of in ((meta.slot_mapping_T, skipped[0]), (meta.exact_slot_mapping_T, skipped[1])):
            if slots_T is not None and rows_of.start < rows_of.stop:
                slots_T.index_fill_(0, sent[rows_of], -1)
        self._sampled_rows_S = sampled_rows_S
        logits = self._run(token_ids_T[None], positions_T[None], logit_rows_S, self._context(meta, probe))
        return logits[: len(logit_rows)]

    def _metadata(
        self, sent: Tensor, groups: Sequence[_PhaseGroup], rows_T: Tensor, positions_T: Tensor
    ) -> AttentionMetadata:
        """Return where tokens are stored, and an attention batch for each phase."""
        page_size = self.plan.page_size
        pages_T = self.tables.table_RN[rows_T, positions_T // page_size]
        sent_int32, batches, start = sent.int(), [], 0
        for group in groups:
            width = cdiv(max(group.seq_lens), page_size)
            # Rows are gathered in full width and cut then, so that their stride is always the same.
            page_table_BN = self.tables.table_RN.index_select(0, sent[group.rows])[:, :width]
            stop = start + sum(group.query_lens)
            batches.append(
                AttentionBatch(
                    group.phase,
                    start,
                    stop,
                    group.query_lens,
                    group.seq_lens,
                    page_table_BN,
                    sent_int32[group.cu_seqlens_q],
                    sent_int32[group.seq_lens_at],
                    sent[group.rows],
                    exact_table_BN=self._exact_table(sent[group.rows], width),
                )
            )
            start = stop
        offsets_T, exact_slot_mapping_T = positions_T % page_size, None
        if exact := self.tables.exact:
            exact_slot_mapping_T = (
                exact.table_RN[rows_T, positions_T // page_size].long() * page_size + offsets_T
            )
        return self._with_frames(pages_T.long() * page_size + offsets_T, batches, exact_slot_mapping_T)

    def _exact_table(self, rows_B: Tensor, width: int) -> Tensor | None:
        """Return the exact pages of requests [B, N], with an exact window."""
        exact = self.tables.exact
        return exact.table_RN.index_select(0, rows_B)[:, :width] if exact else None

    def _with_frames(
        self,
        slot_mapping_T: Tensor,
        batches: Sequence[AttentionBatch],
        exact_slot_mapping_T: Tensor | None = None,
    ) -> AttentionMetadata:
        frame_slot_mapping_T = self.tier.frame_slots(slot_mapping_T) if self.tier else None
        return AttentionMetadata(slot_mapping_T, tuple(batches), frame_slot_mapping_T, exact_slot_mapping_T)

    def _pad_rows(self, values: list[int]) -> list[int]:
        """Repeat an entry that is alone: a single row is summed in another order on a CPU than one of several."""
        # torch.compile specialises on size 1, too, which would mean a second compilation (models/forward.py).
        return values * 2 if len(values) == 1 else values

    def _rows(self, scheduled: Sequence[ScheduledRequest]) -> list[int]:
        return [self.tables.row(item.request.lease) for item in scheduled]

    def _send(self, packed: PackedInts, scheduled: Sequence[ScheduledRequest]) -> Tensor:
        """Send all integers in one copy; updates of page tables and tier travel along, and are applied."""
        places, pages = map(packed.add, self.tables.take_updates())
        exact_updates = self.tables.exact.add_updates(packed) if self.tables.exact else None
        tier_updates = None
        if self.tier:
            leases = {self.tables.row(item.request.lease): item.request.lease for item in scheduled}
            tier_updates = self.tier.take_updates(packed.add, leases)
        sent = packed.send(self.device)
        if places.start < places.stop:
            self.tables.apply(sent[places], sent[pages].int())
        if self.tables.exact and exact_updates:
            self.tables.exact.apply(sent, exact_updates)
        if self.tier and tier_updates:
            self.tier.apply_updates(sent, tier_updates)
        return sent

    def _context(self, meta: AttentionMetadata, probe: AttentionObserver | None = None) -> StepContext:
        return StepContext(
            self.plan, self.pool, self.backends, meta, self.tier, observer=probe, exact=self.exact
        )

    # Steps of decodes alone

    def record(self, graphs: Graphs) -> None:
        """Record a decode step of each size; from now on decode steps are replayed."""
        graphs.record(self._decode)
        self.graphs = graphs

    def _replay(
        self, scheduled: Sequence[ScheduledRequest], graphs: Graphs, probe: AttentionObserver | None
    ) -> Tensor:
        # The smallest step with room for all requests.
        size = next(size for size in graphs.sizes if size >= len(scheduled))
        padding = size - len(scheduled)
        packed = PackedInts()
        # In the order in which _decode() takes them apart: rows, positions, token ids.
        inputs = packed.add(
            (
                *self._rows(scheduled), *[self.tables.padding_row] * padding,
                *[item.start for item in scheduled], *[-1] * padding,
                *_token_ids(scheduled), *[0] * padding,
            )
        )  # fmt: skip
        sent = self._send(packed, scheduled)
        # A decode always samples, so these are the first rows, without padding.
        self._sampled_rows_S = sent[inputs][: len(scheduled)]
        # A graph reads from fixed addresses, so its inputs are copied there.
        graphs.inputs[: 3 * size].copy_(sent[inputs])
        if probe:
            # A replay calls no Python, so the same step over the same buffers is computed.
            self._decode(size, graphs, probe)
        else:
            graphs.replay(size)
        return graphs.logits[: len(scheduled)]

    @torch.inference_mode()
    def _decode(self, size: int, graphs: Graphs, probe: AttentionObserver | None = None) -> None:
        """Compute one step of `size` rows, from buffer to buffer; graphs record this. Position -1 is padding."""
        rows_B, positions_B, sent_ids_B = graphs.inputs[: 3 * size].view(3, size)
        page_size, tables = self.plan.page_size, self.tables
        token_ids_B = torch.where(sent_ids_B < 0, tables.latest_R[rows_B], sent_ids_B)
        page_table_BN = tables.table_RN.index_select(0, rows_B)
        # Padding reads as position 0, and is stored nowhere (slot -1).
        valid_B = positions_B.clamp(min=0)
        pages_B = page_table_BN.gather(1, (valid_B // page_size)[:, None])[:, 0].long()
        slot_mapping_B = torch.where(positions_B < 0, -1, pages_B * page_size + valid_B % page_size)
        # The host knows no lengths of a replayed step: it gives a bound; kernels read them on the device.
        max_seq_len, seq_lens_B = page_table_BN.shape[1] * page_size, (positions_B + 1).int()
        exact_table_BN, exact_slot_mapping_B = self._exact_table(rows_B, page_table_BN.shape[1]), None
        if exact_table_BN is not None:
            exact_B = exact_table_BN.gather(1, (valid_B // page_size)[:, None])[:, 0].long()
            exact_slot_mapping_B = torch.where(positions_B < 0, -1, exact_B * page_size + valid_B % page_size)
        batches = [
            AttentionBatch(
                Phase.DECODE, first, last, (1,) * (last - first), (max_seq_len,) * (last - first),
                page_table_BN[first:last], graphs.cu_seqlens_q[: last - first + 1], seq_lens_B[first:last],
                rows_B[first:last], bounds=True,
                exact_table_BN=None if exact_table_BN is None else exact_table_BN[first:last],
            )
            for first, last in pairwise(self._split_points(size))
        ]  # fmt: skip
        ctx = self._context(self._with_frames(slot_mapping_B, batches, exact_slot_mapping_B), probe)
        logits = self._run(token_ids_B[None], valid_B[None], graphs.rows[:size], ctx)
        graphs.store_logits(logits)

    def _split_points(self, size: int) -> tuple[int, ...]:
        """Return where attention batches of decodes begin and end."""
        # With a host tier there are two. What one has selected is fetched while the other selects, and the first
        # attends while the rest is fetched.
        half = cdiv(size, 2 * SPLIT_MULTIPLE) * SPLIT_MULTIPLE
        return (0, half, size) if self.tier and size >= MIN_SPLIT else (0, size)


class _PhaseGroup:
    """What is scheduled of one phase, and where its numbers lie in the packed integers."""

    def __init__(self, pairs: Sequence[tuple[ScheduledRequest, int]], packed: PackedInts) -> None:
        scheduled = [item for item, _ in pairs]
        self.phase = scheduled[0].phase
        self.query_lens = tuple(item.num_tokens for item in scheduled)
        self.seq_lens = tuple(item.end for item in scheduled)
        self.cu_seqlens_q = packed.add(accumulate(self.query_lens, initial=0))
        self.seq_lens_at = packed.add(self.seq_lens)
        self.rows = packed.add(row for _, row in pairs)


def _logit_rows(scheduled: Sequence[ScheduledRequest]) -> list[int]:
    """Return the rows of the step whose logits are needed: those that are sampled from, then logprob_rows."""
    starts = list(accumulate((item.num_tokens for item in scheduled), initial=0))
    sampled = [end - 1 for end, item in zip(starts[1:], scheduled, strict=True) if item.samples_token]
    first_rows = zip(starts[:-1], scheduled, strict=True)
    return sampled + [start + at - item.start for start, item in first_rows for at in item.logprob_rows]


def _unwritten(scheduled: Sequence[ScheduledRequest]) -> list[int]:
    """Return the rows of tokens that are computed again and lie in the prefix cache: their pages are not written."""
    rows, first = list[int](), 0
    for item in scheduled:
        rows += range(first, first + min(max(item.write_from - item.start, 0), item.num_tokens))
        first += item.num_tokens
    return rows


def _unkept(scheduled: Sequence[ScheduledRequest], page_size: int) -> list[int]:
    """Return the rows of tokens that are too old at the end of the step to be kept in exact pages."""
    rows, first = list[int](), 0
    for item in scheduled:
        kept = item.request.lease.exact_pages
        for page in range(item.start // page_size, cdiv(item.end, page_size)):
            if page not in kept:
                start, stop = max(page * page_size, item.start), min((page + 1) * page_size, item.end)
                rows += range(first + start - item.start, first + stop - item.start)
        first += item.num_tokens
    return rows


def _token_ids(scheduled: Iterable[ScheduledRequest]) -> list[int]:
    """Return the ids of all tokens; ON_DEVICE for a last one that the host does not know yet."""
    token_ids: list[int] = []
    for item in scheduled:
        ids = item.request.token_ids[item.start : item.end]
        # The list ends with the last token that the host knows, so a slice may be one short.
        token_ids += ids if len(ids) == item.num_tokens else [*ids, ON_DEVICE]
    return token_ids

"""From a Batch to logits: fill the tensors of a step and run the model.

A step of decodes alone runs over stable buffers, where it can be recorded (engine/model_runner.py) and replayed; every
other step runs over tensors of its own. Nothing here waits for the device.

Shape suffixes: T tokens of the step, B requests of an attention batch, N pages of a request, R rows of the page tables,
S rows whose logits are computed, V vocabulary.

Integers between host and device: one packed copy a step, and page tables that stay on the device.

On a GPU a copy starts from pinned memory and the host does not wait for it.

Shape suffixes: R rows, one for each open lease and one for padding; N pages of a row; T tokens of a step; S rows whose
logits are computed.

Recorded decode steps: one CUDA graph for each size, over buffers that stay where they are.

What a step computes is in engine/model_runner.py.

Shape suffixes: B rows of a step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor, nn

from nibble.attention.layer import AttentionBackend, AttentionObserver, StepContext
from nibble.attention.planner.plan import Plan
from nibble.cache.hot_buffer import HotBuffers
from nibble.cache.pool import PagedPool
from nibble.engine.error_monitor import ErrorMonitor
from nibble.engine.request import Batch, ScheduledRequest
from nibble.engine.transfer import PackedInts, PageTables, StepTensors
from nibble.errors import BackendError
from nibble.kernels.types import AttentionBatch, AttentionMetadata
from nibble.model_spec import Phase
from nibble.models.forward import Forward, plain
from nibble.models.linear import row_multiple

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Runs a function, and returns one that repeats over the same memory all that it did on the device."""


class Buffers:
    """What a recorded step reads and writes.

    Args:
        max_rows: most rows of a step.
        device: where steps run.
    """

    # All tensors of steps are made in inference mode: to a compiled model others look different.
    @torch.inference_mode()
    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.inputs = torch.zeros(3 * max_rows, dtype=torch.int64, device=device)
        """Of a step of B rows: rows of the page tables, positions and token ids, B int64 each."""
        self.cu_seqlens_q = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        """0, 1, 2, ...: where requests of one token begin."""
        self.rows = torch.arange(max_rows, device=device)
        """0, 1, 2, ...: the rows whose logits are computed."""
        self.logits = torch.empty(0, device=device)
        """[max_rows, V], allocated by the first step."""

    def clear(self, size: int) -> None:
        """Set the inputs of a step of `size` rows to padding."""
        self.inputs.zero_()
        # Positions are the second third. They must be -1, since 0 is a real token's position.
        self.inputs[size : 2 * size] = -1

    def store_logits(self, logits_BV: Tensor) -> None:
        """Copy a step's logits, so that their own memory serves the next graph too."""
        if not len(self.logits):
            self.logits = logits_BV.new_empty(len(self.rows), logits_BV.shape[1])
        self.logits[: len(logits_BV)].copy_(logits_BV)


class Graphs:
    """Decode steps of several sizes.

    Args:
        sizes: rows of a step, ascending.
        device: where steps run.
        record: how a step is recorded.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device, record: Record) -> None:
        self.sizes = tuple(sizes)
        self.buffers = Buffers(self.sizes[-1], device)
        self._record = record
        self._replays: dict[int, Callable[[], None]] = {}

    def size_for(self, count: int) -> int:
        """Return the smallest size with room for `count` requests."""
        return next(size for size in self.sizes if size >= count)

    @torch.inference_mode()
    def record(self, decode: Callable[[int, Buffers], None]) -> None:
        """Record decode(size, buffers) for all sizes.

        Raises:
            BackendError: a graph cannot hold a step.
        """
        # The largest first: the others then fit into its memory.
        for size in reversed(self.sizes):
            self.buffers.clear(size)
            try:
                self._replays[size] = self._record(partial(decode, size, self.buffers))
            # The start explains it by the memory plan (explain_out_of_memory).
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a kernel does that a graph cannot hold
                raise BackendError(
                    f"a decode step of {size} requests cannot be recorded as a CUDA graph ({error}); "
                    "serve without graphs: --no-graphs"
                ) from error

    def replay(self, size: int) -> None:
        """Compute a step of `size` rows from the buffers' inputs to their logits."""
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


ON_DEVICE = -1
"""The id of a token whose value only the device knows: the step before samples it."""
MIN_SPLIT, SPLIT_MULTIPLE = 32, 8
"""With a host tier, steps of so many requests are split in two, at a multiple of SPLIT_MULTIPLE."""


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
        """Decode steps over stable buffers, after record()."""
        self.error_monitor: ErrorMonitor | None = None
        """Compares what attention answers with rows of the model's own precision."""
        self._run = run or plain(model)
        self._sampled_rows_S: Tensor | None = None

    @torch.inference_mode()
    def forward(self, batch: Batch, *, every: bool = False) -> Tensor:
        """Return logits [S, V] of the tokens that are sampled from, or of `every` token."""
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
            self.tier.backup((item.request.lease, item.end) for item in scheduled if item.request.lease)
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
        logit_rows = list(range(len(token_ids))) if every else _last_rows(scheduled)
        row_of_token = [
            row for row, item in zip(rows, scheduled, strict=True) for _ in range(item.num_tokens)
        ]
        packed = PackedInts()
        slices = (
            packed.add(self._pad_rows(token_ids)),
            packed.add(self._pad_rows([p for item in scheduled for p in range(item.start, item.end)])),
            packed.add(self._pad_rows(row_of_token)),
            # A step of prompt chunks may sample nothing, and the model cannot compute an empty set of logits.
            packed.add(self._pad_rows(logit_rows or [0])),
            packed.add(row for row, item in zip(rows, scheduled, strict=True) if item.samples_token),
        )
        groups = _group_by_phase(scheduled, rows, packed)
        sent = self._send(packed, scheduled)
        step = StepTensors(*(sent[part] for part in slices))
        token_ids_T = step.token_ids_T
        if ON_DEVICE in token_ids:
            # A negative id stands for the token that the step before has sampled for this row.
            token_ids_T = torch.where(token_ids_T < 0, self.tables.latest_R[step.rows_T], token_ids_T)
        # The model computes padding rows too, but they have no slot and attention does not see them.
        count = len(token_ids)
        meta = self._metadata(sent, groups, step.rows_T[:count], step.positions_T[:count])
        self._sampled_rows_S = step.sampled_rows_S
        logits = self._run(
            token_ids_T[None], step.positions_T[None], step.logit_rows_S, self._context(meta, probe)
        )
        return logits[: len(logit_rows)]

    def _metadata(
        self, sent: Tensor, groups: Sequence[_PhaseGroup], rows_T: Tensor, positions_T: Tensor
    ) -> AttentionMetadata:
        """Return where tokens are stored, and an attention batch for each phase."""
        page_size = self.plan.page_size
        pages_T = self.tables.table_RN[rows_T, positions_T // page_size]
        sent_int32, batches, start = sent.int(), [], 0
        for group in groups:
            width = -(-max(group.seq_lens) // page_size)
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
                )
            )
            start = stop
        return self._with_frames(pages_T.long() * page_size + positions_T % page_size, batches)

    def _with_frames(self, slot_mapping_T: Tensor, batches: Sequence[AttentionBatch]) -> AttentionMetadata:
        frame_slot_mapping_T = self.tier.frame_slots(slot_mapping_T) if self.tier else None
        return AttentionMetadata(slot_mapping_T, tuple(batches), frame_slot_mapping_T)

    def _pad_rows(self, values: list[int]) -> list[int]:
        """Repeat the last entry until the batch is a multiple of `self.row_multiple`, and never a single row."""
        # CPU GEMMs are batch-invariant only on full vectors (models/linear.py).
        # torch.compile specialises on size 1, which would mean a second compilation (models/forward.py).
        padding = 1 if len(values) == self.row_multiple == 1 else -len(values) % self.row_multiple
        return values + values[-1:] * padding

    def _rows(self, scheduled: Sequence[ScheduledRequest]) -> list[int]:
        return [self.tables.row(item.request.lease) for item in scheduled if item.request.lease]

    def _send(self, packed: PackedInts, scheduled: Sequence[ScheduledRequest]) -> Tensor:
        """Send all integers in one copy; updates of page tables and tier travel along, and are applied."""
        places, pages = map(packed.add, self.tables.take_updates())
        tier_updates = None
        if self.tier:
            leases = [item.request.lease for item in scheduled if item.request.lease]
            tier_updates = self.tier.take_updates(
                packed.add, {self.tables.row(lease): lease for lease in leases}
            )
        sent = packed.send(self.device)
        if places.start < places.stop:
            self.tables.apply(sent[places], sent[pages].int())
        if self.tier and tier_updates:
            self.tier.apply_updates(sent, tier_updates)
        return sent

    def _context(self, meta: AttentionMetadata, probe: AttentionObserver | None = None) -> StepContext:
        return StepContext(self.plan, self.pool, self.backends, meta, self.tier, observer=probe)

    # Steps of decodes alone

    def record(self, graphs: Graphs) -> None:
        """Record a decode step of each size; from now on decode steps are replayed."""
        graphs.record(self._decode)
        self.graphs = graphs

    def _replay(
        self, scheduled: Sequence[ScheduledRequest], graphs: Graphs, probe: AttentionObserver | None
    ) -> Tensor:
        size = graphs.size_for(len(scheduled))
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
        graphs.buffers.inputs[: 3 * size].copy_(sent[inputs])
        if probe:
            # A replay calls no Python, so the same step over the same buffers is computed.
            self._decode(size, graphs.buffers, probe)
        else:
            graphs.replay(size)
        return graphs.buffers.logits[: len(scheduled)]

    @torch.inference_mode()
    def _decode(self, size: int, buffers: Buffers, probe: AttentionObserver | None = None) -> None:
        """Compute one step of `size` rows, from buffer to buffer; graphs record this. Position -1 is padding."""
        rows_B, positions_B, sent_ids_B = buffers.inputs[: 3 * size].view(3, size)
        page_size, tables = self.plan.page_size, self.tables
        token_ids_B = torch.where(sent_ids_B < 0, tables.latest_R[rows_B], sent_ids_B)
        page_table_BN = tables.table_RN.index_select(0, rows_B)
        # Padding reads as position 0, and is stored nowhere (slot -1).
        valid_B = positions_B.clamp(min=0)
        pages_B = page_table_BN.gather(1, (valid_B // page_size)[:, None])[:, 0].long()
        slot_mapping_B = torch.where(positions_B < 0, -1, pages_B * page_size + valid_B % page_size)
        # The host knows no lengths of a replayed step: it gives a bound; kernels read them on the device.
        max_seq_len, seq_lens_B = page_table_BN.shape[1] * page_size, (positions_B + 1).int()
        batches = [
            AttentionBatch(
                Phase.DECODE, first, last, (1,) * (last - first), (max_seq_len,) * (last - first),
                page_table_BN[first:last], buffers.cu_seqlens_q[: last - first + 1], seq_lens_B[first:last],
                rows_B[first:last],
            )
            for first, last in pairwise(self._split_points(size))
        ]  # fmt: skip
        ctx = self._context(self._with_frames(slot_mapping_B, batches), probe)
        logits = self._run(token_ids_B[None], valid_B[None], buffers.rows[:size], ctx)
        buffers.store_logits(logits)

    def _split_points(self, size: int) -> tuple[int, ...]:
        """Return where attention batches of decodes begin and end."""
        # With a host tier there are two. What one has selected is fetched while the other selects, and the first
        # attends while the rest is fetched.
        half = -(-size // (2 * SPLIT_MULTIPLE)) * SPLIT_MULTIPLE
        return (0, half, size) if self.tier and size >= MIN_SPLIT else (0, size)


class _PhaseGroup:
    """What is scheduled of one phase, and where its numbers lie in the packed integers."""

    def __init__(
        self, scheduled: Sequence[ScheduledRequest], rows: Sequence[int], packed: PackedInts
    ) -> None:
        self.phase = scheduled[0].phase
        self.query_lens = tuple(item.num_tokens for item in scheduled)
        self.seq_lens = tuple(item.end for item in scheduled)
        self.cu_seqlens_q = packed.add(accumulate(self.query_lens, initial=0))
        self.seq_lens_at = packed.add(self.seq_lens)
        self.rows = packed.add(rows)


def _group_by_phase(
    scheduled: Sequence[ScheduledRequest], rows: Sequence[int], packed: PackedInts
) -> list[_PhaseGroup]:
    """Group neighbours of one phase."""
    groups, first = [], 0
    # A batch is in the order of phases (Batch.from_scheduled), so each phase is one group.
    for _, items in groupby(scheduled, key=lambda item: item.phase):
        group = tuple(items)
        groups.append(_PhaseGroup(group, rows[first : first + len(group)], packed))
        first += len(group)
    return groups


def _token_ids(scheduled: Iterable[ScheduledRequest]) -> list[int]:
    """Return the ids of all tokens; ON_DEVICE for a last one that the host does not know yet."""
    token_ids: list[int] = []
    for item in scheduled:
        ids = item.request.token_ids[item.start : item.end]
        # The list ends with the last token that the host knows, so a slice may be one short.
        token_ids += ids if len(ids) == item.num_tokens else [*ids, ON_DEVICE]
    return token_ids


def _last_rows(scheduled: Sequence[ScheduledRequest]) -> list[int]:
    """Return the rows of the last tokens of all requests that are sampled for."""
    ends = accumulate(item.num_tokens for item in scheduled)
    return [end - 1 for end, item in zip(ends, scheduled, strict=True) if item.samples_token]

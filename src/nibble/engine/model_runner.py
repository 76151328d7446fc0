"""From a Batch to logits: fill the tensors of a step and run the model. Nothing here waits for the device.

All integers of a step go to the device in one packed copy. Page tables and the tokens sampled last stay there.
A step of decodes alone, or of decodes and drafts, runs over buffers that stay where they are, so that it can be
recorded as a CUDA graph, one for each size, and replayed. Every other step runs over tensors of its own.

A recorded step with drafts has as many rows for each of its requests. One that has fewer new tokens has them in its
last rows. Those before are padding: they see stored tokens of that request alone, are stored nowhere, and nobody reads
them.

Shape suffixes: T tokens of the step, B requests of an attention batch or rows of a recorded step, N pages of a request,
R rows of the page tables, one for each open lease and one for padding, S rows whose logits are computed, V vocabulary,
L rows of a request in a recorded step with drafts.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from nibble.attention import backends
from nibble.attention.observer import AttentionObserver
from nibble.attention.planner.plan import Plan
from nibble.attention.recurrent import RecurrentStates
from nibble.attention.step import AttentionBackend, StepContext
from nibble.attention.window import ExactCache
from nibble.cache.hot_buffer import HotBuffers
from nibble.cache.lease import Lease
from nibble.cache.pool import PagedPool
from nibble.cache.residency import Copy
from nibble.cache.state_pool import StatePool
from nibble.engine.error_monitor import ErrorMonitor
from nibble.engine.graphs import Graphs, parts_of, rows_of
from nibble.engine.page_tables import PackedInts, PageTables, SentUpdates
from nibble.engine.parallel_steps import numbers_by_rank, recorded_numbers_by_rank
from nibble.engine.piecewise import PiecewiseSteps
from nibble.engine.request import Batch, ScheduledRequest, is_ahead
from nibble.engine.step_numbers import Followers, StepNumbers
from nibble.engine.step_tokens import (
    PhaseGroup,
    StateRows,
    VerifyInputs,
    attends_for_logits_only,
    logit_rows,
    pad_rows,
    padded_logit_rows,
    padded_token_ids,
    sampled_rows,
    split_points,
    token_ids,
    token_slots,
    unkept,
    unwritten,
    verify_states,
)
from nibble.kernels import cdiv
from nibble.kernels.experts import first_row_only
from nibble.kernels.recurrence.types import StateMetadata
from nibble.kernels.step_inputs import decode_inputs, verify_inputs
from nibble.kernels.types import AttentionBatch, AttentionMetadata, LogitRows
from nibble.model_spec import Phase
from nibble.models.forward import Forward, plain
from nibble.models.parallel_rows import ROWS, Rows, equal_rows
from nibble.models.taps import TAPS


def adapters(plan: Plan) -> dict[str, Any]:
    """Return one adapter for every backend of the plan; its constructor imports the vendor's package."""
    names = {route.backend for route in plan.routes}
    infos = [backends.get(name) for name in sorted(names)]
    return {info.name: backends.create(info) for info in infos if info.runnable}


def most_prompts(plan: Plan) -> int | None:
    """Return the most requests of an attention batch that computes prompts; None for any number."""
    infos = (backends.get(route.backend) for route in plan.routes if not route.phase.decodes)
    return min((info.compiled_requests for info in infos if info.compiled_requests), default=None)


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
        states: slots of recurrent states, where layers have any.
        followers: the other ranks, where layers are divided among GPUs.
    """

    model: nn.Module
    plan: Plan
    pool: PagedPool
    backends: Mapping[str, AttentionBackend]
    tables: PageTables
    run: Forward | None = None
    tier: HotBuffers | None = None
    exact: ExactCache | None = None
    states: StatePool | None = None
    followers: Followers | None = None
    """The other ranks, where layers are divided among GPUs."""
    graphs: Graphs | None = field(default=None, init=False)
    """Decode steps over stable buffers, after record()."""
    pieces: PiecewiseSteps | None = field(default=None, init=False)
    """Other steps of few tokens, between their attention operators, after record_pieces()."""
    error_monitor: ErrorMonitor | None = field(default=None, init=False)
    """Compares what attention answers with rows of the model's own precision."""
    hidden_states: Tensor | None = field(default=None, init=False)
    """[T, X], of the last forward(), in its order, where a head drafts for the model (models/taps.py); of a head those
    of the rows that are sampled [S, H]."""
    rows: Rows | None = field(default=None, init=False)
    """Of all ranks, where each attends for requests of its own."""
    books: list[ModelRunner] = field(default_factory=list, init=False)
    """At rank 0 then: what makes the numbers of each rank's steps, over its page tables."""
    _sampled_rows_S: Tensor | None = field(default=None, init=False)
    _sampled_at_S: Tensor | None = field(default=None, init=False)
    """Which of the sampled tokens are this rank's, where others have requests of their own."""
    _batch_rows_S: Tensor | None = field(default=None, init=False)
    """At rank 0 then, which rows of all ranks' logits are those of the batch."""

    def __post_init__(self) -> None:
        self.device = self.tables.device
        self.rows = getattr(self.model, ROWS, None)
        self.has_taps = hasattr(self.model, TAPS)
        if self.has_taps:
            self.tables.keep_drafts()
        self._run = self.run or plain(self.model)
        self.most_prompts = most_prompts(self.plan)
        self.verified_size: tuple[int, int] | None = None
        """Of the last step, if it was a recorded one with drafts, of which the device notes what it brings."""

    def keep_books(self, tables: Sequence[PageTables]) -> None:
        """Make the numbers of other ranks' steps, too, over their page tables, as far as the host knows them."""
        self.books = [self, *(copy.copy(self) for _ in tables)]
        for runner, own in zip(self.books[1:], tables, strict=True):
            runner.tables = own

    @torch.inference_mode()
    def forward(self, batch: Batch, *, every: bool = False) -> Tensor:
        """Return logits [S, V] of tokens that are sampled from, then of all logprob_rows; or of `every` token."""
        try:
            logits = self._forward(batch.scheduled, every)
            if self.states:
                for item in batch.scheduled:
                    item.request.lease.state_copies = []
        except BaseException:
            # The step raised midway, as by an interrupt, so nobody knows of which pages the device knows.
            for one in self.books or (self,):
                one.tables.forget_sent()
            # Nor what slots and hot buffers hold.
            for item in batch.scheduled:
                item.request.lease.are_states_lost = True
            if self.tier:
                self.tier.invalidate(self._rows(batch.scheduled))
            raise
        return logits

    def _forward(self, scheduled: Sequence[ScheduledRequest], every: bool) -> Tensor:
        # `every` is for scoring and calibration, whose prompts are no requests of a client.
        probe = self.error_monitor.probe(scheduled) if self.error_monitor and not every else None
        size, followers = None if every else self._recorded_size(scheduled, probe), self.followers
        assert size or not is_ahead(scheduled), "only a recorded step finds out where its requests begin"
        if followers and self.books:
            by_rank = (
                recorded_numbers_by_rank(self.books, scheduled, size)
                if size
                else numbers_by_rank(self.books, scheduled, every)
            )
            return self._compute_with(followers, by_rank)[self._batch_rows_S]
        numbers = self.recorded_numbers(scheduled, size) if size else self.step_numbers(scheduled, every)
        logits = self._compute_with(followers, numbers) if followers else self._compute(numbers, probe)
        if self.tier:
            # After the launch, so that pages are saved while the step runs; those with drafts may be written again.
            settled = ((item.request.lease, item.end - len(item.drafts)) for item in scheduled)
            self.tier.backup(settled, self.save)
        return logits

    def _recorded_size(
        self, scheduled: Sequence[ScheduledRequest], probe: AttentionObserver | None
    ) -> int | tuple[int, int] | None:
        """Return the size of the recorded step that serves these requests, if one does."""
        requests, last = len(scheduled), scheduled[-1].phase
        # In the order of PHASE_ORDER: steps that decode first, and of these those without drafts.
        if not self.graphs or not last.decodes:
            return None
        if self.books:
            # All ranks replay the step of the one with most requests.
            requests = max(Counter(item.request.lease.rank for item in scheduled).values())
        if last is Phase.DECODE:
            return self.graphs.size_of(requests)
        # A short exact window may have no copies of all new tokens, and a recorded step keeps them all.
        if probe or (self.exact and unkept(scheduled, self.plan.page_size)):
            return None
        return self.graphs.verify_size(requests, max([item.num_tokens for item in scheduled]))

    def recorded_numbers(
        self, scheduled: Sequence[ScheduledRequest], size: int | tuple[int, int]
    ) -> StepNumbers:
        """Return the numbers of a recorded step.

        Args:
            scheduled: requests; none: rows of padding, by which a rank takes part in a step of others.
            size: of the step, which has room for them.
        """
        if isinstance(size, int):
            return self._replay_numbers(scheduled, size)
        return self._verify_numbers(scheduled, size)

    def _compute_with(self, followers: Followers, numbers: StepNumbers | list[StepNumbers]) -> Tensor:
        """Compute a step on all ranks, each its own where there is one for each."""
        with followers.together():
            followers.compute(numbers)
            return self.compute(numbers[0] if isinstance(numbers, list) else numbers)

    @torch.inference_mode()
    def compute(self, numbers: StepNumbers, probe: AttentionObserver | None = None) -> Tensor:
        """Compute a step of which all numbers are known; see forward()."""
        return self._compute(numbers, probe)

    def _compute(self, numbers: StepNumbers, probe: AttentionObserver | None) -> Tensor:
        self.verified_size = None
        if self.states:
            self.states.copy(list(numbers.state_copies))
        if not numbers.replay_size:
            return self._step(numbers, probe)
        assert self.graphs is not None
        if isinstance(numbers.replay_size, int):
            return self._replay(numbers, numbers.replay_size, self.graphs, probe)
        return self._replay_verify(numbers, numbers.replay_size, self.graphs)

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Run the model as it is written."""
        run, self._run = self._run, plain(self.model)
        try:
            yield
        finally:
            self._run = run

    @torch.inference_mode()
    def store_sampled(self, tokens_S: Tensor) -> None:
        """Store what was sampled from the last forward(), for a step that runs before the host knows it."""
        if self.graphs and self.verified_size:
            VerifyInputs.of(self.graphs.settled, *self.verified_size).accept(tokens_S, self.tables)
        assert self._sampled_rows_S is not None
        # All requests have drafts, or what they gain is noted above. Those of other ranks may have none.
        if not len(self._sampled_rows_S) and self._sampled_at_S is None:
            return
        if self.followers:
            with self.followers.together():
                self.followers.store_sampled(tokens_S)
        own_S = tokens_S if self._sampled_at_S is None else tokens_S[self._sampled_at_S]
        self.tables.latest_R.index_copy_(0, self._sampled_rows_S, own_S)

    @torch.inference_mode()
    def save(self, copies: Sequence[Copy]) -> None:
        """Save pages from their frames to the host, on all ranks."""
        assert self.tier
        if self.followers:
            self.followers.save(copies)
        self.tier.save(copies)

    # Any step

    def step_numbers(self, scheduled: Sequence[ScheduledRequest], every: bool) -> StepNumbers:
        """Return the numbers of any step.

        Args:
            scheduled: requests; none: rows of padding, by which a rank takes part in a step of others.
            every: whether the logits of every token are needed.
        """
        if not scheduled:
            return self._idle_numbers()
        rows, ids = self._rows(scheduled), token_ids(scheduled)
        rows_of_logits = list(range(len(ids))) if every else logit_rows(scheduled)
        token_rows = [row for row, item in zip(rows, scheduled, strict=True) for _ in range(item.num_tokens)]
        positions = [p for item in scheduled for p in range(item.start, item.end)]
        packed, group_of_logits = PackedInts(), None
        inputs = (
            packed.add(pad_rows(ids)),
            packed.add(pad_rows(positions)),
            packed.add(pad_rows(token_rows)),
            # A step of prompt chunks may sample nothing, and the model cannot compute an empty set of logits.
            packed.add(pad_rows(rows_of_logits or [0])),
            packed.add(sampled_rows(scheduled, rows, self.tables.padding_row)),
        )
        forgotten = unkept(scheduled, self.plan.page_size) if self.exact else []
        skipped = packed.add(unwritten(scheduled)), packed.add(forgotten)
        state_rows = StateRows(scheduled, packed) if self.states else None
        groups = PhaseGroup.of_step(scheduled, rows, packed, self.most_prompts)
        if not (every or self.tier or self.rows) and attends_for_logits_only(scheduled):
            group_of_logits = PhaseGroup.of_tokens(rows_of_logits, positions, token_rows, packed)
        return StepNumbers(
            packed, inputs, len(ids), len(rows_of_logits), self._pack_updates(packed, scheduled), min(ids) < 0,
            0, skipped, state_rows, groups, group_of_logits, self._state_copies(scheduled),
        )  # fmt: skip

    def _idle_numbers(self) -> StepNumbers:
        """Return the numbers of a step without requests: a row that looks at any token, and is stored nowhere."""
        packed, padding = PackedInts(), self.tables.padding_row
        inputs = (*(packed.add(x) for x in ([0, 0], [0, 0], [padding, padding], [0, 0])), packed.add([]))
        skipped = packed.add([0]), packed.add([0])
        group = PhaseGroup.of_padding(padding, packed)
        return StepNumbers(
            packed, inputs, 1, 0, self._pack_updates(packed, ()), skipped=skipped, groups=[group]
        )

    def _step(self, numbers: StepNumbers, probe: AttentionObserver | None) -> Tensor:
        sent = self._send(numbers)
        token_ids_T, positions_T, rows_T, logit_rows_S, sampled_rows_S = (
            sent[part] for part in numbers.inputs
        )
        if numbers.takes_sampled:
            token_ids_T = self.tables.resolve_ids(token_ids_T, rows_T)
        # The model computes padding rows too, but they have no slot and attention does not see them.
        count, state_rows = numbers.num_tokens, numbers.state_rows
        # A probe looks at all rows.
        rows_S = None if probe else logit_rows_S[: numbers.num_logits]
        meta = self._metadata(sent, numbers, rows_T[:count], positions_T[:count], rows_S)
        self._note_rows(sent, numbers, sampled_rows_S)
        state_batch = state_rows.metadata(sent, self.states.invariant) if state_rows and self.states else None
        context = self._context(meta, probe, state_batch)
        if self.rows and numbers.rank_rows:
            with self.rows.step(numbers.rank_rows, self.device):
                return parts_of(self._run(token_ids_T[None], positions_T[None], logit_rows_S, context))[0]
        arguments = self._run, token_ids_T, positions_T, logit_rows_S, context
        # A probe keeps what attention is given, which lies in memory that the next piece uses again.
        if self.pieces and not probe and (recorded := self.pieces.compute(*arguments)) is not None:
            self.hidden_states = None if self.pieces.states is None else self.pieces.states[:count]
            return recorded[: numbers.num_logits]
        logits, states = parts_of(self._run(token_ids_T[None], positions_T[None], logit_rows_S, context))
        self.hidden_states = None if states is None else states[:count]
        return logits[: numbers.num_logits]

    def _note_rows(self, ints: Tensor, numbers: StepNumbers, sampled_rows_S: Tensor) -> None:
        """Note the rows of the page tables that store_sampled() writes, and what belongs to whom of all ranks' rows."""

        def part(where: slice | None) -> Tensor | None:
            return None if where is None else ints[where].to(self.device, non_blocking=True)

        self._sampled_rows_S = sampled_rows_S.to(self.device, non_blocking=True)
        self._sampled_at_S, self._batch_rows_S = part(numbers.sampled_at), part(numbers.batch_rows)

    def _metadata(
        self, sent: Tensor, numbers: StepNumbers, rows_T: Tensor, positions_T: Tensor, logit_rows_S: Tensor | None
    ) -> AttentionMetadata:  # fmt: skip
        """Return where tokens are stored, attention batches of one phase each, and one of logit rows, if given."""
        page_size, (skipped, exact_skipped) = self.plan.page_size, numbers.skipped
        sent_int32, batches, start = sent.int(), [], 0
        for group in numbers.groups:
            batches.append(self._batch(sent, sent_int32, group, start))
            start = batches[-1].stop
        logit_rows = None
        if numbers.logit_rows and logit_rows_S is not None:
            batch = self._batch(sent, sent_int32, numbers.logit_rows, 0) if len(logit_rows_S) else None
            logit_rows = LogitRows(logit_rows_S, batch)
        slots_T = token_slots(self.tables.table_RN, rows_T, positions_T, page_size, sent[skipped])
        exact_slots_T = None
        if exact := self.tables.exact:
            exact_slots_T = token_slots(exact.table_RN, rows_T, positions_T, page_size, sent[exact_skipped])
        return replace(self._with_frames(slots_T, batches, exact_slots_T), logit_rows=logit_rows)

    def _batch(self, sent: Tensor, sent_int32: Tensor, group: PhaseGroup, start: int) -> AttentionBatch:
        """Return the batch of a group, whose rows begin at `start`."""
        width, rows_B = cdiv(max(group.seq_lens), self.plan.page_size), sent[group.rows]
        return AttentionBatch(
            group.phase, start, start + sum(group.query_lens), group.query_lens, group.seq_lens,
            # Rows are gathered in full width and cut then, so that their stride is always the same.
            self.tables.table_RN.index_select(0, rows_B)[:, :width],
            sent_int32[group.cu_seqlens_q], sent_int32[group.seq_lens_at], rows_B,
            exact_table_BN=self._exact_table(rows_B, width),
        )  # fmt: skip

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

    def _rows(self, scheduled: Sequence[ScheduledRequest]) -> list[int]:
        return [self.tables.row(item.request.lease) for item in scheduled]

    def _pack_updates(self, packed: PackedInts, scheduled: Sequence[ScheduledRequest]) -> SentUpdates:
        """Add what the device does not know of page tables and tier, each once."""
        tier = None
        if self.tier:
            leases = {self.tables.row(item.request.lease): item.request.lease for item in scheduled}
            tier = self.tier.take_updates(packed.add, leases)
        return self.tables.pack_updates(packed, tier)

    @torch.inference_mode()
    def send_pages(self, leases: Iterable[Lease]) -> None:
        """Tell the device of new pages of leases before the step that needs them, where this rank alone computes it."""
        if self.followers:
            return
        packed = PackedInts()
        with self.tables.sending():
            for lease in leases:
                self.tables.row(lease)
            updates = self.tables.pack_updates(packed)
            if updates.any_pages:
                self.tables.apply_updates(self.tables.send(packed), updates)

    def _send(self, numbers: StepNumbers) -> Tensor:
        """Send all integers in one copy; updates of page tables and tier travel along, and are applied."""
        sent = self.tables.send(numbers.ints)
        self.tables.apply_updates(sent, numbers.updates)
        if self.tier and numbers.updates.tier:
            self.tier.apply_updates(sent, numbers.updates.tier)
        return sent

    def _context(
        self,
        meta: AttentionMetadata,
        probe: AttentionObserver | None = None,
        state_batch: StateMetadata | None = None,
    ) -> StepContext:
        return StepContext(
            self.plan,
            self.pool,
            self.backends,
            meta,
            self.tier,
            observer=probe,
            exact=self.exact,
            recurrent=RecurrentStates(self.states.layers, state_batch)
            if self.states and state_batch
            else None,
        )

    # Recurrent states

    def _state_copies(self, scheduled: Sequence[ScheduledRequest]) -> list[tuple[int, int]]:
        """Return the copies of slots that come before a step."""
        if not self.states:
            return []
        return [pair for item in scheduled for pair in item.request.lease.state_copies]

    # Steps of decodes alone

    def record(self, graphs: Graphs) -> None:
        """Record a step of each size; from now on such steps are replayed."""
        if self.followers:
            self.followers.record(graphs.sizes, graphs.verify_sizes, captured=graphs.is_captured)
        graphs.num_ranks = self.rows.group.size if self.rows else 1
        graphs.record(self._decode, self._verify)
        graphs.compile_accept(self.tables)
        self.graphs = graphs

    def _replay_numbers(self, scheduled: Sequence[ScheduledRequest], size: int) -> StepNumbers:
        padding = rows_of(size) - len(scheduled)
        packed = PackedInts()
        # In the order in which _decode() takes them apart: rows, positions, token ids.
        inputs = packed.add(
            (
                *self._rows(scheduled), *[self.tables.padding_row] * padding,
                *[item.start for item in scheduled], *[-1] * padding,
                *token_ids(scheduled), *[0] * padding,
            )
        )  # fmt: skip
        count, updates = len(scheduled), self._pack_updates(packed, scheduled)
        copies = self._state_copies(scheduled)
        return StepNumbers(packed, (inputs,), count, count, updates, replay_size=size, state_copies=copies)

    def _replay(
        self, numbers: StepNumbers, size: int, graphs: Graphs, probe: AttentionObserver | None
    ) -> Tensor:
        sent, (inputs,) = self._send(numbers), numbers.inputs
        # A decode always samples, so these are the first rows, without padding.
        self._note_rows(sent, numbers, sent[inputs][: numbers.num_tokens])
        # A graph reads from fixed addresses, so its inputs are copied there.
        graphs.inputs[: inputs.stop - inputs.start].copy_(sent[inputs])
        if probe:
            # A replay calls no Python, so the same step over the same buffers is computed.
            self._decode(size, graphs, probe)
        else:
            graphs.replay(size)
        self.hidden_states = None if graphs.states is None else graphs.states[: numbers.num_tokens]
        return graphs.logits[: numbers.num_logits]

    @torch.inference_mode()
    def _decode(self, size: int, graphs: Graphs, probe: AttentionObserver | None = None) -> None:
        """Compute one step of `size` requests, from buffer to buffer; graphs record this. Position -1 is padding."""
        rows_B, positions_B, sent_ids_B = graphs.decode_inputs(size)
        tables = self.tables
        inputs = decode_inputs(rows_B, positions_B, sent_ids_B, tables.on_device(self.plan.page_size))
        # The host knows no lengths of a replayed step: it gives a bound; kernels read them on the device.
        max_seq_len = inputs.pages_BN.shape[1] * self.plan.page_size
        batches = [
            AttentionBatch(
                Phase.DECODE, first, last, (1,) * (last - first), (max_seq_len,) * (last - first),
                inputs.pages_BN[first:last], graphs.cu_seqlens_q[: last - first + 1], inputs.seq_lens_B[first:last],
                rows_B[first:last], bounds=True,
                exact_table_BN=None if inputs.exact_BN is None else inputs.exact_BN[first:last],
            )
            for first, last in pairwise(split_points(len(rows_B), has_tier=self.tier is not None))
        ]  # fmt: skip
        state_batch = None
        if tables.slots_R is not None and self.states:
            slots_B = torch.where(positions_B < 0, -1, tables.slots_R.index_select(0, rows_B))
            starts_B, starts_B1 = inputs.positions_B.int(), graphs.cu_seqlens_q[: len(rows_B) + 1]
            state_batch = StateMetadata(slots_B, starts_B, starts_B1, 1, invariant=self.states.invariant)
        meta = self._with_frames(inputs.slots_B, batches, inputs.exact_slots_B)
        ctx = self._context(meta, probe, state_batch)
        with first_row_only(size == 1 and not self.rows), equal_rows(self.rows, rows_B):
            output = self._run(inputs.ids_B[None], inputs.positions_B[None], graphs.rows[: len(rows_B)], ctx)
        graphs.store_logits(*parts_of(output))

    # Steps with drafts

    def _verify_numbers(self, scheduled: Sequence[ScheduledRequest], size: tuple[int, int]) -> StepNumbers:
        (requests, length), rows, packed = size, self._rows(scheduled), PackedInts()
        padding, runs_ahead = requests - len(scheduled), is_ahead(scheduled)
        new = tuple([item.num_tokens for item in scheduled])
        # Behind what is stored, which the device knows by then.
        ends = [-1 - count for count in new] if runs_ahead else [item.end for item in scheduled]
        rows_of_logits = padded_logit_rows(new, length)
        none = [0] * padding
        inputs = packed.add_inputs(
            [
                *rows, *[self.tables.padding_row] * padding,
                *ends, *none,
                *new, *none,
                *padded_token_ids(scheduled, length), *none * length,
                *rows_of_logits, *[0] * (requests * length - len(rows_of_logits)),
            ]
        )  # fmt: skip
        # Of requests with drafts no step takes tokens from here, but from what accept() notes, if it does; other ranks
        # have no such notes, and their requests may have no drafts.
        takes = self.rows is not None or (min(new) == 1 and bool(self.followers or not self.tables.verified))
        of_sampled = packed.add(sampled_rows(scheduled, rows, self.tables.padding_row) if takes else ())
        return StepNumbers(
            packed, (inputs, of_sampled), sum(new), len(rows_of_logits),
            self._pack_updates(packed, scheduled), replay_size=size,
            state_copies=self._state_copies(scheduled), is_ahead=runs_ahead,
        )  # fmt: skip

    def _replay_verify(self, numbers: StepNumbers, size: tuple[int, int], graphs: Graphs) -> Tensor:
        # The device may wait for this step, so that all comes after the launch that can.
        inputs, of_sampled = numbers.inputs
        self.tables.send_inputs(
            numbers.ints, inputs, graphs.verify_inputs, numbers.updates, is_ahead=numbers.is_ahead
        )
        graphs.replay(size)
        self.verified_size = size if self.tables.verified and not self.rows else None
        if of_sampled.start < of_sampled.stop or numbers.sampled_at or numbers.batch_rows:
            ints = self.tables.on_host(numbers.ints)
            self._note_rows(ints, numbers, ints[of_sampled])
        else:
            self._sampled_rows_S, self._sampled_at_S, self._batch_rows_S = graphs.rows[:0], None, None
        self.hidden_states = None
        if graphs.states is not None:
            # A head reads those of new tokens, whose logits are computed, too.
            rows_S = VerifyInputs.of(graphs.settled, *size).logit_rows_S[: numbers.num_logits]
            self.hidden_states = graphs.states[rows_S]
        return graphs.logits[: numbers.num_logits]

    @torch.inference_mode()
    def _verify(self, size: tuple[int, int], graphs: Graphs) -> None:
        """Compute one step of requests with as many rows each, from buffer to buffer; graphs record this."""
        (requests, length), page_size, tables = size, self.plan.page_size, self.tables
        sent = VerifyInputs.of(graphs.copy_inputs(size, tables.verified), *size)
        inputs = verify_inputs(sent.rows_B, sent.ends_B, sent.new_B, sent.ids_BL, tables.on_device(page_size))
        max_seq_len = inputs.pages_BN.shape[1] * page_size
        batch = AttentionBatch(
            Phase.VERIFY, 0, requests * length, (length,) * requests, (max_seq_len,) * requests,
            inputs.pages_BN, graphs.cu_seqlens_of[size], inputs.seq_lens_B, sent.rows_B,
            bounds=True, exact_table_BN=inputs.exact_BN, new_B=inputs.new_B,
        )  # fmt: skip
        state_batch = None
        if self.states and tables.slots_R is not None:
            slots_B = tables.slots_R.index_select(0, sent.rows_B)
            state_batch = verify_states(sent, slots_B, length, invariant=self.states.invariant)
        meta = self._with_frames(inputs.slots_T, [batch], inputs.exact_slots_T)
        ctx, rows_S = self._context(meta, None, state_batch), graphs.logit_rows(size, sent)
        with equal_rows(self.rows, inputs.ids_T):
            output = self._run(inputs.ids_T[None], inputs.positions_T[None], rows_S, ctx)
        graphs.store_logits(*parts_of(output))

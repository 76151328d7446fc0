"""A head drafts: one decoder layer over the hidden states that the model leaves, with a cache of its own.

Row i of a head's cache comes from hidden state i and token i + 1, and predicts token i + 2 (models/head_model.py). To
the head a request is the sequence of its tokens 1, 2, ..., its twin, whose pages depend on these and on token 0: they
are shared by prefix in the manager of the head's own pool.

Hidden states are there only for tokens that the model computes. Each step leaves them here (`observe`); those of a few
rows wait, and rows are computed as soon as there are more, so that a prompt's hidden states are never kept. One row at
least is left, with which the next drafts begin. Drafts are computed behind it, one by one, each with the hidden state
that the head left for the one before. They are taken back in any case: tokens that count come again with hidden states
of the model, and their slots are written again.

Where steps are recorded, all drafts of a request are computed before the first is read (draft_steps.py), as many as are
likely to pay. On a GPU they are not even read before they are verified: the step that verifies them takes them from the
device, and is launched while they are drawn. And while that step runs the next drafts are launched, before it is known
which of the last ones count (`propose_ahead`): the books of both steps are then settled one step late. What needs the
value of a token before the next is drawn, a grammar or a penalty, goes step by step.

A prefix that the model's cache has, and the head's not, would leave a hole. So the scheduler asks how far the head has
followed a prefix (`reusable`), and the model computes what is beyond again. Mostly both have the same: pools hold the
same number of tokens.

Shape suffixes: T tokens of a step, S rows that are sampled, H hidden size, X values of the model's hidden states,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from time import perf_counter

import torch
from torch import Tensor

from nibble.cache.manager import CacheManager
from nibble.drafts import KEPT_STATES, MAX_DRAFTS, WAITING_STATES
from nibble.engine.draft_books import DraftBooks, chunk, ended
from nibble.engine.draft_steps import DraftGraphs, HeadForward, NewRows
from nibble.engine.draft_tracks import Chain, HeadRows, Track
from nibble.engine.drafters.base import DraftTask
from nibble.engine.following import unfinished
from nibble.engine.model_runner import ModelRunner
from nibble.engine.page_tables import PageTables
from nibble.engine.request import Batch, Request, ScheduledRequest, is_ahead
from nibble.engine.sampler import Sampler, needs_output_tokens
from nibble.kernels.transfer import to_device

NO_LIMIT = 1 << 62


class DraftHead(DraftBooks):
    """The drafter.

    Args:
        runner: of the head, with a HeadForward.
        manager: the books of its pool, of its own.
        sampler: with the seed of the model's.
        step_tokens: most tokens of a step.
        max_context: most tokens of a request that the head can have.
        vocab_size: tokens of the model that is drafted for.
        adapts: whether a draft may end where the head is not sure enough.
    """

    def __init__(
        self,
        runner: ModelRunner,
        manager: CacheManager,
        sampler: Sampler,
        step_tokens: int,
        max_context: int,
        vocab_size: int,
        adapts: bool,
    ) -> None:
        super().__init__(runner, manager, sampler, step_tokens, max_context, adapts)
        assert isinstance(runner.run, HeadForward)
        self.forward, self.head, self.waiting = runner.run, runner.run.head, runner.run.waiting
        self.vocab_size = vocab_size
        self.draft_ids = runner.run.draft_ids
        self._tracks: dict[Request, Track] = {}
        self.tables: PageTables | None = None
        """Of the model, where its steps take drafts from the device before the host has read them."""
        self._numbers: tuple[tuple[int, ...], Tensor] | None = None
        """Of the last step that was launched before its beginning was known, and the same on the device."""
        self._unread: dict[int, Chain] = {}
        """Chains that the host has not read, by their buffer."""

    @property
    def graphs(self) -> DraftGraphs | None:
        """Return the recorded steps, if there are any."""
        return self.forward.graphs

    # What the model computes

    def reusable(self, request: Request) -> int:
        """Return how many tokens of the prefix cache may be used for a request, so that no row is missing."""
        track = self._track(request)
        track.follow()
        if not track.is_lost and track.end <= track.start:
            self.manager.advance(track.twin.lease, track.twin.token_ids, len(track.twin.token_ids))
        return NO_LIMIT if track.is_lost else max(track.start, track.end)

    @torch.inference_mode()
    def observe(self, batch: Batch, states_TX: Tensor) -> None:
        """Take the hidden states [T, X] of a step, in its order, and compute rows of requests that have many."""
        self._forget(item.request for item in batch.scheduled)
        if is_ahead(batch.scheduled):
            self._observe_ahead(batch.scheduled, states_TX)
            return
        tracks = [self._track(item.request) for item in batch.scheduled]
        try:
            long = self._extend_all(tracks, batch.scheduled, states_TX)
        except BaseException:
            # What they say that they have is not there.
            for track in tracks:
                self._lose(track)
            raise
        try:
            self._store(long)
        finally:
            self._wait(tracks, batch.scheduled, states_TX)
        # As many as a recorded step of drafts can have.
        most = self.graphs.longest if self.graphs else KEPT_STATES
        if any(track.num_waiting > most for track in tracks):
            # Others that have many, too, so that all have as many at the same steps.
            self._store([track for track in tracks if track.num_waiting > most // 2])

    def _observe_ahead(self, scheduled: Sequence[ScheduledRequest], states_TX: Tensor) -> None:
        """Let hidden states of a step wait whose beginnings only the device knows."""
        assert self.tables
        rows, places, of_model, counts, first = list[int](), list[int](), list[int](), list[int](), 0
        tracks = list[Track]()
        for item in scheduled:
            track, count = self._tracks.get(item.request), item.num_tokens
            if track and not track.is_lost and track.slot is not None:
                rows += range(first, first + count)
                places += self.waiting.places(track.slot, 0, 1) * count
                of_model += [self.tables.row_of(item.request.lease)] * count
                counts += range(count)
                track.unsettled = item
                tracks.append(track)
            first += count
        if not rows:
            return
        try:
            numbers = *rows, *places, *of_model, *counts
            # Most steps have those of the one before.
            if self._numbers is None or self._numbers[0] != numbers:
                self._numbers = numbers, to_device(numbers, torch.int64, states_TX.device).view(4, -1)
            rows_T, places_T, of_model_T, counts_T = self._numbers[1]
            positions_T = self.tables.stored(of_model_T) + counts_T
            is_part = len(rows) < len(states_TX)
            self.waiting.store(
                places_T + positions_T % WAITING_STATES, states_TX[rows_T] if is_part else states_TX
            )
        except BaseException:
            for track in tracks:
                self._lose(track)
            raise

    def _settle(self, track: Track) -> None:
        """Note what is known by now of a step that was launched before its beginning was known."""
        item, is_drafted = track.unsettled, track.is_drafted
        track.unsettled, track.is_drafted = None, False
        if track.is_lost or item is None:
            return
        # A step that was interrupted is made again, and nobody has settled that one.
        if item.is_unread:
            return
        track.follow()
        if is_drafted:
            self._keep(track, item.start)
        track.end = item.end
        self.manager.take_back(track.twin.lease)
        if track.end - track.start > WAITING_STATES:
            self._lose(track)

    def _extend_all(
        self, tracks: Sequence[Track], scheduled: Sequence[ScheduledRequest], states_TX: Tensor
    ) -> list[Track]:
        """Note what hidden states there are; return the requests that have more than can wait."""
        first, long, combined_TH = 0, list[Track](), None
        for track, item in zip(tracks, scheduled, strict=True):
            track.follow()
            self._extend(track, item)
            if not track.is_lost and track.end - track.start > WAITING_STATES:
                combined_TH = self.head.combine(states_TX) if combined_TH is None else combined_TH
                self._take(track, item.start, combined_TH[first : first + item.num_tokens])
                long.append(track)
            first += item.num_tokens
        return long

    def _extend(self, track: Track, item: ScheduledRequest) -> None:
        """Note that there are hidden states of an item's tokens; they replace those of drafts that did not count."""
        if track.slot is None and not track.is_lost:
            track.slot = self.waiting.open()
        if track.slot is None or item.start > max(track.start, track.end):
            self._lose(track)
        track.end = item.end

    def _take(self, track: Track, start: int, states_TH: Tensor) -> None:
        """Keep hidden states of the rows from `start` on, and those before them that wait, until they are stored."""
        assert track.slot is not None
        track.states = states_TH[max(track.start - start, 0) :]
        if places := self.waiting.places(track.slot, track.start, start):
            track.states = torch.cat([self.waiting.load(places), track.states])

    def _wait(
        self, tracks: Sequence[Track], scheduled: Sequence[ScheduledRequest], states_TX: Tensor
    ) -> None:
        """Let hidden states of a step wait, of rows that are not stored."""
        rows, places, first = list[int](), list[int](), 0
        for track, item in zip(tracks, scheduled, strict=True):
            track.states, begin = None, max(item.start, track.start)
            if track.end - track.start > WAITING_STATES:
                self._lose(track)
            if not track.is_lost and track.slot is not None:
                rows += range(first + begin - item.start, first + item.num_tokens)
                places += self.waiting.places(track.slot, begin, item.end)
            first += item.num_tokens
        if rows:
            is_part = len(rows) < len(states_TX)
            self.waiting.store(
                places, states_TX[to_device(rows, torch.int64, states_TX.device)] if is_part else states_TX
            )

    def _forget(self, running: Iterable[Request]) -> None:
        """Close what is kept of requests that do not run."""
        for request in ended(self._tracks, running):
            self._close(self._tracks.pop(request))

    def _track(self, request: Request) -> Track:
        track = self._tracks.get(request)
        if track is None:
            twin = Request(request.id, request.token_ids[:1])
            twin.token_ids = request.token_ids[1:]
            track = Track(request, twin)
            namespace = f"{request.namespace}/{request.token_ids[0]}"
            twin.lease = self.manager.open(twin.token_ids, namespace, reusable=len(twin.token_ids))
            self._tracks[request] = track
        self._settle(track)
        if not track.is_lost and len(request.token_ids) >= self.max_context:
            self._lose(track)
        return track

    def _lose(self, track: Track) -> None:
        """Draft no more for a request."""
        track.is_lost = True
        self._close(track)

    def _close(self, track: Track) -> None:
        """Give back what a request has that cannot be drafted for."""
        if track.twin.lease in self.manager.leases:
            self.manager.release(track.twin.lease)
        if track.slot is not None:
            self.waiting.close(track.slot)
        track.slot = track.states = None

    def _store(self, tracks: Iterable[Track]) -> None:
        """Compute all known rows but the last of each, and keep them."""
        rest = [track for track in tracks if not track.is_lost]
        while rest:
            room, rows = self.step_tokens, list[HeadRows]()
            for track in rest:
                count = min(track.num_waiting - 1, room)
                if count > 0 and self._has_pages(track, track.start + count):
                    rows.append(HeadRows(track, track.start, count))
                    room -= count
            if not rows:
                return
            self._run_unread(rows)
            for one in rows:
                self._keep(one.track, one.start + one.count)
            rest = [track for track in rest if not track.is_lost and track.num_waiting > 1]

    def _run_unread(self, rows: Sequence[HeadRows]) -> None:
        """Compute rows whose answers nobody reads."""
        graphs, longest = self.graphs, max(one.count for one in rows)
        # Recorded steps read what waits.
        if graphs and longest <= graphs.length(len(rows)) and all(one.states is None for one in rows):
            graphs.replay_first(self.runner.tables, [one.track.new_rows(one.count) for one in rows])
        else:
            # Most of the head is not computed here. The host takes longer, and of few requests as long as a step.
            self._run(rows)

    def _has_pages(self, track: Track, upto: int) -> bool:
        """Reserve pages for rows; a request whose answer has none is lost."""
        if self.reserve(track, upto):
            return True
        if not track.tokens:
            self._lose(track)
        return False

    def _keep(self, track: Track, upto: int) -> None:
        """Note that rows are stored for good."""
        if track.states is not None:
            track.states = track.states[upto - track.start :]
        self.manager.commit(track.twin.lease, track.twin.token_ids, upto)

    def _run(self, rows: Sequence[HeadRows]) -> tuple[list[Track], Tensor]:
        """Compute rows of some requests; return those that are sampled, in the order of the step, and logits [S, V]."""
        by_twin = {one.track.twin: one for one in rows}
        batch = Batch.from_scheduled(chunk(one.track.twin, one.start, one.count, one.samples) for one in rows)
        ordered = [by_twin[item.request] for item in batch.scheduled]
        self.forward.input_states = self._states(ordered)
        logits_SV = self.runner.forward(batch)
        return [one.track for one in ordered if one.samples], logits_SV

    def _states(self, rows: Sequence[HeadRows]) -> Tensor:
        """Return the hidden states of rows [T, H], of each request in turn."""
        if states := [one.states for one in rows if one.states is not None]:
            assert len(states) == len(rows), "those of all wait, or of none"
            return torch.cat(states)
        places = list[int]()
        for one in rows:
            assert one.track.slot is not None
            places += self.waiting.places(one.track.slot, one.start, one.start + one.count)
        return self.waiting.load(places)

    # Drafts

    @torch.inference_mode()
    def prepare(self, tasks: Sequence[DraftTask]) -> None:
        """Compute rows that recorded steps of drafts have no room for, while the step in flight runs.

        Args:
            tasks: that propose() is asked next, once that step is read, which has no drafts.
        """
        if self.graphs:
            tracks = [self._track(task.request) for task in tasks]
            for track in tracks:
                track.follow()
            # With the row that is known then.
            most = self.graphs.length(min(len(tracks), self.graphs.most)) - 1
            self._store([track for track in tracks if track.num_waiting > most])

    @torch.inference_mode()
    def propose(self, tasks: Sequence[DraftTask]) -> list[list[int]]:
        """Return for each task what the head would answer."""
        self._forget(task.request for task in tasks)
        tracks = [self._track(task.request) for task in tasks]
        for track, task in zip(tracks, tasks, strict=True):
            self.begin(track, task)
        ready = [track for track in tracks if self._is_ready(track)]
        try:
            others = self._chain_all(ready, self.graphs) if self.graphs else ready
            # What is left for the first step is no more than KEPT_STATES of each.
            self._store([track for track in others if track.num_waiting > KEPT_STATES])
            step = [
                track
                for track in others
                if not track.is_lost and self._has_pages(track, len(track.twin.token_ids))
            ]
            while step:
                step = [track for group in self.groups(step) for track in self._draft(group)]
            return [track.tokens or list(track.unread) for track in tracks]
        finally:
            for track in ready:
                track.next_states, track.unread = None, ()
                self.take_back(track)

    @torch.inference_mode()
    def propose_ahead(self, tasks: Sequence[DraftTask], batch: Batch) -> list[list[int]] | None:
        """Draft behind the tokens that the step in flight brings, before the host knows them; None: it cannot.

        Args:
            tasks: of requests of that step.
            batch: of which hidden states wait, and nothing else.
        """
        graphs, tables, items = self.graphs, self.tables, {item.request: item for item in unfinished(batch)}
        if not (graphs and tables):
            return None
        # Also those that nothing is drafted for: hidden states of the next step come behind what is settled.
        every = {request: self._track(request) for request in items}
        tracks = [every[task.request] for task in tasks]
        try:
            for track, task in zip(tracks, tasks, strict=True):
                self.begin(track, task)
            ready = [track for track in tracks if track.waits_for(items[track.request])]
            steps = self._steps(ready) if ready else 0
            drafted = [track for track in ready if items[track.request].end + steps < self.max_context]
            others = [track for track in every.values() if not (track.is_lost or track in drafted)]
            if not self._can_draft_ahead(drafted, others, items, graphs):
                return None
            if not all(self.reserve(track, items[track.request].end + steps - 1) for track in drafted):
                return None
            # The drafts of that step may not have been read.
            unread = [item.drafts[0] for item in batch.scheduled if item.drafts and item.drafts[0] < 0]
            chain = Chain(drafted, steps, buffer=int(0 in map(tables.buffer_of, unread)), is_ahead=True)
            most = max(item.num_tokens for item in items.values())
            self._launch_chain(chain, graphs, [track.unknown_rows(tables) for track in drafted], most)
            self._leave_unread(chain)
            for track in drafted:
                track.is_drafted = True
            return [list(track.unread) for track in tracks]
        finally:
            # What is reserved is given back once it is known which rows count.
            for track in tracks:
                track.unread, track.task = (), None

    @staticmethod
    def _can_draft_ahead(
        drafted: Sequence[Track],
        others: Sequence[Track],
        items: Mapping[Request, ScheduledRequest],
        graphs: DraftGraphs,
    ) -> bool:
        """Return whether a recorded step has room for what some requests gain, and other rows may wait on.

        Args:
            drafted: to draft for.
            others: requests of the step that nothing is drafted for.
            items: of the step.
            graphs: the recorded steps.
        """
        if not 0 < len(drafted) <= graphs.most:
            return False
        if max(item.num_tokens for item in items.values()) > graphs.length(len(drafted)):
            return False
        # Those of the next step come behind them; where steps are read, what waits is computed.
        ends = [items[track.request].end + 1 + MAX_DRAFTS - track.start for track in others]
        return max(ends, default=0) <= WAITING_STATES

    def read(self, request: Request, drafts: Sequence[int]) -> list[int]:
        """Return the values of drafts that only the device knew; the step that verified them has ended.

        Args:
            request: that they are of.
            drafts: the ids that stand for them, the first ones of what was proposed.
        """
        return [token for token, _ in self._chain_of(drafts).drafts[request][: len(drafts)]]

    def note_read(self, request: Request, drafts: Sequence[int]) -> float:
        """Learn from drafts that were read; return the seconds that drawing all of the step took."""
        chain = self._chain_of(drafts)
        if not chain.seconds:
            self._note_seconds(chain)
        self.note_verified(self._tracks[request], chain.drafts[request][: len(drafts)])
        return chain.seconds

    def _chain_of(self, drafts: Sequence[int]) -> Chain:
        """Return the chain of ids that stand for drafts, which the host has read."""
        assert self.tables and self.graphs
        chain = self._unread[self.tables.buffer_of(drafts[0])]
        if not chain.drafts:
            requests = (track.request for track in chain.tracks)
            chain.drafts = dict(zip(requests, self._drawn(chain, self.graphs), strict=True))
        return chain

    def _is_ready(self, track: Track) -> bool:
        """Return whether a request has a new row, its last one, and there is room for its drafts."""
        assert track.task is not None
        if track.is_lost or len(track.request.token_ids) + track.task.limit > self.max_context:
            return False
        track.follow()
        return track.start < track.num_known == len(track.twin.token_ids)

    def _chain_all(self, tracks: Sequence[Track], graphs: DraftGraphs) -> list[Track]:
        """Draft by recorded steps; return the requests that have to go step by step."""
        others = [track for track in tracks if needs_output_tokens(track.request.params)]
        chained = [track for track in tracks if not needs_output_tokens(track.request.params)]
        # The next chain is drawn into the same memory.
        is_unread = self.tables is not None and len(chained) <= graphs.most
        for first in range(0, len(chained), graphs.most):
            others += self._chain(chained[first : first + graphs.most], graphs, is_unread=is_unread)
        return others

    def _chain(self, tracks: Sequence[Track], graphs: DraftGraphs, *, is_unread: bool) -> list[Track]:
        """Draft for some requests; return those that there is no room for.

        Args:
            tracks: of the requests.
            graphs: the recorded steps.
            is_unread: the step that verifies them reads the drafts before the host does.
        """
        most, steps = graphs.length(len(tracks)), self._steps(tracks)
        self._store([track for track in tracks if track.num_waiting > most])
        chained = [track for track in tracks if self._has_room(track, steps)]
        if chained:
            chain = Chain(chained, steps)
            self._launch_chain(chain, graphs, [track.new_rows(track.num_waiting) for track in chained])
            for track in chained:
                self._keep(track, len(track.twin.token_ids))
            if is_unread:
                self._leave_unread(chain)
            else:
                self._read(chain, graphs)
        return [track for track in tracks if track not in chained and not track.is_lost]

    def _steps(self, tracks: Sequence[Track]) -> int:
        """Return the steps of a chain: what one more token brings is the same for all."""
        # So the number follows from the most that any may have.
        longest = max(tracks, key=lambda track: track.task.limit if track.task else 0)
        return self.planned(longest, len(tracks))

    def _launch_chain(
        self, chain: Chain, graphs: DraftGraphs, new: Sequence[NewRows], most: int | None = None
    ) -> None:
        """Launch all steps of a chain.

        Args:
            chain: which one.
            graphs: the recorded steps.
            new: rows of its first step.
            most: the most that a request may have of these, where the host does not know them.
        """
        drafts_KR, first = self.tables.drafts_KR if self.tables else None, chain.buffer * MAX_DRAFTS
        graphs.stopwatches[chain.buffer].start()
        for step in range(chain.steps):
            if step:
                graphs.replay_next(len(chain.tracks))
            else:
                graphs.replay_first(self.runner.tables, new, most)
            self._redraw(chain, step, graphs)
            graphs.keep(chain.buffer, step, None if drafts_KR is None else drafts_KR[first + step])
        graphs.stopwatches[chain.buffer].stop()

    def _has_room(self, track: Track, steps: int) -> bool:
        """Reserve pages for a chain of so many steps, of which all requests have as many."""
        if track.is_lost or len(track.request.token_ids) + steps > self.max_context:
            return False
        return self.reserve(track, len(track.twin.token_ids) + steps - 1)

    def _redraw(self, chain: Chain, step: int, graphs: DraftGraphs) -> None:
        """Draw the tokens of a recorded step anew where any request's are not the likeliest ones."""
        requests = [track.request for track in chain.tracks]
        if any(one.params.temperature or one.params.logit_bias or one.params.min_tokens for one in requests):
            counts, counts_S = [request.num_output_tokens + step for request in requests], None
            if chain.is_ahead and self.tables:
                leases = [request.lease for request in requests]
                behind = [1 + step - len(request.prompt_token_ids) for request in requests]
                counts_S = self.tables.counts_behind(leases, behind)
            logits_SV = self._of_model(graphs.logits[: len(requests)])
            graphs.store_drawn(*self.launch(requests, counts, logits_SV, {}, counts_S))

    def _read(self, chain: Chain, graphs: DraftGraphs) -> None:
        """Wait for the drafts of a chain, and note them."""
        graphs.wait()
        self._note_seconds(chain)
        for track, drafts in zip(chain.tracks, self._drawn(chain, graphs), strict=True):
            for token, chance in drafts:
                if not self.add(track, token, chance):
                    break

    def _drawn(self, chain: Chain, graphs: DraftGraphs) -> list[list[tuple[int, float]]]:
        """Return the tokens and chances of each request, which have come."""
        count = len(chain.tracks)
        steps = graphs.read(chain.buffer, chain.steps, count)
        return [[(tokens[row], chances[row]) for tokens, chances in steps] for row in range(count)]

    def _note_seconds(self, chain: Chain) -> None:
        """Note what a step of a chain took."""
        assert self.graphs
        chain.seconds = self.graphs.stopwatches[chain.buffer].seconds
        self.step_seconds.note(len(chain.tracks).bit_length(), chain.seconds / chain.steps)

    def _leave_unread(self, chain: Chain) -> None:
        """Name the drafts of a chain by ids that stand for them."""
        assert self.tables
        self._unread[chain.buffer] = chain
        for column, track in enumerate(chain.tracks):
            assert track.task
            first, count = chain.buffer * MAX_DRAFTS, min(chain.steps, track.task.limit)
            track.unread = [self.tables.unread(first + place, column) for place in range(count)]

    def _draft(self, tracks: Sequence[Track]) -> list[Track]:
        """Compute rows, draw a draft of each request, and return those that another one may follow."""
        start_time = perf_counter()
        rows = [HeadRows(one, one.place, len(one.twin.token_ids) - one.place, samples=True) for one in tracks]
        ordered, logits_SV = self._run(rows)
        states_SH = self.runner.hidden_states
        assert states_SH is not None
        tokens, chances = self._draw(ordered, logits_SV)
        self.note_seconds(start_time, ordered)
        going = []
        for row, (track, token, chance) in enumerate(zip(ordered, tokens, chances, strict=True)):
            if not track.tokens:
                self._keep(track, len(track.twin.token_ids))
            is_going = self.add(track, token, chance) and self.goes_on(track, len(ordered))
            if is_going and self.reserve(track, len(track.twin.token_ids)):
                track.next_states = states_SH[row : row + 1]
                going.append(track)
        return going

    def _draw(self, tracks: Sequence[Track], logits_SV: Tensor) -> tuple[list[int], list[float]]:
        """Return a token for each row and its chance, of all of the model's tokens."""
        return self.draw(tracks, self._of_model(logits_SV))

    def _of_model(self, logits_SV: Tensor) -> Tensor:
        """Return logits of all of the model's tokens, -inf of those that the head does not draft."""
        if self.draft_ids is None:
            return logits_SV
        full_SV = torch.full(
            (len(logits_SV), self.vocab_size), float("-inf"), dtype=torch.float32, device=logits_SV.device
        )
        full_SV[:, self.draft_ids] = logits_SV.float()
        return full_SV

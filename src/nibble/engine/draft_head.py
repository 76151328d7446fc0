"""A head drafts: one decoder layer over the hidden states that the model leaves, with a cache of its own.

Row i of a head's cache comes from hidden state i and token i + 1, and predicts token i + 2 (models/head_model.py). To
the head a request is the sequence of its tokens 1, 2, ..., its twin, whose pages depend on these and on token 0: they
are shared by prefix in the manager of the head's own pool.

Hidden states are there only for tokens that the model computes. Each step leaves them here (`observe`); rows are
computed as soon as there are enough of them, so that a prompt's hidden states are never kept. The last row is kept, and
computed again with what is new when drafts are asked for: the next drafts follow from it. Drafts are computed behind
it, one by one, each with the hidden state that the head left for the one before. They are taken back in any case:
tokens that count come again with hidden states of the model, and their slots are written again.

A prefix that the model's cache has, and the head's not, would leave a hole. So the scheduler asks how far the head has
followed a prefix (`reusable`), and the model computes what is beyond again. Mostly both have the same: pools hold the
same number of tokens.

Shape suffixes: T tokens of a step, S rows that are sampled, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from nibble.attention.layer import StepContext
from nibble.cache.manager import CacheManager
from nibble.drafts import KEPT_STATES
from nibble.engine.draft_books import Draft, DraftBooks, chunk, ended
from nibble.engine.drafters.base import DraftTask
from nibble.engine.model_runner import ModelRunner
from nibble.engine.request import Batch, Request
from nibble.engine.sampler import Sampler
from nibble.models.head_model import draft_ids
from nibble.models.hook import CONTEXT, attention_mask_for

NO_LIMIT = 1 << 62


class HeadForward:
    """Runs a head for one step: the hidden states of its rows come and go beside the step's numbers."""

    def __init__(self, head: Any) -> None:
        self.head = head
        self.input_states: Tensor | None = None
        """[T, H], of the next step; None: a test, which has none."""
        self.output_states = torch.empty(0)
        """[S, H], of the last step's rows that were sampled."""

    def __call__(self, ids: Tensor, positions: Tensor, rows_S: Tensor, ctx: StepContext) -> Tensor:
        """Return logits [S, V of drafts]."""
        states_TH, self.input_states = self.input_states, None
        if states_TH is not None and (missing := ids.shape[1] - len(states_TH)):
            # A row that is alone comes twice, and a step of decodes alone is padded to the next size (ModelRunner).
            states_TH = torch.cat([states_TH, states_TH[-1:].expand(missing, -1)])
        out = self.head(
            input_ids=ids,
            position_ids=positions,
            attention_mask=attention_mask_for(self.head, ids, ctx),
            hidden_states=None if states_TH is None else states_TH[None],
            logits_to_keep=rows_S,
            **{CONTEXT: ctx},
        )
        self.output_states = out.hidden_states[0][0]
        logits: Tensor = out.logits[0]
        return logits


@dataclass(eq=False)
class Track(Draft):
    """What the head knows of a request: its twin's pages, and the hidden states of rows that are not computed yet."""

    states: Tensor = field(default_factory=lambda: torch.empty(0))
    """[n, H], of the rows from `start` on."""
    next_states: Tensor | None = None
    """[1, H], that the newest draft's row is computed from."""
    is_lost: bool = False
    """Whether nothing can be drafted: rows are missing, or pages."""

    @property
    def num_known(self) -> int:
        """Return the number of rows, from the first on, that are stored or could be computed now."""
        return min(self.start + len(self.states), len(self.twin.token_ids))

    def add(self, start: int, states_TH: Tensor) -> None:
        """Add hidden states of the rows from `start` on; they replace those of drafts that did not count."""
        if self.is_lost or start > self.start + len(self.states):
            self.is_lost = True
            return
        before = self.states[: max(start - self.start, 0)]
        self.states = torch.cat([before, states_TH[max(self.start - start, 0) :]])

    def follow(self) -> None:
        """Add what is new of the request to the twin: its tokens only grow."""
        self.twin.token_ids += self.request.token_ids[1 + len(self.twin.token_ids) :]


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
        self.forward, self.head = runner.run, runner.run.head
        self.vocab_size = vocab_size
        self.draft_ids = draft_ids(self.head, vocab_size)
        self._tracks: dict[Request, Track] = {}

    # What the model computes

    def reusable(self, request: Request) -> int:
        """Return how many tokens of the prefix cache may be used for a request, so that no row is missing."""
        track = self._track(request)
        track.follow()
        if not track.is_lost and not len(track.states):
            self.manager.advance(track.twin.lease, track.twin.token_ids, len(track.twin.token_ids))
        return NO_LIMIT if track.is_lost else track.start + len(track.states)

    @torch.inference_mode()
    def observe(self, batch: Batch, states_TX: Tensor) -> None:
        """Take the hidden states [T, X] of a step, in its order, and compute rows of requests that have many."""
        self._forget(item.request for item in batch.scheduled)
        states_TH, first = self.head.combine(states_TX), 0
        for item in batch.scheduled:
            self._track(item.request).add(item.start, states_TH[first : first + item.num_tokens])
            first += item.num_tokens
        tracks = [self._track(item.request) for item in batch.scheduled]
        for track in tracks:
            track.follow()
        self._store([track for track in tracks if track.num_known - track.start > KEPT_STATES])

    def _forget(self, running: Iterable[Request]) -> None:
        """Close what is kept of requests that do not run."""
        for request in ended(self._tracks, running):
            self._closed(self._tracks.pop(request))

    def _track(self, request: Request) -> Track:
        track = self._tracks.get(request)
        if track is None:
            twin = Request(request.id, request.token_ids[:1])
            twin.token_ids = request.token_ids[1:]
            size = self.head.config.hidden_size
            none = torch.empty(0, size, dtype=self.head.dtype, device=self.runner.device)
            track = Track(request, twin, states=none)
            namespace = f"{request.namespace}/{request.token_ids[0]}"
            twin.lease = self.manager.open(twin.token_ids, namespace, reusable=len(twin.token_ids))
            self._tracks[request] = track
        if not track.is_lost and len(request.token_ids) >= self.max_context:
            track.is_lost = True
        return self._closed(track) if track.is_lost else track

    def _closed(self, track: Track) -> Track:
        """Give back what a request has that cannot be drafted for."""
        if track.twin.lease in self.manager.leases:
            self.manager.release(track.twin.lease)
            # And no view of them, which would keep those of a whole chunk.
            track.states = track.states.new_empty(0, track.states.shape[1])
        return track

    def _store(self, tracks: Iterable[Track]) -> None:
        """Compute all known rows but the last of each, and keep them."""
        rest = [track for track in tracks if not track.is_lost]
        while rest:
            room, batch = self.step_tokens, list[tuple[Track, int]]()
            for track in rest:
                count = min(track.num_known - 1 - track.start, room)
                if count > 0 and self._has_pages(track, track.start + count):
                    batch.append((track, count))
                    room -= count
            if not batch:
                return
            self._run([(track, track.start, count, track.states[:count], False) for track, count in batch])
            for track, count in batch:
                self._keep(track, track.start + count)
            rest = [track for track in rest if not track.is_lost and track.num_known - 1 > track.start]

    def _has_pages(self, track: Track, upto: int) -> bool:
        """Reserve pages for rows; a request whose answer has none is lost."""
        if not self.reserve(track, upto):
            track.is_lost = not track.tokens
            return False
        return True

    def _keep(self, track: Track, upto: int) -> None:
        """Note that rows are stored for good."""
        track.states = track.states[upto - track.start :].clone()
        self.manager.commit(track.twin.lease, track.twin.token_ids, upto)

    def _run(self, rows: Sequence[tuple[Track, int, int, Tensor, bool]]) -> tuple[list[Track], Tensor]:
        """Compute rows of some requests: start, number and hidden states of each, and whether its last is sampled.

        Return the requests in the order of the step, and the logits [S, V].
        """
        by_twin = {row[0].twin: row for row in rows}
        items = (chunk(track.twin, start, count, samples) for track, start, count, _, samples in rows)
        batch = Batch.from_scheduled(items)
        ordered = [by_twin[item.request] for item in batch.scheduled]
        self.forward.input_states = torch.cat([row[3] for row in ordered])
        logits_SV = self.runner.forward(batch)
        return [row[0] for row in ordered if row[4]], logits_SV

    # Drafts

    @torch.inference_mode()
    def propose(self, tasks: Sequence[DraftTask]) -> list[list[int]]:
        """Return for each task what the head would answer."""
        self._forget(task.request for task in tasks)
        tracks = [self._track(task.request) for task in tasks]
        for track, task in zip(tracks, tasks, strict=True):
            self.begin(track, task)
        ready = [track for track in tracks if self._is_ready(track)]
        try:
            # What is left for the first step is no more than KEPT_STATES of each.
            self._store([track for track in ready if track.num_known - track.start > KEPT_STATES])
            step = [track for track in ready if self._has_pages(track, len(track.twin.token_ids))]
            while step:
                step = [track for group in self.groups(step) for track in self._draft(group)]
            return [track.tokens for track in tracks]
        finally:
            for track in ready:
                track.next_states = None
                self.take_back(track)

    def _is_ready(self, track: Track) -> bool:
        """Return whether a request's last row can be computed, and there is room for its drafts."""
        assert track.task is not None
        if track.is_lost or len(track.request.token_ids) + track.task.limit > self.max_context:
            return False
        track.follow()
        return 0 < track.num_known == len(track.twin.token_ids)

    def _draft(self, tracks: Sequence[Track]) -> list[Track]:
        """Compute rows, draw a draft of each request, and return those that another one may follow."""
        start_time, rows = perf_counter(), []
        for track in tracks:
            count = len(track.twin.token_ids) - track.place
            states_NH = track.states[:count] if track.next_states is None else track.next_states
            rows.append((track, track.place, count, states_NH, True))
        ordered, logits_SV = self._run(rows)
        states_SH = self.forward.output_states
        tokens, chances = self._draw(ordered, logits_SV)
        self.note_seconds(start_time, ordered)
        going = []
        for row, (track, token, chance) in enumerate(zip(ordered, tokens, chances, strict=True)):
            if not track.tokens:
                self._keep(track, len(track.twin.token_ids) - 1)
            if self.add(track, token, chance, len(ordered)) and self.reserve(
                track, len(track.twin.token_ids)
            ):
                track.next_states = states_SH[row : row + 1]
                going.append(track)
        return going

    def _draw(self, tracks: Sequence[Track], logits_SV: Tensor) -> tuple[list[int], list[float]]:
        """Return a token for each row and its chance, of all of the model's tokens."""
        if self.draft_ids is not None:
            of_drafts, logits_SV = (
                logits_SV.float(),
                logits_SV.new_full((len(logits_SV), self.vocab_size), float("-inf")).float(),
            )
            logits_SV[:, self.draft_ids] = of_drafts
        return self.draw(tracks, logits_SV)

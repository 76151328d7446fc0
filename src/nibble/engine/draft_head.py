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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nibble.attention.layer import StepContext
from nibble.cache.manager import CacheManager
from nibble.engine.drafters.base import DraftTask, can_follow
from nibble.engine.model_runner import ModelRunner
from nibble.engine.request import Batch, Request, ScheduledRequest, State
from nibble.engine.sampler import Sampler
from nibble.errors import OutOfPages
from nibble.model_spec import Phase
from nibble.models.head_model import draft_ids
from nibble.models.hook import CONTEXT, attention_mask_for

MIN_ROWS = 16
"""Rows that are computed at a time where no drafts are asked for."""
LEAST_CHANCE = 0.2
"""A draft ends where the chance that all of it is right has fallen below this, as far as the head knows: to verify one
more token costs more than it brings."""
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
class Track:
    """What the head knows of a request: its twin's pages, and the hidden states of rows that are not computed yet."""

    request: Request
    twin: Request
    states: Tensor
    """[n, H], of the rows from `start` on."""
    is_lost: bool = False
    """Whether nothing can be drafted: rows are missing, or pages."""
    drafts: list[int] = field(default_factory=list)
    chance: float = 1.0
    """That all drafts so far are right, as far as the head knows."""

    @property
    def start(self) -> int:
        """Return the first row that is not stored for good."""
        return self.twin.lease.num_stored_tokens

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


class DraftHead:
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
        self.runner, self.manager, self.sampler = runner, manager, sampler
        self.step_tokens, self.max_context = step_tokens, max_context
        assert isinstance(runner.run, HeadForward)
        self.forward, self.head = runner.run, runner.run.head
        self.vocab_size, self.least_chance = vocab_size, LEAST_CHANCE if adapts else 0.0
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
        self._store([track for track in tracks if track.num_known - track.start > MIN_ROWS])

    def _forget(self, running: Iterable[Request]) -> None:
        """Close what is kept of requests that do not run: they have ended, or wait for room."""
        live = set(running)
        for request in [one for one in self._tracks if one.state is not State.RUNNING and one not in live]:
            self._closed(self._tracks.pop(request))

    def _track(self, request: Request) -> Track:
        track = self._tracks.get(request)
        if track is None:
            twin = Request(request.id, request.token_ids[:1])
            twin.token_ids = request.token_ids[1:]
            size = self.head.config.hidden_size
            track = Track(
                request, twin, torch.empty(0, size, dtype=self.head.dtype, device=self.runner.device)
            )
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
                if count > 0 and self._reserve(track, track.start + count):
                    batch.append((track, count))
                    room -= count
            if not batch:
                return
            self._run([(track, track.start, count, track.states[:count], False) for track, count in batch])
            for track, count in batch:
                self._keep(track, track.start + count)
            rest = [track for track in rest if not track.is_lost and track.num_known - 1 > track.start]

    def _reserve(self, track: Track, upto: int) -> bool:
        try:
            self.manager.reserve(track.twin.lease, upto)
        except OutOfPages:
            track.is_lost = not track.drafts
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
        items = (_chunk(track.twin, start, count, samples) for track, start, count, _, samples in rows)
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
        limits = {track: task.limit for track, task in zip(tracks, tasks, strict=True)}
        ready = [track for track in tracks if self._is_ready(track, limits[track])]
        try:
            # What is left for the first step is less than MIN_ROWS of each.
            self._store([track for track in ready if track.num_known - track.start > MIN_ROWS])
            live = [track for track in ready if self._reserve(track, len(track.twin.token_ids))]
            counts = {track: len(track.twin.token_ids) - track.start for track in live}
            step = [(one, one.start, count, one.states[:count], True) for one, count in counts.items()]
            while step:
                step = [row for group in self._groups(step) for row in self._draft(group, limits)]
            return [track.drafts for track in tracks]
        finally:
            for track in ready:
                self._take_back(track)

    def _is_ready(self, track: Track, limit: int) -> bool:
        """Return whether a request's last row can be computed, and there is room for its drafts."""
        if track.is_lost or len(track.request.token_ids) + limit > self.max_context:
            return False
        track.follow()
        return 0 < track.num_known == len(track.twin.token_ids)

    def _groups(self, rows: Sequence[Any]) -> list[list[Any]]:
        """Cut a step so that none has more than step_tokens tokens."""
        groups, room = list[list[Any]](), 0
        for row in rows:
            if row[2] > room:
                groups.append([])
                room = self.step_tokens
            groups[-1].append(row)
            room -= row[2]
        return groups

    def _draft(self, rows: Sequence[Any], limits: Mapping[Track, int]) -> list[Any]:
        """Compute rows, draw a draft of each request, and return the next step's rows."""
        ordered, logits_SV = self._run(rows)
        states_SH = self.forward.output_states
        for track in ordered:
            if not track.drafts:
                self._keep(track, len(track.twin.token_ids) - 1)
        tokens, chances = self._draw(ordered, logits_SV)
        step = []
        for number, (track, token, chance) in enumerate(zip(ordered, tokens, chances, strict=True)):
            track.chance *= chance
            if token in track.request.stop_ids or track.chance < self.least_chance:
                continue
            if not can_follow(track.request, [*track.drafts, token]):
                continue
            track.drafts.append(token)
            track.twin.token_ids.append(token)
            place = len(track.twin.token_ids) - 1
            if len(track.drafts) < limits[track] and self._reserve(track, place + 1):
                step.append((track, place, 1, states_SH[number : number + 1], True))
        return step

    def _draw(self, tracks: Sequence[Track], logits_SV: Tensor) -> tuple[list[int], list[float]]:
        """Return a token for each row, drawn as the model will, and how likely the head takes it for."""
        logits_SV = logits_SV.float()
        full_SV = logits_SV
        if self.draft_ids is not None:
            full_SV = logits_SV.new_full((len(logits_SV), self.vocab_size), float("-inf"))
            full_SV[:, self.draft_ids] = logits_SV
        requests = [track.request for track in tracks]
        counts = [track.request.num_output_tokens + len(track.drafts) for track in tracks]
        before = {row: tuple(track.drafts) for row, track in enumerate(tracks) if track.drafts}
        tokens_S = self.sampler.launch(full_SV, requests, counts, before).tokens_S
        chances_S = (full_SV.gather(1, tokens_S[:, None])[:, 0] - logits_SV.logsumexp(-1)).exp()
        return tokens_S.tolist(), chances_S.tolist()

    def _take_back(self, track: Track) -> None:
        """Forget the drafts: the next steps say which of them count."""
        if track.drafts:
            del track.twin.token_ids[len(track.twin.token_ids) - len(track.drafts) :]
        track.drafts, track.chance = [], 1.0
        self.manager.take_back(track.twin.lease)


def _chunk(twin: Request, start: int, count: int, samples: bool) -> ScheduledRequest:
    phase = Phase.PREFILL if start == 0 else Phase.DECODE if samples and count == 1 else Phase.EXTEND
    return ScheduledRequest(twin, start, count, phase, samples, write_from=start)

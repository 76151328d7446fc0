"""A smaller model with the same tokenizer drafts, over pages of its own (Leviathan et al. 2023; Chen et al. 2023).

It draws its tokens as the large model will, with the parameters of the request and by the same random numbers, so that
drafts agree the more often, the closer the two distributions are. What it stores of tokens that the answer has stays,
and is shared by prefix; drafts are computed behind it, and their pages given back. When some of them were accepted,
those are computed once more, in the one step that comes before the next drafts anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

from nibble.cache.manager import CacheManager
from nibble.engine.drafters.base import DraftTask, can_follow
from nibble.engine.model_runner import ModelRunner
from nibble.engine.request import Batch, Request, ScheduledRequest, State
from nibble.engine.sampler import Sampler
from nibble.errors import OutOfPages
from nibble.model_spec import Phase


class Draft:
    """One request that is drafted for: its twin in the small model's pages, and the drafts so far."""

    def __init__(self, task: DraftTask, twin: Request) -> None:
        self.task, self.twin = task, twin
        self.tokens: list[int] = []

    @property
    def is_complete(self) -> bool:
        """Return whether there are as many drafts as there may be."""
        return len(self.tokens) >= self.task.limit


class DraftModel:
    """The drafter.

    Args:
        runner: of the small model.
        manager: the books of its pool, of its own.
        sampler: with the seed of the large model's.
        step_tokens: most tokens of a step.
        max_context: most tokens of a request that the small model can have.
    """

    def __init__(
        self,
        runner: ModelRunner,
        manager: CacheManager,
        sampler: Sampler,
        step_tokens: int,
        max_context: int,
    ) -> None:
        self.runner, self.manager, self.sampler = runner, manager, sampler
        self.step_tokens, self.max_context = step_tokens, max_context
        self._twins: dict[Request, Request] = {}

    def propose(self, tasks: Sequence[DraftTask]) -> list[list[int]]:
        """Return for each task what the small model would answer."""
        self._forget()
        drafts = [self._open(task) for task in tasks]
        try:
            live = [draft for draft in drafts if draft and self._catch_up(draft)]
            while live := [draft for draft in live if not draft.is_complete and self._reserve(draft)]:
                self._step(live)
        finally:
            for draft in drafts:
                if draft:
                    self._take_back(draft)
        return [draft.tokens if draft else [] for draft in drafts]

    def _forget(self) -> None:
        """Close what is kept of requests that do not run: they have ended, or wait for room."""
        for request in [one for one in self._twins if one.state is not State.RUNNING]:
            self.manager.release(self._twins.pop(request).lease)

    def _open(self, task: DraftTask) -> Draft | None:
        """Return the draft of a task, None where the small model has no room for it."""
        request = task.request
        if len(request.token_ids) + task.limit > self.max_context:
            return None
        twin = self._twins.get(request)
        if twin is None:
            twin = Request(request.id, request.token_ids)
            twin.lease = self.manager.open(twin.token_ids, request.namespace)
            self._twins[request] = twin
        # Only what is new: a request's tokens only grow.
        twin.token_ids += request.token_ids[len(twin.token_ids) :]
        return Draft(task, twin)

    def _catch_up(self, draft: Draft) -> bool:
        """Compute all tokens of a long answer or prompt but those of the last chunk; return False without pages."""
        lease = draft.twin.lease
        while len(draft.twin.token_ids) - lease.num_stored_tokens > self.step_tokens:
            upto = lease.num_stored_tokens + self.step_tokens
            try:
                self.manager.reserve(lease, upto)
            except OutOfPages:
                return False
            self.runner.forward(Batch((_chunk(draft.twin, lease.num_stored_tokens, upto, False),)))
            self.manager.commit(lease, draft.twin.token_ids, upto)
        return True

    def _reserve(self, draft: Draft) -> bool:
        try:
            self.manager.reserve(draft.twin.lease, len(draft.twin.token_ids))
        except OutOfPages:
            return False
        return True

    def _step(self, drafts: Sequence[Draft]) -> None:
        """Draw one more token for each of these, the first time after what is new of the answer."""
        for group in self._groups(drafts):
            chunks = {
                draft.twin: _chunk(draft.twin, self._start(draft), len(draft.twin.token_ids), True)
                for draft in group
            }
            batch = Batch.from_scheduled(chunks.values())
            by_twin = {draft.twin: draft for draft in group}
            ordered = [by_twin[item.request] for item in batch.scheduled]
            logits = self.runner.forward(batch)
            requests = [draft.task.request for draft in ordered]
            counts = [one.task.request.num_output_tokens + len(one.tokens) for one in ordered]
            before = {row: tuple(draft.tokens) for row, draft in enumerate(ordered) if draft.tokens}
            sampled = self.sampler.launch(logits, requests, counts, before).read()
            for draft, token in zip(ordered, sampled, strict=True):
                if not draft.tokens:
                    # The answer's own tokens stay, but the last: the next drafts begin with its logits.
                    tokens = draft.twin.token_ids
                    self.manager.commit(draft.twin.lease, tokens, len(tokens) - 1)
                self._add(draft, None if token is None else token.token)

    def _add(self, draft: Draft, token: int | None) -> None:
        """Note a token; one that ends the answer, or that its grammar does not allow, or none, ends the draft."""
        request = draft.task.request
        if token is None or token in request.stop_ids or not can_follow(request, [*draft.tokens, token]):
            draft.task = DraftTask(request, 0)
            return
        draft.tokens.append(token)
        draft.twin.token_ids.append(token)

    def _start(self, draft: Draft) -> int:
        lease = draft.twin.lease
        return len(draft.twin.token_ids) - 1 if draft.tokens else lease.num_stored_tokens

    def _groups(self, drafts: Sequence[Draft]) -> list[list[Draft]]:
        """Cut a step so that none has more than step_tokens tokens."""
        groups, room = list[list[Draft]](), 0
        for draft in drafts:
            count = len(draft.twin.token_ids) - self._start(draft)
            if count > room:
                groups.append([])
                room = self.step_tokens
            groups[-1].append(draft)
            room -= count
        return groups

    def _take_back(self, draft: Draft) -> None:
        """Forget the drafts: the next task says which of them count."""
        twin = draft.twin
        if draft.tokens:
            del twin.token_ids[len(twin.token_ids) - len(draft.tokens) :]
        self.manager.take_back(twin.lease)


def _chunk(twin: Request, start: int, stop: int, samples: bool) -> ScheduledRequest:
    phase = Phase.PREFILL if start == 0 else Phase.DECODE if stop - start == 1 else Phase.EXTEND
    return ScheduledRequest(twin, start, stop - start, phase, samples, write_from=start)

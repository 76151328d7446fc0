"""A smaller model with the same tokenizer drafts, over pages of its own (Leviathan et al. 2023; Chen et al. 2023).

It draws its tokens as the large model will, with the parameters of the request and by the same random numbers, so that
drafts agree the more often, the closer the two distributions are. What it stores of tokens that the answer has stays,
and is shared by prefix; drafts are computed behind it, and their pages given back. When some of them were accepted,
those are computed once more, in the one step that comes before the next drafts anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from nibble.cache.manager import CacheManager
from nibble.engine.draft_books import Draft, DraftBooks, chunk, ended
from nibble.engine.drafters.base import DraftTask
from nibble.engine.model_runner import ModelRunner
from nibble.engine.request import Batch, Request
from nibble.engine.sampler import Sampler


class DraftModel(DraftBooks):
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
        super().__init__(runner, manager, sampler, step_tokens, max_context)
        self._drafts: dict[Request, Draft] = {}

    def propose(self, tasks: Sequence[DraftTask]) -> list[list[int]]:
        """Return for each task what the small model would answer."""
        for request in ended(self._drafts):
            self.manager.release(self._drafts.pop(request).twin.lease)
        drafts = [self._open(task) for task in tasks]
        live = [draft for draft in drafts if draft]
        try:
            step = [one for one in live if self._catch_up(one) and self.reserve(one, len(one.twin.token_ids))]
            while step:
                step = [draft for group in self.groups(step) for draft in self._step(group)]
            return [draft.tokens if draft else [] for draft in drafts]
        finally:
            for draft in live:
                self.take_back(draft)

    def _open(self, task: DraftTask) -> Draft | None:
        """Return the draft of a task, None where the small model has no room for it."""
        request = task.request
        if len(request.token_ids) + task.limit > self.max_context:
            return None
        draft = self._drafts.get(request)
        if draft is None:
            twin = Request(request.id, request.token_ids)
            twin.lease = self.manager.open(twin.token_ids, request.namespace)
            draft = self._drafts[request] = Draft(request, twin)
        self.begin(draft, task)
        # Only what is new: a request's tokens only grow.
        draft.twin.token_ids += request.token_ids[len(draft.twin.token_ids) :]
        return draft

    def _catch_up(self, draft: Draft) -> bool:
        """Compute all tokens of a long answer or prompt but those of the last chunk; return False without pages."""
        while len(draft.twin.token_ids) - draft.start > self.step_tokens:
            upto = draft.start + self.step_tokens
            if not self.reserve(draft, upto):
                return False
            self.runner.forward(Batch((chunk(draft.twin, draft.start, self.step_tokens, False),)))
            self.manager.commit(draft.twin.lease, draft.twin.token_ids, upto)
        return True

    def _step(self, drafts: Sequence[Draft]) -> list[Draft]:
        """Draw one more token for each of these, the first time after what is new of the answer.

        Return those that another one may follow.
        """
        start_time, by_twin = perf_counter(), {draft.twin: draft for draft in drafts}
        batch = Batch.from_scheduled(
            chunk(draft.twin, draft.place, len(draft.twin.token_ids) - draft.place, True) for draft in drafts
        )
        ordered = [by_twin[item.request] for item in batch.scheduled]
        tokens, chances = self.draw(ordered, self.runner.forward(batch))
        self.note_seconds(start_time, ordered)
        going = []
        for draft, token, chance in zip(ordered, tokens, chances, strict=True):
            if not draft.tokens:
                # The answer's own tokens stay, but the last: the next drafts begin with its logits.
                own = draft.twin.token_ids
                self.manager.commit(draft.twin.lease, own, len(own) - 1)
            is_going = self.add(draft, token, chance) and self.goes_on(draft, len(ordered))
            if is_going and self.reserve(draft, len(draft.twin.token_ids)):
                going.append(draft)
        return going

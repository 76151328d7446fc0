"""Books of a model or head that drafts: its requests' twins, its steps, and where a draft had better end.

To a model that drafts, a request is a twin: the tokens that it reads, over pages of its own. What it stores of tokens
that count stays, and is shared by prefix; drafts are computed behind it, one by one, and taken back in any case: the
next step says which of them count.

A head's draft ends where one more step would take longer than the token is worth that it may bring: by the seconds that
a step was measured to take, and by the chance that all drafts so far are right, as the head sees it, corrected by what
was accepted before. That of a model which draws nearly as the large one does would be too low by far: by the same
random numbers both draw the same unlikely tokens.

Shape suffixes: S rows that are sampled, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TypeVar

from torch import Tensor

from nibble.cache.manager import CacheManager
from nibble.engine.draft_policy import Medians
from nibble.engine.drafters.base import DraftTask, can_follow
from nibble.engine.model_runner import ModelRunner
from nibble.engine.request import Request, ScheduledRequest, State
from nibble.engine.sampler import Sampler
from nibble.errors import OutOfPages
from nibble.model_spec import Phase

LEAST_CHANCE = 0.2
"""A draft ends where the chance that all of it is right has fallen below this, until times are known."""
TRUST_MEMORY, LEAST_TRUST, MOST_TRUST = 0.98, 0.25, 1.5
"""How much of what was learnt of a drafter's chances counts after one more draft, and the least and most trust."""
FIRST_EXPECTED = 4.0
"""Tokens that a drafter's chances are taken to have been right about, to begin with."""
FIRST_SHARE, SHARE_WEIGHT = 0.7, 0.02
"""How likely a draft after right ones is right, to begin with, and what the newest says about those to come."""


@dataclass(eq=False)
class Draft:
    """One request that is drafted for."""

    request: Request
    twin: Request
    task: DraftTask | None = None
    """What is asked for now."""
    tokens: list[int] = field(default_factory=list)
    """The drafts so far, which are the last ones of the twin."""
    chance: float = 1.0
    """That all of them are right, as far as the drafter knows."""
    expected: float = 0.0
    """Tokens of the draft that are likely to count, by these chances."""
    before: tuple[int, list[int], float] | None = None
    """Of the last draft: the request's tokens then, the drafts, and what was expected."""

    @property
    def start(self) -> int:
        """Return the first token of the twin that is not stored for good."""
        return self.twin.lease.num_stored_tokens

    @property
    def place(self) -> int:
        """Return where the next step of this draft begins: at the newest draft, or at what is new of the answer."""
        return len(self.twin.token_ids) - 1 if self.tokens else self.start


AnyDraft = TypeVar("AnyDraft", bound=Draft)


class DraftBooks:
    """What a model and a head that draft have in common.

    Args:
        runner: of the drafter.
        manager: the books of its pool, of its own.
        sampler: with the seed of the model's.
        step_tokens: most tokens of a step.
        max_context: most tokens of a request that the drafter can have.
        adapts: whether a draft may end where the drafter is not sure enough.
    """

    def __init__(
        self,
        runner: ModelRunner,
        manager: CacheManager,
        sampler: Sampler,
        step_tokens: int,
        max_context: int,
        adapts: bool = False,
    ) -> None:
        self.runner, self.manager, self.sampler = runner, manager, sampler
        self.step_tokens, self.max_context = step_tokens, max_context
        self.adapts = adapts
        self.step_seconds = Medians()
        """What drawing one more token took, by the number of requests."""
        self._share = FIRST_SHARE
        self._accepted = self._expected = FIRST_EXPECTED

    @property
    def trust(self) -> float:
        """Return how many times as many drafts were right as the drafter took for likely."""
        return min(max(self._accepted / self._expected, LEAST_TRUST), MOST_TRUST)

    def begin(self, draft: Draft, task: DraftTask) -> None:
        """Begin with a task, and learn what became of the last draft of the request."""
        draft.task = task
        if draft.before:
            count, tokens, expected = draft.before
            draft.before, new = None, task.request.token_ids[count:]
            right = [token == other for token, other in zip(tokens, new, strict=False)]
            accepted = right.index(False) if False in right else len(right)
            self._accepted = TRUST_MEMORY * self._accepted + accepted
            self._expected = TRUST_MEMORY * self._expected + expected

    def reserve(self, draft: Draft, upto: int) -> bool:
        """Reserve pages for the first `upto` tokens of a twin; return whether there were any left."""
        try:
            self.manager.reserve(draft.twin.lease, upto)
        except OutOfPages:
            return False
        return True

    def groups(self, drafts: Sequence[AnyDraft]) -> list[list[AnyDraft]]:
        """Cut a step so that none has more than step_tokens tokens."""
        groups, room = list[list[AnyDraft]](), 0
        for draft in drafts:
            count = len(draft.twin.token_ids) - draft.place
            if count > room:
                groups.append([])
                room = self.step_tokens
            groups[-1].append(draft)
            room -= count
        return groups

    def launch(
        self,
        requests: Sequence[Request],
        counts: Sequence[int],
        logits_SV: Tensor,
        before: Mapping[int, Sequence[int]],
        counts_S: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Draw a token for each row as the model will; return them, and how likely the drafter takes each for.

        Args:
            requests: whose rows these are.
            counts: tokens of each answer by then, with drafts.
            logits_SV: of the model's tokens; -inf for those that the drafter cannot say.
            before: by row, drafts before it, where there are any.
            counts_S: the counts on the device, where the host knows too little of them.
        """
        logits_SV = logits_SV.float()
        tokens_S = self.sampler.launch(logits_SV, requests, counts, before, counts_S).tokens_S
        return tokens_S, (logits_SV.gather(1, tokens_S[:, None])[:, 0] - logits_SV.logsumexp(-1)).exp()

    def draw(self, drafts: Sequence[Draft], logits_SV: Tensor) -> tuple[list[int], list[float]]:
        """Return a token for each draft and its chance; see launch()."""
        counts = [draft.request.num_output_tokens + len(draft.tokens) for draft in drafts]
        before = {row: tuple(draft.tokens) for row, draft in enumerate(drafts) if draft.tokens}
        tokens_S, chances_S = self.launch([draft.request for draft in drafts], counts, logits_SV, before)
        return tokens_S.tolist(), chances_S.tolist()

    def note_seconds(self, since: float, drafts: Sequence[Draft]) -> None:
        """Note what a step took that drew a token for each of these."""
        # One after the answer's new tokens is another matter, and comes once for each draft.
        if all(draft.tokens for draft in drafts):
            self.step_seconds.note(len(drafts).bit_length(), perf_counter() - since)

    def add(self, draft: Draft, token: int, chance: float) -> bool:
        """Note a token that was drawn; return whether another one may follow it.

        Args:
            draft: which gets it.
            token: the token.
            chance: how likely the drafter takes it for.
        """
        task, request = draft.task, draft.request
        assert task is not None
        if not math.isfinite(chance):
            return False  # logits that are not numbers
        if draft.tokens:
            self._share += SHARE_WEIGHT * (chance - self._share)
        draft.chance *= chance
        is_good = token not in request.stop_ids and self._pays(draft, task)
        if not is_good or not can_follow(request, [*draft.tokens, token]):
            return False
        draft.tokens.append(token)
        draft.expected += draft.chance
        draft.twin.token_ids.append(token)
        return len(draft.tokens) < task.limit

    def note_verified(self, draft: Draft, drafts: Sequence[tuple[int, float]]) -> None:
        """Note tokens and their chances that were drawn and verified before the host knew them."""
        chance, expected = 1.0, 0.0
        for place, (_, of_token) in enumerate(drafts):
            if not math.isfinite(of_token):
                break  # logits that are not numbers
            if place:
                self._share += SHARE_WEIGHT * (of_token - self._share)
            chance *= of_token
            expected += chance
        draft.before = len(draft.request.token_ids), [token for token, _ in drafts], expected

    def _pays(self, draft: Draft, task: DraftTask) -> bool:
        """Return whether the newest token is worth its verification."""
        if not self.adapts:
            return True
        if task.token_seconds is None:
            return self._chance(draft) >= LEAST_CHANCE
        return self._chance(draft) * task.token_seconds >= task.verify_seconds

    def goes_on(self, draft: Draft, rows: int) -> bool:
        """Return whether one more step is likely to bring more than it takes.

        Args:
            draft: that it would go on with.
            rows: requests of the step, which share what it takes.
        """
        assert draft.task is not None
        return self._brings(self._chance(draft), draft.task, rows)

    def planned(self, draft: Draft, rows: int) -> int:
        """Return how many tokens to draw for a request where none is known before all are.

        Args:
            draft: that has none yet.
            rows: requests of each step.
        """
        count, chance, task = 1, self._share, draft.task
        assert task is not None
        while count < task.limit and self._brings(min(chance * self.trust, 1.0), task, rows):
            count, chance = count + 1, chance * self._share
        return count

    def _brings(self, chance: float, task: DraftTask, rows: int) -> bool:
        """Return whether a step pays behind drafts that are all right with this chance."""
        seconds = self.step_seconds.get(rows.bit_length())
        if not self.adapts or task.token_seconds is None or seconds is None:
            return True
        return chance * self._share * task.token_seconds >= seconds / rows + task.verify_seconds

    def _chance(self, draft: Draft) -> float:
        return min(draft.chance * self.trust, 1.0)

    def take_back(self, draft: Draft) -> None:
        """Forget the drafts: the next task says which of them count."""
        if draft.tokens:
            del draft.twin.token_ids[len(draft.twin.token_ids) - len(draft.tokens) :]
            draft.before = len(draft.request.token_ids), draft.tokens, draft.expected
        draft.tokens, draft.chance, draft.expected, draft.task = [], 1.0, 0.0, None
        self.manager.take_back(draft.twin.lease)


def ended(requests: Mapping[Request, object], running: Iterable[Request] = ()) -> list[Request]:
    """Return those that do not run: they have ended, or wait for room.

    Args:
        requests: what is kept, by request.
        running: that do run, whatever their state says.
    """
    live = set(running)
    return [one for one in requests if one.state is not State.RUNNING and one not in live]


def chunk(twin: Request, start: int, count: int, samples: bool) -> ScheduledRequest:
    """Return some tokens of a twin as a step has them; one that is sampled after others is a decode."""
    phase = Phase.PREFILL if start == 0 else Phase.DECODE if samples and count == 1 else Phase.EXTEND
    return ScheduledRequest(twin, start, count, phase, samples, write_from=start)

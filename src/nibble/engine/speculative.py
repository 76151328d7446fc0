"""Speculative decoding: several tokens of a request in one step, where somebody guesses them beforehand.

A drafter proposes tokens that may follow. A step in the phase VERIFY computes the last token of the request and all
drafts, and the sampler draws a token at each of these positions, from the model's own distribution there, as if the
drafts before it were part of the answer. Drafts count as long as they are the very tokens that were drawn; the first
token that differs counts too, and all after it is taken back:

    drafts       d1  d2  d3
    drawn    s1  s2  s3  s4          s1 = d1, s2 = d2, s3 != d3: the answer goes on with s1 s2 s3

A drafter names one token for each position, so this is rejection sampling: a draft is accepted with the probability
p(d) that the model gives it, and if it is not, the token is drawn from p without d, renormalised (Leviathan et al.
2023, with a proposal that has all of its mass on d). Every token is drawn as it is without drafts, by the same random
number of its seed and position, so the answer is the same too, not only its distribution.

Tokens are written quantised before they are attended, and what is stored of a token depends on that token alone, so a
draft that is taken back leaves nothing behind: its slot is written again.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from time import perf_counter
from typing import Any

from nibble.drafts import recorded_lengths
from nibble.engine.draft_policy import (
    LONGEST_PAUSE,
    SHORTEST_PAUSE,
    DraftPolicy,
    Gain,
    Likelihood,
    Medians,
)
from nibble.engine.drafters import Drafter
from nibble.engine.drafters.base import DraftTask, HeadDrafter
from nibble.engine.request import Batch, Request, ScheduledRequest

log = logging.getLogger("nibble.drafts")

FIRST_TOKENS = 4
"""Draft tokens of a request's first step with drafts, where their number is left to Nibble."""
NEWEST, DRAWN_STEPS = 4, 128
"""Steps of which the longest drafts say how many come where more were asked; and steps after which that is forgotten,
as there may be more by then."""
MISSES, MISS_PAUSE = 8, 16
"""Times in a row that nothing was proposed, and tokens for which nobody is asked then, where asking has its price."""


def accepted_run(drafts: Sequence[int], sampled: list[int]) -> list[int]:
    """Return the tokens that a verification adds to an answer: accepted drafts, and one more.

    Args:
        drafts: tokens that were proposed, k of them.
        sampled: what was drawn at each position, k + 1 tokens, each as if the drafts before it were part of the answer;
            NO_TOKEN where logits are not numbers.
    """
    count = 0
    for draft, token in zip(drafts, sampled, strict=False):
        if token != draft:
            break
        count += 1
    return sampled[: count + 1]


@lru_cache(256)
def recorded_counts(running: int, most_drafts: int, step_tokens: int) -> list[int]:
    """Return the numbers of drafts for each of so many requests that recorded steps have room for.

    They have as many rows for each, in all no more than step_tokens, and a power of two of requests.
    """
    most = step_tokens // (1 << (max(running, 1) - 1).bit_length()) - 1
    return [length - 1 for length in recorded_lengths(1 + most_drafts) if length - 1 <= most]


@dataclass(slots=True)
class DraftLength:
    """How many tokens to draft for one request: more while all are accepted, fewer and then none where they are not."""

    most: int
    length: int
    likelihood: Likelihood = field(default_factory=Likelihood)
    gain: Gain = field(default_factory=Gain)
    """Where asking takes steps of a model."""
    cost: float = 0.0
    """Tokens that could have been had in the time of the last drafts."""
    _pause: int = SHORTEST_PAUSE
    _resumes_at: int = 0
    _num_misses: int = 0

    def at(self, num_tokens: int) -> int:
        """Return the length for a request of so many tokens."""
        return self.length if num_tokens >= self._resumes_at else 0

    def note_proposal(self, has_drafts: bool, num_tokens: int) -> None:
        """Note whether anything was proposed for a request of so many tokens."""
        self.likelihood.note_proposal(has_drafts)
        self._num_misses = 0 if has_drafts else self._num_misses + 1
        if self._num_misses >= MISSES:
            self._resumes_at = num_tokens + MISS_PAUSE

    def update(self, proposed: int, accepted: int, num_tokens: int) -> None:
        """Note what became of drafts.

        Args:
            proposed: draft tokens.
            accepted: those of them that counted.
            num_tokens: of the request, with the new ones.
        """
        if accepted:
            self._pause = SHORTEST_PAUSE
        if accepted == proposed:
            self.length = min(max(self.length, 2 * proposed), self.most)
        elif accepted:
            self.length = accepted + 1
        else:
            self.length //= 2
            if self.length:
                return
            # A short draft from time to time, as what is being written may change.
            self.length, self._resumes_at = 1, num_tokens + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)


@dataclass(slots=True)
class DraftCounts:
    """Counts over an engine's life."""

    steps: int = 0
    """Requests that were verified, each step one."""
    drafted: int = 0
    """Draft tokens that were verified."""
    accepted: int = 0
    by_position: list[int] = field(default_factory=list)
    """Accepted ones by their place in a draft."""

    def add(self, proposed: int, accepted: int) -> None:
        """Count one verification."""
        self.steps += 1
        self.drafted += proposed
        self.accepted += accepted
        self.by_position += [0] * (proposed - len(self.by_position))
        for place in range(accepted):
            self.by_position[place] += 1


@dataclass(eq=False)
class Speculation:
    """Drafts for the requests of one engine.

    Args:
        name: of the drafter.
        drafter: who proposes.
        max_tokens: most tokens of a draft.
        adapts: whether a request's number of tokens follows what was accepted.
        step_tokens: most tokens of a step that has drafts: beyond it a step takes longer with every token.
        vocab_size: tokens of the model.
        overlaps: whether steps are launched before the last is read, unless somebody may draft.
        head: the drafter, where it reads the model's hidden states.
        needs_model: whether drafting takes steps of a model or head.
        policy: whether drafts pay then.
    """

    name: str
    drafter: Drafter
    max_tokens: int
    adapts: bool
    step_tokens: int
    vocab_size: int
    overlaps: bool = False
    head: HeadDrafter | None = None
    needs_model: bool = False
    policy: DraftPolicy = field(default_factory=DraftPolicy)
    counts: DraftCounts = field(default_factory=DraftCounts, init=False)
    _num_drafts: int | None = field(default=None, init=False)
    """Tokens to draft for each request of the next step, where that is decided."""
    _proposals: list[Mapping[Request, Sequence[int]]] = field(default_factory=list, init=False)
    """What was proposed, until settle() notes it."""
    _last_error: str = field(default="", init=False)
    _num_asked: int = field(default=0, init=False)
    """Drafts that are asked for each request of the step that is launched next."""
    _num_drawn: dict[tuple[int, int], deque[int]] = field(default_factory=dict, init=False)
    """The longest drafts of the newest steps for which so many were asked, by the number of requests: a drafter may
    have fewer."""
    _num_launches: int = field(default=0, init=False)
    _draft_times: Medians = field(default_factory=Medians, init=False)
    """What drafting took for each token of the longest draft, by the number of requests."""

    def waits(self, requests: Sequence[Request]) -> bool:
        """Return whether the next step should wait for the tokens of these, as drafts may follow them.

        Args:
            requests: that the step in flight decodes.
        """
        self._num_drafts = None
        self.settle()
        lengths = {request: self._length_at(request, len(request.token_ids) + 1) for request in requests}
        askable = {one: length for one, length in lengths.items() if length > 0 and self._may_propose(one)}
        if askable and self.chooses:
            self._num_drafts = self._choose(len(requests), askable)
        return self._num_drafts > 0 if self._num_drafts is not None else bool(askable)

    def propose(
        self, requests: Iterable[Request], room: Callable[[Request], int], others: int = 0
    ) -> Mapping[Request, tuple[int, ...]]:
        """Return draft tokens for some of these requests.

        Args:
            requests: that decode, and whose tokens are all known.
            room: returns the most tokens that may be drafted for one.
            others: requests that decode too.
        """
        return self.draft(self.tasks(requests, room, others))

    def tasks(
        self, requests: Iterable[Request], room: Callable[[Request], int], others: int = 0
    ) -> list[DraftTask]:
        """Return for whom to draft how many tokens in the next step; see propose().

        Of the requests a step may be in flight, which must have ended before the drafter is asked by draft().
        """
        self.settle()
        decoding = list(requests)
        running = len(decoding) + others
        lengths = self._lengths_of(decoding, room, running)
        if not lengths:
            return []
        token_seconds, verification = self._values(running)
        return [
            DraftTask(request, length, token_seconds, verification) for request, length in lengths.items()
        ]

    def prepare(self, tasks: Sequence[DraftTask]) -> None:
        """Let a head do what it can before the step in flight is read, which has no drafts; see draft()."""
        if self.head and tasks:
            try:
                self.head.prepare(tasks)
            except Exception as error:
                self._note_error(error)

    def draft(self, tasks: Sequence[DraftTask]) -> Mapping[Request, tuple[int, ...]]:
        """Ask the drafter, and return what may be accepted of its drafts, where there are any."""
        if not tasks:
            return {}
        start = perf_counter()
        usable = {
            task.request: self._usable(task.request, tokens)
            for task, tokens in zip(tasks, self._proposed(tasks), strict=True)
        }
        self._note_proposals(usable, perf_counter() - start, tasks[0].token_seconds, tasks[0].verify_seconds)
        return {request: tokens for request, tokens in usable.items() if tokens}

    def draft_ahead(self, tasks: Sequence[DraftTask], batch: Batch) -> Mapping[Request, tuple[int, ...]]:
        """Ask the head for drafts behind the step in flight, before what that brings is known; none where it cannot."""
        if not (self.head and tasks):
            return {}
        try:
            proposed = self.head.propose_ahead(tasks, batch)
        except Exception as error:
            self._note_error(error)
            return {}
        if proposed is None:
            return {}
        drafts = {task.request: tuple(tokens) for task, tokens in zip(tasks, proposed, strict=True)}
        # The host's part takes no time of the device.
        self._note_proposals(drafts, 0.0, tasks[0].token_seconds, tasks[0].verify_seconds)
        return {request: tokens for request, tokens in drafts.items() if tokens}

    def _values(self, running: int) -> tuple[float | None, float]:
        """Return the seconds that a token is worth where so many requests decode, and what verifying one takes."""
        token_seconds = self.policy.token_seconds(running) if self.adapts and self.needs_model else None
        if token_seconds is None:
            return None, 0.0
        return token_seconds, self.policy.verification(running, self.rounded(FIRST_TOKENS - 1), token_seconds)

    def _note_proposals(
        self,
        drafts: Mapping[Request, Sequence[int]],
        seconds: float,
        token_seconds: float | None,
        verification: float,
    ) -> None:
        """Note what a drafter proposed, and what that costs.

        Args:
            drafts: that will be verified.
            seconds: that drafting took.
            token_seconds: seconds that a token is worth.
            verification: seconds by which a step takes longer with one more token.
        """
        self.policy.drafted(seconds)
        if self.weighs:
            # Not of this one time, which may be another program's fault.
            kind, longest = len(drafts).bit_length(), max(1, *map(len, drafts.values()))
            self._draft_times.note(kind, seconds / longest)
            of_each = (self._draft_times.get(kind) or 0.0) * longest / len(drafts)
            for request, tokens in drafts.items():
                length = self._length(request)
                length.cost = (of_each + verification * len(tokens)) / token_seconds if token_seconds else 0.0
                if not tokens:
                    self.policy.note_gain(length.gain, -length.cost, len(request.token_ids))
        elif self.overlaps or self.head:
            self._proposals.append(drafts)

    def settle(self) -> None:
        """Note for whom something was proposed, once there is time: before drafts are noted or asked for again."""
        for drafts in self._proposals:
            for request, tokens in drafts.items():
                self._length(request).note_proposal(bool(tokens), len(request.token_ids))
        self._proposals.clear()

    def observe(self, batch: Batch, states_TX: Any) -> None:
        """Let a head that drafts read the hidden states [T, X] of a step, in its order."""
        if self.head:
            try:
                self.head.observe(batch, states_TX)
            except Exception as error:  # what the head misses of these requests it does not draft for
                self._note_error(error)

    def drafts_of(self, item: ScheduledRequest) -> Sequence[int]:
        """Return the drafts of a step that has ended, also of those that the host did not know before.

        Raises:
            Exception: they cannot be read, and the device has gone on from those that count.
        """
        if self.head is None or not self._is_unread(item.drafts):
            return item.drafts
        try:
            drafts = self.head.read(item.request, item.drafts)
        except Exception as error:
            if item.request.in_flight is not item:
                raise
            # None of them counts, which costs time and never an answer.
            self._note_error(error)
            return ()
        try:
            self.policy.drafted_unread(self.head.note_read(item.request, item.drafts))
        except Exception as error:
            self._note_error(error)
        # As the device has it, but for an end of the answer, behind which nothing counts.
        stops = item.request.stop_ids
        return drafts[: next((place for place, token in enumerate(drafts) if token in stops), len(drafts))]

    def _is_unread(self, drafts: Sequence[int]) -> bool:
        """Return whether ids stand for drafts that only the device knows (PageTables.unread)."""
        return bool(self.leaves_unread and drafts) and max(drafts) < 0

    def _proposed(self, tasks: Sequence[DraftTask]) -> Sequence[Sequence[int]]:
        """Return what the drafter proposes: nothing where it fails, which may cost drafts and never an answer."""
        try:
            return self.drafter.propose(tasks)
        except Exception as error:  # of all kinds
            self._note_error(error)
            return [()] * len(tasks)

    def _note_error(self, error: Exception) -> None:
        """Log an error of the drafter, once where the same comes again and again."""
        text = f"{type(error).__name__}: {error}"
        if text != self._last_error:
            log.warning("%s fails, and answers go on without its drafts (%s)", self.name, text)
        self._last_error = text

    @property
    def leaves_unread(self) -> bool:
        """Return whether steps verify drafts before the host has read them."""
        return self.head is not None and self.head.tables is not None

    @property
    def chooses(self) -> bool:
        """Return whether each step's drafts are weighed against its time."""
        return self.overlaps and self.adapts

    @property
    def weighs(self) -> bool:
        """Return whether the drafts of each request are weighed against the time of a model's steps, on a CPU."""
        return not self.overlaps and self.needs_model and self.adapts

    def _lengths_of(
        self, decoding: Sequence[Request], room: Callable[[Request], int], running: int
    ) -> dict[Request, int]:
        """Return how many tokens to draft for each of these; those of none are left out."""
        num_drafts, self._num_drafts = self._num_drafts, None
        left = self.step_tokens - running
        most = max(self._recorded_counts(running), default=0) if self.overlaps else self.max_tokens
        lengths = dict[Request, int]()
        for request in decoding:
            if left <= 0:
                break
            # A step in flight brings a token at least.
            length = self._length_at(request, len(request.token_ids) + (request.in_flight is not None))
            if length and (length := min(length, left, most, room(request))) > 0:
                lengths[request] = length
                left -= length
        if lengths and self.chooses:
            num_drafts = self._choose(running, lengths) if num_drafts is None else num_drafts
            lengths = {one: min(length, num_drafts) for one, length in lengths.items() if num_drafts}
        return lengths

    def note_launch(self, running: int, drafts: int, now: float, *, waited: bool) -> None:
        """Note a step without prompts that was launched, with so many drafts a request; see DraftPolicy.launched()."""
        self.settle()
        self._num_launches += 1
        if self._num_launches % DRAWN_STEPS == 0:
            self._num_drawn.clear()
        if self._num_asked and drafts:
            key = running.bit_length(), self._num_asked
            self._num_drawn.setdefault(key, deque(maxlen=NEWEST)).append(drafts)
        self._num_asked = 0
        self.policy.launched(running, self.rounded(drafts), now, waited=waited)

    def rounded(self, drafts: int) -> int:
        """Return the drafts of a request in the recorded step that has room for so many; 0 for none."""
        counts = (length - 1 for length in reversed(recorded_lengths(1 + self.max_tokens)))
        return next((count for count in counts if count >= drafts), drafts) if drafts else 0

    def _recorded_counts(self, running: int) -> list[int]:
        return recorded_counts(running, self.max_tokens, self.step_tokens)

    def _choose(self, running: int, lengths: Mapping[Request, int]) -> int:
        """Return how many tokens to draft for each request of a step, 0 for none.

        Args:
            running: requests that the step has.
            lengths: the most for each that may have any.
        """
        drawn = {count: self._drawn(running, count) for count in self._recorded_counts(running)}
        # Where fewer come, a step for more is one of those.
        drawn = {count: most for count, most in drawn.items() if self.rounded(most) == count} or drawn
        if not drawn:
            return 0
        likely = dict.fromkeys(drawn, 0.0)
        for one, length in lengths.items():
            likelihood = self._length(one).likelihood
            for count, most in drawn.items():
                likely[count] += likelihood.expected(min(most, length), self.policy.common_share)
        self._num_asked = self.policy.choose(running, likely)
        return self._num_asked

    def _drawn(self, running: int, num_asked: int) -> int:
        """Return how many drafts a request has at most where so many are asked for."""
        newest = self._num_drawn.get((running.bit_length(), num_asked), ())
        return max(newest) if len(newest) == NEWEST else num_asked

    def _length_at(self, request: Request, num_tokens: int) -> int:
        """Return how many tokens may be drafted for a request of so many tokens."""
        of_request = self._length(request)
        if self.weighs:
            # A head ends its drafts by itself.
            most = self.max_tokens if self.head else of_request.length
            return most if of_request.gain.is_due(num_tokens) else 0
        length = of_request.at(num_tokens)
        return self.max_tokens if length and self.chooses else length

    def _may_propose(self, request: Request) -> bool:
        """Return whether the drafter may have anything to say once the next token is known."""
        may_propose = getattr(self.drafter, "may_propose", None)
        return may_propose is None or bool(may_propose(request))

    def note(self, item: ScheduledRequest, num_accepted: int, proposed: int) -> None:
        """Note how many drafts of a step were accepted, of those that could have been."""
        self.settle()
        self.counts.add(proposed, num_accepted)
        self.policy.update(proposed, num_accepted)
        length, num_tokens = self._length(item.request), item.start + 2 + num_accepted
        if self.chooses:
            length.likelihood.update(proposed, num_accepted)
        elif self.adapts:
            self.policy.note_gain(length.gain, num_accepted - length.cost, num_tokens)
            length.update(proposed, num_accepted, num_tokens)

    def numbers(self) -> dict[str, float]:
        """Return the counts, flat, as the server's statistics have them."""
        counts = self.counts
        numbers = {"steps": counts.steps, "drafted": counts.drafted, "accepted": counts.accepted}
        numbers |= {f"accepted_at_{place}": count for place, count in enumerate(counts.by_position)}
        return {f"drafts_{name}": float(value) for name, value in numbers.items()}

    @property
    def summary(self) -> str:
        """Return what was accepted, in a line."""
        counts = self.counts
        if not counts.steps:
            return f"drafts by {self.name}: none were verified"
        return (
            f"drafts by {self.name}: {counts.accepted:,} of {counts.drafted:,} tokens accepted "
            f"({counts.accepted / counts.drafted:.0%}), {1 + counts.accepted / counts.steps:.2f} tokens a verification"
        )

    def _length(self, request: Request) -> DraftLength:
        # Of the request itself: every step asks for it, several times over.
        length: DraftLength | None = request.drafting
        if length is None:
            first = min(FIRST_TOKENS, self.max_tokens) if self.adapts else self.max_tokens
            length = DraftLength(self.max_tokens, first, gain=self.policy.new_gain())
            request.drafting = length
        return length

    def _usable(self, request: Request, drafts: Sequence[int]) -> tuple[int, ...]:
        """Return the first ones that may be accepted: before an end of the answer, and as the grammar has it."""
        if not drafts:
            return ()
        if self._is_unread(drafts):
            return tuple(drafts)
        is_plain = request.matcher is None and request.stop_ids.isdisjoint(drafts)
        if is_plain and min(drafts) >= 0 and max(drafts) < self.vocab_size:
            return tuple(drafts)
        tokens = list[int]()
        for token in drafts:
            # The answer would end there: nothing behind it counts, and it is drawn without a draft as well.
            if token in request.stop_ids or not 0 <= token < self.vocab_size:
                break
            tokens.append(token)
        if request.matcher and tokens:
            tokens = tokens[: request.matcher.num_valid(request.output_token_ids, tokens)]
        return tuple(tokens)

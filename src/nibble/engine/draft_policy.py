"""When drafts pay on a GPU, and when steps had better run ahead without.

A step without drafts is launched before the last one is read. A step with drafts waits for the last, since who drafts
must know its tokens, and computes several tokens of a request. So it takes longer for all requests, and brings more
tokens to those whose drafts are right. It pays where

    (requests + likely tokens of drafts) / time of a step with drafts > requests / time of a step without

Both times are measured as steps go by, and how likely a draft is right is learnt from those before. Where drafts do not
pay, a step has some nevertheless from time to time, as what is being written may change; so rarely that all of these
cost less than PROBE_COST.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

FIRST_SHARE, LEAST_SHARE = 0.7, 0.3
"""How likely the first draft of a request is right: until one was verified, and at least where others' were not."""
WEIGHT, COMMON_WEIGHT = 0.3, 0.03
"""Of what the newest draft token says about its request, and about requests to come."""
SAMPLES, ENOUGH = 5, 3
"""Times that are remembered, of which the median counts, and how many say something."""
MARGIN = 1.2
"""Times by which drafts must pay where the step before had none."""
PROBE_COST = 0.005
"""Part of all time that drafts may take that are not likely to pay."""
SHORTEST_PROBE, LONGEST_PROBE = 16, 256
"""Steps between those."""


@dataclass(slots=True)
class Likelihood:
    """How likely a request's drafts are right."""

    share: float = FIRST_SHARE
    """Of draft tokens, each after all before it were right."""
    hit_rate: float = 1.0
    """Of the times that somebody was asked for drafts and had some."""

    def note_proposal(self, has_drafts: bool) -> None:
        """Note whether anything was proposed."""
        self.hit_rate += WEIGHT * (has_drafts - self.hit_rate)

    def update(self, proposed: int, accepted: int) -> None:
        """Note what became of draft tokens: what comes after the first wrong one says nothing."""
        self.share = _learnt(self.share, proposed, accepted, WEIGHT)

    def expected(self, length: int) -> float:
        """Return how many of so many draft tokens are likely to count."""
        return self.hit_rate * sum(self.share**place for place in range(1, length + 1))


def _learnt(share: float, proposed: int, accepted: int, weight: float) -> float:
    for is_right in [1.0] * accepted + [0.0] * (accepted < proposed):
        share += weight * (is_right - share)
    return share


def _assumed_ratio(requests: int, drafts: int) -> float:
    """Return how much longer a step with so many drafts a request is taken to be, until it was measured."""
    return 1.08 + requests * (1 + drafts) / 512


@dataclass(slots=True)
class StepTimes:
    """What steps took by drafts of a request and the number of requests: once, twice, four times as many apart."""

    _times: dict[tuple[int, int], deque[float]] = field(default_factory=dict)

    def note(self, requests: int, drafts: int, seconds: float) -> None:
        """Note the time from one launch to the next."""
        key = requests.bit_length(), drafts
        self._times.setdefault(key, deque(maxlen=SAMPLES)).append(seconds)

    def ratio(self, requests: int, drafts: int) -> float:
        """Return how many times as long as without a step with so many drafts a request takes."""
        both = [self._times.get((requests.bit_length(), count), ()) for count in (drafts, 0)]
        if any(len(times) < ENOUGH for times in both):
            return _assumed_ratio(requests, drafts)
        with_drafts, without = map(statistics.median, both)
        return with_drafts / max(without, 1e-9)


@dataclass(slots=True)
class DraftPolicy:
    """Decides for each step whether it has drafts."""

    times: StepTimes = field(default_factory=StepTimes)
    common_share: float = FIRST_SHARE
    """Of all requests' draft tokens."""
    _since_drafts: int = 0
    """Steps that could have had drafts and had none."""
    _last: tuple[int, int, float] | None = None
    """Requests of the step launched last, drafts of each, and when that was; None after one with prompts."""

    def new_likelihood(self) -> Likelihood:
        """Return what is expected of a request that was never drafted for."""
        return Likelihood(max(self.common_share, LEAST_SHARE))

    def update(self, proposed: int, accepted: int) -> None:
        """Note what became of a request's drafts."""
        self.common_share = _learnt(self.common_share, proposed, accepted, COMMON_WEIGHT)

    def choose(self, requests: int, likely: Mapping[int, float]) -> int:
        """Return how many tokens to draft for each request, 0 for none. Asked once a step, where some may have any.

        Args:
            requests: that the step has.
            likely: tokens that drafts are likely to bring, by the number for each request.
        """
        extra = {drafts: self.times.ratio(requests, drafts) - 1 for drafts in likely}
        # Tokens in the time that a step takes without.
        best = max(likely, key=lambda drafts: (requests + likely[drafts]) / (1 + extra[drafts]))
        # To begin with drafts makes a step wait, and so does every end.
        margin = MARGIN if self._since_drafts else 1.0
        interval = min(max(max(extra.values()) / PROBE_COST, SHORTEST_PROBE), LONGEST_PROBE)
        self._since_drafts += 1
        if likely[best] <= margin * extra[best] * requests and self._since_drafts < interval:
            return 0
        self._since_drafts = 0
        return best

    def launched(self, requests: int, drafts: int, now: float, *, waited: bool) -> None:
        """Note a step without prompts that was launched.

        Args:
            requests: that it has.
            drafts: tokens that were drafted for each.
            now: seconds on any clock.
            waited: whether the step before it was read first.
        """
        if self._last:
            before, had_drafts, then = self._last
            # A step without that the next one waited for took longer, and not by its own fault.
            if had_drafts or not waited:
                self.times.note(before, had_drafts, now - then)
        self._last = requests, drafts, now

    def interrupted(self) -> None:
        """Note that the step launched last is not followed by another without prompts."""
        self._last = None

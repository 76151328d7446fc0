"""When drafts pay: on a GPU whether steps had better run ahead without, on a CPU whether to ask a model for any.

A step without drafts is launched before the last one is read. A step with drafts waits for the last where who drafts
must know its tokens, and computes several tokens of a request. So it takes longer for all requests, and brings more
tokens to those whose drafts are right. It pays where

    (requests + likely tokens of drafts) / time of a step with drafts > requests / time of a step without

Both times are measured as steps go by, and how likely a draft is right is learnt from those before. What was not
measured, or long ago, is taken to be in proportion to what was; so a few steps go without drafts, or have another
number of them, where that might pay more than what is known. Where drafts do not pay, a step has some nevertheless from
time to time, as what is being written may change, or they were wrong by chance: after a few steps, then as rarely as it
takes for them to cost less than PROBE_COST; at once so rarely where many were verified.

The time of a step with drafts includes what the drafter took for them, which is measured apart: it may be a model of
its own. That also says what a token is worth, the seconds that the engine takes for one now, by which a model that
drafts decides about each further step (engine/draft_books.py), and the gain of all steps that a request was asked
drafts for decides on a CPU whether to go on.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

FIRST_SHARE, LEAST_SHARE = 0.7, 0.3
"""How likely a draft is right: until any was verified, and at least what those of others say of a request."""
TRUST = 1.5
"""Verified draft tokens of a request that say as much of it as those of all others."""
WEIGHT, COMMON_WEIGHT = 0.3, 0.03
"""Of the newest time that drafts were asked for, and of what the newest draft token says of all requests."""
SAMPLES, ENOUGH = 5, 3
"""Times that are remembered, of which the median counts, and how many say something."""
OLD = 512
"""Steps of as many requests after which a time says nothing."""
HOPE, WILD_HOPE = 0.5, 0.25
"""Part of the time taken for a step that was not measured which it may take: beyond one with fewer drafts; and in all,
where no such step was measured."""
MARGIN = 1.2
"""Times by which drafts must pay where the step before had none."""
TRIES = 8
"""Steps out of OLD in which a number of drafts is tried, as some are never measured: where every step is waited for, or
has prompts, which count an eighth each."""
PROMPT_TRY = 0.125
PROBE_COST = 0.005
"""Part of all time that drafts may take that are not likely to pay, once enough is known of them."""
SHORTEST_PROBE, LONGEST_PROBE = 16, 256
"""Steps between those."""
ENOUGH_DRAFTS = 32
"""Draft tokens that were verified since drafts seemed to pay, after which chance is not why they do not, if those of a
step some time later are among them: what a few steps say may be chance of another kind."""
TOKEN_SHARE = 0.025
"""Of the time of a step, that it takes longer with one more token, until it was measured; and at least a tenth of that,
at most eight times as much, whatever a few steps seem to say."""
MEMORY = 0.95
"""Share of what was counted before that still counts: after one more step, to know how long a token takes now; and
after one more draft token of a request, to know how likely its drafts are right."""
FIRST_GAIN, LEAST_GAIN, GAIN_WEIGHT = 0.5, 0.1, 0.15
"""Tokens that asking a model for drafts is taken to bring beside what that costs: until it was tried, for a new request
at least, and what the newest time says about those to come."""
OUTLIER = 2.0
"""Times the median beyond which a time is another program's fault."""
SHORTEST_PAUSE, LONGEST_PAUSE = 4, 64
"""Tokens without drafts after they did not pay: twice as many each time, up to the longest."""


@dataclass(slots=True)
class Likelihood:
    """How likely a request's drafts are right."""

    right: float = 0.0
    """Draft tokens, each after all before it were right."""
    verified: float = 0.0
    """With the first wrong one of each draft. Both of late."""
    hit_rate: float = 1.0
    """Of the times that somebody was asked for drafts and had some."""

    def note_proposal(self, has_drafts: bool) -> None:
        """Note whether anything was proposed."""
        self.hit_rate += WEIGHT * (has_drafts - self.hit_rate)

    def update(self, proposed: int, accepted: int) -> None:
        """Note what became of draft tokens: what comes after the first wrong one says nothing."""
        for is_right in _outcomes(proposed, accepted):
            self.right = MEMORY * self.right + is_right
            self.verified = MEMORY * self.verified + 1

    def share(self, common: float) -> float:
        """Return how likely a draft token is right.

        Args:
            common: how likely those of all requests are.
        """
        return (self.right + TRUST * max(common, LEAST_SHARE)) / (self.verified + TRUST)

    def expected(self, length: int, common: float = FIRST_SHARE) -> float:
        """Return how many of so many draft tokens are likely to count; see share()."""
        share = self.share(common)
        return self.hit_rate * sum(share**place for place in range(1, length + 1))


def _outcomes(proposed: int, accepted: int) -> list[float]:
    """Return whether each draft token was right, 1 or 0, as far as that was seen."""
    return [1.0] * accepted + [0.0] * (accepted < proposed)


def _assumed_ratio(requests: int, drafts: int) -> float:
    """Return how much longer a step with so many drafts a request is taken to be, until it was measured."""
    return 1.12 + requests * drafts / 512 if drafts else 1.0


@dataclass(slots=True)
class Medians:
    """Medians of the newest few times of each kind."""

    _times: dict[Hashable, deque[float]] = field(default_factory=dict)
    _medians: dict[Hashable, float] = field(default_factory=dict)

    def note(self, kind: Hashable, seconds: float) -> None:
        """Note a time."""
        times = self._times.setdefault(kind, deque(maxlen=SAMPLES))
        times.append(seconds)
        if len(times) >= ENOUGH:
            self._medians[kind] = statistics.median(times)

    def get(self, kind: Hashable) -> float | None:
        """Return the median, None where there are too few."""
        return self._medians.get(kind)

    def forget(self, kind: Hashable) -> None:
        """Forget the times of a kind."""
        self._times.pop(kind, None)
        self._medians.pop(kind, None)

    def usual(self, kind: Hashable, seconds: float) -> float:
        """Note a time, and return it, or what is usual where it is out of all proportion."""
        self.note(kind, seconds)
        median = self.get(kind)
        return seconds if median is None else min(seconds, OUTLIER * median)


@dataclass(slots=True)
class StepTimes:
    """What steps took by drafts of a request and the number of requests: once, twice, four times as many apart."""

    _medians: Medians = field(default_factory=Medians)
    _newest: dict[int, dict[int, int]] = field(default_factory=dict)
    """By the number of requests: the step that had so many drafts last."""
    _steps: dict[int, int] = field(default_factory=dict)
    """How many steps there were."""

    def note(self, requests: int, drafts: int, seconds: float) -> None:
        """Note what a step took."""
        size = requests.bit_length()
        self._steps[size] = self._steps.get(size, 0) + 1
        newest = self._newest.setdefault(size, {})
        newest[drafts] = self._steps[size]
        for old in [count for count, step in newest.items() if self._steps[size] - step >= OLD]:
            del newest[old]
            self._medians.forget((size, old))
        self._medians.note((size, drafts), seconds)

    def age(self, requests: int, drafts: int) -> int:
        """Return how many steps of about as many requests ago such a step was measured; 0 where it was not."""
        size = requests.bit_length()
        newest = self._newest.get(size, {}).get(drafts)
        return 0 if newest is None else self._steps[size] - newest

    def forget(self, requests: int, drafts: int) -> None:
        """Forget what such steps took."""
        size = requests.bit_length()
        self._newest.get(size, {}).pop(drafts, None)
        self._medians.forget((size, drafts))

    def get(self, requests: int, drafts: int) -> float | None:
        """Return what such a step takes, None where it was not measured."""
        return self._medians.get((requests.bit_length(), drafts))

    def ratio(self, requests: int, drafts: int) -> float:
        """Return how many times as long as without a step with so many drafts a request takes."""
        return self._likely(requests, drafts) / max(self._likely(requests, 0), 1e-9)

    def _likely(self, requests: int, drafts: int) -> float:
        """Return what a step takes: what was not measured, in proportion to the measured one that is nearest."""
        if (seconds := self.get(requests, drafts)) is not None:
            return seconds
        assumed, nearest, likely = _assumed_ratio(requests, drafts), math.inf, None
        for count in self._newest.get(requests.bit_length(), ()):
            other = _assumed_ratio(requests, count)
            if (seconds := self.get(requests, count)) is not None and abs(other - assumed) < nearest:
                nearest, likely = abs(other - assumed), seconds * assumed / other
        return assumed if likely is None else likely


@dataclass(slots=True)
class Rate:
    """Tokens of an engine's answers in a time, where the newest steps count most."""

    tokens: float = 0.0
    seconds: float = 0.0
    steps: int = 0

    def add(self, tokens: float, seconds: float) -> None:
        """Add a step."""
        self.tokens, self.seconds = MEMORY * self.tokens + tokens, MEMORY * self.seconds + seconds
        self.steps += 1

    @property
    def token_seconds(self) -> float | None:
        """Return what a token takes, None where too few steps were seen."""
        return self.seconds / self.tokens if self.steps >= ENOUGH and self.tokens else None


@dataclass(slots=True)
class Gain:
    """What drafts of a model brought one request, in tokens beside what they cost: whether to ask for more."""

    mean: float = FIRST_GAIN
    _pause: int = SHORTEST_PAUSE
    _resumes_at: int = 0

    def is_due(self, num_tokens: int) -> bool:
        """Return whether drafts may be asked for where the request has so many tokens."""
        return num_tokens >= self._resumes_at

    def note(self, tokens: float, num_tokens: int) -> None:
        """Note that drafts brought `tokens`, less what they cost, and that the request has num_tokens now."""
        self.mean += GAIN_WEIGHT * (tokens - self.mean)
        if tokens > 0:
            self._pause = SHORTEST_PAUSE
        if self.mean < 0:
            # A draft from time to time, as what is being written may change.
            self._resumes_at = num_tokens + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)


@dataclass(slots=True)
class LaunchedStep:
    """A step without prompts that was launched."""

    requests: int
    drafts: int
    """Of each."""
    time: float
    """When, and that its drafts were drawn."""
    drafting: float
    """Seconds that drafting had taken."""
    waited: bool
    """Whether the step before it was read first."""
    begins: bool
    """Whether it has drafts, and that one had none."""


@dataclass(slots=True)
class DraftPolicy:
    """Decides for each step whether it has drafts."""

    times: StepTimes = field(default_factory=StepTimes)
    """With what drafts took."""
    verify_times: StepTimes = field(default_factory=StepTimes)
    """Without."""
    common_share: float = FIRST_SHARE
    """Of all requests' draft tokens."""
    _tries: dict[tuple[int, int], float] = field(default_factory=dict)
    """Of late, by number of requests and drafts."""
    _try: tuple[int, int] | None = None
    """Number of requests and of drafts that the next step tries, as such a step was not measured."""
    _num_choices: int = 0
    _next_probe: int = SHORTEST_PROBE
    """Steps without drafts after which some are tried, until enough were verified: twice as many each time."""
    _doubt_after: int = SHORTEST_PROBE
    """Steps after which the time of steps without may be doubted: twice as many each time."""
    _num_verified: int = 0
    """Draft tokens since drafts seemed to pay."""
    _before_probe: LaunchedStep | None = None
    """The step in front of one that alone had drafts, until it is known what that one cost."""
    _probe_costs: dict[int, float] = field(default_factory=dict)
    """Steps that could have been made in the time of the newest probe, less those that were; by number of requests."""
    _since_drafts: int = 0
    """Steps that could have had drafts and had none."""
    _last: LaunchedStep | None = None
    """The step launched last; None after one with prompts."""
    _before: LaunchedStep | None = None
    """The one before that."""
    _runs_ahead: bool = False
    """Whether the newest step with drafts behind another was launched before that was read."""
    _is_drawn: bool = False
    """Whether it is known what drawing took that was launched with it."""
    _is_steady: bool = False
    """Whether that step and the one before had neither prompts nor drafts."""
    _drafting: float = 0.0
    """Seconds of drafting since then."""
    _rates: dict[int, Rate] = field(default_factory=dict)
    """By number of requests, once, twice, four times as many apart."""
    _rate: Rate = field(default_factory=Rate)
    """That of the newest step."""
    _whole_times: Medians = field(default_factory=Medians)
    """Of steps with and without drafts together."""
    _common_gain: float = FIRST_GAIN

    def new_gain(self) -> Gain:
        """Return what is expected of a request that a model was never asked for."""
        return Gain(max(self._common_gain, LEAST_GAIN))

    def note_gain(self, gain: Gain, tokens: float, num_tokens: int) -> None:
        """Note what drafts brought a request; see Gain."""
        gain.note(tokens, num_tokens)
        self._common_gain += COMMON_WEIGHT * (tokens - self._common_gain)

    def update(self, proposed: int, accepted: int) -> None:
        """Note what became of a request's drafts."""
        for is_right in _outcomes(proposed, accepted):
            self.common_share += COMMON_WEIGHT * (is_right - self.common_share)
            self._num_verified += 1
        self._rate.tokens += accepted

    def drafted(self, seconds: float) -> None:
        """Note what the drafts took of the step that is launched next."""
        self._drafting += seconds

    def drafted_unread(self, seconds: float) -> None:
        """Note what the drafts took of the newest step that has ended, which was launched before they were drawn."""
        # Once, however many requests it has.
        if self._last and not self._is_drawn:
            # The host's part is known already, and the device drew meanwhile.
            more = max(seconds - self._last.drafting, 0.0)
            self._last.time += more
            self._last.drafting += more
            self._is_drawn = True

    def token_seconds(self, requests: int) -> float | None:
        """Return what a token of an answer takes now, where so many requests decode; None where that is not known."""
        rate = self._rates.get(requests.bit_length())
        return rate.token_seconds if rate else None

    def verification(self, requests: int, drafts: int, token_seconds: float) -> float:
        """Return the seconds by which a step takes longer with one more token.

        Args:
            requests: that the step has.
            drafts: of each, where a step with drafts was measured.
            token_seconds: as token_seconds() says.
        """
        without, with_drafts = self.verify_times.get(requests, 0), self.verify_times.get(requests, drafts)
        step = without or with_drafts or token_seconds
        share = TOKEN_SHARE
        if without and with_drafts and drafts:
            share = (with_drafts / without - 1) / (requests * drafts)
        return step * min(max(share, TOKEN_SHARE / 10), 8 * TOKEN_SHARE)

    def choose(self, requests: int, likely: Mapping[int, float]) -> int:
        """Return how many tokens to draft for each request, 0 for none. Asked once a step, where some may have any.

        Args:
            requests: that the step has.
            likely: tokens that drafts are likely to bring, by the number for each request.
        """
        self._forget()
        size = requests.bit_length()
        extra = {drafts: self.times.ratio(requests, drafts) - 1 for drafts in likely}
        if (untried := self._worth_a_try(requests, likely, extra)) is not None:
            self._try = size, untried
            self._since_drafts = 0 if untried else self._since_drafts + 1
            return untried
        # Tokens in the time that a step takes without.
        best = max(likely, key=lambda drafts: (requests + likely[drafts]) / (1 + extra[drafts]))
        # To begin with drafts makes a step wait, and so does every end.
        margin = MARGIN if self._since_drafts else 1.0
        self._since_drafts += 1
        pays = likely[best] > margin * extra[best] * requests
        if not pays and self._since_drafts < self._probe_after(size, max(extra.values())):
            return 0
        self._next_probe = SHORTEST_PROBE if pays else min(2 * self._next_probe, LONGEST_PROBE)
        if pays:
            self._num_verified = 0
        if pays and self._is_doubtful(requests, best, likely[best]):
            # Measured anew, as what was never measured; less and less often where it was right.
            self._doubt_after = min(2 * self._doubt_after, OLD)
            self.times.forget(requests, 0)
            self._tries.pop((size, 0), None)
            self._try = size, 0
            return 0
        self._since_drafts = 0
        return best

    def _probe_after(self, size: int, extra: float) -> float:
        """Return the steps without drafts after which some are tried that are not likely to pay.

        Args:
            size: as the number of requests counts.
            extra: by how much longer a step with drafts takes.
        """
        # A probe costs more than that: the device waits for the host before and behind it.
        cost = max(extra, self._probe_costs.get(size, 0.0))
        interval = min(max(cost / PROBE_COST, SHORTEST_PROBE), LONGEST_PROBE)
        # A few drafts that are wrong by chance may have ended it, or a time.
        is_sure = self._num_verified >= ENOUGH_DRAFTS and self._next_probe > SHORTEST_PROBE
        return interval if is_sure else min(interval, self._next_probe)

    def _is_doubtful(self, requests: int, drafts: int, likely: float) -> bool:
        """Return whether drafts pay by measured times alone, and a step without was not measured lately.

        By the ratio that is assumed where nothing is measured they would not. Where the host was held up in the few
        steps without, drafts seem to pay though none is right.
        """
        assumed = _assumed_ratio(requests, drafts) - 1
        return likely <= MARGIN * assumed * requests and self.times.age(requests, 0) >= self._doubt_after

    def _forget(self) -> None:
        """Forget the last choice, and from time to time what became of tries."""
        self._try = None
        self._num_choices += 1
        if self._num_choices % OLD == 0:
            self._tries.clear()
            self._doubt_after = SHORTEST_PROBE

    def _note_try(self, weight: float = 1.0) -> None:
        """Note that the step was launched that was chosen in order to measure it, if it was."""
        if self._try:
            self._tries[self._try] = self._tries.get(self._try, 0.0) + weight
        self._try = None

    def _worth_a_try(
        self, requests: int, likely: Mapping[int, float], extra: Mapping[int, float]
    ) -> int | None:
        """Return a number of drafts that was not measured, and might pay more than all that was; None for none."""
        tokens = {0: float(requests), **{drafts: requests + likely[drafts] for drafts in likely}}
        seconds = {0: 1.0, **{drafts: 1 + extra[drafts] for drafts in likely}}
        measured = [drafts for drafts in tokens if self.times.get(requests, drafts) is not None]
        best = max(tokens, key=lambda drafts: tokens[drafts] / seconds[drafts])
        if best not in measured:
            return None
        hopes = dict[int, float]()
        for drafts in tokens.keys() - measured:
            if self._tries.get((requests.bit_length(), drafts), 0.0) >= TRIES:
                continue
            # No step takes less time than one with fewer drafts.
            if fewer := [seconds[count] for count in measured if count < drafts]:
                least = max(fewer) + HOPE * max(seconds[drafts] - max(fewer), 0.0)
            else:
                least = WILD_HOPE * seconds[drafts]
            hopes[drafts] = tokens[drafts] / least
        hope = max(hopes, key=lambda drafts: hopes[drafts], default=0)
        return hope if hopes.get(hope, 0.0) > MARGIN * tokens[best] / seconds[best] else None

    def launched(self, requests: int, drafts: int, now: float, *, waited: bool) -> None:
        """Note a step without prompts that was launched.

        Args:
            requests: that it has.
            drafts: tokens that were drafted for each.
            now: seconds on any clock; of a step that runs behind another, when the newest one that was read had ended.
            waited: whether the step before it was read first.
        """
        self._note_try()
        goes_on = self._last is not None and bool(drafts and self._last.drafts)
        if goes_on:
            self._runs_ahead = not waited
        self._note_last(now, waited)
        self._note_probe(requests, drafts, now, waited)
        self._is_steady = self._last is not None and not self._last.drafts and not drafts
        launched = LaunchedStep(requests, drafts, now, self._drafting, waited, bool(drafts) and not goes_on)
        self._before, self._last, self._drafting = self._last, launched, 0.0
        self._is_drawn = False

    def interrupted(self, now: float | None = None, *, waited: bool = True) -> None:
        """Note that the step launched last is not followed by another without prompts.

        Args:
            now: when one with prompts was launched, if one was.
            waited: see launched().
        """
        self._note_try(PROMPT_TRY)
        if now is not None:
            self._note_last(now, waited)
        self._before, self._last, self._drafting, self._is_steady = None, None, 0.0, False
        self._before_probe = None

    def _note_last(self, now: float, waited: bool) -> None:
        """Note what the step launched last took."""
        if not self._last:
            return
        before, had_drafts, of_drafts = self._last.requests, self._last.drafts, self._last.drafting
        # What was drafted since is the new step's.
        seconds = now - self._last.time - self._drafting
        # A step without that the next one waited for took longer, and not by its own fault. Behind one of another kind
        # the time is that one's, as the next is launched when it ends.
        if had_drafts:
            self._note_drafts(self._last, self._before, seconds, waited)
        elif self._is_steady and not waited:
            self.times.note(before, 0, seconds)
            self.verify_times.note(before, 0, seconds)
        self._rate = self._rates.setdefault(before.bit_length(), Rate())
        self._rate.add(before, self._whole_times.usual(before.bit_length(), seconds + of_drafts))

    def _note_probe(self, requests: int, drafts: int, now: float, waited: bool) -> None:
        """Note what a step that alone had drafts cost, where a step is launched; see launched()."""
        before, last = self._before_probe, self._last
        if drafts:
            # Times of steps that run behind others are those of the step in front, which is to be of the same kind.
            is_first = self._is_steady and last is not None and not (last.drafts or last.waited)
            self._before_probe = last if is_first else None
        # The next step waits for the drafts, and this is the one behind that.
        elif last is None or not last.drafts:
            self._before_probe, without = None, self.times.get(requests, 0)
            if before and before.requests == requests and without and not waited:
                self._probe_costs[requests.bit_length()] = (now - before.time) / without - 3

    def _note_drafts(
        self, last: LaunchedStep, before: LaunchedStep | None, seconds: float, waited: bool
    ) -> None:
        """Note what a step with drafts took.

        Args:
            last: the step launched last.
            before: the one before that.
            seconds: between the times of `last` and the next one (see launched()), but for drafting.
            waited: whether `last` was read before that one was launched.
        """
        whole, step = seconds + last.drafting, last
        if last.waited and not waited:
            return  # it runs on
        if not last.waited:
            # It was launched while the one before it ran, and what has ended since is that one.
            if before is None or not before.drafts:
                return
            step = before
            if waited:  # both have ended
                if (before.requests, before.drafts) != (last.requests, last.drafts):
                    return
                whole /= 2
        # There the device waited for the host, as it does not once drafts go on. It is all that is known of some.
        if step.begins and self._runs_ahead and self.times.get(step.requests, step.drafts) is not None:
            return
        self.times.note(step.requests, step.drafts, whole)
        self.verify_times.note(step.requests, step.drafts, whole - last.drafting)

"""Drafts cost no more than they bring: steps are counted, and take what a table of measured times says.

The loop here is the engine's (schedule, launch, collect), with a clock that moves by the table, tokens that are numbers,
and a coin in place of a model. It shows which steps waited for the one before, and what that took in all.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from nibble.attention.planner.verify_memory import verify_sizes
from nibble.engine import in_flight, speculative
from nibble.engine.draft_books import LEAST_TRUST, Draft, DraftBooks
from nibble.engine.draft_policy import (
    FIRST_SHARE,
    OLD,
    TRIES,
    DraftPolicy,
    Gain,
    Likelihood,
    StepTimes,
    _assumed_ratio,
)
from nibble.engine.drafters.base import DraftTask
from nibble.engine.engine import Engine
from nibble.engine.in_flight import StepClock
from nibble.engine.request import Request, ScheduledRequest
from nibble.engine.sampler import Sampler
from nibble.engine.speculative import DRAWN_STEPS, NEWEST, Speculation
from nibble.model_spec import Phase

DECODE_MS = {1: 5.0, 8: 5.4, 32: 8.2, 128: 18.0}
"""Of a step without drafts, by requests."""
VERIFY_MS = {
    1: {1: 5.5, 3: 5.6, 7: 5.8}, 8: {1: 6.1, 3: 6.4, 7: 7.0}, 32: {1: 9.8, 3: 10.8, 7: 13.5}, 128: {1: 28.0}
}  # fmt: skip
"""Of a step with drafts, by their number, and the host's work between two of those, during which the device waits."""
STALL_MS = {1: 0.4, 8: 0.7, 32: 1.5, 128: 5.0}
"""That work, where a step waited and nothing was proposed."""


class Says:
    """Always has drafts, or never."""

    def __init__(self, *, has_any: bool = True) -> None:
        self.has_any = has_any

    def propose(self, tasks: Sequence[DraftTask]) -> list[list[int]]:
        return [[1] * task.limit if self.has_any else [] for task in tasks]


@dataclass
class Run:
    """What a number of steps came to."""

    waited: int = 0
    verified: int = 0
    tokens: int = 0
    seconds: float = 0.0
    proposed: list[int] = field(default_factory=list)


def run(count: int, share: float, steps: int, drafter: Says | None = None, seed: int = 0) -> Run:
    """Serve `count` requests, whose draft tokens are right with probability `share`."""
    speculation = Speculation("says", drafter or Says(), 7, True, 256, 999, overlaps=True)
    requests = [Request(str(i), [0, 0]) for i in range(count)]
    dice, found, in_flight = random.Random(seed), Run(), dict[Request, tuple[int, ...]]()
    for _ in range(steps):
        waits = any(in_flight.values()) or (bool(in_flight) and speculation.waits(list(in_flight)))
        if waits or not in_flight:
            for request, drafts in in_flight.items():
                accepted = next((i for i in range(len(drafts)) if dice.random() >= share), len(drafts))
                if drafts:
                    item = ScheduledRequest(
                        request,
                        len(request.token_ids) - 1,
                        1 + len(drafts),
                        Phase.VERIFY,
                        True,
                        drafts=drafts,
                    )
                    speculation.note(item, accepted, len(drafts))
                request.token_ids += [0] * (accepted + 1)
                found.tokens += accepted + 1
            drafts = speculation.propose(requests, lambda request: 7)
        else:
            for request in in_flight:
                request.token_ids.append(0)
            found.tokens += len(in_flight)
            drafts = {}
        in_flight = {request: drafts.get(request, ()) for request in requests}
        of_each = speculation.rounded(max(map(len, drafts.values()), default=0))
        found.seconds += STALL_MS[count] if waits and not drafts else 0.0
        speculation.policy.launched(count, of_each, found.seconds, waited=waits)
        found.seconds += VERIFY_MS[count][of_each] if drafts else DECODE_MS[count]
        found.waited += waits
        found.verified += bool(drafts)
        found.proposed.append(sum(map(len, in_flight.values())))
    return found


def times_as_fast(found: Run, count: int, steps: int) -> float:
    return found.tokens / found.seconds / (count * steps / (steps * DECODE_MS[count]))


@pytest.mark.parametrize(("count", "least"), [(1, 0.97), (8, 0.97), (32, 0.97), (128, 0.98)])
def test_drafts_that_are_never_right_cost_little(count: int, least: float) -> None:
    found = run(count, 0.0, 300)
    assert times_as_fast(found, count, 300) > least
    # The first few tell; then one in many is tried.
    assert found.verified < 25 and found.waited < 45
    assert sum(found.proposed[100:]) <= 3 * 7 * count


def test_drafts_are_tried_by_what_that_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device waits as long as a step takes for the host that tried some, they are tried more rarely."""
    monkeypatch.setitem(STALL_MS, 128, DECODE_MS[128])
    assert times_as_fast(run(128, 0.0, 1000), 128, 1000) > 0.99


def test_what_many_requests_say_is_no_chance() -> None:
    """Of one request the first drafts may be wrong by chance, of many not all: they are tried once more."""
    assert run(128, 0.0, 80).verified == 2 < run(1, 0.0, 80).verified


def test_what_a_probe_costs_is_no_other_steps_time() -> None:
    """Neither that of a prompt in front, nor of steps behind it that wait again."""
    for prompt, waits, is_noted in ((0.0, 0, True), (60.0, 0, False), (0.0, 4, False)):
        policy, ends, now = DraftPolicy(), [0.0, 0.0], 0.0
        launches = [(0, False)] * 8 + [(1, True), (0, True)] + [(0, True)] * waits + [(0, False)] * 2
        for number, (drafts, waited) in enumerate(launches):
            if prompt and number == 7:
                policy.interrupted(ends[-2], waited=False)
                ends.append(ends[-1] + prompt)
            begins = ends[-1] + 2.0 * waited
            now = begins if waited else max(now, ends[-2])  # as Engine._note_launch() has it
            policy.launched(4, drafts, now, waited=waited)
            ends.append(begins + (12.0 if drafts else 10.0))
        assert policy._probe_costs == ({3: pytest.approx(0.6)} if is_noted else {})


@pytest.mark.parametrize(("count", "least"), [(1, 1.8), (8, 1.6), (32, 1.3), (128, 0.98)])
def test_drafts_that_are_often_right_go_on(count: int, least: float) -> None:
    found = run(count, 0.7, 300)
    assert times_as_fast(found, count, 300) > least
    assert count == 128 or found.verified > 250


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("count", [8, 32])
def test_the_number_of_drafts_that_pays_most_is_found(
    monkeypatch: pytest.MonkeyPatch, count: int, share: float, seed: int
) -> None:
    """Where the longest drafts look best, until it shows that others take a third of their time."""
    times = {drafts: ratio * DECODE_MS[count] for drafts, ratio in ((1, 1.16), (3, 1.31), (7, 3.1))}
    monkeypatch.setitem(VERIFY_MS, count, times)
    tokens = {drafts: 1 + sum(share**place for place in range(1, drafts + 1)) for drafts in times}
    most = max(tokens[drafts] * DECODE_MS[count] / times[drafts] for drafts in times)
    assert times_as_fast(run(count, share, 300, seed=seed), count, 300) > 0.9 * most


@pytest.mark.parametrize("runs_ahead", [True, False])
def test_single_steps_with_drafts_do_not_stand_for_many(runs_ahead: bool) -> None:
    """Where steps run ahead of one another, one between steps without waits for the host, before it and behind it."""
    policy, ends, now, before = DraftPolicy(), [0.0, 0.0], 0.0, 0
    for drafts in [1] * 6 + [0, 0, 0, 1] * 5 + [0]:
        waited = drafts != before or not (drafts == 0 or runs_ahead)
        begins = ends[-1] + 10.0 * waited
        now = begins if waited else max(now, ends[-2])  # as Engine._note_launch() has it
        policy.launched(4, drafts, now, waited=waited)
        ends.append(begins + (20.0 if drafts else 16.0))
        before = drafts
    assert policy.times.get(4, 1) == (20.0 if runs_ahead else 30.0)
    assert policy.times.get(4, 0) == 16.0


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9])
def test_chance_does_not_change_the_number_of_drafts(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Of one request: a few drafts that were right or wrong say little."""
    times = {1: 5.07, 3: 5.58, 7: 6.99}
    monkeypatch.setitem(DECODE_MS, 1, 4.52)
    monkeypatch.setitem(VERIFY_MS, 1, times)
    tokens = {drafts: 1 + sum(share**place for place in range(1, drafts + 1)) for drafts in times}
    most = max(tokens[drafts] * 4.52 / times[drafts] for drafts in times)
    found = [times_as_fast(run(1, share, 400, seed=seed), 1, 400) for seed in range(6)]
    assert sum(found) / len(found) > 0.95 * most


def test_few_of_many_requests_do_not_make_all_of_them_wait() -> None:
    """One draft token in twenty is right: now and then a request has reason to hope, and the others would pay."""
    found = run(32, 0.05, 400)
    assert found.verified < 30 and times_as_fast(found, 32, 400) > 0.97


@pytest.mark.parametrize("count", [1, 32, 128])
def test_who_has_nothing_to_say_is_asked_less(count: int) -> None:
    found = run(count, 0.7, 300, Says(has_any=False))
    assert found.verified == 0 and found.waited < 40
    assert times_as_fast(found, count, 300) > 0.97


def test_a_step_has_no_more_tokens_than_a_recorded_one() -> None:
    for count, most in ((1, 7), (32, 7), (36, 3), (64, 3), (70, 1), (100, 1), (128, 1)):
        speculation = Speculation("says", Says(), 7, False, 256, 999, overlaps=True)
        drafts = speculation.propose([Request(str(i), [0]) for i in range(count)], lambda request: 7)
        assert {len(tokens) for tokens in drafts.values()} == {most} and len(drafts) == count
    speculation = Speculation("says", Says(), 7, False, 256, 999, overlaps=True)
    assert not speculation.propose([Request("a", [0])], lambda request: 7, others=255)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 7, 12, 15])
def test_steps_of_drafts_alone_are_recorded(tokens: int) -> None:
    for count in range(1, 140):
        speculation = Speculation("says", Says(), tokens, False, 256, 999, overlaps=True)
        drafts = speculation.propose([Request(str(i), [0]) for i in range(count)], lambda request: 15)
        rows = 1 + max(map(len, drafts.values()), default=0)
        sizes = verify_sizes(count, 1 + tokens, 256)
        assert not drafts or any(size[0] >= count and size[1] >= rows for size in sizes)
        assert drafts or count > 128


def test_what_is_likely_is_learnt() -> None:
    right, wrong, silent = Likelihood(), Likelihood(), Likelihood()
    for _ in range(12):
        right.update(3, 3)
        wrong.update(3, 0)
        silent.note_proposal(False)
    assert right.expected(3) > 2.8 and wrong.expected(3) < 0.15 and silent.expected(3) < 0.1
    assert FIRST_SHARE < Likelihood().expected(4) < 4
    policy = DraftPolicy()
    for _ in range(200):
        policy.update(1, 0)
    assert policy.common_share < 0.01
    assert 0.2 < Likelihood().share(policy.common_share) < 0.4, "a new request may still be another matter"


def test_times_count_from_launch_to_launch() -> None:
    times, policy = StepTimes(), DraftPolicy()
    assumed = times.ratio(4, 3)
    now = 0.0
    for place in range(50):
        drafts = 3 * (place % 5 > 2)
        # A step without that the next one waits for took longer, which is not its own fault; the first one is launched
        # while another runs.
        policy.launched(4, drafts, now, waited=place % 5 not in (1, 2))
        now += 3.0 if drafts else 2.0 if place % 5 == 1 else 9.0
    assert policy.times.ratio(4, 3) == 1.5 != assumed
    assert policy.times.ratio(64, 3) != 1.5 != policy.times.ratio(4, 7)
    policy.interrupted()
    policy.launched(4, 3, now + 100, waited=True)
    assert policy.times.ratio(4, 3) == 1.5


def test_times_that_are_not_known_are_in_proportion_to_those_that_are() -> None:
    times = StepTimes()
    for _ in range(3):
        times.note(32, 7, 23.0)
    assert times.ratio(32, 7) == pytest.approx(_assumed_ratio(32, 7))
    for _ in range(3):
        times.note(32, 3, 9.7)
    assert times.ratio(32, 7) / times.ratio(32, 3) == pytest.approx(23.0 / 9.7)
    assert times.ratio(32, 3) == pytest.approx(_assumed_ratio(32, 3)), "nearest to a step without"
    for _ in range(3):
        times.note(32, 0, 7.4)
    assert times.ratio(32, 3) == 9.7 / 7.4


def test_times_of_long_ago_say_nothing() -> None:
    times = StepTimes()
    for _ in range(3):
        times.note(32, 7, 23.0)
        times.note(8, 7, 3.0)
    for step in range(OLD):
        assert (times.get(32, 7) is not None) is (step < OLD)
        times.note(32, 0, 7.4)
    assert times.get(32, 7) is None and times.get(32, 0) == 7.4
    assert times.get(8, 7) == 3.0, "those of other numbers of requests are as old as they were"


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 40), (0.7, 180, 201)])
def test_drafts_that_pay_by_a_wrong_time_alone_do_not_go_on(share: float, least: int, most: int) -> None:
    """The host was held up in the few steps without drafts that were measured."""
    of_each, policy, seconds = Likelihood(1e9 * share, 1e9), DraftPolicy(), 0.0
    likely = {n: 8 * of_each.expected(n) for n in (3, 7)}
    for drafts, taken in {**VERIFY_MS[8], 0: 3 * DECODE_MS[8]}.items():
        for _ in range(3):
            policy.times.note(8, drafts, taken)
    chosen = [policy.choose(8, likely)]
    for _ in range(200):
        policy.launched(8, chosen[-1], seconds, waited=bool(chosen[-1]))
        seconds += VERIFY_MS[8][chosen[-1]] if chosen[-1] else DECODE_MS[8]
        chosen.append(policy.choose(8, likely))
    assert least <= sum(drafts > 0 for drafts in chosen) <= most


def test_what_cannot_be_measured_is_not_tried_for_ever() -> None:
    """Steps without drafts that are all waited for, as those of grammars may be."""
    policy, now, chosen = DraftPolicy(), 0.0, list[int]()
    for _ in range(2 * OLD):
        drafts = policy.choose(4, {3: 2.0})
        policy.launched(4, drafts, now, waited=True)
        now += 1.6 if drafts else 1.0
        chosen.append(drafts)
    assert 0 < chosen.count(0) <= 3 * TRIES and policy.times.get(4, 0) is None


@pytest.mark.parametrize("kind", ["all are waited for", "prompts between"])
def test_where_steps_cannot_be_measured_drafts_go_on(kind: str) -> None:
    policy, now, tokens = DraftPolicy(), 0.0, 0.0
    likely = {drafts: 4 * sum(0.5**place for place in range(1, drafts + 1)) for drafts in (1, 3, 7)}
    for place in range(1000):
        drafts = policy.choose(4, likely)
        policy.launched(4, drafts, now, waited=bool(drafts) or kind == "all are waited for")
        now += {0: 1.0, 1: 1.05, 3: 1.08, 7: 1.15}[drafts]
        tokens += 1 + likely.get(drafts, 0.0) / 4
        if kind == "prompts between" and place % 2:
            policy.interrupted()
    assert tokens / now > 1.65


@pytest.mark.parametrize("prompts", [30, 60])
def test_long_prompts_use_up_no_tries(prompts: int) -> None:
    """Steps with prompts are not measured; in those between, three drafts pay, and seven do not."""
    policy, now, tokens, alone = DraftPolicy(), 0.0, 0.0, 0.0
    likely = {drafts: 32 * sum(0.7**place for place in range(1, drafts + 1)) for drafts in (1, 3, 7)}
    for place in range(2000):
        drafts, has_prompt = policy.choose(32, likely), place % (2 * prompts) < prompts
        if has_prompt:
            policy.interrupted(now, waited=bool(drafts))
        else:
            policy.launched(32, drafts, now, waited=bool(drafts))
        now += {0: 8.0, 1: 9.3, 3: 10.5, 7: 30.0}[drafts] + 12.0 * has_prompt
        alone += 8.0 + 12.0 * has_prompt
        tokens += 1 + likely.get(drafts, 0.0) / 32
    assert tokens / now > 1.9 * 2000 / alone


def test_a_step_behind_two_of_its_kind_is_measured_by_one_with_prompts() -> None:
    policy, now = DraftPolicy(), 0.0
    for _ in range(4):
        for seconds in (7.0, 1.0):  # the first one is launched while the prompts run
            policy.launched(4, 0, now, waited=False)
            now += seconds
        policy.interrupted(now, waited=False)
        now += 5.0
    assert policy.times.get(4, 0) == 1.0


def test_more_drafts_than_ever_come_are_not_chosen_for_ever() -> None:
    """Whoever drafts has three at most, whose steps take four times as long."""
    made, now, tokens = Speculation("says", Says(), 7, True, 256, 999, overlaps=True), 0.0, 0.0
    requests = dict.fromkeys((Request(str(number), [0, 0]) for number in range(8)), 7)
    for request in requests:
        made._length(request).likelihood = Likelihood(0.9e9, 1e9)
    for _ in range(600):
        drafts = min(made._choose(8, requests), 3)
        made.note_launch(8, drafts, now, waited=bool(drafts))
        now += {0: 1.0, 1: 1.1, 3: 4.0}[drafts]
        tokens += 1 + {0: 0.0, 1: 0.9, 3: 2.44}[drafts]
    assert tokens / now > 1.5, "one draft each pays"


def test_the_best_length_is_chosen() -> None:
    times = StepTimes()
    for drafts, seconds in ((0, 1.0), (1, 1.1), (3, 1.15), (7, 1.6)):
        for _ in range(3):
            times.note(4, drafts, seconds)
    assert DraftPolicy(times).choose(4, {1: 2.0, 3: 4.0, 7: 5.0}) == 3
    assert DraftPolicy(times).choose(4, {1: 3.5, 3: 12.0, 7: 25.0}) == 7
    assert DraftPolicy(times).choose(4, {1: 0.2, 3: 0.22, 7: 0.22}) == 0


def test_a_step_counts_from_the_end_of_the_one_before() -> None:
    """Whenever it was launched meanwhile; and from its launch where nothing runs in front of it."""
    noted = list[tuple[float, bool]]()
    policy = SimpleNamespace(interrupted=lambda now, waited: noted.append((now, waited)))
    made = SimpleNamespace(
        policy=policy, note_launch=lambda _, drafts, now, waited: noted.append((now, waited))
    )
    engine: Any = SimpleNamespace(speculation=made, _in_flight=[], _clock=StepClock(3.0, 3.0), _noted_at=0.0)
    step = SimpleNamespace(phase=SimpleNamespace(decodes=True), drafts=())
    decodes, prompts = (
        SimpleNamespace(scheduled=[step]),
        SimpleNamespace(scheduled=[SimpleNamespace(phase=SimpleNamespace(decodes=False))]),
    )
    for batch, num_steps, read_at, waited, launched_at in (
        (decodes, 1, 3.0, False, 10.0),  # after a pause
        (decodes, 2, 3.0, False, 10.5),  # behind it, which is not read
        (decodes, 2, 15.0, False, 16.5),  # the host was late
        (decodes, 1, 20.0, True, 21.0),  # it needed the tokens
        (prompts, 2, 25.0, False, 26.0),
        (None, 0, 30.0, False, 31.0),
    ):
        engine._in_flight, engine._clock = [None] * num_steps, StepClock(read_at, read_at)
        Engine._note_launch(engine, batch, waited, launched_at)  # type: ignore[arg-type]
    assert noted == [(10.0, False), (10.0, False), (15.0, False), (21.0, True), (25.0, False), (None, False)]


@dataclass
class Ended:
    """A step, and what a device notes of its end."""

    seconds: float | None

    @property
    def sampled(self) -> Ended | None:
        return None if self.seconds is None else self

    @property
    def done(self) -> Ended:
        return self

    def elapsed_time(self, other: Ended) -> float:
        assert self.seconds is not None and other.seconds is not None
        return 1e3 * (other.seconds - self.seconds)


def test_the_device_says_when_a_step_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late the host comes to read it."""
    host, clock, ends = [0.0], StepClock(), list[float]()
    monkeypatch.setattr(in_flight, "perf_counter", lambda: host[0])
    for host[0], device in ((100.0, 1.0), (107.0, 6.0), (111.0, 11.0), (114.0, None), (121.0, 21.0)):
        clock.read(Ended(device))  # type: ignore[arg-type]
        ends.append(clock.end - ends[0] if ends else clock.end)
    assert ends[1:] == [5.0, 10.0, 13.0, 20.0]
    assert clock.at(123.0) == clock.end + 2.0


def test_what_a_head_does_not_draw_is_not_counted() -> None:
    """A step with room for seven drafts pays if it has seven, and not with the four that are drawn."""
    made, request = Speculation("says", Says(), 7, True, 256, 999, overlaps=True), Request("r", [0, 0])
    for drafts, seconds in ((0, 4.4), (1, 5.0), (3, 5.5), (7, 6.3)):
        for _ in range(3):
            made.policy.times.note(1, drafts, seconds)
    for place in range(NEWEST):
        assert made._choose(1, {request: 7}) == 7
        made.note_launch(1, 4, 6.3 * place, waited=True)
    for place in range(NEWEST, DRAWN_STEPS):
        assert made._choose(1, {request: 7}) == 3
        made.note_launch(1, 3, 6.3 * NEWEST + 5.5 * (place - NEWEST), waited=True)
    assert made._choose(1, {request: 7}) == 7, "there may be more by now"


def test_a_step_for_which_fewer_come_is_one_of_those() -> None:
    """Seven took less than none when they were measured, and one comes where seven are chosen."""
    made, request = Speculation("says", Says(), 7, True, 256, 999, overlaps=True), Request("r", [0, 0])
    made._length(request).likelihood = Likelihood(0.05e9, 1e9)
    for drafts, seconds in ((0, 5.0), (1, 5.6), (3, 6.2), (7, 4.9)):
        for _ in range(3):
            made.policy.times.note(1, drafts, seconds)
    choices, now = list[int](), 0.0
    for _ in range(DRAWN_STEPS - 1):
        choices.append(made._choose(1, {request: 7}))
        made.note_launch(1, min(choices[-1], 1), now, waited=bool(choices[-1]))
        now += 5.6 if choices[-1] else 5.0
    assert choices[:NEWEST] == [7] * NEWEST and sum(map(bool, choices)) < DRAWN_STEPS / 8, choices


def test_the_time_of_drafting_is_that_of_the_step_that_it_is_for() -> None:
    policy, now = DraftPolicy(), 0.0
    for place in range(24):
        drafts = 3 * (place % 3 > 0)
        if drafts:
            policy.drafted(4.0)
            now += 4.0
        policy.launched(2, drafts, now, waited=True)
        now += 2.5 if drafts else 2.0
    assert policy.verify_times.get(2, 3) == 2.5 and policy.times.get(2, 3) == 6.5
    assert policy.times.ratio(2, 3) == _assumed_ratio(2, 3), "steps without that were waited for say nothing"
    for place in range(6):
        policy.launched(2, 0, now + 2.0 * place, waited=False)
    assert policy.times.ratio(2, 3) == 6.5 / 2.0
    assert policy.verification(2, 3, token_seconds=1.0) == pytest.approx(0.5 / 6)
    assert policy.token_seconds(2) is not None and policy.token_seconds(64) is None


class Head:
    """A drafter whose steps take time, and that does not know how likely its drafts are right."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        self.clock, self.seconds = clock, seconds
        self.asked = 0

    def propose(self, tasks: Sequence[DraftTask]) -> list[list[int]]:
        self.asked += 1
        self.clock[0] += self.seconds * max(task.limit for task in tasks)
        return [[1] * task.limit for task in tasks]


def drafted_on_a_cpu(
    share: float, seconds: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[float, int]:
    """Times as fast as without drafts, and the times that a model was asked, where a plain step takes a second."""
    clock = [0.0]
    monkeypatch.setattr(speculative, "perf_counter", lambda: clock[0])
    drafter, request, dice = Head(clock, seconds), Request("r", [0, 0]), random.Random(4)
    made = Speculation("head", drafter, 7, True, 64, 999, needs_model=True)
    for _ in range(steps):
        drafts = made.propose([request], lambda request: 7).get(request, ())
        made.policy.launched(1, made.rounded(len(drafts)), clock[0], waited=False)
        clock[0] += 1.0 + 0.02 * len(drafts)
        accepted = next((i for i in range(len(drafts)) if dice.random() >= share), len(drafts))
        if drafts:
            place = len(request.token_ids) - 1
            made.note(
                ScheduledRequest(request, place, 1 + len(drafts), Phase.VERIFY, True, drafts=drafts),
                accepted,
                len(drafts),
            )
        request.token_ids += [0] * (accepted + 1)
    return (len(request.token_ids) - 2) / clock[0], drafter.asked


def test_a_model_that_drafts_in_vain_is_asked_less(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, asked = drafted_on_a_cpu(0.0, 0.2, 400, monkeypatch)
    assert fast > 0.96 and asked < 30
    # One token in three is right, and costs more than it brings.
    fast, asked = drafted_on_a_cpu(0.3, 0.6, 400, monkeypatch)
    assert fast > 0.93 and asked < 60


def test_a_model_whose_drafts_pay_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, asked = drafted_on_a_cpu(0.8, 0.1, 200, monkeypatch)
    assert fast > 1.5 and asked > 190


def test_a_gain_comes_back() -> None:
    gain = Gain()
    for place in range(20):
        gain.note(-0.2, place)
    assert gain.mean < 0 and not gain.is_due(24) and gain.is_due(20 + 64)
    for place in range(100, 104):
        gain.note(2.0, place)
    assert gain.mean > 0 and gain.is_due(110)


def test_a_draft_ends_where_one_more_step_does_not_pay() -> None:
    """A token takes 10 ms, a step of the head 2 ms, and a token to verify 0.2 ms."""
    books: Any = DraftBooks(None, None, Sampler(), 64, 99, adapts=True)  # type: ignore[arg-type]
    for _ in range(3):
        books.step_seconds.note(1, 2e-3)

    def draft(*chances: float, **task: Any) -> list[bool]:
        """Whether each token is verified, and another one asked for at the end."""
        request, twin = Request("r", [0, 0]), Request("r", [0])
        made = Draft(request, twin, DraftTask(request, 7, **task))
        books._share = FIRST_SHARE
        goes_on = [books.add(made, 5, chance) and books.goes_on(made, 1) for chance in chances]
        return [len(made.tokens) == len(chances), goes_on[-1]]

    timed = {"token_seconds": 10e-3, "verify_seconds": 0.2e-3}
    assert draft(0.9, **timed) == draft(0.9, 0.9, **timed) == [True, True]
    # Likely enough to be verified, now that it is there, and not enough for another step.
    assert draft(0.1, **timed) == draft(0.9, 0.3, **timed) == [True, False]
    assert draft(0.01, **timed) == draft(float("nan"), **timed) == [False, False]
    assert draft(0.1) == [False, False] and draft(0.3) == [True, True], "without times"

    def planned(share: float, **task: Any) -> int:
        """How many are drawn where none is read before all are."""
        books._share, request = share, Request("r", [0, 0])
        return int(books.planned(Draft(request, Request("r", [0]), DraftTask(request, 7, **task)), 1))

    # 0.7 ^ 3 x 0.7 x 10 ms is worth more than 2.2 ms.
    assert [planned(share, **timed) for share in (0.2, 0.7, 0.99)] == [1, 4, 7]
    assert planned(0.2) == 7, "without times"
    books.adapts = False
    assert draft(0.01) == [True, True] and planned(0.2, **timed) == 7, "as many as the user says"


def test_chances_are_corrected_by_what_was_accepted() -> None:
    books: Any = DraftBooks(None, None, Sampler(), 64, 99, adapts=True)  # type: ignore[arg-type]
    books.manager = SimpleNamespace(take_back=lambda lease: None)
    for share in (0.0, 1.0):
        request = Request("r", [0, 0])
        made = Draft(request, Request("r", [0]))
        for _ in range(200):
            books.begin(made, DraftTask(request, 3))
            for _ in range(3):
                books.add(made, 5, 0.9)
            assert len(made.tokens) > 0, "it is tried again and again"
            drafts = list(made.tokens)
            books.take_back(made)
            request.token_ids += [*(drafts if share else ()), 7]
        assert books.trust == (pytest.approx(3 / (0.9 + 0.81 + 0.729), rel=0.02) if share else LEAST_TRUST)
        books._accepted = books._expected = 4.0


@pytest.mark.parametrize(("drawing", "host", "period"), [(3.0, 2.0, 10.0), (1.0, 1.0, 2.5), (4.0, 9.0, 12.0)])
def test_drawing_that_is_known_late_is_no_part_of_verification(
    drawing: float, host: float, period: float
) -> None:
    """The device draws while the host launches it, and both are over once, whoever takes longer."""
    policy, now = DraftPolicy(), 0.0
    for _ in range(8):
        policy.drafted(host)
        policy.launched(4, 3, now, waited=True)
        for _ in range(4):  # requests
            policy.drafted_unread(drawing)
        now += period
    assert policy.times.get(4, 3) == pytest.approx(period)
    assert policy.verify_times.get(4, 3) == pytest.approx(period - max(drawing, host))


@pytest.mark.parametrize("kinds", [(3,), (3, 7), (3, 3, 7, 7), (7, 3, 3, 3, 3)])
@pytest.mark.parametrize("every", [1, 2, 3, 5, 100])
def test_steps_that_run_ahead_are_measured_as_those_that_wait(every: int, kinds: tuple[int, ...]) -> None:
    """What lies between two launches is another step's time where one did not wait for the step before."""
    policy, ends, now, num_read = DraftPolicy(), list[float](), 0.0, 0
    drawing, verification = {3: 2.0, 7: 5.0}, {3: 7.0, 7: 9.0}

    def read(upto: int) -> None:
        nonlocal now, num_read
        while num_read < upto:
            now = max(now, ends[num_read])
            policy.drafted_unread(drawing[kinds[num_read % len(kinds)]])
            num_read += 1

    for step in range(80):
        drafts, waited = kinds[step % len(kinds)], step % every == 0
        if waited:
            read(step)
            now += 0.5  # the host
        begins = max(now, ends[-1] if ends else 0.0)
        policy.launched(4, drafts, now, waited=waited)
        ends.append(begins + drawing[drafts] + verification[drafts])
        if not waited:
            read(step)
    for drafts in {*kinds}:
        whole, alone = policy.times.get(4, drafts), policy.verify_times.get(4, drafts)
        if (
            whole is None or alone is None
        ):  # steps that wait and those that run ahead take turns, of other kinds
            assert every in {2, 3} and len(kinds) > 1
            continue
        assert whole == pytest.approx(drawing[drafts] + verification[drafts], abs=0.6)
        assert alone == pytest.approx(verification[drafts], abs=0.6)

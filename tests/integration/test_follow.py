"""Steps with drafts that follow one another: the next is made and launched before the one before it is stored.

Answers must be those without drafts, and the books those of the tokens that count.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest

from exact_model import ExactModel, prefix_hashes
from nibble import SamplingParams
from nibble.cache.exact_window import ExactWindow
from nibble.cache.manager import CacheManager
from nibble.cache.states import StateSlots
from nibble.engine.following import (
    can_follow,
    follow,
    follow_unread,
    reserve_unread,
    room_ahead,
    unfinished,
)
from nibble.engine.request import Batch, Request, ScheduledRequest
from nibble.engine.scheduler import Scheduler, order_of
from nibble.engine.speculative import accepted_run
from state_model import StateModel
from traffic import arrivals, expected, limits, next_token, prompt

PAGE, MOST_DRAFTS = 4, 5
Flight = tuple[Batch, Mapping[Request, list[int]]]
"""A step in flight, and what the device knows that it brings."""


class Following:
    """The engine's loop over a device that computes at once, with drafts of which most are right."""

    def __init__(
        self, dice: random.Random, pages: int, prefix_cache: bool = True, window: ExactWindow | None = None,
        states: StateSlots | None = None, breaks: float = 0.0, ahead: float = 0.0, **limits: Any,
    ) -> None:  # fmt: skip
        self.dice, self.breaks, self.ahead = dice, breaks, ahead
        """How often a step is made and not launched, as where it is interrupted; and how often one is launched before
        the last is read, where it can be."""
        self.manager = CacheManager(pages, PAGE, prefix_cache, window=window, states=states)
        self.states = StateModel() if states else None
        self.scheduler = Scheduler(
            self.manager, **{"max_running": 8, "token_budget": 64, "max_context": 1000, **limits}
        )
        self.exact = ExactModel(window, PAGE) if window else None
        self.cells: dict[tuple[int, int], int] = {}
        self.flight: Flight | None = None
        self.names = iter(range(10**6))
        self.num_followed = self.num_ahead = self.num_accepted = 0

    def add(self, prompt: list[int], max_tokens: int = 4, **more: Any) -> Request:
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        request = Request(f"r{next(self.names)}", prompt, params, **more)
        self.scheduler.add(request)
        return request

    def compute(
        self, batch: Batch, before: Mapping[Request, list[int]] = MappingProxyType({})
    ) -> dict[Request, list[int]]:
        """What requests gain by a step, which is launched and ends at once.

        Args:
            batch: of the step.
            before: what the host has not read of the one before, and the device knows.
        """
        runs = dict[Request, list[int]]()
        for work in batch.scheduled:
            known = [*work.request.token_ids, *before.get(work.request, ())]
            start = len(known) - 1 if before else work.start
            end, first_draft = start + work.num_tokens, start + work.num_tokens - len(work.drafts)
            assert start <= work.start and (work.is_unread or start == work.start), "it begins elsewhere"
            tokens = [*known[:first_draft], *work.drafts]
            assert len(tokens) == end, "a step has tokens that nobody knows"
            self._write(work, tokens, start)
            if work.samples_token:
                rows = range(first_draft, end + 1)
                run = accepted_run(work.drafts, [next_token(tokens[:row]) for row in rows])
                end += len(run) - 1 - len(work.drafts)
                runs[work.request] = run
                self.num_accepted += len(run) - 1
            if self.states:
                # Drafts that do not count leave no trace in states (StateBooks.draft_room).
                hashes = prefix_hashes(tokens, work.request.namespace)
                self.states.step(work.request.lease, hashes, start, end)
        return runs

    def _write(self, work: ScheduledRequest, tokens: list[int], start: int) -> None:
        lease, hashes = work.request.lease, prefix_hashes(tokens, work.request.namespace)
        write_from = start if work.is_unread else work.write_from
        if self.exact:
            self.exact.compute(lease, hashes, start, len(tokens), write_from)
        for i, seen in enumerate(hashes):
            cell = (lease.pages[i // PAGE], i % PAGE)
            if i >= write_from:
                self.cells[cell] = seen
            assert self.cells[cell] == seen, f"token {i} of {work.request.id} is not what was stored"

    def drafts(self, requests: list[Request]) -> dict[Request, tuple[int, ...]]:
        """Of requests whose tokens are known; none of them ends an answer (Speculation._usable)."""
        result = dict[Request, tuple[int, ...]]()
        for request in requests:
            drafts = self.draw(request.token_ids, self.dice.randrange(MOST_DRAFTS + 1))
            ends = [place for place, token in enumerate(drafts) if token in request.stop_ids]
            result[request] = drafts[: min(ends, default=len(drafts))]
        return result

    def draw(self, known: Sequence[int], count: int) -> tuple[int, ...]:
        tokens = list(known)
        for _ in range(count):
            tokens.append(next_token(tokens) if self.dice.random() < 0.7 else 7)
        return tuple(tokens[len(known) :])

    def step_ahead(self, flight: Flight, gone: Request | None) -> bool:
        """A step that is launched before the one in flight is read; False where it cannot be.

        Drafts are the device's: they may go on behind the end of an answer.
        """
        scheduler, (before, gained) = self.scheduler, flight
        lengths = {
            item.request: min(self.dice.randrange(MOST_DRAFTS + 1), room_ahead(scheduler, item.request))
            for item in unfinished(before)
        }
        if not reserve_unread(scheduler, before, lengths):
            return False
        drafts = {
            one: self.draw([*one.token_ids, *gained[one]], count) for one, count in lengths.items() if count
        }
        batch = follow_unread(scheduler, before, drafts)
        if not batch.scheduled:
            return False
        if self.dice.random() < self.breaks:
            return True
        assert sum(work.num_tokens for work in batch.scheduled) <= scheduler.token_budget
        scheduler.launch(batch)
        runs = self.compute(batch, gained)
        if gone:
            scheduler.finish(gone, "abort")
        told = self.read(flight)
        scheduler.store(*told, scheduler.add_tokens(*told))
        scheduler.check_integrity()
        for work in batch.scheduled:
            assert work.request.is_finished or (work.start, work.is_unread) == (
                len(work.request.token_ids) - 1,
                0,
            )
        self.num_ahead += 1
        self.flight = batch, runs
        return True

    @staticmethod
    def read(flight: Flight) -> Flight:
        """What the host reads: a draft that ends an answer is none (Speculation._usable)."""
        batch, runs = flight
        ends = {
            request: next(
                (place for place, token in enumerate(run, 1) if token in request.stop_ids), len(run)
            )
            for request, run in runs.items()
        }
        return batch, {request: run[: ends[request]] for request, run in runs.items()}

    def step(self, gone: Request | None = None) -> bool:
        """A step. `gone` is aborted between its batch's launch and when what was before is stored."""
        scheduler, flight, batch = self.scheduler, self.flight, None
        is_ahead = flight and self.dice.random() < self.ahead and can_follow(scheduler, flight[0])
        if flight and is_ahead and self.step_ahead(flight, gone):
            return True
        flight = flight and self.read(flight)
        if flight and can_follow(scheduler, flight[0]):
            ended = scheduler.add_tokens(*flight)
            live = [request for request in scheduler.running if request not in ended]
            drafts = self.drafts(live)
            batch = follow(scheduler, drafts, ended)
            if batch is None or self.dice.random() < self.breaks:
                scheduler.store(*flight, ended)
                batch = scheduler.schedule(drafts)
            else:
                order = [order_of(item.request) for item in batch.scheduled if item.drafts]
                assert order == sorted(order) and not (ended and scheduler.waiting)
                self.num_followed += 1
                scheduler.launch(batch)
                runs = self.compute(batch)
                if gone:
                    scheduler.finish(gone, "abort")
                scheduler.store(*flight, ended)
                scheduler.check_integrity()
                self.flight = batch, runs
                return True
        else:
            if flight:
                scheduler.commit(*flight)
            batch = scheduler.schedule(self.drafts(scheduler.draftable))
        scheduler.check_integrity()
        if gone:
            scheduler.finish(gone, "abort")
        self.flight = None
        if batch and self.dice.random() < self.breaks:
            return True
        if batch:
            assert sum(work.num_tokens for work in batch.scheduled) <= scheduler.token_budget
            live_batch = Batch(tuple(one for one in batch.scheduled if not one.request.is_finished))
            scheduler.launch(live_batch)
            self.flight = live_batch, self.compute(live_batch)
        return batch is not None


@pytest.mark.parametrize(
    "window", [None, ExactWindow(4, 2, 90, 9, MOST_DRAFTS), ExactWindow(6, 2, 40, 2, MOST_DRAFTS)]
)
@pytest.mark.parametrize("states", [None, StateSlots(20, 8)])
@pytest.mark.parametrize("seed", range(30))
def test_any_mix_ends_right(seed: int, states: StateSlots | None, window: ExactWindow | None) -> None:
    dice = random.Random(seed)
    engine = Following(
        dice, **limits(dice), window=window, states=states, breaks=dice.choice([0.0, 0.0, 0.1]),
        # What a recurrent state has seen cannot be taken back.
        ahead=0.0 if states else dice.choice([0.0, 0.7, 1.0]),
    )  # fmt: skip
    requests, aborted = list[Request](), set[Request]()
    while len(requests) < 40 or engine.scheduler.waiting or engine.scheduler.running:
        if len(requests) < 40 and dice.random() < 0.3:
            requests += arrivals(engine, dice, (0, 0, -3, 2) if seed % 2 else (0,))
        gone = None
        if dice.random() < 0.05 and engine.scheduler.running:
            gone = dice.choice(engine.scheduler.running)
            aborted.add(gone)
        engine.step(gone)
    for request in set(requests) - aborted:
        assert request.output_token_ids == expected(request, engine.scheduler.limit)
    assert engine.manager.stats.in_use == 0
    engine.manager.clear()
    assert engine.manager.stats.free == engine.manager.stats.total


def test_steps_follow_one_another() -> None:
    """All but those with prompts, and draft pages are given back where one does not follow."""
    engine = Following(random.Random(1), pages=400)
    requests = [engine.add(prompt(9, i), 60) for i in range(3)]
    steps = 0
    while engine.step():
        steps += 1
        for request in engine.scheduler.running:
            lease = request.lease
            most = lease.num_stored_tokens + 2 * (1 + MOST_DRAFTS)
            assert len(lease.pages) <= engine.manager.pages_for(most)
    assert engine.num_followed >= steps - 4 and engine.num_accepted > 60
    assert all(request.output_token_ids == expected(request, 1000) for request in requests)


def test_steps_run_ahead() -> None:
    """All but the first ones, also where some requests end; and only so many pages are held for drafts."""
    engine = Following(random.Random(1), pages=400, ahead=1.0)
    requests = [engine.add(prompt(9, i), 40 + 10 * i) for i in range(3)]
    steps = 0
    while engine.step():
        steps += 1
        for request in engine.scheduler.running:
            lease = request.lease
            assert len(lease.pages) <= engine.manager.pages_for(
                lease.num_stored_tokens + 2 * (1 + MOST_DRAFTS)
            )
    assert engine.num_ahead >= steps - 6 and engine.num_accepted > 60
    assert all(request.output_token_ids == expected(request, 1000) for request in requests)
    assert engine.manager.stats.in_use == 0


def test_what_ends_is_no_part_of_the_next_step() -> None:
    engine = Following(random.Random(2), pages=100)
    short, long = engine.add(prompt(9), 2), engine.add(prompt(9, 1), 30)
    engine.step()
    while not short.is_finished:
        engine.step()
    assert engine.flight and [item.request for item in engine.flight[0].scheduled] == [long]
    while engine.step():
        pass
    assert long.output_token_ids == expected(long, 1000)


def test_what_is_reserved_for_a_chunk_stays() -> None:
    """One that is made while another is in flight, and not launched; only of drafts is anything taken back."""
    engine = Following(random.Random(3), pages=100, chunk=8)
    request, scheduler = engine.add(prompt(30), 4), engine.scheduler
    first = scheduler.schedule()
    assert first
    scheduler.launch(first)
    assert scheduler.schedule()
    scheduler.commit(first, engine.compute(first))
    assert request.lease.num_stored_tokens == 8 and request.lease.num_reserved_tokens == 16
    assert len(request.lease.pages) == 4
    while engine.step():
        pass
    assert request.output_token_ids == expected(request, 1000)

"""The scheduler against a fake model that sees only what is stored, and checks that it is stored rightly."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from exact_model import ExactModel, prefix_hashes
from nibble.cache.exact_window import ExactWindow
from nibble.cache.manager import CacheManager
from nibble.config import SamplingParams
from nibble.engine.budget import SLICES, divide
from nibble.engine.request import PHASE_ORDER, Batch, Logprob, Request, ScheduledRequest, State
from nibble.engine.scheduler import Scheduler
from nibble.errors import PromptTooLong, RequestError
from nibble.model_spec import Phase
from traffic import arrivals, expected, limits, next_token, prompt

PAGE = 4


class Engine:
    """A scheduler, a pool whose cells remember what was written, and the loop between them."""

    def __init__(
        self,
        pages: int = 64,
        *,
        prefix_cache: bool = True,
        page: int = PAGE,
        window: ExactWindow | None = None,
        **limits: int | None,
    ) -> None:
        self.manager = CacheManager(pages, page, prefix_cache, window=window)
        self.exact = ExactModel(window, page) if window else None
        defaults: dict = {"max_running": 8, "token_budget": 64, "max_context": 1000}
        self.scheduler = Scheduler(self.manager, **{**defaults, **limits})
        self.cells: dict[tuple[int, int], int] = {}
        self.names = iter(range(10**6))

    def add(self, prompt: list[int], max_tokens: int = 4, **more) -> Request:
        request = Request(
            f"r{next(self.names)}", prompt, SamplingParams(max_tokens=max_tokens, temperature=0), **more
        )
        self.scheduler.add(request)
        return request

    def schedule(self) -> Batch | None:
        batch = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if batch is None:
            return None
        assert sum(work.num_tokens for work in batch.scheduled) <= self.scheduler.token_budget
        assert all(0 < work.num_tokens <= self.scheduler.chunk for work in batch.scheduled)
        places = [PHASE_ORDER.index(work.phase) for work in batch.scheduled]
        assert places == sorted(places), "works of one phase are not side by side"
        assert self.scheduler.running[0] in [work.request for work in batch.scheduled], (
            "the oldest does not get on"
        )
        return batch

    def compute(self, batch: Batch) -> dict[Request, int]:
        """Writes what `batch` says, and samples from what is in the cache then."""
        return {
            work.request: next_token(work.request.token_ids) for work in batch.scheduled if self._write(work)
        }

    def _write(self, work: ScheduledRequest) -> bool:
        lease, tokens = work.request.lease, work.request.token_ids
        hashes = prefix_hashes(tokens[: work.end], work.request.namespace)
        assert work.write_from >= work.start, "tokens that are not computed cannot be written"
        if self.exact:
            self.exact.compute(lease, hashes, work.start, work.end, work.write_from)
        for i, seen in enumerate(hashes):
            cell = (lease.pages[i // self.manager.page_size], i % self.manager.page_size)
            if i >= work.write_from:
                self.cells[cell] = seen
            assert self.cells[cell] == seen, f"token {i} of {work.request.id} is not what was stored"
        return work.samples_token

    def commit(self, batch: Batch) -> list[Request]:
        ended = self.scheduler.commit(batch, self.compute(batch))
        self.scheduler.check_integrity()
        return ended

    def step(self) -> Batch | None:
        batch = self.schedule()
        if batch:
            self.commit(batch)
        return batch

    def run(self, steps: int = 10_000) -> Iterator[Batch]:
        for _ in range(steps):
            batch = self.step()
            if batch is None:
                assert not self.scheduler.waiting and not self.scheduler.running
                return
            yield batch
        raise AssertionError("no end in sight")

    def finish(self) -> int:
        """Runs to the end; the number of steps."""
        return sum(1 for _ in self.run())


def work_of(batch: Batch, request: Request) -> ScheduledRequest | None:
    return next((work for work in batch.scheduled if work.request is request), None)


# One request


@pytest.mark.parametrize("chunk", [1, 7, 64, None])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_answer_does_not_depend_on_chunks(chunk, prefix_cache):
    engine = Engine(chunk=chunk, prefix_cache=prefix_cache)
    requests = [engine.add(prompt(30 + i, i), 9) for i in range(3)]
    engine.finish()
    assert [request.output_token_ids for request in requests] == [
        expected(request, 1000) for request in requests
    ]
    assert all(request.finish_reason == "length" for request in requests)


def test_phases_of_one_request():
    engine = Engine(chunk=5)
    request = engine.add(prompt(11), 3)
    works = [batch.scheduled[0] for batch in engine.run()]
    assert [(work.start, work.num_tokens, work.phase, work.samples_token) for work in works] == [
        (0, 5, Phase.PREFILL, False),
        (5, 5, Phase.EXTEND, False),
        (10, 1, Phase.DECODE, True),
        (11, 1, Phase.DECODE, True),
        (12, 1, Phase.DECODE, True),
    ]
    assert request.num_output_tokens == 3


def test_one_token_prompts_prefill_and_single_tokens_in_a_prompt_extend():
    engine = Engine(chunk=1)
    engine.add([1], 1)
    engine.add([1, 2, 3], 1)
    phases = [{work.request.id: work.phase for work in batch.scheduled} for batch in engine.run()]
    assert phases == [
        {"r0": Phase.PREFILL, "r1": Phase.PREFILL},
        {"r1": Phase.EXTEND},
        {"r1": Phase.DECODE},
    ]


def test_a_prompt_that_is_cached_but_for_one_token_decodes():
    engine = Engine()
    engine.add(prompt(9), 1)
    engine.finish()
    engine.add(prompt(9), 1)
    (batch,) = engine.run()
    assert [(work.start, work.phase) for work in batch.scheduled] == [(8, Phase.DECODE)]


def test_batches_are_ordered_by_phase_and_then_arrival():
    engine = Engine(token_budget=256)
    engine.add(prompt(3, 1), 9)
    engine.add(prompt(3, 2), 9)
    engine.step()
    engine.add(prompt(200, 3))
    engine.scheduler.chunk = 8
    engine.step()
    engine.add(prompt(5, 4))
    batch = engine.schedule()
    assert [work.request.id for work in batch.scheduled] == ["r0", "r1", "r2", "r3"]
    assert [work.phase for work in batch.scheduled] == [
        Phase.DECODE,
        Phase.DECODE,
        Phase.EXTEND,
        Phase.PREFILL,
    ]
    assert [work.request.id for work in batch.scheduled if work.phase is Phase.DECODE] == ["r0", "r1"]
    assert sum(work.num_tokens for work in batch.scheduled) == 1 + 1 + 8 + 5


def test_nothing_to_do():
    assert Engine().step() is None


def test_an_empty_prompt_is_refused():
    with pytest.raises(RequestError, match="prompt is empty"):
        Request("r", [])


# Ends


def test_stop_tokens_end_the_answer_and_are_not_in_it():
    engine = Engine()
    free = expected(Request("r", prompt(9), SamplingParams(max_tokens=9, temperature=0)), 1000)
    stop = frozenset({free[3], 10**6})
    request = engine.add(prompt(9), 9, stop_ids=stop)
    engine.finish()
    assert request.finish_reason == "stop"
    assert request.output_token_ids == free[: free.index(free[3])]


def test_a_stop_token_may_come_first():
    engine = Engine()
    request = engine.add(prompt(9), 9, stop_ids=frozenset({next_token(prompt(9))}))
    assert engine.finish() == 1
    assert (request.finish_reason, request.output_token_ids) == ("stop", [])


def test_max_context_ends_an_answer():
    engine = Engine(max_context=12)
    request = engine.add(prompt(9), 99)
    engine.finish()
    assert (request.finish_reason, len(request.token_ids)) == ("length", 12)


def test_the_pool_ends_an_answer():
    engine = Engine(pages=3)
    request = engine.add(prompt(9), 99)
    engine.finish()
    assert (request.finish_reason, len(request.token_ids)) == ("length", 12)
    assert request.num_preemptions == 0


def test_commit_returns_what_ended():
    engine = Engine()
    short, long = engine.add(prompt(3, 1), 1), engine.add(prompt(3, 2), 2)
    assert engine.commit(engine.schedule()) == [short]
    assert engine.commit(engine.schedule()) == [long]


@pytest.mark.parametrize(
    ("limits", "length", "message"),
    [
        ({"max_context": 10}, 10, r"has 10 tokens .* context length is 10 tokens; shorten the prompt$"),
        (
            {"max_context": 10, "can_grow": True},
            10,
            r"context length is 10 tokens; .* or raise --max-context$",
        ),
        ({"pages": 2}, 8, r"has 8 tokens .* cache holds 8; .* --kv-memory, or .* --kv-format"),
    ],
)
def test_prompts_that_can_never_run_are_refused_at_once(limits, length, message):
    engine = Engine(**limits)
    with pytest.raises(PromptTooLong, match=message):
        engine.add(prompt(length))
    assert not engine.scheduler.waiting and not engine.scheduler.running
    request = engine.add(prompt(length - 1))
    engine.finish()
    assert request.num_output_tokens == 1


def test_the_caller_ends_a_request_at_a_stop_string():
    engine = Engine()
    request, other = engine.add(prompt(3, 1), 9), engine.add(prompt(3, 2), 9)
    engine.step()
    engine.scheduler.finish(request, "stop")
    engine.scheduler.check_integrity()
    assert (request.state, request.finish_reason, request.num_output_tokens) == (State.FINISHED, "stop", 1)
    engine.finish()
    assert other.num_output_tokens == 9 and request.num_output_tokens == 1


def test_the_caller_may_correct_the_reason():
    engine = Engine()
    request = engine.add(prompt(3), 1)
    engine.step()
    engine.scheduler.finish(request, "stop")
    assert request.finish_reason == "stop"
    assert engine.scheduler.metrics.finished == 1


# Aborts


def test_abort_waiting_running_and_gone():
    engine = Engine(max_running=1)
    running, waiting = engine.add(prompt(9, 1), 9), engine.add(prompt(9, 2), 9)
    engine.step()
    assert (running.state, waiting.state) == (State.RUNNING, State.WAITING)
    for request in (waiting, running):
        engine.scheduler.finish(request, "abort")
        engine.scheduler.check_integrity()
        assert (request.state, request.finish_reason) == (State.FINISHED, "abort")
        assert request.lease not in engine.manager.leases and not request.lease.pages
    engine.scheduler.finish(running, "abort")
    assert engine.scheduler.metrics.finished == 2
    assert engine.manager.stats.in_use == 0
    assert engine.step() is None


@pytest.mark.parametrize("decoding", [False, True])
def test_abort_between_schedule_and_commit(decoding):
    engine = Engine()
    gone, stays = engine.add(prompt(9, 1), 9), engine.add(prompt(9, 2), 9)
    if decoding:
        engine.step()
    batch = engine.schedule()
    tokens = engine.compute(batch)
    before = gone.num_output_tokens
    engine.scheduler.finish(gone, "abort")
    engine.scheduler.commit(batch, tokens)
    engine.scheduler.check_integrity()
    assert gone.num_output_tokens == before
    engine.finish()
    assert stays.output_token_ids == expected(stays, 1000)


def test_a_step_that_failed_is_scheduled_again():
    engine = Engine()
    request = engine.add(prompt(9), 3)
    first = engine.schedule()
    assert engine.schedule() == first
    engine.finish()
    assert request.output_token_ids == expected(request, 1000)


def test_a_batch_is_committed_once():
    engine = Engine()
    request = engine.add(prompt(9), 9)
    batch = engine.schedule()
    engine.commit(batch)
    with pytest.raises(AssertionError, match="committed before"):
        engine.scheduler.commit(batch, {request: 1})


# Shares of the budget


def test_decodes_come_first_and_prompts_take_the_rest():
    engine = Engine(token_budget=16, pages=200)
    decodes = [engine.add(prompt(2, i), 40) for i in range(4)]
    engine.step()
    long = engine.add(prompt(100, 9))
    for _ in range(8):
        batch = engine.step()
        assert all(work_of(batch, request).phase is Phase.DECODE for request in decodes)
        assert work_of(batch, long).num_tokens == 12


def test_a_long_prompt_does_not_starve_short_ones():
    engine = Engine(token_budget=512, pages=9000, max_running=64, max_context=40_000)
    long = engine.add(prompt(30_000, 1))
    engine.step()
    short = [engine.add(prompt(40, i + 2), 1) for i in range(10)]
    before = long.num_stored_tokens
    batch = engine.step()
    assert all(request.is_finished for request in short)
    assert work_of(batch, long).num_tokens == 512 - 400
    assert long.num_stored_tokens > before


def test_a_short_prompt_gets_by_a_house_full_of_long_ones():
    engine = Engine(token_budget=64, pages=9000, max_running=64, max_context=40_000)
    for i in range(20):
        engine.add(prompt(1000, i))
    engine.step()
    short = engine.add(prompt(8, 99), 1)
    engine.step()
    assert short.is_finished


def test_equal_prompts_go_one_after_another_and_all_of_the_budget_is_used():
    engine = Engine(token_budget=300, pages=1000)
    requests = [engine.add(prompt(200, i)) for i in range(4)]
    works = engine.step().scheduled
    assert [(work.request, work.num_tokens) for work in works] == [(requests[0], 200), (requests[1], 100)]
    # The one that is nearly done goes on.
    assert [work.num_tokens for work in engine.step().scheduled if work.phase is not Phase.DECODE] == [
        100,
        199,
    ]


def test_the_oldest_prompt_goes_on_however_many_short_ones_come():
    engine = Engine(token_budget=64, pages=4000, max_running=4)
    old = engine.add(prompt(400, 1), 1)
    engine.step()
    for i in range(100):
        engine.add(prompt(60, i + 2), 1)
        engine.step()
        if old.is_finished:
            break
    assert old.is_finished and i < 400 // (64 // SLICES)


def test_a_replay_has_the_urgency_of_those_who_wait_for_it(monkeypatch):
    engine = Engine(token_budget=64, pages=900, max_running=8)
    first, replay, waiting = (engine.add(prompt(length, i)) for i, length in enumerate((300, 500, 40)))
    engine.step()
    of_both = (replay.lease, waiting.lease)
    monkeypatch.setattr(engine.manager, "replay_target", lambda lease: 7 if lease in of_both else None)
    monkeypatch.setattr(type(replay.lease), "has_begun", property(lambda lease: lease is replay.lease))
    prompts = [first, replay, waiting]
    demand = {one: one.num_tokens - one.num_computed_tokens for one in prompts}
    selected = engine.scheduler._select_prompts(prompts, demand, 64)
    assert list(selected) == [first, replay], "who waits gets nothing of its own"
    assert selected[replay] == (0, demand[waiting]) < selected[first]


def test_prompts_get_on_beside_a_house_full_of_decodes():
    engine = Engine(token_budget=16, max_running=20, pages=400)
    for i in range(18):
        engine.add([i], 60)
    while (
        any(request.num_output_tokens == 0 for request in engine.scheduler.running)
        or engine.scheduler.waiting
    ):
        engine.step()
    late = engine.add(prompt(20), 1)
    batch = engine.step()
    assert work_of(batch, late).num_tokens == 2
    assert sum(work.phase is Phase.DECODE for work in batch.scheduled) == 14


@pytest.mark.parametrize("budget", [1, 2, 3])
def test_tiny_budgets_get_through(budget):
    engine = Engine(token_budget=budget, pages=100)
    requests = [engine.add(prompt(5 + i, i), 5) for i in range(6)]
    engine.finish()
    assert all(request.output_token_ids == expected(request, 1000) for request in requests)


@pytest.mark.parametrize(
    ("wanted", "urgency", "room", "portions"),
    [
        ([10, 10], [0, 0], 8, [8, 0]),
        ([10, 1], [10, 1], 8, [7, 1]),
        ([10, 9, 10], [10, 9, 10], 9, [2, 7, 0]),
        ([10, 9, 10], [9, 9, 2], 14, [4, 0, 10]),
        ([2, 2], [2, 2], 8, [2, 2]),
        ([5, 5], [5, 5], 1, [1, 0]),
        ([], [], 5, []),
    ],
)
def test_divide(wanted, urgency, room, portions):
    assert divide(wanted, urgency, room, 2) == portions


# Order and limits


def test_never_more_than_max_running():
    engine = Engine(max_running=3)
    requests = [engine.add(prompt(5, i), 3) for i in range(10)]
    for _ in engine.run():
        assert len(engine.scheduler.running) <= 3
    assert all(request.is_finished for request in requests)


def test_requests_start_in_order_of_arrival():
    engine = Engine(max_running=2, pages=20)
    requests = [engine.add(prompt(5 + 20 * (i % 2), i), 3) for i in range(8)]
    started: list[Request] = []
    for batch in engine.run():
        started += [work.request for work in batch.scheduled if work.start == 0]
    assert started == requests


def test_what_does_not_fit_is_not_looked_up_in_every_step(monkeypatch):
    engine = Engine(pages=10)
    engine.add(prompt(25, 1), 10)
    engine.step()
    large = engine.add(prompt(24, 2), 1)
    lookups = []
    found = engine.manager.open
    monkeypatch.setattr(
        engine.manager, "open", lambda *args, **more: lookups.append(args) or found(*args, **more)
    )
    engine.finish()
    assert large.is_finished
    assert len(lookups) == 2, "once when it came, and once when pages had come free"


def test_the_same_requests_give_the_same_batches():
    def trace() -> list[list[tuple[str, int, int]]]:
        engine = Engine(pages=12, token_budget=10)
        for i in range(12):
            engine.add(prompt(3 + i, i % 3), 8)
        return [
            [(work.request.id, work.start, work.num_tokens) for work in batch.scheduled]
            for batch in engine.run()
        ]

    assert trace() == trace()


# Preemption


def crowd(prefix_cache: bool) -> tuple[Engine, list[Request]]:
    """Three requests that fit when they start, and do not when they have grown."""
    engine = Engine(pages=10, prefix_cache=prefix_cache)
    return engine, [engine.add(prompt(4, i), 20) for i in range(3)]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_youngest_gives_its_pages_to_the_older(prefix_cache):
    engine, (old, middle, young) = crowd(prefix_cache)
    ends = []
    for _ in engine.run():
        assert engine.scheduler.running == sorted(
            engine.scheduler.running, key=lambda request: request.arrival
        )
        ends += [request for request in (old, middle, young) if request.is_finished and request not in ends]
    assert old.num_preemptions == 0 and young.num_preemptions > 0
    assert ends == [old, middle, young]
    assert all(request.output_token_ids == expected(request, 1000) for request in (old, middle, young))
    assert engine.scheduler.metrics.preemptions == middle.num_preemptions + young.num_preemptions


def test_a_preempted_request_keeps_its_tokens_and_finds_its_pages_again():
    engine, (*_, young) = crowd(prefix_cache=True)
    while not young.num_preemptions:
        before = list(young.token_ids)
        engine.step()
    assert young.state is State.WAITING and young.num_output_tokens > 0 and not young.lease.pages
    assert young.token_ids == before
    while young.state is State.WAITING:
        engine.schedule()
        engine.step()
    assert young.num_prefix_hit_tokens == 0, (
        "what it finds again is not counted as a prefix hit of the prompt"
    )
    assert engine.manager.stats.hit_tokens > 0


def test_preemption_is_not_a_revolving_door():
    """Who was preempted starts again only where there is room to grow; else there were 22 preemptions here."""
    engine = Engine(pages=24, prefix_cache=False)
    for i in range(8):
        engine.add(prompt(12, i), 40)
    assert engine.finish() < 140
    assert engine.scheduler.metrics.preemptions <= 12


def test_a_prompt_does_not_start_on_pages_that_a_running_one_still_needs():
    engine = Engine(pages=30, token_budget=8)
    old = engine.add(prompt(80, 1), 8)
    engine.step()
    young = engine.add(prompt(60, 2), 8)
    engine.step()
    assert young.state is State.WAITING
    engine.finish()
    assert old.num_preemptions == young.num_preemptions == 0


def test_a_preempted_request_waits_in_order_of_arrival():
    engine, (*_, young) = crowd(prefix_cache=True)
    while not young.num_preemptions:
        engine.step()
    late = engine.add(prompt(4, 9))
    assert engine.scheduler.waiting == [young, late]


# Priorities


def test_waiting_requests_start_by_priority_and_equals_by_arrival():
    engine = Engine(max_running=1)
    first = engine.add(prompt(5, 99), 3)
    engine.step()
    late = [engine.add(prompt(5, i), 2, priority=priority) for i, priority in enumerate((1, 0, 1, -5, 0))]
    started = [first]
    for batch in engine.run():
        started += [work.request for work in batch.scheduled if work.request not in started]
    assert started == [first, late[3], late[1], late[4], late[0], late[2]], (
        "who runs is not put out for who waits"
    )


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_least_important_gives_its_pages_though_it_came_first(prefix_cache):
    engine = Engine(pages=10, prefix_cache=prefix_cache)
    old, middle, young = (engine.add(prompt(4, i), 20, priority=-i) for i in range(3))
    ends = []
    for _ in engine.run():
        ends += [request for request in (old, middle, young) if request.is_finished and request not in ends]
    assert young.num_preemptions == 0 and old.num_preemptions > 0
    assert ends == [young, middle, old]
    assert all(request.output_token_ids == expected(request, 1000) for request in (old, middle, young))


def test_important_prompts_are_first_in_the_budget():
    engine = Engine(token_budget=SLICES, pages=900, max_running=20)
    for i in range(12):
        engine.add(prompt(20, i))
    engine.step()
    late, later = (engine.add(prompt(60, 20 + i), 1, priority=-i) for i in (1, 2))
    ends = []
    for _ in range(40):
        engine.step()
        ends += [one for one in (later, late) if one.is_finished and one not in ends]
    assert ends == [later, late], "though they had most left"
    assert all(not request.is_finished for request in engine.scheduler.running if request.priority == 0)


def test_equals_do_not_starve_one_another():
    """However many of the same priority come later, the first ends first."""
    engine = Engine(pages=12, max_running=4, token_budget=16)
    old = engine.add(prompt(20, 1), 8, priority=3)
    for i in range(200):
        engine.add(prompt(8, i + 2), 8, priority=3)
        engine.step()
        if old.is_finished:
            break
    assert old.is_finished and not old.num_preemptions and i < 20


def test_priorities_do_not_change_answers():
    def answers(priorities: tuple[int, ...]) -> list[list[int]]:
        engine = Engine(pages=12, token_budget=10)
        requests = [
            engine.add(prompt(3 + i, i % 3), 8, priority=priorities[i % len(priorities)]) for i in range(12)
        ]
        engine.finish()
        return [request.output_token_ids for request in requests]

    assert answers((0,)) == answers((2, -1, 0, 7))


def test_metrics():
    engine = Engine()
    engine.add(prompt(9), 3)
    engine.finish()
    engine.add(prompt(9), 3)
    engine.finish()
    metrics = engine.scheduler.metrics
    assert (metrics.prompt_tokens, metrics.decode_tokens, metrics.steps, metrics.finished) == (9, 5, 6, 2)
    assert (metrics.waiting, metrics.running, metrics.preemptions) == (0, 0, 0)
    assert (metrics.cache.lookup_tokens, metrics.cache.hit_tokens) == (18, 8)


# Sharing


def siblings(engine: Engine, tokens: list[int], n: int, max_tokens: int = 6) -> list[Request]:
    leader = engine.add(tokens, max_tokens)
    return [leader] + [engine.add(tokens, max_tokens, waits_for=leader) for _ in range(n - 1)]


def test_siblings_share_the_pages_of_the_prompt():
    engine = Engine(token_budget=16)
    leader, *others = siblings(engine, prompt(30), 4)
    engine.step()
    assert all(request.state is State.WAITING for request in others)
    engine.step()
    engine.step()
    assert all(request.lease.pages[:7] == leader.lease.pages[:7] for request in others)
    assert all(request.num_prefix_hit_tokens == 28 for request in others)
    engine.finish()
    assert engine.scheduler.metrics.prompt_tokens == 30 + 3 * 2


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("when", ["at once", "in the prompt", "in the answer"])
def test_siblings_go_on_without_their_leader(when, prefix_cache):
    engine = Engine(token_budget=16, prefix_cache=prefix_cache)
    leader, *others = siblings(engine, prompt(30), 3)
    for _ in range(("at once", "in the prompt", "in the answer").index(when) * 2):
        engine.step()
    engine.scheduler.finish(leader, "abort")
    engine.finish()
    assert all(request.output_token_ids == expected(request, 1000) for request in others)
    assert engine.manager.stats.in_use == 0


def test_siblings_go_on_when_the_leader_stops_at_its_first_token():
    engine = Engine()
    leader = engine.add(prompt(9), 9, stop_ids=frozenset({next_token(prompt(9))}))
    other = engine.add(prompt(9), 2, waits_for=leader)
    engine.finish()
    assert (leader.num_output_tokens, other.num_output_tokens, other.num_prefix_hit_tokens) == (0, 2, 8)


def test_waiting_siblings_hold_nobody_up():
    engine = Engine(token_budget=16)
    leader, sibling = siblings(engine, prompt(60), 2)
    other = engine.add(prompt(3, 5), 1)
    engine.step()
    assert other.is_finished and sibling.state is State.WAITING and not leader.num_output_tokens


def test_equal_prompts_that_come_together_are_computed_once():
    engine = Engine(token_budget=32, pages=200)
    common = prompt(80)
    requests = [engine.add([*common, *prompt(4, i + 1)], 3) for i in range(6)]
    engine.finish()
    assert engine.scheduler.metrics.prompt_tokens == 84 + 5 * 4
    assert [request.num_prefix_hit_tokens for request in requests] == [0] + [80] * 5
    assert all(request.output_token_ids == expected(request, 1000) for request in requests)


def test_those_who_wait_for_a_common_page_go_on_when_it_is_lost():
    engine = Engine(token_budget=16)
    first, second = engine.add(prompt(60), 3), engine.add(prompt(60), 3)
    engine.step()
    assert second.num_stored_tokens == 0 < first.num_stored_tokens
    engine.scheduler.finish(first, "abort")
    engine.finish()
    assert second.output_token_ids == expected(second, 1000)
    assert second.num_prefix_hit_tokens == 16


def test_requests_of_different_namespaces_share_nothing():
    engine = Engine()
    for name in ("a", "b"):
        request = engine.add(prompt(9), 2, namespace=name)
        engine.finish()
        assert request.num_prefix_hit_tokens == 0


# All at once


WINDOWS = (None, ExactWindow(4, 2, 60, 9), ExactWindow(6, 2, 24, 0), ExactWindow(1, 3, 14, 4))


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("chunk", [1, 7, 64, None])
@pytest.mark.parametrize("seed", range(12))
def test_any_mix_ends_right(seed, chunk, window):
    """Short on pages, with aborts, siblings, common prefixes and late arrivals: every answer is as expected."""
    dice = random.Random(seed)
    engine = Engine(**limits(dice), chunk=chunk, window=window)
    requests: list[Request] = []
    aborted = set()
    while len(requests) < 40 or engine.scheduler.waiting or engine.scheduler.running:
        if len(requests) < 40 and dice.random() < 0.4:
            requests += arrivals(engine, dice, (0, 0, -3, 2) if seed % 2 else (0,))
        batch = engine.schedule()
        if dice.random() < 0.05 and requests and not (victim := dice.choice(requests)).is_finished:
            engine.scheduler.finish(victim, "abort")
            aborted.add(victim)
        if batch:
            live = Batch(tuple(work for work in batch.scheduled if not work.request.is_finished))
            engine.scheduler.commit(batch, engine.compute(live))
            engine.scheduler.check_integrity()
    for request in set(requests) - aborted:
        assert request.output_token_ids == expected(request, engine.scheduler.limit)
        stopped = request.num_output_tokens < min(
            request.params.max_tokens, engine.scheduler.limit - len(request.prompt_token_ids)
        )
        assert request.finish_reason == ("stop" if stopped else "length")
    assert engine.manager.stats.in_use == 0
    engine.manager.clear()
    assert engine.manager.stats.free == engine.manager.stats.total


# Exact window


WINDOW = ExactWindow(4, 6, 200, 60)  # a replay of 24 tokens


def windowed(**limits) -> Engine:
    return Engine(**{"pages": 400, "window": WINDOW, "max_running": 64, "token_budget": 128, **limits})


def replayed(engine: Engine) -> int:
    return engine.manager.stats.window.replayed_tokens


@pytest.mark.parametrize("chunk", [7, 64, None])
def test_a_shared_prefix_is_computed_once_and_needs_no_replay(chunk):
    """The others wait for the first one's pages, so it is known where they branch."""
    engine, common = windowed(chunk=chunk), prompt(101)
    requests = [engine.add([*common, *prompt(4, i + 1), i], 3) for i in range(24)]
    engine.finish()
    assert replayed(engine) == 0
    assert [request.num_prefix_hit_tokens for request in requests] == [0] + [100] * 23
    metrics = engine.scheduler.metrics
    assert metrics.prompt_tokens + metrics.decode_tokens == 106 + 23 * 6 + 24 * 2


def test_sixty_four_starts_with_one_system_prompt():
    engine = windowed(page=64, window=ExactWindow(64, 32, 300, 60), token_budget=8192, max_context=5000)
    common = prompt(2000)
    requests = [engine.add([*common, *prompt(100, i + 1)], 3) for i in range(64)]
    engine.finish()
    assert replayed(engine) == 0
    assert [request.num_prefix_hit_tokens for request in requests] == [0] + [1984] * 63


@pytest.mark.parametrize("chunk", [7, 64, None])
def test_a_prefix_without_a_snapshot_is_replayed_by_one_for_all(chunk):
    engine, common = windowed(chunk=chunk), prompt(101)
    engine.add([*common, *prompt(60, 0)], 3)
    engine.finish()
    requests = [engine.add([*common, *prompt(4, i + 1), i], 3) for i in range(24)]
    batch = engine.step()
    assert [work.request for work in batch.scheduled] == [requests[0]]
    engine.finish()
    assert replayed(engine) == 24
    assert sorted(request.num_prefix_hit_tokens for request in requests) == [76] + [100] * 23


def test_those_who_come_while_the_first_is_in_flight_replay_once():
    engine, common = windowed(), prompt(101)
    engine.add([*common, *prompt(24, 0)], 1)
    batch = engine.schedule()
    engine.scheduler.launch(batch)
    requests = [engine.add([*common, *prompt(4, i + 1), i], 3) for i in range(8)]
    assert engine.schedule() is None
    engine.commit(batch)
    engine.finish()
    assert replayed(engine) == 24
    assert sorted(request.num_prefix_hit_tokens for request in requests) == [76] + [100] * 7


def test_others_take_over_a_replay_that_is_aborted():
    engine, common = windowed(chunk=9), prompt(101)
    engine.add([*common, *prompt(60, 0)], 3)
    engine.finish()
    first, *others = (engine.add([*common, *prompt(4, i + 1), i], 3) for i in range(4))
    engine.step()
    engine.scheduler.finish(first, "abort")
    engine.finish()
    assert replayed(engine) == 9 + 24
    assert all(request.output_token_ids == expected(request, 1000) for request in others)


def test_a_replay_that_has_begun_goes_on_before_those_who_wait_for_it():
    engine, common = windowed(chunk=9, token_budget=16), prompt(101)
    engine.add([*common, *prompt(60, 0)], 3)
    engine.finish()
    busy = engine.add(prompt(90, 7), 3)
    long = engine.add([*common, *prompt(50, 1)], 3)
    engine.step()
    assert long.lease.is_replaying and long.lease.has_begun
    short = engine.add([*common, *prompt(4, 2)], 3)
    engine.finish()
    assert replayed(engine) == 24 and short.num_prefix_hit_tokens == 100
    assert busy.is_finished


def test_phases_and_writes_of_a_replay():
    engine = windowed(chunk=10)
    engine.add(prompt(40), 1)
    engine.finish()
    request = engine.add([*prompt(21), 1, 2, 3], 2)
    works = [batch.scheduled[0] for batch in engine.run()]
    assert [(work.start, work.end, work.phase, work.write_from, work.samples_token) for work in works] == [
        (0, 10, Phase.PREFILL, 20, False),
        (10, 20, Phase.EXTEND, 20, False),
        (20, 24, Phase.EXTEND, 20, True),
        (24, 25, Phase.DECODE, 24, True),
    ]
    assert request.num_prefix_hit_tokens == 0


def test_a_preempted_request_needs_no_replay():
    engine = windowed(chunk=30)
    request, other = engine.add(prompt(101), 9), engine.add(prompt(50, 1), 9)
    for _ in range(6):
        engine.step()
    engine.scheduler._preempt(other)
    engine.finish()
    assert replayed(engine) == 0 and other.num_preemptions == 1
    assert request.output_token_ids == expected(request, 1000)


@pytest.mark.parametrize("style", ["verbatim", "rewritten", "other header"])
@pytest.mark.parametrize("length", [60, 61, 62, 63, 64])
def test_the_next_turn_of_a_conversation_hardly_replays(style, length):
    engine = windowed()
    turn = engine.add(prompt(length), 30)
    engine.finish()
    history = turn.token_ids if style == "verbatim" else prompt(length)
    if style == "other header":
        history = [*history[:-2], 1]
    engine.add([*history, *prompt(20, 1)], 3)
    engine.finish()
    assert replayed(engine) <= 3 * PAGE, "a few pages: 8 tokens of a header, and where pages end"


# Log-probabilities of prompts


def score(batch: Batch) -> dict[Request, list[Logprob]]:
    """What the model says of a batch's rows: the row itself stands for its log-probability."""
    return {
        work.request: [Logprob(work.request.token_ids[row + 1], float(row)) for row in work.logprob_rows]
        for work in batch.scheduled
    }


def add_scored(engine: Engine, tokens: list[int], max_tokens: int, start: int = 0) -> Request:
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=0, logprob_start_len=start)
    request = Request(f"r{next(engine.names)}", tokens, params)
    engine.scheduler.add(request)
    return request


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("rows", [1, 5, 1000])
@pytest.mark.parametrize("seed", range(6))
def test_each_row_of_a_prompt_is_scored_once(
    seed: int, rows: int, in_flight: int, window: ExactWindow | None
) -> None:
    """Short on pages, with common prefixes, chunks, preemptions, and steps that are read late."""
    dice = random.Random(seed)
    more = {"prefix_cache": True, "pages": 8, "max_running": 8, "window": window}
    engine = Engine(**{**limits(dice), **more}, max_logprob_rows=rows)
    requests: list[Request] = []
    flying: list[tuple[Batch, dict[Request, list[Logprob]]]] = []
    while len(requests) < 25 or engine.scheduler.waiting or engine.scheduler.running or flying:
        if len(requests) < 25 and dice.random() < 0.5:
            tokens = prompt(dice.choice([0, 4, 8]), dice.randrange(2))
            tokens += prompt(dice.randrange(1, 9), dice.random())
            if dice.random() < 0.3:
                requests.append(engine.add(tokens, dice.randrange(1, 14)))
            else:
                start = dice.choice([0, 0, 1, dice.randrange(len(tokens))])
                requests.append(add_scored(engine, tokens, dice.choice([0, 1, 14]), start))
        batch = engine.scheduler.schedule()
        engine.scheduler.check_integrity()
        if batch:
            assert sum(len(work.logprob_rows) for work in batch.scheduled) <= rows
            engine.scheduler.launch(batch)
            flying.append((batch, score(batch)))
        while flying and (len(flying) >= in_flight or batch is None):
            oldest, logprobs = flying.pop(0)
            engine.compute(Batch(tuple(w for w in oldest.scheduled if w.request.state is State.RUNNING)))
            # Also of requests that have lost their pages: the model knew the tokens before.
            sampled = (work.request for work in oldest.scheduled if work.samples_token)
            tokens = {request: next_token(request.token_ids) for request in sampled}
            engine.scheduler.commit(oldest, tokens, logprobs)
            engine.scheduler.check_integrity()
    for request in requests:
        assert request.output_token_ids == expected(request, engine.scheduler.limit)
        if request.params.prompt_logprobs is not None:
            first, last = max(request.params.logprob_start_len, 1) - 1, len(request.prompt_token_ids) - 1
            assert [entry.logprob for entry in request.prompt_logprobs] == list(range(first, last))
            assert [entry.token for entry in request.prompt_logprobs] == request.prompt_token_ids[first + 1 :]
    assert engine.manager.stats.in_use == 0


def test_a_scored_prompt_reads_the_prefix_cache_up_to_where_scores_begin() -> None:
    engine = Engine()
    tokens = prompt(4 * PAGE)
    engine.add(tokens, 1)
    engine.finish()
    plain, whole = engine.add(tokens, 1), add_scored(engine, tokens, 1)
    late = add_scored(engine, tokens, 1, 2 * PAGE + 1)
    batch = engine.schedule()
    assert batch
    starts = {work.request: work.start for work in batch.scheduled}
    assert starts == {plain: 3 * PAGE, whole: 0, late: 2 * PAGE}


def test_what_a_scored_prompt_stores_is_shared() -> None:
    engine = Engine()
    add_scored(engine, prompt(4 * PAGE), 0)
    engine.finish()
    later = engine.add(prompt(4 * PAGE), 1)
    engine.finish()
    assert later.num_prefix_hit_tokens == 3 * PAGE


def test_an_answer_of_no_tokens() -> None:
    engine = Engine(max_context=9)
    request = engine.add(prompt(9), 0, stop_ids=frozenset({next_token(prompt(9))}))
    assert engine.finish() == 1
    assert (request.finish_reason, request.output_token_ids) == ("length", [])
    with pytest.raises(PromptTooLong, match=r"has 10 tokens, but"):
        engine.add(prompt(10), 0)

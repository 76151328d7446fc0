"""Slots of recurrent states: who goes on from which, what is kept, and that books and contents agree."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from exact_model import ExactModel, prefix_hashes
from nibble.cache.exact_window import ExactWindow
from nibble.cache.lease import Lease, Place
from nibble.cache.manager import CacheManager
from nibble.cache.states import StateSlots
from nibble.errors import OutOfPages
from state_model import StateModel

SIZE = 4
TEXT = list(range(100, 160))


@dataclass
class Running:
    """A request, and its step in flight."""

    tokens: list[int]
    lease: Lease
    in_flight: int | None = None
    """Where the step in flight ends."""

    @property
    def computed(self) -> int:
        return self.in_flight or self.lease.num_stored_tokens


@dataclass
class Books:
    """A manager with a model of what its slots hold."""

    slots: StateSlots = field(default_factory=lambda: StateSlots(12, 4))
    pages: int = 60
    window: ExactWindow | None = None

    def __post_init__(self) -> None:
        self.manager = CacheManager(self.pages, SIZE, window=self.window, states=self.slots)
        self.model = StateModel()
        self.exact = ExactModel(self.window, SIZE) if self.window else None

    def open(self, tokens: list[int]) -> Running:
        one = Running(list(tokens), self.manager.open(tokens, "", spare_pages=0))
        self.manager.keep_snapshot(one.lease, len(tokens) - 1, Place.PROMPT_END)
        return one

    def launch(self, one: Running, end: int) -> None:
        start, lease = one.computed, one.lease
        assert one.in_flight is None or one.in_flight == start
        stop = self.manager.next_stop(lease)
        end = end if stop is None else min(end, stop)
        self.manager.reserve(lease, end, start=start)
        hashes = prefix_hashes(one.tokens)
        self.model.step(lease, hashes, start, end)
        if self.exact:
            self.exact.compute(lease, hashes, start, end, max(start, lease.replay_until))
        previous, one.in_flight = one.in_flight, end
        if previous is not None:
            self.manager.commit(lease, one.tokens, previous)

    def commit(self, one: Running) -> None:
        if one.in_flight is not None:
            self.manager.commit(one.lease, one.tokens, one.in_flight)
            one.in_flight = None

    def compute(self, one: Running, end: int) -> None:
        while one.computed < end:
            self.launch(one, end)
            self.commit(one)
        self.check()

    def store(self, tokens: list[int]) -> None:
        """A request that comes, is computed and goes."""
        one = self.open(tokens)
        self.compute(one, len(tokens))
        self.manager.release(one.lease)
        self.check()

    def check(self) -> None:
        self.manager.check_integrity()

    def check_snapshots(self, tokens: list[int]) -> int:
        """What is attached along these tokens is after them; returns how many are."""
        pages, hashes = self.manager._radix.match("", tokens, len(tokens)), prefix_hashes(tokens)
        values = [(i, self.snapshots.value_of(page)) for i, page in enumerate(pages)]
        for i, slot in values:
            if slot is not None:
                self.model.check(slot, hashes, (i + 1) * SIZE)
        return sum(slot is not None for _, slot in values)

    @property
    def snapshots(self):
        return self.manager._states.snapshots


def test_the_next_turn_goes_on_where_the_answer_ended():
    books = Books()
    one = books.open(TEXT[:9])
    for end in range(9, 19):
        books.compute(one, 9)
        one.tokens.append(TEXT[len(one.tokens)])
        books.compute(one, end)
    books.manager.release(one.lease)
    books.check()
    # The last page boundary of the answer, and the last one that the prompt leaves behind.
    assert books.check_snapshots(TEXT) == 2
    two = books.open(TEXT[:30])
    assert two.computed == 16
    books.compute(two, 30)


def test_a_prefix_without_states_is_computed_again_and_not_written():
    books = Books()
    books.store(TEXT[:30])
    books.snapshots.clear()
    two = books.open(TEXT[:21])
    assert (two.computed, two.lease.replay_until) == (0, 20)
    books.compute(two, 21)
    # Others may branch there too.
    books.manager.release(two.lease)
    three = books.open([*TEXT[:20], 7, 8])
    assert three.computed == 20
    books.compute(three, 22)


def test_two_go_on_from_one_snapshot():
    books = Books()
    books.store(TEXT[:17])
    ours, theirs = books.open([*TEXT[:16], 1, 2, 3]), books.open([*TEXT[:16], 4, 5, 6])
    assert ours.computed == theirs.computed == 16
    books.launch(ours, 19)
    books.launch(theirs, 19)
    books.commit(theirs)
    books.commit(ours)
    books.check()
    assert books.check_snapshots(TEXT[:16])


WINDOWS = pytest.mark.parametrize("window", [None, ExactWindow(4, 3, 90, 40)], ids=["plain", "windowed"])
"""Snapshots of exact copies are kept where those of states are: one is of no use without the other."""


@WINDOWS
def test_long_prompts_keep_snapshots_on_their_way(window):
    books = Books(StateSlots(12, 4, interval=2), window=window)
    books.store(TEXT[:33])
    assert [books.open([*TEXT[:n], 1]).computed for n in (8, 23, 24)] == [8, 16, 24]


@WINDOWS
def test_where_one_branches_off_all_others_do(window):
    """A system prompt: the second one computes it again for its states, and all that follow find them."""
    books = Books(window=window)
    starts = []
    for number in range(4):
        one = books.open([*TEXT[:20], *range(1000 * number, 1000 * number + 20)])
        starts.append(one.computed)
        books.compute(one, 40)
        books.manager.release(one.lease)
        books.check()
    assert starts == [0, 0, 20, 20]


@WINDOWS
def test_who_waits_for_a_prefix_leaves_no_snapshot_at_each_page(window):
    """Its pages come one after another; only the last boundary is where it branches."""
    books = Books(window=window)
    leader, follower = books.open(TEXT[:33]), books.open([*TEXT[:24], 7, 8])
    books.compute(leader, 4)
    books.snapshots.clear()
    for end in range(8, 32, 4):
        books.compute(leader, end)
        books.manager.advance(follower.lease, follower.tokens)
    kept = [boundary for boundary in follower.lease.state_boundaries if boundary * SIZE <= 24]
    assert kept == [6]


def test_a_lease_is_sure_of_a_slot():
    books = Books(StateSlots(5, 4))
    running = []
    for i in range(4):
        one = books.open([*TEXT[:9], i])
        books.compute(one, 10)
        running.append(one)
    with pytest.raises(OutOfPages, match="slots of states"):
        books.open(TEXT)
    for one in running:
        books.compute(one, 10)
        books.manager.release(one.lease)
    books.check()


def test_a_step_that_was_reserved_and_not_run_leaves_nothing():
    books = Books()
    one = books.open(TEXT[:30])
    books.compute(one, 8)
    books.manager.reserve(one.lease, 12, start=8)
    books.manager.release(one.lease, is_preempted=True)
    books.check()
    # Its slot was after eight tokens, and is kept.
    assert books.check_snapshots(TEXT) == 1
    assert books.open(TEXT[:30]).computed == 8


def test_planted_errors_are_seen():
    books = Books()
    books.store(TEXT[:17])
    books.store([7, *TEXT[:17]])
    right, wrong = (
        books.snapshots.value_of(books.manager._radix.match("", text, 16)[3]) for text in (TEXT, [7, *TEXT])
    )
    books.model.slots[right] = books.model.slots[wrong]
    two = books.open([*TEXT[:16], 1])
    with pytest.raises(AssertionError, match="is not after"):
        books.compute(two, 17)


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_random_steps(seed, windowed):
    rng = random.Random(seed)
    window = ExactWindow(4, 3, 90, 40) if windowed else None
    slots = StateSlots(rng.choice([5, 8, 14]), 4, rng.choice([0, 2, 3]))
    books = Books(slots, rng.choice([24, 60]), window)
    running: list[Running] = []
    hits = 0
    for _ in range(2500):
        action = rng.random()
        if action < 0.15:
            # A few texts, so that prefixes are shared and branch.
            text = [rng.randrange(2) for _ in range(rng.choice([0, 4, 8]))] + TEXT[: rng.randrange(1, 34)]
            tokens = text + [rng.randrange(3) for _ in range(rng.randrange(4))]
            try:
                running.append(books.open(tokens))
            except OutOfPages:
                continue
            hits += running[-1].computed > 0
        elif running and action < 0.8:
            one = rng.choice(running)
            if one.in_flight is not None and rng.random() < 0.4:
                books.commit(one)
            if one.computed >= len(one.tokens):
                one.tokens.append(rng.randrange(3))
            elif one.in_flight is None and rng.random() < 0.2:
                books.manager.advance(one.lease, one.tokens)
            end = min(one.computed + rng.choice([1, 1, 3, 9]), len(one.tokens))
            try:
                if rng.random() < 0.05:
                    books.manager.reserve(one.lease, end, start=one.computed)
                    if rng.random() < 0.5:
                        raise OutOfPages("it gives up its pages for another")
                books.launch(one, end)
            except OutOfPages:
                running.remove(one)
                books.manager.release(one.lease, is_preempted=True)
        elif running and action < 0.97:
            one = running.pop(rng.randrange(len(running)))
            if rng.random() < 0.5:
                books.commit(one)
            books.manager.release(one.lease, is_preempted=rng.random() < 0.3)
        elif action > 0.998:
            books.manager.clear()
        books.check()
        if rng.random() < 0.1:
            for prefix in ([], [0], [1]):
                books.check_snapshots([*prefix, *TEXT])
    assert hits > 5, "nothing was tested"


def test_a_copy_that_no_step_has_made_enters_no_tree() -> None:
    """A step is reserved before the one in front of it is committed, and then not run."""
    manager = CacheManager(20, SIZE, states=StateSlots(12, 4))
    lease = manager.open(TEXT, "")
    manager.keep_snapshot(lease, SIZE, Place.BRANCH)
    manager.reserve(lease, SIZE, start=0)
    manager.reserve(lease, SIZE + 1, start=SIZE)
    assert lease.state_copies
    manager.commit(lease, TEXT, SIZE)
    assert manager.open([*TEXT[:SIZE], 1, 2], "").num_stored_tokens == 0
    manager.reserve(lease, SIZE + 1, start=SIZE)
    lease.state_copies = []  # the step makes them
    manager.commit(lease, TEXT, SIZE + 1)
    assert manager.open([*TEXT[:SIZE], 1, 2], "").num_stored_tokens == SIZE
    manager.check_integrity()

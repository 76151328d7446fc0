"""A machine that does anything with leases that have an exact window, beside a model of pages and exact pages.

The model computes chunks in the order in which they were launched, one or two of them in flight for a lease: it reads
what the lease held then, and knows of each copy whether it is right in all layers. It is told nothing of replays but
where writing begins.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from exact_model import ExactModel, prefix_hashes
from nibble.cache.exact_window import ExactWindow
from nibble.cache.lease import Lease, Place
from nibble.cache.manager import CacheManager
from nibble.errors import OutOfPages

PAGE, DRAFTS = 2, 4
token = st.integers(0, 1)
BASES = ([0] * 16 * PAGE, [0, 1, 0] * 11, [0] * 6 * PAGE + [1] * 10 * PAGE)
prompts = st.builds(  # few beginnings and few tokens, so that prefixes meet often
    lambda base, length, end: base[:length] + end,
    st.sampled_from(BASES),
    st.integers(1, 16 * PAGE),
    st.lists(token, max_size=PAGE),
)
which = st.integers(0, 99)


@dataclass
class Writer:
    """A request: its tokens, its lease, and the ends of its chunks in flight."""

    tokens: list[int]
    lease: Lease
    ends: list[int] = field(default_factory=list)

    @property
    def start(self) -> int:
        """Where its next chunk begins."""
        return self.ends[-1] if self.ends else self.lease.num_stored_tokens


class WindowMachine(RuleBasedStateMachine):
    @initialize(
        pages=st.integers(16, 60),
        window=st.builds(
            ExactWindow,
            st.integers(1, 5),
            st.integers(1, 4),
            st.integers(21, 46),
            st.integers(0, 12),
            st.just(DRAFTS),
            st.integers(0, 3),
        ),
    )
    def start(self, pages: int, window: ExactWindow) -> None:
        self.manager = CacheManager(pages, PAGE, window=window)
        self.exact = ExactModel(window, PAGE)
        self.writers: list[Writer] = []
        self.slots: dict[tuple[int, int], int] = {}

    def pick(self, number: int) -> Writer:
        return self.writers[number % len(self.writers)]

    @rule(tokens=prompts)
    def open(self, tokens: list[int]) -> None:
        lease = self.manager.open(tokens, "")
        assert lease.num_stored_tokens == lease.num_hit_tokens < len(tokens)
        assert lease.num_shared_pages == len(lease.pages) <= (len(tokens) - 1) // PAGE
        window = self.manager.window
        assert window
        lost = lease.num_shared_pages * PAGE - lease.num_stored_tokens
        reach = window.num_copies(PAGE) * PAGE + (window.num_layers - 1) * window.tokens + PAGE - 1
        # Where a sink is missing, all that follows is computed again.
        sinks = window.num_sinks * PAGE
        restarts = lease.num_stored_tokens < sinks
        assert 0 <= lost <= reach + sinks or restarts, "more is computed again than the window reaches"
        self.writers.append(Writer(list(tokens), lease))

    @precondition(lambda self: self.writers)
    @rule(number=which, count=st.integers(1, 9 * PAGE))
    def launch(self, number: int, count: int) -> None:
        """A chunk, computed at once, that is committed later."""
        writer = self.pick(number)
        lease, start = writer.lease, writer.start
        end = min(start + count, len(writer.tokens))
        if end <= start or len(writer.ends) == 2:
            return
        before, held = self.manager.stats, (list(lease.pages), dict(lease.exact_pages))
        try:
            self.manager.reserve(lease, end)
        except OutOfPages:
            assert self.manager.stats == before and (lease.pages, lease.exact_pages) == held
            assert len(self.writers) > 1 or self.manager.pages_for(end) > before.total
            return
        assert all(lease.exact_pages[i] == page for i, page in held[1].items()), "a copy has moved"
        write_from, hashes = max(start, lease.replay_until), prefix_hashes(writer.tokens)
        self.exact.compute(lease, hashes, start, end, write_from)
        for i in range(write_from, end):
            page = lease.pages[i // PAGE]
            others = (other.lease for other in self.writers if other is not writer)
            assert not any(page in other.pages for other in others), "two writers"
            self.slots[page, i % PAGE] = hashes[i]
        writer.ends.append(end)

    @precondition(lambda self: self.writers)
    @rule(number=which)
    def commit(self, number: int) -> None:
        writer = self.pick(number)
        if writer.ends:
            self.manager.commit(writer.lease, writer.tokens, writer.ends.pop(0))

    @precondition(lambda self: self.writers)
    @rule(number=which, tokens=st.lists(token, min_size=1, max_size=PAGE))
    def extend(self, number: int, tokens: list[int]) -> None:
        writer = self.pick(number)
        if writer.start == len(writer.tokens):
            writer.tokens += tokens

    @precondition(lambda self: self.writers)
    @rule(number=which, drafts=st.lists(token, min_size=1, max_size=DRAFTS), accepted=st.integers(0, DRAFTS))
    def draft(self, number: int, drafts: list[int], accepted: int) -> None:
        """A token that is certain and some that are guessed, of which the first ones stay."""
        writer = self.pick(number)
        lease, start, known = writer.lease, writer.start, list(writer.tokens)
        if writer.ends or not lease.replay_until <= start == len(known) - 1:
            return
        writer.tokens = known + drafts
        try:
            self.manager.reserve(lease, len(writer.tokens), len(drafts))
        except OutOfPages:
            writer.tokens = known
            return
        hashes = prefix_hashes(writer.tokens)
        self.exact.compute(lease, hashes, start, len(writer.tokens), start)
        for i in range(start, len(writer.tokens)):
            self.slots[lease.pages[i // PAGE], i % PAGE] = hashes[i]
        writer.tokens = writer.tokens[: len(known) + accepted]
        self.manager.commit(lease, writer.tokens, len(writer.tokens))

    @precondition(lambda self: self.writers)
    @rule(number=which)
    def compute(self, number: int) -> None:
        """Stores all that is known, as one prefill."""
        writer = self.pick(number)
        while writer.ends:
            self.commit(number)
        self.launch(number, len(writer.tokens))
        self.commit(number)

    @rule(tokens=prompts)
    def serve(self, tokens: list[int]) -> None:
        """A request that comes, is computed and goes."""
        self.open(tokens)
        self.compute(len(self.writers) - 1)
        self.release(len(self.writers) - 1, False)

    @precondition(lambda self: self.writers)
    @rule(number=which, tokens=st.integers(0, 20 * PAGE), place=st.sampled_from(Place))
    def keep_snapshot(self, number: int, tokens: int, place: Place) -> None:
        self.manager.keep_snapshot(self.pick(number).lease, tokens, place)

    @precondition(lambda self: self.writers)
    @rule(number=which)
    def advance(self, number: int) -> None:
        writer = self.pick(number)
        lease = writer.lease
        before, held = lease.num_stored_tokens, dict(lease.exact_pages)
        gained = self.manager.advance(lease, writer.tokens)
        assert lease.num_stored_tokens == before + gained and gained >= 0
        assert not writer.ends or (gained == 0 and lease.exact_pages == held), "a step in flight reads these"

    @precondition(lambda self: self.writers)
    @rule(number=which, is_preempted=st.booleans())
    def release(self, number: int, is_preempted: bool) -> None:
        writer = self.pick(number)
        self.writers.remove(writer)
        self.manager.release(writer.lease, is_preempted)
        assert not writer.lease.exact_pages

    @precondition(lambda self: len(self.writers) > 3)
    @rule()
    def release_oldest(self) -> None:
        self.release(0, True)

    @rule(chance=st.integers(0, 99))
    def clear(self, chance: int) -> None:
        if chance == 50:
            self.manager.clear()
            assert self.manager.stats.window.attached == 0

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        stats = self.manager.stats.window
        assert stats and stats.free + stats.idle + stats.in_use == stats.total
        held = {page for writer in self.writers for page in writer.lease.exact_pages.values()}
        assert stats.in_use == len(held), "exact pages leak, or are free while in use"
        for writer in self.writers:
            lease, hashes = writer.lease, prefix_hashes(writer.tokens)
            for i in range(max(lease.num_stored_tokens, lease.num_shared_pages * PAGE)):
                assert self.slots[lease.pages[i // PAGE], i % PAGE] == hashes[i], f"token {i} was lost"
            for i in range(min(self.manager.window.num_sinks, lease.num_stored_tokens // PAGE)):
                for p in range(i * PAGE, i * PAGE + PAGE):
                    assert self.exact.read(lease, hashes, p) == self.manager.window.num_layers, "a wrong sink"
            for i, page in lease.exact_pages.items():
                for p in range(i * PAGE, min(i * PAGE + PAGE, lease.num_stored_tokens)):
                    assert self.exact.cells[page, p % PAGE][0] == hashes[p], f"no copy of token {p}"
            shared = lease.pages[: lease.num_shared_pages]
            self.exact.check_snapshot(lease, hashes, [self.manager.snapshot_of(page) for page in shared])

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        while self.writers:
            self.release(0, False)
        self.manager.clear()
        self.manager.check_integrity()
        stats = self.manager.stats
        assert stats.window and (stats.free, stats.window.free) == (stats.total, stats.window.total)


class TestWindowMachine(WindowMachine.TestCase):  # more than 10,000 steps, the same in every run
    settings = settings(
        max_examples=250,
        stateful_step_count=50,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )

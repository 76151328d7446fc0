"""A machine that does anything with leases over a host tier, beside a model of what every frame and the host hold.

The model knows nothing of needs or free lists: it does the copies that it is told to do, in the order in which it is
told, and then looks whether every token of every lease can be read, from the device where it must be there.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nibble.cache.exact_window import ExactWindow
from nibble.cache.lease import Lease
from nibble.cache.manager import CacheManager
from nibble.cache.residency import NOT_RESIDENT, Residency
from nibble.errors import OutOfFrames, OutOfPages

PAGE, HOT = 2, 2
Content = tuple[int, ...]
which = st.integers(0, 99)
BASES = ([0] * 12, [0, 1] * 6, [1] * 12)
prompts = st.builds(
    lambda base, length, end: base[:length] + end,
    st.sampled_from(BASES),
    st.integers(1, 12),
    st.lists(st.integers(0, 1), max_size=PAGE),
)


class Writer:
    def __init__(self, tokens: list[int], lease: Lease) -> None:
        self.tokens, self.lease = tokens, lease


class ResidencyMachine(RuleBasedStateMachine):
    @initialize(
        pages=st.integers(8, 30),
        frames=st.integers(6, 14),
        window=st.sampled_from([None, None, ExactWindow(3, 2, 24, 6)]),
    )
    def start(self, pages: int, frames: int, window: ExactWindow | None) -> None:
        self.residency = Residency(pages, frames, HOT)
        self.manager = CacheManager(pages, PAGE, residency=self.residency, window=window)
        self.writers: list[Writer] = []
        self.device: dict[tuple[int, int], Content] = {}
        self.host: dict[tuple[int, int], Content] = {}
        self.places: dict[int, int] = {}

    def pick(self, number: int) -> Writer:
        return self.writers[number % len(self.writers)]

    def settle(self) -> None:
        """What a step does first."""
        moves = self.residency.take_moves()
        for copies in (moves.saves, moves.loads):  # each are done at once
            assert len({frame for _, frame in copies}) == len(copies) == len(dict(copies))
        self.save(moves.saves)
        loaded = [(frame, i, self.host.get((page, i))) for page, frame in moves.loads for i in range(PAGE)]
        for frame, i, content in loaded:
            assert content is not None, "a page was loaded that the host does not hold"
            self.device[frame, i] = content
        self.residency.mark_saves_launched()
        for page, frame in moves.places:
            self.places[page] = frame
        self.residency.mark_applied()

    def save(self, copies) -> None:
        for page, frame in copies:
            for i in range(PAGE):
                self.host.pop((page, i), None)
                if (frame, i) in self.device:
                    self.host[page, i] = self.device[frame, i]

    @rule(tokens=prompts)
    def open(self, tokens: list[int]) -> None:
        before = self.manager.stats
        try:
            lease = self.manager.open(tokens, "")
        except OutOfFrames:
            assert self.manager.stats == before
            return
        self.writers.append(Writer(list(tokens), lease))

    @precondition(lambda self: self.writers)
    @rule(number=which)
    def compute(self, number: int) -> None:
        """A step that stores all of a request's tokens; of one with a hot buffer, the next."""
        writer = self.pick(number)
        lease, upto = writer.lease, len(writer.tokens)
        if lease.hot_frames:
            upto = min(upto, lease.num_stored_tokens + 1)
        before = self.manager.stats
        try:
            self.manager.reserve(lease, upto)
        except OutOfPages:
            assert self.manager.stats == before
            return
        self.settle()
        for i in range(max(lease.num_stored_tokens, lease.replay_until), upto):
            frame = self.places[lease.pages[i // PAGE]]
            assert frame != NOT_RESIDENT, "a page is written that is not on the device"
            self.device[frame, i % PAGE] = tuple(writer.tokens[: i + 1])
        self.manager.commit(lease, writer.tokens, upto)

    @precondition(lambda self: self.writers)
    @rule(number=which, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=3 * PAGE))
    def extend(self, number: int, tokens: list[int]) -> None:
        writer = self.pick(number)
        if writer.lease.num_stored_tokens == len(writer.tokens):
            writer.tokens += tokens[:1] if writer.lease.hot_frames else tokens

    @precondition(lambda self: self.writers)
    @rule(number=which, others=st.integers(0, 3))
    def spill(self, number: int, others: int) -> None:
        """Of some leases that decode, in some order."""
        some = [self.pick(i) for i in range(number, number + others + 1)]
        leases = list(dict.fromkeys(w.lease for w in some if w.lease.num_stored_tokens == len(w.tokens)))
        before, cold = self.residency.num_available, [lease for lease in leases if not lease.hot_frames]
        if self.manager.offload(leases):
            assert self.residency.num_available > before
            assert any(len(lease.hot_frames) == HOT for lease in cold)
        else:
            assert not any(lease.hot_frames for lease in cold) and self.residency.num_available == before

    @precondition(lambda self: self.writers)
    @rule()
    def a_step_that_breaks_off(self) -> None:
        """After its saves, and before the device was told of all."""
        moves = self.residency.take_moves()
        self.save(moves.saves)
        self.residency.mark_saves_launched()

    @precondition(lambda self: self.writers)
    @rule(number=which)
    def backup(self, number: int) -> None:
        """What happens beside a step: full pages are saved early."""
        self.settle()
        lease = self.pick(number).lease
        copies = self.residency.unsaved(lease.pages[: lease.num_stored_tokens // PAGE])
        self.save(copies)
        self.residency.mark_saved(copies)

    @precondition(lambda self: self.writers)
    @rule(number=which)
    def advance(self, number: int) -> None:
        writer = self.pick(number)
        self.manager.advance(writer.lease, writer.tokens)

    @precondition(lambda self: self.writers)
    @rule(number=which)
    def release(self, number: int) -> None:
        writer = self.pick(number)
        self.writers.remove(writer)
        self.manager.release(writer.lease)

    @rule(chance=st.integers(0, 30))
    def clear(self, chance: int) -> None:
        if chance == 0:
            self.manager.clear()

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check_integrity()

    @rule()
    def all_can_be_read(self) -> None:
        """Not after every rule: what several do is told to the device together."""
        self.settle()
        for page, frame in self.places.items():
            assert self.residency._frame[page] == frame, "the device was told something else"
        for writer in self.writers:
            lease = writer.lease
            for i in range(lease.num_stored_tokens):
                page, wanted = lease.pages[i // PAGE], tuple(writer.tokens[: i + 1])
                frame = self.places.get(page, NOT_RESIDENT)
                assert frame != NOT_RESIDENT or page not in lease.resident_pages
                found = (
                    self.host.get((page, i % PAGE)) if frame == NOT_RESIDENT else self.device[frame, i % PAGE]
                )
                assert found == wanted, f"token {i} was lost"

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.all_can_be_read()
        while self.writers:
            self.release(0)
        self.manager.clear()
        self.manager.check_integrity()
        assert self.residency.stats.free == self.residency.num_frames


class TestResidencyMachine(ResidencyMachine.TestCase):
    settings = settings(
        max_examples=250,
        stateful_step_count=50,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )

"""Exact pages of leases: which are held when, where a prefix is continued, and what is replayed."""

from __future__ import annotations

import pytest

from exact_model import ExactModel, prefix_hashes
from nibble.cache.exact_window import ExactWindow
from nibble.cache.lease import Lease, Place
from nibble.cache.manager import CacheManager
from nibble.errors import OutOfPages

SIZE = 4
TEXT = list(range(100, 160))


class Books:
    """A manager with a model of what its exact pages hold."""

    def __init__(
        self,
        tokens: int = 4,
        layers: int = 3,
        *,
        exact: int = 60,
        idle: int = 40,
        pages: int = 60,
        sinks: int = 0,
    ) -> None:
        self.window = ExactWindow(tokens, layers, exact, idle, num_sinks=sinks)
        self.manager = CacheManager(pages, SIZE, window=self.window)
        self.model = ExactModel(self.window, SIZE)

    def open(self, tokens: list[int]) -> Lease:
        return self.manager.open(tokens, "")

    def compute(self, lease: Lease, tokens: list[int], *ends: int) -> None:
        """Chunks that end there."""
        for end in ends or (len(tokens),):
            self.manager.reserve(lease, end)
            start, write_from = lease.num_stored_tokens, max(lease.num_stored_tokens, lease.replay_until)
            self.model.compute(lease, prefix_hashes(tokens), start, end, write_from)
            self.manager.commit(lease, tokens, end)
            self.check(lease, tokens)

    def check(self, lease: Lease, tokens: list[int]) -> None:
        self.manager.check_integrity()
        shared = lease.pages[: lease.num_shared_pages]
        values = [self.manager.snapshot_of(page) for page in shared]
        self.model.check_snapshot(lease, prefix_hashes(tokens), values)

    @property
    def snapshots(self):
        return self.manager._window.snapshots

    def store(self, tokens: list[int]) -> None:
        """A request that comes, is computed and goes."""
        lease = self.open(tokens)
        self.compute(lease, tokens)
        self.manager.release(lease)
        self.manager.check_integrity()

    def attached(self, tokens: list[int]) -> list[int]:
        """Places of pages in the tree that have an exact copy."""
        pages = self.manager._radix.match("", tokens, len(tokens))
        return [i for i, page in enumerate(pages) if self.manager.snapshot_of(page) is not None]


@pytest.mark.parametrize(
    ("tokens", "page", "copies"), [(64, 64, 1), (65, 64, 2), (96, 64, 2), (1, 64, 1), (64, 16, 4)]
)
def test_a_snapshot_has_the_pages_that_the_window_reaches(tokens, page, copies):
    assert ExactWindow(tokens, 1, 99, 0).num_copies(page) == copies


@pytest.mark.parametrize(
    ("window", "layers", "boundary", "start"),
    [
        (64, 32, 40, 40 * 64 - 64 * 32),
        (64, 32, 10, 0),
        (96, 2, 10, 384),
        (64, 1, 5, 256),
        (128, 32, 100, 2304),
    ],
)
def test_a_replay_begins_as_late_as_its_snapshot_allows(window, layers, boundary, start):
    assert ExactWindow(window, layers, 99, 0).replay_start(boundary, 64) == start


def test_without_a_window_nothing_is_held():
    books = CacheManager(20, SIZE)
    lease = books.open(TEXT, "")
    books.reserve(lease, 30)
    books.commit(lease, TEXT, 30)
    books.keep_snapshot(lease, 50, Place.BRANCH)
    assert not lease.exact_pages and not lease.snapshot_boundaries and books.stats.window is None


@pytest.mark.parametrize(("window", "copies"), [(1, 1), (4, 1), (5, 2), (9, 3)])
@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 50])
def test_a_lease_holds_the_copies_before_its_last_boundary_and_what_it_writes(window, copies, chunk):
    books = Books(window)
    lease = books.open(TEXT)
    for end in [*range(chunk, len(TEXT), chunk), len(TEXT)]:
        books.compute(lease, TEXT, end)
        assert sorted(lease.exact_pages) == list(range(max(end // SIZE - copies, 0), -(-end // SIZE)))


def test_a_chunk_keeps_no_copies_before_its_window():
    books = Books()
    lease = books.open(TEXT)
    books.manager.reserve(lease, 42)
    assert sorted(lease.exact_pages) == [9, 10] and books.manager.stats.window.in_use == 2


def test_copies_stay_until_the_chunk_after_them_is_committed():
    books = Books()
    lease = books.open(TEXT)
    books.compute(lease, TEXT, 8)
    books.manager.reserve(lease, 16)  # in flight
    books.manager.reserve(lease, 24)  # launched before that is read
    assert sorted(lease.exact_pages) == [1, 3, 5]
    books.manager.commit(lease, TEXT, 16)
    assert sorted(lease.exact_pages) == [3, 5], "the second reads the end of the first"
    books.manager.commit(lease, TEXT, 24)
    assert sorted(lease.exact_pages) == [5]


def test_no_exact_pages_change_nothing():
    books = Books(exact=6, idle=0)
    one, two = books.open(TEXT), books.open(TEXT[::-1])
    books.compute(one, TEXT, 9)
    books.compute(two, TEXT[::-1], 9)
    books.manager.reserve(one, 13)
    books.manager.reserve(two, 13)
    before, held = books.manager.stats, (dict(two.exact_pages), list(two.pages))
    with pytest.raises(OutOfPages, match="1 more exact pages are needed, 0 of 6 can be had"):
        books.manager.reserve(two, 17)
    assert books.manager.stats == before and (two.exact_pages, two.pages) == held


def test_a_lease_starts_only_where_exact_pages_are_left():
    books = Books(exact=6)
    books.open(TEXT)
    books.manager.open(TEXT, "", spare_pages=0)
    with pytest.raises(OutOfPages, match="9 exact pages are needed, there are 6"):
        books.manager.open(TEXT, "", spare_pages=0)


def test_a_prefix_goes_on_at_its_snapshot():
    books = Books()
    books.store(TEXT[:41])
    assert books.attached(TEXT) == [9]
    lease = books.open(TEXT)
    assert (lease.num_stored_tokens, lease.num_hit_tokens, sorted(lease.exact_pages)) == (40, 40, [9])
    books.compute(lease, TEXT)
    stats = books.manager.stats.window
    assert (stats.snapshot_hits, stats.snapshot_misses, stats.replayed_tokens) == (1, 0, 0)


def test_a_prefix_without_a_snapshot_is_replayed_and_gets_one():
    books = Books()  # 3 layers of 4 tokens: 12 tokens before the end
    books.store(TEXT[:41])
    fork = [*TEXT[:30], 1, 2, 3, 4, 5, 6]
    lease = books.open(fork)
    assert (lease.num_shared_pages, lease.num_stored_tokens, lease.replay_until) == (7, 16, 28)
    assert lease.num_hit_tokens == books.manager.stats.hit_tokens == 16
    books.compute(lease, fork)
    assert books.attached(fork)[:1] == [6] and books.manager.stats.window.replayed_tokens == 12
    other = books.open([*TEXT[:30], 9, 9, 9])
    assert (other.num_stored_tokens, other.num_hit_tokens) == (28, 28)
    books.compute(other, [*TEXT[:30], 9, 9, 9])


@pytest.mark.parametrize("ends", [(17, 23, 28, 36), (28, 36), (27, 29, 36), (36,), tuple(range(17, 37))])
def test_a_replay_may_be_cut_and_may_run_past_its_end(ends):
    books = Books()
    books.store(TEXT[:41])
    fork = [*TEXT[:30], 1, 2, 3, 4, 5, 6]
    lease = books.open(fork)
    books.compute(lease, fork, *ends)
    assert books.attached(fork)[:1] == [6]


def test_a_replay_begins_at_a_snapshot_where_there_is_one_after_its_start():
    books = Books()
    books.store(TEXT[:41])
    books.store([*TEXT[:22], 1, 2, 3])  # a replay up to page 5
    assert 4 in books.attached(TEXT)
    lease = books.open([*TEXT[:30], 7])
    assert (lease.num_stored_tokens, sorted(lease.exact_pages), lease.clean_from) == (20, [4], 0)
    books.compute(lease, [*TEXT[:30], 7])


def test_what_a_replay_computes_first_is_never_attached():
    books = Books(layers=4)
    books.store(TEXT[:57])
    fork = [*TEXT[:50], 7]
    lease = books.open(fork)
    assert lease.num_stored_tokens == 32
    books.compute(lease, fork, 40)  # right in the lower layers alone
    books.manager.release(lease)
    assert books.attached(TEXT) == [13]


@pytest.mark.parametrize("end", [33, 40, 45, 48, 51])
def test_a_replay_may_end_anywhere(end):
    books = Books(layers=4)
    books.store(TEXT[:57])
    fork = [*TEXT[:50], 7]
    lease = books.open(fork)
    books.compute(lease, fork, end)
    books.manager.release(lease)
    books.manager.check_integrity()
    assert (11 in books.attached(TEXT)) is (end >= 48)
    again = books.open(fork)
    assert again.num_stored_tokens == (48 if end >= 48 else 32)
    books.compute(again, fork)


def test_a_window_that_is_no_multiple_of_a_page_gives_whole_pages():
    """Of the first page of a snapshot its window covers a part, but another snapshot reads all of it."""
    books = Books(tokens=6, layers=2)
    books.store(TEXT[:57])
    lease = books.open([*TEXT[:46], 7])
    books.compute(lease, [*TEXT[:46], 7])
    assert books.attached(TEXT)[:2] == [9, 10]


def test_advance_takes_a_snapshot_that_exists_by_now():
    books = Books()
    books.store(TEXT[:41])
    prompts = [[*TEXT[:30], 1, 2], [*TEXT[:30], 3, 4]]
    first, second = map(books.open, prompts)
    assert first.num_stored_tokens == second.num_stored_tokens == 16
    assert books.manager.replay_target(first) == books.manager.replay_target(second) == first.pages[6]
    books.compute(first, prompts[0])
    assert books.manager.advance(second, prompts[1]) == 12
    assert (second.num_stored_tokens, second.num_hit_tokens, second.is_replaying) == (28, 28, False)
    books.compute(second, prompts[1])
    stats = books.manager.stats.window
    assert (stats.replayed_tokens, stats.snapshot_hits, stats.snapshot_misses) == (12, 1, 1)


def test_advance_leaves_what_is_in_flight():
    books = Books()
    books.store(TEXT[:41])
    prompts = [[*TEXT[:30], 1, 2], [*TEXT[:30], 3, 4]]
    first, second = map(books.open, prompts)
    books.manager.reserve(second, 20)
    held = dict(second.exact_pages)
    books.compute(first, prompts[0])
    assert books.manager.advance(second, prompts[1]) == 0 and second.exact_pages == held
    books.manager.commit(second, prompts[1], 20)
    assert books.manager.advance(second, prompts[1]) == 8, "between two chunks of its replay"
    books.compute(second, prompts[1])


def test_a_branch_that_is_known_needs_no_replay():
    books = Books()
    lease = books.open(TEXT)
    books.compute(lease, TEXT, 9)
    books.manager.keep_snapshot(lease, 30, Place.BRANCH)
    books.compute(lease, TEXT, 26, 60)
    assert books.attached(TEXT) == [6]
    books.manager.keep_snapshot(lease, 20, Place.BRANCH)
    assert not lease.snapshot_boundaries, "that is passed"


def test_a_branch_that_a_step_in_flight_passes_is_let_go():
    books = Books()
    lease = books.open(TEXT)
    books.manager.reserve(lease, 40)
    books.manager.keep_snapshot(lease, 30, Place.BRANCH)
    assert not lease.snapshot_boundaries
    books.manager.keep_snapshot(lease, 41, Place.BRANCH)
    assert lease.snapshot_boundaries


def test_snapshots_leave_a_lease_room_to_go_on():
    books = Books(exact=7, idle=0)
    lease = books.open(TEXT)
    for boundary in range(1, 15):
        books.manager.keep_snapshot(lease, boundary * SIZE, Place.BRANCH)
    books.compute(lease, TEXT, 30, 59)


def test_without_room_for_idle_ones_all_is_replayed():
    books = Books(idle=0)
    books.store(TEXT[:41])
    assert books.open(TEXT).num_stored_tokens == 28


def test_a_page_that_leaves_the_tree_takes_its_snapshot_along():
    books = Books(pages=16)
    books.store(TEXT[:41])
    lease = books.open([1] * 60)
    books.compute(lease, [1] * 60)
    assert books.attached(TEXT) == []
    assert books.manager.stats.window.idle == 0


def test_clear_during_a_replay_leaves_it_right():
    books = Books()
    books.store(TEXT[:41])
    fork = [*TEXT[:30], 1, 2, 3, 4, 5, 6]
    leases = [books.open(fork), books.open(fork)]
    books.compute(leases[0], fork, 20)
    books.manager.clear()
    books.compute(leases[0], fork)
    assert leases[1].replay_until == 28 and books.manager.advance(leases[1], fork) == 0
    books.compute(leases[1], fork)
    for lease in leases:
        books.manager.release(lease)
    books.manager.check_integrity()
    stats = books.manager.stats
    assert (stats.free, stats.window.free) == (60, 60)


def test_a_preempted_request_goes_on_where_it_was():
    books = Books()
    lease = books.open(TEXT)
    books.compute(lease, TEXT, 41)
    books.manager.release(lease, is_preempted=True)
    again = books.open(TEXT)
    assert again.num_stored_tokens == 40
    books.manager.release(again, is_preempted=True)
    assert books.open(TEXT).num_stored_tokens == 40, "it may be preempted again, with nothing computed"


def test_the_next_turn_uses_up_the_snapshots_of_the_one_before():
    books = Books(idle=2, layers=9)
    lease = books.open(TEXT)
    books.manager.keep_snapshot(lease, 20, Place.PROMPT_END)
    books.compute(lease, TEXT, 41)
    books.manager.release(lease)
    assert books.attached(TEXT) == [4, 9]
    turn = books.open(TEXT)
    assert (turn.num_stored_tokens, turn.resumed_place) == (40, Place.ANSWER_END)
    books.manager.keep_snapshot(turn, 48, Place.PROMPT_END)
    books.compute(turn, TEXT)
    books.manager.release(turn)
    assert books.attached(TEXT)[-1] == 14, "the new end outlives what was used and what will not be"
    books.store([1] * 9)
    assert books.attached(TEXT) == [14]


def test_a_namespace_and_private_leases_have_windows_and_no_snapshots():
    books = Books()
    lease = books.manager.open(TEXT, "", private=True)
    books.compute(lease, TEXT)
    assert sorted(lease.exact_pages) == [14]
    books.manager.release(lease)
    assert books.manager.stats.window.free == 60


# Faults that the model of exact pages must catch


def test_the_model_catches_a_snapshot_of_the_neighbouring_node():
    books = Books()
    lease = books.open(TEXT)
    books.compute(lease, TEXT, 41)
    books.snapshots.attach(lease.pages[8], lease.exact_pages[9])
    other = books.open([*TEXT[:36], 1, 2])
    assert other.num_stored_tokens == 36
    with pytest.raises(AssertionError, match="reads a wrong exact copy"):
        books.compute(other, [*TEXT[:36], 1, 2])


def test_the_model_catches_a_stale_copy():
    books = Books()
    lease = books.open(TEXT)
    books.compute(lease, TEXT, 9)
    books.model.cells.pop((lease.exact_pages[1], 3))
    with pytest.raises(AssertionError, match="right in 1 layers"):
        books.compute(lease, TEXT, 10)


@pytest.mark.parametrize(
    ("fact", "wrong"),
    [
        ("num_copies", lambda self, page_size: -(-self.tokens // page_size) - 1),
        ("clean_from", lambda self, start: start),
        ("replay_start", lambda self, boundary, page_size: (boundary - 2) * page_size),
    ],
)
def test_the_model_catches_arithmetic_that_is_off(monkeypatch, fact, wrong):
    monkeypatch.setattr(ExactWindow, fact, wrong)
    books = Books(tokens=8, layers=3)
    with pytest.raises(AssertionError):
        books.store(TEXT[:57])
        for length in (50, 44, 46):
            fork = [*TEXT[:length], 7]
            lease = books.open(fork)
            books.compute(
                lease, fork, *(end for end in (36, 41) if end > lease.num_stored_tokens), length + 1
            )
            books.manager.release(lease)


# ---- first pages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 50])
def test_sinks_stay_until_the_lease_is_closed(chunk):
    books = Books(sinks=2)
    lease = books.open(TEXT)
    for end in [*range(chunk, len(TEXT), chunk), len(TEXT)]:
        books.compute(lease, TEXT, end)
        last = range(max(end // SIZE - 1, 0), -(-end // SIZE))
        assert sorted(lease.exact_pages) == sorted({*range(min(2, -(-end // SIZE))), *last})
    assert books.attached(TEXT)[:2] == [0, 1]
    books.manager.release(lease)
    assert books.manager.stats.window.in_use == 0 and books.attached(TEXT)[:2] == [0, 1]


def test_requests_that_begin_alike_share_sinks():
    books = Books(sinks=2)
    books.store(TEXT)
    one, two = books.open(TEXT), books.open([*TEXT[:40], 7, 8, 9, 10])
    assert [one.exact_pages[i] for i in (0, 1)] == [two.exact_pages[i] for i in (0, 1)]
    books.compute(two, [*TEXT[:40], 7, 8, 9, 10])
    assert [one.exact_pages[i] for i in (0, 1)] == [two.exact_pages[i] for i in (0, 1)]


def test_without_its_sinks_a_prefix_is_computed_again_from_the_first_that_is_missing():
    books = Books(sinks=2)
    books.store(TEXT)
    books.snapshots.drop(books.manager._radix.match("", TEXT, 8)[1])
    lease = books.open(TEXT)
    assert (lease.num_stored_tokens, lease.clean_from) == (SIZE, 0), (
        "the first page has its copy, and is the window"
    )
    books.compute(lease, TEXT)
    assert books.attached(TEXT)[:2] == [0, 1]


@pytest.mark.parametrize(("sinks", "attached", "start"), [(0, 0, 16), (4, 4, 16), (5, 2, 8), (5, 0, 0)])
def test_no_replay_begins_among_sinks(sinks, attached, start):
    books = Books(layers=2, sinks=sinks)
    books.store(TEXT[:25])
    for node in books.manager._radix.match("", TEXT, 24)[attached:]:
        books.snapshots.drop(node)
    lease = books.open(TEXT)
    assert lease.num_stored_tokens == start
    books.compute(lease, TEXT)


def test_sinks_are_evicted_after_what_goes_on_from_them():
    books = Books(sinks=2, idle=3)
    books.store(TEXT)
    assert books.attached(TEXT)[:2] == [0, 1] and len(books.attached(TEXT)) == 3

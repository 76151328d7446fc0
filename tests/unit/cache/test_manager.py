"""Leases: what they share, what they may write, and that nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from nibble.cache.lease import Lease
from nibble.cache.manager import CacheManager
from nibble.errors import OutOfPages

SIZE = 4
PROMPT = list(range(100, 111))  # two full pages and three tokens


def manager(total: int = 8, prefix_cache: bool = True) -> CacheManager:
    return CacheManager(total, SIZE, prefix_cache)


def store(books: CacheManager, tokens: list[int], namespace: str = "") -> Lease:
    """A lease that has computed all of `tokens`."""
    lease = books.open(tokens, namespace)
    books.reserve(lease, len(tokens))
    books.commit(lease, tokens, len(tokens))
    books.check_integrity()
    return lease


def test_the_second_of_two_equal_prompts_shares_full_pages():
    books = manager()
    first, second = store(books, PROMPT), books.open(PROMPT, "")
    assert second.pages == first.pages[:2]
    assert (second.num_stored_tokens, second.num_hit_tokens) == (8, 8)
    books.reserve(second, len(PROMPT))
    assert second.pages[2] != first.pages[2], "a page that is not full has one owner"
    books.check_integrity()


@pytest.mark.parametrize(("length", "hit"), [(4, 0), (5, 4), (8, 4), (9, 8)])
def test_the_last_token_is_always_computed(length, hit):
    books = manager()
    store(books, PROMPT)
    assert books.open(PROMPT[:length], "").num_stored_tokens == hit


def test_pages_outlive_the_request_that_wrote_them():
    books = manager()
    lease = store(books, PROMPT)
    pages = lease.pages[:2]
    books.release(lease)
    books.check_integrity()
    assert (books.stats.free, books.stats.idle, books.stats.in_use) == (6, 2, 0)
    assert books.open([*PROMPT[:8], 7], "").pages == pages


def test_answers_are_cached_too():
    books = manager()
    lease = books.open(PROMPT, "")
    tokens = list(PROMPT)
    for upto in range(1, 21):
        tokens += [200 + upto] * (upto > len(tokens))
        books.reserve(lease, upto)
        books.commit(lease, tokens, upto)
        books.check_integrity()
        assert lease.num_shared_pages == upto // SIZE
    assert books.open([*tokens, 0], "").num_stored_tokens == 20


def test_namespaces_never_share():
    books = manager()
    store(books, PROMPT, "bf16")
    assert books.open(PROMPT, "nvfp4").num_stored_tokens == 0


def test_without_prefix_cache_nothing_is_shared():
    books = manager(prefix_cache=False)
    books.release(store(books, PROMPT))
    assert books.stats.free == books.stats.total
    assert books.open(PROMPT, "").num_stored_tokens == 0


def test_two_that_compute_the_same_keep_their_own_copies():
    books = manager()
    one, two = books.open(PROMPT, ""), books.open(PROMPT, "")
    for lease in (one, two):
        books.reserve(lease, len(PROMPT))
        books.commit(lease, PROMPT, len(PROMPT))
        books.check_integrity()
    assert not set(one.pages) & set(two.pages)
    assert (one.num_shared_pages, two.num_shared_pages) == (2, 0)
    books.release(one)
    books.check_integrity()
    assert books.num_available_pages == 5, "what `two` holds, no page of `one` is needed for"
    books.release(two)
    books.check_integrity()
    assert books.num_available_pages == 8


def test_advance_takes_over_what_another_has_stored_since():
    books = manager()
    late = books.open(PROMPT, "")
    first = store(books, PROMPT)
    assert books.advance(late, PROMPT) == 8
    assert late.pages == first.pages[:2] and late.num_stored_tokens == late.num_hit_tokens == 8
    assert books.advance(late, PROMPT) == 0
    books.check_integrity()


def test_advance_never_joins_below_a_page_of_its_own():
    books = manager()
    late = books.open(PROMPT, "")
    books.reserve(late, 4)
    books.commit(late, PROMPT, 2)
    store(books, PROMPT)
    assert books.advance(late, PROMPT) == 0
    books.commit(late, PROMPT, 4)
    assert not late.is_sharing
    assert books.advance(late, PROMPT) == 0
    books.check_integrity()


def test_advance_leaves_reserved_pages_where_they_are():
    books = manager()
    late = books.open(PROMPT, "")
    books.reserve(late, 4)
    store(books, PROMPT)
    assert books.advance(late, PROMPT) == 0
    books.commit(late, PROMPT, 4)
    books.check_integrity()


def test_next_page_is_equal_for_those_who_compute_the_same():
    books = manager()
    one, two, other = (books.open(PROMPT, name) for name in ("", "", "other"))
    assert books.next_page_key(one, PROMPT) == books.next_page_key(two, PROMPT) is not None
    assert books.next_page_key(one, PROMPT) != books.next_page_key(other, PROMPT)
    assert books.next_page_key(one, PROMPT[:3]) is None


def test_reserve_evicts_the_idle_and_only_as_many_as_it_must():
    books = manager(total=4)
    books.release(store(books, PROMPT))  # one free page, two idle, and one more free
    lease = books.open([1] * 12, "")
    books.reserve(lease, 12)
    assert (books.stats.evicted, books.stats.idle, books.stats.free) == (1, 1, 0)
    books.check_integrity()


def test_out_of_pages_changes_nothing():
    books = manager(total=4)
    books.release(store(books, PROMPT))
    lease = books.open([1] * 99, "")
    before = books.stats
    with pytest.raises(OutOfPages, match="5 more pages are needed, 4 of 4 can be had"):
        books.reserve(lease, 17)
    assert books.stats == before and lease.pages == []
    books.check_integrity()


def test_open_with_spare_counts_idle_pages_once():
    books = manager(total=4)
    books.release(store(books, PROMPT))
    before = books.stats
    with pytest.raises(OutOfPages, match="1 pages and 2 to spare are needed, 2 can be had"):
        books.open(PROMPT, "", spare_pages=2)
    assert books.stats == before
    lease = books.open(PROMPT, "", spare_pages=1)
    assert lease.num_stored_tokens == 8
    books.check_integrity()


def test_stats_count_tokens():
    books = manager()
    books.release(store(books, PROMPT))
    books.open(PROMPT, "")
    stats = books.stats
    assert (stats.lookup_tokens, stats.hit_tokens) == (22, 8)
    assert (stats.total, stats.in_use, stats.cached, stats.idle, stats.free) == (8, 2, 2, 0, 6)


def test_clear_forgets_all_and_takes_nothing_away():
    books = manager()
    first = store(books, PROMPT)
    second = books.open(PROMPT, "")
    books.release(store(books, [7] * 8))
    books.clear()
    books.check_integrity()
    assert books.stats.cached == 0 and second.num_stored_tokens == 8
    books.reserve(second, 11)
    books.commit(second, PROMPT, 11)
    assert books.stats.cached == 0, "what was begun before is not cached after"
    books.release(first)
    books.release(second)
    books.check_integrity()
    assert books.stats.free == 8


def test_release_twice_is_our_own_bug():
    books = manager()
    lease = store(books, PROMPT)
    books.release(lease)
    with pytest.raises(KeyError):
        books.release(lease)


@pytest.mark.parametrize("upto", [3, 12, 13])
def test_commit_refuses_what_cannot_be(upto):
    books = manager()
    lease = books.open(PROMPT, "")
    books.reserve(lease, 11)
    books.commit(lease, PROMPT, 4)
    with pytest.raises(AssertionError, match="cannot commit"):
        books.commit(lease, PROMPT, upto)


def _leak(books: CacheManager, lease: Lease) -> None:
    books._allocator.allocate(1)


def _write_shared(books: CacheManager, lease: Lease) -> None:
    books._allocator.retain([lease.pages[-1]])
    books.leases.add(Lease("", [lease.pages[-1]]))


def _publish_partial(books: CacheManager, lease: Lease) -> None:
    books._radix.insert(lease.last_node, [1, 2, 3, 4], lease.pages[-1])


def _lose_idle(books: CacheManager, lease: Lease) -> None:
    books.release(lease)
    books._radix._idle.popitem()


def _swap(books: CacheManager, lease: Lease) -> None:
    lease.pages[:2] = lease.pages[1::-1]


@pytest.mark.parametrize("harm", [_leak, _write_shared, _publish_partial, _lose_idle, _swap])
def test_integrity_check_sees_harm(harm):
    books = manager()
    harm(books, store(books, PROMPT))
    with pytest.raises(AssertionError):
        books.check_integrity()


def test_no_torch():
    code = "import sys, nibble.cache.manager, nibble.engine.scheduler; assert 'torch' not in sys.modules"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


def test_pages_that_are_reserved_ahead_stay_until_they_are_short():
    books = manager(total=6)
    lease = store(books, PROMPT)
    books.reserve(lease, 15, 3)
    books.reserve_ahead(lease, 19)
    assert len(lease.pages) == 5
    books.commit(lease, [*PROMPT, 1], 12)
    books.take_back(lease)
    assert len(lease.pages) == 5 and books.stats.free == 1, "the next step may have as many drafts"
    books.check_integrity()
    books.reserve(lease, 13)
    books.trim(lease)
    assert len(lease.pages) == 4, "what was reserved since stays"
    assert lease.num_kept_pages == 4, "page tables look again at what is behind"
    books.trim(lease)
    books.check_integrity()
    other = books.open([1, 2], "")
    books.reserve(other, 8)
    books.reserve_ahead(lease, 19)
    assert len(lease.pages) == 4, "nothing is evicted for drafts to come"


def test_drafts_that_are_taken_back_without_pages_ahead_keep_none():
    books = manager()
    lease = store(books, PROMPT)
    books.reserve(lease, 19, 8)
    books.commit(lease, [*PROMPT, 1], 12)
    books.take_back(lease)
    assert len(lease.pages) == 3
    books.check_integrity()

"""The free list: pages are held as often as they were taken and shared, no more and no less."""

from __future__ import annotations

import pytest

from nibble.cache.radix_cache import PageAllocator
from nibble.errors import OutOfPages


def test_takes_the_low_pages_first():
    pages = PageAllocator(4)
    assert pages.allocate(3) == [0, 1, 2]
    assert (pages.num_free, pages.ref_count(0), pages.ref_count(3)) == (1, 1, 0)
    assert pages.allocate(0) == []
    assert pages.allocate(1) == [3]


def test_out_of_pages_takes_none():
    pages = PageAllocator(4)
    pages.allocate(2)
    with pytest.raises(OutOfPages, match="3 pages are needed, 2 of 4 are free"):
        pages.allocate(3)
    assert pages.num_free == 2
    assert pages.allocate(2) == [2, 3]


def test_a_shared_page_is_free_when_its_last_holder_drops_it():
    pages = PageAllocator(2)
    (page,) = pages.allocate(1)
    pages.retain([page, page])
    for left in (2, 1, 0):
        pages.release([page])
        assert pages.ref_count(page) == left
    assert pages.num_free == 2


def test_what_was_dropped_last_is_taken_first():
    pages = PageAllocator(8)
    taken = pages.allocate(4)
    pages.release(reversed(taken))
    assert pages.allocate(4) == taken


@pytest.mark.parametrize(
    "misuse", [lambda p: p.release([0]), lambda p: p.retain([0]), lambda p: p.allocate(-1)]
)
def test_misuse_is_our_own_bug(misuse):
    with pytest.raises(AssertionError):
        misuse(PageAllocator(2))


def test_double_drop_is_our_own_bug():
    pages = PageAllocator(2)
    taken = pages.allocate(1)
    with pytest.raises(AssertionError, match="page 0 is released but has no user"):
        pages.release(taken + taken)


def test_check_names_the_pages_that_are_off():
    pages = PageAllocator(3)
    pages.allocate(2)
    pages.check_integrity([1, 1, 0])
    with pytest.raises(AssertionError, match=r"\{1: \(1, 2\)\}"):
        pages.check_integrity([1, 2, 0])


def test_more_pages_come_after_those_that_are_free() -> None:
    pages = PageAllocator(3)
    held = pages.allocate(2)
    pages.grow(2)
    assert (pages.num_pages, pages.num_free) == (5, 3)
    assert held == [0, 1] and pages.allocate(3) == [2, 3, 4]
    pages.release([1, 4])
    pages.check_integrity([1, 0, 1, 1, 0])

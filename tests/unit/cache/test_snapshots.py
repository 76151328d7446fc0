"""Value pages: who holds them, what they are attached to, and which go first."""

from __future__ import annotations

import pytest

from nibble.cache.snapshots import SnapshotPages
from nibble.errors import OutOfPages

NODES = [True] * 100


def pages(total: int = 4, max_idle: int = 4) -> SnapshotPages[str]:
    return SnapshotPages(total, max_idle)


def keep(books: SnapshotPages[str], node: int, group: str | None = None) -> int:
    """A value page that only the tree holds."""
    (page,) = books.allocate(1)
    assert books.attach(node, page, group)
    books.release([page])
    return page


def check(books: SnapshotPages[str], users: dict[int, int] | None = None) -> None:
    books.check_integrity([(users or {}).get(page, 0) for page in range(books.num_pages)], NODES)


def test_what_is_attached_outlives_its_user():
    books = pages()
    page = keep(books, 7)
    assert books.value_of(7) == page and books.value_of(8) is None
    assert (books.num_idle, books.num_free, books.num_available, len(books)) == (1, 3, 4, 1)
    check(books)


def test_an_older_attachment_stays():
    books = pages()
    first = keep(books, 7)
    (second,) = books.allocate(1)
    assert not books.attach(7, second)
    books.release([second])
    assert books.value_of(7) == first and books.num_free == 3
    check(books)


def test_a_page_is_attached_once():
    books = pages()
    page = keep(books, 7)
    with pytest.raises(AssertionError, match=f"page {page} is attached to page 7 already"):
        books.attach(8, page)


def test_allocation_evicts_the_longest_idle_and_none_in_use():
    books = pages()
    kept = [keep(books, node) for node in range(4)]
    books.retain([kept[0]])
    assert books.allocate(1) == [kept[1]]
    assert [books.value_of(node) for node in range(4)] == [kept[0], None, *kept[2:]]
    books.release([kept[0]])  # used again: it is the last to go
    assert set(books.allocate(2)) == {kept[2], kept[3]}
    assert (books.value_of(0), books.num_evicted) == (kept[0], 3)


def test_out_of_pages_changes_nothing():
    books = pages()
    kept = keep(books, 7)
    books.retain([kept])
    with pytest.raises(OutOfPages, match="4 more pages of snapshots are needed, 3 of 4 can be had"):
        books.allocate(4)
    assert books.value_of(7) == kept and books.num_free == 3


@pytest.mark.parametrize("max_idle", [0, 1, 2])
def test_no_more_are_idle_than_the_budget_allows(max_idle):
    books = pages(max_idle=max_idle)
    for node in range(4):
        keep(books, node)
        check(books)
    assert [node for node in range(4) if books.value_of(node) is not None] == [0, 1, 2, 3][4 - max_idle :]


def test_what_leaves_the_tree_is_detached_and_users_keep_it():
    books = pages()
    idle, used = keep(books, 1), keep(books, 2)
    books.retain([used])
    for node in (1, 2, 3):
        books.drop(node)
    assert books.num_free == 3 and books.value_of(2) is None
    check(books, {used: 1})
    assert idle in books.allocate(3)


def test_clear_detaches_everything():
    books = pages()
    for node in range(3):
        keep(books, node, "group")
    books.clear()
    assert (len(books), books.num_free) == (0, 4)
    check(books)


def test_what_is_expired_goes_first_whenever_it_becomes_idle():
    books = pages()
    keep(books, 1)
    late, used = keep(books, 2, "late"), keep(books, 3, "used")
    books.retain([used])
    books.expire("late")
    books.expire("used")
    books.expire("nobody's")
    books.release([used])
    check(books)
    assert books.allocate(1) == [3], "the one that is free"
    assert books.allocate(1) == [used]
    assert books.allocate(1) == [late] and books.value_of(1) is not None


def test_a_group_that_is_renewed_is_not_expired():
    books = pages()
    page = keep(books, 1, "old")
    books.expire("old")
    books.regroup(page, "new")
    books.expire("old")
    assert books.group_of(page) == "new"
    (other,) = (keep(books, 2),)
    books.allocate(2)
    books.retain([page])
    books.release([page])
    assert books.allocate(1) == [other], "a page that was used later goes later"
    check(books, {2: 1, 3: 1, other: 1})


def test_integrity_check_sees_harm():
    def detached(books):
        del books._nodes[books.value_of(1)]

    def not_idle(books):
        books._idle.clear()

    def leaked(books):
        books.allocate(1)

    def grouped(books):
        books._pages_by_group["g"].clear()

    for harm in (detached, not_idle, leaked, grouped):
        books = pages()
        keep(books, 1, "g")
        harm(books)
        with pytest.raises(AssertionError):
            check(books)
    books = pages()
    keep(books, 1)
    with pytest.raises(AssertionError, match="not in the tree"):
        books.check_integrity([0] * 4, [False] * 2)

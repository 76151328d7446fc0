"""The prefix tree: what it finds, and what it forgets first."""

from __future__ import annotations

import struct

import pytest

from nibble.cache.radix_cache import PageAllocator, RadixCache

SIZE = 2


class Shelf:
    """A tree, and writers that come and go: each enters its tokens, and is done."""

    def __init__(self, total: int = 16) -> None:
        self.pages = PageAllocator(total)
        self.tree = RadixCache(self.pages, SIZE)

    def write(self, tokens: list[int], namespace: str = "") -> list[int]:
        """Holds and returns the pages of `tokens`, those in the tree first."""
        held = self.tree.match(namespace, tokens, len(tokens))
        self.tree.retain(held)
        for start in range(len(held) * SIZE, len(tokens), SIZE):
            (page,) = self.pages.allocate(1)
            cursor = held[-1] if held else namespace
            assert self.tree.insert(cursor, tokens[start : start + SIZE], page) == page
            held.append(page)
        return held

    def store(self, tokens: list[int], namespace: str = "") -> list[int]:
        held = self.write(tokens, namespace)
        self.tree.release(held)
        self.tree.check_integrity()
        return held


def test_finds_the_longest_prefix_of_full_pages():
    shelf = Shelf()
    stored = shelf.store([1, 2, 3, 4, 5, 6])
    match = shelf.tree.match
    assert match("", [1, 2, 3, 4, 5, 6, 7], 7) == stored
    assert match("", [1, 2, 3, 4, 5, 9], 6) == stored[:2]
    assert match("", [1, 9, 3, 4], 4) == []
    assert match("", [3, 4], 2) == [], "a page stands for all tokens before it too"


@pytest.mark.parametrize(("limit", "pages"), [(0, 0), (1, 0), (2, 1), (3, 1), (5, 2), (6, 3), (-1, 0)])
def test_looks_no_further_than_the_limit(limit, pages):
    shelf = Shelf()
    stored = shelf.store([1, 2, 3, 4, 5, 6])
    assert shelf.tree.match("", [1, 2, 3, 4, 5, 6], limit) == stored[:pages]


def test_goes_on_from_a_cursor():
    shelf = Shelf()
    stored = shelf.store([1, 2, 3, 4, 5, 6])
    assert shelf.tree.match(stored[0], [1, 2, 3, 4, 5, 6], 6, 2) == stored[1:]


def test_branches():
    shelf = Shelf()
    one, two = shelf.store([1, 2, 3, 4]), shelf.store([1, 2, 5, 6])
    assert one[0] == two[0] and one[1] != two[1]
    assert len(shelf.tree) == 3


def test_namespaces_never_mix():
    shelf = Shelf()
    names = ["", "a", "b", "0", "1", "/", "//", "a/b", "ä"]
    stored = {name: shelf.store([1, 2], name) for name in names}
    assert len({pages[0] for pages in stored.values()}) == len(names)
    assert all(shelf.tree.match(name, [1, 2], 2) == pages for name, pages in stored.items())
    assert shelf.tree.match("c", [1, 2], 2) == []


def test_an_equal_page_is_kept_and_the_new_one_is_not():
    shelf = Shelf()
    (first,) = shelf.store([1, 2])
    (second,) = shelf.pages.allocate(1)
    assert shelf.tree.insert("", [1, 2], second) == first
    assert second not in shelf.tree
    assert shelf.pages.ref_count(second) == 1


def test_only_full_pages():
    shelf = Shelf()
    (page,) = shelf.pages.allocate(1)
    with pytest.raises(struct.error):
        shelf.tree.insert("", [1], page)


def test_big_and_negative_tokens_differ():
    shelf = Shelf()
    pages = [shelf.store([token, 0])[0] for token in (-1, 0, 255, 256, 1 << 32, (1 << 63) - 1)]
    assert len(set(pages)) == 6


def test_evicts_the_longest_unused_first_and_leaves_before_what_is_above_them():
    shelf = Shelf()
    old, new = shelf.store([1, 2, 3, 4]), shelf.store([5, 6, 7, 8])
    shelf.store([1, 2, 3, 4])  # used again: `new` is older now
    for tokens, count in (([5, 6, 7, 8], 1), ([5, 6, 7, 8], 0), ([1, 2, 3, 4], 1), ([1, 2, 3, 4], 0)):
        assert shelf.tree.evict(1) == 1
        shelf.tree.check_integrity()
        assert len(shelf.tree.match("", tokens, 4)) == count
    assert shelf.tree.evict(1) == 0
    assert shelf.pages.num_free == shelf.pages.num_pages
    assert old != new


def test_what_is_in_use_is_never_evicted():
    shelf = Shelf()
    shelf.store([1, 2, 3, 4])
    held = shelf.write([1, 2, 9, 9])
    assert shelf.tree.num_idle == 1
    assert shelf.tree.evict(16) == 1
    assert shelf.tree.match("", [1, 2, 9, 9], 4) == held
    shelf.tree.release(held)
    assert shelf.tree.evict(16) == 2


def test_counts_idle_pages():
    shelf = Shelf()
    stored = shelf.store([1, 2, 3, 4])
    held = shelf.write([1, 2])
    assert shelf.tree.num_idle_of(stored) == 1
    shelf.tree.release(held)
    assert shelf.tree.num_idle_of(stored) == 2


def test_clear_leaves_pages_with_their_holders():
    shelf = Shelf()
    shelf.store([1, 2, 3, 4])
    held = shelf.write([1, 2])
    shelf.tree.clear()
    shelf.tree.check_integrity()
    assert shelf.pages.num_free == shelf.pages.num_pages - 1
    assert shelf.tree.match("", [1, 2], 2) == []
    shelf.pages.release(held)
    assert shelf.pages.num_free == shelf.pages.num_pages


def test_knows_a_path():
    shelf = Shelf()
    stored = shelf.store([1, 2, 3, 4])
    assert shelf.tree.is_path("", stored) and shelf.tree.is_path("", [])
    assert not shelf.tree.is_path("a", stored)
    assert not shelf.tree.is_path("", stored[::-1])
    assert not shelf.tree.is_path("", [15])

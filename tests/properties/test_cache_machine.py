"""A machine that does anything with leases in any order, beside a model of what each page must hold.

The model knows a page's slots only by what was written there: the namespace and all tokens up to that one, as that
is what a key or value depends on. It is told nothing of counts, trees or free lists.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nibble.cache.lease import Lease
from nibble.cache.manager import CacheManager
from nibble.errors import OutOfPages

PAGE = 3
Slot = tuple[int, int]
Content = tuple[str, tuple[int, ...]]

BASES = ([0] * 5 * PAGE, [0, 1, 0] * 5, [0] * PAGE + [1] * 4 * PAGE)
token = st.integers(0, 1)
prompts = st.builds(  # few beginnings and few tokens, so that prefixes meet often
    lambda base, length, end: base[:length] + end,
    st.sampled_from(BASES),
    st.integers(1, 5 * PAGE),
    st.lists(token, max_size=PAGE),
)
namespaces = st.sampled_from(["", "", "", "a"])
which = st.integers(0, 99)


class Writer:
    """A request: its tokens, its lease, and the pages the model saw it get."""

    def __init__(self, namespace: str, tokens: list[int], lease: Lease) -> None:
        self.namespace, self.tokens, self.lease = namespace, tokens, lease
        self.pages: list[int] = []

    def content(self, i: int) -> Content:
        return self.namespace, tuple(self.tokens[: i + 1])

    def slot(self, i: int) -> Slot:
        return self.lease.pages[i // PAGE], i % PAGE


class CacheMachine(RuleBasedStateMachine):
    @initialize(pages=st.integers(3, 24), prefix_cache=st.sampled_from([True] * 7 + [False]))
    def start(self, pages: int, prefix_cache: bool) -> None:
        self.manager = CacheManager(pages, PAGE, prefix_cache)
        self.writers: list[Writer] = []
        self.slots: dict[Slot, Content] = {}

    def pick(self, number: int) -> Writer:
        return self.writers[number % len(self.writers)]

    def common(self, namespace: str, tokens: list[int]) -> int:
        """The longest prefix in full pages, of all tokens but the last, that an open lease has in the tree."""
        best = 0
        for writer in self.writers:
            shown, full = writer.lease.num_shared_pages, 0
            while full < min(shown, (len(tokens) - 1) // PAGE) and (
                tokens[full * PAGE : full * PAGE + PAGE] == writer.tokens[full * PAGE : full * PAGE + PAGE]
            ):
                full += 1
            best = max(best, full if writer.namespace == namespace else 0)
        return best * PAGE

    def check_hit(self, writer: Writer) -> None:
        lease = writer.lease
        assert lease.num_stored_tokens % PAGE == 0 and lease.num_stored_tokens < len(writer.tokens)
        assert len(lease.pages) * PAGE == lease.num_stored_tokens == lease.num_hit_tokens
        for i in range(lease.num_stored_tokens):
            assert self.slots[writer.slot(i)] == writer.content(i), "a prefix hit holds something else"
        writer.pages = list(lease.pages)

    @rule(namespace=namespaces, tokens=prompts, spare=st.sampled_from([None, None, 0, 1, 3]))
    def open(self, namespace: str, tokens: list[int], spare: int | None) -> None:
        common, before = self.common(namespace, tokens), self.manager.stats
        try:
            lease = self.manager.open(tokens, namespace, spare_pages=spare)
        except OutOfPages:
            assert spare is not None and self.manager.stats == before
            return
        assert lease.num_stored_tokens >= common, "a prefix that is in use was not found"
        writer = Writer(namespace, list(tokens), lease)
        self.check_hit(writer)
        if spare is not None:
            assert (
                self.manager.num_available_pages
                >= self.manager.pages_for(len(tokens)) - len(lease.pages) + spare
            )
        self.writers.append(writer)

    @precondition(lambda self: self.writers)
    @rule(number=which, more=st.integers(0, 2 * PAGE))
    def reserve(self, number: int, more: int) -> None:
        lease, before = self.pick(number).lease, self.manager.stats
        held, upto = list(lease.pages), lease.num_stored_tokens + more
        try:
            self.manager.reserve(lease, upto)
        except OutOfPages:
            assert self.manager.stats == before and lease.pages == held
            assert self.manager.pages_for(upto) - len(held) > before.free + before.idle
            return
        assert len(lease.pages) == max(len(held), self.manager.pages_for(upto))
        self.note_new_pages(self.pick(number), held)

    def note_new_pages(self, writer: Writer, held: list[int]) -> None:
        pages = writer.lease.pages
        assert pages[: len(held)] == held, "pages that a lease has must stay where they are"
        others = {page for other in self.writers if other is not writer for page in other.lease.pages}
        assert not others & set(pages[len(held) :]), "a page that is in use was handed out"
        for page in pages[len(held) :]:
            for i in range(PAGE):
                self.slots.pop((page, i), None)  # whatever was there is gone
        writer.pages = list(pages)

    @precondition(lambda self: self.writers)
    @rule(number=which, count=st.integers(1, 2 * PAGE))
    def write(self, number: int, count: int) -> None:
        writer = self.pick(number)
        lease = writer.lease
        upto = min(lease.num_stored_tokens + count, len(writer.tokens), len(lease.pages) * PAGE)
        for i in range(lease.num_stored_tokens, upto):
            page, _ = writer.slot(i)
            assert not any(page in other.lease.pages for other in self.writers if other is not writer), (
                "two writers"
            )
            assert writer.slot(i) not in self.slots, "a slot is written twice"
            self.slots[writer.slot(i)] = writer.content(i)
        self.manager.commit(lease, writer.tokens, upto)

    @precondition(lambda self: self.writers)
    @rule(number=which, tokens=st.lists(token, min_size=1, max_size=PAGE))
    def extend(self, number: int, tokens: list[int]) -> None:
        writer = self.pick(number)
        if writer.lease.num_stored_tokens == len(writer.tokens):
            writer.tokens += tokens

    @precondition(lambda self: self.writers)
    @rule(number=which)
    def compute(self, number: int) -> None:
        """Stores all that is known, as one prefill."""
        writer = self.pick(number)
        self.reserve(number, len(writer.tokens) - writer.lease.num_stored_tokens)
        self.write(number, len(writer.tokens))

    @rule(namespace=namespaces, tokens=prompts)
    def serve(self, namespace: str, tokens: list[int]) -> None:
        """A request that comes, is computed and stays."""
        self.open(namespace, tokens, None)
        self.compute(len(self.writers) - 1)

    @precondition(lambda self: self.writers)
    @rule(number=which, others=st.integers(1, 3))
    def decode(self, number: int, others: int) -> None:
        """A few requests grow by one token each."""
        for i in range(number, number + others):
            self.extend(i, [self.pick(i).lease.num_stored_tokens % 2])
            self.compute(i)

    @precondition(lambda self: self.writers)
    @rule(number=which)
    def advance(self, number: int) -> None:
        writer = self.pick(number)
        before = writer.lease.num_stored_tokens
        gained = self.manager.advance(writer.lease, writer.tokens)
        assert writer.lease.num_stored_tokens == before + gained
        if gained:
            self.check_hit(
                writer
            ) if writer.lease.num_hit_tokens == writer.lease.num_stored_tokens else self.check_stored(writer)
        writer.pages = list(writer.lease.pages)

    def check_stored(self, writer: Writer) -> None:
        for i in range(writer.lease.num_stored_tokens):
            assert self.slots[writer.slot(i)] == writer.content(i), f"token {i} was lost while in use"

    @precondition(lambda self: self.writers)
    @rule(number=which)
    def release(self, number: int) -> None:
        writer = self.pick(number)
        self.writers.remove(writer)
        self.manager.release(writer.lease)

    @precondition(lambda self: len(self.writers) > 3)
    @rule()
    def release_oldest(self) -> None:
        self.release(0)

    @rule(chance=st.integers(0, 99))
    def clear(self, chance: int) -> None:
        if chance == 50:
            self.manager.clear()

    @invariant()
    def books_balance(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_integrity()
        stats = self.manager.stats
        held = {page for writer in self.writers for page in writer.lease.pages}
        assert stats.in_use == len(held), "pages leak, or are free while in use"
        assert stats.free + stats.idle + stats.in_use == stats.total
        for writer in self.writers:
            assert writer.pages == writer.lease.pages
            self.check_stored(writer)

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        while self.writers:
            self.release(0)
        assert self.manager.num_available_pages == self.manager.stats.total
        everything = self.manager.open([0], "a fresh start")
        self.manager.reserve(everything, self.manager.num_tokens)
        self.manager.release(everything)
        self.manager.clear()
        self.manager.check_integrity()
        assert self.manager.stats.free == self.manager.stats.total


@pytest.mark.filterwarnings("default")
class TestCacheMachine(CacheMachine.TestCase):  # more than 10,000 steps, the same in every run
    settings = settings(
        max_examples=250,
        stateful_step_count=50,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )

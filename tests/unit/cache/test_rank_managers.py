"""The books of several ranks as one manager: where requests go, and that ranks share nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from nibble.cache.manager import CacheManager
from nibble.cache.radix_cache import Node
from nibble.cache.rank_managers import RankManagers
from nibble.config import SamplingParams
from nibble.engine.request import Request
from nibble.engine.scheduler import Scheduler
from nibble.errors import OutOfPages

PAGE = 4


def books(ranks: int = 2, pages: int = 12) -> RankManagers:
    return RankManagers([CacheManager(pages, PAGE) for _ in range(ranks)])


def opened(manager: RankManagers, tokens: Sequence[int]) -> int:
    lease = manager.open(tokens, "", spare_pages={})
    manager.reserve(lease, len(tokens))
    manager.commit(lease, tokens, len(tokens))
    return lease.rank


def test_a_request_goes_where_its_prefix_is_and_else_where_the_fewest_tokens_are() -> None:
    manager, prompt = books(), list(range(24))
    assert opened(manager, prompt) == 0
    for lease in manager.leases:
        manager.release(lease)
    assert opened(manager, [100] * 8) == 0, "the ranks are alike"
    assert opened(manager, [200] * 12) == 1, "fewest tokens"
    assert opened(manager, prompt) == 0, "the prefix saves more than that rank is behind"
    assert opened(manager, [*range(4), *[300] * 4]) == 1, "a page that is saved is less than that"


def test_a_request_that_does_not_fit_at_one_rank_goes_to_another() -> None:
    manager, prompt = books(pages=6), list(range(20))
    assert opened(manager, prompt) == 0
    lease = manager.open([*prompt[:16], *[7] * 4], "", spare_pages={0: 2})
    assert lease.rank == 1 and not lease.num_stored_tokens
    with pytest.raises(OutOfPages):
        manager.open([9] * 16, "", spare_pages={0: 2, 1: 3})


def test_ranks_wait_for_no_page_of_one_another() -> None:
    manager, prompt = books(), list(range(8))
    leases = [one.open(prompt, "") for one in manager.managers]
    assert [lease.rank for lease in leases] == [0, 1]
    first, second = (manager.next_page_key(lease, prompt) for lease in leases)
    assert first and second and first != second


def test_observers_see_the_pages_of_all_ranks_apart() -> None:
    seen = list[tuple[Node, int]]()

    class Seen:
        def stored(self, parent: Node, page_tokens: Sequence[int], packed_tokens: bytes, page: int) -> None:
            seen.append((parent, page))

        def removed(self, page: int) -> None:
            raise AssertionError

        def cleared(self) -> None:
            seen.clear()

    manager = books()
    manager.observe(Seen())
    for one in manager.managers:
        lease = one.open(range(8), "")
        one.reserve(lease, 8)
        one.commit(lease, range(8), 8)
    assert seen == [("", 0), (0, 1), ("", 12), (12, 13)]


@pytest.mark.parametrize("seed", range(4))
def test_requests_end_whatever_is_short(seed: int) -> None:
    generator = random.Random(seed)
    manager = books(ranks=3, pages=10)
    scheduler = Scheduler(manager, max_running=8, token_budget=16, max_context=40)
    requests = [
        Request(
            f"{i}",
            [generator.randrange(2) for _ in range(generator.randrange(1, 30))],
            SamplingParams(max_tokens=generator.randrange(1, 12)),
        )
        for i in range(40)
    ]
    for request in requests:
        scheduler.add(request)
    ranks = set[int]()
    for _ in range(2000):
        batch = scheduler.schedule()
        if batch is None:
            break
        ranks |= {item.request.lease.rank for item in batch.scheduled}
        if generator.random() < 0.05:
            scheduler.finish(generator.choice(batch.scheduled).request, "abort")
        scheduler.commit(batch, {item.request: generator.randrange(2) for item in batch.scheduled})
        scheduler.check_integrity()
    assert all(request.is_finished for request in requests) and ranks == {0, 1, 2}
    assert manager.stats.in_use == 0 and scheduler.metrics.preemptions > 0

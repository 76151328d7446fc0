"""Whatever is done with leases, the events that are published tell the prefix tree exactly, and a router knows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant
from test_cache_machine import PAGE, CacheMachine

from nibble.cache.events import CacheEvents, page_hashes, root_hash
from nibble.cache.lease import Lease
from nibble.cache.manager import CacheManager
from nibble.engine.kv_events import KVEventBatch, encode
from nibble.routing.router import Router
from vllm_events import FollowedTree

ENGINE = "engine"


def stored_prefixes(manager: CacheManager) -> set[tuple[str, tuple[int, ...]]]:
    """Each page of a tree as what it stands for, read from its keys."""
    radix = manager._radix
    tokens = radix._page_tokens

    def path(page: int) -> tuple[str, tuple[int, ...]]:
        key = radix._keys_by_page[page]
        parent, own = key[tokens.size :], tokens.unpack(key[: tokens.size])
        if parent.startswith(b"/"):
            return parent[1:].decode().removeprefix(f"{ENGINE}/"), own
        namespace, above = path(int(parent))
        return namespace, above + own

    return {path(page) for page in radix._keys_by_page}


class SaltedManager(CacheManager):
    """Namespaces of the machine are salts here."""

    def open(self, tokens: Sequence[int], namespace: str, **options: Any) -> Lease:
        return super().open(tokens, f"{ENGINE}/{namespace}", **options)


class EventsMachine(CacheMachine):
    @initialize(pages=st.integers(3, 24))
    def start(self, pages: int) -> None:
        self.manager = SaltedManager(pages, PAGE)
        self.writers, self.slots = [], {}
        self.followed, self.router = FollowedTree(), Router[int]()
        self.router.add(0, ENGINE, PAGE)
        self.events = CacheEvents(ENGINE, PAGE)
        self.events.sinks += [
            lambda events: self.followed.take(encode(KVEventBatch(0.0, list(events), 3))),
            lambda events: self.router.update(0, events),
        ]
        self.manager.observe(self.events)

    @invariant()
    def events_tell_the_tree(self) -> None:
        if not hasattr(self, "events"):
            return
        self.events.flush()
        truth = stored_prefixes(self.manager)
        assert len(self.followed.pages) == len(truth) == self.router.num_pages(0)
        assert set(self.followed.pages.values()) == truth
        for name, (salt, tokens) in self.followed.pages.items():
            *_, last = page_hashes(root_hash(f"{ENGINE}/{salt}"), [*tokens, 0], PAGE)
            assert name == last, "a name does not say what is stored"
            assert self.router.facts([*tokens, 0], salt)[0].cached_tokens == len(tokens)
            assert self.router.facts([*tokens, 0], "another")[0].cached_tokens == 0


@pytest.mark.filterwarnings("default")
class TestEventsMachine(EventsMachine.TestCase):
    settings = settings(
        max_examples=50,
        stateful_step_count=40,
        derandomize=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )

"""The books of Ray's request router, without Ray: who is chosen, and that nothing is left of requests that ended."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from nibble.cache.events import BlockRemoved, BlockStored, KVEvent, page_hashes, root_hash
from nibble.config import SamplingParams
from nibble.engine.kv_events import Endpoints, Publisher
from nibble.ray.choice import Chooser, Follower, Source, policy_of
from nibble.server.worker import GenerationRequest

SOURCE = Source("fp8/1", 4, "tcp://127.0.0.1:1", None)
TEXT = list(range(40))


def asked(prompt: list[int], salt: str = "", n: int = 1) -> GenerationRequest:
    return GenerationRequest(prompt, SamplingParams(n=n), salt)


def stored(prompt: list[int], salt: str = "") -> BlockStored:
    names = list(page_hashes(root_hash(f"{SOURCE.namespace}/{salt}"), prompt, SOURCE.page_size))
    return BlockStored(names, None, prompt, SOURCE.page_size, None, "GPU", None)


def chooser(*keys: str, **options: Any) -> Chooser:
    made = Chooser(policy_of(options), lambda *_: lambda: None)
    made.set_replicas(dict.fromkeys(keys, SOURCE))
    return made


def test_a_prompt_goes_where_its_pages_are() -> None:
    books = chooser("a", "b", "c")
    books.router.update("b", [stored(TEXT)])
    assert books.choose("1", asked([*TEXT, 1]), ("a", "b", "c"), {}) == "b"
    # Not with another salt, and not to who may not serve.
    assert books.choose("2", asked([*TEXT, 1], salt="x"), ("a", "b", "c"), {}) != "b"
    assert books.choose("3", asked([*TEXT, 1]), ("a", "c"), {}) != "b"


def test_what_was_evicted_draws_nobody() -> None:
    books = chooser("a", "b")
    pages = stored(TEXT)
    books.router.update("b", [pages])
    books.router.update("b", [BlockRemoved(pages.block_hashes, "GPU")])
    facts = books.router.facts(TEXT)
    assert {fact.cached_tokens for fact in facts.values()} == {0}


def test_requests_that_begin_alike_and_come_together_go_together() -> None:
    books = chooser("a", "b", running=0.0, imbalance=0.0, queue=0.0)
    first = books.choose("1", asked([*TEXT, 1]), ("a", "b"), {})
    assert books.choose("2", asked([*TEXT, 2]), ("a", "b"), {}) == first


def test_what_other_fronts_sent_counts() -> None:
    books = chooser("a", "b")
    books.router.update("a", [stored(TEXT)])
    assert books.choose("1", asked([*TEXT, 1]), ("a", "b"), {"a": 50}) == "b"


def test_nothing_is_known_of_engines_without_events() -> None:
    books = chooser()
    books.set_replicas({"a": None})
    assert books.choose("1", asked(TEXT), ("a",), {}) is None
    assert Source.parse({}) is None
    facts = {"namespace": "n", "page_size": 16, "events": "tcp://h:1", "replay": None}
    assert Source.parse({"nibble_kv_events": facts}) == Source("n", 16, "tcp://h:1")


@pytest.mark.parametrize("another", [False, True])
def test_no_request_leaves_a_trace(another: bool) -> None:
    books = chooser("a", "b")
    request = asked(TEXT, n=3)
    chosen = books.choose("1", request, ("a", "b"), {})
    taker = {"a": "b", "b": "a"}[chosen or ""] if another else chosen
    books.routed("1", request, taker or "")
    assert books.router.facts(TEXT)[taker or ""].running == 3
    # The first one refused it: it may say so late.
    if another:
        books.end("1", key=chosen)
        assert books.num_open == 1
    books.start(request)
    assert books.router.facts(TEXT)[taker or ""].queued_tokens == 0
    books.finish(request, 30)
    books.end("1", key=taker)
    assert books.num_open == 0
    assert not books._names
    assert all(fact.running == fact.queued_tokens == 0 for fact in books.router.facts(TEXT).values())


def test_a_request_that_is_sent_again_is_counted_once() -> None:
    books = chooser("a", "b")
    request = asked(TEXT)
    first = books.choose("1", request, ("a", "b"), {})
    books.remove(first or "")
    second = books.choose("2", request, ("a", "b"), {})
    assert second not in {None, first}
    books.end("1", key=first)
    books.start(request)
    books.finish(request, 1)
    assert books.num_open == 0
    assert books.router.facts(TEXT)[second or ""].running == 0


def test_replicas_come_and_go_with_what_follows_them() -> None:
    followed: list[str] = []

    def follow(key: str, _: Source) -> Any:
        followed.append(key)
        return lambda: followed.remove(key)

    books = Chooser(policy_of({}), follow)
    books.set_replicas({"a": SOURCE, "b": None})
    books.set_replicas({"a": SOURCE, "b": SOURCE, "c": SOURCE})
    assert sorted(followed) == ["a", "b", "c"]
    books.set_replicas({"b": SOURCE, "c": SOURCE})
    books.remove("c")
    books.remove("c")
    assert followed == ["b"]
    assert set(books.router.replicas) == {"b"}
    books.close()
    assert followed == []


def test_a_follower_brings_what_is_published(tmp_path: Any) -> None:
    events, replay = f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r"
    publisher = Publisher(Endpoints(events, replay))
    first, second = stored(TEXT[:8]), stored(TEXT)
    publisher.publish([first])
    seen: list[KVEvent] = []
    complete = threading.Event()

    def deliver(batch: Sequence[KVEvent]) -> None:
        seen.extend(batch)
        if second in seen:
            complete.set()

    follower = Follower(Source("n", 4, events, replay), deliver)
    try:
        for _ in range(1200):
            publisher.publish([second])
            if complete.wait(0.1):
                break
        # It came late, and knows what was published before.
        assert first in seen
        assert second in seen
    finally:
        follower.stop()
        publisher.close()

"""The protocol of KV events: what is published, what a subscriber makes of loss, lateness and restarts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import zmq

from nibble.cache import events
from nibble.cache.events import AllBlocksCleared, CacheEvents
from nibble.cache.manager import CacheManager
from nibble.engine.kv_events import Endpoints, Publisher, check_endpoint
from nibble.errors import ConfigError
from nibble.routing.subscriber import Subscriber
from vllm_events import BlockRemoved, BlockStored, FollowedTree, decode

PAGE = 2
SALTED = "engine/tenant"


class Cache:
    """An engine's books, which publish. num_batches: published so far, with the publisher's own first one."""

    def __init__(self, publisher: Publisher) -> None:
        self.publisher, self.num_batches = publisher, 1
        self.manager, self.events = CacheManager(8, PAGE), CacheEvents("engine", PAGE)
        self.manager.observe(self.events)
        self.events.sinks.append(self.publish)

    def publish(self, batch: Sequence[events.KVEvent]) -> None:
        self.num_batches += 1
        self.publisher.publish(batch)

    def store(self, tokens: list[int], namespace: str = "engine/") -> None:
        lease = self.manager.open(tokens, namespace)
        self.manager.reserve(lease, len(tokens))
        self.manager.commit(lease, tokens, len(tokens))
        self.manager.release(lease)
        self.events.flush()


@pytest.fixture
def places(tmp_path: Path) -> Endpoints:
    return Endpoints(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay", "kv-events")


@pytest.fixture
def publisher(places: Endpoints) -> Iterator[Publisher]:
    publisher = Publisher(places, rank=3)
    yield publisher
    publisher.close()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher's thread may have to wait long for its turn, and would be taken for one that has ended."""
    monkeypatch.setattr("nibble.routing.subscriber.REPLAY_MS", 120_000)


def follow(subscriber: Subscriber, last: type, seconds: float = 120) -> list[events.KVEvent]:
    """What comes, until an event of this kind does."""
    received: list[events.KVEvent] = []
    end = time.monotonic() + seconds
    while not (received and isinstance(received[-1], last)):
        assert time.monotonic() < end, f"nothing of the kind came: {received}"
        received += subscriber.poll(100)
    return received


def subscribed(places: Endpoints, publisher: Publisher, cache: Cache, *, replays: bool = True) -> Subscriber:
    """A subscriber that is there: a clear was sent until it came."""
    subscriber = Subscriber(places.events, places.replay if replays else None, places.topic)
    while not subscriber.poll(20):
        cache.manager.clear()
        cache.events.flush()
    until_all_came(subscriber, cache)
    return subscriber


def until_all_came(subscriber: Subscriber, cache: Cache) -> list[events.KVEvent]:
    """What comes of all that was published."""
    end, received = time.monotonic() + 120, list[events.KVEvent]()
    while subscriber._next < cache.num_batches:
        assert time.monotonic() < end
        received += subscriber.poll(20)
    return received


def test_the_wire_is_vllms(places: Endpoints, publisher: Publisher) -> None:
    cache = Cache(publisher)
    with zmq.Context() as context, context.socket(zmq.DEALER) as replay:
        replay.linger = 0
        cache.store([1, 2, 3, 4, 5], SALTED)
        cache.store([1, 2, 3, 4, 7, 8], SALTED)
        cache.store(list(range(10, 26)))  # all pages: the others are evicted
        replay.connect(places.replay or "")
        end = time.monotonic() + 120
        while len(publisher._past) < 4:
            assert time.monotonic() < end
            time.sleep(0.01)
        replay.rcvtimeo = 120_000
        replay.send_multipart((b"", (1).to_bytes(8, "big")))
        messages = [replay.recv_multipart() for _ in range(4)]
    assert [message[1] for message in messages] == [
        *((n).to_bytes(8, "big") for n in (1, 2, 3)), b"\xff" * 8
    ]  # fmt: skip
    assert messages[-1][2] == b""
    first, second, third = (decode(message[2]) for message in messages[:-1])
    assert first.data_parallel_rank == 3 and abs(first.ts - time.time()) < 3600
    (stored,) = first.events  # the one before it, number 0, clears
    assert isinstance(stored, BlockStored) and stored.token_ids == [1, 2, 3, 4] and stored.block_size == PAGE
    assert stored.parent_block_hash is None and stored.extra_keys == [("tenant",), None]
    assert stored.medium == "GPU" and stored.lora_id is None and stored.lora_name is None
    (below,) = second.events
    assert below.parent_block_hash == stored.block_hashes[-1] and below.token_ids == [7, 8]
    removed = [event for event in third.events if isinstance(event, BlockRemoved)]
    names = [*stored.block_hashes, *below.block_hashes]
    assert [name for event in removed for name in event.block_hashes] == [names[2], names[1], names[0]]
    tree = FollowedTree()
    for message in messages[:-1]:
        tree.take(message[2])
    assert {len(tokens) for _, tokens in tree.pages.values()} == set(range(2, 17, 2))
    assert all(0 <= name < 1 << 64 for name in names if isinstance(name, int))


def test_one_who_comes_late_replays_what_was(places: Endpoints, publisher: Publisher) -> None:
    cache = Cache(publisher)
    cache.store([1, 2, 3, 4])
    subscriber = Subscriber(places.events, places.replay, places.topic)
    while not (received := subscriber.poll(20)):
        cache.store([9, 9])
        cache.manager.clear()
        cache.events.flush()
    subscriber.close()
    assert any(
        isinstance(event, events.BlockStored) and event.token_ids == [1, 2, 3, 4] for event in received
    )


def test_what_is_lost_is_replayed(
    places: Endpoints, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(publisher)
    subscriber = subscribed(places, publisher, cache)
    subscriber._next -= 1  # as if the batch before had not come
    cache.store([1, 2])
    received = follow(subscriber, events.BlockStored)
    assert isinstance(received[0], AllBlocksCleared) and len(received) == 2
    subscriber.close()


def test_what_cannot_be_replayed_clears(places: Endpoints, publisher: Publisher) -> None:
    cache = Cache(publisher)
    subscriber = subscribed(places, publisher, cache, replays=False)
    cache.store([1, 2])
    assert [type(event) for event in follow(subscriber, events.BlockStored)] == [events.BlockStored]
    subscriber._next -= 1
    cache.store([3, 4])
    received = follow(subscriber, events.BlockStored)
    assert [type(event) for event in received] == [AllBlocksCleared, events.BlockStored] or len(received) == 1
    subscriber.close()


def test_a_publisher_that_begins_anew_clears(places: Endpoints, tmp_path: Path) -> None:
    first = Publisher(places)
    cache = Cache(first)
    subscriber = subscribed(places, first, cache)
    cache.store([1, 2])
    received = until_all_came(subscriber, cache)
    cache.store([3, 4])
    first.close()
    second = Publisher(places)
    again = Cache(second)
    end = time.monotonic() + 120
    while not any(isinstance(event, events.BlockStored) and event.token_ids == [5, 6] for event in received):
        assert time.monotonic() < end
        again.store([5, 6])
        again.manager.clear()
        again.events.flush()
        received += subscriber.poll(50)
    # Not one page of the life before is left, though nobody looked between its last one and the next life.
    last = max(i for i, event in enumerate(received) if isinstance(event, AllBlocksCleared))
    stored = [event.token_ids for event in received[last:] if isinstance(event, events.BlockStored)]
    assert (
        [1, 2] not in stored
        and [3, 4] not in stored
        and [1, 2] in [event.token_ids for event in received[:last] if isinstance(event, events.BlockStored)]
    )
    subscriber.close()
    second.close()


def test_an_endpoint_that_is_taken_says_so(places: Endpoints) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://*")
        with pytest.raises(
            ConfigError, match=f"cannot be published at tcp://\\*:{port}: Address already in use"
        ):
            Publisher(Endpoints(f"tcp://*:{port}"))


def test_ranks_count_ports_up() -> None:
    places = Endpoints("tcp://*:5557", "tcp://*:5657", "t")
    assert places.of_rank(0) == places
    assert places.of_rank(2) == Endpoints("tcp://*:5559", "tcp://*:5659", "t")
    assert Endpoints("ipc:///tmp/x").of_rank(1) == Endpoints("ipc:///tmp/x_dp1")


@pytest.mark.parametrize(
    "endpoint", ["5557", "tcp://*", "tcp://*:x", "tcp://*:70000", "udp://*:5557", "ipc://", ""]
)
def test_malformed_endpoints_are_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"kv_events is an endpoint of ZeroMQ, as tcp://\*:5557, not"):
        check_endpoint("kv_events", endpoint)


def test_nothing_is_recorded_until_somebody_observes() -> None:
    manager = CacheManager(8, PAGE)
    assert manager._radix.observer is None

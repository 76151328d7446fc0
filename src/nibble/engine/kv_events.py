"""Publishes what happens to the prefix cache over ZeroMQ, in the protocol of vLLM's publisher.

A message has three parts: the topic, a sequence number of 8 bytes (big-endian, from 0), and a batch as MessagePack:
`[time, events, rank]`, each event a map. A subscriber that misses numbers asks the replay socket (a ROUTER) with an
empty part and the first number that it wants, and is sent what is kept from there on, each as an empty part, number
and batch, and the number -1 at the end. The first batch of a publisher's life clears everything.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import zmq

from nibble.cache.events import AllBlocksCleared, KVEvent
from nibble.errors import ConfigError

REPLAYED_BATCHES = 10_000
"""Batches that the replay socket keeps."""
HIGH_WATER_MARK = 100_000
"""Batches that wait for one slow subscriber; it loses those that follow, and sees it by their numbers."""
POLL_S = 0.05
"""Between two looks at the replay socket."""
END = (-1).to_bytes(8, "big", signed=True)
"""The number that ends a replay."""
SCHEMES = ("tcp", "ipc")
"""Not inproc: nobody else has the context of the publisher."""


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True):
    """What one step did to the prefix cache."""

    ts: float
    """Seconds since 1970."""
    events: list[KVEvent]
    data_parallel_rank: int | None = None
    """The replica."""


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(KVEventBatch).decode


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where a publisher is found."""

    events: str
    """As tcp://*:5557; a host in place of the star: the publisher connects to a subscriber that listens there."""
    replay: str | None = None
    topic: str = ""

    def of_rank(self, rank: int) -> Endpoints:
        """Return the endpoints of one replica: ports count up, as vLLM's do."""
        return Endpoints(
            _offset(self.events, rank), self.replay and _offset(self.replay, rank), topic=self.topic
        )


def check_endpoint(name: str, endpoint: str) -> None:
    """Raise ConfigError for an endpoint that ZeroMQ does not understand. name: of the option."""
    scheme, separator, address = endpoint.partition("://")
    port = address.rpartition(":")[2]
    is_valid = separator and scheme in SCHEMES and address
    if not is_valid or (scheme == "tcp" and not (port.isdecimal() and 0 < int(port) < 1 << 16)):
        raise ConfigError(f"{name} is an endpoint of ZeroMQ, as tcp://*:5557, not {endpoint!r}")


def check_ranks(endpoints: Endpoints, count: int) -> None:
    """Raise ConfigError where ports of several engines of a host would overlap. count: of engines."""
    ranks = [endpoints.of_rank(i) for i in range(count)]
    addresses = [address for one in ranks for address in (one.events, one.replay) if address]
    if len(set(addresses)) < len(addresses):
        raise ConfigError(
            f"with {count} replicas the ports of kv_events and kv_events_replay overlap: let them be {count} apart, or "
            "more"
        )


def _offset(endpoint: str, rank: int) -> str:
    if not rank:
        return endpoint
    if not endpoint.startswith("tcp"):
        return f"{endpoint}_dp{rank}"
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + rank}"


class Publisher:
    """Publishes batches from a thread of its own, so that no step waits for a socket.

    Args:
        endpoints: where it is found.
        rank: of the replica.
        max_replayed: batches that can be replayed.

    Raises:
        ConfigError: an endpoint cannot be had.
    """

    def __init__(self, endpoints: Endpoints, rank: int = 0, max_replayed: int = REPLAYED_BATCHES) -> None:
        self._rank, self._topic = rank, endpoints.topic.encode()
        self._past: deque[tuple[bytes, bytes]] = deque(maxlen=max_replayed)
        self._batches: queue.SimpleQueue[KVEventBatch | None] = queue.SimpleQueue()
        self._context = zmq.Context()
        self._pub = self._socket(zmq.PUB, endpoints.events)
        self._replay = self._socket(zmq.ROUTER, endpoints.replay) if endpoints.replay else None
        self._thread = threading.Thread(target=self._run, name="nibble-kv-events", daemon=True)
        self._thread.start()
        self.publish([AllBlocksCleared()])

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Publish what a step did; to be observed by an engine (`Engine.observe_cache`)."""
        self._batches.put(KVEventBatch(time.time(), list(events), self._rank))

    def close(self) -> None:
        """Publish what is left, and let go of the sockets. Closing twice does no harm."""
        self._batches.put(None)
        self._thread.join()
        self._context.destroy(linger=100)

    def _socket(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.sndhwm = HIGH_WATER_MARK
        # As vLLM does: what listens has a star, or is local.
        listens = "*" in endpoint or "::" in endpoint or not endpoint.startswith("tcp")
        try:
            if listens or kind == zmq.ROUTER:
                socket.bind(endpoint)
            else:
                socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"KV events cannot be published at {endpoint}: {error.strerror}") from None
        return socket

    def _run(self) -> None:
        for number in range(1 << 63):
            while (batch := self._next()) is _NOTHING_YET:
                self._answer_replays()
            if not isinstance(batch, KVEventBatch):
                return
            sequence, payload = number.to_bytes(8, "big"), encode(batch)
            self._past.append((sequence, payload))
            self._pub.send_multipart((self._topic, sequence, payload))
            self._answer_replays()

    def _next(self) -> KVEventBatch | object | None:
        """Return the next batch, None at the end; without a replay socket there is nothing else to look at."""
        try:
            return self._batches.get(timeout=POLL_S if self._replay else None)
        except queue.Empty:
            return _NOTHING_YET

    def _answer_replays(self) -> None:
        while self._replay and self._replay.poll(0):
            match self._replay.recv_multipart():
                case [client, _, start] if len(start) == 8:
                    for sequence, payload in self._past:
                        if (
                            sequence >= start
                        ):  # of equal length and big-endian, so that bytes compare as numbers
                            self._replay.send_multipart((client, b"", sequence, payload))
                    self._replay.send_multipart((client, b"", END, b""))


_NOTHING_YET = object()

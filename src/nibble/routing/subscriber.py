"""Follows the KV events of one engine in another process: Nibble's (engine/kv_events.py), or one that speaks as vLLM.

subscriber = Subscriber("tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558")
router.update("10.0.0.7", subscriber.poll(timeout_ms=100))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import zmq

from nibble.cache.events import AllBlocksCleared, KVEvent
from nibble.engine.kv_events import END, decode

REPLAY_MS = 1000
"""Longest wait for a message of a replay."""


class Subscriber:
    """Receives batches in order; what is lost is replayed, and where that fails everything known is cleared.

    Not thread-safe. A subscriber that comes late replays what the publisher keeps; where it keeps the beginning no
    more, the subscriber knows of the pages that are stored from then on.

    Args:
        endpoint: that publishes.
        replay: that replays, if any.
        topic: of the messages.
    """

    def __init__(self, endpoint: str, replay: str | None = None, topic: str = "") -> None:
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.SUB)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_CONNECTED)
        self._socket.connect(endpoint)
        self._replay_endpoint = replay
        self._next = 0
        """The number of the next batch."""
        self._num_connections = 0

    def poll(self, timeout_ms: int = 0) -> list[KVEvent]:
        """Return what happened since the last call, waiting for it if nothing did."""
        events: list[KVEvent] = []
        number, is_anew = -1, False
        while self._socket.poll(timeout_ms if number < 0 else 0):
            _, sequence, payload = self._socket.recv_multipart()
            number = int.from_bytes(sequence, "big")
            is_anew |= self._is_connected_anew()
            if not is_anew:
                events += self._take(number, payload)
        return self._begin_anew(number) if is_anew else events

    def close(self) -> None:
        """Let go of the sockets."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._context.destroy(linger=0)

    def _is_connected_anew(self) -> bool:
        before = self._num_connections
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            self._num_connections += 1
        return self._num_connections > max(before, 1)

    def _begin_anew(self, newest: int) -> list[KVEvent]:
        """Forget everything, and replay what there is: the publisher may have been started again.

        It counts from 0 then, and no message says whether it is of this life or the one before. newest: the last number
        that came.
        """
        batches = self._replayed(0, 1 << 63)
        self._next = 1 + (batches[-1][0] if batches else newest)
        return [AllBlocksCleared(), *(event for _, batch in batches for event in decode(batch).events)]

    def _take(self, number: int, payload: bytes) -> Iterator[KVEvent]:
        if number < self._next:  # it was replayed
            return
        if number > self._next:
            missed = self._replayed(self._next, number)
            if not missed or missed[0][0] != self._next:
                yield AllBlocksCleared()
            for _, batch in missed:
                yield from decode(batch).events
        self._next = number + 1
        yield from decode(payload).events

    def _replayed(self, start: int, stop: int) -> Sequence[tuple[int, bytes]]:
        """Return the batches from `start` to before `stop` that the publisher still has, by number."""
        if self._replay_endpoint is None:
            return ()
        batches: list[tuple[int, bytes]] = []
        with self._context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(self._replay_endpoint)
            socket.send_multipart((b"", start.to_bytes(8, "big")))
            while socket.poll(REPLAY_MS):
                _, sequence, payload = socket.recv_multipart()
                if sequence == END:
                    return batches
                number = int.from_bytes(sequence, "big")
                if number < stop:
                    batches.append((number, payload))
        return ()  # it ended midway

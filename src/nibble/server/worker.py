"""The engine's process, and the messages that it exchanges with the server.

    python -m nibble.server.worker ADDRESS LOG_FORMAT [PLACE] < config.json

The process takes commands, steps, and sends what each step added in one message. It is never held up by tokenising,
JSON or slow readers, and it ends with its parent. Messages are plain data, encoded by msgspec as MessagePack.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from nibble.cache.events import BlockStored, KVEvent
from nibble.config import SamplingParams
from nibble.engine.kv_events import Endpoints, Publisher
from nibble.engine.request import Delta, join_deltas
from nibble.errors import NibbleError, RankError, RequestError, set_caller
from nibble.garbage import freeze_gc
from nibble.models.generation_config import SamplingDefaults
from nibble.server.logging import configure

if TYPE_CHECKING:
    from nibble.engine.llm import LLM
    from nibble.engine.request import Request
    from nibble.engine.structured_output import Matcher


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt to be continued."""

    prompt: Sequence[int]
    params: SamplingParams
    salt: str = ""
    """Only requests of the same salt share pages."""
    priority: int = 0
    """A lower one is served before."""
    is_streamed: bool = True
    """Whether pieces are wanted as they come; else they are gathered for GATHER_S, but for the first and the last."""


class Place(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a process is told beside its config."""

    replica: int = 0
    """Which of several engines of one server it is."""
    forwards_events: bool = False
    """Whether the server is sent what happens to the prefix cache."""
    kv_events: Endpoints | None = None
    """Where that is published."""


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Command to continue a prompt."""

    id: int
    request: GenerationRequest


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Command to give up a request, whose client is not there any more."""

    id: int


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Command to forget all prefixes."""

    id: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Command to end the engine's process."""


Command = Submit | Abort | ResetPrefixCache | Stop


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Event: the engine serves."""

    max_context: int
    vocab_size: int
    about: dict[str, Any]
    """For people and programs: the plan, where memory goes, how the start went."""
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    """What requests get that leave it out."""
    namespace: str = ""
    """Of pages: their layout and scheme, and the version of their scales."""
    page_size: int = 1


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Event: the engine could not start, or serves no more."""

    error: str
    kind: str
    """A class of nibble.errors."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Event: a request cannot be served."""

    id: int
    status: int
    """Of HTTP."""
    error: str
    code: str | None = None


class Pieces(msgspec.Struct, frozen=True, tag=True):
    """Event: one step added to answers."""

    items: list[tuple[int, int, float | None, Delta]]
    """Request, its prompt tokens from the prefix cache, when it was started, and what was added."""


class PrefixCacheReset(msgspec.Struct, frozen=True, tag=True):
    """Event: all prefixes are forgotten."""

    id: int


class Stats(msgspec.Struct, frozen=True, tag=True):
    """Event: counts of the engine."""

    numbers: dict[str, float]
    """By name, as the scheduler's metrics and the cache's have them."""


class CacheChange(msgspec.Struct, frozen=True, tag=True):
    """Event: what a step did to the prefix cache, for the server's router; without tokens."""

    events: list[KVEvent]


Event = Ready | Failed | Refused | Pieces | PrefixCacheReset | Stats | CacheChange


# Built once: decoders compile the types.
encode: Callable[[Command | Event], bytes] = msgspec.msgpack.Encoder().encode
decode_command: Callable[[bytes], Command] = msgspec.msgpack.Decoder(Command).decode
decode_event: Callable[[bytes], Event] = msgspec.msgpack.Decoder(Event).decode

GATHER_S = 0.5
"""How long pieces of answers that are not streamed may wait for others."""
STATS_S = 0.5
"""Between two counts, at least."""
IDLE_MS = 200
"""How long an idle engine waits for a command before it checks its parent."""
GRAMMAR_POLL_MS = 2
"""How long it waits for one while a grammar is prepared."""
GRAMMAR_THREADS = 4
RANK_GRACE_S = 0.3
"""How long the engine's thread has to end the process once a rank has failed."""
LINGER_S = 0.3
"""Given to the last message of a process that ends at once."""


class _Gathered:
    """What was added to the answers of a request that is not streamed: the first at once, others up to GATHER_S later.

    A server that is told each token of some hundred answers has no time for anything else.
    """

    def __init__(self) -> None:
        self._deltas: dict[int, list[Delta]] = {}
        self._due: dict[int, float] = {}

    def add(self, delta: Delta) -> list[Delta]:
        """Add to an answer, and return all that is to be sent now."""
        deltas, now = self._deltas.setdefault(delta.index, []), time.monotonic()
        deltas.append(delta)
        if not delta.finish_reason and not delta.error and now < self._due.get(delta.index, 0.0):
            return []
        self._deltas[delta.index], self._due[delta.index] = [], now + GATHER_S
        return deltas


class Worker:
    """An engine and its open requests.

    Args:
        llm: with the engine.
        socket: of the server.
        parent: the process that it ends with.
    """

    def __init__(self, llm: LLM, socket: zmq.Socket[bytes], parent: int) -> None:
        self._llm, self._engine, self._socket = llm, llm.engine, socket
        self._requests: dict[int, tuple[Request, ...]] = {}
        self._num_open: dict[int, int] = {}
        """Answers that have not ended, by request."""
        self._outbox: list[tuple[int, int, float | None, Delta]] = []
        # A large grammar takes seconds, for which no answer is to wait.
        self._grammar_threads = ThreadPoolExecutor(GRAMMAR_THREADS, "grammar")
        self._preparing: dict[int, tuple[Submit, Future[Matcher | None]]] = {}
        self._parent, self._stats_at = parent, 0.0
        # One thread at a time may use the socket: that of the engine, and once that hangs, the one that says why.
        self._socket_lock, self._is_ending = threading.Lock(), threading.Event()
        self._wake_read, self._wake_write = os.pipe()
        self._idle = zmq.Poller()
        self._idle.register(socket, zmq.POLLIN)
        self._idle.register(self._wake_read, zmq.POLLIN)

    def run(self) -> None:
        """Serve until a Stop comes, or the parent is gone; raise RankError where a rank has failed."""
        if ranks := self._engine.ranks:
            ranks.on_failure = self._end_soon
        self._send(ready_message(self._llm))
        while os.getppid() == self._parent:
            if ranks and ranks.failure:
                # Requests end as the server hears of it.
                self._is_ending.set()
                raise RankError(ranks.failure)
            for command in self._commands():
                if isinstance(command, Stop):
                    return
                self._execute(command)
            self._admit_prepared()
            if self._engine.busy:
                self._engine.step()
            if self._outbox:
                self._send(Pieces(self._outbox))
                self._outbox = []
            if time.monotonic() - self._stats_at > STATS_S:
                self._stats_at = time.monotonic()
                self._send(Stats(engine_stats(self._llm) | {"time": self._stats_at}))

    def _end_soon(self, reason: str) -> None:
        """End the process where the engine's thread does not: it may wait for a GPU that waits for the rank."""
        os.write(self._wake_write, b"x")
        if not self._is_ending.wait(RANK_GRACE_S) and self._socket_lock.acquire(timeout=RANK_GRACE_S):
            self._socket.send(encode(Failed(reason, RankError.__name__)))
        time.sleep(LINGER_S)
        os._exit(1)

    def _commands(self) -> Iterator[Command]:
        """Yield commands that have come; an idle engine waits a little for the first."""
        wait_ms = 0 if self._engine.busy else GRAMMAR_POLL_MS if self._preparing else IDLE_MS
        while (command := self._receive(wait_ms)) is not None:
            yield command
            wait_ms = 0

    def _receive(self, wait_ms: int) -> Command | None:
        with self._socket_lock:
            if wait_ms:
                self._idle.poll(wait_ms)
            return decode_command(self._socket.recv()) if self._socket.poll(0) else None

    def _execute(self, command: Submit | Abort | ResetPrefixCache) -> None:
        if isinstance(command, ResetPrefixCache):
            self._engine.reset_prefix_cache()
            self._send(PrefixCacheReset(command.id))
        elif isinstance(command, Abort):
            if requests := self._requests.pop(command.id, None):
                self._num_open.pop(command.id)
                self._engine.abort(requests)
            if preparing := self._preparing.pop(command.id, None):
                preparing[1].cancel()
        elif command.request.params.grammar is None:
            self._admit(command, None)
        else:
            matcher = self._grammar_threads.submit(self._engine.matcher, command.request.params)
            self._preparing[command.id] = command, matcher

    def _admit_prepared(self) -> None:
        """Admit requests whose grammars are prepared."""
        for command, matcher in [pair for pair in self._preparing.values() if pair[1].done()]:
            del self._preparing[command.id]
            error = matcher.exception()
            if error is None:
                self._admit(command, matcher.result())
            else:
                # llguidance may panic, which is no Exception.
                if not isinstance(error, NibbleError):
                    error = RequestError(f"the grammar fails: {error}")
                self._refuse(command, error)

    def _refuse(self, command: Submit, error: NibbleError) -> None:
        self._send(Refused(command.id, error.status, str(error), error.code))

    def _admit(self, command: Submit, matcher: Matcher | None) -> None:
        request, params = command.request, command.request.params

        gathered = None if request.is_streamed else _Gathered()

        def add(delta: Delta) -> None:
            requests = self._requests.get(command.id)
            if requests is None:  # aborted
                return
            if gathered:
                if not (deltas := gathered.add(delta)):
                    return
                delta = join_deltas(deltas)
            leader = requests[0]
            self._outbox.append((command.id, leader.num_prefix_hit_tokens, leader.start_time, delta))
            if delta.finish_reason:
                self._num_open[command.id] -= 1
                if not self._num_open[command.id]:
                    del self._requests[command.id], self._num_open[command.id]

        try:
            self._requests[command.id] = self._engine.submit(
                request.prompt, params, add, salt=request.salt, priority=request.priority, matcher=matcher
            )
            self._num_open[command.id] = params.n
        except NibbleError as error:
            self._refuse(command, error)

    def forward(self, events: Sequence[KVEvent]) -> None:
        """Send the server what happened to the prefix cache (`Engine.observe_cache`), before the pieces of the step."""
        self._send(CacheChange([_without_tokens(event) for event in events]))

    def _send(self, event: Event) -> None:
        with self._socket_lock:
            self._socket.send(encode(event))


def _without_tokens(event: KVEvent) -> KVEvent:
    return msgspec.structs.replace(event, token_ids=[]) if isinstance(event, BlockStored) else event


def ready_message(llm: LLM) -> Ready:
    """Return what is served."""
    from nibble.attention.planner.explain import as_dict, staging_warnings

    scheduler = llm.engine.scheduler
    # The plan has these as numbers.
    staged = staging_warnings(llm.plan, llm.budget.context)
    plan = {
        "hardware": asdict(llm.hardware),
        **as_dict(llm.plan, llm.budget),
        "startup": dict(llm.startup),
        "kv_scales": llm.engine.startup.kv_scales,
        "drafter": llm.engine.speculation.name if llm.engine.speculation else None,
        "certificate": llm.certificate.summary() if llm.certificate else None,
        "warnings": [note for note in llm.engine.startup.notes if note not in staged],
    }
    engine, page_size = llm.engine, scheduler.manager.page_size
    return Ready(
        scheduler.limit, engine.vocab_size, plan, engine.sampling_defaults, engine.namespace, page_size
    )


def engine_stats(llm: LLM) -> dict[str, float]:
    """Return counts of the scheduler, the cache, the host tier, the fidelity watch, and of drafts, in one level."""
    stats: dict[str, float] = {}

    def add(prefix: str, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, Mapping):
                add(f"{name}_", value)
            elif value is not None:
                stats[prefix + name] = float(value)

    add("", asdict(llm.engine.scheduler.metrics))
    parts = (llm.error_monitor, llm.engine.speculation)
    return stats | {name: value for part in parts if part for name, value in part.numbers().items()}


def main(address: str, log_format: str, place_json: str = "{}") -> None:
    """Start the engine of the config on standard input, and serve at `address`. place_json: a Place."""
    # Asked for now: the parent may be gone before a model is loaded.
    parent = os.getppid()
    set_caller("serve")
    configure(log_format)
    place = msgspec.json.decode(place_json, type=Place)
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    # In milliseconds: the last message may say why the engine could not start.
    socket.linger = 1000
    socket.connect(address)
    config = json.load(sys.stdin)
    try:
        # Before seconds of loading: the endpoint may be taken.
        publisher = Publisher(place.kv_events, place.replica) if place.kv_events else None
        from nibble import LLM

        llm = LLM(**config)
        if llm.engine.grammars:
            llm.engine.grammars.prepare()
        freeze_gc()
        worker = Worker(llm, socket, parent)
    except (NibbleError, OSError) as error:
        message = str(error)
        socket.send(encode(Failed(message, type(error).__name__)))
        raise SystemExit(1) from error
    if publisher:
        llm.engine.observe_cache(publisher.publish)
    if place.forwards_events:
        llm.engine.observe_cache(worker.forward)
    try:
        worker.run()
    except RankError as error:
        socket.send(encode(Failed(str(error), type(error).__name__)))
        socket.close()
        # At once: libraries may wait for ranks that are gone.
        context.term()
        os._exit(1)
    finally:
        if publisher:
            publisher.close()
        if llm.engine.ranks:
            # None is left behind.
            llm.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

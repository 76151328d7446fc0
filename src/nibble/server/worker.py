"""The process of the engine: takes orders, steps, and hands out what each step added, in one message.

    python -m nibble.server.worker ADDRESS LOG_FORMAT < config.json

So tokenising, JSON and slow readers never hold a step up. Ends with its parent, whatever becomes of that. Owns Worker.
Must not know of HTTP.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import zmq

from nibble.engine.outputs import Delta
from nibble.errors import NibbleError, RequestError
from nibble.server import messages as wire
from nibble.server.logging import configure

if TYPE_CHECKING:
    from nibble.engine.engine import RequestHandle
    from nibble.engine.llm import LLM
    from nibble.engine.structured_output import Matcher

STATS_S = 0.5
"""Between two counts, at least."""
IDLE_MS = 200
"""How long an engine that has nothing to do waits for an order before it looks after its parent."""
MAKING_MS = 2
"""How long it waits for one while a grammar is prepared."""
MAKERS = 4
"""Grammars that are prepared at a time, in threads: a large one takes seconds, for which no answer is to wait."""


class Worker:
    """An engine, and the requests that it has open. parent: the process that it ends with."""

    def __init__(self, llm: LLM, socket: zmq.Socket[bytes], parent: int) -> None:
        self._llm, self._engine, self._socket = llm, llm.engine, socket
        self._tickets: dict[int, RequestHandle] = {}
        self._left: dict[int, int] = {}
        self._outbox: list[tuple[int, int, float | None, Delta]] = []
        self._makers = ThreadPoolExecutor(MAKERS, "grammar")
        self._making: dict[int, tuple[wire.Submit, Future[Matcher | None]]] = {}
        self._parent, self._counted = parent, 0.0

    def run(self) -> None:
        """Serves until it is told to stop, or its parent is gone."""
        self._say(about(self._llm))
        while os.getppid() == self._parent:
            for message in self._orders():
                if isinstance(message, wire.Stop):
                    return
                self._obey(message)
            self._admit_made()
            if self._engine.busy:
                self._engine.step()
            self._flush()
            if time.monotonic() - self._counted > STATS_S:
                self._count()

    def _orders(self) -> Iterator[wire.Order]:
        """Orders that have come; while there is nothing to do, after a short wait for one."""
        wait = 0 if self._engine.busy else MAKING_MS if self._making else IDLE_MS
        while self._socket.poll(wait):
            yield wire.order(self._socket.recv())
            wait = 0

    def _obey(self, message: wire.Submit | wire.Abort) -> None:
        if isinstance(message, wire.Abort):
            ticket = self._tickets.pop(message.id, None)
            if ticket:
                self._left.pop(message.id)
                self._engine.abort(ticket)
            if making := self._making.pop(message.id, None):
                making[1].cancel()
        elif message.params.grammar is None:
            self._admit(message, None)
        else:
            self._making[message.id] = message, self._makers.submit(self._engine.matcher, message.params)

    def _admit_made(self) -> None:
        """Requests whose grammars have been prepared."""
        for message, made in [one for one in self._making.values() if one[1].done()]:
            del self._making[message.id]
            error = made.exception()
            if error is None:
                self._admit(message, made.result())
            else:  # whatever it is: llguidance may panic
                known = (
                    error if isinstance(error, NibbleError) else RequestError(f"the grammar fails: {error}")
                )
                self._say(wire.Refused(message.id, *wire.status_of(known)))

    def _admit(self, message: wire.Submit, matcher: Matcher | None) -> None:
        try:
            self._tickets[message.id] = self._submit(message, matcher)
        except NibbleError as error:
            self._say(wire.Refused(message.id, *wire.status_of(error)))
        else:
            self._left[message.id] = message.params.n

    def _submit(self, message: wire.Submit, matcher: Matcher | None) -> RequestHandle:
        def take(piece: Delta) -> None:
            ticket = self._tickets.get(message.id)
            if ticket is None:  # aborted
                return
            leader = ticket.requests[0]
            self._outbox.append((message.id, leader.num_prefix_hit_tokens, leader.start_time, piece))
            if piece.finish_reason:
                self._left[message.id] -= 1
                if not self._left[message.id]:
                    del self._tickets[message.id], self._left[message.id]

        salt, priority = message.salt, message.priority
        return self._engine.submit(
            message.prompt, message.params, take, salt=salt, priority=priority, matcher=matcher
        )

    def _flush(self) -> None:
        if self._outbox:
            self._say(wire.Pieces(self._outbox))
            self._outbox = []

    def _count(self) -> None:
        self._counted = time.monotonic()
        self._say(wire.Stats(numbers(self._llm) | {"time": self._counted}))

    def _say(self, message: wire.News) -> None:
        self._socket.send(wire.encode(message))


def about(llm: LLM) -> wire.Ready:
    """What is served."""
    from nibble.attention.planner.explain import as_dict, staging_warnings
    from nibble.models.hub import locate

    scheduler = llm.engine.scheduler
    staged = staging_warnings(llm.plan, llm.budget.context)  # in the plan, as numbers
    plan = {
        "hardware": asdict(llm.hardware),
        **as_dict(llm.plan, llm.budget),
        "startup": dict(llm.startup),
        "warnings": [note for note in llm.engine.startup.notes if note not in staged],
    }
    return wire.Ready(locate(llm.config.model), scheduler.limit, llm.engine.vocab_size, plan)


def numbers(llm: LLM) -> dict[str, float]:
    """Counts of the scheduler, of the cache, of the host tier, and of the fidelity watch, flat."""
    found: dict[str, float] = {}

    def add(prefix: str, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, Mapping):
                add(f"{name}_", value)
            elif value is not None:
                found[prefix + name] = float(value)

    add("", asdict(llm.engine.scheduler.metrics))
    return found | (llm.error_monitor.numbers() if llm.error_monitor else {})


def main(address: str, log_format: str) -> None:
    """Starts the engine of the config on standard input, and serves at `address`."""
    parent = os.getppid()  # now: it may be gone before a model is loaded
    configure(log_format)
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.linger = 1000
    socket.connect(address)
    config = json.load(sys.stdin)
    try:
        from nibble.engine.llm import LLM

        llm = LLM(**config)
        if llm.engine.grammars:
            llm.engine.grammars.prepare()
        worker = Worker(llm, socket, parent)
    except (NibbleError, OSError) as error:
        socket.send(wire.encode(wire.Failed(str(error), type(error).__name__)))
        raise SystemExit(1) from error
    worker.run()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Ranks as threads of the test's process, in the place of processes and gloo: an engine with --tp starts at once.

All else is as it is with processes: the same messages, runners and layers. What is not shown here, processes and
their collectives, is shown in tests/integration/test_parallel.py.
"""

from __future__ import annotations

import os
import pickle
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from nibble.engine import build
from nibble.engine.rank import Follower
from nibble.engine.ranks import Command, Rank, Ranks, Start
from nibble.errors import RankError
from nibble.kernels.collectives import register, release
from nibble.kernels.collectives.processes import ordered_sum
from nibble.models.shards import Shard

WAIT_S = 60.0


class Meeting:
    """Where the threads of an engine meet."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier = size, threading.Barrier(size, timeout=WAIT_S)
        self.slots: list[Tensor] = [torch.empty(0)] * size


class ThreadCollectives:
    """One of the threads."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self.size, self._meeting = rank, meeting.size, meeting

    def all_gather(self, x: Tensor) -> Tensor:
        self._meeting.slots[self.rank] = x.clone()
        self._meeting.barrier.wait()
        parts = torch.stack(self._meeting.slots)
        self._meeting.barrier.wait()
        return parts

    def all_reduce(self, x: Tensor) -> Tensor:
        return ordered_sum(self.all_gather(x))

    def broadcast(self, x: Tensor) -> None:
        x.copy_(self.all_gather(x)[0])

    def barrier(self) -> None:
        self._meeting.barrier.wait()

    def close(self) -> None:
        self._meeting.barrier.abort()


class ThreadRanks(Ranks):
    """The ranks of one engine."""

    def __init__(self, size: int, device: str, program: Sequence[str] = ()) -> None:
        self.size, self.device, self.failure, self.on_failure = size, device, "", None
        self.is_serving, self.here = False, None
        self.meeting = Meeting(size)
        self.followers: dict[int, Follower] = {}
        self._queues: dict[int, queue.SimpleQueue[Any]] = {r: queue.SimpleQueue() for r in range(1, size)}
        self._threads = [
            threading.Thread(target=self._follow, args=(r,), daemon=True) for r in range(1, size)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, message: Callable[[int], Start]) -> Rank:
        self._send(message(0))
        self.here = self._rank(0)
        return self.here

    def _rank(self, rank: int) -> Rank:
        group = ThreadCollectives(self.meeting, rank)
        return Rank(Shard(rank, self.size), group, register(group), "cpu")

    def _send_each(self, messages: Sequence[Start | Command]) -> None:
        self.check()
        for rank, waiting in self._queues.items():
            # As over a connection, so that what cannot be sent shows.
            waiting.put(pickle.loads(pickle.dumps(messages[rank])))

    def _follow(self, number: int) -> None:
        rank, waiting = self._rank(number), self._queues[number]
        try:
            start = waiting.get()
            if isinstance(start, Command):  # the start failed
                return
            follower = self.followers[number] = Follower(start, rank)
            while (command := waiting.get()).name != "stop":
                if command.name != "freeze":  # other tests go on in this process
                    getattr(follower, command.name)(*command.arguments)
        except Exception as error:
            self.failure = f"rank {number} of {self.size} failed ({type(error).__name__}: {error})"
            self.meeting.barrier.abort()
        finally:
            release(rank.number)

    def explained(self, error: Exception) -> Exception:
        return RankError(self.failure) if self.failure else error

    def _fail(self, reason: str) -> None:
        self.failure = reason
        self.meeting.barrier.abort()

    def close(self) -> None:
        for waiting in self._queues.values():
            waiting.put(Command("stop"))
        for thread in self._threads:
            thread.join(WAIT_S)
        if self.here:
            release(self.here.number)
            self.here = None


@contextmanager
def one_core() -> Iterator[None]:
    """Let threads that the body starts share a core: on several they would pass the interpreter's lock to and fro."""
    if not hasattr(os, "sched_setaffinity"):  # of Linux alone
        yield
        return
    cores = os.sched_getaffinity(0)
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.sched_setaffinity(0, {sorted(cores)[worker % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@contextmanager
def threads_as_ranks() -> Iterator[None]:
    """Let the ranks of all engines be threads, in the body."""
    lock = threading.Lock()

    def alone(function: Callable[..., Any]) -> Callable[..., Any]:
        # Transformers changes what all threads share while a model is made or loads.
        def run(*args: Any, **kwargs: Any) -> Any:
            with lock:
                return function(*args, **kwargs)

        return run

    names = (
        (build, "load"),
        (build, "prepare_model"),
        (build.parallel, "divide"),
        (build.parallel, "Division"),
    )
    with ExitStack() as patches:
        patches.enter_context(one_core())
        patches.enter_context(mock.patch.object(build, "Ranks", ThreadRanks))
        for owner, name in names:
            patches.enter_context(mock.patch.object(owner, name, alone(getattr(owner, name))))
        yield

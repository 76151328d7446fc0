"""The other processes of a model that is divided among GPUs, as rank 0 sees them.

Rank 0 is the engine's own process: it schedules, samples, and answers. Each other rank is a process with the same
runner over its part of every layer. Before rank 0 computes a step it sends them the step's numbers; what layers need of
one another goes through collectives. So whatever rank 0 does with its runner the others do, in the same order.

A rank that ends, or does not take a step up for long, ends the engine: a thread notices, and says which and why.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor

import nibble
from nibble.cache.residency import Copy
from nibble.cache.scales import KVScales
from nibble.engine.plan import EnginePlan
from nibble.engine.step_numbers import StepNumbers
from nibble.errors import RankError
from nibble.kernels.collectives import Collectives, register, release
from nibble.kernels.collectives.processes import connect, store
from nibble.models.shards import Shard

PROGRAM = (sys.executable, "-m", "nibble.engine.rank")
"""What is run for each other rank."""
HANG_S, START_HANG_S = 60.0, 1800.0
"""How long a rank may not take up what it was sent, once the engine serves and before."""
STEP_S = 600.0
"""How long it may be at what it has taken up, once the engine serves: a CPU may take minutes for a long prompt."""
POLL_S = 0.05
STOP_S, KILL_S = 5.0, 0.2
"""Given to a rank to end by itself."""
EXPLAIN_S = 2.0
"""How long a failed collective waits for the reason."""
COUNT = struct.Struct("qq")
"""What a rank notes: messages that it has taken up, and those that it has done."""
log = logging.getLogger("nibble.ranks")


@dataclass(frozen=True, slots=True)
class Start:
    """The first message to a rank: all that it needs to do as rank 0 does."""

    engine_plan: EnginePlan
    prompts: Sequence[Sequence[int]] | None
    """To measure KV scales with; None: `scales` are the scales."""
    most_tokens: int
    """Of these prompts."""
    scales: KVScales
    port: int
    """Of the store at rank 0."""
    threads: int | None
    """Of torch on a CPU."""
    poison: bool


@dataclass(frozen=True, slots=True)
class Command:
    """A further message: what to do, by the name of a method of engine/rank.py's Follower."""

    name: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """What a rank says before it ends by an error."""

    kind: str
    message: str


@dataclass(eq=False)
class Rank:
    """A rank in its own process."""

    shard: Shard
    group: Collectives
    number: int
    """By which operators find the group."""
    device: str


class Ranks:
    """Starts and supervises the ranks 1, 2, ... and lets them do what rank 0 does."""

    def __init__(self, size: int, device: str, program: Sequence[str] = ()) -> None:
        self.size, self.device = size, device
        self.failure: str = ""
        """Why the ranks can do no more; empty while they can."""
        self.on_failure: Callable[[str], None] | None = None
        """Called once, by a thread of this object."""
        self.is_serving = False
        self.here: Rank | None = None
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._num_sent, self._sent_at = 0, time.monotonic()
        self._counts = tempfile.TemporaryFile()  # noqa: SIM115 (close() closes it)
        self._counts.truncate(COUNT.size * size)
        self._map = mmap.mmap(self._counts.fileno(), COUNT.size * size)
        self._connections: dict[int, Connection] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for rank in range(1, size):
            self._spawn(rank, program or PROGRAM)
        self._monitor = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._monitor.start()

    def _spawn(self, rank: int, program: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        counts = self._counts.fileno()
        # The same package, however it was found here.
        paths = [str(Path(nibble.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._processes[rank] = subprocess.Popen(
            [*program, *map(str, (theirs.fileno(), counts, rank, self.size))],
            pass_fds=(theirs.fileno(), counts), env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        theirs.close()
        self._connections[rank] = Connection(ours.detach())

    @property
    def pids(self) -> dict[int, int]:
        """Return the processes of the other ranks."""
        return {rank: process.pid for rank, process in self._processes.items()}

    def start(self, message: Callable[[int], Start]) -> Rank:
        """Send the first message, and return rank 0, connected with the others.

        Args:
            message: makes it of the port of the store.
        """
        import torch

        device = torch.device(self.device, 0) if self.device == "cuda" else torch.device(self.device)
        shared = store("127.0.0.1", 0, 0, self.size)
        self._send(message(shared.port))
        try:
            group = connect(shared, 0, self.size, device)
        except Exception as error:  # of all kinds: a rank may have ended
            raise self.explained(error) from error
        self.here = Rank(Shard(0, self.size), group, register(group), str(device))
        return self.here

    def compute(self, numbers: StepNumbers | list[StepNumbers]) -> None:
        """Let the other ranks compute a step, each its own where there is one for each rank."""
        self._send(Command("compute", (numbers,)))

    def record(
        self, sizes: Sequence[int], verify_sizes: Sequence[tuple[int, int]], *, captured: bool
    ) -> None:
        """Let them record steps of these sizes."""
        self._send(Command("record", (tuple(sizes), tuple(verify_sizes), captured)))

    def store_sampled(self, tokens_S: Tensor) -> None:
        """Let them store what was sampled."""
        assert self.here
        self._send(Command("store_sampled", (len(tokens_S),)))
        self.here.group.broadcast(tokens_S)

    def save(self, copies: Sequence[Copy]) -> None:
        """Let them save pages to the host."""
        self._send(Command("save", (copies,)))

    def run(self, name: str) -> None:
        """Let them run a method of Follower."""
        self._send(Command(name))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let what all ranks do in the body end for all of them, or no further step be computed: Ctrl-C waits."""
        with _interrupts_later():
            try:
                yield
            except Exception as error:  # the others wait for what this rank does not send
                raise self.failed(error) from error
            except BaseException as error:
                if not self.failure:
                    self._fail(f"rank 0 of {self.size} was interrupted in a step ({type(error).__name__})")
                raise

    def serve(self) -> None:
        """Wait until all are ready to serve."""
        assert self.here
        self.run("barrier")
        try:
            self.here.group.barrier()
        except Exception as error:  # of all kinds: a rank may have ended
            raise self.failed(error) from error
        self.is_serving = True

    def check(self) -> None:
        """Raise RankError if a rank has failed."""
        if self.failure:
            raise RankError(self.failure)

    def failed(self, error: Exception) -> Exception:
        """Return why rank 0 failed in a step; no further step can be computed."""
        reason = self.explained(error)
        if not self.failure:
            self._fail(f"rank 0 of {self.size} failed ({type(error).__name__}: {error})")
            return RankError(self.failure)
        return reason

    def explained(self, error: Exception) -> Exception:
        """Return the reason for a failure of rank 0 itself: what became of another rank, where that is why."""
        text = str(error)
        if not isinstance(error, RankError) and _is_connection(text):
            # Whoever ended is noticed at once, but not before its connections were.
            until = time.monotonic() + EXPLAIN_S
            while not self.failure and time.monotonic() < until:
                time.sleep(POLL_S / 5)
            return RankError(self.failure or f"the ranks do not reach one another any more: {text}")
        return RankError(self.failure) if self.failure else error

    def _send(self, message: Start | Command) -> None:
        self.check()
        with self._lock:
            self._num_sent += 1
            self._sent_at = time.monotonic()
        for connection in self._connections.values():
            try:
                connection.send(message)
            except OSError as error:
                raise self.explained(RuntimeError(f"connection closed: {error}")) from error

    # Supervision

    def _watch(self) -> None:
        """Notice a rank that ends, fails or hangs."""
        while not self._closing.wait(POLL_S):
            for rank, process in self._processes.items():
                if reason := self._failure_of(rank, process):
                    if not self._closing.is_set():
                        self._fail(f"rank {rank} of {self.size} {reason}")
                    return

    def _failure_of(self, rank: int, process: subprocess.Popen[bytes]) -> str:
        connection = self._connections[rank]
        with suppress(OSError, EOFError):
            if connection.poll(0) and isinstance(failure := connection.recv(), Failure):
                return f"failed ({failure.kind}: {failure.message})"
        if (code := process.poll()) is not None:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            return f"{how}, of which it said nothing"
        with self._lock:
            num_sent, waited = self._num_sent, time.monotonic() - self._sent_at
        num_taken, num_done = COUNT.unpack_from(self._map, COUNT.size * rank)
        if num_taken < num_sent and waited > (HANG_S if self.is_serving else START_HANG_S):
            return f"has not taken up a step for {waited:.0f} s"
        if num_done < num_sent and waited > (STEP_S if self.is_serving else START_HANG_S):
            return f"has been at a step for {waited:.0f} s"
        return ""

    def _fail(self, reason: str) -> None:
        with self._lock:
            # What is ended below is no reason of its own to the thread that watches.
            if self.failure:
                return
            self.failure = f"{reason}; the engine ends with it"
        log.error("%s", self.failure)
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            # None is left as a zombie.
            with suppress(subprocess.TimeoutExpired):
                process.wait(KILL_S)
        if self.here and self.device != "cpu":
            # Else a kernel that waits for the rank would wait for ever.
            with suppress(Exception):
                self.here.group.close(abort=True)  # type: ignore[attr-defined]
        if self.on_failure:
            self.on_failure(self.failure)

    def close(self) -> None:
        """End the other ranks; none is left afterwards."""
        if self._closing.is_set():
            return
        self._closing.set()
        if not self.failure:
            for connection in self._connections.values():
                with suppress(OSError):
                    connection.send(Command("stop"))
        until = time.monotonic() + STOP_S
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()) if not self.failure else 0.0)
            if process.poll() is None:
                process.kill()
            process.wait()
        self._monitor.join(STOP_S)
        for connection in self._connections.values():
            connection.close()
        if self.here:
            release(self.here.number)
            if not (self.failure and self.device != "cpu"):
                with suppress(Exception):
                    self.here.group.close()  # type: ignore[attr-defined]
        self._map.close()
        self._counts.close()


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Let Ctrl-C act after the body: a step that one rank leaves midway would go on in the next one. A second acts."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    waiting = list[FrameType | None]()

    def handle(number: int, frame: FrameType | None) -> None:
        if waiting:
            before(number, frame)
        waiting.append(frame)

    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if waiting:
        before(signal.SIGINT, waiting[0])


def _is_connection(text: str) -> bool:
    """Return whether an error is one of collectives, and not of a computation."""
    phrases = (
        "connection",
        "Connection",
        "gloo",
        "NCCL",
        "Timed out",
        "timed out",
        "Broken pipe",
        "store",
        "socket",
    )
    return any(phrase in text for phrase in phrases)

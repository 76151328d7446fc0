"""The other processes of a model that is divided among GPUs, as rank 0 sees them.

Rank 0 is the engine's own process: it schedules, samples, and answers. Each other rank is a process with the same
runner over its part of every layer. Before rank 0 computes a step it sends them the step's numbers; what layers need of
one another goes through collectives. So whatever rank 0 does with its runner the others do, in the same order.

A rank that ends, is stopped, or does not take a step up for long, ends the engine: a thread notices, and says which
and why. It counts its own looks and no seconds: a machine that sleeps, or a shell that stops all of these processes, is
no reason.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
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
from nibble.kernels.collectives.processes import abort, connect, store
from nibble.models.shards import Shard
from nibble.processes import ending, is_stopped, memory_kills

PROGRAM = (sys.executable, "-m", "nibble.engine.rank")
"""What is run for each other rank."""
HANG_S, START_HANG_S = 60.0, 1800.0
"""How long a rank may not take up what it was sent, once the engine serves and before."""
STEP_S = 600.0
"""How long it may be at what it has taken up, once the engine serves: a CPU may take minutes for a long prompt."""
FROZEN_S, SILENT_S = 10.0, 60.0
"""How long a process may give no sign of life that is stopped, and one that is not: a library may hold it up."""
POLL_S = 0.2
"""Between two looks. A rank that ends, or says why it fails, is noticed at once."""
STOP_S, KILL_S = 5.0, 2.0
"""Given to a rank to end by itself, and once it is killed."""
EXPLAIN_S, NOTICE_S = 5.0, 10.0
"""How long an error waits for the sign that another rank ended, and for the thread that watches to say why."""
COUNT = struct.Struct("qqq")
"""What a rank notes: messages that it has taken up, those that it has done, and that it lives (BEAT_S)."""
BEAT_S = 0.2
log = logging.getLogger("nibble.ranks")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is."""

    address: str
    """Of its host, as those of the other ranks reach it."""
    index: int
    """Of its GPU among those that its process sees."""
    host: int = 0
    """Number of the host: several may be at one address, as in a cluster of one machine."""


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
    places: tuple[Place, ...] = ()
    """Of all ranks; Ranks knows them."""


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


@dataclass(slots=True)
class Looks:
    """What a rank was seen to do, and how long it has been the same."""

    beats: int = 0
    silent_s: float = 0.0
    steps: tuple[int, int, int] = (0, 0, 0)
    """Messages that were sent, taken up, and done."""
    same_s: float = 0.0

    def add(self, beats: int, steps: tuple[int, int, int]) -> None:
        """Look once more."""
        self.silent_s = self.silent_s + POLL_S if beats == self.beats else 0.0
        self.same_s = self.same_s + POLL_S if steps == self.steps else 0.0
        self.beats, self.steps = beats, steps


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

    def __init__(
        self,
        size: int,
        device: str,
        programs: Mapping[int, Sequence[str]] | None = None,
        places: Sequence[Place] = (),
    ) -> None:
        """Start processes.

        Args:
            size: number of ranks.
            device: of each.
            programs: what is run for some ranks in place of PROGRAM.
            places: of all ranks, where some are on other hosts.
        """
        self.size, self.device = size, device
        self.places = tuple(places) or tuple(Place("127.0.0.1", rank) for rank in range(size))
        self.failure: str = ""
        """Why the ranks can do no more; empty while they can."""
        self.on_failure: Callable[[str], None] | None = None
        """Called once, in a thread of its own."""
        self.is_serving = False
        self.here: Rank | None = None
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._num_sent, self._memory_kills = 0, memory_kills()
        self._counts = tempfile.TemporaryFile()  # noqa: SIM115 (close() closes it)
        self._counts.truncate(COUNT.size * size)
        self._map = mmap.mmap(self._counts.fileno(), COUNT.size * size)
        self._connections: dict[int, Connection] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._looks = {rank: Looks() for rank in range(1, size)}
        for rank in range(1, size):
            self._spawn(rank, (programs or {}).get(rank, PROGRAM))
        self._monitor = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._monitor.start()

    def _spawn(self, rank: int, program: Sequence[str]) -> None:
        started = spawn(program, self._counts.fileno(), rank, self.size)
        self._processes[rank], self._connections[rank] = started

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
        if device.type == "cuda":
            torch.cuda.set_device(device)  # the others take those behind it
        address = self.places[0].address
        shared = store(address, 0, 0, self.size)
        self._send(replace(message(shared.port), places=self.places))
        self._await_others()
        try:
            group = connect(shared, 0, self.size, device, address, one_host=one_host(self.places))
        except Exception as error:  # of all kinds: a rank may have ended
            raise self.explained(error) from error
        self.here = Rank(Shard(0, self.size), group, register(group), str(device))
        return self.here

    def _await_others(self) -> None:
        """Wait until all are about to connect; what waits for one that ended would do so for minutes, Ctrl-C or not."""
        while any(COUNT.unpack_from(self._map, COUNT.size * rank)[0] == 0 for rank in self._processes):
            self.check()
            time.sleep(POLL_S / 20)

    def compute(self, numbers: StepNumbers | list[StepNumbers]) -> None:
        """Let the other ranks compute a step, each its own where there is one for each rank."""
        if isinstance(numbers, list):
            self._send_each([Command("compute", (one,)) for one in numbers])
        else:
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
    def call(self, function: str, *arguments: Any) -> Iterator[Rank]:
        """Let the other ranks call a function, while the body does the same at this rank, for as long as it takes.

        Args:
            function: as `module:name`; it is given the EnginePlan, the rank's model and its Rank.
            arguments: further ones, plain data.
        """
        assert self.here
        # It may take longer than any step.
        self.is_serving, was_serving = False, self.is_serving
        try:
            with self.together():
                self._send(Command("call", (function, arguments)))
                yield self.here
                self.settle()
        finally:
            self.is_serving = was_serving

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

    def settle(self) -> None:
        """Wait for what this rank computes.

        Raises:
            RankError: another rank failed meanwhile, and what was computed with it is nothing.
        """
        import torch

        if self.device != "cpu":
            torch.cuda.synchronize()
        self.check()

    def serve(self) -> None:
        """Wait until all are ready to serve."""
        assert self.here
        self.run("freeze")
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
        if not isinstance(error, RankError) and self._is_left():
            # The thread that watches has seen it, too.
            until = time.monotonic() + NOTICE_S
            while not self.failure and time.monotonic() < until:
                time.sleep(POLL_S / 20)
        return RankError(self.failure) if self.failure else error

    def _is_left(self) -> bool:
        """Return whether a rank has failed: it says so, or the system does, as its connections end.

        What collectives say then is each library's own, and a rank's connection to this one ends with the others.
        """
        if self.failure or self._closing.is_set():
            return bool(self.failure)
        with suppress(OSError):
            return bool(wait(self._connections.values(), EXPLAIN_S))
        return True

    def _send(self, message: Start | Command) -> None:
        self._send_each([message] * self.size)

    def _send_each(self, messages: Sequence[Start | Command]) -> None:
        """Send a message to each rank; the first one is for nobody."""
        self.check()
        with self._lock:
            self._num_sent += 1
        first = messages[1]
        data = ForkingPickler.dumps(first)
        for rank, connection in self._connections.items():
            own = data if messages[rank] is first else ForkingPickler.dumps(messages[rank])
            try:
                connection.send_bytes(own)
            except OSError as error:
                reason = self.explained(error)
                if reason is error:
                    reason = RankError(f"rank {rank} of {self.size} takes no message any more: {error}")
                raise reason from error

    # Supervision

    def _watch(self) -> None:
        """Notice a rank that ends, fails or hangs."""
        while not self._closing.is_set():
            # It returns at once where a rank says something, or ends.
            wait(self._connections.values(), POLL_S)
            for rank, process in self._processes.items():
                if reason := self._failure_of(rank, process):
                    if not self._closing.is_set():
                        self._fail(f"rank {rank} of {self.size} {reason}")
                    return

    def _failure_of(self, rank: int, process: subprocess.Popen[bytes]) -> str:
        try:
            if self._connections[rank].poll(0):
                failure = self._connections[rank].recv()
                assert isinstance(failure, Failure)
                return f"failed ({failure.kind}: {failure.message})"
        except (OSError, EOFError):
            return self._end_of(process)
        return self._end_of(process) if process.poll() is not None else self._delay_of(rank, process.pid)

    def _end_of(self, process: subprocess.Popen[bytes]) -> str:
        """Return how a process ended, of which the system has closed the connection."""
        try:
            how = ending(process.wait(KILL_S))
        except subprocess.TimeoutExpired:
            how = "ended"
        if memory_kills() > self._memory_kills:
            return f"{how}; memory was short, and the system killed a process for it"
        return f"{how}, of which it said nothing"

    def _delay_of(self, rank: int, pid: int) -> str:
        """Return what a rank that lives has not done for too long."""
        with self._lock:
            num_sent = self._num_sent
        num_taken, num_done, beats = COUNT.unpack_from(self._map, COUNT.size * rank)
        looks = self._looks[rank]
        looks.add(beats, (num_sent, num_taken, num_done))
        if looks.silent_s >= FROZEN_S and is_stopped(pid):
            return f"is stopped, as by SIGSTOP: it has given no sign of life for {looks.silent_s:.0f} s"
        if self.is_serving and looks.silent_s >= SILENT_S:
            return f"has given no sign of life for {looks.silent_s:.0f} s"
        if num_taken < num_sent and looks.same_s >= (HANG_S if self.is_serving else START_HANG_S):
            return f"has not taken up a step for {looks.same_s:.0f} s"
        if num_done < num_sent and looks.same_s >= (STEP_S if self.is_serving else START_HANG_S):
            return f"has been at a step for {looks.same_s:.0f} s"
        return ""

    def _fail(self, reason: str) -> None:
        with self._lock:
            # What is ended below is no reason of its own to the thread that watches.
            if self.failure:
                return
            self.failure = f"{reason}; the engine ends with it"
        log.error("%s", self.failure)
        if self.on_failure:
            # At once: what follows may take its time.
            threading.Thread(target=self.on_failure, args=(self.failure,), daemon=True).start()
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(KILL_S)
        if self.device != "cpu":
            # Else a kernel that waits for the rank would wait for ever.
            with suppress(Exception):
                abort()
        for process in self._processes.values():
            # None is left as a zombie, also on a machine that takes its time to end a process.
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)

    def close(self) -> None:
        """End the other ranks; none is left afterwards."""
        if self._closing.is_set():
            return
        self._closing.set()
        # Others are in the middle of something, and do not read what is sent.
        asks = self.is_serving and not self.failure
        for connection in self._connections.values() if asks else ():
            with suppress(OSError):
                connection.send(Command("stop"))
        is_alone, until = not asks, time.monotonic() + (STOP_S if asks else 0.0)
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            if process.poll() is None:
                is_alone = True
                process.kill()
            process.wait()
        self._monitor.join(STOP_S)
        for connection in self._connections.values():
            connection.close()
        if self.here:
            release(self.here.number)
            with suppress(Exception):
                if is_alone and self.device != "cpu":
                    abort()
                else:
                    self.here.group.close()  # type: ignore[attr-defined]
        self._map.close()
        self._counts.close()


def spawn(
    program: Sequence[str], counts: int, rank: int, size: int
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start the process of a rank, and return it with a connection to it.

    Args:
        program: what is run; its arguments follow.
        counts: file descriptor of what ranks note (COUNT).
        rank: its number.
        size: number of ranks.
    """
    ours, theirs = socket.socketpair()
    # The same package, however it was found here.
    paths = [str(Path(nibble.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Ctrl-C is for rank 0, from the first moment on: a process begins with what its parent blocks.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with theirs:
            process = subprocess.Popen(
                [*program, *map(str, (theirs.fileno(), counts, rank, size))],
                pass_fds=(theirs.fileno(), counts), env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return process, Connection(ours.detach())


def live(parent: int, connection: int, beat: Callable[[int], None]) -> None:
    """Note that this process lives, and end it when rank 0 is gone, whatever it waits for.

    Args:
        parent: the process of rank 0.
        connection: to it; a file descriptor.
        beat: notes a sign of life, by its number.
    """
    poll = select.poll()
    # Its end alone, which the system tells at once; messages are the other thread's.
    poll.register(connection, getattr(select, "POLLRDHUP", 0))
    for beats in itertools.count(1):
        beat(beats)
        # A copy of rank 0, which a fork makes, would hold the connection open.
        if poll.poll(1000 * BEAT_S) or os.getppid() != parent:
            os._exit(1)


def one_host(places: Sequence[Place]) -> bool:
    """Return whether all ranks are on one host."""
    return len({place.host for place in places}) == 1


@contextmanager
def all_ranks(ranks: Ranks | None, function: str, *arguments: Any) -> Iterator[Rank | None]:
    """Do something on all ranks, in the body at this one; see Ranks.call(). Without other ranks None is yielded."""
    if ranks is None:
        yield None
    else:
        with ranks.call(function, *arguments) as rank:
            yield rank


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

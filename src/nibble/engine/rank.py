"""The process of a rank other than 0: it does what rank 0 does, over its part of every layer.

    python -m nibble.engine.rank CONNECTION COUNTS RANK SIZE

CONNECTION and COUNTS are file descriptors of rank 0 (ranks.py). The process ends with its parent, whatever it waits
for, and a thread notes that it lives.
"""

from __future__ import annotations

import importlib
import mmap
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from nibble.cache.residency import Copy
from nibble.engine.ranks import COUNT, Command, Failure, Rank, Start, live, one_host
from nibble.garbage import freeze_gc

if TYPE_CHECKING:
    from nibble.engine.step_numbers import StepNumbers

SAID_S = 0.2
"""How long a rank that fails stays, for rank 0 to read why."""
STEPS = struct.Struct("qq")
BEATS = struct.Struct("q")
"""The parts of COUNT, which two threads write."""


class Follower:
    """Runs the steps of rank 0 over a runner of its own.

    Args:
        start: from rank 0.
        rank: of this process.
    """

    def __init__(self, start: Start, rank: Rank) -> None:
        from nibble.engine.build import follow

        self.rank, self.start = rank, start
        self.runner = follow(start, rank)

    def compute(self, numbers: StepNumbers) -> None:
        """Compute a step."""
        self.runner.compute(numbers)

    def record(
        self, sizes: tuple[int, ...], verify_sizes: tuple[tuple[int, int], ...], captured: bool
    ) -> None:
        """Record steps of these sizes."""
        from nibble.engine.graphs import CudaGraphs, Graphs, live

        self.runner.record(
            Graphs(sizes, self.runner.device, CudaGraphs() if captured else live, verify_sizes)
        )

    def store_sampled(self, count: int) -> None:
        """Store what rank 0 has sampled."""
        import torch

        tokens_S = torch.empty(count, dtype=torch.int64, device=self.runner.device)
        self.rank.group.broadcast(tokens_S)
        self.runner.store_sampled(tokens_S)

    def save(self, copies: Sequence[Copy]) -> None:
        """Save pages to the host."""
        self.runner.save(copies)

    def test(self) -> None:
        """Run the start-up test over the pool of this rank."""
        from nibble.engine.warmup import most_rows, tests_of

        engine_plan = self.start.engine_plan
        for run in tests_of(self.runner, most_rows(engine_plan.config, engine_plan.budget)):
            run()

    def check_memory(self) -> None:
        """Check that the memory suffices, once everything is allocated."""
        import torch

        from nibble.engine.memory_check import check_memory

        if self.runner.device.type == "cuda":
            torch.cuda.synchronize()
            check_memory(self.start.engine_plan.budget, torch.cuda.mem_get_info()[0])

    def call(self, function: str, arguments: tuple[Any, ...]) -> None:
        """Call a function, `module:name`, with what this rank has, and these arguments."""
        module, _, name = function.partition(":")
        here = self.start.engine_plan, self.runner.model, self.rank
        getattr(importlib.import_module(module), name)(*here, *arguments)

    def freeze(self) -> None:
        """Leave what there is out of garbage collection: this process has it until it ends."""
        freeze_gc()

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.rank.group.barrier()


def main(connection: Connection, counts: mmap.mmap, rank: int, size: int) -> None:
    """Do what rank 0 sends until it says stop, or is gone."""
    # Ctrl-C is for rank 0.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    at = COUNT.size * rank
    beat = partial(BEATS.pack_into, counts, at + STEPS.size)
    threading.Thread(target=live, args=(os.getppid(), connection.fileno(), beat), daemon=True).start()
    note, num_done = partial(STEPS.pack_into, counts, at), 0
    try:
        start = connection.recv()
        follower = Follower(start, _connect(start, rank, size, note))
        note(1, num_done := 1)
        while (command := connection.recv()).name != "stop":
            assert isinstance(command, Command)
            note(num_done + 1, num_done)
            getattr(follower, command.name)(*command.arguments)
            num_done += 1
            note(num_done, num_done)
    except EOFError:
        os._exit(1)  # rank 0 is gone
    except BaseException as error:
        with suppress(OSError):
            connection.send(Failure(type(error).__name__, str(error)))
        # And no other way: destructors of libraries may wait for other ranks.
        time.sleep(SAID_S)
        os._exit(1)
    os._exit(0)


def _connect(start: Start, rank: int, size: int, note: Callable[[int, int], None]) -> Rank:
    """Return this rank, connected with the others, who wait until it notes that it is about to."""
    import torch

    from nibble.kernels.collectives import register
    from nibble.kernels.collectives.processes import connect, store
    from nibble.models.shards import Shard

    is_cpu, place = start.engine_plan.hardware.is_cpu, start.places[rank]
    device = torch.device("cpu") if is_cpu else torch.device("cuda", place.index)
    if is_cpu and start.threads:
        torch.set_num_threads(start.threads)
    if not is_cpu:
        torch.cuda.set_device(device)
    note(1, 0)
    shared = store(start.places[0].address, start.port, rank, size)
    group = connect(shared, rank, size, device, place.address, one_host=one_host(start.places))
    return Rank(Shard(rank, size), group, register(group), str(device))


def run(arguments: Sequence[str]) -> None:
    """Do what rank 0 sends; see the top of this file."""
    connection, counts, rank, size = map(int, arguments)
    main(Connection(connection), mmap.mmap(counts, COUNT.size * size), rank, size)


if __name__ == "__main__":
    run(sys.argv[1:])

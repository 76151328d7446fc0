"""The process of a rank other than 0: it does what rank 0 does, over its part of every layer.

    python -m nibble.engine.rank CONNECTION COUNTS RANK SIZE

CONNECTION and COUNTS are file descriptors of rank 0 (ranks.py). The process ends with its parent.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from nibble.cache.residency import Copy
from nibble.engine.ranks import COUNT, Command, Failure, Rank, Start

PARENT_POLL_S = 0.2


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

    def compute(self, numbers: Any) -> None:
        """Compute a step."""
        self.runner.compute(numbers[self.rank.shard.rank] if isinstance(numbers, list) else numbers)

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
        from nibble.engine.warmup import tests_of

        for run in tests_of(self.runner):
            run()

    def check_memory(self) -> None:
        """Check that the memory suffices, once everything is allocated."""
        import torch

        from nibble.engine.memory_check import check_memory

        if self.runner.device.type == "cuda":
            torch.cuda.synchronize()
            check_memory(self.start.engine_plan.budget, torch.cuda.mem_get_info()[0])

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.rank.group.barrier()


def main(connection: Connection, counts: mmap.mmap, rank: int, size: int) -> None:
    """Do what rank 0 sends until it says stop, or is gone."""
    # Ctrl-C is for rank 0.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    note, num_done = partial(COUNT.pack_into, counts, COUNT.size * rank), 0
    try:
        start = connection.recv()
        note(1, num_done)
        follower = Follower(start, _connect(start, rank, size))
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
        connection.send(Failure(type(error).__name__, str(error)))
        # At once: destructors of libraries may wait for other ranks.
        time.sleep(PARENT_POLL_S)
        os._exit(1)
    os._exit(0)


def _connect(start: Start, rank: int, size: int) -> Rank:
    """Return this rank, connected with the others."""
    import torch

    from nibble.kernels.collectives import register
    from nibble.kernels.collectives.processes import connect, store
    from nibble.models.shards import Shard

    is_cpu = start.engine_plan.hardware.is_cpu
    device = torch.device("cpu") if is_cpu else torch.device("cuda", rank)
    if is_cpu and start.threads:
        torch.set_num_threads(start.threads)
    if not is_cpu:
        torch.cuda.set_device(device)
    group = connect(store("127.0.0.1", start.port, rank, size), rank, size, device)
    return Rank(Shard(rank, size), group, register(group), str(device))


def _end_with_parent(parent: int) -> None:
    """End this process when rank 0 is gone, whatever it waits for."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os._exit(1)


def run(arguments: Sequence[str]) -> None:
    """Do what rank 0 sends; see the top of this file."""
    connection, counts, rank, size = map(int, arguments)
    main(Connection(connection), mmap.mmap(counts, COUNT.size * size), rank, size)


if __name__ == "__main__":
    run(sys.argv[1:])

"""Ranks that are processes: gloo on CPUs; on GPUs NCCL, and within a host memory that all write to for what is small.

On CPUs the sum is made from what all ranks have, in their order: a library's own would depend on where in a tensor a
value lies, and an answer on the batch it came in.

A decode step's few rows are added up by one launch (push.py) in a third of the time that NCCL takes. Multicast of
NVLink is not used.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from nibble.errors import BackendError
from nibble.kernels.collectives import Collectives, push

log = logging.getLogger("nibble.ranks")
dist: Any = torch.distributed  # whose stub leaves out what a build may lack
TIMEOUT_S = 1800.0
"""A rank that waits longer for another gives up: rank 0 may compile for long. engine/ranks.py notices before."""
TRIED_BYTES = tuple(8192 << n for n in range(8))
"""Sizes of sums that are timed at the start, up to push.MOST_BYTES: a row of 4,096 values in BF16, twice that, ..."""
CALLS, RUNS = 10, 5
"""Sums in a recorded graph that is timed, and how often it is."""
TRIAL_S = 60.0
"""How long the first sums through memory of other ranks may take, all sizes together."""
Way = Callable[[Tensor], Tensor]
"""To add up what all ranks have."""


def store(address: str, port: int, rank: int, size: int) -> Any:
    """Return what ranks find one another by; rank 0 serves it, at this address alone.

    Args:
        address: of rank 0.
        port: where it listens; 0 for rank 0: any.
        rank: of this process.
        size: number of ranks.
    """
    timeout = timedelta(seconds=TIMEOUT_S)
    if rank:
        return dist.TCPStore(address, port, size, is_master=False, timeout=timeout)
    # Left to itself the store listens at all addresses of the host, and whoever reaches it may change what ranks read.
    listener = socket.create_server((address, port))
    return dist.TCPStore(
        address, listener.getsockname()[1], size, is_master=True, wait_for_workers=False, timeout=timeout,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def connect(
    shared: Any,
    rank: int,
    size: int,
    device: torch.device,
    address: str = "127.0.0.1",
    *,
    one_host: bool = True,
) -> Collectives:
    """Return a rank's way to the others; all ranks must call this.

    Args:
        shared: from store().
        rank: of this process.
        size: number of ranks.
        device: of this rank.
        address: of this host, as the other ranks reach it.
        one_host: whether all ranks are on one host.
    """
    if device.type == "cpu":
        return GlooCollectives(shared, rank, size, address)
    return NcclCollectives(shared, rank, size, device, one_host=one_host)


def abort() -> None:
    """End what this process's GPU waits for of other ranks, where one is gone; a group may still be in the making."""
    push.stop_all()
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()


def ordered_sum(parts: Tensor) -> Tensor:
    """Return the sum of what ranks have [size, ...], added in their order."""
    first, *others = parts
    y = first.clone()
    for part in others:
        y += part
    return y


class GlooCollectives:
    """CPUs."""

    def __init__(self, shared: Any, rank: int, size: int, address: str = "127.0.0.1") -> None:
        self.rank, self.size = rank, size
        options = dist.ProcessGroupGloo._Options()
        # Left to itself it listens where the host's name leads, which others may reach, or nobody.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = timedelta(seconds=TIMEOUT_S)
        # Not the group of the process: any number of engines may be in it.
        self._group: Any = dist.ProcessGroupGloo(dist.PrefixStore("gloo", shared), rank, size, options)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks, in their order."""
        return ordered_sum(self.all_gather(x))

    def all_gather(self, x: Tensor) -> Tensor:
        """Return what all ranks have, [size, *x.shape]."""
        x = x.contiguous()
        parts = x.new_empty(self.size, *x.shape)
        if x.numel():
            self._group.allgather([list(parts.unbind())], [x]).wait()
        return parts

    def broadcast(self, x: Tensor) -> None:
        """Overwrite `x` by that of rank 0."""
        if x.numel():
            self._group.broadcast(x, 0).wait()

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self._group.barrier().wait()

    def close(self) -> None:
        """End the group."""
        self._group = None


class NcclCollectives:
    """GPUs, a process for each."""

    def __init__(
        self, shared: Any, rank: int, size: int, device: torch.device, *, one_host: bool = True
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        dist.init_process_group(
            "nccl", store=shared, rank=rank, world_size=size, device_id=device,
            timeout=timedelta(seconds=TIMEOUT_S),
        )  # fmt: skip
        self.barrier()
        self._push: push.PushSum | None = None
        self._ways: list[Way] = []
        """By size (TRIED_BYTES) the faster way to add up; larger sums go through NCCL."""
        # Of several hosts some ranks would wait for ever for what others cannot send.
        self.note = self._share_memory() if one_host else "sums over hosts go through NCCL"
        """What was measured, or why ranks do not write to one another's memory."""

    def _share_memory(self) -> str:
        """Let ranks write to one another's memory, if all can and add up as NCCL does; return the note."""
        reason = "another rank cannot"
        try:
            self._push = self._prepare_push()
        except Exception as error:  # of all kinds: drivers, packages, compilers
            reason = f"{type(error).__name__}: {error}"
            log.warning("rank %d of %d cannot write to other ranks' memory: %s", self.rank, self.size, reason)
        if self._all_agree(self._push is not None):
            assert self._push is not None
            if note := self._tried(self._push):
                return note
            reason = "sums through it are not NCCL's"
        if self._push is not None:
            self._push.close()
            self._push = None
        return f"sums of few rows go through NCCL: ranks cannot write to one another's memory ({reason})"

    def _tried(self, add: push.PushSum) -> str:
        """Return what was measured; nothing where sums are wrong, or what one rank writes does not reach another.

        There are machines whose drivers allow it, and whose GPUs then wait for ever for what is lost on the way.
        """
        timer = threading.Timer(TRIAL_S, add.stop)
        timer.daemon = True
        timer.start()
        note = ""
        try:
            # Small integers, whose sums are exact in any order. Three times: memory is used in turns.
            x = ((torch.arange(4096, device=self.device) + self.rank) % 7).bfloat16()
            equal = [bool((add(x + i) == self._by_nccl(x + i)).all()) for i in range(3)]
            if self._all_agree(all(equal) and not add.is_stopped):
                note = self._choose((self._by_nccl, add))
        finally:
            timer.cancel()
            timer.join()  # it must not end between this rank's vote and the others'
        if self._all_agree(bool(note) and not add.is_stopped):
            return note
        self._ways = []
        return ""

    def _prepare_push(self) -> push.PushSum:
        if os.environ.get("NCCL_P2P_DISABLE", "0") != "0":
            raise BackendError("NCCL_P2P_DISABLE is set")
        from nibble.kernels.collectives.peer_memory import PeerMemory

        memory = PeerMemory(push.memory_bytes(self.size), self.rank, self.device, self.all_gather)
        try:
            return push.PushSum(memory, self.rank, self.device)
        except Exception:
            memory.close()
            raise

    def _choose(self, ways: Sequence[Way]) -> str:
        """Keep the faster way by size, as rank 0 measures it; return what it measured, in microseconds."""
        lines = list[str]()
        for size in TRIED_BYTES:
            x = torch.ones(size // 2, dtype=torch.bfloat16, device=self.device)
            times = torch.tensor([_graph_us(partial(way, x)) for way in ways], device=self.device)
            dist.broadcast(times, 0)
            self._ways.append(ways[int(times.argmin())])
            lines.append(f"{size >> 10}K: {' / '.join(f'{us:.1f}' for us in times.tolist())}")
        return f"sums over GPUs in us, NCCL / push: {', '.join(lines)}"

    def _all_agree(self, mine: bool) -> bool:
        votes = torch.tensor([float(mine)], device=self.device)
        dist.all_reduce(votes, dist.ReduceOp.MIN)
        return bool(votes.item())

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks."""
        x = x.contiguous()
        # The size is known as the launch is recorded, and the same on all ranks.
        if (
            x.dtype != torch.bfloat16
            or not 0 < x.nbytes <= push.MOST_BYTES
            or x.nbytes % 16
            or not self._ways
        ):
            return self._by_nccl(x)
        way = next(way for way, size in zip(self._ways, TRIED_BYTES, strict=True) if x.nbytes <= size)
        return way(x)

    def _by_nccl(self, x: Tensor) -> Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y

    def all_gather(self, x: Tensor) -> Tensor:
        """Return what all ranks have, [size, *x.shape]."""
        parts = x.new_empty(self.size, *x.shape)
        dist.all_gather_into_tensor(parts, x.contiguous())
        return parts

    def broadcast(self, x: Tensor) -> None:
        """Overwrite `x` by that of rank 0."""
        dist.broadcast(x, 0)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        dist.barrier(device_ids=[self.device.index or 0])

    def close(self) -> None:
        """End the group; not where another rank is gone, for which kernels would wait for ever: see abort()."""
        self._ways = []
        if self._push is not None:
            self._push.close()
        dist.destroy_process_group()


def _graph_us(run: Callable[[], Tensor]) -> float:
    """Return how long a sum takes in a CUDA graph, in microseconds."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(CALLS):
            run()
    times = list[float]()
    for _ in range(RUNS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return 1e3 * min(times) / CALLS

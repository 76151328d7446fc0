"""Ranks that are processes: gloo on CPUs; on GPUs NCCL, and within a host symmetric memory for what is small.

On CPUs the sum is made from what all ranks have, in their order: a library's own would depend on where in a tensor a
value lies, and an answer on the batch it came in.

Symmetric memory is memory of each GPU that the others read: one launch adds up a decode step's few rows in the time
that NCCL takes to begin. Multicast of NVLink is not used.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from nibble.kernels.collectives import Collectives

dist: Any = torch.distributed  # whose stub leaves out what a build may lack
TIMEOUT_S = 600.0
"""A rank that waits longer for another gives up; engine/ranks.py notices before."""
SHARED_BYTES = 1 << 20
"""Of symmetric memory: most bytes that are added up through it."""
TRIED_BYTES = tuple(8192 << n for n in range(8))
"""Sizes of sums that are timed at the start, up to SHARED_BYTES: a row of 4,096 values in BF16, twice that, ..."""
CALLS, RUNS = 10, 5
"""Sums in a recorded graph that is timed, and how often it is."""


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

    def close(self, *, abort: bool = False) -> None:
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
        self._shared: Tensor | None = None
        self._name = ""
        self._ways: list[Callable[[Tensor], Tensor]] = []
        """By size (TRIED_BYTES) the fastest way to add up; larger sums go through NCCL."""
        # Of several hosts some ranks would wait for ever for what others cannot send.
        self.note = self._share_memory() if one_host else "sums over hosts go through NCCL"
        """What was measured, or why symmetric memory cannot be had."""

    def _share_memory(self) -> str:
        """Set symmetric memory up, where every rank can, and where it adds up as NCCL does."""
        error = ""
        try:
            self._shared, self._name = _symmetric_memory(SHARED_BYTES, self.device)
        except Exception as failure:  # of all kinds: it is a part of torch that is not stable
            error = f"{type(failure).__name__}: {failure}"
        if self._all_agree(not error):
            # Small integers, whose sums are exact in any order.
            x = (torch.arange(4096, device=self.device) % 7).bfloat16() * (self.rank + 1)
            expected = self._by_nccl(x)
            if self._all_agree(bool((self._one_shot(x) == expected).all())):
                return self._choose((self._by_nccl, self._one_shot))
            error = "it does not add up as NCCL does"
        self._shared = None
        return f"sums of few rows go through NCCL: symmetric memory is not to be had ({error or 'on another rank'})"

    def _choose(self, ways: Sequence[Callable[[Tensor], Tensor]]) -> str:
        """Keep the fastest way by size, as rank 0 measures it; return what it measured, in microseconds."""
        lines = list[str]()
        for size in TRIED_BYTES:
            x = torch.ones(size // 2, dtype=torch.bfloat16, device=self.device)
            times = torch.tensor([_graph_us(partial(way, x)) for way in ways], device=self.device)
            dist.broadcast(times, 0)
            self._ways.append(ways[int(times.argmin())])
            lines.append(f"{size >> 10}K: {' / '.join(f'{us:.1f}' for us in times.tolist())}")
        return f"sums over GPUs in us, NCCL / one-shot: {', '.join(lines)}"

    def _all_agree(self, mine: bool) -> bool:
        votes = torch.tensor([float(mine)], device=self.device)
        dist.all_reduce(votes, dist.ReduceOp.MIN)
        return bool(votes.item())

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks."""
        x = x.contiguous()
        # The size is known as the launch is recorded, and the same on all ranks.
        if x.dtype != torch.bfloat16 or not 0 < x.nbytes <= SHARED_BYTES or x.nbytes % 16 or not self._ways:
            return self._by_nccl(x)
        way = next(way for way, size in zip(self._ways, TRIED_BYTES, strict=True) if x.nbytes <= size)
        return way(x)

    def _one_shot(self, x: Tensor) -> Tensor:
        assert self._shared is not None
        part = self._shared[: x.numel()]
        part.copy_(x.view(-1))
        y: Tensor = torch.ops.symm_mem.one_shot_all_reduce(part, "sum", self._name)
        return y.view(x.shape)

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

    def close(self, *, abort: bool = False) -> None:
        """End the group; `abort` where another rank is gone, for which kernels would wait for ever."""
        self._shared = None
        if abort:
            dist.distributed_c10d._abort_process_group()
        else:
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


def _symmetric_memory(size: int, device: torch.device) -> tuple[Tensor, str]:
    """Return bytes that all ranks of the process's group share, as bfloat16, and the name of the group."""
    import torch.distributed._symmetric_memory as symm_mem

    group = dist.group.WORLD
    assert group is not None
    memory = symm_mem.empty(size // 2, dtype=torch.bfloat16, device=device)
    symm_mem.rendezvous(memory, group=group.group_name)
    return memory, group.group_name

"""Ranks that are processes: gloo on CPUs; on GPUs NCCL, and within a host symmetric memory for what is small.

On CPUs the sum is made from what all ranks have, in their order: a library's own would depend on where in a tensor a
value lies, and an answer on the batch it came in.

Symmetric memory is memory of each GPU that the others read and write: one launch adds up a decode step's few rows in
the time that NCCL takes to begin. Multicast of NVLink is not used.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from nibble.kernels.collectives import Collectives, push

dist: Any = torch.distributed  # whose stub leaves out what a build may lack
TIMEOUT_S = 600.0
"""A rank that waits longer for another gives up; engine/ranks.py notices before."""
SHARED_BYTES = 1 << 20
"""Of symmetric memory: most bytes that are added up through it."""
TRIED_BYTES = tuple(8192 << n for n in range(8))
"""Sizes of sums that are timed at the start, up to SHARED_BYTES: a row of 4,096 values in BF16, twice that, ..."""
CALLS, RUNS = 10, 5
"""Sums in a recorded graph that is timed, and how often it is."""
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
        self._ways: list[Way] = []
        """By size (TRIED_BYTES) the fastest way to add up; larger sums go through NCCL."""
        # Of several hosts some ranks would wait for ever for what others cannot send.
        self.note = self._share_memory() if one_host else "sums over hosts go through NCCL"
        """What was measured, or why symmetric memory cannot be had."""

    def _share_memory(self) -> str:
        """Set symmetric memory up, where every rank can, and where it adds up as NCCL does; return the note."""
        ways: dict[str, Way] = {"NCCL": self._by_nccl}
        reasons = list[str]()
        for name, prepare in (("one-shot", self._prepare_one_shot), ("push", self._prepare_push)):
            # The second way is tried only where the first shows that ranks see one another's memory.
            if not reasons:
                way, reason = self._tried(prepare)
                if way:
                    ways[name] = way
                else:
                    reasons.append(f"{name}: {reason}")
        return "; ".join((self._choose(ways), *reasons))

    def _tried(self, prepare: Callable[[], Way]) -> tuple[Way | None, str]:
        """Return a way to add up, None where a rank cannot or where it is wrong, and why."""
        way, reason = None, "another rank cannot"
        try:
            way = prepare()
        except Exception as failure:  # of all kinds: symmetric memory is a part of torch that is not stable
            reason = f"{type(failure).__name__}: {failure}"
        if not self._all_agree(way is not None):
            return None, reason
        assert way is not None
        # Small integers, whose sums are exact in any order. Twice, and once more: memory is used in turns.
        x = (torch.arange(4096, device=self.device) % 7).bfloat16() * (self.rank + 1)
        equal = [bool((way(x + i) == self._by_nccl(x + i)).all()) for i in range(3)]
        return (way, "") if self._all_agree(all(equal)) else (None, "it does not add up as NCCL does")

    def _choose(self, ways: Mapping[str, Way]) -> str:
        """Keep the fastest way by size, as rank 0 measures it; return what it measured, in microseconds."""
        if len(ways) == 1:
            return "sums over GPUs go through NCCL"
        lines = list[str]()
        for size in TRIED_BYTES:
            x = torch.ones(size // 2, dtype=torch.bfloat16, device=self.device)
            tried = [way for name, way in ways.items() if name != "push" or size <= push.MOST_BYTES]
            times = torch.tensor([_graph_us(partial(way, x)) for way in tried], device=self.device)
            dist.broadcast(times, 0)
            self._ways.append(tried[int(times.argmin())])
            lines.append(f"{size >> 10}K: {' / '.join(f'{us:.1f}' for us in times.tolist())}")
        return f"sums over GPUs in us, {' / '.join(ways)}: {', '.join(lines)}"

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

    def _prepare_one_shot(self) -> Way:
        self._shared, _ = _symmetric_memory(SHARED_BYTES, self.device)
        return self._one_shot

    def _prepare_push(self) -> Way:
        # Nobody sends before all have agreed, for which all have cleared what they receive in.
        return push.PushSum(*_symmetric_memory(push.memory_bytes(self.size), self.device))

    def _one_shot(self, x: Tensor) -> Tensor:
        assert self._shared is not None
        part = self._shared[: x.numel()]
        part.copy_(x.view(-1))
        y: Tensor = torch.ops.symm_mem.one_shot_all_reduce(part, "sum", _group_name())
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
        self._ways = []
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


def _symmetric_memory(size: int, device: torch.device) -> tuple[Tensor, Any]:
    """Return bytes that all ranks of the process's group share, as bfloat16, and torch's way to those of the others."""
    import torch.distributed._symmetric_memory as symm_mem

    memory = symm_mem.empty(size // 2, dtype=torch.bfloat16, device=device)
    return memory, symm_mem.rendezvous(memory, group=_group_name())


def _group_name() -> Any:
    group = dist.group.WORLD
    assert group is not None
    return group.group_name

"""Ranks that are processes of one host: gloo on CPUs; on GPUs NCCL, and symmetric memory for what is small.

On CPUs the sum is made from what all ranks have, in their order: a library's own would depend on where in a tensor a
value lies, and an answer on the batch it came in.

Symmetric memory is memory of each GPU that the others read: one launch adds up a decode step's few rows in the time
that NCCL takes to begin. Multicast of NVLink is not used.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nibble.kernels.collectives import Collectives

TIMEOUT_S = 600.0
"""A rank that waits longer for another gives up; engine/ranks.py notices before."""
ONE_SHOT_BYTES = 512 << 10
"""Most bytes that are added up in one launch; NCCL is faster beyond (two H200: 128 rows of 4,096 values in BF16 take
13 us, with NCCL 25; 512 rows 31 and 46, and two copies of such rows take some)."""
log = logging.getLogger("nibble.ranks")


def store(address: str, port: int, rank: int, size: int) -> dist.Store:
    """Return what ranks find one another by; rank 0 serves it.

    Args:
        address: of rank 0.
        port: where it listens; 0 for rank 0: any.
        rank: of this process.
        size: number of ranks.
    """
    return dist.TCPStore(
        address, port, size, is_master=rank == 0, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT_S)
    )


def connect(shared: dist.Store, rank: int, size: int, device: torch.device) -> Collectives:
    """Return a rank's way to the others; all ranks must call this.

    Args:
        shared: from store().
        rank: of this process.
        size: number of ranks.
        device: of this rank.
    """
    if device.type == "cpu":
        return GlooCollectives(shared, rank, size)
    return NcclCollectives(shared, rank, size, device)


class GlooCollectives:
    """CPUs of one host."""

    def __init__(self, shared: dist.Store, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        # Not the group of the process: any number of engines may be in it.
        self._group: Any = dist.ProcessGroupGloo(
            dist.PrefixStore("gloo", shared), rank, size, timedelta(seconds=TIMEOUT_S)
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks, in their order."""
        first, *others = self.all_gather(x)
        y = first.clone()
        for part in others:
            y += part
        return y

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
    """GPUs of one host, a process for each."""

    def __init__(self, shared: dist.Store, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, size, device
        dist.init_process_group(
            "nccl", store=shared, rank=rank, world_size=size, device_id=device,
            timeout=timedelta(seconds=TIMEOUT_S),
        )  # fmt: skip
        self.barrier()
        self._shared: Tensor | None = None
        self._name = ""
        self.note = self._share_memory()
        """Why small sums go another way than symmetric memory; empty where they do not."""

    def _share_memory(self) -> str:
        """Set symmetric memory up, where every rank can, and where it adds up as NCCL does."""
        error = ""
        try:
            self._shared, self._name = _symmetric_memory(ONE_SHOT_BYTES, self.device)
        except Exception as failure:  # of all kinds: it is a part of torch that is not stable
            error = f"{type(failure).__name__}: {failure}"
        if self._all_agree(not error):
            # Small integers, whose sums are exact in any order.
            x = (torch.arange(4096, device=self.device) % 7).bfloat16() * (self.rank + 1)
            if self._all_agree(bool((self._one_shot(x) == self._by_nccl(x)).all())):
                return ""
            error = "it does not add up as NCCL does"
        self._shared = None
        return f"sums of few rows go through NCCL: symmetric memory is not to be had ({error or 'on another rank'})"

    def _all_agree(self, mine: bool) -> bool:
        votes = torch.tensor([float(mine)], device=self.device)
        dist.all_reduce(votes, dist.ReduceOp.MIN)
        return bool(votes.item())

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks."""
        x = x.contiguous()
        # The size is known as the launch is recorded, and the same on all ranks.
        is_small = 0 < x.nbytes <= ONE_SHOT_BYTES and x.nbytes % 16 == 0
        if self._shared is not None and x.dtype == torch.bfloat16 and is_small:
            return self._one_shot(x)
        return self._by_nccl(x)

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


def _symmetric_memory(size: int, device: torch.device) -> tuple[Tensor, str]:
    """Return bytes that all ranks of the process's group share, as bfloat16, and the name of the group."""
    import torch.distributed._symmetric_memory as symm_mem

    group = dist.group.WORLD
    assert group is not None
    memory = symm_mem.empty(size // 2, dtype=torch.bfloat16, device=device)
    symm_mem.rendezvous(memory, group=group.group_name)
    return memory, group.group_name

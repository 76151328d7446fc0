"""Sums of a few rows over the GPUs of a host in one launch (push.cu).

Each GPU writes its values into memory of the others, with the number of the sum beside every four, and waits for
theirs. There is no barrier in front or behind, and the kernel starts while the one in front of it ends. What NCCL calls
LL ("low latency") is the same kind of packet.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor

from nibble.kernels import SM90, cdiv, gpu_of

if TYPE_CHECKING:
    from nibble.kernels.collectives.peer_memory import PeerMemory

SOURCE = Path(__file__).with_name("push.cu")
THREADS = 256
PACKET_BYTES, VALUES_BYTES = 16, 8
"""Of a packet, and of the values in it."""
MOST_BYTES = 1 << 20
"""Of a sum: 128 rows of 4,096 values in BF16."""
MOST_PACKETS = MOST_BYTES // VALUES_BYTES
_stopped = list[Tensor]()
"""What kernels may still read that were told to stop: it must not be given to anything else."""


def memory_bytes(size: int) -> int:
    """Return what each rank receives in: two halves, of packets of each rank."""
    return 2 * size * MOST_PACKETS * PACKET_BYTES


def stop_all() -> None:
    """End all kernels of this process that wait for other ranks, now and from now on."""
    for one in list(_all):
        one.stop()


def macros(size: int) -> dict[str, int]:
    """Return the macros of push.cu for so many ranks."""
    return {"RANKS": size, "MOST": MOST_PACKETS}


class PushSum:
    """The sum over the ranks of a group, of at most MOST_BYTES in BF16. All ranks call the same, in the same order."""

    def __init__(self, memory: PeerMemory, rank: int, device: torch.device) -> None:
        """Prepare the kernel.

        Args:
            memory: memory_bytes() of each rank; all have cleared theirs before any sends.
            rank: of this process.
            device: of this rank.
        """
        self._memory, self._rank, size = memory, rank, len(memory.addresses)
        self._addresses = torch.tensor(memory.addresses, device=device)
        self._numbers = torch.zeros(cdiv(MOST_PACKETS, THREADS), dtype=torch.int32, device=device)
        # In memory of the host, which a kernel that waits for a rank that is gone reads now and then.
        self._is_stopped = torch.zeros(1, dtype=torch.int32).pin_memory()
        gpu = gpu_of(device)
        self._starts_early = gpu.arch >= SM90
        self._kernel = _kernel(gpu.arch, device.index or 0, size)
        _all.add(self)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the sum of `x`, contiguous in BF16, a multiple of 16 bytes."""
        from nibble.kernels.nvrtc import INT, POINTER

        x = x.clone() if x.data_ptr() % VALUES_BYTES else x
        y, packets = torch.empty_like(x), x.nbytes // VALUES_BYTES
        tensors = (x, y, self._addresses, self._numbers, self._is_stopped)
        self._kernel.launch(
            cdiv(packets, THREADS), THREADS, 0, (*(POINTER,) * len(tensors), INT, INT),
            (*(tensor.data_ptr() for tensor in tensors), packets, self._rank), starts_early=self._starts_early,
        )  # fmt: skip
        return y

    @property
    def is_stopped(self) -> bool:
        """Return whether sums wait for no other rank any more, and what they return means nothing."""
        return bool(self._is_stopped)

    def stop(self) -> None:
        """End kernels that wait for other ranks, now and from now on. Any thread may call it."""
        # A tensor of the one mode could not be written to in the other; here, both can.
        with torch.inference_mode():
            self._is_stopped.fill_(1)
        _stopped.append(self._is_stopped)

    def close(self) -> None:
        """Let go of the memory; no sum is needed any more."""
        self.stop()
        torch.cuda.synchronize(self._addresses.device)
        self._memory.close()


_all = WeakSet[PushSum]()


@cache
def _kernel(arch: int, device: int, size: int) -> Any:
    from nibble.kernels.nvrtc import Kernel, code_of

    return Kernel(code_of(SOURCE, arch, macros(size)), "push_sum", 0)

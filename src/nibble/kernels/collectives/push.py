"""Sums of a few rows over the GPUs of a host in one launch (push.cu).

Each GPU writes its values into memory of the others, with the number of the sum beside every four, and waits for
theirs. There is no barrier in front or behind, and the kernel starts while the one in front of it ends. What NCCL calls
LL ("low latency") is the same kind of packet.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nibble.kernels import SM90, cdiv, gpu_of

SOURCE = Path(__file__).with_name("push.cu")
THREADS = 256
PACKET_BYTES, VALUES_BYTES = 16, 8
"""Of a packet, and of the values in it."""
MOST_BYTES = 256 << 10
"""Of a sum: 32 rows of 4,096 values in BF16. All blocks of a launch run at a time, as they wait for other GPUs."""
MOST_PACKETS = MOST_BYTES // VALUES_BYTES


def memory_bytes(size: int) -> int:
    """Return what each rank receives in: two halves, of packets of each rank."""
    return 2 * size * MOST_PACKETS * PACKET_BYTES


def macros(size: int) -> dict[str, int]:
    """Return the macros of push.cu for so many ranks."""
    return {"RANKS": size, "MOST": MOST_PACKETS}


class PushSum:
    """The sum over the ranks of a group, of at most MOST_BYTES in BF16. All ranks call the same, in the same order."""

    def __init__(self, memory: Tensor, shared: Any) -> None:
        """Prepare the kernel, and clear what this rank receives in, before any rank sends.

        Args:
            memory: memory_bytes() of this rank, which the others write to.
            shared: torch's handle to those of all ranks (_SymmetricMemory).
        """
        self._memory, self._shared = memory.zero_(), shared
        self._rank, self._size = shared.rank, shared.world_size
        parts = [shared.get_buffer(rank, memory.shape, memory.dtype) for rank in range(self._size)]
        self._addresses = torch.tensor([part.data_ptr() for part in parts], device=memory.device)
        self._numbers = torch.zeros(cdiv(MOST_PACKETS, THREADS), dtype=torch.int32, device=memory.device)
        gpu = gpu_of(memory.device)
        self._starts_early = gpu.arch >= SM90
        self._kernel = _kernel(gpu.arch, memory.device.index or 0, self._size)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the sum of `x`, contiguous in BF16, a multiple of 16 bytes."""
        from nibble.kernels.nvrtc import INT, POINTER

        y, packets = torch.empty_like(x), x.nbytes // VALUES_BYTES
        tensors = (x, y, self._addresses, self._numbers)
        self._kernel.launch(
            cdiv(packets, THREADS), THREADS, 0, (*(POINTER,) * len(tensors), INT, INT),
            (*(tensor.data_ptr() for tensor in tensors), packets, self._rank), starts_early=self._starts_early,
        )  # fmt: skip
        return y


@cache
def _kernel(arch: int, device: int, size: int) -> Any:
    from nibble.kernels.nvrtc import Kernel, code_of

    return Kernel(code_of(SOURCE, arch, macros(size)), "push_sum", 0)

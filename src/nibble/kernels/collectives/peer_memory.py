"""Memory of a GPU that GPUs of other processes of the host write to.

CUDA's interprocess handles (cuIpcGetMemHandle), and not torch's symmetric memory: what that asks other ranks by is
numbered through the life of a process, so a second engine of a process would wait for ever for ranks that are new.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress

import torch
from cuda.bindings import driver
from torch import Tensor

from nibble.errors import BackendError
from nibble.kernels.nvrtc import check

HANDLE_BYTES = 64
_PEER_ACCESS = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class PeerMemory:
    """As many bytes of each rank; all ranks make one at the same time."""

    addresses: list[int]
    """Of each rank's, as this process reaches it."""

    def __init__(
        self, size: int, rank: int, device: torch.device, gather: Callable[[Tensor], Tensor]
    ) -> None:
        """Take memory, zero, and find that of the others.

        Args:
            size: bytes.
            rank: of this process.
            device: of this rank, the current one.
            gather: puts what all ranks have into one tensor, [ranks, *].

        Raises:
            BackendError: this rank, or another, cannot.
        """
        self._own, self._rank = 0, rank
        self.addresses = []
        handle, reason = bytes(HANDLE_BYTES), "another rank cannot"
        try:
            handle = self._take(size)
        except Exception as error:  # of all kinds: drivers, packages
            reason = f"{type(error).__name__}: {error}"
        # Whoever cannot says so by zeros: the others wait for what it has.
        handles = gather(torch.frombuffer(bytearray(handle), dtype=torch.uint8).to(device)).cpu()
        if not bool(handles.any(1).all()):
            self.close()
            raise BackendError(reason)
        try:
            for other, values in enumerate(handles.tolist()):
                self.addresses.append(self._own if other == rank else _opened(bytes(values)))
        except Exception:
            self.close()
            raise

    def _take(self, size: int) -> bytes:
        torch.cuda.current_stream()  # makes torch's context current
        self._own = int(check(driver.cuMemAlloc(size), f"{size} bytes"))
        check(driver.cuMemsetD8(self._own, 0, size), "cuMemsetD8")
        check(driver.cuCtxSynchronize(), "cuCtxSynchronize")
        handle = check(driver.cuIpcGetMemHandle(self._own), "cuIpcGetMemHandle")
        return ctypes.string_at(handle.getPtr(), HANDLE_BYTES)

    def close(self) -> None:
        """Let go of all of it; no kernel uses it any more."""
        for rank, address in enumerate(self.addresses):
            if rank != self._rank:
                with suppress(BackendError):
                    check(driver.cuIpcCloseMemHandle(address), "cuIpcCloseMemHandle")
        if self._own:
            with suppress(BackendError):
                check(driver.cuMemFree(self._own), "cuMemFree")
        self._own, self.addresses = 0, []


def _opened(values: bytes) -> int:
    handle = driver.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), values, HANDLE_BYTES)
    return int(check(driver.cuIpcOpenMemHandle(handle, _PEER_ACCESS), "cuIpcOpenMemHandle"))

"""Memory of the host that kernels of a GPU read and write in place, over the link between them.

It is managed memory that stays with the host and is mapped into the GPU. Nothing ever migrates: what counts is that the
driver takes pages of 2 MiB for it and maps them as such, where memory that is allocated as pinned, or pinned later, is
mapped in pages of 4 KiB. Reading rows from all over many GiB is bound by the look-up of addresses: on one H200 it goes
at 45 GB/s in place of 26 for rows of 656 bytes, and at 41 in place of 17 for 416. Where a driver cannot share managed
memory with a GPU at work, or has none to give, memory is pinned.

Source: CUDA driver API, unified memory: cuMemAllocManaged, cuMemAdvise, cuMemPrefetchAsync.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nibble.errors import CapacityError

ATTACH_GLOBAL = 1
PREFERRED_LOCATION, ACCESSED_BY = 3, 5
"""Advice to the driver: where pages stay, and who has them mapped."""
HOST = -1
CONCURRENT_MANAGED_ACCESS = 89
"""Attribute of a device: whether the host may touch managed memory while the device works on it."""
MEMORY_TYPE = 2
"""Attribute of a pointer, which only those have that the driver knows."""


def empty(shape: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate a tensor of the CPU that kernels on a GPU reach, uninitialised.

    Args:
        shape: Of the tensor.
        dtype: Of the tensor.
        device: The GPU.

    Returns:
        A tensor on the CPU.

    Raises:
        CapacityError: The memory cannot be shared with the GPU.
    """
    size = math.prod(shape) * dtype.itemsize
    index = torch.cuda.current_device() if device.index is None else device.index
    with torch.cuda.device(index):
        torch.cuda.synchronize()  # the runtime makes a thread's context current, which the driver's calls need
        memory = _managed(size, index) if size and _shares(index) else None
        memory = _pinned(size) if memory is None else memory
    return memory.view(dtype).view(*shape)


def reachable(tensor: Tensor, device: torch.device) -> bool:
    """Return whether kernels on `device` can read and write `tensor`, which may lie in the host's memory."""
    if tensor.device.type == device.type:
        return True
    # The driver knows an address of the host only if its memory is managed or pinned.
    kind = ctypes.c_uint()
    pointer = ctypes.c_uint64(tensor.data_ptr())
    return (
        device.type == "cuda"
        and _driver().cuPointerGetAttribute(ctypes.byref(kind), MEMORY_TYPE, pointer) == 0
    )


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _shares(index: int) -> bool:
    shares = ctypes.c_int()
    failed = _driver().cuDeviceGetAttribute(ctypes.byref(shares), CONCURRENT_MANAGED_ACCESS, index)
    return not failed and bool(shares.value)


def _managed(size: int, index: int) -> Tensor | None:
    """Allocate bytes that stay with the host; None where the driver gives none, or does not take the advice."""
    driver, pointer, length = _driver(), ctypes.c_uint64(), ctypes.c_size_t(size)
    if driver.cuMemAllocManaged(ctypes.byref(pointer), length, ATTACH_GLOBAL):
        return None
    bytes_ = (ctypes.c_uint8 * size).from_address(pointer.value)
    # At exit the driver frees it by itself, and may be unloaded before this would run.
    weakref.finalize(bytes_, driver.cuMemFree_v2, pointer).atexit = False
    failed = (
        driver.cuMemAdvise(pointer, length, PREFERRED_LOCATION, HOST)
        or driver.cuMemAdvise(pointer, length, ACCESSED_BY, index)
        # all pages are made present now, so that no access has to wait for one
        or driver.cuMemPrefetchAsync(pointer, length, HOST, None)
        or driver.cuStreamSynchronize(None)
    )
    return None if failed else torch.frombuffer(bytes_, dtype=torch.uint8)


def _pinned(size: int) -> Tensor:
    """Allocate ordinary memory, locked. PyTorch's own pinned memory comes in powers of two."""
    tensor = torch.empty(size, dtype=torch.uint8)
    if size:
        storage, runtime = tensor.untyped_storage(), torch.cuda.cudart()
        if error := int(runtime.cudaHostRegister(storage.data_ptr(), size, 0)):
            raise CapacityError(
                f"{size >> 20} MiB of the host's memory cannot be shared with the GPU (CUDA error {error}); "
                "a smaller --hisparse host_memory=..., or a higher limit of locked memory (ulimit -l), would help"
            )
        weakref.finalize(storage, runtime.cudaHostUnregister, storage.data_ptr())
    return tensor

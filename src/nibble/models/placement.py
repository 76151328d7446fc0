"""Tensors of a checkpoint on their way from its files to the device, one after the other.

Transformers' loader asks each tensor for its values, and then for them on the host, where it would keep all of them
until the model is whole. Those that are read here are on the model's device at once, and stay there; what is left in
host memory is what is being read.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from nibble.models.hub import weight_files
from nibble.models.shards import PartialSlice, Split


class Placed(Tensor):
    """A tensor where it shall be, of which the loader can change the dtype alone; what is made of it is plain."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to and kwargs and "device" in kwargs:
            kwargs = {"dtype": kwargs.get("dtype") or args[0].dtype}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return result.as_subclass(Tensor) if isinstance(result, cls) else result


class PlacedSlice:
    """A tensor of a file, with what Transformers' loader asks of safetensors' slices."""

    def __init__(self, stored: Any, device: torch.device) -> None:
        self._stored, self._device = stored, device

    def part(self, split: Split) -> PlacedSlice:
        """Return a rank's part of it, of which alone is read."""
        return PlacedSlice(PartialSlice(self._stored, split), self._device)

    def __getitem__(self, index: Any) -> Tensor:
        x: Tensor = self._stored[index]
        placed = place(x, self._device)
        release([x], self._device)
        return placed


def place(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, where the loader leaves it."""
    # Exactly this class: placeholders of experts (pack.py) are where they shall be.
    return x.to(device).as_subclass(Placed) if type(x) is Tensor else x


def stored_tensors(folder: Path, device: torch.device, stack: ExitStack) -> dict[str, Any]:
    """Return a checkpoint's tensors by name, read when they are asked for.

    Args:
        folder: With safetensors files.
        device: Where they shall be.
        stack: Keeps the files open.
    """
    files = [stack.enter_context(safe_open(path, "pt")) for path in weight_files(folder)]
    return {name: PlacedSlice(file.get_slice(name), device) for file in files for name in file.keys()}  # noqa: SIM118


def release(tensors: Iterable[Tensor], device: torch.device) -> None:
    """Give back the host's pages of tensors of a file, which have been copied to the device.

    Safetensors maps files, and what was read of them counts as memory of the process, up to the whole checkpoint.
    """
    if device.type == "cpu" or not hasattr(mmap, "MADV_DONTNEED"):
        return
    size = mmap.PAGESIZE
    for x in tensors:
        # Pages that are shared with a neighbour stay.
        begin, end = -(-x.data_ptr() // size) * size, (x.data_ptr() + x.nbytes) // size * size
        if end > begin:
            _libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)

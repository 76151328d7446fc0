"""Numbers of the host, sent to a device."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from nibble.kernels import ALIGNED


def to_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a list of numbers as a tensor; the host does not wait until it has arrived.

    Args:
        values: the numbers.
        dtype: of the tensor.
        device: where it is to be.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    # The host can go on during a copy only if that reads from pinned memory.
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


class PinnedBuffers:
    """Pinned memory, from where a copy to the device waits for nothing: a few buffers, in turn.

    To pin memory for each copy would take longer than the copy, and a step waits for it. What is copied from a buffer
    is copied on one stream, and before the next buffer is taken.
    """

    COUNT = 8
    """Where steps are read, the host is two of them ahead at most, each of a few copies: it hardly ever waits."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._next = device, 0
        self._buffers = [torch.empty(0, dtype=torch.int64)] * self.COUNT
        self._copied: list[torch.cuda.Event | None] = [None] * self.COUNT

    def put(self, ints: Tensor) -> Tensor:
        """Return a pinned copy of int64 numbers, which stays until COUNT - 1 others were made."""
        last, place = self._next - 1, self._next
        if len(self._buffers[last]):
            event = self._copied[last] = self._copied[last] or torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
        # Only now: if this is interrupted, the last buffer's event is recorded again.
        self._next = (place + 1) % self.COUNT
        if before := self._copied[place]:
            before.synchronize()
        if len(self._buffers[place]) < len(ints):
            with torch.inference_mode(False):  # what is made in inference mode can be written there alone
                self._buffers[place] = torch.empty(2 * len(ints), dtype=torch.int64, pin_memory=True)
        return self._buffers[place][: len(ints)].copy_(ints)


class HostInputs:
    """Integers that recorded steps copy to the device themselves, as the first of all that they do.

    Where the device waits for a step, it then begins sooner than after a copy that the host launches. Those of a step
    that is launched before the one in front of it has copied its own are sent behind that one, and the step takes what
    has the higher number.

    Args:
        count: int64 integers.
        device: where steps read them.
    """

    HEADER = ALIGNED
    """Integers before them: their number, and as many as align the others."""

    def __init__(self, count: int, device: torch.device) -> None:
        is_cuda, total = device.type == "cuda", self.HEADER + count
        self.on_device, self.sent_ahead = (
            torch.zeros(total, dtype=torch.int64, device=device) for _ in range(2)
        )
        self.on_host = torch.zeros(total, dtype=torch.int64, pin_memory=is_cuda)
        self._address, self._used = self.on_host.data_ptr(), torch.cuda.Event() if is_cuda else None
        self._number = 0

    def copy(self, count: int) -> Tensor:
        """Copy the first integers to the device, and return them there; steps record this."""
        total = self.HEADER + count
        self.on_device[:total].copy_(self.on_host[:total], non_blocking=True)
        return self.on_device[self.HEADER : total]

    def next_number(self) -> int:
        """Return the number of the next inputs, which is higher than all before."""
        self._number += 1
        return self._number

    def write(self, ints: array[int], part: slice) -> None:
        """Write a part of int64 integers, with their header, once the last step that copies them has ended."""
        assert 0 <= part.start <= part.stop <= len(ints) and part.stop - part.start <= len(self.on_host)
        if self._used:
            self._used.synchronize()
        # Without the price of an operator.
        address, size = ints.buffer_info()[0], ints.itemsize
        ctypes.memmove(self._address, address + size * part.start, size * (part.stop - part.start))

    def send(self, ints: Tensor) -> None:
        """Send int64 integers of the host, with their header, behind all that was launched, for the next step."""
        self.sent_ahead[: len(ints)].copy_(ints, non_blocking=True)

    def note_step(self) -> None:
        """Note that a step that copies them was launched on the current stream."""
        if self._used:
            self._used.record()

"""Copies of whole slots in Triton: all tensors of all layers in one launch.

Shape suffixes: N tensors, I items of a tile. Names in capitals are constants of the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels import cdiv
from nibble.kernels.recurrence import naive
from nibble.kernels.recurrence.types import LayerState
from nibble.kernels.transfer import to_device

ITEMS = 2048
"""Items that a program copies."""
UNITS = {16: torch.int64, 1: torch.uint8}
"""What items are, by what the bytes of a slot must be a multiple of."""

Pair = tuple[int, int]
"""A slot and the one that gets what is in it."""


@triton.jit
def copy_kernel(table, pairs, N, UNIT: tl.constexpr, I: tl.constexpr):  # noqa: E741
    """Copy a part of a tensor's slot. Grid: parts, pairs, tensors.

    table: Of each tensor its address, the items of a slot, and those from one slot to the next.
    """
    tensor, pair = tl.program_id(2), tl.program_id(1)
    items = tl.load(table + N + tensor)
    i = tl.program_id(0).to(tl.int64) * I + tl.arange(0, I)
    if tl.program_id(0) * I < items:
        address, stride = tl.load(table + tensor), tl.load(table + 2 * N + tensor)
        source, target = tl.load(pairs + 2 * pair), tl.load(pairs + 2 * pair + 1)
        slots = tl.multiple_of(address, 16).to(tl.pointer_type(UNIT))
        if tl.int64 == UNIT:
            stride = tl.multiple_of(stride, 2)
        item_I = tl.load(slots + source * stride + i, mask=i < items)
        tl.store(slots + target * stride + i, item_I, mask=i < items)


@dataclass(frozen=True, slots=True)
class CopyTable:
    """What copy_kernel reads of tensors that are copied by the same items."""

    rows: Tensor
    """int64, on the device."""
    num_tensors: int
    unit: int
    """Of UNITS."""
    parts: int
    """Programs of the tensor with the largest slots."""


def tables_of(layers: Sequence[LayerState]) -> tuple[CopyTable, ...]:
    """Return the tables of all tensors that some layers have; they hold as long as the tensors do."""
    tensors = [
        tensor
        for layer in layers
        for tensor in (*layer.planes, layer.keys_SPGK, layer.updates_SPHV, layer.decays, layer.inputs_SPC)
        if tensor[:1].numel()
    ]
    alike = ([tensor for tensor in tensors if _unit(tensor) == unit] for unit in UNITS)
    return tuple(_table(group, unit) for group, unit in zip(alike, UNITS, strict=True) if group)


def copy_slots(
    layers: Sequence[LayerState],
    sources: Sequence[int],
    targets: Sequence[int],
    tables: Sequence[CopyTable] = (),
) -> None:
    """Copy whole slots, as they are before any is written; see the package."""
    pairs = [pair for pair in zip(sources, targets, strict=True) if pair[0] != pair[1]]
    tables = tables or tables_of(layers)
    if not pairs or not tables:
        return
    waves = list(_waves(pairs))
    if sum(map(len, waves)) < len(pairs):  # they go round in a circle
        naive.copy_slots(layers, sources, targets)
        return
    flat = [slot for wave in waves for pair in wave for slot in pair]
    sent = to_device(flat, torch.int64, tables[0].rows.device)
    for table in tables:
        first, kind = 0, tl.int64 if table.unit == 16 else tl.uint8
        for wave in waves:
            copy_kernel[table.parts, len(wave), table.num_tensors](
                table.rows, sent[first:], table.num_tensors, UNIT=kind, I=ITEMS, num_warps=8
            )
            first += 2 * len(wave)


def _waves(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Yield pairs that can be copied at once, in an order in which each slot is read before it is written."""
    left = list(pairs)
    while left:
        # What another pair still reads is not written yet.
        read = [source for source, _ in left]
        wave = [pair for pair in left if pair[1] not in read]
        if not wave:
            return
        yield wave
        left = [pair for pair in left if pair not in wave]


def _slot_bytes(tensor: Tensor) -> int:
    return tensor[0].numel() * tensor.itemsize


def _unit(tensor: Tensor) -> int:
    step = tensor.stride(0) * tensor.itemsize
    return 1 if (_slot_bytes(tensor) | step | tensor.data_ptr()) % 16 else 16


def _table(tensors: Sequence[Tensor], unit: int) -> CopyTable:
    item = UNITS[unit].itemsize
    rows = [
        *(tensor.data_ptr() for tensor in tensors),
        *(_slot_bytes(tensor) // item for tensor in tensors),
        *(tensor.stride(0) * tensor.itemsize // item for tensor in tensors),
    ]
    parts = cdiv(max(map(_slot_bytes, tensors)) // item, ITEMS)
    return CopyTable(to_device(rows, torch.int64, tensors[0].device), len(tensors), unit, parts)

"""Recurrent states of rows of a batch, for a cache for Transformers.

A row's states lie in a slot. Rows with a common past share one, and a slot that several hold is copied before one of
them goes on. The last tokens of a short call may be taken back, as drafts are: the states stay before them until the
next call. A call that brings matrices forward works on a copy of its rows' slots, so that one that fails leaves
everything as it was; a call of a single token does so every BLOCK tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nibble.attention.recurrent import RecurrentStates
from nibble.cache.radix_cache import PageAllocator
from nibble.kernels.recurrence import BLOCK, LayerState, StateBatch, copy_slots, layer_state
from nibble.model_spec import RecurrentGroup

TAKE_BACK = BLOCK
"""Most tokens of a call that may be taken back."""
FIRST_SLOTS = 4
"""Slots that a pool begins with."""


@dataclass(frozen=True, slots=True)
class RowState:
    """What one row keeps in its slot."""

    slot: int
    at: int
    """The position of the matrices, a multiple of BLOCK."""
    settled: int
    """Tokens that cannot be taken back."""


@dataclass(frozen=True, slots=True)
class StateStep:
    """One call: what layers are given, and what rows have once it has succeeded."""

    states: RecurrentStates
    before: tuple[RowState | None, ...]
    after: tuple[RowState, ...]


class StateStore:
    """Slots in the tensors of all recurrent layers. The pool grows as it fills up.

    Args:
        groups: layers with recurrent states.
        format: of matrices, one of kernels/state_formats.FORMATS.
        dtype: the compute dtype.
        device: where slots are.
    """

    def __init__(
        self, groups: Sequence[RecurrentGroup], format: str, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._groups, self._format, self._dtype, self._device = groups, format, dtype, device
        self._layers = self._allocate(FIRST_SLOTS)
        self._slots = PageAllocator(FIRST_SLOTS)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all slots."""
        return sum(tensor.nbytes for state in self._layers.values() for tensor in _tensors(state))

    @property
    def num_used_slots(self) -> int:
        """Return the number of slots that rows hold."""
        return self._slots.num_pages - self._slots.num_free

    def begin(
        self, rows: Sequence[RowState | None], starts: Sequence[int], counts: Sequence[int]
    ) -> StateStep:
        """Return a call, with a slot for each of its rows; commit() or withdraw() it.

        Args:
            rows: with at least one new token each; None: nothing is stored yet.
            starts: tokens of each that are stored.
            counts: new tokens.
        """
        after, copies = list[RowState](), list[tuple[int, int]]()
        self._make_room(len(rows))
        for row, start, count in zip(rows, starts, counts, strict=True):
            settled = start + max(count - TAKE_BACK, 0)
            at = settled // BLOCK * BLOCK
            stays = row is not None and row.at == start // BLOCK * BLOCK == at
            if row is not None and stays and self._slots.ref_count(row.slot) == 1:
                after.append(RowState(row.slot, at, settled))
                continue
            (slot,) = self._slots.allocate(1)
            after.append(RowState(slot, at, settled))
            if row is not None:
                copies.append((row.slot, slot))
        if copies:
            copy_slots(tuple(self._layers.values()), *zip(*copies, strict=True))
        batch = StateBatch(
            tuple(state.slot for state in after),
            tuple(starts),
            tuple(counts),
            tuple(row.at if row else 0 for row in rows),
            tuple(state.settled - start for state, start in zip(after, starts, strict=True)),
        )
        return StateStep(RecurrentStates(self._layers, batch), tuple(rows), tuple(after))

    def commit(self, step: StateStep) -> None:
        """Give back the slots that rows had before a call that has succeeded."""
        for old, new in zip(step.before, step.after, strict=True):
            if old is not None and old.slot != new.slot:
                self._slots.release((old.slot,))

    def withdraw(self, step: StateStep) -> None:
        """Give back the slots of a call that has failed; rows have what they had before."""
        for old, new in zip(step.before, step.after, strict=True):
            if old is None or old.slot != new.slot:
                self._slots.release((new.slot,))

    def retain(self, state: RowState) -> None:
        """Add a row with the same past."""
        self._slots.retain((state.slot,))

    def release(self, state: RowState) -> None:
        """Drop a row."""
        self._slots.release((state.slot,))

    def _allocate(self, slots: int) -> dict[int, LayerState]:
        return {
            layer: layer_state(group, slots, self._format, self._dtype, TAKE_BACK, self._device)
            for group in self._groups
            for layer in group.layers
        }

    def _make_room(self, needed: int) -> None:
        """Grow the pool until `needed` slots are free."""
        total, free = self._slots.num_pages, self._slots.num_free
        if needed <= free:
            return
        new_total = max(2 * total, total - free + needed)
        layers = self._allocate(new_total)
        for layer, state in self._layers.items():
            for old, new in zip(_tensors(state), _tensors(layers[layer]), strict=True):
                new[:total] = old
        self._layers = layers
        self._slots.grow(new_total - total)


def _tensors(state: LayerState) -> tuple[Tensor, ...]:
    return (*state.planes, state.keys_SPGK, state.updates_SPHV, state.decays, state.inputs_SPC)

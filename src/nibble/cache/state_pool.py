"""The bytes of recurrent states: slots of all layers on the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from nibble.kernels.recurrence import LayerState, copy_slots, copy_tables, layer_state
from nibble.model_spec import RecurrentGroup


class StatePool:
    """Slots 0 to num_slots - 1 in the tensors of every layer; nothing in them is ever cleared.

    Args:
        groups: layers with recurrent states.
        num_slots: of leases and of snapshots.
        format: of matrices, one of kernels/state_formats.FORMATS.
        dtype: the compute dtype, as torch calls it.
        device: where they lie.
        max_drafts: most tokens of a step that may be taken back.
        poison: fill them with NaN where a format can, to show reads of what was never written.
        invariant: whether every step is computed by kernels whose bits depend on no cut (--deterministic).
    """

    def __init__(
        self,
        groups: Sequence[RecurrentGroup],
        num_slots: int,
        format: str,
        dtype: str,
        device: torch.device | str,
        *,
        max_drafts: int = 0,
        poison: bool = False,
        invariant: bool = False,
    ) -> None:
        self.num_slots, self.invariant = num_slots, invariant
        self.layers: dict[int, LayerState] = {}
        """By layer."""
        for group in groups:
            for layer in group.layers:
                self.layers[layer] = layer_state(
                    group, num_slots, format, getattr(torch, dtype), max_drafts, device
                )
        self._tables = copy_tables(tuple(self.layers.values()))
        if poison:
            self.poison()

    def poison(self) -> None:
        """Fill all slots with bytes that are NaN in floating-point formats."""
        for state in self.layers.values():
            for tensor in (
                *state.planes,
                state.keys_SPGK,
                state.updates_SPHV,
                state.decays,
                state.inputs_SPC,
            ):
                tensor.view(torch.uint8).fill_(255) if tensor.numel() else None

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy slots in all layers, all reads before all writes; pairs: from, to."""
        if pairs := tuple(pairs):
            sources, targets = zip(*pairs, strict=True)
            copy_slots(tuple(self.layers.values()), sources, targets, self._tables)

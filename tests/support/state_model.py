"""A model of what slots of recurrent states hold: after which tokens each of them is.

A step copies slots and then goes on from its own, which must be after the very tokens before the step. Of what a slot
was before its last tokens only so much can be gone back to as IN_FLIGHT says.
"""

from __future__ import annotations

from collections.abc import Sequence

from nibble.cache.lease import Lease
from nibble.kernels.state_formats import IN_FLIGHT


class StateModel:
    """Slots as a device would fill them."""

    def __init__(self) -> None:
        self.slots: dict[int, dict[int, int]] = {}
        """Of each slot the positions that can be gone on from, with the hash of all tokens before them."""

    def step(self, lease: Lease, hashes: Sequence[int], start: int, end: int) -> None:
        """The copies that a step makes, and its tokens."""
        targets = [target for _, target in lease.state_copies]
        assert len(set(targets)) == len(targets), f"two copies to one slot: {lease.state_copies}"
        # All are read before any is written.
        copies = [(target, dict(self.slots.get(source, {}))) for source, target in lease.state_copies]
        self.slots.update(copies)
        lease.state_copies = []
        slot = lease.state_slot
        assert slot is not None, "a step without a slot"
        if start:
            self.check(slot, hashes, start)
        before = self.slots.get(slot, {}) if start else {}
        after = {**before, **{position: hashes[position - 1] for position in range(start + 1, end + 1)}}
        self.slots[slot] = {
            position: seen for position, seen in after.items() if end - IN_FLIGHT <= position <= end
        }

    def check(self, slot: int, hashes: Sequence[int], position: int) -> None:
        """A slot can be gone on from after these tokens."""
        seen = self.slots.get(slot, {}).get(position)
        assert seen == hashes[position - 1], f"slot {slot} is not after the first {position} tokens"

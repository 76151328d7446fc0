"""Recurrent states: a slot for each lease that has begun, and snapshots of slots in the prefix tree.

Layers with a recurrent state keep nothing of single tokens, so a prefix can only be continued where a snapshot of its
states was kept: a slot that is attached to the page of the tree which ends there. Tokens behind it are replayed:
computed again for their states, without being written to pages, which have them. These rules keep states right:

- The slot of a lease has one writer, and a slot that is attached is never written: who goes on from a snapshot copies
  it first.
- A step copies slots before it computes: from a snapshot to go on with, and of its own slot where it begins at a page
  boundary. So a copy is right whatever the step, or one after it, does to the slot, and is attached only once the
  tokens before it are committed.
- Chunks end where a snapshot is to be kept.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from nibble.cache.lease import Lease, Place
from nibble.cache.snapshots import SnapshotPages
from nibble.cache.turns import Group, group_at, note_kept, note_use
from nibble.errors import OutOfPages
from nibble.kernels.state_formats import BLOCK, IN_FLIGHT


@dataclass(frozen=True, slots=True)
class StateSlots:
    """The pool of slots."""

    num_slots: int
    """Of leases and of snapshots."""
    max_leases: int
    """Most leases that are open at a time; each is sure of a slot."""
    interval: int = 0
    """Pages of a prompt after which a snapshot is kept; 0: none inside a prompt."""


@dataclass(slots=True)
class StateStats:
    """Counts of slots and, over the manager's life, of prefixes and tokens."""

    total: int
    free: int = 0
    in_use: int = 0
    """Slots of open leases."""
    idle: int = 0
    """Slots of snapshots that only the tree holds."""
    attached: int = 0
    """Slots of snapshots, in use or idle."""
    evicted: int = 0
    snapshot_hits: int = 0
    """Prefixes from the cache that were continued at their end."""
    snapshot_misses: int = 0
    """Prefixes from the cache that were replayed in part."""
    replayed_tokens: int = 0


class StateBooks:
    """The books of all slots. The manager calls them as pages of a lease change.

    Args:
        slots: the pool.
        page_size: tokens of a page.
    """

    def __init__(self, slots: StateSlots, page_size: int) -> None:
        assert slots.num_slots >= slots.max_leases, f"{slots.num_slots} slots for {slots.max_leases} leases"
        self.slots, self.page_size = slots, page_size
        self.snapshots = SnapshotPages[Group](slots.num_slots, slots.num_slots)
        self._num_leases = 0
        """Leases that have a slot."""
        self._stats = StateStats(slots.num_slots)

    @property
    def stats(self) -> StateStats:
        """Return the current counts."""
        snapshots = self.snapshots
        free, idle = snapshots.num_free, snapshots.num_idle
        return replace(
            self._stats, free=free, idle=idle, in_use=snapshots.num_pages - free - idle, attached=len(snapshots),
            evicted=snapshots.num_evicted,
        )  # fmt: skip

    def check_lease_room(self, num_leases: int) -> None:
        """Raise OutOfPages where there is no slot for one more than so many open leases."""
        if num_leases >= self.slots.max_leases:
            raise OutOfPages(
                f"{num_leases + 1} slots of states are needed, there are {self.slots.max_leases}"
            )

    def has_snapshot(self, lease: Lease, boundary: int) -> bool:
        """Return whether `lease` can go on from states that the tree has at a boundary of its shared pages."""
        # While they are copied they cannot be evicted for a lease to come.
        return self._has_spare and self.snapshots.value_of(lease.pages[boundary - 1]) is not None

    def resume(self, lease: Lease) -> None:
        """Choose where computation goes on: at the last snapshot of the shared pages, or where it stopped."""
        size, end, previous = self.page_size, lease.num_shared_pages, lease.num_stored_tokens
        was_replaying = lease.is_replaying
        boundaries = range(end, previous // size, -1)
        boundary = next((b for b in boundaries if self.has_snapshot(lease, b)), None)
        lease.state_boundaries.pop(lease.replay_until // size, None)
        lease.replay_until = end * size
        is_turn = False
        if boundary is not None:
            lease.num_stored_tokens = boundary * size
            is_turn = self.take_snapshot(lease)
        if lease.num_stored_tokens > previous or not was_replaying:
            lease.resumed_at = lease.num_stored_tokens
        # Others may branch where this one does, unless that is only where a conversation goes on.
        if lease.is_replaying and not is_turn:
            lease.state_boundaries[end] = Place.BRANCH

    def follow(self, lease: Lease, previous: int, previous_end: int) -> None:
        """Go on where an exact window does, which has chosen a snapshot of both, and keep one where it keeps its own.

        Args:
            lease: a lease that has pages of the tree.
            previous: tokens that were stored before.
            previous_end: where a replay was to end before.
        """
        size = self.page_size
        lease.state_boundaries.pop(previous_end // size, None)
        if lease.num_stored_tokens > previous:
            self.take_snapshot(lease)
        end = lease.replay_until // size
        if (place := lease.snapshot_boundaries.get(end)) is not None:
            self.keep_snapshot(lease, end, place)

    def take_snapshot(self, lease: Lease) -> bool:
        """Let `lease` go on from the snapshot after its stored tokens; return whether a turn ended there."""
        source = self.snapshots.value_of(lease.pages[lease.num_stored_tokens // self.page_size - 1])
        assert source is not None, f"no states at {lease.num_stored_tokens} tokens"
        self.snapshots.retain((source,))
        self._release_source(lease)
        lease.state_source = source
        # What was to be kept before has been passed.
        for boundary in [b for b in lease.state_boundaries if b * self.page_size <= lease.num_stored_tokens]:
            del lease.state_boundaries[boundary]
        return note_use(self.snapshots, lease, source)

    def keep_snapshot(self, lease: Lease, boundary: int, place: Place) -> None:
        """Keep a snapshot once `lease` gets to `boundary`, where it has not been there."""
        is_ahead = boundary * self.page_size > max(lease.num_reserved_tokens, lease.num_stored_tokens)
        # Where prefixes branch, more than the next turn will go on.
        if is_ahead and lease.state_boundaries.get(boundary) is not Place.BRANCH:
            lease.state_boundaries[boundary] = place

    def intervals(self, boundary: int) -> Sequence[int]:
        """Return the page boundaries before `boundary` at which snapshots of a long prompt are kept."""
        step = self.slots.interval
        return range(step, boundary, step) if step else ()

    def next_stop(self, lease: Lease) -> int | None:
        """Return the next token at which a chunk of `lease` ends, so that its states can be kept; None for none."""
        start = max(lease.num_reserved_tokens, lease.num_stored_tokens)
        boundaries = (b * self.page_size for b in lease.state_boundaries)
        return min((at for at in boundaries if at > start), default=None)

    def draft_room(self, lease: Lease, start: int) -> int:
        """Return the most draft tokens that a step may have after the token at `start`, which counts.

        No draft fills a block, so that states are brought forward by tokens that count alone, and stay where the first
        token of a step expects them. A step begins at each page boundary, where states may be gone on from.
        """
        end = start + 1
        if lease.is_sharing and end % self.page_size == 0:
            return 0
        return BLOCK - 1 - end % BLOCK

    def reserve(self, lease: Lease, start: int) -> None:
        """Give `lease` what its next step needs, whose first token is `start`."""
        # A step that was reserved before, and not run, has copied nothing.
        self._withdraw_copies(lease)
        if lease.state_slot is None:
            (lease.state_slot,) = self.snapshots.allocate(1)
            self._num_leases += 1
            if lease.num_shared_pages:
                self._stats.snapshot_hits += not lease.is_replaying
                self._stats.snapshot_misses += lease.is_replaying
        if lease.state_source is not None and start == lease.resumed_at:
            lease.state_copies.append((lease.state_source, lease.state_slot))
        elif start % self.page_size == 0 and start and lease.is_sharing:
            self._save(lease, start // self.page_size)

    def commit(self, lease: Lease, previous: int) -> None:
        """Attach states at boundaries that are committed; `previous` tokens were stored before."""
        stored = lease.num_stored_tokens
        self._stats.replayed_tokens += max(min(stored, lease.replay_until) - previous, 0)
        # The step that has copied it is done.
        self._release_source(lease)
        # A slot that a step has still to copy to holds nothing yet.
        full, unmade = stored // self.page_size, {target for _, target in lease.state_copies}
        saved = {boundary for boundary, slot in lease.saved_states.items() if slot not in unmade}
        for boundary in [b for b in lease.state_boundaries if b in saved and b <= full]:
            self._attach(lease, boundary, lease.saved_states[boundary], lease.state_boundaries[boundary])
            self._forget(lease, boundary)
        # Also those that no step began at.
        for boundary in [
            b for b in lease.state_boundaries if b * self.page_size < stored and b not in lease.saved_states
        ]:
            del lease.state_boundaries[boundary]

    def release(self, lease: Lease, is_preempted: bool) -> None:
        """Keep a snapshot at the last full page where its states are known, and give back all slots."""
        stored, place = lease.num_stored_tokens, Place.PREEMPTION if is_preempted else Place.ANSWER_END
        full, rest = divmod(stored, self.page_size)
        # A step that was reserved, and not run, has left the slot as it was before.
        num_ahead = 0 if lease.state_copies else lease.num_reserved_tokens - stored
        has_states = lease.state_slot is not None and not lease.are_states_lost
        is_copied_to = any(lease.state_slot == target for _, target in lease.state_copies)
        self._withdraw_copies(lease)
        slot = lease.saved_states.get(full)
        # What is kept of inputs has room for so many more, so the states at the boundary are still there.
        if slot is None and not rest and has_states and not is_copied_to and num_ahead <= IN_FLIGHT:
            slot = lease.state_slot
        if slot is not None and full:
            self._attach(lease, full, slot, place)
        if lease.state_slot is not None:
            self.snapshots.release((lease.state_slot,))
            self._num_leases -= 1
        for boundary in tuple(lease.saved_states):
            self._forget(lease, boundary)
        self._release_source(lease)
        lease.state_slot = None
        lease.state_boundaries.clear()

    def check_integrity(self, leases: Collection[Lease], is_node: Sequence[bool]) -> None:
        """Assert that the books balance.

        Args:
            leases: all that are open.
            is_node: of each page, whether it is in the tree.
        """
        num_users = [0] * self.snapshots.num_pages
        for lease in leases:
            for slot in (lease.state_slot, lease.state_source, *lease.saved_states.values()):
                if slot is not None:
                    num_users[slot] += 1
            if lease.state_slot is not None:
                assert num_users[lease.state_slot] == 1, f"slot {lease.state_slot} has two writers"
        with_slots = sum(lease.state_slot is not None for lease in leases)
        assert with_slots == self._num_leases, (
            f"{with_slots} leases have a slot, in the books {self._num_leases}"
        )
        needed = self.slots.max_leases - with_slots
        assert self.snapshots.num_available >= needed, f"fewer than {needed} slots for leases to come"
        self.snapshots.check_integrity(num_users, is_node)

    @property
    def _has_spare(self) -> bool:
        """Whether there is a slot beside those that leases to come are sure of."""
        return self.snapshots.num_available > self.slots.max_leases - self._num_leases

    def _withdraw_copies(self, lease: Lease) -> None:
        """Forget copies that no step has made."""
        unmade = {target for _, target in lease.state_copies}
        for boundary in [b for b, slot in lease.saved_states.items() if slot in unmade]:
            self._forget(lease, boundary)
        lease.state_copies = []

    def _save(self, lease: Lease, boundary: int) -> None:
        """Copy the slot before the next step, where there is room: the states at `boundary` may be gone on from."""
        if boundary in lease.saved_states:
            return
        if (
            boundary <= lease.num_shared_pages
            and self.snapshots.value_of(lease.pages[boundary - 1]) is not None
        ):
            return
        # One copy serves boundaries that nobody asked for: the last of them. Those to be attached have their own.
        old = [b for b in lease.saved_states if b not in lease.state_boundaries]
        if old:
            slot = lease.saved_states.pop(old[0])
        elif self._has_spare:
            (slot,) = self.snapshots.allocate(1)
        else:
            lease.state_boundaries.pop(boundary, None)
            return
        assert lease.state_slot is not None
        lease.saved_states[boundary] = slot
        lease.state_copies.append((lease.state_slot, slot))

    def _attach(self, lease: Lease, boundary: int, slot: int, place: Place) -> None:
        """Keep the states of `slot` at `boundary`, if the tree has the pages before it and no states there yet."""
        if boundary > lease.num_shared_pages:
            return
        node, group = lease.pages[boundary - 1], group_at(lease, place)
        if (value := self.snapshots.value_of(node)) is None:
            self.snapshots.attach(node, slot, group)
        elif self.snapshots.group_of(value) is not None:
            # It is to be used again. What others branch from stays as it is.
            self.snapshots.regroup(value, group)
        note_kept(self.snapshots, lease, place)

    def _forget(self, lease: Lease, boundary: int) -> None:
        self.snapshots.release((lease.saved_states.pop(boundary),))

    def _release_source(self, lease: Lease) -> None:
        if lease.state_source is not None:
            self.snapshots.release((lease.state_source,))
            lease.state_source = None

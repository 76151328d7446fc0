"""Which snapshots of a conversation are worth keeping: of those of one turn the next uses one, and only once."""

from __future__ import annotations

from nibble.cache.lease import Lease, Place
from nibble.cache.snapshots import SnapshotPages

Group = tuple[int, Place]
"""Snapshots that one lease kept at one place: its number, and the place."""
TURN_ENDS = (Place.PROMPT_END, Place.ANSWER_END)
"""Where the next turn of a conversation may go on."""


def group_at(lease: Lease, place: Place) -> Group | None:
    """Return the group of what `lease` keeps at a place; None where any request may branch, which is of no turn."""
    return None if place is Place.BRANCH else (lease.number, place)


def note_kept(snapshots: SnapshotPages[Group], lease: Lease, place: Place) -> None:
    """Note that `lease` keeps a snapshot: a conversation most often goes on as it did a turn ago."""
    if lease.resumed_place in TURN_ENDS and place in TURN_ENDS and place is not lease.resumed_place:
        snapshots.expire((lease.number, place))


def note_use(snapshots: SnapshotPages[Group], lease: Lease, value_page: int) -> bool:
    """Note that `lease` goes on from a snapshot, and return whether a turn ended there."""
    group = snapshots.group_of(value_page)
    if group is None:
        return False
    number, place = group
    if place not in TURN_ENDS:
        snapshots.expire(group)
        return False
    lease.resumed_place = place
    for other in TURN_ENDS:
        snapshots.expire((number, other))
    return True

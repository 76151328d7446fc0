"""The recurrent states' part of the memory plan: slots of running requests, and of snapshots of prefixes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nibble.errors import CapacityError
from nibble.hardware import format_bytes
from nibble.kernels.state_formats import state_bytes
from nibble.model_spec import ModelSpec
from nibble.spec import CacheSpec

STATE_SHARE = 0.4
"""Largest part of the cache's memory that the states of running requests take."""
SNAPSHOT_SHARE = 0.15
"""Part of the cache's memory for snapshots of prefixes."""
SPARE_SLOTS = 1
"""Slots that are no request's: of prompts at the start, and of texts that are scored."""
STEP_COPIES = 2
"""Copies of a recurrent layer's values that are alive at once: projected and convolved, or gated and normed."""
SCAN_TOKENS = 64
"""Tokens after which a scan over a long prompt keeps a matrix of each head, in float32."""


@dataclass(frozen=True, slots=True)
class StateMemory:
    """Slots of fixed size that hold the states of all layers."""

    requests: int
    """That may run at a time."""
    slots: int
    """All of them: of requests, and of snapshots."""
    snapshots: int
    """Slots beside those of running requests."""
    bytes_per_slot: int
    format: str

    @property
    def bytes(self) -> int:
        """Bytes of all slots, with those that are no request's."""
        return (self.slots + SPARE_SLOTS) * self.bytes_per_slot


def slot_bytes(model: ModelSpec, format: str, dtype: str, max_drafts: int = 0) -> int:
    """Return the bytes of a request's states in all layers, buffered inputs included."""
    return sum(len(group.layers) * state_bytes(group, format, dtype, max_drafts) for group in model.states)


def divide(model: ModelSpec, spec: CacheSpec, dtype: str, room: int, requests: int) -> StateMemory | None:
    """Return the states' part of `room` bytes; None for a model without any.

    Args:
        model: The model.
        spec: What is requested.
        dtype: The compute dtype.
        room: Bytes of the cache.
        requests: Most that run at a time for other reasons.
    """
    if not model.states:
        return None
    size = slot_bytes(model, spec.state_format, dtype, spec.max_drafts)
    # Where memory is short, fewer requests run at a time: pages are worth more than their number.
    running = min(requests, max(1, int(STATE_SHARE * room) // size))
    snapshots = int(SNAPSHOT_SHARE * room) // size if spec.prefix_cache else 0
    return StateMemory(running, running + snapshots, snapshots, size, spec.state_format)


def check(states: StateMemory | None, room: int) -> None:
    """Raise CapacityError where states leave nothing of `room` bytes."""
    if states and states.bytes >= room:
        raise CapacityError(
            f"the recurrent states of one request take {format_bytes(states.bytes_per_slot)}, and the cache has "
            f"{format_bytes(room)} for {states.slots + SPARE_SLOTS} of them; what would help: a --state-format with "
            "fewer bytes, or a larger --kv-memory"
        )


def least_bytes(model: ModelSpec, spec: CacheSpec, dtype: str) -> int:
    """Return what states take where one request runs at a time, without snapshots."""
    return (
        (1 + SPARE_SLOTS) * slot_bytes(model, spec.state_format, dtype, spec.max_drafts)
        if model.states
        else 0
    )


def step_bytes(model: ModelSpec, tokens: int, value_bytes: int) -> int:
    """Return what the widest recurrent layer computes in a step: STEP_COPIES of all of a token's values in the compute
    dtype and in float32, and the matrices of scans between blocks of SCAN_TOKENS tokens."""
    widths = [
        group.conv_channels + 2 * group.key_heads * group.columns + 2 * group.heads * group.rows
        for group in model.states
    ]
    scans = max((4 * group.values // SCAN_TOKENS for group in model.states), default=0)
    return tokens * (max(widths, default=0) * STEP_COPIES * (value_bytes + 4) + scans)


def as_dict(states: StateMemory, bytes_per_token: int, fitting: Mapping[int, int]) -> dict[str, Any]:
    """Return all of it, how many stored tokens a request's states weigh, and how many requests fit, by their tokens."""
    weight = {"bytes": states.bytes, "tokens": states.bytes_per_slot // bytes_per_token}
    return asdict(states) | weight | {"fitting": {str(tokens): count for tokens, count in fitting.items()}}


def as_lines(states: StateMemory, bytes_per_token: int, fitting: Mapping[int, int]) -> Iterator[str]:
    """Yield what states take, for people."""
    yield (
        f"recurrent states {format_bytes(states.bytes)} in {states.format}: {states.requests:,} requests at a time, "
        f"{states.snapshots:,} snapshots of prefixes"
    )
    tokens = states.bytes_per_slot // bytes_per_token
    yield f"  a request's: {format_bytes(states.bytes_per_slot)}, as much as {tokens:,} tokens of the cache"
    if fitting:
        counts = ", ".join(f"{count:,} of {tokens:,} tokens" for tokens, count in fitting.items())
        yield f"  requests at a time, with pages: {counts}"

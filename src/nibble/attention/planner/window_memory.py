"""The exact window's part of the memory plan: pages in the compute dtype, and the scratch pages of prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import lcm
from typing import Any

from nibble.attention.planner.plan import Plan
from nibble.errors import CapacityError
from nibble.hardware import format_bytes
from nibble.kernels import cdiv
from nibble.spec import CacheSpec

EXACT_SHARE = 0.25
"""Largest part of the cache's memory that the exact windows of running requests take."""
LEAST_REQUESTS = 3
"""There are pages for so many more: a request that is alone holds those of up to three chunks."""
TILE = 256
"""Near tokens are counted from a multiple of this (attention/window.py): kernels that work in tiles at fixed positions
then have the same tiles whatever the batch."""
MERGED = 3
"""Copies of a layer's output in float32 that are in memory at once, while sinks and near tokens are merged."""
LONG_REQUEST = 8192
"""Tokens of the request whose bytes are reported."""
SNAPSHOT_SHARE = 0.05
"""Part of the cache's memory for snapshots of prefixes."""


@dataclass(frozen=True, slots=True)
class ExactMemory:
    """Pages in the compute dtype that hold the newest tokens of requests, and snapshots of prefixes."""

    requests: int
    """That may run at a time."""
    pages: int
    """All of them: of requests, and of snapshots."""
    snapshots: int
    """Most pages that only snapshots hold."""
    bytes_per_page: int

    @property
    def bytes(self) -> int:
        """Bytes of all pages, with the one that stays empty."""
        return (self.pages + 1) * self.bytes_per_page


def divide(plan: Plan, spec: CacheSpec, room: int) -> ExactMemory | None:
    """Return the exact window's part of `room` bytes; None without one.

    Args:
        plan: What the cache stores.
        spec: What is requested.
        room: Bytes of the cache.
    """
    if not plan.window:
        return None
    page_bytes = plan.exact_layout.bytes_per_page
    # Where memory is short, fewer requests run at a time: pages are worth more than their number.
    growth = _growth(plan, spec)
    fitting = int(EXACT_SHARE * room) // ((running_pages(plan) + growth) * page_bytes)
    requests = min(spec.max_running, max(1, fitting))
    snapshots = int(SNAPSHOT_SHARE * room) // page_bytes if spec.prefix_cache else 0
    # A page to grow into is needed for a step or two, and a snapshot gives way to it.
    growing = requests + LEAST_REQUESTS
    held = growing * running_pages(plan) + max(growing * growth - snapshots, 0)
    return ExactMemory(requests, held + snapshots, snapshots, page_bytes)


def check(plan: Plan, exact: ExactMemory | None, room: int) -> None:
    """Raise CapacityError where the window leaves nothing of `room` bytes.

    Args:
        plan: What the cache stores.
        exact: The window's part.
        room: Bytes of the cache.
    """
    if exact and exact.bytes >= room:
        sinks = " or --kv-sinks" if plan.sinks else ""
        raise CapacityError(
            f"the exact window of {plan.window} tokens takes {format_bytes(exact.bytes)}, and the cache has "
            f"{format_bytes(room)}; what would help: a smaller --kv-window{sinks}, or a larger --kv-memory"
        )


def least_bytes(plan: Plan, spec: CacheSpec) -> int:
    """Return what the window takes where one request runs at a time, without snapshots; 0 without a window."""
    if not plan.window:
        return 0
    pages = (1 + LEAST_REQUESTS) * (running_pages(plan) + _growth(plan, spec)) + 1
    return pages * plan.exact_layout.bytes_per_page


def scratch_bytes(plan: Plan, step_tokens: int, max_prompts: int) -> int:
    """Return the bytes of scratch pages: a step's new tokens, and of each prompt what comes before them; and of sinks.

    Args:
        plan: What the cache stores.
        step_tokens: Most tokens of a step.
        max_prompts: Most prompts of a step.
    """
    if not plan.window:
        return 0
    # Kernels for near tokens need none. Layers of one shape share them; others have their own.
    of_backends = {layer for group in plan.groups if not group.near_kernel for layer in group.layers}
    layers = [layer for layer in plan.exact_layout.layers if layer.layer in of_backends]
    shapes = {tuple((x.stream.heads, x.stream.dim) for x in layer.streams): layer for layer in layers}
    before = lcm(TILE, plan.page_size) + plan.window + plan.page_size
    scratch = (step_tokens + max_prompts * before) * sum(layer.bytes_per_token for layer in shapes.values())
    # The parts of a layer's output in float32, as they are merged.
    heads = (group.group.q_heads * group.group.head_dim for group in plan.groups if group.sees_all)
    return scratch + (step_tokens * MERGED * 4 * max(heads) if plan.sinks else 0)


def request_bytes(plan: Plan, tokens: int) -> int:
    """Return the bytes of a running request of `tokens` tokens: its pages, and those of its exact window."""
    return cdiv(tokens, plan.page_size) * plan.layout.bytes_per_page + window_bytes(plan)


def window_bytes(plan: Plan) -> int:
    """Return the bytes of the exact pages of a running request; 0 without a window."""
    return running_pages(plan) * plan.exact_layout.bytes_per_page if plan.window else 0


def running_pages(plan: Plan) -> int:
    """Return the exact pages of a running request: of its sinks and its window, and the one that is written."""
    return plan.sinks // plan.page_size + cdiv(plan.window, plan.page_size) + 1


def _growth(plan: Plan, spec: CacheSpec) -> int:
    """Return the exact pages that a running request grows into: for a step or two one, or those of its drafts."""
    return max(1, cdiv(spec.max_drafts, plan.page_size))


def as_dict(plan: Plan, exact: ExactMemory, context: int) -> dict[str, Any]:
    """Return all of it, and what a long request takes with the window and without.

    Args:
        plan: What the cache stores.
        exact: The window's part.
        context: Tokens of the longest request.
    """
    tokens = min(LONG_REQUEST, context)
    request = {"tokens": tokens, "bytes": request_bytes(plan, tokens), "window_bytes": window_bytes(plan)}
    return asdict(exact) | {"bytes": exact.bytes, "request": request}


def as_lines(plan: Plan, exact: ExactMemory, context: int) -> Iterator[str]:
    """Yield what the window takes, for people; see as_dict()."""
    yield (
        f"exact window {format_bytes(exact.bytes)}: {exact.pages - exact.snapshots:,} pages in {plan.dtype} for "
        f"{exact.requests:,} requests at a time, {exact.snapshots:,} for snapshots of prefixes"
    )
    request = as_dict(plan, exact, context)["request"]
    factor = request["bytes"] / (request["bytes"] - request["window_bytes"])
    yield f"  a request of {request['tokens']:,} tokens: {format_bytes(request['bytes'])}, {factor:.3f} x without it"

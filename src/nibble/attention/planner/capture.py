"""Which decode steps are recorded as CUDA graphs: their sizes, and what prevents it."""

from __future__ import annotations

from nibble.attention.planner.plan import Plan
from nibble.attention.planner.support import Phase

SMALL = (2, 4, 8)
"""Sizes of few requests. There is none of one: a compiled model would need code of its own for a single row."""
STEPS = ((64, 8), (128, 16), (256, 32))
"""(up to, step) of the sizes that follow; beyond the last, steps of twice its step."""


def graph_sizes(most: int) -> tuple[int, ...]:
    """Return the sizes of recorded steps in requests, ascending; the last has room for `most`."""
    # Few requests get sizes close together: padding costs them most.
    sizes = [size for size in SMALL if size < 2 * most] or [SMALL[0]]
    while sizes[-1] < most:
        step = next((step for upto, step in STEPS if sizes[-1] < upto), 2 * STEPS[-1][1])
        sizes.append(sizes[-1] + step)
    return tuple(sizes)


def cuda_graph_blocker(plan: Plan) -> str | None:
    """Return why decode steps of `plan` cannot be recorded; None if they can."""
    for group in plan.groups:
        route = group.route(Phase.DECODE)
        if not route.graphs:
            return f"decode steps run without CUDA graphs: {route} of group {group.group.name} cannot be recorded"
    return None

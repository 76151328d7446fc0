"""The memory of a GPU beside its plan: what a start checks in the end, and what an error of torch is turned into."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nibble.attention.planner.memory import MIN_RESERVE_LEFT, MemoryPlan
from nibble.errors import CapacityError
from nibble.hardware import format_bytes


def check_memory(budget: MemoryPlan, free: int) -> None:
    """Raise CapacityError where more is in use than was planned, so that too little of the reserve is left."""
    if free < MIN_RESERVE_LEFT * budget.reserve:
        used = budget.memory - free - budget.pool
        raise CapacityError(
            f"{format_bytes(used)} of the GPU are in use beside the cache, where {format_bytes(budget.weights)} of "
            f"weights and {format_bytes(budget.workspace)} of workspace were planned, and {format_bytes(free)} are "
            f"left; {_advice(budget)}"
        )


@contextmanager
def explain_out_of_memory(budget: MemoryPlan) -> Iterator[None]:
    """Turn torch's error into a CapacityError that says what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"the GPU's memory does not suffice for the plan ({format_bytes(budget.weights)} of weights, "
            f"{format_bytes(budget.workspace)} of workspace, a pool of {format_bytes(budget.pool)}); {_advice(budget)}"
        ) from error


def _advice(budget: MemoryPlan) -> str:
    smaller = max(budget.pool - budget.reserve, budget.pool // 2)
    return (
        f"what would help: --kv-memory {smaller >> 20}MiB, a smaller --token-budget (now {budget.step_tokens}), "
        "or ending other programs on this GPU"
    )

"""Search for the nearest configuration that works: backends that serve it, and memory that holds it.

A plan is proposed only if it fits in memory. Where none fits, what would be served is said all the same, with what it
lacks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace

from nibble.attention.planner import refusal
from nibble.attention.planner.memory import MemoryPlanner
from nibble.attention.planner.options import PlanRequest
from nibble.attention.planner.plan import Plan
from nibble.config import Config
from nibble.errors import CapacityError, Suggestion

Resolve = Callable[[PlanRequest], Plan | None]
"""Returns the plan of a request, None where there is none."""
Proposal = tuple[Config, Plan]


def find(request: PlanRequest, resolve: Resolve) -> Suggestion | None:
    """Return the nearest suggestion of a request that no backend serves; None where two edits do not help.

    Edits of backends and storage come first, then other schemes, then less memory for other things than pages.

    Args:
        request: What is refused.
        resolve: Plans an edited request.
    """
    nearest = _nearest(request, resolve, fitting=False)
    if nearest is None:
        return None
    lacking = shortfall(request, *nearest)
    if not lacking:
        return _suggestion(request, nearest[0])
    if smaller := (_nearest(request, resolve, fitting=True) if _may_fit(request) else None):
        return _suggestion(request, smaller[0])
    return _less_memory(request, nearest[0], resolve) or _suggestion(request, nearest[0], lacking)


def find_smaller(request: PlanRequest, resolve: Resolve) -> Suggestion | None:
    """Return the nearest suggestion of a request that is served and does not fit in memory; None where nothing fits.

    Args:
        request: What does not fit.
        resolve: Plans an edited request.
    """
    if suggestion := _less_memory(request, request.config, resolve):
        return suggestion
    # A scheme of fewer bytes, where even the shortest context does not fit in this one.
    if not _may_fit(request):
        return None
    other = _first(request, refusal.single_edits(request, keep_scheme=False), resolve, fitting=True)
    return _suggestion(request, other[0]) if other else None


def shortfall(request: PlanRequest, config: Config, plan: Plan) -> str:
    """Return what the memory lacks for a plan, as `needs at least X, and NAME has Y`; empty where it fits.

    Args:
        request: What is planned.
        config: The same, edited.
        plan: Its plan.
    """
    planner = _memory_planner(request, config, plan)
    try:
        planner.plan()
    except CapacityError:
        return planner.shortfall
    return ""


def _memory_planner(request: PlanRequest, config: Config, plan: Plan) -> MemoryPlanner:
    edited = replace(request, config=config)
    return MemoryPlanner(edited.spec, edited.model_in_dtype(request.dtype), request.hardware, plan)


def _may_fit(request: PlanRequest) -> bool:
    """Whether there is memory beside the weights, in 16 bits on a CPU: no edit makes them smaller."""
    weights = request.model_spec.weight_bytes
    if request.hardware.is_cpu and request.dtype == "float32":
        weights //= 2
    return weights < request.hardware.memory


def _suggestion(request: PlanRequest, config: Config, lacking: str = "") -> Suggestion:
    return refusal.suggestion(config, request.hardware, declared=request.declared, shortfall=lacking)


def _less_memory(request: PlanRequest, config: Config, resolve: Resolve) -> Suggestion | None:
    """Return `config` with the mildest edit of what takes memory beside pages, or of the context, that makes it fit."""
    if not _may_fit(request):
        return None
    for edited in refusal.memory_edits(request, config):
        plan = resolve(replace(request, config=edited))
        if plan and not shortfall(request, edited, plan):
            return _suggestion(request, edited)
    return None


def _nearest(request: PlanRequest, resolve: Resolve, *, fitting: bool) -> Proposal | None:
    """Return the nearest config that is served, with its plan: one edit if any does, else two.

    A plan that falls to plain torch on a GPU, unrequested, is proposed where nothing else keeps the scheme.
    """
    nearest = _first(request, refusal.single_edits(request, keep_scheme=True), resolve, fitting=fitting)
    if nearest and refusal.uses_reference(request, nearest[1]):
        # Plain torch on a GPU is many times slower: two edits are better than that.
        doubles = refusal.double_edits(request, keep_scheme=True)
        faster = _first(request, doubles, resolve, fitting=fitting)
        nearest = faster if faster and not refusal.uses_reference(request, faster[1]) else nearest
    if nearest is None:
        kinds = (edits(request, keep_scheme=False) for edits in (refusal.single_edits, refusal.double_edits))
        nearest = _first(request, itertools.chain.from_iterable(kinds), resolve, fitting=fitting)
    return nearest


def _first(
    request: PlanRequest, kinds: Iterable[Iterable[Config]], resolve: Resolve, *, fitting: bool
) -> Proposal | None:
    """Return an edited config and its plan: the best of the first kind of edits that works without the reference, else
    of the first that works; with `fitting` of those that fit in memory."""
    slow: Proposal | None = None
    for kind in kinds:
        edited = ((config, resolve(replace(request, config=config))) for config in kind)
        plans = [(config, plan) for config, plan in edited if plan and refusal.is_acceptable(request, plan)]
        if fitting:
            plans = [pair for pair in plans if not shortfall(request, *pair)]
        if plans:
            best = min(plans, key=lambda pair: refusal.cost(request, pair[1]))
            if not refusal.uses_reference(request, best[1]):
                return best
            # Kept for the case that no kind of edit avoids plain torch on a GPU.
            slow = slow or best
    return slow

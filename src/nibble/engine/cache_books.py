"""The books of an engine's caches, of its own pool or of those of all ranks."""

from __future__ import annotations

from nibble.attention.planner.state_memory import SPARE_SLOTS
from nibble.cache.exact_window import ExactWindow
from nibble.cache.manager import CacheManager
from nibble.cache.rank_managers import RankManagers
from nibble.cache.residency import Residency
from nibble.cache.states import StateSlots
from nibble.engine.plan import EnginePlan
from nibble.kernels import cdiv
from nibble.model_spec import NO_LAYER
from nibble.spec import CacheSpec


def cache_manager(
    engine_plan: EnginePlan, pages: int, residency: Residency | None
) -> CacheManager | RankManagers:
    """Return the books that a scheduler keeps.

    Args:
        engine_plan: of the engine.
        pages: of a pool.
        residency: of the host tier, if there is one.
    """
    config = engine_plan.config
    if not config.attention_dp:
        return _manager_of_pool(engine_plan, pages, residency)
    return RankManagers([_manager_of_pool(engine_plan, pages, None) for _ in range(config.tp)])


def _manager_of_pool(engine_plan: EnginePlan, pages: int, residency: Residency | None) -> CacheManager:
    """Return the books of a pool."""
    config, plan, budget, window = engine_plan.config, engine_plan.plan, engine_plan.budget, None
    if budget.exact:
        window = ExactWindow(
            plan.window, sum(owner != NO_LAYER for owner in plan.owner), budget.exact.pages, budget.exact.snapshots,
            max_drafts=CacheSpec.from_config(config).max_drafts, num_sinks=plan.sinks // plan.page_size,
        )  # fmt: skip
    return CacheManager(
        pages, plan.page_size, config.prefix_cache, residency, window, _state_slots(engine_plan)
    )


def _state_slots(engine_plan: EnginePlan) -> StateSlots | None:
    """Return the slots of recurrent states, if the model has any."""
    states, page_size = engine_plan.budget.states, engine_plan.plan.page_size
    if states is None:
        return None
    interval = cdiv(engine_plan.config.state_interval, page_size)
    return StateSlots(states.slots + SPARE_SLOTS, states.requests + SPARE_SLOTS, interval)

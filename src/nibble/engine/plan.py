"""Everything that is decided of an engine before weights load, without torch where the model was observed before."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nibble.attention import backends
from nibble.attention.planner import evidence
from nibble.attention.planner.memory import MemoryPlan, MemoryPlanner
from nibble.attention.planner.plan import Plan, cuda_graph_blocker
from nibble.attention.planner.resolve import resolve
from nibble.config import Config
from nibble.hardware import Hardware, probe
from nibble.model_spec import ModelSpec
from nibble.models.observations import observe_model
from nibble.spec import CacheSpec


@dataclass(frozen=True)
class CachePlan:
    """What is decided of a cache: for which model, on which machine, with which routes and layout."""

    config: Config
    hardware: Hardware
    model_spec: ModelSpec
    plan: Plan


@dataclass(frozen=True)
class EnginePlan(CachePlan):
    """Everything that is decided before weights load."""

    budget: MemoryPlan
    warning: str = ""
    """Why times that were measured on this machine are not used."""


def plan_engine(
    config: Config, hardware: Hardware | None = None, *, declared: bool = False, by_times: bool = True
) -> EnginePlan:
    """Plan an engine.

    A refusal's command has what differs from the defaults in `config`: what a caller decides for itself does not belong
    there.

    Args:
        config: What is requested.
        hardware: Another machine, on which every backend with an adapter may be chosen. On this machine (None) only
            those whose packages are here.
        declared: Let `auto` also choose backends that this version knows but cannot run.
        by_times: Follow times that were measured on this machine, unless `config` says no.

    Raises:
        ConfigError: The combination or the model cannot be served.
        WeightError: The checkpoint is missing or broken.
        CapacityError: The memory does not suffice.
    """
    here = hardware is None
    # For another machine it does not matter which packages are installed here.
    table = backends.available_backends() if here else backends.all_backends()
    hardware = hardware or probe(config.device)
    spec = CacheSpec.from_config(config)
    dtype = spec.compute_dtype(hardware)
    model_spec = observe_model(config.model, dtype, config.max_context, config.index_topk)
    # Times of this machine say nothing about another one.
    tuned = here and by_times and config.tuned
    times = evidence.load_tuned(hardware, table) if tuned else evidence.NO_RANKINGS
    plan = resolve(config, model_spec, hardware, table, declared=declared, measured=times)
    # Decoding without graphs is slow enough to be worth a note.
    note = cuda_graph_blocker(plan) if config.graphs and not hardware.is_cpu else None
    plan = replace(plan, notes=(*plan.notes, note)) if note else plan
    budget = MemoryPlanner(spec, model_spec, hardware, plan).plan()
    return EnginePlan(config, hardware, model_spec, plan, budget, times.warning)

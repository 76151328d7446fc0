"""Tuning: the backends that may serve a model, timed on this machine, for `auto` to follow.

Each layer group of a plan is raced for in every phase that is routed. attention/planner/evidence.py keeps the times.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from nibble.attention import backends
from nibble.attention.planner import evidence, support
from nibble.attention.planner.evidence import Timing
from nibble.attention.planner.options import ROUTED, PlanRequest
from nibble.attention.planner.plan import Plan
from nibble.attention.planner.resolve import resolve
from nibble.attention.planner.support import SchemeGroup
from nibble.config import Config
from nibble.engine.plan import EnginePlan, plan_engine
from nibble.errors import ConfigError
from nibble.evals.tuning import fixtures
from nibble.evals.tuning.bench import Result, bench_backends
from nibble.evals.tuning.fixtures import Workload
from nibble.model_spec import Phase

SHARE = 0.4
"""Of the device's free memory, what a made-up cache may take; on a CPU, of all memory, a tenth of that."""


@dataclass(frozen=True)
class Trial:
    """One layer group in one phase."""

    part: SchemeGroup
    phase: Phase
    workloads: tuple[Workload, ...]
    subject: str
    """What its times are filed under."""


@dataclass(frozen=True)
class Tuning:
    """What is to be tuned, decided without times that were measured before."""

    engine_plan: EnginePlan
    request: PlanRequest
    trials: tuple[Trial, ...]

    def plan(self, times: Mapping[str, tuple[Timing, ...]]) -> Plan:
        """Return the plan that `auto` makes of these times."""
        r = self.request
        return resolve(r.config, r.model_spec, r.hardware, r.backends, measured=evidence.by_time(times))


def tuning(config: Config) -> Tuning:
    """Return what `config` leaves to choose on this machine; raises ConfigError where nothing can be timed."""
    # Earlier times must not decide which page size and packing the race is on.
    plan = plan_engine(config, by_times=False)
    table = backends.available_backends()
    request = PlanRequest(plan.config, plan.model_spec, plan.hardware, table, False, False)
    trials = []
    for part in support.scheme_groups(request.spec, plan.model_spec):
        # Sparse attention reads what an indexer chooses, and random tokens do not stand for that.
        for phase in ROUTED if not part.group.top_k else ():
            subject = evidence.subject(part, phase, request.dtype)
            trials.append(Trial(part, phase, _workloads(plan, part, phase), subject))
    if not trials:
        raise ConfigError(
            "there is nothing to time: sparse attention reads what its indexer chooses, and has one backend"
        )
    return Tuning(plan, request, tuple(trials))


def run(tuning: Tuning, trial: Trial, names: Collection[str] = ()) -> Iterator[Result]:
    """Race a trial, workload by workload.

    Args:
        tuning: What the trial belongs to.
        trial: The layer group and its phase.
        names: Only these backends; all that may serve if empty.
    """
    for workload in trial.workloads:
        yield from bench_backends(tuning.request, tuning.engine_plan.plan, trial.part, workload, names)


def timings(results: Sequence[Result]) -> tuple[Timing, ...]:
    """Return the results of one trial, backend by backend."""
    by_backend: dict[tuple[str, str | None], list[Result]] = {}
    for result in results:
        by_backend.setdefault((result.backend, result.stage_to), []).append(result)
    return tuple(map(_timing, by_backend.values()))


def _timing(results: Sequence[Result]) -> Timing:
    first = results[0]
    times = {result.workload: result.ms for result in results if result.ms is not None}
    failure = next((result.failure for result in results if result.failure), "")
    return Timing(first.backend, first.stage_to, first.page, first.packing, times, failure)


def _workloads(plan: EnginePlan, part: SchemeGroup, phase: Phase) -> tuple[Workload, ...]:
    """Return the phase's usual workloads, as far as the model and this machine's memory go."""
    usual = (entry for entry in fixtures.usual(plan.hardware.is_cpu) if entry.phase is phase)
    size = part.stored_layer(0).bytes_per_token
    return fixtures.within(usual, plan.model_spec.max_context, max(int(_cache_bytes(plan) // size), 64))


def _cache_bytes(plan: EnginePlan) -> float:
    if plan.hardware.is_cpu:
        return SHARE * plan.hardware.memory / 10
    free, _ = torch.cuda.mem_get_info()
    return SHARE * free

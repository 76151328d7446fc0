"""Tuning: the backends that may serve a model, timed on this machine, for `auto` to follow.

Owns tune(), which races each layer group of a plan in every phase that is routed, and what of it goes into the file
(attention/planner/timings.py). Must not know of the terminal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from nibble.attention import backends
from nibble.attention.planner import needs
from nibble.attention.planner import timings as measured
from nibble.attention.planner.needs import SchemeGroup
from nibble.attention.planner.options import ROUTED, PlanRequest
from nibble.attention.planner.plan import Plan
from nibble.attention.planner.resolve import resolve
from nibble.attention.planner.support import Phase
from nibble.attention.planner.timings import Timing
from nibble.config import Config
from nibble.engine.plan import EnginePlan, plan_engine
from nibble.errors import ConfigError
from nibble.evals.tuning import workloads
from nibble.evals.tuning.bench import Result, bench_backends
from nibble.evals.tuning.workloads import Workload

SHARE = 0.4
"""Of the device's free memory, what a made-up cache may take; on a CPU, of all memory, a tenth of that."""


@dataclass(frozen=True)
class Trial:
    """One part in one phase. subject: what its times are filed under."""

    part: SchemeGroup
    phase: Phase
    works: tuple[Workload, ...]
    subject: str


@dataclass(frozen=True)
class Tuning:
    """What is to be tuned, decided without times that were measured before."""

    made: EnginePlan
    request: PlanRequest
    trials: tuple[Trial, ...]

    def timings(self, results: Sequence[Result]) -> tuple[Timing, ...]:
        """Results of one trial, backend by backend."""
        found: dict[tuple[str, str | None], list[Result]] = {}
        for result in results:
            found.setdefault((result.backend, result.stage_to), []).append(result)
        return tuple(map(_timing, found.values()))

    def planned(self, found: Mapping[str, tuple[Timing, ...]]) -> Plan:
        """The plan that `auto` makes of these times."""
        times = measured.Timings(found)
        r = self.request
        return resolve(r.config, r.model_spec, r.hardware, r.backends, measured=times)


def tuning(config: Config) -> Tuning:
    """What `config` leaves to choose on this machine; raises ConfigError where nothing can be timed."""
    made = plan_engine(config, by_times=False)
    table = backends.available_backends()
    request = PlanRequest(made.config, made.model_spec, made.hardware, table, False, False)
    trials = []
    for part in needs.scheme_groups(request.spec, made.model_spec):
        for phase in ROUTED if not part.group.top_k else ():
            subject = measured.subject(part, phase, request.dtype)
            trials.append(Trial(part, phase, _works(made, part, phase), subject))
    if not trials:
        raise ConfigError(
            "there is nothing to time: sparse attention reads what its indexer chooses, and has one backend"
        )
    return Tuning(made, request, tuple(trials))


def run(what: Tuning, trial: Trial, names: Collection[str] = ()) -> Iterator[Result]:
    """Races a trial, workload by workload. names: only these backends."""
    for work in trial.works:
        yield from bench_backends(what.request, what.made.plan, trial.part, work, names)


def _works(made: EnginePlan, part: SchemeGroup, phase: Phase) -> tuple[Workload, ...]:
    """The phase's usual workloads, as far as the model and this machine's memory go."""
    usual = (work for work in workloads.usual(made.hardware.is_cpu) if work.phase is phase)
    size = part.stored_layer(0).bytes_per_token
    return workloads.within(usual, made.model_spec.max_context, max(int(_room(made) // size), 64))


def _room(made: EnginePlan) -> float:
    if made.hardware.is_cpu:
        return SHARE * made.hardware.memory / 10
    free, _ = torch.cuda.mem_get_info()
    return SHARE * free


def _timing(results: Sequence[Result]) -> Timing:
    first = results[0]
    times = {result.workload: result.ms for result in results if result.ms is not None}
    failure = next((result.failure for result in results if result.failure), "")
    return Timing(first.backend, first.stage_to, first.page, first.packing, times, failure)

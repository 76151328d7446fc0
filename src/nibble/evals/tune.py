"""Tuning: the backends that may serve a model, timed on this machine, for `auto` to follow.

Owns tune(), which races each layer group of a plan in every phase that is routed, and what of it goes into the file
(attention/measured.py). Must not know of the terminal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from nibble.attention import backends, measured, needs
from nibble.attention.capability import Phase
from nibble.attention.measured import Timing
from nibble.attention.needs import Part
from nibble.attention.options import ROUTED, Request
from nibble.attention.plan import Plan
from nibble.attention.resolve import resolve
from nibble.config import Config
from nibble.engine.build import Blueprint, blueprint
from nibble.errors import ConfigError
from nibble.evals import workloads
from nibble.evals.race import Result, race
from nibble.evals.workloads import Workload

SHARE = 0.4
"""Of the device's free memory, what a made-up cache may take; on a CPU, of all memory, a tenth of that."""


@dataclass(frozen=True)
class Trial:
    """One part in one phase. subject: what its times are filed under."""

    part: Part
    phase: Phase
    works: tuple[Workload, ...]
    subject: str


@dataclass(frozen=True)
class Tuning:
    """What is to be tuned, decided without times that were measured before."""

    made: Blueprint
    request: Request
    trials: tuple[Trial, ...]

    def timings(self, results: Sequence[Result]) -> tuple[Timing, ...]:
        """Results of one trial, backend by backend."""
        found: dict[tuple[str, str | None], list[Result]] = {}
        for result in results:
            found.setdefault((result.backend, result.stage_to), []).append(result)
        return tuple(map(_timing, found.values()))

    def planned(self, found: Mapping[str, tuple[Timing, ...]]) -> Plan:
        """The plan that `auto` makes of these times."""
        times = measured.Measured(found)
        r = self.request
        return resolve(r.config, r.geometry, r.hardware, r.backends, measured=times)


def tuning(config: Config) -> Tuning:
    """What `config` leaves to choose on this machine; raises ConfigError where nothing can be timed."""
    made = blueprint(config, by_times=False)
    table = backends.present()
    request = Request(made.config, made.geometry, made.hardware, table, False, False)
    trials = []
    for part in needs.parts(made.config, made.geometry):
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
        yield from race(what.request, what.made.plan, trial.part, work, names)


def _works(made: Blueprint, part: Part, phase: Phase) -> tuple[Workload, ...]:
    """The phase's usual workloads, as far as the model and this machine's memory go."""
    usual = (work for work in workloads.usual(made.hardware.is_cpu) if work.phase is phase)
    size = part.stored(0).bytes_per_token
    return workloads.within(usual, made.geometry.max_context, max(int(_room(made) // size), 64))


def _room(made: Blueprint) -> float:
    if made.hardware.is_cpu:
        return SHARE * made.hardware.memory / 10
    free, _ = torch.cuda.mem_get_info()
    return SHARE * free


def _timing(results: Sequence[Result]) -> Timing:
    first = results[0]
    times = {result.workload: result.ms for result in results if result.ms is not None}
    failure = next((result.failure for result in results if result.failure), "")
    return Timing(first.backend, first.stage_to, first.page, first.packing, times, failure)

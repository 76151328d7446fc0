"""Tuning: the backends that may serve a model, checked and timed on this machine, for `auto` to follow.

Each layer group of a plan is raced for in every phase that is routed. attention/planner/evidence.py keeps the times.

The entrants of a race are the resolver's own routes (planner/options.py), staged ones included. Each is called as an
engine calls it, through its adapter over a pool of random tokens in scattered pages, and what it prepares once a step
is part of its time. Decode steps run in a CUDA graph where an engine would record them, and otherwise with all that the
host does; everything else with the host ahead of the GPU. A backend whose answer is not the reference's is not timed,
and one entrant's failure ends nothing.

Shape suffixes: T tokens, H query heads, D values of a head.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nibble.attention import backends
from nibble.attention.backends.adapters.torch_backends import TorchRef
from nibble.attention.planner import evidence, options
from nibble.attention.planner.evidence import Timing
from nibble.attention.planner.options import ROUTED, PlanRequest
from nibble.attention.planner.plan import Plan, Route
from nibble.attention.planner.resolve import CPU_PAGES, GPU_PAGES, resolve
from nibble.attention.planner.support import Origin, SchemeGroup
from nibble.attention.step import PreparedBatch
from nibble.cache import layout as packings
from nibble.config import Config
from nibble.engine.plan import EnginePlan, plan_engine
from nibble.errors import ConfigError, NibbleError
from nibble.evals import fixtures
from nibble.evals.fixtures import CALLS, Fixture, Workload, make_fixture, time_calls
from nibble.model_spec import Phase

SHARE = 0.4
"""Of the device's free memory, what a made-up cache may take; on a CPU, of all memory, a tenth of that."""
STEP_MS, FEW = 20.0, 4
"""A step has as many calls as a model has layers, fewer where they take longer than this together; FEW at least."""
LONG_MS = 50.0
"""A call that takes longer is a step of its own: what a backend plans for it is little beside it."""
HOPELESS = 6.0
"""An entrant that takes so many times as long as the best so far, twice, is timed by one call."""
SPEND_MS, FEWEST = 40.0, 3
"""What the replays of one entrant may take together, in ms, and how many are made at least."""
BOUNDS = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
"""Relative errors from which an answer is wrong: a few times those of plain torch. Conformance tests are stricter."""


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
        return resolve(
            r.config, r.model_spec, r.hardware, r.backends, measured=evidence.by_time(times), best=r.defaults
        )


def plan_tuning(config: Config) -> Tuning:
    """Return what `config` leaves to choose on this machine; raises ConfigError where nothing can be timed."""
    # Earlier times must not decide which page size and packing the race is on.
    plan = plan_engine(config, by_times=False)
    table = backends.available_backends()
    request = PlanRequest(plan.config, plan.model_spec, plan.hardware, table, defaults=plan.settled)
    trials = []
    for part in request.parts:
        # Sparse attention reads what an indexer chooses, and random tokens do not stand for that.
        for phase in ROUTED if not part.group.top_k else ():
            subject = evidence.subject(part, phase, request.dtype)
            trials.append(Trial(part, phase, _workloads(plan, part, phase), subject))
    if not trials:
        raise ConfigError(
            "there is nothing to time: sparse attention reads what its indexer chooses, and has one backend"
        )
    return Tuning(plan, request, tuple(trials))


def run_trial(tuning: Tuning, trial: Trial, names: Collection[str] = ()) -> Iterator[Result]:
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
    usual = (entry for entry in fixtures.default_workloads(plan.hardware.is_cpu) if entry.phase is phase)
    memory = plan.hardware.memory / 10 if plan.hardware.is_cpu else torch.cuda.mem_get_info()[0]
    tokens = max(int(SHARE * memory // part.stored_layer(0).bytes_per_token), 64)
    return fixtures.fit_workloads(usual, plan.model_spec.max_context, tokens)


@dataclass(frozen=True, slots=True)
class Entrant:
    """A route of the resolver's, on the page size and packing that it is timed with."""

    route: Route
    page: int
    packing: str


@dataclass(frozen=True, slots=True)
class Result:
    """How an entrant did."""

    backend: str
    stage_to: str | None
    page: int
    packing: str
    phase: Phase
    workload: str
    place: float
    graphs: bool
    in_plan: bool = False
    """Whether the plan has it."""
    ms: float | None = None
    """Of a call; None where it failed."""
    error: float | None = None
    """Relative to the reference."""
    captured: bool = False
    """Whether it was timed in a CUDA graph."""
    rough: bool = False
    """Whether it was timed by one call."""
    read_bytes: int = 0
    """Of the cache, at least."""
    failure: str = ""
    """Why it did not finish."""

    @property
    def name(self) -> str:
        """Return the backend's name, and whether its pages were staged."""
        return f"{self.backend}, staged" if self.stage_to else self.backend


def entrants(
    request: PlanRequest, plan: Plan, part: SchemeGroup, phase: Phase, names: Collection[str] = ()
) -> tuple[Entrant, ...]:
    """Return all that may serve a part, best first, on the plan's storage where they read it.

    The reference is what others are checked against; on a GPU it does not race, unless it is named or alone.

    Args:
        request: What is planned.
        plan: Whose page size and packing come first.
        part: The layers.
        phase: What a step asks of them.
        names: Only these backends; all if empty.
    """
    by_key: dict[tuple[str, str | None], Entrant] = {}
    for route in options.serving(request, part, phase):
        page, packing = _page_and_packing(request, plan, route)
        if not names or route.backend in names:
            # Rows of one backend share their code, so the one with the best place races for all.
            by_key.setdefault(route.key, Entrant(route, page, packing))
    candidates = tuple(by_key.values())
    if names or request.hardware.is_cpu:
        return candidates
    table = request.backends
    racing = tuple(c for c in candidates if table[c.route.backend].origin is not Origin.REFERENCE)
    return racing or candidates[:1]


def _page_and_packing(request: PlanRequest, plan: Plan, route: Route) -> tuple[int, str]:
    """Return the plan's page size and packing, or the first of the usual ones that the route reads."""
    usual = CPU_PAGES if request.hardware.is_cpu else GPU_PAGES
    sizes = [plan.page_size, *usual, *sorted(route.row.page or ())]
    packs = [plan.layout.packing, *packings.names(), *sorted(route.packings or ())]
    return next((page, packing) for packing in packs for page in sizes if route.fits(page, packing))


def bench_backends(
    request: PlanRequest, plan: Plan, part: SchemeGroup, workload: Workload, names: Collection[str] = ()
) -> Iterator[Result]:
    """Run all entrants one after the other, those that share pages together.

    Args:
        request: What is planned.
        plan: Whose page size and packing come first.
        part: The layers.
        workload: The requests.
        names: Only these backends; all if empty.

    Raises:
        DeviceLostError: A kernel broke the device itself.
    """
    field = entrants(request, plan, part, workload.phase, names)
    best: float | None = None
    # A fixture is large and depends on page size and packing alone, so entrants that agree share one.
    for place in dict.fromkeys((entrant.page, entrant.packing) for entrant in field):
        judge: _Reference | None = None
        for entrant in (entrant for entrant in field if (entrant.page, entrant.packing) == place):
            result = initial_result(plan, part, entrant, workload)
            try:  # kernels and their compilers fail in all manners, which is their own business
                judge = judge or _Reference(request, part, workload, entrant)
                result = _time_entrant(request, judge, entrant, result, best)
            except Exception as error:
                result = replace(result, failure=_error_summary(error))
            # A broken device shows at the next wait, and would be blamed on the next entrant.
            _require_device(request, result)
            if result.ms is not None:
                best = min(result.ms, best or result.ms)
            yield result
        # Before the next fixture is made: two may not fit.
        judge = None
        if not request.hardware.is_cpu:
            torch.cuda.empty_cache()


def initial_result(plan: Plan, part: SchemeGroup, entrant: Entrant, workload: Workload) -> Result:
    """Return an entrant's result before it runs.

    Args:
        plan: Which may have it.
        part: The layers.
        entrant: The backend, and where it is timed.
        workload: The requests.
    """
    route, phase = entrant.route, workload.phase
    group = next(group for group in plan.groups if (group.group, group.layers) == (part.group, part.layers))
    in_plan = any(planned.phase is phase and planned.key == route.key for planned in group.routes)
    return Result(
        route.backend, route.stage_to, entrant.page, entrant.packing, phase, workload.name,
        route.place, route.graphs, in_plan,
    )  # fmt: skip


def _time_entrant(
    request: PlanRequest, judge: _Reference, entrant: Entrant, result: Result, best: float | None
) -> Result:
    fixture, route = judge.fixture, entrant.route
    adapter, stage_to = backends.create(request.backends[route.backend]), route.stage_to

    def begin_step() -> PreparedBatch:
        page_size = fixture.pool.layout.page_size
        return PreparedBatch(adapter, stage_to, fixture.batch, page_size, fixture.params.window)

    def attend(layer: int, prepared: PreparedBatch) -> Tensor:
        return prepared.attend(fixture.queries[layer], fixture.pool.view(layer), fixture.params)

    # What is prepared once a step is so at the first call, and no layer's time.
    prepared = begin_step()
    error = judge.error(0, attend(0, prepared))
    # 1 ms more, because among very short calls a factor says little.
    hopeless = math.inf if best is None else HOPELESS * best + 1
    once = _once_ms(request, lambda: attend(0, prepared))
    # The first call may have compiled something more, so a second one decides.
    if once > hopeless:
        once = min(once, _once_ms(request, lambda: attend(0, prepared)))
    if once > hopeless:
        return replace(result, ms=once, error=error, rough=True, read_bytes=fixture.read_bytes)
    calls = _calls(fixture, once)

    def step() -> list[Tensor]:
        prepared = begin_step()
        for i in range(calls):
            # Layer after layer, so that no call finds its bytes in the L2 cache.
            out = attend(i % fixture.layers, prepared)
        return [out]

    decode, device = result.phase is Phase.DECODE, request.hardware.device
    recorded = decode and result.graphs and request.config.graphs
    timed = time_calls(
        step, calls, graph=recorded, queue_ahead=not decode, device=device, spend_ms=SPEND_MS, fewest=FEWEST
    )
    if timed.captured:  # a graph may hold something else than what was called
        error = max(error, judge.error((calls - 1) % fixture.layers, timed.outputs[-1]))
    return replace(result, ms=timed.ms, error=error, captured=timed.captured, read_bytes=fixture.read_bytes)


class _Reference:
    """A fixture, and what the reference answers in it: the same for all entrants, so it is asked once."""

    def __init__(self, request: PlanRequest, part: SchemeGroup, workload: Workload, entrant: Entrant) -> None:
        where = entrant.page, entrant.packing, request.dtype, request.hardware.device
        self.fixture: Fixture = make_fixture(part, workload, *where)
        self._bound = BOUNDS[getattr(torch, request.dtype)]
        self._outputs: dict[int, list[Tensor]] = {}

    def error(self, layer: int, out_THD: Tensor) -> float:
        """Return the relative error of a layer's answer; raises WrongAnswerError where it is too large."""
        pairs = zip(self.fixture.samples, self._expected(layer), strict=True)
        error = max(_relative_error(out_THD[rows], expected_THD) for (rows, _), expected_THD in pairs)
        if error > self._bound:
            raise WrongAnswerError(
                f"relative error {error:.1e}, and {self._bound:g} is the most: a wrong answer has no speed"
            )
        return error

    def _expected(self, layer: int) -> list[Tensor]:
        if layer not in self._outputs:
            fixture, view = self.fixture, self.fixture.pool.view(layer)
            # float32, so that the reference's own rounding is no part of the error.
            queries = [(fixture.queries[layer][rows].float(), batch) for rows, batch in fixture.samples]
            self._outputs[layer] = [TorchRef().attend(q, view, batch, fixture.params) for q, batch in queries]
        return self._outputs[layer]


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return ||actual - expected|| / ||expected||; infinite where it is not a number."""
    error = float((actual.double() - expected.double()).norm() / expected.double().norm())
    return math.inf if math.isnan(error) else error


class WrongAnswerError(NibbleError):
    """A backend's answer is not the reference's."""


def _once_ms(request: PlanRequest, call: Callable[[], object]) -> float:
    """Return the wall-clock time of one call, once it has been called before."""
    _synchronise(request)
    start = time.perf_counter()
    call()
    _synchronise(request)
    return (time.perf_counter() - start) * 1e3


def _calls(fixture: Fixture, once_ms: float) -> int:
    """Return the calls of a step, given how long one takes."""
    few = 1 if once_ms > LONG_MS else FEW
    return max(min(max(int(STEP_MS / max(once_ms, 1e-3)), few), CALLS), fixture.layers)


def _synchronise(request: PlanRequest) -> None:
    if not request.hardware.is_cpu:
        torch.cuda.synchronize()


def _require_device(request: PlanRequest, result: Result) -> None:
    """Raise DeviceLostError where a kernel ran into memory that is not its own: nothing more can run."""
    try:
        _synchronise(request)
    except Exception as error:
        raise DeviceLostError(
            f"{result.name} broke the device in {result.phase} {result.workload}: {_error_summary(error)}"
        ) from error


class DeviceLostError(NibbleError):
    """No more can be run in this process."""


def _error_summary(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def fastest(results: Sequence[Result], *, recordable: bool = False) -> Result | None:
    """Return the fastest of those that finished. recordable: of those that an engine can record, if any of them can."""
    finished = [result for result in results if result.ms is not None]
    if recordable:
        finished = [result for result in finished if result.graphs] or finished
    return min(finished, key=lambda result: result.ms or 0.0, default=None)

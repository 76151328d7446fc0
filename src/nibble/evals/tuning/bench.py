"""A race: every backend that may serve a layer group in one phase, checked and timed over the same requests.

The entrants are the resolver's own routes (planner/options.py), staged ones included; each is called as an engine
calls it, through its adapter over a pool of random tokens in scattered pages, with what it works out once per step in
its time: decode steps in a CUDA graph where an engine would record them, and otherwise with all that the host does;
everything else with the host ahead of the GPU. A backend whose answer is not the reference's is not timed, and one
entrant's failure ends nothing.

Shape suffixes: T tokens, H query heads, D values of a head.

The time of a call on this machine: the median replay of a CUDA graph of many calls, or of the calls themselves.

A step is a function that makes several calls, as the layers of a model would, and returns their outputs. It is
captured once and replayed; the median replay, over the number of calls, is the time of one call. So the gap between
two launches counts as it does in an engine, and nothing that the host does in between. What is not captured is called
as it is: with the host ahead of the GPU, as among the large kernels of a prompt, its work counts only where the GPU
has to wait for it; otherwise all of it does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nibble.attention import backends
from nibble.attention.backends.adapters.torch_ref import TorchRef
from nibble.attention.layer import PreparedBatch
from nibble.attention.planner import options
from nibble.attention.planner.options import PlanRequest
from nibble.attention.planner.plan import Plan, Route
from nibble.attention.planner.resolve import CPU_PAGES, GPU_PAGES
from nibble.attention.planner.support import Origin, SchemeGroup
from nibble.cache import layout as packings
from nibble.errors import NibbleError
from nibble.evals.tuning.fixtures import CALLS, Fixture, Workload, make_fixture, time_calls
from nibble.model_spec import Phase

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


@dataclass(frozen=True, slots=True)
class Candidate:
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
) -> tuple[Candidate, ...]:
    """Return all that may serve a part, best first, on the plan's storage where they read it.

    The reference is what others are checked against; on a GPU it does not race, unless it is named or alone.

    Args:
        request: What is planned.
        plan: Whose page size and packing come first.
        part: The layers.
        phase: What a step asks of them.
        names: Only these backends; all if empty.
    """
    by_key: dict[tuple[str, str | None], Candidate] = {}
    for route in options.serving(request, part, phase):
        page, packing = _place(request, plan, route)
        if not names or route.backend in names:
            # Rows of one backend share their code, so the one with the best place races for all.
            by_key.setdefault(route.key, Candidate(route, page, packing))
    candidates = tuple(by_key.values())
    if names or request.hardware.is_cpu:
        return candidates
    table = request.backends
    racing = tuple(c for c in candidates if table[c.route.backend].origin is not Origin.REFERENCE)
    return racing or candidates[:1]


def _place(request: PlanRequest, plan: Plan, route: Route) -> tuple[int, str]:
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
            result = blank(plan, part, entrant, workload)
            try:  # kernels and their compilers fail in all manners, which is their own business
                judge = judge or _Reference(request, part, workload, entrant)
                result = _run(request, judge, entrant, result, best)
            except Exception as error:
                result = replace(result, failure=_summary(error))
            # A broken device shows at the next wait, and would be blamed on the next entrant.
            _require_device(request, result)
            if result.ms is not None:
                best = min(result.ms, best or result.ms)
            yield result
        # Before the next fixture is made: two may not fit.
        judge = None
        _free(request)


def blank(plan: Plan, part: SchemeGroup, entrant: Candidate, workload: Workload) -> Result:
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


def _run(
    request: PlanRequest, judge: _Reference, entrant: Candidate, result: Result, best: float | None
) -> Result:
    fixture, route = judge.fixture, entrant.route
    adapter, stage_to = backends.create(request.backends[route.backend]), route.stage_to

    def begin_step() -> PreparedBatch:
        return PreparedBatch.create(
            adapter, stage_to, fixture.segment, fixture.view(0).page_size, fixture.spec.window
        )

    def attend(layer: int, prepared: PreparedBatch) -> Tensor:
        parts = list(prepared.attend(fixture.queries[layer], fixture.view(layer), fixture.spec))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

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

    def __init__(
        self, request: PlanRequest, part: SchemeGroup, workload: Workload, entrant: Candidate
    ) -> None:
        where = entrant.page, entrant.packing, request.dtype, request.hardware.device
        self.fixture: Fixture = make_fixture(part, workload, *where)
        self._bound = BOUNDS[getattr(torch, request.dtype)]
        self._outputs: dict[int, list[Tensor]] = {}

    def error(self, layer: int, out_THD: Tensor) -> float:
        """Return the relative error of a layer's answer; raises WrongAnswerError where it is too large."""
        pairs = zip(self.fixture.samples, self._expected(layer), strict=True)
        error = max(_relative(out_THD[rows], expected_THD) for (rows, _), expected_THD in pairs)
        if error > self._bound:
            raise WrongAnswerError(
                f"relative error {error:.1e}, and {self._bound:g} is the most: a wrong answer has no speed"
            )
        return error

    def _expected(self, layer: int) -> list[Tensor]:
        if layer not in self._outputs:
            fixture, reference = self.fixture, TorchRef()
            self._outputs[layer] = [
                # float32, so that the reference's own rounding is no part of the error.
                reference.attend(
                    fixture.queries[layer][rows].float(), fixture.view(layer), segment, fixture.spec
                )
                for rows, segment in fixture.samples
            ]
        return self._outputs[layer]


def _relative(actual: Tensor, expected: Tensor) -> float:
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
            f"{result.name} broke the device in {result.phase} {result.workload}: {_summary(error)}"
        ) from error


class DeviceLostError(NibbleError):
    """No more can be run in this process."""


def _free(request: PlanRequest) -> None:
    if not request.hardware.is_cpu:
        torch.cuda.empty_cache()


def _summary(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}"


def fastest(results: Sequence[Result], *, recordable: bool = False) -> Result | None:
    """Return the fastest of those that finished. recordable: of those that an engine can record, if any of them can."""
    finished = [result for result in results if result.ms is not None]
    if recordable:
        finished = [result for result in finished if result.graphs] or finished
    return min(finished, key=lambda result: result.ms or 0.0, default=None)

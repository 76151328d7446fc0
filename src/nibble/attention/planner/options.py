"""Every way to serve each layer group in each phase, best first: support rows in the order of rankings.

resolve.py chooses among these routes: one page size and packing must suit all groups and phases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from nibble import formats
from nibble.attention.planner import evidence, support
from nibble.attention.planner.defaults import BEST, Defaults
from nibble.attention.planner.evidence import NO_RANKINGS, Ranking, Rankings, Timing
from nibble.attention.planner.plan import STAGED_PACKING, Plan, Route
from nibble.attention.planner.step_memory import StepMemory
from nibble.attention.planner.support import BackendInfo, Need, Origin, SchemeGroup, Support
from nibble.config import Config
from nibble.errors import ConfigError, unknown
from nibble.formats.scheme import Scheme
from nibble.hardware import Hardware
from nibble.model_spec import NO_LAYER, ModelSpec, Phase
from nibble.spec import CacheSpec

ROUTED = (Phase.PREFILL, Phase.EXTEND, Phase.DECODE)
"""Phases that every plan serves. VERIFY goes to one of those that read the storage that these chose, if any."""
WEIGHTS = {Phase.PREFILL: 1, Phase.EXTEND: 1, Phase.DECODE: 4}
"""How much a phase counts where one choice must suit all."""

# The default order, for backends that no ranking names for a need. In a ranking places are 0, 1, 2 and so on.
UNRANKED = {Origin.OWN: -1, Origin.VENDOR: 100, Origin.PORTABLE: 101, Origin.REFERENCE: 102}
"""Own kernels come before all that are ranked: somebody added them for what they serve. The others come behind."""
GATHERED = {Origin.REFERENCE: 1000, Origin.OWN: 1001, Origin.VENDOR: 1002, Origin.PORTABLE: 1003}
"""Rows that gather pages in plain torch are not ranked. The reference comes first: its answers ignore the batch."""
CROWDED = 103
"""Rows with a workspace that would leave pages too little come behind those without one."""
STAGING = 2000
"""What is added where pages are dequantised first and no ranking says that it pays. Measured on one H200, decoding 64
requests of 8K tokens: dequantising 2.10 ms a layer, then 0.50 ms for attention."""

SHARE = 0.1
"""Part of the memory that pages could have that a workspace may take to make prompts faster."""

GroupPhase = tuple[SchemeGroup, Phase]
Options = Mapping[GroupPhase, tuple[Route, ...]]
"""All routes that could serve a layer group in a phase, best first."""


def by_name(name: str, table: Mapping[str, BackendInfo]) -> BackendInfo:
    """Return the backend of this name; raise ConfigError where there is none."""
    if name not in table:
        raise ConfigError(unknown("attention backend", name, [*table, "auto"]))
    return table[name]


@dataclass(frozen=True)
class PlanRequest:
    """The arguments of resolve(), and the spec of its config."""

    config: Config
    model_spec: ModelSpec
    hardware: Hardware
    backends: Mapping[str, BackendInfo]
    declared: bool = False
    verify: bool = False
    measured: Rankings = NO_RANKINGS
    """Times of this machine (evidence.load_tuned)."""
    defaults: Defaults = BEST
    """What options that are left to Nibble may become."""

    @property
    def requires_verify(self) -> bool:
        """Whether draft tokens must be served."""
        return self.verify or self.spec.max_drafts > 0

    @cached_property
    def spec(self) -> CacheSpec:
        """The parsed config; raises ConfigError where that is malformed."""
        return CacheSpec.from_config(self.config)

    @property
    def chooses_window(self) -> bool:
        """Whether the exact window is left to Nibble, and there would be one."""
        return not self.spec.requires_window and self.window > 0

    @cached_property
    def is_plain(self) -> bool:
        """Whether no layer is quantised."""
        return all(scheme.is_plain for scheme in self._schemes)

    @property
    def longest(self) -> int:
        """Most tokens of a request."""
        longest = self.model_spec.max_context
        return min(self.spec.max_context or longest, longest)

    @cached_property
    def window(self) -> int:
        """Tokens of the exact window: none where no layer is quantised, and no more than a request has."""
        has_default = bool(self.spec.sinks) or any(scheme.is_4bit for scheme in self._schemes)
        window = self.defaults.window if has_default else 0
        if self.spec.window is not None:
            window = self.spec.window
        return 0 if self.is_plain else min(window, self.longest)

    @property
    def _schemes(self) -> set[Scheme]:
        stored = self.spec.scheme_by_layer(self.model_spec.layers)
        return {stored[owner] for owner in self.model_spec.owner if owner != NO_LAYER}

    @cached_property
    def parts(self) -> tuple[SchemeGroup, ...]:
        """The layer groups by scheme; raises UnstorableError and ConfigError."""
        return support.scheme_groups(self.spec, self.model_spec, self.window, self.defaults.transforms)

    def without_window(self, why: str = "") -> PlanRequest:
        """Return the same with no window where that is left to Nibble, and a note that says why."""
        return (
            self if self.spec.requires_window else replace(self, defaults=self.defaults.without_window(why))
        )

    @property
    def dtype(self) -> str:
        """The compute dtype."""
        return self.spec.compute_dtype(self.hardware)

    def model_in_dtype(self, counted: str) -> ModelSpec:
        """Return the model with its weights in the compute dtype. counted: the dtype in which they were counted."""
        sizes = {dtype: 4 if dtype == "float32" else 2 for dtype in (counted, self.dtype)}
        weights = self.model_spec.weight_bytes * sizes[self.dtype] // sizes[counted]
        return replace(self.model_spec, weight_bytes=weights)

    def considered(self, phase: Phase) -> Mapping[str, BackendInfo]:
        """Return the backends that may serve `phase`: the one that was named, or for `auto` all that run."""
        requested = self.spec.backend_for(phase.decodes)
        if requested is None:
            return {name: info for name, info in self.backends.items() if self.declared or info.runnable}
        return {requested: by_name(requested, self.backends)}

    def may_stage(self, phase: Phase) -> bool:
        """Whether pages may be dequantised for `phase`; in DECODE that reads all bytes several times over."""
        return self.could_stage and (self.spec.allow_staging or not phase.decodes)

    @property
    def could_stage(self) -> bool:
        """Whether --allow-staging could help. Not with a host tier: staging reads pages by their numbers, and they may
        be anywhere; nor where all phases must compute alike."""
        return self.spec.offload is None and not self.spec.deterministic

    def need(self, part: SchemeGroup, phase: Phase) -> Need:
        """Return what `part` needs, before a page size and packing that are open are chosen."""
        page, packing, invariant = self.spec.page_size, self.spec.packing, self.spec.deterministic
        return part.need(phase, self.hardware, self.dtype, page, packing, batch_invariance=invariant)

    def staged(self, need: Need) -> Need | None:
        """Return what `need` becomes when pages are dequantised first; None where they hold the compute dtype.

        Staged pages are numbered anew, so a sparse kernel's indices become offsets into them.
        """
        plain = formats.plain(self.dtype).name
        if need.format == plain:
            return None
        addressing = "ragged" if need.kind == "dsa" else need.addressing
        return replace(need, format=plain, packing=STAGED_PACKING, addressing=addressing)


def serving(request: PlanRequest, part: SchemeGroup, phase: Phase) -> tuple[Route, ...]:
    """Return all routes of a layer group in one phase, best first; ties go by the backend's name, then by its rows.

    Args:
        request: What is planned.
        part: The layers, with what they store.
        phase: What a step asks of them.
    """
    need, subject = request.need(part, phase), evidence.subject(part, phase, request.dtype)
    staged = request.staged(need) if request.may_stage(phase) else None
    rankings = evidence.shipped_rankings(request.hardware.name)
    ranking = rankings.first(need, subject)
    staged_ranking = rankings.first(staged, subject) if staged else None
    # a sparse kernel that takes ragged indices was made for tokens that are dequantised first, memory short or not
    pays = staged is not None and (staged.addressing == "ragged" or _has_workspace(request, part, phase))
    routes = list[Route]()
    for info in request.considered(phase).values():
        for row in info.support:
            if row.serves(need):
                direct = _direct(ranking, info, row, need, request.hardware)
                crowded = not _leaves_room(request, part, row)
                routes += (replace(route, place=CROWDED) for route in direct) if crowded else direct
            if staged and row.serves(staged):
                usable = ranking if pays else None
                routes.append(_over_plain_pages(usable, staged_ranking, info, row, staged, request.hardware))
    routes.sort(key=lambda route: route.place)
    return tuple(_as_measured(request, need, subject, routes))


def _direct(
    ranking: Ranking | None, info: BackendInfo, row: Support, need: Need, hardware: Hardware
) -> Iterator[Route]:
    """Yield the routes of a row that reads pages as they are, one for each packing that has a place of its own.

    Args:
        ranking: Of the cache's format, None where there is none.
        info: The backend.
        row: One of its rows.
        need: What it serves.
        hardware: The machine.
    """
    usual = (GATHERED if row.gathers else UNRANKED)[info.origin]
    graphs = info.verify_graphs if need.phase is Phase.VERIFY else info.graphs
    route = Route(need.phase, info.name, row, None, info.runnable, graphs, place=usual, packings=row.packing)
    route = replace(route, source=row.evidence(need))
    places = ranking.places(info.name, staged=False) if ranking and not row.gathers else ()
    if not ranking or not places:
        yield route
        return
    for place, packing in places:
        if packing is None:
            yield replace(route, place=place, ranking=ranking.basis(hardware))
        elif row.packing is None or packing in row.packing:
            yield replace(route, place=place, ranking=ranking.basis(hardware), packings=frozenset({packing}))


def _over_plain_pages(
    ranking: Ranking | None,
    plain_ranking: Ranking | None,
    info: BackendInfo,
    row: Support,
    need: Need,
    hardware: Hardware,
) -> Route:
    """Return the route of a row that reads pages which are dequantised first.

    Args:
        ranking: Of the cache's own format, None where no workspace may be had for speed.
        plain_ranking: Of the format that pages are dequantised to.
        info: The backend.
        row: One of its rows.
        need: What it serves, in the plain format.
        hardware: The machine.
    """
    # dequantised pages lie in a workspace that is made by lengths on the host, so no graph holds them
    route = Route(
        need.phase, info.name, row, need.format, info.runnable, graphs=False, source=row.evidence(need)
    )
    # A ranking of the stored format that names staged pages says that dequantising pays.
    if ranking and not row.gathers and (places := ranking.places(info.name, staged=True)):
        return replace(route, place=places[0][0], for_speed=True, ranking=ranking.basis(hardware))
    direct = _direct(plain_ranking, info, row, need, hardware)
    return replace(route, place=STAGING + min(entry.place for entry in direct))


def _as_measured(request: PlanRequest, need: Need, subject: str, routes: list[Route]) -> list[Route]:
    """Return the routes with the places of those that were measured on this machine dealt out anew among them.

    The fastest comes first. Nothing changes for the others, nor where a backend was named.
    """
    # By subject alone: times hold for nothing but what was timed.
    match = {"subject": subject}
    measured = next((entry for entry in request.measured.entries if entry.match == match), None)
    if measured is None or request.spec.backend_for(need.phase.decodes) is not None:
        return routes
    page = request.spec.page_size
    # A time on one page size says nothing of another that is asked for.
    times = {timing.key: timing for timing in measured.order if page in {None, timing.page}}
    # Reversed, so that of routes with one key the best one stays.
    best = {route.key: route for route in reversed(routes) if route.key in times}
    # The sort is stable, and measured.order has the fastest first.
    ranked = sorted(
        (key for key in times if key in best),
        key=lambda key: (bool(times[key].failure), _delays_graphs(request, best[key])),
    )
    # The measured ones deal out their own places, so that all others keep theirs.
    places = dict(zip(ranked, sorted(route.place for route in best.values()), strict=True))
    renewed = [
        _with_time(route, times[route.key], places[route.key]) if route.key in places else route
        for route in routes
    ]
    order = {key: index for index, key in enumerate(ranked)}
    return sorted(renewed, key=lambda route: (route.place, order.get(route.key, len(order))))


def _with_time(route: Route, timing: Timing, place: float) -> Route:
    for_speed = route.stage_to is not None and not timing.failure
    return replace(route, place=place, measured=timing.summary(), failed=timing.failure, for_speed=for_speed)


def _delays_graphs(request: PlanRequest, route: Route) -> bool:
    """Whether a route keeps decode steps from being recorded, which costs the whole model more than any attention."""
    recording = route.phase.decodes and request.spec.graphs and not request.hardware.is_cpu
    return recording and not route.graphs


def _has_workspace(request: PlanRequest, part: SchemeGroup, phase: Phase) -> bool:
    """Whether pages may be dequantised for speed alone: by `auto`, where memory is not short.

    A backend that is named reads pages as they are if it can; where none does, this is not asked.
    """
    if request.spec.backend_for(phase.decodes) is not None:
        return False
    memory = StepMemory(request.spec, request.model_spec, request.hardware, request.dtype)
    return memory.dequantized_bytes(part.stored_layer(0).without_index) <= SHARE * memory.free_for_pages


def _leaves_room(request: PlanRequest, part: SchemeGroup, row: Support) -> bool:
    """Whether a row's own workspace leaves pages theirs, so that it may be preferred to rows that need none."""
    if not row.workspace or row.gathers:
        return True
    memory = StepMemory(request.spec, request.model_spec, request.hardware, request.dtype)
    width = part.stored_layer(0).without_index.bytes_in(formats.plain(request.dtype).name)
    free = memory.free_for_pages
    # Where weights do not fit, that is what the user is told, whoever would have served.
    does_not_fit = free + (request.spec.kv_memory or 0) <= 0
    return does_not_fit or memory.workspace_bytes(row, part.group, width) <= SHARE * free


def route_cost(plan: Plan) -> float:
    """Return the places of all that a plan chose, by weight and number of layers.

    Staging counts in full: a command that is proposed should read pages as they are where it can.
    """
    return sum(
        (route.place + STAGING * route.for_speed) * WEIGHTS.get(route.phase, 0) * len(group.layers)
        for group in plan.groups
        for route in group.routes
    )

"""Every way to serve each layer group in each phase, best first: support rows in the order of rankings.

Which of the options a plan takes is resolve.py's business: one page size and packing must suit them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace

from nibble import formats
from nibble.attention.planner import evidence
from nibble.attention.planner.evidence import NO_RANKINGS, Ranking, Rankings, Timing
from nibble.attention.planner.memory import StepMemory
from nibble.attention.planner.plan import STAGED_PACKING, Plan, Route
from nibble.attention.planner.support import BackendInfo, Need, Origin, Phase, SchemeGroup, Support
from nibble.config import Config
from nibble.errors import ConfigError, unknown
from nibble.hardware import Hardware
from nibble.model_spec import ModelSpec
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
STAGING = 2000
"""What is added where pages are dequantised first and no ranking says that it pays. Measured on one H200, decoding 64
requests of 8K tokens: dequantising 2.10 ms a layer, then 0.50 ms for attention."""

SHARE = 0.1
"""Part of the memory that pages could have that a workspace may take to make prompts faster."""


def by_name(name: str, table: Mapping[str, BackendInfo]) -> BackendInfo:
    """The backend that was named; raises ConfigError where none is called so."""
    if name not in table:
        raise ConfigError(unknown("attention backend", name, [*table, "auto"]))
    return table[name]


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The arguments of resolve(), and the spec of its config. Raises ConfigError where that is malformed."""

    config: Config
    model_spec: ModelSpec
    hardware: Hardware
    backends: Mapping[str, BackendInfo]
    declared: bool
    verify: bool
    measured: Rankings = NO_RANKINGS
    """Times of this machine (evidence.load_tuned)."""
    rankings: Rankings | None = None
    """Instead of those that are shipped."""
    spec: CacheSpec = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "spec", CacheSpec.from_config(self.config))

    @property
    def dtype(self) -> str:
        """The compute dtype."""
        return self.spec.compute_dtype(self.hardware)

    def considered(self, phase: Phase) -> Mapping[str, BackendInfo]:
        """The backends that may serve `phase`: the one that was named, or for `auto` all that run."""
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
        be anywhere."""
        return self.spec.offload is None

    def need(self, part: SchemeGroup, phase: Phase) -> Need:
        """What `part` asks for, before page size and packing are chosen."""
        return part.need(phase, self.hardware, self.dtype, self.spec.page_size, None)

    def staged(self, need: Need) -> Need | None:
        """What `need` becomes when pages are dequantised first; None where they hold the compute dtype.

        Staged pages are numbered anew, so a sparse kernel's indices become offsets into them.
        """
        plain = formats.plain(self.dtype).name
        if need.format == plain:
            return None
        addressing = "ragged" if need.kind == "dsa" else need.addressing
        return replace(need, format=plain, packing=STAGED_PACKING, addressing=addressing)


@dataclass(frozen=True, slots=True)
class Option:
    """A row that serves a need."""

    backend: BackendInfo
    row: Support
    place: float
    """In the order of all options of the need; lower is better, and the same for equals."""
    pages: Set[int] | None
    """Page sizes of the cache on which it does; None for any."""
    packings: Set[str] | None
    stage_to: str | None = None
    for_speed: bool = False
    """Pages are dequantised first because that is faster, and not for want of another way."""
    source: str = ""
    """What its place in a ranking rests on."""
    measured: str = ""
    """Its time on this machine in words, where that gave it its place."""
    failed: str = ""
    """Why it has none, where it was timed."""

    @property
    def key(self) -> tuple[str, str | None]:
        """Who serves, and how: rows of one backend share their code."""
        return self.backend.name, self.stage_to

    def fits(self, page: int, packing: str) -> bool:
        """Whether it serves its need on this page size and packing."""
        return (self.pages is None or page in self.pages) and (
            self.packings is None or packing in self.packings
        )

    def route(self, phase: Phase) -> Route:
        """Return the route that a plan has where it takes this option."""
        # dequantised pages lie in a workspace that is made by lengths on the host, so no graph holds them
        graphs = self.backend.graphs and self.stage_to is None
        return Route(
            phase,
            self.backend.name,
            self.row,
            self.stage_to,
            self.backend.runnable,
            graphs,
            self.place,
            self.for_speed,
            self.source,
            self.measured,
            self.failed,
        )


GroupPhase = tuple[SchemeGroup, Phase]
Options = Mapping[GroupPhase, tuple[Option, ...]]


def serving(request: PlanRequest, part: SchemeGroup, phase: Phase) -> tuple[Option, ...]:
    """Return all options of a layer group in one phase, best first; ties go by the backend's name, then by its rows.

    Args:
        request: What is planned.
        part: The layers, with what they store.
        phase: What a step asks of them.
    """
    need, subject = request.need(part, phase), evidence.subject(part, phase, request.dtype)
    staged = request.staged(need) if request.may_stage(phase) else None
    rankings = (
        evidence.shipped_rankings(request.hardware.name) if request.rankings is None else request.rankings
    )
    ranking = rankings.first(need, subject)
    staged_ranking = rankings.first(staged, subject) if staged else None
    # a sparse kernel that takes ragged indices was made for tokens that are dequantised first, memory short or not
    pays = staged is not None and (staged.addressing == "ragged" or _has_workspace(request, part, phase))
    options = list[Option]()
    for info in request.considered(phase).values():
        for row in info.support:
            if row.serves(need):
                options += _direct(ranking, info, row)
            if staged and row.serves(staged):
                options.append(
                    _over_plain_pages(ranking if pays else None, staged_ranking, info, row, staged)
                )
    return _as_measured(request, phase, subject, tuple(sorted(options, key=lambda option: option.place)))


def _direct(ranking: Ranking | None, info: BackendInfo, row: Support) -> Iterator[Option]:
    """Yield the options of a row that reads pages as they are, one for each packing that has a place of its own."""
    places = ranking.places(info.name, staged=False) if ranking and not row.gathers else ()
    for place, packing in places:
        if packing is None or row.packing is None or packing in row.packing:
            packings = row.packing if packing is None else frozenset({packing})
            yield Option(info, row, place, row.page, packings, source=ranking.source if ranking else "")
    if not places:
        yield Option(info, row, _default_place(info, row), row.page, row.packing)


def _over_plain_pages(
    ranking: Ranking | None, plain_ranking: Ranking | None, info: BackendInfo, row: Support, need: Need
) -> Option:
    """Return the option of a row that reads pages which are dequantised first.

    Args:
        ranking: Of the cache's own format, None where no workspace may be had for speed.
        plain_ranking: Of the format that pages are dequantised to.
        info: The backend.
        row: One of its rows.
        need: What it serves, in the plain format.
    """
    # A ranking of the stored format that names staged pages says that dequantising pays.
    if ranking and not row.gathers and (places := ranking.places(info.name, staged=True)):
        return Option(info, row, places[0][0], row.page, None, need.format, True, ranking.source)
    place = min(option.place for option in _direct(plain_ranking, info, row))
    return Option(info, row, STAGING + place, row.page, None, need.format)


def _default_place(info: BackendInfo, row: Support) -> float:
    return (GATHERED if row.gathers else UNRANKED)[info.origin]


def _as_measured(
    request: PlanRequest, phase: Phase, subject: str, options: tuple[Option, ...]
) -> tuple[Option, ...]:
    """Return the options with the places of those that were measured on this machine dealt out anew among them.

    The fastest comes first. Nothing changes for the others, nor where a backend was named.
    """
    measured = next(
        (entry for entry in request.measured.entries if entry.match == {"subject": subject}), None
    )
    if measured is None or request.spec.backend_for(phase.decodes) is not None:
        return options
    page = request.spec.page_size
    # A time on one page size says nothing of another that is asked for.
    times = {timing.key: timing for timing in measured.order if page in {None, timing.page}}
    # Reversed, so that of options with one key the best one stays.
    best = {option.key: option for option in reversed(options) if option.key in times}
    # The sort is stable, and measured.order has the fastest first.
    ranked = sorted(
        (key for key in times if key in best),
        key=lambda key: (bool(times[key].failure), _delays_graphs(request, phase, best[key])),
    )
    # The measured ones deal out their own places, so that all others keep theirs.
    places = dict(zip(ranked, sorted(option.place for option in best.values()), strict=True))
    renewed = [_renew(option, places, times) for option in options]
    return tuple(
        sorted(renewed, key=lambda o: (o.place, ranked.index(o.key) if o.key in places else len(ranked)))
    )


def _renew(
    option: Option,
    places: Mapping[tuple[str, str | None], float],
    times: Mapping[tuple[str, str | None], Timing],
) -> Option:
    if option.key not in places:
        return option
    timing, place = times[option.key], places[option.key]
    speed = option.stage_to is not None and not timing.failure
    return replace(option, place=place, measured=timing.summary(), failed=timing.failure, for_speed=speed)


def _delays_graphs(request: PlanRequest, phase: Phase, option: Option) -> bool:
    """Whether an option keeps decode steps from being recorded, which costs the whole model more than any attention."""
    recording = phase is Phase.DECODE and request.spec.graphs and not request.hardware.is_cpu
    return recording and not option.route(phase).graphs


def _has_workspace(request: PlanRequest, part: SchemeGroup, phase: Phase) -> bool:
    """Whether pages may be dequantised for speed alone: by `auto`, where memory is not short.

    A backend that is named reads pages as they are if it can; where none does, this is not asked.
    """
    if request.spec.backend_for(phase.decodes) is not None:
        return False
    memory = StepMemory(request.spec, request.model_spec, request.hardware, request.dtype)
    return memory.dequantized_bytes(part.stored_layer(0).without_index) <= SHARE * memory.free_for_pages


def route_cost(plan: Plan) -> float:
    """Return the places of all that a plan chose, by weight and number of layers.

    Staging counts in full: a command that is proposed should read pages as they are where it can.
    """
    return sum(
        (route.place + STAGING * route.for_speed) * WEIGHTS.get(route.phase, 0) * len(group.layers)
        for group in plan.groups
        for route in group.routes
    )

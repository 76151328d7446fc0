"""Which rows serve a need: every way to serve each layer group in each phase, best first.

Owns Request (the arguments of resolve() as one), Option, the price of staging, and what measured times change. What is
picked from the options is resolve.py's business. Must not name any backend or format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from nibble import formats
from nibble.attention.planner.memory import StepMemory
from nibble.attention.planner.needs import SchemeGroup
from nibble.attention.planner.plan import STAGED_PACKING, Plan, Route
from nibble.attention.planner.support import BackendInfo, Need, Phase, Support
from nibble.attention.planner.timings import NOTHING, Timing, Timings, subject
from nibble.config import Config
from nibble.errors import ConfigError, unknown
from nibble.hardware import Hardware
from nibble.model_spec import ModelSpec
from nibble.spec import CacheSpec

ROUTED = (Phase.PREFILL, Phase.EXTEND, Phase.DECODE)
"""Phases that every plan serves. VERIFY goes to one of those that read the storage that these chose, if any."""
WEIGHTS = {Phase.PREFILL: 1, Phase.EXTEND: 1, Phase.DECODE: 4}
"""How much a phase's preference counts where one choice must suit all."""
STAGING_PENALTY = 50
"""What staging costs in units of Row.prefer, where a row does not say what it is worth then: more than the gap between
a portable kernel and a vendor's. Measured on one H200, decoding 64 requests of 8K tokens: dequantising 2.10 ms a layer,
then 0.50 ms for attention."""

SHARE = 0.1
"""Part of the memory that pages could have that a workspace may take to make prompts faster."""


def by_name(name: str, table: Mapping[str, BackendInfo]) -> BackendInfo:
    """The backend that was named; raises ConfigError where none is called so."""
    if name not in table:
        raise ConfigError(unknown("attention backend", name, [*table, "auto"]))
    return table[name]


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The arguments of resolve(), and the spec that its config stands for. Raises ConfigError where that is malformed."""

    config: Config
    model_spec: ModelSpec
    hardware: Hardware
    backends: Mapping[str, BackendInfo]
    declared: bool
    verify: bool
    measured: Timings = NOTHING
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
        return replace(need, format=plain, packing=STAGED_PACKING, addressing=addressing, stored=need.format)


@dataclass(frozen=True, slots=True)
class Option:
    """A row that serves a need, on these page sizes and packings of the cache; None is any. measured: its time on this
    machine in words, where that has a say in its `prefer`; failed: why there is none, where it was timed."""

    backend: BackendInfo
    row: Support
    prefer: int
    pages: frozenset[int] | None
    packings: frozenset[str] | None
    stage_to: str | None = None
    measured: str = ""
    failed: str = ""

    @property
    def key(self) -> tuple[str, str | None]:
        """Who serves, and how: rows of one backend share their code."""
        return self.backend.name, self.stage_to

    def timed(self, prefer: int, timing: Timing) -> Option:
        """The option in the place that a timing gives it."""
        return replace(self, prefer=prefer, measured=timing.words, failed=timing.failure)

    def fits(self, page: int, packing: str) -> bool:
        return (self.pages is None or page in self.pages) and (
            self.packings is None or packing in self.packings
        )

    def route(self, phase: Phase) -> Route:
        graphs = (
            self.backend.graphs and self.stage_to is None
        )  # staging makes its workspace by lengths on the host
        able = self.backend.runnable
        return Route(
            phase, self.backend.name, self.row, self.stage_to, able, graphs, self.measured, self.failed
        )


Ask = tuple[SchemeGroup, Phase]
Options = Mapping[Ask, tuple[Option, ...]]


def serving(request: PlanRequest, part: SchemeGroup, phase: Phase) -> tuple[Option, ...]:
    """All options of an ask, best first; ties go by the backend's name, then by order in its file."""
    need = request.need(part, phase)
    staged = request.staged(need) if request.may_stage(phase) else None
    pays, found = staged is not None and _for_speed(request, part, phase), list[Option]()
    for info in request.considered(phase).values():
        found += [
            Option(info, row, row.prefer, row.page, row.packing) for row in info.support if row.serves(need)
        ]
        if staged:
            found += [_staged(info, row, staged, pays) for row in info.support if row.serves(staged)]
    return _as_measured(request, part, phase, tuple(sorted(found, key=lambda option: -option.prefer)))


def _as_measured(
    request: PlanRequest, part: SchemeGroup, phase: Phase, found: tuple[Option, ...]
) -> tuple[Option, ...]:
    """The options with the preferences of those that were measured on this machine handed out anew among them, the
    fastest first; nothing changes for the others, nor where a backend was named."""
    if request.spec.backend_for(phase.decodes) is not None:
        return found
    page = request.spec.page_size
    timings = request.measured.ranked(subject(part, phase, request.dtype))
    times = {timing.key: timing for timing in timings if page in {None, timing.page}}
    first = {option.key: option for option in reversed(found) if option.key in times}
    if not first:
        return found
    ranked = sorted(
        (key for key in times if key in first),
        key=lambda key: (bool(times[key].failure), _waits(request, phase, first[key])),
    )
    preferences = sorted((option.prefer for option in first.values()), reverse=True)
    given = dict(zip(ranked, preferences, strict=True))
    renewed = [
        option.timed(given[option.key], times[option.key]) if option.key in given else option
        for option in found
    ]
    return tuple(
        sorted(renewed, key=lambda o: (-o.prefer, ranked.index(o.key) if o.key in given else len(ranked)))
    )


def _waits(request: PlanRequest, phase: Phase, option: Option) -> bool:
    """Whether an option keeps decode steps from being recorded, which costs the whole model more than any attention."""
    recording = phase is Phase.DECODE and request.spec.graphs and not request.hardware.is_cpu
    return recording and not option.route(phase).graphs


def _staged(info: BackendInfo, row: Support, need: Need, pays: bool) -> Option:
    prefer = row.staged if pays and row.staged is not None else row.prefer - STAGING_PENALTY
    return Option(info, row, prefer, row.page, None, need.format)


def _for_speed(request: PlanRequest, part: SchemeGroup, phase: Phase) -> bool:
    """Whether a workspace may be had for speed alone: by `auto`, where memory is not short. A backend that is named
    reads pages as they are if it can. Where nobody does, this is not asked."""
    if request.spec.backend_for(phase.decodes) is not None:
        return False
    memory = StepMemory(request.spec, request.model_spec, request.hardware, request.dtype)
    return memory.dequantized_bytes(part.stored_layer(0).without_index) <= SHARE * memory.free_for_pages


def score(plan: Plan) -> int:
    """The preferences of all that a plan chose, by weight and number of layers; staging counts in full, as a command
    that is proposed should read pages as they are where it can."""
    return sum(
        (route.row.prefer - STAGING_PENALTY * (route.stage_to is not None))
        * WEIGHTS.get(route.phase, 0)
        * len(group.layers)
        for group in plan.groups
        for route in group.routes
    )

"""The plan: the routes of every layer group and phase, and the cache's layout; and which decode steps are recorded.

resolve.py chooses the routes. Decode steps are recorded as CUDA graphs in a few sizes, unless a route prevents it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

from nibble import formats
from nibble.attention.planner.support import Support
from nibble.cache.layout import CacheLayout
from nibble.errors import Refusal, Unsupported
from nibble.model_spec import LayerGroup, Phase, RecurrentGroup

STAGED_PACKING = "nhd"
"""How staged pages are packed, whatever the cache's packing is."""


@dataclass(frozen=True, slots=True)
class Route:
    """The backend of one group in one phase."""

    phase: Phase
    backend: str
    row: Support
    stage_to: str | None = None
    """The plain format that its pages are dequantised into first, in STAGED_PACKING."""
    runnable: bool = True
    """Whether this version has an adapter for the backend, or only knows its facts."""
    graphs: bool = False
    """Whether a CUDA graph may hold it, in DECODE and VERIFY."""
    place: float = 0
    """Its place among all that serve the same need; lower is better, and the same for equals (options.py)."""
    for_speed: bool = False
    """Pages are dequantised because that is faster than to read them as they are."""
    ranking: str = ""
    """What its place in a ranking rests on; empty where none names it."""
    source: str = ""
    """What stands behind its row, for this phase on this machine."""
    measured: str = ""
    """Its time on this machine in words, where that had a say in the choice."""
    failed: str = ""
    """Why it did not finish when it was timed here; it is chosen all the same where no other did better."""
    packings: Set[str] | None = None
    """Packings of the cache that it reads, None for any."""

    @property
    def key(self) -> tuple[str, str | None]:
        """Who serves, and how: rows of one backend share their code."""
        return self.backend, self.stage_to

    def fits(self, page: int, packing: str) -> bool:
        """Whether it serves on this page size and packing."""
        pages, packings = self.row.page, self.packings
        return (pages is None or page in pages) and (packings is None or packing in packings)

    @property
    def why(self) -> str:
        """What stands behind it: a measurement here, a ranking, or the row's source; and what speaks against it."""
        failed = f"; failed when it was timed on this machine: {self.failed}" if self.failed else ""
        return (self.measured or self.ranking or self.source) + failed

    def __str__(self) -> str:
        return f"{self.backend} (staged to {self.stage_to})" if self.stage_to else self.backend


def of_phase(routes: Iterable[Route], phase: Phase) -> Route | None:
    """Return the route of a phase, if there is one."""
    return next((route for route in routes if route.phase is phase), None)


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A layer group that shares a scheme: the same layers group by group, split where `kv_layers` says so."""

    group: LayerGroup
    layers: tuple[int, ...]
    scheme: str
    routes: tuple[Route, ...]
    near_routes: tuple[Route, ...] = ()
    """Those of the exact window, over pages in the compute dtype; none where there is `near_kernel`."""
    near_kernel: bool = False
    """Whether near tokens have a kernel of their own (kernels/near/__init__.py)."""

    def __str__(self) -> str:
        return f"{self.group.name} in {self.scheme}"

    @property
    def sees_all(self) -> bool:
        """Whether its queries see all tokens before them, so that sinks are among them."""
        return self.group.window is None and self.group.chunk is None

    def route(self, phase: Phase) -> Route:
        """Return the route of `phase`; raise Unsupported where the plan has none (VERIFY only, see its notes)."""
        if route := of_phase(self.routes, phase):
            return route
        # Only backends that decode could serve VERIFY.
        decode = {route.backend: (f"has no row for {phase}",) for route in self.routes if route.phase.decodes}
        raise Unsupported(Refusal(f"{phase} of layer group {self}", decode))


@dataclass(frozen=True, slots=True)
class Tier:
    """A host tier."""

    buffer: int
    """Tokens of a hot buffer, in whole pages."""
    layout: CacheLayout
    """What the host stores."""


class PageSplit(NamedTuple):
    """How pages are split between the device and the host."""

    pages: int
    frames: int
    """Pages that have room on the device."""
    host: int
    """Bytes of the host's memory; 0 where all pages have a frame, and a host tier has nothing to do."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The cache's layout and the routes over it."""

    layout: CacheLayout
    groups: tuple[GroupPlan, ...]
    owner: tuple[int, ...]
    """For each layer the one whose pages it reads."""
    dtype: str
    notes: tuple[str, ...] = ()
    """What was left to `auto`, and why it was chosen so."""
    tier: Tier | None = None
    """The host tier, where there is one."""
    window: int = 0
    """Tokens that a query reads in the compute dtype: those nearer than this; 0 for none."""
    sinks: int = 0
    """First tokens that queries read in the compute dtype however far they are, in whole pages; 0 for none."""
    meaning: str = ""
    """What a 4-bit scheme gives here, in a line (defaults.py); empty for other schemes."""
    default_notes: tuple[str, ...] = ()
    """Those of `notes` that say why a 4-bit scheme gives less than it could."""
    states: tuple[RecurrentGroup, ...] = ()
    """Layers with recurrent states."""
    state_format: str = ""
    """How these are kept."""

    @property
    def stores(self) -> tuple[CacheLayout, ...]:
        """What is stored, on the device and on the host."""
        return (self.layout, self.tier.layout) if self.tier else (self.layout,)

    @property
    def routes(self) -> Iterator[Route]:
        """The routes of all groups."""
        return (route for group in self.groups for route in (*group.routes, *group.near_routes))

    @property
    def runnable(self) -> bool:
        """Whether this version has an adapter for all of its backends."""
        return all(route.runnable for route in self.routes)

    @property
    def fingerprint(self) -> str:
        """Digits that differ if the meaning of a page's bytes differs; part of every prefix key."""
        # What a layer stores depends on what the layers below it have read.
        parts = (f"/{self.sinks}" if self.sinks else "", f"/{self.state_format}" if self.states else "")
        return f"{self.layout.fingerprint}/{self.window}{''.join(parts)}"

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.layout.page_size

    def route(self, layer: int, phase: Phase) -> Route:
        """Return the route of attention layer `layer` in `phase`."""
        return self._group(layer).route(phase)

    def near_route(self, layer: int, phase: Phase) -> Route:
        """Return the route of attention layer `layer` over exact pages in `phase`."""
        route = of_phase(self._group(layer).near_routes, phase)
        assert route, f"the plan has no exact window in {phase}"
        return route

    def has_sinks(self, layer: int) -> bool:
        """Return whether attention layer `layer` reads the first tokens in the compute dtype."""
        return self.sinks > 0 and self._group(layer).sees_all

    @property
    def exact_layout(self) -> CacheLayout:
        """What exact pages hold: what attention reads, in the compute dtype and without transforms."""
        plain = self.layout.without_index.stored_as(formats.plain(self.dtype).name, STAGED_PACKING)
        return replace(plain, layers=tuple(replace(layer, transforms=()) for layer in plain.layers))

    def chunk(self, layer: int) -> int | None:
        """Return the tokens of a chunk in attention layer `layer`, None if it has none."""
        return self._group(layer).group.chunk

    def _group(self, layer: int) -> GroupPlan:
        return next(group for group in self.groups if layer in group.layers)


SMALL = (2, 4, 8)
"""Sizes of few requests."""
MIN_ROWS = 2
"""Rows of a step of one request: a compiled model would need code of its own for a single row."""
STEPS = ((64, 8), (128, 16), (256, 32))
"""(up to, step) of the sizes that follow; beyond the last, steps of twice its step."""


PIECE_SIZES = (32, 64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
"""Tokens of steps with prompts that are recorded piecewise: beyond, the device takes longer than the host launches."""


def graph_sizes(most: int, *, has_experts: bool = False) -> tuple[int, ...]:
    """Return the sizes of recorded steps in requests, ascending; the last has room for `most`.

    Args:
        most: requests that run at a time.
        has_experts: whether padding costs a single request something: experts that it would choose.
    """
    # Few requests get sizes close together: padding costs them most.
    sizes = [size for size in SMALL if size < 2 * most] or [SMALL[0]]
    if has_experts:
        sizes.insert(0, 1)
    while sizes[-1] < most:
        step = next((step for upto, step in STEPS if sizes[-1] < upto), 2 * STEPS[-1][1])
        sizes.append(sizes[-1] + step)
    return tuple(sizes)


def cuda_graph_blocker(plan: Plan) -> str | None:
    """Return why decode steps of `plan` cannot be recorded; None if they can."""
    for group in plan.groups:
        near = of_phase(group.near_routes, Phase.DECODE)
        routes = [group.route(Phase.DECODE), *([near] if near else [])]
        route = next((route for route in routes if not route.graphs), None)
        if route:
            return f"decode steps run without CUDA graphs: {route} of group {group.group.name} cannot be recorded"
    return None

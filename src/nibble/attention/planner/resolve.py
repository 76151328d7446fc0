"""Resolve a config, a model and a machine to a plan: backends, page size, packing, and a host tier if requested.

Choosing, validating and documenting are one function over the backends' rows.

    check_names        what can be refused of a config before there is a model to look at
    resolve            Config, ModelSpec, Hardware -> Plan, or Unsupported with reasons and a command
    attempt            the same with all backends that this version knows, or None
    require_runnable   whether the plan's backends are here
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from nibble import formats
from nibble.attention.backends import all_backends, missing_requirement
from nibble.attention.planner import defaults, explain, options, refusal, state_support, suggestion, support
from nibble.attention.planner.defaults import BEST, Defaults
from nibble.attention.planner.evidence import NO_RANKINGS, Rankings
from nibble.attention.planner.options import ROUTED, WEIGHTS, GroupPhase, Options, PlanRequest
from nibble.attention.planner.plan import STAGED_PACKING, GroupPlan, Plan, Route, Tier
from nibble.attention.planner.refusal import UnservedError
from nibble.attention.planner.support import BackendInfo, SchemeGroup, UnstorableError, format_layers
from nibble.cache import layout as packings
from nibble.cache.layout import CacheLayout
from nibble.config import Config, OffloadSpec
from nibble.errors import ConfigError, Suggestion, Unsupported
from nibble.formats import scheme as schemes
from nibble.hardware import Hardware
from nibble.kernels import cdiv
from nibble.model_spec import INDEX, ModelSpec, Phase
from nibble.spec import CacheSpec

GPU_PAGES = (64, 32, 16, 128, 1)
CPU_PAGES = (16, 32, 64, 128, 1)
"""Page sizes by preference where rows leave the choice: kernels like 64 tokens, prefixes like small pages."""
HOST_PACKING = "record"
"""How the host packs tokens: one run of bytes each, whatever the device does."""
HOT_BUFFER_FACTOR = 2
"""A hot buffer has so many times the tokens that a query looks at, by default: with no more than those, all that a step
does not look at is dropped for the next."""


def check_names(config: Config) -> None:
    """Raise ConfigError where a config names an unknown scheme or backend, as resolve() would, without a model."""
    spec = CacheSpec.from_config(config)
    for name in filter(None, (spec.decode_backend, spec.prefill_backend)):
        options.by_name(name, all_backends())


def resolve(
    config: Config,
    model_spec: ModelSpec,
    hardware: Hardware,
    backends: Mapping[str, BackendInfo] | None = None,
    *,
    declared: bool = False,
    verify: bool = False,
    measured: Rankings = NO_RANKINGS,
    best: Defaults = BEST,
) -> Plan:
    """Return the plan.

    Args:
        config: What is requested.
        model_spec: The model.
        hardware: The machine.
        backends: By name; None for all that this version knows.
        declared: Let `auto` also choose backends that this version knows but cannot run yet.
        verify: Refuse where draft tokens cannot be served, as where `config` has a drafter. Otherwise such a plan has
            no VERIFY route, a note says so, and no backend holds memory for VERIFY alone.
        measured: Times of this machine (evidence.load_tuned), which `auto` follows first.
        best: What an exact window and transforms that are left to Nibble may become.

    Raises:
        Unsupported: No backend serves it; with each backend's reasons and a command that works.
        ConfigError: The config is malformed, or the model cannot be stored so.
    """
    # Sorted, so that ties between options do not depend on the order of registration.
    table = dict(sorted((all_backends() if backends is None else backends).items()))
    request = PlanRequest(config, model_spec, hardware, table, declared, verify, measured, best)
    try:
        return _resolve(request)
    except UnservedError as error:
        nearest = suggestion.find(request.without_window(), _plan_or_none)
        raise Unsupported(replace(error.refusal(), suggestion=nearest)) from None
    except UnstorableError as error:
        refused = ConfigError(str(error))
        refused.suggestion = suggestion.find(request.without_window(), _plan_or_none)
        raise refused from None


def find_smaller(
    config: Config,
    model_spec: ModelSpec,
    hardware: Hardware,
    backends: Mapping[str, BackendInfo],
    *,
    declared: bool = False,
    best: Defaults = BEST,
) -> Suggestion | None:
    """Return the nearest configuration that fits where this one is served and does not; None where nothing fits.

    Args:
        config: What does not fit.
        model_spec: The model.
        hardware: The machine.
        backends: By name.
        declared: Whether backends may be chosen that cannot run yet.
        best: What transforms that are left to Nibble may become. A window is not among what needs room.
    """
    table = dict(sorted(backends.items()))
    request = PlanRequest(config, model_spec, hardware, table, declared, defaults=best)
    return suggestion.find_smaller(request.without_window(), _plan_or_none)


def attempt(
    config: Config,
    model_spec: ModelSpec,
    hardware: Hardware,
    backends: Mapping[str, BackendInfo] | None = None,
    best: Defaults = BEST,
) -> Plan | None:
    """Return the plan, or None; does not search for what would work.

    Args:
        config: What is requested.
        model_spec: The model.
        hardware: The machine.
        backends: By name; None for all that this version knows, whether they run yet or not.
        best: What an exact window and transforms that are left to Nibble may become.
    """
    table = dict(sorted((all_backends() if backends is None else backends).items()))
    request = PlanRequest(config, model_spec, hardware, table, backends is None, defaults=best)
    return _plan_or_none(request)


def _plan_or_none(request: PlanRequest) -> Plan | None:
    try:
        return _resolve(request)
    except ConfigError:
        return None


def require_runnable(plan: Plan, backends: Mapping[str, BackendInfo] | None = None) -> None:
    """Raise ConfigError where a backend of the plan has no adapter, or its package is missing."""
    table = all_backends() if backends is None else backends
    for name in dict.fromkeys(route.backend for route in plan.routes):
        info = table[name]
        if missing := info.missing or (missing_requirement(info) if info.runnable else None):
            raise ConfigError(f"backend {name} needs {missing}")
        if not info.runnable:
            runnable = ", ".join(other for other, entry in table.items() if entry.runnable) or "none"
            raise ConfigError(
                f"this version knows backend {name} but has no adapter for it; it can run: {runnable}"
            )


def _resolve(request: PlanRequest) -> Plan:
    """Return the plan; where the exact window is left to Nibble and cannot be had, that without one."""
    if request.spec.packing is not None:
        packings.get(request.spec.packing)  # raises where there is none of that name
    if not request.chooses_window:
        return _resolve_as_it_is(request)
    try:
        plan = _resolve_as_it_is(request)
    except ConfigError as error:
        # Without one it is refused again where the window is not to blame.
        return _resolve_as_it_is(request.without_window(_why_not(error)))
    if request.hardware.is_cpu or not any(map(_makeshift, plan.routes)):
        return plan
    without = _resolve_as_it_is(request.without_window())
    slow = tuple(_made_slow(plan, without))
    why = f"it would send {', '.join(slow)}, which is slow"
    return _resolve_as_it_is(request.without_window(why)) if slow else plan


def _why_not(error: ConfigError) -> str:
    """Return why there is no plan with a window."""
    if isinstance(error, UnservedError):
        return f"no backend serves {error.refusal().need}"
    return str(error)


def _makeshift(route: Route) -> int:
    """Return how far a route is from a kernel that reads pages as they are: 1 where they are dequantised though that
    is no faster, 2 where they are gathered in plain torch."""
    return 2 if route.row.gathers else int(route.stage_to is not None and not route.for_speed)


def _made_slow(plan: Plan, without: Plan) -> Iterator[str]:
    """Yield the phases that a window sends to a lesser route than they have without one."""
    for group, other in zip(plan.groups, without.groups, strict=True):
        usual = {route.phase: _makeshift(route) for route in other.routes}
        for route in (*group.routes, *group.near_routes):
            if _makeshift(route) > usual.get(route.phase, 2):
                yield f"{route.phase} of {group.group.name} to {route}"


def _resolve_as_it_is(request: PlanRequest) -> Plan:
    """Return the plan with the window that the request has."""
    parts, window = request.parts, request.window
    if reason := state_support.refusal(request.model_spec, request.hardware, request.backends):
        raise ConfigError(reason)
    _check_sparse(request, parts)
    choices = _choices(request, parts)
    # All groups and phases read the same pages.
    page, packing = _storage(request, choices)
    groups = tuple(_group(request, part, choices, page, packing, window) for part in parts)
    shared = support.shared_kv_notes(request.spec, request.model_spec)
    watched = support.watch_notes(request.spec, request.model_spec)
    notes = (*shared, *watched, *request.defaults.notes, *explain.plan_notes(request, groups, page, packing))
    # Layers that share KV store nothing, so the layout has owners only.
    layout = support.layout(parts, request.model_spec, page, packing)
    tier, sinks = _tier(request.spec.offload, parts, layout), _sinks(request, groups, page)
    meaning = defaults.meaning(request.config, request.spec, parts, window, sinks, request.dtype)
    less = request.defaults.notes
    return Plan(
        layout, groups, request.model_spec.owner, request.dtype, notes, tier, window, sinks, meaning, less,
        request.model_spec.states, request.config.state_format,
    )  # fmt: skip


def _choices(request: PlanRequest, parts: Iterable[SchemeGroup]) -> Options:
    """Return all routes of all parts and phases; raise UnservedError where no row serves one, whatever the storage."""
    choices: dict[GroupPhase, tuple[Route, ...]] = {}
    for part in parts:
        for phase in Phase:
            choices[part, phase] = options.serving(request, part, phase)
            if not choices[part, phase] and _must_serve(request, phase):
                raise UnservedError(partial(refusal.unserved, request, part, phase))
    return choices


def _must_serve(request: PlanRequest, phase: Phase) -> bool:
    return phase in ROUTED or request.requires_verify


def _pick(routes: Iterable[Route], page: int, packing: str) -> Route | None:
    """Return the best route on one page size and packing."""
    return next((route for route in routes if route.fits(page, packing)), None)


def _storage(request: PlanRequest, choices: Options) -> tuple[int, str]:
    """Return the best page size and packing: one choice, since all groups and phases share storage."""
    best: tuple[float, int, str] | None = None
    for page, packing in itertools.product(_pages(request, choices), _packings(request, choices)):
        cost = _storage_cost(request, choices, page, packing)
        # Only a lower cost wins, so the order of pages and packings is an order of preference.
        if cost is not None and (best is None or cost < best[0]):
            best = (cost, page, packing)
    if best is None:
        raise UnservedError(partial(refusal.no_common_storage, request, choices))
    return best[1], best[2]


def _storage_cost(request: PlanRequest, choices: Options, page: int, packing: str) -> float | None:
    """Return the places of all routes together, by weight and number of layers; None where one is not served."""
    total = 0.0
    for (part, phase), routes in choices.items():
        if _must_serve(request, phase):
            route = _pick(routes, page, packing)
            if route is None:
                return None
            total += route.place * WEIGHTS.get(phase, 0) * len(part.layers)
    return total


def _pages(request: PlanRequest, choices: Options) -> Iterable[int]:
    """Return the page sizes to try, the preferred ones first."""
    usual = CPU_PAGES if request.hardware.is_cpu else GPU_PAGES
    pages = {page for routes in choices.values() for route in routes for page in route.row.page or ()}
    named = request.spec.page_size
    sizes = (*usual, *sorted(pages - set(usual))) if named is None else (named,)
    # A chunk of attention begins with a page.
    chunks = {group.chunk for group in request.model_spec.groups if group.chunk}
    whole = [page for page in sizes if not any(chunk % page for chunk in chunks)]
    if not whole:
        raise ConfigError(
            f"pages of {' or '.join(map(str, sizes))} tokens do not divide this model's chunks of attention "
            f"({' and '.join(map(str, sorted(chunks)))} tokens); choose a --page-size that does"
        )
    return whole


def _packings(request: PlanRequest, choices: Options) -> Iterable[str]:
    """Return the packings to try: those that the pool knows, then those that only rows name."""
    if request.spec.packing is not None:
        return (request.spec.packing,)
    names = {name for routes in choices.values() for route in routes for name in route.packings or ()}
    return (*packings.names(), *sorted(names - set(packings.names())))


def _group(
    request: PlanRequest, part: SchemeGroup, choices: Options, page: int, packing: str, window: int
) -> GroupPlan:
    has_kernel = _near_kernel(request, part, window)
    near = _near_choices(request, part, page, window) if window and not has_kernel else {}
    routes, near_routes = list[Route](), [near[phase][0] for phase in ROUTED if phase in near]
    for phase in ROUTED:
        route = _pick(choices[part, phase], page, packing)
        assert route is not None, "the storage serves every part in every phase"
        routes.append(route)
    # A hot buffer is for one new token, so only requests without one have drafts; steps are not recorded then.
    if request.spec.offload is None or (request.requires_verify and request.hardware.is_cpu):
        used = {route.backend for route in (*routes, *near_routes)}
        verify = _pick(_drafting(request, choices[part, Phase.VERIFY], used), page, packing)
        near_verify = next(_drafting(request, near.get(Phase.VERIFY, ()), used), None)
        # Draft tokens are served with both parts of a window, or not at all.
        if verify and (near_verify or not near):
            routes.append(verify)
            near_routes += [near_verify] if near_verify else []
    name = part.scheme.name
    return GroupPlan(part.group, part.layers, name, tuple(routes), tuple(near_routes), has_kernel)


def _drafting(request: PlanRequest, routes: Iterable[Route], used: Collection[str]) -> Iterator[Route]:
    """Yield the routes that may serve VERIFY: unless it is required, no backend takes memory for it alone."""
    for route in routes:
        if request.requires_verify or not route.row.workspace_bytes or route.backend in used:
            yield route


def _near_kernel(request: PlanRequest, part: SchemeGroup, window: int) -> bool:
    """Return whether near tokens have a kernel of their own (kernels/near/__init__.py)."""
    triton = request.backends.get("triton")
    is_present = triton is not None and not triton.missing
    return bool(window) and part.group.kind == "mha" and not request.hardware.is_cpu and is_present


def _near_choices(
    request: PlanRequest, part: SchemeGroup, page: int, window: int
) -> dict[Phase, tuple[Route, ...]]:
    """Return by phase who could serve the exact window over pages in the compute dtype, best first.

    None where there is a kernel for near tokens, which needs no backend.
    """
    plain = formats.plain(request.dtype).name
    plain_cache = request.config.with_plain_cache(plain)
    config = replace(plain_cache, page_size=page, packing=STAGED_PACKING, hisparse="")
    near = replace(request, config=config)
    # A backend that is named serves the near part too if it can.
    others = replace(config, attention_backend="auto", prefill_backend=None, decode_backend=None)
    for_all = replace(request, config=others)
    sliding = None if part.group.kind == "dsa" else min(window, part.group.window or window)
    group = replace(part.group, window=sliding)
    subject = SchemeGroup(group, part.layers, schemes.parse(plain), lse=True)
    choices: dict[Phase, tuple[Route, ...]] = {}
    for phase in Phase:
        routes = (*options.serving(near, subject, phase), *options.serving(for_all, subject, phase))
        choices[phase] = tuple(route for route in routes if route.fits(page, STAGED_PACKING))
        if not choices[phase] and _must_serve(request, phase):
            raise ConfigError(
                f"--kv-window {window}: no backend attends over pages in {request.dtype} for the exact window of group "
                f"{part.group.name} in {phase} on {request.hardware}; --kv-window 0 serves without"
            )
    return choices


def _sinks(request: PlanRequest, groups: Iterable[GroupPlan], page: int) -> int:
    """Return the first tokens that are read exactly, in whole pages; raise ConfigError where they cannot be had."""
    tokens = request.spec.sinks
    # Where no layer is quantised, all tokens are read exactly.
    if not tokens or request.is_plain:
        return 0
    if not request.window:
        raise ConfigError(f"--kv-sinks {tokens} needs an exact window; leave --kv-window out, or above 0")
    if any(group.group.kind == "dsa" for group in groups):
        raise ConfigError(
            f"--kv-sinks {tokens}: this model's layers choose the tokens that they read (sparse attention), for which "
            "there are no exact first tokens; leave --kv-sinks out"
        )
    if not any(group.sees_all for group in groups):
        raise ConfigError(
            f"--kv-sinks {tokens}: all layers of this model have a sliding window or chunks, so that first tokens are "
            "not seen for long; leave --kv-sinks out"
        )
    return cdiv(min(tokens, request.longest), page) * page


def _check_sparse(request: PlanRequest, parts: tuple[SchemeGroup, ...]) -> None:
    """Raise ConfigError where a host tier is requested of a model that looks at all tokens in some layers."""
    dense = [part for part in parts if part.group.kind != "dsa"]
    if request.spec.offload and dense:
        layers = format_layers(layer for part in dense for layer in part.layers)
        raise ConfigError(
            f"--hisparse serves models with sparse attention (DSA) in all layers: layers {layers} of "
            f"{request.model_spec.model} look at all tokens ({dense[0].group.kind}), which must then be on the device; "
            "leave --hisparse out"
        )


def _tier(offload: OffloadSpec | None, parts: tuple[SchemeGroup, ...], layout: CacheLayout) -> Tier | None:
    """Return the host tier that is requested, None if none is; raise ConfigError where it cannot work."""
    if offload is None:
        return None
    top_k = max(part.group.top_k for part in parts)
    buffer = offload.buffer or HOT_BUFFER_FACTOR * top_k
    if buffer < top_k:
        raise ConfigError(
            f"a hot buffer of {buffer} tokens is too small: each query looks at {top_k}, and all must be on the device "
            f"at once; --hisparse buffer={HOT_BUFFER_FACTOR * top_k} leaves room to keep some"
        )
    if offload.host_format is not None:
        _check_format(offload.host_format, parts)
    size = layout.page_size
    # Hot buffers are whole pages, since they lie in frames.
    return Tier(cdiv(buffer, size) * size, layout.without_index.stored_as(offload.host_format, HOST_PACKING))


def _check_format(name: str, parts: tuple[SchemeGroup, ...]) -> None:
    """Raise ConfigError where the host cannot store latents in the format `name`."""
    streams = [stream for part in parts for stream in part.group.streams if stream.name != INDEX]
    fitting = [name for name in schemes.fitting(*streams) if name not in schemes.MIXED]
    if name not in fitting:
        raise ConfigError(
            f"hisparse host_format={name}: the host can store {streams[0].name} {streams[0].heads}x"
            f"{streams[0].dim} in {', '.join(fitting)}"
        )

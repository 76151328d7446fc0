"""Why a combination is refused, and the edits of a config that may work instead.

suggestion.py searches the edits: one works if resolving it does, and the plan fits in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import fields, replace
from functools import partial
from typing import Any

from nibble.attention.planner.explain import staging_cost
from nibble.attention.planner.options import ROUTED, Options, PlanRequest, route_cost
from nibble.attention.planner.plan import Plan, Route
from nibble.attention.planner.step_memory import StepMemory
from nibble.attention.planner.support import BackendInfo, Need, SchemeGroup
from nibble.config import Config, default_of
from nibble.errors import ConfigError, Refusal, Suggestion
from nibble.formats import scheme as schemes
from nibble.hardware import Hardware, lookup_gpu
from nibble.model_spec import HEADS, LATENTS, Phase
from nibble.spec import CacheSpec

Edit = Callable[[Config], Config]
FEW_REQUESTS, FEW_TOKENS = 16, 1024
"""Requests and tokens of a step that are proposed where more do not fit."""
MIN_CONTEXT = 1024
"""The shortest context that is proposed where a longer one does not fit."""
PAGES = (1, 16, 32, 64, 128, 256)
"""Page sizes that are tried."""


class UnservedError(ConfigError):
    """There is no plan."""

    def __init__(self, refusal: Callable[[], Refusal]) -> None:
        """Note what returns the refusal: a search tries many configs, and needs the reasons of none."""
        super().__init__("there is no plan")
        self.refusal = refusal


def unserved(request: PlanRequest, part: SchemeGroup, phase: Phase) -> Refusal:
    """Return the nearest row's reasons of each backend that may serve `part` in `phase`, whatever the storage.

    Args:
        request: What is planned.
        part: The layer group that no row serves.
        phase: The phase in which none does.
    """
    need = request.need(part, phase)
    considered = request.considered(phase)
    reasons = {name: tuple(_reasons(request, info, need, part)) for name, info in considered.items()}
    if request.spec.backend_for(phase.decodes) is None:
        # `auto` considered only what can run here; the user may install more.
        for name, info in request.backends.items():
            if name not in considered and info.serves(need):
                why = f"needs {info.missing}" if info.missing else "this version has no adapter for it"
                reasons[name] = (f"would serve it, but {why}",)
    return Refusal(str(need), reasons)


def _reasons(request: PlanRequest, info: BackendInfo, need: Need, part: SchemeGroup) -> Iterator[str]:
    """Yield why a backend does not serve a need: from the cache's own bytes, then over dequantised pages."""
    native, staged = info.nearest(need), request.staged(need)
    yield from native
    if staged is None:
        return
    staged_only = tuple(reason for reason in info.nearest(staged) if reason not in native)
    if request.may_stage(need.phase):
        yield from (f"staged to {staged.format}: {reason}" for reason in staged_only)
    # Only DECODE comes here: it is priced, since every token would pay.
    elif request.could_stage and info.serves(staged):
        cost = staging_cost(part.group, part.stored_layer(0), staged.format, request.model_spec.max_context)
        moved = f"moving {cost.factor:.1f} x the bytes in each step"
        yield f"it could read pages staged to {staged.format}, with --allow-staging, {moved}"


def no_common_storage(request: PlanRequest, options: Options) -> Refusal:
    """Return what each backend reads, where each phase is served, but not all on one page size and packing."""
    limits = [_limits(routes) for (_, phase), routes in options.items() if phase in ROUTED]
    titles = {"page": "page size", "packing": "packing"}
    divided = [title for name, title in titles.items() if not _common([allowed[name] for allowed in limits])]
    page = f"page {request.spec.page_size}" if request.spec.page_size else "one page size"
    storage = f"all phases over {page} and one packing on {request.hardware}"
    why = f"{' and no '.join(divided)} in common" if divided else "page size and packing that go together"
    return Refusal(f"{storage}: no {why}", dict(_storages(options)))


def _limits(routes: Iterable[Route]) -> dict[str, Set[Any] | None]:
    """Return the page sizes and the packings that any of the routes reads; None for all."""
    sets_by_name: dict[str, list[Any]] = {
        "page": [route.row.page for route in routes],
        "packing": [route.packings for route in routes],
    }
    return {name: None if None in sets else frozenset().union(*sets) for name, sets in sets_by_name.items()}


def _common(allowed: Iterable[Set[Any] | None]) -> bool:
    """Whether one value is in all of the sets."""
    bound = [frozenset(values) for values in allowed if values is not None]
    return not bound or bool(frozenset.intersection(*bound))


def _storages(options: Options) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield `backend (its phases)`, and the page sizes and packings that it reads there."""
    phases: dict[tuple[str, tuple[str, ...]], dict[str, None]] = {}
    for (_, phase), routes in options.items():
        for name in dict.fromkeys(route.backend for route in routes if phase in ROUTED):
            limits = tuple(
                f"{field} must be in {{{', '.join(map(str, sorted(allowed)))}}}"
                for field, allowed in _limits([route for route in routes if route.backend == name]).items()
                if allowed is not None
            )
            phases.setdefault((name, limits or ("any page and packing",)), {})[str(phase)] = None
    yield from ((f"{name} ({', '.join(names)})", limits) for (name, limits), names in phases.items())


# What works instead


def single_edits(request: PlanRequest, *, keep_scheme: bool) -> Iterator[Iterator[Config]]:
    """Yield kinds of edited configs, the mildest first: those with the same schemes, or those with others."""
    kinds = _edits(request) if keep_scheme else _scheme_edits(request.spec)
    yield from ((edit(request.config) for edit in kind) for kind in kinds)


def double_edits(request: PlanRequest, *, keep_scheme: bool) -> Iterator[Iterator[Config]]:
    """Yield kinds of configs with two edits, the mildest first; one of them may be of a scheme, unless it is kept."""
    # Lists, because each kind is part of several pairs.
    kinds = [list(kind) for kind in (*_edits(request), *(() if keep_scheme else _scheme_edits(request.spec)))]
    for pair in itertools.combinations(kinds, 2):
        yield (second(first(request.config)) for first, second in itertools.product(*pair))


def uses_reference(request: PlanRequest, plan: Plan) -> bool:
    """Whether plain torch gathers pages on a GPU without being requested."""
    requested = {request.spec.prefill_backend, request.spec.decode_backend}
    gathering = {route.backend for route in plan.routes if route.row.gathers}
    # On a CPU the reference is the usual backend.
    return not request.hardware.is_cpu and bool(gathering - requested)


def is_acceptable(request: PlanRequest, plan: Plan) -> bool:
    """Whether a plan can run, or the user explores what cannot."""
    requested = filter(None, (request.spec.prefill_backend, request.spec.decode_backend))
    infos = (request.backends.get(name) for name in requested)
    explores = request.declared or any(info is not None and not info.runnable for info in infos)
    return explores or plan.runnable


def cost(request: PlanRequest, plan: Plan) -> tuple[bool, float]:
    """Return what orders plans of one kind of edits: those that can run first, then those with preferred routes."""
    return not (request.declared or plan.runnable), route_cost(plan)


def suggestion(
    config: Config, hardware: Hardware, *, declared: bool = False, shortfall: str = ""
) -> Suggestion:
    """Return a configuration as a suggestion: all that differs from the defaults, and the scheme always.

    Args:
        config: What is proposed.
        hardware: The machine, which a plan's command names where it has a name.
        declared: Whether backends may be chosen that cannot run yet.
        shortfall: What it lacks, where it does not fit.
    """
    options = {"kv_format": config.kv_format} | {
        option.name: getattr(config, option.name)
        for option in fields(config)
        if option.name not in {"model", "kv_format"} and getattr(config, option.name) != default_of(option)
    }
    return Suggestion(
        config.model, options, hardware.name if _is_named(hardware) else None, declared, shortfall
    )


def _is_named(hardware: Hardware) -> bool:
    """Whether `--gpu` knows this machine by its name; without it a command means the machine it runs on."""
    try:
        return lookup_gpu(hardware.name).arch == hardware.arch
    except ConfigError:
        return False


def _edits(request: PlanRequest) -> Iterator[Iterator[Edit]]:
    """Yield kinds of edits that keep the scheme, the mildest first."""
    spec, names = request.spec, tuple(request.backends)
    # Another backend for one phase is the mildest: storage and the other phase may stay as they are.
    yield (partial(replace, decode_backend=name) for name in names if name != spec.decode_backend)
    yield (partial(replace, prefill_backend=name) for name in names if name != spec.prefill_backend)
    # The nearest sizes come first; an open page size was tried with all of them already.
    if (size := spec.page_size) is not None:
        sizes = (page for page in PAGES if page != size)
        yield (
            partial(replace, page_size=page)
            for page in sorted(sizes, key=lambda page: max(page / size, size / page))
        )
    if spec.packing is not None:
        yield iter([partial(replace, packing=None)])
    if not spec.allow_staging:
        yield iter([partial(replace, allow_staging=True)])
    if spec.deterministic:
        yield iter([partial(replace, deterministic=False)])
    # The option behind both phases: one edit in place of two.
    if request.config.attention_backend != "auto":
        yield (
            partial(replace, attention_backend=name, prefill_backend=None, decode_backend=None)
            for name in names
        )
    if spec.decode_backend or spec.prefill_backend:
        yield iter([partial(replace, attention_backend="auto", prefill_backend=None, decode_backend=None)])


def memory_edits(request: PlanRequest, config: Config) -> Iterator[Config]:
    """Yield edits of `config` that need less memory, the mildest first: smaller steps, then shorter contexts.

    Args:
        request: What is planned.
        config: What needs too much memory.
    """
    step = StepMemory(request.spec, request.model_spec, request.hardware, request.dtype)
    halves = [step.context >> shift for shift in range(1, step.context.bit_length())]
    for smaller in _smaller_steps(request, config):
        yield smaller
        yield from (replace(smaller, max_context=tokens) for tokens in halves if tokens >= MIN_CONTEXT)


def _smaller_steps(request: PlanRequest, config: Config) -> Iterator[Config]:
    """Yield `config` with fewer requests and tokens at a time; on a CPU with weights in 16 bits too."""
    # A pool of a requested size may be larger than what is left, or smaller than one request.
    config = replace(config, kv_memory=None)
    in_half = request.hardware.is_cpu and request.dtype == "float32"
    for dtype in (config.dtype, "bfloat16") if in_half else (config.dtype,):
        fewer = replace(config, dtype=dtype, max_running=min(config.max_running, FEW_REQUESTS))
        yield replace(config, dtype=dtype)
        yield fewer
        yield replace(fewer, token_budget=min(config.token_budget or FEW_TOKENS, FEW_TOKENS))


def _scheme_edits(spec: CacheSpec) -> Iterator[Iterator[Edit]]:
    """Yield edits that replace each scheme in use by another, those nearest in bytes first, one kind each."""
    for old in spec.schemes:
        # A transform may be what is refused, and not the format.
        if old.transforms:
            yield iter([_rename(old, old.name.partition("+")[0])])
        other_names = (name for name in schemes.names() if name != old.base)
        for name in sorted(other_names, key=lambda name: _distance(old.base, name)):
            yield iter([_rename(old, "+".join((name, *old.transforms)))])


def _distance(old: str, new: str) -> float:
    """Return how far apart two schemes are in bytes; of two equally far ones that with more bytes is nearer."""
    before, after = _share(old), _share(new)
    return max(before, after) / min(before, after) + (0.001 if after < before else 0)


def _share(name: str) -> float:
    """Return the bytes of a scheme for each value of streams that it can store."""
    is_for_latents = name not in schemes.fitting(*HEADS) and not schemes.mixed(name)
    streams = LATENTS if is_for_latents else HEADS
    return schemes.bytes_per_token(name, streams) / sum(stream.values for stream in streams)


def _rename(old: schemes.Scheme, new: str) -> Edit:
    def edit(config: Config) -> Config:
        spec = CacheSpec.from_config(config)
        rules = tuple(rule.renamed(new) if rule.scheme == old else rule for rule in spec.layer_rules)
        # A scheme file is spelled out, as its schemes are no longer those that are meant.
        unchanged = spec.scheme.name if spec.scheme_file else config.kv_format
        kv_format = new if spec.scheme == old else unchanged
        used = (schemes.parse(kv_format), *(rule.scheme for rule in rules))
        encoder = config.kv_encoder if schemes.has_encoder(config.kv_encoder, used) else schemes.AUTO
        kv_layers = ";".join(rule.text for rule in rules)
        return replace(config, kv_format=kv_format, kv_layers=kv_layers, kv_encoder=encoder)

    return edit

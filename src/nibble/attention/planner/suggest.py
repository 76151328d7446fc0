"""What works instead: the nearest config that resolves, as a command line.

Owns the edits that are tried, their order, and how a config is written as a command. Must not judge rows
itself: an edit works if resolving it does.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace

from nibble.attention.planner.options import PlanRequest, cost
from nibble.attention.planner.plan import Plan
from nibble.config import Config, default_of
from nibble.errors import ConfigError
from nibble.formats import scheme as schemes
from nibble.hardware import Hardware, lookup_gpu
from nibble.model_spec import HEADS, LATENTS

Attempt = Callable[[Config], Plan | None]
Edit = Callable[[Config], Config]
Edits = tuple[Edit, ...]
Kinds = Iterable[Iterable[Edit]]
Found = tuple[Config, Plan]
PAGES = (1, 16, 32, 64, 128, 256)


def suggest_command(request: PlanRequest, attempt: Attempt) -> str | None:
    """The nearest command that works: one edit if any does, else two; None where two do not help.

    A plan that falls to plain torch on a GPU, unasked, is proposed where nothing else keeps the scheme.
    """
    kinds = tuple(tuple(kind) for kind in _edits(request))
    others = tuple(tuple(kind) for kind in _scheme_edits(request.config))
    found = _first(request, attempt, _singles(kinds))
    if found and _uses_reference(request, found[1]):
        faster = _first(request, attempt, _pairs(kinds))
        found = faster if faster and not _uses_reference(request, faster[1]) else found
    found = found or _first(request, attempt, itertools.chain(_singles(others), _pairs((*kinds, *others))))
    return command(found[0], request.hardware, declared=request.declared) if found else None


def _singles(kinds: Kinds) -> Iterator[Iterable[Edits]]:
    return ([(edit,) for edit in kind] for kind in kinds)


def _pairs(kinds: Kinds) -> Iterator[Iterable[Edits]]:
    return (itertools.product(first, second) for first, second in itertools.combinations(kinds, 2))


def _first(request: PlanRequest, attempt: Attempt, kinds: Iterable[Iterable[Edits]]) -> Found | None:
    """The best of the first kind that has any, or of the first that has any which does not crawl."""
    slow: Found | None = None
    for kind in kinds:
        edited = (_apply(request.config, edits) for edits in kind)
        able = [
            (config, plan) for config in edited if (plan := attempt(config)) and _acceptable(request, plan)
        ]
        if able:
            best = min(able, key=lambda pair: _cost(request, pair[1]))
            if not _uses_reference(request, best[1]):
                return best
            slow = slow or best
    return slow


def _uses_reference(request: PlanRequest, plan: Plan) -> bool:
    """Whether plain torch gathers pages on a GPU, and nobody asked for it."""
    asked = {request.config.backend_for(decode) for decode in (False, True)}
    routes = (route for group in plan.groups for route in group.routes)
    return not request.hardware.is_cpu and any(r.row.gathers and r.backend not in asked for r in routes)


def _acceptable(request: PlanRequest, plan: Plan) -> bool:
    """Whether a plan can run, or the user is exploring what cannot."""
    config, table = request.config, request.backends
    named_backends = (table.get(config.backend_for(decode)) for decode in (False, True))
    explores = request.declared or any(info is not None and not info.runnable for info in named_backends)
    return explores or _runs(plan)


def _runs(plan: Plan) -> bool:
    return all(route.runnable for group in plan.groups for route in group.routes)


def command(config: Config, hardware: Hardware, *, declared: bool = False) -> str:
    """`nibble plan` with all that differs from the defaults, and the scheme always."""
    words = ["nibble", "plan", config.model, "--kv-format", config.kv_format]
    for option in fields(config):
        value = getattr(config, option.name)
        if option.name not in {"model", "kv_format"} and value != default_of(option):
            words += _words(option.name.replace("_", "-"), value)
    words += ["--gpu", hardware.name] if _is_named(hardware) else []
    return shlex.join([*words, "--declared"] if declared else words)


def _words(name: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}={value}"] if str(value).startswith("-") else [f"--{name}", str(value)]


def _is_named(hardware: Hardware) -> bool:
    """Whether `--gpu` knows this machine by its name; without it a command means the machine it runs on."""
    try:
        return lookup_gpu(hardware.name).arch == hardware.arch
    except ConfigError:
        return False


def _apply(config: Config, edits: Iterable[Edit]) -> Config:
    for edit in edits:
        config = edit(config)
    return config


def _cost(request: PlanRequest, plan: Plan) -> tuple[bool, float]:
    """Return what orders edits of one kind: one that can run comes first, then the one with the better routes."""
    return not (request.declared or _runs(plan)), cost(plan)


def _edits(request: PlanRequest) -> Iterator[Iterator[Edit]]:
    """Kinds of edits that keep the scheme, the mildest first."""
    config = request.config
    names = tuple(request.backends)
    yield (_set(decode_backend=name) for name in names if name != config.backend_for(True))
    yield (_set(prefill_backend=name) for name in names if name != config.backend_for(False))
    if (asked := config.page_size) is not None:
        others = (page for page in PAGES if page != asked)
        yield (
            _set(page_size=page) for page in sorted(others, key=lambda page: max(page / asked, asked / page))
        )
    if not config.allow_staging:
        yield iter([_set(allow_staging=True)])
    if config.attention_backend != "auto":
        yield (_set(attention_backend=name, prefill_backend=None, decode_backend=None) for name in names)
    if {config.backend_for(True), config.backend_for(False)} != {"auto"}:
        yield iter([_set(attention_backend="auto", prefill_backend=None, decode_backend=None)])


def _set(**values: object) -> Edit:
    def edit(config: Config) -> Config:
        return replace(config, **values)  # type: ignore[arg-type]

    return edit


def _scheme_edits(config: Config) -> Iterator[Iterator[Edit]]:
    """Another scheme in the place of each that is in use, those nearest in bytes first, one kind each."""
    used = dict.fromkeys(
        (schemes.parse(config.kv_format), *(new for _, new in schemes.rules(config.kv_layers)))
    )
    for old in used:
        if old.transforms:
            yield iter([_rename(old, old.base)])
        others = sorted(
            (name for name in schemes.names() if name != old.base), key=lambda name: _distance(old.base, name)
        )
        for name in others:
            yield iter([_rename(old, "+".join((name, *old.transforms)))])


def _distance(old: str, new: str) -> float:
    """How far apart two schemes are in bytes; of two equally far ones that with more bytes is nearer."""
    before, after = _share(old), _share(new)
    return max(before, after) / min(before, after) + (0.001 if after < before else 0)


def _share(name: str) -> float:
    """Bytes over those of unquantised values, of streams that the scheme can store."""
    streams = HEADS if name in schemes.fitting(*HEADS) else LATENTS
    return schemes.bytes_per_token(name, streams) / sum(stream.values for stream in streams)


def _rename(old: schemes.Scheme, new: str) -> Edit:
    def rule(text: str) -> str:
        where, equals, name = text.partition("=")
        return f"{where}={new}" if equals and schemes.parse(name) == old else text

    def edit(config: Config) -> Config:
        kv_format = new if schemes.parse(config.kv_format) == old else config.kv_format
        return replace(
            config, kv_format=kv_format, kv_layers=";".join(map(rule, config.kv_layers.split(";")))
        )

    return edit

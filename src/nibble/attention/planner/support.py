"""What backends support and what a model needs of attention, both as data, so that one is held against the other.

A Support is a conjunction of allowed values: no predicates, no escape hatch. Where a fact does not fit, it becomes two
rows. How fast a backend is stands elsewhere (attention/rankings/).

A SchemeGroup is a model's layer group, split by scheme, which has a Need in each phase; with routes it is a GroupPlan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import chain, groupby, pairwise
from typing import Any

from nibble.cache.layout import CacheLayout, LayerLayout, StreamLayout
from nibble.errors import ConfigError
from nibble.formats import scheme as schemes
from nibble.formats import transforms as transform
from nibble.formats.scheme import Scheme
from nibble.hardware import Hardware
from nibble.model_spec import NO_LAYER, LayerGroup, ModelSpec, Phase
from nibble.spec import CacheSpec


@dataclass(frozen=True, slots=True)
class Need:
    """What one layer group asks for in one phase."""

    phase: Phase
    kind: str
    format: str
    """The name of the streams' format, or `k_format:v_format` where they differ."""
    packing: str | None
    """None, as `page`, while it is still to be chosen; any row will do then."""
    arch: int
    """Compute capability, 0 for a CPU."""
    page: int | None
    dim: int
    """Width of a head."""
    group: int
    """Query heads to a KV head; of latents, all query heads."""
    dtype: str
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    addressing: str = "paged"
    """How a sparse kernel's indices name tokens; `paged` for everything dense."""
    kv_heads: int | None = None
    """KV heads of a layer, which matter to speed alone."""
    lse: bool = False
    """Whether the log-sum-exp is needed, to merge attention over several sources."""
    batch_invariance: bool = False
    """Whether a query's result must be the same bits in every batch and phase (--deterministic)."""

    def __str__(self) -> str:
        where = f"{self.format}@{self.packing}" if self.packing else self.format
        parts = [f"{self.phase} of {self.kind} in {where}"]
        parts += [f"page {self.page}"] if self.page else []
        parts += [f"head_dim {self.dim}", f"group {self.group}", self.dtype]
        parts += [name for name in ("window", "softcap", "sinks", "batch_invariance") if getattr(self, name)]
        parts += ["log-sum-exp"] if self.lse else []
        return f"{', '.join(parts)} on {_show('arch', self.arch)}"


NEVER = frozenset({False})
ALL = frozenset(Phase)
PROMPT = frozenset({Phase.PREFILL, Phase.EXTEND})
TOKEN = frozenset({Phase.DECODE, Phase.VERIFY})
MAX_STAGED_TOKENS = 1 << 17
"""Tokens whose pages are dequantised at once, unless a single request has more."""
HOPPER, BLACKWELL, CONSUMER_BLACKWELL = frozenset({90}), frozenset({100, 103}), frozenset({120, 121})
BEFORE_HOPPER = frozenset({80, 86, 89})
GPUS = BEFORE_HOPPER | HOPPER | BLACKWELL | CONSUMER_BLACKWELL
HALF_DTYPES = frozenset({"bfloat16", "float16"})


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was measured of a row, and where: it says nothing of other GPUs and phases."""

    text: str
    gpu: str = "one H200"
    arch: int = 90
    phases: Set[Phase] = TOKEN

    def __str__(self) -> str:
        return f"{self.gpu}, {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """One combination that a backend supports. Fields of a Need have the values that are allowed, None for any."""

    phase: Set[Phase]
    kind: Set[str]
    format: Set[str] | None
    packing: Set[str] | None = None
    arch: Set[int] | None = None
    page: Set[int] | None = None
    dim: Set[int] | None = None
    group: Set[int] | None = None
    dtype: Set[str] | None = None
    window: Set[bool] | None = None
    softcap: Set[bool] | None = None
    sinks: Set[bool] | None = None
    addressing: Set[str] = frozenset({"paged"})
    lse: bool = False
    """Whether the adapter returns the log-sum-exp too (attention/step.py, forward_partial). A need without is served
    either way."""
    batch_invariance: Set[bool] = NEVER
    """Whether a query's result is the same bits in every batch and phase, over pages as they are."""
    gathers: bool = False
    """Plain torch gathers the pages first, many times slower on a GPU than a kernel that reads them."""
    workspace: int = 0
    """Tokens of one layer that the kernel dequantises at a time, into the compute dtype."""
    fixed_split: int = 0
    """Tokens of a split whose float32 result is kept until all are merged, for as many query tokens as are decoded."""
    workspace_bytes: int = 0
    """Bytes that the backend keeps on the device from its first call on, whatever the model."""
    source: str = ""
    """The test or the document that stands behind the row."""
    measured: Measurement | None = None
    """How fast it was, somewhere."""

    def __post_init__(self) -> None:
        for name in _FIELDS:
            allowed = getattr(self, name)
            if allowed is not None and not isinstance(allowed, bool):
                # Rows are written with plain sets, and a frozen dataclass is to be hashable.
                object.__setattr__(self, name, frozenset(allowed))

    def evidence(self, need: Need) -> str:
        """Return what stands behind the row for `need`: its source, and a measurement on such a GPU in this phase."""
        here = self.measured and need.arch == self.measured.arch and need.phase in self.measured.phases
        return "; ".join(filter(None, (self.source, str(self.measured) if here else "")))

    def refuses(self, need: Need) -> tuple[str, ...]:
        """Return the reasons why this row does not serve `need`; empty where it does."""
        return tuple(_reason(name, getattr(need, name), getattr(self, name)) for name in self.misses(need))

    def misses(self, need: Need) -> tuple[str, ...]:
        """Return the fields of `need` that this row does not allow."""
        return tuple(name for name in _FIELDS if not _allows(self, name, need))

    def serves(self, need: Need) -> bool:
        """Whether there is no reason to refuse `need`."""
        return all(_allows(self, name, need) for name in _FIELDS)


_FIELDS = tuple(entry.name for entry in fields(Need) if entry.name in Support.__dataclass_fields__)


def _allows(row: Support, name: str, need: Need) -> bool:
    allowed, value = getattr(row, name), getattr(need, name)
    if isinstance(allowed, bool):  # what a row can do, where others are what it is limited to
        return allowed or not value
    return allowed is None or value is None or value in allowed


def _reason(name: str, value: Any, allowed: Set[Any]) -> str:
    if name == "lse":
        return "does not return the log-sum-exp that an exact window needs"
    if isinstance(value, bool):
        return f"no {name}" if value else f"only with {name}"
    return f"{name} {_show(name, value)} is not in {{{format_values(name, allowed)}}}"


def format_values(name: str, allowed: Set[Any] | None) -> str:
    """Return the values that a row allows in field `name`, for people: `16 to 256 by 16`, `SM90, SM100`, `any`."""
    if allowed is None:
        return "any"
    values = sorted(allowed, key=list(Phase).index if name == "phase" else None)
    steps = {high - low for low, high in pairwise(values)} if name == "dim" else set()
    if len(values) > 4 and len(steps) == 1:
        return f"{values[0]} to {values[-1]} by {steps.pop()}"
    if name == "group":
        runs = ([f"{run[0]} to {run[-1]}"] if len(run) > 3 else map(str, run) for run in _runs(values))
        return ", ".join(chain.from_iterable(runs))
    return ", ".join(_show(name, value) for value in values)


def _runs(values: Iterable[int]) -> list[list[int]]:
    """Return ascending numbers, cut into those that follow one another."""
    # Numbers of one run grow as fast as their indices.
    runs = groupby(enumerate(values), lambda entry: entry[1] - entry[0])
    return [[value for _, value in run] for _, run in runs]


def _show(name: str, value: Any) -> str:
    if name == "arch":
        return f"SM{value}" if value else "CPU"
    return str(value)


class Origin(StrEnum):
    """Whose kernels a backend calls. It orders those that no ranking names (options.py)."""

    OWN = "own"  # Nibble's, or an extension's, for the GPU at hand
    VENDOR = "vendor"  # of another package, or of torch
    PORTABLE = "portable"  # for any GPU, compiled from one source
    REFERENCE = "reference"  # the definition


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendInfo:
    """A backend's file, as data."""

    name: str
    support: tuple[Support, ...]
    summary: str
    origin: Origin = Origin.OWN
    adapter: str | Callable[[], Any] | None = None
    """`module:Class` of the attention object (attention/step.py, AttentionBackend), or what makes it; only then is the
    package imported. None while only its facts are declared."""
    packages: tuple[str, ...] = ()
    """Packages of which one must be importable; none for what torch brings."""
    install: str | None = None
    """How a user gets one."""
    versions: str | None = None
    """Those that the adapter was written for, for people."""
    unavailable_reason: Callable[[], str | None] | None = None
    """Returns what keeps a package that is there from working, None if nothing."""
    missing: str | None = None
    """What this machine lacks for it, with the cure; such a backend has no adapter here."""
    graphs: bool = False
    """Whether a CUDA graph may hold its DECODE: it never waits for the device, and reads lengths from there only."""
    verify_graphs: bool = False
    """Whether one may hold its VERIFY too, where all requests have as many tokens."""
    compiled_requests: int | None = None
    """Most requests of a batch of prompts, as for more its kernels would be compiled anew; None: any number."""

    @property
    def runnable(self) -> bool:
        """Whether this version of Nibble can call it, given its package."""
        return self.adapter is not None

    def nearest(self, need: Need) -> tuple[str, ...]:
        """Return the reasons of the row that is closest to serving `need`; empty where one serves it."""
        return min((row.refuses(need) for row in self.support), key=len, default=("has no rows",))

    def serves(self, need: Need) -> bool:
        """Whether one of the rows serves `need`."""
        return any(row.serves(need) for row in self.support)


class UnstorableError(ConfigError):
    """A scheme refuses a stream of the model, or a transform its layer group."""


@dataclass(frozen=True, slots=True)
class SchemeGroup:
    """Layers of one group that share a scheme."""

    group: LayerGroup
    layers: tuple[int, ...]
    scheme: Scheme
    lse: bool = False
    """Whether its attention is merged with that over other keys, as with an exact window."""

    def stored_layer(self, layer: int) -> LayerLayout:
        """Return what a layer of this part stores."""
        scheme = self.scheme
        streams = (StreamLayout.of(stream, scheme.format_of(stream)) for stream in self.group.streams)
        return LayerLayout(layer, tuple(streams), scheme.transforms)

    def need(
        self,
        phase: Phase,
        hardware: Hardware,
        dtype: str,
        page: int | None,
        packing: str | None,
        *,
        batch_invariance: bool = False,
    ) -> Need:
        """Return what this part needs in `phase`.

        Args:
            phase: The phase.
            hardware: The machine.
            dtype: The compute dtype.
            page: Tokens of a page, None while that is open.
            packing: How planes lie in a page, None while that is open.
            batch_invariance: Whether results must not depend on the batch.
        """
        group = self.group
        return Need(
            phase, group.kind, self.stored_layer(0).format_key, packing, hardware.arch, page, group.head_dim,
            group.group_size, dtype, group.window is not None, group.softcap, group.sinks,
            kv_heads=group.streams[0].heads, lse=self.lse, batch_invariance=batch_invariance,
        )  # fmt: skip


def scheme_groups(
    spec: CacheSpec, model_spec: ModelSpec, window: int = 0, transforms: tuple[str, ...] = ()
) -> tuple[SchemeGroup, ...]:
    """Split the model's layer groups where layers differ in scheme; raise UnstorableError and ConfigError.

    A layer that reads another's pages has that layer's scheme.

    Args:
        spec: What is requested.
        model_spec: The model.
        window: Tokens of the exact window.
        transforms: Those that may be chosen for K in 4 bits, where that is left to the plan.
    """
    _check_shared(spec, model_spec)
    scheme_by_layer = _schemes_by_layer(spec, model_spec, transforms)
    groups = []
    for group in model_spec.groups:
        # Layers of one group may store differently (kv_layers), and then have routes of their own.
        by_scheme: dict[Scheme, list[int]] = {}
        for layer in group.layers:
            # Of a layer that shares KV the owner decides, whatever its own rule says.
            by_scheme.setdefault(scheme_by_layer[model_spec.owner[layer]], []).append(layer)
        groups += [
            SchemeGroup(group, tuple(layers), scheme, window > 0) for scheme, layers in by_scheme.items()
        ]
    for part in groups:
        _check(part)
    return tuple(groups)


def _schemes_by_layer(
    spec: CacheSpec, model_spec: ModelSpec, transforms: tuple[str, ...]
) -> tuple[Scheme, ...]:
    """Return the scheme of each layer; those that leave transforms to the plan with all that are allowed.

    Layers that read the same pages must all allow one.
    """
    by_layer = spec.scheme_by_layer(model_spec.layers)
    if not spec.chooses_transforms:
        return by_layer
    readers: dict[int, list[LayerGroup]] = {}
    for group in model_spec.groups:
        for layer in group.layers:
            readers.setdefault(model_spec.owner[layer], []).append(group)

    def allowed(owner: int) -> tuple[str, ...]:
        groups = dict.fromkeys(readers.get(owner, ()))
        return tuple(
            name for name in transforms if not any(transform.get(name).refuses(group) for group in groups)
        )

    return tuple(
        scheme.transformed_by(allowed(model_spec.owner[layer])) if scheme.has_4bit_keys else scheme
        for layer, scheme in enumerate(by_layer)
    )


def _check_shared(spec: CacheSpec, model_spec: ModelSpec) -> None:
    """Raise ConfigError where a rule is about a layer that stores nothing, and says otherwise than its owner's."""
    by_layer = spec.scheme_by_layer(model_spec.layers)
    named = {layer for rule in spec.layer_rules for layer in rule.indices(model_spec.layers)}
    if without := [layer for layer in sorted(named) if model_spec.owner[layer] == NO_LAYER]:
        raise ConfigError(
            f"--kv-layers has no effect on layers {format_layers(without)} of {model_spec.model}: they keep no keys "
            "and values; --state-format is for recurrent states"
        )
    idle = [layer for layer in sorted(named) if by_layer[layer] != by_layer[model_spec.owner[layer]]]
    if idle:
        owners = {model_spec.owner[layer] for layer in idle}
        raise ConfigError(
            f"--kv-layers has no effect on layers {format_layers(idle)} of {model_spec.model}: they store nothing, and "
            f"read the pages of layers {format_layers(owners)}; name those, whose scheme is then that of all"
        )


def shared_kv_notes(spec: CacheSpec, model_spec: ModelSpec) -> tuple[str, ...]:
    """Return a note for each layer whose own rule has no effect, because it reads another layer's pages."""
    schemes = spec.scheme_by_layer(model_spec.layers)
    return tuple(
        f"layer {layer} reads the pages of layer {owner}, so it has that layer's scheme {schemes[owner].name}"
        for layer, owner in enumerate(model_spec.owner)
        if owner != NO_LAYER and schemes[layer] != schemes[owner]
    )


def watch_notes(spec: CacheSpec, model_spec: ModelSpec) -> tuple[str, ...]:
    """Return a note on what the fidelity watch does not look at, where it is asked for."""
    if not (spec.watches_fidelity and model_spec.states):
        return ()
    layers = sum(len(group.layers) for group in model_spec.states)
    return (
        f"--watch-fidelity compares what attention answers, and not the recurrent states of {layers} layers",
    )


def layout(parts: Iterable[SchemeGroup], model_spec: ModelSpec, page_size: int, packing: str) -> CacheLayout:
    """Return the cache's layout: what every layer with pages of its own stores.

    Args:
        parts: All layers, by scheme.
        model_spec: The model.
        page_size: Tokens of a page.
        packing: How planes lie in a page.
    """
    stored = {layer: part.stored_layer(layer) for part in parts for layer in part.layers}
    # A layer that shares KV has no pages of its own.
    layers = (stored[layer] for layer, owner in enumerate(model_spec.owner) if owner == layer)
    return CacheLayout(tuple(layers), page_size, packing)


def _check(part: SchemeGroup) -> None:
    """Raise UnstorableError where the scheme cannot store the group, or a transform does not fit it."""
    group, scheme = part.group, part.scheme
    where = f"group {group.name} (layers {format_layers(part.layers)})"
    for stream in group.streams:
        if reason := scheme.refuses(stream):
            shapes = ", ".join(f"{stream.name} {stream.heads}x{stream.dim}" for stream in group.streams)
            fitting = f"formats that fit {shapes}: {', '.join(schemes.fitting(*group.streams))}"
            raise UnstorableError(f"stream {stream.name} of {where}: {reason}; {fitting}")
    for name in scheme.transforms:
        if reason := transform.get(name).refuses(group):
            raise UnstorableError(f"{scheme.name} for {where}: {reason}; leave +{name} out")


def format_layers(layers: Iterable[int]) -> str:
    """Return layers in short: `0, 1, 2, 5` -> `0-2,5`; `0, 2, 4, 6` -> `0-6 by 2`."""
    ordered = sorted(layers)
    steps = {high - low for low, high in pairwise(ordered)}
    if len(ordered) > 3 and len(steps) == 1 and steps != {1}:
        return f"{ordered[0]}-{ordered[-1]} by {steps.pop()}"
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in _runs(ordered))

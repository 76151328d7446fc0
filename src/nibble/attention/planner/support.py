"""Facts about backends: rows, and the needs that they are held against.

Owns Phase, Need, Row and BackendInfo. A row is a conjunction of allowed values: no predicates, no escape
hatch; where a fact does not fit, split the row. Must not know of torch, of any one backend, or of models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import groupby, pairwise
from typing import Any

from nibble.model_spec import Phase as Phase  # noqa: PLC0414, for importers of the facts' vocabulary


@dataclass(frozen=True, slots=True)
class Need:
    """What one layer group asks for in one phase.

    format: the name of the streams' format, or `k_format:v_format` where they differ.
    packing, page: None while they are still to be chosen; any row will do then.
    dim: width of a head; group: query heads per KV head; arch: compute capability, 0 for a CPU. kv_heads: None where
    nobody says.
    addressing: how a sparse kernel's indices name tokens; `paged` for everything dense. stored: the format of a cache
    that is dequantised first, None where it is read as it is.
    """

    phase: Phase
    kind: str
    format: str
    packing: str | None
    arch: int
    page: int | None
    dim: int
    group: int
    dtype: str
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    addressing: str = "paged"
    kv_heads: int | None = None
    stored: str | None = None

    def __str__(self) -> str:
        stored = f"{self.format}@{self.packing}" if self.packing else self.format
        parts = [f"{self.phase} of {self.kind} in {stored}"]
        parts += [f"page {self.page}"] if self.page else []
        parts += [f"head_dim {self.dim}", f"group {self.group}", self.dtype]
        parts += [name for name in ("window", "softcap", "sinks") if getattr(self, name)]
        return f"{', '.join(parts)} on {_show('arch', self.arch)}"


NEVER, WITH = frozenset({False}), frozenset({True})
PROMPT = frozenset({Phase.PREFILL, Phase.EXTEND})
MAX_STAGED_TOKENS = 1 << 17
"""Tokens whose pages are dequantised at once, unless a single request has more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """One combination that a backend supports; None allows any value.

    prefer: orders rows that serve the same need, higher first; plain torch is below 0. staged: the same where pages are
    dequantised first; None where that was not found to pay (options.py). workspace: tokens of one layer
    that the kernel dequantises at a time, into the compute dtype. held: bytes that the backend keeps on the device from
    its first call on, whatever the model. cites: the benchmark report, or the source of the fact, that stands behind
    the row.
    """

    phase: frozenset[Phase]
    kind: frozenset[str]
    format: frozenset[str] | None
    packing: frozenset[str] | None = None
    arch: frozenset[int] | None = None
    page: frozenset[int] | None = None
    dim: frozenset[int] | None = None
    group: frozenset[int] | None = None
    dtype: frozenset[str] | None = None
    window: frozenset[bool] | None = None
    softcap: frozenset[bool] | None = None
    sinks: frozenset[bool] | None = None
    addressing: frozenset[str] = frozenset({"paged"})
    kv_heads: frozenset[int] | None = None
    stored: frozenset[str] | None = None
    prefer: int = 0
    staged: int | None = None
    workspace: int = 0
    workspace_bytes: int = 0
    source: str = ""

    def refuses(self, need: Need) -> tuple[str, ...]:
        """The reasons why this row does not serve `need`; empty where it does."""
        return tuple(_reason(name, getattr(need, name), getattr(self, name)) for name in self.misses(need))

    def misses(self, need: Need) -> tuple[str, ...]:
        """The fields of `need` that this row does not allow."""
        return tuple(name for name in _FIELDS if not _allows(self, name, need))

    def serves(self, need: Need) -> bool:
        """Whether there is no reason to refuse `need`."""
        return all(_allows(self, name, need) for name in _FIELDS)


_FIELDS = tuple(asked.name for asked in fields(Need))


def _allows(row: Support, name: str, need: Need) -> bool:
    allowed, asked = getattr(row, name), getattr(need, name)
    return allowed is None or asked is None or asked in allowed


def _reason(name: str, asked: Any, allowed: frozenset[Any]) -> str:
    if isinstance(asked, bool):
        return f"no {name}" if asked else f"only with {name}"
    return f"{name} {_show(name, asked)} is not in {{{format_values(name, allowed)}}}"


def format_values(name: str, allowed: frozenset[Any] | None) -> str:
    """The values that a row allows in field `name`, for people: `16 to 256 by 16`, `SM90, SM100`, `any`."""
    if allowed is None:
        return "any"
    values = sorted(allowed, key=list(Phase).index if name == "phase" else None)
    steps = {high - low for low, high in pairwise(values)} if name == "dim" else set()
    if len(values) > 4 and len(steps) == 1:
        return f"{values[0]} to {values[-1]} by {steps.pop()}"
    if name in {"group", "kv_heads"}:
        return ", ".join(_runs(values))
    return ", ".join(_show(name, value) for value in values)


def _runs(values: list[int]) -> Iterator[str]:
    """Numbers in order, four and more that follow one another as `1 to 16`."""
    for _, run in groupby(enumerate(values), lambda entry: entry[1] - entry[0]):
        found = [value for _, value in run]
        yield from [f"{found[0]} to {found[-1]}"] if len(found) > 3 else map(str, found)


def _show(name: str, value: Any) -> str:
    if name == "arch":
        return f"SM{value}" if value else "CPU"
    return str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendInfo:
    """A backend's file, as data.

    adapter: `module:Class` of the attention object (attention/layer.py, AttentionBackend), or what makes it; the package
    is imported only then. None while only its facts are declared. packages: those of which one must be importable, none for what torch brings;
    install: how a user gets one. versions: those that the adapter was written for, for people. trouble: says
    what keeps a package that is there from working, None if nothing. lack: what this machine lacks for it, with the
    cure; such a backend has no adapter here. graphs: whether a CUDA graph may hold its DECODE: it never waits for the
    device, and reads lengths from there only.
    """

    name: str
    support: tuple[Support, ...]
    summary: str
    adapter: str | Callable[[], Any] | None = None
    packages: tuple[str, ...] = ()
    install: str | None = None
    versions: str | None = None
    unavailable_reason: Callable[[], str | None] | None = None
    missing: str | None = None
    graphs: bool = False

    @property
    def runnable(self) -> bool:
        """Whether this version of Nibble can call it, given its package."""
        return self.adapter is not None

    def nearest(self, need: Need) -> tuple[str, ...]:
        """The reasons of the row that is closest to serving `need`; empty where one serves it."""
        return min((row.refuses(need) for row in self.support), key=len, default=("has no rows",))

    def serves(self, need: Need) -> bool:
        """Whether one of the rows serves `need`."""
        return any(row.serves(need) for row in self.support)

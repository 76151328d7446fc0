"""The generated pages: docs/capabilities.md and docs/formats.md, in markdown.

Owns their wording. Every fact comes from backends' rows, formats and the ledger, so a page cannot say what
the resolver does not do. Must not name a backend or a format.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from inspect import cleandoc
from pathlib import Path

from nibble import formats
from nibble.attention.backends import all_backends
from nibble.attention.planner import ledger
from nibble.attention.planner.explain import BASELINE, Table
from nibble.attention.planner.ledger import LedgerEntry
from nibble.attention.planner.support import BackendInfo, Phase, Support, format_values
from nibble.formats import KVFormat
from nibble.formats import scheme as schemes
from nibble.formats import transforms as transform
from nibble.hardware import CPU_ARCH, GPUS
from nibble.model_spec import HEADS, LATENTS, Stream

LEDGER = Path("docs/ledger.json")
LETTERS = {phase: phase.value[0].upper() for phase in Phase}
Evidence = Mapping[tuple[str, str, str, str, int], LedgerEntry]

_HEAD = """\
# What works with what

Generated from the rows of `src/nibble/attention/backends/` by `nibble docs`; the same rows choose, refuse
and explain.

A cell names phases: P prefill, E extend (new tokens over a cached prefix), D decode, V verify (draft
tokens). They are `declared` in the backend's file, or `verified` by the conformance tests on the GPU that
the footnote names; `-` is refused, for the reason in the footnote, and so are formats that a backend's lines
do not name. What is refused for its format can be had over pages that are dequantised first (`staging`): in P
and E by itself, in D and V with `--allow-staging`, wherever the backend reads the plain format of the compute
dtype.

`--prefill-backend` names who serves P and E, `--decode-backend` who serves D and V, `--attention-backend` both;
what is left out is `auto`. Both read the same pages, so one page size and one packing must suit them: where none
does, the refusal says which of the two divides them. The same for one model, with the reasons of every backend that
cannot serve it: `nibble plan MODEL --gpu h200 --explain`.
"""

_CONDITIONS = """\
Conditions. `group`: query heads to a KV head (of latents, all query heads). `KV heads`: those of a layer. Where two \
lines allow the same, `auto` goes by the one it prefers, and the last column is what that preference stands on.
"""


def capability_table(backends: Mapping[str, BackendInfo] | None = None, path: Path = LEDGER) -> str:
    """docs/capabilities.md. path: the ledger; where there is none, nothing is verified."""
    table = all_backends() if backends is None else backends
    evidence = {entry.key: entry for entry in ledger.read(path)}
    notes: dict[str, int] = {}
    kinds = dict.fromkeys(
        kind for info in table.values() for row in info.support for kind in sorted(row.kind)
    )
    sections = [_HEAD, *_summaries(table)]
    for kind in sorted(kinds, key="mha mla dsa".find):
        sections += [
            f"\n## {kind}\n",
            *_matrix(kind, table, evidence, notes),
            "",
            _CONDITIONS,
            *_conditions(kind, table),
        ]
    sections += [""] + [f"[^{number}]: {text}" for text, number in notes.items()] if notes else []
    return "\n".join(sections) + "\n"


def _summaries(table: Mapping[str, BackendInfo]) -> Iterator[str]:
    rows = []
    for name, info in table.items():
        runs = "runs" if info.runnable else "declared only"
        how, comma, else_ = (info.install or "").partition(",")
        package = f"`{how}`{comma}{else_}" if info.install else "none"
        known = f"; written for: {info.versions}" if info.versions else ""
        rows.append((f"`{name}`", info.summary, runs, package + known))
    return Table(("backend", "what it is", "in this version", "package"), tuple(rows)).as_markdown()


def _matrix(
    kind: str,
    table: Mapping[str, BackendInfo],
    evidence: Evidence,
    notes: dict[str, int],
) -> Iterator[str]:
    """Backends and formats down, GPUs across; formats with equal lines share one."""
    archs, entries = _archs(table), []
    for name, info in table.items():
        rows = [row for row in info.support if kind in row.kind]
        lines: dict[tuple[str, ...], list[str]] = {}
        for fmt in _formats(rows):
            cells = tuple(_cell(name, kind, fmt, arch, rows, evidence, notes) for arch in archs)
            lines.setdefault(cells, []).append(fmt)
        for cells, names in lines.items():
            entries.append((f"`{name}`", _shown(names), *cells))
    return Table(("backend", "formats", *map(_gpu, archs)), tuple(entries)).as_markdown()


def _formats(rows: Iterable[Support]) -> list[str]:
    """The formats that rows name, in the formats' own order, then pairs; `any` for a row that takes all."""
    named = {fmt for row in rows for fmt in row.format or ("any",)}
    order = [*formats.names(), "any"]
    return sorted(named, key=lambda fmt: (order.index(fmt) if fmt in order else len(order), fmt))


def _shown(names: Iterable[str]) -> str:
    """Names of formats; pairs by the scheme that they make."""
    pairs = {":".join(streams.values()): name for name, streams in schemes.MIXED.items()}
    return ", ".join(pairs.get(name, name) for name in names)


def _archs(table: Mapping[str, BackendInfo]) -> list[int]:
    named = {arch for info in table.values() for row in info.support for arch in row.arch or ()}
    return sorted(named | {CPU_ARCH} | {gpu.arch for gpu in GPUS.values()})


def _gpu(arch: int) -> str:
    return f"SM{arch}" if arch else "CPU"


def _cell(
    backend: str,
    kind: str,
    fmt: str,
    arch: int,
    rows: Iterable[Support],
    evidence: Evidence,
    notes: dict[str, int],
) -> str:
    served = {phase for row in rows if _covers(row, fmt, arch) for phase in row.phase}
    by_evidence: dict[str, str] = {}
    for phase in (phase for phase in Phase if phase in served):
        found = _evidence(backend, kind, fmt, arch, phase, evidence)
        mark = f"verified{_note(found, notes)}" if found else "declared"
        by_evidence[mark] = by_evidence.get(mark, "") + LETTERS[phase]
    if missing := "".join(LETTERS[phase] for phase in Phase if phase not in served):
        by_evidence[f"-{_note(_refused(fmt, rows, served), notes)}"] = missing if served else ""
    return "; ".join(f"{letters} {mark}".strip() for mark, letters in by_evidence.items())


def _note(text: str, notes: dict[str, int]) -> str:
    return f"[^{notes.setdefault(text, len(notes) + 1)}]"


def _refused(fmt: str, rows: Iterable[Support], served: set[Phase]) -> str:
    """Why a cell is not served in all phases: those that are there, or the GPUs that there are."""
    if served:
        return f"refused: only for {format_values('phase', frozenset(served))}"
    able = (row for row in rows if row.format is None or fmt in row.format)
    gpus = _gpus(frozenset(arch for row in able for arch in row.arch or ()))
    return f"refused: only on {gpus.removeprefix('all ')}"


def _covers(row: Support, fmt: str, arch: int) -> bool:
    return (row.format is None or fmt in row.format) and (row.arch is None or arch in row.arch)


def _evidence(backend: str, kind: str, fmt: str, arch: int, phase: Phase, entries: Evidence) -> str | None:
    """Where the combination was verified. A row for any format is verified as far as every format that fits was."""
    wanted = _fitting(kind) if fmt == "any" else (fmt,)
    found = [entries.get((backend, str(phase), kind, name, arch)) for name in wanted]
    seen = [entry for entry in found if entry is not None]
    if len(seen) < len(wanted):
        return None
    return f"verified on {min(seen, key=lambda entry: entry.date)}"


def _fitting(kind: str) -> tuple[str, ...]:
    """The formats that can store what a kind of attention caches, index keys aside."""
    found = schemes.fitting(*(HEADS if kind == "mha" else LATENTS[:1]))
    return tuple(name for name in found if name not in schemes.MIXED)


CONDITION_COLUMNS = (
    "backend", "phases", "formats", "GPUs", "page", "packing", "head_dim", "group", "KV heads", "limits", "source",
)  # fmt: skip


def _conditions(kind: str, table: Mapping[str, BackendInfo]) -> Iterator[str]:
    """What else rows ask for; rows that differ in their format only share a line."""
    entries = []
    for name, info in table.items():
        alike: dict[tuple[str, ...], list[Support]] = {}
        for row in (row for row in info.support if kind in row.kind):
            alike.setdefault(_asks(row), []).append(row)
        for asks, rows in alike.items():
            entries.append((f"`{name}`", asks[0], _shown(_formats(rows)), *asks[1:]))
    return Table(CONDITION_COLUMNS, tuple(entries)).as_markdown()


def _asks(row: Support) -> tuple[str, ...]:
    """The cells of a row, without its format."""
    phases = "".join(LETTERS[phase] for phase in Phase if phase in row.phase)
    rest = [
        format_values(field, getattr(row, field)) for field in ("page", "packing", "dim", "group", "kv_heads")
    ]
    return phases, _gpus(row.arch), *rest, ", ".join(_limits(row)) or "-", row.source


def _gpus(archs: frozenset[int] | None) -> str:
    every = frozenset(gpu.arch for gpu in GPUS.values()) - {CPU_ARCH}
    return "all GPUs" if archs == every else format_values("arch", archs)


def _limits(row: Support) -> Iterator[str]:
    for name in ("window", "softcap", "sinks"):
        allowed = getattr(row, name)
        if allowed is not None and True not in allowed:
            yield f"no {name}"
        if allowed is not None and False not in allowed:
            yield f"only with {name}"
    if row.stored:
        yield f"staged from {format_values('stored', row.stored)}"


def formats_table() -> str:
    """docs/formats.md."""
    lines = [
        "# KV formats\n",
        "Generated by `nibble docs` from `src/nibble/formats/`. Bytes are per token, scales in the pool included.\n",
        "## K and V\n",
        "Of one KV head of 128 values.\n",
        *_sizes(HEADS),
        "\n## Mixed schemes\n",
        *Table(("scheme", "bytes", "x fewer", "formats"), tuple(_mixed())).as_markdown(),
        "\n## Latents of MLA\n",
        "Of 512 values and 64 rotary ones.\n",
        *_sizes(LATENTS[:1]),
        "\n## Index keys of sparse attention\n",
        "Of 128 values. Unquantised schemes keep them unquantised.\n",
        *_sizes(LATENTS[1:], schemes.COMPANIONS.values()),
        "\n## Transforms\n",
        "Written behind a scheme, as in `+rot`; they cost no bytes.\n",
        *(f"- `{name}`: {transform.get(name).summary}" for name in transform.names()),
        "\n## The formats' own words, with what zeros, infinities and NaN do\n",
        *_prose(),
    ]
    return "\n".join(lines) + "\n"


SIZE_COLUMNS = (
    "format", "bytes", "x fewer than 16 bits", "planes of one head", "global scale", "values", "summary",
)  # fmt: skip


def _sizes(streams: Sequence[Stream], names: Iterable[str] = ()) -> Iterator[str]:
    """What stores one of these streams, and the bytes of them all."""
    rows = []
    for name in names or (name for name in schemes.fitting(*streams) if name not in schemes.MIXED):
        fmt = formats.get(name)
        size = sum(fmt.bytes_per_token(stream) for stream in streams)
        planes = ", ".join(
            f"{p.name} {'x'.join(map(str, p.shape[1:])) or 1} {p.dtype}" for p in fmt.planes(streams[0])
        )
        scale = f"FP32, up to {fmt.max_value:g} at 1.0" if fmt.needs_scale else "none"
        dims = f"multiple of {fmt.block}" if fmt.block > 1 else "any"
        rows.append((f"`{name}`", str(size), _ratio(size, streams), planes, scale, dims, fmt.summary))
    return Table(SIZE_COLUMNS, tuple(rows)).as_markdown()


def _ratio(size: int, streams: Sequence[Stream]) -> str:
    plain = formats.plain(BASELINE)
    return f"{sum(plain.bytes_per_token(stream) for stream in streams) / size:.2f}"


def _mixed() -> Iterator[tuple[str, ...]]:
    for name, streams in schemes.MIXED.items():
        parts = ", ".join(f"{stream} {fmt}" for stream, fmt in streams.items())
        size = schemes.bytes_per_token(name, HEADS)
        yield f"`{name}`", str(size), _ratio(size, HEADS), parts


def _prose() -> Iterator[str]:
    """Each format file's docstring, with the sources that its bytes agree with."""
    by_module: dict[str, list[KVFormat]] = {}
    for name in formats.names():
        by_module.setdefault(type(formats.get(name)).__module__, []).append(formats.get(name))
    for module, found in by_module.items():
        yield f"### {', '.join(fmt.name for fmt in found)}\n"
        yield cleandoc(sys.modules[module].__doc__ or "")
        yield ""
        yield from (f"- `{fmt.name}` agrees with: {fmt.source}" for fmt in found)
        yield ""

"""The generated pages: docs/capabilities.md and docs/formats.md, in markdown.

Every fact comes from backends' rows, formats and the ledger, so a page cannot claim what the resolver does not do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from inspect import cleandoc
from pathlib import Path

from nibble import formats
from nibble.attention.backends import all_backends
from nibble.attention.planner.evidence import LedgerEntry, read_ledger
from nibble.attention.planner.explain import BASELINE, Table
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
Conditions. `group`: query heads to a KV head (of latents, all query heads). The last column is what a line rests on; \
the order in which `auto` takes backends is in `src/nibble/attention/rankings/`.
"""


def capability_table(backends: Mapping[str, BackendInfo] | None = None, path: Path = LEDGER) -> str:
    """Return the text of docs/capabilities.md. `path`: the ledger; where there is none, nothing is verified."""
    table = all_backends() if backends is None else backends
    evidence = {entry.key: entry for entry in read_ledger(path)}
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
        versions = f"; written for: {info.versions}" if info.versions else ""
        rows.append((f"`{name}`", info.summary, runs, package + versions))
    return Table(("backend", "what it is", "in this version", "package"), tuple(rows)).as_markdown()


def _matrix(
    kind: str,
    table: Mapping[str, BackendInfo],
    evidence: Evidence,
    notes: dict[str, int],
) -> Iterator[str]:
    """Return a table of backends and formats down, GPUs across; formats with equal lines share one."""
    archs, entries = _archs(table), []
    for name, info in table.items():
        rows = [row for row in info.support if kind in row.kind]
        lines: dict[tuple[str, ...], list[str]] = {}
        for fmt in _formats(rows):
            cells = tuple(_cell(name, kind, fmt, arch, rows, evidence, notes) for arch in archs)
            # Formats with the same cells share a line.
            lines.setdefault(cells, []).append(fmt)
        for cells, names in lines.items():
            entries.append((f"`{name}`", _format_names(names), *cells))
    return Table(("backend", "formats", *map(_gpu, archs)), tuple(entries)).as_markdown()


def _formats(rows: Iterable[Support]) -> list[str]:
    """Return the formats that rows name, in the formats' own order, then pairs; `any` for a row that takes all."""
    row_formats = {fmt for row in rows for fmt in row.format or ("any",)}
    order = [*formats.names(), "any"]
    return sorted(row_formats, key=lambda fmt: (order.index(fmt) if fmt in order else len(order), fmt))


def _format_names(names: Iterable[str]) -> str:
    """Return names of formats; pairs by the scheme that they make."""
    # Rows name a pair by its formats; users know the scheme.
    pairs = {":".join(streams.values()): name for name, streams in schemes.MIXED.items()}
    return ", ".join(pairs.get(name, name) for name in names)


def _archs(table: Mapping[str, BackendInfo]) -> list[int]:
    row_archs = {arch for info in table.values() for row in info.support for arch in row.arch or ()}
    return sorted(row_archs | {CPU_ARCH} | {gpu.arch for gpu in GPUS.values()})


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
        source = _evidence(backend, kind, fmt, arch, phase, evidence)
        mark = f"verified{_note(source, notes)}" if source else "declared"
        by_evidence[mark] = by_evidence.get(mark, "") + LETTERS[phase]
    # A cell that serves nothing needs no letters, only the reason.
    if missing := "".join(LETTERS[phase] for phase in Phase if phase not in served):
        by_evidence[f"-{_note(_refused(fmt, rows, served), notes)}"] = missing if served else ""
    return "; ".join(f"{letters} {mark}".strip() for mark, letters in by_evidence.items())


def _note(text: str, notes: dict[str, int]) -> str:
    # Cells with the same note share its number.
    return f"[^{notes.setdefault(text, len(notes) + 1)}]"


def _refused(fmt: str, rows: Iterable[Support], served: set[Phase]) -> str:
    """Return why a cell is not served in all phases: those that are, or the GPUs on which it is."""
    if served:
        return f"refused: only for {format_values('phase', frozenset(served))}"
    reading = (row for row in rows if row.format is None or fmt in row.format)
    gpus = _gpus(frozenset(arch for row in reading for arch in row.arch or ()))
    return f"refused: only on {gpus.removeprefix('all ')}"


def _covers(row: Support, fmt: str, arch: int) -> bool:
    return (row.format is None or fmt in row.format) and (row.arch is None or arch in row.arch)


def _evidence(backend: str, kind: str, fmt: str, arch: int, phase: Phase, entries: Evidence) -> str | None:
    """Return where a combination was verified; None where it was not.

    A row for any format is verified as far as every format that fits is.
    """
    names = _fitting(kind) if fmt == "any" else (fmt,)
    matches = [entries.get((backend, str(phase), kind, name, arch)) for name in names]
    verified = [entry for entry in matches if entry is not None]
    if len(verified) < len(names):
        return None
    return f"verified on {min(verified, key=lambda entry: entry.date)}"


def _fitting(kind: str) -> tuple[str, ...]:
    """Return the formats that can store what a kind of attention caches, index keys aside."""
    names = schemes.fitting(*(HEADS if kind == "mha" else LATENTS[:1]))
    return tuple(name for name in names if name not in schemes.MIXED)


CONDITION_COLUMNS = (
    "backend", "phases", "formats", "GPUs", "page", "packing", "head_dim", "group", "limits", "source",
)  # fmt: skip


def _conditions(kind: str, table: Mapping[str, BackendInfo]) -> Iterator[str]:
    """Return a table of what else rows require; rows that differ in their format only share a line."""
    entries = []
    for name, info in table.items():
        alike: dict[tuple[str, ...], list[Support]] = {}
        for row in (row for row in info.support if kind in row.kind):
            # Rows that differ in their formats only are one condition.
            alike.setdefault(_conditions_of(row), []).append(row)
        for cells, rows in alike.items():
            entries.append((f"`{name}`", cells[0], _format_names(_formats(rows)), *cells[1:]))
    return Table(CONDITION_COLUMNS, tuple(entries)).as_markdown()


def _conditions_of(row: Support) -> tuple[str, ...]:
    """Return the cells of a row, without its format."""
    phases = "".join(LETTERS[phase] for phase in Phase if phase in row.phase)
    values = [format_values(field, getattr(row, field)) for field in ("page", "packing", "dim", "group")]
    return phases, _gpus(row.arch), *values, ", ".join(_limits(row)) or "-", row.source


def _gpus(archs: Set[int] | None) -> str:
    every = frozenset(gpu.arch for gpu in GPUS.values()) - {CPU_ARCH}
    return "all GPUs" if archs == every else format_values("arch", archs)


def _limits(row: Support) -> Iterator[str]:
    for name in ("window", "softcap", "sinks"):
        allowed = getattr(row, name)
        if allowed is not None and True not in allowed:
            yield f"no {name}"
        if allowed is not None and False not in allowed:
            yield f"only with {name}"


def formats_table() -> str:
    """Return the text of docs/formats.md."""
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
    """Return a table of what stores one of these streams, with the bytes of them all."""
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
    """Yield each format file's docstring, with the sources that its bytes agree with."""
    by_module: dict[str, list[KVFormat]] = {}
    for name in formats.names():
        by_module.setdefault(type(formats.get(name)).__module__, []).append(formats.get(name))
    for module, entries in by_module.items():
        yield f"### {', '.join(fmt.name for fmt in entries)}\n"
        yield cleandoc(sys.modules[module].__doc__ or "")
        yield ""
        yield from (f"- `{fmt.name}` agrees with: {fmt.source}" for fmt in entries)
        yield ""

"""What stands behind a choice: combinations that were verified, and backends in the order of their speed.

A ledger (docs/ledger.json) is written by the conformance run, and read by the docs and by `nibble plan --explain`:

    {"schema": 1, "entries": [
      {"backend": NAME, "phase": "decode", "kind": "mha", "format": NAME, "arch": 90,
       "gpu": "NVIDIA H200", "date": "2026-11-20", "versions": {"torch": "2.11.0", "CUDA": "13.0", "triton": "3.6.0"}}]}

Rankings order backends. Some are shipped (attention/rankings/), and `nibble tune` writes those of the user's machine,
in the same form, into $NIBBLE_TUNED or tuned/ in the cache folder, a file a device:

    {"schema": 2, "device": "NVIDIA H200", "versions": {"torch": "2.11.0"}, "support": HASH, "date": "2026-11-21",
     "rankings": [{"match": {"subject": SUBJECT}, "source": "",
                   "order": [{"backend": NAME, "stage_to": null, "page": 64, "packing": "hnd",
                              "ms": {"64x8K": 0.25}, "failure": ""}]}]}

A ranking matches by a subject, which is all that a kernel sees of a layer group in one phase, or by fields of a Need:
`{"phase": ["decode", "verify"], "kv_heads": {"max": 4}, "window": false}`. The first that matches counts. The user's
file must be about this machine, these versions and these backends; otherwise it is not used, and a warning says why.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib import metadata
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nibble
from nibble import files
from nibble.attention.planner.support import BackendInfo, Need, Support
from nibble.errors import ConfigError
from nibble.hardware import Hardware, cache_folder, cuda_version, processor
from nibble.model_spec import Phase

if TYPE_CHECKING:  # which imports the formats, and torch with them
    from nibble.attention.planner.support import SchemeGroup

# --- the ledger -------------------------------------------------------------------------------------------------------

LEDGER_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One combination that passed."""

    backend: str
    phase: str
    kind: str
    format: str
    arch: int
    gpu: str
    date: str
    """ISO 8601."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Package -> version of what the result rests on. Early entries have none."""

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """What a later run of the same combination replaces."""
        return self.backend, self.phase, self.kind, self.format, self.arch

    def as_dict(self) -> dict[str, Any]:
        """Return where it passed, for JSON."""
        return {"gpu": self.gpu, "date": self.date, "versions": dict(self.versions)}

    def __str__(self) -> str:
        """`NVIDIA H200, 2026-11-20 (torch 2.11.0)`."""
        versions = ", ".join(f"{name} {version}" for name, version in sorted(self.versions.items()))
        return f"{self.gpu}, {self.date}" + (f" ({versions})" if versions else "")


def read_ledger(path: Path) -> tuple[LedgerEntry, ...]:
    """Return the entries of a ledger, none where there is no file; raises ConfigError where it cannot be read."""
    if not path.exists():
        return ()
    try:
        content = json.loads(path.read_text())
        if (schema := content["schema"]) != LEDGER_SCHEMA:
            raise ConfigError(f"{path} has schema {schema}, and this version reads {LEDGER_SCHEMA}")
        return tuple(map(_ledger_entry, content["entries"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"cannot read the ledger {path}: {type(error).__name__}: {error}") from error


def _ledger_entry(values: Mapping[str, Any]) -> LedgerEntry:
    # A newer version may have written more fields.
    required = {entry.name: values[entry.name] for entry in fields(LedgerEntry) if entry.name != "versions"}
    return LedgerEntry(**required, versions=dict(values.get("versions") or {}))


def update_ledger(
    path: Path, confirmed: Iterable[LedgerEntry], disproved: Iterable[LedgerEntry] = ()
) -> None:
    """Add what was confirmed in place of older entries, and take out what was disproved.

    Args:
        path: The ledger. Entries that other runs add meanwhile stay.
        confirmed: Combinations that passed.
        disproved: Combinations that failed in some case.
    """
    wrong = {entry.key for entry in disproved}
    # Read and written under one lock, or two runs at a time would lose each other's entries.
    with files.exclusive_lock(path.parent):
        entries = {entry.key: entry for entry in (*read_ledger(path), *confirmed)}
        content = {
            "schema": LEDGER_SCHEMA,
            "entries": [asdict(entries[key]) for key in sorted(entries) if key not in wrong],
        }
        files.write_atomic(path, json.dumps(content, indent=1) + "\n")


def shipped_ledger() -> Path:
    """Return the ledger that came with this installation: in the package, or beside it in a checkout."""
    package = Path(nibble.__file__).parent
    inside = package / "_ledger.json"
    return inside if inside.exists() else package.parents[1] / "docs" / "ledger.json"


# --- rankings ---------------------------------------------------------------------------------------------------------

SCHEMA = 2
TUNED_BYTES = 1 << 18
"""Of a device's file, at most."""
TUNED_FOLDER = "NIBBLE_TUNED"
RANKINGS = Path(__file__).parents[1] / "rankings"
DEFAULT = "default.json"
"""The file for GPUs that nobody raced on; every other one comes before it."""
RETRY = "run `nibble tune` again, or leave it aside with --no-tuned"
IGNORED = frozenset({"source", "measured", "workspace", "workspace_bytes", "fixed_split"})
"""Fields of a Support that say nothing of what it serves: they may change, and times stay true."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How fast one backend is, over the cache's own bytes or over dequantised pages."""

    backend: str
    stage_to: str | None = None
    page: int | None = None
    """The page size that it was timed on; None where it was not."""
    packing: str | None = None
    """The packing that it was timed on. In a shipped ranking, the only packing that the place is for."""
    ms: Mapping[str, float] = field(default_factory=dict)
    """Milliseconds of a call by workload. Without any, the place in the ranking is all that is stated."""
    failure: str = ""
    """Why it did not finish a workload; empty where it did."""
    gap: float = 1
    """How far behind the one before it; 0 where it is as good, so that page size and packing decide between the two."""

    @property
    def key(self) -> tuple[str, str | None]:
        """The backend, and the format that pages are dequantised to."""
        return self.backend, self.stage_to

    def summary(self) -> str:
        """Return the times for a plan's notes; empty where the backend did not finish."""
        if self.failure:
            return ""
        times = ", ".join(f"{ms:.3f} ms ({workload})" for workload, ms in self.ms.items())
        return f"measured on this machine: {times}; pages of {self.page}, {self.packing}"


@dataclass(frozen=True, slots=True)
class Ranking:
    """An order of backends, the fastest first, for all needs that it matches."""

    match: Mapping[str, Any]
    """Allowed values by field of Need: one, a list, or {"min": .., "max": ..}. Or `subject`, an exact one."""
    order: tuple[Timing, ...]
    source: str = ""
    """What the order rests on, for people."""
    device: str = ""
    """Where it was measured; empty where it was not."""

    def basis(self, hardware: Hardware) -> str:
        """Return what the order rests on, for a machine: times on another GPU are none of it."""
        name = hardware.name.lower()
        here = not self.device or self.device.lower() == name or name in self.device.lower().split()
        return self.source if here else "in the order of times on another GPU"

    def matches(self, need: Need, subject: str) -> bool:
        """Whether the ranking is about this need."""
        return all(
            _allows(allowed, subject if name == "subject" else getattr(need, name))
            for name, allowed in self.match.items()
        )

    def places(self, backend: str, *, staged: bool) -> tuple[tuple[float, str | None], ...]:
        """Return the places of a backend, 0 the first, each with the only packing that is meant, or None.

        Args:
            backend: Its name.
            staged: Whether pages are dequantised first.
        """
        places = chain((0,), accumulate(timing.gap for timing in self.order[1:]))
        return tuple(
            (place, timing.packing)
            for timing, place in zip(self.order, places, strict=True)
            if (timing.backend, bool(timing.stage_to)) == (backend, staged)
        )


def _allows(allowed: Any, value: Any) -> bool:
    if isinstance(allowed, Mapping):
        return value is not None and allowed.get("min", value) <= value <= allowed.get("max", value)
    return value in allowed if isinstance(allowed, list) else value == allowed


@dataclass(frozen=True, slots=True)
class Rankings:
    """Rankings of one or more files, the first that matches counts."""

    entries: tuple[Ranking, ...] = ()
    warning: str = ""
    """Why the user's file is not used, although it is there."""

    def first(self, need: Need, subject: str) -> Ranking | None:
        """Return the ranking that counts for a need; None where none matches."""
        return next((entry for entry in self.entries if entry.matches(need, subject)), None)


NO_RANKINGS = Rankings()


def by_time(times: Mapping[str, Iterable[Timing]]) -> Rankings:
    """Return a ranking for each subject, by the mean of time / best time; backends that failed come last."""
    return Rankings(tuple(Ranking({"subject": name}, _fastest_first(times[name])) for name in sorted(times)))


def _fastest_first(timings: Iterable[Timing]) -> tuple[Timing, ...]:
    entries = tuple(timings)
    workloads = dict.fromkeys(workload for timing in entries for workload in timing.ms)
    best = {name: min(t.ms[name] for t in entries if name in t.ms) for name in workloads}

    def slowness(timing: Timing) -> float:
        # A backend that lacks a workload cannot be compared by the others.
        if timing.failure or timing.ms.keys() != best.keys():
            return math.inf
        # Logarithms give a factor the same weight in short and in long workloads.
        return sum(math.log(timing.ms[name] / best[name]) for name in best)

    return tuple(sorted(entries, key=slowness))


def subject(part: SchemeGroup, phase: Phase, dtype: str) -> str:
    """Return what is timed, in words: all that a kernel sees of a layer group in one phase.

    Args:
        part: The layers, with what they store.
        phase: What a step asks of them.
        dtype: The dtype of queries.
    """
    group = part.group
    shapes = (f"{s.name} {s.heads}x{s.dim}" + (f"/{s.rope}" if s.rope else "") for s in group.streams)
    parts = [f"{phase} of {group.kind} in {part.stored_layer(0).format_key}", f"{group.q_heads} heads"]
    parts += ["+".join(shapes), dtype]
    parts += [f"window {group.window}"] if group.window else []
    parts += [name for name in ("softcap", "sinks") if getattr(group, name)]
    return ", ".join(parts)


@cache
def shipped_rankings(device: str = "") -> Rankings:
    """Return the rankings in the package: those of races on `device` first, then of other GPUs, then the default."""
    contents = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in RANKINGS.glob("*.json")}
    names = sorted(contents, key=lambda name: (name == DEFAULT, contents[name]["device"] != device, name))
    return Rankings(tuple(entry for name in names for entry in _entries(contents[name])))


def device(hardware: Hardware) -> str:
    """Return the name of what times are about."""
    return processor() if hardware.is_cpu else hardware.name


def tuned_path(hardware: Hardware) -> Path:
    """Return the path of the user's file about a device."""
    folder = os.environ.get(TUNED_FOLDER)
    name = re.sub(r"[^a-z0-9]+", "-", device(hardware).lower()).strip("-")
    return (Path(folder) if folder else cache_folder() / "tuned") / f"{name}.json"


def load_tuned(hardware: Hardware, backends: Mapping[str, BackendInfo]) -> Rankings:
    """Return what was measured on this machine; nothing, with a warning, where the file is not to be trusted."""
    path = tuned_path(hardware)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return NO_RANKINGS
    except (OSError, ValueError) as error:
        return _unused(path, f"it cannot be read ({getattr(error, 'strerror', None) or error})")
    try:
        content = json.loads(text)
        if not isinstance(content, dict):
            raise TypeError("it is no JSON object")
        here = _identity(hardware, backends)
        recorded = {name: content[name] for name in here}
        # Other versions or backends have other kernels, so these times say nothing about them.
        if recorded != here:
            return _unused(path, _difference(recorded, here))
        return Rankings(_entries(content))
    except KeyError as error:
        return _unused(path, f"it is not what nibble tune writes (there is no {error})")
    except (TypeError, ValueError, OverflowError, AttributeError, RecursionError) as error:
        return _unused(path, f"it is not what nibble tune writes ({error})")


def save_tuned(
    hardware: Hardware, backends: Mapping[str, BackendInfo], times: Mapping[str, tuple[Timing, ...]]
) -> Path:
    """Write times to the device's file, beside what it holds of other subjects and of other backends.

    Args:
        hardware: What was measured.
        backends: All backends of this version, as they are here.
        times: The timings of each subject.

    Returns:
        The path of the file.

    Raises:
        ConfigError: It cannot be written.
    """
    path = tuned_path(hardware)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.exclusive_lock(path.parent):
            # A file about another machine or other versions loads as empty, so its times are dropped here.
            older = {entry.match["subject"]: entry.order for entry in load_tuned(hardware, backends).entries}
            merged = older | {name: _merge(timings, older.get(name, ())) for name, timings in times.items()}
            head = {**_identity(hardware, backends), "date": datetime.date.today().isoformat()}
            files.write_atomic(path, as_json(head, by_time(merged)))
    except OSError as error:
        raise _unwritable(path, error.strerror) from error
    return path


def require_tuned_writable(hardware: Hardware) -> None:
    """Raise ConfigError unless the device's file can be written. To be called before what takes minutes."""
    path = tuned_path(hardware)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.check_writable(path, "the times", TUNED_BYTES)
    except (OSError, ConfigError) as error:
        raise _unwritable(path, str(error)) from error


def _unwritable(path: Path, why: str | None) -> ConfigError:
    return ConfigError(
        f"the times cannot be kept in {path}: {why}; name a folder that can be written in ${TUNED_FOLDER}"
    )


def as_json(head: Mapping[str, Any], rankings: Rankings) -> str:
    """Return the text of a file of rankings, a backend a line. head: its fields before the rankings."""
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    entries = []
    for entry in rankings.entries:
        order = ",\n".join(f"   {json.dumps(_stated(timing))}" for timing in entry.order)
        match, source = json.dumps(entry.match), json.dumps(entry.source)
        entries.append(f'  {{"match": {match}, "source": {source}, "order": [\n{order}]}}')
    body = ",\n".join(entries)
    return "\n".join(("{", *lines, f' "rankings": [\n{body}]', "}", ""))


def _stated(timing: Timing) -> dict[str, Any]:
    """Return a timing's fields, but for those that state nothing."""
    unstated = {"page": None, "packing": None, "gap": 1}
    return {name: value for name, value in asdict(timing).items() if (name, value) not in unstated.items()}


def _merge(new: tuple[Timing, ...], old: tuple[Timing, ...]) -> tuple[Timing, ...]:
    """Return new timings, and old ones of other backends that can be compared with them."""
    keys, workloads = {timing.key for timing in new}, {name for timing in new for name in timing.ms}
    rest = (timing for timing in old if timing.key not in keys)
    # Times of other workloads cannot be compared with the new ones. A failure needs no comparison.
    return (*new, *(t for t in rest if not workloads or t.failure or t.ms.keys() == workloads))


def _unused(path: Path, why: str) -> Rankings:
    return Rankings(warning=f"times measured on this machine are not used: {path}: {why}; {RETRY}")


def _identity(hardware: Hardware, backends: Mapping[str, BackendInfo]) -> dict[str, Any]:
    """Return what times depend on, beside their subject."""
    runnable = {name: info for name, info in backends.items() if info.runnable}
    return {
        "schema": SCHEMA,
        "device": device(hardware),
        "versions": versions(runnable.values()),
        "support": _fingerprint(runnable),
    }


def _difference(recorded: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Return the first thing that differs, in words."""
    if recorded["schema"] != here["schema"]:
        return f"it has schema {recorded['schema']}, and this version reads {here['schema']}"
    if recorded["device"] != here["device"]:
        return f"it is about {recorded['device']}, and this machine has {here['device']}"
    then, now = dict(recorded["versions"]), here["versions"]
    for name in sorted(then.keys() | now.keys()):
        if then.get(name) != now.get(name):
            return f"it was measured with {name} {then.get(name, 'missing')}, and here it is {now.get(name, 'missing')}"
    return "it was measured with other backends than this version's"


def _fingerprint(backends: Mapping[str, BackendInfo]) -> str:
    """Return a hash of what the backends that can run here support."""
    names = [entry.name for entry in fields(Support) if entry.name not in IGNORED]
    rows = [
        (name, [[_plain(getattr(row, field)) for field in names] for row in info.support])
        for name, info in sorted(backends.items())
    ]
    return hashlib.sha256(repr((nibble.__version__, names, rows)).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    # A set has no order, and the hash must be the same in every process.
    return sorted(map(str, value)) if isinstance(value, frozenset) else value


def _entries(content: Mapping[str, Any]) -> tuple[Ranking, ...]:
    """Return the rankings of a file; raises where it is none. A `match` of the file holds for all of them."""
    common = content.get("match", {})
    return tuple(
        Ranking(
            common | dict(entry["match"]),
            tuple(map(_timing, entry["order"])),
            str(entry["source"]),
            str(content.get("device", "")),
        )
        for entry in content["rankings"]
    )


def _timing(values: Mapping[str, Any]) -> Timing:
    ms = {str(name): float(time) for name, time in values["ms"].items()}
    if not all(0 < time < math.inf for time in ms.values()):
        raise ValueError(f"{values['backend']} has times that are none")
    kinds = {"page": int, "packing": str, "gap": float}
    stated = {name: kind(values[name]) for name, kind in kinds.items() if values.get(name) is not None}
    # Required, because a time of plain pages and one of pages that are dequantised first are not the same.
    stage_to = None if values["stage_to"] is None else str(values["stage_to"])
    return Timing(str(values["backend"]), stage_to, ms=ms, failure=str(values["failure"]), **stated)


# --- versions ---------------------------------------------------------------------------------------------------------

ALWAYS = ("torch", "triton")
"""What every backend rests on; torch compiles by the other on a GPU."""


def versions(backends: Iterable[BackendInfo]) -> dict[str, str]:
    """Return package -> version of torch, CUDA, and what brings the kernels of these backends, where installed."""
    cuda = cuda_version()
    names = [name for name in ALWAYS if cuda or name == "torch"]
    names += [name for info in backends if (name := _distribution(info))]
    installed = {name: version for name in dict.fromkeys(names) if (version := _version(name))}
    return dict(sorted((installed | ({"CUDA": cuda} if cuda else {})).items()))


def _version(distribution: str) -> str | None:
    try:
        # What stands behind a + is the build, and CUDA is listed by itself.
        return metadata.version(distribution).split("+")[0]
    except metadata.PackageNotFoundError:
        return None


def _distribution(info: BackendInfo) -> str | None:
    """Return the distribution of one of the backend's packages; None for what torch brings, and for bare copies."""
    for package in info.packages:
        providers = _providers().get(package.partition(".")[0], [])
        if (same_name := package.replace(".", "-")) in providers:
            return same_name
        if providers:
            # several distributions may install modules of one name: `flash_attn` and `flash_attn.cute`
            folder = package.replace(".", "/") + "/"
            return min([name for name in providers if _installs(name, folder)] or providers)
    return None


def _installs(distribution: str, folder: str) -> bool:
    """Whether a distribution has files in a folder."""
    try:
        return any(str(file).startswith(folder) for file in metadata.files(distribution) or ())
    except metadata.PackageNotFoundError:
        return False


_providers = cache(metadata.packages_distributions)
"""Top-level package -> distributions that install it; reading those of all packages takes a while."""

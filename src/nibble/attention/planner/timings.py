"""Times that were measured on this machine, which `auto` follows: the file of `nibble tune`, read and written.

Owns Timing, Measured and the file. What is timed, and how, is evals/tuning/bench.py's business; how options are ordered by it,
options.py's. A file that cannot be read, or is about another machine or other versions, is not used, and said to be so;
it never stops anybody. Must not import torch.

    {"schema": 1, "device": "NVIDIA H200", "versions": {"torch": "2.11.0"}, "rows": HASH, "date": "2026-11-21",
     "measured": {SUBJECT: [{"backend": NAME, "stage_to": null, "page": 64, "packing": "hnd",
                             "ms": {"64x8K": 0.25}, "failure": ""}]}}

The folder is $NIBBLE_TUNED, or tuned/ in the user's cache folder; a file is for one device.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import nibble
from nibble import files
from nibble.attention.planner.needs import SchemeGroup
from nibble.attention.planner.support import BackendInfo, Phase, Support
from nibble.attention.planner.versions import versions
from nibble.errors import ConfigError
from nibble.hardware import Hardware, cache_folder, processor

SCHEMA = 1
PLACE = "NIBBLE_TUNED"
AGAIN = "run `nibble tune` again, or leave it aside with --no-tuned"
OPINIONS = frozenset({"prefer", "staged", "source", "workspace", "workspace_bytes"})
"""Fields of a row that say nothing of what it serves: they may change, and times stay true."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How one backend did, from the cache's own bytes or staged. page, packing: where. ms: a call's time by workload.
    failure: why it did not finish one, empty where it did."""

    backend: str
    stage_to: str | None
    page: int
    packing: str
    ms: Mapping[str, float]
    failure: str = ""

    @property
    def key(self) -> tuple[str, str | None]:
        return self.backend, self.stage_to

    @property
    def words(self) -> str:
        """For a plan; empty where it did not finish."""
        if self.failure:
            return ""
        times = ", ".join(f"{ms:.3f} ms ({workload})" for workload, ms in self.ms.items())
        return f"measured on this machine: {times}; pages of {self.page}, {self.packing}"


@dataclass(frozen=True, slots=True)
class Timings:
    """Timings by subject. warning: why a file that is there is not used."""

    subjects: Mapping[str, tuple[Timing, ...]] = field(default_factory=dict)
    warning: str = ""

    def ranked(self, subject: str) -> tuple[Timing, ...]:
        """The timings of a subject, fastest first, those that failed last: by the mean of time / best time."""
        found = self.subjects.get(subject, ())
        works = dict.fromkeys(work for timing in found for work in timing.ms)
        best = {work: min(t.ms[work] for t in found if work in t.ms) for work in works}

        def slowness(timing: Timing) -> float:
            if timing.failure or timing.ms.keys() != best.keys():
                return math.inf
            return sum(math.log(timing.ms[work] / best[work]) for work in best)

        return tuple(sorted(found, key=slowness))


NOTHING = Timings()


def subject(part: SchemeGroup, phase: Phase, dtype: str) -> str:
    """What is timed, in words: all that a kernel sees of a layer group in one phase."""
    group = part.group
    streams = "+".join(
        f"{s.name} {s.heads}x{s.dim}" + (f"/{s.rope}" if s.rope else "") for s in group.streams
    )
    extras = [f"window {group.window}"] * bool(group.window)
    extras += [name for name in ("softcap", "sinks") if getattr(group, name)]
    stored = part.stored_layer(0).format_key
    return ", ".join(
        (f"{phase} of {group.kind} in {stored}", f"{group.q_heads} heads", streams, dtype, *extras)
    )


def device(hardware: Hardware) -> str:
    """What times are about."""
    return processor() if hardware.is_cpu else hardware.name


def path_for(hardware: Hardware) -> Path:
    """The file about a device."""
    named = os.environ.get(PLACE)
    name = re.sub(r"[^a-z0-9]+", "-", device(hardware).lower()).strip("-")
    return (Path(named) if named else cache_folder() / "tuned") / f"{name}.json"


def load(hardware: Hardware, backends: Mapping[str, BackendInfo]) -> Timings:
    """What was measured on this machine; nothing, with a warning that names the file, where it is not to be trusted."""
    path = path_for(hardware)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return NOTHING
    except (OSError, ValueError) as error:
        return _unused(path, f"it cannot be read ({getattr(error, 'strerror', None) or error})")
    try:
        content = json.loads(text)
        if not isinstance(content, dict):
            raise TypeError("it is no JSON object")
        known, here = {name: content[name] for name in _identity(hardware, {})}, _identity(hardware, backends)
        if known != here:
            return _unused(path, _difference(known, here))
        found = {str(name): tuple(map(_timing, entries)) for name, entries in content["measured"].items()}
    except KeyError as error:
        return _unused(path, f"it is not what nibble tune writes (there is no {error})")
    except (TypeError, ValueError, OverflowError, AttributeError, RecursionError) as error:
        return _unused(path, f"it is not what nibble tune writes ({error})")
    return Timings(found)


def save(
    hardware: Hardware, backends: Mapping[str, BackendInfo], found: Mapping[str, tuple[Timing, ...]]
) -> Path:
    """Writes what was found to the device's file, beside what it knows and still holds: of other subjects, and of
    other backends in the same workloads."""
    path = path_for(hardware)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.exclusive_lock(path.parent):
            files.write_atomic(path, json.dumps(_content(hardware, backends, found), indent=1) + "\n")
    except OSError as error:
        raise ConfigError(
            f"the times cannot be kept in {path}: {error.strerror}; name a folder that can be written in ${PLACE}"
        ) from error
    return path


def _content(
    hardware: Hardware, backends: Mapping[str, BackendInfo], found: Mapping[str, tuple[Timing, ...]]
) -> dict[str, Any]:
    subjects = dict(load(hardware, backends).subjects)
    subjects |= {name: _beside(timings, subjects.get(name, ())) for name, timings in found.items()}
    return {
        **_identity(hardware, backends),
        "date": datetime.date.today().isoformat(),
        "measured": {name: [asdict(timing) for timing in subjects[name]] for name in sorted(subjects)},
    }


def _beside(new: tuple[Timing, ...], old: tuple[Timing, ...]) -> tuple[Timing, ...]:
    """New timings, and old ones of others that can be compared with them."""
    keys, works = {timing.key for timing in new}, {work for timing in new for work in timing.ms}
    others = (timing for timing in old if timing.key not in keys)
    return (*new, *(timing for timing in others if not works or timing.failure or timing.ms.keys() == works))


def _unused(path: Path, why: str) -> Timings:
    return Timings(warning=f"times measured on this machine are not used: {path}: {why}; {AGAIN}")


def _identity(hardware: Hardware, backends: Mapping[str, BackendInfo]) -> dict[str, Any]:
    """What times depend on, beside their subject."""
    able = {name: info for name, info in backends.items() if info.runnable}
    return {
        "schema": SCHEMA,
        "device": device(hardware),
        "versions": versions(able.values()),
        "rows": _fingerprint(able),
    }


def _difference(known: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """The first thing that differs, in words."""
    if known["schema"] != here["schema"]:
        return f"it has schema {known['schema']}, and this version reads {here['schema']}"
    if known["device"] != here["device"]:
        return f"it is about {known['device']}, and this machine has {here['device']}"
    then, now = dict(known["versions"]), here["versions"]
    for name in sorted(then.keys() | now.keys()):
        if then.get(name) != now.get(name):
            return f"it was measured with {name} {then.get(name, 'missing')}, and here it is {now.get(name, 'missing')}"
    return "it was measured with other backends than this version's"


def _fingerprint(backends: Mapping[str, BackendInfo]) -> str:
    """This version's rows, those that can run here, without opinions."""
    names = [entry.name for entry in fields(Support) if entry.name not in OPINIONS]
    rows = [
        (name, [[_plain(getattr(row, field)) for field in names] for row in info.support])
        for name, info in sorted(backends.items())
    ]
    return hashlib.sha256(repr((nibble.__version__, names, rows)).encode()).hexdigest()[:16]


def _plain(allowed: frozenset[Any] | None) -> list[str] | None:
    return None if allowed is None else sorted(map(str, allowed))


def _timing(entry: Mapping[str, Any]) -> Timing:
    """One entry of the file; raises where it is none."""
    stage_to, ms = entry["stage_to"], {str(work): float(time) for work, time in entry["ms"].items()}
    if not all(0 < time < math.inf for time in ms.values()):
        raise ValueError(f"{entry['backend']} has times that are none")
    name, packing = str(entry["backend"]), str(entry["packing"])
    return Timing(
        name,
        None if stage_to is None else str(stage_to),
        int(entry["page"]),
        packing,
        ms,
        str(entry["failure"]),
    )

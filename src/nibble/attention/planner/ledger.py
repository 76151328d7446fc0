"""The ledger: which combinations passed on which GPU. Written by the conformance run, read by the docs.

Owns Entry and the file's schema. Must not know of rows or backends beyond their names.

    {"schema": 1, "entries": [
      {"backend": NAME, "phase": "decode", "kind": "mha", "format": NAME, "arch": 90,
       "gpu": "NVIDIA H200", "date": "2026-11-20", "versions": {"torch": "2.11.0", "CUDA": "13.0", "triton": "3.6.0"}}]}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import nibble
from nibble import files
from nibble.errors import ConfigError

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """One combination that passed. date: ISO 8601. versions: package -> version of what it rests on; empty in entries
    of old, which did not say."""

    backend: str
    phase: str
    kind: str
    format: str
    arch: int
    gpu: str
    date: str
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, str, str, int]:
        """What a later run of the same combination replaces."""
        return self.backend, self.phase, self.kind, self.format, self.arch

    def __str__(self) -> str:
        """`NVIDIA H200, 2026-11-20 (torch 2.11.0)`."""
        versions = ", ".join(f"{name} {version}" for name, version in sorted(self.versions.items()))
        return f"{self.gpu}, {self.date}" + (f" ({versions})" if versions else "")


def read(path: Path) -> tuple[LedgerEntry, ...]:
    """The entries of a ledger, none where there is no file; raises ConfigError where it cannot be read."""
    if not path.exists():
        return ()
    try:
        content = json.loads(path.read_text())
        if content["schema"] != SCHEMA:
            raise ConfigError(f"{path} has schema {content['schema']}, and this version reads {SCHEMA}")
        return tuple(map(_entry, content["entries"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"cannot read the ledger {path}: {type(error).__name__}: {error}") from error


def _entry(found: Mapping[str, Any]) -> LedgerEntry:
    values = {entry.name: found[entry.name] for entry in fields(LedgerEntry) if entry.name != "versions"}
    return LedgerEntry(**values, versions=dict(found.get("versions") or {}))


def update(path: Path, confirmed: Iterable[LedgerEntry], disproved: Iterable[LedgerEntry] = ()) -> None:
    """Adds what was confirmed, in place of older entries of the same combination, and takes out what was disproved.
    What other runs add meanwhile stays."""
    wrong = {entry.key for entry in disproved}
    with files.exclusive_lock(path.parent):
        known = {entry.key: entry for entry in (*read(path), *confirmed)}
        content = {
            "schema": SCHEMA,
            "entries": [asdict(known[key]) for key in sorted(known) if key not in wrong],
        }
        files.write_atomic(path, json.dumps(content, indent=1) + "\n")


def shipped() -> Path:
    """The ledger that came with this installation: in the package, or beside it in a checkout."""
    package = Path(nibble.__file__).parent
    inside = package / "_ledger.json"
    return inside if inside.exists() else package.parents[1] / "docs" / "ledger.json"

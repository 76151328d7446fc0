"""The fingerprint of a checkpoint: what tells its config and weights from others, without reading all of them.

The hub's cache names files by the SHA-256 of their contents, which is taken as it is. Of other files of weights the
size, the header and SAMPLES pieces, spread evenly, are read: a model that was trained further, merged, or quantised has
another fingerprint, and a copy has the same. What changes a few single numbers may go unnoticed.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from nibble.models.hub import MODELOPT_FILE

CONFIG_FILES = ("config.json", MODELOPT_FILE)
WEIGHTS = "*.safetensors"
SAMPLES, SAMPLE = 64, 4096
"""Pieces that are read of a file of weights, and their bytes."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


def fingerprint(folder: Path) -> str:
    """Return 16 hex digits of the checkpoint in a folder; raise OSError where it cannot be read."""
    digest = hashlib.sha256()
    for name in CONFIG_FILES:
        if (path := folder / name).is_file():
            _add(digest, name, path.read_bytes())
    for path in sorted(folder.glob(WEIGHTS)):
        _add(digest, path.name, _content(path))
    return digest.hexdigest()[:16]


def _add(digest: hashlib._Hash, name: str, content: bytes) -> None:
    # With the length, so that no two lists of files give the same bytes.
    digest.update(f"{name} {len(content)}\n".encode())
    digest.update(content)


def _content(path: Path) -> bytes:
    """Return what tells a file of weights from others."""
    blob = path.resolve().name
    return blob.encode() if _SHA256.fullmatch(blob) else _samples(path)


def _samples(path: Path) -> bytes:
    """Return the size of a file, its header, and pieces of the rest."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = file.read(8)
        # A header says how long it is; a file that is none is sampled all the same.
        parts = [str(size).encode(), length, file.read(min(int.from_bytes(length, "little"), size))]
        start = file.tell()
        room = max(size - start - SAMPLE, 0)
        for i in range(SAMPLES):
            file.seek(start + room * i // (SAMPLES - 1))
            parts.append(file.read(SAMPLE))
    return b"".join(parts)

"""Files that several runs read, merge and write: one after the other, and whole or not at all.

Owns alone() and write(). Must not know what is in a file.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Within, nobody else who asks for it works in a folder. Where the file system knows no locks, nobody waits."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def write(path: Path, text: str) -> None:
    """Puts a file in the place of an older one at once: nobody reads half of it, and a run that dies leaves that."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise

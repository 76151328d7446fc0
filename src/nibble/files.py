"""Files that runs write: checked before long work, one run after the other, and whole or not at all."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nibble.errors import ConfigError


def check_writable(path: str | Path, what: str = "the result", size: int = 1) -> Path:
    """Return `path`, where a file can be written now; call it before the work whose result is kept there.

    Args:
        path: of the file.
        what: is to be written, for the message.
        size: of the file, in bytes.

    Raises:
        ConfigError: the file cannot be written there.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        raise ConfigError(f"cannot write {what} to {path}: it is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(
            f"cannot write {what} to {path}: there is no folder {path.parent}; create it, or name another file"
        )
    if _is_device(path):
        return path
    # Permissions alone tell too little: root has all of them, and a file system may be full or read-only.
    probe = _temporary(path)
    try:
        probe.write_bytes(bytes(size))
    except OSError as error:
        raise ConfigError(f"cannot write {what} to {path} ({error.strerror}); name another file") from error
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    return path


@contextmanager
def exclusive_lock(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder. Where the file system knows no locks, nobody waits."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace a file at once: nobody reads half of it, and a run that dies leaves the older one."""
    data = content.encode() if isinstance(content, str) else content
    if _is_device(path):
        path.write_bytes(data)
        return
    temporary = _temporary(path)
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _temporary(path: Path) -> Path:
    """Return the name of a file in the same folder, so that replacing `path` by it is one operation."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def _is_device(path: Path) -> bool:
    """Return whether the path is something to write into, as /dev/stdout is, and not a file to be replaced."""
    return path.exists() and not path.is_file()

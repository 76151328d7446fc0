"""Files that runs write: checked before long work, one run after the other, and whole or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterable, Iterator
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


def write_new(path: Path, content: str) -> bool:
    """Write a file at once, unless there is one; return whether there was none."""
    temporary = _temporary(path)
    try:
        temporary.write_text(content, encoding="utf-8")
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        if path.exists():
            return False
        write_atomic(path, content)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def remove_unused(entries: Iterable[Path], limit: int, keep_s: float) -> int:
    """Delete what was not used for the longest time, as far as all of it takes more than a limit.

    What another process deletes meanwhile, or this one may not delete, is no error.

    Args:
        entries: files, and folders that are deleted whole.
        limit: of their bytes.
        keep_s: what was used within so many seconds stays, as somebody may be about to read it.

    Returns:
        The bytes that are left.
    """
    facts = [_usage(entry) for entry in entries]
    total, now = sum(size for _, size, _ in facts), time.time()
    for used, size, entry in sorted(facts):
        if total <= limit or now - used < keep_s:
            break
        if entry.is_dir():
            # Renamed first: nobody finds half of a folder.
            doomed = entry.with_name(f".{entry.name}.{os.getpid()}")
            with suppress(OSError):
                entry.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)
        else:
            with suppress(OSError):
                entry.unlink()
        total -= 0 if entry.exists() else size
    return total


def _usage(entry: Path) -> tuple[float, int, Path]:
    """Return when an entry was used last, its bytes, and itself."""
    used, size = 0.0, 0
    for path in (entry, *entry.rglob("*")) if entry.is_dir() else (entry,):
        with suppress(OSError):
            facts = path.lstat()
            # A folder is read by everyone who looks for something.
            used = max(used, facts.st_mtime, 0.0 if path.is_dir() else facts.st_atime)
            size += facts.st_size
    return used, size, entry


def _temporary(path: Path) -> Path:
    """Return the name of a file in the same folder, so that replacing `path` by it is one operation."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def _is_device(path: Path) -> bool:
    """Return whether the path is something to write into, as /dev/stdout is, and not a file to be replaced."""
    return path.exists() and not path.is_file()

"""Python's bytecode, kept in the cache folder where an installation keeps none.

Python compiles the source of a module at its first import, and leaves bytecode beside it for the next ones. Where it
may not, as with $PYTHONDONTWRITEBYTECODE of many container images or in folders that cannot be written, each process
compiles torch and Transformers anew: more than 2000 modules, two thirds of the time of their imports. Where the folder
is new, other processes compile beside this one: a core compiles what a start imports in some six seconds.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from importlib.util import MAGIC_NUMBER, cache_from_source, find_spec
from pathlib import Path
from threading import Lock

from nibble.hardware import cache_folder
from nibble.threads import usable_cpus

FOLDER = "bytecode"
LARGE = ("torch", "transformers")
"""The packages that tell whether there is bytecode."""
PREFIX_VARIABLE = "PYTHONPYCACHEPREFIX"
COMPILED_AHEAD = ("torch", "sympy", "mpmath", "networkx", "transformers")
"""Packages of most modules that a start imports, in the order in which it needs them."""
LEFT_OUT = ("testing", "test", "tests", "models")
"""Folders in them of which it imports next to nothing."""
FEWEST_CPUS, MOST_PROCESSES = 4, 8
"""With fewer CPUs other processes would hold up this one."""
_HEADER = 16
"""Bytes of a file of bytecode that say what it was made of: a magic number, flags, the source's time and size."""


@dataclass
class _Users:
    """Who imports by the cache folder now, and how Python was set before the first of them."""

    lock: Lock = field(default_factory=Lock)
    count: int = 0
    before: tuple[str | None, bool, str | None] | None = None
    """None: another folder serves."""
    compiler: subprocess.Popen[bytes] | None = None
    """What compiles beside them."""

    def add(self) -> None:
        with self.lock:
            self.count += 1
            if self.count == 1 and (folder := _folder_needed()):
                self.before = sys.pycache_prefix, sys.dont_write_bytecode, os.environ.get(PREFIX_VARIABLE)
                sys.pycache_prefix, sys.dont_write_bytecode = folder, False
                os.environ[PREFIX_VARIABLE] = folder
                self.compiler = _compile_ahead(folder)

    def remove(self) -> None:
        with self.lock:
            self.count -= 1
            if self.count or self.before is None:
                return
            _stop(self.compiler)
            self.compiler = None
            sys.pycache_prefix, sys.dont_write_bytecode, variable = self.before
            self.before = None
            if variable is None:
                os.environ.pop(PREFIX_VARIABLE, None)
            else:
                os.environ[PREFIX_VARIABLE] = variable


_users = _Users()


@contextmanager
def keep_bytecode() -> Iterator[None]:
    """Import in the body by bytecode of the cache folder, and leave it there, where it is not beside the source.

    Processes that start meanwhile read it too. A folder that the user has chosen stays, and one that cannot be written
    costs time, nothing else.
    """
    _users.add()
    try:
        yield
    finally:
        _users.remove()


def _folder_needed() -> str | None:
    """Return the folder to keep bytecode in; None where another one serves."""
    specs = [spec for spec in map(find_spec, LARGE) if spec and spec.origin]
    if sys.pycache_prefix is None and all(_leaves_bytecode(spec) or _has_bytecode(spec) for spec in specs):
        return None
    try:
        folder = str(_folder(specs))
    except RuntimeError:  # there is no home folder
        return None
    # A prefix may be this very folder: that of the process that started this one.
    return folder if sys.pycache_prefix in (None, folder) else None


def _compile_ahead(folder: str) -> subprocess.Popen[bytes] | None:
    """Begin to compile large packages in other processes where the folder is new; what fails costs time, nothing else.

    This process takes what is there, and compiles what it imports before. Files are written whole by both.
    """
    nowhere = subprocess.DEVNULL
    with suppress(OSError, RuntimeError, ValueError):
        processes = min(usable_cpus() - 1, MOST_PROCESSES)
        places = [place for name in COMPILED_AHEAD for place in _places(name)]
        if processes < FEWEST_CPUS - 1 or not places or not sys.executable:
            return None
        Path(folder).mkdir(parents=True)  # which one process does
        options = ["-P", "-S", *["-O"] * sys.flags.optimize]
        arguments = ["-q", "-j", str(processes), "-x", _left_out(places), *places]
        return subprocess.Popen(
            [sys.executable, *options, "-m", "compileall", *arguments],
            env={**os.environ, PREFIX_VARIABLE: folder}, stdin=nowhere, stdout=nowhere, stderr=nowhere,
            start_new_session=True,
        )  # fmt: skip
    return None


def _left_out(places: Iterable[str]) -> str:
    """Return an expression for files in LEFT_OUT of packages, wherever these lie."""
    packages, folders = ("|".join(map(re.escape, names)) for names in (places, LEFT_OUT))
    return rf"^({packages})([/\\].*)?[/\\]({folders})[/\\]"


def _stop(compiler: subprocess.Popen[bytes] | None) -> None:
    """End what still compiles, with the processes that it has started."""
    if compiler is not None and compiler.poll() is None:
        with suppress(OSError, AttributeError):  # it has ended; not all systems have groups of processes
            os.killpg(compiler.pid, signal.SIGTERM)
        compiler.wait()


def _places(package: str) -> list[str]:
    """Return the folders of a package; none where it is not installed, or is one file."""
    spec = find_spec(package)
    return list(spec.submodule_search_locations or ()) if spec else []


def _folder(specs: list[ModuleSpec]) -> Path:
    """Return the folder for what is installed beside these packages, and for Nibble's own source.

    Python compares a source's time and size, and images may give all files the same time.
    """
    places = {Path(spec.origin or "").parents[1] for spec in specs}
    digest = hashlib.sha256(
        repr(sorted(path.name for place in places for path in place.glob("*.dist-info"))).encode()
    )
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return cache_folder().absolute() / FOLDER / digest.hexdigest()[:16]


def _leaves_bytecode(spec: ModuleSpec) -> bool:
    """Return whether Python leaves a module's bytecode beside its source."""
    return not sys.dont_write_bytecode and os.access(Path(spec.origin or "").parent, os.W_OK)


def _has_bytecode(spec: ModuleSpec) -> bool:
    """Return whether bytecode is beside a module's source that is its own."""
    assert spec.origin is not None
    try:
        # Not spec.cached, which is where a module was imported from, or would be by a prefix.
        header, source = Path(cache_from_source(spec.origin)).read_bytes()[:_HEADER], Path(spec.origin).stat()
    except OSError:
        return False
    number, flags, *facts = (header[i : i + 4] for i in range(0, _HEADER, 4))
    if any(flags):
        # Made of a digest of the source, or not to be compared.
        return number == MAGIC_NUMBER
    expected = (int(source.st_mtime), source.st_size)
    return number == MAGIC_NUMBER and facts == [(n & 0xFFFFFFFF).to_bytes(4, "little") for n in expected]

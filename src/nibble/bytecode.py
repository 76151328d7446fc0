"""Python's bytecode, kept in the cache folder where an installation keeps none.

Python compiles the source of a module at its first import, and leaves bytecode beside it for the next ones. Where it
may not, as with $PYTHONDONTWRITEBYTECODE of many container images or in folders that cannot be written, each process
compiles torch and Transformers anew: more than 2000 modules, two thirds of the time of their imports.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import MAGIC_NUMBER, find_spec
from pathlib import Path

from nibble.hardware import cache_folder

FOLDER = "bytecode"
LARGE = "torch"
"""The package that tells whether there is bytecode."""
PREFIX_VARIABLE = "PYTHONPYCACHEPREFIX"
_HEADER = 16
"""Bytes of a file of bytecode that say what it was made of: a magic number, flags, the source's time and size."""


@contextmanager
def keep_bytecode() -> Iterator[None]:
    """Import in the body by bytecode of the cache folder, and leave it there, where it is not beside the source.

    Processes that start meanwhile read it too. A folder that the user has chosen stays, and one that cannot be written
    costs time, nothing else.
    """
    folder = _folder_needed()
    if folder is None:
        yield
        return
    own = sys.pycache_prefix, sys.dont_write_bytecode, os.environ.get(PREFIX_VARIABLE)
    sys.pycache_prefix, sys.dont_write_bytecode, os.environ[PREFIX_VARIABLE] = folder, False, folder
    try:
        yield
    finally:
        sys.pycache_prefix, sys.dont_write_bytecode, variable = own
        if variable is None:
            os.environ.pop(PREFIX_VARIABLE, None)
        else:
            os.environ[PREFIX_VARIABLE] = variable


def _folder_needed() -> str | None:
    """Return the folder to keep bytecode in; None where another one serves."""
    spec = find_spec(LARGE)
    if spec is None or spec.origin is None:
        return None
    is_left = not sys.dont_write_bytecode and os.access(Path(spec.origin).parent, os.W_OK)
    if sys.pycache_prefix is None and (is_left or _has_bytecode(spec)):
        return None
    try:
        folder = str(_folder(Path(spec.origin)))
    except RuntimeError:  # there is no home folder
        return None
    # A prefix may be this very folder: that of the process that started this one.
    return folder if sys.pycache_prefix in (None, folder) else None


def _folder(source: Path) -> Path:
    """Return the folder for what is installed beside the package of this source.

    Python compares a source's time and size, and images may give all files the same time.
    """
    packages = sorted(path.name for path in source.parents[1].glob("*.dist-info"))
    digest = hashlib.sha256(repr(packages).encode()).hexdigest()[:16]
    return cache_folder().absolute() / FOLDER / digest


def _has_bytecode(spec: ModuleSpec) -> bool:
    """Return whether bytecode is beside a module's source that is its own."""
    assert spec.origin is not None
    try:
        header, source = Path(spec.cached or "").read_bytes()[:_HEADER], Path(spec.origin).stat()
    except OSError:
        return False
    number, flags, *facts = (header[i : i + 4] for i in range(0, _HEADER, 4))
    if any(flags):
        # Made of a digest of the source, or not to be compared.
        return number == MAGIC_NUMBER
    expected = (int(source.st_mtime), source.st_size)
    return number == MAGIC_NUMBER and facts == [(n & 0xFFFFFFFF).to_bytes(4, "little") for n in expected]

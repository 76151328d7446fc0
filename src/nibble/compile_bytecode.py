"""Compiles a share of the modules of some packages to bytecode. A script, which bytecode.py runs some times at once.

Arguments: the folder for bytecode, the number of this share and of all, Python's level of optimisation, and folders of
packages. Modules that a start does not import for the most part are left out.
"""

from __future__ import annotations

import os
import py_compile
import sys
from importlib.util import cache_from_source
from pathlib import Path

LEFT_OUT = frozenset({"__pycache__", "_internal", "benchmarks", "models", "tests"})
"""Names of folders."""


def sources(folder: str) -> list[str]:
    """Return the modules of a package but its first, which its importer is at already."""
    paths = []
    for place, below, names in os.walk(folder):
        below[:] = sorted(set(below) - LEFT_OUT)
        paths += [f"{place}{os.sep}{name}" for name in sorted(names) if name.endswith(".py")]
    return [path for path in paths if path != f"{folder}{os.sep}__init__.py"]


def main() -> None:
    """Compile the share; what cannot be compiled or written is left to who imports it."""
    sys.pycache_prefix, share, shares, level, *folders = sys.argv[1:]
    paths = [path for folder in folders for path in sources(folder)]
    for path in paths[int(share) :: int(shares)]:
        try:
            if not Path(cache_from_source(path)).exists():
                mode = py_compile.PycInvalidationMode.TIMESTAMP
                py_compile.compile(path, quiet=2, optimize=int(level), invalidation_mode=mode)
        except (OSError, ValueError):
            continue


if __name__ == "__main__":
    main()

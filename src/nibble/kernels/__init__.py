"""Kernels: a folder for each operation.

In it, __init__.py has the operation's signature and chooses between implementations, naive.py defines it in torch, and
triton.py, gluon_sm90.py and cuda.py with *.cu files are fast. CONTRIBUTING.md says how one is added.
"""

from __future__ import annotations

import functools
import importlib.util

MISSING = "is missing"


def import_problem(package: str) -> str | None:
    """Return why a package, dotted or not, cannot be imported; None where it can.

    To look for a dotted name is to import its parents, which may do anything.
    """
    try:
        present = importlib.util.find_spec(package) is not None
    except ModuleNotFoundError as error:
        missing = error.name and f"{package}.".startswith(f"{error.name}.")
        return MISSING if missing else _broken(error)
    except (Exception, SystemExit) as error:
        return _broken(error)
    return None if present else MISSING


def _broken(error: BaseException) -> str:
    return f"is broken ({type(error).__name__}: {error})"


@functools.cache
def triton_present() -> bool:
    """Return whether the implementations in Triton can be imported here."""
    return import_problem("triton") is None

"""Kernels: one file an operation, with its signature, its docstring and its torch reference.

Twins of the same name and signature are in triton/ (portable) and cuda/ (fast). The file of an operation chooses
between them by the tensors' device. absence() says whether a package that brings kernels is here. Must not know of
pools, plans or requests.
"""

from __future__ import annotations

import functools
import importlib.util

MISSING = "is missing"


def import_problem(package: str) -> str | None:
    """Why a package, dotted or not, is not there to be imported; None where it is. To look for a dotted name is to
    import its parents, which may do anything."""
    try:
        found = importlib.util.find_spec(package) is not None
    except ModuleNotFoundError as error:
        missing = error.name and f"{package}.".startswith(f"{error.name}.")
        return MISSING if missing else _broken(error)
    except (Exception, SystemExit) as error:
        return _broken(error)
    return None if found else MISSING


def _broken(error: BaseException) -> str:
    return f"is broken ({type(error).__name__}: {error})"


@functools.cache
def triton_present() -> bool:
    """Whether the twins in triton/ can be imported here."""
    return import_problem("triton") is None

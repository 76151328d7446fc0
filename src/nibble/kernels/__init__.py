"""Kernels: one file an operation, with its signature, its docstring and its torch reference.

Twins of the same name and signature are in triton/ (portable) and cuda/ (fast). The file of an operation chooses
between them by the tensors' device. Must not know of pools, plans or requests.
"""

from __future__ import annotations

import functools
import importlib.util


@functools.cache
def triton_present() -> bool:
    """Whether the twins in triton/ can be imported here."""
    return importlib.util.find_spec("triton") is not None

"""The attention backends, one file each. EXTENSION POINT: a file here, or `register()` outside, adds one.

A file holds `BACKEND`, a BackendInfo: its facts as rows, and the name of its adapter. Importing a file imports neither
torch nor the backend's package: adapters/ does, when `create()` constructs one.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nibble.attention.planner.support import BackendInfo
from nibble.errors import BackendError, ConfigError, unknown
from nibble.kernels import import_problem

__all__ = [
    "all_backends",
    "available_backends",
    "create",
    "get",
    "missing_requirement",
    "register",
    "unregister",
]

_registry: dict[str, BackendInfo] = {}


def register(info: BackendInfo) -> BackendInfo:
    """Adds a backend under its name; a different one of the same name is a ConfigError."""
    if _registry.setdefault(info.name, info) != info:
        raise ConfigError(f"an attention backend called {info.name!r} is registered already")
    return info


def unregister(name: str) -> None:
    """Takes a backend out again, for tests and for reloading an extension."""
    del _registry[name]


def get(name: str) -> BackendInfo:
    """The backend called `name`; raises ConfigError with the nearest known name."""
    if name not in _registry:
        raise ConfigError(unknown("attention backend", name, _registry))
    return _registry[name]


def create(info: BackendInfo) -> Any:
    """Construct a backend's adapter (attention/layer.py, AttentionBackend), which imports its package.

    Raises:
        BackendError: the package cannot be imported, or is one that the adapter cannot call.
    """
    adapter = info.adapter
    # A name of a class, so that reading a backend's facts imports nothing.
    if isinstance(adapter, str):
        module, _, name = adapter.partition(":")
        adapter = getattr(importlib.import_module(module), name)
    if adapter is None:
        raise BackendError(
            f"backend {info.name} has no adapter here: {info.missing or 'its facts are only declared'}"
        )
    return adapter()


def all_backends() -> Mapping[str, BackendInfo]:
    """Every backend by name, those whose facts are only declared included."""
    return dict(sorted(_registry.items()))


def missing_requirement(info: BackendInfo) -> str | None:
    """What the backend needs and this machine lacks, with the cure; None where it can run."""
    problems = [import_problem(package) for package in info.packages]
    # Several packages may bring the same kernels, and one is enough.
    if problems and all(problems):
        why = " or ".join(dict.fromkeys(filter(None, problems)))
        return f"the package {' or '.join(info.packages)}, which {why}: {info.install}"
    reason = info.unavailable_reason() if info.unavailable_reason else None
    return f"{reason}: {info.install}" if reason else None


def available_backends() -> Mapping[str, BackendInfo]:
    """Every backend; in place of the adapters of those that cannot run here, what they lack.

    What an engine resolves with, so that `auto` does not choose what cannot start on this machine.
    """
    infos = {
        name: (info, missing_requirement(info) if info.runnable else None)
        for name, info in all_backends().items()
    }
    return {
        name: replace(info, adapter=None, missing=missing) if missing else info
        for name, (info, missing) in infos.items()
    }


def _discover() -> None:
    """Registers the BACKEND of every module in this package that has one."""
    for entry in pkgutil.iter_modules(__path__):
        info = getattr(importlib.import_module(f"{__name__}.{entry.name}"), "BACKEND", None)
        if info is not None:
            register(info)


_discover()

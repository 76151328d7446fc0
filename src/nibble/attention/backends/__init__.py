"""The attention backends, a file a package. EXTENSION POINT: a file here, or `register()` outside, adds one.

A file holds `BACKEND`, a BackendInfo, or several as `BACKENDS`: a backend's facts as rows, and the name of its adapter.
Importing a file imports neither torch nor the backend's package: adapters/ does, when `create()` constructs one.
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

_registry: dict[str, BackendInfo] = {}


def register(info: BackendInfo) -> BackendInfo:
    """Add a backend under its name; a different one of the same name is a ConfigError."""
    if _registry.setdefault(info.name, info) != info:
        raise ConfigError(f"an attention backend called {info.name!r} is registered already")
    return info


def unregister(name: str) -> None:
    """Remove a backend, for tests and for reloading an extension."""
    del _registry[name]


def get(name: str) -> BackendInfo:
    """Return the backend called `name`; raise ConfigError with the nearest known name."""
    if name not in _registry:
        raise ConfigError(unknown("attention backend", name, _registry))
    return _registry[name]


def create(info: BackendInfo) -> Any:
    """Construct a backend's adapter (attention/step.py, AttentionBackend), which imports its package.

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
    """Return every backend by name, those whose facts are only declared included."""
    return dict(sorted(_registry.items()))


def missing_requirement(info: BackendInfo) -> str | None:
    """Return what the backend needs and this machine lacks, with the cure; None where it can run."""
    problems = [import_problem(package) for package in info.packages]
    # Several packages may bring the same kernels, and one is enough.
    if problems and all(problems):
        why = " or ".join(dict.fromkeys(filter(None, problems)))
        return f"the package {' or '.join(info.packages)}, which {why}: {info.install}"
    reason = info.unavailable_reason() if info.unavailable_reason else None
    return f"{reason}: {info.install}" if reason else None


def available_backends() -> Mapping[str, BackendInfo]:
    """Return every backend; those that cannot run here have what they lack in place of an adapter.

    An engine resolves with these, so that `auto` does not choose what cannot start on this machine.
    """
    result = dict(all_backends())
    for name, info in all_backends().items():
        missing = missing_requirement(info) if info.runnable else None
        if missing:
            result[name] = replace(info, adapter=None, missing=missing)
    return result


def _discover() -> None:
    """Register the BACKEND or the BACKENDS of every module in this package."""
    for entry in pkgutil.iter_modules(__path__):
        if entry.name == "adapters":  # which imports torch
            continue
        module = importlib.import_module(f"{__name__}.{entry.name}")
        if hasattr(module, "BACKEND"):
            register(module.BACKEND)
        for info in getattr(module, "BACKENDS", ()):
            register(info)


_discover()

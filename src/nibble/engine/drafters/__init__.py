"""Drafters: who guesses the tokens that a step verifies. EXTENSION POINT: a file here, or `register()` outside.

A file holds `DRAFTER`, a DrafterInfo: facts, and the name of a class. Importing it imports neither torch nor a model.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from nibble.engine.drafters.base import Drafter, DrafterInfo
from nibble.errors import ConfigError, unknown

__all__ = ["Drafter", "DrafterInfo", "create", "get", "names", "register", "unregister"]

_registry: dict[str, DrafterInfo] = {}


def register(info: DrafterInfo) -> DrafterInfo:
    """Add a drafter under its name; a different one of the same name is a ConfigError."""
    if _registry.setdefault(info.name, info) != info:
        raise ConfigError(f"a drafter called {info.name!r} is registered already")
    return info


def unregister(name: str) -> None:
    """Remove a drafter, for tests and for reloading an extension."""
    del _registry[name]


def get(name: str) -> DrafterInfo:
    """Return the drafter called `name`; raise ConfigError with the nearest known name."""
    if name not in _registry:
        raise ConfigError(unknown("drafter", name, names()))
    return _registry[name]


def names() -> tuple[str, ...]:
    """Return the names of all drafters."""
    return tuple(sorted(_registry))


def create(info: DrafterInfo, *arguments: Any) -> Drafter:
    """Construct a drafter."""
    kind = info.drafter
    # A name of a class, so that reading a drafter's facts imports nothing.
    if isinstance(kind, str):
        module, _, name = kind.partition(":")
        kind = getattr(importlib.import_module(module), name)
    drafter: Drafter = kind(*arguments)
    return drafter


def _discover() -> None:
    """Register the DRAFTER of every module in this package that has one."""
    for entry in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{entry.name}")
        if hasattr(module, "DRAFTER"):
            register(module.DRAFTER)


_discover()

"""The formats: one file each. EXTENSION POINT: a new file here, or `register()` from outside, adds one."""

from __future__ import annotations

import importlib
import pkgutil

from nibble.errors import ConfigError, unknown
from nibble.formats.base import KVFormat, Plane
from nibble.model_spec import Stream

__all__ = ["KVFormat", "Plane", "get", "names", "plain", "register", "unregister"]

_registry: dict[str, KVFormat] = {}


def register(fmt: KVFormat) -> KVFormat:
    """Add a format under its name and return it; a second one of the same name is a ConfigError."""
    # An equal type is no error: a module that is imported again registers its formats again.
    if fmt.name in _registry and type(_registry[fmt.name]) is not type(fmt):
        raise ConfigError(f"a format called {fmt.name!r} is registered already")
    return _registry.setdefault(fmt.name, fmt)


def unregister(name: str) -> None:
    """Remove a format, for tests and for reloading an extension."""
    del _registry[name]


def get(name: str) -> KVFormat:
    """Return the format called `name`, or raise ConfigError with the nearest known name."""
    if name not in _registry:
        raise ConfigError(unknown("KV format", name, names()))
    return _registry[name]


def plain(dtype: str) -> KVFormat:
    """Return the unquantised format of a compute dtype: `float32`, `bfloat16` or `float16`."""
    return next(fmt for fmt in _registry.values() if fmt.plain == dtype)


def names() -> tuple[str, ...]:
    """Return the names of all registered formats, from most to fewest bytes."""
    return tuple(_registry)


def _discover() -> None:
    """Register the FORMATS of every module in this package that has them."""
    modules = (
        importlib.import_module(f"{__name__}.{entry.name}") for entry in pkgutil.iter_modules(__path__)
    )
    discovered = [fmt for module in modules for fmt in getattr(module, "FORMATS", ())]
    # A sample, because bytes depend on the stream; the order is the same for all usual heads.
    sample = Stream("k", heads=1, dim=128)
    for fmt in sorted(discovered, key=lambda fmt: (-fmt.bytes_per_token(sample), fmt.name)):
        register(fmt)


_discover()

"""Nibble on a Ray cluster: an application for Ray Serve, and a request router. Needs the extra `ray`.

`nibble.ray:build_app` is what a Serve config imports. Nothing of Ray is imported before it is asked for.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KVRouter", "build_app"]
_HOMES = {"build_app": "nibble.ray.app", "KVRouter": "nibble.ray.router"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        from nibble.errors import ConfigError

        raise ConfigError("nibble.ray needs Ray Serve: pip install 'nibble-llm[ray]'") from None

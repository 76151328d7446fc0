"""Nibble: an LLM serving engine whose KV cache is kept in 4 and 8 bits.

The public names are loaded when first used, so that `import nibble` and the command line stay quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nibble.config import Config, SamplingParams
    from nibble.engine.llm import LLM
    from nibble.engine.request import Completion, Output
    from nibble.errors import (
        BackendError,
        CapacityError,
        ConfigError,
        NibbleError,
        OutOfPages,
        PromptTooLong,
        RequestError,
        ScaleError,
        Unsupported,
        WeightError,
    )

__version__ = "0.1.0"

_HOME = {
    "LLM": "nibble.engine.llm",
    "Completion": "nibble.engine.request",
    "Output": "nibble.engine.request",
    "Config": "nibble.config",
    "SamplingParams": "nibble.config",
}
"""Where public names are defined, but for those of nibble.errors."""

__all__ = [
    "LLM",
    "BackendError",
    "CapacityError",
    "Completion",
    "Config",
    "ConfigError",
    "NibbleError",
    "OutOfPages",
    "Output",
    "PromptTooLong",
    "RequestError",
    "SamplingParams",
    "ScaleError",
    "Unsupported",
    "WeightError",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'nibble' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME.get(name, "nibble.errors")), name)

"""Nibble: an LLM serving engine whose KV cache is kept in 4 and 8 bits.

The public names are loaded when first used, so that `import nibble` and the command line stay quick.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nibble.config import Config, SamplingParams
    from nibble.engine.async_llm import AsyncLLM
    from nibble.engine.llm import LLM
    from nibble.engine.prompts import TextPrompt, TokensPrompt
    from nibble.engine.request import Completion, Delta, Output
    from nibble.engine.scoring import Score
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
    "AsyncLLM": "nibble.engine.async_llm",
    "Completion": "nibble.engine.request",
    "Delta": "nibble.engine.request",
    "Output": "nibble.engine.request",
    "Score": "nibble.engine.scoring",
    "TextPrompt": "nibble.engine.prompts",
    "TokensPrompt": "nibble.engine.prompts",
    "Config": "nibble.config",
    "SamplingParams": "nibble.config",
}
"""Where public names are defined, but for those of nibble.errors."""

__all__ = [
    "LLM",
    "AsyncLLM",
    "BackendError",
    "CapacityError",
    "Completion",
    "Config",
    "ConfigError",
    "Delta",
    "NibbleError",
    "OutOfPages",
    "Output",
    "PromptTooLong",
    "RequestError",
    "SamplingParams",
    "ScaleError",
    "Score",
    "TextPrompt",
    "TokensPrompt",
    "Unsupported",
    "WeightError",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


if not TYPE_CHECKING:  # or every misspelt name would have a type

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module 'nibble' has no attribute {name!r}")
        import contextlib
        import importlib
        import sys

        home = _HOME.get(name, "nibble.errors")
        with contextlib.ExitStack() as quickly:
            # What is loaded already makes nothing. It is imported all the same: another thread may be at it.
            if home not in sys.modules:
                from nibble.bytecode import keep_bytecode
                from nibble.garbage import pause_gc

                quickly.enter_context(keep_bytecode())
                quickly.enter_context(pause_gc())
            return getattr(importlib.import_module(home), name)

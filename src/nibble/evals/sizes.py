"""How much is measured: the options of an evaluation, and the schemes it compares.

A field's doc is its command-line help, as in config.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from nibble.config import Config, default_of
from nibble.errors import ConfigError

RECALL_LENGTHS = (1024, 2048, 4096, 8192)
LAYERS_MARK = "@"
YARDSTICK = next(str(default_of(option)) for option in fields(Config) if option.name == "kv_format")
"""What quality is compared with, unless another scheme is asked for: what Config takes by default."""


def _option(default: Any, doc: str) -> Any:
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What to measure, and on how much. Everything that is drawn follows from `seed`."""

    tokens: int = _option(8192, "Tokens of the text that are scored.")
    window: int | None = _option(
        None, "Tokens of a window; the model's context, or as much as 1 GiB of logits."
    )
    stride: int | None = _option(
        None, "Tokens scored in each window after the first; window - 1, if left out."
    )
    recall_cases: int = _option(8, "Recall questions at each context length; 0 for none.")
    recall_lengths: tuple[int, ...] = _option(
        (), "Context lengths of recall; 1024 to 8192 as the model allows."
    )
    attention_tokens: int = _option(
        1024, "Tokens over which the attention error of each layer is taken; 0: none."
    )
    yardstick: str = _option(YARDSTICK, "The scheme that all others are compared with.")
    seed: int = _option(0, "Seed of the recall questions.")

    def __post_init__(self) -> None:
        # Callers may give a list, and a frozen dataclass is to be hashable.
        object.__setattr__(self, "recall_lengths", tuple(self.recall_lengths))
        for name, least in (
            ("tokens", 2),
            ("window", 2),
            ("stride", 1),
            ("recall_cases", 0),
            ("attention_tokens", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, not {value}")
        if self.window and self.stride and self.stride >= self.window:
            raise ConfigError(f"stride {self.stride} must be smaller than the window of {self.window} tokens")

    def lengths(self, max_context: int) -> tuple[int, ...]:
        """Context lengths of recall; one that was asked for and does not fit is a ConfigError."""
        if beyond := [length for length in self.recall_lengths if length > max_context]:
            raise ConfigError(
                f"recall length {beyond[0]} is more than the model's context of {max_context} tokens"
            )
        return self.recall_lengths or tuple(length for length in RECALL_LENGTHS if length <= max_context)


QUICK = Sizes(tokens=2048, recall_cases=4, recall_lengths=(1024,), attention_tokens=256)
"""A first impression, in about an eighth of the time."""


def sizes(quick: bool = False, values: Mapping[str, Any] | None = None) -> Sizes:
    """Return the full or the quick sizes, with `values` in their place; None and empty values do not count."""
    base = QUICK if quick else Sizes()
    # A repeatable option that was left out is an empty list, not None.
    return replace(
        base, **{name: value for name, value in (values or {}).items() if value not in (None, (), [])}
    )


@dataclass(frozen=True, slots=True)
class Entry:
    """One scheme to measure, written as SCHEME or SCHEME@LAYERS: `nvfp4+rot`, `nvfp4@0,-1=fp8_e4m3`."""

    kv_format: str
    kv_layers: str = ""

    @classmethod
    def parse(cls, text: str) -> Entry:
        """An entry from its name; the layers follow --kv-layers."""
        scheme, mark, layers = text.partition(LAYERS_MARK)
        if not scheme.strip() or (mark and not layers.strip()):
            raise ConfigError(
                f"cannot read {text!r} as a scheme; write it as nvfp4 or nvfp4{LAYERS_MARK}0,-1=fp8_e4m3"
            )
        return cls(scheme.strip(), layers.strip())

    @property
    def name(self) -> str:
        """Return the entry as it is written on the command line."""
        return f"{self.kv_format}{LAYERS_MARK}{self.kv_layers}" if self.kv_layers else self.kv_format


COMBINATIONS = ("nvfp4+rot", "nvfp4+kmean+rot", "nvfp4@0,-1=fp8_e4m3")
"""Remedies for what naive 4-bit loses, measured unless schemes are named: they cost no bytes, or few."""


def parse(names: Iterable[str]) -> tuple[Entry, ...]:
    """Entries by name, each once, in the order given."""
    return tuple(dict.fromkeys(map(Entry.parse, names)))

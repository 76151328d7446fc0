"""What `nibble tune-precision` is to do, and what came of it. No torch: the command line reads the options."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nibble.attention.planner.window_memory import LONG_REQUEST
from nibble.config import option
from nibble.errors import ConfigError
from nibble.evals.report import SchemeResult

_BITS = re.compile(r"^(\d+(?:\.\d+)?)\s*(?:bits?)?$", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What is searched for, and on how much text. Raises ConfigError where a value is malformed."""

    budget: str | None = option(
        None,
        "Most bits of a cached value, the mean over all layers' streams with their scales and the exact window, as "
        "5.0bits.",
    )
    max_kl: float | None = option(
        None, "In place of a budget: the smallest cache whose predicted KL is at most this, in nats a token."
    )
    candidates: str | None = option(
        None,
        "Formats to try for each stream, between commas; left out: BF16, FP8, NVFP4 and their records for MLA.",
    )
    tokens: int = option(4096, "Tokens that candidates are measured on, from the end of the text.")
    window: int = option(2048, "Tokens that the model computes together, while candidates are measured.")
    verify_tokens: int = option(
        8192,
        "Tokens that the chosen scheme is measured on as a whole, from the beginning of the text; 0: none.",
    )
    context: int = option(
        LONG_REQUEST,
        "Tokens of a request, over which the bytes of its exact window are spread; no more than the model's context.",
    )
    compare: tuple[str, ...] = option(
        (), "Another scheme that is measured beside the chosen one; may be repeated."
    )

    def __post_init__(self) -> None:
        if (self.budget is None) == (self.max_kl is None):
            raise ConfigError(
                "say either how large the cache may be, with --budget 5.0bits, or --max-kl 0.01"
            )
        if self.max_kl is not None and not self.max_kl > 0:
            raise ConfigError(f"max_kl must be above 0, not {self.max_kl}")
        _ = self.bits
        for name, least in (("tokens", 64), ("window", 32), ("verify_tokens", 0), ("context", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, not {getattr(self, name)}")

    @property
    def bits(self) -> float | None:
        """Return the budget in bits a value, None where there is none."""
        if self.budget is None:
            return None
        match = _BITS.match(self.budget.strip())
        if not match:
            raise ConfigError(
                f"cannot read the budget {self.budget!r}; write it as 5.0bits, of each cached value"
            )
        return float(match[1])


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """What is chosen for a layer with pages of its own."""

    layer: int
    scheme: str
    streams: Mapping[str, str]
    """Format by stream."""
    bytes_per_token: int
    kl: Mapping[str, float]
    """By stream: what the choice causes in this layer alone."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A search, and what the chosen scheme came to."""

    model: str
    path: str
    layers: tuple[LayerChoice, ...]
    bits: float
    """Of a value in pages, over the streams whose format is a choice."""
    bytes_per_token: int
    window: int
    """Tokens of the exact window."""
    bytes_with_window: float
    """Of a token of a request of measured["context"] tokens, its exact pages included."""
    predicted_kl: float
    """The sum over layers and streams, by the factor of the window."""
    sensitivity: Mapping[str, Mapping[str, tuple[float, ...]]]
    """KL by stream, candidate and layer, in the order of layers."""
    skipped: Mapping[str, str]
    """Schemes that cannot be served, with the reason."""
    measured: Mapping[str, Any]
    """On how much of what."""
    environment: Mapping[str, str]
    verified: tuple[SchemeResult, ...] = field(default=())
    """The yardstick, the chosen scheme, then what it is compared with; on other text than that of the search."""
    notes: tuple[str, ...] = ()
    windows: tuple[Mapping[str, Any], ...] = ()
    """The exact windows that were tried, as WindowOption has them."""

    @property
    def whole(self) -> SchemeResult | None:
        """Return what was measured of the chosen scheme as a whole."""
        return next((entry for entry in self.verified if entry.name == self.path), None)

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yield the table of layers as text."""
        for entry in self.layers:
            kl = " + ".join(f"{loss:.2e}" for loss in entry.kl.values())
            yield str(entry.layer), entry.scheme, f"{entry.bytes_per_token:,}", kl

    def verified_rows(self) -> Iterator[tuple[str, ...]]:
        """Yield the table of schemes that were measured as a whole, as text."""
        for entry in self.verified:
            size = f"{entry.bytes_per_token:,}", f"{entry.request_bytes / self.measured['context']:,.0f}"
            figures = f"{entry.perplexity:.4f}", f"{entry.kl:.5f}", f"{entry.top1:.2%}"
            yield entry.name, *size, *figures

    def summary(self) -> str:
        """Return the outcome in a line."""
        size = f"{self.bits:.3f} bits a value, {self.bytes_per_token:,} bytes a token"
        if self.window:
            window = f"an exact window of {self.window} tokens"
            size += (
                f", {self.bytes_with_window:,.0f} with {window} in a request of {self.measured['context']:,}"
            )
        line = f"{size}; KL predicted {self.predicted_kl:.5f}"
        return f"{line}, measured {self.whole.kl:.5f} on other text" if self.whole else line

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON has it."""
        return {
            "model": self.model,
            "path": self.path,
            "bits": round(self.bits, 4),
            "bytes_per_token": self.bytes_per_token,
            "kv_window": self.window,
            "bytes_with_window": round(self.bytes_with_window, 2),
            "predicted_kl": self.predicted_kl,
            "layers": [
                {"layer": x.layer, "scheme": x.scheme, "bytes_per_token": x.bytes_per_token, "kl": dict(x.kl)}
                for x in self.layers
            ],
            "sensitivity": {stream: dict(entry) for stream, entry in self.sensitivity.items()},
            "skipped": dict(self.skipped),
            "measured": dict(self.measured),
            "environment": dict(self.environment),
            "verified": [_figures(entry) for entry in self.verified],
            "notes": list(self.notes),
            "windows": [dict(entry) for entry in self.windows],
        }


def _figures(entry: SchemeResult) -> dict[str, Any]:
    return {
        "scheme": entry.name,
        "bytes_per_token": entry.bytes_per_token,
        "request_bytes": entry.request_bytes,
        "exact_window": entry.exact_window,
        "perplexity": entry.perplexity,
        "kl": entry.kl,
        "kl_p99": entry.kl_p99,
        "top1": entry.top1,
    }

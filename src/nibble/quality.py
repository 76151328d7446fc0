"""What a certificate may be asked for, as `--require-quality` says it."""

from __future__ import annotations

import math

from nibble.errors import ConfigError, unknown

QUALITY = {"kl": math.inf, "kl_p99": math.inf, "ppl": math.inf, "top1": 1.0, "recall": 1.0}
"""What a certificate may be asked for -> its largest bound."""
MOST = frozenset({"kl", "kl_p99", "ppl"})
"""Figures whose bound is the most that is allowed; of the others it is the least."""


def parse_quality(text: str) -> dict[str, float]:
    """Return bounds by name, as `kl=0.01,recall=0.97` has them; none for an empty text. Raise ConfigError."""
    items = [item.partition("=") for item in filter(None, map(str.strip, text.split(",")))]
    bounds: dict[str, float] = {}
    for name, _, value in ((name.strip(), equals, value.strip()) for name, equals, value in items):
        if name not in QUALITY:
            raise ConfigError(unknown("figure of require_quality", name, QUALITY))
        if name in bounds:
            raise ConfigError(f"require_quality says {name} twice: {text!r}")
        try:
            bounds[name] = float(value)
        except ValueError:
            raise ConfigError(f"require_quality {name} must be a number, as 0.01, not {value!r}") from None
        # Written this way round, the comparison is false for NaN too.
        if not 0 <= bounds[name] <= QUALITY[name]:
            span = "a share from 0 to 1" if QUALITY[name] == 1 else "0 or more"
            raise ConfigError(f"require_quality {name} is {span}, not {value}")
    return bounds

"""How a start went: what its parts took, and what users should know."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from nibble.engine.certificate import Certificate

log = logging.getLogger("nibble.start")


@dataclass
class StartupReport:
    """How a start went."""

    seconds: dict[str, float] = field(default_factory=dict)
    """What its parts took, by name, in order."""
    notes: list[str] = field(default_factory=list)
    """What users should know."""
    meaning: str = ""
    """What a 4-bit scheme gives here, in a line."""
    kv_scales: str = ""
    """Where KV scales come from, in a line."""
    certificate: Certificate | None = None
    """What this cache was measured to cost in quality, if it was."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure the time of a part, and log its begin (DEBUG) and end."""
        log.debug("begin %s", name, extra={"facts": {"part": name}})
        start = perf_counter()
        yield
        seconds = perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        log.info("start", extra={"facts": {"part": name, "seconds": round(seconds, 2)}})

    @property
    def summary(self) -> str:
        """Return `12.3 s: weights 2.0, compile 9.1, ...`."""
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"{sum(self.seconds.values()):.1f} s: {parts}"

"""Certificates: what a cache was measured to cost in quality, and of which model, layout and scales that is true.

evals/certify.py measures them, certificate_lookup.py finds that of a plan. In a file:

    {"schema": "nibble-certificate-1", "subject": {...}, "figures": {...}, "measured": {...}, "environment": {...}, ...}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nibble.errors import ConfigError
from nibble.quality import MOST

SCHEMA = "nibble-certificate-1"
UNKNOWN_SCALES = "unknown"
"""The version of KV scales that a start is still to measure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What figures are true of: a model with a cache."""

    model: str
    scheme: str
    """As it was written; the layout says what it means."""
    weights: str
    """The fingerprint of config and weights; empty where they are not here."""
    layout: str
    """The fingerprints of what is stored, on the device and on the host."""
    pages: str
    """What the scheme came to, with transforms and encoders, the page size and packing, for people."""
    scales: str
    """The version of the KV scales; empty where none are needed."""
    dtype: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """What else changes answers: options that differ from their defaults, and what was decided of others."""

    @property
    def key(self) -> str:
        """Return 8 hex digits that differ where any item differs."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]

    def differences(self, here: Subject) -> Iterator[str]:
        """Yield what makes this one, of a certificate, another than `here`, whose scales may be unknown yet."""
        # Weights that are not here may be any.
        if self.weights != here.weights or not here.weights:
            fingerprints = f"fingerprint {self.weights}, and here {here.weights or 'unknown'}"
            yield f"it is of other weights or another config.json ({fingerprints})"
        if self.layout != here.layout:
            mine, other = f"{self.scheme}, {self.pages}", f"{here.scheme}, {here.pages}"
            yield f"it is of the layout {self.layout} ({mine}), and here it is {here.layout} ({other})"
        if here.scales not in {self.scales, UNKNOWN_SCALES}:
            versions = f"version {self.scales or 'none'}, and here {here.scales or 'none'}"
            yield f"it is of other KV scales ({versions}; a file of `nibble calibrate` would keep them)"
        if self.dtype != here.dtype:
            yield f"it is of {self.dtype}, and here it is {here.dtype}"
        for name in sorted({*self.options, *here.options}):
            before, now = self.options.get(name), here.options.get(name)
            if before != now:
                yield f"it is of {name} {_stated(before)}, and here it is {_stated(now)}"


def _stated(value: Any) -> str:
    return "as usual" if value is None else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What was measured. Shares lie in [0, 1]; KL is in nats, from the yardstick's distribution to the scheme's."""

    kl: float
    kl_p99: float
    """What one token in a hundred exceeds."""
    perplexity: float
    yardstick_perplexity: float
    top1: float
    """Share of tokens whose likeliest successor is the yardstick's."""
    recall: Mapping[int, float] = field(default_factory=dict)
    """Share of exact answers, by context length."""
    yardstick_recall: Mapping[int, float] = field(default_factory=dict)
    attention_error: tuple[float, ...] = ()
    """Relative, by layer."""
    bytes_per_token: int = 0
    yardstick_bytes: int = 0
    sinks: tuple[str, ...] = ()
    """What calibration said of attention sinks."""
    tasks: tuple[Mapping[str, Any], ...] = ()
    """Scores of lm-eval's tasks."""

    @property
    def perplexity_ratio(self) -> float:
        """Return how many times the yardstick's perplexity it is."""
        return self.perplexity / self.yardstick_perplexity

    @property
    def recall_shares(self) -> Mapping[int, float]:
        """Return the share of the yardstick's recall, by context length; lengths at which that has none say nothing."""
        pairs = (
            (length, share, self.yardstick_recall.get(length, 0.0)) for length, share in self.recall.items()
        )
        return {length: share / best for length, share, best in pairs if best}

    @property
    def recall_share(self) -> float | None:
        """Return the least share of the yardstick's recall; None where it was not measured, or has none."""
        return min(self.recall_shares.values(), default=None)

    def value_of(self, name: str) -> float | None:
        """Return the figure that a name of QUALITY means."""
        return _VALUES[name](self)

    def shortfalls(self, bounds: Mapping[str, float]) -> Iterator[str]:
        """Yield the bounds that these figures do not keep, each with the figure."""
        for name, bound in bounds.items():
            value = self.value_of(name)
            if value is None:
                yield f"{name} was not measured"
            # Written this way round, NaN keeps no bound.
            elif not (value <= bound if name in MOST else value >= bound):
                side = "more" if name in MOST else "less"
                yield f"{name} is {value:.4g}, {side} than {bound:.4g}"


_VALUES: Mapping[str, Callable[[Figures], float | None]] = {
    "kl": lambda figures: figures.kl,
    "kl_p99": lambda figures: figures.kl_p99,
    "ppl": lambda figures: figures.perplexity_ratio,
    "top1": lambda figures: figures.top1,
    "recall": lambda figures: figures.recall_share,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Figures, what they are true of, and how they were measured."""

    subject: Subject
    figures: Figures
    measured: Mapping[str, Any]
    """How much, and on what: the text's name and hash among it."""
    environment: Mapping[str, str]
    """Hardware, versions, date."""
    command: str
    notes: tuple[str, ...] = ()
    path: Path | None = None
    """Where it was read from; no part of the file."""

    @property
    def yardstick(self) -> str:
        """Return the scheme that it was compared with."""
        return str(self.measured["yardstick"])

    @property
    def device(self) -> str:
        """Return what it was measured on: `NVIDIA H200 (SM90)`, `CPU`."""
        return self.environment["hardware"].partition(",")[0]

    @property
    def line(self) -> str:
        """Return one line: when, where, and the figures that matter."""
        figures = self.figures
        parts = [f"KL {figures.kl:.2g}", f"perplexity {percent(figures.perplexity_ratio - 1, '+')}"]
        parts += [f"same top token {percent(figures.top1)}"]
        if figures.recall_share is not None:
            longest = format_length(max(figures.recall_shares))
            parts += [
                f"recall {percent(figures.recall_share)} of {self.yardstick}'s or more, up to {longest}"
            ]
        return f"certified {self.environment['date']} on {self.device}: {', '.join(parts)}"

    def summary(self) -> dict[str, Any]:
        """Return what the server says of it."""
        figures = self.figures
        return {
            "line": self.line,
            "scheme": self.subject.scheme,
            "date": self.environment["date"],
            "device": self.device,
            "yardstick": self.yardstick,
            "kl": figures.kl,
            "kl_p99": figures.kl_p99,
            "perplexity_ratio": figures.perplexity_ratio,
            "top1": figures.top1,
            "recall": {str(length): share for length, share in figures.recall.items()},
            "yardstick_recall": {str(length): share for length, share in figures.yardstick_recall.items()},
        }

    def as_json(self) -> str:
        """Return the text of the file."""
        facts = asdict(self)
        del facts["path"]
        return json.dumps({"schema": SCHEMA, **facts}, indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> Certificate:
        """Read a file; raise ConfigError where it is no certificate that this version reads."""
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
            if (schema := facts.pop("schema")) != SCHEMA:
                raise ConfigError(f"{path} has the schema {schema}, and this version reads {SCHEMA}")
            subject = Subject(**facts.pop("subject"))
            figures = _figures(facts.pop("figures"))
            notes = {"notes": tuple(facts["notes"])}
            certificate = cls(subject=subject, figures=figures, path=path, **facts | notes)
            # What it says of itself needs most of its fields.
            certificate.summary()
        except (OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
            raise ConfigError(f"{path} is no certificate: {type(error).__name__}: {error}") from error
        return certificate


def _figures(facts: Mapping[str, Any]) -> Figures:
    # JSON has texts for keys, and lists for tuples.
    lengths = {
        name: {int(n): share for n, share in facts[name].items()} for name in ("recall", "yardstick_recall")
    }
    lists = {name: tuple(facts[name]) for name in ("attention_error", "sinks", "tasks")}
    return Figures(**{**facts, **lengths, **lists})


def percent(share: float, sign: str = "") -> str:
    """Return `97.3 %`, without a digit that says nothing."""
    return f"{100 * share:{sign}.1f}".replace(".0", "") + " %"


def format_length(tokens: int) -> str:
    """Return `8K`, or the number where it is no multiple."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)

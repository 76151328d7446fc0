"""What an evaluation found, as data and as text: JSON, markdown, and rows for the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = "nibble-eval-1"


@dataclass(frozen=True, slots=True)
class SchemeResult:
    """One scheme. Shares lie in [0, 1]; kl is KL(yardstick || scheme) in nats; ratio is of the yardstick's
    bytes.

    recall: exact answers by context length. attention_error: relative, by layer. seconds: what measuring
    took.
    """

    name: str
    kv_format: str
    kv_layers: str
    bytes_per_token: int
    ratio: float
    scales: str
    perplexity: float
    bits_per_byte: float
    top1: float
    kl: float
    kl_p99: float
    recall: Mapping[int, float] = field(default_factory=dict)
    attention_error: tuple[float, ...] = ()
    seconds: float = 0.0

    @property
    def mean_attention_error(self) -> float | None:
        """The mean over layers; None where it was not measured."""
        return sum(self.attention_error) / len(self.attention_error) if self.attention_error else None


@dataclass(frozen=True, slots=True)
class Report:
    """An evaluation.

    skipped: schemes that the model cannot take, with the reason. measured: how much, and on what.
    """

    model: str
    yardstick: str
    results: tuple[SchemeResult, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)
    measured: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Context lengths at which recall was measured."""
        return tuple(sorted({length for result in self.results for length in result.recall}))

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {"schema": SCHEMA, **asdict(self)}

    def as_json(self) -> str:
        """Return everything as JSON text."""
        return json.dumps(self.as_dict(), indent=1)

    def header(self) -> tuple[str, ...]:
        """The columns of the table."""
        recall = tuple(f"recall {_length(length)}" for length in self.lengths)
        return ("scheme", "bytes/token", "x fewer", "perplexity", "top-1", "KL", *recall, "attention error")

    def rows(self) -> Iterator[tuple[str, ...]]:
        """The table's rows as text, the yardstick first."""
        for result in self.results:
            error = result.mean_attention_error
            yield (
                result.name,
                f"{result.bytes_per_token:,}",
                f"{result.ratio:.2f}",
                f"{result.perplexity:.4g}",
                f"{result.top1:.1%}",
                f"{result.kl:.2g}",
                *(
                    f"{result.recall[length]:.0%}" if length in result.recall else ""
                    for length in self.lengths
                ),
                "" if error is None else f"{error:.2%}",
            )

    def as_markdown(self) -> str:
        """The table, how it was measured, the attention error by layer, and what was skipped."""
        return "\n".join(
            (*_table(self.header(), self.rows()), "", self.caption(), *self._layers(), *self._skipped())
        )

    def caption(self) -> str:
        """How to read the table."""
        text = self.measured
        where = ", ".join(f"{key} {value}" for key, value in self.environment.items())
        return (
            f"Model `{self.model}`; top-1, KL (nats) and attention error are against {self.yardstick}. "
            f"Perplexity over {text.get('scored', 0):,} tokens in windows of {text.get('window', 0):,}; "
            f"recall is the share of exact greedy answers, {text.get('recall_cases', 0)} questions a length; "
            f"attention error is the mean over layers, on {text.get('attention_tokens', 0):,} tokens. "
            f"Measured with {where}."
        )

    def _layers(self) -> Iterator[str]:
        results = [result for result in self.results if result.attention_error]
        if results:
            yield "\nAttention error by layer:\n"
            header = ("scheme", *(f"layer {layer}" for layer in range(len(results[0].attention_error))))
            rows = (
                (result.name, *(f"{error:.2%}" for error in result.attention_error)) for result in results
            )
            yield from _table(header, rows)

    def _skipped(self) -> Iterator[str]:
        if self.skipped:
            yield "\nSkipped:\n"
            # The first line says what is refused; the reasons of every backend follow it.
            yield from (f"- {name}: {reason.splitlines()[0]}" for name, reason in self.skipped.items())


def _length(tokens: int) -> str:
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def _table(header: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    # Numbers stand on the right, the name of the scheme on the left.
    yield "|---|" + "---:|" * (len(header) - 1)
    yield from (f"| {' | '.join(row)} |" for row in rows)

"""What a load test found: the arithmetic of one request and of all, as data, as rows, as a plot.

Owns Record, Spread, Goals and LoadReport. Times are seconds after the start of the run; latencies are told in
milliseconds. Must not know how requests are sent, and must not import torch.

The words, as other tools use them. TTFT: from sending a request to the first chunk that carries an answer. E2E: to the
last such chunk. TPOT: (E2E - TTFT) / (tokens - 1), one value a request. ITL: the time between chunks, one value a
token: a chunk that carries several tokens took its time for all of them, which is divided by their number. That number
is not in the stream: the tokens that usage counts are shared out over the chunks by the length of their texts, at least
one each. Latencies are those of completed requests only.
"""

from __future__ import annotations

import heapq
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nibble.errors import ConfigError, unknown
from nibble.evals import plot as plots

SCHEMA = "nibble-load-1"
UNFINISHED = "unfinished"
METRICS = ("ttft", "tpot", "itl", "e2e")
LATE_MS = 20
"""From here on a client that is late is told of: it is a part of what it measures."""


@dataclass(slots=True)
class Record:
    """One request. due, sent: when it should have been sent, and was. marks: arrival and characters of each chunk.

    Tokens are what the server's usage says, None where it says nothing. error: the kind, None for success.
    """

    session: int
    turn: int
    due: float
    sent: float = 0.0
    marks: list[tuple[float, int]] = field(default_factory=list)
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    finish: str | None = None
    error: str | None = UNFINISHED
    detail: str = ""

    @property
    def done(self) -> bool:
        return self.error is None

    @property
    def tokens(self) -> int:
        """Tokens of the answer: as usage says, or else as many as chunks."""
        return len(self.marks) if self.output_tokens is None else self.output_tokens

    @property
    def end(self) -> float:
        return self.marks[-1][0] if self.marks else self.sent

    @property
    def ttft(self) -> float:
        return self.marks[0][0] - self.sent

    @property
    def e2e(self) -> float:
        return self.end - self.sent

    @property
    def tpot(self) -> float | None:
        """None for an answer of one token."""
        return (self.end - self.marks[0][0]) / (self.tokens - 1) if self.tokens > 1 else None

    def itls(self) -> list[float]:
        """One for each token after those of the first chunk."""
        counts = shares(self.tokens, [characters for _, characters in self.marks])
        found = []
        for (before, _), (now, _), count in zip(self.marks, self.marks[1:], counts[1:], strict=False):
            found += [(now - before) / count] * count
        return found

    def worst(self, metric: str) -> float:
        """What a goal judges: a request's one value, or the longest of its inter-token latencies."""
        if metric == "itl":
            return max(self.itls(), default=0.0)
        return getattr(self, metric) or 0.0

    def as_dict(self) -> dict[str, Any]:
        told: dict[str, Any] = {
            "session": self.session, "turn": self.turn, "due_s": self.due, "sent_s": self.sent, "error": self.error,
            "detail": self.detail, "finish": self.finish, "input_tokens": self.input_tokens,
            "cached_tokens": self.cached_tokens, "output_tokens": self.output_tokens, "chunks": len(self.marks),
        }  # fmt: skip
        if self.done:
            told |= {f"{name}_ms": _ms(getattr(self, name)) for name in ("ttft", "tpot", "e2e")}
            told["itl_ms"] = [_ms(value) for value in self.itls()]
        return told


def shares(tokens: int, sizes: Sequence[int]) -> list[int]:
    """Tokens of each chunk: one at least, and each further token to the chunk with most text for a token."""
    counts = [1] * len(sizes)
    heap = [(-max(size, 1), i) for i, size in enumerate(sizes)]
    heapq.heapify(heap)
    for _ in range(tokens - len(sizes) if sizes else 0):
        _, i = heap[0]
        counts[i] += 1
        heapq.heapreplace(heap, (-max(sizes[i], 1) / (counts[i]), i))  # type: ignore[misc]
    return counts


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, percentiles and maximum of values; percentiles lie between the two nearest values, linearly."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None of nothing."""
        if not values:
            return None
        ordered = sorted(values)
        p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
        return cls(len(ordered), math.fsum(ordered) / len(ordered), p50, p90, p99, ordered[-1])

    def as_dict(self) -> dict[str, float]:
        """In milliseconds."""
        return {
            "count": self.count,
            **{name: _ms(getattr(self, name)) for name in ("mean", "p50", "p90", "p99", "max")},
        }


def percentile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def goals(text: str | None) -> dict[str, float]:
    """`ttft:500,itl:50` -> milliseconds by metric; raises ConfigError."""
    found: dict[str, float] = {}
    for part in (text or "").split(",") if text else ():
        name, _, value = part.strip().partition(":")
        if name not in METRICS:
            raise ConfigError(unknown("goal", name, METRICS))
        try:
            found[name] = float(value)
        except ValueError:
            raise ConfigError(
                f"cannot read {part!r}; write goals as ttft:500,itl:50 (milliseconds)"
            ) from None
    return found


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A load test. planned: requests that were to be sent. lags: how late the client's own loop was, now and then.

    asked: every setting, for the record. goals: milliseconds by metric. seconds: how long it ran.
    """

    url: str
    model: str
    planned: int
    records: tuple[Record, ...]
    seconds: float
    goals: Mapping[str, float] = field(default_factory=dict)
    lags: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()
    interrupted: bool = False
    asked: Mapping[str, Any] = field(default_factory=dict)

    @property
    def completed(self) -> tuple[Record, ...]:
        return tuple(record for record in self.records if record.done)

    def errors(self) -> dict[str, int]:
        """Failed requests by kind, the commonest first."""
        return dict(Counter(record.error for record in self.records if record.error).most_common())

    def latencies(self) -> dict[str, Spread | None]:
        done = self.completed
        return {
            "ttft": Spread.of([record.ttft for record in done]),
            "tpot": Spread.of([record.tpot for record in done if record.tpot is not None]),
            "itl": Spread.of([value for record in done for value in record.itls()]),
            "e2e": Spread.of([record.e2e for record in done]),
        }

    def good(self) -> int:
        """Completed requests that met every goal."""
        return sum(
            all(1000 * record.worst(name) <= bound for name, bound in self.goals.items())
            for record in self.completed
        )

    def summary(self) -> dict[str, Any]:
        """All figures but the requests' own."""
        done, rate = self.completed, 1 / self.seconds if self.seconds > 0 else 0.0
        inputs, outputs = sum(r.input_tokens or 0 for r in done), sum(r.tokens for r in done)
        told = [r for r in done if r.cached_tokens is not None and r.input_tokens]
        cached, seen = sum(r.cached_tokens or 0 for r in told), sum(r.input_tokens or 0 for r in told)
        waits, lags = Spread.of([max(0.0, r.sent - r.due) for r in done]), Spread.of(self.lags)
        return {
            "planned": self.planned, "sent": len(self.records), "completed": len(done), "seconds": self.seconds,
            "errors": self.errors(), "requests_per_s": len(done) * rate, "input_tokens": inputs,
            "output_tokens": outputs, "input_tokens_per_s": inputs * rate, "output_tokens_per_s": outputs * rate,
            "cached_share": cached / seen if seen else None, "most_open": self.most_open(),
            "goals_ms": dict(self.goals), "good": self.good() if self.goals else None,
            "goodput_per_s": self.good() * rate if self.goals else None,
            **{f"{name}_ms": spread and spread.as_dict() for name, spread in self.latencies().items()},
            "waited_ms": waits and waits.as_dict(), "client_lag_ms": lags and lags.as_dict(),
        }  # fmt: skip

    def most_open(self) -> int:
        """Most requests that were open at a time."""
        done = self.completed
        steps = sorted([(record.sent, 1) for record in done] + [(record.end, -1) for record in done])
        most = now = 0
        for _, step in steps:
            now += step
            most = max(most, now)
        return most

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "schema": SCHEMA, "url": self.url, "model": self.model, "asked": dict(self.asked),
            "interrupted": self.interrupted, "notes": list(self.told()), "summary": self.summary(),
            "requests": [record.as_dict() for record in self.records],
        }  # fmt: skip

    def as_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1, ensure_ascii=False, allow_nan=False)

    def figures(self) -> Iterator[tuple[str, str]]:
        """Names and values of what is one figure."""
        found = self.summary()
        yield "completed", f"{found['completed']:,} of {self.planned:,} in {self.seconds:.2f} s"
        yield "requests/s", f"{found['requests_per_s']:.2f}"
        yield "output tokens/s", f"{found['output_tokens_per_s']:,.1f}"
        yield "input tokens/s", f"{found['input_tokens_per_s']:,.1f}"
        yield "tokens", f"{found['input_tokens']:,} in, {found['output_tokens']:,} out"
        share = found["cached_share"]
        yield "cached input", "not told" if share is None else f"{share:.1%}"
        yield "most open", f"{found['most_open']:,}"
        if self.goals:
            goal = ", ".join(f"{name} <= {bound:g} ms" for name, bound in self.goals.items())
            rate, part = found["goodput_per_s"], found["good"] / max(1, len(self.records))
            yield "goodput", f"{rate:.2f} requests/s, {part:.1%} of those sent ({goal})"
        for kind, count in found["errors"].items():
            yield f"failed: {kind}", f"{count:,}"

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Latencies as text, in milliseconds: name, mean, p50, p90, p99, max."""
        for name, spread in self.latencies().items():
            values = list(spread.as_dict().values())[1:] if spread else []
            yield (
                (name.upper(), *(f"{value:,.2f}" for value in values)) if values else (name.upper(), *"-----")
            )

    def told(self) -> Iterator[str]:
        """What a reader should know of how this was measured."""
        yield from self.notes
        if self.interrupted:
            yield "interrupted: these are the requests that had ended by then"
        if mute := sum(record.output_tokens is None for record in self.completed):
            yield f"{mute:,} answers came without usage: their tokens are counted as chunks"
        joint = sum(record.tokens > len(record.marks) for record in self.completed)
        if joint:
            yield f"in {joint:,} answers chunks carried several tokens: their ITL is divided by the number"
        waits, lags = Spread.of([max(0.0, r.sent - r.due) for r in self.completed]), Spread.of(self.lags)
        if waits and _ms(waits.p90) >= LATE_MS and self.asked.get("rate") != "inf":  # else they are to wait
            yield f"requests waited in the client, {_ms(waits.p90):,.0f} ms at p90, which is in no latency"
        if lags and _ms(lags.p99) >= LATE_MS:
            yield f"the client was late itself, {_ms(lags.p99):,.0f} ms at p99: it may be what is measured"
        if failed := next((record for record in self.records if record.error and record.detail), None):
            yield f"the first failure ({failed.error}): {failed.detail}"


def _ms(seconds: float | None) -> Any:
    return None if seconds is None else round(1000 * seconds, 4)


# The plot


def plot(report: LoadReport, path: Path) -> None:
    """Writes a picture (png, svg, pdf): how latencies are distributed, and tokens over time."""
    plots.require()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    axes = figure.subplots(1, 3)
    done = report.completed
    _distribution(axes[0], "TTFT", [record.ttft for record in done])
    _distribution(axes[0], "E2E", [record.e2e for record in done])
    _distribution(axes[1], "ITL", [value for record in done for value in record.itls()])
    _distribution(axes[1], "TPOT", [record.tpot for record in done if record.tpot is not None])
    _over_time(axes[2], report)
    figure.suptitle(f"{report.model}: {len(done):,} requests in {report.seconds:.1f} s", fontsize=10)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write the plot {path}: {error}") from error


def _distribution(axes: Any, name: str, values: Sequence[float]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    ordered = sorted(max(1e-3, 1000 * value) for value in values)
    if not ordered:
        return
    axes.step(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], where="post", label=name)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("ms")
    axes.set_ylabel("share of requests" if name in {"TTFT", "E2E"} else "share")
    axes.legend(fontsize=8, frameon=False)
    axes.grid(alpha=0.3)


def _over_time(axes: Any, report: LoadReport) -> None:
    """Output tokens a second, by when their chunks came."""
    bins = 60
    width = max(report.seconds, 1e-9) / bins
    heights = [0.0] * bins
    for record in report.completed:
        for (when, _), count in zip(
            record.marks, shares(record.tokens, [size for _, size in record.marks]), strict=True
        ):
            heights[min(bins - 1, max(0, int(when / width)))] += count / width
    axes.step([i * width for i in range(bins)], heights, where="post")
    axes.set_xlabel("s after the start")
    axes.set_ylabel("output tokens/s")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)

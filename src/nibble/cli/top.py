"""`nibble top`: a live view of a server, from its /metrics and /v1/plan.

Owns Figures and the picture of them. Must not know how the server counts, only what its metrics are called.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from nibble.cli.exits import JsonOption
from nibble.cli.scrape import Buckets, Scrape, Server
from nibble.cli.terminal import print_json
from nibble.errors import NibbleError

UrlArgument = Annotated[str, typer.Argument(metavar="[URL]", help="Of the server.")]
OnceOption = Annotated[
    bool, typer.Option("--once", help="Print one picture, of one interval, and end; so it is in a pipe.")
]
KeyOption = Annotated[
    str | None, typer.Option(help="The server's key; NIBBLE_API_KEY, if left out.", show_default=False)
]
IntervalOption = Annotated[float, typer.Option(min=0.05, help="Seconds between two looks.")]
WINDOW_S = 30.0
"""Rates, latencies and the hit rate are of so many seconds."""


def top(
    url: UrlArgument = "http://localhost:8000",
    once: OnceOption = False,
    api_key: KeyOption = None,
    interval: IntervalOption = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Watch a server: requests, tokens per second, latencies, and how full its cache is.

    Figures are of the last 30 seconds; latencies and the hit rate are of the server's whole life, and dim, while
    there are none as new as that. Ctrl-C ends it.
    """
    server = Server(url, api_key or os.environ.get("NIBBLE_API_KEY"))
    if once or as_json or not sys.stdout.isatty():
        first = server.look()
        time.sleep(interval)
        figures = figures_of([first, server.look()], server.plan())
        print_json(asdict(figures)) if as_json else Console(highlight=False).print(
            picture(figures, server.url)
        )
    else:
        _watch(server, interval)


EXAMPLES = """
nibble top
nibble top http://gpu-7:8000 --interval 0.5
nibble top --once --api-key KEY
nibble top --json | jq .output_tokens_per_s
"""


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds by quantile; None where nothing was timed. recent: of now, and not of the server's whole life."""

    p50: float | None
    p95: float | None
    p99: float | None
    recent: bool


@dataclass(frozen=True, slots=True)
class Figures:
    """What the picture shows. Rates are per second, shares from 0 to 1; None is what the server does not say.
    fidelity_error: of the layer that is worst."""

    model: str
    cache: str
    up: bool
    restarts: int
    seconds: float
    running: float | None
    waiting: float | None
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    first_token: Latency
    between_tokens: Latency
    whole_request: Latency
    kv_usage: float | None
    kv_pages: dict[str, float]
    hit_rate: float | None
    hit_rate_recent: bool
    preemptions: float
    ended: dict[str, float]
    host_tier_frames: dict[str, float]
    host_tier_pages: dict[str, float]
    host_tier_spilled: float | None
    fidelity_samples: float | None
    fidelity_alert: bool
    fidelity_error: float | None


def figures_of(scrapes: Sequence[Scrape], plan: Mapping[str, Any]) -> Figures:
    """From looks at one server, oldest first: how it stands, and what changed between the first and the last."""
    then, now = scrapes[0], scrapes[-1]
    seconds, values = now.time - then.time, now.values

    def rate(*names: str) -> float:
        grown = sum(_grown(then.values.get(name, 0.0), values.get(name, 0.0)) for name in names)
        return grown / seconds if seconds > 0 else 0.0

    hit_rate, recent = _hit_rate(then.values, values)
    ended = _of_states(values, "request_success_total")
    return Figures(
        model=str(plan.get("model", "")),
        cache=_cache_words(plan),
        up=values.get("engine_up", 1.0) > 0,
        restarts=int(values.get("engine_restarts_total", 0.0)),
        seconds=seconds,
        running=values.get("num_requests_running"),
        waiting=values.get("num_requests_waiting"),
        requests_per_s=rate(*(f"request_success_total.{reason}" for reason in ended)),
        prompt_tokens_per_s=rate("prompt_tokens_total"),
        output_tokens_per_s=rate("generation_tokens_total"),
        first_token=_latency(then, now, "time_to_first_token_seconds"),
        between_tokens=_latency(then, now, "inter_token_latency_seconds"),
        whole_request=_latency(then, now, "e2e_request_latency_seconds"),
        kv_usage=values.get("kv_cache_usage_perc"),
        kv_pages=_of_states(values, "kv_cache_pages"),
        hit_rate=hit_rate,
        hit_rate_recent=recent,
        preemptions=values.get("num_preemptions_total", 0.0),
        ended=ended,
        host_tier_frames=_of_states(values, "host_tier_frames"),
        host_tier_pages={
            what: values[f"host_tier_{what}_pages_total"]
            for what in ("saved", "loaded", "dropped")
            if f"host_tier_{what}_pages_total" in values
        },
        host_tier_spilled=values.get("host_tier_spilled_requests_total"),
        fidelity_samples=values.get("kv_fidelity_samples_total"),
        fidelity_alert=values.get("kv_fidelity_alert", 0.0) > 0,
        fidelity_error=_worst(_of_states(values, "kv_fidelity_error")),
    )


def _grown(before: float, after: float) -> float:
    """What a counter rose by; one that fell began anew."""
    return after - before if after >= before else after


def _of_states(values: Mapping[str, float], name: str) -> dict[str, float]:
    split = ((key.partition("."), value) for key, value in values.items())
    return {state: value for (first, _, state), value in split if first == name}


def _worst(errors: Mapping[str, float]) -> float | None:
    """The largest; None where there is none, or it is no number, which JSON has not."""
    found = max(errors.values(), default=float("inf"))
    return found if found < float("inf") else None


def _hit_rate(then: Mapping[str, float], now: Mapping[str, float]) -> tuple[float | None, bool]:
    """Share of prompt tokens that were cached, and whether it is of now."""
    for before in (then, {}):
        names = ("prefix_cache_hits_total", "prefix_cache_queries_total")
        hits, asked = (_grown(before.get(name, 0.0), now.get(name, 0.0)) for name in names)
        if asked:
            return hits / asked, before is then
    return None, False


def _latency(then: Scrape, now: Scrape, name: str) -> Latency:
    before, after = then.histograms.get(name, {}), now.histograms.get(name, {})
    newer = {bound: count - before.get(bound, 0.0) for bound, count in after.items()}
    recent = min(newer.values(), default=0.0) >= 0 and max(newer.values(), default=0.0) > 0
    buckets = newer if recent else after
    return Latency(quantile(buckets, 0.5), quantile(buckets, 0.95), quantile(buckets, 0.99), recent)


def quantile(buckets: Buckets, share: float) -> float | None:
    """As Prometheus's histogram_quantile: on a line within the bucket; of the last one, where it begins."""
    ordered = sorted(buckets.items())
    total = ordered[-1][1] if ordered else 0.0
    if not total:
        return None
    rank, low, below = share * total, 0.0, 0.0
    for bound, count in ordered:
        if count >= rank:
            break
        low, below = bound, count
    return low if bound == float("inf") else low + (bound - low) * (rank - below) / (count - below)


def _cache_words(plan: Mapping[str, Any]) -> str:
    """`nvfp4, 864 bytes per token (3.56 x fewer than in 16 bits)`."""
    if not plan.get("groups"):
        return ""
    schemes = dict.fromkeys(group["scheme"] for group in plan["groups"])
    words = f"{' + '.join(schemes)}, {plan['bytes_per_token']:,} bytes per token"
    return words if plan["ratio"] == 1 else f"{words} ({plan['ratio']:.2f} x fewer than in 16 bits)"


# The picture


def picture(figures: Figures, url: str) -> RenderableType:
    """One picture, for a terminal of 80 columns or more."""

    def panel(title: str, rows: RenderableType) -> Panel:
        return Panel(rows, title=title, title_align="left")

    grid = Table.grid(Column(ratio=5), Column(ratio=6), expand=True)
    grid.add_row(panel("traffic", _rows(_traffic(figures))), panel("latency", _latencies(figures)))
    grid.add_row(panel("KV cache", _rows(_cache(figures))), panel("host tier", _rows(_tier(figures))))
    state = Text("serving", "green") if figures.up else Text("the engine is not there", "bold red")
    head = Text.assemble((figures.model or "?", "bold"), f" at {url}: ", state)
    if figures.restarts:
        head.append(f", restarted {figures.restarts} times", "red")
    return Group(head, Text(figures.cache, style="dim"), grid) if figures.cache else Group(head, grid)


def _rows(rows: Iterable[tuple[str, RenderableType]]) -> RenderableType:
    table = Table.grid(Column(no_wrap=True), "", padding=(0, 2))
    for name, value in rows:
        table.add_row(name, Text(value) if isinstance(value, str) else value)  # no markup in what was read
    return table


def _traffic(figures: Figures) -> Iterator[tuple[str, RenderableType]]:
    yield "running", _count(figures.running)
    yield "waiting", _count(figures.waiting)
    yield "requests/s", f"{figures.requests_per_s:,.1f}"
    yield "prompt tokens/s", f"{figures.prompt_tokens_per_s:,.1f}"
    yield "output tokens/s", f"{figures.output_tokens_per_s:,.1f}"
    yield "ended", _counts(figures.ended)


def _latencies(figures: Figures) -> RenderableType:
    table = Table.grid(Column(no_wrap=True), *(Column(justify="right") for _ in range(3)), padding=(0, 1))
    table.add_row("", "p50", "p95", "p99", style="dim")
    rows = {
        "first token": figures.first_token,
        "between tokens": figures.between_tokens,
        "whole request": figures.whole_request,
    }
    for name, of in rows.items():
        table.add_row(name, *map(_seconds, (of.p50, of.p95, of.p99)), style="" if of.recent else "dim")
    return table


def _cache(figures: Figures) -> Iterator[tuple[str, RenderableType]]:
    usage = figures.kv_usage
    yield "used", "-" if usage is None else f"{usage:.1%}"
    if usage is not None:
        style = "red" if usage > 0.95 else "yellow" if usage > 0.8 else "green"
        yield "", ProgressBar(1.0, usage, width=20, complete_style=style, finished_style=style)
    yield "pages", _counts(figures.kv_pages)
    hits = "-" if figures.hit_rate is None else f"{figures.hit_rate:.1%}"
    yield "prefix hits", Text(hits, style="" if figures.hit_rate_recent else "dim")
    yield "preemptions", _count(figures.preemptions)
    if figures.fidelity_samples is not None:
        error = "-" if figures.fidelity_error is None else f"{figures.fidelity_error:.1%}"
        words = f"{error} off ({_count(figures.fidelity_samples)} seen)"
        yield "attention", Text(words, "bold red" if figures.fidelity_alert else "")


def _tier(figures: Figures) -> Iterator[tuple[str, RenderableType]]:
    if figures.host_tier_spilled is None:
        yield "none", ""
        return
    yield "frames", _counts(figures.host_tier_frames)
    yield "pages", _counts(figures.host_tier_pages)
    yield "spilled", f"{_count(figures.host_tier_spilled)} requests"


def _counts(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{_count(count)} {name}" for name, count in counts.items() if count) or "-"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.{int(value < 0.1)}f} ms"


def _watch(server: Server, interval: float) -> None:
    """Pictures until Ctrl-C. A server that was there once, and cannot be reached, is waited for."""
    looks, trouble = deque([server.look()]), ""
    with (
        suppress(KeyboardInterrupt),
        Live(console=Console(highlight=False), screen=True, auto_refresh=False) as live,
    ):
        while True:
            shown = picture(figures_of(looks, server.plan()), server.url)
            live.update(Group(shown, Text(trouble, "bold red")), refresh=True)
            time.sleep(interval)
            try:
                looks.append(server.look())
                trouble = ""
            except NibbleError as error:
                trouble = str(error)
            while len(looks) > 2 and looks[-1].time - looks[0].time > WINDOW_S:
                looks.popleft()

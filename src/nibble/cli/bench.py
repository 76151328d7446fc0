"""`nibble bench serve`: a load test of an OpenAI-compatible server, as a table, JSON and a plot."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nibble.cli.exits import FAILED, INTERRUPTED, OUTPUT
from nibble.cli.options import Options, takes
from nibble.cli.terminal import err, out
from nibble.errors import ConfigError, unknown
from nibble.evals.load_workloads import Load, Workload

if TYPE_CHECKING:
    from nibble.evals.load_report import LoadReport

SERVE = "serve"
WhatArgument = Annotated[str, typer.Argument(metavar="WHAT", help="What is measured: `serve`, a server.")]
UrlArgument = Annotated[str, typer.Argument(metavar="URL", help="The server's address, with or without /v1.")]
JsonFileOption = Annotated[
    Path | None,
    typer.Option("--json", help="Write everything to this file; `-`: print it.", rich_help_panel=OUTPUT),
]
PlotOption = Annotated[
    Path | None, typer.Option(help="Write a plot of latencies (png, svg or pdf).", rich_help_panel=OUTPUT)
]


@takes("sending", Load, "Sending")
@takes("asked", Workload, "Workload")
def bench(
    what: WhatArgument = SERVE,
    url: UrlArgument = "http://localhost:8000",
    json_file: JsonFileOption = None,
    plot: PlotOption = None,
    *,
    asked: Options,
    sending: Options,
) -> None:
    """Measure a server under load.

    `nibble bench serve` drives any OpenAI-compatible server with streamed answers: requests arrive at a rate, or all
    at once, and the time to the first token (TTFT), between tokens (ITL; TPOT, its mean by request) and to the last
    one (E2E) is noted, at the arrival of each chunk. A chunk of several tokens counts as so many, each with its share
    of the time. Failed requests are counted by kind, and end nothing. Ctrl-C shows what is known.
    """
    if what != SERVE:
        raise ConfigError(unknown("measurement", what, (SERVE,)))
    workload, load = Workload(**asked), _with_key(Load(**sending))
    if plot:
        from nibble.evals import plot as plots

        plots.require()
    report = _measured(url, load, workload)
    as_text = json_file is None or str(json_file) != "-"
    if json_file and as_text:
        json_file.write_text(report.as_json() + "\n", encoding="utf-8")
    if as_text:
        _show(report)
    else:
        print(report.as_json())
    if plot:
        from nibble.evals.load_report import plot as draw

        draw(report, plot)
    if report.interrupted or not report.completed:
        raise typer.Exit(INTERRUPTED if report.interrupted else FAILED)


EXAMPLES = """
nibble bench serve localhost:8000 --requests 64 --max-concurrency 16
nibble bench serve localhost:8000 --rate 8 --goodput ttft:500,itl:50
nibble bench serve localhost:8000 --workload prefix --prefixes 8 --seed 1
nibble bench serve localhost:8000 --turns 5 --chat --think 1
nibble bench serve localhost:8000 --workload file --file prompts.jsonl
nibble bench serve localhost:8000 --json load.json --plot load.svg
"""


def _with_key(load: Load) -> Load:
    key = load.api_key or os.environ.get("NIBBLE_API_KEY") or os.environ.get("OPENAI_API_KEY")
    return replace(load, api_key=key)


def _measured(url: str, load: Load, workload: Workload) -> LoadReport:
    """With a bar on standard error."""
    import asyncio

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from nibble.evals import load as loads

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err(), transient=True, refresh_per_second=2) as bar:
        task = bar.add_task("warming up", total=None)

        def told(ended: int, planned: int, failed: int) -> None:
            said = f"{failed} failed" if failed else "answered"
            bar.update(task, description=said, completed=ended, total=planned)

        return asyncio.run(loads.run(url, load, workload, told=told))


def _show(report: LoadReport) -> None:
    from rich import box
    from rich.table import Table

    figures = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, value in report.figures():
        figures.add_row(name, value)
    latencies = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in ("ms", "mean", "p50", "p90", "p99", "max"):
        latencies.add_column(title, justify="left" if title == "ms" else "right", no_wrap=True)
    for row in report.rows():
        latencies.add_row(*row)
    console = out()
    console.print(f"{report.model} at {report.url}", markup=False)
    console.print(figures, latencies)
    for note in report.told():
        console.print(note, style="dim", markup=False)

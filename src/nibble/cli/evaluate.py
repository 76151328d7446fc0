"""`nibble eval`: what each cache scheme costs in quality, as a table, JSON and a plot.

`nibble calibrate`: KV scales for every scheme, measured on a text, in a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nibble.cli.command import OUTPUT, JsonOption, Options, takes
from nibble.cli.terminal import ModelArgument, err, print_json, quiet, text_of
from nibble.config import Config
from nibble.evals.report import Sizes, sizes

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

    from nibble.evals.report import Report

SchemesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="SCHEME", help="Schemes, as nvfp4+rot or nvfp4@0,-1=fp8_e4m3; all, if left out."),
]
TextOption = Annotated[
    Path | None, typer.Option(help="Text to score, unseen by the model; else the model folder's heldout.txt.")
]
QuickOption = Annotated[
    bool, typer.Option("--quick", help="A first impression: less text, fewer and shorter questions.")
]
MarkdownOption = Annotated[
    Path | None, typer.Option(help="Write the table to this file.", rich_help_panel=OUTPUT)
]
PlotOption = Annotated[
    Path | None,
    typer.Option(help="Write a plot of quality against bytes (png, svg or pdf).", rich_help_panel=OUTPUT),
]


@takes(
    "config", Config, "Model and cache", without=("model", "kv_format", "kv_layers", "prefix_cache", "seed")
)
@takes("evaluation", Sizes, "What is measured", unset=True)
def evaluate(
    model: ModelArgument = "demo",
    schemes: SchemesArgument = None,
    text: TextOption = None,
    quick: QuickOption = False,
    markdown: MarkdownOption = None,
    plot: PlotOption = None,
    as_json: JsonOption = False,
    *,
    config: Options,
    evaluation: Options,
) -> None:
    """Measure what cache schemes cost in quality.

    The report has perplexity, agreement with BF16, recall by context length and attention error by layer,
    all of it through the engine as it serves. Without schemes, all are measured, and some combinations;
    those that the model cannot take are listed with the reason. Scales that the checkpoint lacks are
    measured once, on text that is not scored.
    """
    measured, served = sizes(quick, evaluation), Config(model=model, **config)
    quiet(model)
    from nibble.evals import report as plots
    from nibble.evals.run import evaluate as measure

    if plot:
        # A missing package is reported before hours of measuring, not after them.
        plots.require()
    with _bar() as bar:
        report = measure(served, schemes or (), measured, text, _Bar(bar))
    _show(report, as_json)
    if markdown:
        markdown.write_text(report.as_markdown() + "\n", encoding="utf-8")
    if plot:
        plots.plot(report, plot)


EVAL_EXAMPLES = """\
nibble eval --quick
nibble eval demo bf16 fp8_e4m3 nvfp4 nvfp4+kmean+rot nvfp4@0,-1=fp8_e4m3
nibble eval --markdown eval.md --plot eval.svg --json > eval.json
nibble eval ./my-model nvfp4 k8v4 --text wiki.txt
"""


def _show(report: Report, as_json: bool) -> None:
    if as_json:
        print(report.as_json())
        return
    from rich.console import Console

    table = _table(report)
    console = Console(highlight=False)
    # The table may be wider than the terminal: a number that is cut off is a wrong number.
    least = console.measure(table, options=console.options.update(max_width=1000)).minimum
    Console(width=max(console.width, least), highlight=False).print(table)
    console.print(report.caption(), style="dim", markup=False)
    for name, reason in report.skipped.items():
        console.print(f"skipped {name}: {reason.splitlines()[0]}", style="dim", markup=False)


def _table(report: Report) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, title in enumerate(report.header()):
        # A title may break between its words, never within one.
        longest = max(map(len, title.split()))
        table.add_column(title, justify="right" if index else "left", no_wrap=not index, min_width=longest)
    for row in report.rows():
        table.add_row(*row)
    return table


def _bar() -> Progress:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    return Progress(*columns, console=err(), transient=True)


class _Bar:
    """Shows how far an evaluation is."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("planning", total=None)

    def start(self, tokens: int) -> None:
        self._bar.update(self._task, total=tokens)

    def advance(self, scheme: str, what: str, tokens: int) -> None:
        self._bar.update(self._task, description=f"{scheme}: {what}", advance=tokens)


SampleOption = Annotated[
    list[Path] | None,
    typer.Option(help="A text like those to be served; else one that Python brings."),
]
OutOption = Annotated[Path, typer.Option(help="The file to write.", rich_help_panel=OUTPUT)]


@takes(
    "config",
    Config,
    "Model",
    without=("model", "kv_format", "kv_layers", "kv_scales", "prefix_cache", "seed"),
)
def calibrate(
    model: ModelArgument = "demo",
    text: SampleOption = None,
    out: OutOption = Path("kv_scales.json"),
    as_json: JsonOption = False,
    *,
    config: Options,
) -> None:
    """Measure KV scales once, for all schemes, and write them to a file for --kv-scales.

    A file called kv_scales.json in a checkpoint's folder is found by itself.
    """
    # Before the imports below, which bring Transformers: it reads its verbosity then.
    quiet(model)
    from nibble.engine.build import builtin_texts
    from nibble.engine.llm import LLM

    texts = [text_of(path, "text") for path in text or ()] or builtin_texts()
    with err().status(f"measuring K and V of {model}"):
        scales = LLM(model, **config).measure_scales(texts, save=out)
    if as_json:
        print_json(
            {
                "path": str(out),
                "source": scales.source,
                "layers": len(scales.layers),
                "version": scales.version,
            }
        )
    else:
        print(
            f"wrote {out}: scales of {len(scales.layers)} layers, from {scales.source}; "
            f"use them with --kv-scales {out}"
        )


CALIBRATE_EXAMPLES = """\
nibble calibrate demo --out kv_scales.json
nibble calibrate ./my-model --text talk.txt --out ./my-model/kv_scales.json
"""

"""`nibble eval`: what each cache scheme costs in quality, as a table, JSON and a plot.

`nibble certify`: the same of the one that is served, written down for starts to find.

`nibble check`: GSM8K with it, held against the thresholds of docs/thresholds.md.

`nibble calibrate`: KV scales for every scheme, measured on a text, in a file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from nibble.cache.scales import FILE_NAME, file_size
from nibble.cli.command import FAILED, OUTPUT, JsonOption, Options, takes
from nibble.cli.terminal import ModelArgument, err, print_json, quiet_libraries, read_text
from nibble.config import Config
from nibble.engine.plan import plan_engine
from nibble.evals.gsm8k import FewShot
from nibble.evals.report import CERTIFIED, QUICK, Entry, Report, Sizes, require_matplotlib, write_plot
from nibble.files import check_writable, write_atomic
from nibble.models.hub import local_folder

SET_HERE = ("model", "kv_format", "kv_layers", "prefix_cache", "seed")
"""Fields of Config that are no options of these commands: schemes are measured one after the other."""
WIDEST = 1000
"""Characters of a table."""
IDLE = ("watch_fidelity", "fidelity_alert", "require_quality", "chat_template", "generation_config")
"""Fields of Config that change no measurement."""
IDLE_IN_CHECKS = tuple(name for name in IDLE if name != "chat_template")
"""The same where questions may be asked in chats."""
EAGER = {"compile": False, "compile_cache": False, "graphs": False}
"""Fields with which scales are measured: compiling would take longer than the few steps."""
SchemesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SCHEME",
        help="Schemes, as nvfp4+rot, nvfp4@0,-1=fp8_e4m3 or nvfp4:OPTION=VALUE,...; all, if left out.",
    ),
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

OutputOption = Annotated[
    Path | None,
    typer.Option(
        help="Write the report to this file as JSON, anew after each scheme, so that nothing measured is lost.",
        rich_help_panel=OUTPUT,
    ),
]
JobsOption = Annotated[
    int,
    typer.Option(
        min=1,
        help="Schemes measured at the same time, each in a process; on a GPU name the memory of each cache with "
        "--kv-memory.",
    ),
]


@takes("config", Config, "Model and cache", without=SET_HERE, idle=IDLE)
@takes("evaluation", Sizes, "What is measured", unset=True)
def evaluate(
    model: ModelArgument = "demo",
    schemes: SchemesArgument = None,
    text: TextOption = None,
    quick: QuickOption = False,
    markdown: MarkdownOption = None,
    plot: PlotOption = None,
    output: OutputOption = None,
    jobs: JobsOption = 1,
    as_json: JsonOption = False,
    *,
    config: Options,
    evaluation: Options,
) -> None:
    """Measure what cache schemes cost in quality.

    The report has perplexity, agreement with BF16, recall by context length and attention error by layer,
    all of it through the engine as it serves. Without schemes, all are measured, and some combinations;
    those that the model cannot take are listed with the reason. Scales that the checkpoint lacks are
    measured once, on text that is not scored. With --tasks, lm-eval's tasks are run too, and compared
    question by question (docs/evaluation.md). A scheme may have options of its own, which go before those of the
    command: nvfp4:kv_scales=one,page_size=32.

    Examples:
        nibble eval --quick
        nibble eval demo bf16 fp8_e4m3 nvfp4 nvfp4+kmean+rot nvfp4@0,-1=fp8_e4m3
        nibble eval --markdown eval.md --plot eval.svg --output eval.json
        nibble eval demo nvfp4:kv_window=64 --recall-per-context 4 --jobs 2
        nibble eval demo nvfp4 nvfp4:kv_scales=one --recall-cases 100 --seed 7
        nibble eval ./my-model nvfp4 k8v4 --text wiki.txt
        nibble eval ./my-model nvfp4 k8v4 --tasks gsm8k,arc_easy --limit 500
        nibble eval ./my-model k8v4 --tasks ./mine.yaml --apply-chat-template
    """
    sizes = replace(QUICK if quick else Sizes(), **evaluation)
    served = Config(model=model, **config)
    quiet_libraries(model)
    from nibble.evals import run

    # A missing package or folder is reported before hours of measuring, not after them.
    if plot:
        require_matplotlib()
    for path in filter(None, (markdown, plot, output)):
        check_writable(path, "the report")

    def save(report: Report) -> None:
        if output:
            write_atomic(output, json.dumps(report.as_dict(), indent=1) + "\n")

    with _progress(sizes) as advance:
        report = run.evaluate(served, schemes or (), sizes, text, advance, jobs=jobs, save=save)
    if as_json:
        print_json(report.as_dict())
    else:
        _print_report(report)
    if markdown:
        markdown.write_text(report.as_markdown() + "\n", encoding="utf-8")
    if plot:
        write_plot(report, plot)


@contextmanager
def _progress(sizes: Sizes) -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar; the value takes what is being measured, how many more tokens are done, and how many there are."""
    if sizes.tasks:
        # lm-eval's own bars would break this one.
        os.environ.setdefault("TQDM_DISABLE", "1")
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err(), transient=True) as bar:
        task = bar.add_task("planning", total=None)

        def advance(what: str, tokens: int, total: int) -> None:
            bar.update(task, description=what, advance=tokens, total=total)

        yield advance


def _print_report(report: Report) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    _print_table(report.header(), list(report.rows()))
    console.print(report.caption(), style="dim", markup=False)
    for scheme, title, difference, errors in report.differences():
        note = f", {errors} standard errors" if errors else ""
        console.print(f"{scheme}: {title} {difference} from {report.yardstick}{note}", markup=False)
    for name, reason in report.skipped.items():
        console.print(f"skipped {name}: {reason.splitlines()[0]}", style="dim", markup=False)


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> None:
    """Print a table. texts: columns of words, the first and the last ones; those between are figures."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, title in enumerate(header):
        # A title may break between its words, never within one, and figures never.
        longest = max(map(len, (*title.split(), *(row[index] for row in rows))))
        is_text = index == 0 or index > len(header) - texts
        table.add_column(title, justify="left" if is_text else "right", width=longest)
    for row in rows:
        table.add_row(*row)
    # The table may be wider than the terminal: a number that is cut off is a wrong number.
    Console(width=WIDEST, highlight=False).print(table)


SchemeArgument = Annotated[
    str, typer.Argument(metavar="SCHEME", help="The scheme, as --kv-format takes it, or SCHEME@LAYERS.")
]
FolderOption = Annotated[
    Path | None,
    typer.Option(
        help="Folder to write to; else certificates/ in the model's folder if that is yours, or in the cache folder.",
        rich_help_panel=OUTPUT,
    ),
]


@takes("config", Config, "Model and cache", without=SET_HERE, idle=IDLE)
@takes("evaluation", Sizes, "What is measured", unset=True, usual=CERTIFIED)
def certify(
    model: ModelArgument,
    scheme: SchemeArgument,
    text: TextOption = None,
    out: FolderOption = None,
    as_json: JsonOption = False,
    *,
    config: Options,
    evaluation: Options,
) -> None:
    """Measure what a cache costs in quality, and write a certificate that starts find.

    The figures are those of `nibble eval`: KL, perplexity, top-1, recall by length and attention error, against
    BF16's cache, through the engine as it serves. Give the options that `serve` will get: a certificate counts for
    this very model, layout, KV scales and cache options, and for no other. It is written as JSON and as Markdown.
    `serve` and `plan` show it, and --require-quality kl=0.01,recall=0.97 refuses to start without one that holds
    (docs/evaluation.md). Without a text of the model's own, the built-in one is scored, which is short.

    Examples:
        nibble certify demo nvfp4
        nibble certify demo nvfp4+kmean+rot --kv-scales calibrate
        nibble certify ./my-model nvfp4@0,-1=fp8_e4m3 --text wiki.txt
        nibble certify ./my-model k8v4 --tasks gsm8k --limit 500 --out ./certs
    """
    entry, sizes = Entry.parse(scheme), replace(CERTIFIED, **evaluation)
    served = entry.config(Config(model=model, **config))
    quiet_libraries(model)
    from nibble.evals.certify import certify as measure
    from nibble.evals.certify import header, rows

    with _progress(sizes) as advance:
        certificate = measure(served, sizes, text, out, advance)
    if as_json:
        print_json({"path": str(certificate.path), **json.loads(certificate.as_json())})
        return
    _print_table(header(certificate), list(rows(certificate)), texts=2)
    for note in (*certificate.figures.sinks, *certificate.notes):
        err().print(f"note: {note}", markup=False, style="dim")
    print(certificate.line)
    print(f"wrote {certificate.path}, and the same in Markdown beside it")


DataOption = Annotated[
    Path | None,
    typer.Option(
        help="File of questions, as test.jsonl of GSM8K's authors; openai/gsm8k of the hub, if left out."
    ),
]
RelativeOption = Annotated[
    bool,
    typer.Option(
        "--relative", help="Compare with the same model's cache in BF16 where a least accuracy is known too."
    ),
]


@takes("config", Config, "Model and cache", without=SET_HERE, idle=IDLE_IN_CHECKS)
@takes("questions", FewShot, "Questions")
def check(
    model: ModelArgument,
    scheme: SchemeArgument,
    data: DataOption = None,
    relative: RelativeOption = False,
    as_json: JsonOption = False,
    *,
    config: Options,
    questions: Options,
) -> None:
    """Ask a model GSM8K with a cache, and exit with 1 where it falls short of what is asked of it.

    Of public models with a scheme a least accuracy is known, with the tests that it comes from (docs/thresholds.md). Of
    all others the same model must answer as well as with a cache in BF16, less 1.0 point, over the same questions.
    Accuracies are shown with their standard errors, and where so many questions cannot tell the verdict, it is said.

    Examples:
        nibble check nvidia/Llama-3.1-8B-Instruct-NVFP4 nvfp4
        nibble check ./my-model nvfp4 --data test.jsonl
        nibble check ./my-model fp8_e4m3 --limit 200 --apply-chat-template
        nibble check Qwen/Qwen3-8B nvfp4 --num-fewshot 8 --json
    """
    few_shot, entry = FewShot(**questions), Entry.parse(scheme)
    served = entry.config(Config(model=model, **config))
    quiet_libraries(model)
    from nibble.evals.check import check as run_check

    verdict = run_check(served, few_shot, data, relative=relative)
    if as_json:
        print_json(verdict.as_dict())
    else:
        _print_table(("cache", "GSM8K", "asked"), list(verdict.rows()), texts=2)
        for note in verdict.notes():
            err().print(f"note: {note}", markup=False, style="dim")
        print(verdict.line)
    if not verdict.holds:
        raise typer.Exit(FAILED)


SampleOption = Annotated[
    list[Path] | None,
    typer.Option(help="A text like those to be served; else one that comes with Nibble."),
]
OutOption = Annotated[Path, typer.Option(help="The file to write.", rich_help_panel=OUTPUT)]


@takes(
    "config",
    Config,
    "Model",
    without=(*SET_HERE, "kv_scales"),
    idle=(*IDLE, *EAGER, "hisparse", "max_running"),
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

    A file called kv_scales.json in a checkpoint's folder is found by itself. Without one, a start measures scales that
    the checkpoint lacks, for a few seconds each time.

    Examples:
        nibble calibrate demo --out kv_scales.json
        nibble calibrate ./my-model --text talk.txt --out ./my-model/kv_scales.json
    """
    quiet_libraries(model)
    from nibble.engine.calibration import builtin_texts
    from nibble.engine.llm import LLM

    texts = [read_text(path, "text") for path in text or ()] or builtin_texts()
    # Before weights load: the work is not to be lost in the end.
    out = check_writable(out, "KV scales", file_size(plan_engine(Config(model=model, **config)).plan.layout))
    with err().status(f"measuring K and V of {model}"):
        scales = LLM(model, **{**config, **EAGER}).measure_scales(texts, save=out)
    facts = {"source": scales.source, "layers": len(scales.layers), "version": scales.version}
    if as_json:
        print_json({"path": str(out), **facts})
    else:
        for note in scales.notes:
            err().print(f"warning: {note}", markup=False)
        what = f"scales of {len(scales.layers)} layers, {scales.source}"
        print(f"wrote {out}: {what}; {_use(out, model)}")


def _use(out: Path, model: str) -> str:
    """Return how scales in a file are used."""
    folder = local_folder(model)
    is_beside = folder is not None and out.resolve() == (folder / FILE_NAME).resolve()
    return f"{model} finds them there" if is_beside else f"use them with --kv-scales {out}"

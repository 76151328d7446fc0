"""`nibble tune-precision`: a format for each layer, chosen by measurement within a budget of bits."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import nibble
from nibble.cli.command import OUTPUT, JsonOption, Options, takes
from nibble.cli.terminal import ModelArgument, err, print_json, quiet_libraries
from nibble.config import Config
from nibble.evals.precision_report import Goal, Outcome
from nibble.files import check_writable, write_atomic
from nibble.formats import scheme_file
from nibble.hardware import lookup_gpu

SET_HERE = (
    "model",
    "kv_format",
    "kv_layers",
    "kv_encoder",
    "kv_transforms",
    "hisparse",
    "prefix_cache",
    "seed",
)
"""Fields of Config that are no options of this command."""
IDLE = (
    "watch_fidelity",
    "fidelity_alert",
    "chat_template",
    "generation_config",
    "compile",
    "compile_cache",
    "graphs",
)
"""Fields of Config that change no measurement."""
TextOption = Annotated[
    Path | None,
    typer.Option(help="Text to measure on, unseen by the model; else the model folder's heldout.txt."),
]
GpuOption = Annotated[
    str | None,
    typer.Option(help="Choose for this GPU (h200, b200, rtx5090, sm90... or cpu) and not for this machine."),
]
OutOption = Annotated[Path, typer.Option(help="The file to write, for --kv-format.", rich_help_panel=OUTPUT)]
ModelOptOption = Annotated[
    Path | None,
    typer.Option(
        "--modelopt", help="Write ModelOpt's hf_quant_config.json of it too.", rich_help_panel=OUTPUT
    ),
]


@takes("config", Config, "Model and cache", without=SET_HERE, idle=IDLE)
@takes("goal", Goal, "What is searched for", unset=True)
def tune_precision(
    model: ModelArgument = "demo",
    text: TextOption = None,
    gpu: GpuOption = None,
    out: OutOption = Path("kv_scheme.json"),
    modelopt: ModelOptOption = None,
    as_json: JsonOption = False,
    *,
    config: Options,
    goal: Options,
) -> None:
    """Choose a cache format for each layer by measurement, and write a file for --kv-format.

    Each candidate is tried in one layer at a time, for K and V apart, and the KL that it causes is measured. Of all
    assignments within the budget the one with the least sum is taken, and measured as a whole on other text. Only
    formats that a kernel of the GPU reads are candidates (docs/precision.md).
    `nibble serve MODEL --kv-format ./kv_scheme.json` takes the file.

    Examples:
        nibble tune-precision demo --budget 5.5bits
        nibble tune-precision demo --max-kl 0.01 --compare k8v4
        nibble tune-precision ./my-model --budget 5bits --text wiki.txt
        nibble tune-precision ./my-model --budget 5bits --gpu h200
    """
    wanted_goal, served = Goal(**goal), Config(model=model, **config)
    quiet_libraries(model)
    # The work is not to be lost in the end.
    for path in filter(None, (out, modelopt)):
        check_writable(path, "the scheme")
    if not scheme_file.is_file(str(out)):
        out = Path(f"./{out}")
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from nibble.evals import tune_precision as tuning

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err(), transient=True) as bar:
        task = bar.add_task("planning", total=None)

        def advance(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        outcome = tuning.tune(
            served, wanted_goal, out, text=text, hardware=lookup_gpu(gpu) if gpu else None,
            command=shlex.join(["nibble", *sys.argv[1:]]), progress=advance,
        )  # fmt: skip
    if modelopt:
        _write_modelopt(outcome, modelopt)
    if as_json:
        print_json(outcome.as_dict())
    else:
        _print(outcome)


def _write_modelopt(outcome: Outcome, path: Path) -> None:
    chosen_file = scheme_file.load(outcome.path)
    producer = {"name": "nibble", "version": nibble.__version__}
    content = scheme_file.as_modelopt(chosen_file.layers, producer)
    write_atomic(path, json.dumps(content, indent=2) + "\n")
    if any(scheme.transforms for scheme in chosen_file.layers.values()):
        err().print(
            f"warning: {path} has the formats alone: ModelOpt's form knows no transforms of K", markup=False
        )


def _print(outcome: Outcome) -> None:
    _print_table(("layer", "scheme", "bytes", "KL"), outcome.rows())
    if outcome.verified:
        _print_table(
            ("measured as a whole", "bytes", "with window", "perplexity", "KL", "same top-1"),
            outcome.verified_rows(),
        )
    print(f"wrote {outcome.path}: {outcome.summary()}; use it with --kv-format {outcome.path}")
    for name, reason in outcome.skipped.items():
        err().print(f"not a candidate: {name}: {reason}", style="dim", markup=False)
    for note in outcome.notes:
        err().print(f"warning: {note}", markup=False)


def _print_table(header: tuple[str, ...], rows: Any) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, title in enumerate(header):
        table.add_column(title, justify="left" if index < 2 and title in {"scheme", header[0]} else "right")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, width=1000).print(table)

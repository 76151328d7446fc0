"""The command `nibble`: the list of its commands. Torch and Transformers wait until a command needs them."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Annotated

import typer

import nibble
from nibble.cli import bench, docs, evaluate, generate, plan, precision, serve
from nibble.cli.command import COMMANDS, EXIT_CODES, FAILED, Command, command, unwrap
from nibble.errors import PLAN, set_caller

COMMANDS += (
    Command("generate", generate.generate),
    Command("chat", generate.chat),
    Command("serve", serve.serve, serve.ServeCommand),
    Command("bench", bench.bench, bench.PassThrough),
    Command("plan", plan.plan, serve.ServeCommand),
    Command("tune", bench.tune),
    Command("formats", plan.formats),
    Command("eval", evaluate.evaluate),
    Command("certify", evaluate.certify),
    Command("check", evaluate.check),
    Command("calibrate", evaluate.calibrate),
    Command("tune-precision", precision.tune_precision),
    Command("docs", docs.docs),
)

HELP = """Serve language models from a KV cache that is kept in 4 and 8 bits.

`nibble formats` lists the caches, `nibble plan` says what would be done with a model on a GPU, `nibble
generate` does it.
"""
CODES = "Exit codes: " + "; ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items()) + "."

app = typer.Typer(
    name="nibble",
    help=unwrap(HELP),
    epilog=CODES,
    no_args_is_help=True,
    add_completion=False,
    # Local variables may hold keys and prompts.
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _version(requested: bool) -> None:
    if requested:
        print(f"nibble {nibble.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Take the options of `nibble` itself."""


for _entry in COMMANDS:
    app.command(_entry.name, cls=_entry.group, help=_entry.help, epilog=CODES)(command(_entry.run))


def run() -> None:
    """Run the command line as this process; `plan` ends it without freeing what was imported, which takes a second."""
    code = FAILED
    set_caller(PLAN)  # until a command says which it is

    def end() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    # Only the command that neither computes nor starts processes. The first handler registered is the last to run,
    # so threads have ended and temporary folders are removed by then.
    if sys.argv[1:2] == ["plan"]:
        atexit.register(end)
    try:
        app(prog_name="nibble")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else FAILED if error.code else 0
        raise

"""Exit codes, and errors as one clean message: what every command is wrapped in."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from inspect import cleandoc
from types import ModuleType
from typing import Annotated, Any

import typer

from nibble.errors import ConfigError, NibbleError, RequestError, Unsupported

OK, FAILED, USAGE, REFUSED, INTERRUPTED = 0, 1, 2, 3, 130
EXIT_CODES = {
    OK: "success",
    FAILED: "it failed while running: weights, memory, a kernel, a file; or `docs --check` found stale pages",
    USAGE: "usage: an option or a value is malformed or cannot be had",
    REFUSED: "refused: no backend serves this combination; the message names the nearest command that works",
    INTERRUPTED: "interrupted with Ctrl-C",
}
# The first match counts. Unsupported is a ConfigError, so it stands before it.
_KINDS: tuple[tuple[type[NibbleError], int], ...] = (
    (Unsupported, REFUSED),
    (ConfigError, USAGE),
    (RequestError, USAGE),
)


def code_of(error: type[Exception]) -> int:
    """The exit code of a class of errors."""
    return next((code for kind, code in _KINDS if issubclass(error, kind)), FAILED)


OUTPUT = "Output"
"""The panel of options that every command has; the last of its help."""
DebugOption = Annotated[
    bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=OUTPUT)
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON for scripts, and nothing else.", rich_help_panel=OUTPUT)
]


def command(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with --debug, and its errors as one message on stderr and an exit code."""

    @functools.wraps(function)
    def guarded(*, debug: bool = False, **values: Any) -> Any:
        try:
            return function(**values)
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        except (NibbleError, OSError) as error:
            # A reader that has gone (`| head`) is no error; typer then ends without a message.
            if debug or isinstance(error, BrokenPipeError):
                raise
            print(f"error: {error}", file=sys.stderr)
            raise typer.Exit(code_of(type(error))) from None

    add_parameters(guarded, function, [_keyword("debug", DebugOption, False)])
    return guarded


def add_parameters(
    wrapper: Callable[..., Any],
    function: Callable[..., Any],
    added: list[inspect.Parameter],
    without: str | None = None,
) -> None:
    """Give `wrapper` the signature of `function`, less one parameter, plus others: typer reads it.

    Args:
        wrapper: the function that typer gets.
        function: the command.
        added: further parameters.
        without: the parameter of `function` to leave out.
    """
    # eval_str: annotations are strings in the commands' files, and typer needs the types.
    own_parameters = [
        p for p in inspect.signature(function, eval_str=True).parameters.values() if p.name != without
    ]
    # Options of output come last in every help. The sort is stable, so the others keep their order.
    ordered = sorted((*own_parameters, *added), key=_is_output)
    # Keyword-only parameters may lack a default wherever they stand.
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in ordered]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}


def _is_output(parameter: inspect.Parameter) -> bool:
    info = getattr(parameter.annotation, "__metadata__", (None,))[0]
    return getattr(info, "rich_help_panel", None) == OUTPUT


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


@dataclass(frozen=True, slots=True)
class Command:
    """One command: its function, its help, and examples that are part of the help."""

    name: str
    run: Callable[..., Any]
    module: ModuleType

    @property
    def text(self) -> str:
        """Return the description, the docstring of the function."""
        return cleandoc(self.run.__doc__ or "")

    @property
    def examples(self) -> str:
        """Return the examples, a line each."""
        return str(self.module.EXAMPLES).strip()

    @property
    def help(self) -> str:
        """The text in whole paragraphs, and the examples line by line (\\b keeps typer from joining them)."""
        paragraphs = [" ".join(paragraph.split()) for paragraph in self.text.split("\n\n")]
        # \b keeps typer from joining the lines.
        examples = "\n".join(f"  {line}" for line in self.examples.splitlines())
        return "\n\n".join((*paragraphs, f"\b\nExamples:\n{examples}"))


COMMANDS: list[Command] = []
"""All commands; cli/main.py fills the list."""

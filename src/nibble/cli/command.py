"""What commands are made of: exit codes, errors as one clean message, help, and options from dataclasses.

A field of Config, SamplingParams, Settings or Sizes is an option, and its doc is the help. So a new field is a new
option, with no line here.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from inspect import cleandoc
from pathlib import Path
from textwrap import dedent, indent
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand

from nibble.config import Config, doc_of
from nibble.errors import ConfigError, NibbleError, RequestError, Unsupported, set_caller, unknown

OK, FAILED, USAGE, REFUSED, INTERRUPTED = 0, 1, 2, 3, 130
EXIT_CODES = {
    OK: "success",
    FAILED: "it failed while running: weights, memory, a kernel, a file; or `docs --check` found stale pages, or "
    "`check` an accuracy that falls short",
    USAGE: "usage: an option or a value is malformed or cannot be had",
    REFUSED: "refused: no backend serves this combination; the message names the nearest command that works",
    INTERRUPTED: "interrupted with Ctrl-C",
}


def code_of(error: type[Exception]) -> int:
    """Return the exit code of a class of errors."""
    # Unsupported is a ConfigError, so it comes first.
    if issubclass(error, Unsupported):
        return REFUSED
    return USAGE if issubclass(error, (ConfigError, RequestError)) else FAILED


Options = dict[str, Any]
"""Values by field name, ready for the dataclass; fields that were left out keep their defaults."""
EXAMPLES = "\n\nExamples:\n"
OUTPUT = "Output"
"""The panel of options that every command has; the last of its help."""
DebugOption = Annotated[
    bool, typer.Option("--debug", help="Show the traceback of an error.", rich_help_panel=OUTPUT)
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON for scripts, and nothing else.", rich_help_panel=OUTPUT)
]


def _read_config_file(context: typer.Context, path: Path | None) -> None:
    """Let a file's options be the defaults of a command's parameters; raise typer.Exit(USAGE) for a malformed one."""
    if path is None:
        return
    try:
        context.default_map = file_options(path, context.command)
    except ConfigError as error:
        # The command itself, which would print the error, has not begun.
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(USAGE) from None


def file_options(path: Path, of: Any) -> Options:
    """Return the values of a YAML file with options, by parameter.

    Args:
        path: of the file; keys are names of options, with dashes or underscores.
        of: the command. Its `translate`, where it has one, knows other names of options.

    Raises:
        ConfigError: the file cannot be read, or names an option that there is not.
    """
    entries = {option.lstrip("-"): entry for entry in of.params for option in entry.opts}
    off = {option.lstrip("-"): entry.name for entry in of.params for option in entry.secondary_opts}
    values: Options = {}
    for key, value in _read_yaml(path).items():
        for name, translated in getattr(of, "translate", _as_they_are)(key.replace("_", "-"), value):
            if name in off and isinstance(translated, bool):
                values[off[name]] = not translated
            elif name in entries:
                values[entries[name].name] = _file_value(entries[name], translated)
            else:
                raise ConfigError(f"{path}: {unknown('option', key, entries)}")
    return values


def _file_value(entry: Any, value: Any) -> Any:
    """Return a value of a config file as the command line would have it. entry: the parameter."""
    # YAML takes `on` and `off` for truth values.
    if isinstance(value, bool) and not getattr(entry, "is_flag", False):
        return "on" if value else "off"
    # A repeatable option with one value.
    return [value] if getattr(entry, "multiple", False) and not isinstance(value, list) else value


def _as_they_are(name: str, value: Any) -> list[tuple[str, Any]]:
    return [(name, value)]


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        raise ConfigError(f"the config file {path} cannot be read: {error}") from None
    if not (isinstance(content, dict) and all(isinstance(key, str) for key in content)):
        raise ConfigError(f"the config file {path} must have a line `option: value` for each option")
    return content


CONFIG_FILE = "config_file"
"""The parameter of `--config`, of every command that takes a Config."""
ConfigFileOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="YAML file with options, as `kv-format: nvfp4` (and `model: NAME`); the command line wins.",
        is_eager=True,
        expose_value=False,
        callback=_read_config_file,
        rich_help_panel=OUTPUT,
    ),
]


def command(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with --debug, and its errors as one message on stderr and an exit code."""

    @functools.wraps(function)
    def guarded(*, debug: bool = False, **values: Any) -> Any:
        # A command that is proposed is one of the program that was called.
        before = set_caller(function.__name__)
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
        finally:
            set_caller(before)

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
    own_parameters = inspect.signature(function, eval_str=True).parameters.values()
    # Options of output come last in every help. The sort is stable, so the others keep their order.
    ordered = sorted((*(p for p in own_parameters if p.name != without), *added), key=_is_output)
    # Keyword-only parameters may lack a default wherever they stand.
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in ordered]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}


def _is_output(parameter: inspect.Parameter) -> bool:
    info = getattr(parameter.annotation, "__metadata__", (None,))[0]
    return getattr(info, "rich_help_panel", None) == OUTPUT


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def unwrap(text: str) -> str:
    """Return a text with each of its paragraphs in one line, as typer expects."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


@dataclass(frozen=True, slots=True)
class Command:
    """One command: a function whose docstring is the help, and ends in `Examples:`, a line each."""

    name: str
    run: Callable[..., Any]
    group: type[TyperCommand] | None = None
    """What parses the arguments, where it is not typer's own class."""

    @property
    def text(self) -> str:
        """Return the description."""
        return cleandoc(self.run.__doc__ or "").partition(EXAMPLES)[0]

    @property
    def examples(self) -> str:
        """Return the lines of the examples."""
        return dedent(cleandoc(self.run.__doc__ or "").partition(EXAMPLES)[2])

    @property
    def help(self) -> str:
        """Return the text in whole paragraphs, and the examples line by line."""
        # \b keeps typer from joining the lines.
        return f"{unwrap(self.text)}\n\n\b\nExamples:\n{indent(self.examples, '  ')}"


COMMANDS: list[Command] = []
"""All commands; cli/main.py fills the list."""


def takes(
    parameter: str,
    kind: type,
    panel: str,
    *,
    without: Iterable[str] = (),
    idle: Iterable[str] = (),
    unset: bool = False,
    usual: Any = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace a parameter of a command, a dict of values, by one option for each field of a dataclass.

    Args:
        parameter: the name of the dict.
        kind: the dataclass.
        panel: the heading of these options in the help.
        without: fields that the command sets itself.
        idle: fields that change nothing here: taken, so that options can be copied between commands, and not shown.
        unset: leave out of the dict what the command line leaves out.
        usual: an object of the class with the values that the help shows for what is left out; its defaults.
    """
    # A field's own type is a string, because annotations are not evaluated.
    hints = get_type_hints(kind)
    entries = [entry for entry in fields(kind) if entry.name not in set(without)]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def expanded(**values: Any) -> Any:
            # Its callback has read it, before all others were parsed.
            values.pop(CONFIG_FILE, None)
            options = {entry.name: values.pop(entry.name) for entry in entries}
            return function(**values, **{parameter: _parse(options, hints)})

        options = [_keyword(CONFIG_FILE, ConfigFileOption, None)] if kind is Config else []
        options += [
            _option(entry, hints[entry.name], panel, unset, usual, hidden=entry.name in idle)
            for entry in entries
        ]
        add_parameters(expanded, function, options, without=parameter)
        return expanded

    return decorate


def _option(
    entry: Field[Any], hint: Any, panel: str, unset: bool, values: Any, *, hidden: bool
) -> inspect.Parameter:
    """Return the parameter that typer turns into an option. values: has those that it shows; None: the defaults."""
    default = getattr(values, entry.name) if values else entry.default
    usual = None if default in (MISSING, ()) else default
    # With `unset` None says that an option was left out, and the help still shows the usual value.
    default, kind = None if unset else usual, _display_type(hint)
    kind = kind | None if default is None else kind
    show_default = str(usual) if unset and usual is not None else True
    doc = doc_of(entry) + (f" As {_pair_shape(hint)}." if _is_mapping(hint) else "")
    info = typer.Option(help=doc, rich_help_panel=panel, show_default=show_default, hidden=hidden)
    return _keyword(entry.name, Annotated[kind, info], default)


def _display_type(hint: Any) -> Any:
    """Return the type of an option: tuples are options that may be repeated, mappings too, as KEY=VALUE."""
    # `X | None`: None says only that the option may be left out.
    hint = get_args(hint)[0] if type(None) in get_args(hint) else hint
    if get_origin(hint) is tuple:
        return list[get_args(hint)[0]]  # type: ignore[misc]
    return list[str] if _is_mapping(hint) else hint


def _is_mapping(hint: Any) -> bool:
    origin = get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _parse(options: Options, hints: Mapping[str, Any]) -> Options:
    """Return what was given, in the dataclass's own types."""
    parsed: Options = {}
    for name, value in options.items():
        # typer gives an empty list for a repeatable option that was left out.
        if value in (None, []):
            continue
        if _is_mapping(hints[name]):
            parsed[name] = dict(_pair(text, name, *get_args(hints[name])) for text in value)
        else:
            parsed[name] = tuple(value) if isinstance(value, list) else value
    return parsed


def _pair(text: str, name: str, key: type, value: type) -> tuple[Any, Any]:
    """Parse `KEY=VALUE` in the mapping's types."""
    left, _, right = text.partition("=")
    try:
        return key(left), value(right)
    except ValueError:
        option = "--" + name.replace("_", "-")
        shape = _pair_shape(Mapping[key, value])  # type: ignore[valid-type]
        raise ConfigError(f"cannot read {text!r}; write {option} as {shape}") from None


def _pair_shape(hint: Any) -> str:
    return "=".join(part.__name__.upper() for part in get_args(hint))

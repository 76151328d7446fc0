"""Options from dataclasses: a field of Config, SamplingParams or Sizes is an option, its doc is the help.

So a new field is a new option, with no line here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from nibble.cli.exits import add_parameters
from nibble.config import doc_of
from nibble.errors import ConfigError

Options = dict[str, Any]
"""Values by field name, ready for the dataclass; fields that were left out keep their defaults."""


def takes(
    parameter: str, kind: type, panel: str, *, without: Iterable[str] = (), unset: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace a parameter of a command, a dict of values, by one option for each field of a dataclass.

    Args:
        parameter: the name of the dict.
        kind: the dataclass.
        panel: the heading of these options in the help.
        without: fields that the command sets itself.
        unset: leave out of the dict what the command line leaves out.
    """
    # A field's own type is a string, because annotations are not evaluated.
    hints = get_type_hints(kind)
    entries = [entry for entry in fields(kind) if entry.name not in set(without)]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def expanded(**values: Any) -> Any:
            options = {entry.name: values.pop(entry.name) for entry in entries}
            return function(**values, **{parameter: _parse(options, hints)})

        options = [_option(entry, hints[entry.name], panel, unset) for entry in entries]
        add_parameters(expanded, function, options, without=parameter)
        return expanded

    return decorate


def _option(entry: Field[Any], hint: Any, panel: str, unset: bool) -> inspect.Parameter:
    """The parameter that typer turns into an option."""
    usual = None if entry.default in (MISSING, ()) else entry.default
    # With `unset` None says that an option was left out, and the help still shows the usual value.
    default, kind = None if unset else usual, _display_type(hint)
    kind = kind | None if default is None else kind
    show_default = str(usual) if unset and usual is not None else True
    doc = doc_of(entry) + (f" As {_pair_shape(hint)}." if _is_mapping(hint) else "")
    info = typer.Option(help=doc, rich_help_panel=panel, show_default=show_default)
    annotation = Annotated[kind, info]  # type: ignore[valid-type]
    return inspect.Parameter(
        entry.name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
    )


def _display_type(hint: Any) -> Any:
    """The type of an option: tuples are options that may be repeated, mappings too, as KEY=VALUE."""
    hint = (
        next((part for part in get_args(hint) if part is not type(None)), hint) if _optional(hint) else hint
    )
    if get_origin(hint) is tuple:
        return list[get_args(hint)[0]]  # type: ignore[misc]
    return list[str] if _is_mapping(hint) else hint


def _optional(hint: Any) -> bool:
    return type(None) in get_args(hint)


def _is_mapping(hint: Any) -> bool:
    origin = get_origin(hint)
    return isinstance(origin, type) and issubclass(origin, Mapping)


def _parse(options: Options, hints: Mapping[str, Any]) -> Options:
    """What was given, in the dataclass's own types. None stays only where it is a value."""
    parsed: Options = {}
    for name, value in options.items():
        # typer gives an empty list for a repeatable option that was left out.
        if value is None or (value == [] and not isinstance(hints[name], type)):
            continue
        if _is_mapping(hints[name]):
            parsed[name] = dict(_pair(text, name, *get_args(hints[name])) for text in value)
        else:
            parsed[name] = tuple(value) if isinstance(value, list) else value
    return parsed


def _pair(text: str, name: str, key: type, value: type) -> tuple[Any, Any]:
    """`KEY=VALUE`, in the mapping's types."""
    left, _, right = text.partition("=")
    try:
        return key(left), value(right)
    except ValueError:
        option = "--" + name.replace("_", "-")
        shape = _pair_shape(Mapping[key, value])  # type: ignore[valid-type]
        raise ConfigError(f"cannot read {text!r}; write {option} as {shape}") from None


def _pair_shape(hint: Any) -> str:
    return "=".join(part.__name__.upper() for part in get_args(hint))

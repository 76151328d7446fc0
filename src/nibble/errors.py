"""The exception tree: an error names the cause and what would work instead.

NibbleError            every error that is raised on purpose
    ConfigError        malformed, or not to be had; raised before weights load
        Unsupported    no backend serves a need
        ScaleError     KV scales
    WeightError        a checkpoint
    CapacityError      the cache cannot hold it
        OutOfPages, OutOfFrames, PromptTooLong
    BackendError       a kernel failed
    RankError          a process of a model that is divided among GPUs failed, and the engine with it
    RequestError       a request is invalid
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

PLAN, PYTHON = "plan", "python"
"""Callers in whose words errors are: the command `nibble plan`, and Python."""
_caller = {"name": PYTHON}
WITH_MODEL = ("plan", "serve", "chat", "tune")
"""Commands whose argument is the model, and that take every option of a Config."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """The nearest configuration that works, or that would if it fitted in memory."""

    model: str
    options: Mapping[str, Any]
    """What differs from the defaults, by field of Config; the scheme always."""
    gpu: str | None = None
    """The GPU that is planned for, where it has a name."""
    declared: bool = False
    """Whether backends may be chosen that cannot run yet."""
    shortfall: str = ""
    """What it lacks: `needs at least 1279.40 GiB, and h200 has 141.00 GiB`; empty where it fits."""

    def text(self, caller: str = PLAN) -> str:
        """Return lines for an error: what works, in the words of the program that was called."""
        proposal = self.as_python() if caller == PYTHON else self.as_command(caller)
        if self.shortfall:
            return f"what would serve it: {proposal}\n  which does not fit: {self.shortfall}"
        return f"what works: {proposal}"

    def as_command(self, command: str = PLAN) -> str:
        """Return the command line of `nibble COMMAND`; of `nibble plan` where that takes no single configuration."""
        if command == "generate":
            arguments = ["nibble", command, "PROMPT", "--model", self.model]
        else:
            command = command if command in WITH_MODEL else PLAN
            arguments = ["nibble", command, self.model]
        for name, value in self.options.items():
            arguments += _arguments(name.replace("_", "-"), value)
        if command == PLAN:
            arguments += ["--gpu", self.gpu] if self.gpu else []
            arguments += ["--declared"] if self.declared else []
        return shlex.join(arguments)

    def as_python(self) -> str:
        """Return the call of LLM()."""
        options = (f"{name}={value!r}" for name, value in self.options.items())
        return f"LLM({', '.join((repr(self.model), *options))})"


def _arguments(name: str, value: object) -> Iterator[str]:
    """Yield an option as a command line has it."""
    if isinstance(value, bool):
        yield f"--{name}" if value else f"--no-{name}"
    # A value that begins with a dash would be read as an option.
    elif str(value).startswith("-"):
        yield f"--{name}={value}"
    else:
        yield from (f"--{name}", str(value))


NO_VALUES = "would|with|or|and|to|is|has|that|for"
OPTION = re.compile(
    r"(?<![\w-])--(no-)?([a-z]+(?:-[a-z]+)*)"
    rf"(?:[ =](?!(?:{NO_VALUES})\b)([\w.+/-]+(?:=[\w.+/-]+)?))?"
)
"""An option of the command line in a message, perhaps with its value."""


def set_caller(name: str) -> str:
    """Let errors have the words of PYTHON (`kv_memory=`), or of a command of `nibble` (`--kv-memory`).

    Args:
        name: PYTHON, or the command's name.

    Returns:
        Whose words errors had before.
    """
    before, _caller["name"] = _caller["name"], name
    return before


def in_python(message: str) -> str:
    """Return a message with options as Python's arguments; commands of the terminal stay as they are."""
    lines = message.split("\n")
    return "\n".join(line if "nibble " in line else OPTION.sub(_as_argument, line) for line in lines)


def _as_argument(option: re.Match[str]) -> str:
    negated, name, value = option.groups()
    text = "False" if negated else value or ""
    quoted = text if not text or negated or re.fullmatch(r"[\d.]+", text) else f'"{text}"'
    return f"{name.replace('-', '_')}={quoted}"


class NibbleError(Exception):
    """Base of every error that Nibble raises on purpose."""

    status: int = 500
    """The HTTP status that a server answers with."""
    code: str | None = None
    """What OpenAI's clients call this very error, if they have a name for it."""
    suggestion: Suggestion | None = None
    """What works instead, where that was looked for."""

    def __str__(self) -> str:
        """Return the message and what works, in the words of who called."""
        # Messages are written for the command line; who calls from Python has no flags.
        message, caller = super().__str__(), _caller["name"]
        message = in_python(message) if caller == PYTHON else message
        return f"{message}\n{self.suggestion.text(caller)}" if self.suggestion else message


class ConfigError(NibbleError):
    """A requested value is malformed or cannot be had; raised before weights load."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why no backend serves a need, and what works instead."""

    need: str
    """One line that says what was requested."""
    reasons: Mapping[str, tuple[str, ...]]
    """Backend -> the reasons why its nearest row does not serve the need."""
    suggestion: Suggestion | None = None
    """The nearest configuration that works, None where none was found."""

    def as_text(self) -> str:
        """Return the refusal for a terminal: a line a backend."""
        width = max((len(name) for name in self.reasons), default=0)
        lines = [f"no backend serves {self.need}"]
        lines += [f"  {name:<{width}}  {'; '.join(reasons)}" for name, reasons in self.reasons.items()]
        return "\n".join(lines)

    def as_markdown(self) -> str:
        """Return the reasons of the first backend, for a cell of a table."""
        return "; ".join(next(iter(self.reasons.values()), ()))

    def as_dict(self) -> dict[str, Any]:
        """Return the refusal for JSON."""
        facts: dict[str, Any] = {"need": self.need, "reasons": dict(self.reasons), "works": None}
        if self.suggestion and self.suggestion.shortfall:
            # What would be served and does not fit does not work.
            lacking = {"would_serve": self.suggestion.as_command(), "lacks": self.suggestion.shortfall}
            return facts | lacking
        return facts | ({"works": self.suggestion.as_command()} if self.suggestion else {})


class Unsupported(ConfigError):
    """No backend serves a need."""

    def __init__(self, refusal: Refusal) -> None:
        """Create the error with the refusal's text."""
        self.refusal, self.suggestion = refusal, refusal.suggestion
        super().__init__(refusal.as_text())


class ScaleError(ConfigError):
    """KV scales are missing, malformed, or do not fit the scheme."""


class WeightError(NibbleError):
    """A checkpoint is missing, broken, or would load wrong."""


class CapacityError(NibbleError):
    """The cache cannot hold what is requested."""


class RankError(NibbleError):
    """A process of a model that is divided among GPUs failed; the engine has ended."""


class OutOfPages(CapacityError):
    """No free page is left, and none can be evicted."""


class OutOfFrames(OutOfPages):
    """Pages are left, but no room on the device: a lease that gives its pages up for a hot buffer makes some."""


class PromptTooLong(CapacityError):
    """A prompt (with what must follow it) does not fit the context or the pool."""

    status, code = 400, "context_length_exceeded"


class BackendError(NibbleError):
    """A kernel of an attention backend failed; names the backend and its route."""


class RequestError(NibbleError):
    """A request is invalid."""

    def __init__(self, message: str, status: int = 400, code: str | None = None) -> None:
        """Create the error.

        Args:
            message: What is wrong, and what would work.
            status: The HTTP status that a server answers with.
            code: What OpenAI's clients call this very error, if they have a name for it.
        """
        self.status, self.code = status, code
        super().__init__(message)


def unknown(kind: str, name: str, names: Iterable[str]) -> str:
    """Return one line for an unknown `name`: the nearest of `names`, and all of them."""
    names = sorted(names)
    near = get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown {kind} {name!r}: {hint}known are {', '.join(names)}"

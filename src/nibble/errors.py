"""The exception tree: an error names the cause and what would work instead.

NibbleError            every error that is raised on purpose
    ConfigError        malformed, or not to be had; raised before weights load
        Unsupported    no backend serves a need
        ScaleError     KV scales
    WeightError        a checkpoint
    CapacityError      the cache cannot hold it
        OutOfPages, OutOfFrames, PromptTooLong
    BackendError       a kernel failed
    RequestError       a request is invalid
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any


class NibbleError(Exception):
    """Base of every error that Nibble raises on purpose."""

    status: int = 500
    """The HTTP status that a server answers with."""
    code: str | None = None
    """What OpenAI's clients call this very error, if they have a name for it."""


class ConfigError(NibbleError):
    """A requested value is malformed or cannot be had; raised before weights load."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why no backend serves a need, and what works instead."""

    need: str
    """One line that says what was requested."""
    reasons: Mapping[str, tuple[str, ...]]
    """Backend -> the reasons why its nearest row does not serve the need."""
    suggestion: str | None = None
    """The nearest command line that works, None where none was found."""

    def as_text(self) -> str:
        """Return the refusal for a terminal: a line a backend, and the command that works."""
        width = max((len(name) for name in self.reasons), default=0)
        lines = [f"no backend serves {self.need}"]
        lines += [f"  {name:<{width}}  {'; '.join(reasons)}" for name, reasons in self.reasons.items()]
        lines += [f"what works: {self.suggestion}"] if self.suggestion else []
        return "\n".join(lines)

    def as_markdown(self) -> str:
        """Return the reasons of the first backend, for a cell of a table."""
        return "; ".join(next(iter(self.reasons.values()), ()))

    def as_dict(self) -> dict[str, Any]:
        """Return the refusal for JSON."""
        return {"need": self.need, "reasons": dict(self.reasons), "works": self.suggestion}


class Unsupported(ConfigError):
    """No backend serves a need."""

    def __init__(self, refusal: Refusal) -> None:
        """Create the error with the refusal's text."""
        self.refusal = refusal
        super().__init__(refusal.as_text())


class ScaleError(ConfigError):
    """KV scales are missing, malformed, or do not fit the scheme."""


class WeightError(NibbleError):
    """A checkpoint is missing, broken, or would load wrong."""


class CapacityError(NibbleError):
    """The cache cannot hold what is requested."""


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

"""Messages between the server and the process of its engine: plain data, encoded by msgspec as MessagePack."""

from __future__ import annotations

from typing import Any

import msgspec

from nibble.config import SamplingParams
from nibble.engine.outputs import Delta
from nibble.errors import NibbleError, PromptTooLong, RequestError


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Command to continue a prompt."""

    id: int
    prompt: list[int]
    params: SamplingParams
    salt: str = ""
    """Only requests of the same salt share pages."""
    priority: int = 0
    """A lower one is served before."""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Command to give up a request, whose client is not there any more."""

    id: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Command to end the engine's process."""


Command = Submit | Abort | Stop


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Event: the engine serves."""

    folder: str
    """Where the tokenizer is."""
    max_context: int
    vocab_size: int
    about: dict[str, Any]
    """For people and programs: the plan, where memory goes, how the start went."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Event: the engine could not start."""

    error: str
    kind: str
    """A class of nibble.errors."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Event: a request cannot be served."""

    id: int
    status: int
    """Of HTTP."""
    error: str
    code: str | None = None


class Pieces(msgspec.Struct, frozen=True, tag=True):
    """Event: one step added to answers."""

    items: list[tuple[int, int, float | None, Delta]]
    """Request, its prompt tokens from the prefix cache, when it was started, and what was added."""


class Stats(msgspec.Struct, frozen=True, tag=True):
    """Event: counts of the engine."""

    numbers: dict[str, float]
    """By name, as the scheduler's metrics and the cache's have them."""


Event = Ready | Failed | Refused | Pieces | Stats


def status_of(error: NibbleError) -> tuple[int, str, str | None]:
    """Return the HTTP status, the message and the code of an error that keeps a request from being served."""
    if isinstance(error, RequestError):
        return error.status, str(error), error.code
    if isinstance(error, PromptTooLong):
        return 400, str(error), "context_length_exceeded"
    return 500, str(error), None


# Decoders are built once: they compile the types.
_encoder = msgspec.msgpack.Encoder()
_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def encode(message: Command | Event) -> bytes:
    """Return a message's bytes."""
    return _encoder.encode(message)


def decode_command(data: bytes) -> Command:
    """Return a message of the server."""
    return _command_decoder.decode(data)


def decode_event(data: bytes) -> Event:
    """Return a message of the engine."""
    return _event_decoder.decode(data)

"""What the server and the process of its engine say to each other: messages, and their bytes.

Owns the messages. All are plain data, encoded by msgspec as MessagePack. Must not know of sockets, HTTP or torch.
"""

from __future__ import annotations

from typing import Any

import msgspec

from nibble.config import SamplingParams
from nibble.engine.outputs import Delta
from nibble.errors import NibbleError, PromptTooLong, RequestError


class Submit(msgspec.Struct, frozen=True, tag=True):
    """A prompt. salt: only requests of the same salt share pages. priority: a lower one is served before."""

    id: int
    prompt: list[int]
    params: SamplingParams
    salt: str = ""
    priority: int = 0


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Nobody wants the answers of this request any more."""

    id: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """The engine's process is to end."""


Command = Submit | Abort | Stop


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine serves. about: what, for people and programs: the plan, where memory goes, how the start went. folder:
    where the tokenizer is."""

    folder: str
    max_context: int
    vocab_size: int
    about: dict[str, Any]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not start: the message, and the class of nibble.errors."""

    error: str
    kind: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A request cannot be served, with the HTTP status and the code that say so."""

    id: int
    status: int
    error: str
    code: str | None = None


class Pieces(msgspec.Struct, frozen=True, tag=True):
    """What one step added to answers: by request, with its prompt tokens that came from the prefix cache, and when it
    was started."""

    items: list[tuple[int, int, float | None, Delta]]


class Stats(msgspec.Struct, frozen=True, tag=True):
    """Counts of the engine, by name, as the scheduler's Metrics and the cache's have them."""

    numbers: dict[str, float]


Event = Ready | Failed | Refused | Pieces | Stats


def status_of(error: NibbleError) -> tuple[int, str, str | None]:
    """What keeps a request from being served: HTTP status, message and code."""
    if isinstance(error, RequestError):
        return error.status, str(error), error.code
    if isinstance(error, PromptTooLong):
        return 400, str(error), "context_length_exceeded"
    return 500, str(error), None


_encoder = msgspec.msgpack.Encoder()
_orders: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_news: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def encode(message: Command | Event) -> bytes:
    return _encoder.encode(message)


def decode_command(data: bytes) -> Command:
    """What the server said."""
    return _orders.decode(data)


def decode_event(data: bytes) -> Event:
    """What the engine said."""
    return _news.decode(data)

"""HiSparse, planned: whether a model can have a host tier, how large its hot buffers are, how pages share the device.

Owns decide() and Shares. With a host tier a page's index keys stay on the device, and its latents need a frame there
only while they are needed; so a page costs less of the device, and there may be more pages than frames. Must not know
of torch, or of what happens at run time (cache/residency.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from nibble.attention.needs import Part, compact
from nibble.attention.plan import Tier
from nibble.cache.layout import CacheLayout
from nibble.config import Config, parse_bytes, parse_hisparse
from nibble.errors import CapacityError, ConfigError
from nibble.formats import scheme as schemes
from nibble.geometry import INDEX

RECORD = "record"
"""How the host packs tokens: one run of bytes each, whatever the device does."""
TIMES = 2
"""A hot buffer has so many times the tokens that a query looks at, unless said otherwise: with no more than those, all
that a step does not look at is gone in the next."""
HOST_SHARE = 0.5
"""Part of the free host memory that a tier takes unasked."""
GROWTH = 2
"""Frames of a lease with a hot buffer beside it: the page that is written, and the one before while it is saved."""
STATE = 8
"""Bytes for each slot of a hot buffer, in each layer that chooses: which token it holds, and its turn."""


def check(config: Config, parts: tuple[Part, ...]) -> None:
    """Raises ConfigError where a host tier is asked for, and the model cannot have one."""
    dense = [part for part in parts if part.group.kind != "dsa"]
    if parse_hisparse(config.hisparse) and dense:
        layers = compact(layer for part in dense for layer in part.layers)
        raise ConfigError(
            f"--hisparse serves models with sparse attention (DSA) in all layers: layers {layers} of {config.model} "
            f"look at all tokens ({dense[0].group.kind}), which must then be on the device; leave --hisparse out"
        )


def decide(config: Config, parts: tuple[Part, ...], layout: CacheLayout) -> Tier | None:
    """The host tier that was asked for; raises ConfigError where it cannot work."""
    asked = parse_hisparse(config.hisparse)
    if asked is None:
        return None
    top_k = max(part.group.top_k for part in parts)
    buffer = asked.buffer or TIMES * top_k
    if buffer < top_k:
        raise ConfigError(
            f"a hot buffer of {buffer} tokens is too small: each query looks at {top_k}, and all must be on the device "
            f"at once; --hisparse buffer={TIMES * top_k} leaves room to keep some"
        )
    if asked.host_format is not None:
        _check_format(asked.host_format, parts)
    size = layout.page_size
    return Tier(-(-buffer // size) * size, layout.attended.stored_as(asked.host_format, RECORD), top_k)


def _check_format(name: str, parts: tuple[Part, ...]) -> None:
    streams = [stream for part in parts for stream in part.group.streams if stream.name != INDEX]
    fitting = [name for name in schemes.fitting(*streams) if name not in schemes.MIXED]
    if name not in fitting:
        raise ConfigError(
            f"hisparse host_format={name}: the host can store {streams[0].name} {streams[0].heads}x"
            f"{streams[0].dim} in {', '.join(fitting)}"
        )


@dataclass(frozen=True, slots=True)
class Shares:
    """How many pages there are, how many have a frame on the device, and bytes of the host's memory."""

    pages: int
    frames: int
    host: int


def state_bytes(layout: CacheLayout, tier: Tier | None, rows: int) -> int:
    """What the device remembers of hot buffers, for `rows` requests."""
    choosers = sum(entry.stream.name == INDEX for layer in layout.layers for entry in layer.streams)
    return choosers * rows * tier.buffer * STATE if tier else 0


def shares(
    config: Config, layout: CacheLayout, tier: Tier, room: int, longest: int, free_host: int | None
) -> Shares:
    """Divides `room` bytes of the device; raises CapacityError where they do not suffice, or the host's memory.

    There are pages for as many requests of `longest` tokens as have room for their hot buffers, and what is left is
    frames. A prompt is computed with all of its pages on the device, so one request must fit there whole.
    """
    size = layout.page_size
    frame, hot = layout.attended.bytes_per_page, tier.buffer // size
    index, whole = layout.bytes_per_page - frame, -(-longest // size)
    rest = room - (whole + GROWTH) * frame
    requests = min(config.max_running, rest // ((hot + GROWTH) * frame + whole * index))
    host = tier.layout.bytes_per_page
    most = (
        _host_memory(config, free_host) // host if (config.hisparse and free_host) or _asked(config) else None
    )
    pages = max(requests, 1) * whole
    pages = pages if most is None else min(pages, most)
    frames = min((room - pages * index) // frame, pages)
    if requests < 1 or pages < whole:
        what = "the device" if requests < 1 else "the host's memory"
        raise CapacityError(
            f"{what} has no room for one request of {longest} tokens with --hisparse: the device would hold its "
            f"{whole} pages while its prompt is computed ({(whole + GROWTH) * frame >> 20} MiB), index keys and a hot "
            f"buffer, of {room >> 20} MiB; the host {whole * host >> 20} MiB of "
            f"{'any' if most is None else most * host >> 20}; a smaller --max-context would help"
        )
    return Shares(pages, frames, pages * host)


def _asked(config: Config) -> str | None:
    asked = parse_hisparse(config.hisparse)
    return asked.host_memory if asked else None


def _host_memory(config: Config, free: int | None) -> int:
    """Bytes of the host that the tier may have; raises CapacityError where more are asked for than are free."""
    asked = _asked(config)
    if asked is None:
        return int((free or 0) * HOST_SHARE)
    if free is not None and parse_bytes(asked) > free:
        raise CapacityError(
            f"--hisparse host_memory={asked} does not fit: {free >> 20} MiB of the host's memory are free"
        )
    return parse_bytes(asked)

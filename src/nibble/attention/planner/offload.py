"""HiSparse, planned: whether a model can have a host tier, how large its hot buffers are, how pages share the device.

Owns decide() and Shares. With a host tier a page's index keys stay on the device, and its latents need a frame there
only while they are needed; so a page costs less of the device, and there may be more pages than frames. Must not know
of torch, or of what happens at run time (cache/offload/residency.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from nibble.attention.planner.needs import SchemeGroup, format_layers
from nibble.attention.planner.plan import Tier
from nibble.cache.layout import CacheLayout
from nibble.config import Config, parse_bytes, parse_hisparse
from nibble.errors import CapacityError, ConfigError
from nibble.formats import scheme as schemes
from nibble.model_spec import INDEX

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


def check(config: Config, parts: tuple[SchemeGroup, ...]) -> None:
    """Raises ConfigError where a host tier is asked for, and the model cannot have one."""
    dense = [part for part in parts if part.group.kind != "dsa"]
    if parse_hisparse(config.hisparse) and dense:
        layers = format_layers(layer for part in dense for layer in part.layers)
        raise ConfigError(
            f"--hisparse serves models with sparse attention (DSA) in all layers: layers {layers} of {config.model} "
            f"look at all tokens ({dense[0].group.kind}), which must then be on the device; leave --hisparse out"
        )


def decide(config: Config, parts: tuple[SchemeGroup, ...], layout: CacheLayout) -> Tier | None:
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
    return Tier(-(-buffer // size) * size, layout.without_index.stored_as(asked.host_format, RECORD))


def _check_format(name: str, parts: tuple[SchemeGroup, ...]) -> None:
    streams = [stream for part in parts for stream in part.group.streams if stream.name != INDEX]
    fitting = [name for name in schemes.fitting(*streams) if name not in schemes.MIXED]
    if name not in fitting:
        raise ConfigError(
            f"hisparse host_format={name}: the host can store {streams[0].name} {streams[0].heads}x"
            f"{streams[0].dim} in {', '.join(fitting)}"
        )


@dataclass(frozen=True, slots=True)
class Shares:
    """How many pages there are, how many have a frame on the device, and bytes of the host's memory: none where all
    pages have a frame, and there is nothing to do for a host tier."""

    pages: int
    frames: int
    host: int


def state_bytes(layout: CacheLayout, tier: Tier | None, rows: int) -> int:
    """What the device remembers of hot buffers, for `rows` requests."""
    index_layers = sum(entry.stream.name == INDEX for layer in layout.layers for entry in layer.streams)
    return index_layers * rows * tier.buffer * STATE if tier else 0


def shares(
    config: Config,
    layout: CacheLayout,
    tier: Tier,
    room: int,
    longest: int,
    worth: int,
    free_host: int | None,
) -> Shares:
    """Divides `room` bytes of the device; raises CapacityError where they do not suffice, or the host's memory.

    longest: tokens of the longest request; worth: tokens that it is worth having pages for. There are pages for as many
    of the longest requests as have room for their hot buffers, and what is left is frames. A prompt is computed with
    all of its pages on the device, so one request must fit there whole.
    """
    size, frame = layout.page_size, layout.without_index.bytes_per_page
    index, whole = layout.bytes_per_page - frame, -(-longest // size)
    most, plain, wanted = (
        _host_pages(config, tier, free_host),
        room // layout.bytes_per_page,
        -(-worth // size),
    )
    if plain >= wanted:
        pages = plain if config.kv_memory else wanted
        return Shares(pages, pages, 0)
    each = min(tier.buffer // size + GROWTH, whole + 1)
    requests = min(config.max_running, (room - (whole + GROWTH) * frame) // (each * frame + whole * index))
    pages = requests * whole if most is None else min(requests * whole, most)
    if pages <= plain:
        if plain < whole:
            raise CapacityError(_too_small(tier, room, whole, whole * frame, most))
        return Shares(plain, plain, 0)
    return Shares(pages, min((room - pages * index) // frame, pages), pages * tier.layout.bytes_per_page)


def _too_small(tier: Tier, room: int, whole: int, bytes_whole: int, most: int | None) -> str:
    size = tier.layout.page_size
    host = "any" if most is None else in_mib(most * tier.layout.bytes_per_page)
    return (
        f"one request of {whole * size} tokens does not fit with --hisparse: while its prompt is computed the device "
        f"holds {in_mib(bytes_whole)} of it, index keys and a hot buffer beside, and {in_mib(room)} are there; the "
        f"host {in_mib(whole * tier.layout.bytes_per_page)} of {host}; a smaller --max-context would help"
    )


def in_mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def _host_pages(config: Config, tier: Tier, free: int | None) -> int | None:
    """Pages that the host has room for; None where that is not known. Raises CapacityError where more memory is asked
    for than is free."""
    asked = parse_hisparse(config.hisparse)
    if asked and asked.host_memory:
        size = parse_bytes(asked.host_memory)
        if free is not None and size > free:
            raise CapacityError(
                f"--hisparse host_memory={asked.host_memory} does not fit: {in_mib(free)} of the host's memory are free"
            )
        return size // tier.layout.bytes_per_page
    return None if free is None else int(free * HOST_SHARE) // tier.layout.bytes_per_page

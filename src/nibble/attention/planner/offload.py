"""HiSparse, planned: whether a model can have a host tier, how large its hot buffers are, how pages share the device.

With a host tier a page's index keys stay on the device, and its latents need a frame there only while they are needed.
So a page costs less of the device, and there may be more pages than frames.
"""

from __future__ import annotations

from dataclasses import dataclass

from nibble.attention.planner.needs import SchemeGroup, format_layers
from nibble.attention.planner.plan import Tier
from nibble.cache.layout import CacheLayout
from nibble.config import OffloadSpec, format_size
from nibble.errors import CapacityError, ConfigError
from nibble.formats import scheme as schemes
from nibble.model_spec import INDEX
from nibble.spec import CacheSpec

HOST_PACKING = "record"
"""How the host packs tokens: one run of bytes each, whatever the device does."""
HOT_BUFFER_FACTOR = 2
"""A hot buffer has so many times the tokens that a query looks at, by default: with no more than those, all that a step
does not look at is dropped for the next."""
HOST_SHARE = 0.5
"""Part of the free host memory that a tier takes by default."""
WRITE_FRAMES = 2
"""Frames of a lease beside its hot buffer: the page that is written, and the one before while it is saved."""
HOT_SLOT_BYTES = 8
"""For each slot of a hot buffer, in each layer with an indexer: which token it holds, and its turn."""
PLACE_BYTES = 4
"""For each frame of a hot buffer, and for each page: which frame that is."""


def check_model(spec: CacheSpec, model: str, parts: tuple[SchemeGroup, ...]) -> None:
    """Raise ConfigError where a host tier is requested, and `model` cannot have one.

    Args:
        spec: What is requested.
        model: The model's name, for the message.
        parts: All of its layers, by scheme.
    """
    dense = [part for part in parts if part.group.kind != "dsa"]
    if spec.offload and dense:
        layers = format_layers(layer for part in dense for layer in part.layers)
        raise ConfigError(
            f"--hisparse serves models with sparse attention (DSA) in all layers: layers {layers} of {model} "
            f"look at all tokens ({dense[0].group.kind}), which must then be on the device; leave --hisparse out"
        )


def plan_tier(
    offload: OffloadSpec | None, parts: tuple[SchemeGroup, ...], layout: CacheLayout
) -> Tier | None:
    """Return the host tier that is requested, None if none is; raise ConfigError where it cannot work.

    Args:
        offload: What is requested of a tier, if one is.
        parts: All layers, by scheme.
        layout: What the device stores.
    """
    if offload is None:
        return None
    top_k = max(part.group.top_k for part in parts)
    buffer = offload.buffer or HOT_BUFFER_FACTOR * top_k
    if buffer < top_k:
        raise ConfigError(
            f"a hot buffer of {buffer} tokens is too small: each query looks at {top_k}, and all must be on the device "
            f"at once; --hisparse buffer={HOT_BUFFER_FACTOR * top_k} leaves room to keep some"
        )
    if offload.host_format is not None:
        _check_format(offload.host_format, parts)
    size = layout.page_size
    # Hot buffers are whole pages, since they lie in frames.
    return Tier(-(-buffer // size) * size, layout.without_index.stored_as(offload.host_format, HOST_PACKING))


def _check_format(name: str, parts: tuple[SchemeGroup, ...]) -> None:
    """Raise ConfigError where the host cannot store latents in the format `name`."""
    streams = [stream for part in parts for stream in part.group.streams if stream.name != INDEX]
    fitting = [name for name in schemes.fitting(*streams) if name not in schemes.MIXED]
    if name not in fitting:
        raise ConfigError(
            f"hisparse host_format={name}: the host can store {streams[0].name} {streams[0].heads}x"
            f"{streams[0].dim} in {', '.join(fitting)}"
        )


@dataclass(frozen=True, slots=True)
class PageSplit:
    """How pages are split between the device and the host."""

    pages: int
    frames: int
    """Pages that have room on the device."""
    host: int
    """Bytes of the host's memory; 0 where all pages have a frame, and a host tier has nothing to do."""


def hot_buffer_bytes(layout: CacheLayout, tier: Tier | None, rows: int) -> int:
    """Return what the device keeps about the hot buffers of `rows` requests.

    Args:
        layout: What the device stores.
        tier: The host tier, if there is one.
        rows: Requests that may have a hot buffer.

    Returns:
        Bytes; 0 without a tier.
    """
    if tier is None:
        return 0
    index_layers = sum(entry.stream.name == INDEX for layer in layout.layers for entry in layer.streams)
    frames = tier.buffer // layout.page_size
    return rows * (index_layers * tier.buffer * HOT_SLOT_BYTES + frames * PLACE_BYTES)


def split_pages(
    spec: CacheSpec,
    layout: CacheLayout,
    tier: Tier,
    room: int,
    longest: int,
    useful: int,
    free_host: int | None,
) -> PageSplit:
    """Divide `room` bytes of the device between frames and index keys.

    There are pages for as many of the longest requests as have room for their hot buffers, and what is left is frames.
    A prompt is computed with all of its pages on the device, so one request must fit there in full.

    Args:
        spec: What is requested.
        layout: What the device stores of a page.
        tier: The host tier.
        room: Bytes of the pool.
        longest: Tokens of the longest request.
        useful: Tokens that it is worth having pages for.
        free_host: Free bytes of the host, None where that is not known.

    Raises:
        CapacityError: One request does not fit, or the host has less memory than is requested.
    """
    size, frame = layout.page_size, layout.without_index.bytes_per_page
    # A page always costs its index keys and an entry in the table of places; a frame only while it is needed.
    index, request_pages = layout.bytes_per_page - frame + PLACE_BYTES, -(-longest // size)
    host_pages = _host_pages(spec.offload, tier, free_host)
    device_pages, useful_pages = room // layout.bytes_per_page, -(-useful // size)
    if device_pages >= useful_pages:
        # All pages that are useful fit: a tier would only add work.
        pages = device_pages if spec.kv_memory else useful_pages
        return PageSplit(pages, pages, 0)
    # A request that is shorter than a hot buffer keeps its own pages.
    hot = min(tier.buffer // size + WRITE_FRAMES, request_pages + 1)
    # One prompt must fit in full beside the hot buffers of the others.
    requests = (room - (request_pages + WRITE_FRAMES) * frame) // (hot * frame + request_pages * index)
    pages = min(spec.max_running, requests) * request_pages
    pages = pages if host_pages is None else min(pages, host_pages)
    # The host adds nothing: the device alone has room for more.
    if pages <= device_pages:
        if device_pages < request_pages:
            raise CapacityError(_too_small(tier, room, request_pages, request_pages * frame, host_pages))
        return PageSplit(device_pages, device_pages, 0)
    return PageSplit(pages, min((room - pages * index) // frame, pages), pages * tier.layout.bytes_per_page)


def _too_small(tier: Tier, room: int, pages: int, device_bytes: int, host_pages: int | None) -> str:
    page_bytes = tier.layout.bytes_per_page
    host = "any" if host_pages is None else _mib(host_pages * page_bytes)
    return (
        f"one request of {pages * tier.layout.page_size} tokens does not fit with --hisparse: while its prompt is "
        f"computed the device holds {_mib(device_bytes)} of it, index keys and a hot buffer beside, and "
        f"{_mib(room)} are there; the host {_mib(pages * page_bytes)} of {host}; a smaller --max-context would help"
    )


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def _host_pages(offload: OffloadSpec | None, tier: Tier, free: int | None) -> int | None:
    """Return how many pages the host has room for, None where that is not known; raise CapacityError where more memory
    is requested than is free."""
    if offload and offload.host_memory is not None:
        if free is not None and offload.host_memory > free:
            raise CapacityError(
                f"--hisparse host_memory={format_size(offload.host_memory)} does not fit: {_mib(free)} of the host's "
                "memory are free"
            )
        return offload.host_memory // tier.layout.bytes_per_page
    return None if free is None else int(free * HOST_SHARE) // tier.layout.bytes_per_page

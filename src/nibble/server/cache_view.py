"""The cache as a picture needs it: counts of pages, tokens and requests, and what a token costs.

Owns cache_view(), a pure function of the engine's counts (wire.Stats) and of what it is (wire.Ready.about). Counters
are over the engine's life; whoever wants rates takes the difference of two answers. Must not know of HTTP or engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def cache_view(stats: Mapping[str, float], about: Mapping[str, Any]) -> dict[str, Any]:
    """How the cache stands: the body of `GET /v1/cache`. at: seconds on the engine's clock, if it tells them."""
    return {
        "at": stats.get("time"),
        "pages": _pages(stats, about),
        "prefix": _prefix(stats),
        "requests": {
            name: int(stats.get(name, 0))
            for name in ("running", "waiting", "finished", "preemptions", "preempted_tokens")
        },
        "tokens": {
            "prompt": int(stats.get("prompt_tokens", 0)),
            "decode": int(stats.get("decode_tokens", 0)),
        },
        "steps": int(stats.get("steps", 0)),
        "bytes_per_token": about.get("bytes_per_token"),
        "bytes_per_token_16bit": about.get("bytes_per_token_16bit"),
        "groups": [_group(group) for group in about.get("groups", ())],
        "host": _host(stats, about),
    }


def _pages(stats: Mapping[str, float], about: Mapping[str, Any]) -> dict[str, int]:
    """total = free + held + idle, and held = own + shared. shared: in the prefix cache, and held by requests; idle: in
    the prefix cache alone. size: tokens of a page."""
    total = int(stats.get("cache_total", about.get("budget", {}).get("pages", 0)))
    free, idle = int(stats.get("cache_free", total)), int(stats.get("cache_idle", 0))
    held = total - free - idle
    shared = min(held, int(stats.get("cache_cached", 0)) - idle)
    return {
        "total": total,
        "free": free,
        "held": held,
        "own": held - shared,
        "shared": shared,
        "idle": idle,
        "size": int(about.get("page_size", 0)),
    }


def _prefix(stats: Mapping[str, float]) -> dict[str, Any]:
    """hit_rate: of prompt tokens that were looked up, those found; None before the first."""
    looked, found = int(stats.get("cache_lookup_tokens", 0)), int(stats.get("cache_hit_tokens", 0))
    return {
        "lookup_tokens": looked,
        "hit_tokens": found,
        "hit_rate": found / looked if looked else None,
        "evicted_pages": int(stats.get("cache_evicted", 0)),
    }


def _group(group: Mapping[str, Any]) -> dict[str, Any]:
    """bytes_per_token: of one layer; 0 where the layers read others' pages."""
    streams: Mapping[str, Mapping[str, Any]] = group["streams"]
    return {
        "name": group["name"],
        "kind": group["kind"],
        "layers": len(group["layers"]),
        "window": group["window"],
        "format": group["scheme"],
        "streams": {name: stream["format"] for name, stream in streams.items()},
        "bytes_per_token": sum(stream["bytes_per_token"] for stream in streams.values()),
    }


def _host(stats: Mapping[str, float], about: Mapping[str, Any]) -> dict[str, Any] | None:
    """The host tier, if there is one: frames = free + idle + hot + pinned, and pages that only the host has."""
    tier = about.get("hisparse")
    if not tier:
        return None
    frames = int(stats.get("tier_frames", tier["frames"]))
    free, idle = int(stats.get("tier_free", frames)), int(stats.get("tier_idle", 0))
    hot = int(stats.get("tier_hot", 0))
    used = int(stats.get("cache_total", 0)) - int(stats.get("cache_free", 0))
    return {
        "frames": frames,
        "free": free,
        "idle": idle,
        "hot": hot,
        "pinned": frames - free - idle - hot,
        "only_host_pages": max(0, used - (frames - free - hot)),
        "host_bytes": tier["host"],
        "formats": list(tier["host_format"]),
        **{name: int(stats.get(f"tier_{name}", 0)) for name in ("spilled", "saved", "loaded", "dropped")},
    }

"""What a 4-bit scheme alone gives: what is left to Nibble of an exact window and of transforms of K.

    window       WINDOW tokens where any layer is stored in 4 bits (Scheme.is_4bit), else none
    transforms   of K heads in 4 bits (Scheme.has_4bit_keys): all that the layers allow (formats/transforms.py)

Less where they cannot be had: a window that no backend serves here or that leaves no memory, transforms that KV scales
which are given were not measured for. A default refuses nothing: the plan goes without, and a note says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from nibble.attention.planner.support import SchemeGroup, format_layers
from nibble.config import Config
from nibble.formats import scheme as schemes
from nibble.formats import transforms as transform
from nibble.spec import CacheSpec

WINDOW = 64
"""Newest tokens that a query of a 4-bit cache reads exactly; docs/quality.md has what that brings."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """What `auto` may become, of one model on one machine."""

    window: int = WINDOW
    """Tokens of the exact window; 0 where it cannot be had."""
    transforms: tuple[str, ...] = transform.names()
    """Transforms of K for which there are KV scales, or will be."""
    notes: tuple[str, ...] = ()
    """Why there is less than could be."""

    def without_window(self, why: str = "") -> Defaults:
        """Return the same with no window, and a note that says why."""
        note = (f"no exact window, which is the default for 4 bits: {why}",) if why else ()
        return replace(self, window=0, notes=(*self.notes, *note))


BEST = Defaults()
"""Nothing stands in the way of what 4-bit schemes have by default."""
PLAIN = "--kv-encoder amax --kv-transforms none --kv-window 0"
"""What makes a 4-bit scheme plain: the bytes of other engines' appends, and nothing beside them."""


def meaning(
    config: Config, spec: CacheSpec, parts: Iterable[SchemeGroup], window: int, sinks: int, dtype: str
) -> str:
    """Return what a 4-bit scheme gives here, in a line; empty for other schemes.

    Args:
        config: What is requested.
        spec: The same, parsed.
        parts: The layers, by scheme.
        window: Tokens of the exact window.
        sinks: First tokens that are read exactly too.
        dtype: The compute dtype.
    """
    parts = tuple(part for part in parts if part.scheme.is_4bit)
    if not parts:
        return ""
    newest = f"the first {sinks} and the newest {window}" if sinks else f"the newest {window}"
    near = f"{newest} tokens in {dtype}" if window else "no exact window"
    clauses = (f"block scales by {', '.join(_encoders(parts))}", *_keys(parts), near)
    name = config.kv_format if spec.scheme_file else spec.scheme.name
    rules = f" with --kv-layers {config.kv_layers}" if config.kv_layers else ""
    # Who says all of it needs no hint.
    is_complete = (config.kv_encoder, config.kv_transforms).count(
        schemes.AUTO
    ) == 0 and config.kv_window is not None
    return f"{name}{rules}: {'; '.join(clauses)}" + ("" if is_complete else f" (plain: {PLAIN})")


def _encoders(parts: Iterable[SchemeGroup]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for part in parts for name in part.scheme.encoders))


def _keys(parts: Iterable[SchemeGroup]) -> Iterator[str]:
    """Yield what is done to K before it is stored, with the layers where these differ."""
    layers: dict[tuple[str, ...], list[int]] = {}
    for part in parts:
        if part.scheme.has_4bit_keys and part.group.kind == "mha":
            layers.setdefault(part.scheme.transforms, []).extend(part.layers)
    for transforms, numbers in layers.items():
        changes = " and ".join(transform.get(name).participle for name in transforms) or "as they are"
        yield f"keys {changes}" + (f" in layers {format_layers(numbers)}" if len(layers) > 1 else "")

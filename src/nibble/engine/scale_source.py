"""Where KV scales come from: what --kv-scales says, and what `auto` finds. No weights are read, and no torch is needed.

`auto` takes the first that has all that the cache needs: the checkpoint's own, kv_scales.json in the model's folder,
else scales that are measured at the start. It never takes 1.0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from nibble.cache import scales as kv_scales
from nibble.cache.scales import KVScales
from nibble.config import BUNDLED
from nibble.engine.plan import CachePlan
from nibble.errors import ScaleError
from nibble.models.checkpoint_scales import has_weights, outline_scales, read_scales, tensor_names
from nibble.models.hub import has_tokenizer

AUTO, CALIBRATE, ONE = "auto", "calibrate", "one"
"""What --kv-scales takes beside a file."""

UNKNOWN = "unless the checkpoint, whose weights are not here, has its own"


class Origin(StrEnum):
    """Where scales come from."""

    UNNEEDED = "unneeded"  # no format of the cache has any
    ONE = "one"
    FILE = "file"
    CHECKPOINT = "checkpoint"
    MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class ScaleSource:
    """Where the scales of a cache come from, and why from there."""

    origin: Origin
    why: str = ""
    scales: KVScales | None = None
    """None where they are still to be read from the checkpoint, or to be measured."""
    folder: Path | None = None
    """Of the checkpoint, where it is on this machine."""

    def summary(self, model: str) -> str:
        """Return one line: where they come from, and where to keep those that are measured."""
        if self.origin is Origin.UNNEEDED:
            return "KV scales: this cache needs none"
        if self.origin is Origin.ONE:
            return "KV scales: 1.0 for all, as --kv-scales one says"
        if self.origin is Origin.FILE:
            assert self.scales
            return f"KV scales: from {self.scales.source}"
        if self.origin is Origin.CHECKPOINT:
            return "KV scales: the checkpoint's own"
        return f"KV scales: measured at the start on a built-in text, {self.why}; {keep(model)}"

    def report(self, model: str, scales: KVScales, seconds: float) -> str:
        """Return the same once they are measured, with how long it took."""
        line = f"KV scales: {scales.source}"
        if self is GIVEN_TEXTS:
            return f"{line} of the texts that were given, in {seconds:.1f} s"
        return f"{line} of a built-in text in {seconds:.1f} s, {self.why}; {keep(model)}"


GIVEN_TEXTS = ScaleSource(Origin.MEASURED)
"""Texts that a caller gives, whatever else there is."""


def keep(model: str) -> str:
    """Return how to keep scales that were measured."""
    if Path(model).expanduser().is_dir() and model not in BUNDLED:
        return f"to keep them: nibble calibrate {model} --out {Path(model) / kv_scales.FILE_NAME}"
    return f"to keep them: nibble calibrate {model} --out {kv_scales.FILE_NAME}, then --kv-scales {kv_scales.FILE_NAME}"


def find_source(cache_plan: CachePlan, folder_of: Callable[[str], Path | None]) -> ScaleSource:
    """Return where the scales of a plan come from.

    Args:
        cache_plan: the plan, and the model that it is for.
        folder_of: returns the folder of a model's checkpoint, None where it is not on this machine. It is called for
            `auto` only, where scales are needed.

    Raises:
        ScaleError: a file cannot be read or does not fit the model, or there are no scales and nothing to measure with.
        WeightError: the checkpoint is broken.
    """
    config, stores = cache_plan.config, cache_plan.plan.stores
    needed = any(map(kv_scales.needs_scales, stores))
    if config.kv_scales == ONE:
        return ScaleSource(Origin.ONE, scales=kv_scales.ONE)
    if config.kv_scales not in {AUTO, CALIBRATE}:
        return ScaleSource(
            Origin.FILE, scales=_checked(cache_plan, _load(cache_plan, Path(config.kv_scales)))
        )
    if not needed:
        return ScaleSource(Origin.UNNEEDED, scales=kv_scales.NONE)
    if config.kv_scales == CALIBRATE:
        return ScaleSource(Origin.MEASURED, "as --kv-scales calibrate says")
    return _automatic(cache_plan, folder_of(config.model))


def resolve_scales(cache_plan: CachePlan, source: ScaleSource) -> KVScales:
    """Return the scales of a source that are not measured; raise ScaleError or WeightError."""
    if source.scales is not None:
        return source.scales
    assert source.origin is Origin.CHECKPOINT and source.folder
    return _checked(cache_plan, read_scales(source.folder))


def _automatic(cache_plan: CachePlan, folder: Path | None) -> ScaleSource:
    stores = cache_plan.plan.stores
    own = outline_scales(tensor_names(folder) if folder else ())
    absent = kv_scales.missing(stores, own)
    if not absent:
        return ScaleSource(Origin.CHECKPOINT, folder=folder)
    if folder is None:
        return ScaleSource(Origin.MEASURED, UNKNOWN)
    is_here = has_weights(folder)
    why = f"as the checkpoint has none{f' for {absent}' if own.layers else ''}" if is_here else UNKNOWN
    path = folder / kv_scales.FILE_NAME
    if path.exists():
        in_file = _load(cache_plan, path)
        absent = kv_scales.missing(stores, in_file)
        if not absent:
            return ScaleSource(Origin.FILE, scales=_checked(cache_plan, in_file))
        why += f", and {path} has none for {absent}"
    if is_here and not has_tokenizer(folder):
        raise ScaleError(
            f"this cache needs a KV scale for {absent}, which the checkpoint does not have, and as it has no tokenizer "
            "either, none can be measured on text; name a JSON file with --kv-scales FILE, or accept a scale of 1.0, "
            "which loses accuracy, with --kv-scales one"
        )
    return ScaleSource(Origin.MEASURED, why)


def _load(cache_plan: CachePlan, path: Path) -> KVScales:
    return kv_scales.load(path, cache_plan.model_spec.layers)


def _checked(cache_plan: CachePlan, scales: KVScales) -> KVScales:
    """Return `scales` if they are all that the plan needs, else raise ScaleError."""
    for store in cache_plan.plan.stores:
        kv_scales.require(store, scales)
    return scales

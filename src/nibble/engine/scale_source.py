"""Where KV scales come from: what --kv-scales says, and what `auto` finds. No weights are read, and no torch is needed.

`auto` takes the first that has all that the cache needs: the checkpoint's own, kv_scales.json in the model's folder,
else scales that are measured at the start. It never takes 1.0.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from nibble.cache import scales as kv_scales
from nibble.cache.scales import KVScales
from nibble.config import BUNDLED
from nibble.engine.cache_plan import CachePlan
from nibble.errors import ScaleError
from nibble.models.checkpoint_scales import has_weights, outline_scales, read_scales, tensor_names
from nibble.models.hub import has_tokenizer
from nibble.spec import CacheSpec

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


AVAILABLE = (Origin.ONE, Origin.FILE, Origin.CHECKPOINT)
"""Origins of scales that are there, and hold for K under some transforms alone."""


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
    spec = cache_plan.model_spec
    return kv_scales.load(path, spec.layers, spec.tp, spec.kv_heads)


def _checked(cache_plan: CachePlan, scales: KVScales) -> KVScales:
    """Return `scales` if they are all that the plan needs, else raise ScaleError."""
    spec = cache_plan.model_spec
    for store in cache_plan.plan.stores:
        own = kv_scales.part(scales, store, spec.kv_heads, 0, spec.tp) if spec.tp > 1 else scales
        kv_scales.require(store, own)
    return scales


# Transforms that are left to Nibble


def usable_transforms(
    cache_plan: CachePlan, folder_of: Callable[[str], Path | None], *, measures: bool = True
) -> tuple[tuple[str, ...], str]:
    """Return the transforms that `auto` may choose, with the scales that are given, and why not all of them.

    Scales that are given hold for K as it was when they were measured, so those decide. Where they are to be measured,
    all are usable; where they can be neither had nor measured, those that need none.

    Args:
        cache_plan: the plan with all transforms that the model allows.
        folder_of: returns the folder of a model's checkpoint, None where it is not on this machine.
        measures: whether scales that are missing can be measured at the start.
    """
    offered = cache_plan.defaults.transforms
    layers = _chosen_layers(cache_plan)
    if not layers:
        return offered, ""
    origins = {
        transforms: _origin(_with_transforms(cache_plan, layers, transforms), folder_of, measures=measures)
        for transforms in _subsets(offered)
    }
    usable = [transforms for transforms, origin in origins.items() if origin in AVAILABLE]
    usable += [transforms for transforms, origin in origins.items() if origin is not None]
    # Where nothing will do, the refusal is that of K as it is.
    best = usable[0] if usable else ()
    left_out = "+".join(name for name in offered if name not in best)
    why = f"no {left_out}, which is the default for K in 4 bits: {_lacking(cache_plan, origins[best])}"
    return best, why if left_out else ""


def _lacking(cache_plan: CachePlan, origin: Origin | None) -> str:
    """Return what has no scales for more transforms."""
    if origin in AVAILABLE:
        source = cache_plan.config.kv_scales
        file = kv_scales.FILE_NAME if source == AUTO else source
        of = {Origin.ONE: "--kv-scales one", Origin.CHECKPOINT: "the checkpoint"}.get(origin, file)
        return f"{of} has no KV scales or means for it; --kv-scales calibrate measures them"
    return "it takes scales or means that are measured on text, and nothing is there to measure them with"


def _chosen_layers(cache_plan: CachePlan) -> frozenset[int]:
    """Return the layers whose transforms were left to Nibble, and that have some."""
    spec = CacheSpec.from_config(cache_plan.config)
    by_layer = spec.scheme_by_layer(cache_plan.model_spec.layers)
    return frozenset(
        entry.layer
        for entry in cache_plan.plan.layout.layers
        if spec.chooses_transforms and entry.transforms and not by_layer[entry.layer].names_transforms
    )


def _subsets(names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield all subsets, the largest first."""
    for size in range(len(names), -1, -1):
        yield from itertools.combinations(names, size)


def _with_transforms(cache_plan: CachePlan, layers: frozenset[int], transforms: tuple[str, ...]) -> CachePlan:
    """Return the plan with none but `transforms` in some layers, for what it stores alone."""
    layout = cache_plan.plan.layout
    stored = tuple(
        replace(entry, transforms=tuple(name for name in entry.transforms if name in transforms))
        if entry.layer in layers
        else entry
        for entry in layout.layers
    )
    return replace(cache_plan, plan=replace(cache_plan.plan, layout=replace(layout, layers=stored)))


def _origin(
    cache_plan: CachePlan, folder_of: Callable[[str], Path | None], *, measures: bool
) -> Origin | None:
    """Return where the scales of a plan come from; None where there are none."""
    try:
        source = find_source(cache_plan, folder_of)
        if source.origin is Origin.ONE:
            _checked(cache_plan, kv_scales.ONE)
    except ScaleError:
        return None
    return None if source.origin is Origin.MEASURED and not measures else source.origin

"""Global scales and K means of the cache: where they came from, their version, and their JSON files.

A missing scale is a ScaleError that says what to do; 1.0 is used only if it was asked for by name.
engine/scale_source.py chooses where they come from, models/checkpoint_scales.py reads them from checkpoints,
engine/calibration.py measures them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nibble import files
from nibble.cache.layout import CacheLayout
from nibble.errors import ScaleError
from nibble.formats import KVFormat
from nibble.formats import transforms as transforms_of
from nibble.model_spec import LATENT, Stream

SCHEMA = "nibble-kv-scales-1"
FILE_NAME = "kv_scales.json"
"""A file of this name in a model's folder is found by itself."""
FLOAT32_TINY, FLOAT32_MAX = 1.1754943508222875e-38, 3.4028234663852886e38
"""The smallest and the largest normal FP32 number, the bounds of a scale."""
E4M3_MAX = 448.0
"""The limit of FP8 scales in checkpoints and JSON files of other engines: scale = amax / 448."""
_PEER_LIMITS = {"float8_e4m3fn": E4M3_MAX, "float8_e5m2": 57344.0}
"""Limit of the scales in other engines' JSON files, by their `kv_cache.dtype`."""
BYTES_PER_NUMBER, NUMBERS_PER_LAYER = 32, 16
"""Of a file, a line each."""
Mean = tuple[tuple[float, ...], ...]
"""A mean of K: [H][D]."""


WAYS = (
    "Measure scales with --kv-scales calibrate (Python: LLM(..., calibrate=texts)), name a JSON file with --kv-scales "
    "FILE, or accept a scale of 1.0, which loses accuracy, with --kv-scales one"
)
"""What helps where scales are missing."""


def key_of(stream: str, transforms: Iterable[str]) -> str:
    """Return what scales of a stream go by: only K is transformed, and each transform changes its amax."""
    return "+".join((stream, *transforms)) if stream == "k" else stream


@dataclass(frozen=True, slots=True)
class StreamScale:
    """The global scale of one stream.

    A format with another max_value gets value * limit / max_value, so that the same amax fits.
    """

    value: float | tuple[float, ...]
    """One number, or one per head."""
    limit: float | None
    """`max_value` of the format that it was measured for; None is the scale 1.0 by name, which every format keeps."""

    def for_format(self, fmt: KVFormat) -> float | tuple[float, ...]:
        """Return the global scale of `fmt`."""
        if self.limit is None or fmt.max_value is None or self.limit == fmt.max_value:
            return self.value
        # The amax that was measured, value * limit, must become the largest value of the other format.
        ratio = self.limit / fmt.max_value
        return tuple(v * ratio for v in self.value) if isinstance(self.value, tuple) else self.value * ratio


@dataclass(frozen=True, slots=True)
class LayerScales:
    """Scales of one layer."""

    streams: Mapping[str, StreamScale]
    """By stream; a key such as `k+rot` holds for K under those transforms."""
    k_mean: Mean | None = None


@dataclass(frozen=True, slots=True)
class KVScales:
    """Scales by layer."""

    source: str
    """Where they came from, for messages and `nibble plan`."""
    layers: Mapping[int, LayerScales] = field(default_factory=dict)
    unit: bool = False
    """Whether every scale is 1.0, by name."""
    notes: tuple[str, ...] = ()
    """What users should know of them: values that are clipped."""

    def find(self, layer: int, stream: str, transforms: Iterable[str]) -> StreamScale | None:
        """Return the scale of a stream, None if there is none; see scale()."""
        by_stream = self.layers.get(layer, LayerScales({})).streams
        # Checkpoints of latent models have scales of keys only.
        return by_stream.get(key_of(stream, transforms)) or (by_stream.get("k") if stream == LATENT else None)

    def scale(
        self, layer: int, stream: str, transforms: Iterable[str], fmt: KVFormat
    ) -> float | tuple[float, ...]:
        """Return the global scale of a stream in `fmt`, 1.0 for formats without one.

        Args:
            layer: index of a stored layer.
            stream: name of the stream.
            transforms: names of the transforms of K.
            fmt: the format that stores the stream.

        Raises:
            ScaleError: there is none.
        """
        if not fmt.needs_scale or self.unit:
            return 1.0
        scale = self.find(layer, stream, transforms)
        if scale is None:
            raise ScaleError(
                f"{fmt.name} needs a KV scale for {key_of(stream, transforms)!r} of layer {layer}, and {self.source} "
                f"has none. {WAYS}"
            )
        return scale.for_format(fmt)

    def mean(self, layer: int, transforms: Iterable[str]) -> Mean | None:
        """Return the K mean [H][D] if a transform needs one, else None. Raise ScaleError if it is missing."""
        if not any(transforms_of.get(name).needs_mean for name in transforms):
            return None
        mean = self.layers.get(layer, LayerScales({})).k_mean
        if mean is None:
            raise ScaleError(
                f"layer {layer} needs a mean of K for the transform kmean, and {self.source} has none; "
                "measure it with --kv-scales calibrate or `nibble calibrate`"
            )
        return mean

    @property
    def version(self) -> str:
        """Return 16 hex digits that change with any scale; part of every prefix key."""
        # Sorted: the same scales in another order are the same version.
        layers = [(n, sorted(one.streams.items()), one.k_mean) for n, one in sorted(self.layers.items())]
        text = repr((layers, self.unit))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def part(scales: KVScales, layout: CacheLayout, kv_heads: Sequence[int], rank: int, size: int) -> KVScales:
    """Return the scales and means of a rank's heads.

    Args:
        scales: of all heads.
        layout: of the rank, whose layers have some of the heads.
        kv_heads: by layer, of the whole model.
        rank: of the process.
        size: number of ranks.
    """

    def cut(values: tuple[Any, ...], own: int, whole: int) -> tuple[Any, ...]:
        # Fewer heads than ranks are those of as many ranks that follow one another.
        first = rank * (whole // own) // size * own
        return values[first : first + own] if len(values) == whole else values

    def own_scale(scale: StreamScale, own: int, whole: int) -> StreamScale:
        if not isinstance(scale.value, tuple):
            return scale
        values = cut(scale.value, own, whole)
        # One for all, as files of other engines have it for the heads of a rank.
        return replace(scale, value=values[0] if len(set(values)) == 1 else values)

    layers = dict(scales.layers)
    for stored in layout.layers:
        entry, whole, own = layers.get(stored.layer), kv_heads[stored.layer], stored.streams[0].stream.heads
        if entry is None or own == whole:
            continue
        streams = {name: own_scale(scale, own, whole) for name, scale in entry.streams.items()}
        layers[stored.layer] = LayerScales(streams, entry.k_mean and cut(entry.k_mean, own, whole))
    return replace(scales, layers=layers)


NONE = KVScales("no source of scales")
ONE = KVScales("--kv-scales one", unit=True)


def needs_scales(layout: CacheLayout) -> bool:
    """Return whether any stream of `layout` has a global scale, or a transform that needs a mean."""
    return any(
        any(entry.codec.needs_scale for entry in layer.streams)
        or any(transforms_of.get(name).needs_mean for name in layer.transforms)
        for layer in layout.layers
    )


def missing(layouts: Iterable[CacheLayout], scales: KVScales) -> str:
    """Return the first scale or mean that `layouts` need and `scales` lack, as `'k' of layer 0`; else nothing."""
    for layer in (layer for layout in layouts for layer in layout.layers):
        for entry in layer.streams:
            name = entry.stream.name
            if entry.codec.needs_scale and scales.find(layer.layer, name, layer.transforms) is None:
                return f"{key_of(name, layer.transforms)!r} of layer {layer.layer}"
        needs_mean = any(transforms_of.get(name).needs_mean for name in layer.transforms)
        if needs_mean and scales.layers.get(layer.layer, LayerScales({})).k_mean is None:
            return f"the mean of K of layer {layer.layer}"
    return ""


def require(layout: CacheLayout, scales: KVScales) -> None:
    """Raise ScaleError unless `scales` has all that `layout` needs. To be called before weights load."""
    for layer in layout.layers:
        mean = scales.mean(layer.layer, layer.transforms)
        for entry in layer.streams:
            if mean is not None and entry.stream.name == "k":
                _require_mean(mean, entry.stream, f"{scales.source}, layer {layer.layer}")
            scale = scales.scale(layer.layer, entry.stream.name, layer.transforms, entry.codec)
            if isinstance(scale, tuple) and len(scale) != entry.stream.heads:
                raise ScaleError(
                    f"{scales.source} has {len(scale)} scales for {entry.stream.name!r} of layer {layer.layer}, which "
                    f"has {entry.stream.heads} heads"
                )
            where = f"{scales.source}, {entry.stream.name} of layer {layer.layer}"
            for value in scale if isinstance(scale, tuple) else (scale,):
                check_scale(value, f"{where} in {entry.codec.name}")


def _require_mean(mean: Mean, stream: Stream, where: str) -> None:
    """Raise ScaleError unless `mean` is finite and of the shape of `stream`."""
    sizes = sorted({len(head) for head in mean})
    if len(mean) != stream.heads or sizes != [stream.dim]:
        shape = f"({len(mean)}, {' or '.join(map(str, sizes)) or 0})"
        raise ScaleError(
            f"{where}: the mean of K has the shape {shape}, and the model needs ({stream.heads}, {stream.dim}); "
            "measure it with --kv-scales calibrate or `nibble calibrate`"
        )
    # Written this way round, the comparison is false for NaN too.
    if not all(abs(x) <= FLOAT32_MAX for head in mean for x in head):
        raise ScaleError(f"{where}: the mean of K must be finite; measure it again with `nibble calibrate`")


def check_scale(value: Any, where: str) -> float:
    """Return `value` as a float; raise ScaleError unless it is a normal FP32 number above 0."""
    # NaN fails both comparisons and is refused with the rest. bool is an int, but `true` is no scale.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and FLOAT32_TINY <= value <= FLOAT32_MAX):
        raise ScaleError(
            f"{where}: a KV scale must be a finite number above 0, and a normal one in float32 "
            f"({FLOAT32_TINY:.2g} to {FLOAT32_MAX:.2g}), not {value!r}"
        )
    return float(value)


def load(path: Path, layers: int, tp: int = 1, kv_heads: Sequence[int] = ()) -> KVScales:
    """Read scales from a JSON file of Nibble, SGLang or vLLM.

    Args:
        path: of the file.
        layers: of the model.
        tp: ranks that it is divided among.
        kv_heads: by layer, of the whole model, where there are several ranks.

    Raises:
        ScaleError: there is no such file, or it does not fit.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ScaleError(
            f"cannot read KV scales from {str(path)!r}: no such file, and the names are auto, calibrate and one"
        ) from error
    except OSError as error:
        raise ScaleError(f"cannot read KV scales: {error}") from error
    except ValueError as error:
        raise ScaleError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ScaleError(f"{path}: a file of KV scales is a JSON object, not {type(data).__name__}")
    notes = tuple(map(str, data.get("notes") or ()))
    if data.get("schema") == SCHEMA:
        scales = KVScales(str(path), _parse_own(data, path), notes=notes)
    else:
        scales = _merge(_parse_peer(data, path), path, tp, kv_heads)
    if beyond := [layer for layer in scales.layers if not 0 <= layer < layers]:
        raise ScaleError(
            f"{path} has scales for layer {beyond[0]}, and the model has layers 0 to {layers - 1}"
        )
    return scales


def _parse_peer(data: dict[str, Any], path: Path) -> list[dict[int, StreamScale]]:
    """Return scales by rank of `{"kv_cache": {"dtype": ..., "scaling_factor": {"<tp rank>": {"<layer>": scale}}}}`."""
    try:
        stored, dtype = data["kv_cache"]["scaling_factor"], data["kv_cache"].get("dtype") or "float8_e4m3fn"
        by_rank = {
            int(rank): {int(layer): value for layer, value in layers.items()}
            for rank, layers in stored.items()
        }
        ranks = [by_rank[rank] for rank in range(len(by_rank))]
        first = ranks[0]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ScaleError(
            f'{path}: neither "schema": "{SCHEMA}" nor the form {{"kv_cache": {{"scaling_factor": {{"0": '
            f'{{"<layer>": scale}}}}}}}} with ranks from 0 on ({type(error).__name__}: {error})'
        ) from error
    limit = _PEER_LIMITS.get(str(dtype))
    if limit is None:
        raise ScaleError(
            f"{path} has scales for kv_cache.dtype {dtype!r}, and Nibble reads those for "
            f"{' and '.join(_PEER_LIMITS)}; measure others with --kv-scales calibrate"
        )
    if unlike := [rank for rank, layers in enumerate(ranks) if layers.keys() != first.keys()]:
        raise ScaleError(f"{path}: tensor-parallel rank {unlike[0]} has scales for other layers than rank 0")
    return [
        {
            layer: StreamScale(check_scale(value, f"{path}, rank {rank}, layer {layer}"), limit)
            for layer, value in layers.items()
        }
        for rank, layers in enumerate(ranks)
    ]


def _merge(
    ranks: Sequence[Mapping[int, StreamScale]], path: Path, tp: int, kv_heads: Sequence[int]
) -> KVScales:
    """Return the scales of a file of several ranks: each rank here has the largest of those that had its heads.

    A larger scale holds all values that a smaller one does.
    """
    count = len(ranks)
    if count % tp and tp % count:
        raise ScaleError(
            f"{path} has scales for {count} tensor-parallel ranks, whose heads are not those of {tp}: choose a --tp "
            f"that divides {count} or is a multiple of it, or measure scales with --kv-scales calibrate"
        )

    def merged(layer: int) -> StreamScale:
        values = [_largest(rank[layer]) for rank in ranks]
        # Of each rank here, those of the file that had its heads.
        own = [
            max(values[rank * count // tp : max((rank + 1) * count // tp, rank * count // tp + 1)])
            for rank in range(tp)
        ]
        if len(set(own)) == 1 or not 0 <= layer < len(kv_heads):
            return replace(ranks[0][layer], value=max(own))
        heads = kv_heads[layer]
        # Several ranks have a head of which there are fewer than ranks.
        by_head = tuple(
            max(own[head * tp // heads : max((head + 1) * tp // heads, head * tp // heads + 1)])
            for head in range(heads)
        )
        return replace(ranks[0][layer], value=by_head)

    # These files have one scale a layer, for K and V alike.
    both = {layer: merged(layer) for layer in ranks[0]}
    layers = {layer: LayerScales({"k": scale, "v": scale}) for layer, scale in both.items()}
    takers = "the largest of a layer is taken"
    if tp > 1:
        takers = f"each of {tp} ranks takes the largest of those that had its heads"
    note = f"KV scales of {count} tensor-parallel ranks in {path}: {takers}"
    return KVScales(str(path), layers, notes=(note,) if count > 1 else ())


def _parse_own(data: dict[str, Any], path: Path) -> dict[int, LayerScales]:
    try:
        layers = data["layers"].items()
        return {int(layer): _parse_layer(entry, f"{path}, layer {layer}") for layer, entry in layers}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ScaleError(
            f"{path}: not a well-formed {SCHEMA} file ({type(error).__name__}: {error})"
        ) from error


def _parse_layer(entry: dict[str, Any], where: str) -> LayerScales:
    # The file holds amax itself, which is a scale with the limit 1.
    streams = {
        key: StreamScale(check_scale(amax, f"{where}, {key}"), 1.0) for key, amax in entry["amax"].items()
    }
    mean = entry.get("k_mean")
    return LayerScales(streams, None if mean is None else _parse_mean(mean, where))


def _parse_mean(mean: Any, where: str) -> Mean:
    """Parse `k_mean` of a file: equally many finite numbers for each head. Raise ScaleError."""
    rows = [tuple(head) for head in mean]
    if len({len(row) for row in rows}) != 1:
        raise ScaleError(f"{where}: k_mean must have equally many numbers for each head, [heads][dim]")
    for x in (x for row in rows for x in row):
        if isinstance(x, bool) or not isinstance(x, (int, float)) or not abs(x) <= FLOAT32_MAX:
            raise ScaleError(f"{where}: k_mean must be finite numbers, not {x!r}; measure it again")
    return tuple(tuple(map(float, row)) for row in rows)


def save(scales: KVScales, path: Path) -> None:
    """Write Nibble's own form: the largest magnitude (amax) of each stream, which any format can use."""
    layers = {
        str(layer): {
            "amax": {key: _amax(scale) for key, scale in sorted(entry.streams.items())},
            **({"k_mean": [list(head) for head in entry.k_mean]} if entry.k_mean else {}),
        }
        for layer, entry in sorted(scales.layers.items())
    }
    head = {"schema": SCHEMA, "source": scales.source, **({"notes": scales.notes} if scales.notes else {})}
    files.write_atomic(path, json.dumps({**head, "layers": layers}, indent=1) + "\n")


def file_size(layout: CacheLayout) -> int:
    """Return bytes that a file of measured scales takes at most: numbers of K means, and a few more a layer."""
    means = sum(entry.stream.values for layer in layout.layers for entry in layer.streams)
    return BYTES_PER_NUMBER * (means + NUMBERS_PER_LAYER * len(layout.layers))


def _amax(scale: StreamScale) -> float:
    # The file has one number a stream, so the largest head decides.
    return _largest(scale) * (scale.limit or 1.0)


def _largest(scale: StreamScale) -> float:
    return max(scale.value) if isinstance(scale.value, tuple) else scale.value

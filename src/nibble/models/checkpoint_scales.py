"""KV scales of a checkpoint's own tensors: which it has, without torch, and their values.

They are read under every name that the ecosystem gives them, after `layers.<n>.`: ModelOpt `self_attn.k_proj.k_scale` /
`v_proj.v_scale`; compressed-tensors `self_attn.k_scale` / `v_scale`; also `self_attn.attn.*` and
`self_attn.qkv_proj.*`; Quark `k_proj.output_scale` / `v_proj.output_scale`; old AutoFP8 `self_attn.kv_scale`, for both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from nibble import formats
from nibble.cache import scales
from nibble.cache.scales import KVScales, LayerScales, StreamScale
from nibble.errors import ScaleError, WeightError
from nibble.formats import scheme as schemes
from nibble.formats import scheme_file
from nibble.formats.base import E2M1_MAX
from nibble.models.hub import INDEX_FILE, modelopt_entry, read_json

WEIGHTS = "*.safetensors"
_ATTENTION = r"(?:^|\.)layers\.(?P<layer>\d+)\.(?:self_attn|mixer)\."
_SCALE_NAME = re.compile(
    _ATTENTION + r"(?:(?:attn\.|qkv_proj\.)?(?P<stream>k|v|kv)_scale"
    r"|(?P<of>k|v)_proj\.(?:attn\.)?(?:(?P=of)_scale|output_scale))$"
)  # fmt: skip
_ZERO_POINT = re.compile(_ATTENTION + r"(?:attn\.)?(?:k|v)_zero_point$")
_QUERY_SCALE = re.compile(_ATTENTION + r"(?:attn\.)?(?:q|prob)_(?:scale|zero_point)$")
_OTHER_PARTS = re.compile(r"(?:^|\.)(?:mtp|vision|visual|audio)")
"""Layers of other parts of a checkpoint, which count from 0 again."""

_SCALE_LIMITS = {"FP8": scales.E4M3_MAX, "NVFP4": E2M1_MAX * scales.E4M3_MAX, "INT8": 127.0}
"""Limit of the scales (the largest magnitude of the format), by the format that a checkpoint declares."""
Value = float | tuple[float, ...]
LimitOf = Callable[[int, str], float]
"""Returns the limit of a scale by its layer and stream."""
_ANY = 1.0
"""Stands for a value that is not read."""


def is_scale(name: str) -> bool:
    """Return whether a tensor of a checkpoint is a KV scale, or a scale of queries, which Nibble does not use."""
    return any(pattern.search(name) for pattern in (_SCALE_NAME, _ZERO_POINT, _QUERY_SCALE))


def tensor_names(folder: Path) -> frozenset[str]:
    """Return the names of a checkpoint's tensors by its headers, else by its index; none where it has neither.

    Raises:
        WeightError: a file is broken.
    """
    names = {name for file in _files(folder) for name in _header(file) if name != "__metadata__"}
    # A folder may have the index alone: enough to plan with, and to know the scales' names.
    index = {} if names else read_json(folder / INDEX_FILE).get("weight_map") or {}
    return frozenset(names or index)


def has_weights(folder: Path | None) -> bool:
    """Return whether there is a folder with a checkpoint's tensors, or an index that names them."""
    # PyTorch's own files have no header that could be read alone, and no scales that anyone looks for.
    return folder is not None and any(
        True for pattern in (WEIGHTS, INDEX_FILE, "*.bin") for _ in folder.glob(pattern)
    )


def outline_scales(names: Iterable[str]) -> KVScales:
    """Return which scales tensors of these names are, in place of their values 1."""
    entries = ((match, _ANY) for name in names if (match := _match(name)))
    return _assemble("the checkpoint", entries, lambda layer, stream: scales.E4M3_MAX)


def read_scales(folder: Path) -> KVScales:
    """Return the scales of a checkpoint's tensors; no other tensor is read.

    Raises:
        ScaleError: a scale is malformed.
        WeightError: a file is broken.
    """
    # In a fixed order: if two tensors scale one stream, the same one wins on every machine.
    values = (entry for file in _files(folder) for entry in _scales_of(file))
    return _assemble(f"the checkpoint {folder.name}", values, _limits(folder))


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob(WEIGHTS))


def _header(file: Path) -> dict[str, Any]:
    """Return the header of a safetensors file: its length in 8 bytes, little endian, then JSON by tensor name."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            # A broken length may be larger than any memory.
            return dict(json.loads(stream.read(min(length, file.stat().st_size))))
    except (OSError, ValueError, TypeError) as error:
        raise _broken(file, error) from error


def _broken(file: Path, error: Exception) -> WeightError:
    return WeightError(f"the weight file {file} is broken or cut short ({error}); download it again")


def _assemble(source: str, entries: Iterable[tuple[re.Match[str], Value]], limit_of: LimitOf) -> KVScales:
    layers: dict[int, dict[str, StreamScale]] = {}
    for match, value in entries:
        stream = match["stream"] or match["of"]
        for name in ("k", "v") if stream == "kv" else (stream,):
            layer = int(match["layer"])
            layers.setdefault(layer, {})[name] = StreamScale(value, limit_of(layer, name))
    return KVScales(source, {layer: LayerScales(entry) for layer, entry in layers.items()})


def _match(name: str) -> re.Match[str] | None:
    """Return the match of a scale's name, None for another tensor."""
    return None if _OTHER_PARTS.search(name) else _SCALE_NAME.search(name)


def _scales_of(file: Path) -> list[tuple[re.Match[str], Value]]:
    """Return the scales in a weight file, and check its zero points."""
    # Imports torch with the first tensor that it opens.
    from safetensors import SafetensorError, safe_open

    entries = []
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in filter(is_scale, tensors.keys()):
                if match := _match(name):
                    entries.append((match, _read_scale(name, tensors)))
                elif _ZERO_POINT.search(name) and not _OTHER_PARTS.search(name):
                    _require_no_offset(name, tensors)
    except SafetensorError as error:
        raise _broken(file, error) from error
    return entries


def _require_no_offset(name: str, tensors: Any) -> None:
    # Zero points that are all zero are common and change nothing.
    if tensors.get_tensor(name).any():
        raise ScaleError(
            f"{name} is not zero: the checkpoint's KV scales are for values with an offset, which no format has"
        )


def _read_scale(name: str, tensors: Any) -> Value:
    # A scalar, [1] or one value per head, however nested.
    values = tensors.get_tensor(name).flatten().tolist()
    scalars = tuple(scales.check_scale(value, name) for value in values)
    if not scalars:
        raise ScaleError(f"{name} is empty")
    return scalars[0] if len(scalars) == 1 else scalars


def _limits(folder: Path) -> LimitOf:
    """Return what gives the limit of a checkpoint's scales: 448 for FP8, 6 * 448 for NVFP4."""
    quant, own = read_json(folder / "config.json").get("quantization_config") or {}, modelopt_entry(folder)
    if by_layer := scheme_file.modelopt_layers(own) or scheme_file.modelopt_layers(quant):
        return _limits_by_layer(by_layer, folder)
    algo = scheme_file.MODELOPT_ALGO
    # Checkpoints that declare nothing have FP8 scales: the other kinds always declare theirs.
    scheme = quant.get("kv_cache_scheme") or quant.get(algo) or own.get(algo) or "FP8"
    limit = _SCALE_LIMITS[_declared_format(scheme)]
    return lambda layer, stream: limit


def _limits_by_layer(entry: Mapping[str, Any], folder: Path) -> LimitOf:
    """Return the same for an entry that names formats by layer; of layers without one, FP8's."""
    algos = scheme_file.modelopt_algos(entry, str(folder))

    def limit_of(layer: int, stream: str) -> float:
        if layer not in algos:
            return scales.E4M3_MAX
        scheme = schemes.parse(scheme_file.MODELOPT_SCHEMES[algos[layer]])
        return formats.get(schemes.mixed(scheme.base).get(stream, scheme.base)).max_value or scales.E4M3_MAX

    return limit_of


def _declared_format(scheme: Any) -> str:
    """Return the key of _SCALE_LIMITS that a declaration means; raise ScaleError for others."""
    # A dict is a scheme of compressed-tensors, which has bits and a type, but no name.
    if isinstance(scheme, dict):
        by_bits = {4: "NVFP4", 8: "INT8" if scheme.get("type") == "int" else "FP8"}
        name = by_bits.get(scheme.get("num_bits", 8), "")
    else:
        name = str(scheme).upper()
    if name not in _SCALE_LIMITS:
        raise ScaleError(
            f"the checkpoint declares KV scales for {scheme}, and Nibble reads those for "
            f"{', '.join(_SCALE_LIMITS)}; measure others with --kv-scales calibrate"
        )
    return name

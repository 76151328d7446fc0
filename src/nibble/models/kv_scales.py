"""Read KV scales from a checkpoint, under every name that the ecosystem gives them.

Names, after `layers.<n>.`: ModelOpt `self_attn.k_proj.k_scale` / `v_proj.v_scale`; compressed-tensors
`self_attn.k_scale` / `v_scale`; also `self_attn.attn.*` and `self_attn.qkv_proj.*`; Quark
`k_proj.output_scale` / `v_proj.output_scale`; old AutoFP8 `self_attn.kv_scale`, for both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from nibble.cache import scales
from nibble.cache.scales import KVScales, LayerScales, StreamScale
from nibble.errors import ScaleError, WeightError
from nibble.formats.base import E2M1_MAX

_OWNER = r"(?:^|\.)layers\.(?P<layer>\d+)\.(?:self_attn|mixer)\."
_NAME = re.compile(
    _OWNER + r"(?:(?:attn\.|qkv_proj\.)?(?P<stream>k|v|kv)_scale"
    r"|(?P<of>k|v)_proj\.(?:attn\.)?(?:(?P=of)_scale|output_scale))$"
)  # fmt: skip
_ZERO_POINT = re.compile(_OWNER + r"(?:attn\.)?(?:k|v)_zero_point$")
_UNUSED = re.compile(_OWNER + r"(?:attn\.)?(?:q|prob)_(?:scale|zero_point)$")
_OTHER_PARTS = re.compile(r"(?:^|\.)(?:mtp|vision|visual|audio)")
"""Layers of other parts of a checkpoint, which count from 0 again."""

_LIMITS = {"FP8": scales.E4M3_MAX, "NVFP4": E2M1_MAX * scales.E4M3_MAX, "INT8": 127.0}
"""Limit of the scales (the largest magnitude of the format), by the format that a checkpoint declares."""


def is_scale(name: str) -> bool:
    """Return whether a tensor of a checkpoint is a KV scale, or a scale of queries, which Nibble does not use."""
    return any(pattern.search(name) for pattern in (_NAME, _ZERO_POINT, _UNUSED))


def read(folder: Path) -> KVScales:
    """Return the scales of a checkpoint folder: of its tensors, else of its kv_scales.json, else none.

    Raises:
        ScaleError: a scale is malformed.
        WeightError: a file is broken.
    """
    layers: dict[int, dict[str, StreamScale]] = {}
    limit = _limit(folder)
    for layer, stream, value in _scale_tensors(folder):
        entry = layers.setdefault(layer, {})
        for name in ("k", "v") if stream == "kv" else (stream,):
            entry[name] = StreamScale(value, limit)
    bundled = folder / "kv_scales.json"
    if not layers and bundled.exists():
        return scales.load(bundled, _layers(folder))
    return KVScales(f"the checkpoint {folder.name}", {n: LayerScales(entry) for n, entry in layers.items()})


def _scale_tensors(folder: Path) -> Iterator[tuple[int, str, float | tuple[float, ...]]]:
    """Yield (layer, stream, value) of every scale tensor; no other tensor is read."""
    # In a fixed order: if two tensors scale one stream, the same one wins on every machine.
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in filter(is_scale, tensors.keys()):
                    if not _OTHER_PARTS.search(name):
                        yield from _read(name, tensors)
        except SafetensorError as error:
            raise WeightError(
                f"the weight file {file} is broken or cut short ({error}); download it again"
            ) from error


def _read(name: str, tensors: Any) -> Iterator[tuple[int, str, float | tuple[float, ...]]]:
    """Yield the scale called `name` if it is one of K or V."""
    if match := _NAME.search(name):
        values = tensors.get_tensor(name).tolist()
        yield int(match["layer"]), match["stream"] or match["of"], _value(values, name)
    # Zero points that are all zero are common and change nothing.
    elif _ZERO_POINT.search(name) and tensors.get_tensor(name).any():
        raise ScaleError(
            f"{name} is not zero: the checkpoint's KV scales are for values with an offset, which no format "
            "has"
        )


def _value(values: Any, name: str) -> float | tuple[float, ...]:
    """Return a scalar, [1] or one value per head, however nested, as a number or a tuple."""
    flat = [values]
    while any(isinstance(item, list) for item in flat):
        flat = [inner for item in flat for inner in (item if isinstance(item, list) else [item])]
    scalars = tuple(scales.check_scale(item, name) for item in flat)
    if not scalars:
        raise ScaleError(f"{name} is empty")
    return scalars[0] if len(scalars) == 1 else scalars


def _limit(folder: Path) -> float:
    """Return the limit of the checkpoint's scales: 448 for FP8, 6 * 448 for NVFP4."""
    quant = _read_json(folder / "config.json").get("quantization_config") or {}
    side = _read_json(folder / "hf_quant_config.json").get("quantization") or {}
    for scheme in (
        quant.get("kv_cache_scheme"),
        quant.get("kv_cache_quant_algo"),
        side.get("kv_cache_quant_algo"),
    ):
        if scheme:
            return _LIMITS[_declared_format(scheme)]
    # Checkpoints that declare nothing have FP8 scales: the other kinds always declare theirs.
    return _LIMITS["FP8"]


def _declared_format(scheme: Any) -> str:
    """Return the key of _LIMITS that a declaration means; raise ScaleError for others."""
    # A dict is a scheme of compressed-tensors, which has bits and a type, but no name.
    if isinstance(scheme, dict):
        name = {4: "NVFP4", 8: "INT8" if scheme.get("type") == "int" else "FP8"}.get(
            scheme.get("num_bits", 8), ""
        )
    else:
        name = str(scheme).upper()
    if name not in _LIMITS:
        raise ScaleError(
            f"the checkpoint declares KV scales for {scheme}, and Nibble reads those for "
            f"{', '.join(_LIMITS)}; measure others with --kv-scales calibrate"
        )
    return name


def _layers(folder: Path) -> int:
    """How many layers the model has, as far as config.json says."""
    config = _read_json(folder / "config.json")
    # Without a count in the config any layer number must pass.
    return int(
        config.get("num_hidden_layers")
        or (config.get("text_config") or {}).get("num_hidden_layers")
        or 1 << 20
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise WeightError(
            f"{path} is not a JSON object ({error}); download or save the checkpoint again"
        ) from error

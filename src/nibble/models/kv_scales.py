"""KV scales from a checkpoint, under every name that the ecosystem gives them.

Owns read(). What a scale means, and its JSON forms, is in cache/scales.py. Must not know of pages or layouts.

Names, after `layers.<n>.`: ModelOpt `self_attn.k_proj.k_scale` / `v_proj.v_scale`; compressed-tensors
`self_attn.k_scale` / `v_scale`; also `self_attn.attn.*` and `self_attn.qkv_proj.*`; Quark `k_proj.output_scale` /
`v_proj.output_scale`; old AutoFP8 `self_attn.kv_scale`, for both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

from nibble.cache import scales
from nibble.cache.scales import KVScales, LayerScales, StreamScale
from nibble.errors import ScaleError

_NAME = re.compile(
    r"layers\.(?P<layer>\d+)\.(?:self_attn|mixer)\."
    r"(?:attn\.|qkv_proj\.)?(?:[kv]_proj\.)?(?:(?P<stream>k|v|kv)_scale)$"
)
_QUARK = re.compile(r"layers\.(?P<layer>\d+)\.self_attn\.(?P<stream>k|v)_proj\.output_scale$")
E2M1_MAX = 6.0
FP8_LIMIT = scales.E4M3_MAX
FP4_LIMIT = E2M1_MAX * scales.E4M3_MAX


def is_scale(name: str) -> bool:
    """Whether a tensor of a checkpoint is a KV scale."""
    return bool(_NAME.search(name) or _QUARK.search(name))


def read(folder: Path) -> KVScales:
    """The scales of a checkpoint folder; without any, an empty KVScales whose source says so. Raises ScaleError."""
    bundled = folder / "kv_scales.json"
    limit = _limit(folder)
    layers: dict[int, dict[str, StreamScale]] = {}
    for layer, stream, value in _found(folder):
        entry = layers.setdefault(layer, {})
        for name in ("k", "v") if stream == "kv" else (stream,):
            entry[name] = StreamScale(value, limit)
    if not layers and bundled.exists():
        return scales.load(bundled, layers=1 << 20)
    return KVScales(f"the checkpoint {folder.name}", {n: LayerScales(entry) for n, entry in layers.items()})


def _found(folder: Path) -> Iterator[tuple[int, str, float | tuple[float, ...]]]:
    """(layer, stream, value) of every scale tensor; only these tensors are read."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                if match := _NAME.search(name) or _QUARK.search(name):
                    yield int(match["layer"]), match["stream"], _value(tensors.get_tensor(name).tolist(), name)


def _value(found: Any, name: str) -> float | tuple[float, ...]:
    """A scalar, [1], or one value per head, however nested."""
    flat = [found]
    while any(isinstance(item, list) for item in flat):
        flat = [inner for item in flat for inner in (item if isinstance(item, list) else [item])]
    values = tuple(scales.checked(item, name) for item in flat)
    if not values:
        raise ScaleError(f"{name} is empty")
    return values[0] if len(values) == 1 else values


def _limit(folder: Path) -> float:
    """The largest magnitude that the checkpoint's scales were made for: 448 for FP8, 6 * 448 for NVFP4."""
    declared = [_read_json(folder / "config.json").get("quantization_config", {}).get("kv_cache_scheme")]
    declared.append(_read_json(folder / "hf_quant_config.json").get("quantization", {}).get("kv_cache_quant_algo"))
    for scheme in filter(None, declared):
        bits = scheme.get("num_bits") if isinstance(scheme, dict) else None
        if bits == 4 or "FP4" in str(scheme).upper():
            return FP4_LIMIT
    return FP8_LIMIT


def _read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}

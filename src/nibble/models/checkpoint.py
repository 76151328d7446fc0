"""Read checkpoints: weights, for a model that is prepared to serve, and KV scales.

A model is prepared once its tensors are checked: MLA absorbed, rope fixed, linear layers packed or merged.

KV scales are read under every name that the ecosystem gives them, after `layers.<n>.`: ModelOpt
`self_attn.k_proj.k_scale` / `v_proj.v_scale`; compressed-tensors `self_attn.k_scale` / `v_scale`; also
`self_attn.attn.*` and `self_attn.qkv_proj.*`; Quark `k_proj.output_scale` / `v_proj.output_scale`; old AutoFP8
`self_attn.kv_scale`, for both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from nibble.cache import scales
from nibble.cache.scales import KVScales, LayerScales, StreamScale
from nibble.errors import ScaleError, WeightError
from nibble.formats.base import E2M1_MAX
from nibble.model_spec import ModelSpec
from nibble.models import hook
from nibble.models.hook import adapt
from nibble.models.hub import first_line, locate, modelopt_entry, quiet, read_json
from nibble.models.linear import merge_and_tune_linears, pack_experts, pack_linears
from nibble.models.mla import fix_rope, tabulate_rope
from nibble.models.refusals import architecture_class


def load(config: PretrainedConfig, model_spec: ModelSpec, dtype: str, device: str) -> nn.Module:
    """Load the weights.

    Args:
        config: from models/refusals.py.
        model_spec: what was observed of the model.
        dtype: compute dtype, a name of torch.
        device: where the model runs.

    Returns:
        The model in eval mode, prepared by prepare_model().

    Raises:
        WeightError: the checkpoint is missing, broken, or another model's.
    """
    path = locate(model_spec.model)
    try:
        with quiet():
            model, info = (architecture_class(config) or AutoModelForCausalLM).from_pretrained(
                path,
                config=config,
                dtype=getattr(torch, dtype),
                attn_implementation=hook.NAME,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # _check_tensors reports them with the other differences
                trust_remote_code=False,
            )
    except SafetensorError as error:
        raise WeightError(
            f"a weight file of {path} is broken or cut short ({error}); download it again"
        ) from error
    except (UnpicklingError, EOFError) as error:
        raise WeightError(
            f"a weight file of {path} is broken, or is no PyTorch checkpoint ({first_line(error)}); "
            "download it again, as safetensors where there is a choice"
        ) from error
    except (OSError, RuntimeError, ValueError, KeyError, ImportError) as error:
        raise WeightError(f"cannot load the weights of {model_spec.model!r} from {path}: {error}") from error
    _check_tensors(info, model_spec.model)
    return prepare_model(model.to(device), model_spec.max_context)


def prepare_model(model: nn.Module, max_context: int) -> nn.Module:
    """Prepare a loaded model for serving, in place, and return it."""
    # First, because it needs the plain weight of kv_b_proj, which merging and packing replace.
    adapt(model)
    # Before tabulate_rope(), which computes its tables with these frequencies.
    fix_rope(model, max_context)
    if next(model.parameters()).is_cuda:
        tabulate_rope(model, max_context)
        merge_and_tune_linears(model)
    else:
        pack_linears(model)
        pack_experts(model)
    return model.eval().requires_grad_(False)


def _check_tensors(info: dict[str, Any], model: str) -> None:
    """Raise WeightError unless the checkpoint has exactly the model's tensors; KV scales do not count."""
    missing = sorted(info.get("missing_keys", ()))
    unexpected = sorted(key for key in info.get("unexpected_keys", ()) if not is_scale(key))
    mismatched = sorted(_shapes(entry) for entry in info.get("mismatched_keys", ()))
    problems = (
        ("lacks", missing, "the download may be incomplete"),
        (
            "has other shapes than config.json says for",
            mismatched,
            "weights and config.json belong to different models",
        ),
        ("holds, beside those of the model,", unexpected, "they would be ignored, and the answers wrong"),
    )
    for what, keys, meaning in problems:
        if keys:
            raise WeightError(
                f"the checkpoint {model!r} {what} {len(keys)} tensors, {keys[0]} among them: {meaning}"
            )


def _shapes(entry: Any) -> str:
    """Return (name, stored shape, model's shape) as text."""
    name, *shapes = entry if isinstance(entry, (tuple, list)) else (entry,)
    return (
        f"{name} ({' stored, needed '.join(str(tuple(shape)) for shape in shapes)})" if shapes else str(name)
    )


def download(model: str) -> Path:
    """Return the local folder of a model's checkpoint; a hub model is downloaded first. Raise WeightError."""
    path = Path(locate(model))
    if path.exists():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.model", "*.jinja"])
        )
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise WeightError(f"cannot fetch {model!r}: {first_line(error)}") from error


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


def is_scale(name: str) -> bool:
    """Return whether a tensor of a checkpoint is a KV scale, or a scale of queries, which Nibble does not use."""
    return any(pattern.search(name) for pattern in (_SCALE_NAME, _ZERO_POINT, _QUERY_SCALE))


def read_scales(folder: Path) -> KVScales:
    """Return the scales of a checkpoint folder: of its tensors, else of its kv_scales.json, else none.

    Raises:
        ScaleError: a scale is malformed.
        WeightError: a file is broken.
    """
    layers: dict[int, dict[str, StreamScale]] = {}
    limit = _scale_limit(folder)
    for layer, stream, value in _scale_tensors(folder):
        entry = layers.setdefault(layer, {})
        for name in ("k", "v") if stream == "kv" else (stream,):
            entry[name] = StreamScale(value, limit)
    bundled = folder / "kv_scales.json"
    if not layers and bundled.exists():
        return scales.load(bundled, _num_layers(folder))
    return KVScales(f"the checkpoint {folder.name}", {n: LayerScales(entry) for n, entry in layers.items()})


def _scale_tensors(folder: Path) -> Iterator[tuple[int, str, float | tuple[float, ...]]]:
    """Yield (layer, stream, value) of every scale tensor; no other tensor is read."""
    # In a fixed order: if two tensors scale one stream, the same one wins on every machine.
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in filter(is_scale, tensors.keys()):
                    if not _OTHER_PARTS.search(name):
                        yield from _read_scale(name, tensors)
        except SafetensorError as error:
            raise WeightError(
                f"the weight file {file} is broken or cut short ({error}); download it again"
            ) from error


def _read_scale(name: str, tensors: Any) -> Iterator[tuple[int, str, float | tuple[float, ...]]]:
    """Yield the scale called `name` if it is one of K or V."""
    if match := _SCALE_NAME.search(name):
        # A scalar, [1] or one value per head, however nested.
        values = tensors.get_tensor(name).flatten().tolist()
        scalars = tuple(scales.check_scale(value, name) for value in values)
        if not scalars:
            raise ScaleError(f"{name} is empty")
        value = scalars[0] if len(scalars) == 1 else scalars
        yield int(match["layer"]), match["stream"] or match["of"], value
    # Zero points that are all zero are common and change nothing.
    elif _ZERO_POINT.search(name) and tensors.get_tensor(name).any():
        raise ScaleError(
            f"{name} is not zero: the checkpoint's KV scales are for values with an offset, which no format "
            "has"
        )


def _scale_limit(folder: Path) -> float:
    """Return the limit of the checkpoint's scales: 448 for FP8, 6 * 448 for NVFP4."""
    quant, algo = read_json(folder / "config.json").get("quantization_config") or {}, "kv_cache_quant_algo"
    # Checkpoints that declare nothing have FP8 scales: the other kinds always declare theirs.
    scheme = quant.get("kv_cache_scheme") or quant.get(algo) or modelopt_entry(folder).get(algo) or "FP8"
    return _SCALE_LIMITS[_declared_format(scheme)]


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


def _num_layers(folder: Path) -> int:
    """Return how many layers the model has, as far as config.json says."""
    config = read_json(folder / "config.json")
    count = config.get("num_hidden_layers") or (config.get("text_config") or {}).get("num_hidden_layers")
    # Without a count in the config any layer number must pass.
    return int(count or 1 << 20)

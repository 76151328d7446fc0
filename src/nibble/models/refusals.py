"""From a model's name to its Transformers config, and the families that are refused, with the reason.

Owns load_config() and the refusals. Runs before any weight is read. Must not know of caches or
attention.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils import cached_file

from nibble.errors import ConfigError, WeightError
from nibble.models.hub import find
from nibble.models.quiet import first_line

_RECURRENT = "keep a recurrent state, not keys and values only"
REFUSED = {
    "llama4": "its chunked attention lives in the mask only, which a paged cache never builds",
    "llama4_text": "its chunked attention lives in the mask only, which a paged cache never builds",
}
"""Families that would run and answer wrong: model_type -> why. models/guard.py refuses more, by what they
do.
"""

ALIASES = {"kimi_k2": "deepseek_v3"}
"""Families whose checkpoints bring code for what Transformers knows by another name."""

ATTENTION = ("full_attention", "sliding_attention", "attention")
"""Layer types that are attention over one key and value for each token."""
LATENT = ("indexed_attention", "deepseek_sparse_attention")
"""Layer types of sparse attention over a latent; their index keys are part of the cache's geometry."""
UNSERVED = {
    "linear_attention": _RECURRENT,
    "mamba": _RECURRENT,
    "conv": _RECURRENT,
    "recurrent": _RECURRENT,
    "hybrid": _RECURRENT,
    "hybrid_sliding": _RECURRENT,
    "chunked_attention": "keep their chunks in the mask, which a paged cache never builds",
}
"""Other layer types -> why they are refused."""
UNKNOWN_LAYER = "are more than attention over one key and value for each token"

MODELOPT = "modelopt"
MODELOPT_FILE = "hf_quant_config.json"
NO_WEIGHTS = (None, "", "NONE", "none")
"""What ModelOpt calls the weights' algorithm where only the KV cache is quantised."""


def load_config(model: str, index_topk: int | None = None) -> PretrainedConfig:
    """The config of `model`; raises ConfigError or WeightError where it cannot be served right.

    index_topk: tokens that sparse attention looks at, where these are not the model's own.
    An entry that speaks of KV scales only is left out: models/kv_scales.py reads it, and Transformers need
    not.
    """
    path = find(model)
    local = Path(path)
    if local.exists() and not (local / "config.json").exists():
        raise WeightError(
            f"{local} is no Transformers checkpoint: it has no config.json; name the folder that has one"
        )
    try:
        config = _read(path)
    except Exception as error:  # of all kinds: every family checks its values in its own way
        raise _unreadable(model, local, error) from error
    refuse(config, local if local.exists() else _cached_beside(path))
    if index_topk is not None:
        if not hasattr(config, "index_topk"):
            raise ConfigError(
                f"--index-topk is for models with sparse attention (DSA), which {model} has not"
            )
        config.index_topk = index_topk
    if _kv_only(config):
        del config.quantization_config
    return config


def _read(path: str) -> PretrainedConfig:
    """The config as Transformers reads it, or as the family that it is under another name."""
    raw, _ = PretrainedConfig.get_config_dict(path)
    family = ALIASES.get(raw.get("model_type", ""))
    if family is None:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    kept = {name: value for name, value in raw.items() if name not in {"model_type", "auto_map"}}
    return AutoConfig.for_model(family, **kept)


def _cached_beside(model: str) -> Path | None:
    """The local folder of a hub model's ModelOpt file, or None where it has none."""
    try:
        found = cached_file(model, MODELOPT_FILE)
    except OSError:
        return None
    return Path(found).parent if found else None


def _unreadable(model: str, local: Path, error: Exception) -> ConfigError | WeightError:
    """What to tell of a config that Transformers could not read."""
    file = local / "config.json"
    if file.exists():
        try:
            json.loads(file.read_text(encoding="utf-8"))
        except ValueError as broken:
            return WeightError(f"{file} is not JSON ({broken}); download or save the checkpoint again")
    if "trust_remote_code" in str(error):
        return ConfigError(
            f"{model!r} needs Python code that comes with the checkpoint, and Nibble does not run such "
            "code; use a family that Transformers knows by itself"
        )
    if isinstance(error, OSError) and not local.exists():
        return WeightError(
            f"{model!r} is neither a folder nor a hub model that can be reached ({first_line(error)}); "
            "check the name, or download the model first"
        )
    return ConfigError(f"cannot read the config of {model!r}: {' '.join(str(error).split())}")


def refuse(config: PretrainedConfig, path: Path | None = None) -> None:
    """Raises ConfigError where this family, or the way its weights are stored, cannot be served right."""
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{config.model_type} cannot be served: it is an encoder-decoder model")
    try:
        text = config.get_text_config()
    except ValueError as error:
        raise ConfigError(f"{config.model_type} cannot be served: it is made of several models") from error
    family = text.model_type
    if family in REFUSED:
        raise ConfigError(f"{family} cannot be served: {REFUSED[family]}")
    _refuse_layers(text)
    _refuse_class(config, text)
    _refuse_weights(config, path)


def _refuse_layers(text: PretrainedConfig) -> None:
    """Raises ConfigError for layer types that are not known to be plain attention."""
    kinds = {*(getattr(text, "layer_types", None) or ()), *(getattr(text, "layers_block_type", None) or ())}
    for kind in sorted(kinds.difference(ATTENTION, LATENT)):
        reason = UNSERVED.get(kind, UNKNOWN_LAYER)
        raise ConfigError(f"{text.model_type} cannot be served: its {kind} layers {reason}")


def named_class(config: PretrainedConfig) -> Any:
    """Transformers' causal language model of the name that the checkpoint gives, where Transformers does not find it by
    the config; else None.
    """
    if config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None
    names = [name for name in getattr(config, "architectures", None) or () if name.endswith("ForCausalLM")]
    found = (getattr(transformers, name, None) for name in names)
    return next((cls for cls in found if cls is not None and cls.config_class is type(config)), None)


def _refuse_class(config: PretrainedConfig, text: PretrainedConfig) -> None:
    """Raises ConfigError where Transformers has no causal language model for this config."""
    if config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or named_class(config):
        return
    if text.model_type != config.model_type:
        raise ConfigError(
            f"{config.model_type} cannot be served: it is a multimodal model that Transformers does not "
            "load as a language model; use a text-only checkpoint of the family"
        )
    raise ConfigError(
        f"{config.model_type} cannot be served: Transformers has no causal language model for it"
    )


def _quantization(config: PretrainedConfig) -> dict[str, Any]:
    found = getattr(config, "quantization_config", None) or {}
    return dict(found if isinstance(found, dict) else found.to_dict())


def _kv_only(config: PretrainedConfig) -> bool:
    """Whether the quantisation entry speaks of the KV cache only, the weights being plain."""
    quant = _quantization(config)
    method = quant.get("quant_method")
    return method == MODELOPT or (method == "compressed-tensors" and not quant.get("config_groups"))


def _refuse_weights(config: PretrainedConfig, path: Path | None) -> None:
    """Weights in ways that Transformers does not know load with a warning and wrong values."""
    quant = _quantization(config)
    method = quant.get("quant_method")
    algo = _modelopt_algo(quant, path)
    if algo not in NO_WEIGHTS:
        raise ConfigError(
            f"this checkpoint holds {algo} weights written by ModelOpt, which Transformers would load as if "
            "they were unquantised; use the BF16 checkpoint (its KV scales may be given with --kv-scales "
            "FILE)"
        )
    if quant and method != MODELOPT and method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise ConfigError(
            f"this checkpoint's weights are quantised by {method or 'an unnamed method'}, which "
            "Transformers does not know and would load as if they were unquantised; it knows "
            f"{', '.join(AUTO_QUANTIZATION_CONFIG_MAPPING)}"
        )


def _modelopt_algo(quant: dict[str, Any], path: Path | None) -> Any:
    """The weights' algorithm that ModelOpt declares, in config.json or in hf_quant_config.json; None if
    none.
    """
    algo = None
    if quant.get("quant_method") == MODELOPT:
        algo = quant.get("quant_algo") or (quant.get("quantization") or {}).get("quant_algo")
    side = path / MODELOPT_FILE if path else None
    if side is None or not side.exists():
        return algo
    try:
        return (json.loads(side.read_text(encoding="utf-8")).get("quantization") or {}).get(
            "quant_algo", algo
        )
    except (ValueError, AttributeError) as error:
        raise WeightError(
            f"{side} is no quantisation config ({error}); download or save the checkpoint again"
        ) from error

"""From a model's name to its Transformers config, and the families that are refused, by name, with the reason.

Owns find(), load_config() and the refusals. Runs before any weight is read. Must not know of caches or attention.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

import nibble
from nibble.errors import ConfigError, WeightError

DEMO = "demo"

REFUSED = {
    "llama4": "its chunked attention lives in the mask only, which a paged cache never builds",
    "llama4_text": "its chunked attention lives in the mask only, which a paged cache never builds",
}
"""Families that would run and answer wrong: model_type -> why."""

LINEAR = ("linear_attention", "mamba", "conv", "recurrent", "rwkv", "hybrid")
MODELOPT_KV_ONLY = (None, "", "NONE", "none")


def find(model: str) -> str:
    """A local folder for `demo` and for folders, else the hub name as it is."""
    if model == DEMO:
        return str(_bundled(DEMO))
    path = Path(model).expanduser()
    return str(path) if path.exists() else model


def _bundled(name: str) -> Path:
    package = Path(nibble.__file__).parent
    for folder in (package / "_models" / name, package.parents[1] / "models" / name):
        if (folder / "config.json").exists():
            return folder
    raise WeightError(f"the bundled model {name!r} is not part of this installation; name a folder or a hub model")


def load_config(model: str) -> PretrainedConfig:
    """The text config of `model`; raises ConfigError or WeightError where it cannot be served right."""
    path = find(model)
    local = Path(path)
    if local.exists() and not (local / "config.json").exists():
        raise WeightError(f"{local} is no Transformers checkpoint: it has no config.json")
    try:
        config = AutoConfig.from_pretrained(path)
    except json.JSONDecodeError as error:
        raise WeightError(f"{local / 'config.json'} is not JSON: {error}") from error
    except (OSError, ValueError, KeyError) as error:
        raise WeightError(f"cannot read the config of {model!r}: {error}") from error
    refuse(config, local)
    return config


def refuse(config: PretrainedConfig, path: Path | None = None) -> None:
    """Raises ConfigError where this family, or the way its weights are stored, cannot be served right."""
    text = config.get_text_config()
    family = text.model_type
    if family in REFUSED:
        raise ConfigError(f"{family} cannot be served: {REFUSED[family]}")
    kinds = set(getattr(text, "layer_types", None) or ()) | set(getattr(text, "layers_block_type", None) or ())
    linear = sorted(kind for kind in kinds if any(word in kind for word in LINEAR))
    if linear:
        raise ConfigError(
            f"{family} cannot be served: its {', '.join(linear)} layers keep a recurrent state, not keys and values"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{family} cannot be served: it is an encoder-decoder model")
    _refuse_modelopt(config, path)


def _refuse_modelopt(config: PretrainedConfig, path: Path | None) -> None:
    """ModelOpt weights load in Transformers with a warning and wrong values; KV scales alone are fine."""
    found = getattr(config, "quantization_config", None) or {}
    quant: dict[str, Any] = found if isinstance(found, dict) else found.to_dict()
    algo = quant.get("quant_algo") if quant.get("quant_method") == "modelopt" else None
    side = path / "hf_quant_config.json" if path else None
    if side is not None and side.exists():
        algo = json.loads(side.read_text()).get("quantization", {}).get("quant_algo", algo)
    if algo not in MODELOPT_KV_ONLY:
        raise ConfigError(
            f"this checkpoint holds {algo} weights written by ModelOpt, which Transformers would load as if they "
            "were unquantised; use the BF16 checkpoint (its KV scales may be given with --kv-scales FILE)"
        )

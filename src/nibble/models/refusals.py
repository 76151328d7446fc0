"""Read a model's Transformers config, and refuse what cannot be served right, with the reason.

Some families and some ways to store weights are refused by the config. Other models are refused by what they do: a
model may keep meaning where an attention function cannot see it, in a mask, in positions that it counts itself, in
layers that mix tokens by other means. It would run without complaint and answer wrong, as causal attention over pages
gives no such model's answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils import cached_file

from nibble.errors import ConfigError, WeightError
from nibble.models.hub import MODELOPT_FILE, first_line, locate, modelopt_entry, read_json

_LLAMA4 = "its chunked attention lives in the mask only, which a paged cache never builds"
REFUSED = {"llama4": _LLAMA4, "llama4_text": _LLAMA4}
"""Families that would run and answer wrong: model_type -> reason. models/refusals.py refuses more, by what they do."""

ALIASES = {"kimi_k2": "deepseek_v3"}
"""Families whose checkpoints bring code, and that Transformers has under another name."""

ATTENTION = ("full_attention", "sliding_attention", "attention")
"""Layer types that are attention over one key and value for each token."""
LATENT = ("indexed_attention", "deepseek_sparse_attention")
"""Layer types of sparse attention over a latent; their index keys are part of the cache."""
RECURRENT = ("linear_attention", "mamba", "conv", "recurrent", "hybrid", "hybrid_sliding")
UNSERVED = {
    **dict.fromkeys(RECURRENT, "keep a recurrent state, not keys and values only"),
    "chunked_attention": "keep their chunks in the mask, which a paged cache never builds",
}
"""Other layer types -> the reason of their refusal."""
UNKNOWN_LAYER = "are more than attention over one key and value for each token"

MODELOPT = "modelopt"
NO_WEIGHTS = (None, "", "NONE", "none")
"""ModelOpt's names for the weights' algorithm when only the KV cache is quantised."""


def load_config(model: str, index_topk: int | None = None) -> PretrainedConfig:
    """Return the config of `model`, a folder or hub name.

    A quantisation entry of KV scales only is removed: models/checkpoint.py reads it, and Transformers need not.

    Raises:
        ConfigError: the model cannot be served right.
        WeightError: there is no checkpoint, or it is broken.
    """
    path = locate(model)
    local = Path(path)
    if local.exists() and not (local / "config.json").exists():
        raise WeightError(
            f"{local} is no Transformers checkpoint: it has no config.json; name the folder that has one"
        )
    try:
        config = _read(path)
    except Exception as error:  # every family checks its values in its own way
        raise _unreadable(model, local, error) from error
    # Before the quantisation entry is removed: a refusal may rest on it.
    check_config(config, local if local.exists() else _cached_modelopt_folder(path))
    if index_topk is not None:
        if not hasattr(config, "index_topk"):
            raise ConfigError(
                f"--index-topk is for models with sparse attention (DSA), which {model} has not"
            )
        config.index_topk = index_topk
    if _quantizes_kv_only(config):
        del config.quantization_config
    return config


def _read(path: str) -> PretrainedConfig:
    """Read the config as Transformers does, or as the family that ALIASES names."""
    raw, _ = PretrainedConfig.get_config_dict(path)
    family = ALIASES.get(raw.get("model_type", ""))
    if family is None:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    # These two name the checkpoint's own code, which is never run.
    values = {name: value for name, value in raw.items() if name not in {"model_type", "auto_map"}}
    return AutoConfig.for_model(family, **values)


def _cached_modelopt_folder(model: str) -> Path | None:
    """Return the local folder of a hub model's ModelOpt file, None if it has none."""
    try:
        file = cached_file(model, MODELOPT_FILE)
    except OSError:
        return None
    return Path(file).parent if file else None


def _unreadable(model: str, local: Path, error: Exception) -> ConfigError | WeightError:
    """Return the error for a config that Transformers could not read."""
    try:
        read_json(local / "config.json")
    except WeightError as invalid:
        return invalid
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


def check_config(config: PretrainedConfig, path: Path | None = None) -> None:
    """Raise ConfigError if this family, or the way its weights are stored, cannot be served right.

    Args:
        config: the model's config.
        path: folder of the checkpoint, where ModelOpt's file may lie.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{config.model_type} cannot be served: it is an encoder-decoder model")
    try:
        text = config.get_text_config()
    except ValueError as error:
        raise ConfigError(f"{config.model_type} cannot be served: it is made of several models") from error
    family = text.model_type
    if family in REFUSED:
        raise ConfigError(f"{family} cannot be served: {REFUSED[family]}")
    _check_layer_types(text)
    _check_class(config, text)
    _check_weights(config, path)


def _check_layer_types(text: PretrainedConfig) -> None:
    """Raise ConfigError for layer types that are not plain attention."""
    kinds = {*(getattr(text, "layer_types", None) or ()), *(getattr(text, "layers_block_type", None) or ())}
    for kind in sorted(kinds.difference(ATTENTION, LATENT)):
        reason = UNSERVED.get(kind, UNKNOWN_LAYER)
        raise ConfigError(f"{text.model_type} cannot be served: its {kind} layers {reason}")


def architecture_class(config: PretrainedConfig) -> Any:
    """Return the class that the checkpoint's `architectures` name, if Transformers does not find one by the config."""
    if config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None
    names = [name for name in getattr(config, "architectures", None) or () if name.endswith("ForCausalLM")]
    classes = (getattr(transformers, name, None) for name in names)
    # A class of that name for another config would read this one wrongly.
    return next((cls for cls in classes if cls is not None and cls.config_class is type(config)), None)


def _check_class(config: PretrainedConfig, text: PretrainedConfig) -> None:
    """Raise ConfigError if Transformers has no causal language model for this config."""
    if config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or architecture_class(config):
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
    quantization = getattr(config, "quantization_config", None) or {}
    return dict(quantization if isinstance(quantization, dict) else quantization.to_dict())


def _quantizes_kv_only(config: PretrainedConfig) -> bool:
    """Return whether the quantisation entry is about the KV cache only."""
    quant = _quantization(config)
    method = quant.get("quant_method")
    # ModelOpt's entry is about the KV cache alone here: check_config() has refused its weights.
    return method == MODELOPT or (method == "compressed-tensors" and not quant.get("config_groups"))


def _check_weights(config: PretrainedConfig, path: Path | None) -> None:
    """Raise ConfigError for quantised weights that Transformers would load with wrong values."""
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
    """Return the weights' algorithm that ModelOpt declares in config.json or hf_quant_config.json, None if none."""
    algo = None
    if quant.get("quant_method") == MODELOPT:
        algo = quant.get("quant_algo") or (quant.get("quantization") or {}).get("quant_algo")
    return modelopt_entry(path).get("quant_algo", algo) if path else algo


MaskRule = Callable[[Any, Any, Any, Any], Any]
"""(batch, head, query position, key position) -> whether the key is visible; Transformers builds masks from it."""

_LARGEST = frozenset({torch.max, torch.amax, Tensor.max, Tensor.amax})
_NONZERO = frozenset({torch.nonzero, Tensor.nonzero})
_CONVOLUTIONS = (nn.Conv1d, nn.ConvTranspose1d)


class PositionsWatch(TorchFunctionMode):
    """Records how a model uses the positions that it gets."""

    def __init__(self, positions: Tensor) -> None:
        super().__init__()
        self.positions = positions
        self.is_used = self.uses_largest = False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._contains_positions((*args, *(kwargs or {}).values())):
            # Reading an attribute such as .shape or .device does not use the values.
            self.is_used |= getattr(func, "__name__", "") != "__get__"
            self.uses_largest |= func in _LARGEST
        return func(*args, **(kwargs or {}))

    def _contains_positions(self, values: Iterable[Any]) -> bool:
        """Return whether the positions are among `values`, or in an index such as x[positions, :]."""
        return any(
            value is self.positions or (isinstance(value, (tuple, list)) and self._contains_positions(value))
            for value in values
        )

    def check(self, family: str) -> None:
        """Raise ConfigError if positions are ignored, or if a request's positions depend on another's."""
        if not self.is_used:
            raise ConfigError(
                f"{family} cannot be served: it counts positions by itself, and would count them wrong for "
                "a prompt that is computed in chunks or beside others"
            )
        if self.uses_largest:
            raise ConfigError(
                f"{family} cannot be served: it scales by the largest position of the batch, so that one "
                "request's answer would depend on the others"
            )


class EmptyRouting(TorchFunctionMode):
    """Lets experts that loop over the tokens routed to them run on the meta device: no token is."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _NONZERO and args[0].is_meta and not (kwargs or {}).get("as_tuple"):
            return args[0].new_empty(0, args[0].dim(), dtype=torch.int64)
        return func(*args, **(kwargs or {}))


def check_modules(decoder: nn.Module, family: str) -> None:
    """Raise ConfigError if tokens are mixed by other means than attention."""
    for name, module in decoder.named_modules():
        if isinstance(module, _CONVOLUTIONS):
            raise ConfigError(
                f"{family} cannot be served: its convolution {name} looks at neighbouring tokens, which "
                "would need a state besides keys and values"
            )


def check_masks(
    masks: Iterable[tuple[int, MaskRule | None, int | None]], family: str, max_context: int
) -> None:
    """Raise ConfigError if a mask is more than causal attention within a window.

    Args:
        masks: layer, the rule of its mask, and the window that it passes.
        family: for the message.
        max_context: longest context; a window or chunk that is never reached does no harm.
    """
    checked: set[tuple[int, int | None]] = set()
    for layer, rule, window in masks:
        # A few rules serve all layers, and each check takes time in proportion to the context.
        if rule is None or (id(rule), window) in checked:
            continue
        checked.add((id(rule), window))
        if not _is_causal(rule, window, max_context):
            within = "causal" if window is None else f"causal within {window} tokens"
            raise ConfigError(
                f"{family} cannot be served: the mask of layer {layer} is not simply {within}, and a cache "
                "of pages never builds masks"
            )


def _is_causal(rule: MaskRule, window: int | None, max_context: int) -> bool:
    """Return whether `rule` is causal attention within `window`, judged by the rows where it could differ."""
    last = max_context - 1
    edge = window or last
    # Only rows where a window or chunk could show: all rows would be max_context^2 comparisons.
    rows = {row for row in (0, 1, last // 2, last, edge - 1, edge, edge + 1) if 0 <= row <= last}
    keys = torch.arange(max_context)
    zero = torch.tensor(0)
    for row in sorted(rows):
        expected = keys <= row
        if window is not None:
            # A window includes the query's own token.
            expected &= keys > row - window
        try:
            visible = torch.as_tensor(rule(zero, zero, torch.tensor(row), keys)).expand_as(keys)
        except (RuntimeError, TypeError, IndexError):
            return False  # the rule reads tensors of the batch, not positions alone
        # A rule that captured a tensor of the skeleton yields no values, so it cannot be judged.
        if visible.is_meta or not torch.equal(visible.bool(), expected):
            return False
    return True

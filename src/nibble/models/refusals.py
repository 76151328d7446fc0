"""Read a model's Transformers config, and refuse what cannot be served right, with the reason.

Some families and some ways to store weights are refused by the config. Other models are refused by what they do: a
model may keep meaning where an attention function cannot see it, in a mask, in positions that it counts itself, in
layers that mix tokens by other means. It would run without complaint and answer wrong, as causal attention over pages
gives no such model's answers.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, PretrainedConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.utils import cached_file

from nibble.errors import ConfigError, WeightError
from nibble.models.hub import (
    MODELOPT_FILE,
    first_line,
    locate,
    modelopt_entry,
    read_json,
    unreachable,
)
from nibble.models.quantization import (
    MODELOPT,
    NO_ALGORITHM,
    READABLE,
    modelopt_algorithm,
    quantization_entry,
)
from nibble.models.towers import ALIASES, model_class, nested_text, text_config_of, use_class

_DRAFT = "it is a draft model, which attends over the keys and values of another model"
REFUSED = {
    "gemma4_assistant": _DRAFT,
    "gemma4_unified_assistant": _DRAFT,
}
"""Families that nothing but their name tells of: model_type -> reason. Others are refused by what they do."""

CHUNKED = "chunked_attention"
"""Layer type of attention within chunks, which live in the mask alone."""
ATTENTION = ("full_attention", "sliding_attention", "attention", CHUNKED)
"""Layer types that are attention over one key and value for each token."""
LATENT = ("indexed_attention", "deepseek_sparse_attention")
"""Layer types of sparse attention over a latent; their index keys are part of the cache."""
RECURRENT = ("linear_attention", "mamba", "conv", "recurrent", "hybrid", "hybrid_sliding")
"""Layer types with a recurrent state, which is observed; some attend, too."""
TOKENWISE = ("moe", "mlp")
"""Layer types that compute each token by itself."""
SERVED = (*ATTENTION, *LATENT, *RECURRENT, *TOKENWISE)
UNKNOWN_LAYER = "are more than attention over one key and value for each token"


def load_config(
    model: str, index_topk: int | None = None, *, trust_remote_code: bool = False
) -> PretrainedConfig:
    """Return the config of a model.

    A quantisation entry of KV scales only is removed: models/checkpoint.py reads it, and Transformers need not.

    Args:
        model: a folder or hub name.
        index_topk: tokens that sparse attention looks at, None for the model's own.
        trust_remote_code: whether code that comes with the checkpoint may run.

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
        config = _read(path, trust_remote_code)
    except Exception as error:  # every family checks its values in its own way
        raise _unreadable(model, local, error) from error
    # Before the quantisation entry is removed: a refusal may rest on it.
    folder = local if local.exists() else _cached_modelopt_folder(path)
    check_config(config)
    if index_topk is not None:
        text = config.get_text_config()
        if not hasattr(text, "index_topk"):
            raise ConfigError(
                f"--index-topk is for models with sparse attention (DSA), which {model} has not"
            )
        text.index_topk = index_topk
    if _modelopt_algo(quantization_entry(config), folder) not in NO_ALGORITHM:
        # Its own file says more than config.json, which may lack the entry.
        entry = modelopt_entry(folder) if folder else {}
        config.quantization_config = {**quantization_entry(config), **entry, "quant_method": MODELOPT}
    elif _quantizes_kv_only(config):
        del config.quantization_config
    return config


def _read(path: str, trust_remote_code: bool) -> PretrainedConfig:
    """Read the config as Transformers does, or as that of the text tower, or as the family that ALIASES names."""
    raw, _ = PretrainedConfig.get_config_dict(path)
    code: dict[str, str] = raw.get("auto_map") or {}
    if trust_remote_code and {"AutoConfig", "AutoModelForCausalLM"} <= code.keys():
        config = AutoConfig.from_pretrained(path, trust_remote_code=True)
        use_class(type(config), get_class_from_dynamic_module(code["AutoModelForCausalLM"], path))
        return config
    nested = nested_text(raw)
    if nested is None and raw.get("model_type") not in ALIASES:
        return text_config_of(AutoConfig.from_pretrained(path, trust_remote_code=False))
    raw = nested or raw
    family = ALIASES.get(raw["model_type"], raw["model_type"])
    # These two name the checkpoint's own code, which does not run here.
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
            "code unasked; use a family that Transformers knows by itself, or --trust-remote-code"
        )
    if isinstance(error, OSError) and not local.exists():
        return unreachable(model, first_line(error))
    return ConfigError(f"cannot read the config of {model!r}: {' '.join(str(error).split())}")


def check_config(config: PretrainedConfig) -> None:
    """Raise ConfigError if this family, or the way its weights are stored, cannot be served right."""
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{config.model_type} cannot be served: it is an encoder-decoder model")
    try:
        text = config.get_text_config()
    except ValueError as error:
        raise ConfigError(f"{config.model_type} cannot be served: it is made of several models") from error
    for family in (config.model_type, text.model_type):
        if family in REFUSED:
            raise ConfigError(f"{family} cannot be served: {REFUSED[family]}")
    _check_layer_types(text)
    _check_class(config)
    _check_weights(config)


def _check_layer_types(text: PretrainedConfig) -> None:
    """Raise ConfigError for layer types that are not plain attention."""
    for kind in sorted(set(layer_types(text)).difference(SERVED)):
        raise ConfigError(f"{text.model_type} cannot be served: its {kind} layers {UNKNOWN_LAYER}")


def layer_types(text: PretrainedConfig) -> tuple[str, ...]:
    """Return the type of each layer, by either name that configs have for them; none where a config has no types."""
    kinds = getattr(text, "layers_block_type", None) or getattr(text, "layer_types", None)
    return tuple(kinds or ())


def _check_class(config: PretrainedConfig) -> None:
    """Raise ConfigError if Transformers has no class that generates text for this config."""
    if model_class(config) is None:
        raise ConfigError(
            f"{config.model_type} cannot be served: Transformers has no causal language model for it"
        )


def _quantizes_kv_only(config: PretrainedConfig) -> bool:
    """Return whether the quantisation entry is about the KV cache only."""
    quant = quantization_entry(config)
    method = quant.get("quant_method")
    # ModelOpt's entry that names an algorithm of weights was handled before.
    groups = (quant.get("config_groups") or {}).values()
    return method == MODELOPT or (
        method == "compressed-tensors" and not any(group.get("weights") for group in groups)
    )


def _check_weights(config: PretrainedConfig) -> None:
    """Raise ConfigError for quantised weights that Transformers would load with wrong values."""
    quant = quantization_entry(config)
    method = quant.get("quant_method")
    if quant and method not in READABLE and method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise ConfigError(
            f"this checkpoint's weights are quantised by {method or 'an unnamed method'}, which "
            "Transformers does not know and would load as if they were unquantised; it knows "
            f"{', '.join(AUTO_QUANTIZATION_CONFIG_MAPPING)}"
        )


def _modelopt_algo(quant: dict[str, Any], path: Path | None) -> Any:
    """Return the weights' algorithm that ModelOpt declares in config.json or hf_quant_config.json, None if none."""
    entry: dict[str, Any] = {}
    if quant.get("quant_method") == MODELOPT:
        entry = {**(quant.get("quantization") or {}), **{name: x for name, x in quant.items() if x}}
    return modelopt_algorithm({**entry, **(modelopt_entry(path) if path else {})})


MaskRule = Callable[[Any, Any, Any, Any], Any]
"""(batch, head, query position, key position) -> whether the key is visible; Transformers builds masks from it."""

_LARGEST = frozenset({torch.max, torch.amax, Tensor.max, Tensor.amax})
_RUNNING = frozenset({torch.cumsum, Tensor.cumsum, torch.cumprod, Tensor.cumprod, torch.tril, Tensor.tril})
_CONSTANT = frozenset({torch.zeros, torch.ones, torch.empty, torch.full})
_MAX_CHOICES = 32
"""Most experts that a token chooses, in any family."""
_NONZERO = frozenset({torch.nonzero, Tensor.nonzero})
_CONVOLUTIONS = (nn.Conv1d, nn.ConvTranspose1d)
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""Name by which families' code has Transformers' AttentionInterface."""
NO_INTERFACE = "its layers do not attend through Transformers' AttentionInterface"
NO_ATTENTION = "none of its layers attends, and Nibble serves recurrent layers beside such as attend"
_OTHER_TENSORS = "depends on tensors of the batch, such as the places of images or of padding"


class PositionsWatch(TorchFunctionMode):
    """Records how a model uses the positions that it gets, and whether it makes its own."""

    def __init__(self, positions: Tensor) -> None:
        super().__init__()
        self.positions = positions
        self.is_used = self.uses_largest = self.makes_own = self.skips_padding = False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        tensors = list(_tensors((*args, *(kwargs or {}).values())))
        if any(x is self.positions for x in tensors):
            # Reading an attribute such as .shape or .device does not use the values.
            self.is_used |= getattr(func, "__name__", "") != "__get__"
            self.uses_largest |= func in _LARGEST
            # A table of positions with a row for padding begins behind that row.
            self.skips_padding |= func is F.embedding and (kwargs or {}).get("padding_idx") is not None
        result = func(*args, **(kwargs or {}))
        self.makes_own |= any(self._is_count(func, x, tensors) for x in _tensors((result,)))
        return result

    def _is_count(self, func: Any, result: Tensor, tensors: Iterable[Tensor]) -> bool:
        """Return whether `result` has a value for each token that may tell its place.

        So does what is made for as many tokens out of nothing that has them, such as a range or the first rows of a
        table, and what is summed up from token to token.
        """
        count = self.positions.shape[-1]
        if count not in result.shape or func in _CONSTANT:
            return False
        return func in _RUNNING or not any(self._has_tokens(x) for x in tensors)

    def _has_tokens(self, x: Tensor) -> bool:
        """Return whether a dimension of `x` is that of tokens, or of tokens and the experts that each chooses."""
        count = self.positions.shape[-1]
        return any(size % count == 0 and 0 < size <= count * _MAX_CHOICES for size in x.shape)

    def check(self, family: str) -> None:
        """Raise ConfigError if positions are replaced, or if a request's positions depend on another's."""
        # A model that uses none and makes none has none: its attention is over an order of tokens alone.
        if not self.is_used and self.makes_own:
            raise ConfigError(
                f"{family} cannot be served: it counts positions by itself, and would count them wrong for "
                "a prompt that is computed in chunks or beside others"
            )
        if self.uses_largest:
            raise ConfigError(
                f"{family} cannot be served: it scales by the largest position of the batch, so that one "
                "request's answer would depend on the others"
            )
        if self.skips_padding:
            raise ConfigError(
                f"{family} cannot be served: its first position is pad_token_id + 1, and Nibble counts positions from 0"
            )


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among `values`, also those in an index such as x[positions, :]."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


class EmptyRouting(TorchFunctionMode):
    """Lets a model that looks at some values run on the meta device, where there are none.

    No token is routed to experts that loop over theirs. No token is padding: families look for one to warn of it.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _NONZERO and args[0].is_meta and not (kwargs or {}).get("as_tuple"):
            return args[0].new_empty(0, args[0].dim(), dtype=torch.int64)
        if func is Tensor.__contains__ and args[0].is_meta:
            return False
        if func is Tensor.tolist and args[0].is_meta and args[0].dim() == 1:
            return _RowCounts(len(args[0]))
        if func is Tensor.split and isinstance(args[1], _RowCounts):
            # Whoever cuts rows by these counts gets all of them for the first expert.
            return (args[0], *(args[0][:0] for _ in range(1, args[1].experts)))
        return func(*args, **(kwargs or {}))


class _RowCounts:
    """Stands for the numbers of rows of experts, read from a tensor without values; good for nothing but split()."""

    def __init__(self, experts: int) -> None:
        self.experts = experts


class FullMask(TorchFunctionMode):
    """Lets a model that asks whether its mask hides tokens run on the meta device: it hides none.

    Only for the pass that looks at masks. Elsewhere a question about values decides what a model computes.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return True if func is Tensor.__bool__ and args[0].is_meta else func(*args, **(kwargs or {}))


class ConvolutionsWatch(TorchFunctionMode):
    """Refuses a model that mixes tokens by a convolution of its own; one that text does not pass does no harm.

    What models/recurrent.py serves gets its weight and does not compute with it here.

    Args:
        model: the model that runs.
        family: for the message.
    """

    def __init__(self, model: nn.Module, family: str) -> None:
        super().__init__()
        self.family = family
        # Some families call a function of their own with the weight, and not the module.
        self.names = {
            id(parameter): name
            for name, module in model.named_modules()
            if isinstance(module, _CONVOLUTIONS)
            for parameter in module.parameters()
        }
        self.views = list[Tensor]()
        """Kept alive, so that no two tensors have the same id."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # Models read the dtype of weights that they do not use.
        tensors = list(_tensors((*args, *(kwargs or {}).values())))
        names = [self.names[id(x)] for x in tensors if id(x) in self.names]
        if not names or not isinstance(result, Tensor):
            return result
        name = names[0]
        if len(names) == len(tensors):
            # A view or cast of the weight, which stands for it from here on.
            self.names[id(result)] = name
            self.views.append(result)
        else:
            raise ConfigError(
                f"{self.family} cannot be served: its convolution {name} looks at neighbouring tokens, which "
                "would need a state besides keys and values"
            )
        return result


def failure_reason(model: nn.Module, error: Exception) -> str:
    """Return in plain words why `model` does not run on the meta device without masks, from the error of its code."""
    code = [sys.modules[type(module).__module__] for module in model.modules()]
    if not any(hasattr(source, _INTERFACE) for source in code):
        return NO_INTERFACE
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if _is_foreign(frame)]
    place = f"its forward pass ({frames[-1].f_code.co_qualname})" if frames else "its forward pass"
    if "meta" in str(error):
        return f"{place} depends on values of tensors, and Nibble observes a model before it has any"
    # Nothing is passed as a mask, see attention_mask_for().
    if frames and "NoneType" in str(error) and frames[-1].f_locals.get("attention_mask", error) is None:
        return f"{place} reads its attention mask, and a cache of pages never builds masks"
    return f"{place} fails without weights, masks and cache ({type(error).__name__}: {first_line(error)})"


def _is_foreign(frame: FrameType) -> bool:
    return not frame.f_globals.get("__name__", "").startswith(("nibble", "torch"))


class UnpaddedBatch(TorchFunctionMode):
    """Lets the rule of a chunked mask be computed: it asks how much padding a row of the batch has, which is none."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_padding = func is Tensor.__getitem__ and args[0].is_meta and result.dim() == 0
        return torch.zeros((), dtype=result.dtype) if is_padding else result


def check_masks(
    masks: Iterable[tuple[int, MaskRule | None, int | None, int | None]], family: str, max_context: int
) -> None:
    """Raise ConfigError if a mask is more than causal attention within a window or chunk.

    Args:
        masks: of each layer that attends its index, the rule of its mask, the window that it passes, and its chunk.
        family: for the message.
        max_context: longest context; a window or chunk that is never reached does no harm.
    """
    checked: set[tuple[int, int | None, int | None]] = set()
    for layer, rule, window, chunk in masks:
        # A few rules serve all layers, and each check takes time in proportion to the context.
        if rule is None or (id(rule), window, chunk) in checked:
            continue
        checked.add((id(rule), window, chunk))
        if fault := _mask_fault(rule, window, chunk, max_context):
            raise ConfigError(
                f"{family} cannot be served: the mask of layer {layer} {fault}, and a cache of pages never builds "
                "masks"
            )


def _mask_fault(rule: MaskRule, window: int | None, chunk: int | None, max_context: int) -> str:
    """Return what makes `rule` more than causal attention within `window` or `chunk`.

    It is judged by the rows where it could differ.
    """
    last = max_context - 1
    edge = window or chunk or last
    # Only rows where a window or chunk could show: all rows would be max_context^2 comparisons.
    rows = {row for row in (0, 1, last // 2, last, edge - 1, edge, edge + 1) if 0 <= row <= last}
    keys = torch.arange(max_context)
    zero = torch.tensor(0)
    for row in sorted(rows):
        expected = keys <= row
        if window is not None:
            # A window includes the query's own token.
            expected &= keys > row - window
        if chunk is not None:
            expected &= keys >= row // chunk * chunk
        try:
            with UnpaddedBatch() if chunk else nullcontext():
                visible = torch.as_tensor(rule(zero, zero, torch.tensor(row), keys)).expand_as(keys)
        except (RuntimeError, TypeError, IndexError):
            return _OTHER_TENSORS
        # A rule that captured a tensor of the skeleton yields no values.
        if visible.is_meta:
            return _OTHER_TENSORS
        if not torch.equal(visible.bool(), expected):
            return "is not simply causal" + (f" within {edge} tokens" if window or chunk else "")
    return ""

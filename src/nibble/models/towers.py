"""Choose the class of a model, and leave of a multimodal one its text tower: no weights but those that text passes.

The family's own wrapper around its language model runs, so scaled embeddings, capped logits and rotary positions of
several axes are as the family has them. Its other towers are gone before weights are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import takewhile
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from nibble.errors import ConfigError, WeightError

ALIASES = {"kimi_k2": "deepseek_v3"}
"""Families whose checkpoints bring code, and that Transformers has under another name."""
TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
"""Names by which configs hold that of their language model."""
QUANTIZATION = "quantization_config"
GENERATIVE = ("ForCausalLM", "ForConditionalGeneration")
"""Ends of the names of classes that generate text."""
MAPPINGS = (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
)
"""Classes by config. A config of several towers may have a class of text alone beside that of all."""
_own_classes: dict[type[PretrainedConfig], Any] = {}
"""Classes that come with checkpoints, by their configs."""


def nested_text(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the language model's part of a multimodal config that Transformers does not know, None for others.

    The code of such a checkpoint need not run: it is served as the language model that its config names.

    Args:
        raw: config.json.
    """
    if raw.get("model_type") in CONFIG_MAPPING:
        return None
    parts = (raw.get(name) for name in TEXT_CONFIGS)
    candidates = (part for part in parts if isinstance(part, dict) and _is_known(part.get("model_type")))
    part = next(candidates, None)
    # The whole checkpoint says how its weights are stored.
    return {**part, **{name: raw[name] for name in (QUANTIZATION,) if raw.get(name)}} if part else None


def _is_known(family: Any) -> bool:
    return family in CONFIG_MAPPING or family in ALIASES


def text_config_of(config: PretrainedConfig) -> PretrainedConfig:
    """Return the config of the text tower where the checkpoint names a class of text alone, else `config`.

    It says how weights are stored, whichever of the two did.
    """
    try:
        text = config.get_text_config()
    except ValueError:  # several language models, which refusals.py refuses
        return config
    if text is config:
        return config
    is_text = any(cls.config_class is type(text) for cls in _named_classes(config))
    served, other = (text, config) if is_text else (config, text)
    if getattr(other, QUANTIZATION, None) is not None and getattr(served, QUANTIZATION, None) is None:
        served.quantization_config = other.quantization_config
        del other.quantization_config
    return served


def _named_classes(config: PretrainedConfig) -> list[Any]:
    names = [name for name in getattr(config, "architectures", None) or () if name.endswith(GENERATIVE)]
    return [cls for name in names if (cls := getattr(transformers, name, None)) is not None]


def use_class(config_class: type[PretrainedConfig], model_class: Any) -> None:
    """Let a class that comes with a checkpoint make the models of its configs."""
    _own_classes[config_class] = model_class


def model_class(config: PretrainedConfig) -> Any:
    """Return the class of the model that a checkpoint holds, None if there is none that generates text.

    The checkpoint's `architectures` come first: a family may have a class of text alone beside that of all its towers,
    and the names of tensors belong to one of them. A class of text would read the config of all towers wrongly.
    """
    own = type(config)
    if own in _own_classes:
        return _own_classes[own]
    mapped = [cls for mapping in MAPPINGS if (cls := mapping.get(own, None)) is not None]
    fitting = [cls for cls in (*_named_classes(config), *mapped) if cls.config_class is own]
    if own.sub_configs:
        return text_tower(fitting[0]) if fitting else None
    # A family may be another one's class under a config of its own: internlm3 is Llama's.
    return next(iter((*fitting, *mapped)), None)


def text_attention(config: PretrainedConfig, implementation: str) -> str | dict[str, str]:
    """Return the argument `attn_implementation` that is for text alone: other towers may not know Nibble's."""
    text = config.get_text_config()
    towers = [name for name in config.sub_configs if getattr(config, name, None) is text]
    return dict.fromkeys(("", *towers), implementation) if towers else implementation


class TextTower:
    """Base that comes before a model's class, and leaves of the models it makes the text tower."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _drop_other_towers(self)


@cache
def text_tower(model_class: Any) -> Any:
    """Return a class whose models are those of `model_class` without their other towers; a plain one stays whole."""
    # By its name and module Transformers knows how to rename a checkpoint's tensors for it.
    return type(model_class.__name__, (TextTower, model_class), {"__module__": model_class.__module__})


class DroppedTower(nn.Module):
    """Stands for a tower that text does not pass; running it says that it does."""

    def __init__(self, name: str, device: torch.device) -> None:
        super().__init__()
        self.name = name
        # Some families place their inputs by it.
        self.register_buffer("place", torch.empty(0, device=device), persistent=False)

    @property
    def device(self) -> torch.device:
        """Return the device that the tower would be on."""
        return self.get_buffer("place").device

    def forward(self, *_: Any, **__: Any) -> None:
        """Raise ConfigError."""
        raise ConfigError(f"its text passes {self.name}, which is not part of its language model")


def _drop_other_towers(model: Any) -> None:
    """Replace all that lies beside the way to the language model, except the head; plain models have no such way."""
    language_model = _language_model(model)
    if not language_model:
        return
    head, text_parts, parent, prefix = model.get_output_embeddings(), [language_model], model, ""
    for part in language_model.split("."):
        for name, child in list(parent.named_children()):
            if child is head:
                text_parts.append(prefix + name)
            elif name != part and (parameter := next(child.parameters(), None)) is not None:
                setattr(parent, name, DroppedTower(prefix + name, parameter.device))
        parent, prefix = getattr(parent, part), f"{prefix}{part}."
    _load_only(model, text_parts)


def _load_only(model: Any, parts: Sequence[str]) -> None:
    """Let a checkpoint hold more than these parts of `model`, under whatever names, and tie nothing else."""
    names = "|".join(map(re.escape, parts))
    model._keys_to_ignore_on_load_unexpected = {
        *(model._keys_to_ignore_on_load_unexpected or ()),
        rf"^(?!({names})\.)",
    }
    is_text = re.compile(rf"({names})\.").match
    tied: dict[str, str] = model.all_tied_weights_keys
    model.all_tied_weights_keys = {name: source for name, source in tied.items() if is_text(name)}


def _language_model(model: PreTrainedModel) -> str:
    """Return the name of the language model inside a multimodal model, empty for a plain model."""
    text = model.config.get_text_config()
    if text is model.config:
        return ""
    return next(
        (
            name
            for name, module in model.named_modules()
            if name and isinstance(module, PreTrainedModel) and module.config.model_type == text.model_type
        ),
        "",
    )


def key_mapping(names: Iterable[str], embedding: str) -> dict[str, str]:
    """Return how the tensors of a language model are renamed: a pattern of their prefix -> the model's own.

    Args:
        names: of all tensors of a checkpoint.
        embedding: the model's name of its table of tokens, as `model.embed_tokens.weight`.

    Raises:
        WeightError: no tensor is called like it.
    """
    own = embedding.split(".")
    candidates = [(_common_end(parts, own), parts) for parts in (name.split(".") for name in names)]
    # A tower of images may have a table too, by a name that is less like the text's.
    common, parts = max(candidates, default=(0, []), key=lambda entry: (entry[0], -len(entry[1])))
    if common < 2:
        raise WeightError(
            f"the checkpoint has no tensor like {embedding}: it holds no language model of its config"
        )
    prefix, replacement = (
        "".join(f"{part}." for part in path[: len(path) - common]) for path in (parts, own)
    )
    return {f"^{re.escape(prefix)}": replacement}


def _common_end(a: Sequence[str], b: Sequence[str]) -> int:
    """Return how many parts two names have in common from the end."""
    pairs = zip(reversed(a), reversed(b), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

"""Tiny random multimodal models of every class that Transformers generates text with from text and more.

Their configs are the defaults of Transformers, shrunk as in families.py. Given tokens alone, a class must answer as the
unmodified one. What becomes of each is in REFUSED and NOT_BUILT; a class in neither is served right. survey.py and
test_towers.py read it.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from families import OTHER_TYPES, WINDOW, randomize, shrunk
from nibble.models.hub import quiet

_TYPES = {**MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, **MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
TOWERS = {
    model_class: model_type
    for model_type, model_class in reversed(_TYPES.items())
    if model_class.endswith("ForConditionalGeneration")
}
"""Classes -> their type of config; of several types the first."""


_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _axes(*section: int) -> dict[str, Any]:
    """Rotary positions of several axes, by halves of a head."""
    return {"rope_parameters": {**_ROPE, "mrope_section": [*section]}}


_MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": WINDOW}
_ATTENTION_ONLY = {"layer_types": ["full_attention"] * 4}
_LATENT = {"num_key_value_heads": 4, "n_group": 2, "topk_group": 1}

_WORDS = {"<image>": 3, "<|extra_200|>": 4}
SMALL = {"depth": 2, "embed_dim": 64, "out_hidden_size": 64, "text_hidden_size": 64}
"""Further options of other towers by name."""
OPTIONS: dict[str, dict[str, Any]] = {
    "cohere_compass": {
        "text_config": {"rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), _ROPE)},
    },
    "cosmos3_edge": {"text_config": _axes(2, 3, 3)},
    "deepseek_ocr2": {
        "text_config": {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "mlp_layer_types": ["dense", *["sparse"] * 3]},
    },
    "chameleon": {"vocabulary_map": _WORDS},
    "emu3": {"vocabulary_map": _WORDS},
    "ernie4_5_vl_moe": {"text_config": {"moe_intermediate_size": [32, 16], **_axes(3, 3, 2)}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "granite_docling": {"text_config": {"attention_multiplier": 0.25}},
    "glm46v": {"text_config": _axes(2, 3, 3)},
    "glm4v": {"text_config": _axes(2, 3, 3)},
    "glm4v_moe": {"text_config": _axes(1, 1, 2)},
    "glm_ocr": {"text_config": _axes(2, 3, 3)},
    "glm5_next": {"text_config": {"num_key_value_heads": 4, "index_topk": 16}},
    "hunyuan_vl": {"text_config": {"head_dim": 16, **_axes(2, 2, 2, 2)}},
    "kimi_k25": {"text_config": _LATENT, "tie_word_embeddings": False},
    "llama4": {"text_config": {"attention_chunk_size": 16}},
    "minicpmv4_7": {"text_config": {"initializer_range": 0.1}},
    "mistral_large4": {"text_config": _LATENT},
    "molmo2": {"adapter_config": {"vision_feature_layer": [3, 2]}},
    "paddleocr_vl": {"text_config": _axes(2, 3, 3)},
    "qwen2_5_omni_thinker": {"text_config": _axes(2, 3, 3)},
    "qwen2_5_vl": {"text_config": _axes(2, 3, 3)},
    "qwen2_vl": {"text_config": _axes(2, 3, 3)},
    "qwen3_asr": {"eos_token_id": [1, 2]},
    "qwen3_vl": {"text_config": _axes(4, 2, 2)},
    "qwen3_vl_moe": {"text_config": _axes(4, 2, 2)},
    "step3p7": {"text_config": {**_MIXED, "num_sliding_attention_heads": 4}},
    "unlimited_ocr": {"text_config": {"num_key_value_heads": 4}},
}  # fmt: skip
"""What the shrunk defaults of a type are not enough for."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma4ForConditionalGeneration, images seen whole": (
        "Gemma4ForConditionalGeneration",
        {"text_config": {"use_bidirectional_attention": "vision"}},
    ),
    "Qwen3VLForConditionalGeneration, tied": (
        "Qwen3VLForConditionalGeneration",
        {"tie_word_embeddings": True},
    ),
    "Qwen3_5ForConditionalGeneration, attention only": (
        "Qwen3_5ForConditionalGeneration",
        {"text_config": _ATTENTION_ONLY},
    ),
    "Qwen3_5MoeForConditionalGeneration, attention only": (
        "Qwen3_5MoeForConditionalGeneration",
        {"text_config": _ATTENTION_ONLY},
    ),
}
"""More than one model of a class, by another name."""

_NEEDS_MORE = "gives no logits of text alone"
_NEEDS_TIMM = "its vision tower needs the package timm"
_DEFAULTS = "Transformers makes no model of its default config"
_WHY_NOT_BUILT = {
    _NEEDS_MORE: (
        "Blip Blip2 Idefics InstructBlip InstructBlipVideo Kosmos2 PI0 Pix2Struct PPFormulaNet Qwen2_5Omni T5Gemma2 Udop "
        "VoxtralRealtime"
    ),
    _NEEDS_TIMM: "FastVlm Gemma3n PerceptionLM",
    _DEFAULTS: "Florence2 Glm5Next Granite4Vision KyutaiSpeechToText Nemotron3_5Transcribe Qwen3OmniMoe",
}
NOT_BUILT = {
    f"{name}ForConditionalGeneration": reason
    for reason, names in _WHY_NOT_BUILT.items()
    for name in names.split()
    if f"{name}ForConditionalGeneration" in TOWERS
}
"""Classes that cannot be built here, or give no logits by themselves: why."""

_LOGITS = "cannot compute the logits of chosen tokens only"
_WHY_REFUSED = {
    "InklingShortConvolution gets neither the keywords nor the mask": "Inkling",
    "passes position_bias to its attention|ShortConvolution gets neither": "Inkling2",
    r"Qwen4ExpTextQSAIndexer.forward\) reads its attention mask": "Qwen4Exp",
    _LOGITS: "MiniCPMOcr MiniCPMV4_6 Qwen2Audio Qwen2_5OmniThinker Qwen3OmniMoeThinker VideoLlama3",
    "the mask of layer 0 depends on tensors of the batch": "Gemma4Unified",
    "is not what the family's own code computes": "Kosmos2_5",
    "selects tokens from hidden_states, position_embeddings": "MistralLarge4",
    "layers do not attend to text": "Mllama",
    "attends with is_causal=False": "PaliGemma",
    "reference_sliding_attention layers are more than attention": "UnlimitedOcr",
}
REFUSED = {
    f"{name}ForConditionalGeneration": reason
    for reason, names in _WHY_REFUSED.items()
    for name in names.split()
}
"""Classes that are refused for what they are: a pattern of the reason."""

NAMES = (*sorted(TOWERS), *VARIANTS)


def tower_config(name: str) -> Any:
    """A small config of a class's type, or of a variant's."""
    model_class, changes = VARIANTS.get(name, (name, {}))
    kind = TOWERS[model_class]
    with quiet():
        default = CONFIG_MAPPING[kind]()
        options = shrunk(default)
        for name in default.sub_configs:
            for option in SMALL.keys() & vars(getattr(default, name, None) or object).keys():
                options[name][option] = SMALL[option]
        for more in (OTHER_TYPES.get(kind, {}), OPTIONS.get(kind, {}), changes):
            for option, value in more.items():
                nested = options.get(option)
                options[option] = {**nested, **value} if isinstance(nested, dict) else value
        return CONFIG_MAPPING[kind](**options)


def tower_model(name: str) -> Any:
    """A small random float32 model of a class, with all its towers."""
    torch.manual_seed(0)
    model_class = getattr(transformers, VARIANTS.get(name, (name,))[0])
    with quiet():
        config = tower_config(name)
        model = (
            model_class._from_config(config, attn_implementation="eager", dtype=torch.float32).float().eval()
        )
    randomize(model)
    return model

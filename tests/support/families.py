"""Tiny random models of every type that Transformers has a causal language model for.

FAMILIES are served, and test_families.py examines them closely. OTHER_TYPES are the rest: their configs are the defaults
of Transformers, shrunk, so that a prompt of 40 tokens exceeds every window and every top-k. What becomes of each type
is in REFUSED, WRONG and NOT_BUILT; a type in none of them is served right. survey.py and test_all_families.py read it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from nibble.models.hub import quiet

TOLERANCE = 1e-4
WINDOW = 8
VOCAB = 512
BASE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2, "eos_token_id": None,
    "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MOE = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {
    "n_routed_experts": 32,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2}
SHARED = {
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
}
GEMMA3N = {
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB, "laurel_rank": 8,
    "intermediate_size": [96] * 6, "activation_sparsity_pattern": [0.0] * 6,
}  # fmt: skip
GPT2 = {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 128, "n_inner": 96}
OPT = {"ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.2}


@dataclass(frozen=True)
class Family:
    """options: of its config, over BASE. windows: the sliding windows that must be observed. asks: what it asks of
    attention beside keys and values; leaving any out must show. owner: whose pages each layer reads, if not its own."""

    options: dict[str, Any] = field(default_factory=dict)
    heads: tuple[int, int] = (2, 16)
    windows: tuple[int | None, ...] = (None,)
    asks: tuple[str, ...] = ()
    owner: tuple[int, ...] = ()

    def config(self, name: str) -> Any:
        heads, dim = self.heads
        layout = {"num_key_value_heads": heads, "head_dim": dim}
        with quiet():  # one of them warns of its own defaults
            return self._made(name, layout)

    def _made(self, name: str, layout: dict[str, int]) -> Any:
        return AutoConfig.for_model(name, **{**BASE, **layout, **self.options})


def windowed(heads: tuple[int, int] = (2, 16), *asks: str, mixed: bool = True, **options: Any) -> Family:
    windows = (None, WINDOW) if mixed else (WINDOW,)
    kinds = MIXED if mixed else {}
    return Family({"sliding_window": WINDOW, **kinds, **options}, heads, windows, ("window", *asks))


def latent(**options: Any) -> Family:
    """MLA: one latent of 32 + 8 values for four heads of 16 + 8, whose values have 32. The experts are as above."""
    ranks = {
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 32,
    }
    experts = {**ROUTED, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}
    return Family({**experts, **ranks, "num_key_value_heads": 4, "head_dim": 8, **options}, (1, 40))


def sparse(**options: Any) -> Family:
    """DSA: MLA that looks at 12 tokens. So many heads of the indexer that no two tokens have the same score: which of
    them is chosen would be anyone's guess."""
    indexer = {"index_topk": 12, "index_n_heads": 32, "index_head_dim": 32}
    return replace(latent(**indexer, **options), asks=("chosen",))


LONGCAT = {
    "num_layers": 2, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "moe_topk": 2, "zero_expert_num": 2,
}  # fmt: skip
LOOPED = ("longcat_flash",)
"""Families whose experts are computed one after the other on the rows that chose them, by their own code, and so depend
on the number of rows in the last bit."""
SCALAR_GATE = ("qwen2_moe",)
"""Families with a sigmoid of one value per token. torch computes elements in vectors of up to 32 and the rest one by
one, which may differ in the last bit; so widths here are multiples of 32, as those of real models are."""

FAMILIES = {
    "axk1": latent(),
    "deepseek_v2": latent(topk_method="greedy", routed_scaling_factor=1.0),
    "deepseek_v3": latent(),
    "deepseek_v32": sparse(),
    "glm_moe_dsa": sparse(indexer_types=["full", "shared", "full", "shared"]),
    "glm4_moe_lite": latent(),
    "longcat_flash": latent(**LONGCAT),
    "minicpm3": latent(hidden_act="silu"),
    "mistral4": latent(num_local_experts=8),
    "youtu": latent(),
    "afmoe": windowed(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, num_dense_layers=1),
    "apertus": Family(),
    "arcee": Family(),
    "cohere": Family({"logit_scale": 1.0}),
    "cohere2": windowed(logit_scale=1.0),
    "ernie4_5": Family(),
    "exaone4": windowed(),
    "flex_olmo": Family(MOE),
    "gemma": Family({}, (1, 256)),
    "gemma2": windowed((1, 128), "softcap", attn_logit_softcapping=5.0, query_pre_attn_scalar=16),
    "gemma3_text": windowed((2, 64)),
    "gemma3n_text": Family(
        {**SHARED, **GEMMA3N, "sliding_window": WINDOW},
        windows=(None, WINDOW),
        asks=("window",),
        owner=(0, 1, 2, 3, 2, 3),
    ),
    "gemma4_text": Family(
        {**SHARED, "global_head_dim": 32, "sliding_window": WINDOW, "hidden_size_per_layer_input": 32},
        windows=(None, WINDOW),
        asks=("window",),
        owner=(0, 1, 2, 3, 2, 3),
    ),
    "glm": Family(),
    "glm4": Family(),
    "glm4_moe": Family(ROUTED),
    "gpt2": Family(GPT2, (4, 16)),
    "gpt_neox": Family({}, (4, 16)),
    "gpt_oss": windowed((2, 64), "sinks", **MOE),
    "granite": Family({"attention_multiplier": 0.25}),
    "granitemoe": Family({**MOE, "attention_multiplier": 0.25}),
    "helium": Family({"num_attention_heads": 4}, (4, 16)),
    "hunyuan_v1_dense": Family(),
    "hunyuan_v1_moe": Family({"num_experts": 4, "moe_topk": 2}),
    "llama": Family({"tie_word_embeddings": True}, (2, 64)),
    "minimax_m2": Family({**MOE, "num_experts": 32, "num_local_experts": 32, "rotary_dim": 8}),
    "ministral": windowed(),
    "ministral3": windowed(mixed=False),
    "mistral": windowed((2, 128), mixed=False),
    "mixtral": windowed(mixed=False, num_local_experts=8, num_experts_per_tok=2),
    "nanochat": Family({}, (4, 16)),
    "olmo": Family({}, (4, 16)),
    "olmo2": Family(),
    "olmo3": windowed(),
    "olmoe": Family(MOE),
    "opt": Family(OPT, (4, 16)),
    "phi": Family({"hidden_size": 320, "initializer_range": 0.08}, (4, 80)),
    "phi3": windowed((2, 96), mixed=False, hidden_size=384, initializer_range=0.08),
    "qwen2": Family({}, (1, 16)),
    "qwen2_moe": Family({**MOE, "shared_expert_intermediate_size": 32}),
    "qwen3": Family({"tie_word_embeddings": True}, (2, 128)),
    "qwen3_moe": Family({**MOE, "norm_topk_prob": True}),
    "seed_oss": Family(),
    "smollm3": Family({"no_rope_layers": [1, 0, 1, 0]}),
    "starcoder2": windowed(mixed=False),
    "vaultgemma": windowed((2, 16), "softcap", attn_logit_softcapping=5.0, query_pre_attn_scalar=16),
}


NAMED = {"mistral4": "Mistral4ForCausalLM"}
"""Families whose class Transformers finds only by the name that a checkpoint gives."""


def make(name: str, config: Any) -> Any:
    """A random model of a family, as Transformers has it."""
    if name not in NAMED:
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    config.architectures = [NAMED[name]]
    return getattr(transformers, NAMED[name])._from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )


# The other types: defaults, shrunk

LAYERS = 4
SIZES = {
    "vocab_size vocab_size_per_layer_input unpadded_vocab_size": VOCAB,
    "hidden_size n_embd d_model embedding_size input_embedding_size output_embedding_size emb_dim lru_width": 64,
    "hidden_size_global encoder_cross_output_size word_embed_proj_dim": 64,
    "intermediate_size dense_intermediate_size prefix_dense_intermediate_size ffn_dim encoder_ffn_dim": 96,
    "decoder_ffn_dim n_inner ffn_hidden_size dff dim_ff d_ff": 96,
    "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers": LAYERS,
    "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads": 4,
    "num_decoder_attention_heads swa_num_attention_heads linear_num_heads linear_num_key_heads": 4,
    "linear_num_value_heads mamba_n_heads mamba_num_heads": 4,
    "num_key_value_heads num_kv_heads kv_n_heads swa_num_key_value_heads": 2,
    "num_experts_per_tok num_experts_per_token moe_k moe_topk moe_top_k top_k_experts": 2,
    "head_dim qk_nope_head_dim swa_head_dim linear_head_dim linear_key_head_dim dim_head d_kv": 16,
    "linear_value_head_dim mamba_d_state state_size ssm_state_size": 16,
    "sliding_window sliding_window_size window_size attention_window_size local_attention_window_len": WINDOW,
    "qk_rope_head_dim num_experts num_local_experts moe_num_experts n_routed_experts rotary_dim": 8,
    "mamba_chunk_size chunk_size": 8,
    "q_lora_rank kv_lora_rank v_head_dim moe_intermediate_size shared_expert_intermediate_size": 32,
    "shared_experts_intermediate_size shared_intermediate_size hidden_size_per_layer_input": 32,
    "moe_shared_expert_intermediate_size router_hidden_size o_lora_rank global_head_dim mamba_headdim": 32,
    "mamba_d_head mamba_head_dim index_n_heads index_head_dim hc_lowrank": 32,
    "index_topk": 12,
    "rel_extent": 16,
    "max_position_embeddings n_positions n_ctx max_seq_len model_max_length max_target_positions": 128,
    "initializer_range init_std initializer_factor": 0.2,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers pad_token_id decoder_start_token_id": 0,
    "is_decoder": True,
}
"""Values of options by name, in whatever config has them."""
SHRUNK = {name: value for names, value in SIZES.items() for name in names.split()}

_SPARSE_SLIDING = {
    "num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 64, "qk_nope_head_dim": 24, "head_dim": 32,
}  # fmt: skip
_DOTS3 = {
    "num_key_value_heads": 4, "head_dim": 24,
    "layer_types": ["indexed_attention", "indexed_attention", "sliding_attention", "indexed_attention"],
    "per_layer_config": {2: _SPARSE_SLIDING},
}  # fmt: skip
_QSA = {
    "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 12,
    "indexer_compress_ratio": 4,
}  # fmt: skip

_DELTA = {
    "linear_num_value_heads": 32, "linear_num_key_heads": 8, "linear_value_head_dim": 8, "initializer_range": 0.1,
}  # fmt: skip
"""With larger weights rounding alone exceeds the tolerance, in the families' own code too. Gates of 32 heads fill
vectors (SCALAR_GATE)."""
_SPACES = {"mamba_n_heads": 32, "mamba_d_head": 4}
_ALTERNATING = ["linear_attention", "full_attention"] * 2

OTHER_TYPES: dict[str, dict[str, Any]] = {
    "axk2": {"num_key_value_heads": 4},
    "bailing_hybrid": {"num_key_value_heads": 4, "num_expert_group": 2, "topk_group": 1},
    "bamba": {**_SPACES, "attn_layer_indices": [1, 3]},
    "beam": {"n_group": 2, "topk_group": 1},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {
        **MIXED, "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in MIXED["layer_types"]},
    },
    "cwm": {"bos_token_id": 1},
    "cohere2_moe": {"logit_scale": 1.0},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 4.0}, "ffn_config": {"ffn_hidden_size": 32}},
    "dots1": {**MIXED, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {"text_config": _DOTS3, "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64}, "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64}},
    "dots3_note_text": _DOTS3,
    "emu3": {"text_config": {"bos_token_id": 1, "eos_token_id": 2}},
    "falcon_h1": {**_SPACES, "mamba_d_ssm": 128},
    "flint": {"mlp_only_layers": [0]},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {**_SPACES, "layer_types": _ALTERNATING},
    "hrm_text": {"num_layers_per_stack": 1, "H_cycles": 2, "L_cycles": 1, "L_bp_cycles": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8, "mamba_d_state": 16},
    "kimi_linear": {"num_key_value_heads": 4},
    "kolibri1": {"layer_types": MIXED["layer_types"]},
    "laguna": {"layer_types": MIXED["layer_types"]},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mellum": MIXED,
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "minimax": {"initializer_range": 0.15, "block_size": 32},
    "mllama": {"text_config": {"bos_token_id": 1, "eos_token_id": 2, "cross_attention_layers": [2]}},
    "modernbert-decoder": {"bos_token_id": 1, "eos_token_id": 2, "layer_types": MIXED["layer_types"], "local_attention": 16},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"mamba_num_heads": 32, "mamba_head_dim": 4, "n_groups": 2},
    "olmo_hybrid": {"linear_num_value_heads": 32, "linear_num_key_heads": 32, "linear_key_head_dim": 8},
    "qwen3_5": {"text_config": _DELTA},
    "qwen3_5_moe": {"text_config": {**_DELTA, "initializer_range": 0.12}},
    "qwen3_5_moe_text": {**_DELTA, "initializer_range": 0.12},
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA,
    "qwen4_exp": {"text_config": _QSA},
    "qwen4_exp_text": _QSA,
    "reformer": {"axial_pos_embds_dim": [32, 32], "axial_pos_shape": [8, 16], "attention_head_size": 16},
    "roc_bert": {"shape_embed_dim": 32, "shape_vocab_size": 64, "pronunciation_embed_dim": 32, "pronunciation_vocab_size": 64},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2, "num_key_value_heads": 4, "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2, "num_key_value_heads": 4, "n_mamba_heads": 32,
        "mamba_headdim": 4, "attention_head_dim": 32, "initializer_range": 0.15,
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""What the shrunk defaults of a type are not enough for."""


NOT_BUILT = {
    "gemma3n": "its vision tower needs the package timm; gemma3n_text is the same language model",
    "gemma4_assistant": "a draft model, which attends over the keys and values of another model",
    "gemma4_unified_assistant": "a draft model, which attends over the keys and values of another model",
    "musicgen": "Transformers maps it to a class that reads the decoder's config, and fails on this one",
    "musicgen_melody": "Transformers maps it to a class that reads the decoder's config, and fails on this one",
}
"""Types that cannot be built here, or give no logits by themselves: why."""

_FULL = {"layer_types": ["full_attention"] * 4}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_SCALED = {
    "rope_type": "default", "rope_theta": 10000.0, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.1,
}  # fmt: skip

DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
            "num_hidden_layers": 4, "num_kv_shared_layers": 4,
        },
    },
}  # fmt: skip
"""Options without which a type's default config is refused by Transformers itself."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bailing_hybrid, attention only": ("bailing_hybrid", _FULL),
    "bamba, attention only": ("bamba", {"attn_layer_indices": [0, 1, 2, 3]}),
    "bert, bidirectional": ("bert", {"is_decoder": False}),
    "deepseek_v2, no query rank": ("deepseek_v2", {"q_lora_rank": None}),
    "deepseek_v3, halves rotated": ("deepseek_v3", {"rope_interleave": False}),
    "deepseek_v3, yarn": ("deepseek_v3", {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "deepseek_v32, yarn": ("deepseek_v32", {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "deepseek_v4, windows only": ("deepseek_v4", {"layer_types": ["sliding_attention"] * 4}),
    "falcon, alibi": ("falcon", {"alibi": True}),
    "falcon, new architecture": ("falcon", {"new_decoder_architecture": True}),
    "gemma4_text, experts": (
        "gemma4_text", {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32},
    ),
    "gemma4_text, keys as values": ("gemma4_text", {"attention_k_eq_v": True}),
    "gpt2, scores by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2, upcast": ("gpt2", {"reorder_and_upcast_attn": True}),
    "gpt_bigcode, many keys": ("gpt_bigcode", {"multi_query": False}),
    "gpt_neox, in sequence": ("gpt_neox", {"use_parallel_residual": False}),
    "granitemoehybrid, attention only": ("granitemoehybrid", _FULL),
    "granitemoehybrid, attention only, rope": ("granitemoehybrid", {**_FULL, "position_embedding_type": "rope"}),
    "hy_v4, dense": ("hy_v4", {"index_topk": 64}),
    "jetmoe, 4 keys": ("jetmoe", {"num_key_value_heads": 4}),
    "kimi_linear, attention only": ("kimi_linear", _FULL),
    "lfm2, attention only": ("lfm2", _FULL),
    "lfm2_moe, attention only": ("lfm2_moe", _FULL),
    "lfm3, attention only": ("lfm3", MIXED),
    "llama4_text, chunks": ("llama4_text", {"attention_chunk_size": 16}),
    "llama, yarn": ("llama", {"rope_parameters": _YARN}),
    "minimax, attention only": ("minimax", _FULL),
    "minimax_m3_vl_text, sparse": (
        "minimax_m3_vl_text",
        {
            "layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "index_n_heads": 2, "index_head_dim": 16,
            "index_block_size": 4, "index_topk_blocks": 2,
        },
    ),
    "ministral3, scaled": ("ministral3", {"rope_parameters": _SCALED}),
    "mistral4": ("mistral4", {}),
    "mistral4, scaled": ("mistral4", {"rope_parameters": _SCALED}),
    "nemotron_h, attention only": ("nemotron_h", {"layers_block_type": ["full_attention", "moe"] * 2}),
    "opt, norm after": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "phi, norms of queries": ("phi", {"qk_layernorm": True}),
    "qwen2, windows": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, **MIXED}),
    "qwen2_moe, windows": ("qwen2_moe", {"use_sliding_window": True, "sliding_window": WINDOW, **MIXED}),
    "qwen3, windows": ("qwen3", {"use_sliding_window": True, "sliding_window": WINDOW, **MIXED}),
    "qwen3_moe, windows": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": WINDOW}),
    "qwen3_5_text, attention only": ("qwen3_5_text", _FULL),
    "qwen3_next, attention only": ("qwen3_next", _FULL),
    "qwen4_exp_text, indexed only": ("qwen4_exp_text", {"layer_types": ["indexed_attention"] * 4}),
}  # fmt: skip
"""More than one model of a type, by another name."""


_CONVOLUTION = "its convolution .* looks at neighbouring tokens"
_POSITIONS = "counts positions by itself"
_NO_INTERFACE = "its layers do not attend through Transformers' AttentionInterface"
_OWN_CLASSES = "knows a fixed set of attention implementations"
_OTHER_LAYERS = "layers are more than attention over one key and value for each token"
_NOT_CAUSAL = "attends with is_causal=False: queries see later tokens, or a mask hides those"
_REASONS = {
    _CONVOLUTION: "recurrent_gemma zaya",
    "InklingShortConvolution gets neither the keywords nor the mask": "inkling_text",
    "passes position_bias to its attention|ShortConvolution gets neither": "inkling2_text",
    r"Qwen4ExpTextQSAIndexer.forward\) reads its attention mask": "qwen4_exp qwen4_exp_text",
    "Mixer gets neither the keywords nor the mask": "falcon_mamba mamba mamba2",
    "ZambaAttention does not say which layer it is": "zamba",
    _POSITIONS: "bart blenderbot blenderbot-small marian mbart pegasus plbart",
    _NO_INTERFACE: (
        "big_bird bloom codegen cpmant gpt_neox_japanese megatron-bert mpt mvp openai-gpt prophetnet reformer rembert "
        "roformer rwkv trocr xglm xlm xlnet xlstm"
    ),
    _OWN_CLASSES: "falcon git gpt_neo gptj",
    _OTHER_LAYERS: "deepseek_v4",
    _NOT_CAUSAL: "bigbird_pegasus",
    r"its forward pass \(XmodOutput.lang_adapter\) depends on values of tensors": "xmod",
    "cannot compute the logits of chosen tokens only": "whisper",
    "layer 0 attends 2 times in one pass": "diffllama",
    "layer 0 attends 4 times in one pass": "hrm_text",
    "layers do not attend to text": "mllama",
    "the mask of layer 0 depends on tensors of the batch": "gemma4_unified",
    "gets neither the keywords nor the mask of the model's call": "blt",
    "passes attention_mask to its attention": "doge",
    "scales by the largest position of the batch": "phimoe",
    r"its first position is pad_token_id \+ 1": (
        "camembert data2vec-text roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl"
    ),
}
REFUSED = {name: reason for reason, names in _REASONS.items() for name in names.split()} | {
    "bert, bidirectional": _NOT_CAUSAL,
    "falcon, alibi": _OWN_CLASSES,
    "falcon, new architecture": _OWN_CLASSES,
    "minimax_m3_vl_text, sparse": _OTHER_LAYERS,
    "qwen2_moe, windows": "mask of layer 0 is not simply causal",
    "qwen4_exp_text, indexed only": r"Qwen4ExpTextQSAIndexer.forward\) reads its attention mask",
}
"""Types that are refused for what they are: a pattern of the reason."""

WRONG: dict[str, str] = {}
"""Types that are served and answer otherwise than the unmodified model: the cause."""
VARYING = {
    "dbrx", "hy_v4", "jetmoe", "kolibri1", "llama4", "llama4_text", "longcat_flash", "MuseSparkForConditionalGeneration",
    "Llama4ForConditionalGeneration", "Step3p7ForConditionalGeneration", "deepseek_v4, windows only", "hy_v4, dense",
    "jamba", "jetmoe, 4 keys", "llama4_text, chunks",
}  # fmt: skip
"""Types whose last bits depend on how a prompt is cut: gates of gathered or mixed values, experts of their own code,
products with the weight of a layer that is not called (jamba)."""


def shrunk(default: Any) -> dict[str, Any]:
    """Options that make a small config of a default one: known sizes, layer lists of LAYERS, nested configs likewise."""
    options: dict[str, Any] = {}
    values = default.to_dict()
    for name, value in values.items():
        if name in SHRUNK and value is not None:
            options[name] = SHRUNK[name]
        elif name in {"layer_types", "mlp_layer_types", "layers_block_type"} and value:
            kinds = itertools.cycle(dict.fromkeys(value))
            options[name] = list(itertools.islice(kinds, LAYERS))
        elif name in {"bos_token_id", "eos_token_id"} and value is not None:
            options[name] = None
    if "qk_rope_head_dim" in values and "head_dim" in values:
        options["head_dim"] = SHRUNK["qk_rope_head_dim"]
    for name in type(default).sub_configs:
        nested = getattr(default, name, None)
        if nested is not None:
            options[name] = {"model_type": nested.model_type, **shrunk(nested)}
    return options


def tiny_config(name: str) -> Any:
    """A small config of any type, or of a variant."""
    kind, changes = VARIANTS.get(name, (name, {}))
    if kind in FAMILIES:
        family = FAMILIES[kind]
        return replace(family, options={**family.options, **changes}).config(kind)
    with quiet():
        options = shrunk(CONFIG_MAPPING[kind]())
        for option, value in {**OTHER_TYPES.get(kind, {}), **changes}.items():
            nested = options.get(option)
            options[option] = (
                {**nested, **value} if isinstance(nested, dict) and isinstance(value, dict) else value
            )
        return CONFIG_MAPPING[kind](**options)


def randomize(model: Any, seed: int = 0) -> None:
    """Make all weights matter: those that start as zeros, ones or nearly so (norms, biases, sinks, gates) are moved."""
    generator = torch.Generator().manual_seed(seed)
    stored = model.state_dict(keep_vars=True)
    state = {id(x): x for x in (*model.parameters(), *stored.values())}
    # Buffers of lightning attention, three of which are computed of the first.
    computed = {id(x) for name, x in stored.items() if name.endswith(("slope_rate", "_decay"))}
    with torch.no_grad():
        for x in state.values():
            if id(x) not in computed and x.is_floating_point() and (x.numel() == 1 or float(x.std()) < 0.05):
                x.add_(0.2 * torch.randn(x.shape, generator=generator))


def tiny_model(name: str) -> Any:
    """A small random float32 model of any type, or of a variant."""
    torch.manual_seed(0)
    with quiet():
        model = make(VARIANTS.get(name, (name,))[0], tiny_config(name)).float().eval()
    randomize(model)
    return model

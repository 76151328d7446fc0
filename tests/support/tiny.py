"""Tiny random models on disk, for tests that need a real checkpoint. Built once per folder, in well under a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}

MLA: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 128, "qk_nope_head_dim": 16, "qk_rope_head_dim": 32,
    "v_head_dim": 32, "n_routed_experts": 32, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 32,
}  # fmt: skip
"""What makes a deepseek_v3 of BASE."""
SPARSE: dict[str, Any] = {
    **MLA, "index_topk": 24, "index_n_heads": 8, "index_head_dim": 32,
    "indexer_types": ["full", "shared", "full"],
}  # fmt: skip
"""What makes a glm_moe_dsa of BASE."""


QWEN3_NEXT: dict[str, Any] = {
    "num_hidden_layers": 4, "linear_num_key_heads": 8, "linear_num_value_heads": 32, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
"""What makes a hybrid qwen3_next of BASE. Gates of all heads fill vectors, as in models that are published: torch rounds
the tail of sigmoid() otherwise."""

CHUNKED: dict[str, Any] = {
    "attention_chunk_size": 16,
    "no_rope_layers": [1, 0, 1],
    "intermediate_size_mlp": 96,
    "num_local_experts": 4,
}
"""What makes a llama4_text of BASE whose chunks are short."""


def save_model(folder: Path, family: str = "qwen3", *, seed: int = 0, **changes: Any) -> Path:
    """Saves a random float32 model of `family` to `folder`, greedy by default, so that tests of answers are steady."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**BASE, **changes})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().save_pretrained(folder)
    set_generation_config(folder, temperature=0.0)
    return folder


def set_generation_config(folder: Path, **values: Any) -> Path:
    """Changes entries of a checkpoint's generation_config.json; None removes one."""
    file = folder / "generation_config.json"
    entries = json.loads(file.read_text()) if file.exists() else {}
    kept = {name: value for name, value in {**entries, **values}.items() if value is not None}
    file.write_text(json.dumps(kept))
    return folder


def save_tokenizer(folder: Path, symbols: int = 256) -> Path:
    """Saves a byte-level tokenizer: 256 bytes, or the first few of them, and `<eos>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:symbols]
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>").save_pretrained(folder)
    return folder


def save_tiny(folder: Path, family: str = "qwen3", **changes: Any) -> Path:
    """A random model with a byte-level tokenizer."""
    return save_tokenizer(save_model(folder, family, **changes))

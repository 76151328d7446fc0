"""Small random hybrid models for a GPU: sizes of heads and states as published models have them, and few layers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from nibble import LLM
from nibble.models.hub import quiet
from tiny import set_generation_config

VOCAB = 2048
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 8192,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
}  # fmt: skip
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 16, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128,
}  # fmt: skip
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **_DELTA, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
    },
    "qwen3_5_text": _DELTA,
    "bamba": {**_MAMBA, "mamba_expand": 2, "attn_layer_indices": [2]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 1024},
    "granitemoehybrid": {
        **_MAMBA, "mamba_expand": 2, "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "num_local_experts": 0, "shared_intermediate_size": 1024,
    },
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "expert_layer_period": 2,
        "expert_layer_offset": 1, "mamba_d_state": 16, "mamba_dt_rank": 32,
    },
    "minimax": {
        "layer_types": ["linear_attention", "full_attention"] * 2, "num_local_experts": 2,
        "num_experts_per_tok": 1, "block_size": 64,
    },
    "nemotron_h": {
        "mamba_num_heads": 16, "mamba_head_dim": 64, "n_groups": 2, "ssm_state_size": 128,
        "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
    },
}  # fmt: skip
"""By type of model: gated delta nets, Mamba 2 and 1, short convolutions, lightning attention."""
ALL_EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"num_experts_per_tok": 8},
    "minimax": {"num_experts_per_tok": 2},
}
"""What lets each token have all experts. Where a token chooses some, a router near a tie makes another token of
rounding (tests/integration/test_hybrid_routers.py), and answers say nothing of kernels."""


@dataclass(frozen=True)
class Unmodified:
    """What a family's own code computes of a prompt."""

    ids: list[int]
    logits: Tensor
    """In float32 [T, V], on the host."""
    error: float
    """How far bfloat16 is from that, norm over norm."""
    token_errors_T: Tensor
    """The same of each token."""


def save_hybrid(
    folder: Path, family: str, device: str, tokens: int = 300, *, all_experts: bool = False
) -> Unmodified:
    """Saves a random bfloat16 model, and says what it computes."""
    experts = ALL_EXPERTS.get(family, {}) if all_experts else {}
    torch.manual_seed(0)
    with quiet(), torch.device(device):
        config = AutoConfig.for_model(family, **{**_BASE, **HYBRIDS[family], **experts})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and "embed" not in name:
            weight.data.mul_(2.0)
    ids = torch.randint(1, VOCAB, (tokens,)).tolist()
    model.save_pretrained(folder)
    set_generation_config(folder, temperature=0.0)
    own, exact = (_logits(model.to(dtype), ids) for dtype in (torch.bfloat16, torch.float32))
    return Unmodified(ids, exact, distance(own, exact), distances(own, exact))


@torch.inference_mode()
def _logits(model: Any, ids: list[int]) -> Tensor:
    logits: Tensor = model(torch.tensor([ids], device=model.device), use_cache=False).logits[0]
    return logits.float().cpu()


def distance(one: Tensor, other: Tensor) -> float:
    """Between logits, norm over norm."""
    return float((one.float().cpu() - other.float().cpu()).norm() / other.float().cpu().norm())


def distances(one: Tensor, other: Tensor) -> Tensor:
    """Of each token's logits, [T]: norm over norm."""
    one, other = (x.float().cpu() for x in (one, other))
    return (one - other).norm(dim=-1) / other.norm(dim=-1)


def greedy(llm: LLM, prompts: list[list[int]], count: int = 24) -> tuple[list[list[int]], list[int]]:
    """Answers, and how many tokens of each prompt came from the cache."""
    outputs = llm.generate(prompts, max_tokens=count, ignore_eos=True, temperature=0, progress=False)
    answers = [list(output.completions[0].token_ids) for output in outputs]
    return answers, [output.cached_tokens for output in outputs]


def worst_gap(llm: LLM, prompts: list[list[int]], answers: list[list[int]]) -> float:
    """How far a token of an answer is below the largest logit, in deviations, where prompt and answer are a prompt."""
    worst = 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        logits_TV = llm.logits([*prompt, *answer]).float().cpu()[len(prompt) - 1 : -1]
        below_T = logits_TV.amax(-1) - logits_TV.gather(1, torch.tensor(answer)[:, None])[:, 0]
        worst = max(worst, float((below_T / logits_TV.std(-1)).max()))
    return worst

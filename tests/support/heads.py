"""Tiny random heads that draft, and what they should say, written from the published descriptions.

MTP heads are made of one more layer of their family, whose tensors Transformers names as checkpoints do; the reference
runs it with Transformers' own attention, as a model of one layer that is given its inputs. EAGLE-3 heads, and MiMo's
layer, are computed here in plain torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

from nibble.models.hub import quiet
from tiny import MLA, QWEN3_NEXT, SPARSE, save_model, save_tokenizer

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 320, 64, 4, 2, 32, 96
ROUTED: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
MTP: dict[str, tuple[str, dict[str, Any], str]] = {
    "deepseek_v3": ("deepseek_v3", {**MLA, "num_hidden_layers": 2}, "model.layers.2."),
    "deepseek_v32": (
        "deepseek_v32", {**SPARSE, "num_hidden_layers": 2, "indexer_types": ["full"] * 2}, "model.layers.2.",
    ),
    "glm4_moe": ("glm4_moe", {**ROUTED, "num_hidden_layers": 2, "head_dim": HEAD_DIM}, "model.layers.2."),
    "qwen3_next": ("qwen3_next", QWEN3_NEXT, "mtp."),
    "mimo": ("qwen2", {"num_hidden_layers": 2}, "model.mtp_layers.0."),
}  # fmt: skip
"""A family's model, its sizes, and what stands in front of the tensors of its MTP layer."""
NAMES = {
    "mtp.": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0."),
    "model.mtp_layers.0.": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", ""),
    "model.layers.2.": ("enorm", "hnorm", "eh_proj", "shared_head.norm", ""),
}
"""How norms of token and hidden state, projection and last norm are called, and what stands before the layer's own."""
Reference = Callable[[Sequence[int], Sequence[int]], Tensor]
"""(tokens of a request, drafts behind them) -> logits [V] of the next draft."""


def random(generator: torch.Generator, *shape: int, scale: float = 0.15) -> Tensor:
    return torch.randn(*shape, generator=generator) * scale


def save_mtp(folder: Path, kind: str) -> Path:
    """Saves a model with an MTP layer, and beside it, in `layer`, the layer as a model of its own."""
    family, sizes, prefix = MTP[kind]
    count = sizes["num_hidden_layers"]
    types = sizes.get("layer_types")
    more = {**sizes, "num_hidden_layers": count + 1}
    if types:
        more["layer_types"] = [*types, "full_attention"]
    if "indexer_types" in sizes:
        more["indexer_types"] = ["full"] * (count + 1)
    save_model(folder, family, **more)
    save_tokenizer(folder)
    tensors = load_file(folder / "model.safetensors")
    own = f"model.layers.{count}."
    layer = {name.removeprefix(own): tensors.pop(name) for name in list(tensors) if name.startswith(own)}
    generator = torch.Generator().manual_seed(7)
    token_norm, state_norm, projection, last_norm, before = NAMES[prefix]
    centre = 0.0 if family == "qwen3_next" else 1.0
    head = {
        f"{token_norm}.weight": centre + random(generator, HIDDEN, scale=0.3),
        f"{state_norm}.weight": centre + random(generator, HIDDEN, scale=0.3),
        f"{projection}.weight": random(generator, HIDDEN, 2 * HIDDEN),
        f"{last_norm}.weight": centre + random(generator, HIDDEN, scale=0.3),
        **{f"{before}{name}": x for name, x in layer.items()},
    }
    save_file(
        {**tensors, **{prefix + name: x for name, x in head.items()}},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"], config["num_nextn_predict_layers"] = count, 1
    for name in ("layer_types", "mlp_layer_types", "indexer_types"):
        if config.get(name):
            config[name] = config[name][:count]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "layer").mkdir()
    alone = {f"model.layers.0.{name}": x for name, x in layer.items()}
    alone |= {
        "model.norm.weight": head[f"{last_norm}.weight"],
        "model.embed_tokens.weight": tensors["model.embed_tokens.weight"],
    }
    save_file(alone, folder / "layer" / "model.safetensors", {"format": "pt"})
    config["num_hidden_layers"] = 1
    config |= {"first_k_dense_replace": 0} if "first_k_dense_replace" in config else {}
    for name, value in (
        ("layer_types", "full_attention"),
        ("mlp_layer_types", "sparse"),
        ("indexer_types", "full"),
    ):
        if config.get(name):
            config[name] = [value]
    (folder / "layer" / "config.json").write_text(json.dumps(config))
    return folder


def rms(x: Tensor, weight: Tensor, eps: float = 1e-6, centre: float = 0.0) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (centre + weight)


def model_states(model: Any, tokens: Sequence[int], layers: Sequence[int] | None) -> Tensor:
    """Hidden states [T, X]: of the model's output, or the inputs of some layers side by side."""
    out = model(torch.tensor([list(tokens)]), output_hidden_states=True)
    # The last one of Transformers' is behind the norm; none of the tests reads what is just before it.
    return (
        out.hidden_states[-1][0]
        if layers is None
        else torch.cat([out.hidden_states[i][0] for i in layers], -1)
    )


def chained(
    tokens: Sequence[int], drafts: Sequence[int], states: Tensor, row: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Runs a head over a request and drafts; returns the hidden state of the last row.

    row(tokens [T], hidden states [T, H]) computes all rows, and returns the head's own hidden states [T, H].
    """
    ids, given = list(tokens[1:]), states[: len(tokens) - 1]
    left = row(torch.tensor(ids), given)[-1:]
    for draft in drafts:
        ids, given = [*ids, draft], torch.cat([given, left])
        left = row(torch.tensor(ids), given)[-1:]
    return left[0]


@torch.no_grad()
def mtp_reference(folder: Path, kind: str) -> Reference:
    """What an MTP layer should say."""
    _, _, prefix = MTP[kind]
    token_norm, state_norm, projection, *_ = NAMES[prefix]
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        layer = AutoModel.from_pretrained(
            folder / "layer", dtype=torch.float32, attn_implementation="eager"
        ).eval()
    tensors = load_file(folder / "model.safetensors")
    norms = [tensors[f"{prefix}{name}.weight"] for name in (token_norm, state_norm)]
    matrix, table = tensors[f"{prefix}{projection}.weight"], tensors["model.embed_tokens.weight"]
    centre, eps = 1.0 if kind == "qwen3_next" else 0.0, model.config.rms_norm_eps

    def row(ids: Tensor, states: Tensor) -> Tensor:
        halves = [rms(table[ids], norms[0], eps, centre), rms(states, norms[1], eps, centre)]
        # MiMo has the hidden state first.
        x = torch.cat(halves[::-1] if kind == "mimo" else halves, -1) @ matrix.T
        # The layer's model ends in the head's norm.
        return layer(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]

    @torch.no_grad()
    def logits(tokens: Sequence[int], drafts: Sequence[int]) -> Tensor:
        return model.lm_head(chained(tokens, drafts, model_states(model, tokens, None), row))

    return logits


def eagle_weights(draft_vocab: int, hidden: int = HIDDEN) -> dict[str, Tensor]:
    """An EAGLE-3 head's tensors as its authors name them."""
    g = torch.Generator().manual_seed(3)
    ids = torch.randperm(VOCAB, generator=g)[:draft_vocab].sort().values
    chosen = torch.zeros(VOCAB, dtype=torch.bool)
    chosen[ids] = True
    layer = {
        "hidden_norm": 1 + random(g, HIDDEN, scale=0.3), "input_layernorm": 1 + random(g, HIDDEN, scale=0.3),
        "post_attention_layernorm": 1 + random(g, HIDDEN, scale=0.3),
        "self_attn.q_proj": random(g, HEADS * HEAD_DIM, 2 * HIDDEN),
        "self_attn.k_proj": random(g, KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "self_attn.v_proj": random(g, KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "self_attn.o_proj": random(g, HIDDEN, HEADS * HEAD_DIM), "mlp.gate_proj": random(g, MLP, HIDDEN),
        "mlp.up_proj": random(g, MLP, HIDDEN), "mlp.down_proj": random(g, HIDDEN, MLP),
    }  # fmt: skip
    return {
        "fc.weight": random(g, HIDDEN, 3 * hidden), "norm.weight": 1 + random(g, HIDDEN, scale=0.3),
        "lm_head.weight": random(g, draft_vocab, HIDDEN), "d2t": ids - torch.arange(draft_vocab), "t2d": chosen,
        **{f"midlayer.{name}.weight": x for name, x in layer.items()},
    }  # fmt: skip


LAYER_CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": MLP, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "num_hidden_layers": 1, "vocab_size": VOCAB,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10000.0,
}  # fmt: skip
STATE_LAYERS = (1, 2, 3)
"""The layers that get the hidden states which these heads read."""


def save_eagle3(folder: Path, spelling: str, *, draft_vocab: int = 160, **changes: Any) -> Path:
    """Saves a head for a qwen3 of at least four layers: as its authors do (`raw`), or as `speculators` does."""
    weights = eagle_weights(draft_vocab)
    if spelling == "raw":
        ids = [layer - 1 for layer in STATE_LAYERS]
        config = {
            **LAYER_CONFIG, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": draft_vocab,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}, **changes,
        }  # fmt: skip
    else:
        g = torch.Generator().manual_seed(11)
        weights = {name.replace("midlayer.", "layers.0."): x for name, x in weights.items()}
        weights["embed_tokens.weight"] = random(g, VOCAB, HIDDEN)
        weights["verifier_norm.weight"] = random(g, HIDDEN)
        config = {
            "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
            "transformer_layer_config": LAYER_CONFIG, "draft_vocab_size": draft_vocab, "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": list(STATE_LAYERS), "target_hidden_size": None,
            "speculators_config": {
                "algorithm": "eagle3", "default_proposal_method": "greedy", "verifier": {"name_or_path": "any"},
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            }, **changes,
        }  # fmt: skip
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def rotated(x: Tensor, base: float = 10000.0) -> Tensor:
    """Rotary positions 0, 1, ... of [T, heads, D], halves side by side."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x))[:, None, None] * base ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def eagle3_reference(model_folder: Path, folder: Path, spelling: str) -> Reference:
    """What an EAGLE-3 head should say: logits of all tokens, -inf for those that it cannot draft."""
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    w = load_file(folder / "model.safetensors")
    prefix = "midlayer." if spelling == "raw" else "layers.0."
    table = w.get("embed_tokens.weight", model.get_input_embeddings().weight)

    def layer(name: str) -> Tensor:
        return w[f"{prefix}{name}.weight"]

    def row(ids: Tensor, states: Tensor) -> Tensor:
        normed = rms(states, layer("hidden_norm"))
        x = torch.cat([rms(table[ids], layer("input_layernorm")), normed], -1)
        q, k, v = ((x @ layer(f"self_attn.{name}_proj").T).unflatten(-1, (-1, HEAD_DIM)) for name in "qkv")
        k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (rotated(k), v))
        scores = torch.einsum("thd,shd->hts", rotated(q), k) * HEAD_DIM**-0.5
        hidden = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)
        mixed = torch.einsum("hts,shd->thd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)
        # `speculators` may add to the normed hidden state.
        residual = normed if spelling == "speculators" else states
        y = residual + mixed.flatten(1) @ layer("self_attn.o_proj").T
        z = rms(y, layer("post_attention_layernorm"))
        return (
            y
            + (F.silu(z @ layer("mlp.gate_proj").T) * (z @ layer("mlp.up_proj").T)) @ layer("mlp.down_proj").T
        )

    @torch.no_grad()
    def logits(tokens: Sequence[int], drafts: Sequence[int]) -> Tensor:
        states = model_states(model, tokens, STATE_LAYERS) @ w["fc.weight"].T
        own = rms(chained(tokens, drafts, states, row), w["norm.weight"]) @ w["lm_head.weight"].T
        full = torch.full((VOCAB,), float("-inf"))
        full[torch.arange(len(own)) + w["d2t"]] = own
        return full

    return logits

"""Models of well-known shapes with random weights, served by Nibble's own engine, with no checkpoint on disk.

A checkpoint is a folder with config.json alone; the weights are made on the device. Before the model is handed over,
its own attention computes logits of a prompt: what the engine's are checked against.

Shape suffixes: T tokens, V vocabulary.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from packed_weights import KINDS, quantize
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from nibble import LLM
from nibble.engine import build
from nibble.kernels.weight_formats import Activations
from nibble.model_spec import ModelSpec
from nibble.models import hook
from nibble.models.activations import FULL
from nibble.models.checkpoint import prepare_model
from nibble.models.linear import QuantizedLinear, quantized_layers
from nibble.models.quantization import Handling

LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
_TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
_ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3.1-8b": ("llama", {
        **_8B, "vocab_size": 128256, "intermediate_size": 14336, "num_hidden_layers": 32, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072, "rope_parameters": LLAMA3_ROPE,
    }),
    "qwen3-8b": ("qwen3", {
        **_8B, "vocab_size": 151936, "intermediate_size": 12288, "num_hidden_layers": 36, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }),
    "deepseek-v3.2, 4 layers": ("deepseek_v32", {
        "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 4,
        "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "index_n_heads": 64,
        "index_head_dim": 128, "index_topk": 2048, "first_k_dense_replace": 1, "n_routed_experts": 256,
        "moe_intermediate_size": 2048, "n_shared_experts": 1, "n_group": 8, "topk_group": 4,
        "num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "max_position_embeddings": 163840,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }),
    "tiny sparse": ("deepseek_v32", {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 128,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 32, "v_head_dim": 32, "index_n_heads": 8,
        "index_head_dim": 32, "index_topk": 24, "first_k_dense_replace": 2, "n_routed_experts": 32,
        "moe_intermediate_size": 32, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
        "num_experts_per_tok": 2, "max_position_embeddings": 1024, "initializer_range": 0.1,
    }),
    "tiny": ("llama", {
        **_TINY, "vocab_size": 320, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 512,
        "initializer_range": 0.1,
    }),
}  # fmt: skip
"""Name -> family and config of published models."""
PROMPT = 192
"""Tokens of the prompt that is checked."""
SMALL, LARGE = 0.1, 50.0
"""What queries and embeddings are multiplied by."""


@dataclass
class Served:
    """An engine with random weights. prompt, expected_TV: what the model itself computes."""

    llm: LLM
    prompt: list[int]
    expected_TV: Tensor

    def streamed_bytes(self) -> int:
        """Bytes of weights that a decode step must read: all but the table of input embeddings."""
        model = self.llm.engine.runner.model
        assert isinstance(model, nn.Module)
        table = model.get_input_embeddings()  # type: ignore[operator]
        packed = sum(layer.matrix.nbytes for layer in quantized_layers(model))
        return packed + sum(p.nbytes for p in model.parameters()) - table.weight.nbytes


PLAIN: dict[str, Any] = {"kv_transforms": "none", "kv_window": 0}
"""A scheme is what its kernels read and nothing beside it, unless a benchmark says otherwise."""


@contextmanager
def served(shape: str, likeness: float = 0.0, weights: str = "", **options: Any) -> Iterator[Served]:
    """The engine of a shape in SHAPES; options are fields of nibble.Config.

    likeness: see make(). weights: a name of packed_weights.KINDS; those of linear layers are then quantised, and what
    the engine is checked against is the model with these.
    """
    family, changes = SHAPES[shape]
    if weights:
        changes = {**changes, "quantization_config": KINDS[weights].config}
        if not KINDS[weights].activations:
            options = {"activations": FULL, **options}
    kept: dict[str, Any] = {}

    def load(
        config: PretrainedConfig,
        model_spec: ModelSpec,
        dtype: str,
        device: str,
        *,
        deterministic: bool = False,
        handling: Handling = Handling.UNPACKED,
        activations: str = FULL,
        **others: object,  # of loading from files
    ) -> nn.Module:
        if weights:
            del config.quantization_config
        model = make(config, dtype, device, likeness)
        if weights and handling is Handling.PACKED:
            pack(model, weights, activations)
        kept["prompt"] = torch.randint(model_spec.vocab_size, (PROMPT,)).tolist()
        kept["expected"] = reference(model, kept["prompt"])
        return prepare_model(model, model_spec, deterministic=deterministic)

    with tempfile.TemporaryDirectory() as folder:
        AutoConfig.for_model(family, **{**_ENDS, **changes}).save_pretrained(Path(folder))
        with mock.patch.object(build, "load", load):
            llm = LLM(folder, **{"kv_scales": "one", **PLAIN, **options})
        yield Served(llm, kept["prompt"], kept["expected"])


def pack(model: Any, weights: str, activations: str = FULL) -> None:
    """Quantises the linear layers of a model but the last, in place; their inputs too unless these are left as FULL."""
    output, kind = model.get_output_embeddings(), KINDS[weights]
    inputs = Activations.NONE if activations == FULL else kind.activations
    for name, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and layer is not output:
            matrix = replace(quantize(layer.weight.data, kind.format), activations=inputs)
            model.set_submodule(name, QuantizedLinear(matrix, layer.bias))


def make(config: PretrainedConfig, dtype: str, device: str, likeness: float = 0.0) -> nn.Module:
    """A model with random weights, the same each time.

    likeness: what part of an embedding's square all tokens have in common, as they have much in trained models.

    Queries are made small and embeddings large, so that attention is broad and tokens keep what they are, as in a
    trained model. As random weights come, the least error of a key sends attention elsewhere, every layer blows that
    up, and nothing could be checked.
    """
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation=hook.NAME
        )
    for name, weight in model.named_parameters():
        if name.endswith(_queries(model)):
            weight.data.mul_(SMALL)
        elif name.endswith("embed_tokens.weight"):
            common = torch.randn_like(weight[:1]) * weight.std() * likeness**0.5
            weight.data.mul_((1 - likeness) ** 0.5).add_(common).mul_(LARGE)
    return model.eval()


def _queries(model: nn.Module) -> str:
    """The weight that queries are proportional to: of their norm, where they have one, or of their second factor."""
    names = [name for name, _ in model.named_parameters()]
    of = ("q_norm.weight", "self_attn.q_b_proj.weight", "q_proj.weight")
    return next(end for end in of if any(name.endswith(end) for name in names))


@torch.inference_mode()
def reference(model: Any, prompt: list[int]) -> Tensor:
    """Logits [T, V] of the unmodified model, with torch's own attention."""
    model.set_attn_implementation("sdpa")
    logits: Tensor = model(torch.tensor([prompt], device=model.device), use_cache=False).logits[0]
    model.set_attn_implementation(hook.NAME)
    return logits.float().cpu()

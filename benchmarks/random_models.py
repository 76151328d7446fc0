"""Models of well-known shapes with random weights, served by Nibble's own engine, with no checkpoint on disk.

A checkpoint is a folder with config.json alone; the weights are made on the device. Quantised ones are made packed, one
matrix after the other, so that a model that does not fit in BF16 can be served. Before the model is handed over, its
own attention computes logits of a prompt: what the engine's are checked against.

Shape suffixes: T tokens, V vocabulary.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from packed_weights import KINDS, quantize, random_experts
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from nibble import LLM
from nibble.engine import build
from nibble.kernels.weight_formats import Activations, experts_unserved, unserved
from nibble.model_spec import ModelSpec
from nibble.models import hook
from nibble.models.activations import AUTO, FULL, activations_of
from nibble.models.experts import ExpertMatrices, expert_matrices, packed_matrices, set_packed_experts
from nibble.models.head_model import class_of
from nibble.models.heads import HeadFacts
from nibble.models.linear import QuantizedLinear, compile_ahead, quantized_layers
from nibble.models.pack import Packer
from nibble.models.quantization import Handling, MatrixFormat, Quantization, parse
from nibble.models.recurrent import own_forwards
from nibble.models.weight_bytes import ALWAYS_PLAIN

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
_GPT_OSS: dict[str, Any] = {
    "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "num_experts_per_tok": 4, "sliding_window": 128, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 4096,
    },
}  # fmt: skip
_QWEN3_NEXT: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5120, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512, "num_experts_per_tok": 10,
    "norm_topk_prob": True,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
_QWEN3_5: dict[str, Any] = {
    "vocab_size": 248320, "head_dim": 256, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6, "max_position_embeddings": 262144,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
}  # fmt: skip
"""What text towers of Qwen3.5 have in common: github.com/THUDM/slime, scripts/models/qwen3.5-27B.sh and -35B-A3B.sh; of
the former the heads of values are in docs.modular.com, max.pipelines.architectures.qwen3_5."""
_TINY_DELTA: dict[str, Any] = {
    **_TINY, "vocab_size": 320, "intermediate_size": 96, "num_hidden_layers": 4, "max_position_embeddings": 512,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "initializer_range": 0.1,
}  # fmt: skip
_TINY_NEXT: dict[str, Any] = {
    **_TINY_DELTA, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}  # fmt: skip
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
    "qwen3-32b": ("qwen3", {
        "hidden_size": 5120, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "intermediate_size": 25600, "num_hidden_layers": 64, "rms_norm_eps": 1e-6, "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }),
    "llama-3.3-70b": ("llama", {
        "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
        "intermediate_size": 28672, "num_hidden_layers": 80, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072,
        "rope_parameters": LLAMA3_ROPE,
    }),
    "qwen3-30b-a3b": ("qwen3_moe", {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }),
    "gpt-oss-20b": ("gpt_oss", {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32}),
    "gpt-oss-120b": ("gpt_oss", {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128}),
    "deepseek-v3.2, 4 layers": ("deepseek_v32", {
        "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 4,
        "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "index_n_heads": 64,
        "index_head_dim": 128, "index_topk": 2048, "first_k_dense_replace": 1, "n_routed_experts": 256,
        "moe_intermediate_size": 2048, "n_shared_experts": 1, "n_group": 8, "topk_group": 4,
        "num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "max_position_embeddings": 163840,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }),
    "qwen3-next, 8 layers": ("qwen3_next", _QWEN3_NEXT),
    "qwen3-next, 8 layers that attend": ("qwen3_next", {**_QWEN3_NEXT, "layer_types": ["full_attention"] * 8}),
    "qwen3.5-27b, 16 layers": ("qwen3_5_text", {
        **_QWEN3_5, "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 16, "num_attention_heads": 24,
        "num_key_value_heads": 4, "linear_num_value_heads": 48,
    }),
    "qwen3.5-35b-a3b, 8 layers": ("qwen3_5_moe_text", {
        **_QWEN3_5, "hidden_size": 2048, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 2, "num_experts": 256,
        "num_experts_per_tok": 8, "linear_num_value_heads": 32,
    }),
    "tiny hybrid": ("qwen3_next", _TINY_NEXT),
    "tiny qwen3.5": ("qwen3_5_text", _TINY_DELTA),
    "tiny qwen3.5 of experts": ("qwen3_5_moe_text", _TINY_NEXT),
    "tiny hybrid that attends": ("qwen3_next", {**_TINY_NEXT, "layer_types": ["full_attention"] * 4}),
    "tiny sparse": ("deepseek_v32", {
        "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 128,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 32, "v_head_dim": 32, "index_n_heads": 8,
        "index_head_dim": 32, "index_topk": 24, "first_k_dense_replace": 2, "n_routed_experts": 32,
        "moe_intermediate_size": 32, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
        "num_experts_per_tok": 2, "max_position_embeddings": 1024, "initializer_range": 0.1,
    }),
    "tiny gpt-oss": ("gpt_oss", {
        **_TINY, "vocab_size": 320, "intermediate_size": 64, "num_hidden_layers": 2, "num_local_experts": 8,
        "num_experts_per_tok": 2, "sliding_window": 16, "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    }),
    "tiny moe": ("qwen3_moe", {
        **_TINY, "hidden_size": 128, "vocab_size": 320, "intermediate_size": 128, "moe_intermediate_size": 128,
        "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 512,
    }),
    "tiny": ("llama", {
        **_TINY, "vocab_size": 320, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 512,
        "initializer_range": 0.1,
    }),
}  # fmt: skip
"""Name -> family and config of published models."""
OWN_CONFIGS: dict[tuple[str, str], dict[str, Any]] = {("gpt_oss", "mxfp4"): {"quant_method": "mxfp4"}}
"""By family and kind of weights: what published checkpoints say in the place of packed_weights.KINDS."""
OWN_ATTENTION = {"gpt_oss": "eager"}
"""Families whose attention torch's kernels do not compute, as it has sinks."""
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
        """Bytes of weights that a decode step must read: all but the table of input embeddings; of all experts."""
        model = self.llm.engine.runner.model
        assert isinstance(model, nn.Module)
        table = model.get_input_embeddings()  # type: ignore[operator]
        packed = sum(layer.matrix.nbytes for layer in quantized_layers(model))
        packed += sum(experts.matrices.nbytes for experts in packed_matrices(model))
        return packed + sum(p.nbytes for p in model.parameters()) - table.weight.nbytes


PLAIN: dict[str, Any] = {"kv_transforms": "none", "kv_window": 0}
"""A scheme is what its kernels read and nothing beside it, unless a benchmark says otherwise."""


def shape_config(shape: str, **changes: Any) -> PretrainedConfig:
    """The config of a shape in SHAPES."""
    family, fields = SHAPES[shape]
    config: PretrainedConfig = AutoConfig.for_model(family, **{**_ENDS, **fields, **changes})
    return config


@contextmanager
def served(shape: str, likeness: float = 0.0, weights: str = "", **options: Any) -> Iterator[Served]:
    """The engine of a shape in SHAPES; options are fields of nibble.Config.

    likeness: see make(). weights: a name of packed_weights.KINDS; matrices are then made packed, as the plan counts
    them, and what the engine is checked against is the model with these.
    """
    family, _ = SHAPES[shape]
    entry = OWN_CONFIGS.get((family, weights)) or (KINDS[weights].config if weights else {})
    changes = {"quantization_config": entry} if weights else {}
    if weights and not KINDS[weights].activations:
        options = {"activations": FULL, **options}
    kept: dict[str, Any] = {}

    def load(
        config: PretrainedConfig,
        model_spec: ModelSpec,
        dtype: str,
        device: str,
        *,
        handling: Handling = Handling.UNPACKED,
        activations: str = FULL,
        **others: object,  # of loading from files
    ) -> nn.Module:
        if HeadFacts.of(config):
            return make_head(config, dtype, device)
        if weights:
            del config.quantization_config
        is_packed = bool(weights) and handling in (Handling.PACKED, Handling.EXPERTS)
        quantization = parse(entry) if is_packed else None
        inputs = Activations.NONE if not weights or activations == FULL else KINDS[weights].activations
        linears = handling is Handling.PACKED
        if quantization and linears:
            # As loading from files does.
            packer = Packer(device, getattr(torch, dtype), AUTO if inputs is not Activations.NONE else FULL)
            compile_ahead(config, quantization, packer)
        model = make(config, dtype, device, likeness, quantization, inputs, linears=linears)
        kept["prompt"] = torch.randint(model_spec.vocab_size, (PROMPT,)).tolist()
        kept["expected"] = reference(model, kept["prompt"])
        return model

    with tempfile.TemporaryDirectory() as folder:
        shape_config(shape, **changes).save_pretrained(Path(folder))
        with mock.patch.object(build, "load", load):
            llm = LLM(folder, **{"kv_scales": "one", **PLAIN, **options})
        yield Served(llm, kept["prompt"], kept["expected"])


@contextmanager
def head_folder(shape: str, draft_vocab: int = 32000) -> Iterator[Path]:
    """The folder of an EAGLE-3 head for a shape in SHAPES, with config.json alone; served() makes its weights."""
    config, names = shape_config(shape), ("num_attention_heads", "num_key_value_heads", "head_dim")
    names += ("hidden_size", "intermediate_size", "vocab_size", "rms_norm_eps", "max_position_embeddings")
    last = config.num_hidden_layers
    layers = (2, last // 2, last - 3) if last > 5 else (1, max(last // 2, 1), last)
    fields = {
        **{name: getattr(config, name) for name in names}, "model_type": "llama",
        "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": min(draft_vocab, config.vocab_size),
        "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers]},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(fields))
        yield Path(folder)


def make_head(config: PretrainedConfig, dtype: str, device: str) -> nn.Module:
    """A head with random weights, which drafts the first tokens of the vocabulary."""
    torch.manual_seed(1)
    with torch.device(device):
        head = class_of(config)._from_config(
            config, dtype=getattr(torch, dtype), attn_implementation=hook.NAME
        )
    made: nn.Module = head.eval()
    return made


def pack(
    model: Any,
    quantization: Quantization,
    dtype: torch.dtype,
    device: str,
    inputs: Activations = Activations.NONE,
    *,
    linears: bool = True,
) -> None:
    """Replaces the matrices that a quantisation is about by random packed ones, in place; they need have no values.

    inputs: how those of linear layers are quantised.
    """
    name_of_dtype, std = str(dtype).removeprefix("torch."), model.config.initializer_range
    queries = _queries(model)
    for name, module in list(model.named_modules()):
        if weights := expert_matrices(module):
            _pack_experts(module, quantization.format_of(f"{name}.0.gate_proj"), weights, dtype, device, std)
        format = quantization.format_of(name) if type(module) is nn.Linear and linears else None
        if format is None or format.packed is None or name.endswith(ALWAYS_PLAIN):
            continue
        rows, columns = module.weight.shape
        if not unserved(format.packed, rows, columns, name_of_dtype):
            size = SMALL * std if f"{name}.weight".endswith(queries) else std
            weight_NK = size * torch.randn(rows, columns, dtype=dtype, device=device)
            bias = None if module.bias is None else torch.zeros(rows, dtype=dtype, device=device)
            matrix = quantize(weight_NK, format.packed)
            matrix = replace(matrix, activations=activations_of(AUTO, inputs, matrix.format))
            model.set_submodule(name, QuantizedLinear(matrix, bias))


def _pack_experts(
    module: Any,
    format: MatrixFormat | None,
    weights: dict[str, nn.Parameter],
    dtype: torch.dtype,
    device: str,
    std: float,
) -> None:
    if format is None or format.packed is None:
        return
    packed = {}
    for name, weight in weights.items():
        count, rows, columns = weight.shape
        rows, columns = (columns, rows) if module.is_transposed else (rows, columns)
        if experts_unserved(format.packed, columns, str(dtype).removeprefix("torch.")):
            return
        packed[name] = random_experts(format.packed, (count, rows, columns), dtype, device, std)
    set_packed_experts(module, packed)


def make(
    config: PretrainedConfig,
    dtype: str,
    device: str,
    likeness: float = 0.0,
    quantization: Quantization | None = None,
    inputs: Activations = Activations.NONE,
    *,
    linears: bool = True,
) -> nn.Module:
    """A model with random weights, the same each time.

    likeness: what part of an embedding's square all tokens have in common, as they have much in trained models.
    quantization, inputs, linears: see pack().

    Queries are made small and embeddings large, so that attention is broad and tokens keep what they are, as in a
    trained model. As random weights come, the least error of a key sends attention elsewhere, every layer blows that
    up, and nothing could be checked.
    """
    torch.manual_seed(0)
    with torch.device("meta" if quantization else device):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation=hook.NAME
        )
    queries = _queries(model)
    if quantization:
        pack(model, quantization, getattr(torch, dtype), device, inputs, linears=linears)
        _fill(model, device)
    for name, weight in model.named_parameters():
        if name.endswith(queries):
            weight.data.mul_(SMALL)
        elif name.endswith("embed_tokens.weight"):
            common = torch.randn_like(weight[:1]) * weight.std() * likeness**0.5
            weight.data.mul_((1 - likeness) ** 0.5).add_(common).mul_(LARGE)
    made: nn.Module = model.eval()
    return made


@torch.no_grad()
def _fill(model: Any, device: str) -> None:
    """Gives all that has no values yet those that the family begins with."""
    for module in model.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not any(tensor.is_meta for tensor in own):
            continue
        module.to_empty(device=device, recurse=False)
        if any(isinstance(part, ExpertMatrices) for part in module.children()):
            for bias in module.parameters(recurse=False):
                bias.zero_()
        else:
            model._init_weights(module)


def _queries(model: nn.Module) -> str:
    """The weight that queries are proportional to: of their norm, where they have one, or of their second factor."""
    names = [name for name, _ in model.named_parameters()]
    of = ("q_norm.weight", "self_attn.q_b_proj.weight", "q_proj.weight")
    return next(end for end in of if any(name.endswith(end) for name in names))


@torch.inference_mode()
def reference(model: Any, prompt: list[int]) -> Tensor:
    """Logits [T, V] of the unmodified model, with torch's own attention or the family's."""
    model.set_attn_implementation(OWN_ATTENTION.get(model.config.model_type, "sdpa"))
    with ExitStack() as patches:
        # Recurrent layers in torch: kernels of other packages are tuned at their first call, for a minute.
        for module, forward in own_forwards(model).items():
            patches.enter_context(mock.patch.object(module, "forward", forward))
        logits: Tensor = model(torch.tensor([prompt], device=model.device), use_cache=False).logits[0]
    model.set_attn_implementation(hook.NAME)
    return logits.float().cpu()

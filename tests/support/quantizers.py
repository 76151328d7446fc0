"""Tiny models, and how other libraries quantise them, write them, and read them back; for scripts/quantized_fixtures.

Libraries are imported where they are called: each is installed apart, and none is needed for the tests.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY, TOKENS = 64, 12
SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": VOCABULARY, "max_position_embeddings": 256,
    "tie_word_embeddings": False, "initializer_range": 0.1, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
LLAMA: dict[str, Any] = {"family": "llama"}
NARROW: dict[str, Any] = {"family": "llama", "intermediate_size": 128}
SMALL: dict[str, Any] = NARROW | {"num_key_value_heads": 4}
"""Each matrix is one tile of kernels on GPUs."""
MOE: dict[str, Any] = {
    "family": "qwen3_moe", "moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
SMALL_MOE = MOE | {"num_key_value_heads": 4}
GPT_OSS: dict[str, Any] = {
    "family": "gpt_oss", "hidden_size": 128, "intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2,
    "sliding_window": 8, "layer_types": ["full_attention"],
}  # fmt: skip
QUERY = "model.layers.0.self_attn.q_proj.weight"

State = dict[str, Tensor]


@dataclass
class Spelling:
    """One way to write quantised weights, with its library's own writer and reader."""

    write: Callable[[PreTrainedModel, Path], None]
    read: Callable[[Path], State]
    """Dequantises what `write` wrote, under the names of plain per-expert checkpoints or of Transformers' model."""
    library: str
    dtype: str
    """Type in which the library multiplies values and scales, to which its result is rounded."""
    sizes: dict[str, Any] = field(default_factory=lambda: LLAMA)
    note: str = ""
    bound: float = 0.15
    """Largest relative error of a quantised matrix; four bits with one scale for 128 have some 0.12."""
    shown: str = QUERY
    version: str = ""
    """Start of the version that is needed."""


# Models


def plain_config(family: str, **changes: Any) -> Any:
    """Return the configuration of a tiny model."""
    config = AutoConfig.for_model(family, **{**SIZES, **changes})
    config.dtype = torch.bfloat16
    return config


def build(sizes: dict[str, Any]) -> PreTrainedModel:
    """Make a random bf16 model whose rows, columns and norms differ in size, so that misplaced scales show."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(plain_config(**sizes), dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * 0.1)
            elif "layers" in name:
                rows = torch.exp(torch.randn(weight.shape[:-1]) * 0.3).unsqueeze(-1)
                columns = torch.exp(torch.randn(weight.shape[-1]) * 0.3)
                weight.copy_((weight.float() + 0.02) * rows * columns)
    model.config.architectures = [type(model).__name__]
    return model


def tokens() -> Tensor:
    """Return the prompt that every fixture answers."""
    return torch.randint(VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(1))


def split_experts(state: State) -> State:
    """Name each expert's matrices as checkpoints do; Transformers stacks those of a layer."""
    out: State = {}
    for name, weight in state.items():
        base, _, last = name.rpartition(".")
        if not base.endswith("mlp.experts"):
            out[name] = weight
            continue
        for expert, matrix in enumerate(weight):
            if last == "down_proj":
                out[f"{base}.{expert}.down_proj.weight"] = matrix.contiguous()
            else:
                gate, up = (half.contiguous() for half in matrix.chunk(2))
                out |= {f"{base}.{expert}.gate_proj.weight": gate, f"{base}.{expert}.up_proj.weight": up}
    return out


def stack_experts(state: State) -> State:
    """Undo `split_experts`."""
    out = {name: weight for name, weight in state.items() if not re.search(r"experts\.\d+\.", name)}
    for base in sorted(
        {name.split(".0.gate_proj")[0] for name in state if name.endswith("experts.0.gate_proj.weight")}
    ):
        count = sum(name.startswith(base) and name.endswith("gate_proj.weight") for name in state)
        each = [
            {kind: state[f"{base}.{e}.{kind}.weight"] for kind in ("gate_proj", "up_proj", "down_proj")}
            for e in range(count)
        ]
        out[f"{base}.gate_up_proj"] = torch.stack([torch.cat([e["gate_proj"], e["up_proj"]]) for e in each])
        out[f"{base}.down_proj"] = torch.stack([e["down_proj"] for e in each])
    return out


def loosen_experts(model: PreTrainedModel) -> PreTrainedModel:
    """Replace stacked experts by `nn.Linear`s, which libraries quantise; the model no longer runs."""
    state = split_experts(model.state_dict())
    for name in [name for name, _ in model.named_modules()]:
        if name.endswith("mlp.experts"):
            parent = model.get_submodule(name.rpartition(".")[0])
            parent.experts = nn.ModuleList()
            while f"{name}.{len(parent.experts)}.gate_proj.weight" in state:
                expert = nn.Module()
                for kind in ("gate_proj", "up_proj", "down_proj"):
                    weight = state[f"{name}.{len(parent.experts)}.{kind}.weight"]
                    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
                    linear.weight = nn.Parameter(weight, requires_grad=False)
                    expert.register_module(kind, linear)
                parent.experts.append(expert)
    return model


def input_ranges(model: PreTrainedModel) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the least and greatest input of every linear module on the prompt."""
    ranges: dict[str, tuple[Tensor, Tensor]] = {}

    def hook(name: str) -> Callable[..., None]:
        return lambda _module, args: ranges.update({name: torch.aminmax(args[0])})

    hooks = [
        m.register_forward_pre_hook(hook(n)) for n, m in model.named_modules() if isinstance(m, nn.Linear)
    ]
    with torch.no_grad():
        model(tokens())
    for handle in hooks:
        handle.remove()
    return ranges


def tensors_of(folder: Path) -> State:
    """Read a checkpoint's tensors."""
    return load_file(folder / "model.safetensors")


def quantization_of(folder: Path) -> dict[str, Any]:
    """Read the quantisation entry of a checkpoint's config.json."""
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def save(
    folder: Path, model: PreTrainedModel, state: State, quantization: dict[str, Any] | None = None
) -> None:
    """Write tensors and config.json."""
    save_file(
        {n: t.detach().contiguous() for n, t in state.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    config = model.config.to_dict() | ({"quantization_config": quantization} if quantization else {})
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True, default=str) + "\n")


def quantized_names(state: State, keep: tuple[str, ...] = ("lm_head", "embed_tokens")) -> Iterator[str]:
    """Name the modules of a plain checkpoint whose matrices are quantised."""
    for name, weight in state.items():
        if weight.dim() == 2 and not any(part in name for part in keep):
            yield name.removesuffix(".weight")


# compressed-tensors


def ct_weight_parameters(
    weight: Tensor, args: Any, order: Tensor | None, share: Tensor | None
) -> dict[str, Tensor]:
    """Return scales, zero points and the global scale by the library's formulas, from plain minima and maxima."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    strategy = str(getattr(args.strategy, "value", args.strategy))
    if strategy == "tensor":
        cells, dims = weight, (0, 1)
    elif strategy == "channel":
        cells, dims = weight.unsqueeze(1), (2,)
    elif strategy in {"group", "tensor_group"}:
        cells, dims = (
            (weight if order is None else weight[:, order]).unflatten(1, (-1, args.group_size)),
            (2,),
        )
    else:
        height, width = args.block_structure
        padded = nn.functional.pad(weight, (0, -weight.shape[1] % width, 0, -weight.shape[0] % height))
        cells, dims = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height)), (1, 3)
    low, high = cells.amin(dims), cells.amax(dims)
    values: dict[str, Tensor] = {}
    if strategy == "tensor_group":
        whole = weight if share is None else share
        values["global_scale"] = generate_gparam(whole.amin(), whole.amax())
    values["scale"], values["zero_point"] = calculate_qparams(low, high, args, values.get("global_scale"))
    return values


def ct_calibrate(
    model: PreTrainedModel, fuse: bool, ordered: bool, ranges: dict[str, tuple[Tensor, Tensor]]
) -> None:
    """Fill in the quantisation parameters of every module that has a scheme."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    generator = torch.Generator().manual_seed(2)
    modules = dict(model.named_modules())
    for name, module in modules.items():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None:
            continue
        base, _, last = name.rpartition(".")
        peers = next((p for p in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")) if last in p), ())
        share = torch.cat([modules[f"{base}.{p}"].weight for p in peers]) if fuse and peers else None
        order = None
        if ordered:
            order = torch.randperm(module.weight.shape[1], generator=generator)
            group = torch.empty_like(order)
            group[order] = torch.arange(len(order)) // scheme.weights.group_size
            order = torch.argsort(group)
            module.weight_g_idx.data.copy_(group)
        for key, value in ct_weight_parameters(module.weight, scheme.weights, order, share).items():
            if hasattr(module, f"weight_{key}"):
                getattr(module, f"weight_{key}").data.copy_(value)
        if hasattr(module, "input_global_scale"):
            module.input_global_scale.data.copy_(generate_gparam(*ranges[name]))
        elif hasattr(module, "input_scale"):
            module.input_scale.data.copy_(calculate_qparams(*ranges[name], scheme.input_activations)[0])


def ct_scheme(preset: str, targets: list[str], **weights: Any) -> Any:
    """Return a preset scheme, with entries of its weights changed."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme

    scheme = preset_name_to_scheme(preset, targets).model_dump(exclude_unset=True)
    entries = scheme["weights"] | weights
    scheme["weights"] = QuantizationArgs(
        **{k: v for k, v in entries.items() if k not in {"zp_dtype"} or k in weights}
    )
    return QuantizationScheme(**scheme)


def ct_write(
    *presets: tuple[str, list[str]],
    ignore: tuple[str, ...] = ("lm_head",),
    fuse: bool = False,
    **weights: Any,
) -> Callable[[PreTrainedModel, Path], None]:
    """Return a writer by compressed-tensors.

    Args:
        presets: names of schemes and what they target.
        ignore: what is not quantised.
        fuse: whether matrices that engines merge share a global scale, as LLM Compressor has it.
        weights: changes of the schemes' weights.
    """

    def write(model: PreTrainedModel, folder: Path) -> None:
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

        ranges = input_ranges(model)
        model = loosen_experts(model)
        groups = {f"group_{i}": ct_scheme(name, on, **weights) for i, (name, on) in enumerate(presets)}
        apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=list(ignore)))
        with torch.no_grad():
            ct_calibrate(model, fuse, weights.get("actorder") is not None, ranges)
        formats = ("pack-quantized",) if weights.get("actorder") else ()
        compressor = ModelCompressor.from_pretrained_model(model, *(() if not formats else (None, *formats)))
        compressor.quantization_config.ignore = list(ignore)
        compressor.compress_model(model)
        save(folder, model, model.state_dict())
        compressor.update_config(str(folder))

    return write


def ct_read(folder: Path) -> State:
    """Decompress as Transformers' quantizer for compressed-tensors does."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    config = AutoConfig.from_pretrained(folder)
    entries = quantization_of(folder)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    names = set(split_experts(model.state_dict()))
    model = loosen_experts(model)
    quantization = QuantizationConfig.model_validate(entries)
    apply_quantization_config(model, quantization)
    compressor = ModelCompressor(quantization_config=quantization)
    compressor.compress_model(model)
    model.load_state_dict(tensors_of(folder))
    compressor.decompress_model(model)
    return {name: weight for name, weight in model.state_dict().items() if name in names}


def compressed(
    *presets: str | tuple[str, list[str]], sizes: dict[str, Any] = LLAMA, **options: Any
) -> Spelling:
    """Return a spelling of compressed-tensors."""
    pairs = [preset if isinstance(preset, tuple) else (preset, ["Linear"]) for preset in presets]
    bound, note = options.pop("bound", 0.15), options.pop("note", "")
    version = "0.12" if "actorder" in options else "0.2"
    writer = ct_write(*pairs, **options)
    return Spelling(writer, ct_read, "compressed-tensors", "bfloat16", sizes, note, bound, version=version)


# Transformers' own


def fp8_quantizer(**entries: Any) -> Any:
    """Return what Transformers' operations on fine-grained FP8 ask of a quantizer."""
    return SimpleNamespace(quantization_config=transformers.FineGrainedFP8Config(**entries))


def fp8_write(**entries: Any) -> Callable[[PreTrainedModel, Path], None]:
    """Return a writer of fine-grained FP8."""

    def write(model: PreTrainedModel, folder: Path) -> None:
        from transformers.integrations.finegrained_fp8 import Fp8Quantize

        quantizer = fp8_quantizer(**entries)
        state = split_experts(model.state_dict())
        for name in list(quantized_names(state, ("lm_head", "embed_tokens", "mlp.gate."))):
            state |= Fp8Quantize(quantizer).convert({f"{name}.weight": state[f"{name}.weight"]})
        written = quantizer.quantization_config.to_dict() | {"modules_to_not_convert": ["lm_head"]}
        save(folder, model, state, {k: v for k, v in written.items() if k != "dequantize"})

    return write


def transformers_read(folder: Path) -> State:
    """Let Transformers dequantise as it loads."""
    method = quantization_of(folder)["quant_method"]
    kind = transformers.FineGrainedFP8Config if method == "fp8" else transformers.Mxfp4Config
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=kind(dequantize=True), dtype=torch.float32
    )
    return split_experts(model.state_dict()) if method == "fp8" else model.state_dict()


def fine_grained(sizes: dict[str, Any], **entries: Any) -> Spelling:
    """Return a spelling of fine-grained FP8."""
    note = "quantised by integrations.finegrained_fp8.Fp8Quantize, read by from_pretrained(dequantize=True)"
    writer = fp8_write(weight_block_size=(128, 128), **entries)
    return Spelling(writer, transformers_read, "transformers", "float32", sizes, note, 0.05)


def mxfp4_write(model: PreTrainedModel, folder: Path) -> None:
    """Write gpt-oss's experts in MXFP4: the values and bytes by ModelOpt, the names and shapes by Transformers."""
    from modelopt.torch.quantization.qtensor import MXFP4QTensor

    state = model.state_dict()
    for name in [name for name in state if re.search(r"experts\.(gate_up|down)_proj$", name)]:
        weight = state.pop(name).transpose(1, 2).contiguous()
        packed, scales = MXFP4QTensor.quantize(weight, 32)
        groups = (*weight.shape[:2], weight.shape[2] // 32)
        state[f"{name}_blocks"] = packed._quantized_data.reshape(*groups, 16)
        state[f"{name}_scales"] = scales.reshape(groups)
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    save(folder, model, state, {"quant_method": "mxfp4", "modules_to_not_convert": kept})


# ModelOpt


def modelopt_config(preset: str, **first: Any) -> dict[str, Any]:
    """Return a preset, with other formats for the modules that `first` names by layer, and a cache scheme."""
    import modelopt.torch.quantization as mtq

    config = copy.deepcopy(getattr(mtq, preset))
    for pattern, other in first.get("overrides", {}).items():
        for entry in copy.deepcopy(getattr(mtq, other))["quant_cfg"]:
            if entry["quantizer_name"] in {"*weight_quantizer", "*input_quantizer"}:
                config["quant_cfg"].append(entry | {"quantizer_name": f"*{pattern}{entry['quantizer_name']}"})
    if cache := first.get("cache"):
        config["quant_cfg"] += copy.deepcopy(getattr(mtq, cache))["quant_cfg"]
    return config


def modelopt_write(preset: str, **changes: Any) -> Callable[[PreTrainedModel, Path], None]:
    """Return a writer by ModelOpt's unified export."""

    def write(model: PreTrainedModel, folder: Path) -> None:
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export import export_hf_checkpoint

        mtq.quantize(model, modelopt_config(preset, **changes), lambda m: m(tokens()))
        export_hf_checkpoint(model, export_dir=folder)
        (folder / "generation_config.json").unlink(missing_ok=True)

    return write


def modelopt_matrix(base: str, state: State) -> Tensor:
    """Dequantise one matrix by ModelOpt's own types."""
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    weight, scale = state[f"{base}.weight"], state[f"{base}.weight_scale"]
    if weight.dtype == torch.float8_e4m3fn:
        scale = scale.unsqueeze(1) if scale.dim() else scale
        return FP8QTensor(weight.shape, torch.float32, weight).dequantize(scale=scale)
    shape = torch.Size((weight.shape[0], weight.shape[1] * 2))
    packed = NVFP4QTensor(shape, torch.float32, weight)
    return packed.dequantize(scale=scale, double_scale=state[f"{base}.weight_scale_2"], block_sizes={-1: 16})


def modelopt_read(folder: Path) -> State:
    """Dequantise every matrix that has a scale."""
    state = tensors_of(folder)
    extra = ("_scale", "_scale_2")
    bases = {name.removesuffix(".weight_scale") for name in state if name.endswith(".weight_scale")}
    plain = {name: tensor for name, tensor in state.items() if not name.endswith(extra)}
    return plain | {f"{base}.weight": modelopt_matrix(base, state) for base in bases}


def modelopt(preset: str, sizes: dict[str, Any] = LLAMA, bound: float = 0.15, **changes: Any) -> Spelling:
    """Return a spelling of ModelOpt."""
    note = f"exported by export_hf_checkpoint from {preset} {changes or ''}; dequantised by its QTensor types"
    return Spelling(
        modelopt_write(preset, **changes), modelopt_read, "nvidia-modelopt", "float32", sizes, note, bound
    )


# GPTQ and AWQ


def gptq_linear(entries: dict[str, Any], rows: int, columns: int) -> Any:
    """Return GPTQModel's linear module, with buffers."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    kept = {key: entries[key] for key in ("bits", "group_size", "sym", "desc_act")}
    return TorchLinear(**kept, in_features=columns, out_features=rows, pack_dtype=torch.int32).eval()


def gptq_pack(weight: Tensor, config: Any, generator: torch.Generator) -> State:
    """Round one matrix by GPTQModel's quantizer, group by group, and pack it as format v1."""
    from gptqmodel.quantization.quantizer import Quantizer
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    rows, columns = weight.shape
    order = torch.randperm(columns, generator=generator) if config.desc_act else torch.arange(columns)
    group = torch.empty(columns, dtype=torch.int32)
    group[order] = torch.arange(columns, dtype=torch.int32) // config.group_size
    scales, zeros = [], []
    for columns_of_group in order.split(config.group_size):
        quantizer = Quantizer(config)
        quantizer.configure(perchannel=True)
        quantizer.find_params(weight[:, columns_of_group].float(), weight=True)
        scales.append(quantizer.scale.reshape(-1, 1))
        zeros.append(quantizer.zero.reshape(-1, 1))
    linear = nn.Linear(columns, rows, bias=False)
    linear.weight.data.copy_(weight)
    packed = gptq_linear(config.to_dict(), rows, columns)
    packed.pack_original(linear, torch.cat(scales, 1), torch.cat(zeros, 1), group)
    convert_gptq_v2_to_v1_format_module(packed, config)
    return {name: getattr(packed, name).clone() for name in ("qweight", "qzeros", "scales", "g_idx")}


def gptq_write(**entries: Any) -> Callable[[PreTrainedModel, Path], None]:
    """Return a writer of GPTQ's format v1 by GPTQModel; values are rounded to nearest, without the Hessian."""

    def write(model: PreTrainedModel, folder: Path) -> None:
        from gptqmodel import QuantizeConfig

        config = QuantizeConfig(format="gptq", offload_to_disk=False, **entries)
        generator, state = torch.Generator().manual_seed(3), model.state_dict()
        for name in list(quantized_names(state)):
            packed = gptq_pack(state.pop(f"{name}.weight"), config, generator)
            state |= {f"{name}.{key}": value for key, value in packed.items()}
        written = {k: v for k, v in config.to_dict().items() if k != "meta"}
        save(folder, model, state, written)
        (folder / "quantize_config.json").write_text(json.dumps(written, indent=2, default=str) + "\n")

    return write


def gptq_read(folder: Path) -> State:
    """Dequantise by GPTQModel's linear module."""
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    state, entries = tensors_of(folder), quantization_of(folder)
    for base in [name.removesuffix(".qweight") for name in state if name.endswith(".qweight")]:
        parts = {key: state.pop(f"{base}.{key}") for key in ("qweight", "qzeros", "scales", "g_idx")}
        module = gptq_linear(entries, parts["scales"].shape[1], len(parts["g_idx"]))
        module.load_state_dict(parts)
        convert_gptq_v1_to_v2_format_module(module, entries["bits"], torch.int32)
        state[f"{base}.weight"] = module.dequantize_weight().T.contiguous()
    return state


def gptq(sizes: dict[str, Any] = LLAMA, **entries: Any) -> Spelling:
    """Return a spelling of GPTQ."""
    note = f"{entries}, rounded by its Quantizer, packed by TorchLinear.pack_original as v1; random order"
    bound = 0.15 if entries["bits"] == 4 else 0.02
    return Spelling(gptq_write(**entries), gptq_read, "gptqmodel", "float16", sizes, note, bound)


def awq_write(model: PreTrainedModel, folder: Path) -> None:
    """Write AWQ's GEMM version by AutoAWQ, without its search for scales of channels."""
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.quantize.quantizer import AwqQuantizer

    state = model.state_dict()
    options = SimpleNamespace(group_size=32, w_bit=4, zero_point=True)
    for name in list(quantized_names(state)):
        weight = state.pop(f"{name}.weight").half()
        rounded, scales, zeros = AwqQuantizer.pseudo_quantize_tensor(options, weight)
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=torch.float16)
        linear.weight.data.copy_(rounded)
        packed = WQLinear_GEMM.from_linear(
            linear, 4, 32, False, scales.t().contiguous(), zeros.t().contiguous()
        )
        state |= {f"{name}.{key}": value for key, value in packed.state_dict().items()}
    entries = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    save(folder, model, state, entries | {"modules_to_not_convert": None})


def awq_read(folder: Path) -> State:
    """Dequantise by AutoAWQ."""
    from awq.utils.packing_utils import dequantize_gemm

    state, entries = tensors_of(folder), quantization_of(folder)
    for base in [name.removesuffix(".qweight") for name in state if name.endswith(".qweight")]:
        parts = [state.pop(f"{base}.{key}") for key in ("qweight", "qzeros", "scales")]
        state[f"{base}.weight"] = dequantize_gemm(
            *parts, entries["bits"], entries["group_size"]
        ).T.contiguous()
    return state

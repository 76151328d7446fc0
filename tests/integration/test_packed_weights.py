"""Quantised matrices that stay packed, on a CPU: the loader, merged layers, the operator by its definition, and plans.

What kernels make of them on a GPU is tested there (tests/gpu).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nibble import LLM
from nibble.config import Config
from nibble.engine.plan import plan_cache
from nibble.errors import ConfigError
from nibble.hardware import lookup_gpu
from nibble.models import checkpoint
from nibble.models.experts import packed_matrices
from nibble.models.linear import (
    MergedLinear,
    QuantizedLinear,
    expected_keys,
    merge_linears,
    prepare_linears,
    quantized_layers,
)
from nibble.models.observations import observe_model
from nibble.models.pack import Packer
from nibble.models.quantization import Handling, parse, quantization_entry
from nibble.models.refusals import load_config

FIXTURES = Path(__file__).parent.parent / "fixtures" / "quantized"
NAMES = sorted(path.name for path in FIXTURES.iterdir())
UNPACKED = {"ct_w4a16_actorder", "gptq_asym_actorder", "gptq_sym_actorder"}
"""Inputs out of order."""
EXPERTS = [name for name in NAMES if "moe" in name or name == "gptoss_mxfp4"]
PLAIN_EXPERTS = "ct_w4a16_moe"
"""Integers in groups of 32."""
PARTLY = {"ct_fp8_block": "mlp.down_proj"}
"""A matrix whose inputs are no whole blocks."""
TOLERANCE = 1e-4


def read(folder: Path, handling: Handling = Handling.PACKED) -> Any:
    """A model as it is before it is prepared."""
    model_spec = observe_model(str(folder), "float32", 64)
    return checkpoint.load(load_config(str(folder)), model_spec, "float32", "cpu", handling=handling)


def logits(model: Any) -> Tensor:
    """Of a model that is not prepared, or whose linear layers are."""
    ids = torch.randint(1, 60, (1, 17), generator=torch.Generator().manual_seed(1))
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return model.eval()(ids, use_cache=False).logits


def copied(name: str, folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    shutil.copytree(FIXTURES / name, folder, dirs_exist_ok=True)
    (folder / "expected.safetensors").unlink()
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_unpacked_weights(name: str) -> None:
    expected, model = logits(read(FIXTURES / name, Handling.UNPACKED)), read(FIXTURES / name)
    assert bool(quantized_layers(model) or packed_matrices(model)) == (name not in UNPACKED)
    assert (logits(model) - expected).abs().max() <= TOLERANCE
    prepare_linears(model)
    assert (logits(model) - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", [name for name in NAMES if name not in {*EXPERTS, *UNPACKED}])
def test_all_quantised_layers_are_packed_and_merged(name: str) -> None:
    plain, model = read(FIXTURES / name, Handling.UNPACKED), read(FIXTURES / name)
    linears = {path for path, module in plain.named_modules() if type(module) is nn.Linear}
    rest = {path for path, module in model.named_modules() if type(module) is nn.Linear}
    ignored = (
        json.loads((FIXTURES / name / "config.json").read_text())["quantization_config"].get("ignore") or ()
    )
    ignored = [entry.rpartition(".")[2].strip("*$") for entry in ignored if not entry.startswith("lm_head")]
    left = [PARTLY.get(name, "lm_head"), "lm_head", *ignored]
    assert rest == {path for path in linears if path.endswith(tuple(left))}
    prepare_linears(model)
    attention = model.model.layers[0].self_attn
    assert all(type(part) is MergedLinear for part in (attention.q_proj, attention.k_proj, attention.v_proj))
    assert attention.q_proj.product is attention.v_proj.product


@pytest.mark.parametrize("name", [name for name in NAMES if name not in {*EXPERTS, *UNPACKED, *PARTLY}])
def test_kernels_are_known_before_weights_are_read(name: str) -> None:
    config = load_config(str(FIXTURES / name))
    quantization = parse(quantization_entry(config))
    assert quantization
    expected = expected_keys(config, quantization, Packer("cpu", torch.float32))
    prepare_linears(model := read(FIXTURES / name))
    # Whether global scales of merged matrices differ, which the config does not say, is taken for no.
    keys = {layer.matrix.key._replace(has_row_globals=False) for layer in quantized_layers(model)}
    assert expected == keys


@pytest.mark.parametrize("name", [name for name in NAMES if name not in UNPACKED])
def test_a_plan_counts_the_bytes_that_are_kept(name: str) -> None:
    folder = FIXTURES / name
    plan = plan_cache(Config(model=str(folder), dtype="float32", quantized_weights="packed"))
    model = read(folder)
    size = sum(p.nbytes for p in model.parameters()) + sum(x.matrix.nbytes for x in quantized_layers(model))
    size += sum(x.matrices.nbytes for x in packed_matrices(model))
    assert plan.model_spec.weight_bytes == size
    assert any("multiplied as they are packed" in note for note in plan.plan.notes)


@pytest.mark.parametrize(
    "name",
    [
        "awq_gemm",
        "ct_mixed",
        "ct_nvfp4_moe",
        "fp8_block",
        "fp8_block_moe",
        "gptoss_mxfp4",
        "gptq_asym",
        "modelopt_nvfp4",
    ],
)
def test_an_engine_serves_them(name: str) -> None:
    options = {
        "kv_format": "fp32",
        "dtype": "float32",
        "device": "cpu",
        "max_context": 64,
        "kv_memory": "4MiB",
        "activations": "bf16",
    }
    answers = []
    for handling in ("packed", "unpacked"):
        with LLM(str(FIXTURES / name), quantized_weights=handling, **options) as llm:
            model: Any = llm.engine.runner.model
            assert bool(quantized_layers(model) or packed_matrices(model)) == (handling == "packed")
            (output,) = llm.generate([list(range(5, 25))], max_tokens=8, prompt_logprobs=0, ignore_eos=True)
            assert output.prompt_logprobs is not None
            answers.append([entry.logprob for entry in output.prompt_logprobs[1:] if entry])
    assert max(abs(a - b) for a, b in zip(*answers, strict=True)) < TOLERANCE


Q_PROJ = "model.layers.0.self_attn.q_proj"
V_PROJ, K_PROJ = Q_PROJ.replace("q_proj", "v_proj"), Q_PROJ.replace("q_proj", "k_proj")


def changed(name: str) -> Callable[[dict[str, Tensor]], None]:
    """A planted error in one value of the second group."""

    def change(tensors: dict[str, Tensor]) -> None:
        raw = (
            tensors[name].view(torch.uint8)
            if tensors[name].dim()
            else tensors[name].view(1).view(torch.uint8)
        )
        raw.view(-1)[-1] ^= 0x10

    return change


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("awq_gemm", "qweight"), ("awq_gemm", "qzeros"), ("awq_gemm", "scales"), ("gptq_asym", "qzeros"),
        ("ct_w4a16_g32_asym", "weight_zero_point"), ("ct_nvfp4", "weight_global_scale"),
        ("modelopt_nvfp4", "weight_scale_2"), ("ct_mxfp4", "weight_scale"), ("fp8_block", "weight_scale_inv"),
        ("ct_int8", "weight"),
    ],
)  # fmt: skip
def test_each_tensor_of_a_matrix_counts(name: str, end: str, tmp_path: Path) -> None:
    expected = logits(read(FIXTURES / name))
    folder = copied(name, tmp_path, changed(f"{Q_PROJ}.{end}"))
    wrong = logits(read(folder))
    assert (wrong - expected).abs().max() > TOLERANCE
    assert (wrong - logits(read(folder, Handling.UNPACKED))).abs().max() <= TOLERANCE


def test_global_scales_that_differ_are_merged_by_row(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{K_PROJ}.weight_scale_2"] *= 3
        tensors[f"{V_PROJ}.weight_scale_2"] *= 0.5

    folder = copied("modelopt_nvfp4", tmp_path, change)
    expected, model = logits(read(folder, Handling.UNPACKED)), read(folder)
    prepare_linears(model)
    matrix = model.model.layers[0].self_attn.q_proj.product.layer.matrix
    assert len(matrix.global_scale) == matrix.rows
    assert (logits(model) - expected).abs().max() <= TOLERANCE


def test_a_merged_layer_with_wrong_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the comparison with the family's own code."""
    from nibble.models import linear

    right, folder = linear.merged, FIXTURES / "gptq_sym"
    monkeypatch.setattr(linear, "merged", lambda matrices: right([*matrices[1:], matrices[0]]))
    with pytest.raises(ConfigError, match="is not what the family's own code computes"):
        checkpoint.prepare_model(read(folder), observe_model(str(folder), "float32", 64))


def test_a_matrix_that_is_of_no_linear_layer_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader may make other tensors of it; then it reads once more."""
    calls: list[int] = []
    right = checkpoint._read

    def lose(*arguments: Any) -> Any:
        model = right(*arguments)
        calls.append(1)
        if len(calls) == 1:
            layer = model.model.layers[0].self_attn
            layer.o_proj.weight = nn.Parameter(layer.o_proj.weight.clone(), requires_grad=False)
        return model

    expected = logits(read(FIXTURES / "gptq_sym", Handling.UNPACKED))
    monkeypatch.setattr(checkpoint, "_read", lose)
    model = read(FIXTURES / "gptq_sym")
    assert len(calls) == 2 and type(model.model.layers[0].self_attn.o_proj) is nn.Linear
    assert len(quantized_layers(model)) == 6
    assert (logits(model) - expected).abs().max() <= TOLERANCE


def test_a_text_tower_under_another_prefix(tmp_path: Path) -> None:
    def rename(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)

    folder = copied("gptq_sym", tmp_path, rename)
    config = json.loads((folder / "config.json").read_text())
    whole = {
        "model_type": "somebodys_vl",
        "quantization_config": config.pop("quantization_config"),
        "text_config": config,
    }
    (folder / "config.json").write_text(json.dumps(whole))
    model = read(folder)
    assert len(quantized_layers(model)) == 7
    expected = logits(read(FIXTURES / "gptq_sym", Handling.UNPACKED))
    assert (logits(model) - expected).abs().max() <= TOLERANCE


EXPERT = "model.layers.0.mlp.experts"


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_packed(name: str) -> None:
    model = read(FIXTURES / name)
    if name == PLAIN_EXPERTS:
        assert not packed_matrices(model)
        return
    assert len(packed_matrices(model)) == 2
    assert not any(p.dim() == 3 for p in model.parameters())
    plain = read(FIXTURES / name, Handling.UNPACKED)
    for part in ("gate_up_proj", "down_proj"):
        matrices = model.get_submodule(f"{EXPERT}.{part}")
        expected = plain.get_parameter(f"{EXPERT}.{part}")
        for expert in range(len(expected)):
            torch.testing.assert_close(matrices[expert], expected[expert], rtol=1e-6, atol=1e-7)


def exchanged(first: str, second: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[first], tensors[second] = tensors[second], tensors[first]

    return change


def first_two(name: str) -> Callable[[dict[str, Tensor]], None]:
    """Exchange what a tensor has of the first two experts."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name][[1, 0, *range(2, len(tensors[name]))]].contiguous()

    return change


def nibbles(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name] << 4 | tensors[name] >> 4

    return change


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("fp8_block_moe", exchanged(f"{EXPERT}.0.up_proj.weight_scale_inv", f"{EXPERT}.1.up_proj.weight_scale_inv")),
        ("fp8_block_moe", exchanged(f"{EXPERT}.0.up_proj.weight", f"{EXPERT}.0.gate_proj.weight")),
        ("gptoss_mxfp4", first_two(f"{EXPERT}.down_proj_scales")),
        ("gptoss_mxfp4", nibbles(f"{EXPERT}.gate_up_proj_blocks")),
        (
            "ct_nvfp4_moe",
            exchanged(f"{EXPERT}.1.gate_proj.weight_global_scale", f"{EXPERT}.1.down_proj.weight_global_scale"),
        ),
        ("modelopt_nvfp4_moe", nibbles(f"{EXPERT}.2.down_proj.weight")),
        ("ct_w4a16_moe", exchanged(f"{EXPERT}.0.down_proj.weight_scale", f"{EXPERT}.1.down_proj.weight_scale")),
    ],
)  # fmt: skip
def test_a_planted_error_of_experts_changes_answers(
    name: str, change: Callable[[dict[str, Tensor]], None], tmp_path: Path
) -> None:
    expected, folder = logits(read(FIXTURES / name)), copied(name, tmp_path, change)
    wrong = logits(read(folder))
    assert (wrong - expected).abs().max() > TOLERANCE
    assert (wrong - logits(read(folder, Handling.UNPACKED))).abs().max() <= TOLERANCE


def test_experts_that_the_loader_transposes_are_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads once more where it does more than putting them together."""
    from transformers.core_model_loading import MergeModulelist

    expected, right, calls = logits(read(FIXTURES / "fp8_block_moe")), MergeModulelist.convert, []

    def convert(self: Any, tensors: dict[str, Any], **others: Any) -> dict[str, Tensor]:
        calls.append(1)
        return {name: x + 0 for name, x in right(self, tensors, **others).items()}

    monkeypatch.setattr(MergeModulelist, "convert", convert)
    model = read(FIXTURES / "fp8_block_moe")
    assert len(calls) == 4 and not packed_matrices(model) and quantized_layers(model)
    assert (logits(model) - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", ["fp8_block_moe", "gptoss_mxfp4"])
def test_experts_alone_are_packed(name: str) -> None:
    """As on a GPU without a library for linear layers; bytes are those of the plan."""
    folder = FIXTURES / name
    model = read(folder, Handling.EXPERTS)
    assert packed_matrices(model) and not quantized_layers(model)
    assert (logits(model) - logits(read(folder, Handling.UNPACKED))).abs().max() <= TOLERANCE
    stored = plan_cache(Config(model=str(folder), dtype="float32")).model_spec.stored_weights
    size = sum(p.nbytes for p in model.parameters()) + sum(x.matrices.nbytes for x in packed_matrices(model))
    assert stored and stored.packed_experts == size


def test_w4afp8_is_packed(tmp_path: Path) -> None:
    """Experts' signed integers, by the layout: no library writes it."""

    def write(tensors: dict[str, Tensor]) -> None:
        rng = torch.Generator().manual_seed(0)
        for name in [name for name in tensors if ".experts." in name and name.endswith(".weight")]:
            rows, columns = tensors[name].shape
            tensors[name] = torch.randint(-128, 128, (rows, columns // 2), generator=rng, dtype=torch.int8)
            tensors[f"{name}_scale_inv"] = torch.rand(rows, columns // 64, generator=rng) / 64

    folder = copied("fp8_block_moe", tmp_path, write)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= {"quant_method": "w4afp8", "group_size": 64}
    (folder / "config.json").write_text(json.dumps(config))
    model = read(folder)
    assert {x.format.codes for x in packed_matrices(model)} == {"uint4"} and quantized_layers(model)
    assert (logits(model) - logits(read(folder, Handling.UNPACKED))).abs().max() <= TOLERANCE
    plan = plan_cache(Config(model=str(folder), dtype="float32", quantized_weights="packed"))
    size = sum(p.nbytes for p in model.parameters()) + sum(x.matrix.nbytes for x in quantized_layers(model))
    assert plan.model_spec.weight_bytes == size + sum(x.matrices.nbytes for x in packed_matrices(model))


@pytest.mark.parametrize("name", ["fp8_block_moe", "gptoss_mxfp4"])
def test_a_compiler_sees_two_products_of_packed_experts(name: str) -> None:
    model = read(FIXTURES / name)
    expected = logits(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ids = torch.randint(1, 60, (1, 17), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        actual = compiled(ids, use_cache=False).logits
    assert (actual - expected).abs().max() <= TOLERANCE


def test_a_layer_says_its_plain_weight() -> None:
    plain, model = read(FIXTURES / "awq_gemm", Handling.UNPACKED), read(FIXTURES / "awq_gemm")
    layer = model.model.layers[0].mlp.down_proj
    assert type(layer) is QuantizedLinear
    torch.testing.assert_close(layer.weight, plain.model.layers[0].mlp.down_proj.weight.data)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_compiler_does_not_look_into_the_operator(backend: str) -> None:
    model = read(FIXTURES / "ct_nvfp4")
    expected = logits(model)
    assert merge_linears(model, packed_only=True) == 5
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    ids = torch.randint(1, 60, (1, 17), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        actual = compiled(ids, use_cache=False).logits
    assert (actual - expected).abs().max() <= TOLERANCE


def notes(name: str, gpu: str = "h100", **options: Any) -> str:
    return "\n".join(plan_cache(Config(model=str(FIXTURES / name), **options), lookup_gpu(gpu)).plan.notes)


def test_plans_say_what_becomes_of_them() -> None:
    by_library = "multiplied as they are packed by humming-kernels"
    assert by_library in notes("fp8_block") and by_library in notes("ct_w4a16_g128")
    assert f"{by_library}, experts by Nibble's own kernels" in notes("fp8_block_moe")
    assert "with --deterministic" in notes("ct_nvfp4_moe", deterministic=True)
    assert "as they are unpacked here" in notes("fp8_block", quantized_weights="unpacked")
    assert "as they are unpacked here (with --deterministic" in notes("ct_w4a16_g128", deterministic=True)
    assert "as they are unpacked here (no kernels multiply" in notes("ct_w4a16_actorder")
    with pytest.raises(ConfigError, match="--quantized-weights packed cannot be served: no kernels multiply"):
        notes("ct_w4a16_actorder", quantized_weights="packed")
    with pytest.raises(ConfigError, match="with --deterministic"):
        notes("fp8_block", quantized_weights="packed", deterministic=True)
    with pytest.raises(ConfigError, match="float32 on SM90"):
        notes("fp8_block", quantized_weights="packed", dtype="float32")
    with pytest.raises(ConfigError, match="quantized_weights"):
        Config(model="x", quantized_weights="some")


@pytest.fixture
def without_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, and no packages for quantised weights."""
    from nibble.engine import plan as plans

    gpu = replace(lookup_gpu("h100"))
    monkeypatch.setattr(plans, "probe", lambda device: gpu)
    problem = {"triton": None}
    monkeypatch.setattr(
        "nibble.models.quantization.import_problem", lambda name: problem.get(name, "is missing")
    )
    monkeypatch.setattr(plans, "_backends", lambda here: plans.backends.all_backends())


@pytest.mark.usefixtures("without_libraries")
@pytest.mark.parametrize(
    ("name", "handling", "note"),
    [
        ("fp8_block_moe", Handling.EXPERTS, "experts multiplied as they are packed, and others unpacked (humming"),
        ("gptoss_mxfp4", Handling.PACKED, "multiplied as they are packed by Nibble's own kernels"),
    ],
)  # fmt: skip
def test_experts_need_no_other_library(
    name: str, handling: Handling, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_cache(Config(model=str(FIXTURES / name)))
    assert plan.weights and plan.weights.handling is handling
    assert note in "\n".join(plan.plan.notes)
    assert plan.model_spec.weight_bytes < plan.weights.full
    with pytest.raises(ConfigError, match="humming-kernels is missing"):
        plan_cache(Config(model=str(FIXTURES / "fp8_block_moe"), quantized_weights="packed"))
    monkeypatch.setattr("nibble.models.quantization.import_problem", lambda name: "is missing")
    plan = plan_cache(Config(model=str(FIXTURES / name)))
    assert (
        plan.weights
        and plan.weights.handling is Handling.UNPACKED
        and plan.weights.why == "triton is missing here"
    )


@pytest.mark.usefixtures("without_libraries")
def test_without_the_library_they_are_unpacked() -> None:
    plan = plan_cache(Config(model=str(FIXTURES / "fp8_block")))
    text = "\n".join(plan.plan.notes)
    assert "unpacked here (humming-kernels is missing here, with which they would take" in text
    assert plan.weights and plan.weights.handling is Handling.UNPACKED

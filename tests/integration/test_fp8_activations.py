"""Activations in FP8, on a CPU by their definition: which checkpoints get them, with which scales, and what plans say.

The reference is the same model with plain weights, whose linear layers see inputs that a loop of this file rounds. What
kernels make of them on a GPU is tested there (tests/gpu).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from nibble import LLM
from nibble.config import Config
from nibble.engine.plan import plan_cache
from nibble.errors import ConfigError, NibbleError
from nibble.hardware import lookup_gpu
from nibble.kernels.quantized_linear import naive
from nibble.kernels.weight_formats import Activations
from nibble.models import checkpoint, linear
from nibble.models.activations import AUTO, FP8, FULL, of_group, of_scheme
from nibble.models.linear import prepare_linears, quantized_layers
from nibble.models.observations import observe_model
from nibble.models.quantization import Handling
from nibble.models.refusals import load_config

FIXTURES = Path(__file__).parent.parent / "fixtures" / "quantized"
ASKED = {
    "fp8_block": "group",
    "fp8_block_ue8m0": "group",
    "ct_fp8_block": "group",
    "ct_fp8_channel_dynamic": "token",
    "modelopt_fp8_channel": "token",
    "ct_fp8_tensor_static": "tensor",
    "modelopt_fp8": "tensor",
}
"""Checkpoints that ask for FP8 activations, and their scales."""
OTHERS = ("ct_w4a16_g128", "ct_int8", "ct_nvfp4", "modelopt_nvfp4", "gptq_sym", "ct_mxfp8")
TOLERANCE = 5e-3
"""A last bit of an input may turn one of its codes into the next."""


def read(folder: Path, handling: Handling = Handling.PACKED, activations: str = FULL) -> Any:
    """A model as it is before it is prepared."""
    model_spec = observe_model(str(folder), "float32", 64)
    config = load_config(str(folder))
    return checkpoint.load(config, model_spec, "float32", "cpu", handling=handling, activations=activations)


def logits(model: Any) -> Tensor:
    ids = torch.randint(1, 60, (1, 17), generator=torch.Generator().manual_seed(1))
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return model.eval()(ids, use_cache=False).logits


def rounded(x: Tensor, width: int, scale: float | None) -> Tensor:
    """Values of FP8 with a scale for each `width` inputs of a token, or with one that is given."""
    rows = x.reshape(-1, x.shape[-1]).clone()
    for row in rows:
        for part in row.split(width):
            step = part.abs().max() / 448 if scale is None else scale
            part[:] = (part / step).clamp(-448, 448).to(torch.float8_e4m3fn).float() * step
    return rows.view(x.shape)


def reference(folder: Path, kind: str) -> Any:
    """The model with plain weights, whose packed layers would see rounded inputs."""
    model, packed = read(folder, Handling.UNPACKED), read(folder)
    tensors = load_file(folder / "model.safetensors")
    names = {name for name, module in packed.named_modules() if module in quantized_layers(packed)}
    for name, module in model.named_modules():
        if name in names:
            assert type(module) is nn.Linear
            width = 128 if kind == "group" else module.in_features
            scale = float(tensors[f"{name}.input_scale"]) if kind == "tensor" else None
            module.register_forward_pre_hook(lambda _, x, w=width, s=scale: (rounded(x[0], w, s),))
    assert names
    return model


@pytest.mark.parametrize("name", ASKED)
def test_inputs_are_quantised_as_the_checkpoint_asks(name: str) -> None:
    folder = FIXTURES / name
    expected, plain = logits(reference(folder, ASKED[name])), logits(read(folder))
    model = read(folder, activations=AUTO)
    assert {layer.activations for layer in quantized_layers(model)} <= {
        Activations(ASKED[name]),
        Activations.TOKEN,  # a row of one group
    }
    assert (logits(model) - expected).abs().max() <= TOLERANCE < (plain - expected).abs().max()
    prepare_linears(model)
    assert (logits(model) - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_left_as_they_are(name: str) -> None:
    for activations in (AUTO, FP8):
        model = read(FIXTURES / name, activations=activations)
        assert quantized_layers(model) and not any(x.activations for x in quantized_layers(model))


def per_tensor(x: Tensor, activations: Activations, input_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """A planted error: a scale of all tokens."""
    codes, scale = naive.quantize_activations(x.reshape(1, -1), Activations.TOKEN)
    return codes.view(x.shape), scale.view(1)


def exchanged(x: Tensor, activations: Activations, input_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """A planted error: a group has the scale of another."""
    codes, scale = naive.quantize_activations(x, activations, input_scale)
    return codes, scale.flip(-1)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("ct_fp8_channel_dynamic", per_tensor), ("fp8_block", per_tensor), ("fp8_block", exchanged)],
)
def test_a_wrong_scale_is_noticed(
    name: str, wrong: Callable[..., tuple[Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = FIXTURES / name
    expected, model = logits(reference(folder, ASKED[name])), read(folder, activations=AUTO)
    monkeypatch.setattr(linear, "quantize_activations", wrong)
    assert (logits(model) - expected).abs().max() > TOLERANCE


def copied(name: str, folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    shutil.copytree(FIXTURES / name, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_static_scale_counts_and_must_be_one(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.input_scale"

    def smaller(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name] / 64

    def negative(tensors: dict[str, Tensor]) -> None:
        tensors[name] = -tensors[name]

    before = logits(read(FIXTURES / "modelopt_fp8", activations=AUTO))
    folder = copied("modelopt_fp8", tmp_path / "a", smaller)
    after = logits(read(folder, activations=AUTO))
    assert (after - before).abs().max() > TOLERANCE
    assert (after - logits(reference(folder, "tensor"))).abs().max() <= TOLERANCE
    with pytest.raises(NibbleError, match="the scale of inputs is -"):
        read(copied("modelopt_fp8", tmp_path / "b", negative), activations=AUTO)
    with pytest.raises(NibbleError, match="lacks 'input_scale'"):
        read(copied("modelopt_fp8", tmp_path / "c", lambda tensors: tensors.pop(name)), activations=AUTO)


def test_layers_say_their_plain_weight() -> None:
    for name in ("fp8_block", "modelopt_fp8", "ct_fp8_channel_dynamic"):
        plain, model = read(FIXTURES / name, Handling.UNPACKED), read(FIXTURES / name, activations=AUTO)
        for layer in ("mlp.down_proj", "self_attn.o_proj"):
            path = f"model.layers.0.{layer}"
            expected = plain.get_submodule(path).weight.data
            torch.testing.assert_close(model.get_submodule(path).weight, expected)


def test_a_loaded_model_is_compared_with_quantised_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    folder, right = FIXTURES / "fp8_block", linear.merged
    model_spec = observe_model(str(folder), "float32", 64)
    checkpoint.prepare_model(read(folder, activations=AUTO), model_spec)
    monkeypatch.setattr(linear, "merged", lambda matrices: right([*matrices[1:], matrices[0]]))
    with pytest.raises(ConfigError, match="is not what the family's own code computes"):
        checkpoint.prepare_model(read(folder, activations=AUTO), model_spec)


def test_a_compiler_joins_the_quantisation_with_what_is_before() -> None:
    model = read(FIXTURES / "fp8_block", activations=AUTO)
    expected = logits(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ids = torch.randint(1, 60, (1, 17), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        assert (compiled(ids, use_cache=False).logits - expected).abs().max() <= TOLERANCE


def test_an_engine_serves_them() -> None:
    options = {
        "kv_format": "fp32",
        "dtype": "float32",
        "device": "cpu",
        "max_context": 64,
        "kv_memory": "4MiB",
    }
    for activations, expected in (("auto", True), ("bf16", False)):
        with LLM(
            str(FIXTURES / "fp8_block"), quantized_weights="packed", activations=activations, **options
        ) as llm:
            layers = quantized_layers(llm.engine.runner.model)
            assert layers and all(bool(layer.activations) == expected for layer in layers)
            (output,) = llm.generate([[5, 6, 7]], max_tokens=4, ignore_eos=True)
            assert output.text is not None


def test_weights_that_are_quantised_as_they_load_may_have_them() -> None:
    with LLM("demo", weights="fp8", quantized_weights="packed", activations="fp8", device="cpu") as llm:
        layers = quantized_layers(llm.engine.runner.model)
        assert layers and all(layer.activations for layer in layers)


def notes(name: str, gpu: str = "h100", **options: Any) -> str:
    return "\n".join(plan_cache(Config(model=name, **options), lookup_gpu(gpu)).plan.notes)


def on_a_cpu(name: str) -> str:
    config = Config(model=of(name), device="cpu", dtype="float32", quantized_weights="packed")
    return "\n".join(plan_cache(config).plan.notes)


def of(name: str) -> str:
    return str(FIXTURES / name)


def test_plans_say_what_becomes_of_them() -> None:
    asked = "activations of packed layers in FP8, as the checkpoint asks: "
    assert asked + "a scale for each token and 128 inputs" in notes(of("fp8_block"))
    assert asked + "a scale for each token\n" in on_a_cpu("ct_fp8_channel_dynamic")
    assert asked + "the checkpoint's own scales" in on_a_cpu("modelopt_fp8")
    assert "activations" not in notes(of("ct_w4a16_g128"))
    left = "activations are not quantised, though the checkpoint asks for FP8: "
    assert left + "--activations bf16" in notes(of("fp8_block"), activations="bf16")
    assert left + "SM80 multiplies no FP8" in notes(of("fp8_block"), "a100")
    assert left + "weights are unpacked here (with --deterministic" in notes(
        of("ct_fp8_block"), deterministic=True
    )
    # Transformers loads these, and its kernels may quantise activations.
    assert "activations" not in notes(of("fp8_block"), deterministic=True)
    assert left + "weights are unpacked here" in notes(of("fp8_block"), quantized_weights="unpacked")
    forced = "activations of packed layers in FP8, which the checkpoint does not ask for"
    assert forced in notes("demo", weights="fp8", activations="fp8")
    assert "activations" not in notes("demo", weights="fp8")


@pytest.mark.parametrize(
    ("name", "gpu", "options", "why"),
    [
        ("fp8_block", "a100", {}, "SM80 multiplies no FP8, which begins with SM89"),
        ("fp8_block", "h100", {"quantized_weights": "unpacked"}, "weights are unpacked here"),
        ("fp8_block", "h100", {"deterministic": True}, "loads these weights .with --deterministic"),
        ("ct_w4a16_g128", "h100", {}, "these are compressed-tensors 4 bits"),
        ("modelopt_nvfp4", "h100", {}, "these are modelopt NVFP4"),
        ("demo", "h100", {}, "the weights are not quantised .--weights fp8"),
    ],
)
def test_refusals_have_their_reasons(name: str, gpu: str, options: dict[str, Any], why: str) -> None:
    model = name if name == "demo" else of(name)
    with pytest.raises(ConfigError, match=f"--activations fp8 cannot be served: .*{why}"):
        notes(model, gpu, activations="fp8", **options)


def test_a_choice_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match="activations"):
        Config(model="x", activations="int8")


def test_what_configs_ask_for() -> None:
    assert of_scheme({"weight_block_size": [128, 128]}) is Activations.GROUP
    assert of_scheme({"activation_scheme": "dynamic"}) is Activations.TOKEN
    assert of_scheme({"activation_scheme": "static"}) is Activations.TENSOR
    entry = json.loads((FIXTURES / "ct_fp8_block" / "config.json").read_text())
    group = entry["quantization_config"]["config_groups"]["group_0"]["input_activations"]
    assert of_group(group) is Activations.GROUP
    assert of_group({**group, "group_size": 64}) is Activations.NONE
    assert of_group({**group, "num_bits": 4}) is Activations.NONE
    assert of_group({**group, "type": "int"}) is Activations.NONE
    assert of_group(None) is Activations.NONE

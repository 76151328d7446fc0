"""Quantised checkpoints, written by the libraries that define their spellings (scripts/quantized_fixtures).

Each folder has what the library makes of it: logits of a model with the library's own dequantised weights, and one of
its matrices.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from nibble import LLM
from nibble.cli.main import app
from nibble.config import Config
from nibble.engine.plan import plan_cache
from nibble.errors import ConfigError, NibbleError, WeightError
from nibble.models.quantization import quantization_entry
from nibble.models.refusals import load_config
from nibble.models.unpack import unpacked
from tiny import save_tokenizer

CPU = torch.device("cpu")
FIXTURES = Path(__file__).parent.parent / "fixtures" / "quantized"
NAMES = sorted(path.name for path in FIXTURES.iterdir())
WEIGHTS, EXPECTED = "model.safetensors", "expected.safetensors"
TOLERANCE = 1e-4
Q_PROJ = "model.layers.0.self_attn.q_proj"


def copied(name: str, folder: Path, **changes: Any) -> Path:
    """A fixture whose `quantization_config` is changed."""
    folder = folder / name
    shutil.copytree(FIXTURES / name, folder, ignore=shutil.ignore_patterns(EXPECTED))
    config = json.loads((folder / "config.json").read_text())
    config.get("quantization_config", {}).update(changes)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def edit(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def error_of(folder: Path, name: str, quantized_weights: str = "auto") -> float:
    """How far log-probabilities of the prompt are from those that the library's weights give."""
    expected = load_file(FIXTURES / name / EXPECTED)
    ids = expected["input_ids"][0].tolist()
    logprobs_TV = torch.log_softmax(expected["logits"][0], -1)
    options = {
        "kv_format": "fp32",
        "dtype": "float32",
        "device": "cpu",
        "max_context": 64,
        "kv_memory": "4MiB",
        "quantized_weights": quantized_weights,
    }
    with LLM(str(folder), **options) as llm:
        (output,) = llm.generate([ids], max_tokens=1, prompt_logprobs=0)
    assert output.prompt_logprobs is not None
    found = [entry.logprob for entry in output.prompt_logprobs[1:] if entry]
    assert len(found) == len(ids) - 1
    return max(abs(a - float(logprobs_TV[i, ids[i + 1]])) for i, a in enumerate(found))


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_librarys_own_weights(name: str, tmp_path: Path) -> None:
    # Another safetensors file beside the model's own is not read.
    shutil.copytree(FIXTURES / name, tmp_path / name)
    assert error_of(tmp_path / name, name) < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_a_matrix_is_the_librarys_own(name: str) -> None:
    with safe_open(FIXTURES / name / EXPECTED, "pt") as file:
        expected, about = file.get_tensor("dequantized"), file.metadata()
    config = load_config(str(FIXTURES / name))
    with ExitStack() as files:
        tensors = unpacked(FIXTURES / name, quantization_entry(config), CPU, files)
        found = tensors[about["dequantized_name"]][...].float()
    if found.dim() == 3:  # of an expert, with inputs first
        found = found[0]
    torch.testing.assert_close(found[: len(expected), : expected.shape[1]], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_counts_the_bytes_of_the_file(name: str) -> None:
    plan = plan_cache(Config(model=str(FIXTURES / name), dtype="float32"))
    stored = plan.model_spec.stored_weights
    assert stored is not None
    with safe_open(FIXTURES / name / WEIGHTS, "pt") as file:
        assert stored.bytes == sum(file.get_tensor(key).nbytes for key in file.keys())  # noqa: SIM118
    assert any("as they are unpacked here" in note for note in plan.plan.notes)


@pytest.mark.parametrize("name", NAMES)
def test_the_command_line_answers_over_a_4_bit_cache(name: str, tmp_path: Path) -> None:
    folder = save_tokenizer(copied(name, tmp_path), symbols=63)
    sizes = ("--max-tokens", "4", "--max-context", "64", "--kv-memory", "4MiB")
    result = CliRunner().invoke(
        app, ["generate", "ABC", "--model", str(folder), "--kv-format", "nvfp4", "--ignore-eos", *sizes]
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()


def test_end_tokens_that_stand_in_the_generation_config_alone(tmp_path: Path) -> None:
    folder = copied("ct_w4a16_g128", tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 7]}))
    with LLM(str(folder), device="cpu", max_context=64, kv_memory="4MiB") as llm:
        assert llm.engine.runner.model.generation_config.eos_token_id == [3, 7]


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_biases_that_add_nothing_to_layers_without_one(value: float, tmp_path: Path) -> None:
    """As AutoGPTQ wrote them."""
    bias = {f"{Q_PROJ}.bias": torch.full((64,), value, dtype=torch.float16)}
    folder = edit(copied("gptq_sym", tmp_path), lambda tensors: tensors.update(bias))
    if value:
        with pytest.raises(WeightError, match=r"q_proj.bias among them"):
            error_of(folder, "gptq_sym")
    else:
        assert error_of(folder, "gptq_sym") < TOLERANCE


def swap(a: str, b: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[a], tensors[b] = tensors[b], tensors[a]

    return change


def drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(name)


def zero_point(tensors: dict[str, Tensor]) -> None:
    tensors[f"{Q_PROJ}.weight_zero_point"][:, 0] = 0


def sorted_groups(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.endswith("g_idx")]:
        tensors[name] = tensors[name].sort().values


K_PROJ = Q_PROJ.replace("q_proj", "k_proj")
O_PROJ = Q_PROJ.replace("q_proj", "o_proj")
V_PROJ = Q_PROJ.replace("q_proj", "v_proj")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("ct_w4a16_g128", swap(f"{K_PROJ}.weight_scale", f"{V_PROJ}.weight_scale")),
        ("fp8_block", swap(f"{K_PROJ}.weight_scale_inv", f"{V_PROJ}.weight_scale_inv")),
        ("modelopt_nvfp4", swap(f"{K_PROJ}.weight_scale", f"{V_PROJ}.weight_scale")),
        ("modelopt_fp8", swap(f"{Q_PROJ}.weight_scale", f"{O_PROJ}.weight_scale")),
        ("ct_w4a16_g32_asym", zero_point),
        ("ct_w4a16_actorder", sorted_groups),
        ("gptq_sym_actorder", sorted_groups),
        ("gptq_asym_actorder", drop(f"{Q_PROJ}.g_idx")),
    ],
)
def test_a_planted_error_is_seen(
    name: str, change: Callable[[dict[str, Tensor]], None], tmp_path: Path
) -> None:
    assert error_of(edit(copied(name, tmp_path), change), name) > 30 * TOLERANCE


def test_zero_points_of_the_second_gptq_format_are_as_they_stand(tmp_path: Path) -> None:
    assert error_of(copied("gptq_asym", tmp_path, checkpoint_format="gptq_v2"), "gptq_asym") > 30 * TOLERANCE


def cut(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name][:1].clone()

    return change


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("ct_w4a16_g128", drop(f"{Q_PROJ}.weight_scale"), r"lacks 'weight_scale' beside .*q_proj"),
        ("modelopt_nvfp4", drop(f"{Q_PROJ}.weight_scale_2"), r"lacks 'weight_scale_2' beside .*q_proj"),
        ("ct_w4a16_g32_asym", cut(f"{Q_PROJ}.weight_scale"), r"q_proj.weight does not fit together"),
        ("gptq_sym", cut(f"{Q_PROJ}.qzeros"), r"q_proj.weight does not fit together"),
        ("fp8_block", lambda tensors: tensors.update({"model.layers.0.x.weight_odd": torch.ones(1)}), "weight_odd"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_refused(
    name: str, change: Callable[[dict[str, Tensor]], None], message: str, tmp_path: Path
) -> None:
    with pytest.raises(WeightError, match=message):
        error_of(edit(copied(name, tmp_path), change), name)


@pytest.mark.parametrize(
    ("name", "entry", "message"),
    [
        ("awq_gemm", {"version": "gemv"}, "awq that cannot be read: 4 bits in the layout 'gemv'"),
        ("gptq_sym", {"bits": 3}, "gptq that cannot be read: 3 bits"),
        ("ct_w4a16_g128", {"format": "marlin-24"}, "compressed-tensors that cannot be read: marlin-24"),
    ],
)
def test_what_cannot_be_read_is_refused_before_weights_load(
    name: str, entry: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nibble.models.checkpoint.unpacked", lambda *arguments: pytest.fail("weights load"))
    with pytest.raises(ConfigError, match=message):
        LLM(str(copied(name, tmp_path, **entry)))


def test_a_checkpoint_that_only_says_it_is_quantised(tmp_path: Path) -> None:
    folder = copied("fp8_block", tmp_path)

    def unquantised(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            if name.endswith("_scale_inv"):
                weight = name.removesuffix("_scale_inv")
                tensors[weight] = tensors[weight].bfloat16()
                del tensors[name]

    with pytest.raises(NibbleError, match="holds no quantised matrix"):
        LLM(str(edit(folder, unquantised)))


def test_w4afp8_has_experts_in_integers_and_other_layers_in_blocks(tmp_path: Path) -> None:
    """No library writes it: bytes are made here by the layout, and compared with the plain weights that they mean."""
    quantised = copied("fp8_block_moe", tmp_path, quant_method="w4afp8", group_size=64)
    entry = json.loads((quantised / "config.json").read_text())["quantization_config"]
    with ExitStack() as stack:
        plain = {
            name: x[...].float()
            for name, x in unpacked(FIXTURES / "fp8_block_moe", entry, CPU, stack).items()
        }

    def write(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".experts." in name and name.endswith(".weight")]:
            groups = plain[name].unflatten(1, (-1, 64))
            scale = groups.abs().amax(-1) / 7
            codes = (groups / scale[..., None]).round().clamp(-8, 7).flatten(1)
            plain[name] = (codes.unflatten(1, (-1, 64)) * scale[..., None]).flatten(1)
            pairs = codes.int().unflatten(1, (-1, 2)) & 15
            tensors[name] = (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8).view(torch.int8)
            tensors[f"{name}_scale_inv"] = scale

    edit(quantised, write)
    meant = copied("fp8_block_moe", tmp_path / "plain")
    config = json.loads((meant / "config.json").read_text())
    del config["quantization_config"]
    (meant / "config.json").write_text(json.dumps(config))
    save_file(plain, meant / WEIGHTS, metadata={"format": "pt"})
    ids, found = list(range(3, 20)), []
    for folder in (quantised, meant):
        with LLM(
            str(folder), kv_format="fp32", dtype="float32", device="cpu", max_context=64, kv_memory="4MiB"
        ) as llm:
            found.append(llm.logits(ids))
    assert float((found[0] - found[1]).abs().max()) < TOLERANCE
    stored = plan_cache(Config(model=str(quantised), device="cpu")).model_spec.stored_weights
    assert stored and stored.bytes == sum(x.nbytes for x in load_file(quantised / WEIGHTS).values())
    edit(
        quantised,
        lambda tensors: tensors.update(
            {k: x[:, :1].clone() for k, x in tensors.items() if x.dtype == torch.int8}
        ),
    )
    with pytest.raises(NibbleError, match="does not fit together"):
        LLM(str(quantised), device="cpu")

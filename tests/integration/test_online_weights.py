"""Linear layers and experts that are quantised as a checkpoint loads: which, their bytes, engines, and refusals. On a CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from typer.testing import CliRunner

from nibble import LLM
from nibble.cli.main import app
from nibble.config import Config
from nibble.engine.plan import plan_cache
from nibble.errors import ConfigError, WeightError
from nibble.hardware import lookup_gpu
from nibble.models import checkpoint
from nibble.models.experts import packed_matrices
from nibble.models.linear import prepare_linears, quantized_layers
from nibble.models.observations import observe_model
from nibble.models.online import FORMATS
from nibble.models.pack import Packer
from nibble.models.quantization import Handling
from nibble.models.refusals import load_config
from tiny import MLA, SPARSE, save_model, save_tiny

FIXTURES = Path(__file__).parent.parent / "fixtures" / "quantized"
NAMES = tuple(FORMATS)
SHAPES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384, "initializer_range": 0.05}
"""Whole groups of 128 inputs."""
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
OPTIONS: dict[str, Any] = {"device": "cpu", "max_context": 128, "kv_memory": "4MiB"}
TOLERANCE = 1e-4
EXPERTS = "experts"
_MOE: dict[str, Any] = {**SHAPES, "num_experts_per_tok": 2}
MOE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_MOE, "num_experts": 4, "moe_intermediate_size": 128},
    "mixtral": {**_MOE, "num_local_experts": 4},
    "gpt_oss": {**_MOE, "intermediate_size": 256, "num_local_experts": 4},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("online"), **SHAPES)


def read(folder: Path, weights: str | None, handling: Handling = Handling.UNPACKED) -> Any:
    """A model as it is before it is prepared."""
    model_spec = observe_model(str(folder), "float32", 64, weights=weights)
    return checkpoint.load(
        load_config(str(folder)), model_spec, "float32", "cpu", handling=handling, weights=weights
    )


def logits(model: Any) -> Tensor:
    ids = torch.randint(1, 60, (1, 17), generator=torch.Generator().manual_seed(1))
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return model.eval()(ids, use_cache=False).logits


def changed(folder: Path, weights: str) -> set[str]:
    """Names of the parameters that a format changes."""
    plain = dict(read(folder, None).named_parameters())
    return {name for name, x in read(folder, weights).named_parameters() if not torch.equal(x, plain[name])}


@pytest.mark.parametrize("name", NAMES)
def test_packed_and_unpacked_matrices_are_the_same(folder: Path, name: str) -> None:
    expected, model = logits(read(folder, name)), read(folder, name, Handling.PACKED)
    assert len(quantized_layers(model)) == 3 * len(LAYERS)
    assert (logits(model) - expected).abs().max() <= TOLERANCE
    prepare_linears(model)
    assert (logits(model) - expected).abs().max() <= TOLERANCE
    distance = (logits(read(folder, None)) - expected).norm() / expected.norm()
    assert 100 * TOLERANCE < distance < 0.5


def test_eight_bits_are_nearer_than_four(folder: Path) -> None:
    plain = logits(read(folder, None))
    errors = {name: float((logits(read(folder, name)) - plain).norm()) for name in NAMES}
    assert errors["fp8"] < 0.5 * min(errors["int4"], errors["nvfp4"]) and errors["nvfp4"] < errors["mxfp4"]


@pytest.mark.parametrize("name", NAMES)
def test_a_matrix_is_quantised_as_it_is_read(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that no more than one lies in memory as it was: nothing is left for afterwards, and nothing is read twice."""
    seen: list[str] = []
    right, reads = Packer.quantize, list[int]()
    read_model = checkpoint._read

    def note(packer: Packer, name: str, *arguments: Any) -> Any:
        seen.append(name)
        return right(packer, name, *arguments)

    def count(*arguments: Any) -> Any:
        reads.append(1)
        return read_model(*arguments)

    monkeypatch.setattr(Packer, "quantize", note)
    monkeypatch.setattr(checkpoint, "_read", count)
    model = read(folder, name, Handling.PACKED)
    assert len(reads) == 1 and all(x.endswith(".weight") for x in seen)
    assert len(seen) == len(set(seen)) == len(quantized_layers(model)) == 3 * len(LAYERS)


def test_files_of_pytorch_are_quantised_afterwards(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    torch.save(load_file(folder / "model.safetensors"), tmp_path / "pytorch_model.bin")
    model = read(tmp_path, "nvfp4", Handling.PACKED)
    assert len(quantized_layers(model)) == 3 * len(LAYERS)
    assert (logits(model) - logits(read(folder, "nvfp4"))).abs().max() <= TOLERANCE


def test_a_text_tower_under_another_prefix(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {f"language_model.{name}": x for name, x in tensors.items()} | {"visual.blocks.0.mlp.up_proj.weight": torch.ones(4, 4)},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )  # fmt: skip
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "some_vl", "text_config": config}))
    model = read(tmp_path, "int4", Handling.PACKED)
    assert len(quantized_layers(model)) == 3 * len(LAYERS)
    assert (logits(model) - logits(read(folder, "int4"))).abs().max() <= TOLERANCE


def kept_bytes(model: nn.Module) -> int:
    """Bytes of a model's weights, packed ones included."""
    packed = (
        *(layer.matrix for layer in quantized_layers(model)),
        *(part.matrices for part in packed_matrices(model)),
    )
    return sum(x.nbytes for x in (*model.parameters(), *packed))


def families() -> Iterator[tuple[str, dict[str, Any], set[str]]]:
    """Family, config and the last parts of the names of quantised matrices."""
    yield "qwen3", {}, set(LAYERS)
    yield "llama", {"attention_bias": True}, set(LAYERS)
    latent = {
        "q_a_proj",
        "q_b_proj",
        "kv_a_proj_with_mqa",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        EXPERTS,
    }
    yield "deepseek_v3", MLA, latent
    yield "glm_moe_dsa", SPARSE, latent
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    yield "qwen3_moe", experts, {"q_proj", "k_proj", "v_proj", "o_proj", EXPERTS}
    yield "mixtral", {"num_local_experts": 4}, {"q_proj", "k_proj", "v_proj", "o_proj", EXPERTS}


@pytest.mark.parametrize(("family", "config", "expected"), list(families()))
def test_which_layers_are_quantised(
    family: str, config: dict[str, Any], expected: set[str], tmp_path: Path
) -> None:
    """None of routers, indexers, embeddings, norms, the output layer and MLA's kv_b_proj."""
    save_model(tmp_path, family, **config, tie_word_embeddings=False)
    names = changed(tmp_path, "nvfp4")
    assert {name.split(".")[-2] for name in names} == expected
    assert all(name.endswith((".weight", ".experts.gate_up_proj", ".experts.down_proj")) for name in names)
    model = read(tmp_path, "nvfp4", Handling.PACKED)
    parts = {*quantized_layers(model), *packed_matrices(model)}
    packed = {name for name, part in model.named_modules() if part in parts}
    assert packed == {name.removesuffix(".weight") for name in names}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", sorted(MOE))
def test_experts_are_quantised_as_they_are_read(
    family: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one (and by other names than the model's, in mixtral), or all in one tensor, with inputs first (gpt_oss)."""
    save_model(tmp_path, family, **MOE[family])
    expected, plain = logits(read(tmp_path, name)), logits(read(tmp_path, None))
    reads, read_model = list[int](), checkpoint._read
    monkeypatch.setattr(checkpoint, "_read", lambda *rest: (reads.append(1), read_model(*rest))[1])
    late: list[str] = []
    quantize_experts = Packer.quantize_experts

    def note(packer: Packer, name: str, *rest: Any, **more: Any) -> Any:
        late.append(name)
        return quantize_experts(packer, name, *rest, **more)

    monkeypatch.setattr(Packer, "quantize_experts", note)
    model = read(tmp_path, name, Handling.PACKED)
    assert len(packed_matrices(model)) == 6 and len(reads) == 1
    assert len(late) == (6 if family == "gpt_oss" else 0), (
        "those of one tensor alone are not quantised one by one"
    )
    assert (logits(model) - expected).abs().max() <= TOLERANCE < (plain - expected).abs().max()
    options: dict[str, Any] = {"model": str(tmp_path), "dtype": "float32", "weights": name}
    assert plan_cache(Config(**options, quantized_weights="packed")).model_spec.weight_bytes == kept_bytes(
        model
    )


def test_experts_of_files_of_pytorch_are_quantised_afterwards(tmp_path: Path) -> None:
    save_model(tmp_path / "safe", "qwen3_moe", **MOE["qwen3_moe"])
    (tmp_path / "torch").mkdir()
    for file in (tmp_path / "safe").glob("*.json"):
        (tmp_path / "torch" / file.name).write_bytes(file.read_bytes())
    torch.save(load_file(tmp_path / "safe" / "model.safetensors"), tmp_path / "torch" / "pytorch_model.bin")
    model = read(tmp_path / "torch", "nvfp4", Handling.PACKED)
    assert len(packed_matrices(model)) == 6
    assert (logits(model) - logits(read(tmp_path / "safe", "nvfp4"))).abs().max() <= TOLERANCE


def test_without_the_library_of_linear_layers_experts_alone_are_packed(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3_moe", **MOE["qwen3_moe"])
    model = read(tmp_path, "fp8", Handling.EXPERTS)
    assert len(packed_matrices(model)) == 6 and not quantized_layers(model)
    assert (logits(model) - logits(read(tmp_path, "fp8"))).abs().max() <= TOLERANCE
    stored = plan_cache(Config(model=str(tmp_path), dtype="float32", weights="fp8")).model_spec.stored_weights
    assert stored
    assert stored.packed_experts == kept_bytes(model)


def test_experts_that_no_kernels_multiply_have_its_errors_too(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3_moe", **{**MOE["qwen3_moe"], "moe_intermediate_size": 96})
    model = read(tmp_path, "int4", Handling.PACKED)
    assert not packed_matrices(model) and quantized_layers(model)
    assert (logits(model) - logits(read(tmp_path, "int4"))).abs().max() <= TOLERANCE
    assert sum(".experts." in name for name in changed(tmp_path, "int4")) == 6


def test_an_engine_with_experts_quantised_answers_alike(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3_moe", **MOE["qwen3_moe"])
    answers = []
    for handling in ("packed", "unpacked"):
        options = {**OPTIONS, "weights": "fp8", "kv_format": "bf16", "quantized_weights": handling}
        with LLM(str(tmp_path), **options) as llm:
            assert bool(packed_matrices(llm.engine.runner.model)) == (handling == "packed")
            answers.append(llm.logits(list(range(5, 45))))
    assert (answers[0] - answers[1]).abs().max() < 1e-3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("family", "changes"), [("qwen3", SHAPES), ("qwen3", {}), ("deepseek_v3", {**MLA, "hidden_size": 128})]
)
def test_a_plan_counts_the_bytes_that_are_kept(
    family: str, changes: dict[str, Any], name: str, tmp_path: Path
) -> None:
    save_model(tmp_path, family, **changes)
    options: dict[str, Any] = {"model": str(tmp_path), "dtype": "float32", "weights": name}
    try:
        plan = plan_cache(Config(**options, quantized_weights="packed"))
    except ConfigError as error:
        # Of hidden sizes of 64 no matrix has whole groups of 128 inputs.
        assert "no kernels multiply" in str(error) and family == "qwen3" and name in ("int4", "fp8")
        return
    model = read(tmp_path, name, Handling.PACKED)
    size = kept_bytes(model)
    assert plan.model_spec.weight_bytes == size
    full = plan_cache(Config(model=str(tmp_path), dtype="float32")).model_spec.weight_bytes
    assert size < full == plan_cache(Config(**options)).model_spec.weight_bytes


def plan(model: Path | str, gpu: str | None = "h100", **options: Any) -> Any:
    hardware = lookup_gpu(gpu) if gpu else None
    return plan_cache(Config(model=str(model), **options), hardware, published=True)


def notes(*arguments: Any, **options: Any) -> str:
    return "\n".join(plan(*arguments, **options).plan.notes)


@pytest.mark.slow
def test_plans_need_no_weights_and_say_what_becomes_of_them(folder: Path) -> None:
    plain = plan("qwen3-8b").model_spec.weight_bytes
    # Of 8.19e9 parameters 1.24e9 are embeddings and the output layer, and hardly any are not in matrices.
    for name, bits in (("fp8", 8 + 16 / 128), ("int4", 4 + 16 / 128), ("nvfp4", 4.5), ("mxfp4", 4.25)):
        rest = 2 * 2 * 151936 * 4096
        expected = rest + (plain - rest) * bits / 16
        assert plan("qwen3-8b", weights=name).model_spec.weight_bytes == pytest.approx(expected, rel=1e-3)
    assert "weights quantised to int4 as they load: " in notes("qwen3-8b", weights="int4")
    assert "multiplied as they are packed by humming-kernels" in notes("qwen3-8b", weights="int4")
    experts = (
        plan("qwen3-30b-a3b").model_spec.weight_bytes
        / plan("qwen3-30b-a3b", weights="fp8").model_spec.weight_bytes
    )
    assert 1.9 < experts < 2
    assert "by humming-kernels, experts by Nibble's own kernels; " in notes("qwen3-30b-a3b", weights="nvfp4")
    assert "experts" not in notes("qwen3-8b", weights="nvfp4")
    assert "unpacked again here (with --deterministic" in notes("qwen3-8b", weights="fp8", deterministic=True)
    on_cpu = notes(folder, None, weights="fp8")
    assert "and unpacked again here: errors of fp8, and " in on_cpu and "in float32, as without" in on_cpu
    assert "unpacked again here (no kernels multiply fp8" in notes("qwen3-8b", weights="fp8", dtype="float16")
    assert "quantised to" not in notes("qwen3-8b")


def test_what_cannot_be_quantised_is_refused_before_weights_load(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this one is quantised already, by modelopt; leave it out"):
        plan(FIXTURES / "modelopt_nvfp4", weights="nvfp4")
    with pytest.raises(ConfigError, match="quantised already, by gptq"):
        LLM(str(FIXTURES / "gptq_sym"), weights="fp8", **OPTIONS)
    save_model(tmp_path, "gpt2", n_embd=64, n_layer=2, n_head=2)
    with pytest.raises(ConfigError, match="--weights int4 quantises linear layers of a decoder, and this"):
        plan(tmp_path, weights="int4")
    with pytest.raises(ConfigError, match="weights"):
        Config(model="x", weights="nvfp8")


def test_scales_of_a_cache_are_no_quantised_weights(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "quantised to nvfp4 as they load" in notes(tmp_path, weights="nvfp4")


@pytest.mark.parametrize("handling", [Handling.PACKED, Handling.UNPACKED])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_named(
    folder: Path, tmp_path: Path, handling: Handling, value: float
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightError, match=r"layers\.1\.mlp\.up_proj.* not finite"):
        read(tmp_path, "int4", handling)


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_answers_over_a_cache_in_four_bits(folder: Path, name: str) -> None:
    answers = []
    for handling in ("packed", "unpacked"):
        with LLM(
            str(folder),
            weights=name,
            kv_format="nvfp4",
            kv_scales="one",
            quantized_weights=handling,
            **OPTIONS,
        ) as llm:
            assert bool(quantized_layers(llm.engine.runner.model)) == (handling == "packed")
            (output,) = llm.generate([list(range(5, 45))], max_tokens=8, prompt_logprobs=0, ignore_eos=True)
            assert len(output.completions[0].token_ids) == 8 and output.prompt_logprobs is not None
            answers.append([entry.logprob for entry in output.prompt_logprobs[1:] if entry])
    # A difference in the last bit may move a value of the cache by a step.
    assert max(abs(a - b) for a, b in zip(*answers, strict=True)) < 0.05


def test_layers_whose_inputs_are_no_whole_groups_have_its_errors_too(tmp_path: Path) -> None:
    save_model(tmp_path)
    for name in ("int4", "fp8"):
        names = changed(tmp_path, name)
        assert len(names) == 3 * len(LAYERS)
        model: nn.Module = read(tmp_path, name, Handling.PACKED)
        # Only o_proj has 128 inputs.
        assert len(quantized_layers(model)) == 3
        assert (logits(model) - logits(read(tmp_path, name))).abs().max() <= TOLERANCE


def run(*words: str) -> Any:
    return CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, list(words))


def test_the_command_line() -> None:
    result = run("plan", "llama-3.1-8b", "--kv-format", "nvfp4", "--gpu", "b200", "--weights", "nvfp4")
    assert result.exit_code == 0 and "weights quantised to nvfp4 as they load" in result.stdout
    result = run("plan", "llama-3.1-8b", "--gpu", "b200", "--weights", "int8")
    assert result.exit_code == 2 and "fp8, int4, mxfp4, nvfp4" in result.stderr


@pytest.mark.slow
def test_quality_is_measured_anywhere() -> None:
    """Of the bundled model, for the whole run and for a single scheme."""
    sizes = ("--tokens", "512", "--recall-cases", "0", "--attention-tokens", "64", "--json")
    schemes = ("bf16:weights=fp8", "bf16:weights=mxfp4", "nvfp4:weights=mxfp4")
    plain, *others = json.loads(run("eval", "demo", *schemes, *sizes).stdout)["results"]
    fp8, mxfp4, both = (entry["perplexity"] / plain["perplexity"] for entry in others)
    assert abs(fp8 - 1) < 0.02 < mxfp4 - 1 < 0.2 and 1.02 < both < 1.2
    report = json.loads(run("eval", "demo", "bf16", "--weights", "mxfp4", *sizes).stdout)
    assert report["results"][0]["perplexity"] == pytest.approx(others[1]["perplexity"])
    assert report["environment"]["weights"] == "mxfp4"

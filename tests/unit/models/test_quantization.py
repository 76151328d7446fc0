"""Bytes of quantised weights, by a config and by the files of a folder; and what plans say of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nibble.config import Config
from nibble.engine.plan import plan_cache, plan_engine
from nibble.hardware import GIB, lookup_gpu
from nibble.models import hub
from nibble.models.quantization import parse
from nibble.models.weight_bytes import Parameter, folder_bytes, packed_bytes, stored_bytes


def llama_70b() -> Iterator[Parameter]:
    yield Parameter("model.embed_tokens", (128256, 8192), False)
    for layer in range(80):
        path = f"model.layers.{layer}"
        shapes = {
            "q_proj": (8192, 8192),
            "k_proj": (1024, 8192),
            "v_proj": (1024, 8192),
            "o_proj": (8192, 8192),
        }
        yield from (Parameter(f"{path}.self_attn.{name}", shape, True) for name, shape in shapes.items())
        for name, shape in (
            ("gate_proj", (28672, 8192)),
            ("up_proj", (28672, 8192)),
            ("down_proj", (8192, 28672)),
        ):
            yield Parameter(f"{path}.mlp.{name}", shape, True)
        yield from (
            Parameter(f"{path}.{name}", (8192,), False) for name in ("input_layernorm", "post_layernorm")
        )
    yield Parameter("lm_head", (128256, 8192), True)


def experts() -> Iterator[Parameter]:
    """One layer with 8 experts, as Transformers keeps them."""
    yield Parameter("model.layers.0.self_attn.q_proj", (512, 512), True)
    yield Parameter("model.layers.0.mlp.gate", (8, 512), False)
    yield Parameter("model.layers.0.mlp.experts", (8, 2048, 512), False)
    yield Parameter("model.layers.0.mlp.experts", (8, 512, 1024), False)
    yield Parameter("model.layers.0.mlp.shared_experts.up_proj", (1024, 512), True)


def group(**weights: Any) -> dict[str, Any]:
    return {"group_0": {"targets": ["Linear"], "weights": weights}}


CT = "compressed-tensors"
IGNORED = {"ignore": ["lm_head"]}


@pytest.mark.parametrize(
    ("entry", "gib"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, 37.0),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, 37.1),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 67.7),
        (
            {"quant_method": CT, "config_groups": group(num_bits=4, type="int", group_size=128), **IGNORED},
            36.8,
        ),
        (
            {
                "quant_method": CT,
                "config_groups": group(num_bits=8, type="float", strategy="channel"),
                **IGNORED,
            },
            67.7,
        ),
        (
            {"quant_method": CT, "config_groups": group(num_bits=4, type="float", group_size=16), **IGNORED},
            39.8,
        ),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 67.7),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, 39.8),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}, 67.7),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}, 36.9),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 67.7),
    ],
    ids=lambda value: value if isinstance(value, float) else f"{value['quant_method']}",
)
def test_a_llama_of_70_billion_values(entry: dict[str, Any], gib: float) -> None:
    quantization = parse(entry)
    assert quantization is not None
    assert stored_bytes(quantization, llama_70b()) / GIB == pytest.approx(gib, abs=0.1)


@pytest.mark.parametrize(
    ("ignored", "quantised"),
    [
        (["lm_head"], {"q_proj", "experts", "up_proj"}),
        (["re:.*self_attn.*", "re:.*shared_experts.*"], {"experts"}),
        (["re:.*mlp[.]experts[.].*", "model.layers.0.self_attn*"], {"up_proj"}),
        (["language_model.model.layers.0.self_attn.q_proj"], {"experts", "up_proj"}),
    ],
)
def test_modules_that_are_left_alone(ignored: list[str], quantised: set[str]) -> None:
    entry = {
        "quant_method": CT,
        "config_groups": group(num_bits=4, type="int", group_size=32),
        "ignore": ignored,
    }
    quantization = parse(entry)
    assert quantization is not None
    smaller = {
        parameter.module.rpartition(".")[2]
        for parameter in experts()
        if stored_bytes(quantization, [parameter]) < 2 * torch.Size(parameter.shape).numel()
    }
    assert smaller == quantised


def test_each_layer_may_have_an_algorithm_of_its_own() -> None:
    layers = {
        "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
        "model.layers.0.mlp.experts*": {"quant_algo": "NVFP4", "group_size": 16},
    }
    entry = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    quantization = parse(entry)
    assert quantization is not None and quantization.kind == "MIXED_PRECISION"
    q_proj, gate, up, down, shared = (stored_bytes(quantization, [parameter]) for parameter in experts())
    assert (q_proj, gate, shared) == (512 * 512 + 8, 2 * 8 * 512, 2 * 1024 * 512)
    assert (up, down) == (8 * (2048 * 512 * 9 // 16 + 8), 8 * (512 * 1024 * 9 // 16 + 8))


def test_nothing_is_quantised_without_an_entry_or_for_the_cache_alone() -> None:
    assert parse({}) is None
    assert parse({"quant_method": "modelopt", "quant_algo": None}) is None
    assert parse({"quant_method": CT, "config_groups": {}}) is None


def test_files_of_a_folder_are_counted_as_they_are(tmp_path: Path) -> None:
    assert folder_bytes(tmp_path, 2) is None
    layers = {f"model.layers.{n}.x.qweight": torch.zeros(8, 4, dtype=torch.int32) for n in range(3)}
    save_file({**layers, "visual.x": torch.zeros(100)}, tmp_path / "a.safetensors")
    save_file({"lm_head.weight": torch.zeros(10, dtype=torch.bfloat16)}, tmp_path / "b.safetensors")
    # The third layer predicts further tokens, and the vision tower is not loaded.
    assert folder_bytes(tmp_path, 2) == 2 * 8 * 4 * 4 + 20
    index = {"weight_map": {"lm_head.weight": "c.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert folder_bytes(tmp_path, 2) is None, "a file is missing"


@pytest.mark.parametrize(("name", "gib"), [("gpt-oss-20b", 12.8), ("llama-3.1-8b", 15.0)])
def test_a_published_model(name: str, gib: float) -> None:
    plan = plan_engine(Config(model=name, max_context=4096), lookup_gpu("h200"), published=True)
    assert plan.budget.weights / GIB == pytest.approx(gib, abs=0.05)
    assert any(note.startswith(f"config of {name}: built in, as published") for note in plan.plan.notes)


def test_what_serving_does_with_them_is_noted(tiny: Path, tmp_path: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())

    def notes(entry: dict[str, Any], gpu: str | None = "h200") -> str:
        config["quantization_config"] = entry
        (tmp_path / "config.json").write_text(json.dumps(config))
        plan = plan_cache(Config(model=str(tmp_path)), lookup_gpu(gpu) if gpu else None).plan
        return "\n".join(plan.notes)

    # These matrices are smaller than a tile, and Transformers has other kernels.
    awq = notes({"quant_method": "awq", "bits": 4, "group_size": 128})
    assert "weights in awq 4 bits: " in awq and "needs accelerate and gptqmodel" in awq
    entry = {"quant_method": CT, "config_groups": group(num_bits=4, type="float", group_size=16)}
    assert "in bfloat16, as they are unpacked here (no kernels multiply" in notes(entry)
    assert "serving weights" not in notes(entry)
    modelopt = notes({"quant_method": "modelopt", "quant_algo": "NVFP4"})
    assert "in bfloat16, as they are unpacked here" in modelopt
    assert "in float32, as they are unpacked here" in notes({"quant_method": "mxfp4"}, None)


def test_every_published_config_has_a_name_on_the_hub() -> None:
    assert {path.parent.name for path in hub.PUBLISHED_FOLDER.glob("*/config.json")} == set(hub.PUBLISHED)
    names = [name for entry in hub.PUBLISHED.values() for name in entry]
    assert len(names) == len(set(names)) and all(name.count("/") == 1 for name in names)


@pytest.mark.parametrize(
    ("entry", "gib"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, 37.0),
        # Zero points of symmetric weights are not kept, and their inputs must be in order.
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}, 36.8),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": True}, 131.4),
        ({"quant_method": CT, "config_groups": group(num_bits=4, type="int", group_size=128), **IGNORED}, 36.8),
        ({"quant_method": CT, "config_groups": group(num_bits=8, type="float", strategy="channel"), **IGNORED}, 67.7),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 68.7),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, 39.8),
    ],
    ids=lambda value: value if isinstance(value, float) else f"{value['quant_method']}",
)  # fmt: skip
def test_bytes_of_a_llama_of_70_billion_values_that_stays_packed(entry: dict[str, Any], gib: float) -> None:
    quantization = parse(entry)
    assert quantization is not None
    assert packed_bytes(quantization, llama_70b(), "bfloat16") / GIB == pytest.approx(gib, abs=0.1)


def test_bytes_of_experts_that_stay_packed() -> None:
    """Both of their matrices, or none; and linear layers only where they are packed."""
    quantization = parse({"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert quantization is not None
    name = "model.layers.0.mlp.experts"
    up, down = (Parameter(name, shape, False, True) for shape in ((8, 2048, 512), (8, 512, 1024)))
    linear = Parameter("model.layers.0.self_attn.q_proj", (512, 512), True)
    size = 8 * (2048 * 512 + 2 * 2048 * 4)
    assert packed_bytes(quantization, [up], "bfloat16") == size
    both = packed_bytes(quantization, [up, down, linear], "bfloat16", linears=False)
    assert both == size + 8 * (512 * 1024 + 2 * 512 * 8) + 2 * 512 * 512
    odd = replace(down, shape=(8, 512, 1000))
    plain = 2 * 8 * (2048 * 512 + 512 * 1000)
    assert packed_bytes(quantization, [up, odd], "bfloat16") == plain
    assert packed_bytes(quantization, [up, down], "float16") == 2 * 8 * (2048 * 512 + 512 * 1024)
    # Of gpt-oss, whose matrices have inputs first.
    mxfp4 = parse({"quant_method": "mxfp4"})
    assert mxfp4 is not None
    turned = Parameter(name, (8, 2880, 5760), False, True, True)
    assert packed_bytes(mxfp4, [turned], "bfloat16") == 8 * 2880 * 5760 * 17 // 32


def test_experts_and_odd_shapes_are_unpacked() -> None:
    quantization = parse({"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert quantization is not None
    sizes = [packed_bytes(quantization, [parameter], "bfloat16") for parameter in experts()]
    assert sizes[0] == 512 * 512 + 2 * 512 * 4 and sizes[2:4] == [2 * 8 * 2048 * 512, 2 * 8 * 512 * 1024]
    odd = Parameter("model.layers.0.self_attn.kv_a_proj_with_mqa", (576, 7168), True)
    taken_apart = Parameter("model.layers.0.self_attn.kv_b_proj", (1024, 512), True)
    for parameter in (odd, taken_apart):
        assert packed_bytes(quantization, [parameter], "bfloat16") == 2 * torch.Size(parameter.shape).numel()

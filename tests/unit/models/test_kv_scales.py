"""KV scales: found under every name that the ecosystem gives them, used exactly, and never made up."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nibble import LLM
from nibble.cache import scales
from nibble.cache.layout import CacheLayout, LayerLayout, StreamLayout
from nibble.cache.scales import KVScales
from nibble.errors import NibbleError, ScaleError, WeightError
from nibble.model_spec import Stream
from nibble.models import checkpoint_scales
from nibble.models.checkpoint_scales import is_scale, read_scales
from planning import PLAIN
from tiny import save_model, save_tiny

LAYERS, HEADS = 3, 2
FP8, NVFP4 = 448.0, 6 * 448.0
IDS = [(5 * i) % 300 + 1 for i in range(48)]
TEXT = "The quick brown fox jumps over the lazy dog. " * 8
ATTENTION = "model.layers.{}.self_attn."
SPELLINGS = {
    "ModelOpt": ("k_proj.k_scale", "v_proj.v_scale"),
    "compressed-tensors": ("k_scale", "v_scale"),
    "attn": ("attn.k_scale", "attn.v_scale"),
    "qkv_proj": ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    "Quark": ("k_proj.output_scale", "v_proj.output_scale"),
}


def put(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Adds tensors to a checkpoint, in a file of their own where it has none."""
    file = folder / "model.safetensors"
    stored = load_file(file) if file.exists() else {}
    save_file({**stored, **tensors}, file, {"format": "pt"})
    return folder


def named(k: str, v: str, shape: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    """Scales of all layers: 0.01, 0.02, ... for K and ten times as much for V."""
    found = {}
    for layer in range(LAYERS):
        value = 0.01 * (layer + 1)
        found[ATTENTION.format(layer) + k] = torch.full(shape, value)
        found[ATTENTION.format(layer) + v] = torch.full(shape, 10 * value)
    return found


def values(found: KVScales) -> list[tuple[Any, Any]]:
    return [(entry.streams["k"].value, entry.streams["v"].value) for _, entry in sorted(found.layers.items())]


EXPECTED = [pytest.approx((0.01 * n, 0.1 * n)) for n in (1, 2, 3)]


class TestNames:
    @pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
    @pytest.mark.parametrize("spelling", SPELLINGS)
    def test_every_spelling(self, tmp_path: Path, spelling: str, shape: tuple[int, ...]) -> None:
        tensors = named(*SPELLINGS[spelling], shape)
        assert all(map(is_scale, tensors))
        assert values(read_scales(put(tmp_path, tensors))) == EXPECTED

    @pytest.mark.parametrize("shape", [(HEADS,), (HEADS, 1), (1, HEADS, 1)])
    def test_one_per_head(self, tmp_path: Path, shape: tuple[int, ...]) -> None:
        tensors = {ATTENTION.format(0) + "k_scale": torch.tensor([0.25, 0.5]).reshape(shape)}
        assert read_scales(put(tmp_path, tensors)).layers[0].streams["k"].value == (0.25, 0.5)

    @pytest.mark.parametrize("name", ["kv_scale", "attn.kv_scale"])
    def test_one_for_both(self, tmp_path: Path, name: str) -> None:
        tensors = {ATTENTION.format(layer) + name: torch.tensor(0.5) for layer in range(LAYERS)}
        assert values(read_scales(put(tmp_path, tensors))) == [(0.5, 0.5)] * LAYERS

    @pytest.mark.parametrize(
        "prefix", ["model.layers.0.", "language_model.model.layers.0.", "backbone.layers.0."]
    )
    @pytest.mark.parametrize("block", ["self_attn", "mixer"])
    def test_prefixes(self, tmp_path: Path, prefix: str, block: str) -> None:
        found = read_scales(put(tmp_path, {f"{prefix}{block}.k_proj.k_scale": torch.tensor(0.5)}))
        assert found.layers[0].streams["k"].value == 0.5

    @pytest.mark.parametrize("part", ["mtp.layers.0.self_attn.", "vision_tower.encoder.layers.0.self_attn."])
    def test_other_parts_of_a_checkpoint_are_left_alone(self, tmp_path: Path, part: str) -> None:
        tensors = {part + "k_scale": torch.tensor(9.0), ATTENTION.format(0) + "k_scale": torch.tensor(0.5)}
        assert read_scales(put(tmp_path, tensors)).layers[0].streams["k"].value == 0.5

    @pytest.mark.parametrize(
        "name", ["k_proj.weight_scale", "k_proj.input_scale", "o_proj.output_scale", "k_proj.v_scale"]
    )
    def test_other_scales_are_no_kv_scales(self, name: str) -> None:
        assert not is_scale(ATTENTION.format(0) + name)

    def test_scales_of_queries_are_not_needed(self, tmp_path: Path) -> None:
        name = ATTENTION.format(0) + "q_scale"
        assert is_scale(name)
        assert not read_scales(put(tmp_path, {name: torch.tensor(0.5)})).layers

    def test_zero_points_must_be_zero(self, tmp_path: Path) -> None:
        name = ATTENTION.format(0) + "k_zero_point"
        assert not read_scales(put(tmp_path, {name: torch.zeros(1)})).layers
        with pytest.raises(ScaleError, match="k_zero_point is not zero"):
            read_scales(put(tmp_path, {name: torch.ones(1)}))

    def test_only_scales_are_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tensors = named("k_scale", "v_scale")
        put(save_model(tmp_path), tensors)
        seen: list[str] = []
        plain = checkpoint_scales._read_scale

        def watched(name: str, file: Any) -> Any:
            seen.append(name)
            return plain(name, file)

        monkeypatch.setattr(checkpoint_scales, "_read_scale", watched)
        assert values(read_scales(tmp_path)) == EXPECTED
        assert sorted(seen) == sorted(tensors)


class TestDeclaredFormats:
    @pytest.mark.parametrize(
        ("config", "limit"),
        [
            ({}, FP8),
            ({"quantization_config": None}, FP8),
            ({"quantization_config": {"kv_cache_scheme": None}}, FP8),
            ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}, FP8),
            ({"quantization_config": {"kv_cache_scheme": {"num_bits": 4, "type": "float"}}}, NVFP4),
            ({"quantization_config": {"kv_cache_scheme": "NVFP4"}}, NVFP4),
            ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}}, 127.0),
        ],
    )
    def test_in_config_json(self, tmp_path: Path, config: dict[str, Any], limit: float) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert read_scales(put(tmp_path, named("k_scale", "v_scale"))).layers[0].streams["k"].limit == limit

    @pytest.mark.parametrize(("algo", "limit"), [("FP8", FP8), ("NVFP4", NVFP4), (None, FP8)])
    def test_in_modelopts_own_file(self, tmp_path: Path, algo: str | None, limit: float) -> None:
        (tmp_path / "hf_quant_config.json").write_text(
            json.dumps({"quantization": {"kv_cache_quant_algo": algo}})
        )
        assert read_scales(put(tmp_path, named("k_scale", "v_scale"))).layers[0].streams["k"].limit == limit

    @pytest.mark.parametrize("name", ["hf_quant_config.json", "config.json"])
    def test_by_layer(self, tmp_path: Path, name: str) -> None:
        algos = {0: "NVFP4", 1: "FP8_K_NVFP4_V", 2: "FP8"}
        by_name = {f"model.layers.{layer}.self_attn": {"quant_algo": algo} for layer, algo in algos.items()}
        entry = {"kv_cache_quant_algo": "MIXED_PRECISION", "kv_cache_quantized_layers": by_name}
        place = "quantization" if name.startswith("hf") else "quantization_config"
        (tmp_path / name).write_text(json.dumps({place: entry}))
        tensors = {
            ATTENTION.format(i) + x: torch.tensor([0.01]) for i in range(4) for x in ("k_scale", "v_scale")
        }
        layers = read_scales(put(tmp_path, tensors)).layers
        limits = [(layers[i].streams["k"].limit, layers[i].streams["v"].limit) for i in range(4)]
        assert limits == [(NVFP4, NVFP4), (FP8, NVFP4), (FP8, FP8), (FP8, FP8)]

    def test_an_unknown_one_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "hf_quant_config.json").write_text(
            '{"quantization": {"kv_cache_quant_algo": "NVFP4_AFFINE"}}'
        )
        with pytest.raises(ScaleError, match=r"NVFP4_AFFINE.*--kv-scales calibrate"):
            read_scales(put(tmp_path, named("k_scale", "v_scale")))

    def test_the_same_amax_fits_another_format(self, tmp_path: Path) -> None:
        folder = put(save_model(tmp_path), named("k_scale", "v_scale"))
        view = serve(folder, "nvfp4").engine.runner.pool.view(0)
        assert float(view.streams["k"].scale) == pytest.approx(0.01 * FP8 / NVFP4)


class TestBadValues:
    @pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
    def test_in_a_checkpoint(self, tmp_path: Path, value: float) -> None:
        with pytest.raises(
            ScaleError, match=r"layers.0.self_attn.k_scale: a KV scale must be a finite number above 0"
        ):
            read_scales(put(tmp_path, {ATTENTION.format(0) + "k_scale": torch.tensor([1.0, value])}))

    def test_booleans_and_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(ScaleError, match="not True"):
            read_scales(put(tmp_path, {ATTENTION.format(0) + "k_scale": torch.tensor(True)}))
        with pytest.raises(ScaleError, match="empty"):
            read_scales(put(tmp_path, {ATTENTION.format(0) + "k_scale": torch.zeros(0)}))

    @pytest.mark.parametrize("value", [0, -1, True, "1.0", None, [1.0], 1e-44, 1e39, 10**400])
    def test_in_a_file(self, tmp_path: Path, value: Any) -> None:
        file = write(tmp_path, {"kv_cache": {"scaling_factor": {"0": {"0": value}}}})
        with pytest.raises(ScaleError, match="layer 0: a KV scale must be a finite number above 0"):
            scales.load(file, LAYERS)

    def test_a_file_cut_short(self, tmp_path: Path) -> None:
        put(tmp_path, named("k_scale", "v_scale"))
        (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:40])
        with pytest.raises(WeightError, match="broken or cut short"):
            read_scales(tmp_path)


def write(folder: Path, data: Any, name: str = "scales.json") -> Path:
    (folder / name).write_text(data if isinstance(data, str) else json.dumps(data))
    return folder / name


def peer(layers: int = LAYERS, ranks: int = 1) -> dict[str, Any]:
    """The form that other engines take."""
    by_layer = {str(layer): 0.01 * (layer + 1) for layer in range(layers)}
    return {
        "kv_cache": {
            "dtype": "float8_e4m3fn",
            "scaling_factor": {str(rank): by_layer for rank in range(ranks)},
        }
    }


class TestFiles:
    def test_the_form_of_other_engines(self, tmp_path: Path) -> None:
        found = scales.load(write(tmp_path, peer()), LAYERS)
        assert values(found) == [pytest.approx((0.01 * n, 0.01 * n)) for n in (1, 2, 3)]
        assert found.layers[0].streams["k"].limit == FP8

    def test_tensor_parallel_ranks(self, tmp_path: Path) -> None:
        file = write(tmp_path, peer(ranks=4))
        data = json.loads(file.read_text())
        for rank, layers in data["kv_cache"]["scaling_factor"].items():
            # Of layer 2 all have the same.
            layers |= {"0": 0.1 * (int(rank) + 1), "1": 0.4 - 0.1 * int(rank)}
        write(tmp_path, data)

        def of_rank(tp: int, heads: int, rank: int) -> tuple[Any, ...]:
            found = scales.load(file, LAYERS, tp, (heads,) * LAYERS)
            assert "of 4 tensor-parallel ranks" in found.notes[0]
            streams = tuple(
                StreamLayout(Stream(name, max(heads // tp, 1), 64), "fp8_e4m3") for name in ("k", "v")
            )
            layout = CacheLayout(tuple(LayerLayout(n, streams) for n in range(LAYERS)), 16, "nhd")
            own = scales.part(found, layout, (heads,) * LAYERS, rank, tp) if tp > 1 else found
            scales.require(layout, own)
            return tuple(own.layers[layer].streams["k"].value for layer in range(LAYERS))

        assert of_rank(1, 8, 0) == pytest.approx((0.4, 0.4, 0.03))
        # With fewer ranks than in the file, a rank has the heads of several.
        assert of_rank(2, 8, 0) == pytest.approx((0.2, 0.4, 0.03))
        assert of_rank(2, 8, 1) == pytest.approx((0.4, 0.2, 0.03))
        assert of_rank(4, 8, 3) == pytest.approx((0.4, 0.1, 0.03))
        # With more, several have those of one; of two heads two ranks keep each.
        assert of_rank(8, 8, 3) == pytest.approx((0.2, 0.3, 0.03))
        assert of_rank(4, 2, 2) == pytest.approx((0.4, 0.2, 0.03))

    def test_tensor_parallel_ranks_that_do_not_fit(self, tmp_path: Path) -> None:
        with pytest.raises(
            ScaleError, match="has scales for 4 tensor-parallel ranks, whose heads are not those of 3"
        ):
            scales.load(write(tmp_path, peer(ranks=4)), LAYERS, 3, (12,) * LAYERS)
        data = peer(ranks=2)
        data["kv_cache"]["scaling_factor"]["1"] = {"0": 1.0}
        with pytest.raises(ScaleError, match="rank 1 has scales for other layers than rank 0"):
            scales.load(write(tmp_path, data), LAYERS)
        data["kv_cache"]["scaling_factor"] = {"1": {"0": 1.0}}
        with pytest.raises(ScaleError, match="with ranks from 0 on"):
            scales.load(write(tmp_path, data), LAYERS)

    def test_layers_that_the_model_lacks(self, tmp_path: Path) -> None:
        with pytest.raises(ScaleError, match="layer 3, and the model has layers 0 to 2"):
            scales.load(write(tmp_path, peer(LAYERS + 1)), LAYERS)

    @pytest.mark.parametrize(
        ("data", "reason"),
        [
            ("{", "is not JSON"),
            ("[1]", "a JSON object, not list"),
            ("{}", "neither"),
            ({"kv_cache": {}}, "neither"),
            ({"kv_cache": {"scaling_factor": {"0": {"first": 1.0}}}}, "neither"),
            ({"schema": scales.SCHEMA}, "not a well-formed"),
            ({"schema": scales.SCHEMA, "layers": {"0": {}}}, "not a well-formed"),
        ],
    )
    def test_other_content(self, tmp_path: Path, data: Any, reason: str) -> None:
        with pytest.raises(ScaleError, match=reason):
            scales.load(write(tmp_path, data), LAYERS)

    def test_no_such_file(self, tmp_path: Path) -> None:
        with pytest.raises(ScaleError, match="no such file, and the names are auto, calibrate and one"):
            scales.load(tmp_path / "none.json", LAYERS)

    def test_the_type_that_a_file_declares(self, tmp_path: Path) -> None:
        for dtype, limit in (("float8_e4m3fn", FP8), (None, FP8), ("float8_e5m2", 57344.0)):
            data = peer()
            data["kv_cache"]["dtype"] = dtype
            found = scales.load(write(tmp_path, data), LAYERS)
            assert found.layers[0].streams["k"].limit == limit
        data["kv_cache"]["dtype"] = "int8"
        with pytest.raises(ScaleError, match=r"dtype 'int8', and Nibble reads those for float8_e4m3fn and"):
            scales.load(write(tmp_path, data), LAYERS)

    @pytest.mark.parametrize(
        "mean", [[[1.0], [1.0, 2.0]], [[1.0, float("nan")]], [[1.0, float("inf")]], [["1"]], [[True]], []]
    )
    def test_a_bad_mean(self, tmp_path: Path, mean: Any) -> None:
        data = {"schema": scales.SCHEMA, "layers": {"1": {"amax": {"k": 1.0}, "k_mean": mean}}}
        with pytest.raises(ScaleError, match="layer 1: k_mean must"):
            scales.load(write(tmp_path, data), LAYERS)

    def test_own_form_round_trip(self, tmp_path: Path) -> None:
        found = read_scales(put(tmp_path, named("k_scale", "v_scale")))
        scales.save(found, tmp_path / "saved.json")
        again = scales.load(tmp_path / "saved.json", LAYERS)
        for layer, entry in found.layers.items():
            for name, scale in entry.streams.items():
                other = again.layers[layer].streams[name]
                assert other.value * other.limit == pytest.approx(scale.value * scale.limit)


def serve(folder: Path, kv_format: str = "fp8_e4m3", **options: Any) -> LLM:
    return LLM(str(folder), kv_format=kv_format, max_context=128, kv_memory="8MiB", **options)


def used(llm: LLM) -> list[tuple[float, float]]:
    """The global scales of the pool, by layer."""
    views = [llm.engine.runner.pool.view(layer) for layer in range(LAYERS)]
    return [(float(view.streams["k"].scale), float(view.streams["v"].scale)) for view in views]


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test where weights are read."""

    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("nibble.engine.build.load", load)


@pytest.mark.usefixtures("no_weights")
class TestFailClosed:
    def test_no_scales(self, tmp_path: Path) -> None:
        with pytest.raises(ScaleError) as raised:
            serve(save_model(tmp_path))
        for part in ("'k' of layer 0", "no tokenizer", "--kv-scales FILE", "--kv-scales one"):
            assert part in str(raised.value)

    def test_a_layer_without(self, tmp_path: Path) -> None:
        tensors = named("k_scale", "v_scale")
        del tensors[ATTENTION.format(1) + "v_scale"]
        with pytest.raises(ScaleError, match=r"'v' of layer 1, which the checkpoint does not have"):
            serve(put(save_model(tmp_path), tensors))

    def test_a_file_without_all_layers(self, tmp_path: Path) -> None:
        with pytest.raises(ScaleError, match="'k' of layer 2"):
            serve(save_model(tmp_path), kv_scales=str(write(tmp_path, peer(2))))

    def test_scales_of_plain_keys_are_not_those_of_rotated_ones(self, tmp_path: Path) -> None:
        with pytest.raises(ScaleError, match=r"'k\+rot' of layer 0"):
            serve(put(save_model(tmp_path), named("k_scale", "v_scale")), "fp8_e4m3+rot")

    def test_a_named_file_must_have_all(self, tmp_path: Path) -> None:
        with pytest.raises(
            ScaleError, match=r"'k\+rot' of layer 0, and .*scales.json has none. Measure scales with"
        ):
            serve(save_tiny(tmp_path), "fp8_e4m3+rot", kv_scales=str(write(tmp_path, peer())))

    @pytest.mark.parametrize(
        ("mean", "reason"),
        [
            (
                [[0.0] * 3] * HEADS,
                r"layer 0: the mean of K has the shape \(2, 3\), and the model needs \(2, ",
            ),
            ([[0.0] * 3] * 5, r"the mean of K has the shape \(5, 3\)"),
        ],
    )
    def test_a_mean_of_another_model(self, tmp_path: Path, mean: Any, reason: str) -> None:
        layer = {"amax": {"k+kmean": 1.0, "v": 1.0}, "k_mean": mean}
        data = {"schema": scales.SCHEMA, "layers": {str(n): layer for n in range(LAYERS)}}
        with pytest.raises(ScaleError, match=reason):
            serve(save_model(tmp_path), "fp8_e4m3+kmean", kv_scales=str(write(tmp_path, data)))

    def test_a_scale_that_vanishes_in_the_format(self, tmp_path: Path) -> None:
        layer = {"amax": {"k": 2e-38, "v": 1.0}}
        data = {"schema": scales.SCHEMA, "layers": {str(n): layer for n in range(LAYERS)}}
        with pytest.raises(ScaleError, match="k of layer 0 in fp8_e4m3: a KV scale must be"):
            serve(save_model(tmp_path), kv_scales=str(write(tmp_path, data)))

    def test_calibration_without_a_tokenizer(self, tmp_path: Path) -> None:
        with pytest.raises(ScaleError, match="no tokenizer; use --kv-scales FILE"):
            serve(save_model(tmp_path), calibrate=[TEXT])


class TestServing:
    def test_scales_of_the_checkpoint_are_used_exactly(self, tmp_path: Path) -> None:
        llm = serve(put(save_model(tmp_path), named("k_proj.k_scale", "v_proj.v_scale")))
        assert used(llm) == EXPECTED

    def test_a_named_file_goes_before_the_checkpoint(self, tmp_path: Path) -> None:
        folder = put(save_model(tmp_path), named("k_scale", "v_scale"))
        llm = serve(folder, kv_scales=str(write(tmp_path, peer())))
        assert used(llm) == [pytest.approx((0.01 * n, 0.01 * n)) for n in (1, 2, 3)]

    def test_a_file_beside_the_weights_is_picked_up(self, tmp_path: Path) -> None:
        save_model(tmp_path)
        write(tmp_path, peer(), "kv_scales.json")
        assert used(serve(tmp_path)) == [pytest.approx((0.01 * n, 0.01 * n)) for n in (1, 2, 3)]

    def test_a_file_beside_the_weights_must_fit_the_model(self, tmp_path: Path) -> None:
        save_model(tmp_path)
        write(tmp_path, peer(LAYERS + 1), "kv_scales.json")
        with pytest.raises(ScaleError, match="the model has layers 0 to 2"):
            serve(tmp_path)

    def test_one_by_name(self, tmp_path: Path) -> None:
        assert used(serve(save_model(tmp_path), kv_scales="one")) == [(1.0, 1.0)] * LAYERS

    def test_one_per_head(self, tmp_path: Path) -> None:
        save_model(tmp_path)
        exact = serve(tmp_path, "fp32").logits(IDS)
        tensors = {name: torch.tensor([0.01, 0.02]) for name in named("k_scale", "v_scale")}
        llm = serve(put(tmp_path, tensors))
        scale = llm.engine.runner.pool.view(0).streams["k"].scale
        assert scale.shape == (HEADS, 1)
        assert scale.flatten().tolist() == pytest.approx([0.01, 0.02])
        assert 0 < relative(llm.logits(IDS), exact) < 0.2


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


class TestCalibration:
    def test_logits_are_close_to_exact_ones(self, tiny: Path) -> None:
        exact = serve(tiny, "fp32").logits(IDS)
        errors = {
            name: relative(serve(tiny, name, calibrate=[TEXT], **PLAIN).logits(IDS), exact)
            for name in ("fp8_e4m3", "nvfp4")
        }
        assert 0 < errors["fp8_e4m3"] < 0.1
        assert errors["fp8_e4m3"] < errors["nvfp4"] < 0.6

    def test_measured_scales_round_trip_through_a_file(self, tiny: Path, tmp_path: Path) -> None:
        llm = serve(tiny, calibrate=[TEXT])
        found = llm.measure_scales([TEXT], save=tmp_path / "scales.json")
        assert scales.load(tmp_path / "scales.json", LAYERS).layers == found.layers
        again = serve(tiny, kv_scales=str(tmp_path / "scales.json"))
        assert used(again) == used(llm)
        assert torch.equal(again.logits(IDS), llm.logits(IDS))

    def test_one_measurement_serves_every_scheme(self, tiny: Path, tmp_path: Path) -> None:
        serve(tiny, "fp32").measure_scales([TEXT], save=tmp_path / "scales.json")
        for name in ("nvfp4", "fp8_e4m3+rot", "nvfp4+kmean", "k8v4+kmean+rot"):
            llm = serve(tiny, name, kv_scales=str(tmp_path / "scales.json"), kv_window=0)
            assert llm.logits(IDS).isfinite().all()

    def test_by_name_it_needs_no_texts(self, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("nibble.engine.calibration.CALIBRATION_TOKENS", 256)
        llm = serve(tiny, kv_scales="calibrate")
        assert (
            used(llm)[0][0] > 0
            and "measured on 256 tokens of a built-in text" in llm.engine.startup.kv_scales
        )

    def test_texts_that_are_none(self, tiny: Path) -> None:
        for texts in ([1], 1, [b"text"], None):
            with pytest.raises(ScaleError, match="scales are measured on a text or a list of texts, not on"):
                serve(tiny, "fp32").measure_scales(texts)  # type: ignore[arg-type]
        with pytest.raises(ScaleError, match="a list of texts, not on 1"):
            serve(tiny, calibrate=[1])

    def test_a_place_that_cannot_be_written_is_refused_before_the_work(
        self, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def measure(*_: Any) -> None:
            raise AssertionError("scales were measured")

        monkeypatch.setattr("nibble.engine.llm.measure", measure)
        llm = serve(tiny, "fp32")
        for path, reason in (
            (tmp_path / "no" / "s.json", "there is no folder"),
            (tmp_path, "it is a folder"),
        ):
            with pytest.raises(
                NibbleError, match=f"cannot write KV scales to {re.escape(str(path))}: {reason}"
            ):
                llm.measure_scales([TEXT], save=path)

    def test_too_little_text(self, tiny: Path) -> None:
        with pytest.raises(ScaleError, match="at least 64 tokens of text, and got 5"):
            serve(tiny, calibrate=["short"])

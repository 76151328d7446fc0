"""Schemes with formats of K and of V, and files with a scheme for each layer: round trips, and what is wrong with bad ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nibble.config import Config
from nibble.errors import ConfigError
from nibble.formats import scheme as schemes
from nibble.formats import scheme_file
from nibble.formats.scheme import Scheme
from nibble.model_spec import HEADS, LATENTS, Stream
from nibble.spec import CacheSpec

K, V = HEADS
PAIRS = ("bf16", "fp8_e4m3", "nvfp4", "mxfp4")


def write(path: Path, content: Any) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def own(layers: Any) -> dict[str, Any]:
    return {"schema": scheme_file.SCHEMA, "layers": layers}


def stored(scheme: Scheme, streams: tuple[Stream, ...] = HEADS) -> tuple[Any, ...]:
    """What a scheme does to streams."""
    codecs = tuple((scheme.format_of(stream).name, scheme.format_of(stream).encoder) for stream in streams)
    return (*codecs, scheme.transforms)


class TestPairs:
    def test_of_k_and_v(self) -> None:
        scheme = schemes.parse("NVFP4 : fp8+rot".replace(" ", ""))
        assert scheme.name == "nvfp4:fp8_e4m3+rot"
        assert [scheme.format_of(stream).name for stream in HEADS] == ["nvfp4", "fp8_e4m3"]
        assert scheme.transforms == ("rot",)

    @pytest.mark.parametrize(
        ("text", "name"), [("fp8:nvfp4", "k8v4"), ("nvfp4:nvfp4", "nvfp4"), ("fp8:nvfp4_amax", "k8v4_amax")]
    )
    def test_one_meaning_has_one_name(self, text: str, name: str) -> None:
        assert schemes.parse(text) == schemes.parse(name)

    @pytest.mark.parametrize(
        "text", ["nvfp4:", ":nvfp4", "nvfp4:nvfp4:nvfp4", "k8v4:nvfp4", "nvfp4:nonsense"]
    )
    def test_no_pairs(self, text: str) -> None:
        with pytest.raises(ConfigError, match="as formats of K and of V; write it as K:V"):
            schemes.parse(text)

    def test_are_not_for_latents(self) -> None:
        assert "no format for the stream 'latent'" in str(schemes.parse("nvfp4:fp8").refuses(LATENTS[0]))

    @given(st.sampled_from(PAIRS), st.sampled_from(PAIRS), st.sampled_from([(), ("rot",), ("kmean", "rot")]))
    def test_compose_is_parsed_back(self, k: str, v: str, transforms: tuple[str, ...]) -> None:
        scheme = schemes.compose({"v": v, "k": k}, transforms)
        assert [scheme.format_of(stream).name for stream in HEADS] == [k, v]
        assert scheme.transforms == transforms
        assert schemes.parse(scheme.name) == scheme


class TestFiles:
    @given(
        st.lists(
            st.tuples(
                st.sampled_from(PAIRS),
                st.sampled_from(PAIRS),
                st.sampled_from([(), ("rot",), ("kmean", "rot")]),
            ),
            min_size=1,
            max_size=6,
        )
    )
    def test_round_trip(self, layers: list[tuple[str, str, tuple[str, ...]]]) -> None:
        import tempfile

        by_layer = {i: schemes.compose({"k": k, "v": v}, names) for i, (k, v, names) in enumerate(layers)}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kv_scheme.json"
            scheme_file.save(path, by_layer, dict.fromkeys(by_layer, HEADS), model="demo")
            file = scheme_file.load(path)
        assert {layer: stored(scheme) for layer, scheme in file.layers.items()} == {
            layer: stored(scheme) for layer, scheme in by_layer.items()
        }
        assert file.provenance == {"model": "demo"}

    def test_latents_have_no_entry_for_index_keys(self, tmp_path: Path) -> None:
        path = tmp_path / "kv_scheme.json"
        scheme_file.save(path, {0: schemes.parse("nvfp4_amax")}, {0: LATENTS})
        assert json.loads(path.read_text())["layers"] == {
            "0": {"latent": {"format": "nvfp4", "encoder": "amax"}}
        }
        assert stored(scheme_file.load(path).layers[0], LATENTS) == (("nvfp4", "amax"), ("index_fp8", ""), ())

    def test_a_spec_of_it(self, tmp_path: Path) -> None:
        """Options leave the file's schemes as they are, and rules win over it."""
        entries = {
            "0": {"k": {"format": "fp8_e4m3"}, "v": {"format": "nvfp4", "encoder": "amax"}},
            "1": {"k": {"format": "nvfp4", "transforms": ["rot"]}, "v": {"format": "nvfp4"}},
            "2": {"k": {"format": "nvfp4", "transforms": ["rot"]}, "v": {"format": "nvfp4"}},
        }
        path = write(tmp_path / "s.json", own(entries))
        config = Config(
            model="m", kv_format=path, kv_layers="2=bf16", kv_transforms="kmean", kv_encoder="4over6"
        )
        spec = CacheSpec.from_config(config)
        assert spec.scheme_file
        assert [stored(scheme) for scheme in spec.scheme_by_layer(3)] == [
            (("fp8_e4m3", ""), ("nvfp4", "amax"), ()),
            (("nvfp4", "4over6"), ("nvfp4", "4over6"), ("rot",)),
            (("bf16", ""), ("bf16", ""), ("kmean",)),
        ]
        # Commands that spell it out say the same.
        rules = ";".join(rule.text for rule in spec.layer_rules)
        spelled = CacheSpec.from_config(
            replace(config, kv_format=spec.scheme_file.usual.name, kv_layers=rules)
        )
        assert spelled.scheme_by_layer(3) == spec.scheme_by_layer(3)

    @pytest.mark.parametrize("layers", [2, 4])
    def test_is_for_one_model(self, tmp_path: Path, layers: int) -> None:
        entry = {"k": {"format": "nvfp4"}, "v": {"format": "nvfp4"}}
        path = write(tmp_path / "s.json", own({str(i): entry for i in range(3)}))
        spec = CacheSpec.from_config(Config(model="m", kv_format=path))
        said = "layer 2: the model has layers 0 to 1" if layers == 2 else "has no layer 3.*0 to 3"
        with pytest.raises(ConfigError, match=f"s.json.*{said}"):
            spec.scheme_by_layer(layers)

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            ("{", "is not JSON"),
            ([], "is a JSON object, not list"),
            ({"schema": "nibble-kv-scales-1"}, 'neither "schema": "nibble-kv-scheme-1" nor ModelOpt'),
            (own({}), '"layers" must be an object'),
            (own({"first": {}}), "'first' is no layer"),
            (own({"1": {"k": {"format": "nvfp4"}}}), "layer 1: a layer has k and v or latent, not k"),
            (own({"1": {}}), "layer 1: a layer has k and v or latent, not nothing"),
            (own({"1": {"latent": "nvfp4"}}), 'layer 1, latent: write it as {"format": NAME}'),
            (own({"1": {"latent": {"format": "nvfp5"}}}), "layer 1, latent: unknown KV format 'nvfp5'"),
            (own({"1": {"latent": {"format": "index_fp8"}}}), "layer 1, latent: unknown KV format"),
            (
                own({"1": {"latent": {"format": "nvfp4", "scale": 1}}}),
                "layer 1, latent: unknown setting 'scale'",
            ),
            (
                own({"1": {"latent": {"format": "nvfp4", "encoder": "swap"}}}),
                "layer 1, latent: unknown encoder",
            ),
            (
                own({"1": {"latent": {"format": "nvfp4", "transforms": ["rot"]}}}),
                "layer 1, latent: transforms are of k",
            ),
            (
                own({"1": {"latent": {"format": "nvfp4", "transforms": "rot"}}}),
                "layer 1, latent: transforms are a list",
            ),
            (
                own({"1": {"k": {"format": "nvfp4", "transforms": ["rott"]}, "v": {"format": "nvfp4"}}}),
                "layer 1: unknown transform 'rott'",
            ),
            (
                own(
                    {
                        "1": {
                            "k": {"format": "nvfp4", "encoder": "amax"},
                            "v": {"format": "nvfp4", "encoder": "sweep"},
                        }
                    }
                ),
                "layer 1: k and v have the encoders amax and sweep",
            ),
        ],
    )
    def test_bad_files(self, tmp_path: Path, content: Any, said: str) -> None:
        path = write(tmp_path / "bad.json", content)
        with pytest.raises(ConfigError) as error:
            scheme_file.load(path)
        assert "bad.json" in str(error.value)
        assert said in str(error.value)

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"cannot read the KV scheme file .*none.json: No such file"):
            CacheSpec.from_config(Config(model="m", kv_format=str(tmp_path / "none.json")))


LAYERS = {0: "fp8_e4m3", 1: "bf16", 2: "nvfp4", 3: "k8v4"}


class TestWindow:
    LAYERS = own({"0": {"k": {"format": "nvfp4"}, "v": {"format": "nvfp4"}}})

    @pytest.mark.parametrize(
        ("in_file", "option", "expected"),
        [(64, None, 64), (64, 0, 0), (64, 96, 96), (0, None, 0), (None, 32, 32)],
    )
    def test_an_option_wins(
        self, tmp_path: Path, in_file: int | None, option: int | None, expected: int
    ) -> None:
        content = self.LAYERS if in_file is None else {**self.LAYERS, "kv_window": in_file}
        path = write(tmp_path / "s.json", content)
        assert scheme_file.load(path).window == in_file
        assert CacheSpec.from_config(Config(model="m", kv_format=path, kv_window=option)).window == expected

    def test_round_trip(self, tmp_path: Path) -> None:
        layers = {0: schemes.parse("nvfp4")}
        for window in (None, 0, 96):
            scheme_file.save(tmp_path / "s.json", layers, {0: HEADS}, window, model="m")
            found = scheme_file.load(tmp_path / "s.json")
            assert (found.window, found.provenance) == (window, {"model": "m"})

    @pytest.mark.parametrize("window", [-1, "64", 6.5, True])
    def test_bad_ones(self, tmp_path: Path, window: Any) -> None:
        path = write(tmp_path / "s.json", {**self.LAYERS, "kv_window": window})
        with pytest.raises(ConfigError, match=r's\.json: "kv_window" is a number of tokens, from 0'):
            scheme_file.load(path)

    def test_one_that_is_too_long(self, tmp_path: Path) -> None:
        path = write(tmp_path / "s.json", {**self.LAYERS, "kv_window": 1 << 20})
        with pytest.raises(ConfigError, match=r"s\.json: kv_window must lie in \[0, 4096\]"):
            CacheSpec.from_config(Config(model="m", kv_format=path))


class TestModelOpt:
    def test_round_trip(self, tmp_path: Path) -> None:
        by_layer = {layer: schemes.parse(name) for layer, name in LAYERS.items()}
        content = scheme_file.as_modelopt(by_layer, {"name": "nibble", "version": "1"})
        assert content["quantization"] == {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {},
            "kv_cache_quant_algo": "MIXED_PRECISION",
            "kv_cache_quantized_layers": {
                "model.layers.0.self_attn": {"quant_algo": "FP8"},
                "model.layers.2.self_attn": {"quant_algo": "NVFP4"},
                "model.layers.3.self_attn": {"quant_algo": "FP8_K_NVFP4_V"},
            },
            "kv_cache_schema_version": 1,
        }
        spec = CacheSpec.from_config(
            Config(model="m", kv_format=write(tmp_path / "hf_quant_config.json", content))
        )
        # A file leaves no transforms to the plan.
        assert [scheme.name for scheme in spec.scheme_by_layer(4)] == [
            "fp8_e4m3",
            "bf16",
            "nvfp4+none",
            "k8v4",
        ]

    def test_a_uniform_map_says_its_algorithm(self) -> None:
        content = scheme_file.as_modelopt(dict.fromkeys(range(2), schemes.parse("nvfp4+rot")), {})
        assert content["quantization"]["kv_cache_quant_algo"] == "NVFP4"

    def test_other_places_of_it(self, tmp_path: Path) -> None:
        entry = {
            "kv_cache_quantized_layers": {
                "model.language_model.layers.1.self_attn.attn": {"quant_algo": "FP8"}
            }
        }
        for content in (entry, {"quantization_config": {"quant_method": "modelopt", **entry}}):
            file = scheme_file.load(write(tmp_path / "config.json", content))
            assert {layer: scheme.name for layer, scheme in file.layers.items()} == {1: "fp8_e4m3"}
            assert file.usual.name == "bf16"

    @pytest.mark.parametrize(
        ("entry", "said"),
        [
            (
                {"model.layers.4.self_attn": {"quant_algo": "INT8"}},
                "layer 4: KV caches in INT8 are not served",
            ),
            (
                {"model.encoder": {"quant_algo": "FP8"}},
                "'model.encoder' in kv_cache_quantized_layers names no layer",
            ),
            (["FP8"], "must be an object"),
        ],
    )
    def test_what_is_not_served(self, tmp_path: Path, entry: Any, said: str) -> None:
        path = write(tmp_path / "mo.json", {"quantization": {"kv_cache_quantized_layers": entry}})
        with pytest.raises(ConfigError, match=f"mo.json.*{said}"):
            scheme_file.load(path)

    def test_another_schema(self, tmp_path: Path) -> None:
        entry = {
            "kv_cache_quantized_layers": {"layers.0": {"quant_algo": "FP8"}},
            "kv_cache_schema_version": 2,
        }
        with pytest.raises(ConfigError, match="is of schema 2, and Nibble reads 1"):
            scheme_file.load(write(tmp_path / "mo.json", entry))

    def test_what_it_has_no_word_for(self) -> None:
        with pytest.raises(ConfigError, match="layer 1: ModelOpt's form has no word for nvfp4:fp8_e4m3"):
            scheme_file.as_modelopt({0: schemes.parse("nvfp4"), 1: schemes.parse("nvfp4:fp8")}, {})

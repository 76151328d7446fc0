"""How encoders and transforms are asked for: by option, by the scheme's text, by the names of other engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nibble.attention.planner import refusal
from nibble.cache.layout import CacheLayout, LayerLayout, StreamLayout
from nibble.cli.main import app
from nibble.config import Config
from nibble.errors import ConfigError
from nibble.formats import scheme as schemes
from nibble.formats.base import ENCODERS
from nibble.model_spec import HEADS
from nibble.spec import CacheSpec


def spec(**options: str) -> CacheSpec:
    return CacheSpec.from_config(Config(model="demo", **options))


def encoders(**options: str) -> dict[str, str]:
    """The encoder of each stream in the spec's main scheme."""
    return {stream.name: spec(**options).scheme.format_of(stream).encoder for stream in HEADS}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"kv_format": "nvfp4"}, "sweep"),
        ({"kv_format": "nvfp4", "kv_encoder": "auto"}, "sweep"),
        ({"kv_format": "nvfp4", "kv_encoder": "amax"}, "amax"),
        ({"kv_format": "nvfp4+kmean+rot", "kv_encoder": "4over6"}, "4over6"),
        ({"kv_format": "nvfp4_4over6"}, "4over6"),
        ({"kv_format": "nvfp4_4over6", "kv_encoder": "amax"}, "4over6"),
        ({"kv_format": "fp4_mx_block16_amax"}, "amax"),
        ({"kv_format": "mxfp4_sweep", "kv_encoder": "amax"}, "sweep"),
    ],
)
def test_which_encoder_it_is(options: dict[str, str], expected: str) -> None:
    assert encoders(**options) == {"k": expected, "v": expected}


def test_a_format_without_a_choice_goes_its_own_way() -> None:
    assert encoders(kv_format="k8v4", kv_encoder="amax") == {"k": "", "v": "amax"}
    assert encoders(kv_format="fp8_e4m3") == {"k": "", "v": ""}
    mixed = spec(kv_format="nvfp4", kv_layers="0=mxfp4;1=nvfp4_amax", kv_encoder="4over6").scheme_by_layer(3)
    assert [scheme.format_of(HEADS[0]).encoder for scheme in mixed] == ["sweep", "amax", "4over6"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_encoder": "amax"}, "amax is for .*nvfp4.*and this cache is in bf16"),
        (
            {"kv_format": "mxfp4", "kv_encoder": "4over6"},
            "4over6 is for nvfp4, nvfp4_ds_mla.*in mxfp4; use another",
        ),
        ({"kv_format": "nvfp4", "kv_encoder": "amx"}, "unknown KV encoder 'amx': did you mean 'amax'"),
        ({"kv_format": "mxfp4_4over6"}, "unknown KV format 'mxfp4_4over6'"),
        ({"kv_format": "nvfp4+auto"}, "unknown transform 'auto'"),
        ({"kv_transforms": "rott"}, "unknown transform 'rott'"),
        ({"kv_transforms": "rot+rot"}, "names a transform twice"),
        ({"kv_transforms": ""}, "unknown transform ''"),
    ],
)
def test_what_cannot_be(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec(**options)


def test_every_encoder_is_described() -> None:
    assert schemes.encoders().keys() == ENCODERS.keys()
    page = (Path(__file__).parents[2] / "docs/formats.md").read_text()
    assert all(f"- `{name}` ({', '.join(having)})" in page for name, having in schemes.encoders().items())


def test_transforms_by_option() -> None:
    assert spec(kv_format="nvfp4", kv_transforms="rot+kmean").scheme.name == "nvfp4+kmean+rot"
    assert spec(kv_format="nvfp4+rot", kv_transforms="kmean+rot").scheme.transforms == ("rot",)
    assert spec(kv_format="nvfp4+none", kv_transforms="kmean+rot").scheme.transforms == ()
    assert spec(kv_format="nvfp4", kv_transforms="none").scheme.transforms == ()
    rules = spec(
        kv_format="nvfp4", kv_layers="0=fp8_e4m3;1=fp8_e4m3+none", kv_transforms="rot"
    ).scheme_by_layer(2)
    assert [scheme.transforms for scheme in rules] == [("rot",), ()]


def test_another_encoder_is_another_layout() -> None:
    def fingerprint(encoder: str, kv_format: str = "nvfp4") -> str:
        entries = tuple(StreamLayout(stream, kv_format, encoder) for stream in HEADS)
        return CacheLayout((LayerLayout(0, entries),), 16, "hnd").fingerprint

    assert len({fingerprint(encoder) for encoder in ("sweep", "amax", "4over6")}) == 3
    assert fingerprint("") == fingerprint("sweep")
    assert fingerprint("amax", "fp8_e4m3") == fingerprint("", "fp8_e4m3")


def test_plans_say_it() -> None:
    def told(*words: str) -> str:
        result = CliRunner().invoke(app, ["plan", "demo", "--gpu", "cpu", *words])
        assert result.exit_code == 0, result.stderr
        return result.stdout

    assert "  block scales: nvfp4 by sweep\n" in told("--kv-format", "nvfp4")
    assert "  block scales: nvfp4 by amax\n" in told("--kv-format", "k8v4", "--kv-encoder", "amax")
    assert "  block scales: nvfp4 by 4over6\n" in told("--kv-cache-dtype", "nvfp4_4over6")
    assert "block scales" not in told("--kv-format", "fp8_e4m3")
    facts = json.loads(told("--kv-format", "k8v4", "--json"))
    assert [group["streams"]["v"]["encoder"] for group in facts["groups"]] == ["sweep"]
    assert "encoder" not in facts["groups"][0]["streams"]["k"]


def test_what_is_proposed_has_an_encoder_that_it_can_have() -> None:
    """A scheme that cannot store a model's streams is refused with one that can, whatever encoder was asked for."""
    words = ["plan", "demo", "--kv-format", "nvfp4_ds_mla", "--kv-encoder", "4over6"]
    result = CliRunner().invoke(app, words)
    assert "what works: nibble plan demo --kv-format k8v4 --kv-encoder 4over6" in " ".join(
        result.stderr.split()
    )
    config = Config(model="demo", kv_format="nvfp4", kv_encoder="4over6")
    edited = [
        refusal._rename(spec(kv_format="nvfp4", kv_encoder="4over6").scheme, name)(config)
        for name in ("bf16", "k8v4")
    ]
    assert [(entry.kv_format, entry.kv_encoder) for entry in edited] == [("bf16", "auto"), ("k8v4", "4over6")]

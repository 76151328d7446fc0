"""What a 4-bit scheme alone gives: the exact window and the transforms that are left to the plan, and where there are less."""

from __future__ import annotations

from typing import Any

import pytest

from nibble import ConfigError, Unsupported
from nibble.attention.planner.defaults import WINDOW
from nibble.attention.planner.plan import Plan
from nibble.attention.planner.resolve import resolve
from nibble.config import Config
from nibble.engine.cache_plan import CachePlan
from nibble.engine.plan import EnginePlan, plan_memory
from nibble.formats import scheme as schemes
from nibble.hardware import GIB, Hardware, lookup_gpu
from nibble.model_spec import HEADS, LATENTS, ModelSpec
from planning import DEEPSEEK_V3, GEMMA2, GPT_OSS, PLAIN, QWEN3_8B, SHARED_KV, mha, model_spec

CPU, H200 = Hardware("cpu", 0, 32 * GIB), lookup_gpu("h200")
SMALL = model_spec(mha(2, 64), context=512, weights=1 << 20)


def plan(model: ModelSpec = QWEN3_8B, machine: Hardware = H200, **options: Any) -> Plan:
    return resolve(Config(model="m", **options), model, machine)


def fitted(model: ModelSpec, machine: Hardware, **options: Any) -> EnginePlan:
    config = Config(model="m", **options)
    return plan_memory(CachePlan(config, machine, model, resolve(config, model, machine), here=False))


def stored(made: Plan) -> set[str]:
    return {group.scheme for group in made.groups}


def test_a_4_bit_scheme_takes_less_than_five_bits_a_value() -> None:
    for name in schemes.names():
        streams = HEADS if name in schemes.fitting(*HEADS) else LATENTS[:1]
        scheme = schemes.parse(name)
        bits = [8 * scheme.format_of(x).bytes_per_token(x) / x.values for x in streams]
        # The rope of a DeepSeek record is in 16 bits.
        least = 6.0 if "ds_mla" in name else 5.0
        assert scheme.is_4bit == (min(bits) < least), name
        assert scheme.has_4bit_keys == (bits[0] < least), name


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "fp4_mx16", "fp4_e2m1", "nvfp4_amax", "nvfp4:fp8_e4m3"])
def test_keys_in_4_bits_have_a_window_and_transforms(name: str) -> None:
    made = plan(kv_format=name)
    assert made.window == WINDOW and all(group.near_kernel or group.near_routes for group in made.groups)
    assert {layer.transforms for layer in made.layout.layers} == {("kmean", "rot")}


@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3"])
def test_others_have_neither(name: str) -> None:
    made = plan(kv_format=name)
    assert (made.window, stored(made), made.meaning) == (0, {name}, "")


def test_values_in_4_bits_have_a_window() -> None:
    made = plan(kv_format="k8v4")
    assert (made.window, stored(made)) == (WINDOW, {"k8v4"})


def test_one_layer_in_4_bits_is_enough_for_a_window() -> None:
    made = plan(kv_format="fp8_e4m3", kv_layers="3=nvfp4")
    assert (made.window, stored(made)) == (WINDOW, {"fp8_e4m3", "nvfp4+kmean+rot"})
    made = plan(kv_format="nvfp4", kv_layers="0-35=fp8_e4m3")
    assert (made.window, stored(made)) == (0, {"fp8_e4m3"})


@pytest.mark.parametrize("model", [GPT_OSS, GEMMA2])
def test_no_mean_is_subtracted_where_sinks_or_caps_would_notice(model: ModelSpec) -> None:
    made = plan(model, kv_format="nvfp4")
    assert stored(made) == {"nvfp4+rot"} and "keys rotated" in made.meaning
    with pytest.raises(ConfigError, match="shifts scores"):
        plan(model, kv_format="nvfp4+kmean")


def test_layers_that_share_pages_share_transforms() -> None:
    assert stored(plan(SHARED_KV, kv_format="nvfp4")) == {"nvfp4+kmean+rot"}


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4_ds_mla"])
def test_latents_have_a_window_and_no_transforms(name: str) -> None:
    made = plan(DEEPSEEK_V3, CPU, kv_format=name)
    assert (made.window, stored(made)) == (WINDOW, {name})


@pytest.mark.parametrize(
    ("options", "window", "scheme"),
    [
        (PLAIN, 0, "nvfp4"),
        ({"kv_window": 16}, 16, "nvfp4+kmean+rot"),
        ({"kv_transforms": "rot"}, WINDOW, "nvfp4+rot"),
        ({"kv_format": "nvfp4+none"}, WINDOW, "nvfp4+none"),
        ({"kv_format": "nvfp4+rot", "kv_window": 0}, 0, "nvfp4+rot"),
    ],
)
def test_what_was_said_stays(options: dict[str, Any], window: int, scheme: str) -> None:
    made = plan(**{"kv_format": "nvfp4", **options})
    assert (made.window, stored(made)) == (window, {scheme})


def test_the_meaning_is_one_line() -> None:
    assert plan(kv_format="nvfp4", kv_layers="0=fp8_e4m3").meaning == (
        "nvfp4 with --kv-layers 0=fp8_e4m3: block scales by sweep; keys less their mean and rotated; the newest 64 "
        "tokens in bfloat16 (plain: --kv-encoder amax --kv-transforms none --kv-window 0)"
    )
    plain = plan(kv_format="nvfp4", kv_encoder="amax", **PLAIN)
    assert plain.meaning == "nvfp4: block scales by amax; keys as they are; no exact window"


def test_a_window_that_no_backend_serves_is_left_out_unless_it_was_asked_for() -> None:
    made = plan(kv_format="nvfp4", deterministic=True)
    assert any("no exact window" in note for note in made.default_notes)
    assert made.window == 0 and not any(group.near_routes for group in made.groups)
    (note,) = (note for note in made.notes if note.startswith("no exact window"))
    assert "log-sum-exp" in note
    with pytest.raises(Unsupported, match="log-sum-exp"):
        plan(kv_format="nvfp4", deterministic=True, kv_window=64)


def test_a_window_sends_nothing_to_plain_torch() -> None:
    """What only a backend without a log-sum-exp has a kernel for keeps its kernel, and has no window."""
    for name in ("nvfp4", "nvfp4_ds_mla", "nvfp4_ds_mla_fp8rope", "mxfp4"):
        made, plain = (plan(DEEPSEEK_V3, kv_format=name, **options) for options in ({}, PLAIN))
        for group, other in zip(made.groups, plain.groups, strict=True):
            gathers = {route.phase for route in (*group.routes, *group.near_routes) if route.row.gathers}
            assert gathers <= {route.phase for route in other.routes if route.row.gathers}, name


def test_a_window_gives_way_where_it_does_not_fit() -> None:
    plain = fitted(SMALL, CPU, kv_format="nvfp4", kv_memory="600KiB", **PLAIN)
    alone = fitted(SMALL, CPU, kv_format="nvfp4", kv_memory="600KiB", kv_transforms="none")
    assert alone.plan.window == 0 and alone.budget == plain.budget
    assert any("64 tokens do not fit" in note for note in alone.plan.notes)
    roomy = fitted(SMALL, CPU, kv_format="nvfp4", kv_memory="64MiB")
    assert roomy.plan.window == WINDOW and roomy.budget.exact


def test_a_window_is_part_of_what_pages_mean() -> None:
    prints = {plan(kv_format="nvfp4", **options).fingerprint for options in ({}, PLAIN, {"kv_window": 0})}
    assert len(prints) == 3
    assert plan(kv_format="nvfp4").fingerprint == plan(kv_format="nvfp4+kmean+rot", kv_window=64).fingerprint

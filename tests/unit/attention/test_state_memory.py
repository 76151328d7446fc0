"""Recurrent states in the memory plan: slots are counted to the byte, and what does not fit is refused with numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nibble.attention.planner import explain, state_memory
from nibble.attention.planner.memory import MemoryPlan
from nibble.attention.planner.resolve import resolve
from nibble.cache.state_pool import StatePool
from nibble.config import STATE_FORMATS, Config
from nibble.errors import CapacityError, ConfigError
from nibble.hardware import GIB, Hardware
from nibble.kernels.state_formats import FORMATS
from nibble.model_spec import NO_LAYER, LayerGroup, RecurrentGroup
from planning import gqa, memory_plan, model_spec

LINEAR = RecurrentGroup(
    "delta", "delta", tuple(i for i in range(8) if i % 4 != 3), heads=32, rows=128, columns=128, key_heads=16,
    conv_channels=8192, conv_taps=4,
)  # fmt: skip
MODEL = replace(
    model_spec(
        LayerGroup("full", "mha", gqa(256, 2), (3, 7), 16),
        owner=tuple(i if i % 4 == 3 else NO_LAYER for i in range(8)),
        context=4096,
        weights=GIB,
    ),
    states=(LINEAR,),
)


CPU = Hardware("cpu", 0, 32 * GIB)


def plan(**options: Any) -> MemoryPlan:
    config = Config(**{"model": "m", "kv_memory": "2GiB", "max_running": 8, **options})
    return memory_plan(config, MODEL, CPU, resolve(config, MODEL, CPU))


def test_formats_are_those_of_the_kernels() -> None:
    assert set(STATE_FORMATS) == set(FORMATS)


@pytest.mark.parametrize("format", STATE_FORMATS)
def test_slots_are_counted_to_the_byte(format: str) -> None:
    small = replace(LINEAR, rows=16, columns=16, conv_channels=96)
    pool = StatePool((small,), 3, format, "float32", "cpu")
    allocated = sum(
        x.nbytes
        for state in pool.layers.values()
        for x in (*state.planes, state.keys_SPGK, state.updates_SPHV, state.decays, state.inputs_SPC)
    )
    model = replace(MODEL, states=(small,))
    assert allocated == 3 * state_memory.slot_bytes(model, format, "float32")


def test_states_and_pages_share_the_memory() -> None:
    budget = plan(state_format="int8")
    assert budget.states and budget.requests == budget.states.requests == 8
    assert budget.states.slots == 8 + budget.states.snapshots
    assert (
        budget.pool + budget.states.bytes
        <= 2 * GIB
        < budget.pool + budget.states.bytes + 2 * budget.states.bytes_per_slot
    )
    # An 8-bit state is about a quarter, and buffered inputs and the convolution's stay as they are.
    exact = plan(state_format="fp32").states
    assert exact and 2.0 < exact.bytes_per_slot / budget.states.bytes_per_slot < 4


def test_without_a_prefix_cache_there_are_no_snapshots() -> None:
    states = plan(prefix_cache=False).states
    assert states and (states.snapshots, states.slots) == (0, 8)


def test_fewer_requests_run_where_memory_is_short() -> None:
    short = plan(kv_memory="128MiB", max_running=64, max_context=512)
    assert short.states and 1 <= short.states.requests < 64 and short.requests == short.states.requests


def test_states_that_do_not_fit_are_refused() -> None:
    with pytest.raises(CapacityError, match=r"states of one request take .* what would help"):
        plan(kv_memory="16MiB", max_context=256)


def test_the_plan_says_what_a_state_weighs() -> None:
    config = Config(model="m", kv_memory="2GiB", state_format="int8", max_running=8)
    cache, budget = resolve(config, MODEL, CPU), plan(state_format="int8")
    assert budget.states
    text = explain.as_text(cache, budget)
    assert "recurrent states" in text and "in int8: 8 requests at a time" in text
    said = explain.as_dict(cache, budget)["states"]
    assert said["tokens"] == budget.states.bytes_per_slot // budget.bytes_per_token > 0
    assert cache.fingerprint != resolve(replace(config, state_format="fp32"), MODEL, CPU).fingerprint


def test_a_rule_for_layers_without_kv_is_refused() -> None:
    config = Config(model="m", kv_layers="0,3=fp8_e4m3")
    with pytest.raises(ConfigError, match="no effect on layers 0 of m: they keep no keys and values"):
        resolve(config, MODEL, CPU)
    resolve(replace(config, kv_layers="3=fp8_e4m3"), MODEL, CPU)


@pytest.mark.parametrize("wrong", [{"state_format": "fp4"}, {"state_interval": -1}])
def test_options_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="state_"):
        Config(model="m", **wrong)

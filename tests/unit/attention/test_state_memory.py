"""Recurrent states in the memory plan: slots are counted to the byte, and what does not fit is refused with numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nibble.attention import backends
from nibble.attention.planner import explain, state_memory, state_support
from nibble.attention.planner.evidence import LedgerEntry
from nibble.attention.planner.memory import MemoryPlan
from nibble.attention.planner.resolve import resolve
from nibble.cache.state_pool import StatePool
from nibble.config import STATE_FORMATS, Config
from nibble.errors import CapacityError, ConfigError
from nibble.hardware import GIB, Hardware, lookup_gpu
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


def test_the_plan_says_how_many_requests_fit() -> None:
    config = Config(model="m", kv_memory="2GiB", state_format="int8", max_running=64)
    cache, budget = resolve(config, MODEL, CPU), plan(state_format="int8", max_running=64)
    assert budget.states and budget.fitting == {2048: 64}, "the model's context is shorter than 16K"
    assert "requests at a time, with pages: 64 of 2,048 tokens" in explain.as_text(cache, budget)
    assert explain.as_dict(cache, budget)["states"]["fitting"] == {"2048": 64}
    short = plan(kv_memory="256MiB", max_running=64)
    pages = -(-2048 * short.pages // short.tokens)
    assert short.states and short.fitting[2048] == min(short.states.requests, short.pages // pages)


H200 = lookup_gpu("h200")


@pytest.mark.parametrize(("layers", "kv_heads"), [(48, 2), (32, 4)], ids=["qwen3-next", "qwen3.5"])
def test_small_states_and_a_small_cache_serve_more_requests(layers: int, kv_heads: int) -> None:
    """In the same memory on a GPU, with an exact window and buffered inputs: what both are for."""
    model = replace(
        model_spec(
            LayerGroup("full", "mha", gqa(256, kv_heads), tuple(range(3, layers, 4)), 16),
            owner=tuple(i if i % 4 == 3 else NO_LAYER for i in range(layers)),
            context=32768,
            weights=40 * GIB,
        ),
        states=(replace(LINEAR, layers=tuple(i for i in range(layers) if i % 4 != 3)),),
    )

    def most(tokens: int, **options: Any) -> int:
        """Requests of so many tokens, with as many slots as are needed."""
        count = 0
        for step in (64, 16, 4, 1):
            while True:
                config = Config(model="m", kv_memory="40GiB", max_running=count + step, **options)
                budget = memory_plan(config, model, H200, resolve(config, model, H200))
                if budget.fitting[tokens] < count + step:
                    break
                count += step
        return count

    for tokens, least in ((2048, 2.4), (16384, 3.1)):
        plain = most(tokens, kv_format="bf16", state_format="fp32")
        for state_format in ("int8", "fp8"):
            small = most(tokens, kv_format="nvfp4", state_format=state_format)
            assert small >= least * plain, f"{small} requests of {tokens} tokens, {plain} of a plain cache"


def test_what_cannot_compute_states_is_refused() -> None:
    old = replace(H200, name="t4", arch=75)
    with pytest.raises(ConfigError, match=r"run on GPUs from SM80 on, and this one has SM75: --device cpu"):
        resolve(Config(model="m"), MODEL, old)
    table = dict(backends.all_backends())
    table["triton"] = replace(table["triton"], adapter=None, missing="the package triton: pip install triton")
    with pytest.raises(
        ConfigError, match="on a GPU need the package triton: pip install triton; or --device cpu"
    ):
        resolve(Config(model="m"), MODEL, H200, table)
    resolve(Config(model="m"), MODEL, CPU, table)


def test_the_ledger_knows_rules_and_formats() -> None:
    def missing(*entries: LedgerEntry, format: str = "int8") -> dict[str, str]:
        return state_support.untested(MODEL.states, format, H200, entries)

    entries = [
        LedgerEntry(*state_support.key(LINEAR, phase, "int8", 90), gpu="H200", date="2026-11-25")
        for phase in state_support.PHASES
    ]
    assert missing() == {"delta": "prefill, extend, decode"}
    assert missing(*entries) == {} and missing(*entries[:2]) == {"delta": "decode"}
    assert missing(*entries, format="fp8") == missing()
    assert not state_support.untested(MODEL.states, "int8", CPU, ())


def test_a_rule_for_layers_without_kv_is_refused() -> None:
    config = Config(model="m", kv_layers="0,3=fp8_e4m3")
    with pytest.raises(ConfigError, match="no effect on layers 0 of m: they keep no keys and values"):
        resolve(config, MODEL, CPU)
    resolve(replace(config, kv_layers="3=fp8_e4m3"), MODEL, CPU)


@pytest.mark.parametrize("wrong", [{"state_format": "fp4"}, {"state_interval": -1}])
def test_options_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="state_"):
        Config(model="m", **wrong)

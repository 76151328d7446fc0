"""Staging: its workspace is bounded, its answer is that of direct reading, and its price is told before it is paid.

Shape suffixes: T tokens, H query heads, D values of a head, N pages of a request.
"""

from __future__ import annotations

import gc
import json
import operator
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nibble import LLM
from nibble.attention import staging
from nibble.attention.backends.adapters.torch_backends import TorchRef
from nibble.attention.planner.explain import as_dict, as_text, staging_costs
from nibble.attention.planner.plan import Route
from nibble.attention.planner.resolve import resolve
from nibble.attention.planner.support import Support
from nibble.attention.step import StepStates
from nibble.cache.layout import CacheLayout, LayerLayout, StreamLayout
from nibble.cache.pool import KVView, PagedPool
from nibble.cache.scales import ONE
from nibble.config import Config
from nibble.errors import ConfigError
from nibble.hardware import GIB, lookup_gpu
from nibble.kernels.types import AttentionBatch, AttentionParams
from nibble.model_spec import ModelSpec, Phase, Stream
from nibble.server.logging import decode_costs
from planning import GPT_OSS, MODELS, PLAIN, QWEN3_8B, memory_plan

PAGE, HEADS, DIM = 16, 2, 32
LENGTHS = (5, 16, 90, 200, 64)


@pytest.fixture(scope="module")
def view() -> KVView:
    """A layer in nvfp4 with all its pages written."""
    streams = tuple(StreamLayout(Stream(name, HEADS, DIM), "nvfp4") for name in "kv")
    pool = PagedPool(CacheLayout((LayerLayout(0, streams),), PAGE, "hnd"), 40, ONE)
    rng = torch.Generator().manual_seed(3)
    slots = torch.arange(40 * PAGE)
    pool.write(0, {name: torch.randn(len(slots), HEADS, DIM, generator=rng) for name in "kv"}, slots)
    return pool.view(0)


def segment(phase: Phase, new: int) -> AttentionBatch:
    """Requests of LENGTHS stored tokens, `new` of them new, on pages in random order."""
    order = torch.randperm(40, generator=torch.Generator().manual_seed(5)).int()
    page_table_BN = torch.zeros(len(LENGTHS), -(-max(LENGTHS) // PAGE), dtype=torch.int32)
    for row, length in zip(page_table_BN, LENGTHS, strict=True):
        count = -(-length // PAGE)
        row[:count], order = order[:count], order[count:]
    return AttentionBatch.from_lens(phase, 0, [new] * len(LENGTHS), LENGTHS, page_table_BN)


@pytest.mark.parametrize("window", [None, 1, 16, 33, 150, 4096])
@pytest.mark.parametrize(("phase", "new"), [(Phase.DECODE, 1), (Phase.EXTEND, 4)])
@pytest.mark.parametrize("bound", [1 << 17, 500])
def test_it_is_bounded_and_changes_no_answer(
    view: KVView, phase: Phase, new: int, window: int | None, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "MAX_STAGED_TOKENS", bound)
    step, spec = segment(phase, new), AttentionParams(DIM**-0.5, window=window)
    q_THD = torch.randn(step.stop, 3 * HEADS, DIM, generator=torch.Generator().manual_seed(9))
    parts = [
        (staging.dequantize_pages(view, part, "fp32"), part.batch)
        for part in staging.cut_parts(step, view.page_size, window)
    ]
    found = [TorchRef().attend(q_THD[p.start : p.stop], part, p, spec) for part, p in parts]
    expected = TorchRef().attend(q_THD, view, step, spec)
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-5, atol=1e-6)
    tokens = [len(part.keys.planes[0]) * PAGE for part, _ in parts]
    assert max(tokens) <= bound
    if window == 16 and bound > 500:
        assert sum(tokens) <= len(LENGTHS) * 3 * PAGE, "what a window has left behind is not staged"


@pytest.mark.parametrize("bound", [1 << 17, 500])
def test_layers_of_a_step_share_what_is_worked_out(
    view: KVView, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that backends, who plan once for a segment, do so once for a step; and it is gone with the step."""
    monkeypatch.setattr(staging, "MAX_STAGED_TOKENS", bound)
    step, states = segment(Phase.EXTEND, 4), StepStates()
    row = Support(phase=frozenset(Phase), kind=frozenset({"mha"}), format=None)
    route, other = (Route(Phase.EXTEND, "torch_ref", row, stage_to="bf16") for _ in range(2))
    backends = {"torch_ref": TorchRef()}

    def parts(route: Route, window: int | None) -> list[AttentionBatch]:
        prepared = states.lookup(route, backends, view.page_size, step, AttentionParams(1.0, window))
        return [part.batch for part in prepared.parts]

    one, again, third = parts(route, None), parts(route, None), parts(other, None)
    assert all(map(operator.is_, one, again)) and len(one) == (1 if bound > 500 else 3)
    assert all(map(operator.is_, one, third)), "layers of another group too"
    assert not any(map(operator.is_, one, parts(route, 16)))
    prepared = states.lookup(route, backends, view.page_size, step, AttentionParams(1.0))
    held = weakref.ref(prepared)
    del prepared
    states = StepStates()
    gc.collect()
    assert held() is None


def plan_of(model_spec: ModelSpec, gpu: str, **options: Any) -> tuple[Any, Any]:
    config = Config(model="m", **options)
    plan = resolve(config, model_spec, lookup_gpu(gpu), declared=True)
    return plan, memory_plan(config, model_spec, lookup_gpu(gpu), plan)


def test_the_price_in_bytes() -> None:
    """Per token and layer: 8 heads in 144 bytes are read, 512 written, and 512 read again."""
    plan, money = plan_of(
        QWEN3_8B,
        "b200",
        kv_format="nvfp4",
        prefill_backend="triton",
        decode_backend="fa4",
        allow_staging=True,
    )
    (entry,) = staging_costs(plan, money.context)
    assert entry.route.phase is Phase.DECODE
    assert entry.cost.direct == 36 * 32768 * 8 * 144
    assert entry.cost.staged == 36 * 32768 * 8 * (144 + 2 * 512)
    assert entry.cost.factor == pytest.approx(8.11, abs=0.01)


def test_a_window_and_a_choice_bound_what_direct_reading_moves() -> None:
    plan, money = plan_of(GPT_OSS, "h200", kv_format="fp4_mx16", prefill_backend="fa3")
    window, full = staging_costs(plan, money.context)
    assert (window.group.group.name, full.group.group.name) == ("window", "full")
    assert window.cost.direct * 32768 == full.cost.direct * 128
    small = replace(MODELS["deepseek-v3.2"], weight_bytes=8 * GIB)
    sparse, money = plan_of(small, "h200", kv_format="nvfp4_ds_mla", prefill_backend="flashmla")
    (entry,) = staging_costs(sparse, money.context)
    assert entry.cost.direct == 61 * 2048 * 416
    assert entry.cost.staged == 61 * (32768 * (416 + 1152) + 2048 * 1152)


def test_it_is_told_by_the_plan_the_server_and_the_refusal() -> None:
    options = {"kv_format": "nvfp4", "prefill_backend": "fa4", "decode_backend": "flex_attention", **PLAIN}
    with pytest.raises(ConfigError, match=r"with --allow-staging, moving 8\.1 x the bytes in each step"):
        plan_of(QWEN3_8B, "b200", **options)
    plan, money = plan_of(QWEN3_8B, "b200", **options, allow_staging=True)
    text = as_text(plan, money)
    told = "decode of full in nvfp4: flex_attention reads bf16; a step over a request of 32,768 tokens moves at least"
    assert (
        f"staging, {told} 10.27 GiB, 8.1 x the 1.27 GiB that a kernel for nvfp4 reads, 2.3 x those of" in text
    )
    assert "staging, extend of full in nvfp4: fa4 reads bf16" in text
    about = json.loads(json.dumps(as_dict(plan, money)))
    assert [entry["phase"] for entry in about["staging"]] == ["extend", "decode"]
    (warned,) = decode_costs(about)
    assert (warned["backend"], warned["factor"]) == ("flex_attention", 8.11)
    assert told in warned["words"]


def test_what_reads_the_cache_as_it_is_costs_nothing() -> None:
    plan, money = plan_of(QWEN3_8B, "h200", kv_format="nvfp4", allow_staging=True)
    assert not list(staging_costs(plan, money.context))
    assert decode_costs(as_dict(plan, money)) == []


def test_an_engine_that_stages_answers_as_one_that_does_not(tiny: Path) -> None:
    options: dict[str, Any] = {"kv_format": "nvfp4", "kv_scales": "one", "kv_memory": "1MiB", **PLAIN}
    prompts = ["0123456789" * 6, "def f(x):"]
    direct = LLM(str(tiny), attention_backend="torch_ref", **options)
    staged = LLM(str(tiny), attention_backend="sdpa", allow_staging=True, **options)
    assert {route.stage_to for route in staged.plan.groups[0].routes} == {"fp32"}
    (note,) = staged.engine.startup.notes
    assert note.startswith("staging, decode of full in nvfp4: sdpa reads fp32")
    assert not direct.engine.startup.notes
    told = [
        [output.completions[0].token_ids for output in llm.generate(prompts, max_tokens=12, ignore_eos=True)]
        for llm in (direct, staged)
    ]
    assert told[0] == told[1]

"""The pools allocate what the plan says, to the byte: ten model shapes, all schemes, per-layer schemes too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nibble.attention.planner.memory import MemoryPlan
from nibble.attention.planner.plan import Plan
from nibble.attention.planner.resolve import resolve
from nibble.cache.pool import PagedPool
from nibble.cache.scales import KVScales, LayerScales
from nibble.config import Config
from nibble.errors import ConfigError
from nibble.formats import scheme
from nibble.hardware import lookup_gpu
from nibble.model_spec import HEADS, LayerGroup, ModelSpec, Stream
from planning import GEMMA2, GPT_OSS, HEAD_80, QWEN3_8B, SHARED_KV, memory_plan, mha, model_spec


def streams(heads: int, dim: int, v_dim: int | None = None) -> tuple[Stream, ...]:
    return Stream("k", heads, dim), Stream("v", heads, v_dim or dim)


SHAPES: dict[str, ModelSpec] = {
    "qwen3-8b": QWEN3_8B,
    "head-80": HEAD_80,
    "gpt-oss": GPT_OSS,
    "gemma2": GEMMA2,
    "shared-kv": SHARED_KV,
    "mqa": model_spec(LayerGroup("full", "mha", streams(1, 128), tuple(range(24)), 16)),
    "mha": model_spec(LayerGroup("full", "mha", streams(32, 96), tuple(range(32)), 32)),
    "demo": model_spec(LayerGroup("full", "mha", streams(2, 64), tuple(range(6)), 6), context=8192),
    "one-layer": model_spec(mha(1, 256)),
    "two-widths": model_spec(
        LayerGroup("sliding", "mha", streams(2, 256), (0, 2), 8, window=512),
        LayerGroup("full", "mha", streams(4, 512), (1, 3), 8),
    ),
}
SCHEMES = (*scheme.fitting(*HEADS), "nvfp4+rot", "nvfp4+kmean+rot")
NO_SCALES = KVScales("test", {n: LayerScales({}, ((0.0,),)) for n in range(64)}, unit=True)


@pytest.mark.parametrize("kv_layers", ["", "0,-1=fp8_e4m3"], ids=["alike", "by-layer"])
@pytest.mark.parametrize("kv_format", SCHEMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_pool_is_the_plan_to_the_byte(shape: str, kv_format: str, kv_layers: str) -> None:
    model = replace(SHAPES[shape], weight_bytes=1 << 20, max_context=512)
    config = Config(model="m", kv_format=kv_format, kv_layers=kv_layers, kv_memory="1GB", device="cpu")
    hardware = lookup_gpu("h200")
    try:
        plan = resolve(config, model, hardware)
    except ConfigError as refusal:
        assert "not a multiple" in str(refusal) or "shifts scores" in str(refusal)
        return
    made = memory_plan(config, model, hardware, plan)
    exact = exact_bytes(plan, made)
    # 4 bits have an exact window, unless it is refused.
    assert bool(exact) == any(entry.codec.is_4bit for layer in plan.layout.layers for entry in layer.streams)
    assert made.pages > 0 and 0 <= 1_000_000_000 - made.pool - exact < plan.layout.bytes_per_page
    pool = PagedPool(plan.layout, made.pages, NO_SCALES, "meta")
    assert pool.nbytes == made.pool == made.pages * plan.page_size * made.bytes_per_token


def exact_bytes(plan: Plan, made: MemoryPlan) -> int:
    """What the pages of the exact window take, of which one more than the plan counts stays empty."""
    if made.exact is None:
        return 0
    pool = PagedPool(plan.exact_layout, made.exact.pages + 1, NO_SCALES, "meta")
    assert pool.nbytes == made.exact.bytes
    return pool.nbytes


def test_refusals_are_the_exception() -> None:
    """The test above compares, and does not only skip."""
    refused = sum(
        bool(scheme.parse(kv_format).refuses(stream))
        for model in SHAPES.values() for group in model.groups for stream in group.streams for kv_format in SCHEMES
    )  # fmt: skip
    assert refused == 2, "head_dim 80 in mxfp4, K and V"

"""Shapes of models, and the way back from a printed command to a config, for tests of plans.

Owns made-up geometries of real proportions. Nothing here loads a model.
"""

from __future__ import annotations

import shlex
from dataclasses import fields
from typing import Any

from nibble.attention.planner.memory import MemoryPlan, MemoryPlanner
from nibble.attention.planner.plan import Plan
from nibble.config import Config, default_of
from nibble.hardware import GIB, Hardware, lookup_gpu, probe
from nibble.model_spec import LayerGroup, ModelSpec, Stream
from nibble.spec import CacheSpec

PLAIN: dict[str, Any] = {"kv_transforms": "none", "kv_window": 0}
"""A 4-bit scheme with nothing beside its bytes, for tests of routes, storage and bytes."""


def gqa(dim: int = 128, heads: int = 8) -> tuple[Stream, ...]:
    return Stream("k", heads, dim), Stream("v", heads, dim)


def model_spec(
    *groups: LayerGroup, owner: tuple[int, ...] | None = None, context: int = 32768, weights: int = 8 * GIB
) -> ModelSpec:
    layers = max(max(group.layers) for group in groups) + 1
    return ModelSpec("m", "test", groups, owner or tuple(range(layers)), context, 151936, 4096, weights)


def mha(layers: int = 36, dim: int = 128, **options: Any) -> LayerGroup:
    return LayerGroup("full", "mha", gqa(dim), tuple(range(layers)), 32, **options)


QWEN3_8B = model_spec(mha())
HEAD_80 = model_spec(mha(32, 80))
HEAD_72 = model_spec(mha(32, 72))
DEEPSEEK_V3 = model_spec(
    LayerGroup("latent", "mla", (Stream("latent", 1, 576, rope=64),), tuple(range(61)), 128)
)
DEEPSEEK_V32 = model_spec(
    LayerGroup(
        "sparse", "dsa", (Stream("latent", 1, 576, rope=64), Stream("index_k", 1, 128)), tuple(range(61)), 128
    )
)
GPT_OSS = model_spec(
    LayerGroup("window", "mha", gqa(64), tuple(range(0, 24, 2)), 64, window=128, sinks=True),
    LayerGroup("full", "mha", gqa(64), tuple(range(1, 24, 2)), 64, sinks=True),
)
GEMMA2 = model_spec(
    LayerGroup("window", "mha", gqa(256), tuple(range(0, 42, 2)), 16, window=4096, softcap=True),
    LayerGroup("full", "mha", gqa(256), tuple(range(1, 42, 2)), 16, softcap=True),
)
SHARED_KV = model_spec(mha(4), owner=(0, 1, 1, 0))

SHAPES = {
    "qwen3-8b": QWEN3_8B, "head-80": HEAD_80, "deepseek-v3": DEEPSEEK_V3, "deepseek-v3.2": DEEPSEEK_V32,
    "gpt-oss": GPT_OSS, "gemma2": GEMMA2, "shared-kv": SHARED_KV,
}  # fmt: skip


def dense(
    layers: int,
    q_heads: int,
    kv_heads: int,
    dim: int,
    gib: int,
    window: int | None = None,
    every: int = 0,
    **options: Any,
) -> ModelSpec:
    """Layers of heads, with a window or without; with `every`, each every-th looks at all tokens, the others at a window."""
    streams = gqa(dim, kv_heads)
    if not every:
        group = LayerGroup("full", "mha", streams, tuple(range(layers)), q_heads, window=window, **options)
        return model_spec(group, weights=gib * GIB)
    full = tuple(range(every - 1, layers, every))
    rest = tuple(layer for layer in range(layers) if layer not in full)
    return model_spec(
        LayerGroup("window", "mha", streams, rest, q_heads, window=window, **options),
        LayerGroup("full", "mha", streams, full, q_heads, **options),
        weights=gib * GIB,
    )  # fmt: skip


def latent(layers: int, q_heads: int, gib: int, rank: int = 512, rope: int = 64, top_k: int = 0) -> ModelSpec:
    """Layers of latents; with `top_k`, of sparse attention with index keys."""
    streams: tuple[Stream, ...] = (Stream("latent", 1, rank + rope, rope=rope),)
    streams += (Stream("index_k", 1, 128, rope=64),) if top_k else ()
    kind = "dsa" if top_k else "mla"
    group = LayerGroup("latent", kind, streams, tuple(range(layers)), q_heads, top_k=top_k)
    return model_spec(group, weights=gib * GIB)


MODELS = {
    "llama-3.1-8b": dense(32, 32, 8, 128, 15),
    "qwen3-8b": dense(36, 32, 8, 128, 15),
    "qwen3-235b-a22b": dense(94, 64, 4, 128, 438),
    "gemma-2-9b": dense(42, 16, 8, 256, 17, window=4096, every=2, softcap=True),
    "gemma-3-12b": dense(48, 16, 8, 256, 22, window=1024, every=6),
    "gpt-oss-120b": dense(36, 64, 8, 64, 217, window=128, every=2, sinks=True),
    "phi-3-mini-4k": dense(32, 32, 32, 96, 7, window=2047),
    "phi-2": dense(32, 32, 32, 80, 5),
    "deepseek-v2-lite": latent(27, 16, 29),
    "deepseek-v3": latent(61, 128, 1250),
    "deepseek-v3.2": latent(61, 128, 1251, top_k=2048),
    "glm-5": latent(78, 64, 1385, top_k=2048),
    "minicpm3-4b": latent(62, 40, 8, rank=256, rope=32),
    "mistral-small-4": latent(36, 32, 222, rank=256),
}
"""Published models, as models/observe.py sees them; weights in GiB of 16 bits."""


def parse_command(text: str) -> tuple[Config, Hardware, bool]:
    """`nibble plan MODEL ...` -> config, hardware, and whether `--declared` was given."""
    program, verb, model, *words = shlex.split(text)
    assert (program, verb) == ("nibble", "plan")
    known = {"--" + option.name.replace("_", "-"): option for option in fields(Config)}
    values: dict[str, Any] = {}
    gpu, declared = "", False
    queue = iter(words)
    for word in queue:
        name, _, inline = word.partition("=")
        if name == "--declared":
            declared = True
        elif name == "--gpu":
            gpu = next(queue)
        elif isinstance(default_of(known[name.replace("--no-", "--")]), bool):
            values[known[name.replace("--no-", "--")].name] = not name.startswith("--no-")
        else:
            value = inline or next(queue)
            numeric = "int" in str(known[name].type)
            values[known[name].name] = int(value) if numeric else value
    return Config(model=model, **values), lookup_gpu(gpu) if gpu else probe("cpu"), declared


def memory_planner(config: Config, model: ModelSpec, machine: Hardware, plan: Plan) -> MemoryPlanner:
    return MemoryPlanner(CacheSpec.from_config(config), model, machine, plan)


def memory_plan(config: Config, model: ModelSpec, machine: Hardware, plan: Plan) -> MemoryPlan:
    return memory_planner(config, model, machine, plan).plan()

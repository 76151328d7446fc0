"""Shapes of models, and the way back from a printed command to a config, for tests of plans.

Owns made-up geometries of real proportions. Nothing here loads a model.
"""

from __future__ import annotations

import shlex
from dataclasses import fields
from typing import Any

from nibble.config import Config, default_of
from nibble.geometry import Geometry, LayerGroup, Stream
from nibble.hardware import GIB, Hardware, named, probe


def gqa(dim: int = 128) -> tuple[Stream, ...]:
    return Stream("k", 8, dim), Stream("v", 8, dim)


def geometry(
    *groups: LayerGroup, owner: tuple[int, ...] | None = None, context: int = 32768, weights: int = 8 * GIB
) -> Geometry:
    layers = max(max(group.layers) for group in groups) + 1
    return Geometry("m", "test", groups, owner or tuple(range(layers)), context, 151936, 4096, weights)


def mha(layers: int = 36, dim: int = 128, **options: Any) -> LayerGroup:
    return LayerGroup("full", "mha", gqa(dim), tuple(range(layers)), 32, **options)


QWEN3_8B = geometry(mha())
HEAD_80 = geometry(mha(32, 80))
HEAD_72 = geometry(mha(32, 72))
DEEPSEEK_V3 = geometry(
    LayerGroup("latent", "mla", (Stream("latent", 1, 576, rope=64),), tuple(range(61)), 128)
)
DEEPSEEK_V32 = geometry(
    LayerGroup(
        "sparse", "dsa", (Stream("latent", 1, 576, rope=64), Stream("index_k", 1, 128)), tuple(range(61)), 128
    )
)
GPT_OSS = geometry(
    LayerGroup("window", "mha", gqa(64), tuple(range(0, 24, 2)), 64, window=128, sinks=True),
    LayerGroup("full", "mha", gqa(64), tuple(range(1, 24, 2)), 64, sinks=True),
)
GEMMA2 = geometry(
    LayerGroup("window", "mha", gqa(256), tuple(range(0, 42, 2)), 16, window=4096, softcap=True),
    LayerGroup("full", "mha", gqa(256), tuple(range(1, 42, 2)), 16, softcap=True),
)
SHARED_KV = geometry(mha(4), owner=(0, 1, 1, 0))

SHAPES = {
    "qwen3-8b": QWEN3_8B, "head-80": HEAD_80, "deepseek-v3": DEEPSEEK_V3, "deepseek-v3.2": DEEPSEEK_V32,
    "gpt-oss": GPT_OSS, "gemma2": GEMMA2, "shared-kv": SHARED_KV,
}  # fmt: skip


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
    return Config(model=model, **values), named(gpu) if gpu else probe("cpu"), declared

"""What a plain 4-bit scheme stores: byte for byte what other engines append for the same keys and values.

The definition is that of formats (tests/properties/test_formats.py holds it against the formulas and written-out bytes).
Keys and values are those that Transformers' own model computes over the same decoded bytes.

Shape suffixes: T tokens, H heads, D values of a head.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_invariance import PROMPT, measured
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

from nibble import LLM, formats
from nibble.attention.planner.defaults import PLAIN
from nibble.config import Config
from nibble.formats import KVFormat
from planning import parse_command
from tiny import save_tiny

ANSWER = 6
ROUNDING = 0.005
"""The largest part of bytes that may differ between two ways to compute the same keys."""
Streams = dict[str, Tensor]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random model and its scales."""
    return measured(save_tiny(tmp_path_factory.mktemp("tiny")))


def plain(kv_format: str) -> dict[str, Any]:
    """The options that a plan says make a scheme plain."""
    config, _, _ = parse_command(f"nibble plan m --kv-format {kv_format} {PLAIN}")
    changed = {name: getattr(config, name) for name in ("kv_encoder", "kv_transforms", "kv_window")}
    assert changed == {"kv_encoder": "amax", "kv_transforms": "none", "kv_window": 0}
    assert all(value != getattr(Config(model="m"), name) for name, value in changed.items())
    return {"kv_format": kv_format, **changed}


def store(
    model: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[list[int], dict[int, Streams], dict[int, dict[str, tuple[Tensor, ...]]]]:
    """Answer the prompt -> the tokens that are stored, and by layer what was to be stored and what the pool holds."""
    path, scales = model
    llm = LLM(
        str(path), kv_scales=str(scales), kv_memory="8MiB", max_running=2, page_size=16, token_budget=40,
        **options,
    )  # fmt: skip
    pool = llm.engine.runner.pool
    written: dict[int, list[tuple[Streams, Tensor]]] = {}
    write = pool.write

    def spy(layer: int, streams: Streams, slot_mapping_T: Tensor, *exact: Tensor | None) -> None:
        rows = {name: x_THD[: len(slot_mapping_T)].clone() for name, x_THD in streams.items()}
        written.setdefault(layer, []).append((rows, slot_mapping_T.clone()))
        write(layer, streams, slot_mapping_T, *exact)

    with monkeypatch.context() as patch:
        patch.setattr(pool, "write", spy)
        (output,) = llm.generate([PROMPT], max_tokens=ANSWER, temperature=0, ignore_eos=True)
    # The last token of an answer is never stored.
    ids = [*PROMPT, *output.completions[0].token_ids[:-1]]
    given, held = dict[int, Streams](), dict[int, dict[str, tuple[Tensor, ...]]]()
    for layer, calls in written.items():
        slots_T = torch.cat([slots_T for _, slots_T in calls])
        # They are in the order of positions; behind them is what was computed beyond the end of the answer.
        slots_T = slots_T[: len(ids)]
        assert len(slots_T.unique()) == len(ids) and (slots_T >= 0).all()
        view = pool.view(layer)
        given[layer] = {name: torch.cat([rows[name] for rows, _ in calls])[: len(ids)] for name in "kv"}
        held[layer] = {
            name: tuple(_at(plane, slots_T, entry.packing.heads_first) for plane in entry.planes)
            for name, entry in view.streams.items()
        }
    return ids, given, held


def _at(plane: Tensor, slots_T: Tensor, heads_first: bool) -> Tensor:
    """The bytes of tokens in pages [page, head, token, ...] or [page, token, head, ...]."""
    pages = plane.view(torch.uint8).transpose(1, 2) if heads_first else plane.view(torch.uint8)
    return torch.stack([pages[slot // 16, slot % 16] for slot in slots_T.tolist()])


def codec_and_scales(kv_format: str, scales: Path) -> tuple[KVFormat, dict[int, dict[str, Tensor]]]:
    """The format as other engines append it, and the global scales that belong to it: amax / 2688 for NVFP4."""
    fmt = formats.get(kv_format).encoded_by("amax")
    layers = json.loads(scales.read_text())["layers"]
    divisor = {"nvfp4": 2688.0, "mxfp4": None}[kv_format]
    return fmt, {
        int(layer): {name: torch.tensor(facts["amax"][name] / divisor if divisor else 1.0) for name in "kv"}
        for layer, facts in layers.items()
    }


def keys_and_values(
    path: Path, ids: list[int], fmt: KVFormat, scales: dict[int, dict[str, Tensor]]
) -> dict[int, Streams]:
    """What Transformers' own model computes of the tokens [T, H, D], where each layer attends over decoded bytes."""
    found: dict[int, Streams] = {}

    def attend(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **options: Any
    ) -> tuple[Tensor, None]:
        layer, group = module.layer_idx, q.shape[1] // k.shape[1]
        found[layer] = {name: x[0].transpose(0, 1).contiguous() for name, x in (("k", k), ("v", v))}
        k_HTD, v_HTD = (
            fmt.decode(fmt.encode(x_THD, scales[layer][name]), scales[layer][name])
            .transpose(0, 1)
            .repeat_interleave(group, 0)
            for name, x_THD in found[layer].items()
        )
        out_HTD = torch.nn.functional.scaled_dot_product_attention(
            q[0], k_HTD, v_HTD, is_causal=True, scale=scaling
        )
        return out_HTD.transpose(0, 1)[None], None

    AttentionInterface.register("over_plain_bytes", attend)
    model = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="over_plain_bytes", dtype=torch.float32
    )
    with torch.inference_mode():
        model(torch.tensor([ids]))
    return found


def share(held: tuple[Tensor, ...], planes: tuple[Tensor, ...]) -> float:
    """The part of the bytes that differ, of the plane where it is larger."""
    return max(float((a != b.view(torch.uint8)).float().mean()) for a, b in zip(held, planes, strict=True))


@pytest.mark.parametrize("kv_format", ["nvfp4", "mxfp4"])
def test_the_pool_holds_the_bytes_of_other_engines(
    kv_format: str, tiny: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, given, held = store(tiny, monkeypatch, **plain(kv_format))
    fmt, scales = codec_and_scales(kv_format, tiny[1])
    expected = keys_and_values(tiny[0], ids, fmt, scales)
    assert given.keys() == held.keys() == expected.keys() and len(expected) > 1
    for layer, streams in expected.items():
        for name, x_THD in streams.items():
            scale = scales[layer][name]
            assert share(held[layer][name], fmt.encode(given[layer][name], scale)) == 0, (layer, name)
            # Computed in another order, a value may differ in its last bits, which seldom turns a code.
            assert share(held[layer][name], fmt.encode(x_THD, scale)) < ROUNDING, (layer, name)


@pytest.mark.parametrize("option", ["kv_encoder", "kv_transforms", "kv_window"])
def test_each_option_is_needed(option: str, tiny: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the pool has other keys, and the test above would say so."""
    options = plain("nvfp4")
    del options[option]
    ids, _, held = store(tiny, monkeypatch, **options)
    fmt, scales = codec_and_scales("nvfp4", tiny[1])
    expected = keys_and_values(tiny[0], ids, fmt, scales)
    # A window changes what layers above the first are given.
    last = max(expected)
    assert share(held[last]["k"], fmt.encode(expected[last]["k"], scales[last]["k"])) > 5 * ROUNDING

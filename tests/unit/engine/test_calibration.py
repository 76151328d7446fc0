"""Measured scales: usual tokens keep their precision whatever a few sinks do, and broken weights are named."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nibble import LLM
from nibble.cache.layout import CacheLayout, LayerLayout, StreamLayout
from nibble.cache.pool import PagedPool
from nibble.cache.scales import KVScales, LayerScales, StreamScale
from nibble.engine import calibration
from nibble.engine.calibration import fit
from nibble.errors import ScaleError, WeightError
from nibble.model_spec import Stream
from tiny import save_model, save_tiny, save_tokenizer

TOKENS, HEADS, DIM, PAGE = 2048, 2, 64, 16
SINKS = [0, 700]
FORMATS = ("fp8_e4m3", "nvfp4")


def normal(seed: int = 0, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randn(tokens, HEADS, DIM, generator=torch.Generator().manual_seed(seed))


def with_sinks(k_THD: torch.Tensor, times: float) -> torch.Tensor:
    planted = k_THD.clone()
    planted[SINKS] *= times
    return planted


def usual(x_THD: torch.Tensor) -> torch.Tensor:
    """The same without the sinks."""
    keep = torch.ones(len(x_THD), dtype=torch.bool)
    keep[SINKS] = False
    return x_THD[keep]


def stored(kv_format: str, k_THD: torch.Tensor, v_THD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a pool whose scales were fitted to K and V gives back of them."""
    streams = tuple(StreamLayout(Stream(name, HEADS, DIM), kv_format) for name in ("k", "v"))
    layout = CacheLayout((LayerLayout(0, streams),), PAGE, "nhd")
    pair = {"k": k_THD, "v": v_THD}
    scales = {name: StreamScale(fit(x_THD).limit, 1.0) for name, x_THD in pair.items()}
    pages = math.ceil(len(k_THD) / PAGE)
    pool = PagedPool(layout, pages, KVScales("test", {0: LayerScales(scales)}), "cpu")
    pool.write(0, pair, torch.arange(len(k_THD)))
    table = torch.arange(pages)[None]
    k, v = (pool.view(0).streams[name].gather_reference(table)[0, : len(k_THD)] for name in pair)
    return k, v


def weights(q_THD: torch.Tensor, k_THD: torch.Tensor) -> torch.Tensor:
    return (torch.einsum("qhd,thd->hqt", q_THD, k_THD) / DIM**0.5).softmax(-1)


def attention(q_THD: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> torch.Tensor:
    return torch.einsum("hqt,thd->qhd", weights(q_THD, k_THD), v_THD)


def attention_error(kv_format: str, k_THD: torch.Tensor, v_THD: torch.Tensor) -> float:
    """||o - o_exact|| / ||o_exact|| over all tokens but the sinks."""
    q_THD = normal(9, 64)
    exact = attention(q_THD, usual(k_THD), usual(v_THD))
    answer = attention(q_THD, *map(usual, stored(kv_format, k_THD, v_THD)))
    return float((answer - exact).norm() / exact.norm())


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("times", [1e3, 1e5])
@pytest.mark.parametrize("seed", range(3))
def test_usual_tokens_keep_their_precision_beside_sinks(kv_format: str, times: float, seed: int) -> None:
    k_THD, v_THD = normal(seed), normal(seed + 100)
    without = attention_error(kv_format, with_sinks(k_THD, 0.0), v_THD)
    assert attention_error(kv_format, with_sinks(k_THD, times), v_THD) == pytest.approx(without, rel=0.02)


@pytest.mark.parametrize("kv_format", FORMATS)
@pytest.mark.parametrize("times", [1e3, 1e5])
def test_channels_of_different_size_keep_theirs_too(kv_format: str, times: float) -> None:
    """Keys of real models have a few large channels, and heads that differ."""
    size_HD = normal(7, 1)[0].exp()
    k_THD, v_THD = normal() * size_HD / size_HD.square().mean().sqrt(), normal(1)
    without = attention_error(kv_format, with_sinks(k_THD, 0.0), v_THD)
    assert attention_error(kv_format, with_sinks(k_THD, times), v_THD) == pytest.approx(without, rel=0.02)


@pytest.mark.parametrize("kv_format", FORMATS)
def test_sinks_of_1000_times_the_rest_win_attention_as_before(kv_format: str) -> None:
    k_THD, q_THD = with_sinks(normal(), 1e3), normal(9, 64)
    fitted = fit(k_THD)
    assert fitted.num_clipped == 0 and fitted.limit >= fitted.largest
    k, _ = stored(kv_format, k_THD, normal(1))
    # By their score a sink takes all of a query's weight, or nothing; a score near zero may go either way.
    scores_HQ2 = torch.einsum("qhd,thd->hqt", q_THD, k_THD[SINKS])
    decided = (scores_HQ2.abs() > 0.3 * scores_HQ2.std()).all(-1)
    before, after = ((weights(q_THD, x)[..., SINKS].sum(-1) > 0.5)[decided] for x in (k_THD, k))
    assert 10 < int(before.sum()) < len(before) - 10  # both kinds of queries are here
    assert torch.equal(before, after)


def test_sinks_of_100000_times_the_rest_are_clipped_in_their_own_direction() -> None:
    k_THD = with_sinks(normal(), 1e5)
    fitted = fit(k_THD)
    assert fitted.num_clipped == 2 and fitted.limit < fitted.largest / 10
    assert fitted.limit > 1000 * fitted.usual
    for kv_format in FORMATS:
        sinks = stored(kv_format, k_THD, normal(1))[0][SINKS]
        assert float(sinks.abs().max()) == pytest.approx(fitted.limit)
        assert torch.equal(sinks.sign()[sinks != 0], k_THD[SINKS].sign()[sinks != 0])


def test_without_outliers_the_largest_value_decides() -> None:
    k_THD = normal()
    assert fit(k_THD).limit == pytest.approx(calibration.HEADROOM * float(k_THD.abs().max()))
    heavy = (
        k_THD * (1 + 9 * (torch.arange(TOKENS) % 50 == 0))[:, None, None]
    )  # large, but not out of all proportion
    assert fit(heavy).limit == pytest.approx(calibration.HEADROOM * float(heavy.abs().max()))


def test_zeros_and_tokens_of_zeros_have_a_scale() -> None:
    assert fit(torch.zeros(TOKENS, HEADS, DIM)).limit > 0
    mostly = torch.zeros(TOKENS, HEADS, DIM)
    mostly[:3] = 5.0
    assert fit(mostly).limit >= 5.0 and fit(mostly).num_clipped == 0


# Of a model

TEXT = "sixteen letters with one attention sink among them, to be clipped! " * 8
CLEAN = 63
"""A hidden channel that the model leaves alone."""


def plant(folder: Path, times: float) -> Path:
    """A model whose K of one token is `times` that of the rest, in layer 1: by a hidden channel of that token alone."""
    save_tokenizer(save_model(folder, "llama"))
    tensors = load_file(folder / "model.safetensors")
    for name, weight in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[CLEAN] = 0
        if name.endswith(
            ("q_proj.weight", "k_proj.weight", "v_proj.weight", "up_proj.weight", "gate_proj.weight")
        ):
            weight[:, CLEAN] = 0
    tensors["model.embed_tokens.weight"][:, CLEAN] = 0
    from nibble.engine.tokenizer import Tokenizer

    (sink,) = Tokenizer(str(folder)).encode("!")
    tensors["model.embed_tokens.weight"][sink, CLEAN] = 1.0
    tensors["model.layers.1.self_attn.k_proj.weight"][:, CLEAN] = times
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def served(folder: Path, kv_format: str = "nvfp4", **options: Any) -> LLM:
    return LLM(str(folder), kv_format=kv_format, kv_memory="4MiB", max_context=512, **options)


def test_a_sink_of_a_model_is_clipped_with_figures(tmp_path: Path) -> None:
    llm = served(plant(tmp_path, 1e6), calibrate=[TEXT])
    notes = [note for note in llm.engine.startup.notes if "clipped" in note]
    assert len(notes) == 1
    assert notes[0].startswith("K of layer 1 reaches ") and f" in 8 of {len(TEXT)} tokens, " in notes[0]
    assert "90% of the tokens stay below" in notes[0] and "clipped to" in notes[0]
    scales = llm.measure_scales([TEXT], save=tmp_path / "scales.json")
    assert scales.notes == tuple(notes)
    again = served(tmp_path, kv_scales=str(tmp_path / "scales.json"))
    assert notes[0] in again.engine.startup.notes
    k = [scales.layers[layer].streams["k"] for layer in range(3)]
    assert 10 < k[1].value / k[0].value < 1e4  # type: ignore[operator]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.layers.1.self_attn.k_proj.weight", math.nan, "layer 1's K is NaN: .* contain NaN in {}"),
        ("model.layers.2.self_attn.v_proj.weight", math.nan, "layer 2's V is NaN: .* contain NaN in {}"),
        ("model.layers.0.mlp.up_proj.weight", math.inf, "layer 1's K is NaN: .* contain infinity in {}"),
    ],
)
def test_broken_weights_are_named(tmp_path: Path, name: str, value: float, message: str) -> None:
    save_tiny(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name][3, 5] = value
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightError, match=message.format(name)):
        served(tmp_path)


def test_an_overflow_is_not_taken_for_broken_weights(tmp_path: Path) -> None:
    save_tokenizer(save_model(tmp_path, "llama"))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"] *= 1e38
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ScaleError, match=r"layer 1's K is .*overflows in float32; use another --dtype"):
        served(tmp_path)


def test_prompts_are_cut_to_the_context_and_to_the_most() -> None:
    pieces = calibration._cut([range(5), range(7), range(9)], 14, 4)
    assert [len(piece) for piece in pieces] == [4, 1, 4, 3, 2]


def test_the_text_that_comes_with_nibble_is_long_and_mixed() -> None:
    (text,) = calibration.builtin_texts()
    assert len(text) > 8000
    for part in ("def median", "春天", "SELECT", "User:", '{"order"', "#include"):
        assert part in text

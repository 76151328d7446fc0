"""Encoders of block scales: the definition in whole numbers, never more error than amax, and what has none to win."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from nibble import formats
from nibble.formats import KVFormat
from nibble.formats.nvfp4 import OFFSETS
from nibble.model_spec import LATENT, LATENTS, Stream

GRID = [Fraction(x) for x in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
E4M3 = [Fraction(x) for x in torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).tolist()]
FP4 = ("nvfp4", "mxfp4", "fp4_mx16")
ROUNDING = 1.01
"""How much more the error may be, because it is compared in units of a small part of a scale."""

blocks = hnp.arrays(
    "float32",
    st.tuples(st.just(5), st.just(1), st.just(32)),
    elements=st.floats(-50, 50, width=32) | st.sampled_from([0.0, -0.0, 1e-30, 0.25, 1.75, 6.0, 2.0**-140]),
)


def errors(fmt: KVFormat, x_THD: Tensor, scale: Tensor) -> Tensor:
    """The squared error of each block, float64."""
    error = fmt.decode(fmt.encode(x_THD, scale), scale).double() - x_THD.double()
    return error.square().unflatten(-1, (-1, fmt.block)).sum(-1)


def units(x: Tensor, factor: Tensor) -> list[int]:
    """Magnitudes in whole units, rounded as float32 does."""
    return [min(round(v), 6144) for v in (x.float().abs() * factor.float()).tolist()]


def squared(values: list[int], step: Fraction) -> Fraction:
    """The error of magnitudes under a scale, by exhaustive search."""
    return sum((min((value - step * code) ** 2 for code in GRID) for value in values), Fraction())


def sweep_reference(block: Tensor, scale: Tensor, code: int) -> int:
    """The code that `sweep` stores for a block of NVFP4, in exact arithmetic, given the one of amax."""
    exponent = max(code >> 3, 1)
    candidates = [code] if code == 126 else [min(max(code + offset, 0), 126) for offset in OFFSETS]
    values = units(block, 2.0 ** (16 - exponent) / scale)
    found = [squared(values, E4M3[c] * 2**16 / 2**exponent) for c in candidates]
    return candidates[found.index(min(found))]


@pytest.mark.slow
@given(x=blocks, scale=st.sampled_from([1.0, 0.037, 2.5e-3, 7e-6]))
def test_nvfp4s_sweep_is_exact(x: object, scale: float) -> None:
    x_THD, one = torch.from_numpy(x), torch.tensor(scale)
    fmt = formats.get("nvfp4")
    _, amax = fmt.encoded_by("amax").encode(x_THD, one)
    _, swept = fmt.encode(x_THD, one)
    codes = zip(
        amax.view(torch.uint8).flatten().tolist(), swept.view(torch.uint8).flatten().tolist(), strict=True
    )
    for block, (code, found) in zip(x_THD.unflatten(-1, (-1, 16)).flatten(0, -2), codes, strict=True):
        assert found == sweep_reference(block, one, code)


@pytest.mark.parametrize("name", ["mxfp4", "fp4_mx16"])
@given(x=blocks)
def test_a_sweep_of_powers_of_two_is_exact(name: str, x: object) -> None:
    fmt, x_THD = formats.get(name), torch.from_numpy(x)
    stored = fmt.encode(x_THD, torch.tensor(1.0))[1].flatten().tolist()
    for block, found in zip(x_THD.unflatten(-1, (-1, fmt.block)).flatten(0, -2), stored, strict=True):
        amax = float(block.abs().max())
        low = max(math.frexp(amax)[1] - 3, -127) if amax else -127
        values = units(block.ldexp(torch.tensor(-low)), torch.tensor(256.0))
        best = squared(values, Fraction(512)) < squared(values, Fraction(256))
        assert found - 127 == low + best


@pytest.mark.parametrize("name", FP4)
@given(x=blocks, scale=st.sampled_from([1.0, 0.037, 2.5e-3, 7e-6]))
def test_the_error_is_never_more_than_amaxs(name: str, x: object, scale: float) -> None:
    fmt, x_THD, one = formats.get(name), torch.from_numpy(x), torch.tensor(scale)
    before = errors(fmt.encoded_by("amax"), x_THD, one)
    # What is rounded to units is off by half of one, of 512 and more in a scale.
    slack = 16 * (x_THD.double().unflatten(-1, (-1, fmt.block)).abs().amax(-1) / 3000) ** 2 + 1e-80
    for encoder in fmt.encoders:
        assert (errors(fmt.encoded_by(encoder), x_THD, one) <= before * ROUNDING + slack).all(), encoder


@pytest.mark.parametrize("name, gain", [("nvfp4", 0.76), ("mxfp4", 0.95), ("fp4_mx16", 0.95)])
def test_a_sweep_gains_on_usual_values(name: str, gain: float) -> None:
    fmt, x = formats.get(name), torch.randn(512, 2, 64, generator=torch.Generator().manual_seed(1))
    one = torch.tensor(0.003)
    before = errors(fmt.encoded_by("amax"), x, one)
    assert errors(fmt, x, one).sum() < gain * before.sum()
    if "4over6" in fmt.encoders:
        between = errors(fmt.encoded_by("4over6"), x, one).sum()
        assert errors(fmt, x, one).sum() < between < before.sum()


def test_four_over_six_takes_one_of_two() -> None:
    fmt, one = formats.get("nvfp4"), torch.tensor(1.0)
    x = torch.zeros(2, 1, 16)
    # 4, 3, 2 and 1 are exact with 4 as the largest, 6, 4, 3 and 2 with 6.
    x[0, 0, :4], x[1, 0, :4] = torch.tensor([12.0, 9, 6, 3]), torch.tensor([12.0, 8, 6, 4])
    for encoder in ("4over6", "sweep"):
        planes = fmt.encoded_by(encoder).encode(x, one)
        assert planes[1].float().flatten().tolist() == [3.0, 2.0]
        assert torch.equal(fmt.decode(planes, one), x)


@pytest.mark.parametrize("encoder", ["sweep", "4over6"])
def test_what_has_nothing_to_win_is_as_amax_has_it(encoder: str) -> None:
    """Zeros of both signs, NaN, infinities, and blocks beyond the largest scale."""
    fmt = formats.get("nvfp4")
    x = torch.randn(5, 1, 16, generator=torch.Generator().manual_seed(2))
    x[0], x[1, 0, 3], x[2, 0, 3], x[3] = torch.tensor([0.0, -0.0] * 8), math.nan, -math.inf, x[3] * 1e6
    x[4, 0, 5] = 448 * 6 * 1.2
    for a, b in zip(
        fmt.encoded_by("amax").encode(x, torch.tensor(1.0)),
        fmt.encoded_by(encoder).encode(x, torch.tensor(1.0)),
        strict=True,
    ):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_a_block_below_the_least_scale_is_kept() -> None:
    x = torch.tensor([2.0**-10, -(2.0**-9), 0.0, 2.0**-9] * 4).view(1, 1, 16)
    fmt, one = formats.get("nvfp4"), torch.tensor(1.0)
    assert fmt.encoded_by("amax").decode(fmt.encoded_by("amax").encode(x, one), one).count_nonzero() == 0
    assert torch.equal(fmt.decode(fmt.encode(x, one), one), x)


@pytest.mark.parametrize("scale", [2.0**-100, 2.0**-60, 2.0**60, 2.0**100])
@pytest.mark.parametrize("name", FP4)
def test_any_global_scale(name: str, scale: float) -> None:
    fmt, one = formats.get(name), torch.tensor(scale)
    x = (torch.randn(3, 1, 64, generator=torch.Generator().manual_seed(3)) * scale).clamp(-3e38, 3e38)
    found = fmt.decode(fmt.encode(x, one), one)
    assert found.isfinite().all() and (found - x).double().norm() <= 0.2 * x.double().norm()
    assert not fmt.decode(fmt.encode(torch.zeros(1, 1, 64), one), one).any()


def test_the_proper_part_of_a_latent_is_encoded_alike() -> None:
    stream, one = LATENTS[0], torch.tensor(0.004)
    x = torch.randn(9, 1, 576, generator=torch.Generator().manual_seed(4))
    for encoder in formats.get("nvfp4").encoders:
        plain = formats.get("nvfp4").encoded_by(encoder).encode(x[..., :512], one)
        latent = formats.get("nvfp4_ds_mla").encoded_by(encoder).bound(stream)
        assert latent.encoder == encoder
        for a, b in zip(plain, latent.encode(x, one), strict=False):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_a_format_keeps_its_encoder_where_it_has_no_such_one() -> None:
    fp8, nvfp4 = formats.get("fp8_e4m3"), formats.get("nvfp4")
    assert fp8.encoded_by("amax") is fp8 and nvfp4.encoded_by("") is nvfp4
    assert nvfp4.encoder == "sweep" and nvfp4.encoded_by("amax").encoder == "amax"
    bound = formats.get("nvfp4_ds_mla").encoded_by("amax").bound(Stream(LATENT, 1, 576, 64))
    assert (bound.encoder, formats.get("nvfp4_ds_mla").encoder) == ("amax", "sweep")


def test_pieces_do_not_change_the_winner(monkeypatch: pytest.MonkeyPatch) -> None:
    fmt, x = formats.get("nvfp4"), torch.randn(50, 2, 64, generator=torch.Generator().manual_seed(5))
    whole = fmt.encode(x, torch.tensor(0.01))
    monkeypatch.setattr("nibble.formats.base._PIECE", 100)
    for a, b in zip(whole, fmt.encode(x, torch.tensor(0.01)), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))

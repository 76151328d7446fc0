"""Properties of every format: shapes and bytes, error bounds, saturation, zeros, NaN, and bytes of the ecosystem."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nibble import formats
from nibble.formats import KVFormat, scheme, transforms
from nibble.formats.base import pack_e2m1
from nibble.model_spec import HEADS, Stream

ALL = [
    formats.get(name).encoded_by(encoder)
    for name in scheme.fitting(*HEADS)
    if name in formats.names()
    for encoder in formats.get(name).encoders
]
QUANTISED = [fmt for fmt in ALL if fmt.plain is None]
STEP = {"fp8_e4m3": 2**-4, "fp8_e5m2": 2**-3, "bf16": 2**-8, "fp16": 2**-11, "fp32": 0.0}
"""Largest relative rounding error of a normal number."""

ids = {"ids": lambda fmt: "_".join(filter(None, (fmt.name, fmt.encoder)))}
arrays = hnp.arrays(
    "float32",
    st.tuples(st.integers(1, 4), st.integers(1, 3), st.sampled_from([32, 64, 96])),
    elements=st.floats(-1e4, 1e4, width=32) | st.sampled_from([0.0, -0.0, 1e-30, -1e-30, 2.0**-140]),
)


def recipe(name: str) -> KVFormat:
    """The format as other engines append it."""
    return formats.get(name).encoded_by("amax")


def scale_for(fmt: KVFormat, x: torch.Tensor) -> torch.Tensor:
    amax = float(x.abs().nan_to_num(0, 0, 0).max()) or 1.0
    return torch.tensor(max(amax / fmt.max_value, 1e-30) if fmt.max_value else 1.0)


def roundtrip(fmt: KVFormat, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    scale = scale_for(fmt, x) if scale is None else scale
    return fmt.decode(fmt.encode(x, scale), scale)


@pytest.mark.parametrize("fmt", ALL, **ids)
@given(x=arrays)
def test_planes_are_what_the_layout_says(fmt: KVFormat, x: object) -> None:
    x_THD = torch.from_numpy(x)
    before = x_THD.clone()
    stream = Stream("k", x_THD.shape[1], x_THD.shape[2])
    planes = fmt.encode(x_THD, scale_for(fmt, x_THD))
    for plane, spec in zip(planes, fmt.planes(stream), strict=True):
        assert plane.shape == (len(x_THD), *spec.shape) and plane.dtype == spec.torch_dtype
    assert sum(plane[0].nbytes for plane in planes) == fmt.bytes_per_token(stream)
    assert torch.equal(x_THD, before), "encode wrote to its input"


@pytest.mark.parametrize("fmt", ALL, **ids)
@given(x=arrays)
def test_decoding_is_stable(fmt: KVFormat, x: object) -> None:
    """What was decoded encodes to values that are as near to it as the format allows: no drift by re-encoding."""
    x_THD = torch.from_numpy(x)
    scale = scale_for(fmt, x_THD)
    once = roundtrip(fmt, x_THD, scale)
    assert once.isfinite().all() or fmt.plain
    twice = roundtrip(fmt, once, scale)
    block = (
        once.unflatten(-1, (-1, fmt.block))
        .abs()
        .amax(-1, keepdim=True)
        .expand(*once.shape[:-1], -1, fmt.block)
    )
    assert ((twice - once).abs() <= block.flatten(-2) / 3 + 1e-6).all()


@pytest.mark.parametrize("fmt", QUANTISED, **ids)
@given(x=arrays)
def test_error_is_bounded(fmt: KVFormat, x: object) -> None:
    """FP8: half a step of the value. FP4: at most a sixth of the block's largest value, and for OCP's floor rule a
    quarter of it, where the largest value saturates."""
    x_THD = torch.from_numpy(x)
    scale = scale_for(fmt, x_THD)
    error = (roundtrip(fmt, x_THD, scale) - x_THD).abs()
    if fmt.name in STEP:
        smallest = scale * torch.finfo(fmt.planes(Stream("k", 1, 32))[0].torch_dtype).smallest_normal
        assert (error <= (x_THD.abs() * STEP[fmt.name]).clamp(min=smallest) * 1.001).all()
        return
    block = x_THD.unflatten(-1, (-1, fmt.block)).abs().amax(-1, keepdim=True)
    bound = block * 0.26 + float(scale if fmt.needs_scale else 0) * 6 * 2**-9 + 6e-10
    assert (error.unflatten(-1, (-1, fmt.block)) <= bound).all()


@pytest.mark.parametrize("fmt", ALL, **ids)
def test_zeros_stay_zero(fmt: KVFormat) -> None:
    assert torch.equal(roundtrip(fmt, torch.zeros(2, 2, 64)), torch.zeros(2, 2, 64))


@pytest.mark.parametrize("fmt", ALL, **ids)
def test_zero_bytes_decode_to_zeros(fmt: KVFormat) -> None:
    """What the reference relies on where it fills in tokens that are not there."""
    planes = tuple(
        torch.zeros(3, *plane.shape, dtype=plane.torch_dtype) for plane in fmt.planes(Stream("k", 2, 64))
    )
    assert torch.equal(fmt.decode(planes, torch.tensor(0.37)), torch.zeros(3, 2, 64))


@pytest.mark.parametrize("fmt", QUANTISED, **ids)
def test_infinities_saturate(fmt: KVFormat) -> None:
    x = torch.randn(2, 2, 64, generator=torch.Generator().manual_seed(0))
    x[0, 0, 3], x[1, 1, 40] = math.inf, -math.inf
    y = roundtrip(fmt, x)
    assert y.isfinite().all() and y[0, 0, 3] >= 0.99 * x[x.isfinite()].max() and y[1, 1, 40] < -3


@pytest.mark.parametrize("fmt", ALL, **ids)
def test_nan_shows_and_stays_in_its_block(fmt: KVFormat) -> None:
    x = torch.randn(2, 2, 64, generator=torch.Generator().manual_seed(0))
    x[1, 0, 5] = math.nan
    y = roundtrip(fmt, x)
    assert y[1, 0, 5].isnan()
    y[1, 0, : fmt.block * (5 // fmt.block + 1)] = 0
    assert y.isfinite().all()


@pytest.mark.parametrize("fmt", ALL, **ids)
def test_an_outlier_harms_its_block_only(fmt: KVFormat) -> None:
    x = torch.randn(1, 2, 64, generator=torch.Generator().manual_seed(0))
    scale = torch.tensor(1000.0 / fmt.max_value if fmt.max_value else 1.0)
    quiet = roundtrip(fmt, x, scale)
    x[0, 1, 0] = 1000.0
    loud = roundtrip(fmt, x, scale)
    assert torch.equal(loud[0, 1, fmt.block :], quiet[0, 1, fmt.block :]) and torch.equal(
        loud[0, 0], quiet[0, 0]
    )
    assert abs(float(loud[0, 1, 0]) - 1000) <= 260


@pytest.mark.parametrize("fmt", [fmt for fmt in ALL if fmt.block > 1], **ids)
def test_odd_head_sizes_are_refused(fmt: KVFormat) -> None:
    reason = fmt.refuses(Stream("k", 2, 40)) or ""
    assert re.search(rf"{fmt.name} shares a scale among {fmt.block} .* heads of 40", reason)
    assert fmt.refuses(Stream("k", 2, 96)) is None


@pytest.mark.parametrize("fmt", ALL, **ids)
def test_scales_may_differ_by_head(fmt: KVFormat) -> None:
    x = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(0))
    per_head = torch.tensor([[0.01], [0.02]]) if fmt.needs_scale else torch.tensor(1.0)
    whole = roundtrip(fmt, x, per_head)
    for head in range(2):
        one = per_head[head, 0] if fmt.needs_scale else per_head
        assert torch.equal(whole[:, head], roundtrip(fmt, x[:, head : head + 1], one)[:, 0])


GOLDEN_BYTES = {  # K + V of one KV head at head_dim 128
    "fp32": 1024, "bf16": 512, "fp16": 512, "fp8_e4m3": 256, "fp8_e5m2": 256, "nvfp4": 144, "fp4_mx16": 144, "mxfp4": 136,
}  # fmt: skip


def test_bytes_per_token() -> None:
    assert {fmt.name: 2 * fmt.bytes_per_token(Stream("k", 1, 128)) for fmt in ALL} == GOLDEN_BYTES


def e2m1_reference(value: float, ties_away: bool) -> int:
    """The nearest code by exhaustive search; ties to the even code, or to the larger magnitude."""
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    distance = [abs(abs(value) - v) for v in values]
    best = [code for code, d in enumerate(distance) if d == min(distance)]
    return best[-1] if ties_away else next(c for c in best if c % 2 == 0) if len(best) > 1 else best[0]


@pytest.mark.parametrize("ties_away", [False, True], ids=["even", "away"])
def test_e2m1_rounds_as_an_exhaustive_search_does(ties_away: bool) -> None:
    values = [i / 64 for i in range(0, 64 * 8)] + [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    x = torch.tensor(values + [-v for v in values])
    x = torch.cat((x, x[: len(x) % 2]))
    packed = pack_e2m1(x, x < 0, ties_away)
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten().tolist()
    for value, code in zip(x.tolist(), codes, strict=True):
        assert code & 7 == e2m1_reference(value, ties_away), value
        assert bool(code & 8) == (value < 0)


def nvfp4_reference(block: list[float], scale: float) -> tuple[int, list[int]]:
    """NVFP4 of 16 values, value by value in float32, written from the formula."""
    f32 = lambda v: torch.tensor(v, dtype=torch.float32)  # noqa: E731
    amax = f32(max(abs(v) for v in block))
    stored = (amax / (f32(6.0) * f32(scale))).clamp(max=448).to(torch.float8_e4m3fn)
    inverse = f32(1.0) / (stored.float() * f32(scale)) if float(stored.float()) > 0 else f32(0.0)
    codes = []
    for value in block:
        scaled = f32(value) * inverse
        codes.append(
            e2m1_reference(float(scaled.abs().clamp(max=6)), False)
            | (8 if math.copysign(1, float(scaled)) < 0 else 0)
        )
    return int(stored.view(torch.uint8)), codes


@given(
    st.lists(st.floats(-300, 300, width=32), min_size=16, max_size=16), st.sampled_from([1.0, 0.037, 2.5e-3])
)
def test_nvfp4_bytes_follow_the_formula(block: list[float], scale: float) -> None:
    data, scales = recipe("nvfp4").encode(torch.tensor(block).view(1, 1, 16), torch.tensor(scale))
    stored, codes = nvfp4_reference(block, scale)
    assert int(scales.view(torch.uint8)) == stored
    assert torch.stack((data & 15, data >> 4), -1).flatten().tolist() == codes


def test_known_bytes() -> None:
    """A block written out by hand: what a kernel or a checkpoint tool of the ecosystem stores for it."""
    ramp = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 0.25])
    codes = bytes([0x10, 0x32, 0x54, 0x76, 0xA9, 0xCB, 0xED, 0x0F])
    data, scale = recipe("nvfp4").encode(ramp.view(1, 1, 16), torch.tensor(1.0))
    assert bytes(data.flatten().tolist()) == codes and int(scale.view(torch.uint8)) == 0x38  # 1.0 in E4M3
    data, scale = recipe("fp4_mx16").encode(ramp.view(1, 1, 16), torch.tensor(1.0))
    assert bytes(data.flatten().tolist()) == codes[:-1] + b"\x1f" and int(scale) == 127  # .25 is a tie: away
    data, scale = recipe("mxfp4").encode(ramp.repeat(2).view(1, 1, 32), torch.tensor(1.0))
    assert bytes(data.flatten().tolist()) == codes * 2 and int(scale) == 127


@given(st.floats(2.0**-100, 2.0**100, width=32))
def test_power_of_two_scales_follow_their_formulas(amax: float) -> None:
    x = torch.zeros(1, 1, 32)
    x[0, 0, 7] = -amax
    exponent = math.frexp(amax)[1] - 1
    assert int(recipe("mxfp4").encode(x, torch.tensor(1.0))[1]) == exponent - 2 + 127
    stored = int(recipe("fp4_mx16").encode(x, torch.tensor(1.0))[1][0, 0, 0])
    exact = math.ceil(math.log2(max(amax / 6, 1e-10)))
    assert stored - 127 in {exact, exact - 1, exact + 1}
    assert 2.0 ** (stored - 127) * 6 >= amax * (1 - 1e-5)


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("dim", [32, 80, 128])
def test_a_rotation_has_the_same_bits_in_any_step(dim: int, heads: int) -> None:
    """Keys of a step are a view of its heads: neither strides nor the number of tokens may move a 4-bit rounding."""
    heads_HTD = torch.randn(heads, 96, dim, generator=torch.Generator().manual_seed(dim))
    expected = transforms.rotate(heads_HTD.transpose(0, 1).contiguous())
    for start, stop in ((0, 96), (0, 1), (5, 7), (40, 63), (64, 81)):
        part = heads_HTD[:, start:stop]
        for x in (part.transpose(0, 1), part.clone().transpose(0, 1), part.transpose(0, 1).contiguous()):
            assert torch.equal(transforms.rotate(x), expected[start:stop])

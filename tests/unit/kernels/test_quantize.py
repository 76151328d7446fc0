"""Matrices that are quantised, against the formats' definitions in float64, which share no code with them.

Shape suffixes: N outputs, K inputs, G groups of inputs, k inputs of a group.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nibble.kernels.quantized_linear import quantize as module
from nibble.kernels.quantized_linear.naive import dequantize
from nibble.kernels.quantized_linear.quantize import quantize, rounded
from nibble.models.online import FORMATS

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
BYTES = torch.arange(256, dtype=torch.uint8)
E4M3 = BYTES.view(torch.float8_e4m3fn).double()
GRIDS = {
    "fp8": E4M3[E4M3.isfinite()].unique(),
    "int4": torch.arange(-8, 8, dtype=torch.float64),
    "nvfp4": torch.cat((-E2M1, E2M1)).unique(),
    "mxfp4": torch.cat((-E2M1, E2M1)).unique(),
}
"""Values of codes, ascending."""
GROUPS = {"fp8": 128, "int4": 128, "nvfp4": 16, "mxfp4": 32}
NAMES = tuple(GRIDS)
DTYPES = (torch.float32, torch.bfloat16)


def weights(rows: int = 200, columns: int = 256, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random ones with an outlier, groups of very different sizes, and zeros."""
    generator = torch.Generator().manual_seed(1)
    x_NK = torch.randn(rows, columns, generator=generator) * 0.02
    x_NK *= torch.exp2(torch.randint(-3, 3, (rows, 1), generator=generator).float())
    x_NK[3, 5], x_NK[7], x_NK[9, :128] = 4.0, 0.0, 1e-6
    return x_NK.to(dtype)


def made(name: str, x_NK: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What is stored, read anew: the values of codes [N, K] and the scale of each [N, G], both in float64."""
    format = FORMATS[name]
    assert format.packed is not None
    matrix = quantize(x_NK, format.packed, dtype, format.block_rows)
    words_NB = matrix.codes.view(torch.uint8)
    if name == "fp8":
        codes_NK = E4M3[words_NB.int()]
    else:
        nibbles_NK = torch.stack((words_NB % 16, words_NB // 16), -1).flatten(1).int()
        codes_NK = nibbles_NK.double() - 8 if name == "int4" else torch.cat((E2M1, -E2M1))[nibbles_NK]
    if name == "mxfp4":
        scale_NG = torch.exp2(matrix.scale.double() - 127)
    elif name == "nvfp4":
        assert matrix.global_scale is not None and matrix.global_scale.dtype == torch.float32
        scale_NG = E4M3[matrix.scale.int()] * matrix.global_scale.double()
    else:
        assert matrix.scale.dtype == dtype
        scale_NG = matrix.scale.double()
    assert scale_NG.shape == (len(x_NK), x_NK.shape[1] // GROUPS[name])
    return codes_NK, scale_NG


def amax(x_NK: Tensor, name: str) -> Tensor:
    """float64 [N, G]; of FP8 the largest of 128 rows too."""
    amax_NG = x_NK.double().abs().unflatten(1, (-1, GROUPS[name])).amax(-1)
    if name == "fp8":
        amax_NG = torch.cat([part.amax(0).expand_as(part) for part in amax_NG.split(128)])
    return amax_NG


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_codes_are_the_nearest(name: str, dtype: torch.dtype) -> None:
    x_NK = weights()
    codes_NK, scale_NG = made(name, x_NK, dtype)
    scale_NK = scale_NG.repeat_interleave(GROUPS[name], 1)
    exact_NK, grid = x_NK.double(), GRIDS[name]
    error_NK = (codes_NK * scale_NK - exact_NK).abs()
    least_NK = (grid * scale_NK[..., None] - exact_NK[..., None]).abs().amin(-1)
    # A quotient in float32 is off by one in 2^24, which may decide between two codes that are equally far.
    assert (error_NK <= least_NK + 1e-6 * scale_NK * grid.max()).all()
    assert error_NK.norm() > 0 and (error_NK.norm() / exact_NK.norm() < 0.15)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "largest"), [("fp8", 448.0), ("int4", 7.5)])
def test_scales_make_the_largest_value_of_a_block_the_largest_code(
    name: str, largest: float, dtype: torch.dtype
) -> None:
    x_NK = weights()
    _, scale_NG = made(name, x_NK, dtype)
    expected_NG = (amax(x_NK, name) / largest).to(dtype).double()
    error_NG = (scale_NG - expected_NG).abs()
    live_NG = expected_NG > 0
    # A quotient near the middle of two values of the dtype may go to either.
    assert (error_NG <= torch.finfo(dtype).eps * expected_NG)[live_NG].all() and live_NG.sum() > 300
    assert (error_NG == 0).double().mean() > 0.95


def test_scales_of_nvfp4_are_among_those_of_its_encoder() -> None:
    x_NK = weights()
    _, scale_NG = made("nvfp4", x_NK, torch.bfloat16)
    largest = float(x_NK.double().abs().max())
    unit = torch.tensor(largest / (6 * 448)).float().double()
    near_NG = (amax(x_NK, "nvfp4") / 6 / unit).clamp(max=448).float().to(torch.float8_e4m3fn)
    index_NG = near_NG.view(torch.uint8).int()
    steps = torch.stack([(index_NG + i).clamp(0, 126) for i in (0, -1, 1, 4, 5)])
    candidates = E4M3[steps] * unit
    assert (scale_NG == candidates).any(0).all()
    assert scale_NG.max() <= largest / 6 * (1 + 2**-3) and float(unit) > 0


def test_scales_of_mxfp4_are_powers_of_two_that_hold_the_largest_value() -> None:
    x_NK = weights()
    _, scale_NG = made("mxfp4", x_NK, torch.bfloat16)
    largest_NG = amax(x_NK, "mxfp4")
    live_NG = largest_NG > 0
    ratio = (largest_NG / scale_NG)[live_NG]
    # From floor(log2(amax)) - 2, the specification's, to one more.
    assert ((ratio >= 2) & (ratio < 8)).all() and (ratio > 4).any()


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_scales_of_four_bits_lose_no_more_than_those_that_fit_the_largest_value(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x_NK = weights()

    def errors() -> Tensor:
        codes_NK, scale_NG = made(name, x_NK, torch.bfloat16)
        difference_NK = codes_NK * scale_NG.repeat_interleave(GROUPS[name], 1) - x_NK.double()
        return difference_NK.square().unflatten(1, (-1, GROUPS[name])).sum(-1)

    best_NG = errors()
    monkeypatch.setattr(module, "ENCODER", "amax")
    simple_NG = errors()
    assert (best_NG <= simple_NG * (1 + 1e-3)).all() and best_NG.sum() < 0.97 * simple_NG.sum()


@pytest.mark.parametrize("name", NAMES)
def test_the_definition_reads_what_is_stored(name: str) -> None:
    x_NK, format = weights(), FORMATS[name]
    codes_NK, scale_NG = made(name, x_NK, torch.bfloat16)
    expected_NK = codes_NK * scale_NG.repeat_interleave(GROUPS[name], 1)
    assert format.packed is not None
    actual_NK = dequantize(quantize(x_NK, format.packed, torch.bfloat16, format.block_rows))
    torch.testing.assert_close(actual_NK.double(), expected_NK, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_a_shorter_last_group_is_a_group(name: str) -> None:
    x_NK, format = weights(columns=200, dtype=torch.float32), FORMATS[name]
    assert format.packed is not None
    actual_NK = rounded(x_NK, format.packed, format.block_rows)
    padded_NK = torch.cat((x_NK, x_NK.new_zeros(len(x_NK), 56)), 1)
    codes_NK, scale_NG = made(name, padded_NK, torch.float32)
    expected_NK = (codes_NK * scale_NG.repeat_interleave(GROUPS[name], 1))[:, :200]
    assert actual_NK.dtype == x_NK.dtype and actual_NK.shape == x_NK.shape
    torch.testing.assert_close(actual_NK.double(), expected_NK, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("name", NAMES)
def test_pieces_make_no_difference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x_NK, format = weights(rows=300), FORMATS[name]
    assert format.packed is not None
    whole = rounded(x_NK, format.packed, format.block_rows)
    monkeypatch.setattr(module, "ROWS", 128)
    assert torch.equal(rounded(x_NK, format.packed, format.block_rows), whole)


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float16), ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros(name: str, dtype: torch.dtype) -> None:
    format = FORMATS[name]
    assert format.packed is not None
    assert not rounded(torch.zeros(128, 256, dtype=dtype), format.packed, format.block_rows).any()

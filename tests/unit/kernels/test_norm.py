"""Sums and their norms in one launch, against the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nibble.kernels.norm import add_norm, naive, serves
from nibble.kernels.norm import triton as fast

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def operands(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(len(shape))
    x, residual = (4 * torch.randn(shape, generator=rng).to(dtype) for _ in range(2))
    return x.to(DEVICE), residual.to(DEVICE), (1 + torch.randn(shape[-1], generator=rng)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 5, 64), (3, 96), (2, 2880), (1, 1, 4096)])
def test_sums_and_norms(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual, weight = operands(shape, dtype)
    total, normed = fast.add_norm(x, residual, weight, 1e-5, 0.25)
    expected_total, expected = naive.add_norm(x, residual, weight, 1e-5, 0.25)
    # Triton's interpreter rounds to bfloat16 towards zero.
    torch.testing.assert_close(total, expected_total, rtol=8e-3, atol=1e-6)
    torch.testing.assert_close(normed, expected, rtol=2e-2, atol=1e-2)
    assert normed.shape == total.shape == x.shape and normed.dtype == dtype


def test_the_norm_is_that_of_the_rounded_sum() -> None:
    """256 + 1 is 256 in bfloat16, and so the norm of what is stored has ones alone."""
    x, residual = torch.ones(1, 64).bfloat16(), torch.full((1, 64), 256.0).bfloat16()
    residual[0, :32] = 128
    total, normed = naive.add_norm(x, residual, torch.ones(64).bfloat16(), 0.0)
    assert total.tolist() == [[129.0] * 32 + [256.0] * 32]
    rms = ((129**2 + 256**2) / 2) ** 0.5
    torch.testing.assert_close(normed[0, -1].item(), 256 / rms, rtol=4e-3, atol=0)


def test_a_weight_may_be_how_far_factors_are_from_one() -> None:
    x, residual, weight = operands((3, 64), torch.float32)
    _, expected = naive.add_norm(x, residual, weight + 1, 1e-5)
    for normed in (
        naive.add_norm(x, residual, weight, 1e-5, 1.0)[1],
        add_norm(x, residual, weight, 1e-5, 1.0)[1],
    ):
        torch.testing.assert_close(normed, expected)


def test_rows_of_any_stride() -> None:
    wide, residual, weight = operands((4, 192), torch.float16)
    x, residual = wide[:, 64:128], residual[:, ::3]
    for found, expected in zip(
        fast.add_norm(x, residual, weight[:64], 1e-6),
        naive.add_norm(x, residual, weight[:64], 1e-6),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-3)
    assert fast.add_norm(x[:0], residual[:0], weight[:64], 1e-6)[0].shape == (0, 64)


def test_what_is_served() -> None:
    assert serves(torch.empty(1, 16384, dtype=torch.bfloat16))
    assert not serves(torch.empty(1, 16392, dtype=torch.bfloat16)) and not serves(torch.empty(1, 64))
    x, residual, weight = operands((3, 64), torch.float32)
    total, normed = add_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual) and normed.dtype == torch.float32

"""Gates of few heads: each token's bits, alone and among others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from nibble.models.gates import ROUNDED, whole_vectors


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 12, 16, 31, 32, 40, 63, 64])
def test_rows_have_the_same_bits_alone(heads: int) -> None:
    generator = torch.Generator().manual_seed(heads)
    for function in sorted(ROUNDED, key=str):
        for rows in (2, 3, 7, 61):
            x = 4 * torch.randn(1, rows, heads, generator=generator)
            with whole_vectors():
                together, alone = function(x), torch.cat([function(x[:, i : i + 1]) for i in range(rows)], 1)
            assert together.shape == x.shape
            assert torch.equal(together, alone)
            torch.testing.assert_close(together, function(x))


def test_everything_else_is_left_alone() -> None:
    x = torch.randn(3, 4)
    with whole_vectors():
        assert torch.equal(x.exp(), torch.exp(x)) and (x + x).shape == (3, 4)
        assert F.softplus(x, beta=2.0).shape == (3, 4) and torch.sigmoid(torch.tensor(0.0)) == 0.5
        assert torch.empty(2, 4, device="meta").sigmoid().is_meta
    torch.testing.assert_close(F.softplus(x, beta=2.0), torch.log1p((2 * x).exp()) / 2)

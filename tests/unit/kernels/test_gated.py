"""Gated products: the twins in Triton's interpreter against float64, and the operator beside the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nibble.kernels import gated
from nibble.kernels.gated import cuda, naive
from nibble.kernels.gated.triton import gate
from nibble.kernels.linear import triton as twin

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tensors(rows: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + outputs)
    x = torch.randn(rows, inputs, generator=generator)
    weight = torch.randn(2 * outputs, inputs, generator=generator) / inputs**0.5
    return x.to(DEVICE, torch.float16), weight.to(DEVICE, torch.float16)


def exact(x: Tensor, weight: Tensor) -> Tensor:
    gates, factors = (x.double() @ weight.double().T).chunk(2, -1)
    return gates.sigmoid() * gates * factors


def off(y: Tensor, expected: Tensor) -> float:
    return float((y.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("outputs", [64, 96, 32 * 128])
@pytest.mark.parametrize("rows", [1, 7, 16, 17])
def test_few_rows_are_multiplied_and_joined(rows: int, outputs: int) -> None:
    x, weight = tensors(rows, outputs, 256)
    y = twin.linear(x[None], weight, None, gated=True)
    assert y.shape == (1, rows, outputs) and y.dtype == x.dtype
    assert off(y[0], exact(x, weight)) <= 2e-3


@pytest.mark.parametrize(("rows", "outputs"), [(1, 8), (3, 2048), (5, 2049)])
def test_the_gate_alone(rows: int, outputs: int) -> None:
    y = 6 * torch.randn(rows, 2 * outputs + 4, device=DEVICE).half()[:, 4:]
    a, b = y.double().chunk(2, -1)
    assert off(gate(y), a.sigmoid() * a * b) <= 1e-3
    far = torch.tensor([[-80.0, 1e4, 0.0, -0.0] + [2.0] * 4], device=DEVICE, dtype=torch.float16)
    assert gate(far).tolist() == [[-0.0, 2e4, 0.0, -0.0]]


@pytest.mark.parametrize("rows", [1, 20, 600])
def test_the_operator_computes_the_definition(rows: int) -> None:
    x, weight = tensors(rows, 128, 256)
    y = gated.gated_linear(x[None].to(torch.bfloat16), weight.to(torch.bfloat16))
    assert y.shape == (1, rows, 128)
    assert off(y[0], exact(x, weight)) <= 1e-2
    assert off(naive.gated_linear(x, weight), exact(x, weight)) <= 2e-3


def test_what_is_served() -> None:
    assert cuda.serves((28672, 4096), torch.bfloat16, 90)
    assert not cuda.serves((28672, 4096), torch.float16, 90) and not cuda.serves(
        (28672, 4096), torch.bfloat16, 100
    )
    assert not cuda.serves((28672, 4097), torch.bfloat16, 90)

"""Products with packed weights on a GPU: every kernel against the definition, and the same in a CUDA graph.

Skipped where there is no GPU or no `humming-kernels`, or it is not asked for: NIBBLE_TEST_GPU=1 pytest tests/gpu
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nibble.kernels import import_problem
from nibble.kernels.gated import naive
from nibble.kernels.quantized_linear import (
    TOLERANCE,
    Preparation,
    cuda,
    expected_product,
    fp8_blocks,
    prepared,
    quantized_gated_linear,
    quantized_linear,
)
from nibble.kernels.quantized_linear.matrix import PackedMatrix, merged
from nibble.kernels.weight_formats import FP8_ARCH, PACKAGE, Activations, WeightFormat

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from packed_weights import KINDS, Kind, quantize

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or bool(import_problem(PACKAGE)), reason="needs a GPU and humming-kernels"
)
KINDS_HERE = {
    **KINDS,
    "int8": Kind(WeightFormat("uint8"), {}),
    "int8z": Kind(WeightFormat("uint8", 128, has_zero=True), {}),
    "int4 in groups of 32": Kind(WeightFormat("uint4", 32), {}),
    "int4z by rows": Kind(WeightFormat("uint4", has_zero=True), {}),
    "fp8 with a scale of inputs": Kind(WeightFormat("e4m3"), {}, Activations.TENSOR),
}


def matrix_of(kind: Kind, rows: int, size: float) -> PackedMatrix:
    matrix = quantize(size * torch.randn(rows, 512, device="cuda").bfloat16(), kind.format)
    scale = torch.tensor([0.01], device="cuda") if kind.activations is Activations.TENSOR else None
    return replace(matrix, activations=kind.activations, input_scale=scale)


@pytest.mark.parametrize("name", KINDS_HERE)
def test_each_kernel_computes_what_the_definition_says(name: str) -> None:
    kind = KINDS_HERE[name]
    major, minor = torch.cuda.get_device_capability()
    if kind.activations and 10 * major + minor < FP8_ARCH:
        pytest.skip("this GPU multiplies no FP8")
    torch.manual_seed(0)
    # Of sizes that differ, so that NVFP4 has global scales of rows.
    matrix = merged([matrix_of(kind, rows, size) for rows, size in ((256, 1.0), (128, 8.0))])
    prepare = Preparation([matrix])
    packed, locks = prepare(matrix)
    prepare.test([(packed, locks)])
    assert packed.codes.nbytes == matrix.codes.nbytes
    assert packed.scale.nbytes == matrix.scale.nbytes or kind.activations is Activations.GROUP
    x = torch.randn(5, 512, device="cuda").bfloat16()
    quantized_linear(x, packed, locks)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = quantized_linear(x, packed, locks)
    for _ in range(3):
        x.copy_(torch.randn(5, 512, device="cuda"))
        graph.replay()
        expected = expected_product(x, matrix).float()
        assert (y.float() - expected).norm() <= TOLERANCE * expected.norm()


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a GPU of SM90",
)
@pytest.mark.parametrize("name", ["fp8", "nvfp4", "mxfp4"])
def test_gated_products_of_slices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    half = 2 * cuda.GATED_MULTIPLE + 64
    matrix = matrix_of(KINDS_HERE[name], 2 * half, 1.0)
    packed, locks = Preparation([matrix])(matrix)
    x = torch.randn(cuda.MANY_TOKENS + 1, 512, device="cuda").bfloat16()
    expected = naive.gate(expected_product(x, matrix)).float()
    for slice_bytes in (1, 1 << 30):
        monkeypatch.setattr(cuda, "SLICE", slice_bytes)
        y = quantized_gated_linear(x, packed, locks).float()
        assert (y - expected).norm() <= TOLERANCE * expected.norm()


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a GPU of SM90",
)
@pytest.mark.parametrize("shape", [(128, 512), (384, 1536), (4096, 14336), (17024, 512)])
def test_fp8_blocks_of_any_number_of_tokens(shape: tuple[int, int]) -> None:
    """By one kernel and by the other, whole tiles of tokens and outputs or not."""
    torch.manual_seed(0)
    weight = torch.randn(shape, device="cuda").bfloat16()
    # Blocks of very different sizes, so that a scale in another's place shows.
    weight *= (
        torch.randn(shape[0] // 128, 1, shape[1] // 128, 1, device="cuda")
        .exp()
        .expand(-1, 128, -1, 128)
        .reshape(shape)
    )
    kind = KINDS["fp8a8"]
    matrix = replace(quantize(weight, kind.format), activations=kind.activations)
    packed, locks = prepared(matrix)
    assert packed.layout == fp8_blocks.LAYOUT and packed.nbytes < matrix.nbytes
    for tokens in (1, 7, 8, 9, 16, 31, 33, 64, 65, 77, 128, 300, 1000):
        x = torch.randn(tokens, shape[1], device="cuda").bfloat16()
        x *= torch.randn(tokens, shape[1] // 128, device="cuda").exp().repeat_interleave(128, 1)
        expected = expected_product(x, matrix).float()
        y = quantized_linear(x, packed, locks)
        error = float((y.float() - expected).norm() / expected.norm())
        print(shape, tokens, f"{error:.1e}")
        assert y.shape == (tokens, shape[0]) and error <= 3e-3
    assert quantized_linear(x[:0], packed, locks).shape == (0, shape[0])

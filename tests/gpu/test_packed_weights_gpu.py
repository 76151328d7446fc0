"""Products with packed weights on a GPU: every kernel against the definition, and the same in a CUDA graph.

Skipped where there is no GPU or no `humming-kernels`, or it is not asked for: NIBBLE_TEST_GPU=1 pytest tests/gpu
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from nibble.kernels import import_problem
from nibble.kernels.quantized_linear import TOLERANCE, naive, preparation, quantized_linear
from nibble.kernels.quantized_linear.matrix import PackedMatrix, merged
from nibble.kernels.weight_formats import PACKAGE, WeightFormat

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from packed_weights import KINDS, quantize

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or bool(import_problem(PACKAGE)), reason="needs a GPU and humming-kernels"
)
FORMATS = {
    **{name: kind.format for name, kind in KINDS.items()},
    "int8": WeightFormat("uint8"),
    "int8z": WeightFormat("uint8", 128, has_zero=True),
    "int4 in groups of 32": WeightFormat("uint4", 32),
    "int4z by rows": WeightFormat("uint4", has_zero=True),
}


def matrix_of(format: WeightFormat, rows: int, size: float) -> PackedMatrix:
    return quantize(size * torch.randn(rows, 512, device="cuda").bfloat16(), format)


@pytest.mark.parametrize("name", FORMATS)
def test_each_kernel_computes_what_the_definition_says(name: str) -> None:
    torch.manual_seed(0)
    # Of sizes that differ, so that NVFP4 has global scales of rows.
    matrix = merged([matrix_of(FORMATS[name], rows, size) for rows, size in ((256, 1.0), (128, 8.0))])
    packed, locks = preparation([matrix])(matrix)
    assert packed.codes.nbytes == matrix.codes.nbytes and packed.scale.nbytes == matrix.scale.nbytes
    x = torch.randn(5, 512, device="cuda").bfloat16()
    quantized_linear(x, packed, locks)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = quantized_linear(x, packed, locks)
    for _ in range(3):
        x.copy_(torch.randn(5, 512, device="cuda"))
        graph.replay()
        expected = naive.quantized_linear(x, matrix).float()
        assert (y.float() - expected).norm() <= TOLERANCE * expected.norm()

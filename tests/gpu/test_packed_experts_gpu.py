"""Experts that are packed on a GPU: both products of a layer against the definition, replayed from a CUDA graph.

Skipped where there is no GPU, or it is not asked for: NIBBLE_TEST_GPU=1 pytest tests/gpu
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from nibble.kernels import experts as op
from nibble.kernels.experts import naive
from nibble.kernels.weight_formats import WeightFormat

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from packed_weights import KINDS, random_experts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FORMATS = {
    **{name: KINDS[name].format for name in ("fp8", "fp8row", "mxfp4", "nvfp4", "int4")},
    "mxfp8": WeightFormat("e4m3", 32, "e8m0"),
}
TOLERANCE = 0.004
"""Norm over norm: both round once, to bfloat16."""
EXPERTS, TOP_K = 24, 4


@pytest.mark.parametrize("tokens", [1, 5, 64, 65, 1000])
@pytest.mark.parametrize("name", FORMATS)
def test_both_products_in_a_graph(name: str, tokens: int) -> None:
    torch.manual_seed(0)
    shapes = (EXPERTS, 768, 640), (EXPERTS, 640, 768)
    up, down = (random_experts(FORMATS[name], s, torch.bfloat16, "cuda", s[2] ** -0.5) for s in shapes)
    bias = torch.randn(EXPERTS, 768, device="cuda").bfloat16()
    x = torch.randn(tokens, 640, device="cuda").bfloat16()
    chosen = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K)[1]

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        y_SN, places_S = op.up(x, chosen, up, bias)
        return y_SN[places_S], op.down(y_SN, chosen, down, None)[places_S]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(2):
        x.copy_(torch.randn_like(x))
        chosen.copy_(torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K)[1])
        graph.replay()
        expected = naive.product(x, chosen, up, bias)
        back = naive.product(found[0], chosen, down, None)
        for y, right in zip(found, (expected, back), strict=True):
            assert (y.float() - right.float()).norm() <= TOLERANCE * right.float().norm()

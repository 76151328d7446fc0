"""Experts on a GPU: both products of a layer, and layers with their router, against the definition, from CUDA graphs.

Skipped where there is no GPU, or it is not asked for: NIBBLE_TEST_GPU=1 pytest tests/gpu
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nibble.kernels import experts as op
from nibble.kernels import router
from nibble.kernels.experts import cuda, naive
from nibble.kernels.experts.gate import CLAMPED, SILU, Gate, gated
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


MODELS = {
    "qwen3-30b-a3b": (2048, 768, 8, 128, Gate(SILU)),
    "gpt-oss-20b": (2880, 2880, 4, 32, Gate(CLAMPED, 2.0, 1.7)),
    "small": (640, 768, 3, 24, Gate(SILU)),
}
TURNS = 300


def matrices(name: str, shape: tuple[int, int, int]) -> Any:
    if name == "bf16":
        return (torch.randn(shape, device="cuda") * shape[2] ** -0.5).bfloat16()
    return random_experts(FORMATS[name], shape, torch.bfloat16, "cuda", shape[2] ** -0.5)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs an SM90"
)
@pytest.mark.parametrize(("has_shared", "padding"), [(False, 0), (True, 0), (False, 1)])
@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("qwen3-30b-a3b", "fp8"),
        ("qwen3-30b-a3b", "bf16"),
        ("gpt-oss-20b", "mxfp4"),
        *(("small", name) for name in ("bf16", "fp8row", "nvfp4", "mxfp8")),
    ],
)
def test_a_token_and_its_router_in_a_graph(model: str, name: str, has_shared: bool, padding: int) -> None:
    """Three layers, one behind the other, so that kernels of one start while another ends; again and again.

    Rows of padding, as a step of one request has one, get what the token does.
    """
    torch.manual_seed(0)
    hidden, inner, top_k, count, gate = MODELS[model]
    top_k -= has_shared
    made: list[Any] = []
    for _ in range(3):
        up, down = (matrices(name, shape) for shape in ((count, 2 * inner, hidden), (count, hidden, inner)))
        biases = [torch.randn(count, n, device="cuda").bfloat16() for n in (2 * inner, hidden)]
        weight = (torch.randn(count, hidden, device="cuda") * hidden**-0.5).bfloat16()
        own_bias = torch.randn(count, device="cuda").bfloat16()
        made.append(((weight, own_bias), (up, biases[0]), (down, biases[1])))
    first, second = (cuda.matrices_of(matrix, 1) for matrix in (up, down))
    x = torch.randn(1 + padding, hidden, device="cuda").bfloat16()
    assert first and second and cuda.routes(x[:1], weight, (1, top_k + has_shared), first, second)
    choice: dict[str, Any] = {"top_k": top_k, "is_normalized": gate.kind == CLAMPED, "has_shared": has_shared}

    def step() -> list[torch.Tensor]:
        values = [x]
        with op.first_row_only():
            for parts in made:
                values.append(op.routed_layer(values[-1], *parts, gate, **choice))
        return values

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values = step()
    for turn in range(TURNS):
        x.copy_(torch.randn_like(x))
        graph.replay()
        if turn % 50:
            continue
        for value in values[1:]:
            assert torch.equal(value, value[:1].expand_as(value)), turn
        alone = [value[:1] for value in values]
        for before, found, (own, *pairs) in zip(alone[:-1], alone[1:], made, strict=True):
            _, weights, chosen = router.route(before, *own, **choice)
            y = op.layer(before, chosen, weights, *pairs, gate)
            # Logits of another order of sums may round to another tie, which random ones rarely have.
            assert (found.float() - y.float()).norm() <= 3 * TOLERANCE * y.float().norm(), turn
            inside = gated(naive.product(before, chosen, *pairs[0]).float(), gate).bfloat16()
            rows = naive.product(inside, chosen, *pairs[1]).float()
            expected = naive.combined(rows, None, chosen, weights, count)
            assert (found.float() - expected).norm() <= 3 * TOLERANCE * expected.norm(), turn
    # The same bits, however kernels met: a value that was read too early would differ.
    kept = [value.clone() for value in values]
    for _ in range(TURNS):
        graph.replay()
        assert all(map(torch.equal, values, kept))

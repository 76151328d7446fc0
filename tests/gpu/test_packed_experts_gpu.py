"""Layers of experts on a GPU, in parts and as a whole, against the definition, replayed from CUDA graphs.

Skipped where there is no GPU, or it is not asked for: NIBBLE_TEST_GPU=1 pytest tests/gpu
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from nibble.kernels import experts as op
from nibble.kernels import router
from nibble.kernels.experts import cuda, naive, one
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


@pytest.mark.parametrize("gate", [Gate(SILU), Gate(CLAMPED, 2.0, 1.7)], ids=lambda gate: gate.kind)
@pytest.mark.parametrize("tokens", [1, 2, 8, 33, 64, 65, 500])
@pytest.mark.parametrize("name", ["bf16", *FORMATS])
def test_a_layer_in_a_graph(name: str, tokens: int, gate: Gate) -> None:
    """With a router before it, and choices that are given, some of no expert; one launch for a token, again and again."""
    torch.manual_seed(0)
    inner, hidden = 1536, 768
    up, down = (matrices(name, shape) for shape in ((EXPERTS, 2 * inner, hidden), (EXPERTS, hidden, inner)))
    biases = [torch.randn(EXPERTS, n, device="cuda").bfloat16() for n in (2 * inner, hidden)]
    biases = biases if gate.kind == CLAMPED else [None, None]
    x, weight = (
        torch.randn(tokens, hidden, device="cuda").bfloat16(),
        torch.randn(EXPERTS, hidden, device="cuda"),
    )
    weight = (weight * hidden**-0.5).bfloat16()
    chosen = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K)[1]
    weights = torch.rand(tokens, TOP_K, device="cuda")
    pairs = (up, biases[0]), (down, biases[1])

    def step() -> tuple[torch.Tensor, ...]:
        parts = (part for matrix, bias in pairs for part in (*op._parts(matrix), bias))
        facts = (op._facts(matrix) for matrix, _ in pairs)
        options = *parts, *facts, gate.kind, gate.limit, gate.factor
        routed = torch.ops.nibble.experts_routed_layer(x, weight, None, TOP_K, True, *options)
        return *routed, op.layer(x, chosen, weights, *pairs, gate)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits, found_weights, found, routed, given = step()
    for turn in range(4):
        x.copy_(torch.randn_like(x))
        chosen.copy_(torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K)[1])
        if turn == 2:
            chosen[0, 1] = EXPERTS
        graph.replay()
        exact = x.float() @ weight.float().T
        assert (logits.float() - exact).norm() <= TOLERANCE * exact.norm()
        right_weights, right = router.naive.choose(logits, TOP_K, True)
        assert (
            torch.equal(found, right) and (found_weights.float() - right_weights.float()).abs().max() < 0.01
        )
        for y, who, how in ((routed, found, found_weights), (given, chosen, weights)):
            inside = gated(naive.product(x, who, up, biases[0]).float(), gate).bfloat16()
            rows = naive.product(inside, who, down, biases[1]).float()
            expected = naive.combined(rows, None, who, how, EXPERTS)
            assert (y.float() - expected).norm() <= 3 * TOLERANCE * expected.norm(), (turn, y is routed)


def matrices(name: str, shape: tuple[int, int, int]) -> object:
    if name != "bf16":
        return random_experts(FORMATS[name], shape, torch.bfloat16, "cuda", shape[2] ** -0.5)
    return torch.randn(shape, device="cuda").bfloat16() * shape[2] ** -0.5


def test_a_token_of_large_models_takes_one_launch() -> None:
    """Where blocks have room: its operators must not be computed in parts there."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("for SM90")
    x = torch.zeros(1, 2048, device="cuda").bfloat16()
    up, down = (matrices("fp8", shape) for shape in ((16, 1536, 2048), (16, 2048, 768)))
    assert one.serves(x, 8, up, None, down, None, Gate(SILU))
    assert cuda.matrices_of(torch.zeros(2, 8, 8, device="cuda").bfloat16(), 1)


@pytest.mark.parametrize(
    ("experts", "inputs", "top_k"), [(128, 2048, 8), (32, 2880, 4), (8, 4096, 2), (256, 2048, 8)]
)
@pytest.mark.parametrize("tokens", [1, 7, 64, 65, 3000])
def test_routes_in_a_graph(tokens: int, experts: int, inputs: int, top_k: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(tokens, inputs, device="cuda").bfloat16()
    weight = (torch.randn(experts, inputs, device="cuda") * inputs**-0.5).bfloat16()
    bias = torch.randn(experts, device="cuda").bfloat16()

    def step() -> tuple[torch.Tensor, ...]:
        return *router.route(x, weight, bias, top_k, is_normalized=True), *router.route(x, weight, None, top_k, is_normalized=False)  # fmt: skip

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for fill in ("random", "nan", "few"):
        x.copy_(torch.randn_like(x))
        if fill == "nan":
            x[0, 3] = float("nan")
        if fill == "few":
            x.copy_(x.round() / 4)
        graph.replay()
        for parts, own_bias, is_normalized in ((found[:3], bias, True), (found[3:], None, False)):
            logits, weights, chosen = parts
            exact = x.float() @ weight.float().T + (0 if own_bias is None else own_bias.float())
            difference = (logits.float() - exact).nan_to_num()
            assert difference.norm() <= TOLERANCE * exact.nan_to_num().norm()
            right_weights, right = router.naive.choose(logits, top_k, is_normalized)
            assert torch.equal(chosen, right), fill
            assert torch.allclose(weights.float(), right_weights.float(), atol=0.01, equal_nan=True)

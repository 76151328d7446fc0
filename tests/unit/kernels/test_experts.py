"""Products of tokens with their experts: the twin in Triton's interpreter, and rows that are sorted, against float64."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton")
from nibble.kernels import experts as op
from nibble.kernels.experts import naive
from nibble.kernels.experts import triton as twin
from nibble.kernels.experts.gate import CLAMPED, SILU, Gate, gated
from nibble.kernels.router import route

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.usefixtures("scalars_bound_loops")


class Layer:
    """`tokens` tokens that chose `chosen` of `experts` experts each, with matrices and biases."""

    def __init__(self, tokens: int, chosen: int, experts: int, *, transposed: bool = False) -> None:
        rng = torch.Generator().manual_seed(tokens + experts)
        self.outputs, self.inputs = 70, 48
        scores = torch.rand(tokens, experts, generator=rng)
        self.experts_TK = scores.topk(chosen).indices.to(DEVICE)
        shape = (experts, self.inputs, self.outputs) if transposed else (experts, self.outputs, self.inputs)
        weight = torch.randn(shape, generator=rng).to(DEVICE, torch.float16)
        self.weight = weight.transpose(1, 2) if transposed else weight
        self.bias = torch.randn(experts, self.outputs, generator=rng).to(DEVICE, torch.float16)
        self.x_TI = torch.randn(tokens, self.inputs, generator=rng).to(DEVICE, torch.float16)
        self.x_SI = torch.randn(tokens * chosen, self.inputs, generator=rng).to(DEVICE, torch.float16)

    def expected(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x if len(x) != len(self.experts_TK) else x.repeat_interleave(self.experts_TK.shape[1], 0)
        matrices = self.weight[self.experts_TK.flatten()].double()
        y = torch.bmm(matrices, rows.double()[:, :, None])[:, :, 0]
        return y if bias is None else y + bias[self.experts_TK.flatten()].double()


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found.double() - expected).norm() <= 1e-3 * expected.norm())


SIZES = [(1, 2, 4), (1, 4, 16), (3, 2, 60), (7, 8, 12), (16, 8, 160), (17, 3, 5), (64, 2, 8)]


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "chosen", "experts"), SIZES, ids=str)
def test_the_twin_multiplies(tokens: int, chosen: int, experts: int) -> None:
    """Rows of tokens and rows of choices; with a bias and matrices the other way around."""
    for transposed in (False, True):
        layer = Layer(tokens, chosen, experts, transposed=transposed)
        bias = layer.bias if transposed else None
        for x in (layer.x_TI, layer.x_SI):
            if chosen == 1 and x is layer.x_SI:
                continue
            places = torch.full((tokens * chosen,), -1, device=DEVICE)
            found = twin.few_product(x, layer.experts_TK, layer.weight, bias, places_S=places)
            assert close(found, layer.expected(x, bias))
            assert close(naive.product(x, layer.experts_TK, layer.weight, bias), layer.expected(x, bias))
            assert places.tolist() == list(range(tokens * chosen))


@pytest.mark.parametrize("tile", [twin.Tile(16, 16), twin.Tile(64, 32), twin.Tile(32, 64, stages=1)], ids=str)
def test_tiles_compute_alike(tile: twin.Tile) -> None:
    layer = Layer(5, 3, 9)
    found = twin.few_product(layer.x_TI, layer.experts_TK, layer.weight, layer.bias, tile=tile)
    assert close(found, layer.expected(layer.x_TI, layer.bias))


@pytest.mark.parametrize("tokens", [1, 64, 65, 200])
def test_both_products_keep_their_order(tokens: int) -> None:
    """Whatever way is taken, rows of up() go into down(), and `places` says whose they are."""
    layer = Layer(tokens, 3, 10)
    y_SN, places_S = op.up(layer.x_TI, layer.experts_TK, layer.weight, layer.bias)
    assert sorted(places_S.tolist()) == list(range(3 * tokens))
    assert close(y_SN[places_S], layer.expected(layer.x_TI, layer.bias))
    back = torch.randn(10, layer.inputs, layer.outputs, device=DEVICE, dtype=torch.float16)
    z_SI = op.down(y_SN, layer.experts_TK, back, None)[places_S]
    matrices = back[layer.experts_TK.flatten()].double()
    assert close(z_SI, torch.bmm(matrices, y_SN[places_S].double()[:, :, None])[:, :, 0])


def test_an_expert_may_be_chosen_twice() -> None:
    """As where few experts stand for many, in the comparison with a family's code."""
    layer = Layer(6, 3, 9)
    layer.experts_TK = layer.experts_TK % 2
    found = twin.few_product(layer.x_TI, layer.experts_TK, layer.weight, layer.bias)
    assert close(found, layer.expected(layer.x_TI, layer.bias))
    back = torch.randn(9, layer.inputs, layer.outputs, device=DEVICE, dtype=torch.float16)
    expected = naive.product(found, layer.experts_TK, back, None)
    assert close(twin.few_product(found, layer.experts_TK, back, None), expected.double())


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_choice_of_no_expert_reads_nothing(tokens: int) -> None:
    layer = Layer(tokens, 3, 9)
    layer.experts_TK[:, 1] = 9
    found = twin.few_product(layer.x_TI, layer.experts_TK, layer.weight, None).view(tokens, 3, -1)
    layer.experts_TK[:, 1] = 0
    expected = layer.expected(layer.x_TI, None).view(tokens, 3, -1)
    assert close(found[:, [0, 2]], expected[:, [0, 2]])


def test_experts_that_nobody_chose_are_not_read() -> None:
    layer = Layer(4, 2, 30)
    weight = layer.weight.clone()
    unused = torch.ones(30, dtype=torch.bool, device=DEVICE)
    unused[layer.experts_TK.flatten()] = False
    weight[unused] = float("nan")
    found = twin.few_product(layer.x_TI, layer.experts_TK, weight, None)
    assert close(found, layer.expected(layer.x_TI, None))


def test_wide_matrices_have_wide_tiles() -> None:
    hopper, ada = twin.GPU(90, 132, 232_448), twin.GPU(89, 142, 101_376)
    assert twin.tile_of(8, 16, 1536, 2048, 2, hopper).outputs == 32  # 384 programs
    assert twin.tile_of(8, 16, 2048, 768, 2, hopper).outputs == 64
    assert twin.tile_of(64, 16, 1536, 2048, 2, hopper).outputs == 64
    assert twin.tile_of(4, 16, 768, 2048, 2, hopper).outputs == 16
    assert max(twin.ROWS) == op.MAX_TOKENS
    for gpu, rows, matrices, inputs in itertools.product(
        (hopper, ada), twin.ROWS, (1, 8, 128), (48, 512, 2880)
    ):
        tile = twin.tile_of(matrices, rows, 1024, inputs, 2, gpu)
        assert tile.stages * tile.inputs * (tile.outputs + rows) * 2 <= gpu.memory, (gpu, rows, tile)
        assert tile.stages > 1


def test_rows_of_no_expert_may_have_biases() -> None:
    tokens = 70
    layer = Layer(tokens, 2, 4)
    layer.experts_TK[3, 1] = 4
    y_SN, places_S = op.up(layer.x_TI, layer.experts_TK, layer.weight, layer.bias)
    others = torch.arange(2 * tokens, device=DEVICE) != 7
    layer.experts_TK[3, 1] = 0
    assert close(y_SN[places_S][others], layer.expected(layer.x_TI, layer.bias)[others])


GATES = [Gate(SILU), Gate(CLAMPED, 2.0, 1.7)]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.kind)
def test_the_twin_of_a_gate(gate: Gate) -> None:
    y = torch.randn(7, 2 * 1100, generator=torch.Generator().manual_seed(0)).to(DEVICE) * 4
    y[2, 3], y[4, 1100], y[5, 0] = float("nan"), float("inf"), -float("inf")
    assert torch.allclose(twin.gated(y, gate), gated(y, gate), rtol=1e-4, atol=1e-6, equal_nan=True)
    assert twin.gated(y[:0], gate).shape == (0, 1100)


@pytest.mark.parametrize("has_places", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_twin_of_a_sum(dtype: torch.dtype, has_places: bool) -> None:
    """Rows of no expert, which may hold anything, count for nothing."""
    rng = torch.Generator().manual_seed(0)
    y, weights = (
        torch.randn(12, 700, generator=rng).to(DEVICE),
        torch.rand(4, 3, generator=rng).to(DEVICE, dtype),
    )
    chosen = torch.randint(0, 6, (4, 3), generator=rng).to(DEVICE)
    places = torch.randperm(12, generator=rng).to(DEVICE) if has_places else None
    chosen[1, 1] = 6
    y[places[4] if has_places else 4] = float("nan")
    found = twin.combined(y, places, chosen, weights, 6)
    assert torch.allclose(found, naive.combined(y, places, chosen, weights, 6), atol=1e-5)
    rows = y if places is None else y[places]
    expected = (
        rows.view(4, 3, -1).nan_to_num() * weights.float().masked_fill(chosen == 6, 0)[:, :, None]
    ).sum(1)
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 5, 64, 65, 200])
@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.kind)
def test_a_layer_is_its_parts(gate: Gate, tokens: int) -> None:
    """In few launches or many, and with choices of no expert."""
    layer = Layer(tokens, 3, 10)
    rng = torch.Generator().manual_seed(1)
    back = torch.randn(10, layer.inputs, layer.outputs // 2, generator=rng).to(DEVICE, torch.float16) / 8
    weights = torch.rand(tokens, 3, generator=rng).to(DEVICE)
    found = op.layer(layer.x_TI, layer.experts_TK, weights, (layer.weight, layer.bias), (back, None), gate)
    y = gated(naive.product(layer.x_TI.float(), layer.experts_TK, layer.weight, layer.bias), gate)
    z = naive.product(y, layer.experts_TK, back, None)
    expected = naive.combined(z, None, layer.experts_TK, weights, 10)
    assert found.dtype == torch.float16 and (found - expected).norm() <= 4e-3 * expected.norm()
    layer.experts_TK[0, 1] = 10
    weights[0, 1] = 0
    others = op.layer(layer.x_TI, layer.experts_TK, weights, (layer.weight, layer.bias), (back, None), gate)
    assert torch.equal(others[1:], found[1:]) and not torch.equal(others[0], found[0])


def test_padding_behind_a_single_token_reads_no_expert() -> None:
    """All rows get what the first does; what padding would choose may hold anything."""
    rng = torch.Generator().manual_seed(0)
    up, down = (
        torch.randn(shape, generator=rng).to(DEVICE, torch.float16) for shape in ((6, 64, 48), (6, 48, 32))
    )
    x_TI = torch.randn(1, 48, generator=rng).to(DEVICE, torch.float16) * torch.tensor(
        [[1], [-1]], device=DEVICE
    )
    router = (torch.randn(6, 48, generator=rng).to(DEVICE, torch.float16), None)
    _, weights_TK, experts_TK = route(x_TI, *router, 2, is_normalized=True)
    assert not set(experts_TK[0].tolist()) & set(experts_TK[1].tolist())
    pairs, gate = ((up, None), (down, None)), Gate(SILU)
    expected = op.layer(x_TI[:1], experts_TK[:1], weights_TK[:1], *pairs, gate)
    for weight in (up, down):
        weight[experts_TK[1]] = torch.nan
    for is_alone in (True, False):
        with op.first_row_only(is_alone):
            chosen = op.layer(x_TI, experts_TK, weights_TK, *pairs, gate)
            routed = op.routed_layer(x_TI, router, *pairs, gate, top_k=2, is_normalized=True)
        for found in (chosen, routed):
            assert found.shape == x_TI.shape and found.is_contiguous()
            assert torch.equal(found[0], expected[0]) and bool(found[1].isnan().all()) is not is_alone
            assert not is_alone or torch.equal(found[1], expected[0])

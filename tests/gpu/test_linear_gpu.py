"""Products of few rows on Hopper against their definition: all tiles, edges, biases and gates, and kernels in a row.

Values are small integers, whose sums are exact in any order.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nibble.errors import BackendError
from nibble.kernels import gpu_of
from nibble.kernels import linear as op
from nibble.kernels.gated import naive
from nibble.kernels.linear import sm90
from nibble.kernels.linear.sm90 import Tile

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a GPU of SM90",
)
DEVICE = torch.device("cuda", 0)
ROWS = (1, 5, 8, 9, 16, 17, 33, 64, 100, 128)
SHAPES = [(128, 512), (64, 1024), (384, 640), (328, 520), (1536, 4096), (4096, 1024)]
"""N and K; some are no multiples of tiles."""
STAGES = {1: 2, 2: 3, 4: 4}
"""Of so many groups, where stages are used again."""


def integers(rows: int, columns: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    rng = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randint(-2, 3, (rows, columns), generator=rng, device=DEVICE) * scale).bfloat16()


def operands(rows: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, a weight and a bias, whose products are numbers of the size of 3."""
    scale = 2.0 ** -((inputs.bit_length() - 1) // 2)
    x, weight = integers(rows, inputs), integers(outputs, inputs, scale, seed=1)
    return x, weight, integers(1, outputs, seed=2)[0]


def check(
    actual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False
) -> None:
    products = x.float() @ weight.float().T
    products = (products if bias is None else products + bias.float()).to(x.dtype)
    if not gated:
        assert torch.equal(actual, products)
        return
    expected = naive.gate(products)
    torch.testing.assert_close(actual, expected, rtol=2**-6, atol=1e-30)
    # The exponential may differ by a last bit here and there; of few values that is many.
    assert (actual != expected).sum() <= 2e-3 * actual.numel() + 2


@pytest.mark.parametrize("shape", [(64, 512), (4096, 4096)])
def test_a_trial_times_every_way_and_keeps_nothing(shape: tuple[int, int]) -> None:
    """Also of a small weight, whose copies lie in the GPU's cache together."""
    weight = integers(*shape)
    for most in op.PRODUCT.of(weight):
        x, left = integers(op.TRIALS[most], shape[1]), list[int]()
        for _ in range(2):  # libraries keep what they allocate the first time
            times = {name: op._ms(way, x, weight) for name, way in op.PRODUCT.ways(weight, most).items()}
            left.append(torch.cuda.memory_allocated())
        assert len(times) > 1 and all(ms > 0 for ms in times.values()), times
        assert left[0] == left[1]


@pytest.mark.parametrize("splits", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("groups", sm90.GROUPS)
@pytest.mark.parametrize("gated", [False, True])
def test_tiles(groups: int, splits: int, gated: bool) -> None:
    for rows in ROWS:
        for outputs, inputs in SHAPES:
            tile = Tile(groups, splits, STAGES[groups])
            x, weight, bias = operands(rows, 2 * outputs if gated else outputs, inputs)
            assert tile.fits(inputs, rows)
            for added in (None, bias):
                y = sm90.linear(x, weight, added, gated=gated, tile=tile)
                check(y, x, weight, added, gated=gated)


@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336), (8192, 5120), (72, 64)])
@pytest.mark.parametrize("gated", [False, True])
def test_the_tile_that_is_chosen(shape: tuple[int, int], gated: bool) -> None:
    for rows in ROWS:
        x, weight, bias = operands(rows, shape[0] * 2 if gated else shape[0], shape[1])
        check(sm90.linear(x, weight, bias, gated=gated), x, weight, bias, gated=gated)


def test_repeats() -> None:
    """Sums that are not exact have the same order each time."""
    for rows in (5, 64, 128):
        x, weight = (torch.randn(n, 4096, device=DEVICE).bfloat16() for n in (rows, 2048))
        for gated in (False, True):
            first = sm90.linear(x, weight, gated=gated)
            assert all(torch.equal(first, sm90.linear(x, weight, gated=gated)) for _ in range(50))


@pytest.mark.parametrize("rows", [1, 17, 64, 128])
@pytest.mark.parametrize("tile", [None, Tile(1, 8, 4), Tile(2, 4, 3), Tile(2, 1, 3), Tile(4, 2, 4)])
def test_kernels_in_a_row(rows: int, tile: Tile | None) -> None:
    """Each reads what the one in front wrote, and writes where an earlier one read."""
    size, layers = 2048, 12
    weights = [torch.randn(2 * size, size, device=DEVICE).mul_(size**-0.5).bfloat16() for _ in range(layers)]
    bias = torch.randn(size, device=DEVICE).bfloat16()

    def run(x: Tensor, *, waits: bool = False) -> Tensor:
        for i, weight in enumerate(weights):
            if i % 3 == 2:
                x = sm90.linear(x, weight, gated=True, tile=tile) * 4
            else:
                x = sm90.linear(x, weight[:size], bias if i % 2 else None, tile=tile)
            if waits:
                torch.cuda.synchronize()
        return x

    inputs = [torch.randn(rows, size, device=DEVICE).bfloat16() for _ in range(4)]
    expected = [run(x, waits=True) for x in inputs]
    assert all(y.isfinite().all() and y.any() for y in expected)
    x, graph = inputs[0].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x)
    for i in range(100):
        x.copy_(inputs[i % 4])
        graph.replay()
        assert torch.equal(out, expected[i % 4]), f"replay {i}"


def test_many_blocks_in_a_row() -> None:
    """A kernel of several rounds of blocks, between short ones."""
    x = torch.randn(32, 1024, device=DEVICE).bfloat16()
    wide = torch.randn(65536, 1024, device=DEVICE).mul_(0.03).bfloat16()
    narrow = torch.randn(1024, 32768, device=DEVICE).mul_(0.03).bfloat16()

    def run(*, waits: bool = False) -> Tensor:
        y = x
        for _ in range(4):
            for weight, gated in ((wide, True), (narrow, False)):
                y = sm90.linear(y, weight, gated=gated)
                if waits:
                    torch.cuda.synchronize()
            y = (y / y.float().square().mean().sqrt()).bfloat16()
        return y

    expected = run(waits=True)
    assert expected.isfinite().all()
    assert all(torch.equal(run(), expected) for _ in range(20))


def test_what_is_not_a_number_stays_in_its_row() -> None:
    x, weight, _ = operands(17, 256, 512)
    x[7, 5] = float("nan")
    is_nan = sm90.linear(x, weight).isnan()
    assert is_nan[7].all()
    assert is_nan.sum() == 256


def test_strides_and_dimensions() -> None:
    wide, (_, weight, bias) = integers(60, 520), operands(1, 256, 512)
    for x in (wide[:, :512], wide[:, 3:515], wide[::2, 8:], wide[:1, :512].expand(30, -1)):
        check(sm90.linear(x, weight), x, weight)
    x = wide[:, :512].unflatten(0, (2, 30))
    assert torch.equal(sm90.linear(x, weight).flatten(0, 1), sm90.linear(x.flatten(0, 1), weight))
    assert sm90.linear(x[:, :0], weight).shape == (2, 0, 256)
    x, odd = wide[:, :512], torch.cat([bias[:1], bias])[1:]
    check(sm90.linear(x, weight, odd), x, weight, bias)


def test_what_is_served() -> None:
    assert sm90.serves((6144, 4096), torch.bfloat16, 90)
    assert not sm90.serves((6144, 4096), torch.float16, 90)
    assert not sm90.serves((6144, 4096), torch.bfloat16, 100)
    assert not sm90.serves((6148, 4096), torch.bfloat16, 90)
    x, weight, _ = operands(129, 256, 512)
    with pytest.raises(BackendError, match="129 rows"):
        sm90.linear(x, weight)


@pytest.mark.parametrize("tile", [Tile(2, 4, 3), Tile(2, 2, 3), Tile(2, 8, 3), Tile(4, 8, 4), Tile(4, 4, 4)])
def test_how_many_clusters_fit(tile: Tile) -> None:
    """Of 128 rows nearly as many blocks run at a time as multiprocessors have room for."""
    from cuda.bindings import driver

    rows = 128
    sm90.linear(operands(rows, 256, 1024)[0], operands(1, 256, 1024)[1], tile=tile)  # which loads the kernel
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = tile.splits, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 128 * tile.groups + 32, 1, 1
    config.sharedMemBytes = tile.shared(rows)
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x = tile.splits
    attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1
    config.attrs, config.numAttrs = [attribute], 1
    function = sm90._kernel(DEVICE, rows, tile, False)._function
    status, clusters = driver.cuOccupancyMaxActiveClusters(function, config)
    assert status == driver.CUresult.CUDA_SUCCESS
    processors = gpu_of(DEVICE).processors
    # GPCs have odd numbers of multiprocessors.
    empty = 4 if tile.splits > 2 else 0
    expected = (processors - empty) * tile.per_processor(rows) // tile.splits
    print(f"{tile}: {clusters} clusters, {expected} expected")
    assert clusters >= 0.9 * expected

"""Gated products on Hopper against their definition: tiles that are cut off, many tiles of a cluster, and large gates.

Values are small integers, whose sums are exact in any order. So what differs is the exponential alone, by a last bit here
and there.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nibble.kernels import gpu_of
from nibble.kernels.gated import cuda, naive

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a GPU of SM90",
)
DEVICE = torch.device("cuda", 0)
SHAPES = [
    (128, 64),
    (128, 128),
    (256, 320),
    (200, 264),
    (1536, 2048),
    (6400, 512),
    (6400, 64),
    (6400, 192),
    (6400, 320),
]
"""N and K; some are no multiples of tiles."""


def integers(rows: int, columns: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    rng = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randint(-2, 3, (rows, columns), generator=rng, device=DEVICE) * scale).bfloat16()


def operands(rows: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """Return x and a weight whose products are numbers of the size of 3."""
    scale = 2.0 ** -((inputs.bit_length() - 1) // 2)
    return integers(rows, inputs), integers(2 * outputs, inputs, scale, seed=1)


def check(actual: Tensor, x: Tensor, weight: Tensor, *, rounds_silu: bool = False) -> None:
    # In float32: a library may round parts of sums.
    products = (x.float() @ weight.float().T).to(x.dtype)
    expected = naive.gate(products, rounds_silu=rounds_silu)
    torch.testing.assert_close(actual, expected, rtol=2**-6, atol=1e-30)
    assert (actual != expected).float().mean() < 2e-3


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 127, 128, 129, 256, 300, 1000])
def test_edges(shape: tuple[int, int], rows: int) -> None:
    x, weight = operands(rows, *shape)
    check(cuda.gated_linear(x, weight), x, weight)


@pytest.mark.parametrize("rows", [4096, 8191])
@pytest.mark.parametrize("band", [1, 5, 8, 100])
def test_many_tiles_of_a_cluster(rows: int, band: int) -> None:
    x, weight = operands(rows, 7168, 1024)
    out = cuda.gated_linear(x, weight, band=band)
    check(out, x, weight)
    assert torch.equal(out, cuda.gated_linear(x, weight, band=band))


@pytest.mark.parametrize("rounds_silu", [False, True])
def test_roundings(rounds_silu: bool) -> None:
    x, weight = operands(500, 1024, 512)
    check(cuda.gated_linear(x, weight, rounds_silu=rounds_silu), x, weight, rounds_silu=rounds_silu)


def test_large_gates() -> None:
    sizes = torch.tensor([-1e30, -1e4, -200, -100, -88.5, -20, -0.0, 20, 100, 1e4, 1e30], device=DEVICE)
    x = torch.zeros(len(sizes), 64, device=DEVICE, dtype=torch.bfloat16)
    x[:, 0], x[:, 1] = sizes.bfloat16(), 1
    weight = torch.zeros(256, 64, device=DEVICE, dtype=torch.bfloat16)
    weight[:128, 0], weight[128:, 1] = 1, 3
    torch.testing.assert_close(
        cuda.gated_linear(x, weight), naive.gated_linear(x, weight), rtol=2**-7, atol=1e-30
    )


def test_what_is_not_a_number_stays_in_its_row() -> None:
    x, weight = operands(300, 256, 256)
    x[7, 5] = float("nan")
    is_nan = cuda.gated_linear(x, weight).isnan()
    assert is_nan[7].all()
    assert is_nan.sum() == 256


def test_strides_and_dimensions() -> None:
    wide, weight = integers(600, 520), operands(1, 256, 512)[1]
    for x in (wide[:, :512], wide[:, 3:515], wide[::2, 8:], wide[:1, :512].expand(300, -1)):
        check(cuda.gated_linear(x, weight), x, weight)
    x = wide[:, :512].unflatten(0, (2, 300))
    assert torch.equal(cuda.gated_linear(x, weight).flatten(0, 1), cuda.gated_linear(x.flatten(0, 1), weight))
    assert cuda.gated_linear(x[:, :0], weight).shape == (2, 0, 256)


def test_in_a_graph() -> None:
    x, weight = operands(700, 2048, 512)
    expected = cuda.gated_linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = cuda.gated_linear(x, weight)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)


def test_what_is_served() -> None:
    assert cuda.serves((28672, 4096), torch.bfloat16, 90)
    assert not cuda.serves((28672, 4096), torch.float16, 90)
    assert not cuda.serves((28672, 4096), torch.bfloat16, 100)
    assert not cuda.serves((200, 4100), torch.bfloat16, 90)


def test_all_clusters_fit() -> None:
    """All run at once; if not, some would begin when others end."""
    from cuda.bindings import driver

    cuda.gated_linear(*operands(256, 128, 64))  # which loads the kernel
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = cuda.BLOCKS, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = cuda.THREADS, 1, 1
    config.sharedMemBytes = cuda.SHARED
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    attribute.value.clusterDim.x = cuda.BLOCKS
    attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1
    config.attrs, config.numAttrs = [attribute], 1
    function = cuda._kernel(DEVICE, cuda.ROUNDS_SILU)._function
    status, clusters = driver.cuOccupancyMaxActiveClusters(function, config)
    assert status == driver.CUresult.CUDA_SUCCESS
    assert clusters == gpu_of(DEVICE).processors // cuda.BLOCKS

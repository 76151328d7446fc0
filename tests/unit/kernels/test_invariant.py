"""Products and sums whose rows do not depend on one another: against float64, and bit by bit among themselves.

The interpreter's arithmetic is NumPy's, so here the structure is proved: which rows and values meet in which order. That
one instruction of Hopper serves all tiles is read from what the compiler makes of them, which needs no GPU;
tests/gpu/test_deterministic_gpu.py compares bits there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
import nibble
from nibble.kernels import GPU
from nibble.kernels import invariant as op
from nibble.kernels.invariant import naive
from nibble.kernels.invariant import triton as twin

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HOPPER = GPU(90, 132, 232_448)
TILES = [*twin.all_tiles(torch.float16, HOPPER), twin.FULL]
ROWS = 40

pytestmark = pytest.mark.usefixtures("scalars_bound_loops", "rows_alike")


def factors(k: int, dtype: torch.dtype = torch.float16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(k)
    x, weight, bias = torch.randn(2, ROWS, k), torch.randn(2, 70, k) / k**0.5, torch.randn(70)
    x, weight, bias = (y.to(DEVICE, dtype) for y in (x, weight, bias))
    return x, weight.transpose(1, 2), bias


@pytest.mark.parametrize("k", [1, 96, 200])
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_products_are_right(tile: twin.Tile, k: int) -> None:
    x, weight, bias = factors(k)
    expected = x.double() @ weight.double() + bias.double()
    found = twin.bmm(x, weight, bias, tile=tile)
    assert found.shape == expected.shape and found.dtype == x.dtype
    assert float((found.double() - expected).norm()) <= 1e-3 * float(expected.norm())
    assert torch.allclose(naive.bmm(x, weight, bias).double(), expected, atol=5e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_a_row_has_the_same_bits_in_every_batch_and_tile(dtype: torch.dtype) -> None:
    x, weight, bias = factors(200, dtype)
    tiles = [twin.FULL] if dtype == torch.float32 else TILES[:-1]
    whole = twin.bmm(x, weight, bias, tile=tiles[0])
    for tile in tiles:
        if DEVICE == "cpu":  # NumPy's products depend on the shape of a tile
            whole = twin.bmm(x, weight, bias, tile=tile)
        for start, count in ((0, ROWS), (0, 1), (17, 1), (5, 2), (3, 33)):
            part = twin.bmm(x[:, start : start + count], weight, bias, tile=tile)
            assert torch.equal(part, whole[:, start : start + count]), (tile, start, count)


@pytest.mark.parametrize("ends", [(3, 3, 20, 31), (0, 0, 0, 0), (40, 40, 40, 40), (10, 20, 30, 40)])
def test_experts_compute_their_own_rows(ends: tuple[int, ...]) -> None:
    x, weight = factors(96)[0][0], torch.randn(4, 96, 70).to(DEVICE, torch.float16) / 10
    ends_E = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    expected, found = naive.grouped_mm(x, weight, ends_E), twin.grouped_mm(x, weight, ends_E)
    assert torch.allclose(found, expected, atol=2e-3)
    assert not found[ends[-1] :].any()
    for tile in TILES[:-1] if DEVICE == "cuda" else ():
        assert torch.equal(twin.grouped_mm(x, weight, ends_E, tile=tile), found)
    alone, start = torch.zeros_like(found), 0
    for expert, end in enumerate(ends):
        for row in range(start, end):
            alone[row] = twin.bmm(x[None, row, None], weight[expert, None], None)[0, 0]
        start = end
    assert torch.equal(alone, found), "a row of an expert is a product like any other"


def test_rows_are_summed_alike() -> None:
    x = torch.randn(9, 2500, device=DEVICE)
    found = twin.row_sums(x)
    torch.testing.assert_close(found, x.double().sum(1).float(), rtol=1e-5, atol=1e-4)
    for row in range(9):
        assert torch.equal(twin.row_sums(x[row, None]), found[row, None])
    assert torch.equal(twin.row_sums(x.T.contiguous().T), found)


def test_nothing_is_multiplied_where_there_is_nothing() -> None:
    empty = torch.empty(0, 8, device=DEVICE)
    assert op.mm(empty, torch.ones(8, 3, device=DEVICE)).shape == (0, 3)
    assert op.row_sums(empty).shape == (0,)


INSTRUCTIONS = """
import re, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from nibble.kernels import GPU
from nibble.kernels.invariant import triton as twin

kernel, pointers = twin.bmm_kernel, ("x", "weight", "out")
names = kernel.arg_names
for tile in twin.all_tiles(torch.bfloat16, GPU(90, 132, 232448)):
    fixed = dict(bias=None, x_stride_K=1, weight_stride_K=1, EVEN=True, BM=tile.rows, BN=tile.outputs, BK=tile.depth,
                 NEXT=twin.NEIGHBOURS)
    signature = {n: "constexpr" if n in fixed else "*bf16" if n in pointers else "i32" for n in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in (*fixed, "rows")}
    source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in fixed.items()}, aligned)
    options = dict(num_warps=tile.warps, num_stages=tile.stages)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    print(tile.rows, tile.depth, *re.findall(r"(?:wgmma.mma_async|mma.sync)\\S*", ptx))
"""


@pytest.mark.slow
def test_one_instruction_of_hopper_serves_all_tiles() -> None:
    """Each tile goes through K in steps of 16, all by wgmma, whatever the number of rows."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    source = Path(nibble.__file__).parent.parent
    command = [sys.executable, "-W", "ignore", "-c", INSTRUCTIONS]
    run = subprocess.run(command, cwd=source, env=environment, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert len(lines) == len(TILES) - 1
    for line in lines:
        rows, depth, *found = line.split()
        assert set(found) == {f"wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16"}, line
        assert len(found) % (int(depth) // 16) == 0, line

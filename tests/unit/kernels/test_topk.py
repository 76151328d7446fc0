"""topk() of short rows and the largest value of long ones: the twins in Triton's interpreter against torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import nibble
from nibble.kernels import topk as op
from nibble.kernels.topk import naive
from nibble.kernels.topk import triton as fast

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter knows no bfloat16.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
INF, NAN = float("inf"), float("nan")


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    random = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=random).to(DEVICE, dtype)


def assert_same(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for x, right in zip(found, expected, strict=True):
        assert x.dtype == right.dtype and x.shape == right.shape
        assert torch.equal(x.nan_to_num(7.5), right.nan_to_num(7.5)) and torch.equal(x.isnan(), right.isnan())


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(
    ("shape", "k"),
    [((1, 8), 2), ((5, 32), 4), ((3, 128), 8), ((2, 100), 7), ((2, 1024), 32), ((4, 5), 5), ((2, 3, 32), 2), ((3, 1), 1)],
)  # fmt: skip
def test_it_is_torchs(shape: tuple[int, ...], k: int, dtype: torch.dtype) -> None:
    x = values(*shape, dtype=dtype)
    found = fast.topk(x, k)
    assert_same(found, naive.topk(x, k))
    assert torch.equal(found[0], x.topk(k)[0])


def test_the_first_of_equal_values_comes_first() -> None:
    x = values(6, 64).mul(2).round().div(2)
    x[0], x[1] = 0.0, -INF
    x[2, ::2] = -0.0
    found = fast.topk(x, 9)
    assert_same(found, naive.topk(x, 9))
    assert found[1][:2].tolist() == [list(range(9))] * 2


def test_nan_is_the_largest_and_infinite_values_have_their_places() -> None:
    x = values(5, 40)
    x[0] = NAN
    x[1, 3], x[1, 30], x[1, 5] = NAN, -NAN, INF
    x[2] = -INF
    x[2, 38] = 1.0
    x[3, 1:] = NAN
    for k in (1, 5, 32):
        found = fast.topk(x, k)
        assert_same(found, naive.topk(x, k))
        assert_same(found[:1], x.topk(k)[:1])


def test_rows_may_lie_apart() -> None:
    x = values(7, 90)[:, 11:75]
    assert_same(fast.topk(x, 6), naive.topk(x, 6))
    assert_same(fast.topk(x.T, 6), naive.topk(x.T, 6))
    assert_same(fast.topk(x[:0], 6), naive.topk(x[:0], 6))


def test_what_it_serves() -> None:
    assert op.serves(torch.bfloat16, 128, 8) and op.serves(torch.float32, op.MAX_VALUES, op.MAX_K)
    assert not op.serves(torch.float64, 128, 8)
    assert not op.serves(torch.float32, op.MAX_VALUES + 1, 8)
    assert not op.serves(torch.float32, 128, op.MAX_K + 1)
    assert not op.serves(torch.float32, 4, 5), "torch says what is wrong with it"


def test_a_compiler_sees_one_operator() -> None:
    run = torch.compile(op.topk, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (20, 33):
        x = values(rows, 16)
        assert_same(run(x, 3), naive.topk(x, 3))


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("shape", [(1, 1), (3, 37), (2, fast.PART), (5, 2 * fast.PART + 1), (2, 40000)])
def test_the_largest_of_a_long_row(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = values(*shape, dtype=dtype)
    assert_same(fast.likeliest(x), naive.likeliest(x))
    assert_same(fast.likeliest(x[:0]), naive.likeliest(x[:0]))


def test_the_first_of_equal_values_and_nan_in_a_long_row() -> None:
    x = values(7, 3 * fast.PART)
    x[0] = -INF
    x[1, 5000:] = 9.0
    x[2, [4000, 9000]] = NAN
    x[3] = NAN
    x[4, 10000] = INF
    x[5] = 0.0
    x[5, :6000] = -0.0
    x[6] = -1e-40
    found = fast.likeliest(x)
    assert_same(found, naive.likeliest(x))
    assert found[0].tolist()[:6] == [0, 5000, 4000, 0, 10000, 0]
    assert found[1].tolist()[:6] == [0, 5000, -1, -1, 10000, 0]
    wide = values(3, 5000)[:, 7:4800]
    assert_same(fast.likeliest(wide), naive.likeliest(wide))


def drawn(draw: Callable[..., None], x: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    numbers = torch.zeros(2, len(x) + 1, dtype=torch.int64)
    chances = numbers[1].view(torch.float64)
    draw(x, ids, numbers[0, : len(x)], chances[: len(x)])
    assert not numbers[:, len(x) :].any(), "it writes what it was given"
    return numbers[0, : len(x)], chances[: len(x)]


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("shape", [(1, 1), (3, 37), (2, fast.PART), (5, 2 * fast.PART + 1), (2, 40000)])
@pytest.mark.parametrize("has_ids", [False, True])
def test_the_likeliest_token_and_its_chance(
    shape: tuple[int, int], dtype: torch.dtype, has_ids: bool
) -> None:
    x = values(*shape, dtype=dtype) * 2
    ids = torch.randperm(shape[1]) + 7 if has_ids else None
    expected = x.float().softmax(-1).max(-1)
    for draw in (fast.draw_likeliest, naive.draw_likeliest, op.draw_likeliest):
        tokens, chances = drawn(draw, x, ids)
        assert torch.equal(tokens, naive.likeliest(x)[0] if ids is None else ids[naive.likeliest(x)[0]])
        torch.testing.assert_close(chances.float(), expected.values, rtol=1e-5, atol=0)
        assert not len(drawn(draw, x[:0], ids)[0])


def test_chances_where_values_are_no_usual_numbers() -> None:
    x = values(6, 3 * fast.PART)
    x[0] = -INF
    x[1, 5000:] = -INF
    x[2, 9000] = NAN
    x[3, [70, 10000]] = INF
    x[4] = 0.0
    x[4, :6000] = -0.0
    x[5] = -1e30
    x[5, 4097] = -1e29
    for draw in (fast.draw_likeliest, naive.draw_likeliest):
        tokens, chances = drawn(draw, x, None)
        assert tokens[[0, 2, 3, 4, 5]].tolist() == [0, 9000, 70, 0, 4097]
        assert torch.isnan(chances[2])
        expected = [1 / x.shape[1], float(x[1].softmax(-1).max()), 0.5, 1 / x.shape[1], 1.0]
        assert chances[[0, 1, 3, 4, 5]].tolist() == pytest.approx(expected, rel=1e-5)


COMPILED = """
import re, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from nibble.kernels.topk import triton as topk

for dtype, width, k in (("fp32", 128, 8), ("bf16", 32, 4), ("fp32", 256, 8)):
    kernel = topk.topk_kernel
    fixed = dict(WIDTH=width, TOP_K=k, E=width, K=k, PDL=True)
    types = {"x": "*" + dtype, "values": "*" + dtype, "indices": "*i64", "stride": "i32"}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    constants = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(4)}
    source = ASTSource(kernel, signature, constants, aligned)
    options = dict(num_warps=1, launch_pdl=True)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    before = ptx[: ptx.index("griddepcontrol.wait")]
    print(k, ptx.count("redux.sync"), ptx.count("shfl.sync"), "ld.global" in before)
"""


@pytest.mark.slow
def test_a_warp_finds_the_largest_in_one_instruction() -> None:
    """Compiled as for a GPU, which none is needed for: two such instructions for each of the k, and no other way."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILED],
        cwd=Path(nibble.__file__).parent.parent,
        env=os.environ | {"TRITON_INTERPRET": "0"},
        check=False,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    lines = [line.split() for line in run.stdout.splitlines()]
    assert len(lines) == 3
    for k, reductions, shuffles, reads_early in lines:
        assert int(reductions) == 2 * int(k) and reads_early == "False", (k, reductions, shuffles)

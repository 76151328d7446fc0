"""linear() for few rows: the twin in Triton's interpreter against float64, and the operator beside F.linear."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from nibble.kernels import GPU, cdiv
from nibble.kernels import linear as op
from nibble.kernels.linear import sm90
from nibble.kernels.linear import triton as twin
from nibble.models.linear import LargeLinear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tensors(rows: int, n: int, k: int, bias: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    torch.manual_seed(rows + n)
    x, weight = torch.randn(rows, k), torch.randn(n, k) / k**0.5
    halves = [y.to(DEVICE, torch.float16) for y in (x, weight, torch.randn(n))]
    return halves[0], halves[1], halves[2] if bias else None


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("n", [128, 160, 96 * 64])
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 17, 32])
def test_the_twin_multiplies(rows: int, n: int, bias: bool) -> None:
    x, weight, b = tensors(rows, n, 256, bias)
    expected = F.linear(x.double(), weight.double(), None if b is None else b.double())
    found = twin.linear(x[None], weight, b)
    assert found.shape == (1, rows, n) and found.dtype == x.dtype
    assert (found[0].double() - expected).norm() <= 1e-3 * expected.norm()


def test_tiles_of_hopper_fit() -> None:
    """Whatever the weight, the rows and the GPU are; and blocks of a narrow weight are about one a multiprocessor."""
    sizes = (
        8,
        64,
        256,
        512,
        1024,
        2048,
        2560,
        4096,
        5120,
        6144,
        7168,
        8192,
        12288,
        14336,
        18432,
        25600,
        28672,
    )
    for processors, outputs, inputs, rows in product(
        (114, 132, 144), sizes, sizes, (1, 17, 32, 33, 64, 65, 128)
    ):
        tile = sm90.tile_of(outputs, inputs, rows, processors)  # or it raises
        if tile.groups == 1:
            assert 0.9 * processors <= outputs / 64 * tile.splits <= processors
        if rows <= 32 and outputs <= 128 * processors:
            blocks = cdiv(outputs, 64 * tile.groups) * tile.splits
            assert blocks <= processors * tile.per_processor(rows), (outputs, inputs, rows)
    assert sm90.tile_of(4096, 4096, 64, 132) == sm90.Tile(1, 2, 7)
    assert sm90.tile_of(4096, 14336, 32, 132) == sm90.Tile(1, 2, 10)
    assert sm90.tile_of(4096, 14336, 64, 132) == sm90.Tile(1, 2, 8)
    assert sm90.tile_of(28672, 4096, 128, 132) == sm90.Tile(4, 1, 4)
    assert sm90.tile_of(24576, 4096, 128, 132) == sm90.Tile(2, 1, 3)


def test_tiles_are_whole_and_there_are_enough_of_them() -> None:
    hopper = GPU(90, 132, 232448)
    for outputs, inputs in (
        (2048, 4096),
        (4096, 4096),
        (16480, 5120),
        (28672, 4096),
        (4096, 14336),
        (12352, 2048),
    ):
        for rows in (16, 32):
            tile = twin.tile_of(outputs, inputs, 2, hopper, rows)
            assert outputs % tile.outputs == inputs % tile.inputs == 0
            assert outputs // tile.outputs >= 64
            assert tile.stages * (tile.outputs + rows) * tile.inputs * 2 <= hopper.memory


@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n", "k"), [(1, 64), (32, 2880), (128, 2048), (5, 33)])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_the_twin_multiplies_with_narrow_weights(rows: int, n: int, k: int, bias: bool) -> None:
    x, weight, b = tensors(rows, n, k, bias)
    expected = F.linear(x.double(), weight.double(), None if b is None else b.double())
    for inputs in (x[None], torch.zeros(1, rows, k + 8, device=DEVICE, dtype=x.dtype)[..., 8:].copy_(x)):
        found = twin.narrow_linear(inputs, weight, b)
        assert found.shape == (1, rows, n) and found.dtype == x.dtype
        assert (found[0].double() - expected).norm() <= 1e-3 * expected.norm()


def test_rows_may_lie_apart() -> None:
    x, weight, _ = tensors(5, 128, 256, False)
    apart = torch.randn(5, 700, device=DEVICE, dtype=x.dtype)[:, 100:356].copy_(x)
    assert torch.equal(twin.linear(apart, weight, None), twin.linear(x, weight, None))
    assert torch.equal(twin.linear(x.T.contiguous().T, weight, None), twin.linear(x, weight, None))


def test_many_rows_are_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name in ("linear", "narrow_linear"):
        multiply = lambda x, w, b, name=name: calls.append(name) or x @ w.T  # noqa: E731
        monkeypatch.setattr(twin, name, multiply)
    for outputs, kernel in ((op.NARROW, "narrow_linear"), (op.NARROW + 1, "linear")):
        weight = torch.randn(outputs, 4)
        for way, least in ((op.TORCH, op.MMA_ROWS), (op.TRITON, 32)):
            monkeypatch.setattr(op, "_fastest", {op._key(weight, 32): way})
            calls.clear()
            for rows, twins in ((1, 1), (least, 2), (least + 1, 2)):
                x = torch.randn(1, rows, 4)
                assert torch.allclose(op.linear(x, weight), F.linear(x, weight), atol=1e-5)
                assert calls == [kernel] * twins


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("NIBBLE_CACHE", str(tmp_path))
    monkeypatch.setattr(op, "_fastest", {})
    return tmp_path


def wins() -> bool:
    return op._fastest_of(torch.randn(8, 4), op.MMA_ROWS) == op.TRITON


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("error", "ms", "expected"),
    [(0.0, 1.0, True), (0.001, 1.0, True), (0.1, 1.0, False), (float("nan"), 1.0, False), (0.0, 3.0, False)],
)
def test_a_trial_decides(error: float, ms: float, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twin, "narrow_linear", lambda x, w, b: F.linear(x, w, b) * (1 + error))
    monkeypatch.setattr(op, "_ms", lambda multiply, x, w: 2.0 if multiply is F.linear else ms)
    assert wins() is expected


@pytest.mark.parametrize("first", [True, False])
def test_the_next_start_decides_alike(first: bool, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where its trial would end otherwise, unless what is kept of the first is broken."""
    monkeypatch.setattr(twin, "narrow_linear", F.linear)
    for faster, expected in ((first, first), (not first, first)):
        monkeypatch.setattr(op, "_fastest", {})
        monkeypatch.setattr(
            op, "_ms", lambda multiply, x, w, faster=faster: 2.0 - ((multiply is F.linear) != faster)
        )
        assert wins() is expected
    (file,) = (cache / "linear").iterdir()
    file.write_text("tri")
    monkeypatch.setattr(op, "_fastest", {})
    assert wins() is not first


@pytest.mark.usefixtures("cache")
def test_a_twin_that_fails_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twin, "narrow_linear", lambda *_: 1 / 0)
    monkeypatch.setattr(op, "_fastest", {})
    assert not wins()


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    "winners", [{}, {16: "triton"}, {64: "sm90"}, {16: "triton", 32: "sm90", 64: "sm90"}]
)
def test_trials_for_more_rows(winners: dict[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A narrow weight has one trial, others one for each number of rows."""
    tried = []

    def trial(_: torch.Tensor, most: int, *_unused: Path) -> str:
        tried.append(most)
        return winners.get(most, op.TORCH)

    monkeypatch.setattr(op, "_trial", trial)
    monkeypatch.setattr(op, "_may_serve", lambda _: True)
    weight, narrow = torch.randn(op.NARROW + 1, 4), torch.randn(op.NARROW, 4)
    assert op.serves(weight) is bool(winners) and tried == [16, 32, 64, 128]
    for rows, most in ((1, 16), (16, 16), (17, 32), (64, 64), (65, 128), (128, 128)):
        assert op.way_of(weight, rows) == winners.get(most, op.TORCH)
    assert op.way_of(weight, 129) == op.TORCH and op.way_of(torch.randn(3, 5), 1, "untried") == "untried"
    tried.clear()
    assert op.serves(narrow) is (16 in winners) and tried == [16]


def test_of_processes_that_try_at_the_same_time_the_first_decides(tmp_path: Path) -> None:
    path, ways = tmp_path / "linear" / "a trial", {op.TORCH, op.TRITON}
    assert op._keep(path, op.TRITON, ways) == op.TRITON
    assert op._keep(path, op.TORCH, ways) == op.TRITON
    path.write_text("a way of another version")
    assert op._keep(path, op.TORCH, ways) == op.TORCH == path.read_text()
    (tmp_path / "file").touch()
    assert op._keep(tmp_path / "file" / "a trial", op.TRITON, ways) == op.TRITON, "a folder that is none"


def test_what_is_not_on_a_gpu_is_left_alone() -> None:
    assert not op.serves(torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta"))


def test_a_compiler_sees_one_operator() -> None:
    layer = LargeLinear(torch.nn.Linear(4, 8, bias=False))
    run = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
    for rows in (20, 33):
        x = torch.randn(1, rows, 4)
        assert torch.equal(run(x), layer(x))

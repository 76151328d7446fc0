"""Attention over chosen latents against its torch reference: in Triton's interpreter where there is no GPU.

What no list names is poison, so a row that is read without being asked for shows as NaN. PTX, bfloat16 and the kernel
for SM90 are beyond the interpreter; where there is a GPU, the same cases go through what it would run, and so do some
that only it can.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass, replace

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed here", allow_module_level=True)
from torch import Tensor

from nibble import formats
from nibble.formats.base import KVFormat, raw
from nibble.kernels import flash
from nibble.kernels.mla import naive
from nibble.kernels.mla import triton as twin
from nibble.kernels.mla.triton import LatentTile as Shape
from nibble.kernels.types import Paged
from nibble.model_spec import LATENT, Stream

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = (
    "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla", "nvfp4", "nvfp4_ds_mla", "fp4_mx16", "mxfp4",
)  # fmt: skip
NARROW = Shape(rows=16, latents=32, warps=4, stages=2, programs=2)
SMALL = Shape(rows=16, latents=16, warps=4, stages=2, programs=2)
WIDE = Shape(rows=64, latents=16, warps=4, stages=2, programs=2)
POOL = 11
"""Pages of the pool."""

pytestmark = pytest.mark.usefixtures("scalars_bound_loops")


@dataclass(frozen=True)
class Case:
    """listed: slots of each query's list that are somebody's, the first of `top_k` unless `mixed`."""

    format: str
    heads: int = 16
    listed: tuple[int, ...] = (70, 0, 1, 33)
    top_k: int = 70
    mixed: bool = False
    rank: int = 128
    rope: int = 64
    page: int = 16
    dtype: torch.dtype = torch.float32
    packing: str = "nhd"
    shape: Shape | None = NARROW
    splits: int | None = 1

    def __str__(self) -> str:
        kind = f"{self.shape.rows}x{self.shape.latents}" if self.shape else "auto"
        mixed = "-mixed" if self.mixed else ""
        return (
            f"{self.format}-h{self.heads}-r{self.rank}+{self.rope}-p{self.page}-k{self.top_k}{mixed}"
            f"-{self.packing}-{kind}-{self.splits}"
        )


CASES = [
    *(Case(name) for name in FORMATS),
    *(
        Case(name, 5, (9, 0, 41), 48, mixed=True, page=8, packing="record", shape=SMALL, splits=3)
        for name in FORMATS
    ),
    *(Case(name, 20, (64, 3), 64, mixed=True, page=64, packing="hnd", shape=replace(SMALL, rows=32))
      for name in ("fp16", "fp8_e4m3", "nvfp4_ds_mla")),
    Case("fp8_ds_mla", 128, (20,), 40, mixed=True, rank=256, page=64, packing="record", shape=WIDE, splits=2),
    Case("nvfp4_ds_mla", 128, (20,), 40, rank=256, rope=0, page=32, packing="record", shape=WIDE),
    Case("fp8_e4m3", 1, (7, 2), 7, rope=0, shape=None, splits=None),
    Case("nvfp4", 3, (5, 0), 5, rope=32, dtype=torch.float16, shape=None, splits=2),
]  # fmt: skip

LARGE = [
    Case(name, heads, (700, 0, 64, 130, 65), 700, mixed, 512, 64, 64, torch.bfloat16, packing, None, splits)
    for name in ("bf16", "fp8_e4m3", "fp8_ds_mla", "nvfp4", "nvfp4_ds_mla", "fp4_mx16")
    for heads, mixed, packing, splits in ((16, False, "hnd", None), (64, True, "nhd", 1), (128, True, "record", 3))
]  # fmt: skip
"""For what a GPU would choose."""


def lists(case: Case, rng: torch.Generator) -> Tensor:
    """Slots in random order, each once in a list, and nobody for the rest."""
    topk_slots_TK = torch.full((len(case.listed), case.top_k), -1, dtype=torch.int32)
    for row, count in zip(topk_slots_TK, case.listed, strict=True):
        places = torch.randperm(case.top_k, generator=rng) if case.mixed else torch.arange(case.top_k)
        row[places[:count]] = torch.randperm(pages(case) * case.page, generator=rng)[:count].int()
    return topk_slots_TK


def pages(case: Case) -> int:
    return max(POOL, -(-case.top_k // case.page))


def latents(case: Case, topk_slots_TK: Tensor, rng: torch.Generator) -> Paged:
    """Random latents; what is on no list is poison."""
    dim = case.rank + case.rope
    fmt = formats.get(case.format).bound(Stream(LATENT, 1, dim, case.rope))
    scale = torch.tensor(0.02 if fmt.needs_scale else 1.0)
    planes = fmt.encode(torch.randn(pages(case), 1, case.page, dim, generator=rng), scale)
    planes = tuple(map(hnd, planes)) if case.packing == "hnd" else planes
    planes = records(planes) if case.packing == "record" else planes
    listed_PS = torch.zeros(pages(case) * case.page, dtype=torch.bool)
    listed_PS[topk_slots_TK[topk_slots_TK >= 0].long()] = True
    poisoned = ~listed_PS.view(-1, 1, case.page, 1)
    for plane in planes:
        raw(plane).masked_fill_(poisoned, 255 if plane.dtype.itemsize == 1 else -1)
    return on_device(fmt, dim, planes, scale)


def hnd(plane: Tensor) -> Tensor:
    """The same plane as one of two layers of a page, say: pages further apart than their slots are long."""
    room = plane.new_empty(len(plane), 2, *plane.shape[2:])
    raw(room)[:, 0], raw(room)[:, 1] = raw(plane)[:, 0], 127
    return room[:, :1]


def records(planes: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The same planes as columns of one array of bytes."""
    parts = [plane.contiguous().view(torch.uint8) for plane in planes]
    columns = torch.cat(parts, -1).split([part.shape[-1] for part in parts], -1)
    return tuple(column.view(plane.dtype) for column, plane in zip(columns, planes, strict=True))


def on_device(fmt: KVFormat, dim: int, planes: tuple[Tensor, ...], scale: Tensor) -> Paged:
    """Strides are kept."""

    def moved(plane: Tensor) -> Tensor:
        whole = plane.new_empty(0).set_(plane.untyped_storage())
        return whole.to(DEVICE).as_strided(plane.shape, plane.stride(), plane.storage_offset())

    return Paged(fmt, dim, tuple(map(moved, planes)), scale.to(DEVICE))


def both(case: Case) -> tuple[Tensor, Tensor]:
    """What the twin and the reference say."""
    rng = torch.Generator().manual_seed(7)
    topk_slots_TK = lists(case, rng)
    stored = latents(case, topk_slots_TK, rng)
    shape_THD = len(case.listed), case.heads, case.rank + case.rope
    q_THD = torch.randn(shape_THD, generator=rng).to(DEVICE, case.dtype)
    scale = (case.rank + case.rope) ** -0.5
    assert twin.serves_latents(stored, case.rope)
    topk_slots_TK = topk_slots_TK.to(DEVICE)
    expected = naive.sparse_mla_attention(q_THD.float(), stored, case.rope, topk_slots_TK, scale)
    found = twin.sparse_mla_attention(
        q_THD, stored, case.rope, topk_slots_TK, scale, shape=case.shape, splits=case.splits
    )
    assert found.dtype == case.dtype and found.shape == (*shape_THD[:2], case.rank)
    return found.float(), expected


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_agrees_with_its_reference(case: Case) -> None:
    found, expected = both(case)
    error = (found - expected).abs().max()
    assert error <= (1e-5 if case.dtype == torch.float32 else 2e-3), f"error {error:.1e}"
    assert not found[[count == 0 for count in case.listed]].any()


def test_the_log_sum_exp_agrees_with_its_reference() -> None:
    """Where a list would not be split, too; and where it is empty."""
    rng = torch.Generator().manual_seed(7)
    case = Case("fp16", 5, (30, 0, 4), 30, mixed=True)
    topk_slots_TK = lists(case, rng)
    stored = latents(case, topk_slots_TK, rng)
    q_THD = torch.randn(3, 5, 192, generator=rng).to(DEVICE)
    topk_slots_TK = topk_slots_TK.to(DEVICE)
    expected = naive.partial_sparse_mla_attention(q_THD, stored, 64, topk_slots_TK, 0.1)
    assert expected.lse_HT[:, 1].isneginf().all()
    for splits in (1, 3):
        lse_TH = torch.full((3, 5), torch.nan, device=DEVICE)
        values_THR = twin.sparse_mla_attention(
            q_THD, stored, 64, topk_slots_TK, 0.1, splits=splits, lse_TH=lse_TH
        )
        torch.testing.assert_close(values_THR, expected.values_THD, rtol=0, atol=1e-5)
        torch.testing.assert_close(lse_TH.T, expected.lse_HT, rtol=0, atol=1e-5)


@pytest.mark.skipif(DEVICE == "cpu", reason="bfloat16 is beyond the interpreter")
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_it_agrees_with_its_reference_as_a_gpu_runs_it(case: Case) -> None:
    found, expected = both(case)
    error = ((found - expected).norm() / expected.norm()).item()
    assert error <= 6e-3, f"error {error:.1e}"
    assert not found[[count == 0 for count in case.listed]].any()


def on_cpu(stored: Paged) -> Paged:
    return Paged(
        stored.format, stored.dim, tuple(plane.cpu() for plane in stored.planes_PHS), stored.scale.cpu()
    )


def test_the_reference_is_the_book() -> None:
    """Each query and head alone, over the listed latents alone; steps change nothing."""
    rng = torch.Generator().manual_seed(7)
    case = Case("fp16", 3, (30, 0, 4), 30, mixed=True)
    topk_slots_TK = lists(case, rng)
    stored = on_cpu(latents(case, topk_slots_TK, rng))
    q_THD = torch.randn(3, 3, 192, generator=rng)
    found = naive.sparse_mla_attention(q_THD, stored, 64, topk_slots_TK, 0.1)
    values_SD = stored.planes_PHS[0].float().view(-1, 192)
    for query, slots, mean in zip(q_THD, topk_slots_TK, found, strict=True):
        rows = values_SD[slots[slots >= 0].long()]
        expected = (query @ rows.T * 0.1).softmax(-1) @ rows[:, :128]
        assert torch.allclose(mean, expected, atol=1e-5)


def test_sinks_take_weight_and_have_no_value() -> None:
    rng = torch.Generator().manual_seed(7)
    case = Case("fp16", 3, (30, 0, 4), 30, mixed=True)
    topk_slots_TK = lists(case, rng)
    stored = on_cpu(latents(case, topk_slots_TK, rng))
    q_THD, sinks_H = torch.randn(3, 3, 192, generator=rng), torch.tensor([-1.0, 0.5, 30.0])
    found = naive.sparse_mla_attention(q_THD, stored, 64, topk_slots_TK, 0.1, sinks_H)
    values_SD = stored.planes_PHS[0].float().view(-1, 192)
    for query, slots, mean in zip(q_THD, topk_slots_TK, found, strict=True):
        rows = values_SD[slots[slots >= 0].long()]
        weights = torch.cat((query @ rows.T * 0.1, sinks_H[:, None]), -1).softmax(-1)[:, :-1]
        assert torch.allclose(mean, weights @ rows[:, :128], atol=1e-5)
    assert not found[1].any()


def test_a_row_does_not_depend_on_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(7)
    case = Case("fp8_ds_mla", 5, (30, 2, 4, 9), 30)
    topk_slots_TK = lists(case, rng)
    stored = on_cpu(latents(case, topk_slots_TK, rng))
    q_THD = torch.randn(4, 5, 192, generator=rng)
    whole = naive.sparse_mla_attention(q_THD, stored, 64, topk_slots_TK, 0.1)
    monkeypatch.setattr(naive, "MAX_VALUES", 1)
    assert torch.equal(whole, naive.sparse_mla_attention(q_THD, stored, 64, topk_slots_TK, 0.1))


@pytest.mark.parametrize("dealt", [1, 2, 4])
def test_shares_are_joined_in_the_order_of_values(dealt: int) -> None:
    """Of the pieces that the kernel for SM90 leaves; a share that saw nothing holds anything."""
    tokens, splits, heads, rank = 2, 3, 4, 96
    parts_TSHR = torch.randn(tokens, splits, heads, rank, generator=torch.Generator().manual_seed(0))
    lse_TSH = torch.randn(tokens, splits, heads, generator=torch.Generator().manual_seed(1))
    lse_TSH[0, 1], parts_TSHR[0, 1], lse_TSH[1, :, 2] = -torch.inf, torch.nan, -torch.inf
    weights_TSH = torch.exp2(lse_TSH).nan_to_num()
    weights_TSH /= weights_TSH.sum(1, keepdim=True).clamp(min=1e-30)
    mean_THR = (parts_TSHR.nan_to_num() * weights_TSH[..., None]).sum(1)
    expected_THR = mean_THR.unflatten(2, (dealt, -1)).transpose(2, 3).flatten(2)
    out_THR = torch.full((tokens, heads, rank), torch.nan, device=DEVICE)
    lse_TH = torch.full((tokens, heads), torch.nan, device=DEVICE)
    twin.sparse_combine_kernel[(tokens, heads)](
        out_THR, lse_TH, parts_TSHR.to(DEVICE), lse_TSH.to(DEVICE), heads, rank, splits, dealt, 4, 128
    )
    torch.testing.assert_close(out_THR.cpu(), expected_THR)
    # Those of shares are in powers of two.
    torch.testing.assert_close(lse_TH.cpu(), (lse_TSH * math.log(2)).logsumexp(1))


@pytest.mark.parametrize(("programs", "splits"), [(16, 8), (128, 1), (256, 1), (64, 2), (4000, 1)])
def test_lists_are_split_where_there_are_few_queries(programs: int, splits: int) -> None:
    assert flash.splits_of(programs, 32, 132) == splits

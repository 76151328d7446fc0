"""Attention over paged latents against its torch reference: in Triton's interpreter where there is no GPU.

Pages are in random order over poisoned memory, so a slot that is not a request's own shows as NaN. PTX, bfloat16 and
the kernel for SM90 are beyond the interpreter; where there is a GPU, the same cases go through what it would run.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed here", allow_module_level=True)
from torch import Tensor

from nibble import formats
from nibble.formats.base import KVFormat, raw
from nibble.kernels.mla import naive
from nibble.kernels.mla import triton as twin
from nibble.kernels.mla.triton import LatentTile as Shape
from nibble.kernels.types import AttentionBatch, Paged
from nibble.model_spec import LATENT, Phase, Stream

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = (
    "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla", "nvfp4", "nvfp4_ds_mla", "fp4_mx16", "mxfp4",
)  # fmt: skip
NARROW = Shape(rows=16, latents=32, warps=4, stages=2, programs=2)
WIDE = Shape(rows=32, latents=16, warps=4, stages=2, programs=2)


pytestmark = pytest.mark.usefixtures("scalars_bound_loops")


@dataclass(frozen=True)
class Case:
    """batch: stored tokens and query tokens of each request; one of no stored tokens is padding."""

    format: str
    heads: int = 16
    batch: tuple[tuple[int, int], ...] = ((1, 1), (16, 1), (0, 1), (75, 1))
    rank: int = 128
    rope: int = 64
    page: int = 16
    dtype: torch.dtype = torch.float32
    record: bool = False
    shape: Shape | None = NARROW
    concurrency: int = 8
    window: int | None = None

    def __str__(self) -> str:
        kind = f"{self.shape.rows}x{self.shape.latents}" if self.shape else "auto"
        return f"{self.format}-h{self.heads}-r{self.rank}+{self.rope}-p{self.page}-{kind}-{self.concurrency}"


CASES = [
    *(Case(name) for name in FORMATS),
    *(Case(name, 20, ((40, 9), (0, 1), (130, 2)), page=64, shape=WIDE, concurrency=1) for name in FORMATS),
    *(Case(name, rank=256, rope=0, page=32, record=True) for name in ("fp8_ds_mla", "nvfp4_ds_mla")),
    *(Case(name, 128, page=128, record=True, shape=WIDE) for name in ("fp8_ds_mla", "nvfp4_ds_mla")),
    Case(
        "nvfp4_ds_mla",
        64,
        ((600, 1), (0, 1), (5, 1)),
        rope=32,
        dtype=torch.float16,
        shape=None,
        concurrency=6,
    ),
    Case("fp8_e4m3", 128, dtype=torch.float16, shape=None),
    Case("bf16", 32, ((300, 2), (33, 2)), rope=0, page=64, shape=None, concurrency=1),
    Case("fp4_mx16", 3, ((90, 5), (20, 3)), rope=32),
    Case("bf16", window=20),
    Case("fp8_ds_mla", 20, ((40, 9), (0, 1), (130, 33)), page=64, shape=WIDE, concurrency=1, window=37),
    Case("nvfp4", 4, ((900, 3), (5, 3)), window=600, concurrency=8),
]
PARTIAL = [
    Case("bf16", window=20),
    Case("nvfp4_ds_mla", 20, ((4, 9), (0, 1), (130, 2)), page=64, shape=WIDE, concurrency=1),
    Case("nvfp4", 4, ((900, 3), (1, 3)), concurrency=8),
]


def latents(case: Case, pages: Tensor, rng: torch.Generator) -> Paged:
    """Random latents; what no request owns is poison."""
    dim, count = case.rank + case.rope, int(pages.max()) + 3
    fmt = formats.get(case.format).bound(Stream(LATENT, 1, dim, case.rope))
    scale = torch.tensor(0.02 if fmt.needs_scale else 1.0)
    planes = fmt.encode(torch.randn(count, 1, case.page, dim, generator=rng), scale)
    if case.record:
        planes = records(planes)
    mine_PS = torch.zeros(count, case.page, dtype=torch.bool)
    for row, (stored, _) in zip(pages, case.batch, strict=True):
        for token in range(stored):
            mine_PS[row[token // case.page], token % case.page] = True
    for plane in planes:
        raw(plane).masked_fill_(~mine_PS[:, None, :, None], 255 if plane.dtype.itemsize == 1 else -1)
    return on_device(fmt, dim, planes, scale)


def records(planes: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The same planes as columns of one array of bytes."""
    parts = [plane.contiguous().view(torch.uint8) for plane in planes]
    columns = torch.cat(parts, -1).split([part.shape[-1] for part in parts], -1)
    return tuple(column.view(plane.dtype) for column, plane in zip(columns, planes, strict=True))


def on_device(fmt: KVFormat, dim: int, planes: tuple[Tensor, ...], scale: Tensor) -> Paged:
    return Paged(fmt, dim, tuple(plane.to(DEVICE) for plane in planes), scale.to(DEVICE))


def table(case: Case, rng: torch.Generator) -> Tensor:
    counts = [-(-stored // case.page) for stored, _ in case.batch]
    order = torch.randperm(sum(counts), generator=rng).tolist()
    pages = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, count in zip(pages, counts, strict=True):
        row[:count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    return pages


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_agrees_with_its_reference(case: Case) -> None:
    rng = torch.Generator().manual_seed(7)
    pages = table(case, rng)
    stored = latents(case, pages, rng)
    segment = AttentionBatch.from_lens(
        Phase.VERIFY, 0, [n for _, n in case.batch], [length for length, _ in case.batch], pages.to(DEVICE)
    )
    q_THD = torch.randn(segment.stop, case.heads, case.rank + case.rope, generator=rng).to(DEVICE, case.dtype)
    scale = (case.rank + case.rope) ** -0.5
    expected = naive.mla_attention(q_THD, stored, case.rope, segment, scale, case.window)
    found = twin.mla_attention(
        q_THD,
        stored,
        case.rope,
        segment,
        scale,
        window=case.window,
        shape=case.shape,
        concurrency=case.concurrency,
    )
    assert twin.serves_latents(stored, case.rope)
    assert found.dtype == case.dtype and found.shape == (segment.stop, case.heads, case.rank)
    error = (found.float() - expected.float()).abs().max()
    assert error <= (1e-5 if case.dtype == torch.float32 else 2e-3), f"error {error:.1e}"


@pytest.mark.parametrize("case", PARTIAL, ids=str)
def test_the_log_sum_exp_agrees_with_its_reference(case: Case) -> None:
    rng = torch.Generator().manual_seed(7)
    pages = table(case, rng)
    stored = latents(case, pages, rng)
    segment = AttentionBatch.from_lens(
        Phase.VERIFY, 0, [n for _, n in case.batch], [length for length, _ in case.batch], pages.to(DEVICE)
    )
    q_THD = torch.randn(segment.stop, case.heads, case.rank + case.rope, generator=rng).to(DEVICE)
    expected = naive.partial_mla_attention(q_THD, stored, case.rope, segment, 0.1, case.window)
    lse_TH = torch.full(q_THD.shape[:2], torch.nan, device=DEVICE)
    values_THR = twin.mla_attention(
        q_THD, stored, case.rope, segment, 0.1, window=case.window, shape=case.shape,
        concurrency=case.concurrency, lse_TH=lse_TH,
    )  # fmt: skip
    torch.testing.assert_close(values_THR, expected.values_THD, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse_TH.T, expected.lse_HT, rtol=0, atol=1e-5)


def test_padding_is_zeros() -> None:
    rng = torch.Generator().manual_seed(7)
    case = Case("nvfp4_ds_mla", batch=((0, 1), (30, 1), (0, 1)))
    pages = table(case, rng)
    stored = latents(case, pages, rng)
    segment = AttentionBatch.from_lens(Phase.DECODE, 0, [1, 1, 1], [0, 30, 0], pages.to(DEVICE))
    q_THD = torch.randn(3, case.heads, case.rank + case.rope, generator=rng).to(DEVICE)
    found = twin.mla_attention(q_THD, stored, case.rope, segment, 0.1, shape=NARROW, concurrency=8)
    assert not found[[0, 2]].any() and found[1].any()


def test_the_reference_sees_no_later_token() -> None:
    """By the book: each query alone, over the tokens up to its own."""
    rng = torch.Generator().manual_seed(7)
    q_nHD, latents_LD = torch.randn(3, 4, 24, generator=rng), torch.randn(9, 24, generator=rng)
    values_nHR, lse_Hn = naive.dense(q_nHD, latents_LD, 8, 0.3)
    for i in range(3):
        seen_LD = latents_LD[: 7 + i]
        scores = q_nHD[i] @ seen_LD.T * 0.3
        assert torch.allclose(values_nHR[i], scores.softmax(-1) @ seen_LD[:, :16], atol=1e-6)
        assert torch.allclose(lse_Hn[:, i], scores.logsumexp(-1))

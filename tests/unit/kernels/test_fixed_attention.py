"""Attention over splits of fixed keys: a query's bits are the same in any chunk and company, whoever shares the splits.

In Triton's interpreter, whose arithmetic is NumPy's: this proves which keys meet in which order. That instructions of a
GPU keep that, with the tiles and dtypes that are served there, is for tests/gpu/test_deterministic_gpu.py. Pages hold
poison where no request has stored anything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from nibble import formats
from nibble.formats.base import raw
from nibble.kernels.attention import naive
from nibble.kernels.attention.fixed import fixed_attention
from nibble.kernels.attention.triton import TileShape
from nibble.kernels.mla import naive as naive_mla
from nibble.kernels.mla.fixed import fixed_mla_attention
from nibble.kernels.mla.triton import LatentTile
from nibble.kernels.types import AttentionBatch, AttentionParams, Paged
from nibble.model_spec import Phase

pytestmark = [
    pytest.mark.usefixtures("scalars_bound_loops", "rows_alike"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="these tiles are for the interpreter"),
]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE, SPLIT, LENGTH, HEADS, GROUP, DIM = 16, 32, 50, 2, 2, 32
FEW = TileShape(rows=16, keys=16, join=True, warps=4, stages=1, programs=1)
MANY = replace(FEW, rows=32)
LATENT = LatentTile(rows=16, latents=16, warps=4, stages=1, programs=1)


@dataclass(frozen=True)
class Case:
    format: str
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


CASES = (Case("nvfp4"), Case("bf16", window=21, sinks=True), Case("fp8_e4m3", softcap=4.0))


class Scene:
    """A request of LENGTH tokens with their queries, and others beside it, over pages in random order."""

    def __init__(self, name: str, heads: int, dim: int) -> None:
        rng = torch.Generator().manual_seed(3)
        self.lens = (LENGTH, 9, 20)
        counts = [-(-n // PAGE) for n in self.lens]
        order = iter(torch.randperm(sum(counts), generator=rng).tolist())
        self.table_BN = torch.zeros(3, max(counts), dtype=torch.int32)
        for row, count in zip(self.table_BN, counts, strict=True):
            row[:count] = torch.tensor([next(order) for _ in range(count)], dtype=torch.int32)
        fmt, scale = formats.get(name), torch.tensor(0.02 if formats.get(name).needs_scale else 1.0)

        def pages() -> Paged:
            values = torch.randn(sum(counts) + 1, heads, PAGE, dim, generator=rng)
            planes = [plane.clone() for plane in fmt.encode(values, scale)]
            for row, n in zip(self.table_BN, self.lens, strict=True):
                for plane in planes if n % PAGE else ():
                    raw(plane)[row[n // PAGE], :, n % PAGE :] = 255 if plane.dtype.itemsize == 1 else -1
            return Paged(fmt, dim, tuple(plane.to(DEVICE) for plane in planes), scale.to(DEVICE))

        self.k, self.v = pages(), pages()
        self.q_THD = torch.randn(LENGTH, heads * GROUP, dim, generator=rng).to(DEVICE)
        self.sinks = torch.randn(heads * GROUP, generator=rng).to(DEVICE)

    def batch(self, end: int, count: int, *, company: bool = False) -> tuple[Tensor, AttentionBatch]:
        """The queries of tokens [end - count, end), alone or between others'."""
        q_THD = self.q_THD[end - count : end]
        table_BN = self.table_BN.to(DEVICE)
        if not company:
            return q_THD, AttentionBatch.from_lens(Phase.EXTEND, 0, (count,), (end,), table_BN[:1])
        parts = torch.cat((self.q_THD[:3], q_THD, self.q_THD[:1]))
        lens = (9, end, 20)
        return parts, AttentionBatch.from_lens(Phase.EXTEND, 0, (3, count, 1), lens, table_BN[[1, 0, 2]])


def check(scene: Scene, attend: Any, shapes: tuple[Any, ...], expected: Tensor) -> None:
    whole = attend(*scene.batch(LENGTH, LENGTH), shape=shapes[0], spread=False)
    assert float((whole - expected).abs().max()) < 1e-5
    for shape, spread in ((shapes[0], False), (shapes[0], True), (shapes[-1], False)):
        run = partial(attend, shape=shape, spread=spread)
        for chunk, first in ((1, LENGTH - 2), (7, LENGTH - 10), (40, 0)):
            for start in range(first, LENGTH, chunk):
                end = min(start + chunk, LENGTH)
                assert torch.equal(run(*scene.batch(end, end - start)), whole[start:end]), (chunk, start)
        found = run(*scene.batch(LENGTH, 7, company=True))
        assert torch.equal(found[3:10], whole[-7:]), "company"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_query_has_the_same_bits_however_it_comes(case: Case) -> None:
    scene = Scene(case.format, HEADS, DIM)
    params = AttentionParams(DIM**-0.5, case.window, case.softcap, scene.sinks if case.sinks else None)

    def attend(q_THD: Tensor, batch: AttentionBatch, **options: Any) -> Tensor:
        return fixed_attention(q_THD, scene.k, scene.v, batch, params, size=SPLIT, **options)

    q_THD, batch = scene.batch(LENGTH, LENGTH)
    check(scene, attend, (FEW, MANY), naive.paged_attention(q_THD, scene.k, scene.v, batch, params))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "window"), [("bf16", None), ("fp8_e4m3", None), ("bf16", 21)])
def test_a_query_over_latents_has_the_same_bits_however_it_comes(name: str, window: int | None) -> None:
    scene, rope = Scene(name, 1, 96), 32

    def attend(q_THD: Tensor, batch: AttentionBatch, **options: Any) -> Tensor:
        return fixed_mla_attention(q_THD, scene.k, rope, batch, 0.1, window, size=SPLIT, **options)

    q_THD, batch = scene.batch(LENGTH, LENGTH)
    check(scene, attend, (LATENT,), naive_mla.mla_attention(q_THD, scene.k, rope, batch, 0.1, window))


@pytest.mark.parametrize("spread", [False, True])
def test_padding_is_zeros(spread: bool) -> None:
    scene = Scene("bf16", HEADS, DIM)
    table_BN = scene.table_BN.to(DEVICE)[:2]
    batch = AttentionBatch.from_lens(Phase.DECODE, 0, (1, 1), (45, 0), table_BN)
    params = AttentionParams(1.0, sinks_H=scene.sinks)
    found = fixed_attention(scene.q_THD[:2], scene.k, scene.v, batch, params, size=SPLIT, spread=spread)
    assert found[0].any() and not found[1].any()


def test_splits_that_lie_elsewhere_change_bits() -> None:
    """The comparison can fail: other splits are another order of sums."""
    scene = Scene("nvfp4", HEADS, DIM)
    q_THD, batch = scene.batch(LENGTH, 7)
    attend = partial(fixed_attention, q_THD, scene.k, scene.v, batch, AttentionParams(DIM**-0.5), shape=FEW)
    assert not torch.equal(attend(size=SPLIT), attend(size=2 * SPLIT))

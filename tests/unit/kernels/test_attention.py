"""The portable kernels that read pages, against their torch references, in Triton's interpreter where there is no GPU.

Pages are in random order over poisoned memory, so a slot that is not a request's own shows as NaN. PTX and bfloat16
are beyond the interpreter; the conformance suite judges both on a GPU.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed here", allow_module_level=True)
from torch import Tensor

import nibble
from nibble import formats
from nibble.attention import backends
from nibble.cache.layout import CacheLayout, LayerLayout, StreamLayout
from nibble.cache.pool import PagedPool
from nibble.cache.scales import ONE
from nibble.formats import scheme
from nibble.formats.base import raw
from nibble.kernels import GPU
from nibble.kernels.append import naive as naive_gather
from nibble.kernels.append import triton as triton_gather
from nibble.kernels.attention import naive
from nibble.kernels.attention import triton as triton_attention
from nibble.kernels.attention.triton import TileShape as Shape
from nibble.kernels.types import AttentionBatch, AttentionParams, Paged
from nibble.model_spec import HEADS as ONE_HEAD
from nibble.model_spec import Phase, Stream

SOURCE = Path(nibble.__file__).parent.parent
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Shape(rows=16, keys=32, join=False, warps=4, stages=2, programs=4)
JOINED = Shape(rows=32, keys=32, join=True, warps=4, stages=2, programs=4)


pytestmark = pytest.mark.usefixtures("scalars_bound_loops")


@dataclass(frozen=True)
class Case:
    """batch: tokens already stored and new tokens of each request; a request of fewer than none stored is padding."""

    k: str
    v: str
    batch: tuple[tuple[int, int], ...]
    dim: int = 64
    page: int = 16
    packing: str = "hnd"
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    per_head: bool = False
    shape: Shape = SMALL
    concurrency: int = 1

    def __str__(self) -> str:
        kind = "joined" if self.shape.join else "parts"
        return f"{self.k}-{self.v}-d{self.dim}-p{self.page}-{kind}-{self.concurrency}"


HEADS, GROUP = 2, 3
FORMATS = [name for name in scheme.fitting(*ONE_HEAD) if name in formats.names()]
DECODE = ((0, 1), (15, 1), (70, 1))
MORE = ((0, 5), (33, 20))
CASES = [
    *(Case(name, name, DECODE, concurrency=8) for name in FORMATS),
    *(Case(name, name, ((9, 7),), shape=JOINED) for name in FORMATS),
    Case(
        "fp8_e4m3",
        "nvfp4",
        DECODE,
        80,
        16,
        "nhd",
        window=37,
        softcap=5.0,
        sinks=True,
        per_head=True,
        concurrency=8,
    ),
    Case("nvfp4", "nvfp4", MORE, dtype=torch.float16, shape=JOINED),
    Case("mxfp4", "fp8_e5m2", ((40, 4), (7, 2)), page=64, dtype=torch.float16, shape=JOINED, concurrency=8),
    Case("nvfp4", "nvfp4", MORE, window=9, shape=JOINED),
    Case("bf16", "bf16", MORE, packing="nhd", window=9, sinks=True, shape=JOINED),
    Case("nvfp4", "nvfp4", MORE, dim=96, page=32, softcap=3.0),
    Case("nvfp4", "nvfp4", ((40, 1), (-1, 1), (5, 1)), sinks=True),
    Case("nvfp4", "nvfp4", ((600, 1), (-1, 1), (5, 1)), dim=128, page=128, concurrency=8),
    Case("fp8_e4m3", "fp8_e4m3", ((300, 1), (0, 1)), dim=128, page=128, window=40, sinks=True, concurrency=8),
]


def paged(name: str, case: Case, pages: Tensor, rng: torch.Generator) -> Paged:
    """Random pages of a stream; what no request owns is poison."""
    fmt, count = formats.get(name), int(pages.max()) + 3
    scale = torch.ones(HEADS, 1) if case.per_head else torch.tensor(1.0)
    if fmt.needs_scale:
        scale = scale * 0.02
    x_PHSD = torch.randn(count, HEADS, case.page, case.dim, generator=rng)
    planes = [plane.clone() for plane in fmt.encode(x_PHSD, scale.unsqueeze(-1) if case.per_head else scale)]
    mine_PS = torch.zeros(count, case.page, dtype=torch.bool)
    for row, (stored, new) in zip(pages, case.batch, strict=True):
        for token in range(stored + new):
            mine_PS[row[token // case.page], token % case.page] = True
    for plane in planes:
        raw(plane).masked_fill_(~mine_PS[:, None, :, None], 255 if plane.dtype.itemsize == 1 else -1)
    if case.packing == "nhd":
        planes = [plane.transpose(1, 2).contiguous().transpose(1, 2) for plane in planes]
    return Paged(fmt, case.dim, tuple(plane.to(DEVICE) for plane in planes), scale.to(DEVICE))


def table(case: Case, rng: torch.Generator) -> Tensor:
    counts = [-(-(stored + new) // case.page) for stored, new in case.batch]
    order = torch.randperm(sum(counts), generator=rng).tolist()
    pages = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, count in zip(pages, counts, strict=True):
        row[:count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    return pages


Arguments = tuple[Tensor, Paged, Paged, AttentionBatch, AttentionParams]


def arguments(case: Case) -> Arguments:
    rng = torch.Generator().manual_seed(5)
    pages = table(case, rng)
    k, v = (paged(name, case, pages, rng) for name in (case.k, case.v))
    segment = AttentionBatch.from_lens(
        Phase.EXTEND, 0, [new for _, new in case.batch], [sum(lens) for lens in case.batch], pages.to(DEVICE)
    )
    heads = HEADS * GROUP
    q_THD = torch.randn(segment.stop, heads, case.dim, generator=rng).to(DEVICE, case.dtype)
    sinks = torch.randn(heads, generator=rng).to(DEVICE) if case.sinks else None
    return q_THD, k, v, segment, AttentionParams(case.dim**-0.5, case.window, case.softcap, sinks)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_agrees_with_its_reference(case: Case) -> None:
    given = arguments(case)
    expected = naive.paged_attention(*given)
    found = triton_attention.paged_attention(*given, shape=case.shape, concurrency=case.concurrency)
    assert found.dtype == case.dtype
    error = (found.float() - expected.float()).abs().max()
    assert error <= (1e-5 if case.dtype == torch.float32 else 2e-3), f"error {error:.1e}"


PARTIAL = [
    *CASES[2 * len(FORMATS) :],
    # More queries than stored tokens: the first of them see nothing.
    Case("bf16", "bf16", ((-3, 5), (0, 3), (-4, 4), (90, 4)), concurrency=8),
    Case("nvfp4", "nvfp4", ((-30, 40), (-7, 7)), window=9, sinks=True, shape=JOINED),
]


@pytest.mark.parametrize("case", PARTIAL, ids=str)
def test_the_log_sum_exp_agrees_with_its_reference(case: Case) -> None:
    given = arguments(case)
    expected = naive.partial_attention(*given)
    lse_TH = torch.full(given[0].shape[:2], torch.nan, device=DEVICE)
    values_THD = triton_attention.paged_attention(
        *given, shape=case.shape, concurrency=case.concurrency, lse_TH=lse_TH
    )
    # Of prompts values are rounded to the query's dtype.
    assert values_THD.dtype == (torch.float32 if given[3].phase.decodes else case.dtype)
    values_THD = values_THD.float()
    tolerance = 1e-5 if case.dtype == torch.float32 else 2e-3
    torch.testing.assert_close(values_THD, expected.values_THD, rtol=0, atol=tolerance)
    torch.testing.assert_close(lse_TH.T, expected.lse_HT, rtol=0, atol=tolerance)


def test_the_reference_is_the_book() -> None:
    """The log-sum-exp is the logarithm of the softmax's sum, sinks included; of no keys it is -inf."""
    q_THD, k, v, segment, spec = arguments(Case("fp32", "fp32", ((-2, 3), (-2, 2), (20, 1)), softcap=5.0))
    values_THD, lse_HT = naive.partial_attention(q_THD, k, v, segment, spec)
    assert lse_HT[:, [0, 1, 3, 4]].isneginf().all() and not values_THD[[0, 1, 3, 4]].any()
    k_GLD, v_GLD = (
        naive.dequantize_pages(x, segment.page_table_BN[2:3], torch.float32, heads_first=True)[0, :, :21]
        for x in (k, v)
    )
    for head in range(HEADS * GROUP):
        scores_L = 5.0 * torch.tanh(k_GLD[head // GROUP] @ q_THD[5, head] * spec.scale / 5.0)
        weights_L = scores_L.exp()
        torch.testing.assert_close(lse_HT[head, 5], weights_L.sum().log())
        torch.testing.assert_close(
            values_THD[5, head], weights_L @ v_GLD[head // GROUP] / weights_L.sum(), rtol=1e-4, atol=1e-5
        )
    sinks = torch.linspace(-2, 3, HEADS * GROUP, device=DEVICE)
    with_sinks = naive.partial_attention(q_THD, k, v, segment, replace(spec, sinks_H=sinks)).lse_HT
    torch.testing.assert_close(with_sinks, torch.logaddexp(lse_HT, sinks[:, None]))


@pytest.mark.parametrize("merge", [naive.merge_lse, triton_attention.merge_lse])
def test_parts_of_no_keys_weigh_nothing(merge: Any) -> None:
    """One part, or both, may be empty: no NaN, and the other part as it is."""
    rng = torch.Generator().manual_seed(3)
    values_2THD = torch.randn(2, 4, 3, 40, generator=rng)
    lse_2HT = torch.randn(2, 3, 4, generator=rng) * 30
    lse_2HT[0, :, :2] = lse_2HT[1, :, 1:3] = -torch.inf
    values_2THD[0, :2] = values_2THD[1, 1:3] = torch.nan
    a, b = (naive.PartialAttention(values_2THD[i].to(DEVICE), lse_2HT[i].to(DEVICE)) for i in (0, 1))
    values_THD, lse_HT = merge(a, b, torch.float32)
    torch.testing.assert_close(lse_HT, torch.logaddexp(a.lse_HT, b.lse_HT))
    assert torch.equal(values_THD[0], b.values_THD[0]) and torch.equal(values_THD[2], a.values_THD[2])
    assert not values_THD[1].any()
    weight_H1 = torch.sigmoid(a.lse_HT - b.lse_HT)[:, 3:]
    expected = a.values_THD[3] * weight_H1 + b.values_THD[3] * (1 - weight_H1)
    torch.testing.assert_close(values_THD[3], expected)


def test_a_tile_has_room_for_all_query_heads_of_a_kv_head() -> None:
    """Falcon's 71, in one token and in several."""
    case = Case("fp8_e4m3", "nvfp4", ((20, 1), (7, 2)))
    rng = torch.Generator().manual_seed(5)
    pages = table(case, rng)
    k, v = (paged(name, case, pages, rng) for name in (case.k, case.v))
    segment = AttentionBatch.from_lens(Phase.EXTEND, 0, (1, 2), (21, 9), pages.to(DEVICE))
    q_THD = torch.randn(3, HEADS * 71, case.dim, generator=rng).to(DEVICE)
    found = triton_attention.paged_attention(q_THD, k, v, segment, AttentionParams(0.1))
    torch.testing.assert_close(
        found, naive.paged_attention(q_THD, k, v, segment, AttentionParams(0.1)), rtol=1e-4, atol=1e-5
    )


@pytest.mark.skipif(DEVICE == "cpu", reason="the CPU has no CUDA graphs")
@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("name", ["nvfp4", "bf16"])
def test_a_graph_follows_the_lengths(name: str, new: int) -> None:
    """What was recorded for some lengths is replayed for others, with requests that became padding."""
    case = Case(name, name, ((3000, new), (42, new), (700, new), (13, new)))
    rng = torch.Generator().manual_seed(5)
    pages = table(case, rng)
    k, v = (paged(name, case, pages, rng) for _ in "kv")
    lens = [sum(pair) for pair in case.batch]
    segment = AttentionBatch.from_lens(Phase.VERIFY, 0, (new,) * 4, lens, pages.to(DEVICE))
    q_THD = torch.randn(4 * new, HEADS * GROUP, case.dim, generator=rng).to(DEVICE, torch.bfloat16)
    spec, graph = AttentionParams(case.dim**-0.5), torch.cuda.CUDAGraph()
    triton_attention.paged_attention(q_THD, k, v, segment, spec)
    with torch.cuda.graph(graph):
        found = triton_attention.paged_attention(q_THD, k, v, segment, spec)
    for some in (lens, [lens[0], 0, 500, 0], [new, lens[1], 0, new], [0] * 4):
        segment.seq_lens_B.copy_(torch.tensor(some, dtype=torch.int32))
        found.fill_(float("nan"))
        graph.replay()
        error = (found - naive.paged_attention(q_THD, k, v, segment, spec)).abs().max()
        assert error < 2e-2, f"error {error:.1e} at {some}"


def test_padding_is_zeros() -> None:
    case = replace(CASES[0], batch=((-1, 1), (20, 1)), sinks=True)
    rng = torch.Generator().manual_seed(5)
    pages = table(case, rng)
    k = paged(case.k, case, pages, rng)
    segment = AttentionBatch.from_lens(Phase.DECODE, 0, (1, 1), (0, 21), pages.to(DEVICE))
    q_THD = torch.randn(2, HEADS * GROUP, case.dim, generator=rng).to(DEVICE)
    for concurrency in (1, 2):
        found = triton_attention.paged_attention(
            q_THD, k, k, segment, AttentionParams(1.0), concurrency=concurrency
        )
        assert not found[0].any() and found[1].any()


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_gather_agrees_with_its_reference(name: str, heads_first: bool) -> None:
    case = Case(
        name, name, ((0, 40), (0, 33)), dim=96, packing="nhd" if heads_first else "hnd", per_head=True
    )
    rng = torch.Generator().manual_seed(5)
    pages = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    stream = paged(name, replace(case, batch=((0, 32), (0, 32))), pages, rng)
    for dtype in (torch.float32, torch.float16):
        expected = naive_gather.dequantize_pages(stream, pages.to(DEVICE), dtype, heads_first=heads_first)
        found = triton_gather.dequantize_pages(stream, pages.to(DEVICE), dtype, heads_first=heads_first)
        assert found.dtype == dtype and found.is_contiguous()
        torch.testing.assert_close(found, expected, rtol=1e-6 if dtype == torch.float32 else 1e-3, atol=0)


@pytest.mark.parametrize(
    ("name", "dim", "stages", "compiled"),
    [
        ("bf16", 64, 3, 65_536),
        ("bf16", 96, 3, 131_072),
        ("bf16", 192, 2, 196_608),
        ("bf16", 256, 2, 196_608),
        ("fp8_e4m3", 80, 3, 131_072),
        ("fp8_e4m3", 256, 3, 196_608),
        ("nvfp4", 128, 3, 116_736),
        ("nvfp4", 256, 3, 167_936),
        ("mxfp4", 256, 3, 165_888),
    ],
)
def test_tiles_of_prompts_fit_into_hoppers_shared_memory(
    name: str, dim: int, stages: int, compiled: int
) -> None:
    """compiled: the bytes that Triton 3.6 takes for the kernel with the tile that is chosen, compiled for SM90."""
    fmt, gpu, one = formats.get(name), GPU(90, 132, 232_448), torch.tensor(1.0)
    stream = Paged(fmt, dim, fmt.encode(torch.zeros(1, 1, 64, dim), one), one)
    shape = triton_attention.shape_of(8192, 4, stream, stream, torch.bfloat16, gpu)
    assert (shape.warps, shape.stages) == (8, stages)
    stored = triton_attention.stored_tokens(stream, stream)
    assert compiled <= triton_attention.memory_of(shape, stored, 2, gpu) <= gpu.memory


def test_damaged_blocks_are_seen() -> None:
    """Codes that mean NaN come out as NaN, in every format that has them, and nowhere else."""
    pages = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    for name in FORMATS:
        fmt = formats.get(name)
        x_PHSD = torch.ones(1, HEADS, 16, 32, device=DEVICE)
        x_PHSD[0, 1, 3] = float("nan")
        one = torch.tensor(1.0, device=DEVICE)
        stream = Paged(fmt, 32, fmt.encode(x_PHSD, one), one)
        found = triton_gather.dequantize_pages(stream, pages, torch.float32, heads_first=True)
        assert torch.equal(found.isnan(), x_PHSD.isnan()), name


@pytest.mark.parametrize("packing", ["nhd", "hnd"])
@pytest.mark.parametrize("phase", [Phase.DECODE, Phase.EXTEND])
def test_the_adapter_reads_a_pool(phase: Phase, packing: str) -> None:
    entries = StreamLayout(Stream("k", HEADS, 32), "fp8_e4m3"), StreamLayout(Stream("v", HEADS, 32), "nvfp4")
    layout = CacheLayout((LayerLayout(0, entries),), 16, packing)
    pool = PagedPool(layout, 4, ONE, DEVICE, poison=True)
    rng = torch.Generator().manual_seed(5)
    new = 1 if phase is Phase.DECODE else 5
    values = {name: torch.randn(20, HEADS, 32, generator=rng).to(DEVICE) for name in "kv"}
    pool.write(0, values, torch.tensor([*range(48, 64), *range(16, 20)], device=DEVICE))
    pages = torch.tensor([[3, 1]], dtype=torch.int32, device=DEVICE)
    segment = AttentionBatch.from_lens(phase, 0, (new,), (20,), pages)
    q_THD = torch.randn(new, HEADS * GROUP, 32, generator=rng).to(DEVICE)
    adapter, reference = (backends.create(backends.get(name)) for name in ("triton", "torch_ref"))
    spec = AttentionParams(0.2, 7)
    expected = reference.attend(q_THD, pool.view(0), segment, spec)
    for _ in range(2):  # the second time from what it knows of the pages
        found = adapter.attend(q_THD, pool.view(0), segment, spec)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


def test_declaring_the_backend_does_not_import_triton() -> None:
    code = "import nibble.attention.backends, sys; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=SOURCE, check=False).returncode == 0


def test_every_format_of_the_rows_has_a_decoder() -> None:
    from nibble.kernels.codecs import DECODERS

    named = {
        part
        for row in backends.get("triton").support
        if "mha" in row.kind
        for name in row.format or ()
        for part in name.split(":")
    }
    assert named <= set(DECODERS)
    assert all(DECODERS[name].serves(16 * (formats.get(name).block // 16 or 1)) for name in named)

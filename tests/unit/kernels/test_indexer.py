"""choose(): the tokens of sparse attention, against the definition written out; and the twin against the reference.

The twin runs in Triton's interpreter where there is no GPU, in float32. Values are small whole numbers, so that sums
are exact in any order and ties are many. Pages are in random order over poisoned memory.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nibble import formats
from nibble.cache.layout import CacheLayout, LayerLayout, StreamLayout
from nibble.cache.pool import PagedPool
from nibble.cache.scales import ONE
from nibble.kernels import indexer as op
from nibble.kernels.indexer import naive
from nibble.kernels.types import AttentionBatch, Paged
from nibble.model_spec import INDEX, LATENT, Phase, Stream

DIM, HEADS, PAGE = 32, 4, 16


def stored(keys_LD: Tensor, pages: list[int], kv_format: str) -> tuple[Paged, Tensor]:
    """Index keys in pages that lie in any order."""
    entries = (StreamLayout(Stream(LATENT, 1, 32), "bf16"), StreamLayout(Stream(INDEX, 1, DIM), kv_format))
    pool = PagedPool(CacheLayout((LayerLayout(0, entries),), PAGE, "nhd"), 8, ONE, poison=True)
    tokens = torch.arange(len(keys_LD))
    table = torch.tensor(pages)
    pool.write(0, {INDEX: keys_LD[:, None]}, table[tokens // PAGE] * PAGE + tokens % PAGE)
    return pool.view(0).streams[INDEX].paged, table[None].int()


def asked(table_BN: Tensor, query_lens: Sequence[int], seq_lens: Sequence[int]) -> AttentionBatch:
    return AttentionBatch.from_lens(Phase.EXTEND, 0, query_lens, seq_lens, table_BN)


def by_the_book(keys_LD: Tensor, q_nHD: Tensor, weights_nH: Tensor, top_k: int) -> list[list[int]]:
    found, length, n = [], len(keys_LD), len(q_nHD)
    for i in range(n):
        seen = length - n + i + 1
        score = [float((weights_nH[i] * (q_nHD[i] @ keys_LD[t]).clamp(min=0)).sum()) for t in range(seen)]
        best = sorted(range(seen), key=lambda t: (-score[t], t))[:top_k]
        found.append(sorted(best) + [op.PAD_INDEX] * (top_k - len(best)))
    return found


@pytest.mark.parametrize("n", [1, 5, 70])
@pytest.mark.parametrize("top_k", [1, 7, 64, 100])
def test_the_best_are_chosen(top_k: int, n: int) -> None:
    rng = torch.Generator().manual_seed(n + top_k)
    keys = torch.randint(-3, 4, (70, DIM), generator=rng).float()
    q, weights = (
        torch.randint(-3, 4, (n, HEADS, DIM), generator=rng).float(),
        torch.randn(n, HEADS, generator=rng),
    )
    weights = (weights * 8).round()  # whole numbers: sums are exact, and ties are many
    paged, table = stored(keys, [3, 0, 6, 1, 5], "bf16")
    found = op.select_topk(paged, asked(table, (n,), (70,)), q, weights, top_k)
    assert found.dtype == torch.int32 and found.tolist() == by_the_book(keys, q, weights, top_k)


def test_equal_scores_go_by_position() -> None:
    keys = torch.ones(40, DIM)
    paged, table = stored(keys, [3, 0, 6], "bf16")
    found = op.select_topk(
        paged, asked(table, (2,), (40,)), torch.ones(2, HEADS, DIM), torch.ones(2, HEADS), 3
    )
    assert found.tolist() == [[0, 1, 2]] * 2


def test_requests_and_bounds_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = torch.Generator().manual_seed(1)
    keys, q, weights = (
        torch.randn(*shape, generator=rng) for shape in ((70, DIM), (6, HEADS, DIM), (6, HEADS))
    )
    paged, table = stored(keys, [3, 0, 6, 1, 5], "index_fp8")
    whole = op.select_topk(paged, asked(table, (6,), (70,)), q, weights, 9)
    pairs = op.select_topk(paged, asked(table.expand(2, -1), (4, 2), (68, 70)), q, weights, 9)
    assert torch.equal(pairs, whole)
    monkeypatch.setattr(naive, "MAX_SCORES", 1)
    assert torch.equal(op.select_topk(paged, asked(table, (6,), (70,)), q, weights, 9), whole)


def test_padding_chooses_nobody() -> None:
    paged, table = stored(torch.ones(40, DIM), [3, 0, 6], "bf16")
    segment = asked(table.expand(3, -1), (1, 1, 2), (0, 40, 0))
    found = op.select_topk(paged, segment, torch.ones(4, HEADS, DIM), torch.ones(4, HEADS), 2)
    assert found.tolist() == [[op.PAD_INDEX] * 2, [0, 1], [op.PAD_INDEX] * 2, [op.PAD_INDEX] * 2]


# ---- the twin --------------------------------------------------------------------------------------------------------

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed here", allow_module_level=True)

from nibble.kernels.indexer import triton as twin  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = ((1, 1), (0, 1), (39, 1), (40, 1), (41, 1), (150, 1), (0, 1))
"""Stored tokens and queries of requests: none, one, fewer than are chosen, as many, more."""


@dataclass(frozen=True)
class Case:
    """spread: queries are whole numbers up to so many; 0 makes all scores equal. packing: as the cache's, or records."""

    format: str
    batch: tuple[tuple[int, int], ...] = LENGTHS
    top_k: int = 40
    heads: int = 16
    dim: int = 32
    page: int = 16
    packing: str = "nhd"
    spread: int = 3
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        queries = sum(n for _, n in self.batch)
        return f"{self.format}-{self.packing}-q{queries}-h{self.heads}-d{self.dim}-p{self.page}-k{self.top_k}-{self.spread}"


CASES = [
    *(Case(name) for name in ("fp32", "fp16", "index_fp8")),
    Case("index_fp8", packing="hnd", page=64, spread=1),
    Case("index_fp8", packing="record", heads=32, spread=0),
    Case("index_fp8", ((90, 3), (0, 1), (50, 8)), top_k=17, page=128),
    Case("index_fp8", ((12, 12), (9, 3), (150, 60), (0, 2)), top_k=20, packing="record", page=64),
    Case("fp16", ((130, 20), (33, 33)), top_k=64, heads=48, dim=48, spread=1),
    Case("fp32", ((130, 9),), top_k=200, packing="hnd", page=32),
    Case("index_fp8", heads=8),
    Case("index_fp8", ((90, 20), (33, 33)), heads=5),
]
GPU_CASES = [
    replace(case, format=case.format.replace("fp32", "bf16"), dim=128, heads=64, dtype=torch.bfloat16)
    for case in CASES
]


def keys_of(case: Case, page_table_BN: Tensor, rng: torch.Generator) -> Paged:
    """Whole numbers in the slots that requests own, poison in all others."""
    stream = Stream(INDEX, 1, case.dim)
    record = case.packing == "record"
    entries = (StreamLayout(Stream(LATENT, 1, 32), "bf16"), StreamLayout(stream, case.format))
    layout = CacheLayout((LayerLayout(0, entries),), case.page, "nhd" if record else case.packing)
    pool = PagedPool(layout, int(page_table_BN.max()) + 3, ONE, poison=True)
    for row, (length, _) in zip(page_table_BN, case.batch, strict=True):
        token = torch.arange(length)
        values = torch.randint(-4, 5, (length, 1, case.dim), generator=rng).float()
        pool.write(0, {INDEX: values}, row[token // case.page].long() * case.page + token % case.page)
    paged = pool.view(0).streams[INDEX].paged
    planes = records(paged.planes_PHS) if record else paged.planes_PHS
    return Paged(paged.format, paged.dim, tuple(plane.to(DEVICE) for plane in planes), paged.scale.to(DEVICE))


def records(planes: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The same planes as columns of one array of bytes, 4 bytes longer than they are."""
    parts = [
        (plane if plane.dim() == 4 else plane.unsqueeze(3)).contiguous().view(torch.uint8) for plane in planes
    ]
    padding = torch.full_like(parts[0][..., :4], 255)
    sizes = [part.shape[-1] for part in parts]
    columns = torch.cat([*parts, padding], -1).split([*sizes, 4], -1)
    views = [column.view(plane.dtype) for column, plane in zip(columns, planes, strict=False)]
    return tuple(
        view if plane.dim() == 4 else view.squeeze(3) for view, plane in zip(views, planes, strict=True)
    )


def table_of(case: Case, rng: torch.Generator) -> Tensor:
    counts = [-(-length // case.page) for length, _ in case.batch]
    order = torch.randperm(sum(counts), generator=rng).int().tolist()
    pages = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    for row, count in zip(pages, counts, strict=True):
        row[:count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    return pages


def made(case: Case) -> tuple[Paged, AttentionBatch, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(7)
    pages = table_of(case, rng)
    keys = keys_of(case, pages, rng)
    segment = asked(pages.to(DEVICE), [n for _, n in case.batch], [length for length, _ in case.batch])
    shape = segment.stop, case.heads
    q = torch.randint(-case.spread, case.spread + 1, (*shape, case.dim), generator=rng).to(DEVICE, case.dtype)
    weights = torch.randint(-4, 5, shape, generator=rng).to(DEVICE, torch.float32)
    return keys, segment, q, weights


@pytest.mark.slow
@pytest.mark.usefixtures("scalars_bound_loops")
@pytest.mark.parametrize("case", CASES if DEVICE == "cpu" else GPU_CASES, ids=str)
def test_the_twin_chooses_the_same(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, segment, q, weights = made(case)
    assert twin.serves(keys, q)
    expected = naive.select_topk(keys, segment, q, weights, case.top_k)
    assert torch.equal(twin.select_topk(keys, segment, q, weights, case.top_k), expected)
    longest = max(length for length, _ in case.batch)
    monkeypatch.setattr(twin, "WORKSPACE", 1 << 12)  # a few rows at a time
    assert torch.equal(twin.select_topk(keys, segment, q, weights, case.top_k, longest), expected)


@pytest.mark.usefixtures("scalars_bound_loops")
@pytest.mark.parametrize("top_k", [1, 100, 2048])
def test_the_best_of_any_scores(top_k: int) -> None:
    """What no key gives: NaN, infinities, zeros of both signs, and every float."""
    rng = torch.Generator().manual_seed(3)
    scores = torch.randint(-(1 << 31), 1 << 31, (4, 4224), generator=rng).int().view(torch.float32)
    scores[1] = scores[1].nan_to_num(0.5, 1.0, -1.0).clamp(-1, 1).mul(3).round()
    scores[2, ::3], scores[2, 1::5], scores[2, 2::5] = float("inf"), float("-inf"), -0.0
    lengths = (4224, 4200, 4001, 90)
    segment = asked(torch.zeros(4, 1, dtype=torch.int32, device=DEVICE), (1,) * 4, lengths)
    chosen = torch.empty(4, top_k, dtype=torch.int32, device=DEVICE)
    twin.topk(scores.to(DEVICE), segment, chosen, 0, 4)
    for row, length in enumerate(lengths):
        expected = naive.largest(scores[row : row + 1, :length], length - 1, top_k)
        assert torch.equal(chosen[row : row + 1].cpu(), expected), row


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")
def test_a_replayed_graph_reads_lengths_anew() -> None:
    keys, segment, q, weights = made(GPU_CASES[2])
    most = segment.seq_lens_B.clone()
    twin.select_topk(keys, segment, q, weights, 40)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = twin.select_topk(keys, segment, q, weights, 40)
    for lengths in (most // 2, most, most * 0):
        segment.seq_lens_B.copy_(lengths)
        graph.replay()
        assert torch.equal(found, naive.select_topk(keys, segment, q, weights, 40))


@pytest.mark.parametrize("batch", [((5, 1), (0, 1), (40, 1)), ((90, 20), (33, 33), (0, 2), (7, 3))], ids=str)
def test_everything_is_chosen_without_scores(batch: tuple[tuple[int, int], ...]) -> None:
    longest = max(stored + new for stored, new in batch)
    keys, segment, q, weights = made(Case("fp32", batch))
    for top_k in (longest, longest + 9):
        expected = naive.select_topk(keys, segment, q, weights, top_k)
        assert torch.equal(op.select_topk(keys, segment, q, weights, top_k, longest), expected)


def test_what_the_twin_does_not_serve() -> None:
    keys, segment, q, _ = made(CASES[2])
    assert not twin.serves(replace_format(keys, "nvfp4"), q)
    assert not twin.serves(keys, q.repeat(1, 20, 1)) and not twin.serves(keys, q[..., :8])
    assert segment.stop == len(q)


def replace_format(keys: Paged, name: str) -> Paged:
    return Paged(formats.get(name), keys.dim, keys.planes_PHS, keys.scale)


def test_the_cuda_kernel_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    from nibble.kernels.indexer import cuda as fast
    from nibble.kernels.nvrtc import ELF, cubin

    monkeypatch.setenv("NIBBLE_CACHE", str(tmp_path))
    for arch, blocks, threads in ((80, 1, 512), (90, 1, 1024), (90, 8, 1024), (120, 2, 1024)):
        assert cubin(fast.SOURCE, arch, fast.macros(blocks, threads)).startswith(ELF)
    asked_for = [(64, 32768), (1, 131072), (8, 8192), (256, 8192), (1, 2048)]
    assert [fast.cluster_size(rows, length, 132) for rows, length in asked_for] == [2, 8, 1, 1, 1]

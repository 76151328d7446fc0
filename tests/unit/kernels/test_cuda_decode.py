"""The decode kernel in CUDA C++ over requests with drafts, on a CPU: as many queries for each, some of which see nothing.

Its source is translated to C++ (tests/support/cuda_on_cpu.py). Blocks and threads take turns at random; copies are done
at once, 16 bytes at a time, so what is shown is arithmetic, masks and merges, and not the order of copies.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import cuda_on_cpu
from nibble.attention.backends.adapters.torch_backends import TorchRef
from nibble.cache.layout import CacheLayout, LayerLayout, StreamLayout
from nibble.cache.pool import PagedPool
from nibble.cache.scales import ONE
from nibble.formats import scheme
from nibble.kernels.types import AttentionBatch, AttentionParams, Paged
from nibble.model_spec import Phase, Stream

pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
if cuda_on_cpu.COMPILER is None:
    pytest.skip("there is no C++ compiler here", allow_module_level=True)

from nibble.kernels.attention import cuda

PAGE, HEADS, SHARED = 64, 2, 232448
LENS = (150, 5, 90, 0, 70, 8, 1)
"""Stored tokens of requests; one is padding, and two have fewer tokens than queries."""


def stored(kv_format: str, dim: int, random: torch.Generator) -> tuple[PagedPool, Tensor]:
    """A pool with all requests in it, and their pages."""
    streams, formats = [Stream(name, HEADS, dim) for name in "kv"], scheme.parse(kv_format)
    parts = tuple(StreamLayout.of(stream, formats.format_of(stream)) for stream in streams)
    pages = sum(-(-length // PAGE) for length in LENS)
    pool = PagedPool(CacheLayout((LayerLayout(0, parts, ()),), PAGE, "hnd"), pages, ONE, "cpu", poison=True)
    free, table_BN = (
        torch.randperm(pages, generator=random).tolist(),
        torch.zeros(len(LENS), 4, dtype=torch.int32),
    )
    for request, length in enumerate(LENS):
        own = torch.tensor([free.pop() for _ in range(-(-length // PAGE))], dtype=torch.int64)
        table_BN[request, : len(own)] = own
        at = torch.arange(length)
        if length:
            values = {name: torch.randn(length, HEADS, dim, generator=random).bfloat16() for name in "kv"}
            pool.write(0, values, own[at // PAGE] * PAGE + at % PAGE)
    return pool, table_BN


def run(
    q_THD: Tensor, k: Paged, v: Paged, batch: AttentionBatch, params: AttentionParams, blocks: int
) -> Tensor:
    """Launch the kernel as cuda.Decode does."""
    queries, heads, dim = max(batch.query_lens), q_THD.shape[1], q_THD.shape[2]
    columns = cuda.columns_of(batch, heads, k.heads)
    variant = cuda.variant_of(k.format.name, v.format.name, dim, PAGE, columns, True, False, SHARED)
    out_THD = torch.full_like(q_THD, float("nan"))
    workspace = torch.empty(blocks * (variant.tiling.warps + 2) * variant.columns, dim + 2)
    counters = torch.zeros(1 << 12, dtype=torch.int32)
    planes = [plane for pages in (k, v) for plane in (*pages.planes_PHS, None)[:2]]
    cu_seqlens = None if queries == 1 else batch.cu_seqlens_q_B1
    pointers = (q_THD, out_THD, *planes, batch.seq_lens_B, cu_seqlens, batch.page_table_BN, k.scale, v.scale, None,
                workspace, counters)  # fmt: skip
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in pointers]
    sizes = (
        len(batch.seq_lens),
        batch.page_table_BN.stride(0),
        k.heads,
        heads // k.heads,
        params.window or 0,
        0,
        0,
    )
    cuda_on_cpu.Kernel(cuda.SOURCE, variant.macros).launch(
        blocks,
        32 * variant.tiling.warps,
        variant.shared_bytes(len(LENS)),
        (),
        [*addresses, params.scale, 0.0, *sizes],
    )
    assert not counters.any(), "merges leave their counters at zero"
    return out_THD


@pytest.mark.parametrize(
    ("kv_format", "dim", "group", "counts", "window", "blocks", "scale"),
    [
        ("nvfp4", 64, 3, (8,) * 7, None, 3, 1),
        ("k8v4", 64, 4, (8, 1, 2, 3, 4, 5, 6), 60, 12, 1),
        ("bf16", 64, 3, (8,) * 7, None, 5, 1),
        ("nvfp4", 128, 4, (4,) * 7, None, 9, 1),
        # Scores so far apart that sums are rescaled in many tiles.
        ("nvfp4", 128, 4, (4,) * 7, None, 2, 4),
    ],
)
def test_it_is_the_definition(
    kv_format: str,
    dim: int,
    group: int,
    counts: tuple[int, ...],
    window: int | None,
    blocks: int,
    scale: float,
) -> None:
    random = torch.Generator().manual_seed(3)
    pool, table_BN = stored(kv_format, dim, random)
    batch, view = AttentionBatch.from_lens(Phase.VERIFY, 0, counts, LENS, table_BN), pool.view(0)
    q_THD = (scale * torch.randn(sum(counts), HEADS * group, dim, generator=random)).bfloat16()
    params = AttentionParams(dim**-0.5, window)
    found = run(q_THD, view.streams["k"].paged, view.streams["v"].paged, batch, params, blocks)
    stop = 0
    for number, (length, count) in enumerate(zip(LENS, counts, strict=True)):
        stop, live = stop + count, min(count, length)
        assert (found[stop - count : stop - live] == 0).all()
        if live:
            rows, table_1N = slice(stop - live, stop), table_BN[number : number + 1]
            one = AttentionBatch.from_lens(Phase.EXTEND, 0, (live,), (length,), table_1N)
            expected = TorchRef().attend(q_THD[rows], view, one, params).float()
            error = (found[rows].float() - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)
            assert error.max() < 0.01

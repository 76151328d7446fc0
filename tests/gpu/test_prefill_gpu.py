"""Prompts of many requests in torch's flash kernel, against the kernel that reads pages as they are.

Skipped where there is no GPU, or it is not asked for: NIBBLE_TEST_GPU=1 pytest tests/gpu
"""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from nibble import formats
from nibble.kernels import attention
from nibble.kernels.attention import PackedKeys, QueryBlock
from nibble.kernels.types import AttentionBatch, AttentionParams, Paged
from nibble.model_spec import Phase

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GROUP, PAGE = 4, 64
TOLERANCE = 1e-2
REQUESTS = {
    "prompts": [(0, 1000), (0, 256), (0, 1024), (0, 129)],
    "behind a prefix": [(700, 200), (64, 1023), (1, 300)],
    "the first tokens see nothing": [(-64, 1024), (-64, 200), (-30, 400)],
}
"""Stored tokens before the new ones, and new ones."""


def paged(name: str, values_PHSD: Tensor) -> Paged:
    fmt, one = formats.get(name), torch.tensor(1.0, device="cuda")
    return Paged(fmt, values_PHSD.shape[-1], fmt.encode(values_PHSD, one), one)


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("kv_format", ["bf16", "nvfp4"])
@pytest.mark.parametrize("dim", [64, 128])
def test_prompts_that_are_packed(name: str, kv_format: str, dim: int) -> None:
    torch.manual_seed(0)
    requests, heads = REQUESTS[name], 2
    lens, new = [stored + count for stored, count in requests], [count for _, count in requests]
    counts = [-(-length // PAGE) for length in lens]
    order = torch.randperm(sum(counts)).int()
    table = torch.zeros(len(lens), max(counts) + 3, dtype=torch.int32)
    for i, (count, end) in enumerate(zip(counts, accumulate(counts), strict=True)):
        table[i, :count] = order[end - count : end]
    k, v = (
        paged(kv_format, torch.randn(sum(counts), heads, PAGE, dim, device="cuda").bfloat16()) for _ in "kv"
    )
    q = torch.randn(sum(new), heads * GROUP, dim, device="cuda").bfloat16()
    batch, params = (
        AttentionBatch.from_lens(Phase.EXTEND, 0, new, lens, table.cuda()),
        AttentionParams(dim**-0.5),
    )
    blocks = attention.plan_blocks(batch, PAGE, cudnn=False)
    assert [type(block.plan) for block in blocks] == [PackedKeys]
    found = attention.partial_prefill_attention(q, k, v, blocks, params)
    expected = attention.partial_prefill_attention(q, k, v, [QueryBlock(blocks[0].rows, batch)], params)
    seen = expected.lse_HT.isfinite()
    assert torch.equal(found.lse_HT.isfinite(), seen) and bool((found.lse_HT[~seen] == -torch.inf).all())
    assert not found.values_THD.isnan().any()
    assert (found.lse_HT - expected.lse_HT)[seen].abs().max() < TOLERANCE
    rows = seen.T[..., None].expand_as(found.values_THD)
    off = (found.values_THD.float() - expected.values_THD.float())[rows].norm()
    assert off < TOLERANCE * expected.values_THD.float()[rows].norm()
    values_THD = attention.prefill_attention(q, k, v, blocks, params)
    assert torch.equal(values_THD, found.values_THD)

"""The kernel for prompts on Hopper against attention by the book: many items, stages and passes, and all its variants."""

from __future__ import annotations

import pytest
import torch

from nibble import formats
from nibble.kernels import gpu_of
from nibble.kernels.attention import naive
from nibble.kernels.types import AttentionBatch, AttentionParams, Paged
from nibble.model_spec import Phase

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a GPU of SM90",
)
DEVICE = torch.device("cuda")
Request = tuple[int, int]
"""Stored tokens before the new ones, and new ones."""
MANY: list[Request] = [(0, 1500), (700, 1500), (-300, 200), (37, 130), (2000, 5000), (-1000, 300), (10, 129)]
"""More items than blocks, with some that see no key among them."""


def attend(
    requests: list[Request], kv_format: str, dim: int, heads: int, kv_heads: int, page: int, dtype: torch.dtype,
    params: AttentionParams, poison: bool = False, steep: slice | None = None,
) -> float:  # fmt: skip
    """Return the largest difference to attention by the book, of the largest value; of log-sum-exps it is checked.

    steep: rows of each 128 whose scores are very high at keys of a few tokens, among them the first: 2^41 times as much
    weight at least.
    """
    from nibble.kernels.attention import prefill_sm90 as own

    rng = torch.Generator(DEVICE).manual_seed(1)
    lens, news = [max(stored + new, 0) for stored, new in requests], [new for _, new in requests]
    counts = [-(-length // page) for length in lens]
    order = (torch.randperm(sum(counts), generator=rng, device=DEVICE) + 1).int().split(counts)
    table = torch.zeros(len(lens), max(*counts, 1), dtype=torch.int32, device=DEVICE)
    for row, pages in zip(table, order, strict=True):
        row[: len(pages)] = pages
    fmt, one = formats.get(kv_format), torch.tensor(1.0, device=DEVICE)
    streams = []
    for name in "kv":
        values = torch.randn(sum(counts) + 1, kv_heads, page, dim, generator=rng, device=DEVICE)
        if steep and name == "k":
            for row, length in zip(table, lens, strict=True):
                for token in (0, 3, length // 3, length // 2):
                    values[row[token // page].long(), :, token % page, 0] = 40
        if fmt.name in {"bf16", "fp16"}:
            for row, length, count in zip(table, lens, counts, strict=True):
                if length % page:
                    values[row[count - 1].long(), :, length % page :] = float("nan")
        streams.append(Paged(fmt, dim, fmt.encode(values, one), one))
    k, v = streams
    q = torch.randn(sum(news), heads, dim, generator=rng, device=DEVICE).to(dtype)
    if steep:
        q[..., 0] = 0
        for request in q.split(news):
            for rows in request.split(128):
                rows[steep, :, 0] = 8
    if poison:
        q[5] = float("nan")
    batch = AttentionBatch.from_lens(Phase.EXTEND, 0, news, lens, table)
    blocks = own.plan_blocks(batch, params.window, heads, gpu_of(DEVICE).processors)
    part = own.partial_prefill_attention(q, k, v, batch, blocks, params)
    assert torch.equal(
        own.prefill_attention(q, k, v, batch, blocks, params).nan_to_num(), part.values_THD.nan_to_num()
    )
    expected = naive.partial_attention(q, k, v, batch, params)
    torch.testing.assert_close(part.lse_HT, expected.lse_HT, atol=2e-3, rtol=1e-4, equal_nan=True)
    differences = (part.values_THD.float() - expected.values_THD).abs()
    assert torch.equal(differences.isnan(), expected.values_THD.isnan())
    return float(differences.nan_to_num().max() / expected.values_THD.nan_to_num().abs().max())


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("asked", ["plain", "window", "sinks", "cap", "cap, window"])
def test_many_items(dim: int, dtype: torch.dtype, asked: str) -> None:
    params = AttentionParams(
        dim**-0.5,
        window=200 if "window" in asked else None,
        softcap=3.0 if "cap" in asked else None,
        sinks_H=torch.randn(16, device=DEVICE) if asked == "sinks" else None,
    )
    error = attend(MANY, "bf16", dim, 16, 4, 16, dtype, params)
    assert error < (6e-3 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("asked", ["plain", "window", "sinks", "cap"])
@pytest.mark.parametrize("steep", [slice(None), slice(0, 64), slice(64, 128), slice(40, 41)], ids=str)
def test_scores_far_above_those_before(dim: int, dtype: torch.dtype, asked: str, steep: slice) -> None:
    """Tiles are weighed by peaks of those before, behind them: where these are far too low, once more."""
    params = AttentionParams(
        dim**-0.5,
        window=1500 if asked == "window" else None,
        softcap=50.0 if asked == "cap" else None,
        sinks_H=torch.randn(8, device=DEVICE) if asked == "sinks" else None,
    )
    requests = [(2000, 300), (4000, 129), (0, 1100)]
    error = attend(requests, "bf16", dim, 8, 2, 16, dtype, params, steep=steep)
    assert error < (6e-3 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("kv_format", ["nvfp4", "mxfp4", "fp8_e4m3", "fp16"])
@pytest.mark.parametrize("page", [16, 32, 64, 128])
def test_formats_and_pages(kv_format: str, page: int) -> None:
    # Keys are rounded to the dtype of queries; in attention by the book they are not.
    dtype = torch.float16 if kv_format == "fp16" else torch.bfloat16
    assert attend(MANY[:4], kv_format, 128, 8, 8, page, dtype, AttentionParams(128**-0.5)) < 6e-3


@pytest.mark.parametrize(("sinks", "window"), [(False, None), (True, None), (False, 600)])
def test_passes(sinks: bool, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from nibble.kernels.attention import prefill_sm90 as own

    monkeypatch.setattr(own, "PREFILL_WORKSPACE", 512)
    sinks_H = torch.randn(8, device=DEVICE) if sinks else None
    requests = [(0, 300), (1700, 400), (5, 129), (2000, 150)]
    params = AttentionParams(128**-0.5, sinks_H=sinks_H, window=window)
    assert attend(requests, "nvfp4", 128, 8, 2, 64, torch.bfloat16, params) < 6e-3


@pytest.mark.parametrize("stored", [100, 1000])
def test_what_is_not_a_number_stays_so(stored: int) -> None:
    """In tiles that are masked, and in such as are weighed by peaks of those before."""
    params = AttentionParams(128**-0.5)
    attend([(stored, 200), (0, 150)], "bf16", 128, 8, 2, 64, torch.bfloat16, params, poison=True)

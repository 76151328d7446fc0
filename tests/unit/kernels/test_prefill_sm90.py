"""How prompts are cut for the kernel of SM90, and what it is given: attention is what it would be in one piece.

The kernel itself needs a GPU (tests/conformance); here a stand-in attends as it does, item by item, over the workspace
that the real staging kernel has left.
"""

from __future__ import annotations

import math
import os

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nibble import formats
from nibble.kernels.append.naive import dequantize_pages
from nibble.kernels.attention import naive
from nibble.kernels.types import AttentionBatch, AttentionParams, Paged
from nibble.model_spec import Phase

pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")

from nibble.kernels.attention import prefill_sm90 as own
from nibble.kernels.attention.prefill_sm90 import KEYS, ROWS, Pass, _Pages
from nibble.kernels.attention.prefill_stage import stage

pytestmark = pytest.mark.skipif(
    os.environ.get("NIBBLE_TEST_GPU") == "1", reason="tensors are on the CPU, and Triton's interpreter is off"
)
HEADS, GROUP, DIM, SIZE = 2, 2, 64, 16
Request = tuple[int, int]
"""Stored tokens before the new ones, and new ones."""


def item_by_item(q_THD: Tensor, pages: _Pages, step: Pass, out_THD: Tensor, lse_HT: Tensor | None) -> None:
    """What prefill_sm90.cu does with a pass."""
    params = pages.params
    k_LGD, v_LGD = own.stage(pages.k, pages.v, pages.page_table_BN, step.spans_I4, torch.float32)
    tiles = []
    for row, rows, key, keys, visible, *_ in step.items_J8.tolist():
        assert 0 < rows <= min(ROWS, len(q_THD) - row) and key % KEYS == 0
        stop = min(keys, max(visible + rows - 1, 0))
        start = max(visible - params.window, 0) // KEYS * KEYS if params.window else 0
        tiles.append(math.ceil(stop / KEYS) - start // KEYS)
        k, v = (x[key : key + keys].repeat_interleave(GROUP, 1) for x in (k_LGD, v_LGD))
        scores = torch.einsum("nhd,lhd->hnl", q_THD[row : row + rows].float(), k) * params.scale
        if params.softcap:
            scores = params.softcap * torch.tanh(scores / params.softcap)
        seen, at = visible + torch.arange(rows)[:, None], torch.arange(keys)
        hidden = at >= seen
        if params.window:
            hidden |= at < seen - params.window
        scores = scores.masked_fill(hidden, float("-inf"))
        if params.sinks_H is not None:
            scores = torch.cat([scores, params.sinks_H.view(-1, 1, 1).expand(-1, rows, 1)], 2)
        weights = scores.softmax(2).nan_to_num()[..., :keys]
        out_THD[row : row + rows] = torch.einsum("hnl,lhd->nhd", weights, v)
        if lse_HT is not None:
            lse_HT[:, row : row + rows] = scores.logsumexp(2)
    # Shares are fair only if items come in this order.
    assert tiles == sorted(tiles, reverse=True)
    *shares, end = step.shares_NP.tolist()
    items = sorted(item for share in shares for item in share if item >= 0)
    assert items == list(range(len(tiles) * q_THD.shape[1])) and {*end} == {-1}


def staged(stream: Paged, page_table_BN: Tensor, spans_I4: Tensor) -> Tensor:
    """What the staging kernel leaves of a stream."""
    tiles = []
    for row, start, stop, _ in spans_I4.tolist():
        pages = page_table_BN[row : row + 1, start // SIZE : -(-min(start + KEYS, stop) // SIZE)]
        values_LGD = dequantize_pages(stream, pages, torch.float32)[0, : stop - start]
        tiles.append(F.pad(values_LGD, (0, 0, 0, 0, 0, KEYS - len(values_LGD))))
    return torch.cat(tiles)


def stage_by_the_book(
    k: Paged, v: Paged, page_table_BN: Tensor, spans_I4: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return staged(k, page_table_BN, spans_I4).to(dtype), staged(v, page_table_BN, spans_I4).to(dtype)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter takes seconds for what the kernel does in microseconds; it has tests of its own below.
    monkeypatch.setattr(own, "stage", stage_by_the_book)
    monkeypatch.setattr(own, "_launch", item_by_item)
    monkeypatch.setattr(own, "PREFILL_WORKSPACE", 4 * KEYS)


def check(requests: list[Request], processors: int = 1, **asked: object) -> list[own.Block]:
    """Compare the cut prompts with attention by the book, and return the blocks."""
    rng = torch.Generator().manual_seed(len(requests))
    params = AttentionParams(DIM**-0.5, **asked)  # type: ignore[arg-type]
    lens, news = [max(stored + new, 0) for stored, new in requests], [new for _, new in requests]
    counts = [-(-length // SIZE) for length in lens]
    order = (torch.randperm(sum(counts), generator=rng) + 1).tolist()
    table = torch.zeros(len(lens), max(*counts, 1), dtype=torch.int32)
    fmt, one = formats.get("fp32"), torch.tensor(1.0)
    values = {name: torch.randn(sum(counts) + 1, HEADS, SIZE, DIM, generator=rng) for name in "kv"}
    for i, (length, count) in enumerate(zip(lens, counts, strict=True)):
        table[i, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
        if length % SIZE:
            for x in values.values():
                x[table[i, count - 1].long(), :, length % SIZE :] = float("nan")
    k, v = (Paged(fmt, DIM, fmt.encode(values[name], one), one) for name in "kv")
    q = torch.randn(sum(news), HEADS * GROUP, DIM, generator=rng)
    batch = AttentionBatch.from_lens(Phase.EXTEND, 0, news, lens, table)
    blocks = own.plan_blocks(batch, params.window, HEADS * GROUP, processors)
    part = own.partial_prefill_attention(q, k, v, batch, blocks, params)
    expected = naive.partial_attention(q, k, v, batch, params)
    torch.testing.assert_close(part.values_THD, expected.values_THD, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(part.lse_HT, expected.lse_HT, atol=2e-5, rtol=1e-4)
    out_THD = own.prefill_attention(q, k, v, batch, blocks, params)
    torch.testing.assert_close(out_THD, part.values_THD)
    return list(blocks)


@pytest.mark.parametrize(
    ("requests", "most"),
    [([(0, 8192)], 1.005), ([(8192, 8192)], 1.015), ([(0, 2048)] * 4, 1.005), ([(0, 1024)] * 8, 1.01)],
)
def test_blocks_have_about_the_same_to_do(requests: list[Request], most: float) -> None:
    heads, processors = 32, 132
    tiles = sorted((-(-(at + ROWS) // KEYS) for stored, new in requests for at in range(stored, stored + new, ROWS)),
                   reverse=True)  # fmt: skip
    costs = [count + own.ITEM_TILES for count in tiles for _ in range(heads)]
    shares = own.share_out(tiles, heads, processors)
    loads = [sum(costs[item] for item in share if item >= 0) for share in zip(*shares, strict=True)]
    assert len(loads) == processors and max(loads) <= most * sum(loads) / processors
    # A block does what is longest first.
    for share in zip(*shares, strict=True):
        own_costs = [costs[item] for item in share if item >= 0]
        assert own_costs == sorted(own_costs, reverse=True) and share[len(own_costs)] == -1


LENGTHS = st.tuples(st.integers(-200, 900), st.integers(1, 300)).filter(lambda r: sum(r) >= 0)


@pytest.mark.slow
@settings(max_examples=15)
@given(st.lists(LENGTHS, min_size=1, max_size=4), st.sampled_from([None, 1, 100, 128, 300]))
def test_prompts_of_any_lengths(requests: list[Request], window: int | None) -> None:
    check(requests, window=window)


@pytest.mark.parametrize(
    ("k_format", "v_format"), [("nvfp4", "nvfp4"), ("fp8_e4m3", "mxfp4"), ("bf16", "bf16")]
)
def test_the_workspace_has_zeros_behind_a_requests_tokens(k_format: str, v_format: str) -> None:
    rng = torch.Generator().manual_seed(1)
    table = torch.tensor([[3, 5, 7, 2, 1, 9, 10, 11, 12], [4, 6, 8, 0, 0, 0, 0, 0, 0]], dtype=torch.int32)
    spans = torch.tensor([[0, 0, 140, 0], [0, 128, 140, 0], [1, 0, 40, 0]], dtype=torch.int32)
    streams = []
    for name in (k_format, v_format):
        values = torch.randn(13, HEADS, SIZE, DIM, generator=rng)
        if name == "bf16":
            values[12, :, 12:] = values[8, :, 8:] = float("nan")
        fmt, scale = formats.get(name), torch.tensor(0.75 if name in {"nvfp4", "fp8_e4m3"} else 1.0)
        streams.append(Paged(fmt, DIM, fmt.encode(values, scale), scale))
    k, v = streams
    for dtype in (torch.bfloat16, torch.float16):
        for got, expected in zip(
            stage(k, v, table, spans, dtype), stage_by_the_book(k, v, table, spans, dtype), strict=True
        ):
            assert torch.equal(got, expected)


def test_sinks_count_once_where_keys_take_several_passes() -> None:
    (block,) = check([(1300, 200)], sinks_H=torch.tensor([0.5, -1.0, 3.0, 0.0]))
    assert isinstance(block.plan, tuple) and len(block.plan) == 3


def test_capped_scores() -> None:
    check([(0, 130), (200, 140)], softcap=2.0)


def test_prompts_share_a_launch_and_short_ones_go_elsewhere() -> None:
    blocks = check([(0, 200), (50, 128), (300, 3), (10, 127), (0, 500)])
    assert [isinstance(block.plan, tuple) for block in blocks] == [True, False, True]
    assert [block.rows for block in blocks] == [slice(0, 328), slice(328, 458), slice(458, 958)]


@pytest.mark.slow
def test_few_rows_over_long_contexts_go_where_keys_are_split() -> None:
    long = KEYS * own.LONG_TILES
    few, enough = ([(long, 130)], 100), ([(long, 130)], 16)
    assert [isinstance(check(*one)[0].plan, tuple) for one in (few, enough)] == [False, True]
    assert isinstance(check([(300, 130)], 100)[0].plan, tuple), "a short context"
    assert isinstance(check([(long, 130), *[(0, 200)] * 6], 100)[0].plan, tuple), "others keep the GPU busy"


def test_a_window_leaves_out_keys_that_no_row_sees() -> None:
    (block,) = check([(1500, 130)], window=100)
    assert isinstance(block.plan, tuple)
    assert sum(len(step.spans_I4) for step in block.plan) == 3


def test_queries_that_cannot_be_copied_in_pieces_of_16_bytes_are_made_dense() -> None:
    q_THD = torch.randn(4, 2, 65, dtype=torch.bfloat16)
    assert own._copyable(q_THD[..., :64]).stride() == (128, 64, 1)
    q_THD = torch.randn(4, 5, 64, dtype=torch.bfloat16)[:, 1:3]
    assert own._copyable(q_THD) is q_THD

"""How prompts are cut for torch's fused kernels, and put together again: attention is what it would be in one piece.

The kernels themselves need a GPU; here dense attention stands in for them, with the contracts that they have.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nibble import formats
from nibble.kernels import attention
from nibble.kernels.attention import KeyTile, merge_lse, naive
from nibble.kernels.attention import PartialAttention as Part
from nibble.kernels.attention import triton as twin
from nibble.kernels.types import AttentionBatch, AttentionParams, Paged
from nibble.model_spec import Phase

HEADS, GROUP, DIM, SIZE = 2, 3, 16, 4
SPEC = AttentionParams(DIM**-0.5)
ROWS, KEYS = (32, 16), (64, 32, 16)

Request = tuple[int, int]
"""Stored tokens before the new ones, and new ones."""

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OMITTED = 5
"""Tokens of the exact window that some batches leave out."""


def dense(q_THD: Tensor, k_LHD: Tensor, v_LHD: Tensor, causal: bool) -> Part:
    """The last rows of as many keys, if causal."""
    rows, length = len(q_THD), len(k_LHD)
    k, v = (x.repeat_interleave(GROUP, 1).transpose(0, 1).double() for x in (k_LHD, v_LHD))
    scores = q_THD.double().transpose(0, 1) @ k.transpose(1, 2) * SPEC.scale
    if causal:
        hidden = torch.arange(length) > torch.arange(length - rows, length)[:, None]
        scores = scores.masked_fill(hidden, float("-inf"))
    values = (scores.softmax(-1).nan_to_num() @ v).transpose(0, 1)
    return Part(values.to(q_THD.dtype), scores.logsumexp(-1).float())


def flash(q: Tensor, k: Tensor, v: Tensor, tile: KeyTile, scale: float) -> Part:
    assert scale == SPEC.scale and not tile.cudnn and len(k) <= attention.KEY_SIZES[0]
    assert (tile.cu_seqlens_q_2.tolist(), tile.cu_seqlens_k_2.tolist()) == ([0, len(q)], [0, len(k)])
    return dense(q, k, v, tile.causal)


def few_sizes(sizes: tuple[int, ...]) -> set[int]:
    """Those given, and what an exact window leaves of them."""
    return {*sizes, *(size - OMITTED for size in sizes)}


def cudnn(q: Tensor, k: Tensor, v: Tensor, tile: KeyTile, scale: float) -> Part:
    assert (
        scale == SPEC.scale
        and len(q) in few_sizes(ROWS)
        and len(k) in few_sizes(ROWS if tile.causal else KEYS)
    )
    assert len(q) == len(k) or not tile.causal
    return dense(q, k, v, tile.causal)


def few(q: Tensor, k: Paged, v: Paged, batch: AttentionBatch, params: AttentionParams) -> Tensor:
    assert max(batch.seq_lens) == int(batch.seq_lens_B.max())
    return naive.paged_attention(q, k, v, batch, params)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = {"_flash": flash, "_cudnn": cudnn, "_short": few, "_partial_short": naive.partial_attention}
    for name, value in {**stand_in, "QUERY_SIZES": ROWS, "KEY_SIZES": KEYS}.items():
        monkeypatch.setattr(attention, name, value)


def attend(
    requests: list[Request], use_cudnn: bool, kv_format: str = "fp32", omitted: int = 0
) -> tuple[Part, Part]:
    """What the cut prompts give, and what they should."""
    rng = torch.Generator().manual_seed(len(requests))
    lens = [max(stored + new, 0) for stored, new in requests]
    counts = [-(-length // SIZE) for length in lens]
    order = iter(torch.randperm(sum(counts), generator=rng).tolist())
    table = torch.zeros(len(lens), max(*counts, 1), dtype=torch.int32)
    fmt, one = formats.get(kv_format), torch.tensor(1.0)
    pages = {name: torch.randn(sum(counts) + 1, HEADS, SIZE, DIM, generator=rng) for name in "kv"}
    for i, (length, count) in enumerate(zip(lens, counts, strict=True)):
        if not count:
            continue
        table[i, :count] = torch.tensor([next(order) for _ in range(count)])
        for values in pages.values():
            values[table[i, count - 1].long(), :, (length - 1) % SIZE + 1 :] = float("nan")
    k, v = (Paged(fmt, DIM, fmt.encode(pages[name], one), one) for name in "kv")
    q = torch.randn(sum(new for _, new in requests), HEADS * GROUP, DIM, generator=rng)
    news = [new for _, new in requests]
    batch = AttentionBatch.from_lens(Phase.EXTEND, 0, news, lens, table)
    blocks = attention.plan_blocks(replace(batch, num_omitted=omitted), SIZE, cudnn=use_cudnn)
    found = attention.partial_prefill_attention(q, k, v, blocks, SPEC)
    values_THD = attention.prefill_attention(q, k, v, blocks, SPEC)
    torch.testing.assert_close(values_THD, found.values_THD)
    expected = []
    for i, q_nHD in enumerate(q.split(news)):
        own = table[i, : counts[i]].long()
        keys, values = (
            fmt.decode(tuple(p[own] for p in x.planes_PHS), one).transpose(1, 2).flatten(0, 1)[: lens[i]]
            for x in (k, v)
        )
        expected.append(dense(q_nHD, keys, values, True))
    return found, Part(
        torch.cat([x.values_THD for x in expected]), torch.cat([x.lse_HT for x in expected], 1)
    )


@pytest.mark.parametrize("use_cudnn", [False, True])
@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(-60, 200), st.integers(1, 90)), min_size=1, max_size=4),
    st.sampled_from([0, OMITTED]),
)
def test_cut_prompts_see_what_they_should(use_cudnn: bool, requests: list[Request], omitted: int) -> None:
    """Where less than nothing is stored before the new tokens, the first of them see nothing."""
    found, expected = attend(requests, use_cudnn, omitted=omitted)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_quantised_pages_are_read_as_they_are_stored() -> None:
    found, expected = attend([(70, 50), (3, 2)], True, "nvfp4")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def shapes(requests: list[Request], use_cudnn: bool, omitted: int = 0) -> list[object]:
    """Of each block: the rows of every request, or its rows with the keys of its tiles and whether cuDNN takes them."""
    lens, pages = [sum(r) for r in requests], torch.zeros(len(requests), 400, dtype=torch.int32)
    found: list[object] = []
    batch = AttentionBatch.from_lens(Phase.EXTEND, 0, [new for _, new in requests], lens, pages)
    batch = replace(batch, num_omitted=omitted)
    for block in attention.plan_blocks(batch, SIZE, cudnn=use_cudnn):
        if isinstance(block.plan, AttentionBatch):
            assert len(block.plan.page_table_BN) == len(block.plan.query_lens)
            found.append((block.plan.query_lens, tuple(block.plan.seq_lens_B.tolist())))
        else:
            tiles = [(tile.keys.stop - tile.keys.start, tile.cudnn) for tile in block.plan]
            found.append((block.rows.stop - block.rows.start, tiles))
    return found


def test_cudnn_is_given_few_shapes() -> None:
    assert shapes([(149, 57)], True) == [
        (32, [(64, True), (64, True), (16, True), (5, False), (32, True)]),
        (16, [(64, True), (64, True), (32, True), (16, True), (5, False), (16, True)]),
        ((9,), (206,)),
    ]
    assert shapes([(100, 40)], False) == [(32, [(64, False), (36, False), (32, False)]), ((8,), (140,))]


def test_a_window_leaves_out_the_newest_tokens_and_no_shape_is_cut() -> None:
    """Of whole blocks the keys are so many tokens fewer, and the rows of the first."""
    assert shapes([(-3, 32)], True, 3) == [((3,), (0,)), (29, [(29, True)])]
    assert shapes([(61, 32)], True, 3) == [(32, [(61, True), (32, True)])]
    assert shapes([(61, 32)], False, 3) == [(32, [(61, False), (32, False)])]


def test_windows_almost_as_long_as_a_block_add_no_tiny_blocks() -> None:
    assert attention._sizes((32, 16), 5) == (32, 27, 16, 11)
    assert attention._sizes((64, 32, 16), 30) == (64, 34, 32, 16)
    assert attention._sizes((32, 16), 40) == (32, 16)


def test_few_tokens_go_together() -> None:
    assert shapes([(0, 9), (100, 5), (7, 17), (0, 15), (60, 32), (60, 2)], True) == [
        ((9, 5), (9, 105)),
        (16, [(7, False), (16, True)]),
        ((1, 15), (24, 15)),
        (32, [(32, True), (16, True), (12, False), (32, True)]),
        ((2,), (62,)),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dim", [48, 64])
def test_merging_is_the_same_everywhere(dim: int, dtype: torch.dtype) -> None:
    """The twin against the reference, and both against attention over all keys at once."""
    rng = torch.Generator().manual_seed(dim)
    q, k, v = (torch.randn(7, heads, dim, generator=rng).to(DEVICE) for heads in (6, 2, 2))
    q[0], k[5:] = 30 * q[0], 3 * k[5:]  # one part may hold next to nothing
    a, b, both = (dense(q, k[s], v[s], False) for s in (slice(0, 5), slice(5, 7), slice(0, 7)))
    a = Part(a.values_THD.transpose(0, 1).contiguous().transpose(0, 1), a.lse_HT.T.contiguous().T)
    for combine in (naive.merge_lse, twin.merge_lse, merge_lse):
        found = combine(Part(a.values_THD.to(dtype), a.lse_HT), b, dtype)
        assert found.values_THD.dtype == dtype
        assert (found.values_THD - both.values_THD).abs().max() < (1e-5 if dtype == torch.float32 else 4e-3)
        assert (found.lse_HT - both.lse_HT).abs().max() < 1e-4

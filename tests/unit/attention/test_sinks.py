"""The part over first tokens: which requests it makes of a batch, and a key that is 100,000 times the others."""

from __future__ import annotations

from dataclasses import replace
from math import log

import pytest
import torch

from nibble.attention.layer import attention
from nibble.attention.planner.resolve import resolve
from nibble.attention.sinks import split_sinks
from nibble.attention.window import far_batch, rows_with_far_tokens
from nibble.cache import scales
from nibble.config import Config
from nibble.evals.perplexity import prompt_context
from nibble.hardware import GIB, Hardware
from nibble.kernels.types import AttentionBatch, AttentionParams
from nibble.model_spec import Phase
from planning import mha, model_spec

CPU = Hardware("cpu", 0, 32 * GIB)
SMALL = model_spec(mha(2, 64), context=512, weights=1 << 20)
PAGE, WINDOW, SINKS, TOKENS = 16, 20, 32, 120


def batch(phase: Phase, query_lens: tuple[int, ...], seq_lens: tuple[int, ...]) -> AttentionBatch:
    table = torch.arange(len(seq_lens) * 8, dtype=torch.int32).view(len(seq_lens), 8)
    return replace(
        AttentionBatch.from_lens(phase, 3, query_lens, seq_lens, table), exact_table_BN=table + 100
    )


def test_each_query_is_a_request_that_ends_where_near_tokens_begin() -> None:
    whole = batch(Phase.EXTEND, (3, 2), (22, 90))
    parts = split_sinks(whole, far_batch(whole, WINDOW), WINDOW, SINKS, PAGE)
    assert parts and parts.far
    ((rows, sinks),) = parts.sinks
    assert rows == slice(0, 5)
    # Tokens 19, 20, 21 see 0, 1, 2 of them; later ones all.
    assert sinks.seq_lens == (0, 1, 2, 32, 32) == tuple(sinks.seq_lens_B.tolist())
    assert sinks.query_lens == (1,) * 5 and sinks.cu_seqlens_q_B1.tolist() == [0, 1, 2, 3, 4, 5]
    assert sinks.page_table_BN.tolist() == [[100, 101]] * 3 + [[108, 109]] * 2
    assert parts.far.seq_lens == (0, 90 - WINDOW - SINKS) == tuple(parts.far.seq_lens_B.tolist())
    assert parts.far.page_table_BN[1].tolist() == [10, 11, 12, 13, 14, 15]


def test_a_row_is_the_same_request_in_a_decode_step() -> None:
    decode = batch(Phase.DECODE, (1, 1), (21, 90))
    parts = split_sinks(decode, far_batch(decode, WINDOW), WINDOW, SINKS, PAGE)
    assert parts
    ((_, sinks),) = parts.sinks
    assert sinks.seq_lens == (1, 32) == tuple(sinks.seq_lens_B.tolist())
    assert sinks.page_table_BN.tolist() == [[100, 101], [108, 109]]


def test_a_recorded_step_takes_lengths_from_the_device() -> None:
    """The host has bounds alone; the third row is padding."""
    bounds = batch(Phase.DECODE, (1, 1, 1), (128, 128, 128))
    lens = torch.tensor([21, 90, 0], dtype=torch.int32)
    recorded = replace(bounds, bounds=True, seq_lens_B=lens)
    parts = split_sinks(recorded, far_batch(recorded, WINDOW), WINDOW, SINKS, PAGE)
    assert parts and parts.far
    ((_, sinks),) = parts.sinks
    assert sinks.bounds and sinks.seq_lens == (SINKS,) * 3
    assert sinks.seq_lens_B.tolist() == [1, 32, 0]
    assert parts.far.seq_lens_B.tolist() == [0, 90 - WINDOW - SINKS, 0]


def test_long_prompts_are_merged_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nibble.attention.sinks.ROWS", 2)
    whole = batch(Phase.EXTEND, (3, 2), (22, 90))
    parts = split_sinks(whole, far_batch(whole, WINDOW), WINDOW, SINKS, PAGE)
    assert parts and [rows for rows, _ in parts.sinks] == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert [part.seq_lens for _, part in parts.sinks] == [(0, 1), (2, 32), (32,)]
    assert [part.seq_lens_B.tolist() for _, part in parts.sinks] == [[0, 1], [2, 32], [32]]
    assert [part.cu_seqlens_q_B1.tolist() for _, part in parts.sinks] == [[0, 1, 2], [0, 1, 2], [0, 1]]


def test_there_may_be_nothing_to_read() -> None:
    short, some = batch(Phase.PREFILL, (20,), (20,)), batch(Phase.PREFILL, (50,), (50,))
    none = split_sinks(short, far_batch(short, WINDOW), WINDOW, SINKS, PAGE)
    assert none and none.sinks == () and none.far is None
    no_far = split_sinks(some, far_batch(some, WINDOW), WINDOW, SINKS, PAGE)
    assert no_far and no_far.sinks and no_far.far is None
    assert split_sinks(some, far_batch(some, WINDOW), WINDOW, 0, PAGE) is None


def sink_weights(sinks: int, kv_format: str) -> torch.Tensor:
    """The weight [T, H] that each query of a prompt gives a first key that is 100,000 times the others."""
    config = Config(model="m", kv_format=kv_format, kv_transforms="none", kv_window=WINDOW, kv_sinks=sinks)
    plan = resolve(config, SMALL, CPU)
    group = plan.groups[0].group
    random, heads, dim = torch.Generator().manual_seed(0), group.streams[0].heads, group.head_dim
    q, k, v = (torch.randn(TOKENS, n, dim, generator=random) for n in (group.q_heads, heads, heads))
    # Other keys are 1 or -1, which every format holds, so that nothing but the first is off. As in models with
    # sinks, that is large in one channel, where queries are small.
    k = k.sign()
    k[0], k[0, :, 5] = 0.0, 1e5
    q[..., 5] = log(TOKENS) * dim**0.5 / 1e5
    v[..., 0] = 0.0
    v[0] = 0.0
    v[0, :, 0] = 1.0
    with torch.inference_mode():
        ctx = prompt_context(plan, scales.ONE, TOKENS, torch.device("cpu"))
        out = attention(ctx, 0, q, {"k": k, "v": v}, AttentionParams(dim**-0.5))
        wide = k.repeat_interleave(group.q_heads // heads, 1)
        scores = torch.einsum("thd,lhd->htl", q, wide) * dim**-0.5
        future = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
        expected = scores.masked_fill(future, -torch.inf).softmax(-1)[..., 0].T
    assert float(expected.min()) > 0.1, "the first key has weight"
    return (out[..., 0] - expected).abs() / expected


@pytest.mark.parametrize("kv_format", ["nvfp4", "mxfp4", "fp8_e4m3"])
def test_a_key_100_000_times_the_others_has_its_weight(kv_format: str) -> None:
    assert float(sink_weights(1, kv_format).max()) < 1e-3
    # Near queries read it exactly anyway; all others are off without sinks.
    without = sink_weights(0, kv_format)
    assert float(without[:WINDOW].max()) < 1e-3 < 0.01 < float(without[WINDOW:].min())


def test_rows_that_see_no_far_token_are_left_out_of_a_single_prompt() -> None:
    far = far_batch(batch(Phase.EXTEND, (30,), (37,)), WINDOW)
    assert far and (far.start, far.stop) == (0, 30)
    rows = rows_with_far_tokens(far)
    # Tokens 7 to 19 see none.
    assert (rows.start, rows.stop, rows.query_lens, rows.seq_lens) == (13, 30, (17,), (17,))
    assert rows.cu_seqlens_q_B1.tolist() == [0, 17] and rows.seq_lens_B.tolist() == [17]
    assert rows.num_omitted == far.num_omitted == WINDOW
    for query_lens, seq_lens in (((30,), (50,)), ((30,), (90,)), ((30, 4), (37, 90))):
        far = far_batch(batch(Phase.EXTEND, query_lens, seq_lens), WINDOW)
        assert far and rows_with_far_tokens(far) is far

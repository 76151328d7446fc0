"""Attention over near tokens in one launch, of decode steps, drafts and prompts, and without_mean, in Triton.

An exact page holds keys and values as the model made them. There are few near tokens, so a program takes all of a
request's for one KV head, and of drafts as many queries as its tile has rows for. Lengths are read on the device.

Shape suffixes: T tokens, H query heads, M query heads of a KV head for each query token, padded, D values of a head,
N keys of a tile, R rows of a tile of without_mean (a token's head each). Names in capitals are constants of a kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels import GPU, MMA_ROWS, cdiv, gpu_of, next_power_of_2
from nibble.kernels.attention.naive import PartialAttention
from nibble.kernels.launches import launches_of
from nibble.kernels.types import AttentionBatch, AttentionParams, Paged

KEYS, KEY_BYTES = 64, 512
"""Keys of a tile, where a key has at most so many bytes; fewer of longer ones, to fit into the smallest GPUs."""
SHIFT_VALUES = 4096
"""Values of a tile of without_mean."""
MANY_PROGRAMS = 4
"""Programs of a processor from which they hide each other's waiting: then each is small."""
DRAFT_ROWS = 64
"""Rows of a tile of drafts."""
PROMPT_ROWS, PROMPT_KEYS, PROMPT_BYTES = 64, 16, 512
"""Rows and keys of a tile of prompts, where a key has at most so many bytes. Few keys, since of a window's first and
last ones most are hidden."""


@triton.jit
def _load_tile(rows, offset_N, keep_N, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Load keys or values [N, D] that lie at offsets of `rows`; zeros where they are not kept."""
    column_D = tl.arange(0, WIDTH)[None, :]
    return tl.load(rows + offset_N[:, None] + column_D, mask=keep_N[:, None] & (column_D < DIM), other=0.0)


@triton.jit
def _attend_tile(state, q_MD, k_ND, v_ND, visible, scale, softcap, SOFTCAP: tl.constexpr):
    """Add a tile of keys to the state of an online softmax: peaks [M], totals [M], sums [M, D]."""
    peak_M, total_M, sums_MD = state
    scores_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee") * scale
    if SOFTCAP:
        # tanh by its exponential, which Triton has on every machine
        scores_MN = softcap * (1 - 2 / (tl.exp(2 * scores_MN / softcap) + 1))
    scores_MN = tl.where(visible, scores_MN, float("-inf"))
    new_M = tl.maximum(peak_M, tl.max(scores_MN, 1))
    weights_MN, rescale_M = tl.exp(scores_MN - new_M[:, None]), tl.exp(peak_M - new_M)
    sums_MD = sums_MD * rescale_M[:, None] + tl.dot(weights_MN.to(v_ND.dtype), v_ND, input_precision="ieee")
    return new_M, total_M * rescale_M + tl.sum(weights_MN, 1), sums_MD


@triton.jit
def _add_sink(state, sinks, head_M, live_M):
    """Add a sink, a key without a value, to the state of an online softmax."""
    peak_M, total_M, sums_MD = state
    sink_M = tl.load(sinks + head_M, mask=live_M, other=0.0).to(tl.float32)
    new_M = tl.maximum(peak_M, sink_M)
    rescale_M = tl.exp(peak_M - new_M)
    return new_M, total_M * rescale_M + tl.exp(sink_M - new_M), sums_MD * rescale_M[:, None]


@triton.jit
def _mean_shift(q_MD, k_mean, kv_head, k_D, scale, K_DIM: tl.constexpr):
    """Return by how much scores of far keys are less, as those lack their mean."""
    mean_D = tl.load(k_mean + kv_head * K_DIM + k_D, mask=k_D < K_DIM, other=0.0)
    return tl.sum(q_MD.to(tl.float32) * mean_D[None, :], 1) * scale


@triton.jit
def near_kernel(
    q, k, v, table, cu_seqlens_q, seq_lens, sinks, k_mean, values, lse, scale, softcap,
    q_stride_T, q_stride_H, k_stride_P, k_stride_H, k_stride_S, v_stride_P, v_stride_H, v_stride_S, table_stride,
    lse_stride_T,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, GROUP: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    PAGE: tl.constexpr, TOKENS: tl.constexpr, M: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Attend over a request's near tokens. Grid: requests, KV heads, tiles of TOKENS queries.

    Without cu_seqlens_q each request has one query.
    """
    request, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row_M, stop = tl.arange(0, M), tl.load(seq_lens + request)
    if cu_seqlens_q is None:
        at_M, head_M = request + tl.zeros([M], tl.int64), kv_head * GROUP + row_M
        live_M, end_M, first = row_M < GROUP, stop + tl.zeros([M], tl.int32), stop - WINDOW
    else:
        begin, query = tl.load(cu_seqlens_q + request), tl.program_id(2) * TOKENS
        count = tl.load(cu_seqlens_q + request + 1) - begin
        token_M, head_M = query + row_M // GROUP, kv_head * GROUP + row_M % GROUP
        at_M, live_M = (begin + token_M).to(tl.int64), (row_M < TOKENS * GROUP) & (token_M < count)
        # Each query sees one token more than the one before it.
        end_M, first = stop - count + token_M + 1, stop - count + query + 1 - WINDOW
        # A tile behind the last query has nothing to read.
        stop = tl.where(query < count, stop + tl.minimum(query + TOKENS, count) - count, 0)
    first = tl.maximum(first, 0)
    k_D, v_D = tl.arange(0, K_WIDTH), tl.arange(0, V_WIDTH)
    q_at = q + (at_M * q_stride_T + head_M * q_stride_H)[:, None] + k_D[None, :]
    q_MD = tl.load(q_at, mask=live_M[:, None] & (k_D < K_DIM)[None, :], other=0.0)
    # --- softmax over near tokens, tile by tile
    state = tl.full([M], -1e30, tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, V_WIDTH], tl.float32)
    for begin in range(first, stop, N):
        key_N = begin + tl.arange(0, N)
        page_N = tl.load(table + request * table_stride + key_N // PAGE, mask=key_N < stop, other=0).to(
            tl.int64
        )
        k_ND = _load_tile(k + kv_head * k_stride_H, page_N * k_stride_P + key_N % PAGE * k_stride_S, key_N < stop,
                          K_DIM, K_WIDTH)  # fmt: skip
        v_ND = _load_tile(v + kv_head * v_stride_H, page_N * v_stride_P + key_N % PAGE * v_stride_S, key_N < stop,
                          V_DIM, V_WIDTH)  # fmt: skip
        visible_MN = (key_N < stop)[None, :]
        if cu_seqlens_q is not None:
            visible_MN = (key_N[None, :] < end_M[:, None]) & (key_N[None, :] >= end_M[:, None] - WINDOW)
        state = _attend_tile(state, q_MD, k_ND, v_ND, visible_MN, scale, softcap, SOFTCAP)
    if sinks is not None:
        state = _add_sink(state, sinks, head_M, live_M)
    peak_M, total_M, sums_MD = state
    # --- store; padding sees no tokens at all
    keep_M = live_M & (end_M > 0)
    total_M = tl.where(keep_M, total_M, 1.0)
    lse_M = peak_M + tl.log(total_M)
    if k_mean is not None:
        lse_M -= _mean_shift(q_MD, k_mean, kv_head, k_D, scale, K_DIM)
    tl.store(lse + at_M * lse_stride_T + head_M, tl.where(keep_M, lse_M, float("-inf")), mask=live_M)
    values_MD = tl.where(keep_M[:, None], sums_MD / total_M[:, None], 0.0)
    values_at = values + (at_M * lse_stride_T + head_M)[:, None] * V_DIM + v_D[None, :]
    tl.store(values_at, values_MD, mask=live_M[:, None] & (v_D < V_DIM)[None, :])


def near_attention(
    q_THD: Tensor,
    k: Paged,
    v: Paged,
    batch: AttentionBatch,
    params: AttentionParams,
    k_mean_HD: Tensor | None = None,
) -> PartialAttention:
    """Attend over near tokens in one launch; see naive.py for the arguments."""
    (k_plane,), (v_plane,) = k.planes_PHS, v.planes_PHS
    (tokens, heads, _), queries = q_THD.shape, max(batch.query_lens)
    values_THD = torch.empty(tokens, heads, v.dim, dtype=torch.float32, device=q_THD.device)
    lse_TH = torch.empty(tokens, heads, dtype=torch.float32, device=q_THD.device)
    group, table_BN, requests = heads // k.heads, batch.page_table_BN, len(batch.query_lens)
    longest = next_power_of_2(max(k.dim, v.dim)) * k_plane.itemsize
    keys, warps, stages = decode_tile(longest, requests * k.heads, gpu_of(q_THD.device))
    cu_seqlens_q, of_tile = None, 1
    if queries > 1:
        cu_seqlens_q, of_tile = (
            batch.cu_seqlens_q_B1,
            max(1, min(next_power_of_2(queries), DRAFT_ROWS // group)),
        )
        # The same for any number of requests, so that few kernels are compiled.
        keys, warps, stages = decode_tile(longest, 0, gpu_of(q_THD.device))
    dynamic = (
        q_THD, k_plane, v_plane, table_BN, cu_seqlens_q, batch.seq_lens_B, params.sinks_H, k_mean_HD, values_THD,
        lse_TH, params.scale, params.softcap or 0.0,
        *q_THD.stride()[:2], *k_plane.stride()[:3], *v_plane.stride()[:3], table_BN.stride(0), lse_TH.stride(0),
    )  # fmt: skip
    # WINDOW to N
    constants = (
        params.window, bool(params.softcap), group, k.dim, v.dim, k.page_size, of_tile,
        max(MMA_ROWS, next_power_of_2(group * of_tile)), next_power_of_2(k.dim), next_power_of_2(v.dim), keys,
    )  # fmt: skip
    launches_of(k, "near")(
        near_kernel, (requests, k.heads, cdiv(queries, of_tile)), (*dynamic, (*constants, warps, stages)),
        (*dynamic, *constants), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return PartialAttention(values_THD, lse_TH.T)


def decode_tile(key_bytes: int, programs: int, gpu: GPU) -> tuple[int, int, int]:
    """Choose the keys, warps and stages of decode steps.

    Args:
        key_bytes: Of the longer of a key and a value, padded.
        programs: How many there are.
        gpu: Sizes of the GPU.
    """
    keys = max(MMA_ROWS, min(KEYS, KEYS * KEY_BYTES // key_bytes))
    if key_bytes <= KEY_BYTES // 2 and programs >= MANY_PROGRAMS * gpu.processors:
        return keys // 2, 1, 3
    return keys, 4, 1


# ---- prompts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PromptTile:
    """How near_prompt_kernel is tiled."""

    rows: int
    keys: int
    warps: int
    stages: int


def prompt_tile(key_bytes: int, group: int) -> PromptTile:
    """Choose the tile of prompts.

    Args:
        key_bytes: Of the longer of a key and a value, padded.
        group: Query heads of a KV head.
    """
    # Longer keys have smaller tiles, to fit into the smallest GPUs.
    is_long = key_bytes > PROMPT_BYTES
    rows = max(MMA_ROWS, PROMPT_ROWS * PROMPT_BYTES // key_bytes) if is_long else PROMPT_ROWS
    return PromptTile(max(rows, next_power_of_2(group)), PROMPT_KEYS, 4, 1 if is_long else 3)


@triton.jit(
    do_not_specialize=["table_stride", "far_first", "far_lse_stride_H", "far_lse_stride_T"],
    do_not_specialize_on_alignment=["table", "cu_seqlens_q", "seq_lens", "sinks", "far_lse"],
)
def near_prompt_kernel(
    q, new_k, new_v, k, v, table, cu_seqlens_q, seq_lens, sinks, k_mean, far, far_lse, far_first, out, scale, softcap,
    q_stride_T, q_stride_H, new_k_stride_T, new_k_stride_H, new_v_stride_T, new_v_stride_H,
    k_stride_P, k_stride_H, k_stride_S, v_stride_P, v_stride_H, v_stride_S, table_stride,
    far_stride_T, far_stride_H, far_lse_stride_H, far_lse_stride_T, out_stride_T,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, GROUP: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    PAGE: tl.constexpr, M: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Attend over near tokens of a tile of queries, and merge far ones. Grid: KV heads, tiles of queries, requests.

    Tokens before the request's first query are read from exact pages, and others as the model gave them.
    """
    # --- which queries
    kv_head, request = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    TOKENS: tl.constexpr = M // GROUP
    begin = tl.load(cu_seqlens_q + request)
    count = tl.load(cu_seqlens_q + request + 1) - begin
    first = tl.program_id(1) * TOKENS
    if first >= count:
        return
    past = tl.load(seq_lens + request) - count
    row_M = tl.arange(0, M)
    token_M, head_M = first + row_M // GROUP, kv_head * GROUP + row_M % GROUP
    live_M = (row_M < TOKENS * GROUP) & (token_M < count)
    at_M, position_M = (begin + token_M).to(tl.int64), past + token_M
    k_D, v_D = tl.arange(0, K_WIDTH), tl.arange(0, V_WIDTH)
    q_at = q + (at_M * q_stride_T + head_M * q_stride_H)[:, None] + k_D[None, :]
    q_MD = tl.load(q_at, mask=live_M[:, None] & (k_D < K_DIM)[None, :], other=0.0)
    # --- softmax over near tokens, tile by tile: those in pages, then new ones
    state = tl.full([M], -1e30, tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, V_WIDTH], tl.float32)
    start, stop = tl.maximum(past + first - WINDOW + 1, 0), past + tl.minimum(first + TOKENS, count)
    new_k, new_v = new_k + kv_head * new_k_stride_H, new_v + kv_head * new_v_stride_H
    k, v = k + kv_head * k_stride_H, v + kv_head * v_stride_H
    for at in tl.range(start, past, N, num_stages=1):  # few tiles have any
        key_N = at + tl.arange(0, N)
        keep_N = key_N < past
        page_N = tl.load(table + request * table_stride + key_N // PAGE, mask=keep_N, other=0).to(tl.int64)
        slot_N = key_N % PAGE
        k_ND = _load_tile(k, page_N * k_stride_P + slot_N * k_stride_S, keep_N, K_DIM, K_WIDTH)
        v_ND = _load_tile(v, page_N * v_stride_P + slot_N * v_stride_S, keep_N, V_DIM, V_WIDTH)
        visible_MN = (position_M[:, None] - key_N[None, :] < WINDOW) & keep_N[None, :]
        state = _attend_tile(state, q_MD, k_ND, v_ND, visible_MN, scale, softcap, SOFTCAP)
    for at in range(tl.maximum(start, past), stop, N):
        key_N = at + tl.arange(0, N)
        new_N = (begin + key_N - past).to(tl.int64)
        k_ND = _load_tile(new_k, new_N * new_k_stride_T, key_N < stop, K_DIM, K_WIDTH)
        v_ND = _load_tile(new_v, new_N * new_v_stride_T, key_N < stop, V_DIM, V_WIDTH)
        distance_MN = position_M[:, None] - key_N[None, :]
        visible_MN = (distance_MN >= 0) & (distance_MN < WINDOW)
        state = _attend_tile(state, q_MD, k_ND, v_ND, visible_MN, scale, softcap, SOFTCAP)
    if sinks is not None:
        state = _add_sink(state, sinks, head_M, live_M)
    peak_M, total_M, sums_MD = state
    # A query sees itself, so only rows that there are not have a sum of nothing.
    total_M = tl.where(live_M, total_M, 1.0)
    sums_MD /= total_M[:, None]
    # --- merge
    if far is not None:
        # Rows before the first see no far token.
        near_M, far_row_M = peak_M + tl.log(total_M), at_M - far_first
        if k_mean is not None:
            near_M -= _mean_shift(q_MD, k_mean, kv_head, k_D, scale, K_DIM)
        far_at, sees_M = head_M * far_lse_stride_H + far_row_M * far_lse_stride_T, live_M & (far_row_M >= 0)
        far_M = 1 / (1 + tl.exp(near_M - tl.load(far_lse + far_at, mask=sees_M, other=float("-inf"))))
        # Values without a weight are not loaded.
        keep_MD = (live_M & (far_M > 0.0))[:, None] & (v_D < V_DIM)[None, :]
        far_MD = tl.load(
            far + (far_row_M * far_stride_T + head_M * far_stride_H)[:, None] + v_D[None, :],
            mask=keep_MD,
            other=0.0,
        )
        sums_MD = sums_MD * (1.0 - far_M)[:, None] + far_MD.to(tl.float32) * far_M[:, None]
    # --- store
    out_at = out + (at_M * out_stride_T + head_M * V_DIM)[:, None] + v_D[None, :]
    tl.store(out_at, sums_MD.to(out.dtype.element_ty), mask=live_M[:, None] & (v_D < V_DIM)[None, :])


def near_prompt_attention(
    q_THD: Tensor,
    streams: Mapping[str, Tensor],
    k: Paged,
    v: Paged,
    batch: AttentionBatch,
    params: AttentionParams,
    k_mean_HD: Tensor | None = None,
    far: PartialAttention | None = None,
    tile: PromptTile | None = None,
) -> Tensor:
    """Attend over near tokens and merge far ones in one launch; see naive.py for the arguments."""
    (k_plane,), (v_plane,), table_BN = k.planes_PHS, v.planes_PHS, batch.exact_table_BN
    assert table_BN is not None
    tokens, heads, _ = q_THD.shape
    out_THD = q_THD.new_empty(tokens, heads, v.dim)
    q_THD, new_k, new_v = (_readable(x, k_plane.dtype) for x in (q_THD, streams["k"], streams["v"]))
    values, lse_HT = (None, None) if far is None else (_readable(far.values_THD), far.lse_HT)
    far_first = 0 if values is None else tokens - len(values)
    group = heads // k.heads
    tile = tile or prompt_tile(next_power_of_2(max(k.dim, v.dim)) * k_plane.itemsize, group)
    grid = k.heads, cdiv(max(batch.query_lens), tile.rows // group), len(batch.query_lens)
    dynamic = (
        q_THD, new_k, new_v, k_plane, v_plane, table_BN, batch.cu_seqlens_q_B1, batch.seq_lens_B, params.sinks_H,
        k_mean_HD, values, lse_HT, far_first, out_THD, params.scale, params.softcap or 0.0,
        *q_THD.stride()[:2], *new_k.stride()[:2], *new_v.stride()[:2], *k_plane.stride()[:3], *v_plane.stride()[:3],
        table_BN.stride(0), *(values.stride()[:2] if values is not None else (0, 0)),
        *(lse_HT.stride() if lse_HT is not None else (0, 0)), out_THD.stride(0),
    )  # fmt: skip
    # WINDOW to N
    constants = (
        params.window, bool(params.softcap), group, k.dim, v.dim, k.page_size, tile.rows, next_power_of_2(k.dim),
        next_power_of_2(v.dim), tile.keys,
    )  # fmt: skip
    launches_of(k, "near_prompt")(
        near_prompt_kernel, grid, (*dynamic, (constants, tile)), (*dynamic, *constants),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out_THD


def _readable(x_THD: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    x_THD = x_THD if dtype is None else x_THD.to(dtype)
    return x_THD if x_THD.stride(2) == 1 else x_THD.contiguous()


# ---- the mean of far keys --------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows", "lse_stride_H", "lse_stride_T"])
def shift_kernel(
    q, mean, lse, out, rows, scale, q_stride_T, q_stride_H, lse_stride_H, lse_stride_T,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, R: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Subtract q . mean from log-sum-exps. Grid: tiles of rows, each a head of a token."""
    row_R = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    token_R, head_R, keep_R = row_R // HEADS, row_R % HEADS, row_R < rows
    d_D = tl.arange(0, WIDTH)
    keep_RD = keep_R[:, None] & (d_D < DIM)[None, :]
    q_at = q + (token_R * q_stride_T + head_R * q_stride_H)[:, None] + d_D[None, :]
    q_RD = tl.load(q_at, mask=keep_RD, other=0.0).to(tl.float32)
    mean_RD = tl.load(mean + (head_R // GROUP * DIM)[:, None] + d_D[None, :], mask=keep_RD, other=0.0)
    lse_R = tl.load(lse + head_R * lse_stride_H + token_R * lse_stride_T, mask=keep_R, other=0.0)
    tl.store(out + row_R, lse_R - tl.sum(q_RD * mean_RD, 1) * scale, mask=keep_R)


def without_mean(near: PartialAttention, q_THD: Tensor, k_mean_HD: Tensor, scale: float) -> PartialAttention:
    """Return the near part as if the mean of keys had been subtracted, in one launch; see naive.py."""
    tokens, heads, dim = q_THD.shape
    lse_TH = torch.empty(tokens, heads, dtype=torch.float32, device=q_THD.device)
    q_THD = _readable(q_THD)
    width = next_power_of_2(dim)
    tile = max(1, SHIFT_VALUES // width)
    if rows := tokens * heads:
        shift_kernel[(cdiv(rows, tile),)](
            q_THD, k_mean_HD.contiguous(), near.lse_HT, lse_TH, rows, scale, *q_THD.stride()[:2],
            *near.lse_HT.stride(), HEADS=heads, GROUP=heads // len(k_mean_HD), DIM=dim, R=tile, WIDTH=width,
        )  # fmt: skip
    return near._replace(lse_HT=lse_TH.T)

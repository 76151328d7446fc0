"""Attention of decode steps over exact pages in one launch, and without_mean, in Triton.

An exact page holds keys and values as the model made them. There are few near tokens, so a program takes all of a
request's for one KV head. Lengths are read on the device.

Shape suffixes: T tokens (one of each request), H query heads, M query heads of a KV head, padded, D values of a head,
N keys of a tile, R rows of a tile of without_mean (a token's head each). Names in capitals are constants of a kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels import MMA_ROWS, cdiv, next_power_of_2
from nibble.kernels.attention.naive import PartialAttention
from nibble.kernels.types import AttentionBatch, AttentionParams, Paged

KEYS, KEY_BYTES = 64, 512
"""Keys of a tile, where a key has at most so many bytes; fewer of longer ones, to fit into the smallest GPUs."""
SHIFT_VALUES = 4096
"""Values of a tile of without_mean."""


@triton.jit
def _load_tile(rows, offset_N, keep_N, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Load keys or values [N, D] that lie at offsets of `rows`; zeros where they are not kept."""
    column_D = tl.arange(0, WIDTH)[None, :]
    return tl.load(rows + offset_N[:, None] + column_D, mask=keep_N[:, None] & (column_D < DIM), other=0.0)


@triton.jit
def near_kernel(
    q, k, v, table, seq_lens, sinks, k_mean, values, lse, scale, softcap,
    q_stride_T, q_stride_H, k_stride_P, k_stride_H, k_stride_S, v_stride_P, v_stride_H, v_stride_S, table_stride,
    lse_stride_T,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, GROUP: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    PAGE: tl.constexpr, M: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Attend over a request's near tokens. Grid: requests, KV heads."""
    request, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row_M = tl.arange(0, M)
    head_M = kv_head * GROUP + row_M
    live_M = row_M < GROUP
    k_D, v_D = tl.arange(0, K_WIDTH), tl.arange(0, V_WIDTH)
    q_at = q + request * q_stride_T + head_M[:, None] * q_stride_H + k_D[None, :]
    q_MD = tl.load(q_at, mask=live_M[:, None] & (k_D < K_DIM)[None, :], other=0.0)
    stop = tl.load(seq_lens + request)
    first = tl.maximum(stop - WINDOW, 0)
    # --- softmax over near tokens, tile by tile
    peak_M = tl.full([M], -1e30, tl.float32)
    total_M = tl.zeros([M], tl.float32)
    sums_MD = tl.zeros([M, V_WIDTH], tl.float32)
    for begin in range(first, stop, N):
        key_N = begin + tl.arange(0, N)
        page_N = tl.load(table + request * table_stride + key_N // PAGE, mask=key_N < stop, other=0).to(
            tl.int64
        )
        k_ND = _load_tile(k + kv_head * k_stride_H, page_N * k_stride_P + key_N % PAGE * k_stride_S, key_N < stop,
                          K_DIM, K_WIDTH)  # fmt: skip
        v_ND = _load_tile(v + kv_head * v_stride_H, page_N * v_stride_P + key_N % PAGE * v_stride_S, key_N < stop,
                          V_DIM, V_WIDTH)  # fmt: skip
        scores_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee") * scale
        if SOFTCAP:
            # tanh by its exponential, which Triton has on every machine
            scores_MN = softcap * (1 - 2 / (tl.exp(2 * scores_MN / softcap) + 1))
        scores_MN = tl.where((key_N < stop)[None, :], scores_MN, float("-inf"))
        new_M = tl.maximum(peak_M, tl.max(scores_MN, 1))
        weights_MN, rescale_M = tl.exp(scores_MN - new_M[:, None]), tl.exp(peak_M - new_M)
        total_M = total_M * rescale_M + tl.sum(weights_MN, 1)
        sums_MD = sums_MD * rescale_M[:, None] + tl.dot(
            weights_MN.to(v_ND.dtype), v_ND, input_precision="ieee"
        )
        peak_M = new_M
    if sinks is not None:
        sink_M = tl.load(sinks + head_M, mask=live_M, other=0.0).to(tl.float32)
        new_M = tl.maximum(peak_M, sink_M)
        rescale_M = tl.exp(peak_M - new_M)
        total_M = total_M * rescale_M + tl.exp(sink_M - new_M)
        sums_MD *= rescale_M[:, None]
        peak_M = new_M
    # --- store; padding has no tokens at all
    keep_M = live_M & (stop > 0)
    total_M = tl.where(keep_M, total_M, 1.0)
    lse_M = peak_M + tl.log(total_M)
    if k_mean is not None:
        # Scores of far keys lack what their mean would add; so that both compare, those of near ones lack it too.
        mean_D = tl.load(k_mean + kv_head * K_DIM + k_D, mask=k_D < K_DIM, other=0.0)
        lse_M -= tl.sum(q_MD.to(tl.float32) * mean_D[None, :], 1) * scale
    tl.store(lse + request * lse_stride_T + head_M, tl.where(keep_M, lse_M, float("-inf")), mask=live_M)
    values_MD = tl.where(keep_M[:, None], sums_MD / total_M[:, None], 0.0)
    values_at = values + (request * lse_stride_T + head_M)[:, None] * V_DIM + v_D[None, :]
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
    requests, heads, _ = q_THD.shape
    values_THD = torch.empty(requests, heads, v.dim, dtype=torch.float32, device=q_THD.device)
    lse_TH = torch.empty(requests, heads, dtype=torch.float32, device=q_THD.device)
    group, table_BN = heads // k.heads, batch.page_table_BN
    longest = next_power_of_2(max(k.dim, v.dim)) * k_plane.itemsize
    keys = max(MMA_ROWS, min(KEYS, KEYS * KEY_BYTES // longest))
    near_kernel[requests, k.heads](
        q_THD, k_plane, v_plane, table_BN, batch.seq_lens_B, params.sinks_H, k_mean_HD, values_THD, lse_TH,
        params.scale, params.softcap or 0.0,
        *q_THD.stride()[:2], *k_plane.stride()[:3], *v_plane.stride()[:3], table_BN.stride(0), lse_TH.stride(0),
        WINDOW=params.window, SOFTCAP=bool(params.softcap), GROUP=group, K_DIM=k.dim, V_DIM=v.dim, PAGE=k.page_size,
        M=max(MMA_ROWS, next_power_of_2(group)), K_WIDTH=next_power_of_2(k.dim), V_WIDTH=next_power_of_2(v.dim),
        N=keys,
    )  # fmt: skip
    return PartialAttention(values_THD, lse_TH.T)


# ---- the mean of far keys --------------------------------------------------------------------------------------------


@triton.jit
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
    q_THD = q_THD if q_THD.stride(2) == 1 else q_THD.contiguous()
    width = next_power_of_2(dim)
    tile = max(1, SHIFT_VALUES // width)
    if rows := tokens * heads:
        shift_kernel[(cdiv(rows, tile),)](
            q_THD, k_mean_HD.contiguous(), near.lse_HT, lse_TH, rows, scale, *q_THD.stride()[:2],
            *near.lse_HT.stride(), HEADS=heads, GROUP=heads // len(k_mean_HD), DIM=dim, R=tile, WIDTH=width,
        )  # fmt: skip
    return near._replace(lse_HT=lse_TH.T)

import torch, triton, triton.language as tl
from nibble.kernels import cdiv, next_power_of_2
from nibble.kernels.near.triton import _load_tile, _attend_tile, _add_sink, _mean_shift, _readable

@triton.jit(
    do_not_specialize=["table_stride", "far_lse_stride_H", "far_lse_stride_T"],
    do_not_specialize_on_alignment=["table", "cu_seqlens_q", "seq_lens", "sinks", "far_lse"],
)
def kernel(
    q, new_k, new_v, k, v, table, cu_seqlens_q, seq_lens, sinks, k_mean, far, far_lse, out, scale, softcap,
    q_stride_T, q_stride_H, new_k_stride_T, new_k_stride_H, new_v_stride_T, new_v_stride_H,
    k_stride_P, k_stride_H, k_stride_S, v_stride_P, v_stride_H, v_stride_S, table_stride,
    far_stride_T, far_stride_H, far_lse_stride_H, far_lse_stride_T, out_stride_T,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, GROUP: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    PAGE: tl.constexpr, M: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, N: tl.constexpr,
    EARLY: tl.constexpr, HEADS_FAST: tl.constexpr, SPLIT: tl.constexpr,
):
    if HEADS_FAST:
        kv_head, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    else:
        tile, kv_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    request = tl.program_id(2).to(tl.int64)
    TOKENS: tl.constexpr = M // GROUP
    begin = tl.load(cu_seqlens_q + request)
    count = tl.load(cu_seqlens_q + request + 1) - begin
    length = tl.load(seq_lens + request)
    first = tile * TOKENS
    if first >= count:
        return
    past = length - count
    row_M = tl.arange(0, M)
    token_M, head_M = first + row_M // GROUP, kv_head * GROUP + row_M % GROUP
    live_M = (row_M < TOKENS * GROUP) & (token_M < count)
    at_M, position_M = (begin + token_M).to(tl.int64), past + token_M
    k_D, v_D = tl.arange(0, K_WIDTH), tl.arange(0, V_WIDTH)
    q_at = q + (at_M * q_stride_T + head_M * q_stride_H)[:, None] + k_D[None, :]
    q_MD = tl.load(q_at, mask=live_M[:, None] & (k_D < K_DIM)[None, :], other=0.0)
    if EARLY and far is not None:
        far_M = tl.load(far_lse + head_M * far_lse_stride_H + at_M * far_lse_stride_T, mask=live_M, other=float("-inf"))
        far_MD = tl.load(far + (at_M * far_stride_T + head_M * far_stride_H)[:, None] + v_D[None, :],
                         mask=(live_M & (far_M > float("-inf")))[:, None] & (v_D < V_DIM)[None, :], other=0.0)
    state = tl.full([M], -1e30, tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, V_WIDTH], tl.float32)
    stop = past + tl.minimum(first + TOKENS, count)
    new_k, new_v = new_k + kv_head * new_k_stride_H, new_v + kv_head * new_v_stride_H
    k, v = k + kv_head * k_stride_H, v + kv_head * v_stride_H
    start0 = tl.maximum(past + first - WINDOW + 1, 0)
    if SPLIT:
        for start in range(start0, past, N):
            key_N = start + tl.arange(0, N)
            keep_N = key_N < past
            page_N = tl.load(table + request * table_stride + key_N // PAGE, mask=keep_N, other=0).to(tl.int64)
            slot_N = key_N % PAGE
            k_ND = _load_tile(k, page_N * k_stride_P + slot_N * k_stride_S, keep_N, K_DIM, K_WIDTH)
            v_ND = _load_tile(v, page_N * v_stride_P + slot_N * v_stride_S, keep_N, V_DIM, V_WIDTH)
            distance_MN = position_M[:, None] - key_N[None, :]
            state = _attend_tile(state, q_MD, k_ND, v_ND, (distance_MN < WINDOW) & keep_N[None, :], scale, softcap, SOFTCAP)
        # in tokens of the request's new ones
        for start in tl.range(tl.maximum(start0, past), stop, N):
            key_N = start + tl.arange(0, N)
            new_N = (begin + key_N - past).to(tl.int64)
            k_ND = _load_tile(new_k, new_N * new_k_stride_T, key_N < stop, K_DIM, K_WIDTH)
            v_ND = _load_tile(new_v, new_N * new_v_stride_T, key_N < stop, V_DIM, V_WIDTH)
            distance_MN = position_M[:, None] - key_N[None, :]
            state = _attend_tile(state, q_MD, k_ND, v_ND, (distance_MN >= 0) & (distance_MN < WINDOW), scale, softcap, SOFTCAP)
    else:
        for start in range(start0, stop, N):
            key_N = start + tl.arange(0, N)
            keep_N, is_new_N = key_N < stop, key_N >= past
            new_N = (begin + key_N - past).to(tl.int64)
            k_ND = _load_tile(new_k, new_N * new_k_stride_T, keep_N & is_new_N, K_DIM, K_WIDTH)
            v_ND = _load_tile(new_v, new_N * new_v_stride_T, keep_N & is_new_N, V_DIM, V_WIDTH)
            if start < past:
                page_N = tl.load(table + request * table_stride + key_N // PAGE, mask=key_N < past, other=0).to(tl.int64)
                slot_N, is_old_N1 = key_N % PAGE, (key_N < past)[:, None]
                old_k_ND = _load_tile(k, page_N * k_stride_P + slot_N * k_stride_S, key_N < past, K_DIM, K_WIDTH)
                old_v_ND = _load_tile(v, page_N * v_stride_P + slot_N * v_stride_S, key_N < past, V_DIM, V_WIDTH)
                k_ND, v_ND = tl.where(is_old_N1, old_k_ND, k_ND), tl.where(is_old_N1, old_v_ND, v_ND)
            distance_MN = position_M[:, None] - key_N[None, :]
            visible_MN = (distance_MN >= 0) & (distance_MN < WINDOW)
            state = _attend_tile(state, q_MD, k_ND, v_ND, visible_MN, scale, softcap, SOFTCAP)
    if sinks is not None:
        state = _add_sink(state, sinks, head_M, live_M)
    peak_M, total_M, sums_MD = state
    total_M = tl.where(live_M, total_M, 1.0)
    sums_MD /= total_M[:, None]
    if far is not None:
        near_M = peak_M + tl.log(total_M)
        if k_mean is not None:
            near_M -= _mean_shift(q_MD, k_mean, kv_head, k_D, scale, K_DIM)
        if not EARLY:
            far_M = tl.load(far_lse + head_M * far_lse_stride_H + at_M * far_lse_stride_T, mask=live_M, other=float("-inf"))
        far_M = 1 / (1 + tl.exp(near_M - far_M))
        if not EARLY:
            far_MD = tl.load(far + (at_M * far_stride_T + head_M * far_stride_H)[:, None] + v_D[None, :],
                             mask=(live_M & (far_M > 0))[:, None] & (v_D < V_DIM)[None, :], other=0.0)
        sums_MD = sums_MD * (1.0 - far_M)[:, None] + far_MD.to(tl.float32) * far_M[:, None]
    out_at = out + (at_M * out_stride_T + head_M * V_DIM)[:, None] + v_D[None, :]
    tl.store(out_at, sums_MD.to(out.dtype.element_ty), mask=live_M[:, None] & (v_D < V_DIM)[None, :])


def run(q_THD, streams, k, v, batch, params, k_mean_HD, far, rows, keys, warps, stages, early, heads_fast, split, maxnreg=None):
    (k_plane,), (v_plane,), table_BN = k.planes_PHS, v.planes_PHS, batch.exact_table_BN
    tokens, heads, _ = q_THD.shape
    out_THD = q_THD.new_empty(tokens, heads, v.dim)
    q_THD, new_k, new_v = (_readable(x, k_plane.dtype) for x in (q_THD, streams["k"], streams["v"]))
    values, lse_HT = (None, None) if far is None else (_readable(far.values_THD), far.lse_HT)
    group = heads // k.heads
    tiles = cdiv(max(batch.query_lens), rows // group)
    grid = (k.heads, tiles, len(batch.query_lens)) if heads_fast else (tiles, k.heads, len(batch.query_lens))
    kernel[grid](
        q_THD, new_k, new_v, k_plane, v_plane, table_BN, batch.cu_seqlens_q_B1, batch.seq_lens_B, params.sinks_H,
        k_mean_HD, values, lse_HT, out_THD, params.scale, params.softcap or 0.0,
        *q_THD.stride()[:2], *new_k.stride()[:2], *new_v.stride()[:2], *k_plane.stride()[:3], *v_plane.stride()[:3],
        table_BN.stride(0), *(values.stride()[:2] if values is not None else (0, 0)),
        *(lse_HT.stride() if lse_HT is not None else (0, 0)), out_THD.stride(0),
        WINDOW=params.window, SOFTCAP=bool(params.softcap), GROUP=group, K_DIM=k.dim, V_DIM=v.dim, PAGE=k.page_size,
        M=rows, K_WIDTH=next_power_of_2(k.dim), V_WIDTH=next_power_of_2(v.dim), N=keys,
        EARLY=early, HEADS_FAST=heads_fast, SPLIT=split,
        num_warps=warps, num_stages=stages, maxnreg=maxnreg,
    )
    return out_THD

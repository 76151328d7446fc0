"""Mamba 1 in Triton: a program has some channels of a request, and scans its tokens one by one from the matrix on.

The matrix is in registers. A step's first tokens are those that were stored since the last multiple of BLOCK.

Shape suffixes: C channels of a tile, K columns. Names in capitals are constants of the kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels import cdiv, gpu_of, next_power_of_2, state_formats
from nibble.kernels.dependent_launch import launch_options, wait_for_inputs
from nibble.kernels.recurrence.tiles import (
    BLOCK,
    clear_rows,
    contiguous_rows,
    decode_rows,
    round_rows,
    states_of,
    store_rows,
    tokens_of,
)
from nibble.kernels.recurrence.triton import is_one_token
from nibble.kernels.recurrence.types import LayerState, StateMetadata

CHANNELS = 32
"""Channels of a program."""


@triton.jit
def _load_token(
    x, dt, keys, queries, kept_keys, updates, paces, is_new, row, place, c, k_K,
    x_stride_T, dt_stride_T, keys_stride_T, queries_stride_T, channels, K: tl.constexpr,
):  # fmt: skip
    """Return a token's step of time [C], update [C], key [K] and query [K]: new, or as stored, which has no query."""
    new_C, stored_C = c < tl.where(is_new, channels, 0), c < tl.where(is_new, 0, channels)
    new_K, stored_K = k_K < tl.where(is_new, K, 0), k_K < tl.where(is_new, 0, K)
    dt_C = tl.load(dt + row * dt_stride_T + c, mask=new_C, other=0.0).to(tl.float32)
    x_C = tl.load(x + row * x_stride_T + c, mask=new_C, other=0.0).to(tl.float32)
    key_K = tl.load(keys + row * keys_stride_T + k_K, mask=new_K, other=0.0)
    query_K = tl.load(queries + row * queries_stride_T + k_K, mask=new_K, other=0.0).to(tl.float32)
    kept_update_C = tl.load(updates + place * channels + c, mask=stored_C, other=0.0)
    update_C = (x_C * dt_C).to(updates.dtype.element_ty) + kept_update_C
    kept_key_K = tl.load(kept_keys + place * K + k_K, mask=stored_K, other=0.0)
    key_K = key_K.to(kept_keys.dtype.element_ty) + kept_key_K
    dt_C += tl.load(paces + place * channels + c, mask=stored_C, other=0.0)
    return dt_C, update_C, key_K, query_K


@triton.jit(do_not_specialize=["rows", "requests"])
def selective_kernel(
    x, dt, a, keys, queries, codes, scales, kept_keys, updates, paces, slots, starts, cu_seqlens, states_at, settled,
    out, rows, requests, channels, x_stride_T, dt_stride_T, keys_stride_T, queries_stride_T,
    codes_stride_S, scales_stride_S, keys_stride_S, updates_stride_S, paces_stride_S,
    K: tl.constexpr, P: tl.constexpr, KW: tl.constexpr, C: tl.constexpr, MAX_CODE: tl.constexpr,
    ONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Scan a request's tokens for a tile of channels. Grid: tiles of channels, requests."""
    wait_for_inputs(PDL)
    # --- which tokens and channels
    c, k_K, request = tl.program_id(0) * C + tl.arange(0, C), tl.arange(0, KW), tl.program_id(1)
    keep_C, keep_K = c < channels, k_K < K
    keep_CK = keep_C[:, None] & keep_K[None, :]
    slot, first, length, start = tokens_of(slots, starts, cu_seqlens, request)
    state_at, final = states_of(states_at, settled, request, start, length)
    clear_rows(out + c, keep_C, tl.load(cu_seqlens + requests) + request, rows, requests, channels)
    if slot < 0:
        clear_rows(out + c, keep_C, first, first + length, 1, channels)
        return
    # --- the matrix
    a_CK = tl.load(a + c[:, None] * K + k_K[None, :], mask=keep_CK, other=0.0)
    stored_channels = tl.where(state_at > 0, channels, 0)
    codes_CK = codes + slot * codes_stride_S + c[:, None] * K + k_K[None, :]
    scales_C, scale_C = None, None
    if MAX_CODE > 0:
        scales_C = scales + slot * scales_stride_S + c
        scale_C = tl.load(scales_C, mask=c < stored_channels, other=0.0)
    codes_loaded_CK = tl.load(codes_CK, mask=keep_CK & (c < stored_channels)[:, None], other=0.0)
    matrix_CK = decode_rows(codes_loaded_CK, scale_C, MAX_CODE)
    kept_keys, updates = kept_keys + slot * keys_stride_S, updates + slot * updates_stride_S
    paces = paces + slot * paces_stride_S
    for position in range(state_at, start + length):
        # --- scan
        is_new, row = position >= start, tl.cast(first + position - start, tl.int64)
        dt_C, update_C, key_K, query_K = _load_token(
            x, dt, keys, queries, kept_keys, updates, paces, is_new, row, position % P, c, k_K,
            x_stride_T, dt_stride_T, keys_stride_T, queries_stride_T, channels, K,
        )  # fmt: skip
        new_CK = update_C.to(tl.float32)[:, None] * key_K.to(tl.float32)[None, :]
        matrix_CK = tl.fma(matrix_CK, tl.exp(dt_C[:, None] * a_CK), new_CK)
        if is_new:
            out_C = tl.sum(matrix_CK * query_K[None, :], 1)
            tl.store(out + row * channels + c, out_C.to(out.dtype.element_ty), mask=keep_C)
            # --- store
            if position >= final:
                # All threads have read the token that was at this place.
                tl.debug_barrier()
                kept_C = position % P * channels + c
                tl.store(updates + kept_C, update_C, mask=keep_C)
                tl.store(paces + kept_C, dt_C, mask=keep_C)
                if ONE and tl.program_id(0) == 0:
                    tl.store(kept_keys + position % P * K + k_K, key_K, mask=keep_K)
        # --- round at multiples of BLOCK
        stop = position + 1
        if (stop % BLOCK == 0) & ((stop < start + length) | (stop <= final)):
            matrix_CK = round_rows(matrix_CK, codes_CK, scales_C, keep_CK, keep_C, stop == final, MAX_CODE)


def selective(
    x_TC: Tensor,
    dt_TC: Tensor,
    A_CK: Tensor,
    B_TK: Tensor,
    C_TK: Tensor,
    state: LayerState,
    batch: StateMetadata,
) -> Tensor:
    """Scan as Mamba 1 does -> [T, C]; see the package."""
    requests, (tokens, channels), columns = len(batch.slots_B), x_TC.shape, A_CK.shape[1]
    if not requests or not tokens:
        return torch.zeros_like(x_TC)
    out_TC = x_TC.new_empty(tokens, channels)
    x_TC, dt_TC, B_TK, C_TK = (contiguous_rows(rows) for rows in (x_TC, dt_TC, B_TK, C_TK))
    codes, scales = state.planes[0], state.planes[1] if len(state.planes) > 1 else None
    one, pdl = is_one_token(batch), launch_options(gpu_of(x_TC.device))
    selective_kernel[cdiv(channels, CHANNELS), requests](
        x_TC, dt_TC, A_CK.float().contiguous(), B_TK, C_TK, codes, scales, state.keys_SPGK, state.updates_SPHV,
        state.decays, batch.slots_B, batch.starts_B, batch.cu_seqlens_B1, batch.states_at_B, batch.settled_B, out_TC,
        tokens, requests, channels, x_TC.stride(0), dt_TC.stride(0), B_TK.stride(0), C_TK.stride(0),
        codes.stride(0), scales.stride(0) if scales is not None else 0, state.keys_SPGK.stride(0),
        state.updates_SPHV.stride(0), state.decays.stride(0), K=columns, P=state.keys_SPGK.shape[1],
        KW=next_power_of_2(columns), C=CHANNELS, MAX_CODE=state_formats.state_format(state.format).max_code,
        ONE=one, PDL=bool(pdl), num_warps=4, **pdl,
    )  # fmt: skip
    if not one:
        store_rows(B_TK, state.keys_SPGK, batch)
    return out_TC

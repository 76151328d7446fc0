"""The rule of matrices in Triton, for any cut of requests into steps: one arithmetic for a token wherever it stands.

A program has a tile of rows of one head's matrix and goes through its request block by block, each token at its place
among BLOCK, places without a token being zeros. Products have tiles of one shape; updates are made one after the other,
in their order, and rounded before anything reads them. So a token's result depends on neither the cut nor the company.

Keys and sums of decays are read by many programs, and new ones may take the places of those: a launch before the main
one adds up decays, and launches behind it store what later steps read. In a step of one token for each request a new
token's place is one that nobody reads, and one launch does all (ONE).

Shape suffixes: J places of a block, I the same as rows of a product, K columns, V rows of a tile, X decays of a token;
T tokens, H heads, G heads of keys, D 1 or K. Names in capitals are constants of a kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels import MMA_ROWS, cdiv, gpu_of, next_power_of_2, state_formats
from nibble.kernels.dependent_launch import launch_options, wait_for_inputs
from nibble.kernels.recurrence.tiles import (
    BLOCK,
    ROW_VALUES,
    add_product,
    clear_rows,
    contiguous_rows,
    decode_rows,
    row_scale,
    states_of,
    store_rows,
    to_codes,
    tokens_of,
)
from nibble.kernels.recurrence.types import LayerState, StateMetadata

ROWS = 32
"""Rows of a matrix in a program, where there are so many; the same for every step."""


# ---- sums of decays --------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["columns"])
def sums_kernel(
    log_decay, sums, kept, slots, starts, cu_seqlens, columns, log_decay_stride_T, kept_stride_S,
    P: tl.constexpr, X: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add up the log decays of a block's tokens, from its begin on. Grid: tiles of X, blocks, requests."""
    wait_for_inputs(PDL)
    slot, first, length, start = tokens_of(slots, starts, cu_seqlens, tl.program_id(2))
    begin = (start // BLOCK + tl.program_id(1)) * BLOCK
    at, stop = tl.maximum(begin, start), tl.minimum(begin + BLOCK, start + length)
    if (slot >= 0) & (at < stop):
        x = tl.program_id(0) * X + tl.arange(0, X)
        keep_X = x < columns
        before_X = kept + slot * kept_stride_S + (at + P - 1) % P * columns + x
        sum_X = tl.load(before_X, mask=x < tl.where(at > begin, columns, 0), other=0.0)
        for position in range(at, stop):
            row = (first + position - start).to(tl.int64)
            sum_X += tl.load(log_decay + row * log_decay_stride_T + x, mask=keep_X, other=0.0).to(tl.float32)
            tl.store(sums + row * columns + x, sum_X, mask=keep_X)


# ---- the rule --------------------------------------------------------------------------------------------------------


@triton.jit
def _load_rows(rows_J, keep_J, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Load rows of DIM values [J, X]; zeros where there are none."""
    x = tl.arange(0, WIDTH)
    return tl.load(rows_J[:, None] + x[None, :], mask=keep_J[:, None] & (x < DIM)[None, :], other=0.0)


@triton.jit
def _load_sums(
    sums, log_decay, kept, row_J, place_J, stored_J, new_J, head, log_decay_stride_T,
    H: tl.constexpr, K: tl.constexpr, KW: tl.constexpr, P: tl.constexpr, COLUMNS: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """Return the sums of log decays at places of a block: [J], or [J, K] where each column has its own.

    Where ONE, the new one's is its log decay and the sum of the place before it.
    """
    WIDTH: tl.constexpr = K if COLUMNS else 1
    kept_J = kept + (place_J * H + head) * WIDTH
    sums_J = _load_rows(kept_J, stored_J, WIDTH, KW) if COLUMNS else tl.load(kept_J, mask=stored_J, other=0.0)
    if ONE:
        x_J = log_decay + row_J * log_decay_stride_T + head * WIDTH
        before_J, follows_J = kept + ((place_J + P - 1) % P * H + head) * WIDTH, new_J & (place_J % BLOCK > 0)
        if COLUMNS:
            new = _load_rows(before_J, follows_J, WIDTH, KW) + _load_rows(x_J, new_J, WIDTH, KW).to(
                tl.float32
            )
        else:
            before = tl.load(before_J, mask=follows_J, other=0.0)
            new = before + tl.load(x_J, mask=new_J, other=0.0).to(tl.float32)
    else:
        x_J = sums + (row_J * H + head) * WIDTH
        new = _load_rows(x_J, new_J, WIDTH, KW) if COLUMNS else tl.load(x_J, mask=new_J, other=0.0)
    is_new = new_J[:, None] if COLUMNS else new_J
    return tl.where(is_new, new, sums_J)


@triton.jit
def _pick_row(x_JX, is_J):
    """Return the one row of a tile that a mask has."""
    return tl.sum(tl.where(is_J[:, None], x_JX, 0.0), 0)


@triton.jit
def _weights(keys_JK, x_JK, sums, later_J, is_J, products_JI, COLUMNS: tl.constexpr):
    """Return by how much rows x read the update of one place [J]; of places before it, anything finite.

    Args:
        keys_JK: Keys.
        x_JK: Rows: keys or queries.
        sums: Of log decays.
        later_J: New tokens behind the place.
        is_J: The place.
        products_JI: All products of rows and keys, where columns have no decays of their own.
        COLUMNS: Whether they have.
    """
    if COLUMNS:
        fade_JK = tl.where(later_J[:, None], sums - _pick_row(sums, is_J)[None, :], 0.0)
        key_K = _pick_row(keys_JK.to(tl.float32), is_J)
        weights_J = tl.sum(x_JK.to(tl.float32) * (key_K[None, :] * tl.exp(fade_JK)), 1)
    else:
        fade_J = tl.where(later_J, sums - tl.sum(tl.where(is_J, sums, 0.0)), 0.0)
        weights_J = tl.sum(tl.where(is_J[None, :], products_JI, 0.0), 1) * tl.exp(fade_J)
    return weights_J


@triton.jit
def _store_token(
    kept_keys_J, keys_JK, kept_J, sums, new_J, k_K, is_first_head, K: tl.constexpr, COLUMNS: tl.constexpr
):
    """Store the one new key of a block and its sums: of the programs that have them, one does."""
    if tl.program_id(0) == 0:
        keep_JK = new_J[:, None] & (k_K < K)[None, :]
        if is_first_head:
            tl.store(kept_keys_J[:, None] + k_K[None, :], keys_JK, mask=keep_JK)
        if COLUMNS:
            tl.store(kept_J[:, None] + k_K[None, :], sums, mask=keep_JK)
        else:
            tl.store(kept_J, sums, mask=new_J)


@triton.jit(do_not_specialize=["rows", "requests"])
def recurrence_kernel(  # noqa: PLR0912, PLR0915 (most are settled while it is compiled)
    q, k, v, log_decay, beta, sums, codes, scales, keys, updates, kept, slots, starts, cu_seqlens, states_at, settled,
    out, rows, requests, q_stride_T, k_stride_T, v_stride_T, log_decay_stride_T, beta_stride_T,
    codes_stride_S, scales_stride_S, keys_stride_S, updates_stride_S, kept_stride_S,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, P: tl.constexpr,
    VW: tl.constexpr, KW: tl.constexpr, MAX_CODE: tl.constexpr, COLUMNS: tl.constexpr, DELTA: tl.constexpr,
    FULL: tl.constexpr, ONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Bring rows of a head's matrix through a request's tokens, and read it. Grid: tiles of rows, heads, requests."""
    wait_for_inputs(PDL)
    # --- which tokens and rows
    head, request = tl.program_id(1), tl.program_id(2)
    slot, first, length, start = tokens_of(slots, starts, cu_seqlens, request)
    state_at, final = states_of(states_at, settled, request, start, length)
    end = start + length
    v_V, k_K, j_J = tl.program_id(0) * VW + tl.arange(0, VW), tl.arange(0, KW), tl.arange(0, BLOCK)
    keep_V, keep_VK = v_V < V, (v_V < V)[:, None] & (k_K < K)[None, :]
    out_V = out + head * V + v_V
    clear_rows(out_V, keep_V, tl.load(cu_seqlens + requests) + request, rows, requests, H * V)
    if slot < 0:
        clear_rows(out_V, keep_V, first, first + length, 1, H * V)
        return
    key_head = head // (H // G)
    # --- the matrix
    stored_rows = tl.where(state_at > 0, V, 0)
    codes_VK = codes + slot * codes_stride_S + (head * V + v_V)[:, None] * K + k_K[None, :]
    scales_V, scale_V = None, None
    if MAX_CODE > 0:
        scales_V = scales + slot * scales_stride_S + head * V + v_V
        scale_V = tl.load(scales_V, mask=v_V < stored_rows, other=0.0)
    matrix_VK = decode_rows(
        tl.load(codes_VK, mask=keep_VK & (v_V < stored_rows)[:, None], other=0.0), scale_V
    )
    keys, updates = keys + slot * keys_stride_S, updates + slot * updates_stride_S
    kept = kept + slot * kept_stride_S
    for begin in range(state_at, end, BLOCK):
        # --- load a block
        position_J = begin + j_J
        stored_J, new_J = position_J < start, (position_J >= start) & (position_J < end)
        place_J, row_J = position_J % P, (first + position_J - start).to(tl.int64)
        kept_keys_J, k_J = keys + (place_J * G + key_head) * K, k + row_J * k_stride_T + key_head * K
        new_keys_JK = _load_rows(k_J, new_J, K, KW).to(keys.dtype.element_ty)
        keys_JK = tl.where(new_J[:, None], new_keys_JK, _load_rows(kept_keys_J, stored_J, K, KW))
        q_JK = _load_rows(q + row_J * q_stride_T + key_head * K, new_J, K, KW)
        keep_JV = new_J[:, None] & keep_V[None, :]
        v_JV = tl.load(v + (row_J * v_stride_T + head * V)[:, None] + v_V[None, :], mask=keep_JV, other=0.0)
        kept_updates_JV = updates + (place_J * H + head)[:, None] * V + v_V[None, :]
        update_JV = tl.load(kept_updates_JV, mask=stored_J[:, None] & keep_V[None, :], other=0.0).to(
            tl.float32
        )
        fade = _load_sums(sums, log_decay, kept, row_J, place_J, stored_J, new_J, head, log_decay_stride_T,
                          H, K, KW, P, COLUMNS, ONE)  # fmt: skip
        beta_J = tl.full([BLOCK], 1.0, tl.float32)
        if beta is not None:
            beta_J = tl.load(beta + row_J * beta_stride_T + head, mask=new_J, other=0.0).to(tl.float32)
        # --- read the matrix
        matrix_KV, zeros_JV = tl.trans(matrix_VK), tl.zeros([BLOCK, VW], tl.float32)
        zeros_JI = tl.zeros([BLOCK, BLOCK], tl.float32)
        products_JI, read_JI = zeros_JI, zeros_JI
        rest_JV = v_JV.to(tl.float32)
        # Rows of no new token are of no use, and what they would make of an exponential may be infinite.
        if COLUMNS:
            fade_new = tl.exp(tl.where(new_J[:, None], fade, 0.0))
            out_JV = add_product(zeros_JV, q_JK.to(tl.float32) * fade_new, matrix_KV, FULL)
            if DELTA:
                rest_JV -= add_product(zeros_JV, keys_JK.to(tl.float32) * fade_new, matrix_KV, FULL)
        else:
            fade_new = tl.exp(tl.where(new_J, fade, 0.0))[:, None]
            out_JV = add_product(zeros_JV, q_JK, matrix_KV, FULL) * fade_new
            read_JI = add_product(zeros_JI, q_JK, tl.trans(keys_JK), FULL)
            if DELTA:
                rest_JV = tl.fma(-add_product(zeros_JV, keys_JK, matrix_KV, FULL), fade_new, rest_JV)
                products_JI = add_product(zeros_JI, keys_JK, tl.trans(keys_JK), FULL)
        # --- updates in their order, each read by all tokens from its own on
        for j in range(0, tl.minimum(end - begin, BLOCK)):
            is_J, later_J = j_J == j, new_J & (j_J > j)
            new_JV = (rest_JV * beta_J[:, None]).to(updates.dtype.element_ty).to(tl.float32)
            update_V = _pick_row(tl.where(new_J[:, None], new_JV, update_JV), is_J)
            update_JV = tl.where(is_J[:, None], update_V[None, :], update_JV)
            if DELTA:
                weights_J = _weights(keys_JK, keys_JK, fade, later_J, is_J, products_JI, COLUMNS)
                less_JV = tl.fma(
                    -weights_J[:, None], tl.broadcast_to(update_V[None, :], [BLOCK, VW]), rest_JV
                )
                rest_JV = tl.where(later_J[:, None], less_JV, rest_JV)
            weights_J = _weights(keys_JK, q_JK, fade, later_J, is_J, read_JI, COLUMNS)
            more_JV = tl.fma(weights_J[:, None], tl.broadcast_to(update_V[None, :], [BLOCK, VW]), out_JV)
            # A weight of zero would not keep a later token's NaN out.
            out_JV = tl.where((is_J | later_J)[:, None], more_JV, out_JV)
        # --- store
        out_at = out + row_J[:, None] * (H * V) + (head * V + v_V)[None, :]
        tl.store(out_at, out_JV.to(out.dtype.element_ty), mask=keep_JV)
        stop = begin + BLOCK
        if stop > final:
            # All threads have read the places that new tokens take.
            tl.debug_barrier()
            tl.store(kept_updates_JV, update_JV.to(updates.dtype.element_ty), mask=keep_JV)
            if ONE:
                _store_token(
                    kept_keys_J, keys_JK, kept + (place_J * H + head) * (K if COLUMNS else 1), fade, new_J, k_K,
                    head % (H // G) == 0, K, COLUMNS,
                )  # fmt: skip
        # --- bring the matrix forward, and round it
        if (stop < end) | (stop <= final):
            is_last_J = j_J == BLOCK - 1
            if COLUMNS:
                end_K = _pick_row(fade, is_last_J)
                faded_JK = keys_JK.to(tl.float32) * tl.exp(end_K[None, :] - fade)
                matrix_VK *= tl.exp(end_K)[None, :]
            else:
                last = tl.sum(tl.where(is_last_J, fade, 0.0))
                faded_JK = keys_JK.to(tl.float32) * tl.exp(last - fade)[:, None]
                matrix_VK *= tl.exp(last)
            update_VJ = tl.trans(update_JV.to(updates.dtype.element_ty))
            matrix_VK = add_product(matrix_VK, update_VJ, faded_JK, FULL)
            scale_V, scale_V1 = None, None
            if MAX_CODE > 0:
                scale_V = row_scale(tl.max(tl.abs(matrix_VK), 1), MAX_CODE)
                scale_V1 = scale_V[:, None]
            rounded_VK = to_codes(matrix_VK, scale_V1, codes.dtype.element_ty)
            if stop == final:
                tl.store(codes_VK, rounded_VK, mask=keep_VK)
                if MAX_CODE > 0:
                    tl.store(scales_V, scale_V, mask=keep_V)
            matrix_VK = decode_rows(rounded_VK, scale_V)


# ---- launches --------------------------------------------------------------------------------------------------------


def recurrence(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THV: Tensor,
    log_decay: Tensor,
    beta_TH: Tensor | None,
    state: LayerState,
    batch: StateMetadata,
    *,
    delta: bool,
) -> Tensor:
    """Update matrices by keys and values, and read them by queries -> [T, H, V]; see the package."""
    requests, (tokens, heads, dim) = len(batch.slots_B), v_THV.shape
    if not requests or not tokens:
        return torch.zeros_like(v_THV)
    out_THV = v_THV.new_empty(v_THV.shape)
    q_TGK, k_TGK, v_THV, log_decay = (contiguous_rows(x) for x in (q_TGK, k_TGK, v_THV, log_decay))
    key_heads, columns = k_TGK.shape[1:]
    codes, scales = state.planes[0], state.planes[1] if len(state.planes) > 1 else None
    pdl = launch_options(gpu_of(v_THV.device))
    sums_TX = None if is_one_token(batch) else decay_sums(log_decay, state, batch)
    rows = max(MMA_ROWS, min(ROWS, next_power_of_2(dim)))
    recurrence_kernel[cdiv(dim, rows), heads, requests](
        q_TGK, k_TGK, v_THV, log_decay, beta_TH, sums_TX, codes, scales, state.keys_SPGK, state.updates_SPHV,
        state.decays, batch.slots_B, batch.starts_B, batch.cu_seqlens_B1, batch.states_at_B, batch.settled_B,
        out_THV, tokens, requests, q_TGK.stride(0), k_TGK.stride(0), v_THV.stride(0), log_decay.stride(0),
        beta_TH.stride(0) if beta_TH is not None else 0, codes.stride(0), scales.stride(0) if scales is not None else 0,
        state.keys_SPGK.stride(0), state.updates_SPHV.stride(0), state.decays.stride(0),
        H=heads, G=key_heads, V=dim, K=columns, P=state.keys_SPGK.shape[1], VW=rows,
        KW=max(MMA_ROWS, next_power_of_2(columns)), MAX_CODE=state_formats.state_format(state.format).max_code,
        COLUMNS=log_decay.dim() == 3, DELTA=delta, FULL=state.keys_SPGK.dtype != torch.bfloat16, ONE=sums_TX is None,
        PDL=bool(pdl), num_warps=4, num_stages=1, **pdl,
    )  # fmt: skip
    if sums_TX is not None:
        store_rows(k_TGK, state.keys_SPGK, batch)
        store_rows(sums_TX, state.decays, batch)
    return out_THV


def is_one_token(batch: StateMetadata) -> bool:
    """Return whether each request has a token at most, and a matrix at the last multiple of BLOCK before it."""
    return batch.max_length == 1 and batch.states_at_B is None and batch.settled_B is None


def decay_sums(log_decay: Tensor, state: LayerState, batch: StateMetadata) -> Tensor:
    """Return the sums of log decays from a block's begin to each token of the step: float32 [T, X].

    Args:
        log_decay: Of the step's tokens, [T, H] or [T, H, K], in contiguous rows.
        state: Has the sums of tokens before them.
        batch: The requests.
    """
    tokens = len(log_decay)
    columns = log_decay[0].numel()
    sums_TX = torch.empty(tokens, columns, dtype=torch.float32, device=log_decay.device)
    width = min(ROW_VALUES, next_power_of_2(columns))
    blocks = cdiv(batch.max_length + state_formats.BLOCK - 1, state_formats.BLOCK)
    pdl = launch_options(gpu_of(log_decay.device))
    sums_kernel[cdiv(columns, width), blocks, len(batch.slots_B)](
        log_decay, sums_TX, state.decays, batch.slots_B, batch.starts_B, batch.cu_seqlens_B1, columns,
        log_decay.stride(0), state.decays.stride(0), P=state.decays.shape[1], X=width, PDL=bool(pdl), **pdl,
    )  # fmt: skip
    return sums_TX

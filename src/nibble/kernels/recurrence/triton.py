"""The rule of matrices in Triton, for any cut of requests into steps: one arithmetic for a token wherever it stands.

A first launch has a program for each block of BLOCK tokens and each head: sums of log decays, and by how much the
block's tokens read each other's updates (weights). In the main one a program has some rows of a head's matrix and goes
through its request block by block, each token at its place, places without a token being zeros. Products have tiles of
one shape; updates are made one after the other, in their order, and rounded before anything reads them. So a token's
result depends on neither the cut nor the company.

Keys and sums are read by many programs, and new ones may take the places of those: a last launch stores them. In a step
of one token for each request its place is one that nobody reads, and the main launch stores it (ONE).

Shape suffixes: J places of a block, I the same of tokens that read, K columns, V rows of a tile, X a token's decays;
N places of all blocks of a step (_places), T tokens, H heads, G heads of keys. Names in capitals are constants of a
kernel.
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
    add_product,
    clear_rows,
    contiguous_rows,
    decode_rows,
    round_rows,
    states_of,
    store_rows,
    tokens_of,
)
from nibble.kernels.recurrence.types import LayerState, StateMetadata

ROWS = 64
"""Rows of a matrix in a program: those of the tensor cores' tile."""
LONG_ROW = 128
"""Columns of a matrix above which more threads share it."""
WARPS, LONG_ROW_WARPS = 4, 8


@triton.jit
def _load_rows(rows_J, keep_J, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Load rows of DIM values [J, X]; zeros where there are none."""
    x = tl.arange(0, WIDTH)
    return tl.load(rows_J[:, None] + x[None, :], mask=keep_J[:, None] & (x < DIM)[None, :], other=0.0)


@triton.jit
def _load_keys(stored_rows_J, new_rows_J, stored_J, new_J, K: tl.constexpr, KW: tl.constexpr):
    """Load the keys of a block [J, K], stored ones and new ones, in the dtype of stored ones."""
    new_JK = _load_rows(new_rows_J, new_J, K, KW).to(stored_rows_J.dtype.element_ty)
    return tl.where(new_J[:, None], new_JK, _load_rows(stored_rows_J, stored_J, K, KW))


@triton.jit
def _load_sums(
    stored_rows_J, new_rows_J, stored_J, new_J, K: tl.constexpr, KW: tl.constexpr, COLUMNS: tl.constexpr
):
    """Load the sums of log decays of a block: [J], or [J, K] where each column has its own."""
    if COLUMNS:
        new_JK = _load_rows(new_rows_J, new_J, K, KW)
        sums = tl.where(new_J[:, None], new_JK, _load_rows(stored_rows_J, stored_J, K, KW))
    else:
        new_sum_J = tl.load(new_rows_J, mask=new_J, other=0.0)
        sums = tl.where(new_J, new_sum_J, tl.load(stored_rows_J, mask=stored_J, other=0.0))
    return sums


@triton.jit
def _pick_row(x_JX, is_J):
    """Return the one row of a tile that a mask has."""
    return tl.sum(tl.where(is_J[:, None], x_JX, 0.0), 0)


# ---- weights ---------------------------------------------------------------------------------------------------------


@triton.jit
def _add_up(log_decay, sums, decays, first, length, start, begin, log_decay_stride_T, sums_stride_T, decays_stride_P,
            P: tl.constexpr, WIDTH: tl.constexpr, X: tl.constexpr):  # fmt: skip
    """Store the sums of a block's log decays up to each of its new tokens, added one by one."""
    at, stop = tl.maximum(begin, start), tl.minimum(begin + BLOCK, start + length)
    x = tl.arange(0, X)
    # Of a block that begins with a new token, nothing comes before.
    stored_width = tl.where(at > begin, WIDTH, 0)
    sum_X = tl.load(decays + (at + P - 1) % P * decays_stride_P + x, mask=x < stored_width, other=0.0)
    for position in range(at, stop):
        row = (first + position - start).to(tl.int64)
        new_X = tl.load(log_decay + row * log_decay_stride_T + x, mask=x < WIDTH, other=0.0)
        sum_X += new_X.to(tl.float32)
        tl.store(sums + row * sums_stride_T + x, sum_X, mask=x < WIDTH)


@triton.jit(do_not_specialize_on_alignment=["q_stride_T", "k_stride_T", "log_decay_stride_T"])
def weights_kernel(
    q, k, log_decay, keys, decays, sums, weights, slots, starts, cu_seqlens,
    q_stride_T, k_stride_T, log_decay_stride_T, keys_stride_S, decays_stride_S,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, P: tl.constexpr, KW: tl.constexpr,
    COLUMNS: tl.constexpr, DELTA: tl.constexpr, FULL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Weigh updates of a block for its new tokens' keys and queries. Grid: heads, blocks, requests."""
    wait_for_inputs(PDL)
    # --- which tokens
    head, request = tl.program_id(0), tl.program_id(2)
    slot, first, length, start = tokens_of(slots, starts, cu_seqlens, request)
    first_block = start // BLOCK * BLOCK
    begin, end = first_block + tl.program_id(1) * BLOCK, start + length
    if (slot < 0) | (begin >= end) | (length == 0):
        return
    # --- sums of log decays
    WIDTH: tl.constexpr = K if COLUMNS else 1
    log_decay, sums = log_decay + head * WIDTH, sums + head * WIDTH
    decays = decays + slot * decays_stride_S + head * WIDTH
    _add_up(log_decay, sums, decays, first, length, start, begin, log_decay_stride_T, H * WIDTH, H * WIDTH,
            P, WIDTH, KW if COLUMNS else 1)  # fmt: skip
    tl.debug_barrier()
    # --- load
    j_J = tl.arange(0, BLOCK)
    position_J, key_head = begin + j_J, head // (H // G)
    stored_J, new_J = position_J < start, (position_J >= start) & (position_J < end)
    place_J, row_J = position_J % P, (first + position_J - start).to(tl.int64)
    keys_J = keys + slot * keys_stride_S + (place_J * G + key_head) * K
    keys_JK = _load_keys(keys_J, k + row_J * k_stride_T + key_head * K, stored_J, new_J, K, KW)
    q_IK = _load_rows(q + row_J * q_stride_T + key_head * K, new_J, K, KW)
    sums_new_J = sums + row_J * (H * WIDTH)
    sums_J = _load_sums(decays + place_J * (H * WIDTH), sums_new_J, stored_J, new_J, K, KW, COLUMNS)
    # --- weigh
    place = (first + request * (2 * BLOCK) + begin - first_block).to(tl.int64)
    weights = weights + (place * H + head) * (2 * BLOCK)
    if COLUMNS:
        keys_wide_JK, q_wide_IK = keys_JK.to(tl.float32), q_IK.to(tl.float32)
        for j in range(0, tl.minimum(end - begin, BLOCK)):
            is_J = j_J == j
            # Of tokens that do not read this one, the exponential may be infinite.
            later_I = new_J & (j_J > j)
            fade_IK = tl.where(later_I[:, None], sums_J - _pick_row(sums_J, is_J)[None, :], 0.0)
            key_IK = _pick_row(keys_wide_JK, is_J)[None, :] * tl.exp(fade_IK)
            weights_I = weights + j * (H * 2 * BLOCK) + j_J
            if DELTA:
                tl.store(weights_I, tl.sum(keys_wide_JK * key_IK, 1))
            tl.store(weights_I + BLOCK, tl.sum(q_wide_IK * key_IK, 1))
    else:
        zeros_IJ = tl.zeros([BLOCK, BLOCK], tl.float32)
        later_IJ = new_J[:, None] & (j_J[:, None] > j_J[None, :])
        fade_IJ = tl.exp(tl.where(later_IJ, sums_J[:, None] - sums_J[None, :], 0.0))
        weights_IJ = weights + j_J[None, :] * (H * 2 * BLOCK) + j_J[:, None]
        if DELTA:
            tl.store(weights_IJ, add_product(zeros_IJ, keys_JK, tl.trans(keys_JK), FULL) * fade_IJ)
        tl.store(weights_IJ + BLOCK, add_product(zeros_IJ, q_IK, tl.trans(keys_JK), FULL) * fade_IJ)


# ---- the rule --------------------------------------------------------------------------------------------------------


@triton.jit
def _store_token(
    keys_J, keys_JK, stored_rows_J, sums, new_J, k_K, is_first_head, K: tl.constexpr, COLUMNS: tl.constexpr
):
    """Store the one new key of a block and its sums: of the programs that have them, one does."""
    if tl.program_id(0) == 0:
        keep_JK = new_J[:, None] & (k_K < K)[None, :]
        if is_first_head:
            tl.store(keys_J[:, None] + k_K[None, :], keys_JK, mask=keep_JK)
        if COLUMNS:
            tl.store(stored_rows_J[:, None] + k_K[None, :], sums, mask=keep_JK)
        else:
            tl.store(stored_rows_J, sums, mask=new_J)


@triton.jit
def _read_matrix(matrix_VK, x_JK, sums, new_J, COLUMNS: tl.constexpr, FULL: tl.constexpr):
    """Return what rows x read of the matrix, faded up to their tokens [V, J]."""
    zeros_VJ = tl.zeros([matrix_VK.shape[0], BLOCK], tl.float32)
    # Rows of no new token are of no use, and what they would make of an exponential may be infinite.
    if COLUMNS:
        faded_JK = x_JK.to(tl.float32) * tl.exp(tl.where(new_J[:, None], sums, 0.0))
        read_VJ = add_product(zeros_VJ, matrix_VK, tl.trans(faded_JK), FULL)
    else:
        read_VJ = add_product(zeros_VJ, matrix_VK, tl.trans(x_JK), FULL)
        read_VJ *= tl.exp(tl.where(new_J, sums, 0.0))[None, :]
    return read_VJ


@triton.jit
def _add_updates(
    update_VJ, rest_VJ, out_VJ, weights, beta_J, new_J, stride, DTYPE: tl.constexpr, DELTA: tl.constexpr
):
    """Make updates in their order, each read by all tokens from its own on -> updates, outputs.

    Args:
        update_VJ: Updates before the step; others are zero.
        rest_VJ: Values, less what the matrix has for their keys.
        out_VJ: What queries read of the matrix.
        weights: Pointers to those of the block's first place.
        beta_J: Learning rates.
        new_J: Which tokens are new.
        stride: Between weights of places.
        DTYPE: What updates are rounded to.
        DELTA: Whether updates read those before them.
    """
    j_J = tl.arange(0, BLOCK)
    for j in tl.static_range(BLOCK):
        is_J, later_J = j_J == j, new_J & (j_J > j)
        new_VJ = (rest_VJ * beta_J[None, :]).to(DTYPE).to(tl.float32)
        update_VJ = tl.where((is_J & new_J)[None, :], new_VJ, update_VJ)
        update_V = tl.sum(tl.where(is_J[None, :], update_VJ, 0.0), 1)
        update_all_VJ = tl.broadcast_to(update_V[:, None], update_VJ.shape)
        if DELTA:
            weights_J = tl.load(weights + j * stride + j_J, mask=later_J, other=0.0)
            less_VJ = tl.fma(tl.broadcast_to(-weights_J[None, :], update_VJ.shape), update_all_VJ, rest_VJ)
            rest_VJ = tl.where(later_J[None, :], less_VJ, rest_VJ)
        reads_J = new_J & (j_J >= j)
        weights_J = tl.load(weights + j * stride + BLOCK + j_J, mask=reads_J, other=0.0)
        more_VJ = tl.fma(tl.broadcast_to(weights_J[None, :], update_VJ.shape), update_all_VJ, out_VJ)
        # A weight of zero would not keep a later token's NaN out.
        out_VJ = tl.where(reads_J[None, :], more_VJ, out_VJ)
    return update_VJ, out_VJ


@triton.jit
def _advance(matrix_VK, update_VJ, keys_JK, sums, COLUMNS: tl.constexpr, FULL: tl.constexpr):
    """Return the matrix at the end of a full block."""
    is_last_J = tl.arange(0, BLOCK) == BLOCK - 1
    if COLUMNS:
        end_K = _pick_row(sums, is_last_J)
        faded_JK = keys_JK.to(tl.float32) * tl.exp(end_K[None, :] - sums)
        matrix_VK *= tl.exp(end_K)[None, :]
    else:
        end = tl.sum(tl.where(is_last_J, sums, 0.0))
        faded_JK = keys_JK.to(tl.float32) * tl.exp(end - sums)[:, None]
        matrix_VK *= tl.exp(end)
    return add_product(matrix_VK, update_VJ, faded_JK, FULL)


@triton.jit(do_not_specialize=["rows", "requests"])
def recurrence_kernel(  # noqa: PLR0915 (most are settled while it is compiled)
    q, k, v, beta, sums, weights, codes, scales, keys, updates, decays, slots, starts, cu_seqlens, states_at, settled,
    out, rows, requests, q_stride_T, k_stride_T, v_stride_T, beta_stride_T,
    codes_stride_S, scales_stride_S, keys_stride_S, updates_stride_S, decays_stride_S,
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
    # --- the matrix
    key_head, stored_rows = head // (H // G), tl.where(state_at > 0, V, 0)
    codes_VK = codes + slot * codes_stride_S + (head * V + v_V)[:, None] * K + k_K[None, :]
    scales_V, scale_V = None, None
    if MAX_CODE > 0:
        scales_V = scales + slot * scales_stride_S + head * V + v_V
        scale_V = tl.load(scales_V, mask=v_V < stored_rows, other=0.0)
    codes_loaded_VK = tl.load(codes_VK, mask=keep_VK & (v_V < stored_rows)[:, None], other=0.0)
    matrix_VK = decode_rows(codes_loaded_VK, scale_V, MAX_CODE)
    keys, updates = keys + slot * keys_stride_S + key_head * K, updates + slot * updates_stride_S
    WIDTH: tl.constexpr = K if COLUMNS else 1
    decays, sums = decays + slot * decays_stride_S + head * WIDTH, sums + head * WIDTH
    first_place = first + request * (2 * BLOCK) - start // BLOCK * BLOCK
    weights = weights + (first_place.to(tl.int64) * H + head) * (2 * BLOCK)
    for begin in range(state_at, end, BLOCK):
        # --- load a block
        stop, position_J = begin + BLOCK, begin + j_J
        stored_J, new_J = position_J < start, (position_J >= start) & (position_J < end)
        place_J, row_J = position_J % P, (first + position_J - start).to(tl.int64)
        keys_J = keys + place_J * (G * K)
        keys_JK = _load_keys(keys_J, k + row_J * k_stride_T + key_head * K, stored_J, new_J, K, KW)
        q_JK = _load_rows(q + row_J * q_stride_T + key_head * K, new_J, K, KW)
        stored_rows_J, new_sums_J = decays + place_J * (H * WIDTH), sums + row_J * (H * WIDTH)
        fade = _load_sums(stored_rows_J, new_sums_J, stored_J, new_J, K, KW, COLUMNS)
        new_VJ = keep_V[:, None] & new_J[None, :]
        v_VJ = v + (row_J * v_stride_T)[None, :] + (head * V + v_V)[:, None]
        rest_VJ = tl.load(v_VJ, mask=new_VJ, other=0.0).to(tl.float32)
        updates_VJ = updates + ((place_J * H + head) * V)[None, :] + v_V[:, None]
        update_VJ = tl.load(updates_VJ, mask=keep_V[:, None] & stored_J[None, :], other=0.0).to(tl.float32)
        beta_J = tl.full([BLOCK], 1.0, tl.float32)
        if beta is not None:
            beta_J = tl.load(beta + row_J * beta_stride_T + head, mask=new_J, other=0.0).to(tl.float32)
        # --- read the matrix, and then the block
        out_VJ = _read_matrix(matrix_VK, q_JK, fade, new_J, COLUMNS, FULL)
        if DELTA:
            rest_VJ -= _read_matrix(matrix_VK, keys_JK, fade, new_J, COLUMNS, FULL)
        else:
            # Never true; it gives values to the threads that have the outputs of the same rows.
            rest_VJ = tl.where(start < 0, out_VJ, rest_VJ)
        weights_at = weights + tl.cast(begin, tl.int64) * (H * 2 * BLOCK)
        update_VJ, out_VJ = _add_updates(
            update_VJ,
            rest_VJ,
            out_VJ,
            weights_at,
            beta_J,
            new_J,
            H * 2 * BLOCK,
            updates.dtype.element_ty,
            DELTA,
        )
        # --- store
        rounded_VJ = update_VJ.to(updates.dtype.element_ty)
        out_at = out + (row_J * (H * V))[None, :] + (head * V + v_V)[:, None]
        tl.store(out_at, out_VJ.to(out.dtype.element_ty), mask=new_VJ)
        if stop > final:
            # All threads have read the places that new tokens take.
            tl.debug_barrier()
            tl.store(updates_VJ, rounded_VJ, mask=new_VJ)
            if ONE:
                is_first_head = head % (H // G) == 0
                _store_token(keys_J, keys_JK, stored_rows_J, fade, new_J, k_K, is_first_head, K, COLUMNS)
        # --- bring the matrix forward, and round it
        if (stop < end) | (stop <= final):
            matrix_VK = _advance(matrix_VK, rounded_VJ, keys_JK, fade, COLUMNS, FULL)
            matrix_VK = round_rows(matrix_VK, codes_VK, scales_V, keep_VK, keep_V, stop == final, MAX_CODE)


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
    out: Tensor | None = None,
) -> Tensor:
    """Update matrices by keys and values, and read them by queries -> [T, H, V], in `out` if given; see the package."""
    requests, (tokens, heads, dim) = len(batch.slots_B), v_THV.shape
    if not requests or not tokens:
        return torch.zeros_like(v_THV)
    out_THV = torch.empty(v_THV.shape, dtype=v_THV.dtype, device=v_THV.device) if out is None else out
    q_TGK, k_TGK, v_THV, log_decay = (contiguous_rows(x) for x in (q_TGK, k_TGK, v_THV, log_decay))
    columns = k_TGK.shape[2]
    codes, scales = state.planes[0], state.planes[1] if len(state.planes) > 1 else None
    pdl, one = launch_options(gpu_of(v_THV.device)), is_one_token(batch)
    sums_TX, weights_NH = block_weights(q_TGK, k_TGK, log_decay, state, batch, delta=delta)
    recurrence_kernel[cdiv(dim, ROWS), heads, requests](
        q_TGK, k_TGK, v_THV, beta_TH, sums_TX, weights_NH, codes, scales, state.keys_SPGK, state.updates_SPHV,
        state.decays, batch.slots_B, batch.starts_B, batch.cu_seqlens_B1, batch.states_at_B, batch.settled_B,
        out_THV, tokens, requests, q_TGK.stride(0), k_TGK.stride(0), v_THV.stride(0),
        beta_TH.stride(0) if beta_TH is not None else 0, codes.stride(0), scales.stride(0) if scales is not None else 0,
        state.keys_SPGK.stride(0), state.updates_SPHV.stride(0), state.decays.stride(0),
        H=heads, G=k_TGK.shape[1], V=dim, K=columns, P=state.keys_SPGK.shape[1], VW=ROWS,
        KW=max(MMA_ROWS, next_power_of_2(columns)), MAX_CODE=state_formats.state_format(state.format).max_code,
        COLUMNS=log_decay.dim() == 3, DELTA=delta, FULL=has_full_products(state), ONE=one,
        PDL=bool(pdl), num_warps=_warps(columns, has_full_products(state)), num_stages=1, **pdl,
    )  # fmt: skip
    if not one:
        store_rows(k_TGK, state.keys_SPGK, batch)
        store_rows(sums_TX, state.decays, batch)
    return out_THV


def _warps(columns: int, has_full_products: bool) -> int:
    # What Triton 3.6 makes of products of TF32 for two warp groups reads what is not there.
    return LONG_ROW_WARPS if columns > LONG_ROW and not has_full_products else WARPS


def has_full_products(state: LayerState) -> bool:
    """Return whether factors of products count with all bits of float32."""
    return state.keys_SPGK.dtype != torch.bfloat16


def is_one_token(batch: StateMetadata) -> bool:
    """Return whether each request has a token at most, and a matrix at the last multiple of BLOCK before it."""
    return batch.max_length == 1 and batch.states_at_B is None and batch.settled_B is None


def block_weights(
    q_TGK: Tensor, k_TGK: Tensor, log_decay: Tensor, state: LayerState, batch: StateMetadata, *, delta: bool
) -> tuple[Tensor, Tensor]:
    """Return what tokens of a block need to read each other's updates.

    Args:
        q_TGK: Queries, in contiguous rows, as are the following two.
        k_TGK: Keys.
        log_decay: Of the step's tokens, [T, H] or [T, H, K].
        state: Has keys and sums of tokens before them.
        batch: The requests.
        delta: Whether updates read others.

    Returns:
        Sums of log decays from a block's begin to each token, float32 [T, X], and weights [N, H, 2, I]: by how much
        the keys and the queries of a block's tokens I read the update of a place N, for new tokens from the place on.
        Request b has its first place at cu_seqlens[b] + 2 b BLOCK: both its first and its last block may be incomplete.
    """
    (tokens, key_heads, columns), requests, block = k_TGK.shape, len(batch.slots_B), state_formats.BLOCK
    heads, device = log_decay.shape[1], log_decay.device
    sums_TX = torch.empty(tokens, log_decay[0].numel(), dtype=torch.float32, device=device)
    weights_NH = torch.empty(
        tokens + requests * 2 * block, heads, 2, block, dtype=torch.float32, device=device
    )
    pdl = launch_options(gpu_of(device))
    weights_kernel[heads, cdiv(batch.max_length + block - 1, block), requests](
        q_TGK, k_TGK, log_decay, state.keys_SPGK, state.decays, sums_TX, weights_NH, batch.slots_B, batch.starts_B,
        batch.cu_seqlens_B1, q_TGK.stride(0), k_TGK.stride(0), log_decay.stride(0), state.keys_SPGK.stride(0),
        state.decays.stride(0), H=heads, G=key_heads, K=columns, P=state.keys_SPGK.shape[1],
        KW=max(MMA_ROWS, next_power_of_2(columns)), COLUMNS=log_decay.dim() == 3, DELTA=delta,
        FULL=has_full_products(state), PDL=bool(pdl), num_warps=4, num_stages=1, **pdl,
    )  # fmt: skip
    return sums_TX, weights_NH

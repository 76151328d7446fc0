"""A step of one token for each request in Triton: matrices are read once, and written where a token fills a block.

A program has some rows of a head's matrix, which it reads by the new key and the new query at once. Memory sets the
pace, so a thread has whole pieces of a row: tiles are [pieces, rows, columns of a piece], a piece being a line of the
cache, so that sums over columns need few exchanges between threads.

Shape suffixes: J places of a block, V rows of a tile, C pieces and W columns of a piece; D and E the same of keys.
Names in capitals are constants of the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels import GPU, cdiv, gpu_of, next_power_of_2, state_formats
from nibble.kernels.dependent_launch import LINE, launch_options, prefetch, wait_for_inputs
from nibble.kernels.recurrence.project import RUN_CONSTANTS, gates_of, run_constants, run_place
from nibble.kernels.recurrence.tiles import (
    BLOCK,
    clear_rows,
    contiguous_rows,
    inverse_length,
    row_scale,
    states_of,
    to_codes,
    tokens_of,
)
from nibble.kernels.recurrence.types import (
    UNIT_EPSILON,
    Convolution,
    LayerState,
    Projection,
    StateMetadata,
)

MIN_ROWS = 8
"""Fewest rows of a matrix in a program."""
TILE_BYTES = 16 << 10
"""Most of a matrix in a program."""
THREAD_VALUES = 32
"""Of a thread; values of one byte are more, by four warps: where each has so many that it needs all registers, that was
1.6 times as fast for many requests."""
MOST_REGISTERS = 255
PROGRAMS = 1
"""Programs of a processor below which each gets fewer rows."""


@triton.jit
def _prefetch_matrix(
    codes, slots, request, first, codes_stride_S, LINES: tl.constexpr, LINE_VALUES: tl.constexpr
):
    """Bring a program's part of a matrix into the L2 cache, before what the kernel in front writes can be read.

    Should that be the slots, or the matrix itself, this brings in other lines or older ones, and nothing else.
    """
    # Past the L1 cache, which would keep what is not yet valid.
    slot = tl.load(slots + request, cache_modifier=".cg")
    if slot >= 0:
        line = codes + slot.to(tl.int64) * codes_stride_S + first
        prefetch(line + tl.arange(0, LINES) * LINE_VALUES)


@triton.jit
def _sum_columns(x_CRW):
    """Sum over pieces and the columns of a piece -> [R]."""
    return tl.sum(tl.sum(x_CRW, 0), 1)


@triton.jit
def _pieces(C: tl.constexpr, W: tl.constexpr):
    """Return columns as [pieces, columns of a piece]."""
    return (tl.arange(0, C) * W)[:, None] + tl.arange(0, W)[None, :]


@triton.jit
def _load_pieces(at, column_CW, K):
    """Load a row of K values in pieces, as float32."""
    return tl.load(at + column_CW, mask=column_CW < K, other=0.0).to(tl.float32)


@triton.jit
def _convolved(x_at, inputs, weight, bias, c, i, N, start, channels, stride_C, stride_W, TAPS: tl.constexpr,
               PLACES: tl.constexpr, SILU: tl.constexpr):  # fmt: skip
    """Return what a convolution makes of some channels of one token, and its newest inputs; as conv_kernel does.

    Args:
        x_at: Where the token's inputs are.
        inputs: Stored inputs of the request.
        weight: Taps.
        bias: Of channels, or None.
        c: The channels.
        i: Their numbers, up to N of which they are there.
        N: See there.
        start: The token's position.
        channels: How many there are in all.
        stride_C: From a channel's taps to those of the next.
        stride_W: Between taps.
        TAPS: Of a channel.
        PLACES: For inputs of a request.
        SILU: Whether that is behind it.
    """
    sum, keep = tl.zeros(c.shape, tl.float32), i < N
    for tap in tl.static_range(TAPS - 1):
        position = start - (TAPS - 1) + tap
        place = (position + PLACES) % PLACES
        past = tl.load(inputs + place * channels + c, mask=i < tl.where(position >= 0, N, 0), other=0.0)
        tap_of = tl.load(weight + c * stride_C + tap * stride_W, mask=keep, other=0.0)
        sum = tl.fma(past.to(tl.float32), tap_of.to(tl.float32), sum)
    own = tl.load(x_at, mask=keep, other=0.0).to(inputs.dtype.element_ty)
    last = tl.load(weight + c * stride_C + (TAPS - 1) * stride_W, mask=keep, other=0.0)
    sum = tl.fma(own.to(tl.float32), last.to(tl.float32), sum)
    if bias is not None:
        sum += tl.load(bias + c, mask=keep, other=0.0).to(tl.float32)
    if SILU:
        sum = sum / (1 + tl.exp(-sum))
    return sum.to(x_at.dtype.element_ty), own


@triton.jit
def _unit_pair(x_2DE, EPSILON: tl.constexpr, SCALE: tl.constexpr):
    """Normalise queries and keys, and multiply the former with SCALE, in their own dtype."""
    y_2DE, side = x_2DE.to(tl.float32), tl.arange(0, 2)[:, None, None]
    factor_2 = inverse_length(tl.sum(tl.sum(y_2DE * y_2DE, 2), 1), EPSILON)
    y_2DE *= factor_2[:, None, None]
    return tl.where(side == 0, y_2DE * SCALE, y_2DE).to(x_2DE.dtype)


@triton.jit(do_not_specialize=["rows", "requests"])
def decode_kernel(  # noqa: PLR0912, PLR0915 (most are settled while it is compiled)
    q, k, v, log_decay, beta, codes, scales, keys, updates, decays, slots, starts, cu_seqlens, out, rows, requests,
    x, inputs, weight, bias, a, b, paces, offsets,
    q_stride_T, k_stride_T, v_stride_T, log_decay_stride_T, beta_stride_T,
    codes_stride_S, scales_stride_S, keys_stride_S, updates_stride_S, decays_stride_S,
    x_stride_T, inputs_stride_S, weight_stride_C, weight_stride_W, channels, a_stride_T, b_stride_T,
    TAPS: tl.constexpr, PLACES: tl.constexpr, SILU: tl.constexpr, Q_AT: tl.constexpr, K_AT: tl.constexpr,
    V_AT: tl.constexpr, SHARE: tl.constexpr, GATES: tl.constexpr,
    Q_FIRST: tl.constexpr, Q_LENGTH: tl.constexpr, Q_STRIDE: tl.constexpr, K_FIRST: tl.constexpr,
    K_LENGTH: tl.constexpr, K_STRIDE: tl.constexpr, V_FIRST: tl.constexpr, V_LENGTH: tl.constexpr,
    V_STRIDE: tl.constexpr, A_FIRST: tl.constexpr, A_LENGTH: tl.constexpr, A_STRIDE: tl.constexpr,
    B_FIRST: tl.constexpr, B_LENGTH: tl.constexpr, B_STRIDE: tl.constexpr,
    UNIT: tl.constexpr, EPSILON: tl.constexpr, SCALE: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, P: tl.constexpr, VW: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, D: tl.constexpr, E: tl.constexpr, LINES: tl.constexpr, LINE_VALUES: tl.constexpr,
    MAX_CODE: tl.constexpr, COLUMNS: tl.constexpr, DELTA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Read rows of a head's matrix for one token. Grid: tiles of rows, heads, requests.

    TAPS: of the convolution that makes queries, keys and values; 0: they are given. GATES: whether log decays and
    learning rates are computed here, and x has the convolution's inputs in runs (types.Projection). UNIT: whether
    queries and keys are normalised, and queries multiplied with SCALE.
    """
    tile, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if LINES:
        _prefetch_matrix(
            codes, slots, request, (head * V + tile * VW) * K, codes_stride_S, LINES, LINE_VALUES
        )
    wait_for_inputs(PDL)
    # --- which token and rows
    slot, row, length, start = tokens_of(slots, starts, cu_seqlens, request)
    v_V, j_J = tile * VW + tl.arange(0, VW), tl.arange(0, BLOCK)
    keep_V = v_V < V
    out_V = out + head * V + v_V
    if (slot < 0) | (length == 0):
        clear_rows(out_V, keep_V, row, row + length, 1, H * V)
        clear_rows(out_V, keep_V, tl.load(cu_seqlens + requests) + request, rows, requests, H * V)
        return
    state_at, final = states_of(None, None, request, start, length)
    stored, place, row = start - state_at, start % P, row.to(tl.int64)
    key_head, stored_rows = head // (H // G), tl.where(state_at > 0, V, 0)
    column_CW, column_DE = _pieces(C, W), _pieces(D, E)
    # --- load
    codes_CVW = codes + slot * codes_stride_S + (head * V + v_V)[None, :, None] * K + column_CW[:, None, :]
    keep_CVW = keep_V[None, :, None] & (column_CW < K)[:, None, :]
    codes_loaded = tl.load(codes_CVW, mask=keep_CVW & (v_V < stored_rows)[None, :, None], other=0.0)
    keys, updates = keys + slot * keys_stride_S + key_head * K, updates + slot * updates_stride_S + head * V
    block = place - stored
    keys_DJE = keys + ((block + j_J) * (G * K))[None, :, None] + column_DE[:, None, :]
    keep_DJE = (j_J < stored)[None, :, None] & (column_DE < K)[:, None, :]
    key_DJE = tl.load(keys_DJE, mask=keep_DJE, other=0.0).to(tl.float32)
    updates_JV = updates + ((block + j_J) * (H * V))[:, None] + v_V[None, :]
    update_JV = tl.load(updates_JV, mask=(j_J < stored)[:, None] & keep_V[None, :], other=0.0).to(tl.float32)
    keep_DE, keep_CW = column_DE < K, column_CW < K
    if TAPS:
        x, inputs = x + row * x_stride_T, inputs + slot * inputs_stride_S
        channel_head = key_head // SHARE
        # Queries and keys together, so that no thread computes what another does; tiles have each value in many.
        PADDED: tl.constexpr = C * W
        side, i = tl.arange(0, 2 * PADDED) // PADDED, tl.arange(0, 2 * PADDED) % PADDED
        c, c_V = tl.where(side == 0, Q_AT, K_AT) + channel_head * K + i, V_AT + head * V + v_V
        x_at, x_V = c, c_V
        if GATES:
            # A head's channels are in one run.
            q_from = run_place(channel_head * K, Q_FIRST, Q_LENGTH, Q_STRIDE)
            k_from = run_place(channel_head * K, K_FIRST, K_LENGTH, K_STRIDE)
            x_at, x_V = (
                tl.where(side == 0, q_from, k_from) + i,
                run_place(head * V, V_FIRST, V_LENGTH, V_STRIDE) + v_V,
            )
        both, new = _convolved(x + x_at, inputs, weight, bias, c, i, K, start, channels, weight_stride_C,
                               weight_stride_W, TAPS, PLACES, SILU)  # fmt: skip
        value_V, new_V = _convolved(x + x_V, inputs, weight, bias, c_V, v_V, V, start, channels, weight_stride_C,
                                    weight_stride_W, TAPS, PLACES, SILU)  # fmt: skip
        if UNIT:
            both = _unit_pair(tl.reshape(both, [2, D, E]), EPSILON, SCALE)
        q_all, k_all = tl.split(tl.trans(tl.reshape(both, [2, PADDED])))
        q_DE, k_DE = tl.reshape(q_all, [D, E]), tl.reshape(k_all, [D, E])
        q_CW, k_CW = tl.reshape(q_all, [C, W]), tl.reshape(k_all, [C, W])
        # Nobody reads their place, one more than taps need. Heads that share channels write the same.
        newest = inputs + start % PLACES * channels
        tl.store(newest + c_V, new_V, mask=keep_V)
        if (tile == 0) & (head % (H // G) == 0):
            tl.store(newest + c, new, mask=i < K)
    else:
        q, k = q + row * q_stride_T + key_head * K, k + row * k_stride_T + key_head * K
        q_DE = tl.load(q + column_DE, mask=keep_DE, other=0.0)
        k_DE = tl.load(k + column_DE, mask=keep_DE, other=0.0)
        q_CW = tl.load(q + column_CW, mask=keep_CW, other=0.0)
        k_CW = tl.load(k + column_CW, mask=keep_CW, other=0.0)
        value_V = tl.load(v + row * v_stride_T + head * V + v_V, mask=keep_V, other=0.0)
    if GATES:
        new_decay, rate = gates_of(
            tl.load(a + row * a_stride_T + run_place(head, A_FIRST, A_LENGTH, A_STRIDE)),
            tl.load(b + row * b_stride_T + run_place(head, B_FIRST, B_LENGTH, B_STRIDE)),
            tl.load(paces + head),
            tl.load(offsets + head),
        )
    DTYPE: tl.constexpr = q_DE.dtype
    q_DE, k_DE, value_V = q_DE.to(tl.float32), k_DE.to(tl.float32), value_V.to(tl.float32)
    q_CW, k_CW = q_CW.to(tl.float32), k_CW.to(tl.float32)
    if UNIT and not TAPS:
        q_factor = inverse_length(tl.sum(tl.sum(q_DE * q_DE, 1), 0), EPSILON)
        k_factor = inverse_length(tl.sum(tl.sum(k_DE * k_DE, 1), 0), EPSILON)
        q_DE = (q_DE * q_factor * SCALE).to(DTYPE).to(tl.float32)
        q_CW = (q_CW * q_factor * SCALE).to(DTYPE).to(tl.float32)
        k_DE, k_CW = (k_DE * k_factor).to(DTYPE).to(tl.float32), (k_CW * k_factor).to(DTYPE).to(tl.float32)
    own_DE = k_DE.to(keys.dtype.element_ty)
    k_DE, k_CW = own_DE.to(tl.float32), k_CW.to(keys.dtype.element_ty).to(tl.float32)
    own_CW = k_CW
    # --- sums of log decays
    if COLUMNS:
        decays, log_decay = (
            decays + slot * decays_stride_S + head * K,
            log_decay + row * log_decay_stride_T + head * K,
        )
        before = decays + (place - 1) * (H * K)
        sum_DE, sum_CW = (
            _load_pieces(before, column_DE, tl.where(stored > 0, K, 0)) + _load_pieces(log_decay, column_DE, K),
            _load_pieces(before, column_CW, tl.where(stored > 0, K, 0)) + _load_pieces(log_decay, column_CW, K),
        )  # fmt: skip
        decays_DJE = decays + ((block + j_J) * (H * K))[None, :, None] + column_DE[:, None, :]
        fade_DJE = sum_DE[:, None, :] - tl.load(decays_DJE, mask=keep_DJE, other=0.0)
        key_DJE *= tl.exp(tl.where(keep_DJE, fade_DJE, 0.0))
        fade_CW = tl.exp(sum_CW)
        q_CW, k_CW = q_CW * fade_CW, k_CW * fade_CW
        fade = 1.0
    else:
        decays = decays + slot * decays_stride_S + head
        if not GATES:
            new_decay = tl.load(log_decay + row * log_decay_stride_T + head).to(tl.float32)
        sum = tl.load(decays + (place - 1) * H, mask=stored > 0, other=0.0) + new_decay
        sum_J = tl.load(decays + (block + j_J) * H, mask=j_J < stored, other=0.0)
        fade_J = tl.exp(tl.where(j_J < stored, sum - sum_J, 0.0))
        fade = tl.exp(sum)
    # --- read the matrix
    matrix_CVW = codes_loaded.to(tl.float32)
    scales_V = None
    if MAX_CODE > 0:
        scales_V = scales + slot * scales_stride_S + head * V + v_V
        scale_V = tl.load(scales_V, mask=v_V < stored_rows, other=0.0)
        fade_V = fade * scale_V
    else:
        fade_V = tl.full([VW], 1.0, tl.float32) * fade
    out_read_V = _sum_columns(matrix_CVW * q_CW[:, None, :]) * fade_V
    # --- read the block
    q_weights_J = _sum_columns(key_DJE * q_DE[:, None, :])
    if not COLUMNS:
        q_weights_J *= fade_J
    out_read_V += tl.sum(q_weights_J[:, None] * update_JV, 0)
    new_V = value_V
    if DELTA:
        new_V -= _sum_columns(matrix_CVW * k_CW[:, None, :]) * fade_V
        k_weights_J = _sum_columns(key_DJE * k_DE[:, None, :])
        if not COLUMNS:
            k_weights_J *= fade_J
        new_V -= tl.sum(k_weights_J[:, None] * update_JV, 0)
    if GATES:
        new_V *= rate
    elif beta is not None:
        new_V *= tl.load(beta + row * beta_stride_T + head).to(tl.float32)
    rounded_V = new_V.to(updates.dtype.element_ty)
    new_V = rounded_V.to(tl.float32)
    own = tl.sum(tl.sum(q_DE * k_DE, 1), 0)
    # --- store
    tl.store(out_V + row * (H * V), (out_read_V + own * new_V).to(out.dtype.element_ty), mask=keep_V)
    tl.store(updates + place * (H * V) + v_V, rounded_V, mask=keep_V)
    # Of the programs that have the same key and sums, one stores them.
    if tile == 0:
        if head % (H // G) == 0:
            tl.store(keys + place * (G * K) + column_DE, own_DE, mask=column_DE < K)
        if COLUMNS:
            tl.store(decays + place * (H * K) + column_DE, sum_DE, mask=column_DE < K)
        else:
            tl.store(decays + place * H, sum)
    clear_rows(out_V, keep_V, tl.load(cu_seqlens + requests) + request, rows, requests, H * V)
    # --- bring the matrix forward
    if final > state_at:
        if MAX_CODE > 0:
            matrix_CVW *= scale_V[None, :, None]
        if COLUMNS:
            matrix_CVW *= fade_CW[:, None, :]
        else:
            matrix_CVW *= fade
        for j in range(0, BLOCK - 1):
            at = block + j
            key_CW = _load_pieces(keys + at * (G * K), column_CW, K)
            past_V = tl.load(updates + at * (H * V) + v_V, mask=keep_V, other=0.0).to(tl.float32)
            if COLUMNS:
                key_CW *= tl.exp(sum_CW - _load_pieces(decays + at * (H * K), column_CW, K))
            else:
                key_CW *= tl.exp(sum - tl.load(decays + at * H))
            matrix_CVW += past_V[None, :, None] * key_CW[:, None, :]
        matrix_CVW += new_V[None, :, None] * own_CW[:, None, :]
        scale_1V1 = None
        if MAX_CODE > 0:
            scale_V = row_scale(tl.max(tl.max(tl.abs(matrix_CVW), 0), 1), MAX_CODE)
            scale_1V1 = scale_V[None, :, None]
            tl.store(scales_V, scale_V, mask=keep_V)
        tl.store(codes_CVW, to_codes(matrix_CVW, scale_1V1, codes.dtype.element_ty), mask=keep_CVW)


# ---- launches --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tile:
    """How decode_kernel is tiled."""

    rows: int
    warps: int
    registers: int = 0
    """Most of a thread; 0: with as many two programs of 8 warps share a processor, or three of 4."""

    @property
    def maxnreg(self) -> int:
        """Return the most registers of a thread."""
        return self.registers or (128 if self.warps > 4 else 168)


def tile_of(rows: int, columns: int, itemsize: int, matrices: int, gpu: GPU) -> Tile:
    """Choose the tile of a step.

    Args:
        rows: Of a matrix.
        columns: Of it, padded to a power of two.
        itemsize: Bytes of a value.
        matrices: How many there are: heads of all requests.
        gpu: Sizes of the GPU.
    """
    tile = min(next_power_of_2(rows), max(MIN_ROWS, TILE_BYTES // itemsize // columns))
    while tile > MIN_ROWS and matrices * cdiv(rows, tile) < PROGRAMS * gpu.processors:
        tile //= 2
    if itemsize == 1:
        return Tile(tile, 4, MOST_REGISTERS if tile * columns == TILE_BYTES else 0)
    return Tile(tile, min(max(tile * columns // (32 * THREAD_VALUES), 4), 8))


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
    unit: bool = False,
    tile: Tile | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Update matrices by a key and a value of each request, and read them by queries -> [T, H, V]; see the package.

    Args:
        q_TGK: As there, and so are the following.
        k_TGK: See there.
        v_THV: See there.
        log_decay: See there.
        beta_TH: See there.
        state: See there.
        batch: See there.
        delta: See there.
        unit: See there.
        tile: Another tile than that of tile_of().
        out: Where outputs are written.
    """
    if not len(batch.slots_B) or not len(v_THV):
        return torch.zeros_like(v_THV)
    rows = contiguous_rows(q_TGK), contiguous_rows(k_TGK), contiguous_rows(v_THV)
    step = _Step(state, batch, log_decay, beta_TH, v_THV.new_empty(v_THV.shape) if out is None else out)
    return step.launch(rows, None, delta=delta, unit=unit, tile=tile)


def conv_recurrence(
    conv: Convolution,
    log_decay: Tensor,
    beta_TH: Tensor | None,
    state: LayerState,
    batch: StateMetadata,
    *,
    delta: bool,
    unit: bool,
    tile: Tile | None = None,
) -> Tensor:
    """Convolve, and update and read matrices by what comes of it, in one launch -> [T, H, V]; see the package."""
    x_TC, (heads, dim) = conv.x_TC, state.updates_SPHV.shape[2:]
    if not len(batch.slots_B) or not len(x_TC):
        return x_TC.new_zeros(len(x_TC), heads, dim)
    step = _Step(state, batch, log_decay, beta_TH, x_TC.new_empty(len(x_TC), heads, dim))
    return step.launch((None, None, None), conv, delta=delta, unit=unit, tile=tile)


def projected_recurrence(
    projection: Projection,
    conv: Convolution,
    state: LayerState,
    batch: StateMetadata,
    *,
    delta: bool,
    unit: bool,
    tile: Tile | None = None,
) -> Tensor:
    """Compute gates, convolve, and update and read matrices, in one launch -> [T, H, V]; see the package.

    Args:
        projection: As there, and so are the following.
        conv: See there.
        state: See there.
        batch: See there.
        delta: See there.
        unit: See there.
        tile: Another tile than that of tile_of().
    """
    x_TW, (heads, dim) = projection.x_TW, state.updates_SPHV.shape[2:]
    if not len(batch.slots_B) or not len(x_TW):
        return x_TW.new_zeros(len(x_TW), heads, dim)
    step = _Step(state, batch, None, None, x_TW.new_empty(len(x_TW), heads, dim), projection)
    return step.launch((None, None, None), conv, delta=delta, unit=unit, tile=tile)


def convolves(conv: Convolution, state: LayerState) -> bool:
    """Return whether conv_recurrence() may store the newest inputs while others read those before them."""
    return state.inputs_SPC.shape[1] >= conv.weight_CW.shape[1]


def projects(projection: Projection, state: LayerState) -> bool:
    """Return whether the inputs of each head are in one run, and a head has one decay."""
    rows, columns = state.planes[0].shape[2:]
    sizes = (columns, columns, rows)
    has_runs = all(runs.length % n == 0 for runs, n in zip(projection.runs[:3], sizes, strict=True))
    return has_runs and state.decays.dim() == 3


@dataclass(frozen=True, slots=True)
class _Step:
    """Tensors of a step."""

    state: LayerState
    batch: StateMetadata
    log_decay: Tensor | None
    beta_TH: Tensor | None
    out_THV: Tensor
    projection: Projection | None = None
    """Of which log decays and rates are computed."""

    def launch(
        self,
        rows: tuple[Tensor | None, Tensor | None, Tensor | None],
        conv: Convolution | None,
        *,
        delta: bool,
        unit: bool,
        tile: Tile | None,
    ) -> Tensor:
        """Compute the step by given queries, keys and values, or by those that a convolution makes."""
        state, batch, beta_TH, requests = self.state, self.batch, self.beta_TH, len(self.batch.slots_B)
        tokens, heads, dim = self.out_THV.shape
        log_decay, keys = None if self.log_decay is None else contiguous_rows(self.log_decay), state.keys_SPGK
        key_heads, columns = keys.shape[2:]
        codes, scales = state.planes[0], state.planes[1] if len(state.planes) > 1 else None
        gpu, width = gpu_of(self.out_THV.device), next_power_of_2(columns)
        tile = tile or tile_of(dim, width, codes.itemsize, requests * heads, gpu)
        pdl = launch_options(gpu)
        piece, key_piece = (min(width, LINE // x.itemsize) for x in (codes, keys))
        # Lines of a whole tile, where rows are whole lines.
        line = LINE // codes.itemsize
        lines = tile.rows * columns // line if pdl and dim % tile.rows == 0 and columns % line == 0 else 0
        tensors, strides, facts = _of_convolution(conv, state)
        gates, gates_strides, runs = _of_projection(self.projection)
        decode_kernel[cdiv(dim, tile.rows), heads, requests](
            *rows, log_decay, beta_TH, codes, scales, keys, state.updates_SPHV, state.decays,
            batch.slots_B, batch.starts_B, batch.cu_seqlens_B1, self.out_THV, tokens, requests, *tensors,
            *gates,
            *(0 if x is None else x.stride(0) for x in (*rows, log_decay, beta_TH, codes, scales)),
            keys.stride(0), state.updates_SPHV.stride(0), state.decays.stride(0), *strides,
            *gates_strides, **facts, **runs, UNIT=unit, EPSILON=UNIT_EPSILON, SCALE=columns**-0.5,
            H=heads, G=key_heads, V=dim, K=columns, P=keys.shape[1], VW=tile.rows, C=width // piece, W=piece,
            D=width // key_piece, E=key_piece, LINES=lines if lines & (lines - 1) == 0 else 0, LINE_VALUES=line,
            MAX_CODE=state_formats.state_format(state.format).max_code, COLUMNS=state.decays.dim() == 4, DELTA=delta,
            PDL=bool(pdl), num_warps=tile.warps, maxnreg=tile.maxnreg, **pdl,
        )  # fmt: skip
        return self.out_THV


def _of_convolution(
    conv: Convolution | None, state: LayerState
) -> tuple[tuple[Tensor | None, ...], tuple[int, ...], dict[str, int]]:
    """Return the tensors, strides and constants of decode_kernel that are about a convolution."""
    names = ("TAPS", "PLACES", "SILU", "Q_AT", "K_AT", "V_AT", "SHARE")
    if conv is None:
        return (None,) * 4, (0,) * 5, dict.fromkeys(names, 0)
    x_TC = contiguous_rows(conv.x_TC)
    tensors = x_TC, state.inputs_SPC, conv.weight_CW, conv.bias_C
    strides = x_TC.stride(0), state.inputs_SPC.stride(0), *conv.weight_CW.stride(), len(conv.weight_CW)
    places, silu = state.inputs_SPC.shape[1], int(conv.activation is not None)
    facts = (conv.weight_CW.shape[1], places, silu, conv.q_at, conv.k_at, conv.v_at, conv.share)
    return tensors, strides, dict(zip(names, facts, strict=True))


def _of_projection(
    projection: Projection | None,
) -> tuple[tuple[Tensor | None, ...], tuple[int, int], dict[str, int]]:
    """Return the tensors, strides and constants of decode_kernel that are about a projection."""
    if projection is None:
        return (None,) * 4, (0, 0), {"GATES": 0, **dict.fromkeys(RUN_CONSTANTS, 1)}
    a_TW, b_TW = projection.a_TW, projection.b_TW
    tensors = a_TW, b_TW, projection.paces_H, projection.offsets_H
    return tensors, (a_TW.stride(0), b_TW.stride(0)), {"GATES": 1, **run_constants(projection)}

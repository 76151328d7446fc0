"""What kernels of recurrent layers share in Triton: which tokens a program has, codes of states, products, rows.

Shape suffixes: R rows, X values of a row; those of a kernel are in its file. Names in capitals are constants.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels import cdiv, gpu_of, next_power_of_2, state_formats
from nibble.kernels.dependent_launch import launch_options, wait_for_inputs
from nibble.kernels.recurrence.types import UNIT_EPSILON, StateMetadata

BLOCK = tl.constexpr(state_formats.BLOCK)
MIN_SCALE = tl.constexpr(state_formats.MIN_SCALE)
ROUND = tl.constexpr(1.5 * 2.0**23)
"""Added to a float32 and subtracted again it leaves a whole number, rounded to nearest, ties to even."""
ROW_VALUES = 1024
"""Values of a row that a program has which only adds or stores them."""


# ---- which tokens ----------------------------------------------------------------------------------------------------


@triton.jit
def tokens_of(slots, starts, cu_seqlens, request):
    """Return a request's slot, the row of its first token, its tokens, and the position of the first."""
    slot = tl.load(slots + request).to(tl.int64)
    first = tl.load(cu_seqlens + request)
    return slot, first, tl.load(cu_seqlens + request + 1) - first, tl.load(starts + request)


@triton.jit
def states_of(states_at, settled, request, start, length):
    """Return where a request's matrix is before the step, and where it is to be after it."""
    state_at = start // BLOCK * BLOCK
    if states_at is not None:
        state_at = tl.load(states_at + request)
    if settled is not None:
        length = tl.load(settled + request)
    return state_at, (start + length) // BLOCK * BLOCK


@triton.jit
def clear_rows(row_X, keep_X, first, last, step, stride):
    """Write zeros to some rows of an output: those that no request has, or a request without a slot.

    Args:
        row_X: Pointers to values of row 0.
        keep_X: Which of them there are.
        first: The first row.
        last: Where rows end.
        step: From one row to the next.
        stride: Between rows.
    """
    for row in range(first, last, step):
        zero_X = tl.zeros(row_X.shape, row_X.dtype.element_ty)
        tl.store(row_X + tl.cast(row, tl.int64) * stride, zero_X, mask=keep_X)


# ---- codes of states -------------------------------------------------------------------------------------------------


@triton.jit
def decode_rows(codes_RX, scale_R, MAX_CODE: tl.constexpr):
    """Return the values of codes; scale_R: of each row, where the format has scales."""
    x_RX = codes_RX.to(tl.float32)
    if MAX_CODE > 0:
        x_RX *= scale_R[:, None]
    return x_RX


@triton.jit
def row_scale(peak, MAX_CODE: tl.constexpr):
    """Return the scale of rows whose largest magnitude is `peak`, as formats.py computes it."""
    return tl.maximum(tl.div_rn(peak, tl.full(peak.shape, MAX_CODE, tl.float32)), MIN_SCALE)


@triton.jit
def to_codes(x, scale, DTYPE: tl.constexpr):
    """Return the codes of values, rounded to nearest, ties to even; scale: of each, None where there are none."""
    if scale is not None:
        x = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    if tl.int8 == DTYPE:
        x = (x + ROUND) - ROUND
    return x.to(DTYPE)


@triton.jit
def encode_rows(x_RX, MAX_CODE: tl.constexpr, DTYPE: tl.constexpr):
    """Return the codes of rows, and a scale of each: ones, which nobody needs, where the format has none."""
    if MAX_CODE > 0:
        scale_R = row_scale(tl.max(tl.abs(x_RX), 1), MAX_CODE)
        codes_RX = to_codes(x_RX, scale_R[:, None], DTYPE)
    else:
        scale_R = tl.full([x_RX.shape[0]], 1.0, tl.float32)
        codes_RX = to_codes(x_RX, None, DTYPE)
    return codes_RX, scale_R


@triton.jit
def round_rows(x_RX, codes_RX, scales_R, keep_RX, keep_R, is_final, MAX_CODE: tl.constexpr):
    """Return rows as the state's format has them, and store them where that is their state after the step.

    Args:
        x_RX: Values.
        codes_RX: Pointers to their codes.
        scales_R: Pointers to their scales; None where the format has none.
        keep_RX: Which of the values there are.
        keep_R: Which of the rows there are.
        is_final: Whether they are stored.
        MAX_CODE: Of the format; 0: it has no scales.
    """
    rounded_RX, scale_R = encode_rows(x_RX, MAX_CODE, codes_RX.dtype.element_ty)
    if is_final:
        tl.store(codes_RX, rounded_RX, mask=keep_RX)
        if MAX_CODE > 0:
            tl.store(scales_R, scale_R, mask=keep_R)
    return decode_rows(rounded_RX, scale_R, MAX_CODE)


# ---- products --------------------------------------------------------------------------------------------------------


@triton.jit
def halves(x):
    """Return float32 values as a sum of two in bfloat16, the first rounded towards zero."""
    # Not by way of bfloat16 and back, which Triton 3.6 cannot move past other conversions.
    high = (x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)


@triton.jit
def add_product(sum, a, b, FULL: tl.constexpr):
    """Add the product of two matrices to `sum`; where a factor is float32, it counts with 16 bits at least.

    FULL: Both are float32, and count with all their bits.
    """
    if FULL:
        sum = tl.dot(a.to(tl.float32), b.to(tl.float32), sum, input_precision="tf32x3")
    elif a.dtype == tl.bfloat16:
        if b.dtype == tl.bfloat16:
            sum = tl.dot(a, b, sum)
        else:
            b_high, b_low = halves(b)
            sum = tl.dot(a, b_high, tl.dot(a, b_low, sum))
    else:
        a_high, a_low = halves(a)
        if b.dtype == tl.bfloat16:
            sum = tl.dot(a_high, b, tl.dot(a_low, b, sum))
        else:
            b_high, b_low = halves(b)
            sum = tl.dot(a_high, b_high, tl.dot(a_high, b_low, tl.dot(a_low, b_high, sum)))
    return sum


# ---- rows ------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["columns"])
def store_kernel(
    rows, stored, slots, starts, cu_seqlens, settled, columns, row_stride, stored_stride_S,
    P: tl.constexpr, X: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store what later steps read of the newest tokens, each at its place. Grid: tiles of X, tokens, requests.

    It runs when all programs that read older tokens have ended.
    """
    wait_for_inputs(PDL)
    slot, first, length, start = tokens_of(slots, starts, cu_seqlens, tl.program_id(2))
    _, final = states_of(None, settled, tl.program_id(2), start, length)
    position = tl.maximum(start, final) + tl.program_id(1)
    if (slot >= 0) & (position < start + length):
        x = tl.program_id(0) * X + tl.arange(0, X)
        row = (first + position - start).to(tl.int64)
        value_X = tl.load(rows + row * row_stride + x, mask=x < columns, other=0.0)
        stored_X = stored + slot * stored_stride_S + position % P * columns + x
        tl.store(stored_X, value_X.to(stored.dtype.element_ty), mask=x < columns)


def store_rows(rows_TX: Tensor, stored_SPX: Tensor, batch: StateMetadata) -> None:
    """Store rows of the step that later steps read, when nobody reads older ones any more.

    Args:
        rows_TX: In contiguous rows.
        stored_SPX: Where they are kept, by position.
        batch: The requests.
    """
    places, columns = stored_SPX.shape[1], stored_SPX[0, 0].numel()
    width = min(ROW_VALUES, next_power_of_2(columns))
    pdl = launch_options(gpu_of(stored_SPX.device))
    store_kernel[cdiv(columns, width), min(places, batch.max_length), len(batch.slots_B)](
        rows_TX, stored_SPX, batch.slots_B, batch.starts_B, batch.cu_seqlens_B1, batch.settled_B, columns,
        rows_TX.stride(0), stored_SPX.stride(0), P=places, X=width, PDL=bool(pdl), **pdl,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def unit_kernel(
    q, k, out, rows, q_stride_T, k_stride_T, G: tl.constexpr, K: tl.constexpr, SCALE: tl.constexpr,
    EPSILON: tl.constexpr, X: tl.constexpr, R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Normalise heads of queries and of keys. Grid: rows / R, both."""
    wait_for_inputs(PDL)
    row_R1, x_1X = (tl.program_id(0) * R + tl.arange(0, R))[:, None], tl.arange(0, X)[None, :]
    keep_RX, token_R1, is_key = (row_R1 < rows) & (x_1X < K), (row_R1 // G).to(tl.int64), tl.program_id(1)
    at_RX = row_R1 % G * K + x_1X
    if is_key:
        value_RX = tl.load(k + token_R1 * k_stride_T + at_RX, mask=keep_RX, other=0.0).to(tl.float32)
    else:
        value_RX = tl.load(q + token_R1 * q_stride_T + at_RX, mask=keep_RX, other=0.0).to(tl.float32)
    value_RX *= inverse_length(tl.sum(value_RX * value_RX, 1), EPSILON)[:, None]
    if is_key == 0:
        value_RX *= SCALE
    out_RX = out + (tl.cast(is_key, tl.int64) * rows + row_R1) * K + x_1X
    tl.store(out_RX, value_RX.to(out.dtype.element_ty), mask=keep_RX)


@triton.jit
def inverse_length(square, EPSILON: tl.constexpr):
    """Return what a vector is multiplied by so that its length is 1, by its square."""
    return tl.rsqrt(square + EPSILON)


def unit_rows(q_TGK: Tensor, k_TGK: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys of length 1, queries times K^-1/2, as naive.py does."""
    tokens, heads, columns = q_TGK.shape
    q_TGK, k_TGK = contiguous_rows(q_TGK), contiguous_rows(k_TGK)
    out_2TGK = torch.empty(2, tokens, heads, columns, dtype=q_TGK.dtype, device=q_TGK.device)
    width, rows = next_power_of_2(columns), tokens * heads
    tile, pdl = max(ROW_VALUES // width, 1), launch_options(gpu_of(q_TGK.device))
    if rows:
        unit_kernel[cdiv(rows, tile), 2](
            q_TGK, k_TGK, out_2TGK, rows, q_TGK.stride(0), k_TGK.stride(0), G=heads, K=columns, SCALE=columns**-0.5,
            EPSILON=UNIT_EPSILON, X=width, R=tile, PDL=bool(pdl), **pdl,
        )  # fmt: skip
    return out_2TGK[0], out_2TGK[1]


def contiguous_rows(x: Tensor) -> Tensor:
    """Return a tensor whose rows may lie anywhere, but each in one piece."""
    stride = 1
    for dim in range(x.dim() - 1, 0, -1):
        if x.shape[dim] > 1 and x.stride(dim) != stride:
            return x.contiguous()
        stride *= x.shape[dim]
    return x

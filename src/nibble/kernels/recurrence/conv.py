"""Convolutions of recurrent layers in Triton: a program has some tokens of a request, and some channels.

A value is a sum over taps in their order, whichever program has it. The program of a request's first tokens, the only
one that reads stored inputs, also stores the newest.

Shape suffixes: R tokens of a tile, C channels of a tile. Names in capitals are constants of the kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels import cdiv, gpu_of, next_power_of_2
from nibble.kernels.dependent_launch import launch_options, wait_for_inputs
from nibble.kernels.recurrence.tiles import clear_rows, tokens_of
from nibble.kernels.recurrence.types import LayerState, StateMetadata

FEW_CHANNELS, CHANNELS = 256, 128
"""Channels of a program in steps of one token for each request, and in others."""
TOKENS = 32
"""Most tokens of a program."""


@triton.jit(do_not_specialize=["rows", "requests"])
def conv_kernel(
    x, weight, bias, inputs, slots, starts, cu_seqlens, out, rows, requests, channels,
    x_stride_T, x_stride_C, weight_stride_C, weight_stride_W, inputs_stride_S,
    W: tl.constexpr, P: tl.constexpr, SILU: tl.constexpr, R: tl.constexpr, C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Convolve a tile of tokens and channels. Grid: tiles of channels, tiles of a request's tokens, requests."""
    wait_for_inputs(PDL)
    # --- which tokens
    c, tile, request = tl.program_id(0) * C + tl.arange(0, C), tl.program_id(1), tl.program_id(2)
    keep_C = c < channels
    slot, first, length, start = tokens_of(slots, starts, cu_seqlens, request)
    if tile == 0:
        clear_rows(out + c, keep_C, tl.load(cu_seqlens + requests) + request, rows, requests, channels)
        if slot < 0:
            clear_rows(out + c, keep_C, first, first + length, 1, channels)
    if (slot < 0) | (tile * R >= length):
        return
    # --- accumulate
    offset_R = tile * R + tl.arange(0, R)
    keep_RC = (offset_R < length)[:, None] & keep_C[None, :]
    x_C, inputs_C = x + c * x_stride_C, inputs + slot * inputs_stride_S + c
    x_C += first.to(tl.int64) * x_stride_T
    sum_RC = tl.zeros([R, C], tl.float32)
    for tap in tl.static_range(W):
        from_R = offset_R - (W - 1) + tap
        at_RC = x_C[None, :] + (from_R.to(tl.int64) * x_stride_T)[:, None]
        x_RC = tl.load(at_RC, mask=keep_RC & (from_R >= 0)[:, None], other=0.0).to(inputs.dtype.element_ty)
        if tap < W - 1:
            position_R = start + from_R
            is_past_R = (from_R < 0) & (position_R >= 0)
            past_RC = inputs_C[None, :] + ((position_R + P) % P * channels)[:, None]
            x_RC += tl.load(past_RC, mask=keep_RC & is_past_R[:, None], other=0.0)
        weight_C = tl.load(weight + c * weight_stride_C + tap * weight_stride_W, mask=keep_C, other=0.0)
        weight_RC = tl.broadcast_to(weight_C.to(tl.float32)[None, :], [R, C])
        sum_RC = tl.fma(x_RC.to(tl.float32), weight_RC, sum_RC)
    if bias is not None:
        sum_RC += tl.load(bias + c, mask=keep_C, other=0.0).to(tl.float32)[None, :]
    if SILU:
        sum_RC = sum_RC / (1 + tl.exp(-sum_RC))
    # --- store
    out_RC = out + (first + offset_R).to(tl.int64)[:, None] * channels + c[None, :]
    tl.store(out_RC, sum_RC.to(out.dtype.element_ty), mask=keep_RC)
    if tile == 0:
        # All threads have read the places that new inputs take.
        tl.debug_barrier()
        for offset in range(tl.maximum(length - P, 0), length):
            x_at_C = x_C + tl.cast(offset, tl.int64) * x_stride_T
            new_C = tl.load(x_at_C, mask=keep_C, other=0.0).to(inputs.dtype.element_ty)
            tl.store(inputs_C + (start + offset) % P * channels, new_C, mask=keep_C)


def causal_conv(
    x_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    activation: str | None,
    state: LayerState,
    batch: StateMetadata,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Convolve each channel over the inputs up to the present one -> [T, C], in `out` if given; see the package."""
    requests, (tokens, channels), taps = len(batch.slots_B), x_TC.shape, weight_CW.shape[1]
    if not requests or not tokens:
        return torch.zeros_like(x_TC)
    out_TC = x_TC.new_empty(tokens, channels) if out is None else out
    one = batch.max_length == 1
    # Only the first tile may reach what was stored before the step.
    tile = 1 if one else max(next_power_of_2(taps), min(TOKENS, next_power_of_2(batch.max_length)))
    width = min(FEW_CHANNELS if one else CHANNELS, next_power_of_2(channels))
    pdl = launch_options(gpu_of(x_TC.device))
    conv_kernel[cdiv(channels, width), cdiv(batch.max_length, tile), requests](
        x_TC, weight_CW, bias_C, state.inputs_SPC, batch.slots_B, batch.starts_B, batch.cu_seqlens_B1, out_TC,
        tokens, requests, channels, *x_TC.stride(), *weight_CW.stride(), state.inputs_SPC.stride(0),
        W=taps, P=state.inputs_SPC.shape[1], SILU=activation is not None, R=tile, C=width, PDL=bool(pdl),
        num_warps=1 if one else 4, **pdl,
    )  # fmt: skip
    return out_TC

"""What a layer reads of the products that it begins with, in Triton, in one launch.

Steps of one token for each request read it where it is (decode.py), with the gates of gates_of(); others get it in the
order of channels.

Shape suffixes: C channels of a tile, H heads. Names in capitals are constants of the kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nibble.kernels import cdiv, gpu_of, next_power_of_2
from nibble.kernels.dependent_launch import launch_options, wait_for_inputs
from nibble.kernels.recurrence.types import Convolution, LayerState, Projection

CHANNELS = 1024
"""Of a program."""
LINEAR = tl.constexpr(20.0)
"""From here on softplus is its argument, as torch has it."""


@triton.jit
def run_place(n, FIRST: tl.constexpr, LENGTH: tl.constexpr, STRIDE: tl.constexpr):
    """Return where the n-th value is (types.Runs)."""
    return FIRST + n // LENGTH * STRIDE + n % LENGTH


@triton.jit
def gates_of(a, b, pace, offset):
    """Return log decays and learning rates."""
    x = a.to(tl.float32) + offset.to(tl.float32)
    power = tl.exp(tl.minimum(x, LINEAR))
    sum = 1.0 + power
    # What the sum rounds away of a small power counts in its logarithm.
    added = sum - 1.0
    softplus = tl.where(added == 0.0, power, tl.log(sum) * (power / tl.where(added == 0.0, 1.0, added)))
    softplus = tl.where(x > LINEAR, x, softplus)
    return -tl.exp(pace.to(tl.float32)) * softplus, 1.0 / (1.0 + tl.exp(-b.to(tl.float32)))


@triton.jit
def project_kernel(
    x, a, b, paces, offsets, out, log_decay, beta, x_stride_T, a_stride_T, b_stride_T, channels,
    Q_AT: tl.constexpr, K_AT: tl.constexpr, V_AT: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr,
    Q_FIRST: tl.constexpr, Q_LENGTH: tl.constexpr, Q_STRIDE: tl.constexpr,
    K_FIRST: tl.constexpr, K_LENGTH: tl.constexpr, K_STRIDE: tl.constexpr,
    V_FIRST: tl.constexpr, V_LENGTH: tl.constexpr, V_STRIDE: tl.constexpr,
    A_FIRST: tl.constexpr, A_LENGTH: tl.constexpr, A_STRIDE: tl.constexpr,
    B_FIRST: tl.constexpr, B_LENGTH: tl.constexpr, B_STRIDE: tl.constexpr,
    C: tl.constexpr, H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Bring a tile of a token's channels into their order, and compute its gates. Grid: tokens, tiles of channels.

    KEYS: channels of queries, and of keys.
    """
    wait_for_inputs(PDL)
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    # --- channels
    c_C = tile * C + tl.arange(0, C)
    keep_C = c_C < channels
    from_q_C, from_k_C, from_v_C = c_C - Q_AT, c_C - K_AT, c_C - V_AT
    at_C = run_place(from_v_C, V_FIRST, V_LENGTH, V_STRIDE)
    is_k_C, is_q_C = (from_k_C >= 0) & (from_k_C < KEYS), (from_q_C >= 0) & (from_q_C < KEYS)
    at_C = tl.where(is_k_C, run_place(from_k_C, K_FIRST, K_LENGTH, K_STRIDE), at_C)
    at_C = tl.where(is_q_C, run_place(from_q_C, Q_FIRST, Q_LENGTH, Q_STRIDE), at_C)
    tl.store(out + row * channels + c_C, tl.load(x + row * x_stride_T + at_C, mask=keep_C), mask=keep_C)
    # --- gates
    if tile == 0:
        h_H = tl.arange(0, H)
        keep_H, a, b = h_H < HEADS, a + row * a_stride_T, b + row * b_stride_T
        log_decay_H, beta_H = gates_of(
            tl.load(a + run_place(h_H, A_FIRST, A_LENGTH, A_STRIDE), mask=keep_H, other=0.0),
            tl.load(b + run_place(h_H, B_FIRST, B_LENGTH, B_STRIDE), mask=keep_H, other=0.0),
            tl.load(paces + h_H, mask=keep_H, other=0.0),
            tl.load(offsets + h_H, mask=keep_H, other=0.0),
        )
        tl.store(log_decay + row * HEADS + h_H, log_decay_H, mask=keep_H)
        tl.store(beta + row * HEADS + h_H, beta_H, mask=keep_H)


RUN_CONSTANTS = tuple(f"{part}_{field}" for part in "QKVAB" for field in ("FIRST", "LENGTH", "STRIDE"))


def run_constants(projection: Projection) -> dict[str, int]:
    """Return the constants that say where everything is."""
    numbers = [n for runs in projection.runs for n in (runs.first, runs.length, runs.stride)]
    return dict(zip(RUN_CONSTANTS, numbers, strict=True))


def project(projection: Projection, conv: Convolution, state: LayerState) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs of the convolution [T, C], log decays and learning rates float32 [T, H]; see naive.project()."""
    x_TW, a_TW, b_TW = projection.x_TW, projection.a_TW, projection.b_TW
    tokens, channels, heads = len(x_TW), len(conv.weight_CW), len(projection.paces_H)
    key_heads, columns = state.keys_SPGK.shape[2:]
    x_TC = x_TW.new_empty(tokens, channels)
    log_decay_TH, beta_TH = (x_TW.new_empty(tokens, heads, dtype=torch.float32) for _ in range(2))
    if not tokens:
        return x_TC, log_decay_TH, beta_TH
    options = launch_options(gpu_of(x_TW.device))
    project_kernel[(tokens, cdiv(channels, CHANNELS))](
        x_TW, a_TW, b_TW, projection.paces_H, projection.offsets_H, x_TC, log_decay_TH, beta_TH,
        x_TW.stride(0), a_TW.stride(0), b_TW.stride(0), channels, conv.q_at, conv.k_at, conv.v_at,
        key_heads // conv.share * columns, heads, **run_constants(projection), C=CHANNELS,
        H=next_power_of_2(heads), PDL=bool(options), **options,
    )  # fmt: skip
    return x_TC, log_decay_TH, beta_TH

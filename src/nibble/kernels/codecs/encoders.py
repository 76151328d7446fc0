"""Encoders: how each format turns a tile of values into the tiles of its planes, inside a kernel that stores them.

EXTENSION POINT: an entry of ENCODERS, made here or from outside, gives a format its fused append. The bytes are those
of the format's `encode` in nibble/formats, which is the definition. Owns the arithmetic of one tile; must not know of
pages, slots or streams.

An encoder is a `@triton.jit` function (x_RD, scale_R1) -> one [R, W] tile per plane, in the plane's order: x_RD in
float32, the format's global scale of each row, and W values of a plane to a row. Bytes are returned as integers.

Comparisons are made on the bits of magnitudes, as integers: they have the order of the values, with NaN above
infinity, on every machine. Divisions are IEEE's. Nothing needs FP8 instructions, which GPUs before SM89 lack.

Shape suffixes: R rows, D values of a row, B blocks of a row, W values of a plane's row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.runtime import JITFunction

ABS = tl.constexpr(0x7FFFFFFF)
EXPONENT = tl.constexpr(0x7F800000)  # also the bits of infinity
MAX_E2M1 = tl.constexpr(0x40C00000)  # 6.0
MAX_E4M3 = tl.constexpr(0x43E00000)  # 448.0
MAX_E5M2 = tl.constexpr(0x47600000)  # 57344.0
NAN_FP8 = tl.constexpr(0x7F)
NAN_E8M0 = tl.constexpr(255)
MAX_E8M0 = tl.constexpr(252)  # 2^125: times 6, the largest product that float32 holds


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def magnitude(x):
    """The bits of |x|."""
    return bits_of(x) & ABS


@triton.jit
def nearest(bits, LARGEST: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr):
    """The bits of magnitudes -> nearest values of a small float, and their codes; ties to even, NaN as LARGEST.

    LARGEST: bits of the value at which it saturates. MANTISSA: bits of its mantissa. LOWEST: its smallest exponent,
    below which it is subnormal.

    Adding a power of two 2^(23 - MANTISSA) times the value's own leaves no bits behind the last that is kept, so the
    addition rounds; what then stands in the low bits counts steps, and the exponent says how large they are. Some more
    steps are added with it, so that the sum of both is the code: an even number of them, which leaves ties as they are.
    """
    SHIFT: tl.constexpr = 23 - MANTISSA
    MORE: tl.constexpr = -((127 + SHIFT + LOWEST) << MANTISSA) % 128
    bits = tl.minimum(bits, LARGEST)
    lift = float_of(tl.maximum(bits, (127 + LOWEST) << 23) & EXPONENT) * ((1 << SHIFT) + (MORE >> MANTISSA))
    lifted = float_of(bits) + lift
    code = bits_of(lifted) + (bits_of(lifted) >> SHIFT)
    return lifted - lift, code & 0x7F


@triton.jit
def blocks(x_RD, SIZE: tl.constexpr):
    """[R, D] -> [R, B, SIZE]."""
    return tl.reshape(x_RD, [x_RD.shape[0], x_RD.shape[1] // SIZE, SIZE])


@triton.jit
def rows(x):
    """[R, B, 1] -> [R, B], and [R, B, SIZE] -> [R, D]."""
    return tl.reshape(x, [x.shape[0], x.shape[1] * x.shape[2]])


@triton.jit
def packed(codes_RD):
    """4-bit codes, two to a byte, the even index in the low half."""
    even, odd = tl.split(blocks(codes_RD, 2))
    return (even + odd * 16).to(tl.uint8)


@triton.jit
def plain(x_RD, scale_R1):
    """Values as they are; storing them rounds them to the plane's dtype."""
    return (x_RD,)


@triton.jit
def fp8(x_RD, scale_R1, LARGEST: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr):
    y_RD = tl.div_rn(x_RD, tl.broadcast_to(scale_R1, x_RD.shape))
    _, code = nearest(magnitude(y_RD), LARGEST, MANTISSA, LOWEST)
    code = tl.where(magnitude(y_RD) > EXPONENT, NAN_FP8, code)
    return ((code | (bits_of(x_RD) >> 24) & 0x80).to(tl.uint8),)


@triton.jit
def e4m3(x_RD, scale_R1):
    return fp8(x_RD, scale_R1, MAX_E4M3, 3, -6)


@triton.jit
def e5m2(x_RD, scale_R1):
    return fp8(x_RD, scale_R1, MAX_E5M2, 2, -14)


@triton.jit
def nvfp4(x_RD, scale_R1):
    x_RBS = blocks(x_RD, 16)
    amax_RB1 = float_of(tl.max(magnitude(x_RBS), 2, keep_dims=True))
    scale_RB1 = tl.broadcast_to(scale_R1[:, :, None], amax_RB1.shape)
    ideal = magnitude(tl.div_rn(amax_RB1, 6.0 * scale_RB1))
    rounded, stored = nearest(ideal, MAX_E4M3, 3, -6)
    damaged = ideal > EXPONENT
    step = tl.where(damaged, amax_RB1, rounded * scale_RB1)
    inverse = tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step)
    inverse = tl.where(inverse == float("inf"), 0.0, inverse)  # the scale is zero: a block of signed zeros
    scaled = rows(float_of(magnitude(x_RBS)) * inverse)
    _, code = nearest(bits_of(scaled), MAX_E2M1, 1, 0)
    stored = tl.where(damaged, NAN_FP8, stored)
    return packed(code | (bits_of(x_RD) >> 28) & 8), rows(stored).to(tl.uint8)


@triton.jit
def mx(x_RBS, amax, stored, TIES_AWAY: tl.constexpr):
    """Blocks, bits of their largest magnitude, and E8M0 codes of their scales -> both planes."""
    stored = tl.minimum(tl.maximum(stored, 0), MAX_E8M0)
    scaled = rows(x_RBS * float_of((254 - stored) << 23))  # times the power of two that undoes the scale
    bits = magnitude(scaled)
    if TIES_AWAY:
        bits |= 1  # what lies midway is above it now; all else stays on its side
    _, code = nearest(bits, MAX_E2M1, 1, 0)
    stored = tl.where(amax > EXPONENT, NAN_E8M0, stored)
    return packed(code | tl.where(scaled < 0, 8, 0)), rows(stored).to(tl.uint8)


@triton.jit
def finite(amax):
    """Bits of a block's largest magnitude, with NaN as zero and infinity as the largest finite value."""
    return tl.minimum(tl.where(amax > EXPONENT, 0, amax), EXPONENT - 1)


@triton.jit
def mxfp4(x_RD, scale_R1):
    x_RBS = blocks(x_RD, 32)
    amax = tl.max(magnitude(x_RBS), 2, keep_dims=True)
    return mx(x_RBS, amax, (finite(amax) >> 23) - 2, False)


@triton.jit
def fp4_mx16(x_RD, scale_R1):
    x_RBS = blocks(x_RD, 16)
    amax = tl.max(magnitude(x_RBS), 2, keep_dims=True)
    largest = float_of(finite(amax))
    ideal = tl.maximum(tl.div_rn(largest, tl.full(largest.shape, 6.0, tl.float32)), 1e-10)
    return mx(x_RBS, amax, (bits_of(ideal) + 0x7FFFFF) >> 23, True)


ENCODERS: dict[str, JITFunction] = {
    "fp32": plain,
    "bf16": plain,
    "fp16": plain,
    "fp8_e4m3": e4m3,
    "fp8_e5m2": e5m2,
    "nvfp4": nvfp4,
    "mxfp4": mxfp4,
    "fp4_mx16": fp4_mx16,
}
"""The encoder of each format that has one."""

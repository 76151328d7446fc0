"""Codec of MXFP4 and FP4 with blocks of 16: E2M1 values, and a power of two (E8M0) for each block of them.

Shape suffixes: R rows, D values of a row, B blocks of a row, S values of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.runtime import JITFunction

from nibble.formats import mx as definition
from nibble.kernels.codecs import small_floats as floats
from nibble.kernels.codecs.base import Codec, CudaFormat, Decoder, LatentDecoder, RowEncoder

NAN_E8M0 = tl.constexpr(255)
UNITS = tl.constexpr(definition.UNITS)
MAX_E8M0 = tl.constexpr(252)  # 2^125: times 6, the largest product that float32 holds


@triton.jit
def _inverse(stored):
    """Return one over the scale of E8M0 codes up to MAX_E8M0."""
    return floats.float_of((254 - stored) << 23)


@triton.jit
def _encode(x_RBS, amax, stored, TIES_AWAY: tl.constexpr):
    """Encode blocks, given the bits of their largest magnitude and the E8M0 codes of their scales."""
    stored = tl.minimum(tl.maximum(stored, 0), MAX_E8M0)
    # Times the power of two that undoes the scale.
    scaled = floats.to_rows(x_RBS * _inverse(stored))
    bits = floats.magnitude(scaled)
    if TIES_AWAY:
        bits |= 1  # what lies midway is above it now; all else stays on its side
    _, code = floats.round_bits(bits, floats.MAX_E2M1, 1, 0)
    stored = tl.where(amax > floats.INF_BITS, NAN_E8M0, stored)
    # By value and not by the sign bit: -0.0 is stored as 0, as formats/mx.py does.
    return floats.pack_e2m1(code | tl.where(scaled < 0, 8, 0)), floats.to_rows(stored).to(tl.uint8)


@triton.jit
def _finite(amax):
    """Return bits of a block's largest magnitude, with NaN as zero and infinity as the largest finite value."""
    return tl.minimum(tl.where(amax > floats.INF_BITS, 0, amax), floats.INF_BITS - 1)


@triton.jit
def _floor(amax):
    """Return the codes of the largest powers of two within amax / 4."""
    # The exponent bits of amax are the E8M0 code of its power of two; E2M1 itself reaches 2^2, hence -2.
    return (_finite(amax) >> 23) - 2


@triton.jit
def _sweep(x_RD, BLOCK: tl.constexpr, TIES_AWAY: tl.constexpr):
    """Encode blocks with that power of two or the next, whichever makes the smaller error; see formats/mx.py."""
    x_RBS = floats.to_blocks(x_RD, BLOCK)
    amax = tl.max(floats.magnitude(x_RBS), 2, keep_dims=True)
    low = tl.minimum(tl.maximum(_floor(amax), 0), MAX_E8M0)
    scaled = floats.float_of(floats.magnitude(x_RBS)) * _inverse(low)
    units_RBS, step = floats.whole_units(scaled * UNITS), tl.full(amax.shape, UNITS, tl.float32)
    error, other = (
        floats.squared_error(units_RBS, step, True),
        floats.squared_error(units_RBS, 2 * step, False),
    )
    # Beyond the largest there is none; _encode() sees to that.
    return _encode(x_RBS, amax, tl.where(other < error, low + 1, low), TIES_AWAY)


@triton.jit
def sweep_mxfp4(x_RD, scale_R1):
    """Encode rows in blocks of 32 with the better of two scales."""
    return _sweep(x_RD, 32, False)


@triton.jit
def sweep_fp4_mx16(x_RD, scale_R1):
    """Encode rows in blocks of 16 with the better of two scales."""
    return _sweep(x_RD, 16, True)


@triton.jit
def encode_mxfp4(x_RD, scale_R1):
    """Encode rows in blocks of 32; a scale is the largest power of two within amax / 4."""
    x_RBS = floats.to_blocks(x_RD, 32)
    amax = tl.max(floats.magnitude(x_RBS), 2, keep_dims=True)
    return _encode(x_RBS, amax, _floor(amax), False)


@triton.jit
def encode_fp4_mx16(x_RD, scale_R1):
    """Encode rows in blocks of 16; scales are amax / 6, rounded up to a power of two."""
    x_RBS = floats.to_blocks(x_RD, 16)
    amax = tl.max(floats.magnitude(x_RBS), 2, keep_dims=True)
    largest = floats.float_of(_finite(amax))
    ideal = tl.maximum(tl.div_rn(largest, tl.full(largest.shape, 6.0, tl.float32)), 1e-10)
    # All bits of the mantissa are added, so the exponent grows by one unless the value is a power of two.
    return _encode(x_RBS, amax, (floats.bits_of(ideal) + 0x7FFFFF) >> 23, True)


@triton.jit
def decode(items, scale, DTYPE: tl.constexpr):
    """Decode words of four E2M1 values, times their block scales."""
    a, b, c, d = floats.unpack_e2m1(items, scale, True)
    return a.to(DTYPE), b.to(DTYPE), c.to(DTYPE), d.to(DTYPE)


@triton.jit
def e8m0_scale(codes, DTYPE: tl.constexpr):
    """Decode powers of two; 0 is 2^-127, 255 is NaN."""
    bits = codes.to(tl.int32) << 23
    # 2^-127 is half of the smallest normal number: no exponent, and the first bit of the mantissa.
    bits = tl.where(codes == 0, 1 << 22, tl.where(codes == 255, 0x7FC00000, bits))
    scale = bits.to(tl.float32, bitcast=True)
    if tl.bfloat16 == DTYPE:  # float16 has no room for unpack_e2m1's factor, so for it they stay in float32
        scale = scale.to(tl.bfloat16)
    return scale


def _codec(amax: JITFunction, sweep: JITFunction, block: int, cuda: str) -> Codec:
    encoders = {"amax": amax, "sweep": sweep}
    decoder, rows = Decoder(decode, e8m0_scale, parts=4, block=block), RowEncoder(encoders, block)
    return Codec(encoders, decoder, rows, LatentDecoder(decoder), cuda=CudaFormat(cuda, 4, block))


CODECS = {
    "mxfp4": _codec(encode_mxfp4, sweep_mxfp4, 32, "MXFP4"),
    "fp4_mx16": _codec(encode_fp4_mx16, sweep_fp4_mx16, 16, "FP4_MX16"),
}

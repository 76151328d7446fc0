"""Codec of NVFP4: E2M1 values, an E4M3 scale for each 16 of them, and one global scale.

Shape suffixes: R rows, D values of a row, B blocks of a row, S values of a block.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from nibble.formats import nvfp4 as definition
from nibble.kernels.codecs import small_floats as floats
from nibble.kernels.codecs.base import Codec, CudaFormat, Decoder, LatentDecoder, RowEncoder

MAX_CODE = tl.constexpr(definition.MAX_CODE)
CANDIDATES = tl.constexpr(len(definition.OFFSETS))


@triton.constexpr_function
def _offset(i: int) -> int:
    """Return how many codes candidate `i` of a sweep lies above amax's."""
    return definition.OFFSETS[i]


@triton.jit
def _scale_of(codes):
    """Return E4M3 codes in float32; NaN's is 480."""
    # Exponent and mantissa at their places: but for the bias of the exponent that is the value, also a subnormal one.
    return floats.float_of(codes << 20) * floats.TWO_120


@triton.jit
def _better(units_RBS, units, code, error, candidate, SATURATES: tl.constexpr):
    """Return the better of two scales with its error: a candidate wins by a smaller one."""
    other = floats.squared_error(units_RBS, _scale_of(candidate) * units, SATURATES)
    return tl.where(other < error, candidate, code), tl.minimum(other, error)


@triton.jit
def _sweep(x_RBS, code, largest_RB1, scale_RB1, ENCODER: tl.constexpr):
    """Return the scale's code with the least error, of amax's code and others; see formats/nvfp4.py.

    Args:
        x_RBS: Values.
        code: The code of amax / 6.
        largest_RB1: amax.
        scale_RB1: The global scale.
        ENCODER: Which others.
    """
    # --- values in units of the global scale times 2^(e - 16)
    units = floats.float_of((143 - tl.maximum(code >> 3, 1)) << 23)
    units_RBS = floats.whole_units(floats.float_of(floats.magnitude(x_RBS)) * tl.div_rn(units, scale_RB1))
    # --- candidates
    best, error = code, floats.squared_error(units_RBS, _scale_of(code) * units, True)
    if ENCODER == "4over6":
        ideal = floats.magnitude(tl.div_rn(largest_RB1, 4.0 * scale_RB1))
        _, candidate = floats.round_bits(ideal, floats.MAX_E4M3, 3, -6)
        best, error = _better(units_RBS, units, best, error, candidate, False)
    else:
        # A scale that saturates is kept, since a smaller one would cut off more.
        least = tl.where(code == MAX_CODE, MAX_CODE, 0)
        for i in tl.static_range(1, CANDIDATES):
            candidate = tl.maximum(tl.minimum(code + _offset(i), MAX_CODE), least)
            best, error = _better(units_RBS, units, best, error, candidate, _offset(i) < 0)
    return best


@triton.jit
def _encode(x_RD, scale_R1, ENCODER: tl.constexpr):
    """Encode rows: values are divided by their block's scale as it is stored."""
    # --- block scales: amax / 6, in E4M3
    x_RBS = floats.to_blocks(x_RD, 16)
    amax_RB1 = floats.float_of(tl.max(floats.magnitude(x_RBS), 2, keep_dims=True))
    scale_RB1 = tl.broadcast_to(scale_R1[:, :, None], amax_RB1.shape)
    ideal = floats.magnitude(tl.div_rn(amax_RB1, 6.0 * scale_RB1))
    rounded, stored = floats.round_bits(ideal, floats.MAX_E4M3, 3, -6)
    damaged = ideal > floats.INF_BITS
    if ENCODER != "amax":
        stored = _sweep(x_RBS, stored, amax_RB1, scale_RB1, ENCODER)
        rounded = _scale_of(stored)
    step = tl.where(damaged, amax_RB1, rounded * scale_RB1)
    # --- values
    inverse = tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step)
    inverse = tl.where(inverse == float("inf"), 0.0, inverse)  # the scale is zero: a block of signed zeros
    scaled = floats.to_rows(floats.float_of(floats.magnitude(x_RBS)) * inverse)
    _, code = floats.round_bits(floats.bits_of(scaled), floats.MAX_E2M1, 1, 0)
    stored = tl.where(damaged, floats.NAN_FP8, stored)
    # Bit 31, the sign, becomes bit 3 of the code.
    return floats.pack_e2m1(code | (floats.bits_of(x_RD) >> 28) & 8), floats.to_rows(stored).to(tl.uint8)


@triton.jit
def encode_amax(x_RD, scale_R1):
    """Encode rows with scales that fit the largest magnitude."""
    return _encode(x_RD, scale_R1, "amax")


@triton.jit
def encode_sweep(x_RD, scale_R1):
    """Encode rows with the best of some scales around that one."""
    return _encode(x_RD, scale_R1, "sweep")


@triton.jit
def encode_4over6(x_RD, scale_R1):
    """Encode rows with scales that make 6 or 4 of the largest magnitude, the better of them."""
    return _encode(x_RD, scale_R1, "4over6")


@triton.jit
def decode(items, scale, DTYPE: tl.constexpr):
    """Decode words of four E2M1 values, times their block scales."""
    return floats.unpack_e2m1(items, scale, False)


@triton.jit
def e4m3_scale(codes, DTYPE: tl.constexpr):
    """Decode block scales, times what leaves 2^-7 of unpack_e2m1's factor, in every dtype."""
    scale = floats.e4m3_to_fp16(codes.to(tl.int16)).to(tl.float32)
    if tl.float16 == DTYPE:
        scale *= 2.0**15
    elif tl.bfloat16 == DTYPE:
        scale *= 2.0**127
    else:
        scale *= 2.0
    return scale.to(DTYPE)


UNPACK_8 = tl.constexpr(
    "{ .reg .b32 a, b, s; "
    "and.b32 s, $4, 0x80808080; shr.b32 a, $4, 3; and.b32 a, a, 0x0E0E0E0E; or.b32 a, a, s; "
    "shl.b32 s, $4, 4; and.b32 s, s, 0x80808080; shl.b32 b, $4, 1; and.b32 b, b, 0x0E0E0E0E; or.b32 b, b, s; "
    "prmt.b32 s, b, 0, 0x2404; mul.f16x2 $0, s, $5; prmt.b32 s, a, 0, 0x2404; mul.f16x2 $1, s, $5; "
    "and.b32 b, b, 0xFF00FF00; mul.f16x2 $2, b, $5; and.b32 a, a, 0xFF00FF00; mul.f16x2 $3, a, $5; }"
)
"""Eight E2M1 codes of two words at once: the upper bytes of float16s, of even and of odd codes, then halves."""


@triton.jit
def decode_latent(items, scale, DTYPE: tl.constexpr):
    """Decode words of four E2M1 values, times their block scales: in float16 all four parts at once."""
    if floats.HAS_PTX and tl.float16 == DTYPE:
        # The dtypes stand in the call, because Triton 3.9 does not see the tuple in a constexpr.
        parts = tl.inline_asm_elementwise(
            asm=UNPACK_8,
            constraints="=&r,=&r,=&r,=&r,r,r",
            args=[items, scale],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        parts = floats.unpack_e2m1(items, scale, False)
    return parts


DECODER = Decoder(decode, e4m3_scale, parts=4, block=16, fold=128.0, half=torch.float16)
LATENT_DECODER = replace(DECODER, decode=decode_latent)

ENCODERS = {"amax": encode_amax, "sweep": encode_sweep, "4over6": encode_4over6}

CODECS = {
    "nvfp4": Codec(
        ENCODERS,
        DECODER,
        RowEncoder(ENCODERS, 16),
        LatentDecoder(LATENT_DECODER),
        cuda=CudaFormat("NVFP4", 4, 16),
    )
}

"""Codec of NVFP4: E2M1 values, an E4M3 scale for each 16 of them, and one global scale.

Shape suffixes: R rows, D values of a row, B blocks of a row, S values of a block.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from nibble.kernels.codecs import small_floats as floats
from nibble.kernels.codecs.base import Codec, CudaFormat, Decoder, LatentDecoder, RowEncoder


@triton.jit
def encode(x_RD, scale_R1):
    """Encode rows: values are divided by their block's scale as it is stored."""
    # --- block scales: amax / 6, in E4M3
    x_RBS = floats.to_blocks(x_RD, 16)
    amax_RB1 = floats.float_of(tl.max(floats.magnitude(x_RBS), 2, keep_dims=True))
    scale_RB1 = tl.broadcast_to(scale_R1[:, :, None], amax_RB1.shape)
    ideal = floats.magnitude(tl.div_rn(amax_RB1, 6.0 * scale_RB1))
    rounded, stored = floats.round_bits(ideal, floats.MAX_E4M3, 3, -6)
    damaged = ideal > floats.INF_BITS
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

CODECS = {
    "nvfp4": Codec(
        encode,
        DECODER,
        RowEncoder(encode, 16),
        LatentDecoder(LATENT_DECODER),
        cuda=CudaFormat("NVFP4", 4, 16),
    )
}

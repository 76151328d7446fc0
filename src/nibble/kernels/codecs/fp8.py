"""Codec of FP8 with one global scale: E4M3 and E5M2."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.runtime import JITFunction

from nibble.kernels.codecs import small_floats as floats
from nibble.kernels.codecs.base import Codec, CudaFormat, Decoder, LatentDecoder, RowEncoder


@triton.jit
def _encode(x_RD, scale_R1, LARGEST: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr):
    y_RD = tl.div_rn(x_RD, tl.broadcast_to(scale_R1, x_RD.shape))
    _, code = floats.round_bits(floats.magnitude(y_RD), LARGEST, MANTISSA, LOWEST)
    # round_bits() makes the largest value of a NaN, so NaN is put back.
    code = tl.where(floats.magnitude(y_RD) > floats.INF_BITS, floats.NAN_FP8, code)
    return ((code | (floats.bits_of(x_RD) >> 24) & 0x80).to(tl.uint8),)


@triton.jit
def encode_e4m3(x_RD, scale_R1):
    """Encode rows as E4M3: saturating, NaN kept."""
    return _encode(x_RD, scale_R1, floats.MAX_E4M3, 3, -6)


@triton.jit
def encode_e5m2(x_RD, scale_R1):
    """Encode rows as E5M2: saturating, NaN kept."""
    return _encode(x_RD, scale_R1, floats.MAX_E5M2, 2, -14)


@triton.jit
def decode_e4m3(items, scale, DTYPE: tl.constexpr):
    """Decode words of two E4M3 values, times 2^-8."""
    return floats.unpack_fp8(items, 0, DTYPE, 4), floats.unpack_fp8(items, 1, DTYPE, 4)


@triton.jit
def decode_e5m2(items, scale, DTYPE: tl.constexpr):
    """Decode words of two E5M2 values."""
    return floats.unpack_fp8(items, 0, DTYPE, 5), floats.unpack_fp8(items, 1, DTYPE, 5)


def _codec(encode: JITFunction, decoder: Decoder, cuda: str) -> Codec:
    encoders = {"": encode}
    return Codec(encoders, decoder, RowEncoder(encoders), LatentDecoder(decoder), cuda=CudaFormat(cuda, 8))


CODECS = {
    "fp8_e4m3": _codec(encode_e4m3, Decoder(decode_e4m3, parts=2, fold=256.0, half=torch.float16), "E4M3"),
    "fp8_e5m2": _codec(encode_e5m2, Decoder(decode_e5m2, parts=2, half=torch.float16), "E5M2"),
}

"""Codec of index keys in FP8: E4M3 values, and a float32 power of two for each key.

Shape suffixes: R rows, D values of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nibble.kernels.codecs.base import Codec, Decoder, IndexDecoder, RowEncoder
from nibble.kernels.codecs.ds_mla import encode_blocks
from nibble.kernels.codecs.small_floats import to_blocks, unpack_fp8

MIN_SCALE = tl.constexpr(1e-4 / 448.0)


@triton.jit
def encode(x_RD, scale_R1):
    """Encode keys; a whole row is one block."""
    return encode_blocks(to_blocks(x_RD, x_RD.shape[1]), MIN_SCALE)


@triton.jit
def decode(items, scale, DTYPE: tl.constexpr):
    """Decode words of two E4M3 values to the values themselves: no dtype's range is too small for them."""
    low, high = unpack_fp8(items, 0, DTYPE, 4), unpack_fp8(items, 1, DTYPE, 4)
    return (low * 256.0).to(DTYPE), (high * 256.0).to(DTYPE)


CODECS = {
    "index_fp8": Codec(
        row=RowEncoder(encode, 0), index=IndexDecoder(Decoder(decode, parts=2), scaled=True, bytes=True)
    )
}

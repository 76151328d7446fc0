"""Codecs of what DeepSeek's sparse attention caches: latents with BF16 rotary values, and index keys.

- fp8_ds_mla: E4M3 values with a float32 power of two for each 128 of them; rotary values in a plane of their own.
- nvfp4_ds_mla: NVFP4 values; rotary values likewise.
- index_fp8: E4M3 values, and a float32 power of two for each key.

Shape suffixes: R rows, D values of a row, B blocks of a row, S values of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nibble.kernels.codecs import base, nvfp4
from nibble.kernels.codecs import small_floats as floats
from nibble.kernels.codecs.base import HEADS, RANK, ROPE, TILE, CudaLatent

MIN_AMAX = tl.constexpr(1e-4)
MAX_SCALE = tl.constexpr(2.0**118)


@triton.jit
def encode_blocks(x_RBS, LEAST: tl.constexpr):
    """Encode blocks as E4M3 with a float32 scale each: amax / 448, but LEAST at least, up to a power of two."""
    # --- scales
    amax = tl.max(floats.magnitude(x_RBS), 2, keep_dims=True)
    damaged = amax > floats.INF_BITS
    ideal = tl.div_rn(floats.float_of(tl.where(damaged, 0, amax)), tl.full(amax.shape, 448.0, tl.float32))
    # rounded up by its bits, and undone by its inverse: both are exact
    bits = (floats.bits_of(tl.minimum(tl.maximum(ideal, LEAST), MAX_SCALE)) + 0x7FFFFF) & floats.INF_BITS
    # --- values
    y_RD = floats.to_rows(x_RBS * floats.float_of((254 << 23) - bits))
    _, code = floats.round_bits(floats.magnitude(y_RD), floats.MAX_E4M3, 3, -6)
    # NaN is kept in the codes and scale of its block, with the sign of a code that was NaN itself
    damaged_RD = floats.to_rows(tl.broadcast_to(damaged, x_RBS.shape))
    sign = (floats.bits_of(y_RD) >> 24) & 0x80
    nan_RD = floats.magnitude(y_RD) > floats.INF_BITS
    code = tl.where(damaged_RD, floats.NAN_FP8 | tl.where(nan_RD, sign, 0), code | sign)
    return code.to(tl.uint8), floats.to_rows(floats.float_of(tl.where(damaged, 0x7FC00000, bits)))


@triton.jit
def encode(x_RD, scale_R1):
    """Encode the latent proper of fp8_ds_mla."""
    return encode_blocks(floats.to_blocks(x_RD, 128), MIN_AMAX)


@triton.jit
def decode(items, scale, DTYPE: tl.constexpr):
    """Decode words of two E4M3 values, times their block scales and 2^-8."""
    return floats.unpack_fp8(items, 0, DTYPE, 4) * scale, floats.unpack_fp8(items, 1, DTYPE, 4) * scale


@triton.jit
def float_scale(codes, DTYPE: tl.constexpr):
    """Return float32 block scales in DTYPE."""
    return codes.to(DTYPE)


def _cuda_fp8(warpgroups: int, pitch: int) -> CudaLatent:
    """Return the traits of mla.cu. pitch: bytes of a token's values and block scales."""
    # of each warpgroup two tiles of values and one of rotary values
    tiles = TILE * (2 * pitch + 2 * ROPE)
    # then queries and weights of tiles, or sums on their way from one warpgroup to another
    meeting = max(2 * HEADS * (RANK + ROPE) + warpgroups * 2 * (2 * TILE * HEADS), 4 * HEADS * RANK)
    return CudaLatent("mla.cu", (("WARPGROUPS", warpgroups),), 128 * warpgroups, warpgroups * tiles + meeting)


def _cuda_fp4(warpgroups: int, depth: int) -> CudaLatent:
    """Return the traits of mla_fp4.cu. depth: words of a row whose products may be in flight."""
    # of each warpgroup a tile as it is stored and as float16, weights, and maxima
    tiles = warpgroups * TILE * (2 * RANK + 2 * HEADS + RANK // 2 + RANK // 16 + 2 * ROPE)
    maxima = warpgroups * (4 + 2) * 4 * HEADS
    # queries, maxima of late, and sums
    rest = (
        2 * 2 * HEADS * (RANK + ROPE) + 4 * 4 * HEADS + 8 * (13 * warpgroups + 2) + 4 * 4 * (warpgroups + 2)
    )
    macros = (("WARPGROUPS", warpgroups), ("DEPTH", depth))
    return CudaLatent("mla_fp4.cu", macros, 128 * (warpgroups + 2), tiles + maxima + rest, in_runs=True)


MIN_INDEX_SCALE = tl.constexpr(1e-4 / 448.0)


@triton.jit
def encode_index(x_RD, scale_R1):
    """Encode keys; a whole row is one block."""
    return encode_blocks(floats.to_blocks(x_RD, x_RD.shape[1]), MIN_INDEX_SCALE)


@triton.jit
def decode_index(items, scale, DTYPE: tl.constexpr):
    """Decode words of two E4M3 values to the values themselves: no dtype's range is too small for them."""
    low, high = floats.unpack_fp8(items, 0, DTYPE, 4), floats.unpack_fp8(items, 1, DTYPE, 4)
    return (low * 256.0).to(DTYPE), (high * 256.0).to(DTYPE)


DECODER = base.Decoder(decode, float_scale, parts=2, block=128, fold=256.0)

CODECS = {
    "fp8_ds_mla": base.Codec(
        row=base.RowEncoder({"": encode}, 128, rope_apart=True),
        latent=base.LatentDecoder(DECODER, rope_apart=True),
        cuda_latent=_cuda_fp8(warpgroups=2, pitch=544),
    ),
    "nvfp4_ds_mla": base.Codec(
        row=base.RowEncoder(nvfp4.ENCODERS, 16, rope_apart=True),
        latent=base.LatentDecoder(nvfp4.LATENT_DECODER, rope_apart=True),
        cuda_latent=_cuda_fp4(warpgroups=2, depth=2),
    ),
    "index_fp8": base.Codec(
        row=base.RowEncoder({"": encode_index}, 0),
        index=base.IndexDecoder(base.Decoder(decode_index, parts=2), scaled=True, bytes=True),
    ),
}

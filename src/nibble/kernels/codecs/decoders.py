"""Decoders: how each format's stored words become a tile of floats, inside a kernel that reads pages.

EXTENSION POINT: an entry of DECODERS gives a format its fused attention and gather. The values are those of the
format's `decode` in nibble/formats, which is the definition. Owns the arithmetic of one tile; must not know of pages,
slots or attention.

A packed format is read in words of 16 bits, each of which holds `parts` values of a row: 4 of E2M1, 2 of FP8. A
decoder returns one tile per part, and part j has the values j, j + parts, j + 2 * parts... of the row: a sum over a row
is a sum over its parts, so attention permutes the query once instead of interleaving every tile. Two neighbouring
words stand in one register wherever the tile came from, and PTX decodes both at once (ptx.py).

Block scales are decoded apart, before they are spread over the words that share them. What is common to a whole stream
stays off the element path: the global scale, and a power of two (`fold`) by which decoded values are too small. Nothing
needs FP8 instructions, which GPUs before SM89 lack.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.runtime import JITFunction

from nibble.kernels.codecs.ptx import e2m1_ptx, fp8_ptx

HAS_PTX = tl.constexpr(not triton.knobs.runtime.interpret)
"""The interpreter has no PTX: there the same bits are moved by plain operations."""
TWO_126 = tl.constexpr(2.0**126)


@triton.jit
def e4m3(codes):
    """int16 codes -> float16 values times 2^-8. A NaN's magnitude carries into the exponent's top bit."""
    magnitude = (codes & 0x7F) << 7
    magnitude |= (magnitude + 0x80) & 0x4000
    return (magnitude | (codes & 0x80) << 8).to(tl.float16, bitcast=True)


@triton.jit
def e2m1(words, scale, PART: tl.constexpr, WIDE: tl.constexpr):
    """Codes PART of words, times their scales, in the scales' dtype; in float16 times 2^-14 too, in bfloat16 times
    2^-126 if not WIDE.

    The three bits of a magnitude are the lowest of an exponent and the highest of a mantissa: shifted there they are
    the value, subnormals included, but for the bias of the exponent.
    """
    if HAS_PTX and scale.dtype != tl.float32:
        PTX: tl.constexpr = e2m1_ptx(PART, scale.dtype == tl.float16, WIDE)
        values = tl.inline_asm_elementwise(PTX, "=r,r,r", [words, scale], scale.dtype, is_pure=True, pack=2)
    elif scale.dtype == tl.float16:
        codes = words >> 4 * PART
        values = ((codes & 7) << 9 | (codes & 8) << 12).to(tl.float16, bitcast=True) * scale
    else:
        codes = words.to(tl.int32) >> 4 * PART
        values = ((codes & 7) << 22 | (codes & 8) << 28).to(tl.float32, bitcast=True) * TWO_126 * scale
    return values


@triton.jit
def e2m1_parts(words, scale, WIDE: tl.constexpr):
    a, b = e2m1(words, scale, 0, WIDE), e2m1(words, scale, 1, WIDE)
    return a, b, e2m1(words, scale, 2, WIDE), e2m1(words, scale, 3, WIDE)


@triton.jit
def fp8(words, PART: tl.constexpr, DTYPE: tl.constexpr, EXPONENT: tl.constexpr):
    """FP8 values with so many bits of exponent, from byte PART of words; E4M3 times 2^-8."""
    if HAS_PTX:
        IS_BF16: tl.constexpr = tl.bfloat16 == DTYPE
        PTX: tl.constexpr = fp8_ptx(PART, EXPONENT, not IS_BF16)
        bits = tl.inline_asm_elementwise(PTX, "=r,r", [words], tl.int16, is_pure=True, pack=2)
        values = bits.to(tl.bfloat16 if IS_BF16 else tl.float16, bitcast=True)
    elif EXPONENT == 4:
        values = e4m3(words >> 8 * PART)
    else:
        values = (words << 8 - 8 * PART & -256).to(tl.float16, bitcast=True)  # the upper half of a float16
    return values.to(DTYPE)


@triton.jit
def no_scale(codes, DTYPE: tl.constexpr):
    return codes


@triton.jit
def e4m3_scale(codes, DTYPE: tl.constexpr):
    """Times what leaves 2^-7 of e2m1's factor, in every dtype."""
    scale = e4m3(codes.to(tl.int16)).to(tl.float32)
    if tl.float16 == DTYPE:
        scale *= 2.0**15
    elif tl.bfloat16 == DTYPE:
        scale *= 2.0**127
    else:
        scale *= 2.0
    return scale.to(DTYPE)


@triton.jit
def e8m0_scale(codes, DTYPE: tl.constexpr):
    """Powers of two; 0 is 2^-127, 255 is NaN. In float32 for float16, whose range has no room for e2m1's factor."""
    bits = codes.to(tl.int32) << 23
    bits = tl.where(codes == 0, 1 << 22, tl.where(codes == 255, 0x7FC00000, bits))
    scale = bits.to(tl.float32, bitcast=True)
    if tl.bfloat16 == DTYPE:
        scale = scale.to(tl.bfloat16)
    return scale


@triton.jit
def plain(words, scale, DTYPE: tl.constexpr):
    return (words.to(DTYPE),)


@triton.jit
def fp8_e4m3(words, scale, DTYPE: tl.constexpr):
    return fp8(words, 0, DTYPE, 4), fp8(words, 1, DTYPE, 4)


@triton.jit
def fp8_e5m2(words, scale, DTYPE: tl.constexpr):
    return fp8(words, 0, DTYPE, 5), fp8(words, 1, DTYPE, 5)


@triton.jit
def nvfp4(words, scale, DTYPE: tl.constexpr):
    return e2m1_parts(words, scale, False)


@triton.jit
def mx(words, scale, DTYPE: tl.constexpr):
    a, b, c, d = e2m1_parts(words, scale, True)
    return a.to(DTYPE), b.to(DTYPE), c.to(DTYPE), d.to(DTYPE)


@dataclass(frozen=True, slots=True)
class Decoder:
    """decode: @triton.jit (words, scale, DTYPE) -> a tuple of `parts` tiles of the words' shape.
    scale: @triton.jit (codes, DTYPE) -> block scales for `decode`, which gets them in the words' shape.

    words: int16, or the plane's own values where `parts` is 1. block: values that share a block scale, 0 for none.
    fold: what decoded values must still be multiplied by. half: the dtype that decodes with the least work, if any, and
    holds every value exactly.
    """

    decode: JITFunction
    scale: JITFunction = no_scale
    parts: int = 1
    block: int = 0
    fold: float = 1.0
    half: torch.dtype | None = None

    def serves(self, dim: int) -> bool:
        """Whether rows of `dim` values are whole words and blocks."""
        return dim % self.parts == 0 and dim % max(self.block, 1) == 0


DECODERS: dict[str, Decoder] = {
    "fp32": Decoder(plain),
    "bf16": Decoder(plain),
    "fp16": Decoder(plain),
    "fp8_e4m3": Decoder(fp8_e4m3, parts=2, fold=256.0, half=torch.float16),
    "fp8_e5m2": Decoder(fp8_e5m2, parts=2, half=torch.float16),
    "nvfp4": Decoder(nvfp4, e4m3_scale, parts=4, block=16, fold=128.0, half=torch.float16),
    "mxfp4": Decoder(mx, e8m0_scale, parts=4, block=32),
    "fp4_mx16": Decoder(mx, e8m0_scale, parts=4, block=16),
}
"""The decoder of each format that has one."""

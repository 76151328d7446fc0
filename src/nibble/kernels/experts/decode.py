"""Words of experts' codes (matrices.py) unpacked in Triton.

PTX moves the codes of two words at once, which lie in one register, and multiplies pairs of bfloat16 values; GPUs
before SM90 do that only by fused multiply-add, so -0.0 is added. E4M3's NaN becomes 480.

Shape suffixes: N outputs, W words of a row, G groups of inputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nibble.kernels.codecs.small_floats import HAS_PTX, TWO_120

NVFP4_REST = tl.constexpr(9)
"""E2M1 values times E4M3 scales come times 2^-9: all of 2^126 beside the largest scale is beyond bfloat16."""
_REGISTERS = "{ .reg .b32 a, b, z; "
_PRODUCT = " mov.b32 z, 0x80008000; "
E4M3_PTX = tl.constexpr(
    _REGISTERS + _PRODUCT + "shl.b32 a, $2, 8; and.b32 a, a, 0x80008000; shl.b32 b, $2, 4; "
    "lop3.b32 a, b, 0x07F007F0, a, 0xEA; fma.rn.bf16x2 $0, a, $3, z; "
    "and.b32 a, $2, 0x80008000; shr.b32 b, $2, 4; lop3.b32 a, b, 0x07F007F0, a, 0xEA; fma.rn.bf16x2 $1, a, $3, z; }"
)
E2M1_PTX = tl.constexpr(
    _REGISTERS + _PRODUCT + "and.b32 a, $4, 0x81C081C0; fma.rn.bf16x2 $0, a, $5, z; "
    "shl.b32 a, $4, 3; and.b32 a, a, 0x81C081C0; fma.rn.bf16x2 $1, a, $5, z; "
    "shl.b32 a, $4, 6; and.b32 a, a, 0x81C081C0; fma.rn.bf16x2 $2, a, $5, z; "
    "shr.b32 a, $4, 8; and.b32 a, a, 0x006C006C; mul.lo.u32 a, a, 0x421; and.b32 a, a, 0x81C081C0; "
    "fma.rn.bf16x2 $3, a, $5, z; }"
)
UINT4_PTX = tl.constexpr(
    # 128 + code, of which 136 is taken away.
    _REGISTERS
    + "mov.b32 z, 0xC308C308; mov.b32 b, 0x3F803F80; lop3.b32 a, $4, 0x000F000F, 0x43004300, 0xEA; "
    "fma.rn.bf16x2 $0, a, b, z; "
    "shr.b32 a, $4, 4; lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $1, a, b, z; "
    "shr.b32 a, $4, 8; lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $2, a, b, z; "
    "shr.b32 a, $4, 12; lop3.b32 a, a, 0x000F000F, 0x43004300, 0xEA; fma.rn.bf16x2 $3, a, b, z; }"
)


@triton.jit
def factors(scale, CODES: tl.constexpr, SCALES: tl.constexpr):
    """Return bfloat16 factors that make values of unpacked codes, of bytes of scales; see NVFP4_REST."""
    if SCALES == "e8m0":
        # 2^(scale - 127), times 2^126 or 2^120.
        exponent = scale.to(tl.int16) + (126 if CODES == "e2m1" else 120)
        factor = (exponent << 7).to(tl.bfloat16, bitcast=True)
    else:
        bits = scale.to(tl.int32)
        value = ((bits & 0x7F) << 20 | (bits & 0x80) << 24).to(tl.float32, bitcast=True) * TWO_120
        factor = (value * 2.0 ** (126 - NVFP4_REST)).to(tl.bfloat16)
    return factor


@triton.jit
def _float(bits):
    """Return the upper halves of float32 values as such."""
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def unpack(codes_NW, factor, CODES: tl.constexpr, DTYPE: tl.constexpr):
    """Return the values of each of a word's codes, times factors; integers are not multiplied."""
    if CODES == "e4m3":
        if HAS_PTX:
            parts = tl.inline_asm_elementwise(
                asm=E4M3_PTX,
                constraints="=&r,=&r,r,r",
                args=[codes_NW, factor],
                dtype=(tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=2,
            )
        else:
            x, f = codes_NW.to(tl.int32), factor.to(tl.float32)
            low = _float((x & 0x7F) << 4 | (x & 0x80) << 8) * f
            parts = (low.to(DTYPE), (_float((x >> 4) & 0x7F0 | x & 0x8000) * f).to(DTYPE))
    elif HAS_PTX:
        PTX: tl.constexpr = E2M1_PTX if CODES == "e2m1" else UINT4_PTX
        parts = tl.inline_asm_elementwise(
            asm=PTX,
            constraints="=&r,=&r,=&r,=&r,r,r",
            args=[codes_NW, factor],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    elif CODES == "e2m1":
        x, f = codes_NW.to(tl.int32), factor.to(tl.float32)
        last = ((x >> 8) & 0x6C) * 0x421 & 0x81C0
        parts = (
            (_float(x & 0x81C0) * f).to(DTYPE),
            (_float((x << 3) & 0x81C0) * f).to(DTYPE),
            (_float((x << 6) & 0x81C0) * f).to(DTYPE),
            (_float(last) * f).to(DTYPE),
        )
    else:
        x = codes_NW.to(tl.int32)
        parts = (
            ((x & 15) - 8).to(DTYPE),
            (((x >> 4) & 15) - 8).to(DTYPE),
            (((x >> 8) & 15) - 8).to(DTYPE),
            (((x >> 12) & 15) - 8).to(DTYPE),
        )
    return parts

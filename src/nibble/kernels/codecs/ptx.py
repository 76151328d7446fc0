"""PTX for decoders: a register that holds two 16-bit words ($1) -> a register of two floats ($0).

Evaluated while a kernel is compiled. Codes of both words are moved at once by shifts, and masked so that neither
reaches into the other. GPUs before SM90 multiply bfloat16 only by fused multiply-add, so -0.0 is added there.
"""

from __future__ import annotations

import triton


@triton.constexpr_function
def _shift(to: str, by: int) -> str:
    """Moves the bits of $1 up, or down where negative."""
    return f"shl.b32 {to}, $1, {by};" if by >= 0 else f"shr.b32 {to}, $1, {-by};"


@triton.constexpr_function
def _bf16_product(to: str, factor: str) -> str:
    """to = m * factor, which is a register or a number. Braces keep its own registers to itself."""
    return f"{{ .reg .b32 f, z; mov.b32 f, {factor}; mov.b32 z, 0x80008000; fma.rn.bf16x2 {to}, m, f, z; }}"


@triton.constexpr_function
def e2m1_ptx(part: int, fp16: bool, wide: bool) -> str:
    """Codes `part` times the pair of scales $2; where `wide`, times 2^126 before that, in bfloat16."""
    signs = f"{_shift('s', 12 - 4 * part)} and.b32 s, s, 0x80008000;"
    if fp16:
        codes = f"{_shift('m', 9 - 4 * part)} {signs} lop3.b32 m, m, 0x0E000E00, s, 0xEA;"
        product = "mul.f16x2 $0, m, $2;"
    else:
        codes = f"{_shift('m', 6 - 4 * part)} {signs} lop3.b32 m, m, 0x01C001C0, s, 0xEA;"
        product = (_bf16_product("m", "0x7E807E80") if wide else "") + _bf16_product("$0", "$2")
    return f"{{ .reg .b32 m, s; {codes} {product} }}"


@triton.constexpr_function
def fp8_ptx(part: int, exponent: int, fp16: bool) -> str:
    """Bytes `part`, with so many bits of exponent. E4M3 becomes floats times 2^-8, E5M2 is exact.

    Where the exponent grows, adding the lowest bit of an exponent (E5M2) or of a mantissa (E4M3) carries out of a
    magnitude that is NaN or infinite, and out of no other; the carry then fills what the exponent has gained.
    """
    if exponent == 5 and fp16:  # the upper half of a float16
        return f"{{ .reg .b32 c; {_shift('c', 8 - 8 * part)} and.b32 $0, c, 0xFF00FF00; }}"
    if exponent == 5:
        down, mask, one, carry, fill, product = 3, "0x0FE00FE0", "0x00800080", "0x10001000", 7, "0x77807780"
    elif fp16:
        down, mask, one, carry, fill, product = 1, "0x3F803F80", "0x00800080", "0x40004000", 1, ""
    else:
        down, mask, one, carry, fill, product = 4, "0x07F007F0", "0x00100010", "0x08000800", 15, "0x77807780"
    magnitude = f"{_shift('c', 8 - 8 * part)} shr.b32 m, c, {down}; and.b32 m, m, {mask};"
    special = f"add.u32 n, m, {one}; and.b32 n, n, {carry}; mad.lo.u32 m, n, {fill}, m;"
    signed = "lop3.b32 m, c, 0x80008000, m, 0xEA;"
    moved = _bf16_product("$0", product) if product else "mov.b32 $0, m;"
    return f"{{ .reg .b32 c, m, n; {magnitude} {special} {signed} {moved} }}"

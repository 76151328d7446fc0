"""The arithmetic of 4- and 8-bit floats that codecs share: round to them, and unpack words of them.

Comparisons are made on the bits of magnitudes, as integers: they have the order of the values, with NaN above
infinity, on every machine. Divisions are IEEE's.

Words are unpacked by PTX, which functions write while a kernel is compiled: from a register that holds two 16-bit words
($1) to a register of two floats ($0). Codes of both words are moved at once by shifts, and masked so that neither
reaches into the other. GPUs before SM90 multiply bfloat16 only by fused multiply-add, so -0.0 is added there.

Shape suffixes: R rows, D values of a row, B blocks of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def _shift_ptx(to: str, by: int) -> str:
    """Return PTX that moves the bits of $1 up, or down where negative."""
    return f"shl.b32 {to}, $1, {by};" if by >= 0 else f"shr.b32 {to}, $1, {-by};"


@triton.constexpr_function
def _bf16_product_ptx(to: str, factor: str) -> str:
    """Return PTX of to = m * factor, a register or a number. Braces keep its own registers to itself."""
    return f"{{ .reg .b32 f, z; mov.b32 f, {factor}; mov.b32 z, 0x80008000; fma.rn.bf16x2 {to}, m, f, z; }}"


@triton.constexpr_function
def e2m1_ptx(part: int, fp16: bool, wide: bool) -> str:
    """Return PTX of codes `part` times the pair of scales $2; where `wide`, times 2^126 before that, in bfloat16."""
    signs = f"{_shift_ptx('s', 12 - 4 * part)} and.b32 s, s, 0x80008000;"
    if fp16:
        codes = f"{_shift_ptx('m', 9 - 4 * part)} {signs} lop3.b32 m, m, 0x0E000E00, s, 0xEA;"
        product = "mul.f16x2 $0, m, $2;"
    else:
        codes = f"{_shift_ptx('m', 6 - 4 * part)} {signs} lop3.b32 m, m, 0x01C001C0, s, 0xEA;"
        product = (_bf16_product_ptx("m", "0x7E807E80") if wide else "") + _bf16_product_ptx("$0", "$2")
    return f"{{ .reg .b32 m, s; {codes} {product} }}"


@triton.constexpr_function
def fp8_ptx(part: int, exponent: int, fp16: bool) -> str:
    """Return PTX of bytes `part`, with so many bits of exponent. E4M3 becomes floats times 2^-8, E5M2 is exact.

    Where the exponent grows, adding the lowest bit of an exponent (E5M2) or of a mantissa (E4M3) carries out of a
    magnitude that is NaN or infinite, and out of no other; the carry then fills what the exponent has gained.
    """
    if exponent == 5 and fp16:  # the upper half of a float16
        return f"{{ .reg .b32 c; {_shift_ptx('c', 8 - 8 * part)} and.b32 $0, c, 0xFF00FF00; }}"
    if exponent == 5:
        down, mask, one, carry, fill, product = 3, "0x0FE00FE0", "0x00800080", "0x10001000", 7, "0x77807780"
    elif fp16:
        down, mask, one, carry, fill, product = 1, "0x3F803F80", "0x00800080", "0x40004000", 1, ""
    else:
        down, mask, one, carry, fill, product = 4, "0x07F007F0", "0x00100010", "0x08000800", 15, "0x77807780"
    magnitude = f"{_shift_ptx('c', 8 - 8 * part)} shr.b32 m, c, {down}; and.b32 m, m, {mask};"
    special = f"add.u32 n, m, {one}; and.b32 n, n, {carry}; mad.lo.u32 m, n, {fill}, m;"
    signed = "lop3.b32 m, c, 0x80008000, m, 0xEA;"
    moved = _bf16_product_ptx("$0", product) if product else "mov.b32 $0, m;"
    return f"{{ .reg .b32 c, m, n; {magnitude} {special} {signed} {moved} }}"


ABS_MASK = tl.constexpr(0x7FFFFFFF)
INF_BITS = tl.constexpr(0x7F800000)  # also the bits of the exponent
MAX_E2M1 = tl.constexpr(0x40C00000)  # 6.0
MAX_E4M3 = tl.constexpr(0x43E00000)  # 448.0
MAX_E5M2 = tl.constexpr(0x47600000)  # 57344.0
NAN_FP8 = tl.constexpr(0x7F)
MOST_UNITS = tl.constexpr(0x45C00000)  # 6144.0
TWO_23, TWO_63, TWO_120, TWO_126 = (tl.constexpr(2.0**n) for n in (23, 63, 120, 126))
HAS_PTX = tl.constexpr(not triton.knobs.runtime.interpret)
"""The interpreter has no PTX: there the same bits are moved by plain operations."""


# ---- encoding --------------------------------------------------------------------------------------------------------


@triton.jit
def bits_of(x):
    """Return the bits of float32 values as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    """Return int32 bits as float32 values."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def magnitude(x):
    """Return the bits of |x|."""
    return bits_of(x) & ABS_MASK


@triton.jit
def round_bits(bits, LARGEST: tl.constexpr, MANTISSA: tl.constexpr, LOWEST: tl.constexpr):
    """Round magnitudes to a small float; ties to even, NaN to LARGEST.

    Args:
        bits: Bits of float32 magnitudes.
        LARGEST: Bits of the value at which the small float saturates.
        MANTISSA: Bits of its mantissa.
        LOWEST: Its smallest exponent, below which it is subnormal.

    Returns:
        The rounded values in float32, and their codes.
    """
    SHIFT: tl.constexpr = 23 - MANTISSA
    MORE: tl.constexpr = -((127 + SHIFT + LOWEST) << MANTISSA) % 128
    bits = tl.minimum(bits, LARGEST)
    # A power of two that is 2^SHIFT times the value's own leaves no bits behind the last of the mantissa, so adding it
    # rounds. Some more steps (MORE) are added with it, so that step count and exponent sum up to the code: an even
    # number of them, which leaves ties as they are.
    lift = float_of(tl.maximum(bits, (127 + LOWEST) << 23) & INF_BITS) * ((1 << SHIFT) + (MORE >> MANTISSA))
    lifted = float_of(bits) + lift
    # what now stands in the low bits counts steps, and the exponent says how large they are
    code = bits_of(lifted) + (bits_of(lifted) >> SHIFT)
    return lifted - lift, code & 0x7F


@triton.jit
def whole_units(x):
    """Round magnitudes to whole numbers, at most MOST_UNITS, and return them times 2^-63, for squared_error().

    See least_error() in formats/base.py.
    """
    # Compared as integers, which makes MOST_UNITS of NaN. From 2^23 on float32 has no room behind the point.
    return ((float_of(tl.minimum(bits_of(x), MOST_UNITS)) + TWO_23) - TWO_23) * (1 / TWO_63)


@triton.jit
def squared_error(units_RBS, step_RB1, SATURATES: tl.constexpr):
    """Return the squared error of blocks under a scale, times 2^-126.

    But for powers of two all is whole numbers, so a sum is exact as long as 24 bits hold it, whatever its order and
    whatever is fused. How a quotient is rounded does not matter: it can only decide between codes of the same error.

    Args:
        units_RBS: From whole_units().
        step_RB1: The scale in units, 0 included.
        SATURATES: Whether quotients of 7 and more may occur, which E2M1 would round to 8.
    """
    # Quotients times 2^-126: their exponents are those of E2M1, subnormal ones too, so the upper ten bits are codes.
    t = bits_of(units_RBS * (1 / TWO_63 / tl.maximum(step_RB1, 1.0)))
    code = (t + 0x200000) & -0x400000
    if SATURATES:
        code = tl.minimum(code, 7 << 22)
    error = units_RBS - float_of(code) * (step_RB1 * TWO_63)
    return tl.sum(error * error, 2, keep_dims=True)


@triton.jit
def to_blocks(x_RD, SIZE: tl.constexpr):
    """Reshape [R, D] -> [R, B, SIZE]."""
    return tl.reshape(x_RD, [x_RD.shape[0], x_RD.shape[1] // SIZE, SIZE])


@triton.jit
def to_rows(x):
    """Reshape [R, B, 1] -> [R, B], and [R, B, SIZE] -> [R, D]."""
    return tl.reshape(x, [x.shape[0], x.shape[1] * x.shape[2]])


@triton.jit
def pack_e2m1(codes_RD):
    """Pack 4-bit codes, two to a byte, the even index in the low half."""
    even, odd = tl.split(to_blocks(codes_RD, 2))
    return (even + odd * 16).to(tl.uint8)


# ---- decoding --------------------------------------------------------------------------------------------------------


@triton.jit
def e4m3_to_fp16(codes):
    """Convert int16 codes of E4M3 to float16 values times 2^-8."""
    bits = (codes & 0x7F) << 7
    bits |= (bits + 0x80) & 0x4000  # a NaN's magnitude carries into the exponent's top bit
    return (bits | (codes & 0x80) << 8).to(tl.float16, bitcast=True)


@triton.jit
def _unpack_e2m1(items, scale, PART: tl.constexpr, WIDE: tl.constexpr):
    """Unpack codes PART of words, times their scales, in the scales' dtype.

    In float16 they are times 2^-14 too, in bfloat16 times 2^-126 if not WIDE.
    """
    # The three bits of a magnitude are the lowest of an exponent and the highest of a mantissa: shifted there they are
    # the value, subnormals included, but for the bias of the exponent.
    if HAS_PTX and scale.dtype != tl.float32:
        PTX: tl.constexpr = e2m1_ptx(PART, scale.dtype == tl.float16, WIDE)
        values = tl.inline_asm_elementwise(PTX, "=r,r,r", [items, scale], scale.dtype, is_pure=True, pack=2)
    elif scale.dtype == tl.float16:
        codes = items >> 4 * PART
        values = ((codes & 7) << 9 | (codes & 8) << 12).to(tl.float16, bitcast=True) * scale
    else:
        codes = items.to(tl.int32) >> 4 * PART
        values = ((codes & 7) << 22 | (codes & 8) << 28).to(tl.float32, bitcast=True) * TWO_126 * scale
    return values


@triton.jit
def unpack_e2m1(items, scale, WIDE: tl.constexpr):
    """Unpack the four E2M1 values of each word, times their scales and a power of two (see _unpack_e2m1)."""
    a, b = _unpack_e2m1(items, scale, 0, WIDE), _unpack_e2m1(items, scale, 1, WIDE)
    return a, b, _unpack_e2m1(items, scale, 2, WIDE), _unpack_e2m1(items, scale, 3, WIDE)


@triton.jit
def unpack_fp8(items, PART: tl.constexpr, DTYPE: tl.constexpr, EXPONENT: tl.constexpr):
    """Unpack FP8 values with so many bits of exponent, from byte PART of words; E4M3 times 2^-8."""
    if HAS_PTX:
        IS_BF16: tl.constexpr = tl.bfloat16 == DTYPE
        PTX: tl.constexpr = fp8_ptx(PART, EXPONENT, not IS_BF16)
        bits = tl.inline_asm_elementwise(PTX, "=r,r", [items], tl.int16, is_pure=True, pack=2)
        values = bits.to(tl.bfloat16 if IS_BF16 else tl.float16, bitcast=True)
    elif EXPONENT == 4:
        values = e4m3_to_fp16(items >> 8 * PART)
    else:
        values = (items << 8 - 8 * PART & -256).to(tl.float16, bitcast=True)  # the upper half of a float16
    return values.to(DTYPE)

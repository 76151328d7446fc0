// Words of codes of experts' matrices (matrices.py), unpacked for tensor cores; and gates.
//
// Macros:
//   CODES    0: E4M3, 1: E2M1, 2: unsigned 4-bit integers whose zero is 8, 3: bfloat16, without scales
//   SCALES   of groups; 0: bfloat16, 1: E4M3 beside a float32 for each output, 2: E8M0
//   GROUP    inputs of a group; 0: a row is one
//   GATE     what becomes of outputs; 0: nothing, 1: silu(first half) * second half, 2: of each two neighbours the first
//            is clamped from above, the second on both sides, and a * sigmoid(factor * a) * (b + 1) is left

constexpr int BITS = CODES == 0 ? 8 : CODES == 3 ? 16 : 4, PARTS = 16 / BITS;  // codes of a word
constexpr int PIECE = 128 / BITS;                                     // inputs of 16 bytes of codes
constexpr int RUN = GROUP == 16 ? 4 : 8;                              // inputs that follow one another in words
constexpr bool IS_PLAIN = CODES == 3;                                 // codes are values
constexpr bool OF_CODES = SCALES != 0;                                // scales multiply codes
constexpr bool OF_STEP = !OF_CODES && GROUP != 0;                     // scales multiply the sums of a step
constexpr int GROUPS = OF_CODES && GROUP < PIECE ? PIECE / GROUP : 1;  // of a lane's inputs
static_assert(!OF_STEP || GROUP % (4 * PIECE) == 0, "what is multiplied at a time has one scale");

// E4M3 comes times 2^-120, which factors undo; where there are none, x is times 2^60, and sums.
// Of E2M1 and E4M3 scales, factors leave 2^9 to the sums: with all of it the largest would be beyond bfloat16.
constexpr bool SCALES_X = CODES == 0 && !OF_CODES;
constexpr float UNDO = SCALES_X ? 0x1p60f : SCALES == 1 ? 0x1p9f : 1;

template <int BYTES>
DEVICE void copy_async(u8* to, const u8* from, bool is_there) {
  if (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0],[%1],16,%2;"
                 :: "r"(shared_address(to)), "l"(from), "r"(is_there ? 16 : 0) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0],[%1],%2,%3;"
                 :: "r"(shared_address(to)), "l"(from), "n"(BYTES), "r"(is_there ? BYTES : 0) : "memory");
  }
}

DEVICE u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn.bf16x2 %0,%1,%2,%3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

DEVICE u32 multiply(u32 a, u32 b) { return fma_bf16x2(a, b, 0x80008000); }  // + -0

// The codes of two words, times a factor: for each code of a word a pair of neighbouring inputs.
DEVICE void unpack(u32* pair, u32 words, u32 factor) {
#if CODES == 0
  pair[0] = ((words << 8) & 0x80008000) | ((words << 4) & 0x07F007F0);
  pair[1] = (words & 0x80008000) | ((words >> 4) & 0x07F007F0);
#elif CODES == 3
  pair[0] = words;
#elif CODES == 1
  pair[0] = words & 0x81C081C0;
  pair[1] = (words << 3) & 0x81C081C0;
  pair[2] = (words << 6) & 0x81C081C0;
  pair[3] = (((words >> 8) & 0x006C006C) * 0x421) & 0x81C081C0;
#else
  for (int i = 0; i < 4; i++) {  // 128 + code, of which 136 is taken away
    pair[i] = fma_bf16x2(((words >> (4 * i)) & 0x000F000F) | 0x43004300, 0x3F803F80, 0xC308C308);
  }
#endif
  if (OF_CODES) {
    for (int i = 0; i < PARTS; i++) pair[i] = multiply(pair[i], factor);
  }
}

// The factor of codes, twice, of byte i of a word of scales.
DEVICE u32 factor_of(u32 scales, int i) {
  const u32 byte = (scales >> (8 * i)) & 0xFF;
#if SCALES == 2
  return (byte + (CODES == 1 ? 126 : 120)) * 0x00800080u;
#else
  const float value = __uint_as_float((byte & 0x7F) << 20 | (byte & 0x80) << 24) * 0x1p120f * 0x1p117f;
  return __byte_perm(__float_as_uint(value), 0, 0x3232);
#endif
}

// The input that pair `part` of register r of a piece begins with.
DEVICE constexpr int input_of(int part, int r) { return 2 * r / RUN * (RUN * PARTS) + part * RUN + 2 * r % RUN; }

DEVICE float from_bf16(u16 x) { return __uint_as_float((u32)x << 16); }

DEVICE float sigmoid(float x) { return 1 / (1 + __expf(-x)); }

// What the gate leaves of two outputs. Comparisons let NaN through.
DEVICE float gated(float a, float b, float limit, float factor) {
#if GATE == 2
  a = a > limit ? limit : a;
  b = b > limit ? limit : b < -limit ? -limit : b;
  return a * sigmoid(factor * a) * (b + 1);
#else
  return a * sigmoid(a) * b;
#endif
}

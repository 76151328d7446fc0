// The formats of stored keys and values that decode.cu reads: their sizes, and how their bytes become float16
// pairs.
//
// Needs the macros of decode.cu. All functions of a Format are constant expressions.

enum Format { NVFP4, MXFP4, FP4_MX16, E4M3, E5M2, BF16, FP16 };
#define CONSTANT __host__ __device__ constexpr

constexpr Format KF = K_FORMAT, VF = V_FORMAT;
constexpr int D = HEAD_DIM;
constexpr bool MMA_BF16 = KF == BF16;
static_assert((KF == BF16) == (VF == BF16), "bfloat16 goes with bfloat16: the two need one kind of mma");

// ---- sizes --------------------------------------------------------------------------------------------
CONSTANT int smaller(int a, int b) { return a < b ? a : b; }
CONSTANT int larger(int a, int b) { return a < b ? b : a; }

CONSTANT bool has_e8m0_scales(Format f) { return f == MXFP4 || f == FP4_MX16; }

CONSTANT int bits(Format f) { return f <= FP4_MX16 ? 4 : f <= E5M2 ? 8 : 16; }

// Values that share a scale.
CONSTANT int block(Format f) { return f == MXFP4 ? 32 : 16; }

// Bytes of a token's values, of its scales, and of a tile of both.
CONSTANT int row_bytes(Format f) { return D * bits(f) / 8; }
CONSTANT int scale_bytes(Format f) { return bits(f) == 4 ? D / block(f) : 0; }
CONSTANT int tile_bytes(Format f) { return TILE * (row_bytes(f) + scale_bytes(f)); }

// ---- powers of two that decoding leaves in values -----------------------------------------------------
// Decoded E2M1 is too small by 2^-14. Its scales are multiplied by 2^scale_shift in exchange. E8M0 scales
// must fit float16, so those of keys, which may be large, are shifted less than those of values, which may be
// small.
CONSTANT int scale_shift(Format f, bool is_key) { return has_e8m0_scales(f) ? (is_key ? 4 : 9) : 7; }

// Before SM89 E4M3 is decoded by shifts of bits, which leaves 2^-8.
#if __CUDA_ARCH__ >= 890
constexpr int E4M3_SHIFT = 0;
#else
constexpr int E4M3_SHIFT = 8;
#endif

// What products of decoded values must be multiplied by.
CONSTANT float decode_factor(Format f, bool is_key) {
  return float(1 << (bits(f) == 4 ? 14 - scale_shift(f, is_key) : f == E4M3 ? E4M3_SHIFT : 0));
}

// ---- 16-bit pairs --------------------------------------------------------------------------------------
// A pair of the type that products are computed in.
DEVICE u32 pack_operand(float lo, float hi) { return MMA_BF16 ? pack_bf16(lo, hi) : pack_f16(lo, hi); }

// A pair of the type of queries and output.
DEVICE u32 pack_output(float lo, float hi) { return Q_BF16 ? pack_bf16(lo, hi) : pack_f16(lo, hi); }

// A pair of queries as an operand. bfloat16 reaches further than float16.
DEVICE u32 pack_queries(float lo, float hi) {
  const u32 pair = pack_operand(lo, hi);
  return Q_BF16 && !MMA_BF16 ? clamp_f16x2(pair) : pair;
}

DEVICE void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if (MMA_BF16) {
    mma_bf16(c, a0, a1, a2, a3, b0, b1);
  } else {
    mma_f16(c, a0, a1, a2, a3, b0, b1);
  }
}

// Value i of a pair of queries.
DEVICE float query_value(u32 pair, int i) {
  u16 half = u16(pair >> (16 * i));
  if (Q_BF16) return __uint_as_float(u32(half) << 16);
  float r;
  asm("cvt.f32.f16 %0,%1;" : "=f"(r) : "h"(half));
  return r;
}

// ---- stored bytes to float16 pairs --------------------------------------------------------------------
// Eight E2M1 values n0..n7 -> four pairs (n0,n4) (n1,n5) (n2,n6) (n3,n7), in 11 operations.
DEVICE void decode_e2m1x8(u32 x, u32* pairs) {
  // The upper byte of a float16 holds a value's sign (bit 7) and magnitude (bits 3..1). First all upper bytes
  // of odd and of even values are made, four at a time; then they are spread to halves.
  const u32 SIGNS = 0x80808080u, MAGNITUDES = 0x0E0E0E0Eu;
  u32 odd = ((x >> 3) & MAGNITUDES) | (x & SIGNS);
  u32 even = ((x << 1) & MAGNITUDES) | ((x << 4) & SIGNS);
  pairs[0] = __byte_perm(even, 0, 0x2404);
  pairs[1] = __byte_perm(odd, 0, 0x2404);
  pairs[2] = even & 0xFF00FF00u;
  pairs[3] = odd & 0xFF00FF00u;
}

// FP8 values in bytes 0 and 1 of x -> a pair.
template <Format F>
DEVICE u32 decode_fp8_low(u32 x) {
  if (F == E5M2) return __byte_perm(x, 0, 0x1404);
#if __CUDA_ARCH__ >= 890
  return f16x2_from_e4m3x2(x);
#else
  u32 y = __byte_perm(x, 0, 0x1404);
  return (y & 0x80008000u) | ((y >> 1) & 0x3F803F80u);
#endif
}

// FP8 values in bytes 2 and 3 of x -> a pair.
template <Format F>
DEVICE u32 decode_fp8_high(u32 x) {
  return decode_fp8_low<F>(x >> 16);
}

// Two scale bytes, at bits 0..7 and 16..23 -> a pair, times 2^scale_shift.
template <Format F, bool IS_KEY>
DEVICE u32 decode_scales(u32 x) {
  // The bits of E4M3 are those of a float16 that is 2^-8 times as large. 0x7800 is 2^15.
  if (!has_e8m0_scales(F)) return mul_f16x2(x << 7, 0x78007800u);
  // E8M0 is an exponent alone. It is limited to the exponents from 2^-15, which becomes 0, to 2^15.
  const u32 lowest = (112 - scale_shift(F, IS_KEY)) * 0x10001u;
  const u32 highest = lowest + 30 * 0x10001u;
#if __CUDA_ARCH__ >= 900
  asm("max.u16x2 %0,%0,%1;\nmin.u16x2 %0,%0,%2;" : "+r"(x) : "r"(lowest), "r"(highest));
#else
  x = min(max(x & 0xFFFFu, lowest & 0xFFFFu), highest & 0xFFFFu) |
      (min(max(x >> 16, lowest >> 16), highest >> 16) << 16);
#endif
  return (x - lowest) * 1024u;
}

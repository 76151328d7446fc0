// The products of mla_fp4.cu: wgmma, its operands in shared memory and registers, and what becomes of scores.
//
// Needs mla_fp4_tiles.cuh.

// ---- wgmma --------------------------------------------------------------------------------------------
// m64n16k16. Operand B: 8 x 8 blocks of 128 bytes, two along K, then those of the other eight columns.
// Operand A: in registers, or rows of 128 swizzled bytes that lie across K. A descriptor has 64 bits; its
// upper half is a constant here, and functions take the lower one.
#define ACCUMULATORS                                                                                  \
  "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), \
      "+f"(c[1][3])
constexpr u32 A_LOW = 1 << 16, A_HIGH = 1024 / 16 | 1 << 30, B_LOW = 128 / 16 << 16, B_HIGH = 256 / 16;

DEVICE void wgmma_keys(float (*c)[4], const u32* a, u32 b) {
  asm volatile(
      "{\n.reg .b64 y;\nmov.b64 y,{%12,%13};\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7},{%8,%9,%10,%11},y,1,1,1,0;\n}"
      : ACCUMULATORS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(B_HIGH));
}

DEVICE void wgmma_rope(float (*c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b) {
  asm volatile(
      "{\n.reg .b64 y;\nmov.b64 y,{%12,%13};\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7},{%8,%9,%10,%11},y,1,1,1,0;\n}"
      : ACCUMULATORS : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b), "n"(B_HIGH));
}

DEVICE void wgmma_values(float (*c)[4], u32 a, u32 b) {
  asm volatile(
      "{\n.reg .b64 x,y;\nmov.b64 x,{%8,%10};\nmov.b64 y,{%9,%11};\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7},x,y,1,1,1,1,0;\n}"
      : ACCUMULATORS : "r"(a), "r"(b), "n"(A_HIGH), "n"(B_HIGH));
}

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until at most N groups of products are in flight.
template <int N>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory");
}

// Make stores to shared memory visible to wgmma.
DEVICE void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- queries ------------------------------------------------------------------------------------------
// Value i of eight BF16 values.
DEVICE float bf16_value(const uint4& x, int i) {
  return __uint_as_float(i & 1 ? word_of(x, i / 2) & 0xFFFF0000u : word_of(x, i / 2) << 16);
}

DEVICE u32 f16_pair(const uint4& x, int i, int j) {
  return pack_f16(clamp_f16(bf16_value(x, i)), clamp_f16(bf16_value(x, j)));
}

// Store a token's queries where wgmma finds them, by the first WARPS warps. Eight values of a head are a
// lane's in two steps; rotary ones stay as they are. A warp takes eight heads and four eights of values,
// which go to the words of rows of 16 bytes: no conflicts of banks.
template <int WARPS>
DEVICE void store_queries(u8* to, const u16* q, int heads, int q_stride_head) {
  constexpr int EIGHTS = RANK / 8, PARTS = (RANK + ROPE) / 32 * 2, TURNS = (PARTS + WARPS - 1) / WARPS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pair = lane / 8;
  uint4 x[TURNS];  // all loads before the first is used
#pragma unroll
  for (int k = 0; k < TURNS; k++) {
    const int part = warp + WARPS * k, head = part % 2 * 8 + lane % 8, four = part / 2;
    const int eight = four < EIGHTS / 4 ? four + 16 * pair : 4 * four + pair;
    x[k] = part < PARTS && head < heads ? *(const uint4*)(q + (u64)head * q_stride_head + 8 * eight)
                                        : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int k = 0; k < TURNS; k++) {
    const int part = warp + WARPS * k, four = part / 2;
    if (part >= PARTS) break;
    const bool is_rope = four >= EIGHTS / 4;
    u32* const place = (u32*)to + 256 * four + part % 2 * 64 + lane % 8 * 4 + pair;  // a step is 128 words
    place[0] = is_rope ? x[k].x : f16_pair(x[k], 0, 4);
    place[32] = is_rope ? x[k].y : f16_pair(x[k], 1, 5);
    place[128] = is_rope ? x[k].z : f16_pair(x[k], 2, 6);
    place[160] = is_rope ? x[k].w : f16_pair(x[k], 3, 7);
  }
  fence_async_shared();
}

// ---- keys: what is stored becomes float16, in registers and in shared memory --------------------------
// Eight E2M1 values n0..n7 -> four pairs (n0,n4) (n1,n5) (n2,n6) (n3,n7). The upper byte of a float16 holds a
// value's sign (bit 7) and magnitude (bits 3..1): first all upper bytes, of odd and of even values, then
// halves.
DEVICE void decode_e2m1x8(u32 x, u32* pairs) {
  // In PTX, as the compiler would make more of it: what lop3 selects hides signs in the wrong place.
  u32 odd, even;
  asm("{\n.reg .b32 s,t,u;\nand.b32 s,%2,0x88888888;\nshr.u32 t,%2,3;\nshl.b32 u,%2,1;\n"
      "lop3.b32 %0,t,s,0x0E0E0E0E,0xE4;\nshl.b32 s,s,4;\nlop3.b32 %1,u,s,0x0E0E0E0E,0xE4;\n}"
      : "=r"(odd), "=r"(even) : "r"(x));
  pairs[0] = __byte_perm(even, 0, 0x2404);
  pairs[1] = __byte_perm(odd, 0, 0x2404);
  pairs[2] = even & 0xFF00FF00u;
  pairs[3] = odd & 0xFF00FF00u;
}

// A lane's four registers of operand A are four 8 x 8 matrices of stmatrix: they are stored without moves.
DEVICE void store_operand(u32 to, const u32* a) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0],{%1,%2,%3,%4};"
               :: "r"(to), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]) : "memory");
}

// Decode quarter j of the dims, store it at `to` as float16, and start S^T += K Q^T. operands: registers of
// tokens g and g + 8 in turn, which wgmma reads until it is waited for.
DEVICE void start_scores(float (*scores)[4], u32 (*operands)[8], const StoredRow& first,
                         const StoredRow& second, u32 to, u32 queries, int j) {
  const u32 first_scales = f16x2_from_e4m3x2((j < 2 ? first.scales.x : first.scales.y) >> 16 * (j % 2));
  const u32 second_scales = f16x2_from_e4m3x2((j < 2 ? second.scales.x : second.scales.y) >> 16 * (j % 2));
#pragma unroll
  for (int w = 0; w < 4; w++) {
    u32 a[4], b[4], *const x = operands[(4 * j + w) % DEPTH];
    decode_e2m1x8(word_of(first.values[j], w), a);
    decode_e2m1x8(word_of(second.values[j], w), b);
    if (4 * j + w >= DEPTH) wgmma_wait<DEPTH - 1>();  // the products that read these registers are done
#pragma unroll
    for (int i = 0; i < 4; i++) {
      x[2 * i] = w < 2 ? mul_f16x2_by_low(a[i], first_scales) : mul_f16x2_by_high(a[i], first_scales);
      x[2 * i + 1] = w < 2 ? mul_f16x2_by_low(b[i], second_scales) : mul_f16x2_by_high(b[i], second_scales);
    }
    const u32 place = (to ^ 32 * w) + 2 * j * BLOCK_BYTES;
    store_operand(place, x);
    store_operand(place + BLOCK_BYTES, x + 4);
    wgmma_fence();
    wgmma_keys(scores, x, queries + 32 * (8 * j + 2 * w));
    wgmma_keys(scores, x + 4, queries + 32 * (8 * j + 2 * w + 1));
    wgmma_commit();
  }
}

DEVICE void start_rope_scores(float (*scores)[4], const StoredRope& rope, u32 queries) {
  wgmma_fence();
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const uint4 &x = rope.x[half], &y = rope.y[half];
    wgmma_rope(scores, x.x, y.x, x.y, y.y, queries + 32 * (STEPS + 2 * half));
    wgmma_rope(scores, x.z, y.z, x.w, y.w, queries + 32 * (STEPS + 2 * half + 1));
  }
  wgmma_commit();
}

// ---- softmax ------------------------------------------------------------------------------------------
// Scores of tokens g and g + 8 become weights at `to`, and the maxima that they are relative to go to
// `maxima`. m: the maxima of the lane's heads 2 * c, 2 * c + 1, 8 + 2 * c, 8 + 2 * c + 1.
DEVICE void store_weights(float (*scores)[4], float (*m)[2], u32* to, float* maxima, int g, int c) {
  bool exceeds = false;
#pragma unroll
  for (int n = 0; n < 2; n++) {
#pragma unroll
    for (int e = 0; e < 2; e++) exceeds |= fmaxf(scores[n][e], scores[n][e + 2]) > m[n][e] + RESCALE_SLACK;
  }
  if (__any_sync(ALL_LANES, exceeds)) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float top = fmaxf(scores[n][e], scores[n][e + 2]);
#pragma unroll
        for (int x = 4; x < 32; x <<= 1) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, x));
        m[n][e] = fmaxf(top, m[n][e]);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < 2; n++) {
    to[64 * n] = transpose_8x8(pack_f16(ex2(scores[n][0] - m[n][0]), ex2(scores[n][1] - m[n][1])));
    to[64 * n + 32] = transpose_8x8(pack_f16(ex2(scores[n][2] - m[n][0]), ex2(scores[n][3] - m[n][1])));
    if (g == 0) *(float2*)(maxima + 8 * n + 2 * c) = make_float2(m[n][0], m[n][1]);
  }
}

DEVICE float low_half(u32 x) {
  float r;
  asm("{\n.reg .b16 l,h;\nmov.b32 {l,h},%1;\ncvt.f32.f16 %0,l;\n}" : "=f"(r) : "r"(x));
  return r;
}

DEVICE float high_half(u32 x) {
  float r;
  asm("{\n.reg .b16 l,h;\nmov.b32 {l,h},%1;\ncvt.f32.f16 %0,h;\n}" : "=f"(r) : "r"(x));
  return r;
}

DEVICE float sum_of_weights(const uint4& x) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) sum += low_half(word_of(x, i)) + high_half(word_of(x, i));
  return sum;
}

// ---- values: O^T += V^T P^T ---------------------------------------------------------------------------
// What a lane of the value warpgroup accumulates. m: of heads 2 * (lane % 8) and the next. l: the sum of the
// eight weights of each tile that lie at 16 * lane of its warp's, which are of head 8 * (lane / 16) + lane %
// 8. o: of heads 8 * n + 2 * c + i % 2.
struct Accumulator {
  float o[8][2][4], l;
  float2 m;

  DEVICE void clear() {
    m = make_float2(LOWEST, LOWEST);
    l = 0;
#pragma unroll
    for (int t = 0; t < 8; t++) {
#pragma unroll
      for (int i = 0; i < 8; i++) o[t][i / 4][i % 4] = 0;
    }
  }
};

// The value of a head, of those that lanes from `first_lane` on have two each of.
DEVICE float of_head(const float2& x, int first_lane, int head) {
  const float even = __shfl_sync(ALL_LANES, x.x, first_lane + head / 2);
  const float odd = __shfl_sync(ALL_LANES, x.y, first_lane + head / 2);
  return head & 1 ? odd : even;
}

// Start the products of two of the eight blocks of dims.
template <int FIRST>
DEVICE void start_values(float (*o)[2][4], u32 tile, u32 weights) {
  // The reduction changes nothing. It tells the compiler that all lanes have the same descriptor.
  tile = __reduce_or_sync(ALL_LANES, tile / 16 | A_LOW);
  weights = __reduce_or_sync(ALL_LANES, weights / 16 | B_LOW);
#pragma unroll
  for (int i = FIRST; i < FIRST + 2; i++) {
#pragma unroll
    for (int t = 0; t < 4; t++)
      wgmma_values(o[i], tile + (i * BLOCK_BYTES + t * 2048) / 16, weights + 32 * t);
  }
}

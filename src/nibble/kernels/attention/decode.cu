// Decode attention over paged low-precision KV: one query token a request (or a few, VERIFY), GQA, one launch.
//
// Compiled at run time, with these macros:
//   HEAD_DIM                64, 128 or 256
//   K_FORMAT, V_FORMAT      a Format below
//   COLUMNS                 8 or 16: query tokens x query heads that a KV head serves at once
//   TILE                    tokens of a tile, 32 or 64
//   WARPS                   warps of a block
//   Q_BF16                  1: queries and output are bfloat16; 0: float16
//   SOFTCAP                 1: scores are capped
//   PAGE                    slots of a page: 16, 32, 64 or 128
//   Kernel: decode(...), grid of one block per multiprocessor, 32 * WARPS threads, dynamic shared memory as decode.py says.
//
// Storage is the packing `hnd`, bytes as the formats define them: [page, head, slot, row], scales likewise.
//
// Work. A tile is TILE tokens of one KV head. All tiles of the batch stand in one line, requests outermost, then heads;
// the line is cut evenly over the blocks, and a block's share over its warps, so that mixed lengths load every warp
// alike. A warp streams its tiles through shared memory of its own (bulk copies from SM90 on, cp.async before):
// keys of the next tile arrive while it weighs values, values while it scores keys. It waits for no other warp until the end. A (request, head) that several warps or blocks share is
// joined from pieces in order, so the result depends on the batch's shape only, not on timing.
//
// Arithmetic. KV stands on the M side of mma.m16n8k16, the group's queries on N, so that no rows are wasted:
//   S^T [token, column] = K Q^T,   O^T [dim, column] = V^T P^T
// A lane's bytes of K and V are its fragments, as the order of dims, and of tokens within a tile, may be chosen freely:
//   K row g of a half group is token 4 * (g & 1) + (g >> 1), V column pairs are tokens (c, c + 4), (c + 8, c + 12).
// E2M1 becomes float16 by masks and shifts, exactly, times 2^-14; block scales multiply it as float16 pairs. The powers
// of two are undone in the softmax scale and the output.
//
// Names: g = lane / 4 and c = lane % 4, the coordinates of mma fragments.

#include "bits.cuh"
#define FACT __host__ __device__ constexpr

enum Format { NVFP4, MXFP4, FP4_MX16, E4M3, E5M2, BF16, FP16 };
constexpr int PIECE = PAGE < TILE ? PAGE : TILE, PIECES = TILE / PIECE, GROUPS = TILE / 16, D = HEAD_DIM, NG = COLUMNS / 8, STEPS = D / 16;
constexpr Format KF = K_FORMAT, VF = V_FORMAT;
FACT bool E8M0(Format f) { return f == MXFP4 || f == FP4_MX16; }
FACT int bits(Format f) { return f <= FP4_MX16 ? 4 : f <= E5M2 ? 8 : 16; }
FACT int block(Format f) { return f == MXFP4 ? 32 : 16; }
FACT int row(Format f) { return D * bits(f) / 8; }                         // bytes of a token's values
FACT int srow(Format f) { return bits(f) == 4 ? D / block(f) : 0; }        // and of its scales
FACT int unit(Format f) { return TILE * (row(f) + srow(f)); }
FACT int least(int a, int b) { return a < b ? a : b; }
// Powers of two that stay in decoded values: E2M1 has 2^-14, its scales get 2^SHIFT in exchange. E8M0 scales must fit
// float16, so keys, which may be large, are shifted less than values, which may be small.
FACT int shift(Format f, bool key) { return E8M0(f) ? (key ? 4 : 9) : 7; }
#if __CUDA_ARCH__ >= 890
constexpr int E4M3_SHIFT = 0;
#else
constexpr int E4M3_SHIFT = 8;
#endif
FACT float undo(Format f, bool key) {
  return float(1 << (bits(f) == 4 ? 14 - shift(f, key) : f == E4M3 ? E4M3_SHIFT : 0));
}
constexpr bool MMA_BF16 = KF == BF16;
static_assert((KF == BF16) == (VF == BF16), "bfloat16 goes with bfloat16: the two need one kind of mma");
constexpr float SLACK = 8.f;

// ---- bits and pieces -------------------------------------------------------------------------------------------------
DEV u32 pair(float lo, float hi) { return MMA_BF16 ? bf16s(lo, hi) : halves(lo, hi); }
DEV void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if (MMA_BF16) mma_bf16(c, a0, a1, a2, a3, b0, b1); else mma_f16(c, a0, a1, a2, a3, b0, b1);
}
DEV float q_value(u32 word, int i) {  // value i of a pair of queries
  u16 half = u16(word >> (16 * i));
  if (Q_BF16) return __uint_as_float(u32(half) << 16);
  float r; asm("cvt.f32.f16 %0,%1;" : "=f"(r) : "h"(half)); return r;
}

// ---- formats: bytes to float16 pairs ---------------------------------------------------------------------------------
// Eight E2M1 values n0..n7 -> four pairs (n0,n4) (n1,n5) (n2,n6) (n3,n7), in 11 operations. The upper byte of a float16
// holds a value's sign (bit 7) and magnitude (bits 3..1): first all upper bytes, of odd and of even values, then halves.
DEV void e2m1(u32 x, u32* h) {
  const u32 S = 0x80808080u, M = 0x0E0E0E0Eu;
  u32 odd = ((x >> 3) & M) | (x & S), even = ((x << 1) & M) | ((x << 4) & S);
  h[0] = __byte_perm(even, 0, 0x2404);
  h[1] = __byte_perm(odd, 0, 0x2404);
  h[2] = even & 0xFF00FF00u;
  h[3] = odd & 0xFF00FF00u;
}
template <Format F> DEV u32 fp8_low(u32 x) {   // bytes 0 and 1 -> a pair
  if (F == E5M2) return __byte_perm(x, 0, 0x1404);
#if __CUDA_ARCH__ >= 890
  return e4m3s(x);
#else
  u32 y = __byte_perm(x, 0, 0x1404); return (y & 0x80008000u) | ((y >> 1) & 0x3F803F80u);
#endif
}
template <Format F> DEV u32 fp8_high(u32 x) { return fp8_low<F>(x >> 16); }
// Two scale bytes, at bits 0..7 and 16..23 -> a pair, times 2^shift.
template <Format F, bool KEY> DEV u32 scales(u32 x) {
  if (!E8M0(F)) return mul2(x << 7, 0x78007800u);  // the bits of E4M3 are float16's, times 2^-8; times 2^15
  const u32 least = (112 - shift(F, KEY)) * 0x10001u, most = least + 30 * 0x10001u;  // 2^-15, which is 0, to 2^15
#if __CUDA_ARCH__ >= 900
  asm("max.u16x2 %0,%0,%1;\nmin.u16x2 %0,%0,%2;" : "+r"(x) : "r"(least), "r"(most));
#else
  x = min(max(x & 0xFFFFu, least & 0xFFFFu), most & 0xFFFFu) | (min(max(x >> 16, least >> 16), most >> 16) << 16);
#endif
  return (x - least) * 1024u;
}

// ---- memory ----------------------------------------------------------------------------------------------------------
template <int N> DEV void load_words(u32* w, const u8* p) {  // N words from aligned shared memory
  if (N >= 4) {
#pragma unroll
    for (int i = 0; i < N / 4; i++) *(uint4*)(w + 4 * i) = *(const uint4*)(p + 16 * i);
  } else if (N == 2) *(uint2*)w = *(const uint2*)p;
  else *w = *(const u32*)p;
}

struct Storage { const u8 *data, *scale; };

#if __CUDA_ARCH__ >= 900
DEV void bulk(u32 to, const void* from, int bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];"
    :: "r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}
#else
DEV void copy16(u32 to, const void* from) { asm volatile("cp.async.cg.shared.global [%0],[%1],16;" :: "r"(to), "l"(from) : "memory"); }
#endif

// Starts copying the first `live` tokens of a tile of a stream, a multiple of 16. rows: where its pieces begin, as rows of
// all [page, head, slot].
template <Format F> DEV void fetch(u8* to, u32 bar, Storage s, const u64* rows, int live, int lane) {
#if __CUDA_ARCH__ >= 900
  u32 elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p,0xffffffff;\nselp.u32 %0,1,0,p;\n}" : "=r"(elected));
  if (elected) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" :: "r"(bar), "r"(live * (row(F) + srow(F))) : "memory");
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      const int here = PIECES == 1 ? live : least(live - i * PIECE, PIECE);
      if (PIECES > 1 && here <= 0) break;
      bulk(shared_address(to) + i * PIECE * row(F), s.data + rows[i] * row(F), here * row(F), bar);
      if (srow(F)) bulk(shared_address(to) + TILE * row(F) + i * PIECE * srow(F), s.scale + rows[i] * srow(F), here * srow(F), bar);
    }
  }
#else
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    const int here = least(live - i * PIECE, PIECE);
    for (int j = 16 * lane; j < here * row(F); j += 512)
      copy16(shared_address(to) + i * PIECE * row(F) + j, s.data + rows[i] * row(F) + j);
    for (int j = 16 * lane; j < here * srow(F); j += 512)
      copy16(shared_address(to) + TILE * row(F) + i * PIECE * srow(F) + j, s.scale + rows[i] * srow(F) + j);
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
DEV void landed(u32 bar, u32 parity) {
#if __CUDA_ARCH__ >= 900
  await(bar, parity);
#else
  asm volatile("cp.async.wait_group 1;" ::: "memory");  // keys and values take turns: all but the latest
  __syncwarp();
#endif
}

// ---- keys: S^T += K Q^T for 16 tokens --------------------------------------------------------------------------------
// A lane's bytes of a row come in chunks: chunk j is chunk 4 * j + c of the row.
FACT int chunk(Format f) { return least(16, row(f) / 4); }                   // bytes
FACT int chunk_dims(Format f) { return chunk(f) * 8 / bits(f); }
FACT int words(Format f) { return row(f) / 16; }                             // of a lane and row
// Dim of value e of operand register u in step s.
FACT int dim_of(Format f, int c, int s, int u, int e) {
  int word = bits(f) == 4 ? s / 2 : bits(f) == 8 ? s : 2 * s;                      // the step's first word
  int j = word / (chunk(f) / 4), within = word % (chunk(f) / 4) * (32 / bits(f));
  int value = bits(f) == 4 ? 2 * (s % 2) + u + 4 * e : 2 * u + e;
  return (4 * j + c) * chunk_dims(f) + within + value;
}
struct KeyRow { u32 w[words(KF)]; u32 s[STEPS]; };  // s: by chunk, scales of its one or two blocks as a pair
struct Place { const u8 *data, *scale; };  // where a lane begins to read a tile
DEV Place key_place(const u8* tile, int g, int c) {
  const int token = 4 * (g & 1) + (g >> 1);
  return {tile + token * row(KF) + c * chunk(KF), tile + TILE * row(KF) + token * srow(KF) + c * chunk_dims(KF) / block(KF)};
}
DEV void load_key(KeyRow& k, Place from, int token) {
#pragma unroll
  for (int j = 0; j < words(KF) * 4 / chunk(KF); j++) {
    load_words<chunk(KF) / 4>(k.w + j * (chunk(KF) / 4), from.data + token * row(KF) + 4 * j * chunk(KF));
    if (bits(KF) == 4) {
      const u8* s = from.scale + token * srow(KF) + 4 * j * chunk_dims(KF) / block(KF);
      if (chunk_dims(KF) / block(KF) == 2) k.s[j] = scales<KF, true>(__byte_perm(*(const u16*)s, 0, 0x4140));
      else k.s[j] = scales<KF, true>(*s * 0x10001u);
    }
  }
}
// Operand registers of step s: dims (u = 0), (u = 1).
DEV void key_step2(const KeyRow& k, int word, u32* h) {  // 4 bit: one word serves two steps
  e2m1(k.w[word], h);
  const int j = word / (chunk(KF) / 4), within = word % (chunk(KF) / 4) * 8;
#pragma unroll
  for (int i = 0; i < 4; i++)
    h[i] = chunk_dims(KF) / block(KF) < 2 ? mul2(h[i], k.s[j]) : within < block(KF) ? mul_low(h[i], k.s[j]) : mul_high(h[i], k.s[j]);
}
DEV void scores(float (*s)[4], Place from, int first, const u32 (*q)[STEPS][2]) {
  KeyRow a, b;
  load_key(a, from, first);
  load_key(b, from, first + 8);
#pragma unroll
  for (int w = 0; w < words(KF); w++) {
    if (bits(KF) == 4) {
      u32 x[4], y[4];
      key_step2(a, w, x); key_step2(b, w, y);
#pragma unroll
      for (int n = 0; n < NG; n++) {
        mma(s[n], x[0], y[0], x[1], y[1], q[n][2 * w][0], q[n][2 * w][1]);
        mma(s[n], x[2], y[2], x[3], y[3], q[n][2 * w + 1][0], q[n][2 * w + 1][1]);
      }
    } else if (bits(KF) == 8) {
      u32 x0 = fp8_low<KF>(a.w[w]), x1 = fp8_high<KF>(a.w[w]), y0 = fp8_low<KF>(b.w[w]), y1 = fp8_high<KF>(b.w[w]);
#pragma unroll
      for (int n = 0; n < NG; n++) mma(s[n], x0, y0, x1, y1, q[n][w][0], q[n][w][1]);
    } else if (w % 2 == 0) {
#pragma unroll
      for (int n = 0; n < NG; n++) mma(s[n], a.w[w], b.w[w], a.w[w + 1], b.w[w + 1], q[n][w / 2][0], q[n][w / 2][1]);
    }
  }
}

// The queries of one column, as the other operand: loaded in the order of the lane's dims, then dealt to steps.
DEV void load_queries(u32 (*q)[2], const u16* from, bool there, int c) {
  u32 w[D / 8];
#pragma unroll
  for (int j = 0; j < D / 4 / chunk_dims(KF); j++)
#pragma unroll
    for (int i = 0; i < chunk_dims(KF) / 8; i++)
      *(uint4*)(w + j * chunk_dims(KF) / 2 + 4 * i) = there ? *(const uint4*)(from + (4 * j + c) * chunk_dims(KF) + 8 * i) : make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int s = 0; s < STEPS; s++)
#pragma unroll
    for (int u = 0; u < 2; u++) {
      int d0 = dim_of(KF, 0, s, u, 0), d1 = dim_of(KF, 0, s, u, 1);
      int i0 = d0 / (4 * chunk_dims(KF)) * chunk_dims(KF) + d0 % chunk_dims(KF), i1 = d1 / (4 * chunk_dims(KF)) * chunk_dims(KF) + d1 % chunk_dims(KF);
      q[s][u] = pair(q_value(w[i0 / 2], i0 % 2), q_value(w[i1 / 2], i1 % 2));
    }
}

// ---- values: O^T += V^T P^T for 16 tokens ----------------------------------------------------------------------------
// Lane g has dims g * D / 8 .. + D / 8 of tokens first + 4u + c, u = 0..3. Tile t of O^T has dims 2t (rows 0..7) and 2t+1.
constexpr int vwords = row(VF) / 32;
DEV Place value_place(const u8* tile, int g, int c) {
  return {tile + c * row(VF) + g * (row(VF) / 8), tile + TILE * row(VF) + c * srow(VF) + g * (D / 8) / block(VF)};
}
DEV u32 value_scales(const u8* s) {  // of a token and the fourth after it
  return scales<VF, false>(u32(s[0]) | (u32(s[4 * srow(VF)]) << 16));
}
DEV void weigh(float (*o)[D / 16][4], int t, u32 a0, u32 a1, u32 a2, u32 a3, const u32 (*p)[2]) {
#pragma unroll
  for (int n = 0; n < NG; n++) mma(o[n][t], a0, a1, a2, a3, p[n][0], p[n][1]);
}
DEV void values(float (*o)[D / 16][4], Place from, int first, const u32 (*p)[2]) {
  u32 w[4][vwords];
#pragma unroll
  for (int u = 0; u < 4; u++) load_words<vwords>(w[u], from.data + (first + 4 * u) * row(VF));
  u32 s0 = 0, s1 = 0;
#pragma unroll
  for (int i = 0; i < vwords; i++) {
    if (bits(VF) == 4) {
      if (i * 8 % block(VF) == 0) {
        const u8* s = from.scale + first * srow(VF) + i * 8 / block(VF);
        s0 = value_scales(s);
        s1 = value_scales(s + 8 * srow(VF));
      }
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u32 x[4], y[4];
        e2m1(__byte_perm(w[0][i], w[1][i], half ? 0x7632 : 0x5410), x);
        e2m1(__byte_perm(w[2][i], w[3][i], half ? 0x7632 : 0x5410), y);
#pragma unroll
        for (int j = 0; j < 4; j++) { x[j] = mul2(x[j], s0); y[j] = mul2(y[j], s1); }
        weigh(o, 4 * i + 2 * half, x[0], x[1], y[0], y[1], p);
        weigh(o, 4 * i + 2 * half + 1, x[2], x[3], y[2], y[3], p);
      }
    } else if (bits(VF) == 8) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u32 x = __byte_perm(w[0][i], w[1][i], half ? 0x7362 : 0x5140), y = __byte_perm(w[2][i], w[3][i], half ? 0x7362 : 0x5140);
        weigh(o, 2 * i + half, fp8_low<VF>(x), fp8_high<VF>(x), fp8_low<VF>(y), fp8_high<VF>(y), p);
      }
    } else {
      weigh(o, i, __byte_perm(w[0][i], w[1][i], 0x5410), __byte_perm(w[0][i], w[1][i], 0x7632),
            __byte_perm(w[2][i], w[3][i], 0x5410), __byte_perm(w[2][i], w[3][i], 0x7632), p);
    }
  }
}

// ---- work ------------------------------------------------------------------------------------------------------------
struct Share {  // part i of n of `total` things, as even as can be
  int each, more;
  DEV Share(int total, int n) : each(total / n), more(total % n) {}
  DEV int start(int i) const { return i * each + min(i, more); }
  DEV int owner(int x) const { int big = more * (each + 1); return x < big ? x / (each + 1) : more + (x - big) / each; }
};
struct Batch {
  const int *lens, *starts, *pages, *cum;  // cum: tiles of the requests before, in shared memory
  int stride, heads, group, window;
  DEV int first_row(int b) const { return starts ? starts[b] : b; }  // no starts: one query each
  DEV int queries(int b) const { return starts ? starts[b + 1] - starts[b] : 1; }
  DEV int first_tile(int b) const { return window ? max(lens[b] - queries(b) - window + 1, 0) / TILE : 0; }
};
struct Cursor {  // a place in the line of tiles
  int b, h, p, tiles, first, len;
  DEV void enter(const Batch& w) { tiles = w.cum[b + 1] - w.cum[b]; first = w.first_tile(b); len = w.lens[b]; }
  DEV void at(const Batch& w, int B, int tile) {
    int lo = 0, hi = B - 1;
    while (lo < hi) { int mid = (lo + hi + 1) >> 1; if (w.cum[mid] * w.heads <= tile) lo = mid; else hi = mid - 1; }
    b = lo; enter(w);
    int rest = tile - w.cum[b] * w.heads; h = rest / tiles; p = rest - h * tiles;
  }
  DEV void next(const Batch& w, int B) {
    if (++p >= tiles) leave(w, B);
  }
  DEV void leave(const Batch& w, int B) {  // on to the next (request, head)
    p = 0;
    if (++h < w.heads) return;
    h = 0;
    do b++; while (b < B && w.cum[b + 1] == w.cum[b]);
    if (b < B) enter(w);
  }
  DEV int live() const { return min(TILE, (len - (first + p) * TILE + 15) & ~15); }  // tokens of the tile, by sixteens
  DEV void pages(const Batch& w, int* page) const {  // of the tile's pieces; any page, where a piece holds nothing
    const int* row = w.pages + (u64)b * w.stride;
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      int slot = (first + p) * TILE + i * PIECE;
      page[i] = i == 0 || slot < len ? row[slot / PAGE] : 0;
    }
  }
  DEV void rows(const Batch& w, const int* page, u64* rows) const {
    int within = PAGE > TILE ? (first + p) * TILE % PAGE : 0;
#pragma unroll
    for (int i = 0; i < PIECES; i++) rows[i] = (u64)u32(page[i] * w.heads + h) * PAGE + within;
  }
};

// ---- joining pieces --------------------------------------------------------------------------------------------------
// A piece: what one warp or block has of a (request, head): unnormalised O, then (max, sum) of each column, in the exp2
// domain. O is stored as the fragments lie, four dims of a lane at a time: [column / 8][column % 2][quad][lane][4].
// A short context takes as long as its chain of latencies, and fetching instructions is among them: this code is compact.
constexpr int QUADS = D / 32, MINE = (QUADS + 3) / 4, AHEAD = 8 / MINE, EIGHT = 8;
constexpr int ROOM = unit(KF) + unit(VF), PIECE_O = COLUMNS * D * 4, PIECE_ALL = PIECE_O + 8 * COLUMNS;  // bytes
static_assert(ROOM >= PIECE_ALL, "a warp leaves its piece where its tile was");
DEV float4* quad(u8* piece, int n, int e, int i, int lane) { return (float4*)piece + ((2 * n + e) * QUADS + i) * 32 + lane; }
DEV float2* stats(u8* piece, int column) { return (float2*)(piece + PIECE_O) + column; }
struct Row {  // pieces in shared or global memory, `stride` bytes apart, all but one
  u8 *at, *other; int stride, odd, count;
  DEV u8* piece(int k) const { return k == odd ? other : at + k * stride; }
};
// Past the L1 cache, which does not know what other blocks write.
DEV float4 fresh(const float4* p) {
  float4 x; asm volatile("ld.volatile.v4.f32 {%0,%1,%2,%3},[%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(p) : "memory"); return x;
}
DEV float2 fresh(const float2* p) { float2 x; asm volatile("ld.volatile.v2.f32 {%0,%1},[%2];" : "=f"(x.x), "=f"(x.y) : "l"(p) : "memory"); return x; }
struct Output {
  u16* out; const float *v_scale, *sinks; int v_stride, group, heads;
  DEV float inverse(int h, int column, float m, float l) const {  // what normalises a column
    if (sinks) l += ex2(sinks[h * group + column % group] * LOG2E - m);
    return l > 0 ? __fdividef(v_scale[h * v_stride] * undo(VF, false), l) : 0.f;
  }
  DEV u16* place(int row, int h, int column) const {
    return out + ((u64)(row + column / group) * heads * group + h * group + column % group) * D;
  }
};
DEV u32 q_pair(float lo, float hi) { return Q_BF16 ? bf16s(lo, hi) : halves(lo, hi); }

// A warp joins one column of some pieces, in their order: into the piece `to`, or, where there is none, into the output.
DEV void join(Row from, u8* to, Output output, int row, int h, int column, int lane) {
  const int n = column / 8, e = column % 2, fragment = lane % 8 * 4 + column % 8 / 2;
  float m = NONE, l = 0;
  float4 y[MINE] = {};
#pragma unroll 1
  for (int k0 = 0; k0 < from.count; k0 += AHEAD) {
    float2 s[AHEAD];
    float4 x[AHEAD][MINE];
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {  // all loads before the first is used
      u8* piece = from.piece(k0 + j);
      const bool there = k0 + j < from.count;
      s[j] = there ? fresh(stats(piece, column)) : make_float2(NONE, 0);
#pragma unroll
      for (int i = 0; i < MINE; i++)
        x[j][i] = there && lane / 8 + 4 * i < QUADS ? fresh(quad(piece, n, e, lane / 8 + 4 * i, fragment)) : make_float4(0, 0, 0, 0);
    }
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
      const float top = fmaxf(m, s[j].x), old = ex2(m - top), w = ex2(s[j].x - top);
      m = top;
      l = l * old + s[j].y * w;
#pragma unroll
      for (int i = 0; i < MINE; i++) {
        float4 &a = y[i], b = x[j][i];
        a.x = a.x * old + b.x * w; a.y = a.y * old + b.y * w; a.z = a.z * old + b.z * w; a.w = a.w * old + b.w * w;
      }
    }
  }
  const float f = to ? 1.f : output.inverse(h, column, m, l);
#pragma unroll
  for (int i = 0; i < MINE; i++) {
    const int q = lane / 8 + 4 * i;
    if (q >= QUADS) break;
    if (to) *quad(to, n, e, q, fragment) = y[i];
    else *(uint2*)(output.place(row, h, column) + lane % 8 * (D / 8) + 4 * q) = make_uint2(q_pair(y[i].x * f, y[i].y * f), q_pair(y[i].z * f, y[i].w * f));
  }
  if (to && lane == 0) *stats(to, column) = make_float2(m, l);
}

// ---- the softmax of a tile, as it goes along -------------------------------------------------------------------------
DEV void cap(float (*s)[NG][4], float sm, float softcap) {  // cap * tanh(x / cap), in the exp2 domain
#pragma unroll
  for (int i = 0; i < GROUPS; i++)
#pragma unroll
    for (int n = 0; n < NG; n++)
#pragma unroll
      for (int j = 0; j < 4; j++)
        s[i][n][j] = softcap * LOG2E * (1.f - 2.f * rcp(ex2(s[i][n][j] * sm * (2.f / softcap)) + 1.f)) / sm;
}
DEV void hide(float (*s)[NG][4], const int (*limit)[2], int token0, int window) {  // token0: the lane's first
#pragma unroll
  for (int i = 0; i < GROUPS; i++)
#pragma unroll
    for (int n = 0; n < NG; n++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int token = token0 + 16 * i + 8 * (j >> 1), top = limit[n][j & 1];
        if (token >= top || (window && token < top - window)) s[i][n][j] = __int_as_float(0xff800000);
      }
}
struct Sums {  // O and, of each column, the maximum that it is relative to and the sum of weights (of the lane's tokens)
  float o[NG][D / 16][4], m[NG][2], l[NG][2];
  DEV void clear() {
#pragma unroll
    for (int n = 0; n < NG; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) { m[n][e] = NONE; l[n][e] = 0; }
#pragma unroll
      for (int t = 0; t < D / 16; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) o[n][t][i] = 0;
    }
  }
  DEV void raise(int n, int e, float top) {  // the maximum of a column to what the lanes have seen
#pragma unroll
    for (int x = 4; x < 32; x <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, x));
    top = fmaxf(top, m[n][e]);
    const float r = ex2(m[n][e] - top);
    m[n][e] = top; l[n][e] *= r;
#pragma unroll
    for (int t = 0; t < D / 16; t++) { o[n][t][e] *= r; o[n][t][e + 2] *= r; }
  }
  DEV void weights(u32 (*p)[NG][2], float (*s)[NG][4], float sm) {  // scores -> P, as the operand of values()
    bool grows = false;
    float top[NG][2];
#pragma unroll
    for (int n = 0; n < NG; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float a = fmaxf(s[0][n][e], s[0][n][e + 2]);
#pragma unroll
        for (int i = 1; i < GROUPS; i++) a = fmaxf(a, fmaxf(s[i][n][e], s[i][n][e + 2]));
        top[n][e] = a * sm;
        grows |= top[n][e] > m[n][e] + SLACK;
      }
    if (__any_sync(~0u, grows)) {  // rare: sums may grow by 2^SLACK before they are scaled anew
#pragma unroll
      for (int n = 0; n < NG; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) raise(n, e, top[n][e]);
    }
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
#pragma unroll
      for (int n = 0; n < NG; n++) {
        float e[4];
#pragma unroll
        for (int j = 0; j < 4; j++) { e[j] = ex2(fmaf(s[i][n][j], sm, -m[n][j & 1])); l[n][j & 1] += e[j]; }
        p[i][n][0] = transposed(pair(e[0], e[1]));
        p[i][n][1] = transposed(pair(e[2], e[3]));
      }
  }
  // To the output, if this is all of a (request, head); else to a piece.
  DEV void hand_in(u8* piece, bool all, Output output, int q_row, int h, int columns, int lane) {
    const int g = lane >> 2, c = lane & 3;
#pragma unroll
    for (int n = 0; n < NG; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float sum = l[n][e];
#pragma unroll
        for (int x = 4; x < 32; x <<= 1) sum += __shfl_xor_sync(~0u, sum, x);
        const int col = 8 * n + 2 * c + e;
        if (col >= columns) continue;
        if (all) {
          const float f = output.inverse(h, col, m[n][e], sum);
          u32* out = (u32*)(output.place(q_row, h, col) + g * (D / 8));
#pragma unroll
          for (int t = 0; t < D / 16; t += 2)
            *(uint2*)(out + t) = make_uint2(q_pair(o[n][t][e] * f, o[n][t][e + 2] * f), q_pair(o[n][t + 1][e] * f, o[n][t + 1][e + 2] * f));
        } else {
#pragma unroll
          for (int i = 0; i < QUADS; i++)
            *quad(piece, n, e, i, lane) = make_float4(o[n][2 * i][e], o[n][2 * i][e + 2], o[n][2 * i + 1][e], o[n][2 * i + 1][e + 2]);
          if (g == 0) *stats(piece, col) = make_float2(m[n][e], sum);
        }
      }
  }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) decode(
    const u16* Q, u16* OUT, const u8* K, const u8* K_SCALES, const u8* V, const u8* V_SCALES,
    const int* lens, const int* starts, const int* pages, const float* k_scale, const float* v_scale, const float* sinks,
    u8* pieces, int* arrived,
    float scale, float softcap, int B, int stride, int heads, int group, int window, int k_stride, int v_stride) {
  extern __shared__ __align__(128) u8 smem[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  u64* bars = (u64*)(smem + WARPS * ROOM);
  int* cum = (int*)(bars + 2 * WARPS);
  __shared__ int sums[WARPS];
  Batch work{lens, starts, pages, cum, stride, heads, group, window};
  Output output{OUT, v_scale, sinks, v_stride, group, heads};
  u8 *const key = smem + warp * ROOM, *const value = key + unit(KF);
  const u32 key_bar = shared_address(bars + 2 * warp), value_bar = key_bar + 8;
  // Pieces of each warp, for one that it leaves before its end, and two of each block.
  u8 *const of_warps = pieces + (u64)blockIdx.x * WARPS * PIECE_ALL, *const of_blocks = pieces + (u64)gridDim.x * WARPS * PIECE_ALL;

#if __CUDA_ARCH__ >= 900
  if (lane == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0],1;\nmbarrier.init.shared::cta.b64 [%1],1;" :: "r"(key_bar), "r"(value_bar) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
#endif
  // Tiles before each request: a scan, WARPS * 32 requests at a time.
  for (int base = 0, before = 0; base < B; base += 32 * WARPS) {
    int b = base + threadIdx.x, len = b < B ? lens[b] : 0;
    int tiles = len > 0 ? (len + TILE - 1) / TILE - work.first_tile(b) : 0, x = tiles;
#pragma unroll
    for (int i = 1; i < 32; i <<= 1) { int y = __shfl_up_sync(~0u, x, i); if (lane >= i) x += y; }
    if (lane == 31) sums[warp] = x;
    __syncthreads();
    int total = 0;
    for (int i = 0; i < WARPS; i++) { if (i < warp) x += sums[i]; total += sums[i]; }
    if (b < B) cum[b + 1] = before + x;
    before += total;
    __syncthreads();
  }
  if (threadIdx.x == 0) cum[0] = 0;
  __syncthreads();
  const int T = cum[B] * heads;
  const Share blocks(T, gridDim.x);
  const int block0 = blocks.start(blockIdx.x), block1 = blocks.start(blockIdx.x + 1);
  const Share warps(block1 - block0, WARPS);
  const int begin = block0 + warps.start(warp), end = block0 + warps.start(warp + 1);

  if (begin < end) {
    Cursor here, ahead;
    here.at(work, B, begin); ahead = here;
    const Storage ks{K, K_SCALES}, vs{V, V_SCALES};
    int page[PIECES], fetched = begin;
    u64 rows[PIECES];
    ahead.pages(work, page);
    auto fetch_key = [&] {
      if (fetched < end) { ahead.rows(work, page, rows); fetch<KF>(key, key_bar, ks, rows, ahead.live(), lane); }
#if __CUDA_ARCH__ < 900
      else asm volatile("cp.async.commit_group;" ::: "memory");
#endif
    };
    auto fetch_value = [&] {
      if (fetched < end) {
        fetch<VF>(value, value_bar, vs, rows, ahead.live(), lane);
        if (++fetched < end) { ahead.next(work, B); ahead.pages(work, page); }
      }
#if __CUDA_ARCH__ < 900
      else asm volatile("cp.async.commit_group;" ::: "memory");
#endif
    };
    __syncwarp();
    fetch_key();
    fetch_value();

    const Place key_from = key_place(key, g, c), value_from = value_place(value, g, c);
    u32 q[NG][STEPS][2], parity = 0;
    Sums kept;
    for (int tile = begin; tile < end; here.leave(work, B)) {  // a (request, head), or what the warp has of it
      const int queries = work.queries(here.b), columns = queries * group, q_row = work.first_row(here.b);
      const int count = min(here.tiles - here.p, end - tile), token1 = (here.first + here.p) * TILE;
      const bool starts_here = here.p == 0, ends = here.p + count == here.tiles;
      const int lowest = here.len - queries + 1;  // tokens that the first query sees; each later one sees one more
      const int full0 = window ? max(here.len - window - token1 + TILE - 1, 0) / TILE : 0, full1 = (lowest - token1) / TILE;
      const float sm = scale * LOG2E * undo(KF, true) * k_scale[here.h * k_stride];
      int limit[NG][2];  // tokens that a column may see
#pragma unroll
      for (int n = 0; n < NG; n++) {
        const int col = 8 * n + g;
        load_queries(q[n], Q + ((u64)(q_row + col / group) * heads * group + here.h * group + col % group) * D, col < columns, c);
        for (int e = 0; e < 2; e++) limit[n][e] = lowest + (8 * n + 2 * c + e) / group;
      }
      kept.clear();
      tile += count;
      for (int t = 0; t < count; t++) {
        float s[GROUPS][NG][4] = {};
        landed(key_bar, parity);
#pragma unroll
        for (int i = 0; i < GROUPS; i++) scores(s[i], key_from, 16 * i, q);
        __syncwarp();
        fetch_key();

        const bool edge = t < full0 || t >= full1;
        const int token0 = token1 + t * TILE;
        if (SOFTCAP) cap(s, sm, softcap);
        if (edge) hide(s, limit, token0 + 4 * (g & 1) + (g >> 1), window);
        u32 p[GROUPS][NG][2];
        kept.weights(p, s, sm);

        landed(value_bar, parity);
        if (edge && token0 + TILE > here.len) {  // slots that nobody wrote may hold NaN, and 0 * NaN is one
          for (int i = (here.len - token0) * row(VF) + 4 * lane; i < TILE * row(VF); i += 128) *(u32*)(value + i) = 0;
          for (int i = (here.len - token0) * srow(VF) + lane; i < TILE * srow(VF); i += 32) value[TILE * row(VF) + i] = 0;
#if __CUDA_ARCH__ >= 900
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
          __syncwarp();
        }
#pragma unroll
        for (int i = 0; i < GROUPS; i++) values(kept.o, value_from, 16 * i, p[i]);
        __syncwarp();
        fetch_value();
        parity ^= 1;
      }
      const bool done = tile == end;  // else a next tile is on its way to where the piece would be left
      u8* piece = done ? key : of_warps + warp * PIECE_ALL;
      kept.hand_in(piece, starts_here && ends, output, q_row, here.h, columns, lane);
    }
  }

  for (int b = blockIdx.x; b < B; b += gridDim.x)  // requests of no tokens
    if (lens[b] <= 0)
      for (int i = threadIdx.x; i < work.queries(b) * heads * group * D / 2; i += 32 * WARPS)
        ((u32*)(OUT + (u64)work.first_row(b) * heads * group * D))[i] = 0;

  // What several warps have of a (request, head) is joined here, a column a warp; what several blocks have, by the warp
  // that comes last; of more than eight blocks, of each eight by their last, and then what those have left. Two such
  // (request, head)s at most have pieces of the same eight blocks: one that begins there, and one that does not.
  int* const of_eights = arrived;
  arrived += 2 * ((gridDim.x + EIGHT - 1) / EIGHT) * COLUMNS;
  __syncthreads();
  for (int at = block0, turn = 0; at < block1;) {
    Cursor seg; seg.at(work, B, at);
    const int start = at - seg.p, stop = start + seg.tiles, from = max(start, block0), to = min(stop, block1);
    const int w0 = warps.owner(from - block0), w1 = warps.owner(to - 1 - block0);
    const bool whole = start >= block0 && stop <= block1;
    const int columns = work.queries(seg.b) * group, row = work.first_row(seg.b);
    u8* const own = whole ? nullptr : of_blocks + (2 * blockIdx.x + (start >= block0)) * PIECE_ALL;
    const bool goes_on = block0 + warps.start(w1 + 1) > to;  // the last warp, which then has left its piece early
    for (int column = 0; column < columns && !(whole && w0 == w1); column++) {
      if (turn++ % WARPS != warp) continue;
      Row from{smem + w0 * ROOM, of_warps + w1 * PIECE_ALL, ROOM, goes_on ? w1 - w0 : -1, w1 - w0 + 1};
      u8* into = own;
#pragma unroll 1
      for (bool of_eight = true;; of_eight = false) {
        join(from, into, output, row, seg.h, column, lane);
        if (!into) break;
        const int b0 = blocks.owner(start), b1 = blocks.owner(stop - 1), o0 = b0 / EIGHT, o = blockIdx.x / EIGHT;
        const bool many = b1 - b0 >= EIGHT;
        of_eight &= many;
        const int first = of_eight ? max(b0, o * EIGHT) : many ? o0 * EIGHT : b0,
                  members = of_eight ? min(b1, o * EIGHT + EIGHT - 1) - first + 1 : many ? b1 / EIGHT - o0 + 1 : b1 - b0 + 1;
        int *count = of_eight ? of_eights + (2 * o + (o == o0)) * COLUMNS : arrived + (seg.b * heads + seg.h) * COLUMNS, last = 0;
        __threadfence();
        __syncwarp();
        if (lane == 0 && (last = atomicAdd(count + column, 1) == members - 1)) count[column] = 0;
        if (!__shfl_sync(~0u, last, 0)) break;
        __threadfence();
        u8 *const begun = of_blocks + (2 * b0 + 1) * PIECE_ALL, *const at_first = of_blocks + 2 * first * PIECE_ALL;
        const bool with_begun = !of_eight || first == b0;
        from = {at_first, begun, 2 * (many && !of_eight ? EIGHT : 1) * PIECE_ALL, with_begun ? 0 : -1, members};
        into = !of_eight ? nullptr : with_begun ? begun : at_first;
      }
    }
    at = to;
  }
}

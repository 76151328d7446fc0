// MLA decode over paged NVFP4 latents, for SM90: one query token a request, up to 16 heads, rank 512 + 64 rotary values.
//
// Compiled at run time, with these macros:
//   TEAMS  teams of four warps that read tiles
//   DEPTH  words of each row whose registers the tensor cores may still be reading
//   Kernel: mla(...), grid of one block per multiprocessor, 128 * (TEAMS + 2) threads, dynamic shared memory as
//   formats_latent.py says.
//
// Storage: planes [page, slot, row] whose slots follow one another, or are records of all three in this order: values, block
// scales, BF16 rotary values. All at multiples of 16 bytes.
//
// Work. A tile is 64 tokens. All tiles of the batch stand in one line, which is cut evenly over the blocks; a block has a
// segment of each of some requests. What several blocks have of a request is left for Triton's combine_kernel to join, in
// the order of blocks: the result depends on the batch's shape only. In a block, teams of four warps:
//   Fetchers, one team, copy tiles as they are stored to shared memory, each warp 16 tokens, a tile ahead of each reader.
//   Readers, TEAMS teams, take tiles in turn. Each warp has 16 tokens: it makes float16 of them in registers, which are
//     S^T [token, head] = K Q^T's operand A, leaves them in shared memory, and leaves there the weights P that they have.
//   Weighers, one team, add O^T [dim, head] = V^T P^T and sum weights; each warp has 128 dims.
// Barriers: what a fetcher brought has landed, and is taken; what a reader left is full, and is empty again, a quarter of the
// dims at a time, as readers fill it in that order; queries that were asked for are there.
//
// Why so (docs/design/mla-decode.md has the measurements). mma.sync takes six cycles of a scheduler and overlaps with hardly
// anything, so that products, decoding and copies add up; wgmma goes beside them. Decoding twice, for keys and for values,
// would cost more than to keep a tile as float16. A lane's four registers of operand A are four 8 x 8 matrices of stmatrix:
// no moves. Loads into registers would be waited for all at once, as they share a scoreboard; copies are not. Between a
// reader's last product and its next tile there is as little as can be: others fetch, add and load queries.
//
// Arithmetic. E2M1 becomes float16 by masks and shifts, exactly, times 2^-14, and stays exact when it is multiplied by its
// block scale; the power of two is undone in the softmax scale and the output. P is relative to a maximum, which a warp
// takes as it was TEAMS tiles ago and raises only by far, and which the weigher compares with its own: where they differ,
// for few tiles, it brings both to the larger.
//
// The order of dims may be chosen freely, if queries and the output follow. Lane c (lane % 4) reads bytes 64 c + 16 j .. + 15
// of a row, j = 0..3: words w = 0..3 of eight values each. Pairs (0,4) (1,5) of a word are the operands' step 8 j + 2 w, and
// rows 16 w .. + 15 of V^T's block 2 j; pairs (2,6) (3,7) are the next step and block. So four dims of a lane are neighbours.
//
// Names: g = lane / 4 and c = lane % 4, the coordinates of fragments.

#include "bits.cuh"

constexpr int RANK = 512, ROPE = 64, HEADS = 16, TILE = 64, THREADS = 128 * (TEAMS + 2);
constexpr int DATA = RANK / 2, SCALES = RANK / 16, ROTARY = 2 * ROPE, ROW = DATA + SCALES + ROTARY;  // bytes of a row
constexpr int BLOCK = TILE * 128, DECODED = RANK / 64 * BLOCK;         // a tile as float16: blocks of 64 dims, 128 bytes a token
constexpr int WEIGHTS = TILE * HEADS * 2, STEPS = RANK / 16, QUERIES = (STEPS + ROPE / 16) * 512, LATELY = 2 * TEAMS, STORED = 16 * ROW;
constexpr int BARRIERS = TEAMS + 4 * TEAMS + 2 + 8 * TEAMS;  // full, empty (four a stage), asked (two), landed and taken (of warps)
static_assert(TEAMS <= 2, "with more, a reader could be two turns ahead of the queries that were asked for");
constexpr u32 ALL = ~0u;
constexpr float SLACK = 8.f;      // P may be as large as 2^SLACK
constexpr float FOLD = 16384.f;   // 2^14, by which decoded values are too small

// ---- products, and what they take ------------------------------------------------------------------------------------
// wgmma m64n16k16. B: 8 x 8 blocks of 128 bytes, two along K, then those of the other eight columns. A: in registers, or
// rows of 128 swizzled bytes that lie across K. Descriptors are said by their lower halves.
#define ACC "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3])
constexpr u32 A_LOW = 1 << 16, A_HIGH = 1024 / 16 | 1 << 30, B_LOW = 128 / 16 << 16, B_HIGH = 256 / 16;
DEV void wgmma_keys(float (*c)[4], const u32* a, u32 b) {
  asm volatile("{\n.reg .b64 y;\nmov.b64 y,{%12,%13};\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7},{%8,%9,%10,%11},y,1,1,1,0;\n}"
      : ACC : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(B_HIGH));
}
DEV void wgmma_rope(float (*c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b) {
  asm volatile("{\n.reg .b64 y;\nmov.b64 y,{%12,%13};\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7},{%8,%9,%10,%11},y,1,1,1,0;\n}"
      : ACC : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b), "n"(B_HIGH));
}
DEV void wgmma_values(float (*c)[4], u32 a, u32 b) {
  asm volatile("{\n.reg .b64 x,y;\nmov.b64 x,{%8,%10};\nmov.b64 y,{%9,%11};\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7},x,y,1,1,1,1,0;\n}"
      : ACC : "r"(a), "r"(b), "n"(A_HIGH), "n"(B_HIGH));
}
DEV void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEV void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory"); }
DEV void show_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Eight E2M1 values n0..n7 -> four pairs (n0,n4) (n1,n5) (n2,n6) (n3,n7). The upper byte of a float16 holds a value's
// sign (bit 7) and magnitude (bits 3..1): first all upper bytes, of odd and of even values, then halves.
DEV void e2m1(u32 x, u32* h) {
  u32 odd, even;  // said in PTX, as the compiler would make more of it: what lop3 selects hides signs in the wrong place
  asm("{\n.reg .b32 s,t,u;\nand.b32 s,%2,0x88888888;\nshr.u32 t,%2,3;\nshl.b32 u,%2,1;\n"
      "lop3.b32 %0,t,s,0x0E0E0E0E,0xE4;\nshl.b32 s,s,4;\nlop3.b32 %1,u,s,0x0E0E0E0E,0xE4;\n}" : "=r"(odd), "=r"(even) : "r"(x));
  h[0] = __byte_perm(even, 0, 0x2404);
  h[1] = __byte_perm(odd, 0, 0x2404);
  h[2] = even & 0xFF00FF00u;
  h[3] = odd & 0xFF00FF00u;
}

// ---- memory ----------------------------------------------------------------------------------------------------------
struct Plane { const u8* data; u64 page; u32 slot; };  // strides in bytes
struct Latents { Plane data, scales, rope; };
// A warp's tokens of a tile, as they are stored, come to its place in shared memory: records as they are; of planes, 16 bytes
// of a row at an index that is mixed with others' bits, so that eight lanes' loads fall into different banks. What a lane
// has of them: rows g and g + 8.
struct Row { uint4 x[4]; uint2 scales; };
struct Rotary { uint4 x[2], y[2]; };
struct Place { u32 values[4], scales, rope[2], next_values, next_scales, next_rope; };  // of row g; how far g + 8 is
DEV u32 mixed(u32 index, u32 row) { return index ^ index >> 3 & 1 ^ 2 * (row & 1); }
DEV Place place_of(u32 stored, bool record, int g, int c) {
  Place at;
  const u32 pitch = record ? ROW : DATA, scales = record ? ROW : SCALES, rope = record ? ROW : ROTARY;
#pragma unroll
  for (int j = 0; j < 4; j++) at.values[j] = stored + g * pitch + 16 * (record ? 4 * c + j : mixed(4 * c + j, g));
  at.scales = stored + (record ? DATA : 16 * DATA) + g * scales + 8 * c;
#pragma unroll
  for (int half = 0; half < 2; half++)
    at.rope[half] = stored + (record ? DATA + SCALES : 16 * (DATA + SCALES)) + g * rope + 64 * (record ? half : half ^ g & 1) + 16 * c;
  at.next_values = 8 * pitch; at.next_scales = 8 * scales; at.next_rope = 8 * rope;
  return at;
}
DEV uint4 load16(u32 at) {
  uint4 x; asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(at) : "memory"); return x;
}
DEV uint2 load8(u32 at) { uint2 x; asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(x.x), "=r"(x.y) : "r"(at) : "memory"); return x; }
DEV void read(Row& one, Row& two, Rotary& r, const Place& at) {
#pragma unroll
  for (int half = 0; half < 2; half++) { r.x[half] = load16(at.rope[half]); r.y[half] = load16(at.rope[half] + at.next_rope); }
  one.scales = load8(at.scales); two.scales = load8(at.scales + at.next_scales);
#pragma unroll
  for (int j = 0; j < 4; j++) { one.x[j] = load16(at.values[j]); two.x[j] = load16(at.values[j] + at.next_values); }
}
template <int AT> DEV void copy(u32 to, const u8* from) {  // 16 bytes a lane
  asm volatile("cp.async.cg.shared.global.L2::256B [%0+%2],[%1+%2],16;" :: "r"(to), "l"(from), "n"(512 * AT) : "memory");
}
DEV void make_barrier(u32 bar, u32 count) { asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" :: "r"(bar), "r"(count) : "memory"); }
template <int N> DEV void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(N)); }
template <int N> DEV void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(N)); }
DEV void all_but_fetchers_meet() { asm volatile("bar.sync 2,%0;" :: "n"(128 * TEAMS + 128) : "memory"); }
DEV void weighers_meet() { asm volatile("bar.sync 1,128;" ::: "memory"); }

// ---- the batch -------------------------------------------------------------------------------------------------------
// cum: 64 times the tiles before a request, and what the one before it has in its last tile, less one.
struct Work {
  const int *lens, *starts, *pages, *cum; int B, stride, page_bits;
  DEV int before(int b) const { return cum[b] >> 6; }
  DEV int len(int b) const {
    const int tiles = before(b + 1) - before(b);
    return tiles ? (tiles - 1) * TILE + (cum[b + 1] & 63) + 1 : 0;
  }
};
// A block's tiles of one request after the other.
struct Segment {
  const Work& work; int b, begin, end, stop;
  DEV Segment(const Work& work, int b, int first, int stop) : work(work), b(b), begin(first), end(first), stop(stop) {}
  DEV bool next() {
    begin = end;
    if (begin >= stop) return false;
    while (work.before(b + 1) <= begin) b++;
    end = min(stop, work.before(b + 1));
    return true;
  }
};
// Tile after tile. What a warp reads of one: 16 tokens from a slot of a page. After a request's end, of page 0;
// after the last tile, of slot -1.
struct Spot { int page, slot; };
struct Cursor {
  const Work& work; int at, stop, b, before, upto, len; const int* pages;
  DEV Cursor(const Work& work, int b, int at, int stop) : work(work), at(at), stop(stop) { begin(b); }
  DEV void begin(int request) {
    b = request; before = work.before(b); upto = work.before(b + 1); len = work.len(b); pages = work.pages + (u64)b * work.stride;
  }
  DEV Spot next(int warp) {
    if (at >= stop) return {0, -1};
    while (at >= upto) begin(b + 1);
    const int token = (at - before) * TILE + 16 * warp;
    at++;
    return {token < len ? pages[token >> work.page_bits] : 0, token & ((1 << work.page_bits) - 1)};
  }
};
DEV const u8* row_of(const Plane& plane, const Spot& spot) { return plane.data + ((u64)(u32)spot.page * plane.page + (u32)spot.slot * plane.slot); }
DEV void fetch(u32 to, const Latents& from, const Spot& spot, int lane, u32 landed) {
  const bool record = from.data.slot == ROW;
  const u8 *const values = row_of(from.data, spot) + 16 * lane,
           *const scales = record ? values + 16 * DATA : row_of(from.scales, spot) + 16 * lane,
           *const rope = record ? values + 16 * (DATA + SCALES) : row_of(from.rope, spot) + 16 * lane;
  const u32 to_values = to + 16 * (record ? lane : mixed(lane % 16, lane / 16) + lane / 16 * 16),  // 16 lanes a row
            to_scales = to + 16 * DATA + 16 * lane,
            to_rope = to + 16 * (DATA + SCALES) + 16 * (record ? lane : lane ^ lane / 2 & 4);          // 8 lanes a row
  copy<0>(to_values, values); copy<1>(to_values, values); copy<2>(to_values, values); copy<3>(to_values, values);
  copy<4>(to_values, values); copy<5>(to_values, values); copy<6>(to_values, values); copy<7>(to_values, values);
  copy<0>(to_scales, scales);
  copy<0>(to_rope, rope); copy<1>(to_rope, rope); copy<2>(to_rope, rope); copy<3>(to_rope, rope);
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(landed) : "memory");
}

// ---- queries ---------------------------------------------------------------------------------------------------------
DEV float value(const uint4& x, int i) { return __uint_as_float(i & 1 ? at(x, i / 2) & 0xFFFF0000u : at(x, i / 2) << 16); }
DEV u32 clamped(const uint4& x, int i, int j) { return halves(clamped(value(x, i)), clamped(value(x, j))); }
// To where wgmma finds them, by the first WARPS warps. Eight values of a head are a lane's in two steps; rotary ones stay as
// they are. A warp takes eight heads and four eights, which go to the words of rows of 16 bytes: no conflicts of banks.
template <int WARPS> DEV void keep_queries(u8* to, const u16* q, int heads, int q_head) {
  constexpr int EIGHTS = RANK / 8, MANY = (RANK + ROPE) / 32 * 2, TIMES = (MANY + WARPS - 1) / WARPS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pair = lane / 8;
  uint4 x[TIMES];  // all loads before the first is used
#pragma unroll
  for (int k = 0; k < TIMES; k++) {
    const int part = warp + WARPS * k, head = part % 2 * 8 + lane % 8, four = part / 2;
    const int eight = four < EIGHTS / 4 ? four + 16 * pair : 4 * four + pair;
    x[k] = part < MANY && head < heads ? *(const uint4*)(q + (u64)head * q_head + 8 * eight) : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int k = 0; k < TIMES; k++) {
    const int part = warp + WARPS * k, four = part / 2;
    if (part >= MANY) break;
    const bool rotary = four >= EIGHTS / 4;
    u32* const place = (u32*)to + 256 * four + part % 2 * 64 + lane % 8 * 4 + pair;  // a step is 128 words
    place[0] = rotary ? x[k].x : clamped(x[k], 0, 4); place[32] = rotary ? x[k].y : clamped(x[k], 1, 5);
    place[128] = rotary ? x[k].z : clamped(x[k], 2, 6); place[160] = rotary ? x[k].w : clamped(x[k], 3, 7);
  }
  show_async();
}

// ---- keys: what is stored becomes float16, in registers and in shared memory -------------------------------------------
DEV void keep(u32 to, const u32* a) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0],{%1,%2,%3,%4};" :: "r"(to), "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]) : "memory");
}
// S^T += K Q^T: a quarter of the dims. f: registers of tokens g and g + 8 in turn, which wgmma reads until it is waited for.
DEV void key_quarter(float (*s)[4], u32 (*f)[8], const Row& first, const Row& second, u32 to, u32 queries, int j) {
  const u32 sx = e4m3s((j < 2 ? first.scales.x : first.scales.y) >> 16 * (j % 2)), sy = e4m3s((j < 2 ? second.scales.x : second.scales.y) >> 16 * (j % 2));
#pragma unroll
  for (int w = 0; w < 4; w++) {
    u32 a[4], b[4], *const x = f[(4 * j + w) % DEPTH];
    e2m1(at(first.x[j], w), a); e2m1(at(second.x[j], w), b);
    if (4 * j + w >= DEPTH) wgmma_wait<DEPTH - 1>();
#pragma unroll
    for (int i = 0; i < 4; i++) {
      x[2 * i] = w < 2 ? mul_low(a[i], sx) : mul_high(a[i], sx);
      x[2 * i + 1] = w < 2 ? mul_low(b[i], sy) : mul_high(b[i], sy);
    }
    const u32 place = (to ^ 32 * w) + 2 * j * BLOCK;
    keep(place, x); keep(place + BLOCK, x + 4);
    wgmma_begin();
    wgmma_keys(s, x, queries + 32 * (8 * j + 2 * w));
    wgmma_keys(s, x + 4, queries + 32 * (8 * j + 2 * w + 1));
    wgmma_commit();
  }
}
DEV void key_rope(float (*s)[4], const Rotary& r, u32 queries) {
  wgmma_begin();
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const uint4 &x = r.x[half], &y = r.y[half];
    wgmma_rope(s, x.x, y.x, x.y, y.y, queries + 32 * (STEPS + 2 * half));
    wgmma_rope(s, x.z, y.z, x.w, y.w, queries + 32 * (STEPS + 2 * half + 1));
  }
  wgmma_commit();
}

// ---- weights -----------------------------------------------------------------------------------------------------------
// Scores of tokens g and g + 8 become weights. m: the maxima of the lane's heads 2 c, 2 c + 1, 8 + 2 c, 8 + 2 c + 1.
DEV void keep_weights(float (*s)[4], float (*m)[2], u32* to, float* tops, int g, int c) {
  bool grows = false;
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int e = 0; e < 2; e++) grows |= fmaxf(s[n][e], s[n][e + 2]) > m[n][e] + SLACK;
  if (__any_sync(ALL, grows)) {
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float top = fmaxf(s[n][e], s[n][e + 2]);
#pragma unroll
        for (int x = 4; x < 32; x <<= 1) top = fmaxf(top, __shfl_xor_sync(ALL, top, x));
        m[n][e] = fmaxf(top, m[n][e]);
      }
  }
#pragma unroll
  for (int n = 0; n < 2; n++) {
    to[64 * n] = transposed(halves(ex2(s[n][0] - m[n][0]), ex2(s[n][1] - m[n][1])));
    to[64 * n + 32] = transposed(halves(ex2(s[n][2] - m[n][0]), ex2(s[n][3] - m[n][1])));
    if (g == 0) *(float2*)(tops + 8 * n + 2 * c) = make_float2(m[n][0], m[n][1]);
  }
}
DEV float low_half(u32 x) { float r; asm("{\n.reg .b16 l,h;\nmov.b32 {l,h},%1;\ncvt.f32.f16 %0,l;\n}" : "=f"(r) : "r"(x)); return r; }
DEV float high_half(u32 x) { float r; asm("{\n.reg .b16 l,h;\nmov.b32 {l,h},%1;\ncvt.f32.f16 %0,h;\n}" : "=f"(r) : "r"(x)); return r; }
DEV float sum_of(const uint4& x) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) sum += low_half(at(x, i)) + high_half(at(x, i));
  return sum;
}
// What a lane of the weighers keeps. m: of heads 2 (lane % 8) and the next. l: the sum of the eight weights of each tile that
// lie at 16 * lane of its warp's, which are of head 8 (lane / 16) + lane % 8. o: of heads 8 n + 2 c + i % 2.
struct Kept {
  float o[8][2][4], l; float2 m;
  DEV void clear() {
    m = make_float2(NONE, NONE); l = 0;
#pragma unroll
    for (int t = 0; t < 8; t++)
#pragma unroll
      for (int i = 0; i < 8; i++) o[t][i / 4][i % 4] = 0;
  }
};
DEV float of_head(const float2& x, int from, int head) {  // from: the lane that has those of head 0
  const float even = __shfl_sync(ALL, x.x, from + head / 2), odd = __shfl_sync(ALL, x.y, from + head / 2);
  return head & 1 ? odd : even;
}

template <int FIRST> DEV void weigh(float (*o)[2][4], u32 tile, u32 weights) {
  tile = __reduce_or_sync(ALL, tile / 16 | A_LOW);  // the same in all lanes, which the compiler knows now
  weights = __reduce_or_sync(ALL, weights / 16 | B_LOW);
#pragma unroll
  for (int i = FIRST; i < FIRST + 2; i++)
#pragma unroll
    for (int t = 0; t < 4; t++) wgmma_values(o[i], tile + (i * BLOCK + t * 2048) / 16, weights + 32 * t);
}

// ---- the kernel ------------------------------------------------------------------------------------------------------
extern "C" __global__ void __launch_bounds__(THREADS, 1) mla(
    const u16* Q, u16* OUT, float* PARTS, float* LSE, int* PLAN, const u8* values, const u8* block_scales, const u8* rope,
    const float* global_scale, const int* lens, const int* starts, const int* pages,
    u64 values_page, u64 scales_page, u64 rope_page, int values_slot, int scales_slot, int rope_slot,
    float scale, int B, int stride, int page_bits, int heads, int q_token, int q_head) {
  extern __shared__ __align__(1024) u8 smem[];
  const int team = threadIdx.x / 128 - 1, warp = threadIdx.x % 128 / 32,  // team -1 weighs, team TEAMS fetches
            lane = threadIdx.x % 32, g = lane >> 2, c = lane & 3;
  u8 *const weights = smem + TEAMS * DECODED, *const queries = weights + TEAMS * WEIGHTS;  // of two segments
  float (*const tops)[4][HEADS] = (float (*)[4][HEADS])(queries + 2 * QUERIES);  // maxima: of a stage's warps
  float (*const lately)[HEADS] = (float (*)[HEADS])(tops + TEAMS);          // of the weighers after the last LATELY tiles
  float (*const stats)[HEADS] = lately + LATELY;
  u8* const stored = (u8*)(stats + 4);
  u64* const barriers = (u64*)(stored + 4 * TEAMS * STORED);
  int *const sums = (int*)(barriers + BARRIERS), *const cum = sums + THREADS / 32;
  const u32 full = shared_address(barriers), empty = full + 8 * TEAMS, asked = empty + 32 * TEAMS, landed = asked + 16, taken = landed + 32 * TEAMS;

  if (threadIdx.x == THREADS - 1) {
    cum[0] = 0;
    for (int i = 0; i < BARRIERS; i++) make_barrier(full + 8 * i, i < 5 * TEAMS + 2 ? 4 : i < 9 * TEAMS + 2 ? 32 : 1);
  }
  const float whole = *global_scale;
  // Tiles before each request: a scan, THREADS requests at a time.
  for (int base = 0, before = 0; base < B; base += THREADS) {
    const int b = base + threadIdx.x, len = b < B ? max(lens[b], 0) : 0;
    int x = (len + TILE - 1) / TILE;
    if (b < B) asm volatile("prefetch.global.L1 [%0];" :: "l"(starts + b));
#pragma unroll
    for (int i = 1; i < 32; i <<= 1) { int y = __shfl_up_sync(ALL, x, i); if (lane >= i) x += y; }
    if (lane == 31) sums[threadIdx.x / 32] = x;
    __syncthreads();
    int total = 0;
    for (int i = 0; i < THREADS / 32; i++) { if (i < threadIdx.x / 32) x += sums[i]; total += sums[i]; }
    if (b < B) cum[b + 1] = (before + x) << 6 | (len - 1 & 63);
    before += total;
    __syncthreads();
  }
  const Latents latents{{values, values_page, (u32)values_slot}, {block_scales, scales_page, (u32)scales_slot}, {rope, rope_page, (u32)rope_slot}};
  const Work work{lens, starts, pages, cum, B, stride, page_bits};
  for (int b = blockIdx.x; b < B; b += gridDim.x)  // requests of no tokens
    if (work.len(b) == 0) {
      if (threadIdx.x == 0) { PLAN[2 * b] = 0; PLAN[2 * b + 1] = 1; }
      for (int i = threadIdx.x; i < (starts[b + 1] - starts[b]) * heads * RANK / 2; i += THREADS)
        ((u32*)(OUT + (u64)starts[b] * heads * RANK))[i] = 0;
    }
  const int T = work.before(B), blocks = max(min((int)gridDim.x, T / TEAMS), 1);
  if (blockIdx.x >= blocks) return;
  const int block0 = (u32)T * blockIdx.x / blocks, block1 = (u32)T * (blockIdx.x + 1) / blocks;
  if (block0 >= block1) return;
#pragma unroll 1
  for (int b = threadIdx.x; b < B; b += THREADS)
    if (work.before(b) <= block0 && block0 < work.before(b + 1)) *sums = b;
  __syncthreads();
  const int b0 = *sums;  // the request of the first tile

  if (team == TEAMS) {  // ---- copies
    give_registers<40>();
    Cursor cursor(work, b0, block0, block1);
    Spot next = cursor.next(warp);
    for (int k = 0; next.slot >= 0; k++) {
      const int place = 4 * (k % TEAMS) + warp;
      if (k >= TEAMS) await(taken + 8 * place, k / TEAMS - 1 & 1);
      fetch(shared_address(stored) + STORED * place, latents, next, lane, landed + 8 * place);
      next = cursor.next(warp);
    }
    return;
  }
  // The first queries, while what is read is on its way.
  keep_queries<4 * TEAMS + 4>(queries, Q + (u64)starts[b0] * q_token, heads, q_head);
  all_but_fetchers_meet();
  if (team >= 0) {  // ---- keys
    take_registers<168>();
    const float apart = 1.f / (whole * FOLD), unit = scale * LOG2E * whole * FOLD;
    const Place place = place_of(shared_address(stored) + STORED * (4 * team + warp), values_slot == ROW, g, c);
    const u32 keep = shared_address(smem) + team * DECODED + (16 * warp + lane % 16) * 128 + 16 * (lane / 16 ^ lane % 8);
    const u32 landed_at = landed + 8 * (4 * team + warp), taken_at = taken + 8 * (4 * team + warp);
    Segment segment(work, b0, block0, block1);
    for (int i = 0, turn = 0, tile = block0 + team; segment.next(); i++) {
      const int before = work.before(segment.b), len = work.len(segment.b);
      const u32 queries_at = __reduce_or_sync(ALL, shared_address(queries + i % 2 * QUERIES) / 16 | B_LOW);  // as in weigh()
      if (i > 0 && tile < segment.end) await(asked + i % 2 * 8, (i - 1) / 2 & 1);
      for (; tile < segment.end; tile += TEAMS, turn ^= 1) {
        Row one, two;
        Rotary rotary;
        await(landed_at, turn);
        read(one, two, rotary, place);
        __syncwarp();
        if (lane == 0) arrive(taken_at);
        float s[2][4] = {};
        key_rope(s, rotary, queries_at);
        const int there = len - (tile - before) * TILE - 16 * warp - g;
        if (there <= 8) two.scales = make_uint2(0, 0);  // slots that nobody wrote may hold scales that are no numbers
        if (there <= 0) one.scales = make_uint2(0, 0);
        wgmma_wait<0>();
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) s[n][i] *= apart;
        u32 f[DEPTH][8];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          await(empty + 32 * team + 8 * j, turn ^ 1);
          key_quarter(s, f, one, two, keep, queries_at, j);
        }
        wgmma_wait<0>();
        float m[2][2];
#pragma unroll
        for (int n = 0; n < 2; n++) {
          const float2 known = *(const float2*)&lately[(turn ^ 1) * TEAMS + team][8 * n + 2 * c];
#pragma unroll
          for (int i = 0; i < 4; i++) s[n][i] = 8 * (i / 2) < there ? s[n][i] * unit : __int_as_float(0xff800000);
          m[n][0] = tile < segment.begin + TEAMS ? NONE : known.x; m[n][1] = tile < segment.begin + TEAMS ? NONE : known.y;
        }
        keep_weights(s, m, (u32*)(weights + team * WEIGHTS + 512 * warp) + lane, tops[team][warp], g, c);
        show_async();
        __syncwarp();
        if (lane == 0) arrive(full + 8 * team);
      }
    }
    return;
  }

  // ---- values
  Kept kept;
  const int mine = 8 * (lane / 16) + lane % 8;  // the head of l
  Segment segment(work, b0, block0, block1), ahead = segment;
  ahead.next();
  for (int i = -1, k = 0;; i++) {
    if (i >= 0 && !segment.next()) break;
    const int b = segment.b, q_row = starts[b];
    const u32 first_block = ((u32)(work.before(b) + 1) * blocks - 1) / T, last_block = ((u32)work.before(b + 1) * blocks - 1) / T;  // of the request
    if (i >= 0) kept.clear();
    for (int tile = segment.begin; tile < segment.end; tile++, k++) {
      const int stage = k % TEAMS;
      uint4* const place = (uint4*)(weights + stage * WEIGHTS + 512 * warp) + lane;
      await(full + 8 * stage, k / TEAMS & 1);
      const float2 top = ((const float2*)tops[stage])[lane];  // of warp lane / 8
      if (__any_sync(ALL, top.x != kept.m.x || top.y != kept.m.y)) {  // rare: all go on from the same maxima
        float2 most = top;
#pragma unroll
        for (int x = 8; x < 32; x <<= 1) {
          most.x = fmaxf(most.x, __shfl_xor_sync(ALL, most.x, x));
          most.y = fmaxf(most.y, __shfl_xor_sync(ALL, most.y, x));
        }
        most.x = fmaxf(most.x, kept.m.x); most.y = fmaxf(most.y, kept.m.y);
        const float2 fade = make_float2(ex2(kept.m.x - most.x), ex2(kept.m.y - most.y)), less = make_float2(ex2(top.x - most.x), ex2(top.y - most.y));
        kept.m = most;
        kept.l *= of_head(fade, 0, mine);
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const float r = of_head(fade, 0, 8 * n + 2 * c + e);
#pragma unroll
            for (int i = 0; i < 8; i++) { kept.o[i][n][e] *= r; kept.o[i][n][e + 2] *= r; }
          }
        const float f = of_head(less, 8 * warp, mine);
        const u32 ff = halves(f, f);
        uint4 x = *place;
        *place = make_uint4(mul2(x.x, ff), mul2(x.y, ff), mul2(x.z, ff), mul2(x.w, ff));
        show_async();
        weighers_meet();
      }
      const u32 decoded = shared_address(smem) + stage * DECODED, weighed = shared_address(weights) + stage * WEIGHTS;
      wgmma_begin();
      weigh<0>(kept.o, decoded, weighed); wgmma_commit();
      weigh<2>(kept.o, decoded, weighed); wgmma_commit();
      weigh<4>(kept.o, decoded, weighed); wgmma_commit();
      weigh<6>(kept.o, decoded, weighed); wgmma_commit();
      kept.l += sum_of(*place);
      if (warp == 0 && lane < 8) *(float2*)&lately[k % LATELY][2 * lane] = kept.m;
      __syncwarp();
      const u32 left = empty + 32 * stage;
      wgmma_wait<3>(); if (lane == 0) arrive(left);
      wgmma_wait<2>(); if (lane == 0) arrive(left + 8);
      wgmma_wait<1>(); if (lane == 0) arrive(left + 16);
      wgmma_wait<0>(); if (lane == 0) arrive(left + 24);
    }

    if (ahead.next()) {  // queries of segment i + 2, as all readers have left segment i
      keep_queries<4>(queries + (i & 1) * QUERIES, Q + (u64)starts[ahead.b] * q_token, heads, q_head);
      __syncwarp();
      if (lane == 0) arrive(asked + (i & 1) * 8);
    }
    if (i < 0) continue;

    // The end of a segment. A lane has four dims of each 32 of 128: of blocks 2 j and 2 j + 1, rows g and g + 8.
    const float sum = kept.l + __shfl_xor_sync(ALL, kept.l, 8);
    if (lane / 8 % 2 == 0) stats[warp][mine] = sum;
    weighers_meet();
    if (segment.begin == work.before(b) && threadIdx.x == 0) { PLAN[2 * b] = first_block + b; PLAN[2 * b + 1] = last_block - first_block + 1; }
    const int dim = 128 * (g / 2) + 8 * warp + 4 * (g % 2);
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int head = 8 * n + 2 * c + e;
        const float m = of_head(kept.m, 0, head);
        if (head >= heads) continue;
        const float sum = stats[0][head] + stats[1][head] + stats[2][head] + stats[3][head], f = whole * FOLD / sum;
        const u64 piece = (u64)(blockIdx.x + b) * HEADS + head, row = (u64)q_row * heads + head;
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float *const x = kept.o[2 * j][n], *const y = kept.o[2 * j + 1][n];
          const float4 four = make_float4(x[e] * f, x[e + 2] * f, y[e] * f, y[e + 2] * f);
          if (first_block == last_block) *(uint2*)(OUT + row * RANK + 32 * j + dim) = make_uint2(bf16s(four.x, four.y), bf16s(four.z, four.w));
          else *(float4*)(PARTS + piece * RANK + 32 * j + dim) = four;
        }
        if (first_block != last_block && warp == 0 && g == 0) LSE[piece] = m + lg2(sum);
      }
    weighers_meet();
  }
}

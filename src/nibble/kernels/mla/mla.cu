// MLA decode over paged E4M3 latents: one query token a request, up to 16 heads, rank 512 + 64 rotary values.
//
// Compiled at run time, with these macros:
//   TEAMS     teams of four warps of a block, as many as shared memory holds tiles for
//   Kernel: mla(...), grid of one block per multiprocessor, 128 * TEAMS threads, dynamic shared memory as mla.py says.
//
// Storage: planes [page, slot, row] of any strides, rows of 16 aligned bytes: values, block scales, BF16 rotary values.
//
// Work. A tile is 64 tokens. All tiles of the batch stand in one line, which is cut evenly over the blocks; the tiles of
// a block's segment, which is what it has of a request, are dealt to its teams in turn. A team copies a tile while it
// works on another. Teams are joined through shared memory at the end of a segment; what several blocks have of a request is
// left for Triton's combine_kernel to join, in the order of blocks: the result depends on the batch's shape only.
//
// Arithmetic. A latent is dequantised twice, in registers: as a key, and as a value; by count fewer cycles than to
// keep it in shared memory as float16, whose bytes would all be written once and read twice.
//   S^T [token, head] = K Q^T: each warp has 16 tokens.     O^T [dim, head] = V^T P^T: each warp has 128 dims.
// P goes through shared memory. It is relative to a maximum that all warps of a team share, and that few tiles raise.
// A lane's bytes of K and V are its mma fragments: the order of dims, and of tokens within 16, may be chosen freely.
// E4M3 is converted by the hardware; its scales, of 128 values each, multiply sums of scores, and P.
//
// Names: g = lane / 4 and c = lane % 4, the coordinates of mma fragments.

#include "bits.cuh"

constexpr int RANK = 512, ROPE = 64, HEADS = 16, TILE = 64, THREADS = 128 * TEAMS, QUERY_STEPS = 36, LATENT_STEPS = 32;
constexpr int DATA = RANK, SCALES = RANK / 128 * 4;  // bytes of a row
constexpr int PITCH = 544;  // of values and scales: 8 words more than whole rounds of the 32 banks
constexpr int TILE_BYTES = TILE * PITCH, ROPE_BYTES = TILE * ROPE * 2, WEIGHTS = TILE * HEADS * 2;
constexpr int QUERIES = QUERY_STEPS * 512, TEAM_BYTES = 2 * TILE_BYTES + ROPE_BYTES;
constexpr int MEETING = QUERIES + TEAMS * 2 * WEIGHTS > RANK * HEADS * 4 ? QUERIES + TEAMS * 2 * WEIGHTS : RANK * HEADS * 4;
constexpr float SLACK = 4.f;                                    // P may be as large as 2^SLACK
constexpr float VALUE_FOLD = 1.f / 64;
constexpr int LEAST = TEAMS;                                    // tiles of a block, if there are so many
static_assert(PITCH % 128 == 32 && PITCH >= DATA + SCALES, "rows must spread over the banks");

// ---- bits and pieces -------------------------------------------------------------------------------------------------
// ---- memory ----------------------------------------------------------------------------------------------------------
struct Plane { const u8* data; u64 page; u32 slot; };  // strides in bytes
struct Latents { Plane data, scales, rope; };
DEV void copy16(u32 to, const u8* from) { asm volatile("cp.async.cg.shared.global [%0],[%1],16;" :: "r"(to), "l"(from) : "memory"); }
DEV void copy16_or_zeros(u32 to, const u8* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" :: "r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
// Rows of one plane, each in CHUNKS of 16 bytes; SWAP: of tokens of which this bit is set, halves of rows are swapped.
template <int CHUNKS, int STEP, int SWAP, bool WHOLE> DEV void copy_rows(u32 to, const Plane& from, u64 page, int slot, int live, int lane) {
  const int first = lane / CHUNKS, chunk = lane % CHUNKS;
  if (32 / CHUNKS > 16 && first >= 16) return;
  const u8* p = from.data + (page * from.page + (u32)(slot + first) * from.slot + 16 * chunk);
  to += first * STEP;
#pragma unroll
  for (int r = 0; r < 16; r += 32 / CHUNKS) {
    const u32 place = to + r * STEP + 16 * (chunk ^ (r + first & SWAP));
    if (WHOLE) copy16(place, p);
    else copy16_or_zeros(place, first + r < live ? p : from.data, first + r < live);
    p += 32 / CHUNKS * from.slot;
  }
}
template <bool WHOLE> DEV void copy_planes(u32 to, u32 to_rope, const Latents& from, u64 page, int slot, int live, int lane) {
  copy_rows<DATA / 16, PITCH, 0, WHOLE>(to, from.data, page, slot, live, lane);
  copy_rows<SCALES / 16, PITCH, 0, WHOLE>(to + DATA, from.scales, page, slot, live, lane);
  copy_rows<ROPE * 2 / 16, ROPE * 2, 4, WHOLE>(to_rope, from.rope, page, slot, live, lane);
}
// Starts copying 16 tokens of a tile, `live` of which are there; they lie in one page. The others become zeros, as slots
// that nobody wrote may hold NaN. Rotary values of tokens that are read together lie in different halves of their rows.
DEV void fetch(u32 to, u32 to_rope, const Latents& from, u64 page, int slot, int live, int lane) {
  if (live >= 16) copy_planes<true>(to, to_rope, from, page, slot, live, lane);
  else copy_planes<false>(to, to_rope, from, page, slot, live, lane);
  asm volatile("cp.async.commit_group;" ::: "memory");
}
DEV void meet(int team) { asm volatile("bar.sync %0,128;" :: "r"(team + 1) : "memory"); }

// ---- the batch -------------------------------------------------------------------------------------------------------
struct Work { const int *lens, *starts, *pages; const int* cum; int B, stride, page_bits; };  // cum: tiles before a request
DEV int request_of(const Work& work, int tile) {
  int lo = 0, hi = work.B - 1;
  while (lo < hi) {
    int middle = (lo + hi + 1) / 2;
    if (work.cum[middle] <= tile) lo = middle; else hi = middle - 1;
  }
  return lo;
}
// The tiles of a team: those of each segment in turn, `at` is the next. What a warp fetches of it is known a turn ahead.
struct Cursor {
  int b, at, end, stop, token, live; u64 page;
  DEV void look(const Work& work, int warp) {
    token = (at - work.cum[b]) * TILE + 16 * warp;
    live = work.lens[b] - token;
    page = live > 0 ? work.pages[(u64)b * work.stride + (token >> work.page_bits)] : 0;
  }
  DEV void begin(const Work& work, int first, int last, int team, int warp) {
    stop = last; at = first + team; b = request_of(work, first); end = min(last, work.cum[b + 1]);
    settle(work, team, warp);
  }
  DEV void settle(const Work& work, int team, int warp) {
    while (at >= end && end < stop) {
      at = end + team;
      while (work.cum[b + 1] <= end) b++;
      end = min(stop, work.cum[b + 1]);
    }
    if (at < end) look(work, warp);
  }
  DEV void next(const Work& work, int team, int warp) { at += TEAMS; settle(work, team, warp); }
  DEV bool there() const { return at < end; }
};

// ---- queries ---------------------------------------------------------------------------------------------------------
// Dims of operand register u of a step, for the lanes of column c.
DEV int dim_of(int step, int c, int u, int e) {
  if (step >= LATENT_STEPS) return RANK + (step - LATENT_STEPS) / 2 * 32 + 8 * c + (step & 1) * 4 + 2 * u + e;
  return 16 * (4 * (step / 4) + c) + step % 4 * 4 + 2 * u + e;
}
DEV void keep_queries(uint4* to, const u16* q, int heads, int q_head) {
  constexpr int TIMES = (QUERY_STEPS * 32 + THREADS - 1) / THREADS;
  u16 x[TIMES][4][2];  // of heads g and g + 8, two registers each; all loads before the first is used
#pragma unroll
  for (int k = 0; k < TIMES; k++)
#pragma unroll
    for (int r = 0; r < 8; r++) {
      const int i = min(threadIdx.x + k * THREADS, QUERY_STEPS * 32 - 1), head = i % 32 / 4 + 8 * (r / 4);
      x[k][r / 2][r % 2] = q[(u64)min(head, heads - 1) * q_head + dim_of(i / 32, i % 4, r / 2 % 2, r % 2)];
    }
#pragma unroll
  for (int k = 0; k < TIMES; k++) {
    const int i = threadIdx.x + k * THREADS;
    u32 w[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const u32 lo = x[k][r][0], hi = x[k][r][1];
      const float a = __uint_as_float(lo << 16), b = __uint_as_float(hi << 16);
      const u32 half = halves(clamped(a), clamped(b));
      w[r] = i % 32 / 4 + 8 * (r / 2) >= heads ? 0 : i / 32 < LATENT_STEPS ? half : lo | hi << 16;
    }
    if (i < QUERY_STEPS * 32) to[i] = make_uint4(w[0], w[1], w[2], w[3]);
  }
}

// ---- keys: S^T += K Q^T for 16 tokens --------------------------------------------------------------------------------
// Row g of a fragment, as a token of 8: rows that are read together lie in different banks, here and as values.
DEV int token_of(int g) { return g & 1 ? 4 + (((g >> 1) + 2) & 3) : g >> 1; }

DEV void step16(float (*s)[4], u32 a0, u32 a1, u32 a2, u32 a3, uint4 q) {
  mma_f16(s[0], a0, a1, a2, a3, q.x, q.y);
  mma_f16(s[1], a0, a1, a2, a3, q.z, q.w);
}
// A quarter of the latent's dims, which have one scale. row: a lane's row g; row g + 8 lies eight tokens further.
DEV void key_quarter(float (*s)[4], const u8* row, const uint4* q, int j, int c) {
  float part[2][2][4] = {};
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const u8* p = row + 16 * (4 * (2 * j + half) + c);
    const uint4 x = *(const uint4*)p, y = *(const uint4*)(p + 8 * PITCH);
#pragma unroll
    for (int w = 0; w < 4; w++)
      step16(part[w % 2], e4m3s(at(x, w)), e4m3s(at(y, w)), e4m3s(at(x, w) >> 16), e4m3s(at(y, w) >> 16), q[(8 * j + 4 * half + w) * 32]);
  }
  const float sx = *(const float*)(row + DATA + 4 * j), sy = *(const float*)(row + DATA + 4 * j + 8 * PITCH);
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) s[n][i] += (part[0][n][i] + part[1][n][i]) * (i < 2 ? sx : sy);
}
// row: the lane's in rotary values; swap: 64 where its halves are swapped.
DEV void key_rope(float (*s)[4], const u8* row, int swap, const uint4* q) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const u8* p = row + (64 * half ^ swap);
    const uint4 x = *(const uint4*)p, y = *(const uint4*)(p + 8 * 2 * ROPE);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint4 b = q[(LATENT_STEPS + 2 * half + i) * 32];
      mma_bf16(s[0], at(x, 2 * i), at(y, 2 * i), at(x, 2 * i + 1), at(y, 2 * i + 1), b.x, b.y);
      mma_bf16(s[1], at(x, 2 * i), at(y, 2 * i), at(x, 2 * i + 1), at(y, 2 * i + 1), b.z, b.w);
    }
  }
}

// ---- values: O^T += V^T P^T for 16 tokens ----------------------------------------------------------------------------
// Lane g has dims 16 g .. + 15 of the warp's 128, of tokens t, u, t + 8, u + 8. Tile i of O^T has dims 2i (rows 0..7) and
// 2i + 1. first, second: where the lane's dims of tokens t and u lie; *_scale: where their scales do.
DEV void values16(float (*o)[2][4], const u8* first, const u8* second, const u8* first_scale, const u8* second_scale, uint4 p) {
  const uint4 x0 = *(const uint4*)first, x1 = *(const uint4*)second, x2 = *(const uint4*)(first + 8 * PITCH), x3 = *(const uint4*)(second + 8 * PITCH);
  const u32 s = halves(*(const float*)first_scale * 64, *(const float*)second_scale * 64);
  const u32 t = halves(*(const float*)(first_scale + 8 * PITCH) * 64, *(const float*)(second_scale + 8 * PITCH) * 64);
  p = make_uint4(mul2(p.x, s), mul2(p.y, t), mul2(p.z, s), mul2(p.w, t));
#pragma unroll
  for (int w = 0; w < 4; w++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u32 a = __byte_perm(at(x0, w), at(x1, w), half ? 0x7362 : 0x5140), b = __byte_perm(at(x2, w), at(x3, w), half ? 0x7362 : 0x5140);
      step16(o[2 * w + half], e4m3s(a), e4m3s(a >> 16), e4m3s(b), e4m3s(b >> 16), p);
    }
}

// ---- the softmax, as it goes along -----------------------------------------------------------------------------------
// Of the lane's heads 8 n + 2 c + e: the maximum that sums are relative to, and the sum of weights of the lane's tokens.
struct Sums {
  float o[8][2][4], m[2][2], l[2][2];
  DEV void clear() {
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) { m[n][e] = NONE; l[n][e] = 0; }
#pragma unroll
      for (int t = 0; t < 8; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) o[t][n][i] = 0;
    }
  }
  DEV void fade(int n, int e, float top) {  // to another maximum
    const float r = ex2(m[n][e] - top);
    m[n][e] = top; l[n][e] *= r;
#pragma unroll
    for (int t = 0; t < 8; t++) { o[t][n][e] *= r; o[t][n][e + 2] *= r; }
  }
  DEV bool raise(const float (*s)[4]) {  // the maxima, if scores exceed them by far
    bool grows = false;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) grows |= fmaxf(s[n][e], s[n][e + 2]) > m[n][e] + SLACK;
    if (!__any_sync(~0u, grows)) return false;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float top = fmaxf(s[n][e], s[n][e + 2]);
#pragma unroll
        for (int x = 4; x < 32; x <<= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, x));
        fade(n, e, fmaxf(top, m[n][e]));
      }
    return true;
  }
};
struct __align__(16) Board { float top[4][HEADS]; int raised[4]; };  // of a team's warps, for one tile

// ---- the kernel ------------------------------------------------------------------------------------------------------
struct Stats { float top[TEAMS][HEADS], sum[TEAMS][4][HEADS]; };  // of teams, at the end of a segment

extern "C" __global__ void __launch_bounds__(THREADS, 1) mla(
    const u16* Q, u16* OUT, float* PARTS, float* LSE, int* PLAN, const u8* values, const u8* block_scales, const u8* rope,
    const float* global_scale, const int* lens, const int* starts, const int* pages,
    u64 values_page, u64 scales_page, u64 rope_page, int values_slot, int scales_slot, int rope_slot,
    float scale, int B, int stride, int page_bits, int heads, int q_token, int q_head) {
  extern __shared__ __align__(128) u8 smem[];
  __shared__ Board boards[TEAMS][2];
  __shared__ Stats stats;
  __shared__ u64 free_bars[TEAMS];
  __shared__ int sums[THREADS / 32];
  const int thread = threadIdx.x % 128, team = threadIdx.x / 128, warp = thread / 32, lane = threadIdx.x % 32, g = lane >> 2, c = lane & 3;
  u8 *const tiles = smem + team * TEAM_BYTES, *const meeting = smem + TEAMS * TEAM_BYTES, *const ropes = tiles + 2 * TILE_BYTES;
  uint4 *const queries = (uint4*)meeting, *const weights = (uint4*)(meeting + QUERIES + team * 2 * WEIGHTS);
  float4* const staging = (float4*)meeting;  // at the end of a segment, when nobody needs queries and weights
  int* const cum = (int*)(meeting + MEETING);
  const u32 free_bar = shared_address(free_bars + team);
  if (thread == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0],4;" :: "r"(free_bar) : "memory");

  // Tiles before each request: a scan, THREADS requests at a time.
  for (int base = 0, before = 0; base < B; base += THREADS) {
    const int b = base + threadIdx.x, n = b < B ? (max(lens[b], 0) + TILE - 1) / TILE : 0;
    int x = n;
#pragma unroll
    for (int i = 1; i < 32; i <<= 1) { int y = __shfl_up_sync(~0u, x, i); if (lane >= i) x += y; }
    if (lane == 31) sums[threadIdx.x / 32] = x;
    __syncthreads();
    int total = 0;
    for (int i = 0; i < THREADS / 32; i++) { if (i < threadIdx.x / 32) x += sums[i]; total += sums[i]; }
    if (b < B) cum[b + 1] = before + x;
    before += total;
    __syncthreads();
  }
  if (threadIdx.x == 0) cum[0] = 0;
  __syncthreads();
  const Latents latents{{values, values_page, (u32)values_slot}, {block_scales, scales_page, (u32)scales_slot}, {rope, rope_page, (u32)rope_slot}};
  const Work work{lens, starts, pages, cum, B, stride, page_bits};
  for (int b = blockIdx.x; b < B; b += gridDim.x)  // requests of no tokens
    if (lens[b] <= 0) {
      if (threadIdx.x == 0) { PLAN[2 * b] = 0; PLAN[2 * b + 1] = 1; }
      for (int i = threadIdx.x; i < (starts[b + 1] - starts[b]) * heads * RANK / 2; i += THREADS)
        ((u32*)(OUT + (u64)starts[b] * heads * RANK))[i] = 0;
    }
  const int T = cum[B], blocks = max(min((int)gridDim.x, T / LEAST), 1);
  if (blockIdx.x >= blocks) return;
  const int block0 = (u64)T * blockIdx.x / blocks, block1 = (u64)T * (blockIdx.x + 1) / blocks;
  if (block0 >= block1) return;

  Cursor ahead;
  ahead.begin(work, block0, block1, team, warp);
  const u32 mine = shared_address(tiles) + 16 * warp * PITCH, my_rope = shared_address(ropes) + 16 * warp * 2 * ROPE;
  const int page_mask = (1 << page_bits) - 1;
  int turn = 0;  // tiles of the team so far: its buffer is turn % 2
  if (ahead.there()) {
    fetch(mine, my_rope, latents, ahead.page, ahead.token & page_mask, ahead.live, lane);
    ahead.next(work, team, warp);
  }
  const u8* const key_row = tiles + (16 * warp + token_of(g)) * PITCH;
  const u8* const rope_row = ropes + (16 * warp + token_of(g)) * 2 * ROPE + 16 * c;
  const int t = token_of(2 * c), u = token_of(2 * c + 1);
  const u8 *const first = tiles + t * PITCH + warp * (DATA / 4) + g * (DATA / 32), *const second = first + (u - t) * PITCH;
  const u8 *const first_scale = tiles + t * PITCH + DATA + warp * (SCALES / 4), *const second_scale = first_scale + (u - t) * PITCH;
  const float whole = *global_scale, unit = scale * LOG2E * whole, apart = 1.f / whole;
  Sums kept;

  for (int begin = block0, b = request_of(work, block0); begin < block1;) {
    while (cum[b + 1] <= begin) b++;
    const int end = min(block1, cum[b + 1]), q_row = starts[b], len = lens[b];
    keep_queries(queries, Q + (u64)q_row * q_token, heads, q_head);
    kept.clear();
    __syncthreads();
    for (int tile = begin + team; tile < end; tile += TEAMS, turn++) {
      const int side = turn & 1, buffer = side * TILE_BYTES;
      const u8* const row = key_row + buffer;
      asm volatile("cp.async.wait_group 0;" ::: "memory");
      __syncwarp();
      float s[2][4] = {};
      key_rope(s, rope_row, 16 * (token_of(g) & 4), queries + lane);
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[n][i] *= apart;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        key_quarter(s, row, queries + lane, j, c);
        if (j == 0 && ahead.there()) {  // the other buffer is free once all warps have weighed its values
          __syncwarp();  // all lanes have read their rotary values
          if (turn > 0) await(free_bar, (turn - 1) & 1);
          fetch(mine + (TILE_BYTES - buffer), my_rope, latents, ahead.page, ahead.token & page_mask, ahead.live, lane);
          ahead.next(work, team, warp);
        }
      }
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[n][i] *= unit;
      const int left = len - (tile - cum[b]) * TILE;
      if (left < TILE)
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
          for (int i = 0; i < 4; i++)
            if (16 * warp + token_of(g) + (i & 2) * 4 >= left) s[n][i] = __int_as_float(0xff800000);

      Board& board = boards[team][side];
      const bool raised = kept.raise(s);
      u32 p[2][2];
#pragma unroll
      for (int n = 0; n < 2; n++) {
        float e[4];
#pragma unroll
        for (int i = 0; i < 4; i++) { e[i] = ex2(s[n][i] - kept.m[n][i & 1]); kept.l[n][i & 1] += e[i]; }
        p[n][0] = transposed(halves(e[0], e[1]));
        p[n][1] = transposed(halves(e[2], e[3]));
        if (g == 0) *(float2*)&board.top[warp][8 * n + 2 * c] = make_float2(kept.m[n][0], kept.m[n][1]);
      }
      uint4* const shared = weights + side * (WEIGHTS / 16) + lane;
      shared[warp * 32] = make_uint4(p[0][0], p[0][1], p[1][0], p[1][1]);
      if (lane == 0) board.raised[warp] = raised;
      meet(team);
      const int4 any = *(const int4*)board.raised;
      if (any.x | any.y | any.z | any.w) {  // rare: all go on from the same maxima
        u32 f[2];
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const int head = 8 * n + 2 * c + e;
            kept.fade(n, e, fmaxf(fmaxf(board.top[0][head], board.top[1][head]), fmaxf(board.top[2][head], board.top[3][head])));
          }
          const int head = 8 * n + g;
          const float top = fmaxf(fmaxf(board.top[0][head], board.top[1][head]), fmaxf(board.top[2][head], board.top[3][head]));
          const float x = ex2(board.top[warp][head] - top);
          f[n] = halves(x, x);
        }
        shared[warp * 32] = make_uint4(mul2(p[0][0], f[0]), mul2(p[0][1], f[0]), mul2(p[1][0], f[1]), mul2(p[1][1], f[1]));
        meet(team);
      }
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int skip = buffer + 16 * i * PITCH;
        values16(kept.o, first + skip, second + skip, first_scale + skip, second_scale + skip, shared[i * 32]);
      }
      __syncwarp();
      if (lane == 0) arrive(free_bar);
    }

    // The end of a segment: sums of weights, then of values, team after team.
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float sum = kept.l[n][e];
#pragma unroll
        for (int x = 4; x < 32; x <<= 1) sum += __shfl_xor_sync(~0u, sum, x);
        if (g == 0) { stats.sum[team][warp][8 * n + 2 * c + e] = sum; stats.top[team][8 * n + 2 * c + e] = kept.m[n][e]; }
      }
    __syncthreads();
    float sum[2][2];
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int head = 8 * n + 2 * c + e;
        float top = NONE;
        for (int i = 0; i < TEAMS; i++) top = fmaxf(top, stats.top[i][head]);
        sum[n][e] = 0;
        for (int i = 0; i < TEAMS; i++)
          sum[n][e] += ex2(stats.top[i][head] - top) * (stats.sum[i][0][head] + stats.sum[i][1][head] + stats.sum[i][2][head] + stats.sum[i][3][head]);
        kept.fade(n, e, top);
      }
#pragma unroll 1
    for (int k = TEAMS - 1; k > 0; k--) {
      if (team == k)
#pragma unroll
        for (int i = 0; i < 16; i++) {
          const float* o = kept.o[i / 2][i % 2];
          staging[i * 128 + thread] = make_float4(o[0], o[1], o[2], o[3]);
        }
      __syncthreads();
      if (team == k - 1)
#pragma unroll
        for (int i = 0; i < 16; i++) {
          float* o = kept.o[i / 2][i % 2];
          const float4 x = staging[i * 128 + thread];
          o[0] += x.x; o[1] += x.y; o[2] += x.z; o[3] += x.w;
        }
      __syncthreads();
    }
    const u32 from = ((u64)(cum[b] + 1) * blocks - 1) / T, to = ((u64)cum[b + 1] * blocks - 1) / T;  // blocks of the request
    if (begin == cum[b] && threadIdx.x == 0) { PLAN[2 * b] = from + b; PLAN[2 * b + 1] = to - from + 1; }
    if (team == 0)
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int head = 8 * n + 2 * c + e;
          if (head >= heads) continue;
          const float f = whole * VALUE_FOLD / sum[n][e];
          if (from == to) {
            uint4* place = (uint4*)(OUT + ((u64)q_row * heads + head) * RANK + 128 * warp + 16 * g);
#pragma unroll
            for (int i = 0; i < 2; i++) {
              u32 w[4];
#pragma unroll
              for (int k = 0; k < 4; k++) w[k] = bf16s(kept.o[4 * i + k][n][e] * f, kept.o[4 * i + k][n][e + 2] * f);
              place[i] = make_uint4(w[0], w[1], w[2], w[3]);
            }
          } else {
            const u64 piece = (u64)(blockIdx.x + b) * HEADS + head;
            float4* place = (float4*)(PARTS + piece * RANK + 128 * warp + 16 * g);
#pragma unroll
            for (int i = 0; i < 4; i++)
              place[i] = make_float4(kept.o[2 * i][n][e] * f, kept.o[2 * i][n][e + 2] * f, kept.o[2 * i + 1][n][e] * f, kept.o[2 * i + 1][n][e + 2] * f);
            if (warp == 0 && g == 0) LSE[piece] = kept.m[n][e] + lg2(sum[n][e]);
          }
        }
    begin = end;
  }
}

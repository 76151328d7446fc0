// MLA decode over paged E4M3 latents: one query token a request, up to 16 heads, rank 512 + 64 rotary values.
//
// Compiled at run time, with this macro:
//   WARPGROUPS   warpgroups of a block, as many as shared memory holds tiles for
// Kernel: mla(...), a grid of one block per multiprocessor, 128 * WARPGROUPS threads, dynamic shared memory
// as codecs/ds_mla.py says.
//
// Storage: planes [page, slot, row] of any strides, rows of 16 aligned bytes: values, block scales, BF16
// rotary values.
//
// Partition. A tile is 64 tokens. All tiles of the batch stand in one line, which is cut evenly over the
// blocks. A block's segment is what it has of a request; warpgroups take the tiles of a segment in turn. A
// warpgroup copies a tile while it computes on another. At the end of a segment warpgroups are merged through
// shared memory. What several blocks have of a request is merged by Triton's combine_kernel, in the order of
// blocks: the result depends on the batch's shape only.
//
// Arithmetic. A latent is dequantised twice, in registers: as a key, and as a value. By count that takes
// fewer cycles than to keep it in shared memory as float16, whose bytes would all be written once and read
// twice.
//   S^T [token, head] = K Q^T: each warp has 16 tokens.     O^T [dim, head] = V^T P^T: each warp has 128
//     dims.
// P goes through shared memory. It is relative to a maximum that all warps of a warpgroup share, and that few
// tiles raise. A lane's bytes of K and V are its mma fragments: the order of dims, and of tokens within 16,
// may be chosen freely. E4M3 is converted by the hardware; its scales, of 128 values each, multiply sums of
// scores, and P.
//
// Names: g = lane / 4 and c = lane % 4, the coordinates of mma fragments. In arrays of fragments, n counts
// groups of eight heads, e the two heads of a lane in a group, i the registers of a fragment.

#include "bits.cuh"

constexpr int RANK = 512, ROPE = 64, HEADS = 16, TILE = 64, THREADS = 128 * WARPGROUPS;
// Products of 16 dims each: all, and those of the latent proper.
constexpr int QUERY_STEPS = 36, LATENT_STEPS = 32;
constexpr int VALUE_BYTES = RANK, SCALE_BYTES = RANK / 128 * 4;     // of a row
constexpr int ROW_PITCH = 544;  // of values and scales: 8 words more than whole rounds of the 32 banks
constexpr int TILE_BYTES = TILE * ROW_PITCH, ROPE_BYTES = TILE * ROPE * 2, WEIGHT_BYTES = TILE * HEADS * 2;
constexpr int QUERY_BYTES = QUERY_STEPS * 512, WARPGROUP_BYTES = 2 * TILE_BYTES + ROPE_BYTES;
// Shared by all warpgroups: queries and weights, and at the end of a segment sums on their way between
// warpgroups.
constexpr int EXCHANGE_BYTES = QUERY_BYTES + WARPGROUPS * 2 * WEIGHT_BYTES > RANK * HEADS * 4
                                   ? QUERY_BYTES + WARPGROUPS * 2 * WEIGHT_BYTES
                                   : RANK * HEADS * 4;
constexpr float RESCALE_SLACK = 4.f;      // P may be as large as 2^RESCALE_SLACK
constexpr float VALUE_FACTOR = 1.f / 64;  // undoes what scales of values are multiplied by
constexpr int MIN_TILES = WARPGROUPS;     // tiles of a block, if there are so many
static_assert(ROW_PITCH % 128 == 32 && ROW_PITCH >= VALUE_BYTES + SCALE_BYTES,
              "rows must spread over the banks");

#include "mla_tiles.cuh"

// Wait for the other warps of the warpgroup.
DEVICE void sync_warpgroup(int warpgroup) {
  asm volatile("bar.sync %0,128;" :: "r"(warpgroup + 1) : "memory");
}

// ---- queries ------------------------------------------------------------------------------------------
// The dim of value e of operand register u of a step, for the lanes of column c.
DEVICE int operand_dim(int step, int c, int u, int e) {
  if (step >= LATENT_STEPS) return RANK + (step - LATENT_STEPS) / 2 * 32 + 8 * c + (step & 1) * 4 + 2 * u + e;
  return 16 * (4 * (step / 4) + c) + step % 4 * 4 + 2 * u + e;
}

// Store a token's queries in shared memory as operands: float16 for the latent, BF16 as they are for rotary
// values.
DEVICE void store_queries(uint4* to, const u16* q, int heads, int q_stride_head) {
  constexpr int TURNS = (QUERY_STEPS * 32 + THREADS - 1) / THREADS;
  u16 x[TURNS][4][2];  // of heads g and g + 8, two registers each; all loads before the first is used
#pragma unroll
  for (int k = 0; k < TURNS; k++) {
#pragma unroll
    for (int r = 0; r < 8; r++) {
      const int i = min(threadIdx.x + k * THREADS, QUERY_STEPS * 32 - 1), head = i % 32 / 4 + 8 * (r / 4);
      x[k][r / 2][r % 2] =
          q[(u64)min(head, heads - 1) * q_stride_head + operand_dim(i / 32, i % 4, r / 2 % 2, r % 2)];
    }
  }
#pragma unroll
  for (int k = 0; k < TURNS; k++) {
    const int i = threadIdx.x + k * THREADS;
    u32 w[4];
#pragma unroll
    for (int r = 0; r < 4; r++) {
      const u32 lo = x[k][r][0], hi = x[k][r][1];
      const float a = __uint_as_float(lo << 16), b = __uint_as_float(hi << 16);
      const u32 half = pack_f16(clamp_f16(a), clamp_f16(b));
      w[r] = i % 32 / 4 + 8 * (r / 2) >= heads ? 0 : i / 32 < LATENT_STEPS ? half : lo | hi << 16;
    }
    if (i < QUERY_STEPS * 32) to[i] = make_uint4(w[0], w[1], w[2], w[3]);
  }
}

// ---- keys: S^T += K Q^T for 16 tokens -----------------------------------------------------------------
// The token of 8 that row g of a fragment is: rows that are read together lie in different banks, here and as
// values.
DEVICE int token_of_row(int g) { return g & 1 ? 4 + (((g >> 1) + 2) & 3) : g >> 1; }

DEVICE void mma_heads(float (*s)[4], u32 a0, u32 a1, u32 a2, u32 a3, uint4 q) {
  mma_f16(s[0], a0, a1, a2, a3, q.x, q.y);
  mma_f16(s[1], a0, a1, a2, a3, q.z, q.w);
}

// Quarter j of the latent's dims, which have one scale. row: a lane's row g. Row g + 8 lies eight tokens
// further.
DEVICE void accumulate_scores(float (*scores)[4], const u8* row, const uint4* q, int j, int c) {
  float part[2][2][4] = {};
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const u8* p = row + 16 * (4 * (2 * j + half) + c);
    const uint4 x = *(const uint4*)p, y = *(const uint4*)(p + 8 * ROW_PITCH);
#pragma unroll
    for (int w = 0; w < 4; w++) {
      mma_heads(part[w % 2], f16x2_from_e4m3x2(word_of(x, w)), f16x2_from_e4m3x2(word_of(y, w)),
                f16x2_from_e4m3x2(word_of(x, w) >> 16), f16x2_from_e4m3x2(word_of(y, w) >> 16),
                q[(8 * j + 4 * half + w) * 32]);
    }
  }
  const float scale_x = *(const float*)(row + VALUE_BYTES + 4 * j);
  const float scale_y = *(const float*)(row + VALUE_BYTES + 4 * j + 8 * ROW_PITCH);
#pragma unroll
  for (int n = 0; n < 2; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) scores[n][i] += (part[0][n][i] + part[1][n][i]) * (i < 2 ? scale_x : scale_y);
  }
}

// row: the lane's in rotary values. swap: 64 where its halves are swapped.
DEVICE void accumulate_rope_scores(float (*scores)[4], const u8* row, int swap, const uint4* q) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const u8* p = row + (64 * half ^ swap);
    const uint4 x = *(const uint4*)p, y = *(const uint4*)(p + 8 * 2 * ROPE);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint4 b = q[(LATENT_STEPS + 2 * half + i) * 32];
      mma_bf16(scores[0], word_of(x, 2 * i), word_of(y, 2 * i), word_of(x, 2 * i + 1), word_of(y, 2 * i + 1),
               b.x, b.y);
      mma_bf16(scores[1], word_of(x, 2 * i), word_of(y, 2 * i), word_of(x, 2 * i + 1), word_of(y, 2 * i + 1),
               b.z, b.w);
    }
  }
}

// ---- values: O^T += V^T P^T for 16 tokens -------------------------------------------------------------
// Lane g has dims 16 * g .. + 15 of the warp's 128, of tokens t, u, t + 8, u + 8. Tile i of O^T has dims 2 *
// i (rows 0..7) and 2 * i + 1 (rows 8..15). first, second: where the lane's dims of tokens t and u lie;
// *_scale: where their scales do.
DEVICE void accumulate_values(float (*o)[2][4], const u8* first, const u8* second, const u8* first_scale,
                              const u8* second_scale, uint4 p) {
  const uint4 x0 = *(const uint4*)first, x1 = *(const uint4*)second;
  const uint4 x2 = *(const uint4*)(first + 8 * ROW_PITCH), x3 = *(const uint4*)(second + 8 * ROW_PITCH);
  // Scales multiply P, of which there is less than of values. Times 64 they stay inside float16.
  const u32 s = pack_f16(*(const float*)first_scale * 64, *(const float*)second_scale * 64);
  const u32 t = pack_f16(*(const float*)(first_scale + 8 * ROW_PITCH) * 64,
                         *(const float*)(second_scale + 8 * ROW_PITCH) * 64);
  p = make_uint4(mul_f16x2(p.x, s), mul_f16x2(p.y, t), mul_f16x2(p.z, s), mul_f16x2(p.w, t));
#pragma unroll
  for (int w = 0; w < 4; w++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u32 a = __byte_perm(word_of(x0, w), word_of(x1, w), half ? 0x7362 : 0x5140);
      const u32 b = __byte_perm(word_of(x2, w), word_of(x3, w), half ? 0x7362 : 0x5140);
      mma_heads(o[2 * w + half], f16x2_from_e4m3x2(a), f16x2_from_e4m3x2(a >> 16), f16x2_from_e4m3x2(b),
                f16x2_from_e4m3x2(b >> 16), p);
    }
  }
}

// ---- the running softmax ------------------------------------------------------------------------------
// O, and of the lane's heads 8 * n + 2 * c + e the maximum that it is relative to and the sum of weights. The
// sum is of the lane's tokens alone.
struct Accumulator {
  float o[8][2][4], m[2][2], l[2][2];

  DEVICE void clear() {
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        m[n][e] = LOWEST;
        l[n][e] = 0;
      }
#pragma unroll
      for (int t = 0; t < 8; t++) {
#pragma unroll
        for (int i = 0; i < 4; i++) o[t][n][i] = 0;
      }
    }
  }

  // Make another maximum the one that sums are relative to.
  DEVICE void rescale(int n, int e, float top) {
    const float factor = ex2(m[n][e] - top);
    m[n][e] = top;
    l[n][e] *= factor;
#pragma unroll
    for (int t = 0; t < 8; t++) {
      o[t][n][e] *= factor;
      o[t][n][e + 2] *= factor;
    }
  }

  // Raise the maxima if scores exceed them by more than the slack. Returns whether they were raised.
  DEVICE bool raise_maxima(const float (*scores)[4]) {
    bool exceeds = false;
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) exceeds |= fmaxf(scores[n][e], scores[n][e + 2]) > m[n][e] + RESCALE_SLACK;
    }
    if (!__any_sync(ALL_LANES, exceeds)) return false;
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float top = fmaxf(scores[n][e], scores[n][e + 2]);
#pragma unroll
        for (int x = 4; x < 32; x <<= 1) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, x));
        rescale(n, e, fmaxf(top, m[n][e]));
      }
    }
    return true;
  }
};

// What the warps of a warpgroup tell each other of a tile: their maxima, and whether they raised them.
struct __align__(16) TileMaxima {
  float top[4][HEADS];
  int raised[4];

  DEVICE float highest(int head) const {
    return fmaxf(fmaxf(top[0][head], top[1][head]), fmaxf(top[2][head], top[3][head]));
  }
};

// Maxima and sums of the warpgroups at the end of a segment.
struct SegmentStats {
  float top[WARPGROUPS][HEADS], sum[WARPGROUPS][4][HEADS];
};

// --- kernel
extern "C" __global__ void __launch_bounds__(THREADS, 1) mla(
    const u16* q, u16* out, float* parts, float* lse, int* plan, const u8* values, const u8* block_scales,
    const u8* rope, const float* global_scale, const int* seq_lens, const int* cu_seqlens_q,
    const int* page_table, u64 values_page_stride, u64 scales_page_stride, u64 rope_page_stride,
    int values_slot_stride, int scales_slot_stride, int rope_slot_stride, float softmax_scale, int batch_size,
    int page_table_stride, int page_bits, int heads, int q_stride_token, int q_stride_head) {
  extern __shared__ __align__(128) u8 smem[];
  __shared__ TileMaxima tile_maxima[WARPGROUPS][2];
  __shared__ SegmentStats stats;
  __shared__ u64 empty_barriers[WARPGROUPS];
  __shared__ int warp_sums[THREADS / 32];
  const int thread = threadIdx.x % 128, warpgroup = threadIdx.x / 128, warp = thread / 32;
  const int lane = threadIdx.x % 32, g = lane >> 2, c = lane & 3;
  u8 *const tiles = smem + warpgroup * WARPGROUP_BYTES, *const exchange = smem + WARPGROUPS * WARPGROUP_BYTES;
  u8* const rope_tile = tiles + 2 * TILE_BYTES;
  uint4* const queries = (uint4*)exchange;
  uint4* const weights = (uint4*)(exchange + QUERY_BYTES + warpgroup * 2 * WEIGHT_BYTES);
  // For sums, at the end of a segment, when queries and weights are not needed.
  float4* const staging = (float4*)exchange;
  int* const cu_tiles = (int*)(exchange + EXCHANGE_BYTES);
  const u32 empty_barrier = shared_address(empty_barriers + warpgroup);
  if (thread == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0],4;" :: "r"(empty_barrier) : "memory");

  // --- partition
  // Tiles before each request: a scan, THREADS requests at a time.
  for (int base = 0, before = 0; base < batch_size; base += THREADS) {
    const int request = base + threadIdx.x;
    const int n = request < batch_size ? (max(seq_lens[request], 0) + TILE - 1) / TILE : 0;
    int x = n;
#pragma unroll
    for (int i = 1; i < 32; i <<= 1) {
      int y = __shfl_up_sync(ALL_LANES, x, i);
      if (lane >= i) x += y;
    }
    if (lane == 31) warp_sums[threadIdx.x / 32] = x;
    __syncthreads();
    int total = 0;
    for (int i = 0; i < THREADS / 32; i++) {
      if (i < threadIdx.x / 32) x += warp_sums[i];
      total += warp_sums[i];
    }
    if (request < batch_size) cu_tiles[request + 1] = before + x;
    before += total;
    __syncthreads();  // before warp_sums is written again
  }
  if (threadIdx.x == 0) cu_tiles[0] = 0;
  __syncthreads();
  const Latents latents{{values, values_page_stride, (u32)values_slot_stride},
                        {block_scales, scales_page_stride, (u32)scales_slot_stride},
                        {rope, rope_page_stride, (u32)rope_slot_stride}};
  const Batch batch{seq_lens, cu_seqlens_q, page_table, cu_tiles, batch_size, page_table_stride, page_bits};
  // Requests of no tokens have outputs of zeros.
  for (int request = blockIdx.x; request < batch_size; request += gridDim.x) {
    if (seq_lens[request] <= 0) {
      if (threadIdx.x == 0) {
        plan[2 * request] = 0;
        plan[2 * request + 1] = 1;
      }
      for (int i = threadIdx.x; i < (cu_seqlens_q[request + 1] - cu_seqlens_q[request]) * heads * RANK / 2;
           i += THREADS) {
        ((u32*)(out + (u64)cu_seqlens_q[request] * heads * RANK))[i] = 0;
      }
    }
  }
  const int num_tiles = cu_tiles[batch_size], blocks = max(min((int)gridDim.x, num_tiles / MIN_TILES), 1);
  if (blockIdx.x >= blocks) return;
  const int block_begin = (u64)num_tiles * blockIdx.x / blocks;
  const int block_end = (u64)num_tiles * (blockIdx.x + 1) / blocks;
  if (block_begin >= block_end) return;

  // --- load the first tile
  TileCursor next;  // the tile whose copy starts next
  next.start(batch, block_begin, block_end, warpgroup, warp);
  const u32 warp_rows = shared_address(tiles) + 16 * warp * ROW_PITCH;
  const u32 warp_rope = shared_address(rope_tile) + 16 * warp * 2 * ROPE;
  const int page_mask = (1 << page_bits) - 1;
  int turn = 0;  // tiles of the warpgroup so far: its buffer is turn % 2
  if (next.has_tile()) {
    start_copy(warp_rows, warp_rope, latents, next.page, next.token & page_mask, next.num_tokens, lane);
    next.advance(batch, warpgroup, warp);
  }
  const u8* const key_row = tiles + (16 * warp + token_of_row(g)) * ROW_PITCH;
  const u8* const rope_row = rope_tile + (16 * warp + token_of_row(g)) * 2 * ROPE + 16 * c;
  const int t = token_of_row(2 * c), u = token_of_row(2 * c + 1);
  const u8* const first = tiles + t * ROW_PITCH + warp * (VALUE_BYTES / 4) + g * (VALUE_BYTES / 32);
  const u8* const second = first + (u - t) * ROW_PITCH;
  const u8* const first_scale = tiles + t * ROW_PITCH + VALUE_BYTES + warp * (SCALE_BYTES / 4);
  const u8* const second_scale = first_scale + (u - t) * ROW_PITCH;
  // Rotary values have no global scale: their scores are divided by it before those of the latent are added.
  const float latent_scale = *global_scale, score_scale = softmax_scale * LOG2E * latent_scale;
  const float rope_scale = 1.f / latent_scale;
  Accumulator acc;

  // Each turn is a segment: what the block has of a request.
  for (int begin = block_begin, request = request_of(batch, block_begin); begin < block_end;) {
    while (cu_tiles[request + 1] <= begin) request++;
    const int end = min(block_end, cu_tiles[request + 1]);
    const int q_row = cu_seqlens_q[request], seq_len = seq_lens[request];
    store_queries(queries, q + (u64)q_row * q_stride_token, heads, q_stride_head);
    acc.clear();
    __syncthreads();
    for (int tile = begin + warpgroup; tile < end; tile += WARPGROUPS, turn++) {
      // --- scores
      const int side = turn & 1, buffer = side * TILE_BYTES;
      const u8* const row = key_row + buffer;
      asm volatile("cp.async.wait_group 0;" ::: "memory");
      __syncwarp();
      float scores[2][4] = {};
      accumulate_rope_scores(scores, rope_row, 16 * (token_of_row(g) & 4), queries + lane);
#pragma unroll
      for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) scores[n][i] *= rope_scale;
      }
#pragma unroll
      for (int j = 0; j < 4; j++) {
        accumulate_scores(scores, row, queries + lane, j, c);
        if (j == 0 && next.has_tile()) {
          __syncwarp();  // all lanes have read the rotary values, of which there is one buffer
          // The other buffer is empty once all warps have accumulated its values.
          if (turn > 0) barrier_wait(empty_barrier, (turn - 1) & 1);
          start_copy(warp_rows + (TILE_BYTES - buffer), warp_rope, latents, next.page, next.token & page_mask,
                     next.num_tokens, lane);
          next.advance(batch, warpgroup, warp);
        }
      }
#pragma unroll
      for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) scores[n][i] *= score_scale;
      }
      const int tokens_left = seq_len - (tile - cu_tiles[request]) * TILE;
      if (tokens_left < TILE) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
          for (int i = 0; i < 4; i++) {
            if (16 * warp + token_of_row(g) + (i & 2) * 4 >= tokens_left) scores[n][i] = minus_infinity();
          }
        }
      }

      // --- softmax
      TileMaxima& maxima = tile_maxima[warpgroup][side];
      const bool raised = acc.raise_maxima(scores);
      u32 p[2][2];
#pragma unroll
      for (int n = 0; n < 2; n++) {
        float weight[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          weight[i] = ex2(scores[n][i] - acc.m[n][i & 1]);
          acc.l[n][i & 1] += weight[i];
        }
        p[n][0] = transpose_8x8(pack_f16(weight[0], weight[1]));
        p[n][1] = transpose_8x8(pack_f16(weight[2], weight[3]));
        if (g == 0) *(float2*)&maxima.top[warp][8 * n + 2 * c] = make_float2(acc.m[n][0], acc.m[n][1]);
      }
      uint4* const shared_weights = weights + side * (WEIGHT_BYTES / 16) + lane;
      shared_weights[warp * 32] = make_uint4(p[0][0], p[0][1], p[1][0], p[1][1]);
      if (lane == 0) maxima.raised[warp] = raised;
      sync_warpgroup(warpgroup);
      const int4 any = *(const int4*)maxima.raised;
      if (any.x | any.y | any.z | any.w) {  // rare: all warps go on from the same maxima
        u32 f[2];
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const int head = 8 * n + 2 * c + e;
            acc.rescale(n, e, maxima.highest(head));
          }
          const int head = 8 * n + g;
          const float top = maxima.highest(head);
          const float x = ex2(maxima.top[warp][head] - top);
          f[n] = pack_f16(x, x);
        }
        shared_weights[warp * 32] = make_uint4(mul_f16x2(p[0][0], f[0]), mul_f16x2(p[0][1], f[0]),
                                               mul_f16x2(p[1][0], f[1]), mul_f16x2(p[1][1], f[1]));
        sync_warpgroup(warpgroup);
      }

      // --- accumulate
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int offset = buffer + 16 * i * ROW_PITCH;
        accumulate_values(acc.o, first + offset, second + offset, first_scale + offset, second_scale + offset,
                          shared_weights[i * 32]);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(empty_barrier);
    }

    // --- merge warpgroups: sums of weights, then of values, one warpgroup after the other
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float sum = acc.l[n][e];
#pragma unroll
        for (int x = 4; x < 32; x <<= 1) sum += __shfl_xor_sync(ALL_LANES, sum, x);
        if (g == 0) {
          stats.sum[warpgroup][warp][8 * n + 2 * c + e] = sum;
          stats.top[warpgroup][8 * n + 2 * c + e] = acc.m[n][e];
        }
      }
    }
    __syncthreads();
    float sum[2][2];
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int head = 8 * n + 2 * c + e;
        float top = LOWEST;
        for (int i = 0; i < WARPGROUPS; i++) top = fmaxf(top, stats.top[i][head]);
        sum[n][e] = 0;
        for (int i = 0; i < WARPGROUPS; i++) {
          sum[n][e] += ex2(stats.top[i][head] - top) * (stats.sum[i][0][head] + stats.sum[i][1][head] +
                                                        stats.sum[i][2][head] + stats.sum[i][3][head]);
        }
        acc.rescale(n, e, top);
      }
    }
#pragma unroll 1
    for (int k = WARPGROUPS - 1; k > 0; k--) {
      if (warpgroup == k) {
#pragma unroll
        for (int i = 0; i < 16; i++) {
          const float* o = acc.o[i / 2][i % 2];
          staging[i * 128 + thread] = make_float4(o[0], o[1], o[2], o[3]);
        }
      }
      __syncthreads();
      if (warpgroup == k - 1) {
#pragma unroll
        for (int i = 0; i < 16; i++) {
          float* o = acc.o[i / 2][i % 2];
          const float4 x = staging[i * 128 + thread];
          o[0] += x.x;
          o[1] += x.y;
          o[2] += x.z;
          o[3] += x.w;
        }
      }
      __syncthreads();
    }

    // --- store
    // The first and the last block that have tiles of the request.
    const u32 first_block = ((u64)(cu_tiles[request] + 1) * blocks - 1) / num_tiles;
    const u32 last_block = ((u64)cu_tiles[request + 1] * blocks - 1) / num_tiles;
    if (begin == cu_tiles[request] && threadIdx.x == 0) {
      plan[2 * request] = first_block + request;
      plan[2 * request + 1] = last_block - first_block + 1;
    }
    if (warpgroup == 0) {
#pragma unroll
      for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int head = 8 * n + 2 * c + e;
          if (head >= heads) continue;
          const float f = latent_scale * VALUE_FACTOR / sum[n][e];
          if (first_block == last_block) {
            uint4* to = (uint4*)(out + ((u64)q_row * heads + head) * RANK + 128 * warp + 16 * g);
#pragma unroll
            for (int i = 0; i < 2; i++) {
              u32 w[4];
#pragma unroll
              for (int k = 0; k < 4; k++) {
                w[k] = pack_bf16(acc.o[4 * i + k][n][e] * f, acc.o[4 * i + k][n][e + 2] * f);
              }
              to[i] = make_uint4(w[0], w[1], w[2], w[3]);
            }
          } else {
            const u64 part = (u64)(blockIdx.x + request) * HEADS + head;
            float4* to = (float4*)(parts + part * RANK + 128 * warp + 16 * g);
#pragma unroll
            for (int i = 0; i < 4; i++) {
              to[i] = make_float4(acc.o[2 * i][n][e] * f, acc.o[2 * i][n][e + 2] * f,
                                  acc.o[2 * i + 1][n][e] * f, acc.o[2 * i + 1][n][e + 2] * f);
            }
            if (warp == 0 && g == 0) lse[part] = acc.m[n][e] + lg2(sum[n][e]);
          }
        }
      }
    }
    begin = end;
  }
}

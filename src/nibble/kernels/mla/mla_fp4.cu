// MLA decode over paged NVFP4 latents, for SM90: one query token a request, up to 16 heads, rank 512 + 64
// rotary values.
//
// Compiled at run time, with these macros:
//   WARPGROUPS  score warpgroups
//   DEPTH       words of each row whose registers the tensor cores may still be reading
// Kernel: mla(...), a grid of one block per multiprocessor, 128 * (WARPGROUPS + 2) threads, dynamic shared
// memory as codecs/ds_mla.py says.
//
// Storage: planes [page, slot, row] whose slots follow one another, or are records of all three in this
// order: values, block scales, BF16 rotary values. All at multiples of 16 bytes.
//
// Partition. A tile is 64 tokens. All tiles of the batch stand in one line, which is cut evenly over the
// blocks; a block has a segment of each of some requests. What several blocks have of a request is merged by
// Triton's combine_kernel, in the order of blocks: the result depends on the batch's shape only. In a block
// there are three kinds of warpgroups:
//   The producer warpgroup copies tiles as they are stored to shared memory, each warp 16 tokens, a tile
//     ahead of each score warpgroup.
//   WARPGROUPS score warpgroups take tiles in turn. Each warp has 16 tokens: it decodes them to float16 in
//     registers, which are operand A of S^T [token, head] = K Q^T, stores them in shared memory, and stores
//     the weights P beside them.
//   The value warpgroup adds O^T [dim, head] = V^T P^T and sums weights; each warp has 128 dims.
//
// Barriers. raw_full and raw_empty, of each warp of a score warpgroup: a stored tile has landed, and has been
// read. decoded_full and decoded_empty, of each stage: a decoded tile and its weights are there, and have
// been used. A stage is emptied a quarter of the dims at a time, as score warpgroups fill it in that order.
// queries_full: queries are there.
//
// Why so (docs/design/mla-decode.md has the measurements). mma.sync takes six cycles of a scheduler and
// overlaps with hardly anything, so that products, decoding and copies add up; wgmma runs beside them.
// Decoding twice, for keys and for values, would cost more than to keep a tile as float16. Loads into
// registers would be waited for all at once, as they share a scoreboard; copies are not. Between a score
// warpgroup's last product and its next tile there is as little as can be: other warpgroups copy, add and
// load queries.
//
// Arithmetic. E2M1 becomes float16 by masks and shifts, exactly, times 2^-14, and stays exact when it is
// multiplied by its block scale; the power of two is undone in the softmax scale and the output. P is
// relative to a maximum, which a warp takes as it was WARPGROUPS tiles ago and raises only by far, and which
// the value warpgroup compares with its own: where they differ, for few tiles, it brings both to the larger.
//
// The order of dims may be chosen freely, if queries and the output follow. Lane c (lane % 4) reads bytes
// 64 * c + 16 * j .. + 15 of a row, j = 0..3: words w = 0..3 of eight values each. Pairs (0,4) (1,5) of a word
// are the operands' step 8 * j + 2 * w, and rows 16 * w .. + 15 of V^T's block 2 * j; pairs (2,6) (3,7) are
// the next step and block. So four dims of a lane are neighbours.
//
// Names: g = lane / 4 and c = lane % 4, the coordinates of fragments. In arrays of fragments, n counts groups
// of eight heads, e the two heads of a lane in a group, i the registers of a fragment.

#include "bits.cuh"

constexpr int RANK = 512, ROPE = 64, HEADS = 16, TILE = 64, THREADS = 128 * (WARPGROUPS + 2);
constexpr int VALUE_BYTES = RANK / 2, SCALE_BYTES = RANK / 16, ROPE_BYTES = 2 * ROPE;  // of a row
constexpr int ROW_BYTES = VALUE_BYTES + SCALE_BYTES + ROPE_BYTES;
constexpr int RAW_BYTES = 16 * ROW_BYTES;                   // a warp's tokens of a tile, as they are stored
constexpr int BLOCK_BYTES = TILE * 128;                     // 64 dims of a tile as float16, 128 bytes a token
constexpr int DECODED_BYTES = RANK / 64 * BLOCK_BYTES;
constexpr int WEIGHT_BYTES = TILE * HEADS * 2;
constexpr int STEPS = RANK / 16;                            // products along the dims of a key
constexpr int QUERY_BYTES = (STEPS + ROPE / 16) * 512;
constexpr int RECENT_TILES = 2 * WARPGROUPS;                // whose maxima are kept
// decoded_full, decoded_empty (four a stage), queries_full (two), raw_full and raw_empty (one a warp).
constexpr int BARRIERS = WARPGROUPS + 4 * WARPGROUPS + 2 + 8 * WARPGROUPS;
static_assert(WARPGROUPS <= 2, "with more, a score warpgroup could be two turns ahead of its queries");
constexpr float RESCALE_SLACK = 8.f;                        // P may be as large as 2^RESCALE_SLACK
constexpr float DECODE_FACTOR = 16384.f;                    // 2^14, by which decoded values are too small

#include "mla_fp4_tiles.cuh"
#include "mla_fp4_mma.cuh"

// ---- barriers and registers ---------------------------------------------------------------------------
DEVICE void barrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" :: "r"(barrier), "r"(count) : "memory");
}

template <int N>
DEVICE void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(N));
}

template <int N>
DEVICE void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(N));
}

DEVICE void sync_all_but_producer() {
  asm volatile("bar.sync 2,%0;" :: "n"(128 * WARPGROUPS + 128) : "memory");
}

DEVICE void sync_value_warpgroup() { asm volatile("bar.sync 1,128;" ::: "memory"); }

// --- kernel
extern "C" __global__ void __launch_bounds__(THREADS, 1) mla(
    const u16* q, u16* out, float* parts, float* lse, int* plan, const u8* values, const u8* block_scales,
    const u8* rope, const float* global_scale, const int* seq_lens, const int* cu_seqlens_q,
    const int* page_table, u64 values_page_stride, u64 scales_page_stride, u64 rope_page_stride,
    int values_slot_stride, int scales_slot_stride, int rope_slot_stride, float softmax_scale, int batch_size,
    int page_table_stride, int page_bits, int heads, int q_stride_token, int q_stride_head) {
  extern __shared__ __align__(1024) u8 smem[];
  // -1: values, 0 .. WARPGROUPS - 1: scores, WARPGROUPS: producer.
  const int warpgroup = threadIdx.x / 128 - 1;
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, g = lane >> 2, c = lane & 3;
  // Shared memory: decoded tiles, their weights, queries of two segments, maxima, sums, stored tiles,
  // barriers, and what is known of the batch.
  u8 *const weights = smem + WARPGROUPS * DECODED_BYTES, *const queries = weights + WARPGROUPS * WEIGHT_BYTES;
  // Maxima of the warps of a stage, and of the value warpgroup after recent tiles.
  float(*const maxima)[4][HEADS] = (float(*)[4][HEADS])(queries + 2 * QUERY_BYTES);
  float(*const recent)[HEADS] = (float(*)[HEADS])(maxima + WARPGROUPS);
  float(*const stats)[HEADS] = recent + RECENT_TILES;
  u8* const raw = (u8*)(stats + 4);
  u64* const barriers = (u64*)(raw + 4 * WARPGROUPS * RAW_BYTES);
  int *const warp_sums = (int*)(barriers + BARRIERS), *const packed_cu_tiles = warp_sums + THREADS / 32;
  const u32 decoded_full = shared_address(barriers), decoded_empty = decoded_full + 8 * WARPGROUPS;
  const u32 queries_full = decoded_empty + 32 * WARPGROUPS;
  const u32 raw_full = queries_full + 16, raw_empty = raw_full + 32 * WARPGROUPS;

  // By one thread of a warp that has nothing else to do: a lane each would take 2,300 clocks longer.
  if (threadIdx.x == THREADS - 1) {
    packed_cu_tiles[0] = 0;
    for (int i = 0; i < BARRIERS; i++) {
      barrier_init(decoded_full + 8 * i, i < 5 * WARPGROUPS + 2 ? 4 : i < 9 * WARPGROUPS + 2 ? 32 : 1);
    }
  }
  const float latent_scale = *global_scale;

  // --- partition
  // Tiles before each request: a scan, THREADS requests at a time.
  for (int base = 0, before = 0; base < batch_size; base += THREADS) {
    const int request = base + threadIdx.x, len = request < batch_size ? max(seq_lens[request], 0) : 0;
    int x = (len + TILE - 1) / TILE;
    if (request < batch_size) asm volatile("prefetch.global.L1 [%0];" :: "l"(cu_seqlens_q + request));
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
    if (request < batch_size) packed_cu_tiles[request + 1] = (before + x) << 6 | (len - 1 & 63);
    before += total;
    __syncthreads();  // before warp_sums is written again
  }
  const Latents latents{{values, values_page_stride, (u32)values_slot_stride},
                        {block_scales, scales_page_stride, (u32)scales_slot_stride},
                        {rope, rope_page_stride, (u32)rope_slot_stride}};
  const Batch batch{seq_lens,   cu_seqlens_q,      page_table, packed_cu_tiles,
                    batch_size, page_table_stride, page_bits};
  // Requests of no tokens have outputs of zeros.
  for (int request = blockIdx.x; request < batch_size; request += gridDim.x) {
    if (batch.seq_len(request) == 0) {
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
  const int num_tiles = batch.tiles_before(batch_size);
  const int blocks = max(min((int)gridDim.x, num_tiles / WARPGROUPS), 1);
  if (blockIdx.x >= blocks) return;
  const int block_begin = (u32)num_tiles * blockIdx.x / blocks;
  const int block_end = (u32)num_tiles * (blockIdx.x + 1) / blocks;
  if (block_begin >= block_end) return;
  // The request of the first tile is found by the thread that has it.
#pragma unroll 1
  for (int request = threadIdx.x; request < batch_size; request += THREADS) {
    if (batch.tiles_before(request) <= block_begin && block_begin < batch.tiles_before(request + 1)) {
      *warp_sums = request;
    }
  }
  __syncthreads();
  const int first_request = *warp_sums;

  // --- producer warpgroup: copies
  if (warpgroup == WARPGROUPS) {
    decrease_registers<40>();
    TileCursor cursor(batch, first_request, block_begin, block_end);
    PageSlot next = cursor.advance(warp);
    for (int k = 0; next.slot >= 0; k++) {
      const int place = 4 * (k % WARPGROUPS) + warp;
      if (k >= WARPGROUPS) barrier_wait(raw_empty + 8 * place, k / WARPGROUPS - 1 & 1);
      start_copy(shared_address(raw) + RAW_BYTES * place, latents, next, lane, raw_full + 8 * place);
      next = cursor.advance(warp);
    }
    return;
  }

  // The first queries are loaded by all other warps, while the first tiles are on their way.
  store_queries<4 * WARPGROUPS + 4>(queries, q + (u64)cu_seqlens_q[first_request] * q_stride_token, heads,
                                    q_stride_head);
  sync_all_but_producer();

  // --- score warpgroups: keys become float16, scores, softmax
  if (warpgroup >= 0) {
    increase_registers<168>();
    const float rope_scale = 1.f / (latent_scale * DECODE_FACTOR);
    const float score_scale = softmax_scale * LOG2E * latent_scale * DECODE_FACTOR;
    const LaneBase base = lane_base(shared_address(raw) + RAW_BYTES * (4 * warpgroup + warp),
                                    values_slot_stride == ROW_BYTES, g, c);
    const u32 decoded = shared_address(smem) + warpgroup * DECODED_BYTES + (16 * warp + lane % 16) * 128 +
                        16 * (lane / 16 ^ lane % 8);
    const u32 own_raw_full = raw_full + 8 * (4 * warpgroup + warp);
    const u32 own_raw_empty = raw_empty + 8 * (4 * warpgroup + warp);
    Segment segment(batch, first_request, block_begin, block_end);
    for (int i = 0, turn = 0, tile = block_begin + warpgroup; segment.advance(); i++) {
      const int before = batch.tiles_before(segment.request), seq_len = batch.seq_len(segment.request);
      // The reduction tells the compiler that all lanes have the same descriptor, as in start_values().
      const u32 query_operand =
          __reduce_or_sync(ALL_LANES, shared_address(queries + i % 2 * QUERY_BYTES) / 16 | B_LOW);
      if (i > 0 && tile < segment.end) barrier_wait(queries_full + i % 2 * 8, (i - 1) / 2 & 1);
      for (; tile < segment.end; tile += WARPGROUPS, turn ^= 1) {
        // --- load
        StoredRow first, second;
        StoredRope stored_rope;
        barrier_wait(own_raw_full, turn);
        load_rows(first, second, stored_rope, base);
        __syncwarp();
        if (lane == 0) barrier_arrive(own_raw_empty);

        // --- scores
        float scores[2][4] = {};
        start_rope_scores(scores, stored_rope, query_operand);
        // Slots that were never written may hold scales that are NaN.
        const int tokens_left = seq_len - (tile - before) * TILE - 16 * warp - g;
        if (tokens_left <= 8) second.scales = make_uint2(0, 0);
        if (tokens_left <= 0) first.scales = make_uint2(0, 0);
        wgmma_wait<0>();
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
          for (int i = 0; i < 4; i++) scores[n][i] *= rope_scale;
        }
        u32 operands[DEPTH][8];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          barrier_wait(decoded_empty + 32 * warpgroup + 8 * j, turn ^ 1);
          start_scores(scores, operands, first, second, decoded, query_operand, j);
        }
        wgmma_wait<0>();

        // --- softmax
        float m[2][2];
#pragma unroll
        for (int n = 0; n < 2; n++) {
          const float2 maximum = *(const float2*)&recent[(turn ^ 1) * WARPGROUPS + warpgroup][8 * n + 2 * c];
#pragma unroll
          for (int i = 0; i < 4; i++) {
            scores[n][i] = 8 * (i / 2) < tokens_left ? scores[n][i] * score_scale : minus_infinity();
          }
          m[n][0] = tile < segment.begin + WARPGROUPS ? LOWEST : maximum.x;
          m[n][1] = tile < segment.begin + WARPGROUPS ? LOWEST : maximum.y;
        }
        store_weights(scores, m, (u32*)(weights + warpgroup * WEIGHT_BYTES + 512 * warp) + lane,
                      maxima[warpgroup][warp], g, c);
        fence_async_shared();
        __syncwarp();
        if (lane == 0) barrier_arrive(decoded_full + 8 * warpgroup);
      }
    }
    return;
  }

  // --- value warpgroup
  Accumulator acc;
  const int own_head = 8 * (lane / 16) + lane % 8;  // the head of acc.l
  Segment segment(batch, first_request, block_begin, block_end), next = segment;
  next.advance();
  for (int i = -1, k = 0;; i++) {
    if (i >= 0 && !segment.advance()) break;
    const int request = segment.request, q_row = cu_seqlens_q[request];
    // The first and the last block that have tiles of the request.
    const u32 first_block = ((u32)(batch.tiles_before(request) + 1) * blocks - 1) / num_tiles;
    const u32 last_block = ((u32)batch.tiles_before(request + 1) * blocks - 1) / num_tiles;
    if (i >= 0) acc.clear();
    for (int tile = segment.begin; tile < segment.end; tile++, k++) {
      const int stage = k % WARPGROUPS;
      uint4* const own_weights = (uint4*)(weights + stage * WEIGHT_BYTES + 512 * warp) + lane;
      barrier_wait(decoded_full + 8 * stage, k / WARPGROUPS & 1);

      // --- rescale
      const float2 top = ((const float2*)maxima[stage])[lane];  // of warp lane / 8
      if (__any_sync(ALL_LANES,
                     top.x != acc.m.x || top.y != acc.m.y)) {  // rare: all go on from the same maxima
        float2 highest = top;
#pragma unroll
        for (int x = 8; x < 32; x <<= 1) {
          highest.x = fmaxf(highest.x, __shfl_xor_sync(ALL_LANES, highest.x, x));
          highest.y = fmaxf(highest.y, __shfl_xor_sync(ALL_LANES, highest.y, x));
        }
        highest.x = fmaxf(highest.x, acc.m.x);
        highest.y = fmaxf(highest.y, acc.m.y);
        const float2 rescale = make_float2(ex2(acc.m.x - highest.x), ex2(acc.m.y - highest.y));
        const float2 weight_factor = make_float2(ex2(top.x - highest.x), ex2(top.y - highest.y));
        acc.m = highest;
        acc.l *= of_head(rescale, 0, own_head);
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const float r = of_head(rescale, 0, 8 * n + 2 * c + e);
#pragma unroll
            for (int i = 0; i < 8; i++) {
              acc.o[i][n][e] *= r;
              acc.o[i][n][e + 2] *= r;
            }
          }
        }
        const float f = of_head(weight_factor, 8 * warp, own_head);
        const u32 ff = pack_f16(f, f);
        uint4 x = *own_weights;
        *own_weights = make_uint4(mul_f16x2(x.x, ff), mul_f16x2(x.y, ff), mul_f16x2(x.z, ff),
                                  mul_f16x2(x.w, ff));
        fence_async_shared();
        sync_value_warpgroup();
      }

      // --- accumulate
      const u32 tile_operand = shared_address(smem) + stage * DECODED_BYTES;
      const u32 weight_operand = shared_address(weights) + stage * WEIGHT_BYTES;
      wgmma_fence();
      start_values<0>(acc.o, tile_operand, weight_operand);
      wgmma_commit();
      start_values<2>(acc.o, tile_operand, weight_operand);
      wgmma_commit();
      start_values<4>(acc.o, tile_operand, weight_operand);
      wgmma_commit();
      start_values<6>(acc.o, tile_operand, weight_operand);
      wgmma_commit();
      acc.l += sum_of_weights(*own_weights);
      if (warp == 0 && lane < 8) *(float2*)&recent[k % RECENT_TILES][2 * lane] = acc.m;
      __syncwarp();
      // A quarter of the dims is empty as soon as its products are done.
      const u32 stage_empty = decoded_empty + 32 * stage;
      wgmma_wait<3>();
      if (lane == 0) barrier_arrive(stage_empty);
      wgmma_wait<2>();
      if (lane == 0) barrier_arrive(stage_empty + 8);
      wgmma_wait<1>();
      if (lane == 0) barrier_arrive(stage_empty + 16);
      wgmma_wait<0>();
      if (lane == 0) barrier_arrive(stage_empty + 24);
    }

    // --- load the queries of segment i + 2, as all score warpgroups have left segment i
    if (next.advance()) {
      store_queries<4>(queries + (i & 1) * QUERY_BYTES, q + (u64)cu_seqlens_q[next.request] * q_stride_token,
                       heads, q_stride_head);
      __syncwarp();
      if (lane == 0) barrier_arrive(queries_full + (i & 1) * 8);
    }
    if (i < 0) continue;

    // --- store. A lane has four dims of each 32 of 128: of blocks 2 * j and 2 * j + 1, rows g and g + 8.
    const float lane_sum = acc.l + __shfl_xor_sync(ALL_LANES, acc.l, 8);
    if (lane / 8 % 2 == 0) stats[warp][own_head] = lane_sum;
    sync_value_warpgroup();
    if (segment.begin == batch.tiles_before(request) && threadIdx.x == 0) {
      plan[2 * request] = first_block + request;
      plan[2 * request + 1] = last_block - first_block + 1;
    }
    const int dim = 128 * (g / 2) + 8 * warp + 4 * (g % 2);
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int head = 8 * n + 2 * c + e;
        const float m = of_head(acc.m, 0, head);
        if (head >= heads) continue;
        const float sum = stats[0][head] + stats[1][head] + stats[2][head] + stats[3][head];
        const float f = latent_scale * DECODE_FACTOR / sum;
        const u64 part = (u64)(blockIdx.x + request) * HEADS + head, row = (u64)q_row * heads + head;
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float *const x = acc.o[2 * j][n], *const y = acc.o[2 * j + 1][n];
          const float4 four = make_float4(x[e] * f, x[e + 2] * f, y[e] * f, y[e + 2] * f);
          if (first_block == last_block) {
            *(uint2*)(out + row * RANK + 32 * j + dim) = make_uint2(pack_bf16(four.x, four.y),
                                                                    pack_bf16(four.z, four.w));
          } else {
            *(float4*)(parts + part * RANK + 32 * j + dim) = four;
          }
        }
        if (first_block != last_block && warp == 0 && g == 0) lse[part] = m + lg2(sum);
      }
    }
    sync_value_warpgroup();  // before stats are written again
  }
}

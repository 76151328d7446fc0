// A layer of experts for a single token, in one launch: both products, and the router if there is one.
//
// Compiled at run time, with these macros:
//   CODES, SCALES, GROUP, GATE  as words.cuh says, of both matrices; GATE is 1 or 2
//   HIDDEN, INNER  outputs of the layer, and of the gate
//   SLOTS    experts that the token chose, at most 8
//   EXPERTS  of which the router chooses, if it is computed; 0: choices are there
//   BLOCKS   of the grid: one of each multiprocessor, all of which must be there at a time
//   WARPS    that multiply; one more copies
//   STAGES   pieces of work that a block has room for
// Kernel: one(...), BLOCKS blocks of 32 * (WARPS + 1) threads, dynamic shared memory as one.py says. From SM90 on.
//
// A block takes some tiles of the first product, 16 outputs of an expert, then some outputs of the layer, 8 at a time for
// all experts. What it reads is known as soon as experts are, so one warp copies codes of all tiles, one after the other
// and of both products, while the others multiply: memory is busy from the choice to the end. Blocks exchange logits and
// what the gate leaves through global memory: whoever wants a value reads it until it is not EMPTY, which no value is. Two
// buffers take turns, from launch to launch: this launch empties the other one.
//
// A tile is two halves of 8 outputs, which follow one another in an expert's matrix: halves of the first product belong
// to one expert, those of the second to two slots. Warps share the inputs, as in few.cu; what they are multiplied with
// stays in registers. Column s of the tensor cores' operand has the inputs of slot s, in the first product column 0.
//
// Names: g = lane / 4 and c = lane % 4, the coordinates of mma fragments; a half's output g is a lane's.

#include "bits.cuh"
#include "choose.cuh"
#include "words.cuh"

constexpr int CONSUMERS = 32 * WARPS, THREADS = CONSUMERS + 32;
constexpr u32 EMPTY = 0xFFFFFFFF;  // bfloat16 values are rounded to other NaNs, logits have 16 bits
constexpr int SCALE_BYTES = OF_CODES ? 1 : 2;
constexpr int LANES_ARRIVE = IS_PLAIN ? 0 : 32;  // when their copies of scales have

// A matrix of an expert.
template <int N, int K>
struct Matrix {
  static constexpr int OUTPUTS = N;
  static constexpr int WIDTH = K / 8 * BITS;  // bytes of a row of codes
  static constexpr int PIECES = K / PIECE, QUADS = (PIECES + 3) / 4, EACH = (QUADS + WARPS - 1) / WARPS;
  static constexpr int GROUPS_OF_ROW = GROUP ? K / (GROUP ? GROUP : 1) : 1;
  static constexpr int HALF_CODES = 8 * WIDTH, HALF_SCALES = IS_PLAIN ? 0 : (GROUPS_OF_ROW * 8 * SCALE_BYTES + 15) / 16 * 16;
  static constexpr int BYTES = (2 * (HALF_CODES + HALF_SCALES) + 127) / 128 * 128;  // of a tile

  const u8 *codes, *scales;
  const float* global_scale;
  const u16* bias;
  int bias_stride;

  DEVICE float bias_of(int expert, int output) const {
    return bias ? __uint_as_float((u32)bias[(u64)expert * bias_stride + output] << 16) : 0;
  }
  DEVICE float global_of(int expert, int output) const {
    return UNDO * (SCALES == 1 ? global_scale[(u64)expert * N + output] : 1);
  }
};

using Up = Matrix<2 * INNER, HIDDEN>;
using Down = Matrix<HIDDEN, INNER>;

constexpr int UP_TILES = INNER / 8, ALL_UP = SLOTS * UP_TILES;  // of an expert, of all
constexpr int UNITS = HIDDEN / 8, PAIRS = (SLOTS + 1) / 2;      // 8 outputs of the layer have so many tiles
constexpr int MOST_UP = (ALL_UP + BLOCKS - 1) / BLOCKS, MOST_UNITS = (UNITS + BLOCKS - 1) / BLOCKS;  // of a block
constexpr int STAGE_BYTES = Up::BYTES > Down::BYTES ? Up::BYTES : Down::BYTES;
constexpr int TOGETHER = STAGE_BYTES / Down::BYTES;  // tiles of the second product that are copied at a time
constexpr int ROUNDS = (MOST_UP * 8 + CONSUMERS - 1) / CONSUMERS;             // in which gates are computed
constexpr int LAST_ROUNDS = (MOST_UNITS * 8 * SLOTS + CONSUMERS - 1) / CONSUMERS;  // and rows of the layer
static_assert(ALL_UP >= BLOCKS, "each block computes values that all others wait for");
static_assert(LAST_ROUNDS == 1, "a thread has a slot of an output");

// --- what blocks share
struct State {
  u32 launches;
  u32 padding[3];
  u32 logits[2][EXPERTS ? EXPERTS : 1];
};

// --- barriers and copies
DEVICE void barrier_init(u32 barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" :: "r"(barrier), "r"(count) : "memory");
}

DEVICE void barrier_expect(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" :: "r"(barrier), "r"(bytes) : "memory");
}

DEVICE void show_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void copy_bulk(u8* to, const u8* from, int bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];"
               :: "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// Arrive when the copies of this thread have.
DEVICE void copies_arrive(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(barrier) : "memory");
}

DEVICE void sync_consumers() { asm volatile("bar.sync 1,%0;" :: "n"(CONSUMERS) : "memory"); }

// Reads and writes that other blocks see.
DEVICE uint4 load_shared_by_blocks(const uint4* from) {
  uint4 r;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(from) : "memory");
  return r;
}

DEVICE u32 load_shared_by_blocks(const u32* from) {
  u32 r;
  asm volatile("ld.volatile.global.u32 %0,[%1];" : "=r"(r) : "l"(from) : "memory");
  return r;
}

DEVICE void store_shared_by_blocks(u32* to, u32 x) {
  asm volatile("st.volatile.global.u32 [%0],%1;" :: "l"(to), "r"(x) : "memory");
}

DEVICE void store_shared_by_blocks(u16* to, u16 x) {
  asm volatile("st.volatile.global.u16 [%0],%1;" :: "l"(to), "h"(x) : "memory");
}

DEVICE bool has_empty(u32 pair) { return pair >= 0xFFFF0000 || (pair & 0xFFFF) == 0xFFFF; }

// Multiply a warp's share of a tile's inputs. x: pairs of them, as pieces have them.
template <class M>
DEVICE void multiply_tile(float* acc, const u8* tile, const u32 (*x)[PIECE / 2], int warp, int g, int c) {
  const u8 *low_codes = tile + g * M::WIDTH, *high_codes = low_codes + M::HALF_CODES;
  const u8 *low_scales = tile + 2 * M::HALF_CODES + g * SCALE_BYTES, *high_scales = low_scales + M::HALF_SCALES;
#pragma unroll
  for (int j = 0; j < M::EACH; j++) {
    const int quad = j * WARPS + warp, piece = quad * 4 + c;
    if (M::QUADS % WARPS && quad >= M::QUADS) break;
    const bool is_there = M::PIECES % 4 == 0 || piece < M::PIECES;
    uint4 low = make_uint4(0, 0, 0, 0), high = low;
    if (is_there) low = *(const uint4*)(low_codes + piece * 16), high = *(const uint4*)(high_codes + piece * 16);
    const int group = GROUP ? (is_there ? piece : 0) * PIECE / (GROUP ? GROUP : 1) : 0;
    float sum[4] = {};
    u32 low_factor = 0, high_factor = 0;
#pragma unroll
    for (int r = 0; r < 4; r += 2) {
      if (OF_CODES && r % (4 / GROUPS) == 0) {
        const int at = (group + r * GROUPS / 4) * 8;
        low_factor = factor_of(low_scales[at], 0), high_factor = factor_of(high_scales[at], 0);
      }
      u32 a[2][PARTS], b[2][PARTS];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        unpack(a[i], word_of(low, r + i), low_factor), unpack(b[i], word_of(high, r + i), high_factor);
      }
#pragma unroll
      for (int part = 0; part < PARTS; part++) {
        const int i = input_of(part, r) / 2;
        mma_bf16(OF_STEP ? sum : acc, a[0][part], b[0][part], a[1][part], b[1][part], x[j][i], x[j][i + 1]);
      }
    }
    if (OF_STEP) {
      const float low_scale = from_bf16(((const u16*)low_scales)[group * 8]);
      const float high_scale = from_bf16(((const u16*)high_scales)[group * 8]);
#pragma unroll
      for (int e = 0; e < 4; e++) acc[e] += sum[e] * (e < 2 ? low_scale : high_scale);
    }
  }
  if (!IS_PLAIN && !OF_CODES && GROUP == 0) {
    const float low_scale = from_bf16(*(const u16*)low_scales), high_scale = from_bf16(*(const u16*)high_scales);
#pragma unroll
    for (int e = 0; e < 4; e++) acc[e] *= e < 2 ? low_scale : high_scale;
  }
}

// Copy a half of a tile: 8 outputs of an expert from `row` on.
template <class M>
DEVICE void copy_half(const M& matrix, u8* to, int half, int expert, int row, u32 barrier, int lane) {
  if (lane == 0) {
    const u8* const from = matrix.codes + ((u64)expert * M::OUTPUTS + row) * M::WIDTH;
    copy_bulk(to + half * M::HALF_CODES, from, M::HALF_CODES, barrier);
  }
  for (int i = lane; i < (IS_PLAIN ? 0 : M::GROUPS_OF_ROW); i += 32) {
    const u64 group = (u64)expert * M::GROUPS_OF_ROW + i;
    u8* const at = to + 2 * M::HALF_CODES + half * M::HALF_SCALES + i * 8 * SCALE_BYTES;
    copy_async<8 * SCALE_BYTES>(at, matrix.scales + (group * M::OUTPUTS + row) * SCALE_BYTES, true);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    one(const u16* x, const u16* router, const u16* router_bias, u16* logits, const long long* chosen, const void* weights,
        long long* chosen_here, u16* weights_here, const u8* up_codes, const u8* up_scales, const float* up_global,
        const u16* up_bias, const u8* down_codes, const u8* down_scales, const float* down_global, const u16* down_bias,
        u16* out, State* state, u16* values, int experts, int up_bias_stride, int down_bias_stride, int is_float,
        int is_normalized, float limit, float factor) {
  extern __shared__ __align__(128) u8 smem[];
  __shared__ float up_sums[MOST_UP][WARPS][16], down_sums[MOST_UNITS * PAIRS][WARPS][16];
  __shared__ float rows[SLOTS][MOST_UNITS * 8], slot_weights[SLOTS], logit_sums[WARPS];
  __shared__ int slot_experts[SLOTS];
  __shared__ u64 barriers[2 * STAGES];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3, block = blockIdx.x;
  const Up up{up_codes, up_scales, up_global, up_bias, up_bias_stride};
  const Down down{down_codes, down_scales, down_global, down_bias, down_bias_stride};
  const int first_tile = ALL_UP * block / BLOCKS, tiles = ALL_UP * (block + 1) / BLOCKS - first_tile;
  const int first_unit = UNITS * block / BLOCKS, last_tiles = (UNITS * (block + 1) / BLOCKS - first_unit) * PAIRS;
  const int items = tiles + (last_tiles + TOGETHER - 1) / TOGETHER;
  const u32 full = shared_address(barriers), empty = full + 8 * STAGES;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) barrier_init(full + 8 * s, 1 + LANES_ARRIVE), barrier_init(empty + 8 * s, WARPS);
    show_barriers();
  }
  __syncthreads();

  if (warp == WARPS) {
    // --- copy: choices, then codes and scales
    wait_for_inputs();
    const u32 turn = load_shared_by_blocks(&state->launches) & 1;
    Choice choice{experts, 0};
    if (EXPERTS) {
      const u32* const from = state->logits[turn];
      choice = choose<EXPERTS ? (EXPERTS + 31) / 32 : 1>(
          [&](int e) {
            u32 logit;
            do logit = load_shared_by_blocks(from + e);
            while (logit == EMPTY);
            return logit;
          },
          EXPERTS, SLOTS, is_normalized);
      // As a tensor has it.
      choice.weight = from_bf16(u16(pack_bf16(choice.weight, 0)));
      if (block == 0 && lane < SLOTS) {
        chosen_here[lane] = choice.expert, weights_here[lane] = u16(pack_bf16(choice.weight, 0));
      }
    } else if (lane < SLOTS) {
      choice.expert = (int)min(chosen[lane], (long long)experts);
      choice.weight = is_float ? ((const float*)weights)[lane] : from_bf16(((const u16*)weights)[lane]);
    }
    if (lane < SLOTS) slot_experts[lane] = choice.expert, slot_weights[lane] = choice.weight;
    __syncwarp();
    for (int item = 0; item < items; item++) {
      const int stage = item % STAGES;
      if (item >= STAGES) barrier_wait(empty + 8 * stage, (item / STAGES - 1) & 1);
      u8* const to = smem + stage * STAGE_BYTES;
      const u32 barrier = full + 8 * stage;
      if (item < tiles) {
        const int tile = first_tile + item, expert = slot_experts[tile / UP_TILES], n = tile % UP_TILES;
        const bool is_there = expert < experts;
        if (lane == 0) barrier_expect(barrier, is_there ? 2 * Up::HALF_CODES : 0);
        __syncwarp();
        for (int half = 0; is_there && half < 2; half++) {
          copy_half(up, to, half, expert, GATE == 1 ? n * 8 + half * INNER : n * 16 + half * 8, barrier, lane);
        }
      } else {
        const int first = (item - tiles) * TOGETHER, count = min(TOGETHER, last_tiles - first);
        int halves = 0;
        for (int i = 0; i < 2 * count; i++) {
          const int slot = (first + i / 2) % PAIRS * 2 + i % 2;
          halves += slot < SLOTS && slot_experts[slot] < experts;
        }
        if (lane == 0) barrier_expect(barrier, halves * Down::HALF_CODES);
        __syncwarp();
        for (int i = 0; i < 2 * count; i++) {
          const int tile = first + i / 2, slot = tile % PAIRS * 2 + i % 2, row = (first_unit + tile / PAIRS) * 8;
          if (slot >= SLOTS || slot_experts[slot] >= experts) continue;
          copy_half(down, to + i / 2 * Down::BYTES, i % 2, slot_experts[slot], row, barrier, lane);
        }
      }
      if (LANES_ARRIVE) copies_arrive(barrier);
    }
    return;
  }

  // --- the router's logits
  constexpr int VECTORS = (HIDDEN / 8 + CONSUMERS - 1) / CONSUMERS;  // of 8 inputs, of a thread
  constexpr int MOST_LOGITS = EXPERTS ? (EXPERTS + BLOCKS - 1) / BLOCKS : 0;
  if (EXPERTS) {
    uint4 own[MOST_LOGITS ? MOST_LOGITS : 1][VECTORS];
#pragma unroll
    for (int i = 0; i < MOST_LOGITS; i++) {
#pragma unroll
      for (int v = 0; v < VECTORS; v++) {
        const int e = block + i * BLOCKS, at = (v * CONSUMERS + threadIdx.x) * 8;
        own[i][v] = make_uint4(0, 0, 0, 0);
        if (e < EXPERTS && at < HIDDEN) own[i][v] = *(const uint4*)(router + (u64)e * HIDDEN + at);
      }
    }
    wait_for_inputs();
    const u32 turn = load_shared_by_blocks(&state->launches) & 1;
#pragma unroll
    for (int i = 0; i < MOST_LOGITS; i++) {
      const int e = block + i * BLOCKS;
      if (e >= EXPERTS) break;
      float sum = 0;
#pragma unroll
      for (int v = 0; v < VECTORS; v++) {
        const int at = (v * CONSUMERS + threadIdx.x) * 8;
        if (at >= HIDDEN) break;
        const uint4 inputs = *(const uint4*)(x + at);
#pragma unroll
        for (int w = 0; w < 4; w++) {
          const u32 a = word_of(own[i][v], w), b = word_of(inputs, w);
          sum += __uint_as_float(a << 16) * __uint_as_float(b << 16);
          sum += __uint_as_float(a & 0xFFFF0000) * __uint_as_float(b & 0xFFFF0000);
        }
      }
      sum = sum_of_lanes(sum);
      if (i) sync_consumers();  // the sums before have been read
      if (lane == 0) logit_sums[warp] = sum;
      sync_consumers();
      if (threadIdx.x == 0) {
        sum = router_bias ? from_bf16(router_bias[e]) : 0;
        for (int w = 0; w < WARPS; w++) sum += logit_sums[w];
        const u32 logit = pack_bf16(sum, 0) & 0xFFFF;
        store_shared_by_blocks(&state->logits[turn][e], logit);
        store_shared_by_blocks(&state->logits[turn ^ 1][e], EMPTY);
        logits[e] = u16(logit);
      }
    }
  } else {
    wait_for_inputs();
  }
  const u32 launches = load_shared_by_blocks(&state->launches), turn = launches & 1;
  u16 *const here = values + turn * (SLOTS * INNER), *const other = values + (turn ^ 1) * (SLOTS * INNER);

  // --- first product
  u32 pairs[Up::EACH > Down::EACH ? Up::EACH : Down::EACH][PIECE / 2];
#pragma unroll
  for (int j = 0; j < Up::EACH; j++) {
#pragma unroll
    for (int i = 0; i < PIECE / 8; i++) {
      const int piece = (j * WARPS + warp) * 4 + c;
      uint4 vector = make_uint4(0, 0, 0, 0);
      if (g == 0 && piece < Up::PIECES) vector = *(const uint4*)(x + piece * PIECE + i * 8);
#pragma unroll
      for (int w = 0; w < 4; w++) {
        const u32 pair = word_of(vector, w);
        pairs[j][4 * i + w] = SCALES_X ? multiply(pair, 0x5D805D80) : pair;
      }
    }
  }
#pragma unroll 1
  for (int item = 0; item < tiles; item++) {
    const int stage = item % STAGES;
    barrier_wait(full + 8 * stage, item / STAGES & 1);
    float acc[4] = {};
    multiply_tile<Up>(acc, smem + stage * STAGE_BYTES, pairs, warp, g, c);
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + 8 * stage);
    if (c == 0) up_sums[item][warp][g] = acc[0], up_sums[item][warp][g + 8] = acc[2];
  }
  sync_consumers();

  // --- gate
#pragma unroll
  for (int round = 0; round < ROUNDS; round++) {
    const int i = round * CONSUMERS + threadIdx.x, tile = first_tile + i / 8, n = tile % UP_TILES * 8 + i % 8;
    if (i >= tiles * 8) break;
    const int slot = tile / UP_TILES, expert = slot_experts[slot];
    if (expert < experts) {
      const int a_output = GATE == 1 ? n : 2 * n, b_output = GATE == 1 ? n + INNER : 2 * n + 1;
      const int a_at = GATE == 1 ? i % 8 : i % 8 * 2, b_at = GATE == 1 ? i % 8 + 8 : i % 8 * 2 + 1;
      float a = 0, b = 0;
#pragma unroll
      for (int w = 0; w < WARPS; w++) a += up_sums[i / 8][w][a_at], b += up_sums[i / 8][w][b_at];
      a = a * up.global_of(expert, a_output) + up.bias_of(expert, a_output);
      b = b * up.global_of(expert, b_output) + up.bias_of(expert, b_output);
      store_shared_by_blocks(here + slot * INNER + n, u16(pack_bf16(gated(a, b, limit, factor), 0)));
    }
    other[slot * INNER + n] = u16(EMPTY);
  }

  // --- second product
  const bool is_live = g < SLOTS && slot_experts[g < SLOTS ? g : 0] < experts;
#pragma unroll
  for (int j = 0; j < Down::EACH; j++) {
#pragma unroll
    for (int i = 0; i < PIECE / 8; i++) {
      const int piece = (j * WARPS + warp) * 4 + c;
      uint4 vector = make_uint4(0, 0, 0, 0);
      if (is_live && piece < Down::PIECES) {
        const uint4* const from = (const uint4*)(here + g * INNER + piece * PIECE + i * 8);
        do vector = load_shared_by_blocks(from);
        while (has_empty(vector.x) || has_empty(vector.y) || has_empty(vector.z) || has_empty(vector.w));
      }
#pragma unroll
      for (int w = 0; w < 4; w++) {
        const u32 pair = word_of(vector, w);
        pairs[j][4 * i + w] = SCALES_X ? multiply(pair, 0x5D805D80) : pair;
      }
    }
  }
  __syncwarp();
#pragma unroll 1
  for (int item = tiles; item < items; item++) {
    const int stage = item % STAGES, first = (item - tiles) * TOGETHER;
    barrier_wait(full + 8 * stage, item / STAGES & 1);
    for (int i = 0; i < min(TOGETHER, last_tiles - first); i++) {
      const int tile = first + i, pair = tile % PAIRS;
      float acc[4] = {};
      multiply_tile<Down>(acc, smem + stage * STAGE_BYTES + i * Down::BYTES, pairs, warp, g, c);
      // Of the first half the sums of slot 2 * pair, of the second those of the next.
      if (c == pair) down_sums[tile][warp][g] = acc[0], down_sums[tile][warp][g + 8] = acc[3];
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + 8 * stage);
  }
  sync_consumers();

  // --- weighted sum, in the order of slots
  const int outputs = last_tiles / PAIRS * 8, slot = threadIdx.x / (MOST_UNITS * 8), n = threadIdx.x % (MOST_UNITS * 8);
  if (slot < SLOTS && n < outputs) {
    const int expert = slot_experts[slot], output = first_unit * 8 + n, tile = n / 8 * PAIRS + slot / 2;
    float sum = 0;
    if (expert < experts) {
#pragma unroll
      for (int w = 0; w < WARPS; w++) sum += down_sums[tile][w][slot % 2 * 8 + n % 8];
      sum = (sum * down.global_of(expert, output) + down.bias_of(expert, output)) * slot_weights[slot];
    }
    rows[slot][n] = sum;
  }
  sync_consumers();
  if (threadIdx.x < outputs) {
    float sum = 0;
    for (int s = 0; s < SLOTS; s++) sum += rows[s][threadIdx.x];
    out[first_unit * 8 + threadIdx.x] = u16(pack_bf16(sum, 0));
  }
  // All blocks have read it, as all values are there.
  if (block == 0 && threadIdx.x == 0) store_shared_by_blocks(&state->launches, launches + 1);
}

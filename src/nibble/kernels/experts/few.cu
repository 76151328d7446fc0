// Products of a few tokens with the packed matrices of the experts that they chose (matrices.py), at the speed of memory.
//
// Compiled at run time, with these macros:
//   CODES, SCALES, GROUP, GATE  as words.cuh says
//   OUTPUTS, INPUTS  of a matrix
//   COLUMNS  tokens of an expert that are multiplied at a time: 8 or 16
//   ROWS     outputs that a block multiplies at a time: 32 or 64
//   WARPS    warps of a block
//   STAGES   steps that are copied at a time
//   ONE      whether all choices are those of a single token, with one row of x for a block
//   COMBINE  0, or how many choices a token has: blocks of a cluster, one for each choice, whose outputs are weighted
//            and summed up, in order, into `copies` rows that are alike
//   ROUTED   0, or the experts among which the kernel chooses for a single token, by logits that the kernel in front
//            (logits.cu) writes at the time (early.cuh); chosen and weights receive the choices
//   EARLY    whether x is what a kernel with ROUTED, just in front, writes at the time
//   START    with ROUTED: the step of a block's first warp (its last, if it has fewer) at which the next kernel may start
// Kernel: few(...), blocks of 32 * WARPS threads, dynamic shared memory as cuda.py says. Rows of codes and of x are
// multiples of 16 bytes, outputs of ROWS. is_early: choices were written before the kernel in front began, so that
// weights are read while it ends. From SM80 on, clusters from SM90 on.
//
// A block finds out who chose what, then takes one tile after another: ROWS outputs of an expert, and its tokens. Its
// warps share the inputs. A product does not depend on the order of its inputs, if it is the same on both sides: so of
// a row, a lane takes 16 bytes of codes after another, and the inputs that they are multiplied with, and nothing is
// moved between lanes. It copies its codes through shared memory of its own, some steps ahead, beyond the end of a tile.
// Scales that are of a lane's inputs alone multiply codes, exactly; scales of all that are multiplied at a time
// multiply sums. Warps add up their sums in order.
//
// Names: g = lane / 4 and c = lane % 4, the coordinates of mma fragments. A lane has the OWN outputs from OWN * g on.

#include "bits.cuh"
#include "choose.cuh"
#include "cluster.cuh"
#include "early.cuh"
#include "words.cuh"

constexpr int THREADS = 32 * WARPS, TILES = COLUMNS / 8, OWN = ROWS / 8;
constexpr int SCALE_BYTES = OWN * (OF_CODES ? 1 : 2);                // of a lane's outputs, for a group
constexpr int GROUP_OR_ROW = GROUP ? GROUP : INPUTS;
constexpr u64 WIDTH = (u64)INPUTS * BITS / 8;                       // bytes of a row of codes
constexpr int PIECES = INPUTS / PIECE, STEPS = (PIECES + 3) / 4;
constexpr bool IS_EVEN = PIECES % 4 == 0;                           // the last step is a whole one
constexpr int NUMBERS = OUTPUTS / ROWS;                             // tiles of an expert
constexpr u32 SCALE_GROUP = OUTPUTS * SCALE_BYTES / OWN;            // bytes of the scales of a group

// Of a lane, in shared memory, for each step: codes of its outputs, and scales.
constexpr int ALL_SCALES = IS_PLAIN ? 0 : GROUPS * SCALE_BYTES;
constexpr int SCALE_ROOM = ONE && (ALL_SCALES == 4 || ALL_SCALES == 8) ? ALL_SCALES : (ALL_SCALES + 15) / 16 * 16;
constexpr int STAGE_BYTES = OWN * 512 + SCALE_ROOM * 32;
constexpr int VECTORS_OF_X = PIECE / 8;
constexpr bool AT_ONCE = COMBINE && (STEPS + WARPS - 1) / WARPS <= STAGES;  // a block copies its only tile as a whole
constexpr int AHEAD = AT_ONCE ? STAGES : STAGES - 1;                        // steps that are on their way
constexpr int SUM_FLOATS = ROWS + 4;  // of a token and warp, so that banks differ
constexpr int HALF = WARPS / 2;
constexpr int SUM_WARPS = ONE ? WARPS : HALF, SUM_COLUMNS = ONE ? 1 : COLUMNS;  // whose sums are there at a time
constexpr int RESULTS = GATE ? ROWS / 2 : ROWS;                                 // of a tile
static_assert(!EARLY || ONE, "its row is read at a time");
static_assert(!ONE || COLUMNS == 8, "its sums are those of the first column");
static_assert(!ROUTED || RESULTS <= THREADS - 32, "all but the first warp clear them");

// Some choices of an expert.
struct Share {
  int expert, first, count;  // of the list of choices
};

// Fill in shares and the list of choices, by expert; returns the number of shares. All blocks come to the same.
// numbers: room for one of each choice, and one of each expert.
DEVICE int share_out(const long long* chosen, int choices, int experts, Share* shares, int* list, int* numbers) {
  __shared__ int total;
  int* const counts = numbers + choices;
  for (int e = threadIdx.x; e < experts; e += THREADS) counts[e] = 0;
  __syncthreads();
  for (int s = threadIdx.x; s < choices; s += THREADS) {
    numbers[s] = (int)min(chosen[s], (long long)experts);
    if (numbers[s] < experts) atomicAdd(&counts[numbers[s]], 1);
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const int lane = threadIdx.x;
    int first = 0, share = 0;
    for (int e = lane; e < (experts + 31) / 32 * 32; e += 32) {
      const int count = e < experts ? counts[e] : 0, own = (count + COLUMNS - 1) / COLUMNS;
      int both = own << 16 | count;  // summed up over lanes
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int before = __shfl_up_sync(ALL_LANES, both, d);
        if (lane >= d) both += before;
      }
      const int my_first = first + (both & 0xFFFF) - count, my_share = share + (both >> 16) - own;
      if (e < experts) counts[e] = my_first;
      for (int i = 0; i < own; i++) {
        shares[my_share + i] = {e, my_first + i * COLUMNS, min(count - i * COLUMNS, COLUMNS)};
      }
      const int all = __shfl_sync(ALL_LANES, both, 31);
      first += all & 0xFFFF, share += all >> 16;
    }
    if (lane == 0) total = share;
    __syncwarp();
    for (int s = lane; s < (choices + 31) / 32 * 32; s += 32) {
      const int e = s < choices ? numbers[s] : experts;
      const u32 same = __match_any_sync(ALL_LANES, e);
      const int before = __popc(same & ((1u << lane) - 1)), from = e < experts ? counts[e] : 0;
      if (e < experts) list[from + before] = s;
      __syncwarp();
      if (e < experts && before == 0) counts[e] = from + __popc(same);
      __syncwarp();
    }
  }
  __syncthreads();
  return total;
}

// What a lane of a block's first warp has of a single token's logits.
struct TokenKeys {
  static constexpr int VALUES = (ROUTED + 31) / 32 + !ROUTED;
  u32 keys[VALUES], mine;
  u32 shared;  // the logit behind all others, in all lanes
};

// Choose the experts of a single token, by its logits.
DEVICE int choose_out(const u16* logits, int choices, int has_shared, Share* shares, int* list, TokenKeys& own) {
  if (threadIdx.x < 32) {
    const int s = threadIdx.x;
    u32 all[ROUTED / 32 + 1];
    load_early(all, [&](int i) { return s + 32 * i < ROUTED + has_shared ? read_16(logits + s + 32 * i) : 0; });
    make_keys(own.keys, [&](int e) { return all[e / 32]; }, ROUTED);
    own.mine = largest_keys(own.keys, choices - has_shared);
    own.shared = __shfl_sync(ALL_LANES, all[ROUTED / 32], ROUTED % 32);
    if (s < choices) shares[s] = {s < choices - has_shared ? expert_of(own.mine) : ROUTED, s, 1}, list[s] = s;
  }
  __syncthreads();
  return choices;
}

// Write down what the first warp of a kernel chose.
DEVICE void write_choices(const TokenKeys& own, int choices, int is_normalized, int has_shared, long long* chosen,
                          u16* weights) {
  const int s = threadIdx.x, top_k = choices - has_shared;
  const float weight = weight_of(own.mine, own.keys, top_k, is_normalized);
  if (s >= choices) return;
  chosen[s] = s < top_k ? expert_of(own.mine) : ROUTED;
  weights[s] = u16(pack_bf16(s < top_k ? weight : shared_weight(own.shared), 0));
  publish();
}

// Shares of a single token whose experts are given.
DEVICE int share_out_one(const long long* chosen, int choices, int experts, Share* shares, int* list) {
  for (int s = threadIdx.x; s < choices; s += THREADS) {
    const long long expert = EARLY ? read_64(chosen + s) : chosen[s];
    shares[s] = {(int)min(expert, (long long)(experts - 1)), s, expert < experts}, list[s] = s;
  }
  __syncthreads();
  return choices;
}

#if COMBINE
#define CLUSTERED __cluster_dims__(COMBINE, 1, 1)
#else
#define CLUSTERED
#endif

extern "C" __global__ void CLUSTERED __launch_bounds__(THREADS, COLUMNS == 8 || STAGES <= 3 ? 12 / WARPS : 8 / WARPS)
    few(const u16* x, long long* chosen, void* weights, const u8* codes, const u8* scales,
        const float* global_scale, const u16* bias, u16* out, long long* places, const u16* logits, int choices, int top_k,
        int experts, int copies, int x_stride, int bias_stride, int is_each, int is_early, int is_float,
        int is_normalized, int has_shared, float limit, float factor) {
  __shared__ float biases[ROWS];
  extern __shared__ __align__(128) u8 smem[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  float* const sums = (float*)(smem + WARPS * STAGES * STAGE_BYTES);
  float* const parts = sums + SUM_WARPS * SUM_COLUMNS * SUM_FLOATS;  // of a cluster's blocks
  u16* const x_one = (u16*)(parts + COMBINE * ROWS);                 // the row of x
  Share* const shares = (Share*)(x_one + (ONE ? INPUTS : 0));
  int* const list = (int*)(shares + choices);
#if COMBINE
  __shared__ u64 parts_there;  // in the cluster's first block
  if (threadIdx.x == 0) expect_stores(&parts_there, COMBINE * ROWS * 4);
  cluster_arrive();
#endif
  if (!is_early && !ROUTED) wait_for_inputs();
  if (ROUTED && threadIdx.x >= 32) {
    // Before the next kernel starts, while the first warp chooses.
    for (int tile = blockIdx.x; tile < choices * NUMBERS; tile += gridDim.x) {
      if (threadIdx.x - 32 < RESULTS) store_early(out + (u64)tile * RESULTS + threadIdx.x - 32, EMPTY);
    }
    publish();
  }
  if (places && blockIdx.x == 0) {
    for (int s = threadIdx.x; s < choices; s += THREADS) places[s] = s;
  }
  TokenKeys keys;
  const int share_count =
      ROUTED ? choose_out(logits, choices, has_shared, shares, list, keys)
      : ONE || choices == top_k ? share_out_one(chosen, choices, experts, shares, list)
                         : share_out(chosen, choices, experts, shares, list, list + choices);
  const int stop = share_count * NUMBERS, begin = STEPS * warp / WARPS, end = STEPS * (warp + 1) / WARPS;
  u8* const stages = smem + warp * (STAGES * STAGE_BYTES) + lane * 16;
  const int to_scales = OWN * 512 + lane * (SCALE_ROOM - 16);  // from a lane's codes

  // Tiles of a share follow one another, but those of a cluster are of different shares.
  auto share_of = [&](int tile) { return shares[COMBINE ? tile % (COMBINE ? COMBINE : 1) : tile / NUMBERS]; };
  auto number_of = [&](int tile) { return COMBINE ? tile / (COMBINE ? COMBINE : 1) : tile % NUMBERS; };
  // The output at a place of a tile.
  auto output_of = [&](int number, int place) {
    if (GATE != 1) return number * ROWS + place;
    return number * (ROWS / 2) + place + (place < ROWS / 2 ? 0 : OUTPUTS / 2 - ROWS / 2);
  };

  // Where a warp is: a step of a tile.
  struct Cursor {
    int tile, step;
    const u8 *codes, *scales;  // of the lane's first output; codes at its piece
  };
  auto enter = [&](Cursor& at) {
    if (at.tile >= stop) return;
    const u64 expert = share_of(at.tile).expert;
    const int first = output_of(number_of(at.tile), OWN * g);
    at.codes = codes + (expert * OUTPUTS + first) * WIDTH + (begin * 4 + c) * 16;
    at.scales = scales + (expert * OUTPUTS * (INPUTS / GROUP_OR_ROW) + first) * (SCALE_BYTES / OWN);
  };
  auto advance = [&](Cursor& at) {
    at.codes += 64;
    if (++at.step < end) return;
    at.step = begin, at.tile += gridDim.x;
    enter(at);
  };
  auto copy = [&](const Cursor& at, u8* stage) {
    const int piece = at.step * 4 + c;
    const bool is_there = IS_EVEN || piece < PIECES;
#pragma unroll
    for (int i = 0; i < OWN; i++) copy_async<16>(stage + i * 512, at.codes + i * WIDTH, is_there);
#pragma unroll
    for (int i = 0; i < (IS_PLAIN ? 0 : GROUPS); i++) {
      const u8* from = at.scales + u32(piece * PIECE / GROUP_OR_ROW) * SCALE_GROUP + i * SCALE_GROUP;
      copy_async<SCALE_BYTES>(stage + to_scales + i * SCALE_BYTES, from, is_there);
    }
  };
  const bool works = begin < end;
  Cursor ahead_at{(int)blockIdx.x, begin};
  enter(ahead_at);
#pragma unroll
  for (int i = 0; i < AHEAD; i++) {
    if (works && ahead_at.tile < stop) copy(ahead_at, stages + i * STAGE_BYTES), advance(ahead_at);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  if (is_early && !EARLY) wait_for_inputs();
#if COMBINE
  const int rank = blockIdx.x % COMBINE;
  // Bits, which are converted where they are needed, so that nothing waits for them here.
  const u32 weight = EARLY      ? read_16((const u16*)weights + rank)
                     : is_float ? ((const u32*)weights)[rank]
                                : ((const u16*)weights)[rank];
#endif
  if (ONE) {
    constexpr int MOST = ((STEPS + WARPS - 1) / WARPS * 4 * PIECE + 255) / 256;  // vectors of a lane
    const u16* const row = x + (u64)(COMBINE ? blockIdx.x % (COMBINE ? COMBINE : 1) : 0) * x_stride;
    const int first = begin * 4 * PIECE + lane * 8, behind = min(end * 4 * PIECE, INPUTS);
    uint4 own[MOST];
    auto load = [&](int i) {
      const u16* const from = row + first + i * 256;
      if (first + i * 256 >= behind) return make_uint4(0, 0, 0, 0);
      return EARLY || ROUTED ? read_128(from) : *(const uint4*)from;
    };
    // Whoever comes long before its inputs awaits its codes first, and reads no faster than they come.
    if (EARLY) load_early(own, load, [] { asm volatile("cp.async.wait_all;" ::: "memory"); });
#pragma unroll
    for (int i = 0; i < MOST; i++) {
      if (!EARLY) own[i] = load(i);
    }
#pragma unroll
    for (int i = 0; i < MOST; i++) {
      if (first + i * 256 < behind) *(uint4*)(x_one + first + i * 256) = own[i];
    }
    __syncwarp();
  }
  // Its codes are on their way; what writes logits has little left to do.
  if (ROUTED) {
    if (blockIdx.x == 0 && warp == 0) {
      write_choices(keys, choices, is_normalized, has_shared, chosen, (u16*)weights);
    }
    __syncwarp();
    wait_for_kernel();
    // The warp that wrote choices down, as one thread of a block is enough.
    if (START == 0 && warp == 0) start_next();
  }
  // The next kernel waits for this one, and this one, at its end, for that whose values it has read.
  if (EARLY) start_next();

  int place = 0;
  for (int tile = blockIdx.x; tile < stop; tile += gridDim.x) {
    const Share share = share_of(tile);
    const u16* x_lane[TILES];
    bool is_live[TILES];
#pragma unroll
    for (int t = 0; t < TILES; t++) {
      is_live[t] = 8 * t + g < share.count;
      const int choice = list[share.first + (is_live[t] ? 8 * t + g : 0)];
      x_lane[t] = (ONE ? x_one : x + (u64)(is_each ? choice : choice / top_k) * x_stride) + c * PIECE;
    }
    uint4 next[TILES][VECTORS_OF_X] = {};
    // Of inputs that are not there codes are 0, and x may be what it was.
    auto load_x = [&](int step) {
      const bool is_there = IS_EVEN || step * 4 + c < PIECES;
#pragma unroll
      for (int t = 0; t < TILES; t++) {
#pragma unroll
        for (int i = 0; i < VECTORS_OF_X; i++) {
          if (is_live[t] && is_there) next[t][i] = *(const uint4*)(x_lane[t] + step * (4 * PIECE) + i * 8);
        }
      }
    };
    if (works) load_x(begin);
    // It arrives while codes are multiplied.
    float own_bias = 0;
    if (bias && threadIdx.x < ROWS) {
      own_bias = from_bf16(bias[(u64)share.expert * bias_stride + output_of(number_of(tile), threadIdx.x)]);
    }
    float acc[OWN / 2][TILES][4] = {};
#pragma unroll 1
    for (int step = begin; step < end; step++, place = place + 1 == STAGES ? 0 : place + 1) {
      asm volatile("cp.async.wait_group %0;" :: "n"(AHEAD - 1) : "memory");
      if (!AT_ONCE && ahead_at.tile < stop) {
        copy(ahead_at, stages + (place == 0 ? STAGES - 1 : place - 1) * STAGE_BYTES), advance(ahead_at);
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
      if (ROUTED && START && warp == 0 && step == min(begin + START, end - 1)) start_next();
      u32 x_now[TILES][PIECE / 2];
#pragma unroll
      for (int t = 0; t < TILES; t++) {
#pragma unroll
        for (int i = 0; i < PIECE / 2; i++) {
          const u32 pair = word_of(next[t][i / 4], i % 4);
          x_now[t][i] = SCALES_X ? multiply(pair, 0x5D805D80) : pair;
        }
      }
      if (step + 1 < end) load_x(step + 1);
      const u8* const stage = stages + place * STAGE_BYTES;
      u32 scale[4];
      if (SCALE_ROOM == 4) scale[0] = *(const u32*)(stage + to_scales);
      if (SCALE_ROOM == 8) *(uint2*)scale = *(const uint2*)(stage + to_scales);
      if (SCALE_ROOM == 16) *(uint4*)scale = *(const uint4*)(stage + to_scales);
#pragma unroll
      for (int m = 0; m < OWN / 2; m++) {
        const uint4 low = *(const uint4*)(stage + 2 * m * 512), high = *(const uint4*)(stage + (2 * m + 1) * 512);
        float sum[TILES][4] = {};
        u32 low_factor = 0, high_factor = 0;
#pragma unroll
        for (int r = 0; r < 4; r += 2) {  // inputs of both registers follow one another
          if (OF_CODES && r % (4 / GROUPS) == 0) {
            const int byte = r * GROUPS / 4 * SCALE_BYTES + 2 * m;
            low_factor = factor_of(scale[byte / 4], byte % 4), high_factor = factor_of(scale[byte / 4], byte % 4 + 1);
          }
          u32 a[2][PARTS], b[2][PARTS];
#pragma unroll
          for (int i = 0; i < 2; i++) {
            unpack(a[i], word_of(low, r + i), low_factor), unpack(b[i], word_of(high, r + i), high_factor);
          }
#pragma unroll
          for (int part = 0; part < PARTS; part++) {
            const int i = input_of(part, r) / 2;
#pragma unroll
            for (int t = 0; t < TILES; t++) {
              mma_bf16(OF_STEP ? sum[t] : acc[m][t], a[0][part], b[0][part], a[1][part], b[1][part], x_now[t][i],
                       x_now[t][i + 1]);
            }
          }
        }
        if (OF_STEP) {
          const float low_scale = __uint_as_float(scale[m] << 16), high_scale = __uint_as_float(scale[m] & 0xFFFF0000);
#pragma unroll
          for (int t = 0; t < TILES; t++) {
#pragma unroll
            for (int e = 0; e < 4; e++) acc[m][t][e] += sum[t][e] * (e < 2 ? low_scale : high_scale);
          }
        }
      }
    }

    // --- add up: of several tokens warps of the second half leave their sums to those of the first
#pragma unroll
    for (int half = ONE ? 0 : 1; half >= 0; half--) {
      if (!COMBINE) __syncthreads();  // the sums before have been read
      if (!ONE && warp / HALF != half) continue;
#pragma unroll
      for (int t = 0; t < TILES; t++) {
        if (8 * t >= share.count) break;
#pragma unroll
        for (int e = 0; e < (ONE ? 1 : 2); e++) {
          if (ONE && c) break;
          float* const to = sums + (warp % SUM_WARPS * SUM_COLUMNS + 8 * t + 2 * c + e) * SUM_FLOATS + OWN * g;
#pragma unroll
          for (int m = 0; m < OWN / 2; m += 2) {
            float4 sum = make_float4(acc[m][t][e], acc[m][t][e + 2], acc[m + 1][t][e], acc[m + 1][t][e + 2]);
            if (!ONE && half == 0) {
              const float4 other = *(const float4*)(to + 2 * m);
              sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
            }
            *(float4*)(to + 2 * m) = sum;
          }
        }
      }
    }
    if (threadIdx.x < ROWS) biases[threadIdx.x] = own_bias;
    __syncthreads();

    // --- write
    auto value = [&](int token, int at) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < HALF; w++) {
        const float* const from = sums + (w * SUM_COLUMNS + token) * SUM_FLOATS + at;
        sum += ONE ? from[0] + from[HALF * SUM_FLOATS] : from[0];
      }
      const u64 row = (u64)share.expert * OUTPUTS + output_of(number_of(tile), at);
      if (!OF_CODES && !IS_PLAIN && GROUP == 0) sum *= from_bf16(((const u16*)scales)[row]);
      sum *= UNDO;
      if (SCALES == 1) sum *= global_scale[row];
      return sum + biases[at];
    };
#if COMBINE
    cluster_wait();  // all blocks have begun
    for (int r = threadIdx.x; r < ROWS; r += THREADS) {
      const float share_of_sum = __uint_as_float(is_float ? weight : weight << 16);
      const float y = share.count ? value(0, r) * share_of_sum : 0;
      store_and_count(parts + rank * ROWS + r, __float_as_uint(y), &parts_there, 0);
    }
    if (rank == 0) wait_for_stores(&parts_there);
    for (int r = threadIdx.x; rank == 0 && r < ROWS; r += THREADS) {
      float sum = 0;
      for (int i = 0; i < COMBINE; i++) sum += parts[i * ROWS + r];
      for (int copy = 0; copy < copies; copy++) out[copy * OUTPUTS + number_of(tile) * ROWS + r] = u16(pack_bf16(sum, 0));
    }
#else
    for (int i = threadIdx.x; i < share.count * RESULTS; i += THREADS) {
      const int token = i / RESULTS, r = i % RESULTS;
      float y = value(token, GATE == 2 ? 2 * r : r);
      if (GATE) y = gated(y, value(token, GATE == 2 ? 2 * r + 1 : r + ROWS / 2), limit, factor);
      const u64 choice = list[share.first + token];
      u16* const to = out + choice * (NUMBERS * RESULTS) + number_of(tile) * RESULTS + r;
      if (ROUTED) store_early(to, u16(pack_bf16(y, 0)));
      else *to = u16(pack_bf16(y, 0));
    }
#endif
  }
  if (EARLY) wait_for_kernel();
}

// x W^T + b on SM90 for few rows, and silu(the first half) * the second: W is read once, at the speed of memory.
//
// A block has 64 * GROUPS rows of W, which are 64 * GROUPS outputs, and all rows of x. W is on the left of a product,
// where its rows fill a tile; the few rows of x are the narrow side. The blocks of a cluster have the same outputs and a
// part of K each; in the end each adds up some rows of all parts, always in the same order. One thread copies, and
// warpgroups of 64 outputs multiply. Before the kernel in front ends, the first stages of W are on their way.
// Gated, half of a block's outputs are gates, and half the factors that belong to them.
// FP8: both sides are E4M3 with float32 scales, of W for blocks of 128 x 128, of x for 128 values of a row. Tensor cores
// add up 128 products in about 14 bits; these sums are scaled and added up in float32.
//
// Macros: ROWS, of x, 8, 16, 32, 64 or 128; GROUPS; SPLITS, blocks of a cluster; STAGES; GATED and FP8, 0 or 1.
#include "bits.cuh"
#include "cluster.cuh"
#include "wgmma_ss.cuh"

static_assert(!(FP8 && (GATED || ROWS > 64)), "not written");
static_assert(STAGES > 1, "a stage is given back in the step behind its own");
constexpr int INPUTS = SWIZZLED >> !FP8, SCALED = 128;  // of a stage; what has a scale
constexpr int WARPS = 4 * GROUPS, CONSUMERS = 32 * WARPS, THREADS = CONSUMERS + 32;
constexpr int WEIGHTS = 64 * GROUPS, OUTPUTS = WEIGHTS >> GATED;  // rows of W, and outputs that are stored
constexpr int BOX_BYTES = OUTPUTS * SWIZZLED, WEIGHT_BYTES = WEIGHTS * SWIZZLED, STAGE_BYTES = WEIGHT_BYTES + ROWS * SWIZZLED;
constexpr int MOST_BLOCKS = GROUPS > 2 || (FP8 && ROWS > 32) ? 1 : 2;  // of a multiprocessor
constexpr int SUMS = ROWS / 2;                                         // of a thread
// Floats from a row of a block's sums to the next. Of a warp that stores sums, lanes of four rows, two apart each, and of
// eight outputs have a bank each.
constexpr int PITCH = WEIGHTS + 4;
static_assert(4 * ROWS * PITCH <= STAGES * STAGE_BYTES, "sums lie where stages were");
constexpr int FOUR = 4;                               // outputs that a thread stores together
constexpr int COLUMNS = OUTPUTS / FOUR, DEEP = CONSUMERS / COLUMNS;  // threads of a row, and rows at a time
constexpr int TURNS = (ROWS + DEEP * SPLITS - 1) / (DEEP * SPLITS);
// Turns whose sums are loaded together, in about 32 registers.
constexpr int TOGETHER = TURNS * SPLITS << GATED <= 8 ? TURNS : SPLITS << GATED < 8 ? 8 / (SPLITS << GATED) : 1;

// ---- the thread that copies ---------------------------------------------------------------------------

struct Copies {
  const TensorMap &x_map, &weight_map;
  u32 stages;
  Barriers barriers;
  int output, outputs, first;  // of the block, of all, and the step of K that is the block's first

  DEVICE void weights(int stage, int step) const {
    u32 full = barriers.full(stage), to = stages + stage * STAGE_BYTES;
    expect(full, STAGE_BYTES);  // x included
    copy_once(to, weight_map, output, (first + step) * INPUTS, full);
    if (GATED) copy_once(to + BOX_BYTES, weight_map, outputs + output, (first + step) * INPUTS, full);
  }

  DEVICE void rows(int stage, int step) const {
    copy(stages + stage * STAGE_BYTES + WEIGHT_BYTES, x_map, 0, (first + step) * INPUTS, barriers.full(stage));
  }
};

DEVICE void produce(const Copies& copies, int steps) {
  wait_for_inputs();
  int step = 0;
  for (; step < min(STAGES, steps); step++) copies.rows(step, step);
  for (Place place; step < steps; step++, place.advance()) {
    barrier_wait(copies.barriers.empty(place.stage), place.parity);
    copies.weights(place.stage, step);
    copies.rows(place.stage, step);
  }
}

// ---- the warpgroups that multiply -----------------------------------------------------------------------

#define SUMS_4 "%0,%1,%2,%3"
#define SUMS_8 SUMS_4 ",%4,%5,%6,%7"
#define SUMS_16 SUMS_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define SUMS_32 SUMS_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define SUMS_64                                                                                      \
  SUMS_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53" \
          ",%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#if FP8
#define KIND "k32.f32.e4m3.e4m3 "
#define MAJORNESS ""
#else
#define KIND "k16.f32.bf16.bf16 "
#define MAJORNESS ",0,0"
#endif
// d += A B^T, for A of 64 rows and B of `columns`, of 32 bytes.
#define WGMMA(columns, sums, a_b, ...)                                            \
  asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p,0,0;\n"                           \
               "wgmma.mma_async.sync.aligned.m64n" columns KIND                   \
               "{" sums "}," a_b ",p,1,1" MAJORNESS ";\n}" : __VA_ARGS__ : "l"(descriptor(a)), "l"(descriptor(b)))

DEVICE void wgmma(float (&d)[SUMS], u32 a, u32 b) {
#if ROWS == 8
  WGMMA("8", SUMS_4, "%4,%5", OUT_4(d, 0));
#elif ROWS == 16
  WGMMA("16", SUMS_8, "%8,%9", OUT_4(d, 0), OUT_4(d, 4));
#elif ROWS == 32
  WGMMA("32", SUMS_16, "%16,%17", OUT_16(d, 0));
#elif ROWS == 64
  WGMMA("64", SUMS_32, "%32,%33", OUT_16(d, 0), OUT_16(d, 16));
#else
  static_assert(ROWS == 128, "as the box of x");
  WGMMA("128", SUMS_64, "%64,%65", OUT_16(d, 0), OUT_16(d, 16), OUT_16(d, 32), OUT_16(d, 48));
#endif
}

// Scales of FP8: of rows of x, those of a step together, and of a warpgroup's part of W; from the block's first step on.
struct Scales {
  const float *of_x, *of_weights;
  int rows;

  DEVICE void load(float (&x)[SUMS / 2], float& weight, int step) const {
    weight = of_weights[step];
#pragma unroll
    for (int i = 0; i < SUMS / 2; i++) {
      int row = i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;  // as store_sums() has them
      x[i] = row < rows ? of_x[step * rows + row] : 0;
    }
  }
};

DEVICE void multiply(float (&sums)[SUMS], u32 stages, Barriers barriers, int steps, const Scales& scales) {
  int group = uniform(threadIdx.x / 128);
  u32 a = matrix_at(stages + group * 64 * SWIZZLED), b = matrix_at(stages + WEIGHT_BYTES);
  Place place;
#pragma unroll
  for (int i = 0; i < SUMS; i++) sums[i] = 0;
#if FP8
  constexpr bool AHEAD = ROWS * GROUPS < 256;  // a step, as they come from afar; where there are registers
  float next[SUMS / 2], next_weight;
  if (AHEAD) scales.load(next, next_weight, 0);
#else
  int last_stage = 0;
#endif
#pragma unroll 1
  for (int step = 0; step < steps; step++, place.advance()) {
    int offset = place.stage * STAGE_BYTES;
#if FP8
    float part[SUMS] = {}, scale[SUMS / 2];
    if (!AHEAD) scales.load(next, next_weight, step);
#pragma unroll
    for (int i = 0; i < SUMS / 2; i++) scale[i] = next[i] * next_weight;
    keep(part);
    if (AHEAD && step + 1 < steps) scales.load(next, next_weight, step + 1);
#else
    float (&part)[SUMS] = sums;
#endif
    barrier_wait(barriers.full(place.stage), place.parity);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < SWIZZLED / 32; j++) wgmma(part, behind(a, offset + 32 * j), behind(b, offset + 32 * j));
    wgmma_commit();
#if FP8
    wgmma_wait<0>();
    if (threadIdx.x % 32 == 0) barrier_arrive(barriers.empty(place.stage));
    keep(part);
#pragma unroll
    for (int i = 0; i < SUMS; i++) sums[i] = fmaf(part[i], scale[i / 4 * 2 + i % 2], sums[i]);
#else
    // Tensor cores go on with this step while the one before is given back.
    wgmma_wait<1>();
    if (step && threadIdx.x % 32 == 0) barrier_arrive(barriers.empty(last_stage));
    last_stage = place.stage;
#endif
  }
  wgmma_wait<0>();
  keep(sums);
}

// ---- outputs ------------------------------------------------------------------------------------------

DEVICE void wait_for_consumers() { asm volatile("bar.sync 1,%0;" :: "n"(CONSUMERS) : "memory"); }

// As cluster_arrive(), of a block that has written nothing for others.
DEVICE void cluster_arrive_after_reads() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }

// As cluster_arrive(), for what was written to shared memory alone, without a wait for all other memory.
DEVICE void cluster_arrive_after_sums() {
#if __CUDACC_VER_MAJOR__ >= 13
  asm volatile("fence.release.sync_restrict::shared::cta.cluster;" ::: "memory");
  cluster_arrive_after_reads();
#else
  cluster_arrive();
#endif
}

// A thread's sums are those of output 16 * warp + lane / 4 in places 0 and 1 of each four, and of the output 8 further in
// places 2 and 3; rows 8 * four + lane % 4 * 2 and the next.
DEVICE void store_sums(const float (&sums)[SUMS], u32 to) {
  u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  to += 4 * (lane % 4 * 2 * PITCH + warp * 16 + lane / 4);
#pragma unroll
  for (int i = 0; i < SUMS; i++)
    asm volatile("st.shared.f32 [%0],%1;"
                 :: "r"(to + 4 * ((i / 4 * 8 + i % 2) * PITCH + i / 2 % 2 * 8)), "f"(sums[i]) : "memory");
}

// Not moved in front of a barrier, as both are volatile.
DEVICE float4 load_sums(u32 address) {
  float4 x;
  asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3},[%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(address));
  return x;
}

DEVICE void add(float4& x, const float4& y) { x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w; }

// Four outputs, rounded.
DEVICE uint2 round_4(float4 x, uint2 bias) {
  add(x, make_float4(low(bias.x), high(bias.x), low(bias.y), high(bias.y)));
  return make_uint2(pack_bf16(x.x, x.y), pack_bf16(x.z, x.w));
}

// Two outputs. Both factors were rounded, as the product's outputs in memory would be.
DEVICE u32 gate_2(u32 gates, u32 ups) {
  return pack_bf16(silu(low(gates)) * low(ups), silu(high(gates)) * high(ups));
}

DEVICE uint2 load_bias(const u16* bias, int output) { return *reinterpret_cast<const uint2*>(bias + output); }

// What a thread stores: four outputs of some rows.
struct Share {
  int column, output;  // in the block, and in all
  bool is_inside;
  uint2 bias[1 + GATED];

  // The bias is a weight, which is read before the kernel in front ends.
  DEVICE Share(int first, int outputs, const u16* all) : bias{} {
    column = threadIdx.x % COLUMNS * FOUR, output = first + column, is_inside = output < outputs;
    if (all && is_inside)
#pragma unroll
      for (int i = 0; i <= GATED; i++) bias[i] = load_bias(all, output + i * outputs);
  }

  DEVICE void store(u32 sums, u16* out, int rows, int outputs, int rank) const {
    if (!is_inside) return;
#pragma unroll 1
    for (int row = rank + threadIdx.x / COLUMNS * SPLITS; row < rows; row += TOGETHER * DEEP * SPLITS)
      store_together(sums, out, row, rows, outputs);
  }

  DEVICE void store_together(u32 sums, u16* out, int first, int rows, int outputs) const {
    float4 parts[TOGETHER][1 + GATED][SPLITS];
#pragma unroll
    for (int turn = 0; turn < TOGETHER; turn++) {
      int row = first + turn * DEEP * SPLITS;
      if (row < rows)
#pragma unroll
        for (int i = 0; i <= GATED; i++)
#pragma unroll
          for (int from = 0; from < SPLITS; from++)
            parts[turn][i][from] = load_sums(in_block(sums + 4 * (row * PITCH + column + i * OUTPUTS), from));
    }
#pragma unroll
    for (int turn = 0; turn < TOGETHER; turn++) {
      int row = first + turn * DEEP * SPLITS;
      uint2 y[1 + GATED];
#pragma unroll
      for (int i = 0; i <= GATED; i++) {
        float4 sum = parts[turn][i][0];
#pragma unroll
        for (int from = 1; from < SPLITS; from++) add(sum, parts[turn][i][from]);
        y[i] = round_4(sum, bias[i]);
      }
      if (GATED) y[0] = make_uint2(gate_2(y[0].x, y[GATED].x), gate_2(y[0].y, y[GATED].y));
      if (row < rows) *reinterpret_cast<uint2*>(out + size_t(row) * outputs + output) = y[0];
    }
  }
};

// ---- the kernel ---------------------------------------------------------------------------------------

// Arguments: maps of x [T, K] and the weight [N, K], or [2N, K], gates first; the bias of its rows or null; the output
// [T, N]; T, N, and steps along K, no fewer than SPLITS; of FP8 the scales of x [K / 128, T] and of the weight
// [N / 128, K / 128], else null.
extern "C" __global__ void __cluster_dims__(SPLITS, 1, 1) __launch_bounds__(THREADS, MOST_BLOCKS) linear(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map, const u16* bias, u16* out,
    int rows, int outputs, int all_steps, const float* x_scale, const float* weight_scale) {
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ u64 places[2 * STAGES];
  u32 stages = (shared_address(shared) + EIGHT_ROWS - 1) / EIGHT_ROWS * EIGHT_ROWS;  // the same in all blocks
  Barriers barriers{shared_address(places)};
  asm volatile("" : "+r"(stages), "+r"(barriers.first));  // computed once, not in each step
  int rank = blockIdx.x % SPLITS, output = blockIdx.x / SPLITS * OUTPUTS;
  int first = rank * all_steps / SPLITS, steps = (rank + 1) * all_steps / SPLITS - first;
  Copies copies{x_map, weight_map, stages, barriers, output, outputs, first};
  bool copies_all = threadIdx.x == CONSUMERS;
  if (copies_all) {
    prefetch(weight_map);
    for (int i = 0; i < STAGES; i++) barrier_init(barriers.full(i), 1), barrier_init(barriers.empty(i), WARPS);
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    // Nobody else needs to know of barriers before the first copies.
    for (int i = 0; i < min(STAGES, steps); i++) copies.weights(i, i);
    prefetch(x_map);
  }
  __syncthreads();
  if (threadIdx.x >= CONSUMERS) {
    if (copies_all) produce(copies, steps);
    __syncwarp();
    if (SPLITS > 1) cluster_arrive_after_reads(), cluster_wait();
  } else {
    Share share(output, outputs, bias);
    float sums[SUMS];
    int block = min(output + threadIdx.x / 128 * 64, outputs - 1) / SCALED;
    Scales scales{x_scale + first * rows, weight_scale + block * all_steps + first, rows};
    if (FP8) wait_for_kernel();  // whose scales of x are read by all, and not by the thread that copies alone
    multiply(sums, stages, barriers, steps, scales);
    wait_for_consumers();  // nobody reads stages any more
    store_sums(sums, stages);
    if (SPLITS > 1) cluster_arrive_after_sums(), cluster_wait();
    else wait_for_consumers();
    wait_for_kernel();  // which may read what is in the output's place
    share.store(stages, out, rows, outputs, rank);
    __syncwarp();
  }
  // Nobody leaves while others read its sums; they have been read, as what came of them is stored.
  if (SPLITS > 1) cluster_arrive_after_reads(), cluster_wait();
}

// silu(x Wg^T) * (x Wu^T) on SM90: the first product of a gated MLP for many rows, and what stands behind it.
//
// A cluster of two blocks takes 256 rows and 88 outputs, then the next such tile of its share; a block has 128 rows. A
// tile's rows of Wg and of Wu lie one after the other in shared memory, as one matrix of 176 columns, so that a thread
// has both sums of an output. Each block copies one of the two, for both blocks. One thread copies; two warpgroups
// take tiles in turns: while one multiplies, the other computes the outputs of its tile, and stores them by way of
// buffers of their own.
//
// Macros: STAGES, of inputs; ROUND_SILU, 0 or 1: whether silu is rounded before it is a factor.
#include "bits.cuh"
#include "cluster.cuh"
#include "wgmma_ss.cuh"

constexpr int BLOCKS = 2, GROUPS = 2, GROUP_WARPS = 4;  // of a cluster; of a block; of a warpgroup
constexpr int ROWS = 128, OUTPUTS = 88, INPUTS = 64;    // of a block's tile; and of a stage
constexpr int PRODUCT_ROWS = 64, PRODUCTS = ROWS / PRODUCT_ROWS;
constexpr int SUMS = OUTPUTS;  // of a thread and a product: gates, then as many factors
constexpr int X_BYTES = ROWS * SWIZZLED, MATRIX_BYTES = OUTPUTS * SWIZZLED, STAGE_BYTES = X_BYTES + 2 * MATRIX_BYTES;
constexpr int WARP_ROWS = 16, OUT_BYTES = OUTPUTS * 2, BUFFER_BYTES = WARP_ROWS * OUT_BYTES;  // a warp's outputs
static_assert(OUT_BYTES != SWIZZLED, "rows of outputs are not swizzled (tensor_map.py)");

struct Sizes {
  int rows, columns;  // tiles of a cluster
  int band;           // rows of tiles whose columns are taken together
  int steps, outputs;
  DEVICE int tiles() const { return rows * columns; }
};

// Tile number i: bands one after the other, in a band column after column. So rows of x stay in L2 for a whole band.
struct Tile {
  int row, column;
  DEVICE Tile(int i, const Sizes& sizes) {
    int first = i / (sizes.band * sizes.columns) * sizes.band, deep = min(sizes.band, sizes.rows - first);
    int rest = i - first * sizes.columns;
    row = first + rest % deep, column = rest / deep;
  }
};

// ---- the thread that copies ---------------------------------------------------------------------------

// As barrier_wait(), for arrivals from both blocks.
DEVICE void wait_for_cluster(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred p;\nL: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p,[%0],%1;\n"
      "@p bra E;\nbra L;\nE:\n}"
      :: "r"(barrier), "r"(parity) : "memory");
}

// Copy the box to this place of both blocks, whose barriers each count it.
DEVICE void copy_to_both(u32 to, const TensorMap& map, int y, int x, u32 barrier) {
  asm volatile(COPY ".multicast::cluster [%0],[%1,{%2,%3}],[%4],%5;"
               :: "r"(to), "l"(&map), "r"(x), "r"(y), "r"(barrier), "h"(u16((1 << BLOCKS) - 1)) : "memory");
}

DEVICE void produce(
    const TensorMap& x_map, const TensorMap& weight_map, const Sizes& sizes, u32 stages, Barriers barriers, int rank) {
  Place place;
  for (int i = blockIdx.x / BLOCKS; i < sizes.tiles(); i += gridDim.x / BLOCKS) {
    Tile tile(i, sizes);
    int row = (tile.row * BLOCKS + rank) * ROWS, output = tile.column * OUTPUTS + rank * sizes.outputs;
    for (int k = 0; k < sizes.steps; k++, place.advance()) {
      u32 full = barriers.full(place.stage), x = stages + place.stage * STAGE_BYTES;
      // Until nobody in either block reads what was there; nobody waits for the first turn.
      wait_for_cluster(barriers.empty(place.stage), place.parity ^ 1);
      expect(full, STAGE_BYTES);
      copy(x, x_map, row, k * INPUTS, full);
      copy_to_both(x + X_BYTES + rank * MATRIX_BYTES, weight_map, output, k * INPUTS, full);
    }
  }
}

// ---- the warpgroups that multiply -----------------------------------------------------------------------

#define OUT_40(d, i) OUT_8(d, i), OUT_8(d, i + 8), OUT_8(d, i + 16), OUT_8(d, i + 24), OUT_8(d, i + 32)

// d (+)= A B^T, for A of 64 x 16 and B of 176 x 16.
DEVICE void wgmma(float (&d)[SUMS], u32 a, u32 b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p,%90,0;\nwgmma.mma_async.sync.aligned.m64n176k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"
      "%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,"
      "%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,"
      "%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87},"
      "%88,%89,p,1,1,0,0;\n}"
      : OUT_40(d, 0), OUT_40(d, 40), OUT_8(d, 80) : "l"(descriptor(a)), "l"(descriptor(b)), "r"(add));
}

DEVICE void multiply(float (&sums)[PRODUCTS][SUMS], u32 a, u32 b, bool is_first) {
  wgmma_fence();
#pragma unroll
  for (int j = 0; j < INPUTS / 16; j++) {
#pragma unroll
    for (int h = 0; h < PRODUCTS; h++)
      wgmma(sums[h], behind(a, h * PRODUCT_ROWS * SWIZZLED + 32 * j), behind(b, 32 * j), j > 0 || !is_first);
  }
  wgmma_commit();
}

DEVICE void arrive_in_block(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _,[%0];" :: "r"(barrier) : "memory");
}

// ---- outputs ------------------------------------------------------------------------------------------

// Two outputs. Both factors are rounded, as the product's outputs in memory would be.
DEVICE u32 gated(float gate_0, float gate_1, float up_0, float up_1) {
  u32 gates = pack_bf16(gate_0, gate_1), ups = pack_bf16(up_0, up_1);
  float lo = silu(low(gates)), hi = silu(high(gates));
  if (ROUND_SILU) {
    u32 rounded = pack_bf16(lo, hi);
    lo = low(rounded), hi = high(rounded);
  }
  return pack_bf16(lo * low(ups), hi * high(ups));
}

// Store a warp's 16 rows by way of its buffer. What lies outside of the output is left out.
DEVICE void store(const float (&sums)[SUMS], const TensorMap& map, u32 buffer, int row, int output, int lane) {
  if (lane == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // for the rows before
  __syncwarp();
  // Two matrices of 8 x 8 at a time: 8 rows and the next 8, of 8 columns. A lane has the place of a row of one of them;
  // rows of 176 bytes lie in different banks.
  u32 to = buffer + lane % 16 * OUT_BYTES;
#pragma unroll
  for (int j = 0; j < OUTPUTS / 8; j++) {
    int gate = 4 * j, up = gate + SUMS / 2;
    u32 upper = gated(sums[gate], sums[gate + 1], sums[up], sums[up + 1]);
    u32 lower = gated(sums[gate + 2], sums[gate + 3], sums[up + 2], sums[up + 3]);
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0],{%1,%2};"
                 :: "r"(to + 16 * j), "r"(upper), "r"(lower) : "memory");
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  if (lane == 0) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0,{%1,%2}],[%3];"
                 :: "l"(&map), "r"(output), "r"(row), "r"(buffer) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
}

DEVICE void consume(
    const TensorMap& out_map, const Sizes& sizes, u32 stages, u32 buffers, Barriers barriers, int rank) {
  int lane = threadIdx.x % 32, group = uniform(threadIdx.x / 128) - 1, warp = threadIdx.x / 32 % GROUP_WARPS;
  u32 a = matrix_at(stages), b = matrix_at(stages + X_BYTES);
  u32 empty = in_block(barriers.empty(0), lane % BLOCKS);
  u32 buffer = buffers + (group * GROUP_WARPS + warp) * BUFFER_BYTES;
  Place place;
  float sums[PRODUCTS][SUMS];

  auto multiply_stage = [&](bool is_first) {
    barrier_wait(barriers.full(place.stage), place.parity);
    multiply(sums, behind(a, place.stage * STAGE_BYTES), behind(b, place.stage * STAGE_BYTES), is_first);
  };
  auto release = [&](int stage) {  // in both blocks, as both fill it
    if (lane < BLOCKS) arrive_in_block(empty + 8 * stage);
  };

  if (group == 1) {
    end_turn(group);
    place.skip(sizes.steps);
  }
  int clusters = gridDim.x / BLOCKS;
  for (int i = blockIdx.x / BLOCKS + group * clusters; i < sizes.tiles(); i += GROUPS * clusters) {
    await_turn(group);  // until the other has no stage left to wait for
    multiply_stage(true);
#pragma unroll 1
    for (int k = 1; k < sizes.steps; k++) {
      int before = place.stage;
      place.advance();
      multiply_stage(false);
      wgmma_wait<1>();
      release(before);
    }
    end_turn(group);
    wgmma_wait<0>();
    release(place.stage);
    if (!sizes.outputs) break;  // never; or the compiler computes outputs first, and the thread that copies waits for that
    place.advance();
    place.skip(sizes.steps);
    Tile tile(i, sizes);
#pragma unroll
    for (int h = 0; h < PRODUCTS; h++) {
      keep(sums[h]);
      int row = (tile.row * BLOCKS + rank) * ROWS + h * PRODUCT_ROWS + warp * WARP_ROWS;
      store(sums[h], out_map, buffer, row, tile.column * OUTPUTS, lane);
    }
  }
  if (lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// ---- the kernel ---------------------------------------------------------------------------------------

// Arguments: maps of x [T, K], the weight [2N, K], gates first, and the output [T, N]; and sizes: rows and columns of a
// cluster's tiles, rows of a band, steps along K, and N.
extern "C" __global__ void __cluster_dims__(BLOCKS, 1, 1) __launch_bounds__(128 * (GROUPS + 1), 1) gated_linear(
    const __grid_constant__ TensorMap x_map, const __grid_constant__ TensorMap weight_map,
    const __grid_constant__ TensorMap out_map, int rows, int columns, int band, int steps, int outputs) {
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ u64 places[2 * STAGES];
  u32 stages = (shared_address(shared) + EIGHT_ROWS - 1) / EIGHT_ROWS * EIGHT_ROWS;  // the same in both blocks
  Barriers barriers{shared_address(places)};
  Sizes sizes{rows, columns, band, steps, outputs};
  int rank = blockIdx.x % BLOCKS;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2 * STAGES; i++)
      // A block's own thread fills a stage, and the warps of a warpgroup of both blocks empty it.
      barrier_init(barriers.first + 8 * i, i < STAGES ? 1 : BLOCKS * GROUP_WARPS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  // Before anyone copies to the other block or arrives there.
  cluster_arrive();
  cluster_wait();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) produce(x_map, weight_map, sizes, stages, barriers, rank);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume(out_map, sizes, stages, stages + STAGES * STAGE_BYTES, barriers, rank);
  }
  // Nobody leaves while the other block may copy or arrive here.
  __syncwarp();
  cluster_arrive();
  cluster_wait();
}

// silu(x Wg^T) * (x Wu^T) on SM90: the first product of a gated MLP for many rows, and what stands behind it.
//
// A cluster of two blocks takes 256 rows and 128 outputs, then the next such tile of its share; a block has 128 rows. A
// tile's rows of Wg and of Wu lie one after the other in shared memory, as one matrix of 256 columns, so that a thread
// has both sums of an output. Each block copies one of the two, for both blocks. One thread copies; two warpgroups of 64
// rows multiply. Stages of the next tile are filled while outputs of this one leave by way of a buffer of their own.
//
// Macros: STAGES, of inputs; STAGGER, stages that the first warpgroup is ahead of the second, so that one multiplies
// while the other computes outputs, 0 for together; ROUND_SILU, 0 or 1: whether silu is rounded before it is a factor.
#include "bits.cuh"
#include "cluster.cuh"
#include "wgmma_ss.cuh"

constexpr int BLOCKS = 2, GROUPS = 2, WARPS = 4 * GROUPS;
constexpr int ROWS = 64 * GROUPS, OUTPUTS = 128, INPUTS = 64;  // of a block's tile; and of a stage
constexpr int SUMS = OUTPUTS;                                  // of a thread: gates, then as many factors
constexpr int X_BYTES = ROWS * SWIZZLED, HALF_BYTES = OUTPUTS * SWIZZLED, STAGE_BYTES = X_BYTES + 2 * HALF_BYTES;
static_assert(STAGGER < STAGES, "the first stages are filled before both warpgroups have started");
constexpr int WARP_ROWS = 16, BOX_BYTES = WARP_ROWS * SWIZZLED, BOXES = OUTPUTS / 64;  // a warp's outputs

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
      copy_to_both(x + X_BYTES + rank * HALF_BYTES, weight_map, output, k * INPUTS, full);
    }
  }
}

// ---- the warpgroups that multiply -----------------------------------------------------------------------

#define OUT_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define OUT_16(d, i) OUT_4(d, i), OUT_4(d, i + 4), OUT_4(d, i + 8), OUT_4(d, i + 12)
#define OUT_64(d, i) OUT_16(d, i), OUT_16(d, i + 16), OUT_16(d, i + 32), OUT_16(d, i + 48)

// d (+)= A B^T, for A of 64 x 16 and B of 256 x 16.
DEVICE void wgmma(float (&d)[SUMS], u32 a, u32 b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p,%130,0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,"
      "%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,"
      "%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,"
      "%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,"
      "%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127},"
      "%128,%129,p,1,1,0,0;\n}"
      : OUT_64(d, 0), OUT_64(d, 64) : "l"(descriptor(a)), "l"(descriptor(b)), "r"(add));
}

DEVICE void multiply(float (&sums)[SUMS], u32 a, u32 b, bool is_first) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int j = 0; j < INPUTS / 16; j++) wgmma(sums, behind(a, 32 * j), behind(b, 32 * j), j > 0 || !is_first);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
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
  if (lane == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");  // for the tile before
  __syncwarp();
  // Four matrices of 8 x 8 at a time: 8 rows and the next 8 of 8 columns, then of the next 8. A lane has the place of a
  // row of one of them.
  u32 to = buffer + lane % 16 * SWIZZLED + (lane / 16 ^ lane % 8) * 16;
#pragma unroll
  for (int j = 0; j < OUTPUTS / 16; j++) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int gate = 8 * j + 2 * i, up = gate + SUMS / 2;
      words[i] = gated(sums[gate], sums[gate + 1], sums[up], sums[up + 1]);
    }
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0],{%1,%2,%3,%4};"
                 :: "r"((to ^ j % 4 * 32) + j / 4 * BOX_BYTES), "r"(words[0]), "r"(words[1]), "r"(words[2]),
                    "r"(words[3]) : "memory");
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (int j = 0; j < BOXES; j++)
      asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0,{%1,%2}],[%3];"
                   :: "l"(&map), "r"(output + 64 * j), "r"(row), "r"(buffer + j * BOX_BYTES) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
}

DEVICE void consume(
    const TensorMap& out_map, const Sizes& sizes, u32 stages, u32 buffers, Barriers barriers, int rank) {
  int lane = threadIdx.x % 32, group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 - 4;
  u32 a = matrix_at(stages + group * 64 * SWIZZLED), b = matrix_at(stages + X_BYTES);
  u32 empty = in_block(barriers.empty(0), lane % BLOCKS), buffer = buffers + warp * BOXES * BOX_BYTES;
  Place place;
  float sums[SUMS];

  auto multiply_stage = [&](bool is_first) {
    barrier_wait(barriers.full(place.stage), place.parity);
    multiply(sums, behind(a, place.stage * STAGE_BYTES), behind(b, place.stage * STAGE_BYTES), is_first);
  };
  auto release = [&](int stage) {  // in both blocks, as both fill it
    if (lane < BLOCKS) arrive_in_block(empty + 8 * stage);
  };

  int ahead = min(STAGGER, sizes.steps - 1);
  if (ahead > 0 && group == 1) asm volatile("bar.sync 1,256;" ::: "memory");
  for (int i = blockIdx.x / BLOCKS; i < sizes.tiles(); i += gridDim.x / BLOCKS) {
    multiply_stage(true);
#pragma unroll 1
    for (int k = 1; k < sizes.steps; k++) {
      int before = place.stage;
      place.advance();
      multiply_stage(false);
      wgmma_wait<1>();
      release(before);
      if (STAGGER && k == ahead && group == 0) {  // once, in the first tile
        asm volatile("bar.arrive 1,256;" ::: "memory");
        ahead = 0;
      }
    }
    wgmma_wait<0>();
    release(place.stage);
    place.advance();
    keep(sums);
    Tile tile(i, sizes);
    int row = (tile.row * BLOCKS + rank) * ROWS + warp * WARP_ROWS;
    store(sums, out_map, buffer, row, tile.column * OUTPUTS, lane);
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
      // A block's own thread fills a stage, and each warp of both blocks empties it.
      asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;"
                   :: "r"(barriers.first + 8 * i), "r"(i < STAGES ? 1 : BLOCKS * WARPS) : "memory");
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

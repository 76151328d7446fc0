// Products of a few tokens with a packed matrix in the layout of humming-kernels: y = x W^T, at the speed of memory.
//
// Compiled at run time, with these macros:
//   CODES, SCALES, GROUP and GLOBAL, see packed.cuh
//   WARPS        warps of a block
//   SPLITS       blocks of a cluster, which share the inputs of 128 outputs: 1, 2, 4 or 8
// Kernel: few(...), a grid of outputs / 128 * SPLITS blocks of 32 * WARPS threads, dynamic shared memory
// as cuda.py says. Outputs and inputs are multiples of 128. From SM90 on.
//
// A warp streams its chunks through shared memory of its own. The first copies start before the kernel in front has
// ended, as nobody writes weights. Sums of a group are scaled in float32. Warps, then blocks of a cluster, add up their
// sums in order, so that a result does not depend on timing.
//
// Names: g = lane / 4 and c = lane % 4, the coordinates of mma fragments.

#include "bits.cuh"
#include "packed.cuh"

constexpr int CHUNK = BITS == 4 ? 64 : 32, STEPS = CHUNK / 16;   // inputs that are loaded at a time, and their products
constexpr int GROUPS = GROUP < CHUNK ? CHUNK / GROUP : 1;        // of which a chunk has values
constexpr int COLUMNS = 8;                                       // tokens, at most
constexpr int HALVES = 2, ROWS = 64 * HALVES;                    // outputs of a warp, which share values of x
static_assert(ROWS % SPLITS == 0, "blocks of a cluster write as many outputs each");
static_assert(GROUP >= 16 && (CHUNK % GROUP == 0 || GROUP % CHUNK == 0), "groups and chunks begin together");

// Of shared memory, for each warp: stages of a chunk's codes and scales, later its sums.
constexpr int STAGES = 2;
constexpr int STEP_BYTES = HALVES * HALF_BYTES, CODE_BYTES = STEPS * STEP_BYTES;
constexpr int GROUP_BYTES = HALVES * HALF_SCALES;
constexpr int STAGE_BYTES = CODE_BYTES + GROUPS * GROUP_BYTES;
constexpr int SUM_FLOATS = ROWS + 1;  // of a token and warp, so that banks differ
static_assert((WARPS + 1) * COLUMNS * SUM_FLOATS * 4 <= WARPS * STAGES * STAGE_BYTES, "sums lie where stages were");

DEVICE void copy_16(u8* to, const u8* from) {
  asm volatile("cp.async.cg.shared.global [%0],[%1],16;" :: "r"(shared_address(to)), "l"(from) : "memory");
}

DEVICE u32 scaled_input(u32 x) {
  asm("fma.rn.bf16x2 %0,%1,%2,%3;" : "=r"(x) : "r"(x), "r"(0x5D805D80), "r"(0x80008000));  // 2^60 x - 0
  return x;
}

// What a warp reads of the matrix: its outputs.
struct Source {
  const u8 *codes, *scales;
  u64 step_stride, group_stride;  // bytes
  int lane;

  // Start the copies of a chunk.
  DEVICE void copy(u8* stage, int chunk) const {
    const u8* from = codes + (u64)(chunk * STEPS) * step_stride + lane * 16;
#pragma unroll
    for (int i = 0; i < CODE_BYTES / 512; i++) {
      constexpr int OF_STEP = STEP_BYTES / 512;
      copy_16(stage + i * 512 + lane * 16, from + i / OF_STEP * step_stride + i % OF_STEP * 512);
    }
    constexpr int PIECES = GROUP_BYTES / 16;
#pragma unroll
    for (int i = lane; i < GROUPS * PIECES; i += 32) {
      const u64 group = chunk * CHUNK / GROUP + i / PIECES;
      copy_16(stage + CODE_BYTES + i * 16, scales + group * group_stride + i % PIECES * 16);
    }
  }
};

DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

DEVICE float load_of_block(const float* here, int block) {
  u32 there;
  float x;
  asm volatile("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(there) : "r"(shared_address(here)), "r"(block));
  asm volatile("ld.shared::cluster.f32 %0,[%1];" : "=f"(x) : "r"(there) : "memory");
  return x;
}

extern "C" __global__ void __cluster_dims__(SPLITS, 1, 1) __launch_bounds__(32 * WARPS, 4)
    few(const u8* codes, const u8* scales, const void* global_scale, const u16* x, u16* out, int tokens, int outputs,
        int inputs, int x_stride) {
  extern __shared__ __align__(128) u8 smem[];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  const int tile = blockIdx.x / SPLITS, rank = blockIdx.x % SPLITS, tiles = outputs / ROWS;
  const int chunks = inputs / CHUNK, part = rank * WARPS + warp;
  const int begin = chunks * part / (SPLITS * WARPS), end = chunks * (part + 1) / (SPLITS * WARPS);
  const Source source{codes + tile * STEP_BYTES, scales + tile * GROUP_BYTES, (u64)tiles * STEP_BYTES,
                      (u64)tiles * GROUP_BYTES, lane};
  u8* const stages = smem + warp * (STAGES * STAGE_BYTES);
#pragma unroll
  for (int i = 0; i < STAGES - 1; i++) {
    if (begin + i < end) source.copy(stages + i * STAGE_BYTES, begin + i);
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  wait_for_inputs();

  float acc[HALVES][4][4] = {};
  u32 now[STEPS][2], next[STEPS][2];  // values of x
  const u16* const x_lane = x + (u64)min(g, tokens - 1) * x_stride + 2 * c;
  auto load_x = [&](int chunk) {
#pragma unroll
    for (int i = 0; i < 2 * STEPS; i++) next[i / 2][i % 2] = *(const u32*)(x_lane + chunk * CHUNK + i * 8);
  };
  if (begin < end) load_x(begin);
#pragma unroll 1
  for (int chunk = begin, place = 0; chunk < end; chunk++, place = place + 1 == STAGES ? 0 : place + 1) {
    asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 2) : "memory");
    __syncwarp();  // the copies of all lanes are here, and what lies where the next go has been read
    if (chunk + STAGES - 1 < end) {
      source.copy(stages + (place == 0 ? STAGES - 1 : place - 1) * STAGE_BYTES, chunk + STAGES - 1);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
#pragma unroll
    for (int i = 0; i < 2 * STEPS; i++) now[i / 2][i % 2] = scaled_input(next[i / 2][i % 2]);
    if (chunk + 1 < end) load_x(chunk + 1);
    const u8* const stage = stages + place * STAGE_BYTES;
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
      const u8* const own = stage + half * HALF_BYTES + lane * (VECTORS * 16);
      float sum[4][4] = {};  // of a group
#pragma unroll
      for (int s = 0; s < STEPS; s++) {
        uint4 w[VECTORS];
#pragma unroll
        for (int v = 0; v < VECTORS; v++) w[v] = *(const uint4*)(own + s * STEP_BYTES + v * 16);
#pragma unroll
        for (int m = 0; m < 4; m++) {
          u32 pair[4];
          decode_codes_of(pair, w, m);
          mma_bf16(sum[m], pair[0], pair[2], pair[1], pair[3], now[s][0], now[s][1]);
        }
        if ((s + 1) * 16 % GROUP && s < STEPS - 1) continue;
        const u8* const of_group = stage + CODE_BYTES + s * 16 / GROUP * GROUP_BYTES + half * HALF_SCALES;
        u32 scale[SCALE_WORDS];
#pragma unroll
        for (int i = 0; i < SCALE_WORDS; i++) scale[i] = ((const u32*)of_group)[g * SCALE_WORDS + i];
#pragma unroll
        for (int m = 0; m < 4; m++) {
          const float low = decode_scale(scale, 2 * m), high = decode_scale(scale, 2 * m + 1);
#pragma unroll
          for (int e = 0; e < 4; e++) acc[half][m][e] += (e < 2 ? low : high) * sum[m][e], sum[m][e] = 0;
        }
      }
    }
  }

  // --- add up
  __syncthreads();  // the stages have been read
  float* const sums = (float*)smem;
  float* const total = sums + WARPS * COLUMNS * SUM_FLOATS;
#pragma unroll
  for (int m = 0; m < 4 * HALVES; m++) {
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int token = 2 * c + e % 2, row = 16 * m + g + 8 * (e / 2);
      sums[(warp * COLUMNS + token) * SUM_FLOATS + row] = acc[m / 4][m % 4][e];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < COLUMNS * ROWS; i += 32 * WARPS) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += sums[(w * COLUMNS + i / ROWS) * SUM_FLOATS + i % ROWS];
    total[i] = sum;
  }
  if (SPLITS > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  constexpr int OWN = ROWS / SPLITS;
  for (int i = threadIdx.x; i < tokens * OWN; i += 32 * WARPS) {
    const int token = i / OWN, row = rank * OWN + i % OWN, output = tile * ROWS + row;
    float sum = 0;
    if (SPLITS > 1) {
#pragma unroll
      for (int block = 0; block < SPLITS; block++) sum += load_of_block(total + token * ROWS + row, block);
    } else {
      sum = total[token * ROWS + row];
    }
    sum *= UNDO;
    sum *= read_global_scale(global_scale, output);
    out[(u64)token * outputs + output] = u16(pack_bf16(sum, 0));
  }
  if (SPLITS > 1) cluster_sync();  // nobody reads a block's memory any more
}

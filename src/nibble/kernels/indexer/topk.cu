// The best of a row of scores: exactly the largest, of equal ones those that come first, in the order of positions.
//
// Compiled at run time, with these macros:
//   CLUSTER                 blocks that share a row: 1, or up to 8 from SM90 on
//   THREADS                 of a block: 1024 or 512
//   Kernel: best(...), a grid of rows * CLUSTER blocks of THREADS threads.
//
// A score becomes a number of 32 bits in the same order. The least number that is chosen is found 11, 11 and 10 bits at
// a time: a histogram of the digit among numbers that begin as it does, and where from above it reaches what is needed.
// Then what is above it is written, and of its equals the first, each to the place that a prefix sum gives it. Blocks of
// a cluster have neighbouring parts of a row, and read each other's histograms.
//
// A thread keeps its scores in registers: 4 that lie together of every 128 of its warp's. A part that is too long for
// that goes through them once a digit, out of the L2 cache.

#include "bits.cuh"

constexpr int WARPS = THREADS / 32, EACH = 16, BATCH = THREADS * EACH, BINS = 2048;
constexpr int NOBODY = -1;

// In the order of scores. NaN is the largest, as torch sorts it; zeros are equal; nothing is 0.
DEV u32 ordered(float x) {
  const u32 bits = __float_as_uint(x + 0.f);
  return x != x ? 0xFFFFFFFFu : bits ^ (u32(int(bits) >> 31) | 0x80000000u);
}

DEV u32 cluster_rank() {
#if CLUSTER > 1
  u32 r; asm volatile("mov.u32 %0,%%cluster_ctarank;" : "=r"(r)); return r;
#else
  return 0;
#endif
}
DEV void meet() {  // all threads of the row
#if CLUSTER > 1
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}
DEV uint2 read_pair(const u32* mine, u32 rank) {  // from the same place in another block
#if CLUSTER > 1
  u32 at; uint2 r;
  asm volatile("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(at) : "r"(shared_address(mine)), "r"(rank));
  asm volatile("ld.shared::cluster.v2.u32 {%0,%1},[%2];" : "=r"(r.x), "=r"(r.y) : "r"(at) : "memory");
  return r;
#else
  return *(const uint2*)mine;
#endif
}

DEV u64 below(u64 x, int lane) {  // the sum of lower lanes
  const u64 own = x;
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const u64 other = __shfl_up_sync(~0u, x, by);
    if (lane >= by) x += other;
  }
  return x - own;
}

struct Room {
  u32 counts[3][BINS];
  u64 sums[WARPS];
  u32 totals[2];             // above and equal, of this block
  u32 bin, need, above;      // what a digit's search has found
};

// Scores of a batch, as numbers: 4 at positions first + 128 * i + 4 * lane of the warp's.
DEV void load(u32* x, const float* scores, int first, int stop) {
#pragma unroll
  for (int i = 0; i < EACH / 4; i++) {
    const int at = first + 128 * i;
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
    if (at < stop) v = *(const float4*)(scores + at);  // rows are whole float4s
    x[4 * i] = at < stop ? ordered(v.x) : 0;
    x[4 * i + 1] = at + 1 < stop ? ordered(v.y) : 0;
    x[4 * i + 2] = at + 2 < stop ? ordered(v.z) : 0;
    x[4 * i + 3] = at + 3 < stop ? ordered(v.w) : 0;
  }
}

// The digit whose bin, from the largest, reaches `need`; what is above it in the row, and in this block alone.
DEV void search(Room& room, const u32* counts, u32 need, int thread) {
  constexpr int OWN = BINS / THREADS;
  const int bin = BINS - OWN - OWN * thread, lane = thread % 32, warp = thread / 32;
  const u32 rank = cluster_rank();
  u64 c[OWN], sum = 0;  // of the row in the upper half, of this block in the lower
#pragma unroll
  for (int j = 0; j < OWN; j++) c[j] = 0;
#pragma unroll
  for (int i = 0; i < CLUSTER; i++) {
#pragma unroll
    for (int j = 0; j < OWN; j += 2) {
      const uint2 found = read_pair(counts + bin + j, i);
      c[j] += (u64(found.x) << 32) + (i == rank ? found.x : 0);
      c[j + 1] += (u64(found.y) << 32) + (i == rank ? found.y : 0);
    }
  }
#pragma unroll
  for (int j = 0; j < OWN; j++) sum += c[j];
  u64 before = below(sum, lane);
  if (lane == 31) room.sums[warp] = before + sum;
  __syncthreads();
  const u64 others = below(lane < WARPS ? room.sums[lane] : 0, lane);
  before += __shfl_sync(~0u, others, warp);
#pragma unroll
  for (int j = OWN - 1; j >= 0; j--) {
    const u64 after = before + c[j];
    if (u32(before >> 32) < need && u32(after >> 32) >= need) {
      room.bin = bin + j;
      room.need = need - u32(before >> 32);
      room.above = u32(before);
    }
    before = after;
  }
  __syncthreads();
}

// Places of a batch's chosen: what comes before the warp's, above in the upper half and equal in the lower.
DEV u64 places(Room& room, const u32* x, u32 least, u64& passed, int lane, int warp) {
  u32 above = 0, equal = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) { above += x[i] > least; equal += x[i] == least; }
  u64 own = (u64(above) << 32) + equal;
#pragma unroll
  for (int by = 16; by; by /= 2) own += __shfl_xor_sync(~0u, own, by);
  __syncthreads();
  if (lane == 0) room.sums[warp] = own;
  __syncthreads();
  const u64 sum = lane < WARPS ? room.sums[lane] : 0, before = below(sum, lane), mine = passed + __shfl_sync(~0u, before, warp);
  passed += __shfl_sync(~0u, before + sum, 31);
  return mine;
}

DEV void write(int* chosen, const u32* x, u32 least, u32 need, u64 before, int first, int lane) {
#pragma unroll
  for (int i = 0; i < EACH / 4; i++) {
    u64 own = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) own += (u64(x[4 * i + j] > least) << 32) + (x[4 * i + j] == least);
    if (!__any_sync(~0u, own != 0)) continue;
    u64 at = before + below(own, lane);
    const u64 next = at + own;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const u32 above = u32(at >> 32), equal = u32(at);
      const bool is_above = x[4 * i + j] > least, is_equal = x[4 * i + j] == least;
      if (is_above || (is_equal && equal < need)) chosen[above + min(equal, need)] = first + 128 * i + j;
      at += (u64(is_above) << 32) + is_equal;
    }
    before = __shfl_sync(~0u, next, 31);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
best(const float* __restrict__ scores, int* __restrict__ chosen, const int* __restrict__ q_starts,
     const int* __restrict__ kv_lens, int requests, int first_row, int stride, int top_k) {
  __shared__ Room room;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, rank = cluster_rank();
  const int row = first_row + blockIdx.x / CLUSTER;
  scores += size_t(blockIdx.x / CLUSTER) * stride;
  chosen += size_t(row) * top_k;

  int request = 0;  // the first that ends after the row
  for (int i = 0; i < requests; i += THREADS) {
    const bool past = i + thread < requests && q_starts[i + thread + 1] <= row;
    request += __syncthreads_count(past);
  }
  const int length = request < requests ? kv_lens[request] : 0;
  const int seen = length > 0 ? max(length - q_starts[request + 1] + row + 1, 0) : 0;
  if (seen <= top_k) {  // for all blocks of the row
    for (int i = rank * THREADS + thread; i < top_k; i += THREADS * CLUSTER) chosen[i] = i < seen ? i : NOBODY;
    return;
  }

  const int part = (seen + 128 * CLUSTER - 1) / (128 * CLUSTER) * 128;
  const int start = rank * part, stop = min(start + part, seen), batches = (part + BATCH - 1) / BATCH;
  const int mine = start + warp * 32 * EACH + 4 * lane;
  for (int i = thread; i < 3 * BINS; i += THREADS) room.counts[0][i] = 0;
  u32 x[EACH];
  load(x, scores, mine, stop);
  __syncthreads();
  u32 least = 0, need = top_k, above = 0;
#pragma unroll
  for (int digit = 0; digit < 3; digit++) {
    const int shift = digit == 0 ? 21 : digit == 1 ? 10 : 0, bits = digit == 2 ? 10 : 11;
    u32* counts = room.counts[digit];
    for (int batch = 0; batch < batches; batch++) {
      if (batches > 1 && (digit || batch)) load(x, scores, mine + batch * BATCH, stop);
#pragma unroll
      for (int i = 0; i < EACH; i++) {
        const bool alike = digit == 0 ? x[i] != 0 : (x[i] ^ least) >> (shift + bits) == 0;
        if (alike) atomicAdd(&counts[(x[i] >> shift) & ((1 << bits) - 1)], 1u);
      }
    }
    meet();
    search(room, counts, need, thread);
    least |= room.bin << shift;
    need = room.need;
    above += room.above;
  }

  u64 passed = 0;
#if CLUSTER > 1
  if (thread == 0) { room.totals[0] = above; room.totals[1] = room.counts[2][least & 1023]; }
  meet();
  for (int i = 0; i < rank; i++) {
    const uint2 t = read_pair(room.totals, i);
    passed += (u64(t.x) << 32) + t.y;
  }
#endif
  for (int batch = 0; batch < batches; batch++) {
    if (batches > 1) load(x, scores, mine + batch * BATCH, stop);
    const u64 before = places(room, x, least, passed, lane, warp);
    write(chosen, x, least, need, before, mine + batch * BATCH, lane);
  }
#if CLUSTER > 1
  meet();  // others may still read what this block has counted
#endif
}

// The top k of a row of scores: exactly the largest, of equal ones those that come first, in the order of
// positions.
//
// Compiled at run time, with these macros:
//   CLUSTER_SIZE            blocks that share a row: 1, or up to 8 from SM90 on
//   THREADS                 of a block: 1024 or 512
// Kernel: topk(...), a grid of rows * CLUSTER_SIZE blocks of THREADS threads.
//
// This is a radix select. A score becomes a number of 32 bits in the same order. The least number that is
// selected, the threshold, is found 11, 11 and 10 bits at a time: a histogram of the digit among numbers that
// begin as it does, and where from above it reaches what is needed. Then what is above the threshold is
// written, and of its equals the first, each to the place that a prefix sum gives it. Blocks of a cluster
// have neighbouring parts of a row, and read each other's histograms.
//
// A thread keeps its scores in registers: 4 that lie together of every 128 of its warp's. A part that is too
// long for that goes through them once a digit, out of the L2 cache.

#include "bits.cuh"

constexpr int WARPS = THREADS / 32;
constexpr int SCORES_PER_THREAD = 16;
constexpr int CHUNK = THREADS * SCORES_PER_THREAD;  // scores that a block has in registers at once
constexpr int BINS = 2048;
constexpr int PADDING = -1;  // what follows the positions of a row with fewer than k

// A number in the order of scores. NaN is the largest, as torch sorts it; zeros are equal; no score is 0.
DEVICE u32 ordered_bits(float x) {
  const u32 bits = __float_as_uint(x + 0.f);
  return x != x ? 0xFFFFFFFFu : bits ^ (u32(int(bits) >> 31) | 0x80000000u);
}

// ---- clusters -----------------------------------------------------------------------------------------
DEVICE u32 cluster_rank() {
#if CLUSTER_SIZE > 1
  u32 r;
  asm volatile("mov.u32 %0,%%cluster_ctarank;" : "=r"(r));
  return r;
#else
  return 0;
#endif
}

// Wait for all threads of the row.
DEVICE void sync_cluster() {
#if CLUSTER_SIZE > 1
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// Load from the same place in the shared memory of another block.
DEVICE uint2 load_pair_of(const u32* own, u32 rank) {
#if CLUSTER_SIZE > 1
  u32 address;
  uint2 r;
  asm volatile("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(address) : "r"(shared_address(own)), "r"(rank));
  asm volatile("ld.shared::cluster.v2.u32 {%0,%1},[%2];" : "=r"(r.x), "=r"(r.y) : "r"(address) : "memory");
  return r;
#else
  return *(const uint2*)own;
#endif
}

// The sum over the lower lanes of the warp.
DEVICE u64 exclusive_sum(u64 x, int lane) {
  const u64 own = x;
#pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const u64 other = __shfl_up_sync(ALL_LANES, x, by);
    if (lane >= by) x += other;
  }
  return x - own;
}

// ---- select -------------------------------------------------------------------------------------------
struct Shared {
  u32 counts[3][BINS];
  u64 warp_sums[WARPS];
  u32 totals[2];         // above the threshold and equal to it, of this block
  u32 bin, need, above;  // the result of a digit's search
};

// Load the scores of a chunk as numbers: 4 at positions first + 128 * i + 4 * lane of the warp's.
DEVICE void load_scores(u32* x, const float* scores, int first, int stop) {
#pragma unroll
  for (int i = 0; i < SCORES_PER_THREAD / 4; i++) {
    const int position = first + 128 * i;
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
    if (position < stop) v = *(const float4*)(scores + position);  // rows are whole float4s
    x[4 * i] = position < stop ? ordered_bits(v.x) : 0;
    x[4 * i + 1] = position + 1 < stop ? ordered_bits(v.y) : 0;
    x[4 * i + 2] = position + 2 < stop ? ordered_bits(v.z) : 0;
    x[4 * i + 3] = position + 3 < stop ? ordered_bits(v.w) : 0;
  }
}

// Search the digit whose bin, counted from the largest, reaches `need`, and count what is above it in this
// block.
DEVICE void search_digit(Shared& shared, const u32* counts, u32 need, int thread) {
  constexpr int OWN_BINS = BINS / THREADS;
  const int bin = BINS - OWN_BINS - OWN_BINS * thread, lane = thread % 32, warp = thread / 32;
  const u32 rank = cluster_rank();
  u64 c[OWN_BINS], sum = 0;  // of the row in the upper half, of this block in the lower
#pragma unroll
  for (int j = 0; j < OWN_BINS; j++) c[j] = 0;
#pragma unroll
  for (int i = 0; i < CLUSTER_SIZE; i++) {
#pragma unroll
    for (int j = 0; j < OWN_BINS; j += 2) {
      const uint2 pair = load_pair_of(counts + bin + j, i);
      c[j] += (u64(pair.x) << 32) + (i == rank ? pair.x : 0);
      c[j + 1] += (u64(pair.y) << 32) + (i == rank ? pair.y : 0);
    }
  }
#pragma unroll
  for (int j = 0; j < OWN_BINS; j++) sum += c[j];
  u64 before = exclusive_sum(sum, lane);
  if (lane == 31) shared.warp_sums[warp] = before + sum;
  __syncthreads();
  const u64 of_warps = exclusive_sum(lane < WARPS ? shared.warp_sums[lane] : 0, lane);
  before += __shfl_sync(ALL_LANES, of_warps, warp);
#pragma unroll
  for (int j = OWN_BINS - 1; j >= 0; j--) {
    const u64 after = before + c[j];
    if (u32(before >> 32) < need && u32(after >> 32) >= need) {
      shared.bin = bin + j;
      shared.need = need - u32(before >> 32);
      shared.above = u32(before);
    }
    before = after;
  }
  __syncthreads();
}

// ---- store --------------------------------------------------------------------------------------------
// Count what precedes the warp's scores of a chunk: above the threshold in the upper half, and equal in the
// lower. `total` is of the chunks so far.
DEVICE u64 count_before_warp(Shared& shared, const u32* x, u32 threshold, u64& total, int lane, int warp) {
  u32 above = 0, equal = 0;
#pragma unroll
  for (int i = 0; i < SCORES_PER_THREAD; i++) {
    above += x[i] > threshold;
    equal += x[i] == threshold;
  }
  u64 own = (u64(above) << 32) + equal;
#pragma unroll
  for (int by = 16; by; by /= 2) own += __shfl_xor_sync(ALL_LANES, own, by);
  __syncthreads();
  if (lane == 0) shared.warp_sums[warp] = own;
  __syncthreads();
  const u64 sum = lane < WARPS ? shared.warp_sums[lane] : 0, before = exclusive_sum(sum, lane);
  const u64 before_warp = total + __shfl_sync(ALL_LANES, before, warp);
  total += __shfl_sync(ALL_LANES, before + sum, 31);
  return before_warp;
}

DEVICE void store_indices(int* topk_indices, const u32* x, u32 threshold, u32 need, u64 before, int first,
                          int lane) {
#pragma unroll
  for (int i = 0; i < SCORES_PER_THREAD / 4; i++) {
    u64 own = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) own += (u64(x[4 * i + j] > threshold) << 32) + (x[4 * i + j] == threshold);
    if (!__any_sync(ALL_LANES, own != 0)) continue;
    u64 at = before + exclusive_sum(own, lane);
    const u64 next = at + own;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const u32 above = u32(at >> 32), equal = u32(at);
      const bool is_above = x[4 * i + j] > threshold, is_equal = x[4 * i + j] == threshold;
      if (is_above || (is_equal && equal < need))
        topk_indices[above + min(equal, need)] = first + 128 * i + j;
      at += (u64(is_above) << 32) + is_equal;
    }
    before = __shfl_sync(ALL_LANES, next, 31);
  }
}

// --- kernel
extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
#if CLUSTER_SIZE > 1
__cluster_dims__(CLUSTER_SIZE, 1, 1)
#endif
topk(const float* __restrict__ scores, int* __restrict__ topk_indices, const int* __restrict__ cu_seqlens_q,
     const int* __restrict__ seq_lens, int batch_size, int first_row, int score_stride, int top_k) {
  __shared__ Shared shared;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, rank = cluster_rank();
  const int row = first_row + blockIdx.x / CLUSTER_SIZE;
  scores += size_t(blockIdx.x / CLUSTER_SIZE) * score_stride;
  topk_indices += size_t(row) * top_k;

  int request = 0;  // the first that ends after the row
  for (int i = 0; i < batch_size; i += THREADS) {
    const bool ends_before = i + thread < batch_size && cu_seqlens_q[i + thread + 1] <= row;
    request += __syncthreads_count(ends_before);
  }
  const int seq_len = request < batch_size ? seq_lens[request] : 0;
  const int seen = seq_len > 0 ? max(seq_len - cu_seqlens_q[request + 1] + row + 1, 0) : 0;
  if (seen <= top_k) {  // for all blocks of the row
    for (int i = rank * THREADS + thread; i < top_k; i += THREADS * CLUSTER_SIZE) {
      topk_indices[i] = i < seen ? i : PADDING;
    }
    return;
  }

  // --- load
  const int part = (seen + 128 * CLUSTER_SIZE - 1) / (128 * CLUSTER_SIZE) * 128;
  const int start = rank * part, stop = min(start + part, seen), chunks = (part + CHUNK - 1) / CHUNK;
  const int first = start + warp * 32 * SCORES_PER_THREAD + 4 * lane;
  for (int i = thread; i < 3 * BINS; i += THREADS) shared.counts[0][i] = 0;
  u32 x[SCORES_PER_THREAD];
  load_scores(x, scores, first, stop);
  __syncthreads();

  // --- select
  u32 threshold = 0, need = top_k, above = 0;
#pragma unroll
  for (int digit = 0; digit < 3; digit++) {
    const int shift = digit == 0 ? 21 : digit == 1 ? 10 : 0, bits = digit == 2 ? 10 : 11;
    u32* counts = shared.counts[digit];
    for (int chunk = 0; chunk < chunks; chunk++) {
      // One chunk stays in its registers.
      if (chunks > 1 && (digit || chunk)) load_scores(x, scores, first + chunk * CHUNK, stop);
#pragma unroll
      for (int i = 0; i < SCORES_PER_THREAD; i++) {
        const bool matches = digit == 0 ? x[i] != 0 : (x[i] ^ threshold) >> (shift + bits) == 0;
        if (matches) atomicAdd(&counts[(x[i] >> shift) & ((1 << bits) - 1)], 1u);
      }
    }
    sync_cluster();
    search_digit(shared, counts, need, thread);
    threshold |= shared.bin << shift;
    need = shared.need;
    above += shared.above;
  }

  // --- store
  u64 total = 0;  // above the threshold and equal to it, in the blocks and chunks before
#if CLUSTER_SIZE > 1
  if (thread == 0) {
    shared.totals[0] = above;
    shared.totals[1] = shared.counts[2][threshold & 1023];
  }
  sync_cluster();
  for (int i = 0; i < rank; i++) {
    const uint2 t = load_pair_of(shared.totals, i);
    total += (u64(t.x) << 32) + t.y;
  }
#endif
  for (int chunk = 0; chunk < chunks; chunk++) {
    if (chunks > 1) load_scores(x, scores, first + chunk * CHUNK, stop);
    const u64 before = count_before_warp(shared, x, threshold, total, lane, warp);
    store_indices(topk_indices, x, threshold, need, before, first + chunk * CHUNK, lane);
  }
#if CLUSTER_SIZE > 1
  sync_cluster();  // other blocks may still read the totals of this one
#endif
}

// The router's logits of a single token, for kernels that choose by themselves, and start while they are written.
//
// Compiled at run time, with this macro:
//   VECTORS  of 8 inputs that a thread multiplies
// Kernel: logits_of_token(...), a block of 160 threads for each row of the matrix. From SM90 on.
//
// The row lies in registers before the kernel in front ends. The last warp clears the logit, before the next kernel
// starts (early.cuh), while the others multiply.

#include "bits.cuh"
#include "early.cuh"

constexpr int WARPS = 4, THREADS = 32 * WARPS;

DEVICE float low(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float high(u32 pair) { return __uint_as_float(pair & 0xFFFF0000); }

extern "C" __global__ void __launch_bounds__(THREADS + 32)
    logits_of_token(const u16* x, const u16* weight, const u16* bias, u16* logits, int inputs) {
  __shared__ float sums[WARPS];
  const int row = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  uint4 own[VECTORS];
#pragma unroll
  for (int v = 0; v < VECTORS; v++) {
    const int at = (v * THREADS + threadIdx.x) * 8;
    own[v] = make_uint4(0, 0, 0, 0);
    if (warp < WARPS && at < inputs) own[v] = *(const uint4*)(weight + (u64)row * inputs + at);
  }
  const float own_bias = bias ? low(bias[row]) : 0;
  wait_for_kernel();
  if (warp == WARPS) {
    if (lane == 0) store_early(logits + row, EMPTY), publish(), start_next();
  } else {
    uint4 values[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
      const int at = (v * THREADS + threadIdx.x) * 8;
      values[v] = make_uint4(0, 0, 0, 0);
      if (at < inputs) values[v] = *(const uint4*)(x + at);
    }
    float sum = 0;
#pragma unroll
    for (int v = 0; v < VECTORS; v++) {
#pragma unroll
      for (int w = 0; w < 4; w++) {
        const u32 a = word_of(own[v], w), b = word_of(values[v], w);
        sum += low(a) * low(b), sum += high(a) * high(b);
      }
    }
#pragma unroll
    for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, d);
    if (lane == 0) sums[warp] = sum;
  }
  __syncthreads();
  if (threadIdx.x) return;
  float sum = own_bias;
#pragma unroll
  for (int w = 0; w < WARPS; w++) sum += sums[w];
  store_early(logits + row, pack_bf16(sum, 0) & 0xFFFF);
}

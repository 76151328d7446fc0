// A sum over the GPUs of a host in one launch, without a barrier (push.py).
//
// Each GPU writes what it has into memory of the others: packets of 16 bytes, of which 8 are values and 8 the number
// of the sum, twice. 8 bytes arrive at one time, so whoever sees the number has the values beside it, and no flag has
// to follow. A block's sums have numbers of its own, and take the two halves of the memory in turn: a GPU writes to a
// half again only after it had the others' values of the sum in between, and they send these after they have read that half.
#include "bits.cuh"

constexpr int THREADS = 256;  // of a block, each with a packet

DEVICE uint4 received(const uint4* packet) {
  uint4 r;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(packet) : "memory");
  return r;
}

DEVICE void send(uint4* packet, uint2 values, u32 number) {
  asm volatile("st.volatile.global.v4.u32 [%0],{%1,%2,%3,%2};"
               :: "l"(packet), "r"(values.x), "r"(number), "r"(values.y) : "memory");
}

constexpr u32 LOOK = 1 << 14;  // looks for a packet after which the host is asked whether to go on

DEVICE bool is_stopped(const int* stop) {
  int r;
  asm volatile("ld.volatile.global.s32 %0,[%1];" : "=r"(r) : "l"(stop) : "memory");
  return r;
}

// Zeros where the host has stopped it.
DEVICE uint2 awaited(const uint4* packet, u32 number, const int* stop) {
  for (u32 looks = 1;; looks++) {
    uint4 r = received(packet);
    if (r.y == number && r.w == number) return make_uint2(r.x, r.z);
    if (looks % LOOK == 0 && is_stopped(stop)) return make_uint2(0, 0);
  }
}

// Adds a pair of bfloat16.
DEVICE void add(float* sums, u32 pair) {
  sums[0] += __uint_as_float(pair << 16), sums[1] += __uint_as_float(pair & 0xffff0000u);
}

// y = the sum of x over all ranks, in their order, in float32.
// memory: of each rank, where it receives [2, RANKS, MOST] packets. numbers: of each block, its last sum's. stop: of the host.
extern "C" __global__ void __launch_bounds__(THREADS)
push_sum(const uint2* x, uint2* y, const u64* memory, u32* numbers, const int* stop, int packets, int rank) {
  const int at = blockIdx.x * THREADS + threadIdx.x;
  const bool live = at < packets;
  uint4* to[RANKS];
#pragma unroll
  for (int r = 0; r < RANKS; r++) to[r] = reinterpret_cast<uint4*>(memory[r]);
  const uint4* const from = reinterpret_cast<const uint4*>(memory[rank]);
  wait_for_inputs();
  const u32 number = numbers[blockIdx.x] + 1;
  if (live) {
    const uint2 own = x[at];
    const int half = (number & 1) * RANKS * MOST + at;
#pragma unroll
    for (int r = 0; r < RANKS; r++)
      if (r != rank) send(to[r] + half + rank * MOST, own, number);
    float sums[4] = {};
#pragma unroll
    for (int r = 0; r < RANKS; r++) {
      const uint2 part = r == rank ? own : awaited(from + half + r * MOST, number, stop);
      add(sums, part.x), add(sums + 2, part.y);
    }
    y[at] = make_uint2(pack_bf16(sums[0], sums[1]), pack_bf16(sums[2], sums[3]));
  }
  __syncthreads();
  if (threadIdx.x == 0) numbers[blockIdx.x] = number;
}

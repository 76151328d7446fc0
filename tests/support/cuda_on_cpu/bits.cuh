// In the place of kernels/codecs/bits.cuh where a kernel runs on a CPU: a C++ compiler translates it, and each thread
// of a block is a coroutine.
//
// A thread runs until it must wait for others: at an operation of its warp, at a barrier. So threads are as far apart
// as they may be, and who runs next is drawn at random: what needs a wait that is not there, finds old values. Shared
// memory is filled with NaN before each block.

#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE inline
#define __global__
#define __align__(n) alignas(n)
#define __launch_bounds__(...)
#define __CUDA_ARCH__ 900
#define USES_BULK_COPIES 0  // but 16 bytes at a time, as before SM90
#define __host__
#define __device__

using std::max;
using std::min;

constexpr u32 ALL_LANES = ~0u;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LOWEST = -1e30f;

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

// ---- threads ------------------------------------------------------------------------------------------
struct Index { int x; };
static Index threadIdx, blockIdx, gridDim;
// What a launch asks for, and behind it what kernels declare, each declaration in a place of its own.
static constexpr u64 DYNAMIC = 1 << 18, DECLARED = 1 << 15, STACK = 1 << 17;
static constexpr int ROUNDS = 1 << 20;  // of all threads: more than any test needs
alignas(128) static u8 shared_memory[DYNAMIC + 4 * DECLARED];

struct Copy { u8* to; const u8* from; int bytes; };

struct Thread {
  ucontext_t context;
  std::vector<Copy> copies;
  bool is_done = false;
};

struct Warp {
  int arrived = 0;
  u64 turn = 0;
  const char* name = nullptr;
  u32 in[32][16], out[32][16];
};

static std::vector<Thread> threads;
static std::vector<std::unique_ptr<u8[]>> stacks;
static std::vector<Warp> warps;
static ucontext_t scheduler;
static int block_arrived;
static u64 block_turn;

[[noreturn]] static inline void fail(const char* why) {
  fprintf(stderr, "block %d, thread %d: %s\n", blockIdx.x, threadIdx.x, why);
  abort();
}

static inline void let_others_run() {
  const int me = threadIdx.x;
  swapcontext(&threads[me].context, &scheduler);
  threadIdx.x = me;
}

// How many turns something takes that is not of this thread's making: mostly few.
static std::mt19937 turns;
static inline int turns_to_wait() { return turns() % 8 ? turns() % 4 : turns() % 400; }

// An operation of all lanes of a warp: the last to arrive computes it for all.
template <class Compute>
static inline void together(const char* name, const u32* in, int words, u32* out, int results, Compute compute) {
  const int lane = threadIdx.x % 32;
  Warp& warp = warps[threadIdx.x / 32];
  if (warp.arrived && warp.name != name) fail("lanes of a warp are at different operations");
  warp.name = name;
  memcpy(warp.in[lane], in, 4 * words);
  const u64 turn = warp.turn;
  if (++warp.arrived == 32) {
    compute(warp.in, warp.out);
    warp.arrived = 0;
    warp.turn++;
  }
  while (warp.turn == turn) let_others_run();
  memcpy(out, warp.out[lane], 4 * results);
}

static inline void __syncwarp() {
  together("syncwarp", nullptr, 0, nullptr, 0, [](auto&, auto&) {});
}

static inline bool __all_sync(u32, bool x) {
  u32 in = x, out;
  together("all", &in, 1, &out, 1, [](auto& values, auto& results) {
    u32 all = 1;
    for (auto& value : values) all &= value[0];
    for (auto& result : results) result[0] = all;
  });
  return out;
}

static inline void __syncthreads() {
  const u64 turn = block_turn;
  if (++block_arrived == (int)threads.size()) {
    block_arrived = 0;
    block_turn++;
  }
  while (block_turn == turn) let_others_run();
}

static inline u32 word_of_float(float x) { u32 r; memcpy(&r, &x, 4); return r; }
static inline float float_of_word(u32 x) { float r; memcpy(&r, &x, 4); return r; }
static inline float __uint_as_float(u32 x) { return float_of_word(x); }
static inline u32 __float_as_uint(float x) { return word_of_float(x); }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }

template <class Source>
static inline float shuffle(const char* name, float x, u32 argument, Source source) {
  u32 in[2] = {word_of_float(x), argument}, out;
  together(name, in, 2, &out, 1, [&](auto& values, auto& results) {
    for (int lane = 0; lane < 32; lane++) results[lane][0] = values[source(lane, values[lane][1])][0];
  });
  return float_of_word(out);
}

static inline float __shfl_sync(u32, float x, int from, int width = 32) {
  return shuffle("shfl", x, from, [&](int lane, u32 n) { return lane / width * width + n % width; });
}

static inline float __shfl_xor_sync(u32, float x, int mask) {
  return shuffle("shfl.xor", x, mask, [](int lane, u32 n) { return lane ^ n; });
}

static inline float __shfl_up_sync(u32, float x, int steps, int width = 32) {
  return shuffle("shfl.up", x, steps, [&](int lane, u32 n) { return lane % width >= (int)n ? lane - n : lane; });
}

static inline int __shfl_sync(u32, int x, int from) {
  return (int)word_of_float(__shfl_sync(ALL_LANES, float_of_word((u32)x), from));
}

static inline int __shfl_up_sync(u32, int x, int steps) {
  return (int)word_of_float(__shfl_up_sync(ALL_LANES, float_of_word((u32)x), steps));
}

static inline bool __any_sync(u32, bool x) { return !__all_sync(ALL_LANES, !x); }

// Of blocks one runs after the other.
static inline void __threadfence() {}
static inline void wait_for_inputs() {}
static inline int atomicAdd(int* p, int x) {
  *p += x;
  return *p - x;
}

// Run a grid of blocks, one after the other.
static void (*kernel_entry)();
static void run_thread() {
  kernel_entry();
  threads[threadIdx.x].is_done = true;
  swapcontext(&threads[threadIdx.x].context, &scheduler);
}

static inline void run_block(int block, int count, std::mt19937& random) {
  memset(shared_memory, 0xFF, sizeof shared_memory);
  threads.assign(count, {});
  warps.assign((count + 31) / 32, {});
  block_arrived = 0;
  std::vector<int> order(count);
  for (int i = 0; i < count; i++) {
    Thread& thread = threads[i];
    order[i] = i;
    if ((int)stacks.size() <= i) stacks.emplace_back(new u8[STACK]);
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = stacks[i].get();
    thread.context.uc_stack.ss_size = STACK;
    makecontext(&thread.context, run_thread, 0);
  }
  int rounds = 0;
  for (int left = count; left; rounds++) {
    const bool shuffles = random() % 4 == 0;
    if (shuffles) std::shuffle(order.begin(), order.end(), random);
    left = 0;
    for (int i : order) {
      if (threads[i].is_done) continue;
      threadIdx.x = i;
      blockIdx.x = block;
      swapcontext(&scheduler, &threads[i].context);
      left += !threads[i].is_done;
    }
    if (rounds == ROUNDS) fail("threads wait for each other");
  }
}

// ---- arithmetic ---------------------------------------------------------------------------------------
static inline float ex2(float x) { return exp2f(x); }
static inline float rcp(float x) { return 1 / x; }
static inline float lg2(float x) { return log2f(x); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float minus_infinity() { return -INFINITY; }

static inline u32 bf16_bits(float x) {
  const u32 bits = word_of_float(x);
  if (x != x) return 0x7FFF;
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

static inline u32 pack_bf16(float lo, float hi) { return bf16_bits(lo) | bf16_bits(hi) << 16; }
static inline float bf16_value(u32 word, int half) { return float_of_word(half ? word & 0xFFFF0000u : word << 16); }

static inline u32 __byte_perm(u32 a, u32 b, u32 selector) {
  const u64 bytes = (u64)b << 32 | a;
  u32 r = 0;
  for (int i = 0; i < 4; i++) r |= (u32)(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return r;
}

// The float16 of an E4M3 code, and of a pair.
static inline float e4m3_value(u32 code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if ((code & 127) == 127) return NAN;
  const float value = exponent ? ldexpf(8 + mantissa, exponent - 10) : ldexpf(mantissa, -9);
  return code & 128 ? -value : value;
}

static inline u32 f16_bits(float x) {
  _Float16 h = (_Float16)x;
  u16 r;
  memcpy(&r, &h, 2);
  return r;
}

static inline float f16_value(u32 bits) {
  const u16 low = bits;
  _Float16 h;
  memcpy(&h, &low, 2);
  return (float)h;
}

static inline u32 pack_f16(float lo, float hi) { return f16_bits(lo) | f16_bits(hi) << 16; }
static inline float clamp_f16(float x) { return x > 65504 ? 65504 : x < -65504 ? -65504 : x; }
static inline u32 clamp_f16x2(u32 x) { return pack_f16(clamp_f16(f16_value(x)), clamp_f16(f16_value(x >> 16))); }

static inline u32 mul_f16x2(u32 a, u32 b) {
  return pack_f16(f16_value(a) * f16_value(b), f16_value(a >> 16) * f16_value(b >> 16));
}
static inline u32 mul_f16x2_by_low(u32 a, u32 b) { return mul_f16x2(a, (b & 0xFFFF) * 0x10001u); }
static inline u32 mul_f16x2_by_high(u32 a, u32 b) { return mul_f16x2(a, (b >> 16) * 0x10001u); }

static inline u32 f16x2_from_e4m3x2(u32 x) {
  return f16_bits(e4m3_value(x & 255)) | f16_bits(e4m3_value(x >> 8 & 255)) << 16;
}

// ---- matrices -----------------------------------------------------------------------------------------
template <class Value>
static inline void mma_of(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, Value value) {
  const u32 in[10] = {a0, a1, a2, a3, b0, b1, word_of_float(c[0]), word_of_float(c[1]), word_of_float(c[2]),
                      word_of_float(c[3])};
  together("mma", in, 10, (u32*)c, 4, [value](auto& x, auto& y) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; lane++) {
      for (int i = 0; i < 8; i++) {
        const int g = lane / 4, column = lane % 4 * 2 + i % 2;
        a[g + 8 * (i / 2 % 2)][column + 8 * (i / 4)] = value(x[lane][i / 2], i % 2);
        if (i < 4) b[column + 8 * (i / 2)][g] = value(x[lane][4 + i / 2], i % 2);
      }
    }
    for (int lane = 0; lane < 32; lane++) {
      for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + 8 * (i / 2), column = lane % 4 * 2 + i % 2;
        float sum = float_of_word(x[lane][6 + i]);
        for (int k = 0; k < 16; k++) sum += a[row][k] * b[k][column];
        y[lane][i] = word_of_float(sum);
      }
    }
  });
}

static inline void mma_bf16(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  mma_of(c, a0, a1, a2, a3, b0, b1, bf16_value);
}

static inline void mma_f16(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  mma_of(c, a0, a1, a2, a3, b0, b1, [](u32 word, int half) { return f16_value(word >> 16 * half); });
}

// Of row g in lane (g, c) columns 2 c and 2 c + 1.
template <class Words>
static inline u32 half_of(const Words& words, int row, int column) {
  return words[4 * row + column / 2][0] >> 16 * (column % 2) & 0xFFFF;
}

static inline u32 transpose_8x8(u32 a) {
  u32 out;
  together("transpose", &a, 1, &out, 1, [](auto& x, auto& y) {
    for (int lane = 0; lane < 32; lane++) {
      const int g = lane / 4, c = lane % 4;
      y[lane][0] = half_of(x, 2 * c, g) | half_of(x, 2 * c + 1, g) << 16;
    }
  });
  return out;
}

static inline u32 shared_address(const void* p) {
  const u64 offset = (const u8*)p - shared_memory;
  if (offset >= sizeof shared_memory) fail("an address outside of shared memory");
  return (u32)offset;
}

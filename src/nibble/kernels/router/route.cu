// Which experts tokens choose, from their router's weights on, in one launch.
//
// Compiled at run time, with these macros:
//   TILES    of 16 experts that a block multiplies
//   CLUSTER  blocks of a cluster, which multiply all experts
//   UNITS    of 32 inputs that a warp multiplies
// Kernels: route(...), clusters of CLUSTER blocks of 512 threads, one for each 8 tokens; choose_of_logits(...), blocks of 256
// threads, one for each 8 tokens, whose logits are there. From SM90 on.
//
// Weights lie in registers before the kernel in front ends: warps of a block share experts and inputs. They leave their
// sums to the cluster's first block, where a warp chooses for a token. A product does not depend on the order of its
// inputs, if it is the same on both sides: a lane takes 16 bytes of a row after another, as its operands of two products.
//
// Names: g = lane / 4 and c = lane % 4, the coordinates of mma fragments.

#include "bits.cuh"
#include "choose.cuh"
#include "cluster.cuh"

constexpr int WARPS = 16, TOKENS = 8, SPLIT = WARPS / TILES;
constexpr int EXPERTS = 16 * TILES * CLUSTER, VALUES = (EXPERTS + 31) / 32;  // room for so many, and a lane's

DEVICE float from_bf16(u16 x) { return __uint_as_float((u32)x << 16); }

template <typename Logits>
DEVICE void write_choices(Logits logit_of, u16* scores, long long* chosen, int token, int experts, int top_k,
                          int is_normalized, int has_shared) {
  const Choice choice = choose_all<VALUES>(logit_of, experts, top_k, is_normalized, has_shared);
  const int lane = threadIdx.x & 31, all = top_k + has_shared;
  if (lane >= all) return;
  scores[(u64)token * all + lane] = u16(pack_bf16(choice.weight, 0));
  chosen[(u64)token * all + lane] = choice.expert;
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(32 * WARPS, 1)
    route(const u16* x, const u16* weight, const u16* bias, u16* logits, u16* scores, long long* chosen, int tokens,
          int experts, int inputs, int x_stride, int top_k, int is_normalized, int has_shared) {
  __shared__ float sums[SPLIT][16 * TILES][TOKENS];
  __shared__ u32 of_tokens[TOKENS][EXPERTS];  // logits, in the cluster's first block
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c = lane & 3;
  const int rank = blockIdx.x % CLUSTER, first_token = blockIdx.x / CLUSTER * TOKENS;
  const int rows = experts + has_shared, row = 16 * (rank * TILES + warp % TILES) + g, part = warp / TILES;
  const int units = (inputs + 31) / 32, begin = units * part / SPLIT, end = units * (part + 1) / SPLIT;
  cluster_arrive();

  // --- weights
  uint4 low[UNITS], high[UNITS], own[UNITS];
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    const int at = (begin + u) * 32 + 8 * c;
    const bool is_there = begin + u < end && at < inputs;
    low[u] = high[u] = make_uint4(0, 0, 0, 0);
    if (is_there && row < rows) low[u] = *(const uint4*)(weight + (u64)row * inputs + at);
    if (is_there && row + 8 < rows) high[u] = *(const uint4*)(weight + (u64)(row + 8) * inputs + at);
  }
  wait_for_inputs();

  // --- multiply
  const bool is_live = first_token + g < tokens;
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    const int at = (begin + u) * 32 + 8 * c;
    own[u] = make_uint4(0, 0, 0, 0);
    if (is_live && begin + u < end && at < inputs) own[u] = *(const uint4*)(x + (u64)(first_token + g) * x_stride + at);
  }
  float acc[4] = {};
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    mma_bf16(acc, low[u].x, high[u].x, low[u].y, high[u].y, own[u].x, own[u].y);
    mma_bf16(acc, low[u].z, high[u].z, low[u].w, high[u].w, own[u].z, own[u].w);
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    *(float2*)&sums[part][16 * (warp % TILES) + g + 8 * i][2 * c] = make_float2(acc[2 * i], acc[2 * i + 1]);
  }
  __syncthreads();
  cluster_wait();  // all blocks have begun
  for (int i = threadIdx.x; i < 16 * TILES * TOKENS; i += 32 * WARPS) {
    const int token = i % TOKENS, e = 16 * TILES * rank + i / TOKENS;
    if (e >= rows) continue;
    float sum = bias ? from_bf16(bias[e]) : 0;
#pragma unroll
    for (int p = 0; p < SPLIT; p++) sum += sums[p][i / TOKENS][token];
    const u32 logit = pack_bf16(sum, 0) & 0xFFFF;
    store_in_block(&of_tokens[token][e], logit, 0);
    if (first_token + token < tokens) logits[(u64)(first_token + token) * rows + e] = u16(logit);
  }
  cluster_arrive(), cluster_wait();

  // --- choose
  const int token = first_token + warp;
  if (rank == 0 && warp < TOKENS && token < tokens) {
    write_choices([&](int e) { return of_tokens[warp][e]; }, scores, chosen, token, experts, top_k, is_normalized,
                  has_shared);
  }
}

extern "C" __global__ void __launch_bounds__(32 * TOKENS)
    choose_of_logits(const u16* logits, u16* scores, long long* chosen, int tokens, int experts, int top_k, int is_normalized,
                     int has_shared) {
  wait_for_inputs();
  const u64 token = (u64)blockIdx.x * TOKENS + threadIdx.x / 32;
  if (token >= tokens) return;
  write_choices([&](int e) { return (u32)logits[token * (experts + has_shared) + e]; }, scores, chosen, token, experts,
                top_k, is_normalized, has_shared);
}

// What a prompt's scan needs of each block of 16 tokens, with a decay for each column: records (scan_records.cuh), and
// keys and queries with their decays.
//
// Compiled at run time, with these macros:
//   K      columns of a head's matrix, a multiple of 16 up to 128
//   DELTA  whether updates are by the delta rule
//   SPLIT  whether inverses are kept in two parts
//   BETA   learning rates: 0 none, 1 float32, 2 bfloat16
// Kernel: scan_columns(...), a block of THREADS threads for each block of tokens and head.
//
// tiles [record, head, 3, 16, K]: k_i e^G_i, q_i e^G_i and k_i e^(G_15 - G_i). Two tokens weigh by differences of their
// sums, never by e^-G, which may be too large for a float.

#define COLUMN 1
#include "scan_records.cuh"

constexpr int THREADS = 128, ROW = K + 4;  // floats of a row: rows that are read together lie in different banks
constexpr int PAIRS = BLOCK * (BLOCK + 1) / 2, WEIGHT_PITCH = BLOCK + 1;
static_assert(K <= THREADS, "a thread has a column");

DEVICE u16 bf16_of(float x) { return (u16)pack_bf16(x, 0); }

DEVICE float f32_of(u16 x) { return low_bf16(x); }

DEVICE float rate_of(const void* beta, u64 i) {
  if (BETA == 1) return ((const float*)beta)[i];
  if (BETA == 2) return f32_of(((const u16*)beta)[i]);
  return 1;
}

// --- kernel
extern "C" __global__ void __launch_bounds__(THREADS) scan_columns(
    const u16* q, const u16* k, const float* decay, const void* beta, const u16* stored_keys,
    const float* stored_decays, u8* records, u16* tiles, const int* slots, const int* starts,
    const int* cu_seqlens, u64 q_stride_token, u64 q_stride_head, u64 k_stride_token, u64 k_stride_head,
    u64 keys_stride_slot, u64 decays_stride_slot, int num_requests, int num_blocks, int heads, int key_heads,
    int places) {
  // Sums are logarithms to base 2.
  __shared__ __align__(16) float keys[BLOCK * ROW], queries[BLOCK * ROW], sums[BLOCK * ROW];
  __shared__ __align__(16) float at[BLOCK * PITCH], weights[BLOCK * WEIGHT_PITCH], inverse[BLOCK * WEIGHT_PITCH];
  __shared__ float rates[BLOCK];
  const int head = blockIdx.x % heads, block = blockIdx.x / heads, key_head = head / (heads / key_heads);
  const Requests requests{slots, starts, cu_seqlens, num_requests};
  const int request = request_of(requests, block);
  const Span span(requests, request);
  const int index = block - requests.first_block(request);
  if (span.slot < 0 || index >= span.blocks) return;
  const int begin = span.begin + index * BLOCK;
  const auto is_new = [&](int position) { return position >= span.start && position < span.stop; };
  const auto row_of = [&](int position) { return u64(span.row + position - span.start); };
  u8* const record = records + ((u64)block * heads + head) * RECORD;

  // --- load rows, a column a thread, and sum up its decays
  const int column = threadIdx.x;
  if (column < K) {
    u16* const tile = tiles + ((u64)block * heads + head) * 3 * BLOCK * K + column;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
      const int position = begin + i;
      float key = 0, query = 0;
      if (position < span.start) {
        const u64 place = position % places;
        key = f32_of(stored_keys[span.slot * keys_stride_slot + (place * key_heads + key_head) * K + column]);
        sum = stored_decays[span.slot * decays_stride_slot + (place * heads + head) * K + column];
      } else if (is_new(position)) {
        const u64 row = row_of(position);
        key = f32_of(k[row * k_stride_token + key_head * k_stride_head + column]);
        query = f32_of(q[row * q_stride_token + key_head * q_stride_head + column]);
        sum += decay[(row * heads + head) * K + column];
      }
      keys[i * ROW + column] = key;
      queries[i * ROW + column] = query;
      sums[i * ROW + column] = sum * LOG2E;
      tile[i * K] = bf16_of(key * exp_of(sum));
      tile[(BLOCK + i) * K] = bf16_of(query * exp_of(sum));
    }
    ((float*)(record + END))[column] = exp_of(sum);
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
      tile[(2 * BLOCK + i) * K] = bf16_of(keys[i * ROW + column] * ex2(sum * LOG2E - sums[i * ROW + column]));
    }
  }
  if (threadIdx.x < BLOCK) {
    const int i = threadIdx.x, position = begin + i;
    float rate = position < span.start ? 1.f : 0.f;
    if (is_new(position)) rate = rate_of(beta, row_of(position) * heads + head);
    rates[i] = rate;
    ((float*)(record + FADE))[i] = position < span.start ? 0.f : 1.f;
    ((float*)(record + LEFT))[i] = 1;
    ((float*)(record + RATE))[i] = rate;
  }
  for (int i = threadIdx.x; i < BLOCK * BLOCK; i += THREADS) weights[i / BLOCK * WEIGHT_PITCH + i % BLOCK] = 0;
  __syncthreads();

  // --- products of two tokens, a pair a thread
  for (int pair = threadIdx.x; pair < PAIRS; pair += THREADS) {
    int i = 0;
    while ((i + 1) * (i + 2) / 2 <= pair) i++;
    const int j = pair - i * (i + 1) / 2;
    float kk = 0, qk = 0;
#pragma unroll 4
    for (int x = 0; x < K; x += 4) {
      const float4 a = *(const float4*)(sums + i * ROW + x), b = *(const float4*)(sums + j * ROW + x);
      const float4 y = *(const float4*)(keys + j * ROW + x), z = *(const float4*)(keys + i * ROW + x);
      const float4 w = *(const float4*)(queries + i * ROW + x);
      const float faded[4] = {y.x * ex2(a.x - b.x), y.y * ex2(a.y - b.y), y.z * ex2(a.z - b.z),
                              y.w * ex2(a.w - b.w)};
      kk += z.x * faded[0] + z.y * faded[1] + z.z * faded[2] + z.w * faded[3];
      qk += w.x * faded[0] + w.y * faded[1] + w.z * faded[2] + w.w * faded[3];
    }
    weights[i * WEIGHT_PITCH + j] = qk;
    at[j * PITCH + i] = j < i && begin + i >= span.start ? kk * rates[i] : 0.f;
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;

  // --- store operands, and solve for a column a lane
  const int lane = threadIdx.x, g = lane >> 2, c = lane & 3;
  const auto load = [&](float(*to)[4], const float* from) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
      for (int r = 0; r < 4; r++) {
        to[n][r] = from[(g + 8 * (r >> 1)) * WEIGHT_PITCH + 8 * n + 2 * c + (r & 1)];
      }
    }
  };
  float m[2][4];
  load(m, weights);
  ((uint4*)(record + WEIGHTS))[lane] = operand(m);
  if (!DELTA) return;
  if (lane < BLOCK) {
    float x[BLOCK];
#pragma unroll
    for (int row = 0; row < BLOCK; row++) x[row] = row == lane ? 1.f : 0.f;
    solve(x, at);
#pragma unroll
    for (int row = 0; row < BLOCK; row++) inverse[row * WEIGHT_PITCH + lane] = x[row] * rates[lane];
  }
  __syncwarp();
  load(m, inverse);
  store_solve(record, m, lane);
}
